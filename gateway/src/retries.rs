//! Threads whose call met an inode that another process had removed since the kernel looked it up (`ESTALE`). The
//! kernel resolves the path once more and then gives up. So the inodes that such a thread looks up are kept open until
//! its call has been served: they continue to exist even if another process removes their names.

use ipc::sync::Ordering;
use ipc::{Host, Lock, Word};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use vfs::engine::Handle;

/// Limit of remembered threads; one of them is forgotten when another one is added.
const THREADS_MAX: usize = 64;
/// Limit of open inodes for a thread: the ends of two paths, and directories on these.
const HANDLES_MAX: usize = 8;
/// After this number of messages of a thread, of any kind, nothing is kept open for it.
const MESSAGES_MAX: u32 = 64;

/// A thread whose call is being repeated.
struct Retry {
    kept: VecDeque<Handle>,
    messages_left: u32,
}

pub(crate) struct Retries {
    threads: Lock<BTreeMap<u32, Retry>>,
    /// Number of threads, so that messages of other threads take no lock.
    count: Word,
}

impl Retries {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self { threads: Lock::new(host, BTreeMap::new()), count: Word::new(0) }
    }

    /// A thread's call failed. Returns the handles to close.
    #[must_use]
    pub(crate) fn begin(&self, thread: u32) -> Vec<Handle> {
        let mut threads = self.threads.lock();
        let fresh = Retry { kept: VecDeque::new(), messages_left: MESSAGES_MAX };
        let mut over = threads.insert(thread, fresh).map_or_else(Vec::new, |retry| retry.kept.into());
        if threads.len() > THREADS_MAX
            && let Some(other) = threads.keys().find(|other| **other != thread).copied()
        {
            over.extend(threads.remove(&other).into_iter().flat_map(|retry| retry.kept));
        }
        self.count_is(threads.len());
        over
    }

    /// Whether a thread's call is being repeated.
    pub(crate) fn has(&self, thread: u32) -> bool {
        // Relaxed: a thread's messages follow each other, and each is answered before the next.
        self.count.load(Ordering::Relaxed) > 0 && self.threads.lock().contains_key(&thread)
    }

    /// Keeps an inode that a thread has looked up. Returns a handle to close.
    #[must_use]
    pub(crate) fn keep(&self, thread: u32, handle: Handle) -> Option<Handle> {
        let mut threads = self.threads.lock();
        let Some(retry) = threads.get_mut(&thread) else { return Some(handle) };
        retry.kept.push_back(handle);
        if retry.kept.len() > HANDLES_MAX { retry.kept.pop_front() } else { None }
    }

    /// A message of a thread was served; `ends` if it ends the call. Returns the handles to close.
    #[must_use]
    pub(crate) fn served(&self, thread: u32, ends: bool) -> Vec<Handle> {
        let mut threads = self.threads.lock();
        if let Some(retry) = threads.get_mut(&thread) {
            retry.messages_left -= 1;
            if !ends && retry.messages_left > 0 {
                return Vec::new();
            }
        }
        let over = threads.remove(&thread).map_or_else(Vec::new, |retry| retry.kept.into());
        self.count_is(threads.len());
        over
    }

    /// The kernel has ended the connection.
    #[must_use]
    pub(crate) fn end(&self) -> Vec<Handle> {
        let mut threads = self.threads.lock();
        self.count_is(0);
        std::mem::take(&mut *threads).into_values().flat_map(|retry| retry.kept).collect()
    }

    fn count_is(&self, count: usize) {
        self.count.store(count as u32, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    #[test]
    fn what_a_thread_looks_up_is_kept_until_its_call_ends() {
        let retries = Retries::new(Arc::new(SystemHost));
        assert!(!retries.has(5));
        assert_eq!(retries.begin(5), []);
        assert!(retries.has(5) && !retries.has(6));
        assert_eq!(retries.keep(5, Handle::new(1)), None);
        assert_eq!(retries.served(5, false), []);
        assert_eq!(retries.keep(5, Handle::new(2)), None);
        assert_eq!(retries.served(5, true), [Handle::new(1), Handle::new(2)]);
        assert!(!retries.has(5));
        assert_eq!(retries.served(5, true), []);
        assert_eq!(retries.keep(5, Handle::new(3)), Some(Handle::new(3)), "nobody would end it");
    }

    #[test]
    fn nothing_is_kept_for_long() {
        let retries = Retries::new(Arc::new(SystemHost));
        assert_eq!(retries.begin(5), []);
        let over: Vec<_> = (0..20).filter_map(|number| retries.keep(5, Handle::new(number))).collect();
        assert_eq!(over.len(), 20 - HANDLES_MAX);
        let over: Vec<_> = (0..MESSAGES_MAX).flat_map(|_| retries.served(5, false)).collect();
        assert_eq!(over.len(), HANDLES_MAX);
        for thread in 0..THREADS_MAX as u32 {
            assert_eq!(retries.begin(thread), []);
            assert_eq!(retries.keep(thread, Handle::new(thread.into())), None);
        }
        assert_eq!(retries.begin(1000), [Handle::new(0)]);
        assert_eq!(retries.end().len(), THREADS_MAX - 1);
        assert!(!retries.has(1000));
    }
}
