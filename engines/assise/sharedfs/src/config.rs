//! Limits and times, as plain data: a test makes them tiny.

use crate::error::Error;
use area::Limits as AreaLimits;
use ccnvm::LockLimits;
use format::NodeId;
use format::superblock::OWNER_DAEMON;
use ipc::ring::RingLimits;
use mirror::logs::LOG_BYTES_MAX;
use std::time::Duration;

/// Settings of a daemon.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How long a LibFS may stay inside an operation before a lease is taken by force: its log is sealed then.
    pub grace: Duration,
    /// The same for a process of which a thread runs or waits for a processor: a busy machine ends no session early. At least
    /// `grace`.
    pub grace_starved: Duration,
    /// How long a session that is asked for a lease, and must answer, may give no sign that it is about it.
    pub recall_patience: Duration,
    /// A lease is not asked back earlier than this after it was granted.
    pub hold_min: Duration,
    /// Bytes of the log that a session begins with, superblock included.
    pub log_bytes: u64,
    /// The largest that a log grows to.
    pub log_bytes_max: u64,
    /// Empty logs that are kept ready for sessions to come.
    pub ready_logs: usize,
    /// Bytes of the ledger's file.
    pub ledger_bytes: u64,
    /// Inode numbers that a session may give out.
    pub own_range: u64,
    /// Blocks of room that a session begins with.
    pub room_blocks: u64,
    /// Blocks never promised: for copy-on-write and what only removes.
    pub room_reserve: u64,
    /// Further blocks that are promised only for records that replace blocks, at most; see [`Self::replace_reserve`].
    pub replace_reserve_max: u64,
    /// Bytes that a pool holds on its medium beyond those that back reservations, at most; see [`Self::held_spare`].
    pub held_spare_max: u64,
    /// Lease words of a session: leases that it may hold beside its own range.
    pub lease_words: u32,
    /// Inodes that are remembered as met by a session; beyond it those without a lease or reference are forgotten.
    pub known_max: usize,
    /// Open references of a session.
    pub references_max: usize,
    /// Locks on one file, requests that wait for locks, and owners of locks, at once.
    pub locks_max: usize,
    /// When a program decides about locks on a file by itself.
    pub lock_limits: LockLimits,
    /// Sessions at once.
    pub sessions_max: usize,
    /// Greetings that are being answered at once; others wait.
    pub greetings_max: usize,
    /// Records in one batch of a digest.
    pub batch_records: usize,
    /// Bytes of records in one batch of a digest; one larger record makes a batch of its own.
    pub batch_bytes: usize,
    /// Changes of the ledger's table in one commit.
    pub batch_changes: usize,
    /// Items of an inode without a name that are removed in one commit.
    pub reap_items: usize,
    /// Leaves of the tree that may have changed since they were sent to a member that joins, before what still changes is held
    /// back until it is there.
    pub join_leaves: usize,
    /// The same for blocks of data.
    pub join_blocks: u64,
    /// A log with records that were not digested for so long is digested, full or not.
    pub idle_digest: Duration,
    /// Shape of the request rings.
    pub ring: RingLimits,
    /// How long a server thread polls before it sleeps, at most.
    pub spin_ns: u32,
    /// How long a daemon that starts waits for the pool, which one that dies holds until the kernel is done with it.
    pub lock_patience: Duration,
    /// The daemon's user. Its processes, like root's, may use every inode by its number: they could read all of the pool.
    pub trusted_uid: u32,
    /// The node's number in its cluster.
    pub node: NodeId,
    /// Limits of the shared area.
    pub area: AreaLimits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            grace: Duration::from_millis(100),
            grace_starved: Duration::from_secs(1),
            recall_patience: Duration::from_secs(5),
            hold_min: Duration::from_micros(200),
            log_bytes: 1 << 20,
            log_bytes_max: 64 << 20,
            ready_logs: 2,
            ledger_bytes: 4 << 20,
            own_range: 1 << 20,
            // Most programs write little, or nothing, and many run at once.
            room_blocks: 1 << 8,
            room_reserve: 1 << 10,
            replace_reserve_max: 1 << 9,
            held_spare_max: 64 << 20,
            lease_words: 1 << 16,
            known_max: 1 << 18,
            references_max: 1 << 16,
            locks_max: 1 << 14,
            lock_limits: LockLimits::default(),
            sessions_max: 1 << 10,
            greetings_max: 1 << 6,
            batch_records: 16384,
            batch_bytes: 64 << 20,
            batch_changes: 1024,
            reap_items: 1024,
            join_leaves: 128,
            join_blocks: 8 << 10,
            idle_digest: Duration::from_secs(1),
            ring: RingLimits::DEFAULT,
            spin_ns: 50_000,
            lock_patience: Duration::from_secs(10),
            trusted_uid: OWNER_DAEMON,
            node: NodeId::new(1),
            area: AreaLimits::default(),
        }
    }
}

/// The smallest log or ledger: a superblock and a ring of one block.
const FILE_BYTES_MIN: u64 = 2 * format::BLOCK_BYTES as u64;

/// At most this part of the capacity is left by all records except those that replace blocks.
const REPLACE_RESERVE_PART: u64 = 64;

/// At most this part of the capacity is held as spare.
const HELD_SPARE_PART: u64 = 4;

impl Config {
    /// Blocks that are promised only for records that replace blocks.
    pub fn replace_reserve(&self) -> u64 {
        self.replace_reserve_max.min(self.area.capacity_blocks / REPLACE_RESERVE_PART)
    }

    /// Bytes that a pool holds beyond those that back reservations, while no program writes.
    pub fn held_spare(&self) -> u64 {
        let capacity = self.area.capacity_blocks.saturating_mul(format::BLOCK_BYTES as u64);
        self.held_spare_max.min(capacity / HELD_SPARE_PART)
    }

    /// # Errors
    /// `Settings`.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let fits = [
            ("log_bytes", (FILE_BYTES_MIN..=self.log_bytes_max).contains(&self.log_bytes)),
            ("log_bytes_max", self.log_bytes_max <= LOG_BYTES_MAX),
            ("ledger_bytes", self.ledger_bytes >= FILE_BYTES_MIN),
            ("own_range", self.own_range > 0),
            ("lease_words", self.lease_words > 0 && self.lease_words < u32::MAX),
            ("greetings_max", self.greetings_max > 0),
            ("known_max", self.known_max > 0),
            ("batch_records", self.batch_records > 0),
            ("batch_changes", self.batch_changes > 0),
            ("reap_items", self.reap_items > 0),
        ];
        match fits.iter().find(|(_, fits)| !fits) {
            Some((what, _)) => Err(Error::Settings(what)),
            None => Ok(()),
        }
    }
}
