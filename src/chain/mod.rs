//! A node of a cluster of several: one leads and runs the programs, the others hold copies and take over (Assise §3.4;
//! `docs/replication.md`).
//!
//! Each node is a daemon with its keeper, like that of a cluster of one. Its pool begins as a standby; from there on
//! the view of the cluster manager decides what it does: [`member`] follows the view. The node that leads sends records
//! to the others, and decides which of them are in sync ([`head`]).

pub mod comparison;
pub mod daemon;
mod ending;
mod failed;
mod given_up;
pub mod growth;
pub mod head;
mod hung_disk;
mod last_copy;
pub mod links;
pub mod manager;
pub mod member;
pub mod orders;
mod owner;
mod pool_watch;
pub mod remedy;
mod report;
pub mod settings;
pub mod standby_listener;
mod step_down;
pub mod told;
pub mod waiting;

use crate::commands::manager::{folder, key_file};
use crate::error::Result;
use crate::making::CreatedFiles;
use std::path::{Path, PathBuf};

/// Makes the files of a new cluster of several nodes beside their folders: a key. Files that its manager will make
/// belong to the cluster, too.
///
/// # Errors
/// The key cannot be made, or is of no use.
pub fn make_files(dir: &Path, made: &mut CreatedFiles) -> Result<()> {
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

/// The files of a cluster of several nodes beside their folders.
pub fn files(dir: &Path) -> impl Iterator<Item = PathBuf> {
    [key_file(dir), folder(dir)].into_iter().chain(manager::files(dir))
}
