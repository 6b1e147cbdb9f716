//! Commits of the tree, made beside all other work: the thread that prepares a batch holds the area's lock, and takes
//! the state's lock only for moments ([`crate::replay`]).
//!
//! Guarantees: no commit and no sync happens while the state's lock is held, except when a daemon has ended its threads
//! ([`crate::Daemon::stop_level`]). The ledger has room for the entries of a step before the step begins.

use crate::error::Error;
use crate::leases::LOOK;
use crate::replay::copy::{LocalCopy, Visit, contain_changes};
use crate::state::{Core, State};
use area::Area;
use ccnvm::SessionId;
use format::Sequence;
use ipc::host::WAKE_ALL;
use ipc::lock::Guard;
use ipc::sync::Ordering;

/// The daemon's copy; each visit takes the lock.
pub(crate) struct DaemonCopy<'a>(pub &'a Core);

impl Visit for DaemonCopy<'_> {
    fn visit<T>(&mut self, look: impl FnOnce(&mut LocalCopy) -> T) -> T {
        look(&mut self.0.state.lock().copy)
    }
}

/// Entries of the ledger that one step may write, and the longest payload of one of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    pub count: usize,
    pub payload_bytes: usize,
}

impl Entries {
    /// So many without a payload.
    pub fn plain(count: usize) -> Self {
        Self { count, payload_bytes: 0 }
    }
}

impl Core {
    /// The area, for anything but a batch of a log.
    pub fn area_for_other(&self) -> Guard<'_, Area> {
        // Relaxed: hints by which a batch ends earlier or later.
        self.batch_awaited.fetch_add(1, Ordering::Relaxed);
        let area = self.area.lock();
        self.batch_awaited.fetch_add(u32::MAX, Ordering::Relaxed);
        area
    }

    /// The area, for a batch of a session's log; [`Self::end_batch`] follows. `None` once the log is digested up to a record,
    /// perhaps by batches of another thread: while one makes such batches this call waits for the end of each, not for the lock,
    /// which it might not get between two of them.
    ///
    /// # Errors
    /// `Stopped`.
    pub fn area_for_batch(&self, id: SessionId, up_to: Sequence) -> Result<Option<Guard<'_, Area>>, Error> {
        loop {
            // Acquire: pairs with the Release of `end_batch`; read before the state and `batch_of` are looked at.
            let seen = self.batches.load(Ordering::Acquire);
            if self.state.lock().is_digested(id, up_to)? {
                return Ok(None);
            }
            // Relaxed: it is cleared before `batches` grows. A batch that begins just now is waited for at the lock.
            let is_own = || self.batch_of.load(Ordering::Relaxed) == id.0;
            let area = match is_own() {
                true => None,
                // Another thread may begin such a batch just now.
                false => self.area.try_lock().or_else(|| (!is_own()).then(|| self.area_for_other())),
            };
            if let Some(area) = area {
                self.batch_of.store(id.0, Ordering::Relaxed);
                return Ok(Some(area));
            }
            self.host.wait(&self.batches, seen, Some(self.host.now().after(LOOK)));
        }
    }

    /// Gives back the area after a batch, or after a batch that did not come about.
    pub fn end_batch(&self, area: Guard<'_, Area>) {
        self.batch_of.store(0, Ordering::Relaxed);
        drop(area);
        // Release: pairs with the Acquire of `area_for_batch`.
        self.batches.fetch_add(1, Ordering::Release);
        self.host.wake(&self.batches, WAKE_ALL);
    }

    /// Whether calls wait for the area, other than for the digest of the log that the batch in preparation is of.
    pub fn is_batch_awaited(&self) -> bool {
        self.batch_awaited.load(Ordering::Relaxed) != 0
    }

    /// Locks the state, with room in the ledger for the entries that the caller is about to write there. A ledger that
    /// is too small for them is full when it is written to.
    pub fn state_with_room(&self, entries: impl Fn(&State) -> Entries) -> Guard<'_, State> {
        loop {
            match self.look_for_room(&entries) {
                Ok(state) => return state,
                Err(NoRoom::Commit) => {
                    let mut area = self.area_for_other();
                    // A failure stops the daemon, which the next look sees.
                    let _ = self.contain_changes(&mut area);
                }
                Err(NoRoom::Copies) => self.wait_for_trees(),
            }
        }
    }

    /// The same for a caller that holds the area's lock.
    pub fn state_with_room_beside(
        &self,
        area: &mut Area,
        entries: impl Fn(&State) -> Entries,
    ) -> Guard<'_, State> {
        loop {
            match self.look_for_room(&entries) {
                Ok(state) => return state,
                // As above.
                Err(NoRoom::Commit) => drop(self.contain_changes(area)),
                // The entries that the copies lack were sent already, and need nothing of this node's tree.
                Err(NoRoom::Copies) => self.wait_for_trees(),
            }
        }
    }

    fn look_for_room(&self, entries: &impl Fn(&State) -> Entries) -> Result<Guard<'_, State>, NoRoom> {
        let state = self.state.lock();
        let ledger = &state.copy.ledger;
        let Entries { count, payload_bytes } = entries(&state);
        let has_room = ledger.has_room(count as u64, payload_bytes as u64);
        let fits = has_room && !ledger.wants_commit(self.config.batch_changes);
        let can_have_more = ledger.pending().next().is_some();
        match () {
            () if fits || state.is_stopped() => Ok(state),
            () if can_have_more => Err(NoRoom::Commit),
            () if !has_room && ledger.is_held_back() => Err(NoRoom::Copies),
            () => Ok(state),
        }
    }

    /// Commits until the tree has all that the ledger says.
    pub fn contain_changes(&self, area: &mut Area) -> Result<(), Error> {
        if self.state.lock().is_stopped() {
            return Err(Error::Stopped);
        }
        let contained = contain_changes(area, &mut DaemonCopy(self), 0);
        self.state.lock().guard(contained)
    }
}

/// On what the room in the ledger depends.
enum NoRoom {
    /// A commit of this node's tree.
    Commit,
    /// Progress of the copies' trees.
    Copies,
}
