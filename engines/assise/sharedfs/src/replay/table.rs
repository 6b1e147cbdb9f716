//! The table that the ledger's entries make: which logs live, and which log has had a right to which inode, from which
//! record on, under which version (Assise §3.3, the replicated lease log).
//!
//! Pure. Guarantees: the table after a restart (tree items of the last commit, then the entries after it) is the table
//! before the crash, as far as the ledger survived; replaying entries that the tree already contains changes nothing.
//! At most one log has a right to change an inode at any time.

use format::ledger::{
    Entry, Event, GrantMode, LogKind, OpenLogBody, RIGHT_CONTENTS, RIGHT_WRITE, Unit, UnitKind,
};
use format::node::{GrantItem, LifeItem, LogItem};
use format::{Incarnation, InodeNumber, LeaseVersion, Life, LogUid, NodeId, Sequence};
use std::collections::BTreeMap;
use std::sync::Arc;
use vfs::Caller;
use zerocopy::little_endian::{U32, U64};

/// No right: an inode of the log's own range that was taken away from it.
const RIGHT_NONE: u32 = 0;

/// A grant to change a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Version of the lease.
    pub version: LeaseVersion,
    /// Records of the log after this one may use it.
    pub from: Sequence,
    /// `RIGHT_*` of [`format::ledger`].
    pub rights: u32,
}

impl Grant {
    /// As an item of the tree.
    pub fn to_item(self) -> GrantItem {
        GrantItem {
            version: self.version,
            from: self.from,
            rights: U32::new(self.rights),
            mode: GrantMode::Write as u8,
            reserved: [0; 3],
        }
    }

    /// From an item of the tree.
    pub fn of_item(item: &GrantItem) -> Self {
        Self { version: item.version, from: item.from, rights: item.rights.get() }
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
    /// Which file of the log it is: each growth makes another.
    pub incarnation: Incarnation,
    /// Bytes of that file.
    pub file_bytes: u64,
    /// The node that its process runs on.
    pub node: NodeId,
    /// Grants that live; of the own range also those that ended, with no right.
    grants: BTreeMap<Unit, Grant>,
}

impl OpenLog {
    /// A log that begins.
    pub fn new(
        caller: Caller,
        version: LeaseVersion,
        (first_inode, inodes): (InodeNumber, u64),
        file_bytes: u64,
    ) -> Self {
        Self {
            caller,
            first_inode,
            inodes,
            version,
            incarnation: Incarnation::new(1),
            file_bytes,
            node: NodeId::NONE,
            grants: BTreeMap::new(),
        }
    }

    /// The log of an `OpenLog` entry.
    fn of_entry(version: LeaseVersion, body: &OpenLogBody, groups: &[U32]) -> Self {
        let groups = groups.iter().map(|group| group.get()).collect();
        Self {
            caller: Caller { uid: body.uid.get(), gid: body.gid.get(), groups },
            first_inode: body.first_inode,
            inodes: body.inodes.get(),
            version,
            incarnation: body.incarnation,
            file_bytes: body.file_bytes.get(),
            node: body.node,
            grants: BTreeMap::new(),
        }
    }

    /// The log as an `OpenLog` entry, before its groups.
    pub fn to_body(&self, pid: u32) -> OpenLogBody {
        OpenLogBody {
            uid: U32::new(self.caller.uid),
            gid: U32::new(self.caller.gid),
            groups: self.groups(),
            pid: U32::new(pid),
            first_inode: self.first_inode,
            inodes: U64::new(self.inodes),
            file_bytes: U64::new(self.file_bytes),
            incarnation: self.incarnation,
            node: self.node,
            kind: U32::new(LogKind::Update as u32),
            reserved: U32::new(0),
        }
    }

    fn groups(&self) -> U32 {
        U32::new(u32::try_from(self.caller.groups.len()).expect("groups were counted at the socket"))
    }

    /// Whether the number belongs to the log's own range, taken away or not.
    pub fn in_range(&self, inode: InodeNumber) -> bool {
        inode.get().checked_sub(self.first_inode.get()).is_some_and(|index| index < self.inodes)
    }

    /// Whether the log holds the inode because it drew its number, since its creation.
    pub fn is_own(&self, inode: InodeNumber) -> bool {
        self.in_range(inode) && !self.grants.contains_key(&Unit::inode(inode))
    }

    /// The grant on an inode outside of the own range (or taken away from it and given back).
    pub fn grant(&self, inode: InodeNumber) -> Option<&Grant> {
        self.grants.get(&Unit::inode(inode)).filter(|grant| grant.rights != RIGHT_NONE)
    }

    /// Whether record `sequence` may give a directory another parent.
    pub fn may_move_directories(&self, sequence: Sequence) -> bool {
        self.grants.get(&Unit::RENAME).is_some_and(|grant| sequence > grant.from)
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

    /// The item that says how far the log is contained in the tree.
    pub fn item(&self, digested: Sequence, position: u64) -> LogItem {
        LogItem {
            digested,
            position: U64::new(position),
            incarnation: self.incarnation,
            uid: U32::new(self.caller.uid),
            gid: U32::new(self.caller.gid),
            groups: self.groups(),
            first_inode: self.first_inode,
            inodes: U64::new(self.inodes),
            version: self.version,
            file_bytes: U64::new(self.file_bytes),
            node: self.node,
            kind: U32::new(LogKind::Update as u32),
        }
    }
}

/// The change of an entry in the tree's items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing: the tree's items say the same before and after.
    Nothing,
    /// The log is put, with its groups.
    Open(LogUid),
    /// The grant is put.
    Grant(LogUid, Unit, Grant),
    /// The grant is removed.
    End(LogUid, Unit),
    /// The log is removed, with groups and grants.
    Close(LogUid),
    /// The life is put.
    Life(Life, LifeItem),
}

/// All logs that live.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Shared with batches, which judge by a log as it was when they began: it is copied only if it changes beside one.
    logs: BTreeMap<LogUid, Arc<OpenLog>>,
}

impl Table {
    /// A log.
    pub fn log(&self, log: LogUid) -> Option<&OpenLog> {
        self.logs.get(&log).map(|open| &**open)
    }

    /// A log as it is now, whatever changes later.
    pub fn log_now(&self, log: LogUid) -> Option<Arc<OpenLog>> {
        self.logs.get(&log).cloned()
    }

    fn log_mut(&mut self, log: LogUid) -> Option<&mut OpenLog> {
        self.logs.get_mut(&log).map(Arc::make_mut)
    }

    /// All logs.
    pub fn logs(&self) -> impl Iterator<Item = (LogUid, &OpenLog)> {
        self.logs.iter().map(|(uid, log)| (*uid, &**log))
    }

    /// Takes what the last commit holds of a log.
    pub fn restore(&mut self, uid: LogUid, item: &LogItem, groups: Vec<u32>, grants: &[(Unit, GrantItem)]) {
        let log = OpenLog {
            caller: Caller { uid: item.uid.get(), gid: item.gid.get(), groups },
            first_inode: item.first_inode,
            inodes: item.inodes.get(),
            version: item.version,
            incarnation: item.incarnation,
            file_bytes: item.file_bytes.get(),
            node: item.node,
            grants: grants.iter().map(|(unit, grant)| (*unit, Grant::of_item(grant))).collect(),
        };
        self.logs.insert(uid, Arc::new(log));
    }

    /// Takes one entry, and says what it changes in the tree's items. Entries about logs that are not there, and
    /// entries that were taken before, change nothing.
    pub fn apply(&mut self, entry: &Entry<'_>) -> Change {
        let uid = entry.log;
        match entry.event {
            // Their changes of the tree are made when they are executed.
            Event::Pad | Event::Digest { .. } | Event::Reap { .. } => Change::Nothing,
            Event::OpenLog { version, body, groups } => {
                self.open(uid, OpenLog::of_entry(version, &body, groups))
            }
            Event::Grant { unit, version, from, mode: GrantMode::Write, rights } => {
                self.grant(uid, unit, Grant { version, from, rights })
            }
            // A lease for reading gives a log no right.
            Event::Grant { mode: GrantMode::Read, .. } => Change::Nothing,
            Event::End { unit, version, .. } => self.end(uid, unit, version),
            Event::CloseLog { .. } => self.close(uid),
            Event::Life { body } => {
                let (node, epoch, key) = (body.node, body.epoch, body.key);
                Change::Life(body.life, LifeItem { first: entry.sequence, node, epoch, key })
            }
        }
    }

    /// A log begins.
    pub fn open(&mut self, uid: LogUid, log: OpenLog) -> Change {
        self.logs.insert(uid, Arc::new(log));
        Change::Open(uid)
    }

    /// A log may change a unit.
    pub fn grant(&mut self, uid: LogUid, unit: Unit, grant: Grant) -> Change {
        let Some(log) = self.log_mut(uid) else { return Change::Nothing };
        log.grants.insert(unit, grant);
        Change::Grant(uid, unit, grant)
    }

    /// A log may no longer change a unit.
    fn end(&mut self, uid: LogUid, unit: Unit, version: LeaseVersion) -> Change {
        let Some(log) = self.log_mut(uid) else { return Change::Nothing };
        if log.grants.get(&unit).is_some_and(|grant| grant.version > version) {
            return Change::Nothing;
        }
        if unit.kind != UnitKind::Inode || !log.in_range(unit.inode) {
            log.grants.remove(&unit);
            return Change::End(uid, unit);
        }
        let ended = Grant { version, from: Sequence::default(), rights: RIGHT_NONE };
        log.grants.insert(unit, ended);
        Change::Grant(uid, unit, ended)
    }

    /// A log ends.
    fn close(&mut self, uid: LogUid) -> Change {
        self.logs.remove(&uid);
        Change::Close(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogUid = LogUid::new(3);

    fn table() -> Table {
        let mut table = Table::default();
        let range = (InodeNumber::new(100), 10);
        table.open(LOG, OpenLog::new(Caller::ROOT, LeaseVersion::new(4), range, 1 << 20));
        table
    }

    fn grant(version: u64, from: u64) -> Grant {
        let (version, from) = (LeaseVersion::new(version), Sequence::new(from));
        Grant { version, from, rights: RIGHT_WRITE }
    }

    #[test]
    fn a_batch_judges_by_the_log_as_it_was_and_copies_it_only_if_it_changes_beside() {
        let (mut table, unit) = (table(), Unit::inode(InodeNumber::new(7)));
        table.grant(LOG, unit, grant(9, 20));
        let first = table.log_now(LOG).unwrap();
        assert!(Arc::ptr_eq(&first, &table.log_now(LOG).unwrap()), "no copy for a batch");
        drop(first);
        let at = std::ptr::from_ref(table.log(LOG).unwrap());
        table.end(LOG, unit, LeaseVersion::new(9));
        assert_eq!(at, std::ptr::from_ref(table.log(LOG).unwrap()), "none for a change either");
        let before = table.log_now(LOG).unwrap();
        table.grant(LOG, unit, grant(10, 30));
        assert!(before.grant(unit.inode).is_none() && table.log(LOG).unwrap().grant(unit.inode).is_some());
    }

    #[test]
    fn records_count_after_their_grant_and_until_its_end() {
        let (mut table, inode) = (table(), InodeNumber::new(7));
        let unit = Unit::inode(inode);
        table.grant(LOG, unit, grant(9, 20));
        let entitled =
            |table: &Table, sequence| table.log(LOG).unwrap().entitlement(inode, Sequence::new(sequence));
        assert_eq!(entitled(&table, 20), None);
        assert_eq!(entitled(&table, 21), Some(LeaseVersion::new(9)));
        table.end(LOG, unit, LeaseVersion::new(8));
        assert!(entitled(&table, 21).is_some(), "the end of an older grant ends nothing");
        assert_eq!(table.end(LOG, unit, LeaseVersion::new(9)), Change::End(LOG, unit));
        assert_eq!(entitled(&table, 21), None);
    }

    #[test]
    fn units_of_one_inode_are_granted_apart() {
        let (mut table, inode) = (table(), InodeNumber::new(7));
        table.grant(LOG, Unit { kind: UnitKind::Locks, inode }, grant(9, 20));
        assert_eq!(table.log(LOG).unwrap().entitlement(inode, Sequence::new(21)), None);
        assert!(!table.log(LOG).unwrap().may_move_directories(Sequence::new(21)));
        table.grant(LOG, Unit::RENAME, grant(10, 20));
        assert!(table.log(LOG).unwrap().may_move_directories(Sequence::new(21)));
        assert!(!table.log(LOG).unwrap().may_move_directories(Sequence::new(20)));
    }

    #[test]
    fn an_own_inode_is_held_from_the_start_and_its_end_is_remembered() {
        let (mut table, inode) = (table(), InodeNumber::new(105));
        let unit = Unit::inode(inode);
        assert!(table.log(LOG).unwrap().is_own(inode));
        assert!(!table.log(LOG).unwrap().is_own(InodeNumber::new(110)));
        assert!(matches!(table.end(LOG, unit, LeaseVersion::new(4)), Change::Grant(..)));
        assert_eq!(table.log(LOG).unwrap().entitlement(inode, Sequence::new(5)), None);
        table.grant(LOG, unit, grant(12, 5));
        assert_eq!(table.log(LOG).unwrap().entitlement(inode, Sequence::new(6)), Some(LeaseVersion::new(12)));
        assert!(!table.log(LOG).unwrap().may_write_contents(inode), "what was own is not own any more");
    }
}
