//! The table that the ledger's entries make: which logs live, who was entitled to what, from which record on, under
//! which version (Assise §3.3, the replicated lease log; schedules 1.1, 1.3, 1.12).
//!
//! Pure. Guarantees: the table after a restart (tree items of the last flip, then the entries after it) is the table
//! before the crash, as far as the ledger survived; replaying entries that the tree already contains changes
//! nothing. At most one log is entitled to change an inode at any time.

use format::ledger::{Entry, Event};
use format::node::{GrantItem, LogItem};
use format::{Incarnation, InodeNumber, LeaseVersion, LogUid, Sequence, Stamp};
use std::collections::BTreeMap;
use vfs::Caller;
use zerocopy::little_endian::{U32, U64};

/// Right of a grant: the inode may be changed.
pub const RIGHT_WRITE: u32 = 1;
/// Right of a grant: the contents may be written whatever the mode says, because the inode was opened for writing.
pub const RIGHT_CONTENTS: u32 = 2;
/// No right: an inode of the log's own range that was taken away from it.
pub const RIGHT_NONE: u32 = 0;

/// The unit of the lease that renames of directories between directories need: no inode has this number.
pub const RENAME_UNIT: InodeNumber = InodeNumber::new(u64::MAX);

/// A grant to change an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Version of the lease.
    pub version: LeaseVersion,
    /// Records of the log after this one may use it.
    pub from: Sequence,
    /// What the inode had seen.
    pub follow: Stamp,
    /// `RIGHT_*`.
    pub rights: u32,
}

impl Grant {
    /// As an item of the tree.
    pub fn to_item(self) -> GrantItem {
        GrantItem {
            version: U64::new(self.version.get()),
            from: self.from,
            follow: self.follow,
            rights: U32::new(self.rights),
            reserved: U32::new(0),
        }
    }

    /// From an item of the tree.
    pub fn of_item(item: &GrantItem) -> Self {
        Self {
            version: LeaseVersion::new(item.version.get()),
            from: item.from,
            follow: item.follow,
            rights: item.rights.get(),
        }
    }
}

/// A log that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenLog {
    /// Whose it is.
    pub caller: Caller,
    /// First inode of its own range.
    pub first_inode: InodeNumber,
    /// Numbers in the range.
    pub inodes: u64,
    /// Version under which it holds its own range.
    pub version: LeaseVersion,
    /// Life of the log's file.
    pub incarnation: Incarnation,
    /// Grants that live; of the own range also those that ended, with no right.
    grants: BTreeMap<InodeNumber, Grant>,
}

impl OpenLog {
    /// A log that begins.
    pub fn new(caller: Caller, version: LeaseVersion, first_inode: InodeNumber, inodes: u64) -> Self {
        Self {
            caller,
            first_inode,
            inodes,
            version,
            incarnation: Incarnation::new(1),
            grants: BTreeMap::new(),
        }
    }

    /// Whether the number belongs to the log's own range, taken away or not.
    pub fn in_range(&self, inode: InodeNumber) -> bool {
        inode.get().checked_sub(self.first_inode.get()).is_some_and(|index| index < self.inodes)
    }

    /// Whether the log holds the inode because it drew its number, since its creation.
    pub fn is_own(&self, inode: InodeNumber) -> bool {
        self.in_range(inode) && !self.grants.contains_key(&inode)
    }

    /// The grant on an inode outside of the own range (or taken away from it and given back).
    pub fn grant(&self, inode: InodeNumber) -> Option<&Grant> {
        self.grants.get(&inode).filter(|grant| grant.rights != RIGHT_NONE)
    }

    /// The version under which record `sequence` may change the inode; `None` if it may not.
    pub fn entitlement(&self, inode: InodeNumber, sequence: Sequence) -> Option<LeaseVersion> {
        if self.is_own(inode) {
            return Some(self.version);
        }
        let grant = self.grant(inode).filter(|grant| grant.rights & RIGHT_WRITE != 0)?;
        (sequence > grant.from).then_some(grant.version)
    }

    /// Whether the contents may be written whatever the mode says.
    pub fn may_write_contents(&self, inode: InodeNumber) -> bool {
        self.is_own(inode) || self.grant(inode).is_some_and(|grant| grant.rights & RIGHT_CONTENTS != 0)
    }

    /// Number of grants kept, ended ones of the own range included.
    pub fn grants(&self) -> usize {
        self.grants.len()
    }

    /// All grants that live, those of a range that ended not included.
    pub fn living(&self) -> impl Iterator<Item = (InodeNumber, &Grant)> {
        self.grants
            .iter()
            .filter(|(_, grant)| grant.rights != RIGHT_NONE)
            .map(|(inode, grant)| (*inode, grant))
    }

    /// The item that says how far the log is contained in the tree.
    pub fn item(&self, digested: Sequence, position: u64) -> LogItem {
        LogItem {
            digested,
            position: U64::new(position),
            incarnation: self.incarnation,
            uid: U32::new(self.caller.uid),
            gid: U32::new(self.caller.gid),
            groups: U32::new(
                u32::try_from(self.caller.groups.len()).expect("groups were counted at the socket"),
            ),
            first_inode: self.first_inode,
            inodes: U64::new(self.inodes),
        }
    }
}

/// What an entry changes in the tree's items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing: the tree's items say the same before and after.
    Nothing,
    /// The log is put, with its groups.
    Open(LogUid),
    /// The grant is put.
    Grant(LogUid, InodeNumber, Grant),
    /// The grant is removed.
    End(LogUid, InodeNumber),
    /// The log is removed, with groups and grants.
    Close(LogUid),
}

/// Key under which the tree keeps the version of a log's own range among its grants: no inode has this number.
pub const OWN_RANGE_KEY: InodeNumber = InodeNumber::NONE;

/// All logs that live.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    logs: BTreeMap<LogUid, OpenLog>,
}

impl Table {
    /// A log.
    pub fn log(&self, log: LogUid) -> Option<&OpenLog> {
        self.logs.get(&log)
    }

    /// All logs.
    pub fn logs(&self) -> impl Iterator<Item = (LogUid, &OpenLog)> {
        self.logs.iter().map(|(uid, log)| (*uid, log))
    }

    /// Takes what the last flip holds of a log.
    pub fn restore(
        &mut self,
        uid: LogUid,
        item: &LogItem,
        groups: Vec<u32>,
        grants: &[(InodeNumber, GrantItem)],
    ) {
        let caller = Caller { uid: item.uid.get(), gid: item.gid.get(), groups };
        let mut log = OpenLog::new(caller, LeaseVersion::default(), item.first_inode, item.inodes.get());
        log.incarnation = item.incarnation;
        for (inode, grant) in grants {
            let grant = Grant::of_item(grant);
            if *inode == OWN_RANGE_KEY {
                log.version = grant.version;
            } else {
                log.grants.insert(*inode, grant);
            }
        }
        self.logs.insert(uid, log);
    }

    /// Says that a log goes on in a new file.
    pub fn renew(&mut self, uid: LogUid, incarnation: Incarnation) {
        if let Some(log) = self.logs.get_mut(&uid) {
            log.incarnation = incarnation;
        }
    }

    /// Takes one entry, and says what it changes in the tree's items. Entries about logs that are not there, and
    /// entries that were taken before, change nothing.
    pub fn apply(&mut self, entry: &Entry<'_>, version: LeaseVersion) -> Change {
        let uid = entry.log;
        match entry.event {
            Event::Pad | Event::Void { .. } | Event::Cut { .. } => Change::Nothing,
            Event::OpenLog { body, groups } => {
                let groups = groups.iter().map(|group| group.get()).collect();
                let caller = Caller { uid: body.uid.get(), gid: body.gid.get(), groups };
                self.open(uid, OpenLog::new(caller, version, body.first_inode, body.inodes.get()))
            }
            Event::Grant { inode, version, body } => {
                let grant =
                    Grant { version, from: body.from, follow: body.follow, rights: body.rights.get() };
                self.grant(uid, inode, grant)
            }
            Event::End { inode, version, .. } => self.end(uid, inode, version),
            Event::CloseLog { .. } => self.close(uid),
        }
    }

    /// A log begins.
    pub fn open(&mut self, uid: LogUid, log: OpenLog) -> Change {
        // A flip may hold the log's progress before it holds the entry that opened it.
        let known = self.logs.entry(uid).or_insert_with(|| log.clone());
        known.version = log.version;
        Change::Open(uid)
    }

    /// A log may change an inode.
    pub fn grant(&mut self, uid: LogUid, inode: InodeNumber, grant: Grant) -> Change {
        let Some(log) = self.logs.get_mut(&uid) else { return Change::Nothing };
        log.grants.insert(inode, grant);
        Change::Grant(uid, inode, grant)
    }

    /// A log may no longer change an inode.
    pub fn end(&mut self, uid: LogUid, inode: InodeNumber, version: LeaseVersion) -> Change {
        let Some(log) = self.logs.get_mut(&uid) else { return Change::Nothing };
        if log.grants.get(&inode).is_some_and(|grant| grant.version > version) {
            return Change::Nothing;
        }
        if !log.in_range(inode) {
            log.grants.remove(&inode);
            return Change::End(uid, inode);
        }
        let ended =
            Grant { version, from: Sequence::default(), follow: Stamp::default(), rights: RIGHT_NONE };
        log.grants.insert(inode, ended);
        Change::Grant(uid, inode, ended)
    }

    /// A log ends.
    pub fn close(&mut self, uid: LogUid) -> Change {
        self.logs.remove(&uid);
        Change::Close(uid)
    }

    /// What must hold at any time; tests and the simulator call it.
    ///
    /// # Panics
    /// When two logs are entitled to change one inode.
    pub fn assert_invariants(&self) {
        let mut writers = BTreeMap::new();
        for (uid, log) in &self.logs {
            for (inode, _) in log.living() {
                let other = writers.insert(inode, *uid);
                assert!(other.is_none(), "{inode:?} may be changed by {uid:?} and {other:?}");
                let owner = self.logs.iter().find(|(_, owner)| owner.is_own(inode));
                assert!(owner.is_none(), "{inode:?} may be changed by {uid:?} and its own {owner:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogUid = LogUid::new(3);

    fn table() -> Table {
        let mut table = Table::default();
        let log = OpenLog::new(Caller::ROOT, LeaseVersion::new(4), InodeNumber::new(100), 10);
        table.open(LOG, log);
        table
    }

    fn grant(version: u64, from: u64) -> Grant {
        let (version, from) = (LeaseVersion::new(version), Sequence::new(from));
        Grant { version, from, follow: Stamp::default(), rights: RIGHT_WRITE }
    }

    #[test]
    fn records_count_after_their_grant_and_until_its_end() {
        let (mut table, inode) = (table(), InodeNumber::new(7));
        table.grant(LOG, inode, grant(9, 20));
        let entitled =
            |table: &Table, sequence| table.log(LOG).unwrap().entitlement(inode, Sequence::new(sequence));
        assert_eq!(entitled(&table, 20), None);
        assert_eq!(entitled(&table, 21), Some(LeaseVersion::new(9)));
        table.end(LOG, inode, LeaseVersion::new(8));
        assert!(entitled(&table, 21).is_some(), "the end of an older grant ends nothing");
        assert_eq!(table.end(LOG, inode, LeaseVersion::new(9)), Change::End(LOG, inode));
        assert_eq!(entitled(&table, 21), None);
    }

    #[test]
    fn an_own_inode_is_held_from_the_start_and_its_end_is_remembered() {
        let (mut table, inode) = (table(), InodeNumber::new(105));
        assert!(table.log(LOG).unwrap().is_own(inode));
        assert!(!table.log(LOG).unwrap().is_own(InodeNumber::new(110)));
        assert!(matches!(table.end(LOG, inode, LeaseVersion::new(4)), Change::Grant(..)));
        assert_eq!(table.log(LOG).unwrap().entitlement(inode, Sequence::new(5)), None);
        table.grant(LOG, inode, grant(12, 5));
        assert_eq!(table.log(LOG).unwrap().entitlement(inode, Sequence::new(6)), Some(LeaseVersion::new(12)));
        assert!(!table.log(LOG).unwrap().may_write_contents(inode), "what was own is not own any more");
    }
}
