//! Reports of a daemon about attached programs, for people.

use crate::daemon::Daemon;
use ccnvm::SessionId;
use format::{CommitNumber, InodeNumber, LogUid};
use ipc::sync::Ordering;

/// A session as a person sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its process; 0 for one in the daemon's own process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its update log.
    pub log: LogUid,
    /// Bytes of its log file.
    pub log_bytes: u64,
    /// Leases that it holds, beside its own range.
    pub leases: usize,
}

impl Daemon {
    /// The attached programs.
    pub fn programs(&self) -> Vec<Program> {
        let state = self.core().state.lock();
        let program = |session: &crate::session::Session| Program {
            pid: session.peer.as_ref().map_or(0, |peer| peer.credentials().pid.unsigned_abs()),
            uid: session.caller.uid,
            log: session.log,
            log_bytes: session.log_bytes,
            leases: session.held.len(),
        };
        state.sessions.values().map(program).collect()
    }

    /// Number of detached sessions: kept for processes that may come back after a termination or a restart of the
    /// daemon, or for files that programs gave away.
    pub fn detached_sessions(&self) -> usize {
        self.core().state.lock().detached.all().count()
    }

    /// Open files that sessions and detached sessions refer to by call.
    pub fn references(&self) -> usize {
        self.core().state.lock().references.total()
    }

    /// Blocks of files, by their number in the file, that were found damaged when a program had written a part of them: they
    /// cannot be read until they are written whole.
    pub fn damaged_blocks(&self) -> Vec<(InodeNumber, u64)> {
        self.core().state.lock().copy.damaged.iter().copied().collect()
    }

    /// Data blocks that a program of this user can still take, as `statfs` reports them: without the blocks that are
    /// reserved for the daemon's own work and for programs.
    pub fn free_blocks(&self, uid: u32) -> u64 {
        let state = self.core().state.lock();
        state.room.free_blocks_of(uid, &state.copy.free)
    }

    /// Requests of programs since the daemon started.
    pub fn requests(&self) -> u64 {
        self.core().requests.load(Ordering::Relaxed)
    }

    /// The last root commit.
    pub fn commit(&self) -> CommitNumber {
        self.core().state.lock().copy.tree.commit()
    }

    /// Whether a call waits for the digest of a session's log.
    pub fn is_digest_awaited(&self, session: u64) -> bool {
        let state = self.core().state.lock();
        state.sessions.get(&SessionId(session)).is_some_and(|session| session.is_awaited())
    }
}
