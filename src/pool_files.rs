//! The files in a pool's folder, as a command looks at them before it opens the pool.

use crate::error::{Error, Result};
use pmem::held::HELD_FILE;
use std::path::Path;

/// The ledger's file.
pub const LEDGER: &str = "ledger";
/// The file of the shared area.
pub const TREE: &str = "tree";
/// The file that a process of the pool locks.
const LOCK: &str = "lock";

/// Whether a folder has, or had, a pool.
pub fn are_in(folder: &Path) -> bool {
    [LEDGER, TREE, LOCK].iter().any(|name| folder.join(name).exists())
}

/// Checks that no folder stands in the place of a file, whose error would not name it.
///
/// # Errors
/// The name.
pub fn check(pool: &Path) -> Result<()> {
    let is_own = |name: &str| {
        [LEDGER, TREE, LOCK, HELD_FILE].contains(&name)
            || name.starts_with("log-")
            || name.starts_with("register-")
    };
    let entries = std::fs::read_dir(pool).into_iter().flatten().flatten();
    let mut own = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_own));
    match own.find(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        Some(entry) => {
            let path = entry.path();
            Err(Error::new(format!("{} is a folder, in the place of a file of the pool", path.display())))
        }
        None => Ok(()),
    }
}
