//! A node's end of all its connections: what listens, connects, registers memory, and knows the epoch.
//!
//! Locks: `members`, then those of connections. The lock is not held across a wait.

use crate::connection::{Connection, Core};
use crate::error::{Ended, Error};
use crate::handshake::{Agreed, Identity, Initiator, check_epoch, knock};
use crate::link::{Heard, Link, Provider, Talk};
use crate::listener::Listener;
use crate::memory::Local;
use crate::news::News;
use crate::settings::Settings;
use format::wire::{DoorKind, RefusalReason, WireChallenge, WireRefusal, WireWelcome, check_body};
use format::{DecodeError, Epoch, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Lock, Time, Waited, Word};
use pmem::Region;
use std::sync::{Arc, Weak};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A node's end of its connections. Clones are the same endpoint.
#[derive(Clone)]
pub struct Endpoint(Arc<Shared>);

pub(crate) struct Shared {
    pub host: Arc<dyn Host>,
    provider: Arc<dyn Provider>,
    pub identity: Identity,
    pub settings: Settings,
    /// Tells memory of this endpoint from that of others.
    id: u64,
    members: Lock<Members>,
}

struct Members {
    epoch: Epoch,
    /// Who may connect and be connected to; everybody who has the key, if none.
    allowed: Option<Vec<NodeId>>,
    connections: Vec<Known>,
}

/// A connection of this endpoint.
struct Known {
    core: Weak<Core>,
    /// See [`Core::fenced`].
    fenced: Arc<Word>,
}

impl Known {
    fn is_fenced(&self) -> bool {
        // Acquire: pairs with the Release when the fence stands.
        self.fenced.load(Ordering::Acquire) == 1
    }
}

impl Endpoint {
    /// An endpoint over a provider.
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
        let members = Members { epoch, allowed: None, connections: Vec::new() };
        let id = host.random();
        let members = Lock::new(host.clone(), members);
        Ok(Self(Arc::new(Shared { host, provider, identity, settings, id, members })))
    }

    /// The epoch of this node.
    pub fn epoch(&self) -> Epoch {
        self.0.members.lock().epoch
    }

    /// Connections that are not over.
    pub fn connections(&self) -> usize {
        self.0.members.lock().live()
    }

    /// A new epoch has begun, with these members. Every connection of another epoch is closed: when this returns, on
    /// whichever thread, none of them can write here any more. Who stays connects anew. If a later epoch has begun, it
    /// stays.
    pub fn advance(&self, epoch: Epoch, allowed: Option<Vec<NodeId>>) {
        // They stay in the list until the fence stands, for another advance to see.
        let (leaving, dropped) = {
            let mut members = self.0.members.lock();
            if epoch >= members.epoch {
                members.epoch = epoch;
                members.allowed = allowed;
            }
            members.leaving()
        };
        leaving.into_iter().for_each(|core| Connection::new(core).close());
        for fenced in dropped {
            // Acquire: pairs with the Release when the fence stands. Whoever drops it is at it.
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
        let news = News::heard_by(None);
        let door = self.0.provider.listen(at, news.clone())?;
        Ok(Listener::new(self.0.clone(), door, news))
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

    /// Connections that may not be any more, and the fences of those that are being dropped.
    fn leaving(&self) -> (Vec<Arc<Core>>, Vec<Arc<Word>>) {
        let (mut leaving, mut dropped) = (Vec::new(), Vec::new());
        for known in self.connections.iter().filter(|known| !known.is_fenced()) {
            match known.core.upgrade() {
                Some(core) if self.check(&core.peer()).is_err() => leaving.push(core),
                Some(_) => {}
                None => dropped.push(known.fenced.clone()),
            }
        }
        (leaving, dropped)
    }
}

impl Shared {
    /// A connection over a link that is about to come up.
    pub fn core(&self, link: Arc<dyn Link>, peer: Agreed) -> Arc<Core> {
        Core::new(self.host.clone(), link, self.id, peer, &self.settings)
    }

    pub fn epoch(&self) -> Epoch {
        self.members.lock().epoch
    }

    /// May there be a connection to this peer now?
    pub fn check(&self, peer: &Agreed) -> Result<(), RefusalReason> {
        self.members.lock().check(peer)
    }

    /// Adds a connection to those that an advance closes. Judged under the same lock: none slips by an advance.
    pub fn add(&self, core: &Arc<Core>) -> Result<(), RefusalReason> {
        let mut members = self.members.lock();
        members.check(&core.peer())?;
        members.connections.retain(|known| !known.is_fenced());
        if members.connections.len() >= self.settings.connections_max {
            return Err(RefusalReason::Full);
        }
        members.connections.push(Known { core: Arc::downgrade(core), fenced: core.fenced().clone() });
        Ok(())
    }

    /// The initiator's half of the handshake, and the connection that follows.
    fn initiate(&self, to: &str, epoch: Epoch, node: NodeId, until: Time) -> Result<Arc<Core>, Error> {
        let until = until.min(self.host.now().after(self.settings.handshake));
        let identity = &self.identity;
        let talk = self.provider.talk(to, News::heard_by(None))?;
        let first = Initiator::new(identity, epoch, node, self.settings.own_window(), &*self.host);
        talk.say(DoorKind::Knock, knock(identity, &*self.host).as_bytes())?;
        talk.say(DoorKind::Hello, first.hello().as_bytes())?;
        let challenge: WireChallenge = self.hear(&*talk, DoorKind::Challenge, until)?;
        let own = |reason| Error::Refused { reason, there: false, epoch: challenge.epoch };
        let refuse = |reason| {
            // That the other side does not hear it is no error.
            let _ = talk.say(DoorKind::Refusal, WireRefusal::new(reason, Epoch::new(0)).as_bytes());
            own(reason)
        };
        let agreed = first.judge(identity, &challenge).map_err(refuse)?;
        // The provider hears of somebody who has proved the key only.
        let approach = self.provider.approach(to)?;
        let proof = first.answer(identity, &challenge, approach.port());
        talk.say(DoorKind::Proof, proof.as_bytes())?;
        let welcome: WireWelcome = self.hear(&*talk, DoorKind::Welcome, until)?;
        let entry = first.enter(identity, &challenge, &proof, &welcome).map_err(refuse)?;
        let link = approach.go(welcome.port.get(), entry.as_bytes(), News::heard_by(None))?;
        let core = self.core(link, agreed);
        let joined = wait_up(&core, until).and_then(|()| self.add(&core).map_err(own));
        if let Err(error) = joined {
            core.end(Ended::ClosedHere);
            return Err(error);
        }
        Ok(core)
    }

    /// Waits for a message of one kind; a refusal is an error.
    fn hear<T>(&self, talk: &dyn Talk, wanted: DoorKind, until: Time) -> Result<T, Error>
    where
        T: FromBytes + KnownLayout + Immutable,
    {
        let news = talk.news();
        loop {
            let seen = news.seen();
            match talk.hear() {
                Heard::Said(kind, body) if kind == wanted => return Ok(check_body(&body)?),
                Heard::Said(DoorKind::Refusal, body) => return Err(refused_there(&body)),
                Heard::Said(..) | Heard::Noise => return Err(Error::Message(DecodeError::Kind)),
                Heard::Gone => return Err(Error::Ended(Ended::Lost)),
                Heard::Nothing => {}
            }
            if self.host.now() >= until {
                return Err(Error::TimedOut);
            }
            talk.arm();
            let wake = talk.next_due().map_or(until, |due| due.min(until));
            if matches!(news.sleep(&*self.host, seen, Some(wake)), Waited::Interrupted) {
                return Err(Error::Interrupted);
            }
        }
    }
}

impl Members {
    fn check(&self, peer: &Agreed) -> Result<(), RefusalReason> {
        check_epoch(peer.epoch, self.epoch)?;
        match &self.allowed {
            Some(allowed) if !allowed.contains(&peer.node) => Err(RefusalReason::NotMember),
            _ => Ok(()),
        }
    }
}

fn wait_up(core: &Core, until: Time) -> Result<(), Error> {
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
