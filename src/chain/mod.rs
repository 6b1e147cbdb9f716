//! A node of a cluster of several: one leads and runs the programs, the others hold copies and take over (Assise §3.4;
//! `docs/replication.md`).
//!
//! Each node is a daemon with its keeper, as that of a cluster of one is. Its pool begins as a standby; what it does from
//! there on the view of the cluster manager says: [`member`] follows it. The node that leads feeds the others, and says who
//! of them is in sync ([`head`]).

pub mod comparison;
pub mod daemon;
pub mod door;
pub mod growth;
pub mod head;
pub mod links;
pub mod manager;
pub mod member;
pub mod orders;
mod pool_watch;
pub mod settings;
mod step_down;
pub mod told;
pub mod waiting;

use crate::commands::manager::{folder, key_file};
use crate::error::Result;
use crate::making::Made;
use std::path::{Path, PathBuf};

/// Makes what a new cluster of several nodes has beside their folders: a key. What its manager will make is the cluster's, too.
///
/// # Errors
/// The key cannot be made, or is of no use.
pub fn make_files(dir: &Path, made: &mut Made) -> Result<()> {
    let key = key_file(dir);
    if !key.exists() {
        made.file(key.clone());
    }
    crate::key::read_or_make(&key)?;
    if !folder(dir).exists() {
        made.file(folder(dir));
    }
    made.file(manager::log_file(dir));
    Ok(())
}

/// What a cluster of several nodes has beside their folders.
pub fn files(dir: &Path) -> impl Iterator<Item = PathBuf> {
    [key_file(dir), folder(dir)].into_iter().chain(manager::files(dir))
}
