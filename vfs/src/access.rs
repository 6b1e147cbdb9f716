//! Permission checks: pure functions from a caller and attributes to a decision.
//!
//! All checks of the project use them: an engine calls them inside each operation, so that check and effect are one
//! instant, and the daemon calls them again when it takes an operation out of a log that it does not trust. The
//! rules and the order of the errors are those of Linux for a process that has all capabilities (uid 0) or none.

use crate::engine::{Access, Attributes, Changes, NewType, Removal, RenameMode, Result, SetTime};
use crate::error::Error;
use format::InodeNumber;
use format::record::FileType;

/// Set-user-id bit.
pub const SET_UID: u32 = 0o4000;
/// Set-group-id bit.
pub const SET_GID: u32 = 0o2000;
/// Sticky bit.
pub const STICKY: u32 = 0o1000;
/// Execute permission of the group.
const GROUP_EXECUTE: u32 = 0o010;

/// Permission to read; the values of the three are those of `access(2)`.
pub const READ: u32 = 4;
/// Permission to write.
pub const WRITE: u32 = 2;
/// Permission to execute a file, or to search a directory.
pub const EXECUTE: u32 = 1;

/// Credentials of a caller: the ids that count for files, and the supplementary groups.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Caller {
    /// User; 0 is root.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Caller {
    /// The superuser.
    pub const ROOT: Self = Self { uid: 0, gid: 0, groups: Vec::new() };

    /// True for root, which passes nearly all checks.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// True if the caller belongs to the group.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// True if the caller has the rights of the owner.
    pub fn owns(&self, attributes: &Attributes) -> bool {
        self.is_root() || self.uid == attributes.uid
    }
}

/// True if the permission bits allow everything in `wanted` (a sum of [`READ`], [`WRITE`], [`EXECUTE`]). Root has
/// every permission, except to execute a file that has no execute bit at all.
pub fn permits(caller: &Caller, attributes: &Attributes, wanted: u32) -> bool {
    if caller.is_root() {
        let executable = attributes.file_type == FileType::Directory || attributes.mode & 0o111 != 0;
        return wanted & EXECUTE == 0 || executable;
    }
    let shift = if caller.uid == attributes.uid {
        6
    } else if caller.in_group(attributes.gid) {
        3
    } else {
        0
    };
    wanted & !(attributes.mode >> shift) & 7 == 0
}

/// [`permits`] as a result.
///
/// # Errors
/// `Denied`.
pub fn check(caller: &Caller, attributes: &Attributes, wanted: u32) -> Result<()> {
    if permits(caller, attributes, wanted) { Ok(()) } else { Err(Error::Denied) }
}

/// Check for looking up a name in a directory.
///
/// # Errors
/// `NotDirectory`, `Denied`.
pub fn search(caller: &Caller, directory: &Attributes) -> Result<()> {
    if directory.file_type != FileType::Directory {
        return Err(Error::NotDirectory);
    }
    check(caller, directory, EXECUTE)
}

/// Check for opening an inode. Without any access, as with `O_PATH`, all can be opened, and no permission is needed.
///
/// # Errors
/// `Loop`, `IsDirectory`, `NoDevice`, `Denied`.
pub fn open(caller: &Caller, attributes: &Attributes, access: Access, truncate: bool) -> Result<()> {
    let writes = access.write || truncate;
    if !access.read && !writes {
        return Ok(());
    }
    match attributes.file_type {
        FileType::Regular => {}
        FileType::Directory if writes => return Err(Error::IsDirectory),
        FileType::Directory => {}
        FileType::Symlink => return Err(Error::Loop),
        _ => {
            check(caller, attributes, wanted(access.read, writes))?;
            return Err(Error::NoDevice);
        }
    }
    check(caller, attributes, wanted(access.read, writes))
}

fn wanted(read: bool, write: bool) -> u32 {
    u32::from(read) * READ + u32::from(write) * WRITE
}

/// Check for adding a name to a directory. The name must not exist.
///
/// # Errors
/// `NotFound` if the directory was removed, `Denied`.
pub fn add_entry(caller: &Caller, directory: &Attributes) -> Result<()> {
    if directory.links == 0 {
        return Err(Error::NotFound);
    }
    check(caller, directory, WRITE | EXECUTE)
}

/// Check for creating an inode of a type that needs more than the right to add an entry.
///
/// # Errors
/// `NotPermitted` for a device, unless the caller is root. Every caller may create the character device 0, a whiteout.
pub fn make(caller: &Caller, kind: &NewType<'_>) -> Result<()> {
    let device = matches!(kind, NewType::CharacterDevice(1..) | NewType::BlockDevice(_));
    if device && !caller.is_root() { Err(Error::NotPermitted) } else { Ok(()) }
}

/// Group and permission bits of a new inode that a call creates with `mode` under a umask. In a set-group-id directory
/// an inode gets the directory's group, a directory also gets the bit, and a file loses it if the bit would give the
/// caller a foreign group: by the mode before the umask, so also if the umask removes the group's execute permission.
pub fn inherit(
    caller: &Caller,
    directory: &Attributes,
    file_type: FileType,
    (mode, umask): (u32, u32),
) -> (u32, u32) {
    let masked = mode & 0o7777 & !(umask & 0o777);
    if directory.mode & SET_GID == 0 {
        return (caller.gid, masked);
    }
    if file_type == FileType::Directory {
        return (directory.gid, masked | SET_GID);
    }
    let gives_group = mode & (SET_GID | GROUP_EXECUTE) == SET_GID | GROUP_EXECUTE;
    let foreign = !caller.in_group(directory.gid) && !caller.is_root();
    (directory.gid, if gives_group && foreign { masked & !SET_GID } else { masked })
}

/// Check for removing the entry of `victim` from `directory`: write permission first, then the sticky bit, then
/// types.
///
/// # Errors
/// `Denied`, `NotPermitted`, `NotDirectory`, `IsDirectory`.
pub fn remove_entry(
    caller: &Caller,
    directory: &Attributes,
    victim: &Attributes,
    removal: Removal,
) -> Result<()> {
    check(caller, directory, WRITE | EXECUTE)?;
    if directory.mode & STICKY != 0 && !caller.owns(victim) && !caller.owns(directory) {
        return Err(Error::NotPermitted);
    }
    match (removal, victim.file_type == FileType::Directory) {
        (Removal::Directory, false) => Err(Error::NotDirectory),
        (Removal::File, true) => Err(Error::IsDirectory),
        _ => Ok(()),
    }
}

/// Check for giving an inode a name in `directory`. The name must not exist.
///
/// # Errors
/// `NotFound`, `Denied`, `NotPermitted` for a directory.
pub fn link(caller: &Caller, directory: &Attributes, inode: &Attributes) -> Result<()> {
    add_entry(caller, directory)?;
    if inode.file_type == FileType::Directory {
        return Err(Error::NotPermitted);
    }
    let may_have_names = inode.links > 0 || inode.parent != InodeNumber::NONE;
    if may_have_names { Ok(()) } else { Err(Error::NotFound) }
}

/// Check for renaming `source` from a directory to another; the new name refers to `target`. The caller has checked
/// before that source and target are different inodes, and that neither contains the other.
///
/// # Errors
/// `Denied`, `NotPermitted`, `NotDirectory`, `IsDirectory`, `NotFound`.
pub fn rename(
    caller: &Caller,
    from: &Attributes,
    source: &Attributes,
    to: &Attributes,
    target: Option<&Attributes>,
    mode: RenameMode,
) -> Result<()> {
    remove_entry(caller, from, source, removal_of(source))?;
    match target {
        None => add_entry(caller, to)?,
        Some(target) if mode == RenameMode::Exchange => {
            remove_entry(caller, to, target, removal_of(target))?;
        }
        Some(target) => remove_entry(caller, to, target, removal_of(source))?,
    }
    if from.inode == to.inode {
        return Ok(());
    }
    // The `..` of a directory changes when it gets another parent.
    if source.file_type == FileType::Directory {
        check(caller, source, WRITE)?;
    }
    match target {
        Some(target) if mode == RenameMode::Exchange && target.file_type == FileType::Directory => {
            check(caller, target, WRITE)
        }
        _ => Ok(()),
    }
}

fn removal_of(attributes: &Attributes) -> Removal {
    if attributes.file_type == FileType::Directory { Removal::Directory } else { Removal::File }
}

/// Permission bits after a write or a change of size: set-user-id is cleared, and set-group-id where it gives a
/// group. Root's writes clear neither.
pub fn after_write(caller: &Caller, attributes: &Attributes) -> u32 {
    if caller.is_root() || attributes.file_type != FileType::Regular {
        return attributes.mode;
    }
    without_set_ids(caller, attributes)
}

/// Clears set-user-id, and set-group-id if the group may execute or the caller is not in the group.
fn without_set_ids(caller: &Caller, attributes: &Attributes) -> u32 {
    let foreign = !caller.in_group(attributes.gid) && !caller.is_root();
    let drops_group = attributes.mode & GROUP_EXECUTE != 0 || foreign;
    attributes.mode & !SET_UID & if drops_group { !SET_GID } else { !0 }
}

/// Check for changes of attributes; returns the resulting permission bits. `may_write`: the right to change the
/// size was fixed when the file was opened.
///
/// # Errors
/// For the size: `IsDirectory`, `Invalid` for an inode that is no file, `Denied`. `NotPermitted` if only the owner
/// may make the change. `Denied` for times set to now by a caller who neither owns the inode nor may write it.
pub fn change(caller: &Caller, attributes: &Attributes, changes: &Changes, may_write: bool) -> Result<u32> {
    let owns = caller.owns(attributes);
    let mut mode = attributes.mode;
    if changes.size.is_some() {
        match attributes.file_type {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::IsDirectory),
            _ => return Err(Error::Invalid),
        }
        if !may_write {
            check(caller, attributes, WRITE)?;
        }
        mode = after_write(caller, attributes);
    }
    if changes.uid.is_some_and(|uid| !(caller.is_root() || owns && uid == attributes.uid)) {
        return Err(Error::NotPermitted);
    }
    let group_allowed = |gid| caller.is_root() || (owns && (gid == attributes.gid || caller.in_group(gid)));
    if changes.gid.is_some_and(|gid| !group_allowed(gid)) {
        return Err(Error::NotPermitted);
    }
    if changes.chown && attributes.file_type != FileType::Directory {
        mode = without_set_ids(caller, attributes);
        if mode != attributes.mode && !owns {
            return Err(Error::NotPermitted);
        }
    }
    if let Some(asked) = changes.mode {
        if !owns {
            return Err(Error::NotPermitted);
        }
        let gid = changes.gid.unwrap_or(attributes.gid);
        let foreign = !caller.in_group(gid) && !caller.is_root();
        mode = asked & 0o7777 & if foreign { !SET_GID } else { !0 };
    }
    change_times(caller, attributes, changes)?;
    Ok(mode)
}

fn change_times(caller: &Caller, attributes: &Attributes, changes: &Changes) -> Result<()> {
    match (changes.atime, changes.mtime) {
        (None, None) => Ok(()),
        _ if caller.owns(attributes) => Ok(()),
        (Some(SetTime::Now), Some(SetTime::Now)) => check(caller, attributes, WRITE),
        _ => Err(Error::NotPermitted),
    }
}

/// Name spaces of extended attributes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum XattrSpace {
    User,
    Trusted,
    Security,
    /// Access control lists, which this file system does not have.
    System,
    /// Any other prefix.
    Other,
}

/// The space of a name, and whether the name continues after the prefix.
fn xattr_space(name: &[u8]) -> (XattrSpace, bool) {
    let spaces: [(&[u8], _); 4] = [
        (b"user.", XattrSpace::User),
        (b"trusted.", XattrSpace::Trusted),
        (b"security.", XattrSpace::Security),
        (b"system.", XattrSpace::System),
    ];
    let found = spaces.iter().find(|(prefix, _)| name.starts_with(prefix));
    found.map_or((XattrSpace::Other, true), |(prefix, space)| (*space, name.len() > prefix.len()))
}

/// Error of a name that the caller has the right to use.
fn check_xattr_name((space, named): (XattrSpace, bool)) -> Result<()> {
    match space {
        XattrSpace::System | XattrSpace::Other => Err(Error::NotSupported),
        _ if named => Ok(()),
        _ => Err(Error::Invalid),
    }
}

/// True for the types that can have user attributes: files and directories.
fn has_user_xattrs(attributes: &Attributes) -> bool {
    matches!(attributes.file_type, FileType::Regular | FileType::Directory)
}

/// Check for reading an extended attribute.
///
/// # Errors
/// `NoData` for an attribute that the caller may not know of, `Denied`; then `NotSupported` for an unknown name
/// space, and `Invalid` for an empty name.
pub fn read_xattr(caller: &Caller, attributes: &Attributes, name: &[u8]) -> Result<()> {
    let space = xattr_space(name);
    match space.0 {
        XattrSpace::Trusted if !caller.is_root() => return Err(Error::NoData),
        XattrSpace::User if !has_user_xattrs(attributes) => return Err(Error::NoData),
        XattrSpace::User | XattrSpace::Other => check(caller, attributes, READ)?,
        _ => {}
    }
    check_xattr_name(space)
}

/// Check for setting or removing an extended attribute.
///
/// # Errors
/// `NotPermitted`, `Denied`; then as [`read_xattr`].
pub fn write_xattr(caller: &Caller, attributes: &Attributes, name: &[u8]) -> Result<()> {
    let space = xattr_space(name);
    match space.0 {
        XattrSpace::Trusted | XattrSpace::Security if !caller.is_root() => return Err(Error::NotPermitted),
        XattrSpace::User => {
            let sticky = attributes.file_type == FileType::Directory && attributes.mode & STICKY != 0;
            if !has_user_xattrs(attributes) || (sticky && !caller.owns(attributes)) {
                return Err(Error::NotPermitted);
            }
            check(caller, attributes, WRITE)?;
        }
        XattrSpace::Other => check(caller, attributes, WRITE)?,
        _ => {}
    }
    check_xattr_name(space)
}

/// True if a listing shows this attribute to the caller.
pub fn lists_xattr(caller: &Caller, name: &[u8]) -> bool {
    caller.is_root() || !name.starts_with(b"trusted.")
}
