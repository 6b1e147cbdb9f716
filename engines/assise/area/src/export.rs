//! Reading a tree to copy it to another node: ranges of keys, the items in them, and blocks as they stand.
//!
//! Guarantees: a range owns keys and blocks of files, and no other range of the same tree owns the same. The ranges
//! that changed from an entry of the ledger on contain every key whose item differs from the one in any commit before
//! that entry.

use crate::AreaError;
use crate::node::KEY_MIN;
use crate::snapshot::{Snapshot, read_as_is};
use crate::store::NodeStore;
use crate::stored::StoredExtent;
use crate::view::{Extent, Item};
use format::node::{ItemKind, Key};
use format::root::NodePointer;
use format::superblock::OWNER_DAEMON;
use format::{BLOCK_BYTES, InodeNumber, Sequence};
use std::ops::ControlFlow;

/// A range of keys, and what belongs to it of the files that it divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key.
    pub first: Key,
    /// The key behind the last; `None`: it reaches to the end of the tree.
    pub end: Option<Key>,
    /// If `first` is one of an extent: the first block of the file that no extent before the range covers.
    pub blocks_from: u64,
    /// If `end` is one of an extent: the first block of the file, not before it, that an extent behind the range covers.
    pub blocks_to: u64,
}

/// Keys from the first on, before the second; `None`: up to the end of the tree.
pub type KeySpan = (Key, Option<Key>);

/// Ranges of keys below a pointer that changed from an entry of the ledger on, as the versions say: those of the leaves with
/// such a pointer, and that of the last leaf of what took over the range behind it.
pub(crate) fn changed_keys(
    store: &NodeStore,
    (pointer, level): (&NodePointer, u8),
    (first, end): KeySpan,
    (from, widened): (Sequence, bool),
    found: &mut Vec<KeySpan>,
) -> Result<(), AreaError> {
    if pointer.version < from && !widened {
        return Ok(());
    }
    if level == 0 {
        found.push((first, end));
        return Ok(());
    }
    let page = store.load(pointer, level)?;
    let widened = widened || pointer.version > page.version();
    for (index, slot) in page.slots().iter().enumerate() {
        let is_last = index + 1 == page.slots().len();
        let next = page.slots().get(index + 1).map(|next| next.key).or(end);
        let child = (&page.child(index), level - 1);
        changed_keys(store, child, (slot.key, next), (from, widened && is_last), found)?;
    }
    Ok(())
}

fn is_of_extent(key: &Key) -> bool {
    key.kind() == Ok(ItemKind::Extent)
}

/// Spans in the order of their first keys, with those that touch or overlap joined.
fn joined(spans: Vec<KeySpan>) -> Vec<KeySpan> {
    let mut joined: Vec<KeySpan> = Vec::new();
    for (first, end) in spans {
        match joined.last_mut() {
            Some((_, last)) if last.is_none_or(|last| first <= last) => {
                *last = last.zip(end).map(|(last, end)| last.max(end));
            }
            _ => joined.push((first, end)),
        }
    }
    joined
}

impl Snapshot {
    /// The range of all keys.
    pub fn whole(&self) -> KeyRange {
        KeyRange { first: KEY_MIN, end: None, blocks_from: 0, blocks_to: 0 }
    }

    /// The ranges that changed from an entry of the ledger on, in order and apart from each other; and in how many leaves that is.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn changed_from(&self, from: Sequence) -> Result<(Vec<KeyRange>, usize), AreaError> {
        self.changed_here_or_there(from, Vec::new())
    }

    /// The same, and the ranges in which another tree changed that was equal before that entry.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn changed_here_or_there(
        &self,
        from: Sequence,
        there: Vec<KeySpan>,
    ) -> Result<(Vec<KeyRange>, usize), AreaError> {
        let mut spans = self.changed_leaves(from)?;
        let leaves = spans.len() + there.len();
        for (first, end) in there {
            spans.push((self.start_of_extent(first)?, end));
        }
        spans.sort_unstable_by_key(|(first, _)| *first);
        let ranges = joined(spans).into_iter().map(|span| self.range_of(span));
        Ok((ranges.collect::<Result<_, AreaError>>()?, leaves))
    }

    /// The keys that changed from an entry of the ledger on, and those of all blocks that the extents among them cover.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn changed_spans(&self, from: Sequence) -> Result<Vec<KeySpan>, AreaError> {
        let mut spans = joined(self.changed_leaves(from)?);
        for (_, end) in &mut spans {
            if let Some(key) = end.filter(is_of_extent)
                && let Some(last) = self.extent_before(&key)?
                && last > key.sub()
            {
                *end = Some(Key::new(key.object(), ItemKind::Extent, last));
            }
        }
        Ok(joined(spans))
    }

    fn changed_leaves(&self, from: Sequence) -> Result<Vec<KeySpan>, AreaError> {
        let level = u8::try_from(self.root.height.get() - 1).expect("the height was checked");
        let mut spans = Vec::new();
        changed_keys(&self.store, (&self.root.node, level), (KEY_MIN, None), (from, false), &mut spans)?;
        Ok(spans)
    }

    /// The key, or that of the extent that begins before it and covers its block.
    fn start_of_extent(&self, key: Key) -> Result<Key, AreaError> {
        if !is_of_extent(&key) {
            return Ok(key);
        }
        let covering =
            self.view().extent_items(InodeNumber::new(key.object()), key.sub()..key.sub() + 1, 1)?;
        Ok(covering.first().map_or(key, |(first, _)| key.min(*first)))
    }

    /// The end of the extent that begins before this key of an extent, if it reaches up to it.
    fn extent_before(&self, key: &Key) -> Result<Option<u64>, AreaError> {
        let Some(last) = key.sub().checked_sub(1) else { return Ok(None) };
        let before = self.view().extent_items(InodeNumber::new(key.object()), last..key.sub(), 1)?;
        before.first().map(|(key, value)| Ok(StoredExtent::decode(key, value)?.end())).transpose()
    }

    fn range_of(&self, (first, end): KeySpan) -> Result<KeyRange, AreaError> {
        let mut range = KeyRange { first, end, blocks_from: first.sub(), blocks_to: 0 };
        if is_of_extent(&first)
            && let Some(covered) = self.extent_before(&first)?
        {
            range.blocks_from = covered;
        }
        if let Some(end) = end.filter(is_of_extent) {
            range.blocks_to = u64::MAX;
            self.view().scan_kind(end.object(), ItemKind::Extent, end.sub(), &mut |key, _| {
                range.blocks_to = key.sub();
                Ok(ControlFlow::Break(()))
            })?;
        }
        Ok(range)
    }

    /// Up to `items_max` items of a range, those behind `after`.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn items_of(
        &self,
        range: &KeyRange,
        after: Option<&Key>,
        items_max: usize,
    ) -> Result<Vec<Item>, AreaError> {
        let mut found = Vec::new();
        self.view().scan(after.unwrap_or(&range.first), &crate::snapshot::KEY_MAX, &mut |key, value| {
            if found.len() == items_max || range.end.is_some_and(|end| *key >= end) {
                return Ok(ControlFlow::Break(()));
            }
            if after != Some(key) {
                found.push((*key, Box::from(value)));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// The extents that an item is, in order, and the owner key under which another node keeps their blocks.
    ///
    /// # Errors
    /// `Item`.
    pub fn extents_of(&self, key: &Key, value: &[u8]) -> Result<(Vec<Extent>, u32), AreaError> {
        let extents: Vec<_> = StoredExtent::decode(key, value)?.extents(0..u64::MAX).collect();
        let mut owners = extents.iter().map(|extent| self.segment_owner(extent.segment).unwrap_or_default());
        let first = owners.next().unwrap_or_default();
        // Where some are another user's than the rest, no user maps them there.
        let owner = if owners.all(|owner| owner == first) { first } else { OWNER_DAEMON };
        Ok((extents, owner))
    }

    /// A block of a written extent as it stands there, and whether that is what was written.
    ///
    /// # Errors
    /// `Medium`.
    ///
    /// # Panics
    /// If the extent is not written, or does not cover the block.
    pub fn block_as_is(
        &self,
        extent: &Extent,
        file_block: u64,
    ) -> Result<(Box<[u8; BLOCK_BYTES]>, bool), AreaError> {
        read_as_is(self.segments.get(&extent.segment).map(|file| &**file), extent, file_block)
    }

    /// Inodes, and blocks of data.
    pub fn totals(&self) -> (u64, u64) {
        (self.root.inodes.get(), self.root.data_blocks.get())
    }
}
