//! In which order messages came. Threads serve them side by side, but take them one at a time, so that a request for a
//! lock knows of every closing that the kernel sent before it: closing a file ends its `flock` locks, and a program that
//! has closed one and then asks for the lock, or tells another to, has to get it. The kernel does not wait for our
//! answer to a closing; so the request does, if it meets a lock.
//!
//! The turn to take a message is held while waiting for the kernel, and for nothing that another thread has to do.

use crate::abi::{self, opcode};
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) struct Arrivals {
    host: Arc<dyn Host>,
    turn: Lock<()>,
    /// Closings that were taken and have not been served.
    closing: Lock<BTreeSet<u64>>,
    /// Counts closings that were served.
    closed: Word,
}

/// A closing that is being served.
pub(crate) struct Closing<'a> {
    arrivals: &'a Arrivals,
    unique: u64,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.arrivals.closing.lock().remove(&self.unique);
        // Release: pairs with the load in `settle`.
        self.arrivals.closed.fetch_add(1, Ordering::Release);
        self.arrivals.host.wake(&self.arrivals.closed, ipc::WAKE_ALL);
    }
}

impl Arrivals {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self {
            turn: Lock::new(host.clone(), ()),
            closing: Lock::new(host.clone(), BTreeSet::new()),
            closed: Word::new(0),
            host,
        }
    }

    /// Takes the next message by `take`, which fills the buffer and says how far, or says that there is none.
    ///
    /// # Errors
    /// Those of `take`.
    pub(crate) fn next<E>(
        &self,
        message: &mut [u8],
        take: impl FnOnce(&mut [u8]) -> Result<Option<usize>, E>,
    ) -> Result<Option<(usize, Option<Closing<'_>>)>, E> {
        let _turn = self.turn.lock();
        let Some(bytes) = take(message)? else { return Ok(None) };
        let header = abi::split(&message[..bytes]).ok().map(|(header, _)| header);
        let closing = header.filter(|header| header.opcode == opcode::RELEASE).map(|header| {
            self.closing.lock().insert(header.unique);
            Closing { arrivals: self, unique: header.unique }
        });
        Ok(Some((bytes, closing)))
    }

    /// Waits until all closings that were taken before have been served; whether there were any.
    pub(crate) fn settle(&self) -> bool {
        let before = self.taken();
        self.served(&before);
        !before.is_empty()
    }

    /// The closings that were taken and are not served.
    fn taken(&self) -> BTreeSet<u64> {
        self.closing.lock().clone()
    }

    /// Waits until all of these have been served.
    fn served(&self, before: &BTreeSet<u64>) {
        let mut left = before.clone();
        while !left.is_empty() {
            // Acquire: pairs with the fetch_add that follows each removal, so that one not seen below changes the word.
            let closed = self.closed.load(Ordering::Acquire);
            left = self.closing.lock().intersection(before).copied().collect();
            if !left.is_empty() {
                let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                    self.host.wait(&self.closed, closed, None);
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
        let mut message = [0; 64];
        let taken = arrivals.next(&mut message, |message| {
            message[..size_of::<InHeader>()].copy_from_slice(header.as_bytes());
            Ok::<_, ()>(Some(size_of::<InHeader>()))
        });
        taken.unwrap().unwrap().1
    }

    #[test]
    fn only_closings_that_came_before_are_waited_for() {
        let arrivals = Arc::new(Arrivals::new(Arc::new(SystemHost)));
        assert!(!arrivals.settle());
        assert!(arrives(&arrivals, opcode::READ, 2).is_none());
        let first = arrives(&arrivals, opcode::RELEASE, 4);
        assert!(first.is_some());
        let before = arrivals.taken();
        let (theirs, answered) = (arrivals.clone(), Arc::new(Word::new(0)));
        let done = answered.clone();
        let body = move || {
            theirs.served(&before);
            done.store(1, Ordering::Release);
        };
        let thread = SystemHost.spawn("settles", Box::new(body)).unwrap();
        let soon = SystemHost.now().after(std::time::Duration::from_millis(20));
        SystemHost.wait(&answered, 0, Some(soon));
        assert_eq!(answered.load(Ordering::Acquire), 0, "it waits for the first");
        let second = arrives(&arrivals, opcode::RELEASE, 6);
        drop(first);
        thread.join().unwrap();
        drop(second);
        assert!(!arrivals.settle(), "all are served");
    }
}
