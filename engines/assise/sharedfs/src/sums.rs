//! Checksums of a tree, inode by inode, which are equal in equal trees of two nodes.
//!
//! They cover what programs can read: attributes, entries of directories, targets of symbolic links, contents and extended
//! attributes. Where a node stores blocks is its own decision, and a block of zeros is the same as a hole. An inode that has lost
//! its last name is left out: the head may have removed it already when a copy still waits for the entry that says so.

use area::{AreaError, Extent, Item, Snapshot};
use format::checksum::Sum64;
use format::mirror::{MirrorSum, SUM_DAMAGED};
use format::node::{InodeItem, ItemKind};
use format::{BLOCK_BYTES, InodeNumber};
use std::collections::VecDeque;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Items that are read at once.
const ITEMS_AT_ONCE: usize = 256;

/// The checksums of all inodes of a tree that have a name, in the order of their numbers.
pub(crate) struct Sums<'a> {
    snapshot: &'a Snapshot,
    items: VecDeque<Item>,
    /// Key of the last item that was read; `None` before the first.
    after: Option<format::node::Key>,
}

/// An inode's sums while its items are read.
struct Summing {
    inode: InodeNumber,
    item: InodeItem,
    contents: Sum64,
    xattrs: Sum64,
    damaged: bool,
}

impl<'a> Sums<'a> {
    /// Of the tree of a commit.
    pub fn of(snapshot: &'a Snapshot) -> Self {
        Self { snapshot, items: VecDeque::new(), after: None }
    }

    /// The sums of the next inode; `None` after the last one. They are valid only if the commit was kept until then.
    ///
    /// # Errors
    /// Failures of the medium or the tree.
    pub fn next_sum(&mut self) -> Result<Option<MirrorSum>, AreaError> {
        let (snapshot, mut summing): (_, Option<Summing>) = (self.snapshot, None);
        loop {
            let Some((key, value)) = self.peek()? else { return Ok(summing.map(Summing::finish)) };
            let kind = key.kind().map_err(|_| AreaError::Item(*key, "kind"))?;
            match &mut summing {
                Some(summing) if summing.inode.get() == key.object() => {
                    summing.add(snapshot, kind, (key, value))?;
                }
                Some(_) => return Ok(summing.map(Summing::finish)),
                None if kind == ItemKind::Inode => {
                    let item = InodeItem::read_from_bytes(value);
                    let item = item.map_err(|_| AreaError::Item(*key, "length"))?;
                    summing = (item.links.get() > 0).then(|| Summing {
                        inode: InodeNumber::new(key.object()),
                        item,
                        contents: Sum64::default(),
                        xattrs: Sum64::default(),
                        damaged: false,
                    });
                }
                None => {}
            }
            self.items.pop_front();
        }
    }

    fn peek(&mut self) -> Result<Option<&Item>, AreaError> {
        if self.items.is_empty() {
            let whole = self.snapshot.whole();
            let read = self.snapshot.items_of(&whole, self.after.as_ref(), ITEMS_AT_ONCE)?;
            self.after = read.last().map(|(key, _)| *key).or(self.after);
            self.items = read.into();
        }
        Ok(self.items.front())
    }
}

impl Summing {
    fn add(
        &mut self,
        snapshot: &Snapshot,
        kind: ItemKind,
        (key, value): (&format::node::Key, &[u8]),
    ) -> Result<(), AreaError> {
        let sum = match kind {
            ItemKind::Symlink | ItemKind::Entry => &mut self.contents,
            ItemKind::Xattr => &mut self.xattrs,
            ItemKind::Extent => {
                let (extents, _) = snapshot.extents_of(key, value)?;
                return extents.iter().try_for_each(|extent| self.add_extent(snapshot, extent));
            }
            _ => return Ok(()),
        };
        sum.update(&key.sub().to_le_bytes());
        sum.update(&u64::try_from(value.len()).expect("a value fits a node").to_le_bytes());
        sum.update(value);
        Ok(())
    }

    fn add_extent(&mut self, snapshot: &Snapshot, extent: &Extent) -> Result<(), AreaError> {
        if extent.checksums.is_none() {
            return Ok(());
        }
        let size = self.item.size.get();
        for block in extent.first..extent.end() {
            let (bytes, is_whole) = snapshot.block_as_is(extent, block)?;
            self.damaged |= !is_whole;
            let seen = size.saturating_sub(block * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64);
            let seen = &bytes[..usize::try_from(seen).expect("at most a block")];
            if seen.iter().any(|byte| *byte != 0) {
                self.contents.update(&block.to_le_bytes());
                self.contents.update(seen);
            }
        }
        Ok(())
    }

    fn finish(self) -> MirrorSum {
        let mut attributes = Sum64::default();
        attributes.update(self.item.as_bytes());
        MirrorSum {
            inode: self.inode,
            attributes: U64::new(attributes.finish()),
            contents: U64::new(self.contents.finish()),
            xattrs: U64::new(self.xattrs.finish()),
            flags: U32::new(if self.damaged { SUM_DAMAGED } else { 0 }),
            reserved: U32::new(0),
        }
    }
}
