//! The connections of one node: listens, connects, registers memory, and closes connections when the epoch advances.
//!
//! Locks: `members`, then those of connections. No lock is held across a wait.

use crate::connection::{Connection, ConnectionCore};
use crate::error::{Ended, Error};
use crate::handshake::{Agreed, Identity, Initiator, check_epoch, connect_request};
use crate::link::{ControlChannel, ControlInput, Link, Provider};
use crate::listener::Listener;
use crate::memory::Local;
use crate::settings::Settings;
use format::wire::{ControlKind, RefusalReason, WireChallenge, WireRefusal, WireWelcome, check_body};
use format::{DecodeError, Epoch, NodeId};
use ipc::sync::Ordering;
use ipc::{EventCounter, Host, Lock, Time, Waited, Word};
use pmem::Region;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The endpoint of a node. Clones refer to the same endpoint.
#[derive(Clone)]
pub struct Endpoint(Arc<Shared>);

pub(crate) struct Shared {
    pub host: Arc<dyn Host>,
    provider: Arc<dyn Provider>,
    pub identity: Identity,
    pub settings: Settings,
    /// Identifies the endpoint to which registered memory belongs.
    id: u64,
    members: Lock<Members>,
}

struct Members {
    own: NodeId,
    epoch: Epoch,
    /// Nodes with which connections are allowed, each with the epoch in which its life began; `None`: all nodes that have
    /// the key.
    lives: Option<BTreeMap<NodeId, Epoch>>,
    connections: Vec<KnownConnection>,
}

/// A connection of this endpoint.
struct KnownConnection {
    core: Weak<ConnectionCore>,
    /// See [`ConnectionCore::fenced`].
    fenced: Arc<Word>,
}

impl KnownConnection {
    fn is_fenced(&self) -> bool {
        // Acquire: pairs with the Release in `ConnectionCore::mark_fenced`.
        self.fenced.load(Ordering::Acquire) == 1
    }
}

impl Endpoint {
    /// Creates an endpoint over a provider.
    ///
    /// # Errors
    /// `Unavailable`: impossible limits.
    pub(crate) fn new(
        host: Arc<dyn Host>,
        provider: Arc<dyn Provider>,
        identity: Identity,
        epoch: Epoch,
        settings: Settings,
    ) -> Result<Self, Error> {
        settings.check()?;
        let members = Members { own: identity.node, epoch, lives: None, connections: Vec::new() };
        let id = host.random();
        let members = Lock::new(host.clone(), members);
        Ok(Self(Arc::new(Shared { host, provider, identity, settings, id, members })))
    }

    /// The epoch of this node.
    pub fn epoch(&self) -> Epoch {
        self.0.members.lock().epoch
    }

    /// Number of connections that have not ended.
    pub fn connections(&self) -> usize {
        self.0.members.lock().live()
    }

    /// Starts a new epoch with these members, each with the epoch in which it joined. A connection of an earlier epoch
    /// stays if both ends are members and had joined when it was made: it belongs to two lives that go on. The call closes
    /// every other connection, and without a list every connection of another epoch. After the return, whichever thread
    /// closed them, none of these can write into memory of this node. The call does not go back from a later epoch.
    pub fn advance(&self, epoch: Epoch, lives: Option<BTreeMap<NodeId, Epoch>>) {
        // The connections stay in the list until they are fenced, so that a concurrent advance finds them.
        let (leaving, dropped) = {
            let mut members = self.0.members.lock();
            if epoch >= members.epoch {
                members.epoch = epoch;
                members.lives = lives;
            }
            members.leaving()
        };
        leaving.into_iter().for_each(|core| Connection::new(core).close());
        for fenced in dropped {
            // Acquire: pairs with the Release in `ConnectionCore::mark_fenced`, which the dropping thread is about to
            // execute.
            while fenced.load(Ordering::Acquire) == 0 {
                let _ = self.0.host.wait(&fenced, 0, None);
            }
        }
    }

    /// Registers memory for operations of this side.
    ///
    /// # Errors
    /// `Memory`, `Provider`.
    pub fn register(&self, region: &Region) -> Result<Local, Error> {
        Ok(Local::new(self.0.id, region.clone(), self.0.provider.register(region)?))
    }

    /// Listens at an address of the provider; port 0 is any free one.
    ///
    /// # Errors
    /// `Address`, `Unavailable`, `Provider`.
    pub fn listen(&self, at: &str) -> Result<Listener, Error> {
        let counter = EventCounter::new(None);
        let door = self.0.provider.listen(at, counter.clone())?;
        Ok(Listener::new(self.0.clone(), door, counter))
    }

    /// Connects to a node that listens there.
    ///
    /// # Errors
    /// `Address`, `Unavailable`, `Refused`, `TimedOut`, `Interrupted`, `Ended`, `Provider`.
    pub fn connect(&self, to: &str, node: NodeId, until: Time) -> Result<Connection, Error> {
        let shared = &self.0;
        let epoch = {
            let members = shared.members.lock();
            if members.live() >= shared.settings.connections_max {
                return Err(Error::Unavailable("no more connections are allowed"));
            }
            members.epoch
        };
        shared.initiate(to, epoch, node, until).map(Connection::new)
    }
}

impl Members {
    fn live(&self) -> usize {
        self.connections.iter().filter(|known| !known.is_fenced()).count()
    }

    /// Connections that the current epoch and members do not let stay, and the fence words of those that are being
    /// dropped.
    fn leaving(&self) -> (Vec<Arc<ConnectionCore>>, Vec<Arc<Word>>) {
        let (mut leaving, mut dropped) = (Vec::new(), Vec::new());
        for known in self.connections.iter().filter(|known| !known.is_fenced()) {
            match known.core.upgrade() {
                Some(core) if !self.stands(&core.peer()) => leaving.push(core),
                Some(_) => {}
                None => dropped.push(known.fenced.clone()),
            }
        }
        (leaving, dropped)
    }
}

impl Shared {
    /// Creates a connection over a link that is about to come up.
    pub fn core(&self, link: Arc<dyn Link>, peer: Agreed) -> Arc<ConnectionCore> {
        ConnectionCore::new(self.host.clone(), link, self.id, peer, &self.settings)
    }

    pub fn epoch(&self) -> Epoch {
        self.members.lock().epoch
    }

    /// Checks that the current epoch and members allow a new connection to this peer.
    pub fn check(&self, peer: &Agreed) -> Result<(), RefusalReason> {
        self.members.lock().check(peer)
    }

    /// Adds a connection to the list that an advance closes. Checks the peer under the same lock, so that no
    /// connection escapes a concurrent advance.
    pub fn add(&self, core: &Arc<ConnectionCore>) -> Result<(), RefusalReason> {
        let mut members = self.members.lock();
        members.check(&core.peer())?;
        members.connections.retain(|known| !known.is_fenced());
        if members.connections.len() >= self.settings.connections_max {
            return Err(RefusalReason::Full);
        }
        members
            .connections
            .push(KnownConnection { core: Arc::downgrade(core), fenced: core.fenced().clone() });
        Ok(())
    }

    /// Executes the initiator's half of the handshake, and opens the connection.
    fn initiate(
        &self,
        to: &str,
        epoch: Epoch,
        node: NodeId,
        until: Time,
    ) -> Result<Arc<ConnectionCore>, Error> {
        let until = until.min(self.host.now().after(self.settings.handshake));
        let identity = &self.identity;
        let channel = self.provider.open_channel(to, EventCounter::new(None))?;
        let first = Initiator::new(identity, epoch, node, self.settings.own_window(), &*self.host);
        channel.send(ControlKind::Request, connect_request(identity, &*self.host).as_bytes())?;
        channel.send(ControlKind::Hello, first.hello().as_bytes())?;
        let challenge: WireChallenge = self.receive(&*channel, ControlKind::Challenge, until)?;
        let own = |reason| Error::Refused { reason, there: false, epoch: challenge.epoch };
        let refuse = |reason| {
            // A failure to send is ignored: the other side then notices the closed channel.
            let _ = channel.send(ControlKind::Refusal, WireRefusal::new(reason, Epoch::new(0)).as_bytes());
            own(reason)
        };
        let agreed = first.check(identity, &challenge).map_err(refuse)?;
        // The provider is used only after the other side has proved that it has the key.
        let pending = self.provider.prepare_connect(to)?;
        let proof = first.answer(identity, &challenge, pending.port());
        channel.send(ControlKind::Proof, proof.as_bytes())?;
        let welcome: WireWelcome = self.receive(&*channel, ControlKind::Welcome, until)?;
        let token = first.check_welcome(identity, &challenge, &proof, &welcome).map_err(refuse)?;
        let link = pending.connect(welcome.port.get(), token.as_bytes(), EventCounter::new(None))?;
        let core = self.core(link, agreed);
        let joined = wait_up(&core, until).and_then(|()| self.add(&core).map_err(own));
        if let Err(error) = joined {
            core.end(Ended::ClosedHere);
            return Err(error);
        }
        Ok(core)
    }

    /// Waits for a message of one kind. A refusal is an error.
    fn receive<T>(&self, channel: &dyn ControlChannel, wanted: ControlKind, until: Time) -> Result<T, Error>
    where
        T: FromBytes + KnownLayout + Immutable,
    {
        let counter = channel.counter();
        loop {
            let seen = counter.value();
            match channel.receive() {
                ControlInput::Message(kind, body) if kind == wanted => return Ok(check_body(&body)?),
                ControlInput::Message(ControlKind::Refusal, body) => return Err(refused_there(&body)),
                ControlInput::Message(..) | ControlInput::Malformed => {
                    return Err(Error::Message(DecodeError::Kind));
                }
                ControlInput::Closed => return Err(Error::Ended(Ended::Lost)),
                ControlInput::Empty => {}
            }
            if self.host.now() >= until {
                return Err(Error::TimedOut);
            }
            channel.arm();
            let wake = channel.next_due().map_or(until, |due| due.min(until));
            if matches!(counter.wait(&*self.host, seen, Some(wake)), Waited::Interrupted) {
                return Err(Error::Interrupted);
            }
        }
    }
}

impl Members {
    fn check(&self, peer: &Agreed) -> Result<(), RefusalReason> {
        check_epoch(peer.epoch, self.epoch)?;
        match &self.lives {
            Some(lives) if !lives.contains_key(&peer.node) => Err(RefusalReason::NotMember),
            _ => Ok(()),
        }
    }

    /// Checks that a connection that was made may stay.
    fn stands(&self, peer: &Agreed) -> bool {
        match &self.lives {
            Some(lives) if peer.epoch < self.epoch => [self.own, peer.node]
                .iter()
                .all(|node| lives.get(node).is_some_and(|joined| *joined <= peer.epoch)),
            _ => self.check(peer).is_ok(),
        }
    }
}

fn wait_up(core: &ConnectionCore, until: Time) -> Result<(), Error> {
    core.wait_for(Some(until), |core| {
        if let Some(said) = core.refusal() {
            return Some(Err(refused_there(&said)));
        }
        if let Some(why) = core.ended() {
            return Some(Err(Error::Ended(why)));
        }
        core.is_up().then_some(Ok(()))
    })
}

fn refused_there(said: &[u8]) -> Error {
    match WireRefusal::decode(said) {
        Ok((refusal, reason)) => Error::Refused { reason, there: true, epoch: refusal.epoch },
        Err(error) => Error::Message(error),
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({:?})", self.0.identity.node)
    }
}
