//! Inodes that may have no name any more, which the kernel is asked to forget. The kernel keeps an inode that no program
//! uses as long as the kernel itself has memory, even if another session has removed the last name, and meanwhile the
//! engine keeps the contents for the gateway.
//!
//! An inode is listed when it is not open at the mount and no lease ensures that a removal would be noticed, or when it is
//! known to have no name. The kernel does not report that it still uses an inode. So it is asked again, after pauses that
//! grow, until its FORGET arrives, or until the inode is found to have a name under a lease.

use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Time, Waited, Word};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The first pause, and the smallest between two notifications. An inode that is removed through the mount is usually
/// forgotten before it ends. Each pause of an inode is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// An inode that is listed.
struct Listed {
    due: Time,
    /// The pause after that.
    pause: Duration,
    /// Changes each time that the inode is listed.
    serial: u64,
}

#[derive(Default)]
struct Table {
    listed: BTreeMap<InodeNumber, Listed>,
    serial: u64,
    /// When the thread looks again; none if it waits for an inode.
    looks_at: Option<Time>,
    /// No inodes are due before this time.
    not_before: Option<Time>,
}

/// An inode that is due, as it was listed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    pub(crate) inode: InodeNumber,
    serial: u64,
}

/// All inodes that are listed; no more than the kernel knows.
pub(crate) struct Orphans {
    host: Arc<dyn Host>,
    table: Lock<Table>,
    /// Grows when the thread has to look earlier, and at the end.
    news: Word,
    over: Word,
}

impl Orphans {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        let table = Lock::new(host.clone(), Table::default());
        Self { table, news: Word::new(0), over: Word::new(0), host }
    }

    /// Lists an inode, with the first pause.
    pub(crate) fn list(&self, inode: InodeNumber) {
        let due = self.host.now().after(PAUSE);
        let is_earlier = {
            let mut table = self.table.lock();
            table.serial += 1;
            let serial = table.serial;
            table.listed.insert(inode, Listed { due, pause: PAUSE * 2, serial });
            table.looks_at.is_none_or(|at| due < at)
        };
        if is_earlier {
            self.ring();
        }
    }

    fn ring(&self) {
        // Release: pairs with the Acquire in `next`.
        self.news.fetch_add(1, Ordering::Release);
        self.host.wake(&self.news, ipc::WAKE_ALL);
    }

    /// Waits until inodes are due; they stay listed, with a longer pause. None at the end.
    pub(crate) fn next(&self) -> Option<Vec<Due>> {
        loop {
            // Acquire: pairs with the Release in `ring`.
            let seen = self.news.load(Ordering::Acquire);
            if self.over.load(Ordering::Acquire) != 0 {
                return None;
            }
            let (due, looks_at) = self.take_due(self.host.now());
            if !due.is_empty() {
                return Some(due);
            }
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.host.wait(&self.news, seen, looks_at);
        }
    }

    /// The same without waiting; also the time at which others are due.
    pub(crate) fn take_due(&self, now: Time) -> (Vec<Due>, Option<Time>) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let mut due = Vec::new();
        if table.not_before.is_none_or(|time| time <= now) {
            for (inode, listed) in table.listed.iter_mut().filter(|(_, listed)| listed.due <= now) {
                due.push(Due { inode: *inode, serial: listed.serial });
                listed.due = now.after(listed.pause);
                listed.pause = (listed.pause * 2).min(PAUSE_MAX);
            }
            if !due.is_empty() {
                table.not_before = Some(now.after(PAUSE));
            }
        }
        let earliest = table.listed.values().map(|listed| listed.due).min();
        table.looks_at =
            earliest.map(|earliest| table.not_before.map_or(earliest, |time| time.max(earliest)));
        (due, table.looks_at)
    }

    /// Removes inodes from the list, except those that were listed again since they were due.
    pub(crate) fn remove(&self, over: &[Due]) {
        let mut table = self.table.lock();
        for due in over {
            if table.listed.get(&due.inode).is_some_and(|listed| listed.serial == due.serial) {
                table.listed.remove(&due.inode);
            }
        }
    }

    /// Ends the thread in [`Self::next`].
    pub(crate) fn end(&self) {
        self.over.store(1, Ordering::Release);
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    fn inodes(due: &[Due]) -> Vec<u64> {
        due.iter().map(|due| due.inode.get()).collect()
    }

    #[test]
    fn an_inode_is_due_after_pauses_that_grow_up_to_a_limit() {
        let orphans = Orphans::new(Arc::new(SystemHost));
        orphans.list(InodeNumber::new(5));
        orphans.list(InodeNumber::new(6));
        let (mut now, mut pauses) = (SystemHost.now().after(PAUSE), Vec::new());
        assert_eq!(inodes(&orphans.take_due(now).0), [5, 6], "both in one notification");
        for _ in 0..20 {
            let (due, looks_at) = orphans.take_due(now);
            assert_eq!(due, []);
            let then = looks_at.unwrap();
            pauses.push(then.since(now));
            now = then;
            assert_eq!(inodes(&orphans.take_due(now).0), [5, 6]);
        }
        assert!(pauses[0] == PAUSE * 2 && pauses.is_sorted() && pauses[19] == PAUSE_MAX, "{pauses:?}");
    }

    #[test]
    fn an_inode_that_is_listed_again_meanwhile_stays() {
        let orphans = Orphans::new(Arc::new(SystemHost));
        [5, 6].iter().for_each(|inode| orphans.list(InodeNumber::new(*inode)));
        let due = orphans.next().unwrap();
        orphans.list(InodeNumber::new(6));
        orphans.remove(&due);
        assert_eq!(inodes(&orphans.next().unwrap()), [6]);
        orphans.end();
        assert_eq!(orphans.next(), None);
    }
}
