//! Changes of attributes that a caller requests of an engine, and their conditions.

use crate::error::Error;

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetTime {
    /// The engine's clock at the instant of the operation.
    Now,
    /// Nanoseconds since 1970.
    To(i64),
}

/// Changes of attributes, applied together or not at all. Each of them sets the time of the last change of
/// attributes, even one that changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// New permission bits (twelve).
    pub mode: Option<u32>,
    /// True for a `chown`, even one that gives neither `uid` nor `gid`: it clears set-id bits.
    pub chown: bool,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size. Through an open file it sets the times even if the size stays the same.
    pub size: Option<u64>,
    /// New time of last access.
    pub atime: Option<SetTime>,
    /// New time of last change of the contents.
    pub mtime: Option<SetTime>,
}

/// Condition of `Engine::set_xattr` on an existing value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetXattr {
    /// None.
    Any,
    /// The attribute must not exist.
    Create,
    /// The attribute must exist.
    Replace,
    /// Both at once, which is an error of each attribute: it exists, or it does not.
    CreateAndReplace,
}

impl SetXattr {
    /// The condition of these flags of `setxattr`.
    ///
    /// # Errors
    /// `Invalid` for other flags.
    pub fn of_flags(flags: i32) -> Result<Self, Error> {
        const BOTH: i32 = libc::XATTR_CREATE | libc::XATTR_REPLACE;
        match flags {
            0 => Ok(Self::Any),
            libc::XATTR_CREATE => Ok(Self::Create),
            libc::XATTR_REPLACE => Ok(Self::Replace),
            BOTH => Ok(Self::CreateAndReplace),
            _ => Err(Error::Invalid),
        }
    }

    /// Checks the condition.
    ///
    /// # Errors
    /// `Exists`, `NoData`.
    pub fn check(self, exists: bool) -> Result<(), Error> {
        match (self, exists) {
            (Self::Create | Self::CreateAndReplace, true) => Err(Error::Exists),
            (Self::Replace | Self::CreateAndReplace, false) => Err(Error::NoData),
            _ => Ok(()),
        }
    }
}
