//! Executes the calls of the conformance suite in a directory of the kernel's file system.

use rustix::fs::{
    Access, AtFlags, Dir, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, SeekFrom,
    Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use rustix::thread;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use vfs::conformance::{Actor, Answer, Call, Path, StatSummary};

/// Credentials of the thread.
#[derive(Clone)]
struct User {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

/// A process, as far as one thread can imitate one.
pub struct Kernel {
    root: OwnedFd,
    root_path: String,
    files: BTreeMap<usize, Rc<OwnedFd>>,
    user: User,
    folder: tempfile::TempDir,
}

/// Times that are compared in addition to the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    pub inode: u64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

impl Kernel {
    /// An empty directory on tmpfs, with mode 755.
    pub fn new() -> Self {
        Self::at("/dev/shm")
    }

    /// The same in a folder of some file system.
    pub fn at(place: &str) -> Self {
        let folder = tempfile::tempdir_in(place).expect("a file system that root may write to");
        let root_path = folder.path().to_str().expect("our own name").to_string();
        let root = rustix::fs::open(&*root_path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        rustix::fs::fchmod(&root, Mode::from_raw_mode(0o755)).unwrap();
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let user = User { uid: 0, gid: 0, groups: Vec::new() };
        Self { root, root_path, files: BTreeMap::new(), user, folder }
    }

    /// Removes the directory.
    pub fn end(self) {
        drop(self.files);
        self.folder.close().unwrap();
    }

    /// Inode number and times, for root.
    pub fn times(&self, path: &str) -> Times {
        let stat = rustix::fs::statat(&self.root, path, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        let ns = |seconds: i64, rest: u64| seconds * 1_000_000_000 + rest as i64;
        Times {
            inode: stat.st_ino,
            mtime_ns: ns(stat.st_mtime, stat.st_mtime_nsec),
            ctime_ns: ns(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// Owner of what a path leads to, for root.
    pub fn owner(&self, path: &Path, follow: bool) -> Option<u32> {
        let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let base = self.base(path).ok()?;
        rustix::fs::statat(base, &*path.path, flags).ok().map(|stat| stat.st_uid)
    }

    /// Owner of an open file.
    pub fn owner_of(&self, slot: usize) -> Option<u32> {
        rustix::fs::fstat(self.file(slot).ok()?).ok().map(|stat| stat.st_uid)
    }

    /// Whether the kernel may refuse `O_CREAT` on what a path leads to, for its own sake (`fs.protected_regular`,
    /// `fs.protected_fifos`, and always for the other special files): it is another user's, in a sticky folder that
    /// others may write.
    pub fn is_protected(&self, path: &Path) -> bool {
        const STICKY: u32 = 0o1000;
        const BY_OTHERS: u32 = 0o022;
        let Ok(base) = self.base(path) else { return false };
        let Ok(file) = rustix::fs::openat(base, &*path.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        else {
            return false;
        };
        let found = rustix::fs::fstat(&file).unwrap();
        let setting = match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => return false,
            FileType::RegularFile => "/proc/sys/fs/protected_regular",
            FileType::Fifo => "/proc/sys/fs/protected_fifos",
            _ => "",
        };
        if std::fs::read_to_string(setting).is_ok_and(|value| value.trim() == "0") {
            return false;
        }
        let place = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        let Ok(above) = rustix::fs::stat(place.parent().unwrap()) else { return false };
        let strange = found.st_uid != above.st_uid && found.st_uid != self.uid();
        above.st_mode & STICKY != 0 && above.st_mode & BY_OTHERS != 0 && strange
    }

    pub fn uid(&self) -> u32 {
        self.user.uid
    }

    fn base(&self, path: &Path) -> Result<BorrowedFd<'_>, Errno> {
        match path.base {
            None => Ok(self.root.as_fd()),
            Some(slot) => self.file(slot),
        }
    }

    fn file(&self, slot: usize) -> Result<BorrowedFd<'_>, Errno> {
        self.files.get(&slot).map(|file| file.as_fd()).ok_or(Errno::BADF)
    }

    /// For the calls that have no form with a directory.
    fn absolute(&self, path: &Path) -> String {
        format!("{}/{}", self.root_path, path.path)
    }

    fn as_user<T>(&self, act: impl FnOnce() -> T) -> T {
        if self.user.uid == 0 && self.user.gid == 0 && self.user.groups.is_empty() {
            return act();
        }
        let groups: Vec<_> = self.user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        thread::set_thread_groups(&groups).unwrap();
        thread::set_thread_res_gid(None, Gid::from_raw(self.user.gid), None).unwrap();
        thread::set_thread_res_uid(None, Uid::from_raw(self.user.uid), None).unwrap();
        let result = act();
        thread::set_thread_res_uid(None, Uid::ROOT, None).unwrap();
        thread::set_thread_res_gid(None, Gid::ROOT, None).unwrap();
        thread::set_thread_groups(&[]).unwrap();
        result
    }

    fn play(&mut self, call: &Call) -> Result<Answer, Errno> {
        match call {
            Call::User { uid, gid, groups } => {
                self.user = User { uid: *uid, gid: *gid, groups: groups.clone() };
            }
            Call::Umask(mask) => {
                rustix::process::umask(Mode::from_raw_mode(*mask));
            }
            Call::Open { slot, path, flags, mode } => {
                let flags =
                    OFlags::from_bits_retain(*flags as u32 | (OFlags::CLOEXEC | OFlags::NONBLOCK).bits());
                let mode = Mode::from_bits_retain(*mode);
                let base = self.base(path)?;
                let file = self.as_user(|| rustix::fs::openat(base, &*path.path, flags, mode))?;
                self.files.insert(*slot, Rc::new(file));
            }
            Call::Dup { from, to } => {
                let file = self.files.get(from).cloned().ok_or(Errno::BADF)?;
                self.files.insert(*to, file);
            }
            Call::Close(slot) => {
                self.files.remove(slot).ok_or(Errno::BADF)?;
            }
            _ => {
                return self.as_user(|| match self.play_contents(call)? {
                    Some(answer) => Ok(answer),
                    None => match self.play_names(call)? {
                        Some(answer) => Ok(answer),
                        None => self.play_attributes(call),
                    },
                });
            }
        }
        Ok(Answer::Done)
    }

    fn play_contents(&self, call: &Call) -> Result<Option<Answer>, Errno> {
        let number = |number: usize| Answer::Number(number as u64);
        Ok(Some(match call {
            Call::Read { slot, bytes } => {
                let mut buffer = vec![0; *bytes];
                let count = rustix::io::read(self.file(*slot)?, &mut buffer[..])?;
                Answer::Bytes(buffer[..count].to_vec())
            }
            Call::Pread { slot, offset, bytes } => {
                let mut buffer = vec![0; *bytes];
                let count = rustix::io::pread(self.file(*slot)?, &mut buffer[..], *offset)?;
                Answer::Bytes(buffer[..count].to_vec())
            }
            Call::Write { slot, pieces } => {
                let slices: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
                number(rustix::io::writev(self.file(*slot)?, &slices)?)
            }
            Call::Pwrite { slot, offset, data } => {
                number(rustix::io::pwrite(self.file(*slot)?, data, *offset)?)
            }
            Call::Lseek { slot, by, whence } => {
                let to = match *whence {
                    libc::SEEK_SET => SeekFrom::Start(*by as u64),
                    libc::SEEK_CUR => SeekFrom::Current(*by),
                    libc::SEEK_END => SeekFrom::End(*by),
                    libc::SEEK_DATA => SeekFrom::Data(*by as u64),
                    _ => SeekFrom::Hole(*by as u64),
                };
                Answer::Number(rustix::fs::seek(self.file(*slot)?, to)?)
            }
            Call::Truncate { path, size } => {
                let result = nix::unistd::truncate(&*self.absolute(path), *size);
                result.map_err(|error| Errno::from_raw_os_error(error as i32))?;
                Answer::Done
            }
            Call::Ftruncate { slot, size } => {
                rustix::fs::ftruncate(self.file(*slot)?, *size as u64)?;
                Answer::Done
            }
            Call::Fallocate { slot, mode, offset, bytes } => {
                let mode = FallocateFlags::from_bits_retain(*mode as u32);
                rustix::fs::fallocate(self.file(*slot)?, mode, *offset, *bytes)?;
                Answer::Done
            }
            Call::Fsync(slot) => {
                rustix::fs::fsync(self.file(*slot)?)?;
                Answer::Done
            }
            Call::Flock { slot, kind } => {
                let operation = match kind {
                    0 => FlockOperation::NonBlockingUnlock,
                    1 => FlockOperation::NonBlockingLockShared,
                    _ => FlockOperation::NonBlockingLockExclusive,
                };
                rustix::fs::flock(self.file(*slot)?, operation)?;
                Answer::Done
            }
            Call::OfdLock { slot, kind, start, bytes } => {
                let kind = match kind {
                    0 => libc::F_UNLCK,
                    1 => libc::F_RDLCK,
                    _ => libc::F_WRLCK,
                };
                let lock = libc::flock {
                    l_type: kind as i16,
                    l_whence: libc::SEEK_SET as i16,
                    l_start: *start,
                    l_len: *bytes,
                    l_pid: 0,
                };
                let result = nix::fcntl::fcntl(self.file(*slot)?, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock));
                result.map_err(|error| Errno::from_raw_os_error(error as i32))?;
                Answer::Done
            }
            _ => return Ok(None),
        }))
    }

    fn play_names(&self, call: &Call) -> Result<Option<Answer>, Errno> {
        match call {
            Call::Mkdir { path, mode } => {
                rustix::fs::mkdirat(self.base(path)?, &*path.path, Mode::from_bits_retain(*mode))?;
            }
            Call::Mknod { path, mode, device } => {
                let (kind, bits) = (FileType::from_raw_mode(*mode), Mode::from_bits_retain(mode & 0o7777));
                let kind = if mode & libc::S_IFMT == 0 { FileType::RegularFile } else { kind };
                rustix::fs::mknodat(self.base(path)?, &*path.path, kind, bits, *device)?;
            }
            Call::Rmdir(path) => {
                rustix::fs::unlinkat(self.base(path)?, &*path.path, AtFlags::REMOVEDIR)?;
            }
            Call::Unlink(path) => {
                rustix::fs::unlinkat(self.base(path)?, &*path.path, AtFlags::empty())?;
            }
            Call::Rename { from, to, flags } => {
                let (from_base, to_base) = (self.base(from)?, self.base(to)?);
                let flags = RenameFlags::from_bits_retain(*flags);
                rustix::fs::renameat_with(from_base, &*from.path, to_base, &*to.path, flags)?;
            }
            Call::Link { from, to, follow } => {
                let flags = if *follow { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                rustix::fs::linkat(self.base(from)?, &*from.path, self.base(to)?, &*to.path, flags)?;
            }
            Call::LinkFile { slot, to } => {
                let open = format!("/proc/self/fd/{}", self.file(*slot)?.as_raw_fd());
                let follow = AtFlags::SYMLINK_FOLLOW;
                rustix::fs::linkat(rustix::fs::CWD, &*open, self.base(to)?, &*to.path, follow)?;
            }
            Call::Symlink { target, path } => {
                rustix::fs::symlinkat(&**target, self.base(path)?, &*path.path)?;
            }
            Call::Readlink(path) => {
                let target = rustix::fs::readlinkat(self.base(path)?, &*path.path, Vec::new())?;
                return Ok(Some(Answer::Bytes(target.into_bytes())));
            }
            Call::List(path) => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let file = rustix::fs::openat(self.base(path)?, &*path.path, flags, Mode::empty())?;
                let mut names = Vec::new();
                for entry in Dir::new(file)? {
                    let entry = entry?;
                    let kind = entry.file_type().as_raw_mode() >> 12;
                    names.push(format!("{}:{kind}", entry.file_name().to_bytes().escape_ascii()));
                }
                names.sort();
                return Ok(Some(Answer::Names(names)));
            }
            _ => return Ok(None),
        }
        Ok(Some(Answer::Done))
    }

    fn play_attributes(&self, call: &Call) -> Result<Answer, Errno> {
        match call {
            Call::Stat { path, follow } => {
                let flags = if *follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
                return Ok(seen(&rustix::fs::statat(self.base(path)?, &*path.path, flags)?));
            }
            Call::Fstat(slot) => return Ok(seen(&rustix::fs::fstat(self.file(*slot)?)?)),
            Call::Chmod { path, mode } => {
                let mode = Mode::from_bits_retain(*mode);
                rustix::fs::chmodat(self.base(path)?, &*path.path, mode, AtFlags::empty())?;
            }
            Call::Fchmod { slot, mode } => {
                rustix::fs::fchmod(self.file(*slot)?, Mode::from_bits_retain(*mode))?;
            }
            Call::Chown { path, uid, gid, follow } => {
                let flags = if *follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                rustix::fs::chownat(self.base(path)?, &*path.path, uid, gid, flags)?;
            }
            Call::Utimens { path, atime, mtime, follow } => {
                let flags = if *follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
                let time = |(tv_sec, tv_nsec): (i64, i64)| Timespec { tv_sec, tv_nsec };
                let times = Timestamps { last_access: time(*atime), last_modification: time(*mtime) };
                rustix::fs::utimensat(self.base(path)?, &*path.path, &times, flags)?;
            }
            Call::Access { path, wanted } => {
                let wanted = Access::from_bits_retain(*wanted as u32);
                rustix::fs::accessat(self.base(path)?, &*path.path, wanted, AtFlags::EACCESS)?;
            }
            Call::SetXattr { path, name, value, flags } => {
                let flags = XattrFlags::from_bits_retain(*flags as u32);
                rustix::fs::setxattr(&*self.absolute(path), &**name, value, flags)?;
            }
            Call::GetXattr { path, name } => {
                let mut value = vec![0; 65_536];
                let count = rustix::fs::getxattr(&*self.absolute(path), &**name, &mut value[..])?;
                return Ok(Answer::Bytes(value[..count].to_vec()));
            }
            Call::RemoveXattr { path, name } => {
                rustix::fs::removexattr(&*self.absolute(path), &**name)?;
            }
            Call::ListXattrs(path) => {
                let mut list = vec![0_u8; 65_536];
                let count = rustix::fs::listxattr(&*self.absolute(path), &mut list[..])?;
                let names = list[..count].split(|byte| *byte == 0).filter(|name| !name.is_empty());
                let mut names: Vec<_> = names.map(|name| name.escape_ascii().to_string()).collect();
                names.sort();
                return Ok(Answer::Names(names));
            }
            other => unreachable!("{other:?} was played before"),
        }
        Ok(Answer::Done)
    }
}

impl Actor for Kernel {
    fn call(&mut self, call: &Call) -> Answer {
        self.play(call).unwrap_or_else(|error| Answer::Failed(error.raw_os_error()))
    }
}

fn seen(stat: &Stat) -> Answer {
    let directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    Answer::Stat(StatSummary {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        links: stat.st_nlink as u32,
        size: if directory { 0 } else { stat.st_size as u64 },
        rdev: stat.st_rdev,
    })
}
