//! The effect of a change of attributes on an inode: the same in the area and in the caches of a process.

use crate::node::{InodeItem, PERMISSION_BITS};
use crate::record::{SET_ATIME, SET_GID, SET_MODE, SET_MTIME, SET_UID, SetAttrBody};
use zerocopy::little_endian::U32;

impl InodeItem {
    /// Sets the permission bits, and keeps the type.
    #[inline]
    pub fn set_permissions(&mut self, bits: u32) {
        self.mode = U32::new(self.mode.get() & !PERMISSION_BITS | bits & PERMISSION_BITS);
    }
}

impl SetAttrBody {
    /// Makes the change, but for the time of the change of status.
    pub fn change(&self, item: &mut InodeItem) {
        let mask = self.mask.get();
        if mask & SET_MODE != 0 {
            item.set_permissions(self.mode.get());
        }
        if mask & SET_UID != 0 {
            item.uid = self.uid;
        }
        if mask & SET_GID != 0 {
            item.gid = self.gid;
        }
        if mask & SET_ATIME != 0 {
            item.atime_ns = self.atime_ns;
        }
        if mask & SET_MTIME != 0 {
            item.mtime_ns = self.mtime_ns;
        }
    }
}
