//! Records that change names: create, link, unlink, rename; and those that create a file without one.
//!
//! Such a record touches a directory, or two, and what its entries stand for. Each of them has a stamp of its own
//! and may have seen the record or something later, when a node catches up on a tree that was copied while it
//! changed: then only its part is left out. A part that is applied is checked in full.

use crate::AreaError;
use crate::Refused;
use crate::batch::{Applied, Applying, Batch, Need};
use crate::view::Entry;
use format::node::{EntryItem, InodeItem, ItemKind, Key, VALUE_BYTES_MAX};
use format::record::{CreateBody, FileType, RenameBody, SYMLINK_BYTES_MAX, WhiteoutBody};
use format::{Cookie, InodeNumber, Name};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

/// Names of one inode, at most: the largest number that a signed 32-bit counter shows.
const LINKS_MAX: u32 = i32::MAX as u32;

/// A name with its place.
pub(crate) type Named<'a> = (Cookie, Name<'a>);

fn type_of(item: &InodeItem) -> FileType {
    FileType::of_mode(item.mode.get()).expect("the view gives inodes with a type")
}

fn is_directory(item: &InodeItem) -> bool {
    type_of(item) == FileType::Directory
}

fn add(number: U64, by: i64) -> U64 {
    U64::new(number.get().saturating_add_signed(by))
}

/// Changes a count of links.
fn relink(item: &mut InodeItem, by: i32) -> Result<(), AreaError> {
    let links = item.links.get().checked_add_signed(by).filter(|links| *links <= LINKS_MAX);
    item.links = U32::new(links.ok_or(Refused::TooManyLinks)?);
    Ok(())
}

impl Batch<'_> {
    /// An inode that must be there, and whether the record is new to it.
    fn named(&self, inode: InodeNumber, applying: &Applying<'_>) -> Result<(InodeItem, bool), AreaError> {
        let item = self.view().inode(inode)?.ok_or(Refused::NoInode(inode))?;
        Ok((item, applying.is_new_to(inode, &item)))
    }

    /// The same for a directory.
    fn directory(&self, inode: InodeNumber, applying: &Applying<'_>) -> Result<(InodeItem, bool), AreaError> {
        let found = self.named(inode, applying)?;
        if is_directory(&found.0) { Ok(found) } else { Err(Refused::NotDirectory.into()) }
    }

    /// Checks that a name can be added to a directory.
    fn check_free(
        &self,
        parent: InodeNumber,
        item: &InodeItem,
        (cookie, name): Named<'_>,
    ) -> Result<(), AreaError> {
        if item.links.get() == 0 {
            return Err(Refused::DirectoryGone.into());
        }
        if !cookie.same_hash(Cookie::of_name(name)) {
            return Err(Refused::CookieHash.into());
        }
        if self.view().lookup(parent, name)?.is_some() {
            return Err(Refused::NameExists.into());
        }
        if self.view().entry(parent, cookie)?.is_some() {
            return Err(Refused::CookieTaken.into());
        }
        Ok(())
    }

    /// The entry at a cookie, if it has this name and stands for this inode.
    fn check_entry(
        &self,
        parent: InodeNumber,
        (cookie, name): Named<'_>,
        inode: InodeNumber,
    ) -> Result<Entry, AreaError> {
        let entry = self.view().entry(parent, cookie)?.ok_or(Refused::NoEntry)?;
        if *entry.name != *name.bytes() {
            return Err(Refused::NoEntry.into());
        }
        if entry.inode != inode {
            return Err(Refused::EntryNamesOther.into());
        }
        Ok(entry)
    }

    fn put_entry(
        &mut self,
        parent: InodeNumber,
        (cookie, name): Named<'_>,
        inode: InodeNumber,
        file_type: FileType,
    ) -> Result<(), AreaError> {
        let item = EntryItem {
            inode,
            file_type: file_type as u8,
            name_bytes: name.bytes().len() as u8,
            reserved: [0; 6],
        };
        let value = [item.as_bytes(), name.bytes()].concat();
        self.put(Key::new(parent.get(), ItemKind::Entry, cookie.get()), &value)
    }

    fn remove_entry(&mut self, parent: InodeNumber, cookie: Cookie) -> Result<(), AreaError> {
        self.remove(&Key::new(parent.get(), ItemKind::Entry, cookie.get()))?;
        Ok(())
    }

    /// Stores a directory whose entries the record changed.
    fn put_directory(
        &mut self,
        inode: InodeNumber,
        mut item: InodeItem,
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        let time = I64::new(applying.time_after(&item));
        (item.mtime_ns, item.ctime_ns) = (time, time);
        item.stamp = applying.stamp(inode);
        self.put_inode(inode, &item)
    }

    pub(crate) fn create(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        named: Named<'_>,
        body: &CreateBody,
        target: &[u8],
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let file_type = FileType::of_mode(body.mode.get()).ok_or(Refused::Field("mode"))?;
        let is_link = file_type == FileType::Symlink;
        if target.is_empty() == is_link || target.len() > SYMLINK_BYTES_MAX {
            return Err(Refused::Field("target").into());
        }
        let (mut parent_item, parent_new) = self.directory(parent, applying)?;
        let inode_new = self.is_new_inode(inode, applying)?;
        if !parent_new && !inode_new {
            return Ok(Applied::Stale);
        }
        if parent_new {
            self.check_free(parent, &parent_item, named)?;
            relink(&mut parent_item, i32::from(file_type == FileType::Directory))?;
        }
        self.begin_change(3, 3, applying.need())?;
        if parent_new {
            parent_item.size = add(parent_item.size, 1);
            self.put_directory(parent, parent_item, applying)?;
            self.put_entry(parent, named, inode, file_type)?;
        }
        if inode_new {
            let directory = file_type == FileType::Directory;
            let (links, above) = if directory { (2, parent) } else { (1, InodeNumber::NONE) };
            self.put_new_inode(inode, (links, above), (body, file_type), target, applying)?;
        }
        Ok(Applied::Done)
    }

    /// Creates a file without a name; the log's owner has it open.
    pub(crate) fn create_unnamed(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        body: &CreateBody,
        linkable: bool,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        if FileType::of_mode(body.mode.get()) != Some(FileType::Regular) {
            return Err(Refused::Field("mode").into());
        }
        self.directory(parent, applying)?;
        if !self.is_new_inode(inode, applying)? {
            return Ok(Applied::Stale);
        }
        self.begin_change(2, 2, applying.need())?;
        let above = if linkable { parent } else { InodeNumber::NONE };
        self.put_new_inode(inode, (0, above), (body, FileType::Regular), &[], applying)?;
        self.put(Key::new(0, ItemKind::Orphan, inode.get()), &[])?;
        Ok(Applied::Orphaned(inode))
    }

    /// Whether a record that creates an inode has not been applied to it yet; refuses a number that is in use.
    fn is_new_inode(&self, inode: InodeNumber, applying: &Applying<'_>) -> Result<bool, AreaError> {
        match self.view().inode(inode)? {
            Some(item) if applying.is_new_to(inode, &item) => Err(Refused::InodeInUse.into()),
            Some(_) => Ok(false),
            None if inode == InodeNumber::NONE => Err(Refused::Field("inode").into()),
            None => Ok(true),
        }
    }

    fn put_new_inode(
        &mut self,
        inode: InodeNumber,
        (links, parent): (u32, InodeNumber),
        (body, file_type): (&CreateBody, FileType),
        target: &[u8],
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        let time = I64::new(applying.time_ns);
        let device = matches!(file_type, FileType::CharacterDevice | FileType::BlockDevice);
        let item = InodeItem {
            mode: body.mode,
            uid: body.uid,
            gid: body.gid,
            links: U32::new(links),
            size: U64::new(target.len() as u64),
            blocks: U64::new(0),
            atime_ns: time,
            mtime_ns: time,
            ctime_ns: time,
            btime_ns: time,
            rdev: if device { body.rdev } else { U64::new(0) },
            stamp: applying.stamp(inode),
            parent,
        };
        self.put_inode(inode, &item)?;
        for (piece, bytes) in target.chunks(VALUE_BYTES_MAX).enumerate() {
            self.put(Key::new(inode.get(), ItemKind::Symlink, piece as u64), bytes)?;
        }
        self.root.inodes = add(self.root.inodes, 1);
        Ok(())
    }

    pub(crate) fn link(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        named: Named<'_>,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let (mut parent_item, parent_new) = self.directory(parent, applying)?;
        let (mut item, inode_new) = self.named(inode, applying)?;
        if !parent_new && !inode_new {
            return Ok(Applied::Stale);
        }
        if is_directory(&item) {
            return Err(Refused::IsDirectory.into());
        }
        if parent_new {
            self.check_free(parent, &parent_item, named)?;
        }
        let unnamed = item.links.get() == 0;
        if unnamed && item.parent == InodeNumber::NONE {
            // An inode that has lost its last name may be half reaped: it never comes back.
            return Err(Refused::NoEntry.into());
        }
        relink(&mut item, 1)?;
        self.begin_change(5, 1, applying.need())?;
        if parent_new {
            parent_item.size = add(parent_item.size, 1);
            self.put_directory(parent, parent_item, applying)?;
            self.put_entry(parent, named, inode, type_of(&item))?;
        }
        if inode_new {
            if unnamed {
                self.remove(&Key::new(0, ItemKind::Orphan, inode.get()))?;
                item.parent = InodeNumber::NONE;
            }
            item.ctime_ns = I64::new(applying.time_after(&item));
            item.stamp = applying.stamp(inode);
            self.put_inode(inode, &item)?;
        }
        Ok(Applied::Done)
    }

    /// Checks that an inode may lose a name by unlink or rmdir, or by a rename onto it.
    fn check_removable(inode: InodeNumber, item: &InodeItem, directory: bool) -> Result<(), AreaError> {
        if inode == InodeNumber::ROOT {
            return Err(Refused::Root.into());
        }
        match (directory, is_directory(item)) {
            (true, false) => Err(Refused::NotDirectory.into()),
            (false, true) => Err(Refused::IsDirectory.into()),
            (true, true) if item.size.get() > 0 => Err(Refused::NotEmpty.into()),
            _ if item.links.get() == 0 => Err(Refused::NoEntry.into()),
            _ => Ok(()),
        }
    }

    /// Takes one name, or for a directory the only one, from an inode.
    fn lose_name(
        &mut self,
        inode: InodeNumber,
        mut item: InodeItem,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let links = if is_directory(&item) { 0 } else { item.links.get() - 1 };
        item.links = U32::new(links);
        item.ctime_ns = I64::new(applying.time_after(&item));
        item.stamp = applying.stamp(inode);
        self.unlinked(inode, &item, applying)
    }

    pub(crate) fn unlink(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        named: Named<'_>,
        directory: bool,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let (mut parent_item, parent_new) = self.directory(parent, applying)?;
        let (item, inode_new) = self.named(inode, applying)?;
        if !parent_new && !inode_new {
            return Ok(Applied::Stale);
        }
        if parent_new {
            self.check_entry(parent, named, inode)?;
            relink(&mut parent_item, -i32::from(directory))?;
        }
        if inode_new {
            Self::check_removable(inode, &item, directory)?;
        }
        self.begin_change(6, 1, Need::Shrinking)?;
        if parent_new {
            parent_item.size = add(parent_item.size, -1);
            self.put_directory(parent, parent_item, applying)?;
            self.remove_entry(parent, named.0)?;
        }
        if inode_new { self.lose_name(inode, item, applying) } else { Ok(Applied::Done) }
    }

    /// Refuses to put a directory below itself: `above` must not be on the way from `below` to the root.
    fn check_no_cycle(&self, above: InodeNumber, below: InodeNumber) -> Result<(), AreaError> {
        let mut at = below;
        // A way longer than there are inodes is a circle already.
        for _ in 0..=self.root.inodes.get() {
            if at == above {
                return Err(Refused::Cycle.into());
            }
            if at == InodeNumber::ROOT {
                return Ok(());
            }
            let item = self.view().inode(at)?.ok_or(Refused::NoInode(at))?;
            at = item.parent;
        }
        Err(Refused::Cycle.into())
    }

    pub(crate) fn rename(
        &mut self,
        inode: InodeNumber,
        body: &RenameBody,
        (old_name, new_name): (Name<'_>, Name<'_>),
        exchange: bool,
        whiteout: Option<&WhiteoutBody>,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let old =
            Side::of(self, body.old_parent, (Cookie::from_raw(body.old_cookie.get()), old_name), applying)?;
        let new =
            Side::of(self, body.new_parent, (Cookie::from_raw(body.new_cookie.get()), new_name), applying)?;
        let (item, moved_new) = self.named(inode, applying)?;
        let moved = Moved { inode, item, is_new: moved_new };
        let replaced = match body.replaced {
            InodeNumber::NONE => None,
            inode => {
                let (item, is_new) = self.named(inode, applying)?;
                Some(Moved { inode, item, is_new })
            }
        };
        let replaced_new = replaced.as_ref().is_some_and(|replaced| replaced.is_new);
        let whiteout_new = match whiteout {
            Some(whiteout) => self.is_new_inode(whiteout.inode, applying)?,
            None => false,
        };
        if !(old.is_new || new.is_new || moved.is_new || replaced_new || whiteout_new) {
            return Ok(Applied::Stale);
        }
        self.check_rename(&old, &new, &moved, replaced.as_ref(), exchange)?;
        if body.replaced == inode {
            // Two names of one inode: POSIX leaves both.
            return Ok(Applied::Done);
        }
        let whiteout = whiteout.map(|body| NewWhiteout { body, is_new: whiteout_new });
        match replaced {
            Some(replaced) if exchange => self.exchange(old, new, moved, replaced, applying),
            replaced => self.move_name(old, new, moved, (replaced, whiteout), applying),
        }
    }

    fn check_rename(
        &self,
        old: &Side<'_>,
        new: &Side<'_>,
        moved: &Moved,
        replaced: Option<&Moved>,
        exchange: bool,
    ) -> Result<(), AreaError> {
        if moved.inode == InodeNumber::ROOT || replaced.is_some_and(|found| found.inode == InodeNumber::ROOT)
        {
            return Err(Refused::Root.into());
        }
        if old.is_new {
            self.check_entry(old.parent, old.named, moved.inode)?;
        }
        match replaced {
            Some(replaced) => {
                if new.is_new {
                    self.check_entry(new.parent, new.named, replaced.inode)?;
                }
                if !exchange && replaced.is_new && replaced.inode != moved.inode {
                    Self::check_removable(replaced.inode, &replaced.item, is_directory(&moved.item))?;
                }
            }
            None if exchange => return Err(Refused::NoEntry.into()),
            None if new.is_new => self.check_free(new.parent, &new.item, new.named)?,
            None => {}
        }
        if is_directory(&moved.item) {
            self.check_no_cycle(moved.inode, new.parent)?;
        }
        match replaced {
            Some(replaced) if exchange && is_directory(&replaced.item) => {
                self.check_no_cycle(replaced.inode, old.parent)
            }
            _ => Ok(()),
        }
    }

    fn move_name(
        &mut self,
        mut old: Side<'_>,
        mut new: Side<'_>,
        mut moved: Moved,
        (replaced, whiteout): (Option<Moved>, Option<NewWhiteout<'_>>),
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let directory = i32::from(is_directory(&moved.item));
        let replaced_directory = i32::from(replaced.as_ref().is_some_and(|found| is_directory(&found.item)));
        let grown = i64::from(replaced.is_none());
        relink(&mut old.item, -directory)?;
        // The whiteout takes the place of the name that goes.
        old.item.size = add(old.item.size, if whiteout.is_some() { 0 } else { -1 });
        let same = old.parent == new.parent;
        let target = if same { &mut old.item } else { &mut new.item };
        relink(target, directory - replaced_directory)?;
        target.size = add(target.size, grown);
        // A move may not need more room than there is in the reserve: it frees a name.
        self.begin_change(10, 4, Need::Promised)?;
        if let Some(whiteout) = whiteout.as_ref().filter(|whiteout| whiteout.is_new) {
            self.put_whiteout(whiteout.body, applying)?;
        }
        if old.is_new {
            match &whiteout {
                Some(whiteout) => {
                    self.put_entry(old.parent, old.named, whiteout.body.inode, FileType::CharacterDevice)?;
                }
                None => self.remove_entry(old.parent, old.named.0)?,
            }
            self.put_directory(old.parent, old.item, applying)?;
        }
        if new.is_new {
            self.put_entry(new.parent, new.named, moved.inode, type_of(&moved.item))?;
            if !same {
                self.put_directory(new.parent, new.item, applying)?;
            }
        }
        self.put_moved(&mut moved, new.parent, applying)?;
        match replaced {
            Some(replaced) if replaced.is_new => self.lose_name(replaced.inode, replaced.item, applying),
            _ => Ok(Applied::Done),
        }
    }

    fn exchange(
        &mut self,
        mut old: Side<'_>,
        mut new: Side<'_>,
        mut moved: Moved,
        mut replaced: Moved,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let same = old.parent == new.parent;
        let difference = i32::from(is_directory(&replaced.item)) - i32::from(is_directory(&moved.item));
        if !same {
            relink(&mut old.item, difference)?;
            relink(&mut new.item, -difference)?;
        }
        self.begin_change(9, 3, Need::Promised)?;
        if old.is_new {
            self.put_entry(old.parent, old.named, replaced.inode, type_of(&replaced.item))?;
            self.put_directory(old.parent, old.item, applying)?;
        }
        if new.is_new {
            self.put_entry(new.parent, new.named, moved.inode, type_of(&moved.item))?;
            if !same {
                self.put_directory(new.parent, new.item, applying)?;
            }
        }
        self.put_moved(&mut moved, new.parent, applying)?;
        self.put_moved(&mut replaced, old.parent, applying)?;
        Ok(Applied::Done)
    }

    fn put_whiteout(&mut self, whiteout: &WhiteoutBody, applying: &Applying<'_>) -> Result<(), AreaError> {
        let file_type = FileType::CharacterDevice;
        let body = CreateBody {
            mode: U32::new(file_type.mode_bits()),
            uid: whiteout.uid,
            gid: whiteout.gid,
            ..CreateBody::new_zeroed()
        };
        self.put_new_inode(whiteout.inode, (1, InodeNumber::NONE), (&body, file_type), &[], applying)
    }

    /// Stores an inode that has another name now.
    fn put_moved(
        &mut self,
        moved: &mut Moved,
        parent: InodeNumber,
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        if !moved.is_new {
            return Ok(());
        }
        if is_directory(&moved.item) {
            moved.item.parent = parent;
        }
        moved.item.ctime_ns = I64::new(applying.time_after(&moved.item));
        moved.item.stamp = applying.stamp(moved.inode);
        self.put_inode(moved.inode, &moved.item)
    }
}

/// One of the two directories of a rename.
struct Side<'a> {
    parent: InodeNumber,
    named: Named<'a>,
    item: InodeItem,
    /// The record is new to it.
    is_new: bool,
}

impl<'a> Side<'a> {
    fn of(
        batch: &Batch<'_>,
        parent: InodeNumber,
        named: Named<'a>,
        applying: &Applying<'_>,
    ) -> Result<Self, AreaError> {
        let (item, is_new) = batch.directory(parent, applying)?;
        Ok(Self { parent, named, item, is_new })
    }
}

/// The device that a rename leaves under the old name.
struct NewWhiteout<'a> {
    body: &'a WhiteoutBody,
    /// It is not in the tree yet.
    is_new: bool,
}

/// One of the inodes that a rename gives another name.
struct Moved {
    inode: InodeNumber,
    item: InodeItem,
    is_new: bool,
}
