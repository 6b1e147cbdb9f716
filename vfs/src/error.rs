//! Errors of operations: one enum for this crate and for every engine. `errno` maps its values to numbers.

/// Reason why an operation failed. The comments give the number and its meaning to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Error {
    /// `EPERM`: only the owner, or root, may do it.
    NotPermitted,
    /// `ENOENT`
    NotFound,
    /// `EINTR`: a signal ended the wait; the operation had no effect.
    Interrupted,
    /// `ERESTART`: the operation had no effect, and the process changed its user meanwhile. The front end repeats
    /// the call; no program sees this error.
    Restart,
    /// `EIO`: the medium failed, or the node was expelled; the file stays bad until it is opened again.
    Io,
    /// `ENXIO`: no data or hole follows; or a device, pipe or socket that this tree only names.
    NoDevice,
    /// `E2BIG`: the value of an extended attribute is too long.
    TooBig,
    /// `EBADF`: no such descriptor, or a descriptor that is not open for this use.
    BadDescriptor,
    /// `EAGAIN`: the operation would have to wait, and the caller forbids that.
    WouldBlock,
    /// `EACCES`: the permission bits do not allow it.
    Denied,
    /// `EFAULT`: the given memory cannot be read or written; the operation had no effect.
    BadAddress,
    /// `EBUSY`: the operation is about the root of the tree.
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
    /// `EMFILE`: the process has no number for a descriptor that the engine needs.
    NoDescriptors,
    /// `ENOMEM`: the process has no address space for the engine.
    NoMemory,
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
    /// `EDEADLK`: the wait for this lock would never end.
    Deadlock,
    /// `ENAMETOOLONG`
    NameTooLong,
    /// `ENOLCK`: more locks than the engine keeps.
    NoLocks,
    /// `ENOTEMPTY`
    NotEmpty,
    /// `ELOOP`: more than 40 symbolic links, or a link where none may be followed.
    Loop,
    /// `ENODATA`: no such extended attribute.
    NoData,
    /// `EOVERFLOW`
    Overflow,
    /// `ESTALE`: the caller never walked to the inode, or has forgotten it.
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
