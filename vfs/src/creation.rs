//! Parameters and results of the operations that create inodes: [`crate::Engine::create`] and
//! [`crate::Engine::create_unnamed`].

use crate::engine::{Access, Attributes, Handle};
use format::record::FileType;

/// Type of an inode to create, with its type's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewType<'a> {
    /// A file, and the rights with which it is opened at the same instant, if any: the creator may write a new file
    /// whatever its mode says.
    Regular(Option<Access>),
    /// A directory.
    Directory,
    /// A symbolic link with this target: 1 to [`format::record::SYMLINK_BYTES_MAX`] bytes.
    Symlink(&'a [u8]),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharacterDevice(u64),
    /// A block device.
    BlockDevice(u64),
}

impl NewType<'_> {
    /// The type without parameters.
    pub const fn file_type(&self) -> FileType {
        match self {
            Self::Regular(_) => FileType::Regular,
            Self::Directory => FileType::Directory,
            Self::Symlink(_) => FileType::Symlink,
            Self::Fifo => FileType::Fifo,
            Self::Socket => FileType::Socket,
            Self::CharacterDevice(_) => FileType::CharacterDevice,
            Self::BlockDevice(_) => FileType::BlockDevice,
        }
    }
}

/// Parameters of a creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New<'a> {
    /// Type of the new inode.
    pub kind: NewType<'a>,
    /// Permission bits (twelve) that the call asked for.
    pub mode: u32,
    /// Permission bits that the new inode does not get. [`crate::access::inherit`] applies them, because the
    /// set-group-id bit depends on the mode before.
    pub umask: u32,
    /// True: a name that exists is an error, `Exists`. False: the existing inode is returned, whatever its type,
    /// and even if the caller may not write to the directory.
    pub exclusive: bool,
}

/// Parameters of [`crate::Engine::create_unnamed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewUnnamed {
    /// Rights with which the file is opened, whatever its mode says.
    pub access: Access,
    /// Permission bits (twelve) that the call asked for.
    pub mode: u32,
    /// Permission bits that the new inode does not get. [`crate::access::inherit`] applies them, because the
    /// set-group-id bit depends on the mode before.
    pub umask: u32,
    /// [`crate::Engine::link`] may give the file a name.
    pub linkable: bool,
}

/// Result of [`crate::Engine::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// The inode was created, and opened if the call asked for that.
    New(Attributes, Option<Handle>),
    /// The name existed; nothing was changed.
    Existing(Attributes),
}
