//! The one place where errors become numbers.

use crate::error::Error;
use libc::c_int;

/// The number that a program sees in `errno`.
pub const fn number(error: Error) -> c_int {
    match error {
        Error::NotPermitted => libc::EPERM,
        Error::NotFound => libc::ENOENT,
        Error::Interrupted => libc::EINTR,
        Error::Io => libc::EIO,
        Error::NoDevice => libc::ENXIO,
        Error::TooBig => libc::E2BIG,
        Error::BadDescriptor => libc::EBADF,
        Error::WouldBlock => libc::EAGAIN,
        Error::Denied => libc::EACCES,
        Error::BadAddress => libc::EFAULT,
        Error::Busy => libc::EBUSY,
        Error::Exists => libc::EEXIST,
        Error::CrossDevice => libc::EXDEV,
        Error::NotDirectory => libc::ENOTDIR,
        Error::IsDirectory => libc::EISDIR,
        Error::Invalid => libc::EINVAL,
        Error::TooManyFiles => libc::ENFILE,
        Error::FileTooBig => libc::EFBIG,
        Error::NoSpace => libc::ENOSPC,
        Error::IllegalSeek => libc::ESPIPE,
        Error::ReadOnly => libc::EROFS,
        Error::TooManyLinks => libc::EMLINK,
        Error::OutOfRange => libc::ERANGE,
        Error::Deadlock => libc::EDEADLK,
        Error::NameTooLong => libc::ENAMETOOLONG,
        Error::NoLocks => libc::ENOLCK,
        Error::NotEmpty => libc::ENOTEMPTY,
        Error::Loop => libc::ELOOP,
        Error::NoData => libc::ENODATA,
        Error::Overflow => libc::EOVERFLOW,
        Error::Stale => libc::ESTALE,
        Error::NotSupported => libc::EOPNOTSUPP,
    }
}
