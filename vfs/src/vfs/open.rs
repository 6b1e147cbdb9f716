//! `open`, `openat2` and `close`.

use super::Vfs;
use crate::access::{self, Caller};
use crate::engine::{Access, Attributes, Created, Engine, Handle, New, NewType, NewUnnamed};
use crate::error::Error;
use crate::file::File;
use crate::path::{Base, Last, Outcome, Place, Restriction, Scope, Stop, Walker};
use format::record::FileType;
use libc::c_int;

/// Flags that affect only the opening and are not kept.
const NOT_KEPT: c_int = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC | libc::O_CLOEXEC;

/// Flags that are valid beside `O_PATH`.
const WITH_PATH: c_int = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;

/// The bit of `O_TMPFILE` that `O_DIRECTORY` does not have.
const TMPFILE: c_int = libc::O_TMPFILE & !libc::O_DIRECTORY;

/// Decoded flags of `open`.
struct OpenFlags {
    flags: c_int,
    access: Access,
    truncate: bool,
}

impl OpenFlags {
    fn has(&self, flag: c_int) -> bool {
        self.flags & flag != 0
    }
}

impl<E: Engine> Vfs<E> {
    /// `openat`. The flags are Linux's; `O_DIRECT` is a hint without effect.
    ///
    /// # Errors
    /// Those of paths, and of [`Engine::open`], [`Engine::create`] and, for `O_TMPFILE`, [`Engine::create_unnamed`];
    /// [`Stop::Special`] for a file that the kernel must open.
    pub fn open(&self, place: Place<'_>, flags: c_int, mode: u32) -> Outcome<File> {
        self.open_within(place, flags, mode, Restriction::default())
    }

    /// `openat2`: the same with restrictions on the resolution.
    ///
    /// # Errors
    /// As [`Vfs::open`]; `CrossDevice` for a path that leaves its scope, `Loop` for a link that may not be
    /// followed.
    pub fn open_within(
        &self,
        place: Place<'_>,
        flags: c_int,
        mode: u32,
        restriction: Restriction,
    ) -> Outcome<File> {
        let how = take_apart(flags)?;
        let caller = self.caller();
        let place = match (restriction.scope, place.path.first()) {
            (Scope::Beneath, Some(b'/')) => return Err(Error::CrossDevice.into()),
            (Scope::InRoot, Some(b'/')) => {
                let slashes = place.path.iter().take_while(|byte| **byte == b'/').count();
                let rest = &place.path[slashes..];
                Place { path: if rest.is_empty() { b"." } else { rest }, ..place }
            }
            _ => place,
        };
        self.walking(&caller, place, |walker| {
            walker.restrict(restriction);
            if how.has(libc::O_CREAT) {
                return self.open_or_create(walker, &caller, place.path, &how, mode);
            }
            let attributes = walker.walk_to_end(place.path, !how.has(libc::O_NOFOLLOW))?;
            self.open_end(walker, &caller, &attributes, &how, mode)
        })
    }

    /// Opens the inode of a description once more, whatever names it has: `open` of `/proc/self/fd/N`.
    ///
    /// # Errors
    /// As [`Vfs::open`]; `Loop` for a symbolic link, `IsDirectory` for `O_CREAT` and a directory.
    pub fn reopen(&self, file: &File, flags: c_int, mode: u32) -> Outcome<File> {
        let how = take_apart(flags)?;
        let caller = self.caller();
        let itself = Place { base: Base::Node(file.inode), path: b"." };
        self.walking(&caller, itself, |walker| {
            let attributes = walker.here()?;
            let directory = attributes.file_type == FileType::Directory;
            if how.has(libc::O_CREAT) && directory {
                return Err(Error::IsDirectory.into());
            }
            if how.has(libc::O_DIRECTORY) && !directory {
                return Err(Error::NotDirectory.into());
            }
            self.open_end(walker, &caller, &attributes, &how, mode)
        })
    }

    /// Opens the inode at the end of a walk, or with `O_TMPFILE` a new file in it.
    fn open_end(
        &self,
        walker: &mut Walker<'_, E>,
        caller: &Caller,
        attributes: &Attributes,
        how: &OpenFlags,
        mode: u32,
    ) -> Outcome<File> {
        if !how.has(TMPFILE) {
            return self.open_node(walker, caller, attributes, how);
        }
        let (mode, umask) = (mode & 0o7777, self.current_umask());
        let new = NewUnnamed { access: how.access, mode, umask, linkable: !how.has(libc::O_EXCL) };
        let (attributes, handle) = self.engine.create_unnamed(caller, attributes.inode, &new)?;
        Ok(file(&attributes, Some(handle), how))
    }

    /// Makes a description of a file that another process opened with these flags and passed to this one. The
    /// engine has opened the file for this process already and pinned its inode.
    ///
    /// # Errors
    /// `Invalid` for flags with which no file can be opened.
    pub fn adopt(&self, attributes: &Attributes, handle: Handle, flags: c_int) -> Result<File, Error> {
        let how = take_apart(flags)?;
        Ok(file(attributes, Some(handle), &how))
    }

    /// Closes one descriptor of a file, which ends the process's own locks on the file. `last`: the descriptor is
    /// the last one of the description in all processes, so the description ends too.
    pub fn close(&self, file: &File, last: bool) {
        if !file.is_path() {
            self.engine.release(self.owner, Some(file.inode));
        }
        if last {
            self.end_description(file);
        }
    }

    /// Ends a description with its locks. The process's own locks on the file stay.
    pub fn end_description(&self, file: &File) {
        if !file.is_path() {
            self.engine.release(file.owner, Some(file.inode));
        }
        self.discard(file);
    }

    /// Ends one of two openings of a description that goes on with the other one: no lock ends, neither of the
    /// description nor of the process.
    pub fn discard(&self, file: &File) {
        if let Some(handle) = file.handle {
            self.engine.close(handle);
        }
        self.engine.forget(&[file.inode]);
    }

    fn open_or_create(
        &self,
        walker: &mut Walker<'_, E>,
        caller: &Caller,
        path: &[u8],
        how: &OpenFlags,
        mode: u32,
    ) -> Outcome<File> {
        let mut last = walker.walk_to_parent(path)?;
        let exclusive = how.has(libc::O_EXCL);
        // Each iteration follows one link, which the walker counts.
        loop {
            if matches!(last, Last::Name(_, true)) {
                walker.search_here()?;
                return Err(Error::IsDirectory.into());
            }
            let Some((name, _)) = last.name()? else {
                if last == Last::DotDot {
                    walker.check_ascent()?;
                }
                return Err(if exclusive { Error::Exists } else { Error::IsDirectory }.into());
            };
            let (mode, umask) = (mode & 0o7777, self.current_umask());
            let new = New { kind: NewType::Regular(Some(how.access)), mode, umask, exclusive };
            let existing = match self.engine.create(caller, walker.at(), name, &new)? {
                Created::New(attributes, handle) => return Ok(file(&attributes, handle, how)),
                Created::Existing(attributes) => attributes,
            };
            walker.pins.push(existing.inode);
            match existing.file_type {
                FileType::Symlink if !how.has(libc::O_NOFOLLOW) => {
                    last = walker.follow_to_parent(&existing)?
                }
                FileType::Directory => return Err(Error::IsDirectory.into()),
                _ => {
                    self.check_open_to_create(walker, caller, &existing)?;
                    return self.open_node(walker, caller, &existing, how);
                }
            }
        }
    }

    /// Applies the settings about files of others, in directories to which many users may write.
    fn check_open_to_create(
        &self,
        walker: &mut Walker<'_, E>,
        caller: &Caller,
        file: &Attributes,
    ) -> Outcome<()> {
        if file.uid == caller.uid {
            return Ok(());
        }
        Ok((self.protections)().open_to_create(caller, &walker.here()?, file)?)
    }

    fn open_node(
        &self,
        walker: &mut Walker<'_, E>,
        caller: &Caller,
        attributes: &Attributes,
        how: &OpenFlags,
    ) -> Outcome<File> {
        if how.has(libc::O_DIRECTORY) && attributes.file_type != FileType::Directory {
            return Err(Error::NotDirectory.into());
        }
        if how.has(libc::O_PATH) {
            // Open with no right, so that the inode stays if its last name is removed.
            let (handle, attributes) =
                self.engine.open(caller, attributes.inode, Access::default(), false)?;
            self.keep(walker, attributes.inode)?;
            return Ok(file(&attributes, Some(handle), how));
        }
        let allowed = access::open(caller, attributes, how.access, how.truncate);
        let may = matches!(allowed, Ok(()) | Err(Error::NoDevice));
        if how.has(libc::O_NOATIME) && may && !caller.owns(attributes) {
            return Err(Error::NotPermitted.into());
        }
        let opened = self.engine.open(caller, attributes.inode, how.access, how.truncate);
        let (handle, attributes) = match opened {
            Err(Error::NoDevice) if attributes.file_type != FileType::Socket && !is_whiteout(attributes) => {
                return Err(Stop::Special(attributes.file_type));
            }
            other => other?,
        };
        self.keep(walker, attributes.inode)?;
        Ok(file(&attributes, Some(handle), how))
    }
}

/// A device that no kernel has a driver for.
fn is_whiteout(attributes: &Attributes) -> bool {
    attributes.file_type == FileType::CharacterDevice && attributes.rdev == 0
}

fn take_apart(flags: c_int) -> Result<OpenFlags, Error> {
    let mut flags = flags;
    if flags & libc::O_PATH != 0 {
        flags &= WITH_PATH;
    }
    let read = matches!(flags & libc::O_ACCMODE, libc::O_RDONLY | libc::O_RDWR | libc::O_ACCMODE);
    let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
    if flags & TMPFILE != 0 && (flags & libc::O_DIRECTORY == 0 || !write || flags & libc::O_CREAT != 0) {
        return Err(Error::Invalid);
    }
    if flags & (libc::O_CREAT | libc::O_DIRECTORY) == libc::O_CREAT | libc::O_DIRECTORY {
        return Err(Error::Invalid);
    }
    Ok(OpenFlags { flags, access: Access { read, write }, truncate: flags & libc::O_TRUNC != 0 })
}

fn file(attributes: &Attributes, handle: Option<Handle>, how: &OpenFlags) -> File {
    // The fourth access mode requires both rights and grants neither.
    let access = match how.flags & libc::O_ACCMODE {
        libc::O_ACCMODE => Access::default(),
        _ if handle.is_none() || how.has(libc::O_PATH) => Access::default(),
        _ => how.access,
    };
    File::new(attributes.inode, attributes.file_type, handle, access, how.flags & !NOT_KEPT)
}
