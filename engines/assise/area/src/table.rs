//! The ledger's items in the tree: the entry up to which it is contained, the live logs with their groups and grants,
//! and the lives of the chain. The area keeps these items for SharedFS, which alone knows their meaning.

use crate::AreaError;
use crate::batch::{Batch, Need};
use crate::snapshot::Snapshot;
use format::ledger::{Unit, UnitKind};
use format::node::{GrantItem, ItemKind, Key, LOG_GROUPS_PIECE, LifeItem, LogItem};
use format::root::Root;
use format::{InodeNumber, Life, LogUid, Sequence};
use std::ops::ControlFlow;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// Where the ledger stands in a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerPlace {
    /// The last entry that the tree contains.
    pub sequence: Sequence,
    /// Where in the ledger's ring the entry after it begins.
    pub position: u64,
    /// The life of the chain in which that entry was written, if it does not begin one.
    pub life: Life,
}

impl LedgerPlace {
    /// A root with this place.
    pub(crate) fn in_root(&self, root: Root) -> Root {
        Root {
            ledger_sequence: self.sequence,
            ledger_position: U64::new(self.position),
            life: self.life,
            ..root
        }
    }

    /// The place in a root.
    pub(crate) fn of_root(root: &Root) -> Self {
        Self { sequence: root.ledger_sequence, position: root.ledger_position.get(), life: root.life }
    }
}

/// Kinds of items that hold grants, each with the kind of units that they are on.
const GRANT_ITEMS: [(ItemKind, UnitKind); 4] = [
    (ItemKind::Grant, UnitKind::Inode),
    (ItemKind::RenameGrant, UnitKind::Rename),
    (ItemKind::LocksGrant, UnitKind::Locks),
    (ItemKind::SubtreeGrant, UnitKind::Subtree),
];

fn grant_key(log: LogUid, unit: Unit) -> Key {
    let kind =
        GRANT_ITEMS.iter().find(|(_, kind)| *kind == unit.kind).expect("each kind of unit is listed").0;
    Key::new(log.get(), kind, unit.inode.get())
}

impl Snapshot {
    /// The logs that live.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn logs(&self) -> Result<Vec<(LogUid, LogItem)>, AreaError> {
        let mut found = Vec::new();
        self.view().scan_kind(0, ItemKind::Log, 0, &mut |key, value| {
            let item = LogItem::read_from_bytes(value).map_err(|_| AreaError::Item(*key, "length"))?;
            found.push((LogUid::new(key.sub()), item));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// Supplementary groups of a log's process.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn groups(&self, log: LogUid) -> Result<Vec<u32>, AreaError> {
        let mut groups = Vec::new();
        self.view().scan_kind(log.get(), ItemKind::Log, 0, &mut |key, value| {
            if value.len() % 4 != 0 {
                return Err(AreaError::Item(*key, "length"));
            }
            let group = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("chunks of four bytes"));
            groups.extend(value.chunks_exact(4).map(group));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(groups)
    }

    /// The grants of a log that live.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn grants(&self, log: LogUid) -> Result<Vec<(Unit, GrantItem)>, AreaError> {
        let mut found = Vec::new();
        for (item_kind, kind) in GRANT_ITEMS {
            self.view().scan_kind(log.get(), item_kind, 0, &mut |key, value| {
                let item = GrantItem::read_from_bytes(value).map_err(|_| AreaError::Item(*key, "length"))?;
                found.push((Unit { kind, inode: InodeNumber::new(key.sub()) }, item));
                Ok(ControlFlow::Continue(()))
            })?;
        }
        Ok(found)
    }

    /// The lives of the chain, oldest first; the one that made the pool is not among them.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn lives(&self) -> Result<Vec<(Life, LifeItem)>, AreaError> {
        let mut found = Vec::new();
        self.view().scan_kind(0, ItemKind::Life, 0, &mut |key, value| {
            let item = LifeItem::read_from_bytes(value).map_err(|_| AreaError::Item(*key, "length"))?;
            let life = u32::try_from(key.sub()).map_err(|_| AreaError::Item(*key, "life"))?;
            found.push((Life::new(life), item));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }
}

/// Lives that are forgotten with each new one: more than one, so that a list that is too long becomes shorter.
const LIVES_FORGOTTEN: usize = 2;

impl Batch<'_> {
    /// Notes how far a log is contained in the tree. Its groups stay what they are.
    ///
    /// # Errors
    /// `BatchFull`, `NoSpace`, `Poisoned`, `Node`, `Medium`, as all table changes.
    pub fn put_log(&mut self, log: LogUid, item: &LogItem) -> Result<(), AreaError> {
        self.guarded(|batch| {
            batch.begin_change(1, 1, Need::Promised)?;
            batch.put(Key::new(0, ItemKind::Log, log.get()), item.as_bytes())
        })
    }

    /// Sets the supplementary groups of a log's process.
    ///
    /// # Errors
    /// As [`Batch::put_log`].
    pub fn put_groups(&mut self, log: LogUid, groups: &[u32]) -> Result<(), AreaError> {
        self.guarded(|batch| {
            let pieces = u32::try_from(groups.len().div_ceil(LOG_GROUPS_PIECE)).unwrap_or(u32::MAX);
            batch.begin_change(2, pieces, Need::Promised)?;
            batch.remove_kind(log.get(), ItemKind::Log)?;
            for (piece, groups) in groups.chunks(LOG_GROUPS_PIECE).enumerate() {
                let bytes: Vec<u8> = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
                batch.put(Key::new(log.get(), ItemKind::Log, piece as u64), &bytes)?;
            }
            Ok(())
        })
    }

    /// Takes a log with its groups and grants out of the table.
    ///
    /// # Errors
    /// As [`Batch::put_log`].
    pub fn remove_log(&mut self, log: LogUid) -> Result<(), AreaError> {
        self.guarded(|batch| {
            batch.begin_change(3, 0, Need::Shrinking)?;
            batch.remove(&Key::new(0, ItemKind::Log, log.get()))?;
            batch.remove_kind(log.get(), ItemKind::Log)?;
            for (kind, _) in GRANT_ITEMS {
                batch.remove_kind(log.get(), kind)?;
            }
            Ok(())
        })
    }

    /// Notes a grant that lives.
    ///
    /// # Errors
    /// As [`Batch::put_log`].
    pub fn put_grant(&mut self, log: LogUid, unit: Unit, item: &GrantItem) -> Result<(), AreaError> {
        self.guarded(|batch| {
            batch.begin_change(1, 1, Need::Promised)?;
            batch.put(grant_key(log, unit), item.as_bytes())
        })
    }

    /// Takes a grant out of the table.
    ///
    /// # Errors
    /// As [`Batch::put_log`].
    pub fn remove_grant(&mut self, log: LogUid, unit: Unit) -> Result<(), AreaError> {
        self.guarded(|batch| {
            batch.begin_change(1, 0, Need::Shrinking)?;
            batch.remove(&grant_key(log, unit))?;
            Ok(())
        })
    }

    /// Notes a life of the chain, and forgets old ones: however often a daemon begins, the lives take only so many nodes. A pool
    /// whose last life was forgotten looks like one of another history.
    ///
    /// # Errors
    /// As [`Batch::put_log`].
    pub fn put_life(&mut self, life: Life, item: &LifeItem) -> Result<(), AreaError> {
        self.guarded(|batch| {
            batch.begin_change(1 + LIVES_FORGOTTEN as u32, 1, Need::Promised)?;
            let kept = u64::from(batch.area.limits.lives_max);
            let oldest = batch.keys(0, ItemKind::Life, 0, LIVES_FORGOTTEN)?;
            for key in oldest.iter().filter(|key| key.sub() + kept <= u64::from(life.get())) {
                batch.remove(key)?;
            }
            batch.put(Key::new(0, ItemKind::Life, u64::from(life.get())), item.as_bytes())
        })
    }
}
