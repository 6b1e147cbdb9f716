//! The ends of files as the kernel knows them.
//!
//! A read beyond the end that the kernel knows first asks for attributes (GETATTR with the open file). The kernel ignores
//! the size in the answer if a notification about the inode, or an answer to another thread, arrived meanwhile, or if
//! another program is extending the file. The read would then stop at the old end, although bytes after it were written
//! long before. For the same reason the kernel may still have the old end after an open, or after a program was told the
//! size of the file (GETATTR without an open file), and then an access to a mapping behind that end is a SIGBUS. So the
//! gateway stores the last byte of the file into the kernel's pages before it answers such a request, for files that are
//! open: this extends the file at once, whatever happens to the answer. A file that became shorter needs no such step,
//! because the answer to the READ shows its end.
//!
//! A kernel that takes a larger size from an answer clears its page behind that size, and may be late: by then the page may have
//! been read with bytes there, because the file has grown further. So of an open file it takes a larger size from no answer. It
//! ignores the one in the answer to a LOOKUP, because it is told before to drop the attributes.

use crate::gateway::Gateway;
use crate::pages::PAGE_BYTES;
use crate::recalls::Repair;
use crate::reply::Reply;
use format::InodeNumber;
use format::record::FileType;
use ipc::{Host, Lock};
use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::sync::Arc;
use vfs::engine::{Access, Attributes, Handle, Target};
use vfs::{Caller, Error, LeaseMode};

#[derive(Default)]
struct EndsState {
    ends: BTreeMap<InodeNumber, u64>,
    cuts: u64,
}

/// Lower bounds of the ends that the kernel knows.
pub(crate) struct Ends(Lock<EndsState>);

impl Ends {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self(Lock::new(host, EndsState::default()))
    }

    /// Whether the kernel knows that the file ends at `end` or later.
    pub(crate) fn reaches(&self, node: InodeNumber, end: u64) -> bool {
        end == 0 || self.0.lock().ends.get(&node).is_some_and(|known| *known >= end)
    }

    /// Whether the kernel knows the last page of a file that ends there.
    pub(crate) fn reaches_page(&self, node: InodeNumber, end: u64) -> bool {
        self.reaches(node, end.div_ceil(PAGE_BYTES).saturating_sub(1) * PAGE_BYTES + u64::from(end > 0))
    }

    /// The kernel gets this end of the file in an answer; 0 if it has forgotten the file.
    pub(crate) fn end_at(&self, node: InodeNumber, end: u64) {
        let mut state = self.0.lock();
        if state.ends.get(&node).is_some_and(|known| *known > end) {
            state.ends.remove(&node);
            state.cuts += 1;
        }
    }

    /// A program of the mount truncates a file.
    pub(crate) fn cut(&self, node: InodeNumber, end: u64) {
        self.0.lock().cuts += 1;
        self.end_at(node, end);
    }

    pub(crate) fn cuts(&self) -> u64 {
        self.0.lock().cuts
    }

    /// The kernel has this end, or gets it in an answer that it does not ignore; not noted if a file was truncated since
    /// `cuts` was read.
    pub(crate) fn known(&self, node: InodeNumber, end: u64, cuts: u64) {
        let mut state = self.0.lock();
        // The end 0 is known of each file, and `end_at` would not remove it.
        if state.cuts == cuts && end > 0 {
            let known = state.ends.entry(node).or_insert(0);
            *known = end.max(*known);
        }
    }
}

impl Gateway {
    /// A program of the mount has truncated a file.
    pub(crate) fn is_cut(&self, node: InodeNumber, end: u64) {
        self.ends.cut(node, end);
        self.units.cut(node, end);
    }

    /// Makes sure that the kernel knows the last page of a file that is being opened and may be mapped. If the engine
    /// fails, the requests that follow fail too.
    pub(crate) fn tell_end(&self, handle: Handle, attributes: &Attributes, reply: &mut Reply) {
        let Attributes { inode, file_type: FileType::Regular, .. } = *attributes else { return };
        let knows = |size: u64| self.ends.reaches_page(inode, size);
        if !self.caches || attributes.size == 0 || !self.nodes.knows(inode) || knows(attributes.size) {
            return;
        }
        let Ok(stay) = self.units.enter_pages(inode, LeaseMode::Read) else { return };
        reply.stays(stay);
        if let Ok(Attributes { size, .. }) = self.engine.getattr(Target::Open(handle))
            && !knows(size)
        {
            let _ = self.store_end(inode, handle, size);
        }
    }

    /// The kernel is about to get these attributes of a file that it knows in the answer for a name. If the file is open, and longer
    /// than the kernel knows, it has to ignore them.
    pub(crate) fn keep_from_growing(&self, attributes: &Attributes) {
        let Attributes { inode, size, file_type: FileType::Regular, .. } = *attributes else { return };
        if self.caches && !self.ends.reaches(inode, size) && self.files.any_of(inode).is_some() {
            // Waits for no page.
            let _ = self.notices.drop_attributes(inode.get());
        }
    }

    /// Makes sure that the kernel does not expect the file to end before `end`. The caller holds a lease, so that
    /// programs elsewhere do not change the file meanwhile.
    pub(crate) fn store_end(&self, node: InodeNumber, handle: Handle, end: u64) -> Result<(), Error> {
        let Some(at) = end.checked_sub(1).filter(|_| !self.ends.reaches(node, end)) else { return Ok(()) };
        let cuts = self.ends.cuts();
        let mut byte = [0];
        let own = match self.engine.read(handle, at, &mut [IoSliceMut::new(&mut byte)]) {
            Err(Error::BadDescriptor) => match self.open_to_read(node) {
                Some(own) => Some(own),
                // The kernel accepts the size in the answer if no notification comes before it.
                None => return Ok(()),
            },
            read => read.map(|_| None)?,
        };
        // The kernel may know this end, which the gateway cannot see, and a mapping may have changed the byte: then it is
        // written back first.
        let from = at - at % PAGE_BYTES;
        self.repair(Repair::Moved { node, from, last: None });
        let bytes = self.engine.read(own.unwrap_or(handle), at, &mut [IoSliceMut::new(&mut byte)]);
        let bytes = match own {
            Some(own) => {
                self.engine.close(own);
                // The program itself reads nothing.
                bytes.unwrap_or(0)
            }
            None => bytes?,
        };
        if bytes == 1 && self.repair(Repair::Longer { node, at, byte: byte[0] }) {
            self.ends.known(node, end, cuts);
        }
        Ok(())
    }

    /// A handle of the gateway's own for a file that programs have open for writing only.
    fn open_to_read(&self, node: InodeNumber) -> Option<Handle> {
        let access = Access { read: true, write: false };
        self.engine.open(&Caller::ROOT, node, access, false).ok().map(|(handle, _)| handle)
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
        ends.known(node, 10, ends.cuts());
        ends.end_at(node, 10);
        assert!(ends.reaches(node, 9) && ends.reaches(node, 10) && !ends.reaches(node, 11));
        ends.end_at(node, 9);
        assert!(!ends.reaches(node, 9) && ends.reaches(node, 0));
        // A program truncates the file while its end is being sent to the kernel.
        let cuts = ends.cuts();
        ends.cut(node, 0);
        ends.known(node, 10, cuts);
        assert!(!ends.reaches(node, 10));
        // Nothing is kept of a file that the kernel has forgotten, whatever its size was.
        for end in [0, 5] {
            ends.known(node, end, ends.cuts());
            ends.end_at(node, 0);
            assert!(ends.0.lock().ends.is_empty());
        }
    }
}
