//! Calls that create, rename and remove names.

use super::{Entry, Vfs, at_entry, failed};
use crate::access::Caller;
use crate::engine::{Created, Engine, New, NewType, Removal, RenameMode, Target};
use crate::error::Error;
use crate::path::{Base, Last, Outcome, Place, Stop};
use crate::vfs::Subject;
use format::InodeNumber;
use format::record::{FileType, SYMLINK_BYTES_MAX};

/// Permission bits that `mkdir` accepts.
const DIRECTORY_MODE: u32 = 0o1777;

impl<E: Engine> Vfs<E> {
    /// `mkdirat`
    ///
    /// # Errors
    /// Those of paths and of [`Engine::create`].
    pub fn mkdir(&self, place: Place<'_>, mode: u32) -> Outcome<()> {
        let (mode, umask) = (mode & DIRECTORY_MODE, self.current_umask());
        let new = New { kind: NewType::Directory, mode, umask, exclusive: true };
        self.make(place, &new)
    }

    /// `mknodat`: `mode` includes the type; no type means a file.
    ///
    /// # Errors
    /// `NotPermitted` for a directory, `Invalid` for an unknown type; those of paths and of [`Engine::create`].
    pub fn mknod(&self, place: Place<'_>, mode: u32, device: u64) -> Outcome<()> {
        let kind = match mode & libc::S_IFMT {
            0 | libc::S_IFREG => NewType::Regular(None),
            libc::S_IFIFO => NewType::Fifo,
            libc::S_IFSOCK => NewType::Socket,
            libc::S_IFCHR => NewType::CharacterDevice(device),
            libc::S_IFBLK => NewType::BlockDevice(device),
            libc::S_IFDIR => return failed(Error::NotPermitted),
            _ => return failed(Error::Invalid),
        };
        let (mode, umask) = (mode & 0o7777, self.current_umask());
        self.make(place, &New { kind, mode, umask, exclusive: true })
    }

    /// `symlinkat`
    ///
    /// # Errors
    /// `NotFound` for an empty target, `NameTooLong`; those of paths and of [`Engine::create`].
    pub fn symlink(&self, target: &[u8], place: Place<'_>) -> Outcome<()> {
        if target.is_empty() {
            return failed(Error::NotFound);
        }
        if target.len() > SYMLINK_BYTES_MAX {
            return failed(Error::NameTooLong);
        }
        self.make(place, &New { kind: NewType::Symlink(target), mode: 0o777, umask: 0, exclusive: true })
    }

    /// `readlinkat`: returns the whole target. An empty path reads the link that was opened with `O_PATH`.
    ///
    /// # Errors
    /// `Invalid` for an inode that is no link; those of paths.
    pub fn readlink(&self, place: Place<'_>) -> Outcome<Vec<u8>> {
        match place.base {
            Base::At(file) if place.path.is_empty() && file.file_type == FileType::Symlink => {
                Ok(self.engine.readlink(file.inode)?)
            }
            _ => self.subject(Subject::Link(place), |_, node| Ok(self.engine.readlink(node)?)),
        }
    }

    /// `linkat`: adds a name to the inode of `from`.
    ///
    /// # Errors
    /// Those of paths and of [`Engine::link`].
    pub fn link(&self, from: Subject<'_>, to: Place<'_>) -> Outcome<()> {
        self.subject(from, |caller, node| {
            let made = self.walking_once(caller, to, |walker| {
                at_entry(walker, to, no_new_name, |caller, entry| {
                    self.refuse_slash(caller, &entry)?;
                    self.check_link_source(caller, node, &entry)?;
                    let attributes = self.engine.link(caller, node, entry.parent, entry.name)?;
                    self.engine.forget(&[attributes.inode]);
                    Ok(())
                })
            });
            made.map_err(Stop::second)
        })
    }

    /// Applies the setting about hard links to files of others. That the new name exists is detected before.
    fn check_link_source(&self, caller: &Caller, node: InodeNumber, entry: &Entry<'_>) -> Outcome<()> {
        if caller.is_root() {
            return Ok(());
        }
        let source = self.engine.getattr(Target::Node(node))?;
        if caller.owns(&source) || (self.protections)().permit_link(caller, &source) {
            return Ok(());
        }
        match self.look(caller, entry) {
            Ok(_) => failed(Error::Exists),
            Err(Stop::Failed(Error::NotFound)) => failed(Error::NotPermitted),
            Err(stop) => Err(stop),
        }
    }

    /// `unlinkat` without flags.
    ///
    /// # Errors
    /// Those of paths and of [`Engine::unlink`].
    pub fn unlink(&self, place: Place<'_>) -> Outcome<()> {
        self.on_entry(
            place,
            |_| Error::IsDirectory,
            |caller, entry| {
                if entry.slash {
                    let directory = self.look(caller, &entry)?.file_type == FileType::Directory;
                    return failed(if directory { Error::IsDirectory } else { Error::NotDirectory });
                }
                Ok(self.engine.unlink(caller, entry.parent, entry.name, Removal::File)?)
            },
        )
    }

    /// `unlinkat` with `AT_REMOVEDIR`.
    ///
    /// # Errors
    /// `Busy` for the root, `Invalid` for `.`, `NotEmpty` for `..`; those of paths and of [`Engine::unlink`].
    pub fn rmdir(&self, place: Place<'_>) -> Outcome<()> {
        let no_name = |last: &Last| match last {
            Last::Dot => Error::Invalid,
            Last::DotDot => Error::NotEmpty,
            _ => Error::Busy,
        };
        self.on_entry(place, no_name, |caller, entry| {
            Ok(self.engine.unlink(caller, entry.parent, entry.name, Removal::Directory)?)
        })
    }

    /// `renameat2`; the flags are those of [`RenameMode::of_flags`].
    ///
    /// # Errors
    /// `Invalid` for flags, `Busy` for `.`, `..` and the root; those of paths and of [`Engine::rename`].
    pub fn rename(&self, from: Place<'_>, to: Place<'_>, flags: u32) -> Outcome<()> {
        let mode = RenameMode::of_flags(flags)?;
        let caller = self.caller();
        self.walking(&caller, from, |source| {
            let from_last = source.walk_to_parent(from.path)?;
            source.search_here()?;
            let from_parent = source.at();
            let second = self.walking_once(&caller, to, |target| {
                let to_last = target.walk_to_parent(to.path)?;
                target.search_here()?;
                Ok((to_last, self.keep(target, target.at())?))
            });
            let (to_last, to_parent) = second.map_err(Stop::second)?;
            let result = self.rename_entries(&caller, (from_parent, &from_last), (to_parent, &to_last), mode);
            self.engine.forget(&[to_parent]);
            result
        })
    }

    fn rename_entries(
        &self,
        caller: &Caller,
        (from_parent, from): (InodeNumber, &Last),
        (to_parent, to): (InodeNumber, &Last),
        mode: RenameMode,
    ) -> Outcome<()> {
        if !matches!(from, Last::Name(..)) {
            return failed(Error::Busy);
        }
        if !matches!(to, Last::Name(..)) {
            let taken = matches!(mode, RenameMode::NoReplace { .. });
            return failed(if taken { Error::Exists } else { Error::Busy });
        }
        let from = entry_of(from_parent, from)?;
        let to = match entry_of(to_parent, to) {
            Ok(to) => to,
            // A missing source is detected before this error.
            Err(error) => return self.look(caller, &from).and(failed(error)),
        };
        if from.slash || to.slash {
            self.check_slashes(caller, &from, &to, mode)?;
        }
        Ok(self.engine.rename(caller, (from.parent, from.name), (to.parent, to.name), mode)?)
    }

    /// Slashes after a name are allowed only for a directory.
    fn check_slashes(
        &self,
        caller: &Caller,
        from: &Entry<'_>,
        to: &Entry<'_>,
        mode: RenameMode,
    ) -> Outcome<()> {
        let source = self.look(caller, from)?;
        let target = match self.look(caller, to) {
            Ok(target) => Some(target.file_type),
            Err(Stop::Failed(Error::NotFound)) => None,
            Err(stop) => return Err(stop),
        };
        match (mode, target) {
            (RenameMode::NoReplace { .. }, Some(_)) => return failed(Error::Exists),
            (RenameMode::Exchange, None) => return failed(Error::NotFound),
            (RenameMode::Exchange, Some(target)) if to.slash && target != FileType::Directory => {
                return failed(Error::NotDirectory);
            }
            _ => {}
        }
        let wrong = from.slash || mode != RenameMode::Exchange;
        if source.file_type != FileType::Directory && wrong { failed(Error::NotDirectory) } else { Ok(()) }
    }

    fn make(&self, place: Place<'_>, new: &New<'_>) -> Outcome<()> {
        self.on_entry(place, no_new_name, |caller, entry| {
            if new.kind != NewType::Directory {
                self.refuse_slash(caller, &entry)?;
            }
            match self.engine.create(caller, entry.parent, entry.name, new)? {
                Created::New(attributes, _) | Created::Existing(attributes) => {
                    self.engine.forget(&[attributes.inode]);
                }
            }
            Ok(())
        })
    }

    /// Fails for a new name of a file with slashes after it.
    fn refuse_slash(&self, caller: &Caller, entry: &Entry<'_>) -> Outcome<()> {
        if !entry.slash {
            return Ok(());
        }
        self.look(caller, entry)?;
        failed(Error::Exists)
    }
}

fn no_new_name(_: &Last) -> Error {
    Error::Exists
}

/// The entry of a path that ends in a name.
fn entry_of(parent: InodeNumber, last: &Last) -> Result<Entry<'_>, Error> {
    let (name, slash) = last.name()?.ok_or(Error::Busy)?;
    Ok(Entry { parent, name, slash })
}
