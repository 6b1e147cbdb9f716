//! Accepts connections: executes the acceptor's side of the handshake on control channels, of which most may be
//! opened by programs that have no key.
//!
//! A pending peer costs one socket and a few hundred bytes until its time is over or its slot is needed. The number
//! of slots is small; a new peer replaces the one that has made the least progress in its handshake. A peer that has
//! proved the key is never replaced. Resources of the provider are allocated only after the proof.
//!
//! Locks: `pending` is taken out as a whole while it is processed, and is not held across any call.

use crate::connection::{Connection, ConnectionCore};
use crate::endpoint::Shared;
use crate::error::{Ended, Error};
use crate::handshake::{Acceptor, Agreed, RecentRequests, check_request, check_token};
use crate::link::{ControlChannel, ControlInput, ControlListener, Driver, PendingAccept, TokenCheck};
use format::Epoch;
use format::wire::{ControlKind, RefusalReason, WireHello, WireProof, WireRefusal, check_body};
use ipc::{EventCounter, Lock, Time, Waited};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Accepts connections. Handshakes make progress while a thread is in [`Listener::accept`]; one thread at a time.
pub struct Listener {
    shared: Arc<Shared>,
    control: Box<dyn ControlListener>,
    counter: Arc<EventCounter>,
    pending: Lock<Vec<PendingPeer>>,
    requests: Lock<RecentRequests>,
    /// Why a peer that has proved the key was refused, if a call of this side failed.
    failure: Lock<Option<Error>>,
}

/// A peer whose connection is not up.
struct PendingPeer {
    channel: Arc<dyn ControlChannel>,
    stage: Stage,
    until: Time,
}

enum Stage {
    /// Has sent no valid message.
    Silent,
    /// Has sent a valid request.
    Requested,
    /// Has received the Challenge.
    Challenged(Acceptor),
    /// Was refused; stays until it has read the refusal.
    Leaving,
    /// Has proved the key; its connection has not come yet.
    Invited(Box<dyn PendingAccept>, Agreed),
    /// Its connection is coming up.
    Entering(Arc<ConnectionCore>),
}

impl Stage {
    /// Rank of the progress: the lowest rank is replaced first. `None` after the proof of the key.
    fn progress(&self) -> Option<u32> {
        match self {
            Self::Leaving => Some(0),
            Self::Silent => Some(1),
            Self::Requested | Self::Challenged(_) => Some(2),
            Self::Invited(..) | Self::Entering(_) => None,
        }
    }
}

/// The result of processing a peer.
enum Step {
    /// No new message.
    Stays,
    /// The stage has changed: process the peer again.
    Moved,
    Gone,
    Welcome(Arc<ConnectionCore>),
}

/// A reason, and the epoch if it may be revealed.
type Refused = (RefusalReason, Epoch);

/// Limit of messages read at a time from a peer that was refused.
const LAST_WORDS_MAX: usize = 16;

impl Listener {
    pub(crate) fn new(
        shared: Arc<Shared>,
        control: Box<dyn ControlListener>,
        counter: Arc<EventCounter>,
    ) -> Self {
        let pending = Lock::new(shared.host.clone(), Vec::new());
        let requests = Lock::new(shared.host.clone(), RecentRequests::default());
        let failure = Lock::new(shared.host.clone(), None);
        Self { shared, control, counter, pending, requests, failure }
    }

    /// The address to which other nodes connect.
    pub fn address(&self) -> String {
        self.control.address()
    }

    /// Number of peers whose connection is not up.
    pub fn half_open(&self) -> usize {
        self.pending.lock().len()
    }

    /// Waits for the next peer whose connection is up.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`; any other is one of this side, because of which a peer that has the key may have been refused: no
    /// more descriptors, or a system call that is not permitted.
    pub fn accept(&self, until: Option<Time>) -> Result<Connection, Error> {
        let host = &*self.shared.host;
        loop {
            let seen = self.counter.value();
            let mut pending = std::mem::take(&mut *self.pending.lock());
            let welcome = self.look(&mut pending);
            let more = if welcome.is_none() { self.admit(&mut pending) } else { Ok(true) };
            let due = pending.iter().map(|peer| peer.until).min();
            let due = pending.iter().filter_map(PendingPeer::next_due).chain(due).min();
            let armed = pending.iter().filter(|peer| !peer.arm()).count() == 0;
            self.pending.lock().append(&mut pending);
            if let Some(core) = welcome {
                core.leave_listener();
                return Ok(Connection::new(core));
            }
            let more = more?;
            if let Some(failure) = self.failure.lock().take() {
                return Err(failure);
            }
            let now = host.now();
            if until.is_some_and(|until| now >= until) {
                return Err(Error::TimedOut);
            }
            if more || !armed {
                continue;
            }
            match self.counter.wait(host, seen, until.into_iter().chain(due).min()) {
                Waited::Woken | Waited::TimedOut => {}
                Waited::Interrupted => return Err(Error::Interrupted),
            }
        }
    }

    /// Processes the pending peers until the connection of one is up.
    fn look(&self, pending: &mut Vec<PendingPeer>) -> Option<Arc<ConnectionCore>> {
        let mut welcome = None;
        pending.retain_mut(|peer| {
            if welcome.is_some() {
                return true;
            }
            match self.step(peer) {
                Step::Stays | Step::Moved => true,
                Step::Gone => false,
                Step::Welcome(core) => {
                    welcome = Some(core);
                    false
                }
            }
        });
        welcome
    }

    /// Accepts new control channels; true if there may be more. Processes each at once, so that its progress is known
    /// when a slot is needed.
    fn admit(&self, pending: &mut Vec<PendingPeer>) -> Result<bool, Error> {
        let settings = &self.shared.settings;
        for _ in 0..settings.half_open_max {
            if pending.len() >= settings.half_open_max && !evict_one(pending) {
                // All have proved the key, and are finished soon.
                return Ok(false);
            }
            let Some(channel) = self.control.next()? else {
                self.control.arm();
                return Ok(false);
            };
            let until = self.shared.host.now().after(settings.handshake);
            let mut peer = PendingPeer { channel, stage: Stage::Silent, until };
            // A new peer cannot be connected after this step, because it has to answer the Challenge first.
            if !matches!(self.step(&mut peer), Step::Gone) {
                pending.push(peer);
            }
        }
        Ok(true)
    }

    /// Processes a peer until there is nothing new. Only then is its deadline checked: a peer that has answered while
    /// no thread was in `accept` is not late.
    fn step(&self, peer: &mut PendingPeer) -> Step {
        loop {
            let step = match &peer.stage {
                Stage::Leaving => self.drain_refused(peer),
                Stage::Entering(core) => entering(core),
                Stage::Invited(..) => self.wait_for(peer),
                Stage::Silent | Stage::Requested | Stage::Challenged(_) => self.receive(peer),
            };
            match step {
                Step::Moved => {}
                Step::Stays if self.shared.host.now() >= peer.until => {
                    peer.give_up();
                    return Step::Gone;
                }
                step => return step,
            }
        }
    }

    /// Receives a message of a peer that has not proved the key.
    fn receive(&self, peer: &mut PendingPeer) -> Step {
        let judged = match peer.channel.receive() {
            ControlInput::Empty => return Step::Stays,
            ControlInput::Closed => return Step::Gone,
            ControlInput::Malformed => Err((RefusalReason::Malformed, Epoch::new(0))),
            ControlInput::Message(kind, body) => self.check_message(peer, kind, &body),
        };
        match judged {
            Ok(stage) => peer.stage = stage,
            Err((reason, epoch)) => {
                let refusal = WireRefusal::new(reason, epoch);
                if peer.channel.send(ControlKind::Refusal, refusal.as_bytes()).is_err() {
                    return Step::Gone;
                }
                peer.channel.shut_down();
                peer.stage = Stage::Leaving;
            }
        }
        Step::Moved
    }

    /// Checks one message of the initiator, and answers it. The epoch is revealed only after the proof of the key.
    fn check_message(&self, peer: &PendingPeer, kind: ControlKind, body: &[u8]) -> Result<Stage, Refused> {
        let shared = &self.shared;
        let identity = &shared.identity;
        let unproved = |reason| (reason, Epoch::new(0));
        let malformed = unproved(RefusalReason::Malformed);
        match (kind, &peer.stage) {
            (ControlKind::Request, Stage::Silent) => {
                let nonce = check_request(identity, body).map_err(unproved)?;
                // A replayed request would take the slot of a peer that has the key.
                if !self.requests.lock().add(nonce) {
                    return Err(unproved(RefusalReason::Key));
                }
                Ok(Stage::Requested)
            }
            (ControlKind::Hello, Stage::Requested) => {
                let hello = check_body::<WireHello>(body).map_err(|_| malformed)?;
                let own = shared.settings.own_window();
                let acceptor =
                    Acceptor::new(identity, shared.epoch(), &hello, own, &*shared.host).map_err(unproved)?;
                let challenge = acceptor.challenge().as_bytes();
                peer.channel.send(ControlKind::Challenge, challenge).map_err(|_| malformed)?;
                Ok(Stage::Challenged(acceptor))
            }
            (ControlKind::Proof, Stage::Challenged(acceptor)) => {
                let proof = check_body::<WireProof>(body).map_err(|_| malformed)?;
                self.welcome(peer, acceptor, &proof)
            }
            _ => Err(malformed),
        }
    }

    /// Checks the Proof. If the peer has the key and may connect now, starts to listen for its connection.
    fn welcome(&self, peer: &PendingPeer, acceptor: &Acceptor, proof: &WireProof) -> Result<Stage, Refused> {
        let shared = &self.shared;
        let told = |reason| {
            let proved = reason != RefusalReason::Key;
            (reason, if proved { shared.epoch() } else { Epoch::new(0) })
        };
        let agreed = acceptor.check(&shared.identity, proof).map_err(told)?;
        shared.check(&agreed).map_err(told)?;
        let wanted = Arc::new(Lock::new(shared.host.clone(), None));
        let judge = self.token_check(agreed, wanted.clone());
        let pending_accept = self.control.expect_peer(&*peer.channel, proof.port.get(), judge);
        let pending_accept = pending_accept.map_err(|error| told(self.refusal_of(error)))?;
        let (welcome, token) = acceptor.welcome(&shared.identity, proof, pending_accept.port());
        *wanted.lock() = Some(token);
        peer.channel
            .send(ControlKind::Welcome, welcome.as_bytes())
            .map_err(|_| told(RefusalReason::Malformed))?;
        Ok(Stage::Invited(pending_accept, agreed))
    }

    /// Returns the check of a connect token: whether it is the expected one, and whether the peer may still connect.
    fn token_check(
        &self,
        agreed: Agreed,
        wanted: Arc<Lock<Option<format::wire::WireConnectToken>>>,
    ) -> TokenCheck {
        let shared = Arc::downgrade(&self.shared);
        Arc::new(move |said| {
            let refused = |reason, epoch| WireRefusal::new(reason, epoch).as_bytes().to_vec();
            let (Some(shared), Some(wanted)) = (shared.upgrade(), *wanted.lock()) else {
                return Err(refused(RefusalReason::Full, Epoch::new(0)));
            };
            check_token(&shared.identity, &wanted, said).map_err(|reason| refused(reason, Epoch::new(0)))?;
            shared.check(&agreed).map_err(|reason| refused(reason, shared.epoch()))
        })
    }

    /// Checks whether the connection of a peer has come. A connected peer closes its control channel, so the channel
    /// is read before the connection is looked for; otherwise a connection that comes between the two would look like
    /// a peer that gave up.
    fn wait_for(&self, peer: &mut PendingPeer) -> Step {
        let Stage::Invited(pending_accept, agreed) = &peer.stage else { return Step::Stays };
        let heard = peer.channel.receive();
        match (pending_accept.next(), heard) {
            (Ok(Some(link)), _) => {
                let core = self.shared.core(link, *agreed);
                // From here on, an advance of the epoch ends the connection.
                if self.shared.add(&core).is_err() {
                    core.end(Ended::ClosedHere);
                    return Step::Gone;
                }
                peer.stage = Stage::Entering(core);
                Step::Moved
            }
            (Ok(None), ControlInput::Empty) => Step::Stays,
            // A peer that closes the channel or sends more messages does not connect.
            (Ok(None), ControlInput::Closed | ControlInput::Malformed | ControlInput::Message(..)) => {
                Step::Gone
            }
            (Err(error), _) => {
                self.refusal_of(error);
                Step::Gone
            }
        }
    }

    /// The reason to give to a peer that cannot be connected because of an error here, which [`Self::accept`] returns unless it
    /// is a limit, or the end of the peer.
    fn refusal_of(&self, error: Error) -> RefusalReason {
        match error {
            Error::Unavailable(_) => RefusalReason::Full,
            Error::Ended(_) => RefusalReason::Late,
            error => {
                *self.failure.lock() = Some(error);
                RefusalReason::Failed
            }
        }
    }

    /// Reads the remaining messages of a refused peer. If the socket were closed with unread bytes, the peer would
    /// not receive the refusal.
    fn drain_refused(&self, peer: &PendingPeer) -> Step {
        for _ in 0..LAST_WORDS_MAX {
            match peer.channel.receive() {
                ControlInput::Empty => return Step::Stays,
                ControlInput::Closed | ControlInput::Malformed => return Step::Gone,
                ControlInput::Message(..) => {}
            }
        }
        Step::Gone
    }
}

/// Removes the peer with the lowest progress, the oldest among these; false if all have proved the key.
fn evict_one(pending: &mut Vec<PendingPeer>) -> bool {
    let first = pending.iter().enumerate().filter_map(|(at, peer)| Some((peer.stage.progress()?, at))).min();
    if let Some((_, at)) = first {
        pending.remove(at);
    }
    first.is_some()
}

fn entering(core: &Arc<ConnectionCore>) -> Step {
    core.drive();
    if core.ended().is_some() {
        core.end(Ended::ClosedHere);
        return Step::Gone;
    }
    if core.is_up() { Step::Welcome(core.clone()) } else { Step::Stays }
}

impl PendingPeer {
    /// See [`ControlChannel::arm`]; false: process the peer again first.
    fn arm(&self) -> bool {
        self.channel.arm();
        match &self.stage {
            Stage::Entering(core) => core.arm(),
            _ => true,
        }
    }

    fn next_due(&self) -> Option<Time> {
        let link = match &self.stage {
            Stage::Entering(core) => core.next_due(),
            _ => None,
        };
        link.into_iter().chain(self.channel.next_due()).min()
    }

    /// Ends a connection that is not up.
    fn give_up(&self) {
        if let Stage::Entering(core) = &self.stage {
            core.end(Ended::ClosedHere);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        for peer in &*self.pending.lock() {
            peer.give_up();
        }
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listener({})", self.address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::{ClusterKey, Identity, Window};
    use crate::link::{Arrival, Link, Operation};
    use crate::memory::Rights;
    use crate::{Event, Network, Settings};
    use format::NodeId;
    use format::wire::WireRegion;
    use ipc::{Host, SystemHost};
    use pmem::Region;
    use std::any::Any;
    use std::cell::Cell;
    use std::net::IpAddr;
    use std::ops::Range;
    use std::sync::Weak;
    use std::time::Duration;

    thread_local! {
        /// Number of checks of the peer; after the first one it has connected and closed its control channel.
        static LOOKS: Cell<u32> = const { Cell::new(0) };
    }

    fn has_come() -> bool {
        LOOKS.replace(LOOKS.get() + 1) > 0
    }

    struct Peer(Arc<EventCounter>);

    impl ControlChannel for Peer {
        fn counter(&self) -> &Arc<EventCounter> {
            &self.0
        }
        fn send(&self, _: ControlKind, _: &[u8]) -> Result<(), Error> {
            Ok(())
        }
        fn receive(&self) -> ControlInput {
            if has_come() { ControlInput::Closed } else { ControlInput::Empty }
        }
        fn shut_down(&self) {}
        fn arm(&self) {}
        fn next_due(&self) -> Option<Time> {
            None
        }
        fn peer_address(&self) -> Option<IpAddr> {
            None
        }
    }

    impl PendingAccept for Peer {
        fn port(&self) -> u16 {
            1
        }
        fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
            Ok(has_come().then(|| Arc::new(Peer(self.0.clone())) as Arc<dyn Link>))
        }
    }

    impl Link for Peer {
        fn counter(&self) -> &Arc<EventCounter> {
            &self.0
        }
        fn attach(&self, _: Weak<dyn Driver>) {}
        fn counts_along(&self) -> bool {
            false
        }

        fn post(&self, _: u64, _: &Operation<'_>) -> Result<bool, Error> {
            Ok(true)
        }
        fn drive(&self, take: &mut dyn FnMut(Arrival<'_>)) -> bool {
            take(Arrival::Up);
            true
        }
        fn arm(&self) -> bool {
            true
        }
        fn next_due(&self) -> Option<Time> {
            None
        }
        fn grant(
            &self,
            _: &Region,
            _: Range<u64>,
            _: Rights,
        ) -> Result<(WireRegion, Box<dyn Any + Send + Sync>), Error> {
            Err(Error::Range)
        }
        fn close(&self) {}
    }

    fn identity(node: u32) -> Identity {
        Identity { cluster: [1; 16], key: ClusterKey::new([1; 32]), node: NodeId::new(node) }
    }

    #[test]
    fn what_arrives_on_an_accepted_connection_does_not_wake_the_listener() {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let network = Network::new(host.clone());
        let endpoint =
            |name, node| network.endpoint(name, identity(node), Epoch::new(1), Settings::default()).unwrap();
        let (one, two) = (endpoint("one", 1), endpoint("two", 2));
        let (listener, until) = (two.listen("").unwrap(), SystemHost.now().after(Duration::from_secs(60)));
        let address = listener.address();
        let sends = move || {
            let connection = one.connect(&address, NodeId::new(2), until).unwrap();
            while let Ok(Event::Message(message)) = connection.take(Some(until)) {
                connection.send(&message, Some(until)).unwrap();
            }
        };
        let sender = host.spawn("sender", Box::new(sends)).unwrap();
        let connection = listener.accept(Some(until)).unwrap();
        let round = || {
            connection.send(b"message", Some(until)).unwrap();
            connection.take(Some(until)).unwrap();
        };
        // After the first round the other side has done all that belongs to its connect.
        round();
        let before = listener.counter.value();
        (0..8).for_each(|_| round());
        assert_eq!(listener.counter.value(), before);
        connection.close();
        sender.join().unwrap();
    }

    /// A listener that cannot listen for a peer.
    struct Unable(Option<Box<dyn ControlListener>>);

    impl ControlListener for Unable {
        fn address(&self) -> String {
            self.0.as_ref().unwrap().address()
        }
        fn next(&self) -> Result<Option<Arc<dyn ControlChannel>>, Error> {
            self.0.as_ref().unwrap().next()
        }
        fn arm(&self) {
            self.0.as_ref().unwrap().arm();
        }
        fn expect_peer(
            &self,
            _: &dyn ControlChannel,
            _: u16,
            _: TokenCheck,
        ) -> Result<Box<dyn PendingAccept>, Error> {
            Err(not_permitted())
        }
    }

    fn not_permitted() -> Error {
        Error::Host(ipc::Error::System { call: "SO_ATTACH_FILTER", errno: libc::EPERM })
    }

    #[test]
    fn a_call_that_fails_here_is_an_error_here_and_no_limit_for_the_peer() {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let network = Network::new(host.clone());
        let endpoint =
            |name, node| network.endpoint(name, identity(node), Epoch::new(1), Settings::default()).unwrap();
        let (one, two) = (endpoint("one", 1), endpoint("two", 2));
        let until = SystemHost.now().after(Duration::from_secs(60));
        let mut listener = two.listen("").unwrap();
        let able = std::mem::replace(&mut listener.control, Box::new(Unable(None)));
        listener.control = Box::new(Unable(Some(able)));
        let address = listener.address();
        let (sender, refused) = std::sync::mpsc::channel();
        let connects = move || drop(sender.send(one.connect(&address, NodeId::new(2), until).err()));
        let connecting = host.spawn("connects", Box::new(connects)).unwrap();
        assert_eq!(listener.accept(Some(until)).err(), Some(not_permitted()));
        let refusal = loop {
            // The refused peer has to be read until it has gone.
            let _ = listener.accept(Some(SystemHost.now().after(Duration::from_millis(5))));
            if let Ok(refusal) = refused.try_recv() {
                break refusal;
            }
        };
        let Some(Error::Refused { reason, there, .. }) = refusal else { panic!("refused with {refusal:?}") };
        assert_eq!((reason, there), (RefusalReason::Failed, true));
        connecting.join().unwrap();
    }

    #[test]
    fn who_connects_and_hangs_up_while_it_is_looked_at_has_come() {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let network = Network::new(host);
        let endpoint = network.endpoint("two", identity(2), Epoch::new(1), Settings::default()).unwrap();
        let listener = endpoint.listen("").unwrap();
        let peer = || Peer(EventCounter::new(None));
        let window = Window { message_bytes: 4096, window: 32 };
        let agreed = Agreed { node: NodeId::new(1), epoch: Epoch::new(1), version: 1, window };
        let until = SystemHost.now().after(Duration::from_secs(60));
        let stage = Stage::Invited(Box::new(peer()), agreed);
        let mut peer = PendingPeer { channel: Arc::new(peer()), stage, until };
        assert!(matches!(listener.step(&mut peer), Step::Welcome(_)));
    }
}
