//! Where peers come in: talks at the door, of which most may be strangers', until each has either proved the cluster's
//! key, and has its connection, or is gone.
//!
//! A stranger costs a socket and a few hundred bytes, until its time is up or its place is wanted: places are few, and
//! who has shown least leaves first. Who has proved the key is never pushed out by anybody. Nothing of the provider is
//! made for anybody else.
//!
//! Locks: `halves` is taken out whole while it is looked at, and is not held across anything.

use crate::connection::{Connection, Core};
use crate::endpoint::Shared;
use crate::error::{Ended, Error};
use crate::handshake::{Acceptor, Agreed, Knocks, judge_entry, judge_knock};
use crate::link::{Door, Driver, Heard, Invitation, Judge, Talk};
use crate::news::News;
use format::Epoch;
use format::wire::{DoorKind, RefusalReason, WireHello, WireProof, WireRefusal, check_body};
use ipc::{Lock, Time, Waited};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Where peers come in. Handshakes go on while somebody is in [`Listener::accept`]; one thread at a time.
pub struct Listener {
    shared: Arc<Shared>,
    door: Box<dyn Door>,
    news: Arc<News>,
    halves: Lock<Vec<Half>>,
    knocks: Lock<Knocks>,
}

/// Somebody whose connection is not up.
struct Half {
    talk: Arc<dyn Talk>,
    stage: Stage,
    until: Time,
}

enum Stage {
    /// Has said nothing of worth.
    Strange,
    /// Has knocked.
    Knocked,
    /// Is to answer the Challenge.
    Challenged(Acceptor),
    /// Was refused; stays until it has heard so.
    Leaving,
    /// Has proved the key; its connection is waited for.
    Invited(Box<dyn Invitation>, Agreed),
    /// Its connection comes up.
    Entering(Arc<Core>),
}

impl Stage {
    /// Who shows less leaves first; none: has proved the key.
    fn shown(&self) -> Option<u32> {
        match self {
            Self::Leaving => Some(0),
            Self::Strange => Some(1),
            Self::Knocked | Self::Challenged(_) => Some(2),
            Self::Invited(..) | Self::Entering(_) => None,
        }
    }
}

/// What one look at somebody came to.
enum Step {
    /// Nothing new.
    Stays,
    /// Look again.
    Moved,
    Gone,
    Welcome(Arc<Core>),
}

/// A reason, and the epoch if it may be told.
type Refused = (RefusalReason, Epoch);

/// Messages taken from one that was refused already, at a look.
const LAST_WORDS_MAX: usize = 16;

impl Listener {
    pub(crate) fn new(shared: Arc<Shared>, door: Box<dyn Door>, news: Arc<News>) -> Self {
        let halves = Lock::new(shared.host.clone(), Vec::new());
        let knocks = Lock::new(shared.host.clone(), Knocks::default());
        Self { shared, door, news, halves, knocks }
    }

    /// Where it listens, for others to connect to.
    pub fn address(&self) -> String {
        self.door.address()
    }

    /// Those whose connection is not up.
    pub fn half_open(&self) -> usize {
        self.halves.lock().len()
    }

    /// The next peer whose connection is up, waited for.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`, `Host`: no more descriptors.
    pub fn accept(&self, until: Option<Time>) -> Result<Connection, Error> {
        let host = &*self.shared.host;
        loop {
            let seen = self.news.seen();
            let mut halves = std::mem::take(&mut *self.halves.lock());
            let welcome = self.look(&mut halves);
            let more = if welcome.is_none() { self.let_in(&mut halves) } else { Ok(true) };
            let due = halves.iter().map(|half| half.until).min();
            let due = halves.iter().filter_map(Half::next_due).chain(due).min();
            let armed = halves.iter().filter(|half| !half.arm()).count() == 0;
            self.halves.lock().append(&mut halves);
            if let Some(core) = welcome {
                return Ok(Connection::new(core));
            }
            let more = more?;
            let now = host.now();
            if until.is_some_and(|until| now >= until) {
                return Err(Error::TimedOut);
            }
            if more || !armed {
                continue;
            }
            match self.news.sleep(host, seen, until.into_iter().chain(due).min()) {
                Waited::Woken | Waited::TimedOut => {}
                Waited::Interrupted => return Err(Error::Interrupted),
            }
        }
    }

    /// Looks at everybody; stops at the first whose connection is up.
    fn look(&self, halves: &mut Vec<Half>) -> Option<Arc<Core>> {
        let mut welcome = None;
        halves.retain_mut(|half| {
            if welcome.is_some() {
                return true;
            }
            match self.step(half) {
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

    /// Takes who has come, a place each; true if there may be more. Each is heard at once, so that who knows how to
    /// knock is known when a place is wanted.
    fn let_in(&self, halves: &mut Vec<Half>) -> Result<bool, Error> {
        let settings = &self.shared.settings;
        for _ in 0..settings.half_open_max {
            if halves.len() >= settings.half_open_max && !make_room(halves) {
                // All have proved the key, and are done soon.
                return Ok(false);
            }
            let Some(talk) = self.door.next()? else {
                self.door.arm();
                return Ok(false);
            };
            let until = self.shared.host.now().after(settings.handshake);
            let mut half = Half { talk, stage: Stage::Strange, until };
            // Nobody is let in by the first look: that takes an answer to the Challenge.
            if !matches!(self.step(&mut half), Step::Gone) {
                halves.push(half);
            }
        }
        Ok(true)
    }

    /// Looks at somebody until there is nothing new. Its time counts only then: who has answered while nobody looked
    /// is not late.
    fn step(&self, half: &mut Half) -> Step {
        loop {
            let step = match &half.stage {
                Stage::Leaving => self.see_off(half),
                Stage::Entering(core) => entering(core),
                Stage::Invited(..) => self.wait_for(half),
                Stage::Strange | Stage::Knocked | Stage::Challenged(_) => self.hear(half),
            };
            match step {
                Step::Moved => {}
                Step::Stays if self.shared.host.now() >= half.until => {
                    half.give_up();
                    return Step::Gone;
                }
                step => return step,
            }
        }
    }

    /// Hears what a stranger says.
    fn hear(&self, half: &mut Half) -> Step {
        let judged = match half.talk.hear() {
            Heard::Nothing => return Step::Stays,
            Heard::Gone => return Step::Gone,
            Heard::Noise => Err((RefusalReason::Malformed, Epoch::new(0))),
            Heard::Said(kind, body) => self.judge(half, kind, &body),
        };
        match judged {
            Ok(stage) => half.stage = stage,
            Err((reason, epoch)) => {
                let refusal = WireRefusal::new(reason, epoch);
                if half.talk.say(DoorKind::Refusal, refusal.as_bytes()).is_err() {
                    return Step::Gone;
                }
                half.talk.hang_up();
                half.stage = Stage::Leaving;
            }
        }
        Step::Moved
    }

    /// Answers one message of the initiator. The epoch is told to who has proved the key only.
    fn judge(&self, half: &Half, kind: DoorKind, body: &[u8]) -> Result<Stage, Refused> {
        let shared = &self.shared;
        let identity = &shared.identity;
        let unproved = |reason| (reason, Epoch::new(0));
        let malformed = unproved(RefusalReason::Malformed);
        match (kind, &half.stage) {
            (DoorKind::Knock, Stage::Strange) => {
                let nonce = judge_knock(identity, body).map_err(unproved)?;
                // Who repeats another's would take the place of one that knows how.
                if !self.knocks.lock().hear(nonce) {
                    return Err(unproved(RefusalReason::Key));
                }
                Ok(Stage::Knocked)
            }
            (DoorKind::Hello, Stage::Knocked) => {
                let hello = check_body::<WireHello>(body).map_err(|_| malformed)?;
                let own = shared.settings.own_window();
                let acceptor =
                    Acceptor::new(identity, shared.epoch(), &hello, own, &*shared.host).map_err(unproved)?;
                let challenge = acceptor.challenge().as_bytes();
                half.talk.say(DoorKind::Challenge, challenge).map_err(|_| malformed)?;
                Ok(Stage::Challenged(acceptor))
            }
            (DoorKind::Proof, Stage::Challenged(acceptor)) => {
                let proof = check_body::<WireProof>(body).map_err(|_| malformed)?;
                self.welcome(half, acceptor, &proof)
            }
            _ => Err(malformed),
        }
    }

    /// Judges the Proof; who has the key, and may come now, is waited for.
    fn welcome(&self, half: &Half, acceptor: &Acceptor, proof: &WireProof) -> Result<Stage, Refused> {
        let shared = &self.shared;
        let told = |reason| {
            let proved = reason != RefusalReason::Key;
            (reason, if proved { shared.epoch() } else { Epoch::new(0) })
        };
        let agreed = acceptor.judge(&shared.identity, proof).map_err(told)?;
        shared.check(&agreed).map_err(told)?;
        let wanted = Arc::new(Lock::new(shared.host.clone(), None));
        let judge = self.entries(agreed, wanted.clone());
        let invitation = self.door.invite(&*half.talk, proof.port.get(), judge);
        let invitation = invitation.map_err(|_| told(RefusalReason::Full))?;
        let (welcome, entry) = acceptor.welcome(&shared.identity, proof, invitation.port());
        *wanted.lock() = Some(entry);
        half.talk.say(DoorKind::Welcome, welcome.as_bytes()).map_err(|_| told(RefusalReason::Malformed))?;
        Ok(Stage::Invited(invitation, agreed))
    }

    /// Judges what comes with a connection: is it the one that is waited for, and may it still come?
    fn entries(&self, agreed: Agreed, wanted: Arc<Lock<Option<format::wire::WireEntry>>>) -> Judge {
        let shared = Arc::downgrade(&self.shared);
        Arc::new(move |said| {
            let refused = |reason, epoch| WireRefusal::new(reason, epoch).as_bytes().to_vec();
            let (Some(shared), Some(wanted)) = (shared.upgrade(), *wanted.lock()) else {
                return Err(refused(RefusalReason::Full, Epoch::new(0)));
            };
            judge_entry(&shared.identity, &wanted, said).map_err(|reason| refused(reason, Epoch::new(0)))?;
            shared.check(&agreed).map_err(|reason| refused(reason, shared.epoch()))
        })
    }

    /// Looks whether the connection of somebody who was welcome has come. Who has it hangs up: so the talk is heard
    /// before the look, or an end of it that comes between the two would be taken for one without a connection.
    fn wait_for(&self, half: &mut Half) -> Step {
        let Stage::Invited(invitation, agreed) = &half.stage else { return Step::Stays };
        let heard = half.talk.hear();
        match (invitation.next(), heard) {
            (Ok(Some(link)), _) => {
                let core = self.shared.core(link, *agreed);
                // From here on an advance ends it.
                if self.shared.add(&core).is_err() {
                    core.end(Ended::ClosedHere);
                    return Step::Gone;
                }
                half.stage = Stage::Entering(core);
                Step::Moved
            }
            (Ok(None), Heard::Nothing) => Step::Stays,
            // Whoever gives up, or says more, does not come.
            (Ok(None), Heard::Gone | Heard::Noise | Heard::Said(..)) | (Err(_), _) => Step::Gone,
        }
    }

    /// Hears the last words of somebody who was refused: who was hung up on while it spoke would not hear why.
    fn see_off(&self, half: &Half) -> Step {
        for _ in 0..LAST_WORDS_MAX {
            match half.talk.hear() {
                Heard::Nothing => return Step::Stays,
                Heard::Gone | Heard::Noise => return Step::Gone,
                Heard::Said(..) => {}
            }
        }
        Step::Gone
    }
}

/// Has the one leave who has shown least, of those the oldest; false if all have proved the key.
fn make_room(halves: &mut Vec<Half>) -> bool {
    let first = halves.iter().enumerate().filter_map(|(at, half)| Some((half.stage.shown()?, at))).min();
    if let Some((_, at)) = first {
        halves.remove(at);
    }
    first.is_some()
}

fn entering(core: &Arc<Core>) -> Step {
    core.drive();
    if core.ended().is_some() {
        core.end(Ended::ClosedHere);
        return Step::Gone;
    }
    if core.is_up() { Step::Welcome(core.clone()) } else { Step::Stays }
}

impl Half {
    /// See [`Talk::arm`]; false: look again first.
    fn arm(&self) -> bool {
        self.talk.arm();
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
        link.into_iter().chain(self.talk.next_due()).min()
    }

    /// Its time is over.
    fn give_up(&self) {
        if let Stage::Entering(core) = &self.stage {
            core.end(Ended::ClosedHere);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        for half in &*self.halves.lock() {
            half.give_up();
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
    use crate::link::{Arrival, Link, Work};
    use crate::memory::Rights;
    use crate::{Network, Settings};
    use format::NodeId;
    use format::wire::WireRegion;
    use ipc::{Host, SystemHost};
    use pmem::Region;
    use std::any::Any;
    use std::cell::Cell;
    use std::net::IpAddr;
    use std::ops::Range;
    use std::sync::Weak;

    thread_local! {
        /// Looks at the peer; behind the first one it has connected, and hung up.
        static LOOKS: Cell<u32> = const { Cell::new(0) };
    }

    fn has_come() -> bool {
        LOOKS.replace(LOOKS.get() + 1) > 0
    }

    struct Peer(Arc<News>);

    impl Talk for Peer {
        fn news(&self) -> &Arc<News> {
            &self.0
        }
        fn say(&self, _: DoorKind, _: &[u8]) -> Result<(), Error> {
            Ok(())
        }
        fn hear(&self) -> Heard {
            if has_come() { Heard::Gone } else { Heard::Nothing }
        }
        fn hang_up(&self) {}
        fn arm(&self) {}
        fn next_due(&self) -> Option<Time> {
            None
        }
        fn from(&self) -> Option<IpAddr> {
            None
        }
    }

    impl Invitation for Peer {
        fn port(&self) -> u16 {
            1
        }
        fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
            Ok(has_come().then(|| Arc::new(Peer(self.0.clone())) as Arc<dyn Link>))
        }
    }

    impl Link for Peer {
        fn news(&self) -> &Arc<News> {
            &self.0
        }
        fn attach(&self, _: Weak<dyn Driver>) {}
        fn counts_along(&self) -> bool {
            false
        }

        fn post(&self, _: u64, _: &Work<'_>) -> Result<bool, Error> {
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

    #[test]
    fn who_connects_and_hangs_up_while_it_is_looked_at_has_come() {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let identity = Identity { cluster: [1; 16], key: ClusterKey::new([1; 32]), node: NodeId::new(2) };
        let network = Network::new(host);
        let endpoint = network.endpoint("two", identity, Epoch::new(1), Settings::default()).unwrap();
        let listener = endpoint.listen("").unwrap();
        let peer = || Peer(News::heard_by(None));
        let window = Window { message_bytes: 4096, window: 32 };
        let agreed = Agreed { node: NodeId::new(1), epoch: Epoch::new(1), version: 1, window };
        let until = SystemHost.now().after(std::time::Duration::from_secs(60));
        let stage = Stage::Invited(Box::new(peer()), agreed);
        let mut half = Half { talk: Arc::new(peer()), stage, until };
        assert!(matches!(listener.step(&mut half), Step::Welcome(_)));
    }
}
