//! The threads that execute recalls: one learns from the engine which leases other sessions need, others send
//! notifications to the kernel. None of them serves requests, and none makes a call on the mount, so all requests for
//! which the kernel waits can be served meanwhile.

use crate::gateway::Gateway;
use crate::orphans::Due;
use crate::pages::PAGE_BYTES;
use crate::size_holds;
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use vfs::Recalled;
use vfs::engine::Sync;

/// Threads for inodes that may have pages in the kernel, whose notifications may have to wait for a request.
const WITH_PAGES: usize = 4;
/// Threads for repairs, which a recall never holds up.
const REPAIRS: usize = 2;
/// How long a request waits until a thread begins a repair: on a busy machine none may run for a while.
const BEGIN: Duration = Duration::from_millis(200);
/// How long it then waits for pages to be dropped, or for bytes to be stored into a page, if the writer itself may hold
/// the page.
const DROP: Duration = Duration::from_millis(1);
const STORE_INTO_LOCKED: Duration = Duration::from_millis(200);
/// How long a write waits until its bytes are stored again. Bytes that are stored after the answer would undo a later
/// write. This is less than SharedFS waits for a session.
const STORE: Duration = Duration::from_secs(2);

/// Inodes without pages in the kernel whose leases are given back in one call. The first of them waits for the last.
const RECALLS_AT_ONCE: usize = 16;

/// Number of inodes in one notification.
const FORGETS_A_NOTICE: usize = 512;

/// States of a repair.
const WAITING: u32 = 0;
const BEGUN: u32 = 1;
const DONE: u32 = 2;
/// The request no longer waits for the repair, and no thread begins it.
const ABANDONED: u32 = 3;

/// A unit of work on the kernel's caches.
pub(crate) enum Task {
    Recall(InodeNumber),
    /// All leases were lost.
    LoseAll,
    Repair(Repair, Arc<Word>),
}

/// Pages that differ from the engine's data after a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Repair {
    /// The write took effect at another position than the kernel expected.
    Moved {
        node: InodeNumber,
        /// Pages from this offset on are dropped.
        from: u64,
        /// The last byte of the file and its offset, if the kernel expects the file to be shorter.
        last: Option<(u64, u8)>,
    },
    /// The kernel may expect the file to end before this byte.
    Longer { node: InodeNumber, at: u64, byte: u8 },
    /// The kernel may have read pages before the write took effect. They are not dropped, because a page that a mapping
    /// made dirty would be written back with the contents from before the write.
    Overtaken {
        node: InodeNumber,
        offset: u64,
        bytes: Vec<u8>,
        /// The kernel may keep the page locked until the answer to the write.
        may_be_locked: bool,
    },
}

impl Repair {
    /// How long a request waits until the repair begins, and then until it is done.
    fn patience(&self) -> (Duration, Duration) {
        match self {
            Self::Moved { .. } => (BEGIN, DROP),
            Self::Longer { .. } => (BEGIN, BEGIN),
            Self::Overtaken { may_be_locked: true, .. } => (STORE, STORE_INTO_LOCKED),
            Self::Overtaken { may_be_locked: false, .. } => (STORE, STORE),
        }
    }
}

/// Work that waits for a thread.
pub(crate) struct Queue<T> {
    host: Arc<dyn Host>,
    tasks: Lock<VecDeque<T>>,
    /// Grows with each item, and at the end.
    news: Word,
    over: Word,
}

impl<T> Queue<T> {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self { tasks: Lock::new(host.clone(), VecDeque::new()), news: Word::new(0), over: Word::new(0), host }
    }

    pub(crate) fn push(&self, task: T) {
        self.tasks.lock().push_back(task);
        self.ring();
    }

    fn ring(&self) {
        // Release: pairs with the Acquire in `next`.
        self.news.fetch_add(1, Ordering::Release);
        self.host.wake(&self.news, ipc::WAKE_ALL);
    }

    /// The next task; none at the end.
    pub(crate) fn next(&self) -> Option<T> {
        loop {
            // Acquire: pairs with the Release in `ring`.
            let seen = self.news.load(Ordering::Acquire);
            if let Some(task) = self.tasks.lock().pop_front() {
                return Some(task);
            }
            if self.over.load(Ordering::Acquire) != 0 {
                return None;
            }
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.host.wait(&self.news, seen, None);
        }
    }

    /// The next task, and those behind it that are there, at most so many in all; none at the end.
    fn next_few(&self, count_max: usize) -> Option<Vec<T>> {
        let mut few = vec![self.next()?];
        let mut tasks = self.tasks.lock();
        let count = tasks.len().min(count_max - 1);
        few.extend(tasks.drain(..count));
        Some(few)
    }

    pub(crate) fn end(&self) {
        self.over.store(1, Ordering::Release);
        self.ring();
    }
}

fn spawn(gateway: &Arc<Gateway>, name: &str, body: fn(&Gateway)) -> Result<(), ipc::Error> {
    gateway.threads.fetch_add(1, Ordering::Relaxed);
    let theirs = gateway.clone();
    let run = Box::new(move || {
        // If the thread fails, requests are still served; the daemon terminates a session that does not answer.
        let _ = catch_unwind(AssertUnwindSafe(|| body(&theirs)));
        theirs.threads.fetch_add(u32::MAX, Ordering::AcqRel);
        theirs.host.wake(&theirs.threads, ipc::WAKE_ALL);
    });
    let spawned = gateway.host.spawn(name, run);
    if spawned.is_err() {
        gateway.threads.fetch_add(u32::MAX, Ordering::AcqRel);
    }
    spawned.map(drop)
}

/// Starts the thread that persists what programs have changed. The end of the mount does not wait for it: a sync waits for as
/// long as there are fewer copies than there have to be.
///
/// # Errors
/// The thread could not be started.
pub(crate) fn start_late_sync(gateway: &Arc<Gateway>) -> Result<(), ipc::Error> {
    let theirs = gateway.clone();
    let run = move || {
        while theirs.late_sync.wait() {
            // All of the mount's own log. If the medium fails, each later `fsync` at the mount fails, too.
            let _ = theirs.engine.sync(Sync::Own);
        }
    };
    gateway.host.spawn("late sync", Box::new(run)).map(drop)
}

/// Starts the threads that ask the kernel to forget inodes: when it knows too many, and when they may have no name.
///
/// # Errors
/// The thread could not be started.
pub(crate) fn start_forgetting(gateway: &Arc<Gateway>) -> Result<(), ipc::Error> {
    spawn(gateway, "forgets", |gateway| {
        while gateway.nodes.wait_crowded() {
            gateway.forget_some();
        }
    })?;
    spawn(gateway, "forgets orphans", |gateway| {
        while let Some(due) = gateway.orphans.next() {
            gateway.forget_orphans(&due);
        }
    })
}

/// Starts the threads of a mount whose kernel caches data.
///
/// # Errors
/// A thread could not be started; those that were started end with the mount.
pub(crate) fn start(gateway: &Arc<Gateway>) -> Result<(), ipc::Error> {
    let spawn = |name: &str, body: fn(&Gateway)| spawn(gateway, name, body);
    spawn("recalls", Gateway::hear_recalls)?;
    for _ in 0..size_holds::THREADS {
        spawn("creations", Gateway::confirm_creations)?;
    }
    spawn("drops", |gateway| {
        while let Some(units) = gateway.plain_recalls.next_few(RECALLS_AT_ONCE) {
            gateway.recall(&units);
        }
    })?;
    spawn("evicts", |gateway| {
        while gateway.units.wait_crowded() {
            let evicted = gateway.units.evict(&gateway.nodes, &gateway.notices);
            gateway.list_if_closed(&evicted);
        }
    })?;
    for _ in 0..REPAIRS {
        spawn("repairs", |gateway| gateway.work_through(&gateway.repairs))?;
    }
    for _ in 0..WITH_PAGES {
        spawn("drops pages", |gateway| gateway.work_through(&gateway.page_recalls))?;
    }
    Ok(())
}

impl Gateway {
    /// Asks the kernel to forget inodes, with several in one notification.
    pub(crate) fn forget_some(&self) {
        for some in self.nodes.next_to_forget().chunks(FORGETS_A_NOTICE) {
            // A kernel that has ended the connection has forgotten all inodes.
            let _ = self.notices.forget(some);
        }
    }

    /// Asks the kernel to forget inodes that are due, unless it has, or they are in use or found to have names.
    pub(crate) fn forget_orphans(&self, due: &[Due]) {
        let (left, over): (Vec<Due>, Vec<Due>) = due.iter().partition(|due| self.may_be_orphan(due.inode));
        self.orphans.remove(&over);
        let inodes: Vec<InodeNumber> = left.iter().map(|due| due.inode).collect();
        for some in inodes.chunks(FORGETS_A_NOTICE) {
            let _ = self.notices.forget(some);
        }
    }

    /// The leases of these were given back: if another session removes one, the gateway does not hear of it. An inode
    /// that is open is listed when it is closed; for one that never was open, the engine keeps nothing.
    fn list_if_closed(&self, inodes: &[InodeNumber]) {
        let closed = inodes.iter().filter(|inode| self.nodes.was_closed(**inode));
        closed.for_each(|inode| self.list_orphan(*inode));
    }

    /// Another session requests the leases of these inodes.
    pub(crate) fn recall(&self, nodes: &[InodeNumber]) {
        self.units.recall(&self.nodes, &self.notices, nodes);
        self.list_if_closed(nodes);
    }

    fn hear_recalls(&self) {
        let Some(leases) = self.engine.cache_leases() else { return };
        loop {
            match leases.recalls() {
                Recalled::Units(units) => {
                    for node in units {
                        match self.units.has_pages(node) {
                            true => self.page_recalls.push(Task::Recall(node)),
                            false => self.plain_recalls.push(node),
                        }
                    }
                }
                Recalled::Lost => self.page_recalls.push(Task::LoseAll),
                Recalled::Ended => return,
            }
        }
    }

    fn work_through(&self, queue: &Queue<Task>) {
        while let Some(task) = queue.next() {
            match task {
                Task::Recall(node) => self.recall(&[node]),
                Task::LoseAll => {
                    self.units.lose_all(&self.nodes, &self.notices, self.guarded.as_deref());
                    self.nodes.all_closed().into_iter().for_each(|inode| self.list_orphan(inode));
                    self.engine.cache_leases().into_iter().for_each(|leases| leases.dropped());
                }
                Task::Repair(repair, done) => {
                    if self.change(&done, WAITING, BEGUN) {
                        self.carry_out(&repair);
                        self.change(&done, BEGUN, DONE);
                    }
                }
            }
        }
    }

    fn carry_out(&self, repair: &Repair) {
        // If the kernel forgot the inode meanwhile, there is nothing to repair.
        match repair {
            Repair::Moved { node, from, last } => {
                if let Some((at, byte)) = last {
                    let _ = self.notices.store(node.get(), *at, &[*byte]);
                }
                let _ = self.notices.drop_pages(node.get(), *from, 0);
            }
            Repair::Longer { node, at, byte } => {
                let _ = self.notices.store(node.get(), *at, &[*byte]);
                // After a store that begins at the first byte of a page, the kernel considers the page complete. If the
                // file has just been truncated, the page must not stay.
                if at.is_multiple_of(PAGE_BYTES) {
                    let _ = self.notices.drop_pages(node.get(), *at, 1);
                }
            }
            Repair::Overtaken { node, offset, bytes, .. } => {
                let _ = self.notices.store(node.get(), *offset, bytes);
            }
        }
    }

    /// Repairs pages of the kernel before a request is answered, if that is possible in time; returns whether it was
    /// done.
    pub(crate) fn repair(&self, repair: Repair) -> bool {
        let (begin, end) = repair.patience();
        // The byte at the end of a file may be another one later.
        let is_for_now = matches!(repair, Repair::Longer { .. });
        let done = Arc::new(Word::new(WAITING));
        self.repairs.push(Task::Repair(repair, done.clone()));
        for (state, patience) in [(WAITING, begin), (BEGUN, end)] {
            let until = self.host.now().after(patience);
            // Acquire: pairs with the AcqRel of `change`.
            while done.load(Ordering::Acquire) == state && self.host.now() < until {
                self.host.wait(&done, state, Some(until));
            }
            if is_for_now && state == WAITING && self.change(&done, WAITING, ABANDONED) {
                return false;
            }
        }
        // Acquire: pairs with the AcqRel of `change`.
        done.load(Ordering::Acquire) == DONE
    }

    /// Changes the state of a repair; false if it is another one than `from`.
    fn change(&self, done: &Word, from: u32, to: u32) -> bool {
        // AcqRel: pairs with the Acquire of `repair`.
        let changed = done.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        self.host.wake(done, ipc::WAKE_ALL);
        changed
    }

    /// Ends the threads, and waits for them. The kernel has ended the connection, so no thread waits for it.
    pub(crate) fn end_recalls(&self) {
        self.nodes.end();
        self.orphans.end();
        if let Some(leases) = self.engine.cache_leases().filter(|_| self.caches) {
            leases.end_recalls();
        }
        self.page_recalls.end();
        self.plain_recalls.end();
        self.repairs.end();
        self.size_holds.end();
        self.late_sync.end();
        self.units.end();
        loop {
            // Acquire: pairs with the AcqRel of a thread that ends.
            match self.threads.load(Ordering::Acquire) {
                0 => return,
                count => {
                    let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                        self.host.wait(&self.threads, count, None);
                }
            }
        }
    }
}
