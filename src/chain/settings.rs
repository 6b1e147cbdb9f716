//! `[chain]` in `hearth.toml`: the settings that the nodes of a cluster of several share.

use crate::error::{Error, Result};
use cluster::{LagBound, Rules};
use format::PoolUid;
use ipc::{Host, SystemHost};
use pmem::Medium;
use serde::{Deserialize, Serialize};
use sharedfs::{Config, Format};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// Nodes of a cluster, at most.
pub const NODES_MAX: u32 = format::cluster::CHAIN_MAX as u32;

/// Data bytes for each node of the tree that a pool has room for: files of one block each still fit.
const DATA_BYTES_PER_NODE: u64 = 16 << 10;
/// The smallest tree.
const TREE_NODES_MIN: u64 = 4096;

/// Lease of a cluster for which none is chosen.
const LEASE_MS: u64 = 1000;
/// How long a copy may keep programs waiting.
const PATIENCE_MS: u64 = 250;
/// How much a copy may lack: a quarter of the largest log of a program, which is sent in a fraction of a second.
const LAG_BYTES: u64 = 16 << 20;
/// How long it may lack more: longer than any pause of a machine that is busy.
const LAG_SECONDS: u64 = 5;
/// How long the disk of a node that leads may not answer: several times the longest flush of a busy disk, which should cost no
/// node the lead, and shorter than the 30 s after which the kernel itself gives a request up.
const DISK_SECONDS: u64 = 10;
/// Nodes on which an fsync has to be.
const MIN_COPIES: u32 = 1;
/// By how many parts in a million a clock may be wrong.
const DRIFT_PPM: u32 = 1000;

/// The settings that the nodes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainSettings {
    /// The node whose pool the others are copies of at first.
    pub founder: u32,
    /// The address of this machine at which nodes reach each other.
    #[serde(default = "loopback")]
    pub address: IpAddr,
    /// How long a node may be silent before another one takes its place, in ms; given to the cluster when it is made.
    #[serde(default = "lease_ms")]
    pub lease_ms: u64,
    /// How long a copy may keep programs waiting before it does not count any more, in ms.
    #[serde(default = "patience_ms")]
    pub patience_ms: u64,
    /// A copy in sync may lack so many bytes of logs for any time, and more for [`Self::lag_seconds`].
    #[serde(default = "lag_bytes")]
    pub lag_bytes: u64,
    /// So long a copy in sync may lack more, unless it gets on by as much.
    #[serde(default = "lag_seconds")]
    pub lag_seconds: u64,
    /// So long an operation on the disk of the node that leads may make no progress before a copy leads in its place; three times as
    /// long if the device completes other requests meanwhile.
    #[serde(default = "disk_seconds")]
    pub disk_seconds: u64,
    /// On how many nodes that hold all that was acknowledged an fsync has to be; it waits while there are fewer.
    #[serde(default = "min_copies")]
    pub min_copies: u32,
    /// How every pool is made.
    pub pools: PoolShape,
}

/// How a pool is made: equal for all that are copies of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolShape {
    /// The largest number of nodes that the tree may ever have.
    pub tree_nodes_max: u32,
    /// Permission bits of the root directory.
    pub root_mode: u32,
    /// Its owner.
    pub root_uid: u32,
    /// Its group.
    pub root_gid: u32,
    /// When it was made, in nanoseconds since 1970.
    pub time_ns: i64,
    /// Bytes of the ledger's file.
    pub ledger_bytes: u64,
}

fn loopback() -> IpAddr {
    Ipv4Addr::LOCALHOST.into()
}

fn lag_bytes() -> u64 {
    LAG_BYTES
}

fn lag_seconds() -> u64 {
    LAG_SECONDS
}

fn disk_seconds() -> u64 {
    DISK_SECONDS
}

fn min_copies() -> u32 {
    MIN_COPIES
}

fn lease_ms() -> u64 {
    LEASE_MS
}

fn patience_ms() -> u64 {
    PATIENCE_MS
}

impl PoolShape {
    /// Of a new pool for so much data.
    ///
    /// # Errors
    /// There cannot be such a pool.
    pub fn new(capacity_bytes: u64) -> Result<Self> {
        let nodes = (capacity_bytes / DATA_BYTES_PER_NODE).max(TREE_NODES_MIN);
        Ok(Self {
            tree_nodes_max: u32::try_from(nodes).map_err(|_| Error::new("the capacity is out of range"))?,
            root_mode: 0o755,
            root_uid: rustix::process::geteuid().as_raw(),
            root_gid: rustix::process::getegid().as_raw(),
            time_ns: SystemHost.wall(),
            ledger_bytes: Config::default().ledger_bytes,
        })
    }

    /// Of a pool that exists.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of_pool(medium: &Medium) -> std::result::Result<Self, sharedfs::Error> {
        let Format { pool: _, tree_nodes_max, root_mode, root_uid, root_gid, time_ns, ledger_bytes } =
            sharedfs::format_of(medium)?;
        Ok(Self { tree_nodes_max, root_mode, root_uid, root_gid, time_ns, ledger_bytes })
    }

    /// How a pool of this shape is made.
    pub fn format(&self, pool: PoolUid) -> Format {
        Format {
            pool,
            tree_nodes_max: self.tree_nodes_max,
            root_mode: self.root_mode,
            root_uid: self.root_uid,
            root_gid: self.root_gid,
            time_ns: self.time_ns,
            ledger_bytes: self.ledger_bytes,
        }
    }
}

impl ChainSettings {
    /// Of a cluster whose pools are made so.
    pub fn new(pools: PoolShape) -> Self {
        let (lease_ms, patience_ms) = (LEASE_MS, PATIENCE_MS);
        let (lag_bytes, lag_seconds) = (LAG_BYTES, LAG_SECONDS);
        Self {
            founder: 1,
            address: loopback(),
            lease_ms,
            patience_ms,
            lag_bytes,
            lag_seconds,
            disk_seconds: DISK_SECONDS,
            min_copies: MIN_COPIES,
            pools,
        }
    }

    /// With these times where they are chosen.
    ///
    /// # Errors
    /// One of them is out of its bounds.
    pub fn with_times(mut self, lease: Option<u64>, patience: Option<u64>) -> Result<Self> {
        self.lease_ms = lease.unwrap_or(self.lease_ms);
        self.patience_ms = patience.unwrap_or(self.patience_ms);
        self.check()?;
        Ok(self)
    }

    /// Refuses settings that cannot work.
    ///
    /// # Errors
    /// One of them is out of its bounds.
    pub fn check(&self) -> Result<()> {
        if self.min_copies == 0 {
            return Err(Error::new(
                "hearth.toml: min_copies = 0 in [chain]: an fsync is on one node at least",
            ));
        }
        if self.lag_seconds == 0 {
            return Err(Error::new(
                "hearth.toml: lag_seconds = 0 in [chain]: no copy could stay in sync under load",
            ));
        }
        if self.disk_seconds == 0 {
            return Err(Error::new(
                "hearth.toml: disk_seconds = 0 in [chain]: no disk answers at once, and no node could lead",
            ));
        }
        if Rules::new(Duration::from_millis(self.lease_ms), DRIFT_PPM).is_none() {
            return Err(Error::new(format!(
                "hearth.toml: lease_ms = {} in [chain] is not between 10 and 3600000",
                self.lease_ms
            )));
        }
        if self.address.is_unspecified() || self.address.is_multicast() {
            return Err(Error::new(format!(
                "hearth.toml: address = \"{}\" in [chain] is no address of one machine",
                self.address
            )));
        }
        Ok(())
    }

    /// Refuses more copies than there are nodes.
    ///
    /// # Errors
    /// No fsync could ever return.
    pub fn check_nodes(&self, nodes: usize) -> Result<()> {
        if self.min_copies as usize > nodes {
            let wanted = self.min_copies;
            return Err(Error::new(format!(
                "hearth.toml: min_copies = {wanted} in [chain], and the cluster has {nodes} nodes: no fsync could return"
            )));
        }
        Ok(())
    }

    /// How slow a copy may be.
    pub fn lag(&self) -> LagBound {
        let time = Duration::from_secs(self.lag_seconds);
        LagBound { bytes: self.lag_bytes, time }
    }

    /// How long the disk of a node that leads may not answer.
    pub fn disk_patience(&self) -> Duration {
        Duration::from_secs(self.disk_seconds)
    }

    /// How long a copy may keep programs waiting.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms)
    }

    /// A node that is silent for so long is no member any more, also if the manager has just started.
    pub fn expulsion(&self) -> Duration {
        Duration::from_millis(self.lease_ms.saturating_mul(2))
    }
}
