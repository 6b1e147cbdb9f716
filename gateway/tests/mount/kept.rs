//! How much the kernel keeps.

use super::{Mount, eventually};
use gateway::Options;
use std::fs;

/// Inodes that the kernel may know.
const INODES_MAX: usize = 1000;

/// Programs look at many more files than the kernel may know: it forgets those that nobody uses, so that what the mount keeps of
/// each is bounded, and what is open or somebody's working directory stays what it was.
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
    // Some were asked for and are on their way.
    eventually("it keeps more than it may", || mount.mounted.inodes().0 <= INODES_MAX + INODES_MAX / 4);
    for (folder, file) in folders.iter().zip(open) {
        assert_eq!(std::io::read_to_string(file).unwrap(), "text");
        assert_eq!(fs::read_to_string(folder.join("99")).unwrap(), "text");
    }
}
