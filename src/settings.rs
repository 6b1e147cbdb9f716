//! `hearth.toml`: the settings with which the cluster was made. Paths within the cluster's folder are not written down
//! or relative to it, so that it can be moved and copied; earlier files have them absolute, and are read as if they had
//! not. Only two things may be elsewhere: a pool in memory, and a socket whose path would be too long.

use crate::chain::settings::ChainSettings;
use crate::cluster::{MediumKind, Node, fingerprint, pool_within, socket_path};
use crate::error::{Error, Result};
use crate::limits::Limits;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Written {
    /// Medium of all pools.
    pub medium: MediumKind,
    /// Data that a pool may hold, in bytes.
    pub capacity_bytes: u64,
    /// Whether its nodes are mounted when they start, if they may be.
    #[serde(default = "mounted_unless_chosen", skip_serializing_if = "Clone::clone")]
    pub mount: bool,
    /// Bounds, if any was chosen.
    #[serde(default, skip_serializing_if = "Limits::is_default")]
    pub limits: Limits,
    /// The settings that several nodes share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainSettings>,
    /// The nodes.
    pub nodes: Vec<WrittenNode>,
}

fn mounted_unless_chosen() -> bool {
    true
}

/// One node.
#[derive(Debug, Serialize, Deserialize)]
pub struct WrittenNode {
    number: u32,
    pool: PathBuf,
    /// For a pool elsewhere: the node's folder for which it was made, which is another one in a copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    made_for: Option<Identity>,
    /// Only if it lies elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
}

/// Tells a folder from a copy of it, and stays when it is moved.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(folder: &Path) -> Result<Self> {
        let found = fs::metadata(folder).map_err(Error::at("look at", folder))?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }
}

impl WrittenNode {
    /// How a node is written down.
    ///
    /// # Errors
    /// Its folder cannot be looked at.
    pub fn of(dir: &Path, node: &Node) -> Result<Self> {
        let folder = dir.join(format!("node-{}", node.number));
        let within = node.pool.strip_prefix(dir);
        let elsewhere = within.is_err().then(|| Identity::of(&folder)).transpose()?;
        Ok(Self {
            number: node.number,
            pool: within.unwrap_or(&node.pool).to_owned(),
            made_for: elsewhere,
            socket: (!node.socket.starts_with(dir)).then(|| node.socket.clone()),
        })
    }

    /// The node in a folder that may have been moved or copied since.
    ///
    /// # Errors
    /// Its pool is another cluster's.
    pub fn node(&self, dir: &Path) -> Result<Node> {
        let folder = dir.join(format!("node-{}", self.number));
        Ok(Node { number: self.number, pool: self.pool(dir, &folder)?, socket: self.socket(&folder) })
    }

    fn pool(&self, dir: &Path, folder: &Path) -> Result<PathBuf> {
        if self.pool.is_relative() {
            return Ok(dir.join(&self.pool));
        }
        let here = pool_within(folder);
        if self.pool.ends_with(here.strip_prefix(dir).unwrap_or(&here)) {
            return Ok(here);
        }
        // If it is gone, that is the error to report.
        if !self.pool.exists() {
            return Ok(self.pool.clone());
        }
        let own = match &self.made_for {
            Some(identity) => *identity == Identity::of(folder)?,
            None => named_for(&self.pool, folder),
        };
        if own {
            return Ok(self.pool.clone());
        }
        Err(Error::new(format!(
            "{} is a copy of a cluster whose pool in memory was not copied with it: {} is the original's (what was \
             moved here from another file system has to go back there; a copy can be removed)",
            dir.display(),
            self.pool.display()
        )))
    }

    fn socket(&self, folder: &Path) -> PathBuf {
        let elsewhere = self.socket.as_deref().filter(|socket| {
            socket.is_absolute() && socket.parent().is_some_and(|private| named_for(private, folder))
        });
        elsewhere.map_or_else(|| socket_path(folder), Path::to_owned)
    }
}

/// Whether a folder elsewhere has its name from a node's folder.
fn named_for(elsewhere: &Path, folder: &Path) -> bool {
    let end = format!("-{:016x}", fingerprint(folder));
    elsewhere.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(&end))
}
