//! Compares the tree of a copy with that of the head while programs go on (`docs/replication.md`, comparison of two
//! copies).
//!
//! Guarantees: a difference is one of the trees as of one entry of the ledger, and never the effect of a concurrent
//! write. No fsync waits. The copy executes nothing from the moment it is asked until it has the entry: at most 5
//! seconds, and no longer than the connection lasts. A copy that cannot keep its tree because it runs out of space ends
//! the comparison.

use crate::error::Error;
use crate::ledger::position_of;
use crate::pinned::Pinned;
use crate::state::Core;
use crate::sums::Sums;
use area::Snapshot;
use format::mirror::{MirrorSum, SUM_DAMAGED};
use format::node::{EntryItem, ItemKind, Key};
use format::{InodeNumber, NodeId, Sequence};
use mirror::Comparison;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;
use transport::Connection;
use zerocopy::FromBytes;

/// How long the copy may take to stop, and to hear at which entry.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the copy may take to compute one message of checksums: a large file takes long. A copy that has died ends
/// the connection.
const READING: Duration = Duration::from_secs(3600);
/// Differences that are described.
const DESCRIBED_MAX: usize = 1000;
/// Items that are read at once in search of names.
const ITEMS_AT_ONCE: usize = 256;
/// Progress is reported after so many inodes.
const TOLD_AFTER: u64 = 256;

/// In which way an inode differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unequal {
    /// The copy does not have it.
    OnlyAtHead,
    /// The head does not have it.
    OnlyAtCopy,
    /// Owner, mode, size, times, number of names, or the like.
    Attributes,
    /// Bytes of a file, entries of a directory, the target of a symbolic link.
    Contents,
    /// Extended attributes.
    Xattrs,
    /// A block of the file differs from its checksum at the head.
    DamagedAtHead,
    /// A block of the file differs from its checksum at the copy.
    DamagedAtCopy,
}

/// An inode that is not equal at both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The inode.
    pub inode: InodeNumber,
    /// One of its paths below the root of the tree, as the head has it; `None` if the head does not have it.
    pub path: Option<PathBuf>,
    /// The kinds of difference.
    pub unequal: Vec<Unequal>,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// The entry of the ledger as of which the trees were compared.
    pub entry: Sequence,
    /// Inodes that the head has.
    pub inodes: u64,
    /// Inodes that differ.
    pub unequal: u64,
    /// The first of these.
    pub differences: Vec<Difference>,
}

/// The comparison of two lists of checksums, both in the order of the inodes.
struct Comparing<'a> {
    told: &'a mut dyn FnMut(u64, u64),
    total: u64,
    inodes: u64,
    unequal: u64,
    found: Vec<(InodeNumber, Vec<Unequal>)>,
}

impl Core {
    /// Compares the tree with that of a copy, over a connection of its own; reports from time to time how many of how
    /// many inodes were compared.
    ///
    /// # Errors
    /// `Copy`, `NoRoomToSend`, `Stopped`; `Area`.
    pub fn compare(&self, connection: Connection, told: &mut dyn FnMut(u64, u64)) -> Result<Compared, Error> {
        let node = connection.node();
        let of_copy = |error| Error::Copy(node, error);
        // Records that programs have committed until now are compared, too.
        let written: Vec<_> = {
            let state = self.state.lock();
            state.sessions.iter().map(|(id, session)| (*id, session.shared.committed())).collect()
        };
        for (id, up_to) in written {
            self.digest(id, up_to)?;
        }
        let until = self.host.now().after(PATIENCE);
        let terms = (self.copies.version(), self.state.lock().copy.ledger.region().bytes());
        let (mut comparison, held) = Comparison::ask(connection, terms, until).map_err(of_copy)?;
        let pinned = {
            let mut area = self.area_for_other();
            drop(self.contain_all(&mut area)?);
            Pinned::of(&mut area)
        };
        let place = position_of(&pinned.snapshot.ledger());
        if place.sequence < held {
            return Err(of_copy(mirror::Error::Broken("a copy that executed more than the head")));
        }
        comparison.compare_at(&place, until).map_err(of_copy)?;
        // Possibly no other call needed the copies to have this entry.
        self.announce_work();
        let compared = self.compare_sums(node, &pinned, &mut comparison, told);
        let compared = compared.and_then(|comparing| {
            let names = Names::of(&pinned.snapshot, comparing.found.iter().map(|(inode, _)| *inode));
            let names = self.kept(node, &pinned, names)?;
            let described = comparing.found.into_iter().map(|(inode, unequal)| Difference {
                path: names.path_of(inode),
                inode,
                unequal,
            });
            Ok(Compared {
                entry: place.sequence,
                inodes: comparing.inodes,
                unequal: comparing.unequal,
                differences: described.collect(),
            })
        });
        drop(pinned);
        self.release_pinned()?;
        compared
    }

    fn compare_sums<'a>(
        &self,
        node: NodeId,
        pinned: &Pinned,
        comparison: &mut Comparison,
        told: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Comparing<'a>, Error> {
        let total = pinned.snapshot.totals().0;
        let mut comparing = Comparing { told, total, inodes: 0, unequal: 0, found: Vec::new() };
        let mut sums = Sums::of(&pinned.snapshot);
        let mut own = self.kept(node, pinned, sums.next_sum())?;
        loop {
            let theirs = comparison.next_sums(self.host.now().after(READING));
            let Some(theirs) = theirs.map_err(|error| Error::Copy(node, error))? else { break };
            for their in &theirs {
                while own.is_some_and(|own| own.inode < their.inode) {
                    comparing.compare(own.as_ref(), None);
                    own = self.kept(node, pinned, sums.next_sum())?;
                }
                let same = own.filter(|own| own.inode == their.inode);
                comparing.compare(same.as_ref(), Some(their));
                if same.is_some() {
                    own = self.kept(node, pinned, sums.next_sum())?;
                }
            }
        }
        while own.is_some() {
            comparing.compare(own.as_ref(), None);
            own = self.kept(node, pinned, sums.next_sum())?;
        }
        (comparing.told)(comparing.inodes, comparing.inodes);
        Ok(comparing)
    }
}

impl Comparing<'_> {
    fn compare(&mut self, own: Option<&MirrorSum>, their: Option<&MirrorSum>) {
        let Some(inode) = own.or(their).map(|sum| sum.inode) else { return };
        if own.is_some() {
            self.inodes += 1;
            if self.inodes.is_multiple_of(TOLD_AFTER) {
                (self.told)(self.inodes, self.total.max(self.inodes));
            }
        }
        let unequal = unequal(own, their);
        if unequal.is_empty() {
            return;
        }
        self.unequal += 1;
        if self.found.len() < DESCRIBED_MAX {
            self.found.push((inode, unequal));
        }
    }
}

fn unequal(own: Option<&MirrorSum>, their: Option<&MirrorSum>) -> Vec<Unequal> {
    let is_damaged = |sum: Option<&MirrorSum>| sum.is_some_and(|sum| sum.flags.get() & SUM_DAMAGED != 0);
    let differs = |part: fn(&MirrorSum) -> u64| match (own, their) {
        (Some(own), Some(their)) => part(own) != part(their),
        _ => false,
    };
    [
        (Unequal::OnlyAtHead, their.is_none()),
        (Unequal::OnlyAtCopy, own.is_none()),
        (Unequal::Attributes, differs(|sum| sum.attributes.get())),
        (Unequal::Contents, differs(|sum| sum.contents.get())),
        (Unequal::Xattrs, differs(|sum| sum.xattrs.get())),
        (Unequal::DamagedAtHead, is_damaged(own)),
        (Unequal::DamagedAtCopy, is_damaged(their)),
    ]
    .into_iter()
    .filter_map(|(unequal, is_so)| is_so.then_some(unequal))
    .collect()
}

/// One name of each directory, and of some other inodes.
struct Names(BTreeMap<InodeNumber, (InodeNumber, Vec<u8>)>);

impl Names {
    fn of(snapshot: &Snapshot, wanted: impl Iterator<Item = InodeNumber>) -> Result<Self, area::AreaError> {
        let wanted: BTreeSet<InodeNumber> = wanted.collect();
        let mut names = BTreeMap::new();
        if wanted.is_empty() {
            return Ok(Self(names));
        }
        let (whole, mut after): (_, Option<Key>) = (snapshot.whole(), None);
        loop {
            let items = snapshot.items_of(&whole, after.as_ref(), ITEMS_AT_ONCE)?;
            let Some((last, _)) = items.last() else { return Ok(Self(names)) };
            after = Some(*last);
            for (key, value) in items.iter().filter(|(key, _)| key.kind() == Ok(ItemKind::Entry)) {
                let Ok((entry, name)) = EntryItem::read_from_prefix(value) else { continue };
                let is_directory = entry.file_type == format::record::FileType::Directory as u8;
                if is_directory || wanted.contains(&entry.inode) {
                    let name = (InodeNumber::new(key.object()), name.to_vec());
                    names.entry(entry.inode).or_insert(name);
                }
            }
        }
    }

    /// A path below the root.
    fn path_of(&self, inode: InodeNumber) -> Option<PathBuf> {
        let (mut path, mut at) = (Vec::new(), inode);
        while at != InodeNumber::ROOT {
            let (directory, name) = self.0.get(&at)?;
            path.push(OsString::from_vec(name.clone()));
            at = *directory;
            // A damaged tree may have a ring.
            if path.len() > self.0.len() {
                return None;
            }
        }
        Some(path.into_iter().rev().collect())
    }
}
