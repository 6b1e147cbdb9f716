//! Mapping of this crate's errors to the numbers of `errno`, and of the numbers to their names.

use crate::error::Error;
use libc::c_int;

/// The number that a program sees in `errno`.
pub const fn number(error: Error) -> c_int {
    match error {
        Error::NotPermitted => libc::EPERM,
        Error::NotFound => libc::ENOENT,
        Error::Interrupted => libc::EINTR,
        Error::Restart => libc::ERESTART,
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

/// The name of a number; `None` for a number that [`number`] never returns.
pub const fn name(number: c_int) -> Option<&'static str> {
    Some(match number {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EINTR => "EINTR",
        libc::ERESTART => "ERESTART",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::E2BIG => "E2BIG",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::EEXIST => "EEXIST",
        libc::EXDEV => "EXDEV",
        libc::ENOTDIR => "ENOTDIR",
        libc::EISDIR => "EISDIR",
        libc::EINVAL => "EINVAL",
        libc::ENFILE => "ENFILE",
        libc::EFBIG => "EFBIG",
        libc::ENOSPC => "ENOSPC",
        libc::ESPIPE => "ESPIPE",
        libc::EROFS => "EROFS",
        libc::EMLINK => "EMLINK",
        libc::ERANGE => "ERANGE",
        libc::EDEADLK => "EDEADLK",
        libc::ENAMETOOLONG => "ENAMETOOLONG",
        libc::ENOLCK => "ENOLCK",
        libc::ENOTEMPTY => "ENOTEMPTY",
        libc::ELOOP => "ELOOP",
        libc::ENODATA => "ENODATA",
        libc::EOVERFLOW => "EOVERFLOW",
        libc::ESTALE => "ESTALE",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        _ => return None,
    })
}
