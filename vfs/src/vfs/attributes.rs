//! Calls on attributes, plain and extended.

use super::{Vfs, failed};
use crate::access::{self, Caller};
use crate::engine::{Attributes, Changes, Engine, SetTime, SetXattr, Target};
use crate::error::Error;
use crate::file::File;
use crate::path::{Base, Outcome, Place, Stop};
use format::InodeNumber;
use format::name::NAME_BYTES_MAX;
use format::record::{FileType, XATTR_BYTES_MAX};
use libc::c_int;

/// The inode or file that a call is about.
#[derive(Clone, Copy)]
pub enum Subject<'a> {
    /// The target of a path.
    Path(Place<'a>),
    /// The target of a path; a symbolic link at its end is not followed.
    Link(Place<'a>),
    /// An open file, for a call that takes a descriptor (`fchmod`), which must not be opened with `O_PATH`.
    File(&'a File),
    /// A pinned inode; also that of an open file, for calls with `AT_EMPTY_PATH` and for `fstat`.
    Node(InodeNumber),
}

impl<'a> Subject<'a> {
    /// The subject of an `*at` call with these flags; `allowed` are the flags of that call.
    ///
    /// # Errors
    /// `Invalid` for other flags.
    pub fn of(place: Place<'a>, flags: c_int, allowed: c_int) -> Result<Self, Error> {
        if flags & !allowed != 0 {
            return Err(Error::Invalid);
        }
        if flags & libc::AT_EMPTY_PATH != 0 && place.path.is_empty() {
            return Ok(match place.base {
                Base::At(file) => Self::Node(file.inode),
                Base::Node(node) => Self::Node(node),
                Base::Cwd | Base::Root => Self::Path(Place { path: b".", ..place }),
            });
        }
        let follows = if allowed & libc::AT_SYMLINK_FOLLOW != 0 {
            flags & libc::AT_SYMLINK_FOLLOW != 0
        } else {
            flags & libc::AT_SYMLINK_NOFOLLOW == 0
        };
        Ok(if follows { Self::Path(place) } else { Self::Link(place) })
    }
}

/// Ids for which `access` checks permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessIds {
    /// The real ids.
    Real,
    /// The ids that count for files (`AT_EACCESS`).
    Effective,
}

/// New owner and group; `None` leaves the old one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
}

/// A time argument of `utimensat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeToSet {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, `UTIME_NOW` or `UTIME_OMIT`.
    pub nanoseconds: i64,
}

impl TimeToSet {
    fn meaning(self) -> Result<Option<SetTime>, Error> {
        match self.nanoseconds {
            libc::UTIME_NOW => Ok(Some(SetTime::Now)),
            libc::UTIME_OMIT => Ok(None),
            0..=999_999_999 => {
                // A time beyond 64 bits of nanoseconds is reduced to the limit, as Linux does for its file systems.
                let whole = self.seconds.saturating_mul(1_000_000_000);
                Ok(Some(SetTime::To(whole.saturating_add(self.nanoseconds))))
            }
            _ => Err(Error::Invalid),
        }
    }
}

impl<E: Engine> Vfs<E> {
    /// Runs a call on an inode.
    pub(super) fn subject<T>(
        &self,
        subject: Subject<'_>,
        act: impl Fn(&Caller, InodeNumber) -> Outcome<T>,
    ) -> Outcome<T> {
        self.with_attributes(self.caller().as_ref(), subject, |caller, node, _| act(caller, node))
    }

    /// The same with other credentials, and with the attributes that the walk returned.
    fn with_attributes<T>(
        &self,
        caller: &Caller,
        subject: Subject<'_>,
        act: impl Fn(&Caller, InodeNumber, Option<Attributes>) -> Outcome<T>,
    ) -> Outcome<T> {
        let (place, follow) = match subject {
            Subject::Path(place) => (place, true),
            Subject::Link(place) => (place, false),
            Subject::Node(node) => return act(caller, node, None),
            Subject::File(file) => {
                file.handle()?;
                return act(caller, file.inode, None);
            }
        };
        self.walking(caller, place, |walker| {
            walker.walk_lazily(place.path, follow)?;
            act(caller, walker.at(), walker.known())
        })
    }

    /// `stat`, `lstat`, `fstat`, `statx`.
    ///
    /// # Errors
    /// Those of paths.
    pub fn stat(&self, subject: Subject<'_>) -> Outcome<Attributes> {
        let subject = match subject {
            Subject::File(file) => Subject::Node(file.inode),
            other => other,
        };
        self.with_attributes(&self.caller(), subject, |_, node, known| match known {
            Some(attributes) => Ok(attributes),
            None => Ok(self.engine.getattr(Target::Node(node))?),
        })
    }

    /// `faccessat2`; `wanted` is a sum of `R_OK`, `W_OK` and `X_OK`, or `F_OK`.
    ///
    /// # Errors
    /// `Invalid` for other bits; `Denied`; those of paths.
    pub fn access(&self, subject: Subject<'_>, wanted: c_int, ids: AccessIds) -> Outcome<()> {
        if wanted & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
            return failed(Error::Invalid);
        }
        let caller = match ids {
            AccessIds::Real => self.process(|process| process.real.clone()),
            AccessIds::Effective => self.caller(),
        };
        self.with_attributes(&caller, subject, |caller, node, _| {
            let attributes = self.engine.getattr(Target::Node(node))?;
            Ok(access::check(caller, &attributes, wanted as u32)?)
        })
    }

    /// `fchmodat`, `fchmod`.
    ///
    /// # Errors
    /// `NotSupported` for a symbolic link; those of paths and of [`Engine::setattr`].
    pub fn chmod(&self, subject: Subject<'_>, mode: u32) -> Outcome<()> {
        self.subject(subject, |caller, node| {
            if matches!(subject, Subject::Link(_) | Subject::Node(_))
                && self.engine.getattr(Target::Node(node))?.file_type == FileType::Symlink
            {
                return failed(Error::NotSupported);
            }
            let changes = Changes { mode: Some(mode & 0o7777), ..Changes::default() };
            self.engine.setattr(caller, Target::Node(node), &changes)?;
            Ok(())
        })
    }

    /// `fchownat`, `fchown`.
    ///
    /// # Errors
    /// Those of paths and of [`Engine::setattr`].
    pub fn chown(&self, subject: Subject<'_>, owner: Owner) -> Outcome<()> {
        self.subject(subject, |caller, node| {
            let changes = Changes { chown: true, uid: owner.uid, gid: owner.gid, ..Changes::default() };
            self.engine.setattr(caller, Target::Node(node), &changes)?;
            Ok(())
        })
    }

    /// `utimensat`, `futimens`: time of last access, then of last change; `None` sets both to now.
    ///
    /// # Errors
    /// `Invalid` for impossible nanoseconds; those of paths and of [`Engine::setattr`].
    pub fn utimens(&self, subject: Subject<'_>, times: Option<[TimeToSet; 2]>) -> Outcome<()> {
        if times.is_some_and(|times| times.iter().all(|time| time.nanoseconds == libc::UTIME_OMIT)) {
            // The call has no effect: the kernel does not even resolve the path.
            return Ok(());
        }
        self.subject(subject, |caller, node| {
            let (atime, mtime) = match times {
                None => (Some(SetTime::Now), Some(SetTime::Now)),
                Some([atime, mtime]) => (atime.meaning()?, mtime.meaning()?),
            };
            let changes = Changes { atime, mtime, ..Changes::default() };
            self.engine.setattr(caller, Target::Node(node), &changes)?;
            Ok(())
        })
    }

    /// `getxattr`: the whole value.
    ///
    /// # Errors
    /// `OutOfRange` for a name that is empty or too long; those of paths and of [`Engine::get_xattr`].
    pub fn get_xattr(&self, subject: Subject<'_>, name: &[u8]) -> Outcome<Vec<u8>> {
        check_xattr_name(name)?;
        self.subject(subject, |caller, node| Ok(self.engine.get_xattr(caller, node, name)?))
    }

    /// `setxattr`; flags are `XATTR_CREATE` or `XATTR_REPLACE`; both together are always an error.
    ///
    /// # Errors
    /// `Invalid` for flags, `TooBig`, `OutOfRange`; those of paths and of [`Engine::set_xattr`].
    pub fn set_xattr(&self, subject: Subject<'_>, name: &[u8], value: &[u8], flags: c_int) -> Outcome<()> {
        let how = SetXattr::of_flags(flags)?;
        check_xattr_name(name)?;
        if value.len() > XATTR_BYTES_MAX {
            return failed(Error::TooBig);
        }
        self.subject(subject, |caller, node| Ok(self.engine.set_xattr(caller, node, name, value, how)?))
    }

    /// `listxattr`: names, each followed by a zero byte.
    ///
    /// # Errors
    /// Those of paths.
    pub fn list_xattrs(&self, subject: Subject<'_>) -> Outcome<Vec<u8>> {
        self.subject(subject, |caller, node| Ok(self.engine.list_xattrs(caller, node)?))
    }

    /// `removexattr`
    ///
    /// # Errors
    /// Those of paths and of [`Engine::remove_xattr`].
    pub fn remove_xattr(&self, subject: Subject<'_>, name: &[u8]) -> Outcome<()> {
        check_xattr_name(name)?;
        self.subject(subject, |caller, node| Ok(self.engine.remove_xattr(caller, node, name)?))
    }
}

fn check_xattr_name(name: &[u8]) -> Outcome<()> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) { Ok(()) } else { Err(Stop::Failed(Error::OutOfRange)) }
}
