//! Changes of attributes that a caller requests of an engine.

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
