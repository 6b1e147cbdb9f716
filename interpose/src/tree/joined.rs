//! A file that this process opens for an open file description that other processes already use.

use crate::slots::FileSlot;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vfs::File;
use vfs::file::OpenState;

/// The state of such a description. Until the file is complete, its initial offset and flags must not change the shared
/// state.
struct Joined {
    slot: FileSlot,
    in_force: Arc<AtomicBool>,
}

impl Joined {
    fn in_force(&self) -> bool {
        self.in_force.load(Ordering::Relaxed)
    }
}

impl OpenState for Joined {
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64)) {
        if self.in_force() { self.slot.with_offset(change) } else { change(&mut 0) }
    }

    fn flags(&self) -> i32 {
        self.slot.flags()
    }

    fn set_flags(&self, flags: i32) {
        if self.in_force() {
            self.slot.set_flags(flags);
        }
    }
}

/// Connects a new file with the shared state of its description, which other processes see and change.
pub(super) fn joined_with(file: File, slot: FileSlot) -> File {
    let in_force = Arc::new(AtomicBool::new(false));
    let file = file.shared(Box::new(Joined { slot, in_force: in_force.clone() }), slot.owner());
    // Relaxed: a later Release publishes the file to other threads.
    in_force.store(true, Ordering::Relaxed);
    file
}
