//! Where files end, as the kernel takes it.
//!
//! A read that goes beyond the end which the kernel knows asks for attributes first (GETATTR with the open file). The thread that
//! asked takes the size in when it goes on, but not if the kernel was told meanwhile to drop something of the inode, or if
//! another program makes the file longer just then. The read would then stop at the old end, although bytes behind it were written
//! long before. So the last byte of the file is stored into the kernel's pages before such a question is answered: that makes
//! the file longer at once, whatever becomes of the answer. A file that became shorter needs nothing: a READ says where it ends.

use crate::gateway::Gateway;
use crate::recalls::Repair;
use format::InodeNumber;
use ipc::{Host, Lock};
use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::sync::Arc;
use vfs::Error;
use vfs::engine::Handle;

#[derive(Default)]
struct State {
    ends: BTreeMap<InodeNumber, u64>,
    cuts: u64,
}

/// Ends that the kernel has: it takes a file to end there, or further on.
pub(crate) struct Ends(Lock<State>);

impl Ends {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self(Lock::new(host, State::default()))
    }

    /// Whether the kernel takes a file to end here, or further on.
    pub(crate) fn reaches(&self, node: InodeNumber, end: u64) -> bool {
        end == 0 || self.0.lock().ends.get(&node).is_some_and(|known| *known >= end)
    }

    /// The kernel is told that a file ends here, or that it has forgotten the file if this is its start.
    pub(crate) fn end_at(&self, node: InodeNumber, end: u64) {
        let ends = &mut self.0.lock().ends;
        if ends.get(&node).is_some_and(|known| *known > end) {
            ends.remove(&node);
        }
    }

    /// A program of the mount cuts a file.
    pub(crate) fn cut(&self, node: InodeNumber, end: u64) {
        self.0.lock().cuts += 1;
        self.end_at(node, end);
    }

    fn cuts(&self) -> u64 {
        self.0.lock().cuts
    }

    /// The kernel has an end, unless a file was cut since there were so many cuts.
    fn stored(&self, node: InodeNumber, end: u64, cuts: u64) {
        let mut state = self.0.lock();
        if state.cuts == cuts {
            state.ends.insert(node, end);
        }
    }
}

impl Gateway {
    /// Makes the kernel take a file to end no earlier than it does. A lease is held, so that programs elsewhere do not change it
    /// meanwhile.
    pub(crate) fn store_end(&self, node: InodeNumber, handle: Handle, end: u64) -> Result<(), Error> {
        let Some(at) = end.checked_sub(1).filter(|_| !self.ends.reaches(node, end)) else { return Ok(()) };
        let cuts = self.ends.cuts();
        let mut byte = [0];
        let bytes = match self.engine.read(handle, at, &mut [IoSliceMut::new(&mut byte)]) {
            // It reads nothing, so it needs no end.
            Err(Error::BadDescriptor) => return Ok(()),
            bytes => bytes?,
        };
        if bytes == 1 && self.repair(Repair::Longer { node, at, byte: byte[0] }) {
            self.ends.stored(node, end, cuts);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    #[test]
    fn an_end_is_known_until_the_file_ends_earlier() {
        let ends = Ends::new(Arc::new(SystemHost));
        let node = InodeNumber::new(7);
        ends.stored(node, 10, ends.cuts());
        ends.end_at(node, 10);
        assert!(ends.reaches(node, 9) && ends.reaches(node, 10) && !ends.reaches(node, 11));
        ends.end_at(node, 9);
        assert!(!ends.reaches(node, 9) && ends.reaches(node, 0));
        // A program cuts the file while its end is on the way to the kernel.
        let cuts = ends.cuts();
        ends.cut(node, 0);
        ends.stored(node, 10, cuts);
        assert!(!ends.reaches(node, 10));
    }
}
