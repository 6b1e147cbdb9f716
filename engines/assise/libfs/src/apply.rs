//! The effect of each record on the attributes of the inodes that it names. The rules are those by which a digest
//! applies the record to the shared area, so that attributes are the same before and after the digest.

use format::node::{InodeItem, PERMISSION_BITS};
use format::record::{CreateBody, FileType, SetAttrBody};
use format::{BLOCK_BYTES, InodeNumber};
use vfs::Caller;
use vfs::access;
use vfs::engine::Attributes;
use zerocopy::little_endian::{I64, U32, U64};

/// Type of an inode that was accepted from SharedFS, or made here.
pub(crate) fn file_type(item: &InodeItem) -> FileType {
    FileType::of_mode(item.mode.get()).unwrap_or(FileType::Regular)
}

pub(crate) fn is_directory(item: &InodeItem) -> bool {
    file_type(item) == FileType::Directory
}

/// The attributes in the form of `vfs`.
pub(crate) fn attributes(inode: InodeNumber, item: &InodeItem) -> Attributes {
    Attributes {
        inode,
        file_type: file_type(item),
        mode: item.mode.get() & PERMISSION_BITS,
        uid: item.uid.get(),
        gid: item.gid.get(),
        links: item.links.get(),
        size: item.size.get(),
        blocks: item.blocks.get() * (format::BLOCK_BYTES as u64 / 512),
        rdev: item.rdev.get(),
        atime_ns: item.atime_ns.get(),
        mtime_ns: item.mtime_ns.get(),
        ctime_ns: item.ctime_ns.get(),
        btime_ns: item.btime_ns.get(),
        parent: item.parent,
    }
}

fn changed(item: &mut InodeItem, time_ns: i64) {
    item.ctime_ns = I64::new(time_ns);
}

fn contents_changed(item: &mut InodeItem, time_ns: i64) {
    item.mtime_ns = I64::new(time_ns);
    changed(item, time_ns);
}

/// Whether a change of the contents may change the permission bits.
#[inline]
pub(crate) fn has_set_ids(item: &InodeItem) -> bool {
    item.mode.get() & (access::SET_UID | access::SET_GID) != 0
}

/// Permission bits after a change of the contents by this caller.
pub(crate) fn mode_after_write(caller: &Caller, item: &InodeItem) -> u32 {
    access::after_write(caller, &attributes(InodeNumber::NONE, item))
}

/// Clears the set-id bits that a change of the contents by this caller clears.
#[inline]
fn clear_set_ids(item: &mut InodeItem, caller: &Caller) {
    if has_set_ids(item) {
        item.set_permissions(mode_after_write(caller, item));
    }
}

/// Applies a write that ends at `end`. `credential` is the log's.
#[inline]
pub(crate) fn write(item: &mut InodeItem, credential: &Caller, end: u64, time_ns: i64) {
    clear_set_ids(item, credential);
    item.size = U64::new(item.size.get().max(end));
    contents_changed(item, time_ns);
}

/// Applies a new size.
pub(crate) fn truncate(item: &mut InodeItem, credential: &Caller, size: u64, time_ns: i64) {
    clear_set_ids(item, credential);
    if size <= item.size.get() {
        // Nothing stays beyond the new end, reserved blocks neither.
        item.blocks.set(item.blocks.get().min(size.div_ceil(BLOCK_BYTES as u64)));
    }
    item.size = U64::new(size);
    contents_changed(item, time_ns);
}

/// Applies a reservation or a hole; `end` if the size grows to it.
pub(crate) fn allocate(item: &mut InodeItem, credential: &Caller, end: Option<u64>, time_ns: i64) {
    write(item, credential, end.unwrap_or(0), time_ns);
}

/// Applies a change of attributes.
pub(crate) fn set_attr(item: &mut InodeItem, body: &SetAttrBody, time_ns: i64) {
    body.change(item);
    changed(item, time_ns);
}

/// Applies the change or the removal of an extended attribute.
pub(crate) fn xattr(item: &mut InodeItem, time_ns: i64) {
    changed(item, time_ns);
}

/// The item of a new inode that has a name in a directory.
pub(crate) fn created(
    body: &CreateBody,
    parent: InodeNumber,
    target_bytes: usize,
    time_ns: i64,
) -> InodeItem {
    let directory = FileType::of_mode(body.mode.get()) == Some(FileType::Directory);
    let (links, parent) = if directory { (2, parent) } else { (1, InodeNumber::NONE) };
    let size = U64::new(target_bytes as u64);
    InodeItem { links: U32::new(links), size, parent, ..new_item(body, time_ns) }
}

/// The item of a new file without a name. A link may give it one if `linkable`.
pub(crate) fn created_unnamed(
    body: &CreateBody,
    parent: InodeNumber,
    linkable: bool,
    time_ns: i64,
) -> InodeItem {
    InodeItem { parent: if linkable { parent } else { InodeNumber::NONE }, ..new_item(body, time_ns) }
}

fn new_item(body: &CreateBody, time_ns: i64) -> InodeItem {
    let time = I64::new(time_ns);
    InodeItem {
        mode: body.mode,
        uid: body.uid,
        gid: body.gid,
        atime_ns: time,
        mtime_ns: time,
        ctime_ns: time,
        btime_ns: time,
        rdev: body.rdev,
        ..InodeItem::default()
    }
}

/// Applies a new entry to a directory.
pub(crate) fn entry_added(directory: &mut InodeItem, adds_directory: bool, time_ns: i64) {
    directory.size = U64::new(directory.size.get() + 1);
    directory.links = U32::new(directory.links.get() + u32::from(adds_directory));
    contents_changed(directory, time_ns);
}

/// Applies the removal of an entry to a directory.
pub(crate) fn entry_removed(directory: &mut InodeItem, was_directory: bool, time_ns: i64) {
    directory.size = U64::new(directory.size.get().saturating_sub(1));
    directory.links = U32::new(directory.links.get().saturating_sub(u32::from(was_directory)));
    contents_changed(directory, time_ns);
}

/// Applies an exchange after which an entry of the directory refers to an inode of another type.
pub(crate) fn entry_exchanged(directory: &mut InodeItem, was: bool, is: bool, time_ns: i64) {
    let links = directory.links.get() + u32::from(is);
    directory.links = U32::new(links.saturating_sub(u32::from(was)));
    contents_changed(directory, time_ns);
}

/// Applies another name, or the first one, to an inode that is no directory.
pub(crate) fn linked(item: &mut InodeItem, time_ns: i64) {
    item.parent = InodeNumber::NONE;
    item.links = U32::new(item.links.get() + 1);
    changed(item, time_ns);
}

/// Applies the removal of a name to an inode; a directory has only one.
pub(crate) fn lost_name(item: &mut InodeItem, time_ns: i64) {
    let links = if is_directory(item) { 0 } else { item.links.get().saturating_sub(1) };
    item.links = U32::new(links);
    changed(item, time_ns);
}

/// Applies a move of the inode's name to this directory.
pub(crate) fn moved(item: &mut InodeItem, to: InodeNumber, time_ns: i64) {
    if is_directory(item) {
        item.parent = to;
    }
    changed(item, time_ns);
}
