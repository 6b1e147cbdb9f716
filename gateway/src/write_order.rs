//! Orders reads after the earlier writes of the same file. The kernel puts the bytes of a write into its pages before
//! it sends the WRITE. If these pages are dropped meanwhile and another program reads them again, a READ that is served
//! before the WRITE would return them without its bytes, and if a mapping makes such a page dirty, the write would be
//! undone. So a read waits for the writes that arrived before it.
//!
//! A write waits for the lease of its file, for a space reservation and for the daemon, but for no read, so there is no
//! cycle.

use crate::abi::{self, Body, WRITE_FROM_CACHE, WriteIn, opcode};
use crate::turn;
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Writes in progress: their messages, by numbers that are never reused.
#[derive(Default)]
struct Writes {
    next: u64,
    files: BTreeMap<InodeNumber, BTreeMap<u64, u64>>,
}

pub(crate) struct WriteOrder {
    host: Arc<dyn Host>,
    writes: Lock<Writes>,
    /// Number of files with writes in progress, so that reads of other files take no lock.
    count: Word,
    /// Grows with each write that was served.
    served: Word,
    /// Number of threads that wait for a write.
    waiting: Word,
}

/// A message and its place in the order.
pub(crate) struct Arrival<'a> {
    order: &'a WriteOrder,
    what: What,
}

enum What {
    Other,
    /// A write and its message.
    Write(InodeNumber, u64),
    /// A read after the writes with lower numbers.
    Read(InodeNumber, u64),
}

impl WriteOrder {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        let (count, served, waiting) = (Word::new(0), Word::new(0), Word::new(0));
        Self { writes: Lock::new(host.clone(), Writes::default()), count, served, waiting, host }
    }

    /// Called by the thread that has taken a message, while it has the turn.
    pub(crate) fn arrives(&self, message: &[u8]) -> Arrival<'_> {
        Arrival { order: self, what: self.what(message) }
    }

    fn what(&self, message: &[u8]) -> What {
        let Ok((header, body)) = abi::split(message) else { return What::Other };
        let node = InodeNumber::new(header.node);
        match header.opcode {
            opcode::WRITE if !is_from_cache(body) => {
                let mut writes = self.writes.lock();
                let number = writes.next;
                writes.next += 1;
                writes.files.entry(node).or_default().insert(number, header.unique);
                // Relaxed: read by threads that have the turn, which this one has now.
                self.count.store(writes.files.len() as u32, Ordering::Relaxed);
                What::Write(node, header.unique)
            }
            // Relaxed: an earlier write was counted by the thread that had the turn then.
            opcode::READ if self.count.load(Ordering::Relaxed) > 0 => {
                What::Read(node, self.writes.lock().next)
            }
            _ => What::Other,
        }
    }

    /// Whether all writes of a file with lower numbers were served; later ones do not matter.
    fn are_served(&self, node: InodeNumber, before: u64) -> bool {
        let writes = self.writes.lock();
        let oldest = writes.files.get(&node).and_then(BTreeMap::first_key_value);
        oldest.is_none_or(|(oldest, _)| *oldest >= before)
    }

    /// A write has taken effect: reads need not wait for it any more, although its answer may come later.
    pub(crate) fn served(&self, node: InodeNumber, unique: u64) {
        {
            let mut writes = self.writes.lock();
            let Some(numbers) = writes.files.get_mut(&node) else { return };
            let before = numbers.len();
            numbers.retain(|_, message| *message != unique);
            if numbers.len() == before {
                return;
            }
            if numbers.is_empty() {
                writes.files.remove(&node);
            }
            // Relaxed: a thread that reads the former value checks the list.
            self.count.store(writes.files.len() as u32, Ordering::Relaxed);
        }
        // SeqCst: pairs with `wait`. A waiting thread that is not seen here sees that the word has changed.
        self.served.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.host.wake(&self.served, ipc::WAKE_ALL);
        }
    }
}

fn is_from_cache(mut body: Body<'_>) -> bool {
    body.take::<WriteIn>().is_ok_and(|write| write.write_flags & WRITE_FROM_CACHE != 0)
}

impl Arrival<'_> {
    /// Waits for earlier writes; other threads may take messages meanwhile.
    pub(crate) fn wait(&self) {
        let What::Read(node, before) = self.what else { return };
        loop {
            // Acquire: pairs with the count of a write that was served.
            let seen = self.order.served.load(Ordering::Acquire);
            if self.order.are_served(node, before) {
                return;
            }
            turn::give_away();
            // SeqCst: pairs with the loads of a write that was served.
            self.order.waiting.fetch_add(1, Ordering::SeqCst);
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.order.host.wait(&self.order.served, seen, None);
            self.order.waiting.fetch_add(u32::MAX, Ordering::Relaxed);
        }
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        if let What::Write(node, unique) = self.what {
            self.order.served(node, unique);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::InHeader;
    use ipc::SystemHost;
    use zerocopy::IntoBytes;

    fn message(opcode: u32, node: u64, write_flags: u32) -> Vec<u8> {
        let header = InHeader { opcode, node, ..InHeader::default() };
        let fields = WriteIn { write_flags, ..WriteIn::default() };
        [header.as_bytes(), fields.as_bytes()].concat()
    }

    #[test]
    fn a_read_waits_for_the_writes_of_its_file_that_came_before_it() {
        let order = WriteOrder::new(Arc::new(SystemHost));
        let arrives = |opcode, node, flags| order.arrives(&message(opcode, node, flags));
        arrives(opcode::READ, 5, 0).wait();
        let write = arrives(opcode::WRITE, 5, 0);
        let from_cache = arrives(opcode::WRITE, 6, WRITE_FROM_CACHE);
        [arrives(opcode::READ, 6, 0), arrives(opcode::GETATTR, 5, 0)].iter().for_each(Arrival::wait);
        let read = arrives(opcode::READ, 5, 0);
        let later = arrives(opcode::WRITE, 5, 0);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| read.wait());
            let until = SystemHost.now().after(std::time::Duration::from_secs(60));
            while order.waiting.load(Ordering::SeqCst) == 0 {
                assert!(!waits.is_finished() && SystemHost.now() < until, "it does not wait");
                std::hint::spin_loop();
            }
            // Later writes do not delay the read.
            let latest = arrives(opcode::WRITE, 5, 0);
            drop(write);
            waits.join().unwrap();
            drop(latest);
        });
        drop((later, from_cache));
        assert!(order.writes.lock().files.is_empty());
        assert_eq!(order.count.load(Ordering::Relaxed), 0);
    }
}
