//! The turn to take the next message. A thread that has taken a message keeps the turn while it serves it, as long as
//! that cannot take long. So a program that sends one request after the other is served by one thread, and no other
//! thread is woken for it, which would cost more than the service. Before the thread waits, it releases the turn, so
//! that no message ever waits for a thread that sleeps. The [`Host`] of [`sharing`] does this for all waits, those of
//! the gateway and those of the engine.

use ipc::alive::AliveWord;
use ipc::sync::Ordering;
use ipc::{Error, Host, Join, Time, Waited, Word, Words};
use std::cell::RefCell;
use std::sync::Arc;

/// Values of a turn: a thread has it; it is free; a thread has it and another one may sleep until it is free.
const TAKEN: u32 = 0;
const FREE: u32 = 1;
const WANTED: u32 = 2;

thread_local! {
    /// The turn that this thread has.
    static HELD: RefCell<Option<Arc<Turn>>> = const { RefCell::new(None) };
}

/// A turn that is free or that one thread has.
pub(crate) struct Turn {
    host: Arc<dyn Host>,
    word: Word,
}

/// Releases the turn when it is dropped, if its thread has the turn then.
pub(crate) struct AtEnd;

impl Drop for AtEnd {
    fn drop(&mut self) {
        give_away();
    }
}

impl Turn {
    pub fn new(host: Arc<dyn Host>) -> Arc<Self> {
        Arc::new(Self { host, word: Word::new(FREE) })
    }

    /// Waits until this thread has the turn, which it may have already.
    pub fn take(self: &Arc<Self>) {
        if is_held() {
            return;
        }
        // Acquire, here and below: pairs with the AcqRel of the thread that gave it away.
        if self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            // A thread that had to wait later wakes another one, which checks whether there are more.
            while self.word.swap(WANTED, Ordering::Acquire) != FREE {
                let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                    self.host.wait(&self.word, WANTED, None);
            }
        }
        HELD.set(Some(self.clone()));
    }
}

/// Whether this thread has the turn.
pub(crate) fn is_held() -> bool {
    HELD.with_borrow(Option::is_some)
}

/// Releases the turn, if this thread has it.
pub(crate) fn give_away() {
    if let Some(turn) = HELD.take()
        && turn.word.swap(FREE, Ordering::AcqRel) == WANTED
    {
        turn.host.wake(&turn.word, 1);
    }
}

/// Wraps a host for the engine of a mount: a thread that waits releases the turn.
pub fn sharing(host: Arc<dyn Host>) -> Arc<dyn Host> {
    Arc::new(Sharing(host))
}

struct Sharing(Arc<dyn Host>);

impl Host for Sharing {
    fn now(&self) -> Time {
        self.0.now()
    }

    fn wall(&self) -> i64 {
        self.0.wall()
    }

    fn wall_tick(&self) -> i64 {
        self.0.wall_tick()
    }

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
        self.0.spawn(name, body)
    }

    fn processor(&self) -> Option<u32> {
        self.0.processor()
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        give_away();
        self.0.wait(word, expected, until)
    }

    fn will_block(&self) {
        give_away();
        self.0.will_block();
    }

    fn wake(&self, word: &Word, count: u32) {
        self.0.wake(word, count);
    }

    fn accept_fences(&self) -> bool {
        self.0.accept_fences()
    }

    fn fence_others(&self) -> bool {
        self.0.fence_others()
    }

    fn tie(&self, word: Words<AliveWord>) -> Result<Box<dyn Send + Sync>, Error> {
        self.0.tie(word)
    }

    fn started(&self, process: u32) -> Option<u64> {
        self.0.started(process)
    }

    fn boot(&self) -> u64 {
        self.0.boot()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;
    use std::sync::mpsc::channel;

    #[test]
    fn a_thread_that_waits_leaves_its_turn_to_another() {
        let turn = Turn::new(Arc::new(SystemHost));
        turn.take();
        turn.take();
        let (theirs, (told, hears)) = (turn.clone(), channel());
        let body = move || {
            theirs.take();
            told.send(()).unwrap();
            let _at_end = AtEnd;
        };
        let other = SystemHost.spawn("other", Box::new(body)).unwrap();
        assert!(hears.recv_timeout(std::time::Duration::from_millis(20)).is_err(), "it is not its turn");
        let word = Word::new(1);
        assert_ne!(sharing(Arc::new(SystemHost)).wait(&word, 0, None), Waited::TimedOut);
        hears.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        other.join().unwrap();
        turn.take();
        give_away();
        give_away();
    }
}
