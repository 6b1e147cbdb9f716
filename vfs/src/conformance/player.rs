//! Plays calls against an engine, as one process.

use super::{Actor, Answer, Call, Path, StatSummary};
use crate::engine::{Attributes, LockKind, LockOwner};
use crate::vfs::{AccessIds, LockRequest, Owner, RangeKind, TimeToSet};
use crate::{Base, Caller, Engine, Error, File, Place, Stop, Subject, Vfs, errno};
use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

/// A process with its descriptors.
pub struct Player<E: Engine> {
    vfs: Vfs<E>,
    files: BTreeMap<usize, Arc<File>>,
}

impl<E: Engine> Player<E> {
    /// Makes a process of root.
    ///
    /// # Errors
    /// Those of [`Engine::root`].
    pub fn new(engine: Arc<E>) -> Result<Self, Error> {
        Self::with_owner(engine, LockOwner::Process { id: 1, pid: 1 })
    }

    /// Makes a process of root whose locks belong to `owner`.
    ///
    /// # Errors
    /// Those of [`Engine::root`].
    pub fn with_owner(engine: Arc<E>, owner: LockOwner) -> Result<Self, Error> {
        Ok(Self { vfs: Vfs::new(engine, Caller::ROOT, owner)?, files: BTreeMap::new() })
    }

    /// Ends the process: closes all its files.
    pub fn end(mut self) {
        for slot in self.files.keys().copied().collect::<Vec<_>>() {
            self.close(slot);
        }
        self.vfs.end();
    }

    /// The process's view of the tree.
    pub fn vfs(&self) -> &Vfs<E> {
        &self.vfs
    }

    fn file(&self, slot: usize) -> Result<&Arc<File>, Error> {
        self.files.get(&slot).ok_or(Error::BadDescriptor)
    }

    fn place<'a>(&'a self, path: &'a Path) -> Result<Place<'a>, Error> {
        let base = match path.base {
            None => Base::Root,
            Some(slot) => Base::At(self.file(slot)?),
        };
        Ok(Place { base, path: path.path.as_bytes() })
    }

    fn subject<'a>(&'a self, path: &'a Path, follow: bool) -> Result<Subject<'a>, Error> {
        let place = self.place(path)?;
        Ok(if follow { Subject::Path(place) } else { Subject::Link(place) })
    }

    fn close(&mut self, slot: usize) -> bool {
        let Some(file) = self.files.remove(&slot) else { return false };
        let last = !self.files.values().any(|other| Arc::ptr_eq(other, &file));
        self.vfs.close(&file, last);
        true
    }

    fn put(&mut self, slot: usize, file: Arc<File>) {
        self.close(slot);
        self.files.insert(slot, file);
    }

    fn play(&mut self, call: &Call) -> Result<Answer, Stop> {
        match call {
            Call::User { uid, gid, groups } => {
                let caller = Caller { uid: *uid, gid: *gid, groups: groups.clone() };
                self.vfs.set_caller(caller.clone(), caller);
            }
            Call::Umask(mask) => {
                self.vfs.set_umask(*mask);
            }
            Call::Open { slot, path, flags, mode } => {
                let file = self.vfs.open(self.place(path)?, *flags, *mode)?;
                self.put(*slot, Arc::new(file));
            }
            Call::Dup { from, to } => {
                let file = self.file(*from)?.clone();
                if from != to {
                    self.put(*to, file);
                }
            }
            Call::Close(slot) => {
                if !self.close(*slot) {
                    return Err(Error::BadDescriptor.into());
                }
            }
            Call::Flock { slot, kind } => self.vfs.flock(self.file(*slot)?, kind_of(*kind), None)?,
            Call::OfdLock { slot, kind, start, bytes } => {
                let request = LockRequest {
                    kind: kind_of(*kind),
                    whence: libc::SEEK_SET,
                    start: *start,
                    bytes: *bytes,
                };
                self.vfs.set_range(self.file(*slot)?, RangeKind::Description, &request, None)?;
            }
            _ => {
                return match self.play_contents(call)? {
                    Some(answer) => Ok(answer),
                    None => match self.play_names(call)? {
                        Some(answer) => Ok(answer),
                        None => self.play_attributes(call),
                    },
                };
            }
        }
        Ok(Answer::Done)
    }

    fn play_contents(&self, call: &Call) -> Result<Option<Answer>, Stop> {
        let number = |number: usize| Answer::Number(number as u64);
        let vfs = &self.vfs;
        Ok(Some(match call {
            Call::Read { slot, bytes } => {
                let mut buffer = vec![0; *bytes];
                let count = vfs.read(self.file(*slot)?, &mut [IoSliceMut::new(&mut buffer)])?;
                Answer::Bytes(buffer[..count].to_vec())
            }
            Call::Pread { slot, offset, bytes } => {
                let mut buffer = vec![0; *bytes];
                let into = &mut [IoSliceMut::new(&mut buffer)];
                let count = vfs.pread(self.file(*slot)?, *offset as i64, into, 0)?;
                Answer::Bytes(buffer[..count].to_vec())
            }
            Call::Write { slot, pieces } => {
                let slices: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
                number(vfs.write(self.file(*slot)?, &slices)?)
            }
            Call::Pwrite { slot, offset, data } => {
                number(vfs.pwrite(self.file(*slot)?, *offset as i64, &[IoSlice::new(data)], 0)?)
            }
            Call::Lseek { slot, by, whence } => Answer::Number(vfs.lseek(self.file(*slot)?, *by, *whence)?),
            Call::Truncate { path, size } => {
                vfs.truncate(self.subject(path, true)?, *size)?;
                Answer::Done
            }
            Call::Ftruncate { slot, size } => {
                vfs.ftruncate(self.file(*slot)?, *size)?;
                Answer::Done
            }
            Call::Fallocate { slot, mode, offset, bytes } => {
                vfs.fallocate(self.file(*slot)?, *mode, *offset as i64, *bytes as i64)?;
                Answer::Done
            }
            Call::Fsync(slot) => {
                vfs.fsync(self.file(*slot)?)?;
                Answer::Done
            }
            _ => return Ok(None),
        }))
    }

    fn play_names(&self, call: &Call) -> Result<Option<Answer>, Stop> {
        let vfs = &self.vfs;
        match call {
            Call::Mkdir { path, mode } => vfs.mkdir(self.place(path)?, *mode)?,
            Call::Mknod { path, mode, device } => vfs.mknod(self.place(path)?, *mode, *device)?,
            Call::Rmdir(path) => vfs.rmdir(self.place(path)?)?,
            Call::Unlink(path) => vfs.unlink(self.place(path)?)?,
            Call::Rename { from, to, flags } => vfs.rename(self.place(from)?, self.place(to)?, *flags)?,
            Call::Link { from, to, follow } => vfs.link(self.subject(from, *follow)?, self.place(to)?)?,
            Call::LinkFile { slot, to } => {
                vfs.link(Subject::Node(self.file(*slot)?.inode()), self.place(to)?)?;
            }
            Call::Symlink { target, path } => vfs.symlink(target.as_bytes(), self.place(path)?)?,
            Call::Readlink(path) => return Ok(Some(Answer::Bytes(vfs.readlink(self.place(path)?)?))),
            Call::List(path) => return self.list(path).map(Some),
            _ => return Ok(None),
        }
        Ok(Some(Answer::Done))
    }

    fn play_attributes(&self, call: &Call) -> Result<Answer, Stop> {
        let vfs = &self.vfs;
        match call {
            Call::Stat { path, follow } => return Ok(seen(&vfs.stat(self.subject(path, *follow)?)?)),
            Call::Fstat(slot) => return Ok(seen(&vfs.stat(Subject::File(self.file(*slot)?))?)),
            Call::Chmod { path, mode } => vfs.chmod(self.subject(path, true)?, *mode)?,
            Call::Fchmod { slot, mode } => vfs.chmod(Subject::File(self.file(*slot)?), *mode)?,
            Call::Chown { path, uid, gid, follow } => {
                vfs.chown(self.subject(path, *follow)?, Owner { uid: *uid, gid: *gid })?;
            }
            Call::Utimens { path, atime, mtime, follow } => {
                let times = [atime, mtime]
                    .map(|(seconds, nanoseconds)| TimeToSet { seconds: *seconds, nanoseconds: *nanoseconds });
                vfs.utimens(self.subject(path, *follow)?, Some(times))?;
            }
            Call::Access { path, wanted } => {
                vfs.access(self.subject(path, true)?, *wanted, AccessIds::Effective)?;
            }
            Call::SetXattr { path, name, value, flags } => {
                vfs.set_xattr(self.subject(path, true)?, name.as_bytes(), value, *flags)?;
            }
            Call::GetXattr { path, name } => {
                let value = vfs.get_xattr(self.subject(path, true)?, name.as_bytes())?;
                return Ok(Answer::Bytes(value));
            }
            Call::RemoveXattr { path, name } => {
                vfs.remove_xattr(self.subject(path, true)?, name.as_bytes())?;
            }
            Call::ListXattrs(path) => {
                let list = vfs.list_xattrs(self.subject(path, true)?)?;
                let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
                let mut names: Vec<_> = names.map(|name| name.escape_ascii().to_string()).collect();
                names.sort();
                return Ok(Answer::Names(names));
            }
            other => unreachable!("{other:?} was played before"),
        }
        Ok(Answer::Done)
    }

    fn list(&self, path: &Path) -> Result<Answer, Stop> {
        let file = self.vfs.open(self.place(path)?, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
        let mut names = Vec::new();
        // Small enough that a directory of a few entries takes several calls.
        let mut buffer = [0; 320];
        let result = loop {
            match self.vfs.getdents(&file, &mut buffer) {
                Ok(0) => break Ok(()),
                Ok(used) => names.extend(records(&buffer[..used])),
                Err(error) => break Err(error),
            }
        };
        self.vfs.close(&file, true);
        result?;
        names.sort();
        Ok(Answer::Names(names))
    }
}

impl<E: Engine> Actor for Player<E> {
    fn call(&mut self, call: &Call) -> Answer {
        match self.play(call) {
            Ok(answer) => answer,
            Err(Stop::Failed(error)) => Answer::Failed(errno::number(error)),
            Err(Stop::Leaves(_) | Stop::Special(_)) => Answer::Elsewhere,
        }
    }
}

/// Names and types in the records of `getdents64`.
fn records(mut bytes: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while !bytes.is_empty() {
        let length = usize::from(u16::from_ne_bytes([bytes[16], bytes[17]]));
        let (record, rest) = bytes.split_at(length);
        let name: Vec<u8> = record[19..].iter().copied().take_while(|byte| *byte != 0).collect();
        names.push(format!("{}:{}", name.escape_ascii(), record[18]));
        bytes = rest;
    }
    names
}

fn kind_of(kind: u8) -> Option<LockKind> {
    match kind {
        0 => None,
        1 => Some(LockKind::Shared),
        _ => Some(LockKind::Exclusive),
    }
}

fn seen(attributes: &Attributes) -> Answer {
    let directory = attributes.file_type == format::record::FileType::Directory;
    Answer::Stat(StatSummary {
        mode: attributes.file_type.mode_bits() | attributes.mode,
        uid: attributes.uid,
        gid: attributes.gid,
        links: attributes.links,
        size: if directory { 0 } else { attributes.size },
        rdev: attributes.rdev,
    })
}
