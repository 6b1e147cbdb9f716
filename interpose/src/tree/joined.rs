//! A file that this process opens of a description which other processes use already.

use crate::openings::Place;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vfs::File;
use vfs::file::OpenState;

/// The state of a description that is older than a file of it: what that file comes with does not count.
struct Joined {
    place: Place,
    in_force: Arc<AtomicBool>,
}

impl Joined {
    fn in_force(&self) -> bool {
        self.in_force.load(Ordering::Relaxed)
    }
}

impl OpenState for Joined {
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64)) {
        if self.in_force() { self.place.with_offset(change) } else { change(&mut 0) }
    }

    fn flags(&self) -> i32 {
        self.place.flags()
    }

    fn set_flags(&self, flags: i32) {
        if self.in_force() {
            self.place.set_flags(flags);
        }
    }
}

/// The file of an older description, with its state where other processes see and change it meanwhile.
pub(super) fn joined_with(file: File, place: Place) -> File {
    let in_force = Arc::new(AtomicBool::new(false));
    let file = file.shared(Box::new(Joined { place, in_force: in_force.clone() }), place.owner());
    // Relaxed: the file becomes known to others by a Release.
    in_force.store(true, Ordering::Relaxed);
    file
}
