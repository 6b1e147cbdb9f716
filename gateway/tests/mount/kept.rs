//! The number of inodes that the kernel keeps.

use super::{Mount, eventually};
use gateway::Options;
use std::fs;

/// Limit of inodes that the kernel knows.
const INODES_MAX: usize = 1000;

/// Programs use many more files than the kernel may know. It forgets unused ones, so that the memory of the mount is
/// bounded, while open files and working directories stay valid.
#[test]
fn the_kernel_forgets_inodes_beyond_a_number_of_them() {
    let Some(mount) = Mount::with(&Options { inodes_max: INODES_MAX, ..Options::default() }) else { return };
    let folders: Vec<_> = (0..100).map(|number| mount.path(&format!("folder-{number}"))).collect();
    let open: Vec<_> = folders
        .iter()
        .map(|folder| {
            fs::create_dir(folder).unwrap();
            (0..100).for_each(|number| fs::write(folder.join(format!("{number}")), "text").unwrap());
            fs::File::open(folder.join("50")).unwrap()
        })
        .collect();
    for folder in &folders {
        assert_eq!(fs::read_dir(folder).unwrap().count(), 100);
        for number in 0..100 {
            assert_eq!(fs::metadata(folder.join(format!("{number}"))).unwrap().len(), 4);
        }
    }
    let forgets = |kind: &str| mount.mounted.messages().iter().any(|(name, _)| *name == kind);
    if !forgets("FORGET") && !forgets("BATCH_FORGET") {
        println!("skipped: needs a kernel that can be asked to forget inodes (Linux 6.18)");
        return;
    }
    // The kernel's messages about some of them may not have arrived yet.
    eventually("it keeps more than it may", || mount.mounted.inodes().0 <= INODES_MAX + INODES_MAX / 4);
    for (folder, file) in folders.iter().zip(open) {
        assert_eq!(std::io::read_to_string(file).unwrap(), "text");
        assert_eq!(fs::read_to_string(folder.join("99")).unwrap(), "text");
    }
}
