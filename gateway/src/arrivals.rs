//! In which order messages came. Threads serve them side by side, but take them one at a time, so that a request for a
//! lock knows of every closing that the kernel sent before it: closing a file ends its `flock` locks, and a program that
//! has closed one and then asks for the lock, or tells another to, has to get it. The kernel does not wait for our
//! answer to a closing; so the request does, if it meets a lock.
//!
//! The [turn](crate::turn) to take a message is held while waiting for the kernel, and for nothing that another thread has to
//! do.

use crate::abi::{self, opcode};
use crate::turn::Turn;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) struct Arrivals {
    host: Arc<dyn Host>,
    turn: Arc<Turn>,
    /// Closings that were taken and have not been served.
    closing: Lock<BTreeSet<u64>>,
    /// Counts closings that were served.
    closed: Word,
    /// Threads that wait for one.
    waiting: Word,
}

/// A closing that is being served.
pub(crate) struct Closing<'a> {
    arrivals: &'a Arrivals,
    unique: u64,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut closing = self.arrivals.closing.lock();
        closing.remove(&self.unique);
        // SeqCst: pairs with the loads in `after_closings` and `served`. Counted while the set is held: who does not
        // find it there finds it counted. A thread that is not seen to wait sees that the count is another one.
        self.arrivals.closed.fetch_add(1, Ordering::SeqCst);
        drop(closing);
        if self.arrivals.waiting.load(Ordering::SeqCst) > 0 {
            self.arrivals.host.wake(&self.arrivals.closed, ipc::WAKE_ALL);
        }
    }
}

impl Arrivals {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self {
            turn: Turn::new(host.clone()),
            closing: Lock::new(host.clone(), BTreeSet::new()),
            closed: Word::new(0),
            waiting: Word::new(0),
            host,
        }
    }

    /// Waits until it is this thread's turn to take a message, which it keeps.
    pub(crate) fn wait_for_turn(&self) {
        self.turn.take();
    }

    /// Takes the next message by `take`, which fills the buffer and says how far, or says that there is none. The thread has
    /// the turn until it gives it away.
    ///
    /// # Errors
    /// Those of `take`.
    pub(crate) fn next<E>(
        &self,
        message: &mut Vec<u8>,
        take: impl FnOnce(&mut Vec<u8>) -> Result<Option<usize>, E>,
    ) -> Result<Option<(usize, Option<Closing<'_>>)>, E> {
        self.turn.take();
        let Some(bytes) = take(message)? else { return Ok(None) };
        let header = abi::split(&message[..bytes]).ok().map(|(header, _)| header);
        let closing = header.filter(|header| header.opcode == opcode::RELEASE).map(|header| {
            self.closing.lock().insert(header.unique);
            Closing { arrivals: self, unique: header.unique }
        });
        Ok(Some((bytes, closing)))
    }

    /// Does what a file that is not closed yet may stand in the way of. If it is refused, all closings that came before
    /// it are waited for, and if any was served since it began, it is done once more.
    pub(crate) fn after_closings<T>(&self, refused: impl Fn(&T) -> bool, act: impl Fn() -> T) -> T {
        // Acquire: pairs with the count of a closing that was served.
        let closed = self.closed.load(Ordering::Acquire);
        let done = act();
        if !refused(&done) {
            return done;
        }
        self.served(&self.taken());
        // Acquire: as above.
        if self.closed.load(Ordering::Acquire) == closed { done } else { act() }
    }

    /// The closings that were taken and have not been served.
    fn taken(&self) -> BTreeSet<u64> {
        self.closing.lock().clone()
    }

    /// Waits until all of these have been served.
    fn served(&self, before: &BTreeSet<u64>) {
        let mut left = before.clone();
        while !left.is_empty() {
            // Acquire: pairs with the count that goes with each removal, so that one not seen below changes the word.
            let closed = self.closed.load(Ordering::Acquire);
            left = self.closing.lock().intersection(before).copied().collect();
            if !left.is_empty() {
                // SeqCst: pairs with a closing that was served.
                self.waiting.fetch_add(1, Ordering::SeqCst);
                let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                    self.host.wait(&self.closed, closed, None);
                self.waiting.fetch_add(u32::MAX, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::InHeader;
    use ipc::SystemHost;
    use zerocopy::IntoBytes;

    fn arrives(arrivals: &Arrivals, opcode: u32, unique: u64) -> Option<Closing<'_>> {
        let header = InHeader { opcode, unique, ..InHeader::default() };
        let mut message = vec![0; 64];
        let taken = arrivals.next(&mut message, |message| {
            message[..size_of::<InHeader>()].copy_from_slice(header.as_bytes());
            Ok::<_, ()>(Some(size_of::<InHeader>()))
        });
        taken.unwrap().unwrap().1
    }

    /// Acts that are refused until `closed` is set; how often it was tried.
    fn tries(arrivals: &Arrivals, closed: &Word, in_the_first: impl Fn()) -> u32 {
        let tried = Word::new(0);
        arrivals.after_closings(
            |done| !done,
            || {
                let done = closed.load(Ordering::Acquire) != 0;
                if tried.fetch_add(1, Ordering::Relaxed) == 0 {
                    in_the_first();
                }
                done
            },
        );
        tried.load(Ordering::Relaxed)
    }

    #[test]
    fn who_is_refused_tries_again_if_a_closing_came_before() {
        let arrivals = Arrivals::new(Arc::new(SystemHost));
        let (open, shut) = (Word::new(0), Word::new(1));
        assert_eq!(tries(&arrivals, &open, || ()), 1, "nothing was closed");
        assert!(arrives(&arrivals, opcode::READ, 2).is_none());
        assert_eq!(tries(&arrivals, &open, || ()), 1, "a read is no closing");
        let first = arrives(&arrivals, opcode::RELEASE, 4);
        assert_eq!(tries(&arrivals, &shut, || ()), 1, "who is not refused waits for nobody");
        drop(first);
        // Served after it was refused, and before it looked.
        let first = std::cell::RefCell::new(arrives(&arrivals, opcode::RELEASE, 6));
        assert_eq!(tries(&arrivals, &open, || drop(first.take())), 2);
    }

    #[test]
    fn only_closings_that_came_before_are_waited_for() {
        let arrivals = Arc::new(Arrivals::new(Arc::new(SystemHost)));
        let first = arrives(&arrivals, opcode::RELEASE, 4);
        let (theirs, asked) = (arrivals.clone(), Arc::new(Word::new(0)));
        let (done, word) = (Arc::new(Word::new(0)), asked.clone());
        let answered = done.clone();
        let body = move || {
            let closed = Word::new(0);
            let tried = tries(&theirs, &closed, || {
                word.store(1, Ordering::Release);
                SystemHost.wake(&word, ipc::WAKE_ALL);
            });
            assert_eq!(tried, 2);
            done.store(1, Ordering::Release);
        };
        let thread = SystemHost.spawn("syncs", Box::new(body)).unwrap();
        while asked.load(Ordering::Acquire) == 0 {
            SystemHost.wait(&asked, 0, None);
        }
        let soon = SystemHost.now().after(std::time::Duration::from_millis(20));
        SystemHost.wait(&answered, 0, Some(soon));
        assert_eq!(answered.load(Ordering::Acquire), 0, "it waits for the first");
        drop(first);
        thread.join().unwrap();
        let (first, before) = (arrives(&arrivals, opcode::RELEASE, 6), arrivals.taken());
        let second = arrives(&arrivals, opcode::RELEASE, 8);
        drop(first);
        // Else this would never end.
        arrivals.served(&before);
        drop(second);
    }
}
