//! Changes of a file's size, held until the kernel has taken over an answer with an older size.
//!
//! The kernel ignores the size in an answer if a program of the mount has changed the size since the request was sent. To
//! an answer to CREATE this does not apply: if the file existed, its size becomes what the answer says, and the kernel
//! drops the pages behind it, dirty ones too. The thread that sent CREATE may take over its answer after other threads
//! have taken over theirs. So an answer to a request that has changed the file's size waits until the answer to CREATE
//! was taken over. The gateway notices that by a notification about the name in the directory: for it the kernel waits
//! until no thread creates in the directory. One notification serves all answers about the directory that were sent
//! before it began. A directory in which threads create for long takes one of [`THREADS`].

use crate::gateway::Gateway;
use crate::recalls::Queue;
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, LongWord, Word};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

/// Threads that notify. With as many directories in which threads create for long, those of other directories wait for them.
pub(crate) const THREADS: usize = 3;

/// How long an answer waits at most: the kernel may hold a page for it that the thread that sent CREATE waits for.
const PATIENCE_MS: u32 = 500;

/// A name for which an answer to CREATE is being sent, and the file.
pub(crate) struct Creation {
    directory: InodeNumber,
    name: Vec<u8>,
    inode: InodeNumber,
}

pub(crate) struct SizeHolds {
    host: Arc<dyn Host>,
    /// Number of such answers for each file.
    held: Lock<BTreeMap<InodeNumber, u32>>,
    /// Number of such answers in all, so that without one no lock is taken.
    count: Word,
    /// Grows when one of them was taken over.
    ended: Word,
    creations: Queue<Creation>,
    /// Directories for which a thread notifies the kernel, with what came meanwhile.
    directories: Lock<BTreeMap<InodeNumber, Vec<Creation>>>,
    /// Number of answers that waited for as long as they may.
    overdue: LongWord,
    /// [`PATIENCE_MS`], except in tests.
    pub(crate) patience_ms: Word,
}

impl SizeHolds {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        let held = Lock::new(host.clone(), BTreeMap::new());
        let (creations, directories) = (Queue::new(host.clone()), Lock::new(host.clone(), BTreeMap::new()));
        let (count, ended, overdue) = (Word::new(0), Word::new(0), LongWord::new(0));
        Self {
            held,
            count,
            ended,
            creations,
            directories,
            overdue,
            patience_ms: Word::new(PATIENCE_MS),
            host,
        }
    }

    /// Number of answers that were sent although the kernel may not have taken over an older answer to CREATE.
    pub(crate) fn overdue(&self) -> u64 {
        // Relaxed: for information.
        self.overdue.load(Ordering::Relaxed)
    }

    /// Leaves a creation to the thread that notifies the kernel for its directory; gives it back if there is none, and this
    /// thread is to be it.
    fn leave(&self, creation: Creation) -> Option<Creation> {
        match self.directories.lock().entry(creation.directory) {
            Entry::Occupied(mut others) => {
                others.get_mut().push(creation);
                None
            }
            Entry::Vacant(place) => {
                place.insert(Vec::new());
                Some(creation)
            }
        }
    }

    /// The creations that came since the last notification about their directory began; none if the thread is done with it.
    fn next_of(&self, directory: InodeNumber) -> Vec<Creation> {
        let mut directories = self.directories.lock();
        let came = directories.get_mut(&directory).map(std::mem::take).unwrap_or_default();
        if came.is_empty() {
            directories.remove(&directory);
        }
        came
    }

    fn end_one(&self, inode: InodeNumber) {
        let mut held = self.held.lock();
        if let Some(answers) = held.get_mut(&inode) {
            *answers -= 1;
            if *answers == 0 {
                held.remove(&inode);
            }
        }
        drop(held);
        self.count.fetch_add(u32::MAX, Ordering::AcqRel);
        // Release: pairs with the Acquire of `wait_for_creations`.
        self.ended.fetch_add(1, Ordering::Release);
        self.host.wake(&self.ended, ipc::WAKE_ALL);
    }

    pub(crate) fn end(&self) {
        self.creations.end();
    }
}

impl Gateway {
    /// Called while a CREATE of an existing file is served, before the size in its answer is read.
    pub(crate) fn hold_size(&self, directory: InodeNumber, name: &[u8], inode: InodeNumber) {
        *self.size_holds.held.lock().entry(inode).or_insert(0) += 1;
        // AcqRel: a thread that changes the size after this one has read it, under the engine's lock, sees the number.
        self.size_holds.count.fetch_add(1, Ordering::AcqRel);
        self.size_holds.creations.push(Creation { directory, name: name.to_vec(), inode });
    }

    /// Called after a request has changed the size of a file, before it is answered.
    pub(crate) fn wait_for_creations(&self, inode: InodeNumber) {
        let holds = &self.size_holds;
        // Acquire: pairs with the AcqRel of `hold_size`.
        if holds.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let patience = Duration::from_millis(holds.patience_ms.load(Ordering::Relaxed).into());
        let until = self.host.now().after(patience);
        loop {
            // Acquire: pairs with the Release of `end_one`.
            let seen = holds.ended.load(Ordering::Acquire);
            if !holds.held.lock().contains_key(&inode) {
                return;
            }
            if self.host.now() >= until {
                holds.overdue.fetch_add(1, Ordering::Relaxed);
                return;
            }
            self.host.wait(&holds.ended, seen, Some(until));
        }
    }

    /// Work of the threads that learn from the kernel that answers were taken over.
    pub(crate) fn confirm_creations(&self) {
        let holds = &self.size_holds;
        while let Some(creation) = holds.creations.next() {
            let directory = creation.directory;
            let mut some: Vec<Creation> = holds.leave(creation).into_iter().collect();
            while let Some(first) = some.first() {
                // A name that does not exist is as good: it is looked for after the wait.
                let _ = self.notices.expire_name(directory.get(), &first.name);
                some.iter().for_each(|creation| holds.end_one(creation.inode));
                some = holds.next_of(directory);
            }
        }
    }
}
