//! Changes of attributes, as an engine is asked for them.

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetTime {
    /// The engine's clock, at the instant of the operation.
    Now,
    /// Nanoseconds since 1970.
    To(i64),
}

/// Changes of attributes, made together or not at all. Every one sets the time of the change of status, also
/// one that asks for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// New permission bits (twelve).
    pub mode: Option<u32>,
    /// It is a `chown`, even if neither `uid` nor `gid` is given: set-id bits are cleared.
    pub chown: bool,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size. Through an open file it sets the times also if the size stays.
    pub size: Option<u64>,
    /// New time of last access.
    pub atime: Option<SetTime>,
    /// New time of last change of the contents.
    pub mtime: Option<SetTime>,
}
