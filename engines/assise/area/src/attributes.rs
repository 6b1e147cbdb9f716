//! Records that change an inode's attributes, and what becomes of inodes without a name.

use crate::AreaError;
use crate::Refused;
use crate::batch::{Applied, Applying, Batch, Need};
use crate::contents::grow;
use crate::view::{FILE_BLOCKS_MAX, XATTR_SLOT_MAX, xattr_room};
use format::InodeNumber;
use format::node::{InodeItem, ItemKind, Key, PERMISSION_BITS, XattrItem, xattr_sub};
use format::record::{FileType, SET_ALL, SetAttrBody, XATTR_BYTES_MAX};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I64, U16, U32, U64};

impl Batch<'_> {
    pub(crate) fn set_attr(
        &mut self,
        inode: InodeNumber,
        body: &SetAttrBody,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        if body.mask.get() & !SET_ALL != 0 || body.mode.get() & !PERMISSION_BITS != 0 {
            return Err(Refused::Field("mask").into());
        }
        let Some(mut item) = self.inode_for(inode, applying)? else { return Ok(Applied::Stale) };
        let time = I64::new(applying.time_after(&item));
        body.change(&mut item);
        self.begin_change(1, 0, Need::Shrinking)?;
        item.ctime_ns = time;
        item.stamp = applying.stamp(inode);
        self.put_inode(inode, &item)?;
        Ok(Applied::Done)
    }

    /// Sets the permission bits of an inode as a part of the record that was applied to it before: the code that judges
    /// the record decides which set-id bits a write leaves.
    ///
    /// # Errors
    /// `Refused(NoInode)`; `BatchFull`, `NoSpace`, `Poisoned`, `Node`, `Item`, `Medium`.
    pub fn set_mode(&mut self, inode: InodeNumber, mode: u32) -> Result<(), AreaError> {
        self.sync_file(inode)?;
        // Not put off to the next batch: the write is in this one.
        self.unbounded(|batch| {
            let mut item = batch.view().inode(inode)?.ok_or(Refused::NoInode(inode))?;
            item.set_permissions(mode);
            batch.begin_change(1, 0, Need::Shrinking)?;
            batch.put_inode(inode, &item)
        })
    }

    pub(crate) fn set_xattr(
        &mut self,
        inode: InodeNumber,
        name: &[u8],
        value: &[u8],
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let fits = (1..=format::name::NAME_BYTES_MAX).contains(&name.len()) && !name.contains(&0);
        if !fits || value.len() > XATTR_BYTES_MAX {
            return Err(Refused::Field("name").into());
        }
        let Some(item) = self.inode_for(inode, applying)? else { return Ok(Applied::Stale) };
        let slot = match self.view().xattr(inode, name)? {
            Some((slot, _)) => slot,
            None => self.free_slot(inode, name)?,
        };
        let pieces = value.len() / xattr_room(0) + 2;
        self.begin_change(3, pieces as u32 / 2 + 2, applying.need())?;
        self.remove_pieces(inode, name, slot)?;
        let (first, rest) = value.split_at(value.len().min(xattr_room(name.len())));
        self.put_piece(inode, (name, slot), 0, value.len(), first)?;
        for (piece, bytes) in (1..).zip(rest.chunks(xattr_room(0))) {
            self.put_piece(inode, (name, slot), piece, value.len(), bytes)?;
        }
        self.touch(inode, item, applying)
    }

    fn put_piece(
        &mut self,
        inode: InodeNumber,
        (name, slot): (&[u8], u8),
        piece: u16,
        value_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), AreaError> {
        let stored_name = if piece == 0 { name } else { &[] };
        let item = XattrItem {
            value_bytes: U32::new(value_bytes as u32),
            name_bytes: U16::new(stored_name.len() as u16),
            piece_bytes: U16::new(bytes.len() as u16),
        };
        let value = [item.as_bytes(), stored_name, bytes].concat();
        self.put(Key::new(inode.get(), ItemKind::Xattr, xattr_sub(name, slot, piece)), &value)
    }

    fn free_slot(&self, inode: InodeNumber, name: &[u8]) -> Result<u8, AreaError> {
        for slot in 0..=XATTR_SLOT_MAX {
            let key = Key::new(inode.get(), ItemKind::Xattr, xattr_sub(name, slot, 0));
            if self.view().get(&key)?.is_none() {
                return Ok(slot);
            }
        }
        Err(Refused::XattrSlots.into())
    }

    fn remove_pieces(&mut self, inode: InodeNumber, name: &[u8], slot: u8) -> Result<(), AreaError> {
        let last = xattr_sub(name, slot, u16::MAX);
        for key in self.keys(inode.get(), ItemKind::Xattr, xattr_sub(name, slot, 0), usize::from(u8::MAX))? {
            if key.sub() > last {
                break;
            }
            self.remove(&key)?;
        }
        Ok(())
    }

    pub(crate) fn remove_xattr(
        &mut self,
        inode: InodeNumber,
        name: &[u8],
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let Some(item) = self.inode_for(inode, applying)? else { return Ok(Applied::Stale) };
        let Some((slot, _)) = self.view().xattr(inode, name)? else { return Err(Refused::NoXattr.into()) };
        self.begin_change(3, 0, Need::Shrinking)?;
        self.remove_pieces(inode, name, slot)?;
        self.touch(inode, item, applying)
    }

    /// Notes in an inode that the record changed something of it.
    fn touch(
        &mut self,
        inode: InodeNumber,
        mut item: InodeItem,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        item.ctime_ns = I64::new(applying.time_after(&item));
        item.stamp = applying.stamp(inode);
        self.put_inode(inode, &item)?;
        Ok(Applied::Done)
    }

    /// After a record took a name of an inode, whose item has one link less: stores it, or if it was the last name
    /// makes it an orphan, and unless it is open reaps it as far as one step goes.
    pub(crate) fn unlinked(
        &mut self,
        inode: InodeNumber,
        item: &InodeItem,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        self.put_inode(inode, item)?;
        if item.links.get() > 0 {
            return Ok(Applied::Done);
        }
        self.put(Key::new(0, ItemKind::Orphan, inode.get()), &[])?;
        let gone = !applying.keep_open && self.reap_step(inode, self.area.limits.reap_items_max)?;
        Ok(if gone { Applied::Removed(inode) } else { Applied::Orphaned(inode) })
    }

    /// Removes up to `items_max` items of an inode without a name, the inode itself last. True if nothing is left.
    ///
    /// # Errors
    /// `Refused(NoInode)` if it is no orphan; `BatchFull`, `NoSpace`, `Poisoned`, `Node`, `Item`, `Medium`.
    pub fn reap(&mut self, inode: InodeNumber, items_max: usize) -> Result<bool, AreaError> {
        self.sync_file(inode)?;
        self.guarded(|batch| {
            if !batch.view().is_orphan(inode)? {
                return Err(Refused::NoInode(inode).into());
            }
            batch.begin_change(6, 0, Need::Shrinking)?;
            batch.reap_step(inode, items_max)
        })
    }

    fn reap_step(&mut self, inode: InodeNumber, items_max: usize) -> Result<bool, AreaError> {
        let key = Key::new(inode.get(), ItemKind::Inode, 0);
        let mut item = self.view().inode(inode)?.ok_or(AreaError::Item(key, "orphan"))?;
        let mut left = items_max;
        if FileType::of_mode(item.mode.get()) == Some(FileType::Regular) {
            let extents = self.keys(inode.get(), ItemKind::Extent, 0, left.saturating_add(1))?;
            let end = extents.get(left).map_or(FILE_BLOCKS_MAX, |beyond| beyond.sub());
            let cut = self.cut(inode, 0..end, true)?;
            item.blocks = grow(item.blocks, -cut);
            // Without the front of its contents the file must not be read any more, nor get a name.
            item.size = U64::new(0);
            item.parent = InodeNumber::NONE;
            self.root.data_blocks = grow(self.root.data_blocks, -cut);
            left = left.saturating_sub(extents.len());
        }
        for kind in [ItemKind::Xattr, ItemKind::Symlink] {
            let keys = self.keys(inode.get(), kind, 0, left)?;
            left -= keys.len();
            for key in keys {
                self.remove(&key)?;
            }
        }
        if left == 0 {
            self.put_inode(inode, &item)?;
            return Ok(false);
        }
        self.remove(&key)?;
        self.remove(&Key::new(0, ItemKind::Orphan, inode.get()))?;
        self.root.inodes = grow(self.root.inodes, -1);
        Ok(true)
    }
}
