//! A node's end of all its connections: what listens, connects, registers memory, and knows the epoch.
//!
//! Locks: `members`, then those of connections. The lock is not held across a wait.

use crate::connection::{Connection, Core, Ticket};
use crate::error::{Ended, Error};
use crate::handshake::{Acceptor, Agreed, Identity, Initiator, check_epoch, judge_knock, knock};
use crate::link::{Door, Driver, Judge, Link, Provider};
use crate::memory::Local;
use crate::news::News;
use crate::settings::Settings;
use format::wire::{FrameKind, RefusalReason, WireChallenge, WireHello, WireProof, WireRefusal, check_body};
use format::{Epoch, NodeId};
use ipc::{Host, Lock, Time, Waited};
use pmem::Region;
use std::sync::{Arc, Weak};
use zerocopy::IntoBytes;

/// A node's end of its connections. Clones are the same endpoint.
#[derive(Clone)]
pub struct Endpoint(Arc<Shared>);

struct Shared {
    host: Arc<dyn Host>,
    provider: Arc<dyn Provider>,
    identity: Identity,
    settings: Settings,
    /// Tells memory of this endpoint from that of others.
    id: u64,
    members: Lock<Members>,
}

struct Members {
    epoch: Epoch,
    /// Who may connect and be connected to; everybody who has the key, if none.
    allowed: Option<Vec<NodeId>>,
    connections: Vec<Weak<Core>>,
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

    /// A new epoch has begun, with these members. Every connection of another epoch is closed: when this returns none
    /// of them can write here any more. Who stays connects anew.
    pub fn advance(&self, epoch: Epoch, allowed: Option<Vec<NodeId>>) {
        let connections = {
            let mut members = self.0.members.lock();
            members.epoch = epoch;
            members.allowed = allowed;
            std::mem::take(&mut members.connections)
        };
        let mut kept = Vec::new();
        for core in connections.iter().filter_map(Weak::upgrade) {
            let stays = core.peer().is_some_and(|peer| self.0.check(&peer).is_ok());
            if stays {
                kept.push(Arc::downgrade(&core));
            } else {
                Connection::new(core).close();
            }
        }
        self.0.members.lock().connections.append(&mut kept);
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
        let identity = self.0.identity.clone();
        let judge: Judge = Arc::new(move |said| {
            judge_knock(&identity, said)
                .map_err(|reason| WireRefusal::new(reason, Epoch::new(0)).as_bytes().to_vec())
        });
        let door = self.0.provider.listen(at, judge, news.clone())?;
        let halves = Lock::new(self.0.host.clone(), Vec::new());
        Ok(Listener { endpoint: self.clone(), door, news, halves })
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
        let knock = knock(&shared.identity, &*shared.host);
        let link = shared.provider.connect(to, knock.as_bytes(), News::heard_by(None))?;
        let core = shared.core(link);
        let established = shared.initiate(&core, epoch, node, until);
        if let Err(error) = established {
            core.end(Ended::ClosedHere);
            return Err(error);
        }
        Ok(Connection::new(core))
    }
}

impl Members {
    fn live(&self) -> usize {
        self.connections.iter().filter_map(Weak::upgrade).filter(|core| core.ended().is_none()).count()
    }
}

impl Shared {
    fn core(&self, link: Arc<dyn Link>) -> Arc<Core> {
        Core::new(self.host.clone(), link, self.id, &self.settings)
    }

    /// May there be a connection to this peer now?
    fn check(&self, peer: &Agreed) -> Result<(), RefusalReason> {
        self.members.lock().check(peer)
    }

    /// Adds a connection to those that an advance closes. Judged under the same lock: none slips by an advance.
    fn add(&self, core: &Arc<Core>, peer: Agreed) -> Result<(), RefusalReason> {
        let mut members = self.members.lock();
        members.check(&peer)?;
        members.connections.retain(|core| core.upgrade().is_some_and(|core| core.ended().is_none()));
        if members.connections.len() >= self.settings.connections_max {
            return Err(RefusalReason::Full);
        }
        members.connections.push(Arc::downgrade(core));
        Ok(())
    }

    /// The initiator's half of the handshake.
    fn initiate(&self, core: &Arc<Core>, epoch: Epoch, node: NodeId, until: Time) -> Result<(), Error> {
        let until = until.min(self.host.now().after(self.settings.handshake));
        wait_up(core, until)?;
        let first = Initiator::new(&self.identity, epoch, node, self.settings.own_window(), &*self.host);
        core.post_handshake(FrameKind::Hello, first.hello().as_bytes())?;
        let challenge = match next_frame(core, until)? {
            (FrameKind::Challenge, body) => check_body::<WireChallenge>(&body)?,
            (_, body) => return Err(refused_there(&body)),
        };
        let own = |reason| Error::Refused { reason, there: false, epoch: challenge.epoch };
        let (proof, agreed) = match first.answer(&self.identity, &challenge) {
            Ok(answer) => answer,
            Err(reason) => {
                refuse(core, reason, Epoch::new(0), until);
                return Err(own(reason));
            }
        };
        core.expect_welcome(agreed);
        core.post_handshake(FrameKind::Proof, proof.as_bytes())?;
        wait_welcome(core, until)?;
        self.add(core, agreed).map_err(own)
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

fn next_frame(core: &Core, until: Time) -> Result<(FrameKind, Vec<u8>), Error> {
    core.wait_for(Some(until), |core| {
        core.handshake_frame().map(Ok).or_else(|| core.ended().map(|why| Err(Error::Ended(why))))
    })
}

fn wait_welcome(core: &Core, until: Time) -> Result<(), Error> {
    core.wait_for(Some(until), |core| {
        if core.peer().is_some() {
            return Some(Ok(()));
        }
        if let Some((_, body)) = core.handshake_frame() {
            return Some(Err(refused_there(&body)));
        }
        core.ended().map(|why| Err(Error::Ended(why)))
    })
}

fn refused_there(said: &[u8]) -> Error {
    match WireRefusal::decode(said) {
        Ok((refusal, reason)) => Error::Refused { reason, there: true, epoch: refusal.epoch },
        Err(error) => Error::Message(error),
    }
}

/// Says why not; that the other side does not hear it is no error.
fn refuse(core: &Core, reason: RefusalReason, epoch: Epoch, until: Time) {
    let refusal = WireRefusal::new(reason, epoch);
    if let Ok(ticket) = core.post_handshake(FrameKind::Refusal, refusal.as_bytes()) {
        let _ = core
            .wait_for(Some(until), |core| (core.is_done(ticket) || core.ended().is_some()).then_some(Ok(())));
    }
}

/// Where peers come in. Handshakes go on while somebody is in [`Listener::accept`]; one thread at a time.
pub struct Listener {
    endpoint: Endpoint,
    door: Box<dyn Door>,
    news: Arc<News>,
    halves: Lock<Vec<Half>>,
}

/// A connection whose handshake is not done.
struct Half {
    core: Arc<Core>,
    acceptor: Option<Acceptor>,
    /// It is refused, and leaves when this was sent.
    leaving: Option<Ticket>,
    until: Time,
}

/// What one look at a half-open connection came to.
enum Step {
    Stays,
    Gone,
    Welcome,
}

impl Listener {
    /// Where it listens, for others to connect to.
    pub fn address(&self) -> String {
        self.door.address()
    }

    /// Connections whose handshake is not done.
    pub fn half_open(&self) -> usize {
        self.halves.lock().len()
    }

    /// The next peer whose handshake is done, waited for.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`, `Provider`.
    pub fn accept(&self, until: Option<Time>) -> Result<Connection, Error> {
        let host = &*self.endpoint.0.host;
        loop {
            let seen = self.news.seen();
            self.let_in()?;
            let mut halves = std::mem::take(&mut *self.halves.lock());
            let mut welcome = None;
            halves.retain_mut(|half| {
                if welcome.is_some() {
                    return true;
                }
                match self.step(half) {
                    Step::Stays => true,
                    Step::Gone => {
                        half.core.end(Ended::ClosedHere);
                        false
                    }
                    Step::Welcome => {
                        welcome = Some(half.core.clone());
                        false
                    }
                }
            });
            let armed = halves.iter().all(|half| half.core.arm());
            let due = halves.iter().map(|half| half.until).min();
            let due = halves.iter().filter_map(|half| half.core.next_due()).chain(due).min();
            self.halves.lock().append(&mut halves);
            if let Some(core) = welcome {
                return Ok(Connection::new(core));
            }
            let now = host.now();
            if until.is_some_and(|until| now >= until) {
                return Err(Error::TimedOut);
            }
            if !armed {
                continue;
            }
            match self.news.sleep(host, seen, until.into_iter().chain(due).min()) {
                Waited::Woken | Waited::TimedOut => {}
                Waited::Interrupted => return Err(Error::Interrupted),
            }
        }
    }

    /// Takes who knocks; where there is no room, the oldest that is not done makes some.
    fn let_in(&self) -> Result<(), Error> {
        let shared = &self.endpoint.0;
        while let Some(link) = self.door.next()? {
            let until = shared.host.now().after(shared.settings.handshake);
            let half = Half { core: shared.core(link), acceptor: None, leaving: None, until };
            let oldest = {
                let mut halves = self.halves.lock();
                halves.push(half);
                (halves.len() > shared.settings.half_open_max).then(|| halves.remove(0))
            };
            if let Some(oldest) = oldest {
                oldest.core.end(Ended::ClosedHere);
            }
        }
        Ok(())
    }

    fn step(&self, half: &mut Half) -> Step {
        half.core.drive();
        let now = self.endpoint.0.host.now();
        let is_over = half.core.ended().is_some() || now >= half.until;
        if let Some(ticket) = half.leaving {
            return if is_over || half.core.is_done(ticket) { Step::Gone } else { Step::Stays };
        }
        if is_over {
            return Step::Gone;
        }
        let Some((kind, body)) = half.core.handshake_frame() else { return Step::Stays };
        match self.judge(half, kind, &body) {
            Ok(true) => Step::Welcome,
            Ok(false) => Step::Stays,
            Err((reason, epoch)) => {
                let refusal = WireRefusal::new(reason, epoch);
                match half.core.post_handshake(FrameKind::Refusal, refusal.as_bytes()) {
                    Ok(ticket) => {
                        half.leaving = Some(ticket);
                        Step::Stays
                    }
                    Err(_) => Step::Gone,
                }
            }
        }
    }

    /// Answers one frame of the initiator; true if it is in. The epoch is told to who has proved the key only.
    fn judge(&self, half: &mut Half, kind: FrameKind, body: &[u8]) -> Result<bool, (RefusalReason, Epoch)> {
        let shared = &self.endpoint.0;
        let malformed = (RefusalReason::Malformed, Epoch::new(0));
        match (kind, &half.acceptor) {
            (FrameKind::Hello, None) => {
                let hello = check_body::<WireHello>(body).map_err(|_| malformed)?;
                let own = shared.settings.own_window();
                let epoch = self.endpoint.epoch();
                let acceptor = Acceptor::new(&shared.identity, epoch, &hello, own, &*shared.host)
                    .map_err(|reason| (reason, Epoch::new(0)))?;
                let challenge = acceptor.challenge().as_bytes();
                half.core.post_handshake(FrameKind::Challenge, challenge).map_err(|_| malformed)?;
                half.acceptor = Some(acceptor);
                Ok(false)
            }
            (FrameKind::Proof, Some(acceptor)) => {
                let proof = check_body::<WireProof>(body).map_err(|_| malformed)?;
                let told = |reason: RefusalReason| {
                    let proved = reason != RefusalReason::Key;
                    (reason, if proved { self.endpoint.epoch() } else { Epoch::new(0) })
                };
                let agreed = acceptor.judge(&shared.identity, &proof).map_err(told)?;
                shared.add(&half.core, agreed).map_err(told)?;
                half.core.establish(agreed);
                half.core.post_handshake(FrameKind::Welcome, &[]).map_err(|_| malformed)?;
                Ok(true)
            }
            _ => Err(malformed),
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({:?})", self.0.identity.node)
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listener({})", self.address())
    }
}
