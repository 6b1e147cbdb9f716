//! Why an operation did not happen. One enum for this crate and for every engine; `errno` is the one place where
//! its values become numbers.

/// Why an operation did not happen. The comment names what the values mean to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Error {
    /// `EPERM`: only the owner, or root, may do it.
    NotPermitted,
    /// `ENOENT`
    NotFound,
    /// `EINTR`: a signal came while waiting; nothing happened.
    Interrupted,
    /// `ERESTART`: nothing happened, and the process became another user meanwhile: whoever asked asks again. No program sees
    /// it.
    Restart,
    /// `EIO`: the medium failed, or the node was expelled; the file stays bad until it is opened anew.
    Io,
    /// `ENXIO`: no data or hole there; or nothing behind a device, pipe or socket.
    NoDevice,
    /// `E2BIG`: the value of an extended attribute is too long.
    TooBig,
    /// `EBADF`: no such descriptor, or not open for this.
    BadDescriptor,
    /// `EAGAIN`: it would have to wait, and was asked not to.
    WouldBlock,
    /// `EACCES`: the permission bits do not allow it.
    Denied,
    /// `EFAULT`: the memory given cannot be read or written; nothing happened.
    BadAddress,
    /// `EBUSY`: the root of the tree.
    Busy,
    /// `EEXIST`
    Exists,
    /// `EXDEV`: the two names belong to different engines, chains or mounts.
    CrossDevice,
    /// `ENOTDIR`
    NotDirectory,
    /// `EISDIR`
    IsDirectory,
    /// `EINVAL`
    Invalid,
    /// `ENFILE`: more open files than the engine keeps.
    TooManyFiles,
    /// `EFBIG`: beyond [`format::record::FILE_BYTES_MAX`].
    FileTooBig,
    /// `ENOSPC`
    NoSpace,
    /// `ESPIPE`
    IllegalSeek,
    /// `EROFS`
    ReadOnly,
    /// `EMLINK`
    TooManyLinks,
    /// `ERANGE`: the buffer is too small for the value.
    OutOfRange,
    /// `EDEADLK`: waiting for this lock would never end.
    Deadlock,
    /// `ENAMETOOLONG`
    NameTooLong,
    /// `ENOLCK`: more locks than the engine keeps.
    NoLocks,
    /// `ENOTEMPTY`
    NotEmpty,
    /// `ELOOP`: more than 40 symbolic links, or one where none may be followed.
    Loop,
    /// `ENODATA`: no such extended attribute.
    NoData,
    /// `EOVERFLOW`
    Overflow,
    /// `ESTALE`: the node was never walked to, or was forgotten.
    Stale,
    /// `EOPNOTSUPP`
    NotSupported,
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?} (errno {})", crate::errno::number(*self))
    }
}

impl std::error::Error for Error {}
