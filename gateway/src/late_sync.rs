//! Persists what programs have changed at the mount a while after they did: the kernel does not tell a file system in
//! user space of `sync` and `syncfs`, so it cannot do it when they ask.
//!
//! Guarantees: as long as the mount is there, a change that was answered is persisted, or the attempt has failed, at most
//! [`LATE`] and the time of two syncs later. Only the mount's own log is synced.

use crate::abi::opcode;
use ipc::Host;
use ipc::sync::{Ordering, Word, fence};
use std::sync::Arc;
use std::time::Duration;

/// The time after the first change.
const LATE: Duration = Duration::from_millis(100);

/// Values of the state: nothing to persist, something to persist, the mount ends.
const CLEAN: u32 = 0;
const CHANGED: u32 = 1;
const ENDS: u32 = 2;

/// Whether there are changes that nothing has persisted yet.
pub(crate) struct LateSync {
    host: Arc<dyn Host>,
    state: Word,
}

impl LateSync {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self { host, state: Word::new(CLEAN) }
    }

    /// A request was served that may have changed something.
    pub(crate) fn note(&self, kind: u32) {
        if !may_change(kind) {
            return;
        }
        // Full fence: the change comes before the load. Pairs with the exchange of `wait`, which comes before the sync.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::SeqCst) == CLEAN
            && self.state.compare_exchange(CLEAN, CHANGED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            self.host.wake(&self.state, 1);
        }
    }

    /// Waits until changes have to be persisted; false once the mount ends.
    pub(crate) fn wait(&self) -> bool {
        while self.state.load(Ordering::SeqCst) == CLEAN {
            let _ = self.host.wait(&self.state, CLEAN, None);
        }
        let until = self.host.now().after(LATE);
        while self.state.load(Ordering::SeqCst) == CHANGED && self.host.now() < until {
            let _ = self.host.wait(&self.state, CHANGED, Some(until));
        }
        self.state.compare_exchange(CHANGED, CLEAN, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub(crate) fn end(&self) {
        self.state.store(ENDS, Ordering::SeqCst);
        self.host.wake(&self.state, ipc::WAKE_ALL);
    }
}

fn may_change(kind: u32) -> bool {
    matches!(
        kind,
        opcode::SETATTR
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::CREATE
            | opcode::TMPFILE
            | opcode::WRITE
            | opcode::FALLOCATE
            | opcode::COPY_FILE_RANGE
            | opcode::SETXATTR
            | opcode::REMOVEXATTR
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    #[test]
    fn a_change_is_persisted_once_a_while_after_and_a_read_is_not() {
        let late = LateSync::new(Arc::new(SystemHost));
        late.note(opcode::READ);
        assert_eq!(late.state.load(Ordering::SeqCst), CLEAN);
        let before = SystemHost.now();
        late.note(opcode::WRITE);
        late.note(opcode::RENAME2);
        assert!(late.wait() && SystemHost.now().since(before) >= LATE);
        assert_eq!(
            late.state.load(Ordering::SeqCst),
            CLEAN,
            "what comes from here on is persisted once more"
        );
        late.note(opcode::SETATTR);
        assert!(late.wait());
        late.end();
        assert!(!late.wait());
    }
}
