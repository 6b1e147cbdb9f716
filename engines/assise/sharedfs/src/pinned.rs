//! Commits that a node keeps for as long as it reads their tree: to send it to a member, or to compare it with another node's.

use crate::error::Error;
use crate::state::{Core, State};
use area::{Area, Pin, Snapshot};
use format::NodeId;
use ipc::lock::Guard;
use ipc::sync::Ordering;

/// Most commits that are made to get a tree that contains everything in the ledger.
const COMMITS_MAX: usize = 16;

/// A commit that is kept for as long as it is read.
pub(crate) struct Pinned {
    pub snapshot: Snapshot,
    pub pin: Pin,
}

impl Pinned {
    /// The last commit of an area.
    pub fn of(area: &mut Area) -> Self {
        let (snapshot, pin) = area.pin();
        Self { snapshot, pin }
    }
}

impl Core {
    /// The state, with a tree that contains all that the ledger says, or nearly so if others go on to write there.
    pub fn contain_all(&self, area: &mut Area) -> Result<Guard<'_, State>, Error> {
        let mut guard = self.state.lock();
        for _ in 0..COMMITS_MAX {
            if guard.copy.ledger.pending().next().is_none() {
                break;
            }
            drop(guard);
            self.contain_changes(area)?;
            guard = self.state.lock();
        }
        if guard.is_stopped() { Err(Error::Stopped) } else { Ok(guard) }
    }

    /// Data that was read of a commit is valid only if the commit was kept until now.
    pub fn kept<T>(
        &self,
        node: NodeId,
        pinned: &Pinned,
        read: Result<T, area::AreaError>,
    ) -> Result<T, Error> {
        if !pinned.pin.is_held() {
            return Err(Error::NoRoomToSend(node));
        }
        if self.ending.load(Ordering::Acquire) != 0 || self.state.lock().is_stopped() {
            return Err(Error::Stopped);
        }
        Ok(read?)
    }

    /// Releases the space that a pin kept.
    pub fn release_pinned(&self) -> Result<(), Error> {
        let mut area = self.area_for_other();
        let commit = area.commit();
        area.release(commit)?;
        let free = &mut self.state.lock().copy.free;
        *free = crate::room::Free::of(&area, free.space.take());
        Ok(())
    }
}
