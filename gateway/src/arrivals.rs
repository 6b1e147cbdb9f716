//! The order in which messages arrived. Threads serve messages concurrently, but take them one at a time, so that a
//! request for a lock knows every close that the kernel sent before it. Closing a file ends its `flock` locks, and a
//! program that has closed a file and then requests the lock, or lets another program do so, must get it. The kernel
//! does not wait for the answer to a close, so a request that meets a lock waits for earlier closes.
//!
//! A thread keeps the [turn](crate::turn) to take a message while it waits for the kernel, but not while it waits for
//! another thread.

use crate::abi::{self, opcode};
use crate::turn::Turn;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) struct Arrivals {
    host: Arc<dyn Host>,
    turn: Arc<Turn>,
    /// Closes that were taken and are not served yet.
    closing: Lock<BTreeSet<u64>>,
    /// Counts closes that were served.
    closed: Word,
    /// Threads that wait for a close.
    waiting: Word,
}

/// A close that is being served.
pub(crate) struct Closing<'a> {
    arrivals: &'a Arrivals,
    unique: u64,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut closing = self.arrivals.closing.lock();
        closing.remove(&self.unique);
        // SeqCst: pairs with the loads in `after_closings` and `served`. It is counted while the set is locked: a
        // thread that does not find it in the set finds it counted. A waiting thread that is not seen here sees that
        // the count has changed.
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

    /// Waits for this thread's turn to take a message, and keeps the turn.
    pub(crate) fn wait_for_turn(&self) {
        self.turn.take();
    }

    /// Takes the next message by `take`, which fills the buffer and returns the length, or none. The thread keeps the
    /// turn until it gives it away.
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

    /// Makes an attempt that a file which is not closed yet may prevent. If it is refused, waits for all earlier
    /// closes, and repeats it if any of them was served since the first attempt.
    pub(crate) fn after_closings<T>(&self, refused: impl Fn(&T) -> bool, act: impl Fn() -> T) -> T {
        // Acquire: pairs with the count of a close that was served.
        let closed = self.closed.load(Ordering::Acquire);
        let done = act();
        if !refused(&done) {
            return done;
        }
        self.served(&self.taken());
        // Acquire: as above.
        if self.closed.load(Ordering::Acquire) == closed { done } else { act() }
    }

    /// The closes that were taken and are not served yet.
    fn taken(&self) -> BTreeSet<u64> {
        self.closing.lock().clone()
    }

    /// Waits until all of these closes have been served.
    fn served(&self, before: &BTreeSet<u64>) {
        let mut left = before.clone();
        while !left.is_empty() {
            // Acquire: pairs with the count of each removal, so that a removal which is not seen below changes the
            // word.
            let closed = self.closed.load(Ordering::Acquire);
            left = self.closing.lock().intersection(before).copied().collect();
            if !left.is_empty() {
                // SeqCst: pairs with a close that was served.
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

    /// Makes attempts that are refused until `closed` is set; returns their number.
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
        // The close is served after the refusal, and before the check for earlier closes.
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
        // Otherwise this call would never end.
        arrivals.served(&before);
        drop(second);
    }
}
