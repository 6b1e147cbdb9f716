//! The folder of a pool: named files of fixed length, created completely or not at all.
//!
//! A file appears under its name only after its space is allocated, it reads as zeros, and both file and folder
//! entry are durable. So a later store never finds the medium full (which would be a SIGBUS instead of an error
//! value), and a crash during the creation leaves the name free. Files that become full slowly get their space in steps, each
//! before the first store there ([`Medium::create_in_steps`]).

use crate::MediaError;
use crate::file_space::{allocate, whole_pages};
use crate::guard::{self, Watch};
use crate::held::{HELD_FILE, HeldSpace, with_held, with_held_of};
use crate::outstanding::{Operation, StallMeter};
use crate::recorded::{RecordedLock, Recorder};
use crate::region::Region;
use std::ffi::{CStr, CString};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Longest name of a pool file, in bytes.
pub const NAME_BYTES_MAX: usize = 200;

/// The file on which the pool is locked. The folder itself is locked too, because a user can remove the file by hand.
const LOCK_NAME: &str = "lock";

/// Prefix of a file under construction; no pool file's name begins with a dot.
const UNFINISHED_PREFIX: &str = ".new-";

/// Kind of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A mapped file in memory (tmpfs).
    Memory,
    /// A mapped file of any file system; the operating system syncs it.
    File,
    /// The test medium.
    Recorded,
}

impl Class {
    /// Name for status output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::File => "file",
            Self::Recorded => "recorded",
        }
    }

    /// True if written bytes survive the end of the process.
    pub const fn survives_process(self) -> bool {
        match self {
            Self::Memory | Self::File => true,
            Self::Recorded => false,
        }
    }
}

/// The folder of a pool on a medium. Clones refer to the same folder.
#[derive(Clone, Debug)]
pub struct Medium(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Folder(Arc<Folder>),
    Recorded(Recorder),
}

#[derive(Debug)]
struct Folder {
    class: Class,
    path: PathBuf,
    descriptor: OwnedFd,
    /// Guard of the regions, on a guarded medium.
    watch: Option<Arc<Watch>>,
    /// Shared with the guarded medium.
    held: Arc<HeldSpace>,
}

impl Medium {
    /// A folder on tmpfs, which must exist.
    ///
    /// # Errors
    /// `NotFound`, `Os`.
    pub fn memory(folder: &Path) -> Result<Self, MediaError> {
        Self::folder(Class::Memory, folder)
    }

    /// A folder on any file system, which must exist.
    ///
    /// # Errors
    /// `NotFound`, `Os`.
    pub fn file(folder: &Path) -> Result<Self, MediaError> {
        Self::folder(Class::File, folder)
    }

    /// The test medium of a recorder.
    pub fn recorded(recorder: &Recorder) -> Self {
        Self(Kind::Recorded(recorder.clone()))
    }

    fn folder(class: Class, path: &Path) -> Result<Self, MediaError> {
        let descriptor: OwnedFd = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(path)
            .map_err(|error| MediaError::of_io(&error))?
            .into();
        let path = path.to_owned();
        let held = Arc::default();
        Ok(Self(Kind::Folder(Arc::new(Folder { class, path, descriptor, watch: None, held }))))
    }

    /// Returns the same folder for a process that must survive the loss of a file: if a file is truncated under a
    /// mapping, or the medium cannot read it, the region of that file reports an error (`Lost`), and no SIGBUS ends
    /// the process. This holds for regions that are created or opened through the returned value. The call installs
    /// a SIGBUS handler, which forwards other signals to the previous one. It is therefore for programs of this
    /// project, not for a library in a program of another author. Of a medium that is guarded already, the call returns a
    /// clone.
    ///
    /// # Errors
    /// `Os`.
    pub fn guarded(&self) -> Result<Self, MediaError> {
        let folder = match &self.0 {
            Kind::Folder(folder) if folder.watch.is_none() => folder,
            _ => return Ok(self.clone()),
        };
        guard::install();
        let descriptor = folder.descriptor.try_clone().map_err(|error| MediaError::of_io(&error))?;
        let (class, path, watch) = (folder.class, folder.path.clone(), Some(Arc::default()));
        let held = folder.held.clone();
        Ok(Self(Kind::Folder(Arc::new(Folder { class, path, descriptor, watch, held }))))
    }

    /// The first file that was lost under its mapping, of those for which `counts` is true; `None` also if the
    /// medium is not guarded.
    pub fn lost(&self, counts: impl Fn(&str) -> bool) -> Option<String> {
        match &self.0 {
            Kind::Folder(folder) => folder.watch.as_ref()?.lost(counts),
            Kind::Recorded(_) => None,
        }
    }

    /// Measures for how long operations on this medium, by all threads of this process, do not return. At most `step_max`
    /// counts for each look. `None` if the medium is not guarded.
    pub fn stall_meter(&self, step_max: Duration) -> Option<StallMeter> {
        match &self.0 {
            Kind::Folder(folder) => folder.watch.as_ref().map(|watch| StallMeter::new(watch, step_max)),
            Kind::Recorded(_) => None,
        }
    }

    /// Kind of the medium.
    pub fn class(&self) -> Class {
        match &self.0 {
            Kind::Folder(folder) => folder.class,
            Kind::Recorded(_) => Class::Recorded,
        }
    }

    /// Creates a file of zeros, mode 0600, with all its space; the file is durable when this returns.
    ///
    /// # Errors
    /// `Exists`, `NoSpace`, `Name`, `Length` (zero, or more than an address space), `Os`.
    pub fn create(&self, name: &str, bytes: u64) -> Result<Region, MediaError> {
        self.create_in_steps(name, bytes, bytes)
    }

    /// [`Self::create`] of a file of which only the first `reserved` bytes have space. Nothing may be written behind them
    /// before [`Region::reserve`].
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_in_steps(&self, name: &str, bytes: u64, reserved: u64) -> Result<Region, MediaError> {
        check_name(name)?;
        if reserved == 0 || reserved > bytes || i64::try_from(bytes).is_err() {
            return Err(MediaError::Length);
        }
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.create(name, (bytes, whole_pages(folder.class, 0..reserved, bytes).end))
            }
            Kind::Recorded(recorder) => recorder.create(name, (bytes, reserved)),
        }
    }

    /// Creates a file as [`Self::create`] does, but without any sync: the file may be missing after a crash of the
    /// machine.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_transient(&self, name: &str, bytes: u64) -> Result<Region, MediaError> {
        check_name(name)?;
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.create_transient(name, bytes)
            }
            Kind::Recorded(recorder) => recorder.create(name, (bytes, bytes)),
        }
    }

    /// Removes a file that [`Self::create_transient`] made. After a crash of the machine the file may exist again.
    ///
    /// # Errors
    /// As [`Self::remove`].
    pub fn remove_transient(&self, name: &str) -> Result<(), MediaError> {
        check_name(name)?;
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.unlink(&c_string(name)?)
            }
            Kind::Recorded(recorder) => recorder.remove(name),
        }
    }

    /// Maps a file for reading and writing.
    ///
    /// # Errors
    /// `NotFound`, `Name`, `Length` (an empty file), `Os`.
    pub fn open(&self, name: &str) -> Result<Region, MediaError> {
        self.open_at_most(name, u64::MAX)
    }

    /// Maps a file for reading and writing whose length another process may have chosen: of a longer file only the first
    /// `bytes_max` bytes.
    ///
    /// # Errors
    /// `NotFound`, `Name`, `Length` (an empty file), `Os`.
    pub fn open_at_most(&self, name: &str, bytes_max: u64) -> Result<Region, MediaError> {
        check_name(name)?;
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.open(name, true, bytes_max)
            }
            // No process changes the length of one of its files.
            Kind::Recorded(recorder) => recorder.open(name, true),
        }
    }

    /// Maps a file for reading only, with a descriptor that is read-only too.
    ///
    /// # Errors
    /// As [`Medium::open`].
    pub fn open_read_only(&self, name: &str) -> Result<Region, MediaError> {
        check_name(name)?;
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.open(name, false, u64::MAX)
            }
            Kind::Recorded(recorder) => recorder.open(name, false),
        }
    }

    /// Bytes that are free where the folder lies; `None` if the medium does not say it.
    pub fn free_bytes(&self) -> Option<u64> {
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.free_bytes()
            }
            Kind::Recorded(_) => None,
        }
    }

    /// Uses the space that the pool holds; the caller has locked the pool.
    ///
    /// # Errors
    /// `Os`.
    pub fn open_held(&self) -> Result<(), MediaError> {
        let Kind::Folder(folder) = &self.0 else { return Ok(()) };
        let _operation = folder.begin();
        match folder.open_at(&c_string(HELD_FILE)?, libc::O_RDWR) {
            Ok(file) => folder.held.open(file),
            Err(MediaError::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The least space that a file gets, in bytes, unless it is shorter.
    pub fn space_unit(&self) -> u64 {
        whole_pages(self.class(), 0..1, u64::MAX).end
    }

    /// Bytes that the pool holds; `None` if the medium is never full.
    pub fn held_bytes(&self) -> Option<u64> {
        match &self.0 {
            Kind::Folder(folder) => Some(folder.held.bytes()),
            Kind::Recorded(recorder) => recorder.held_bytes(),
        }
    }

    /// Holds so many bytes more. The caller has called [`Self::open_held`].
    ///
    /// # Errors
    /// `NoSpace`, `Os`: as much is held as before.
    pub fn hold(&self, more: u64) -> Result<(), MediaError> {
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.held.grow(more, || folder.create_held())
            }
            Kind::Recorded(recorder) => recorder.hold_space(more),
        }
    }

    /// Holds so many bytes at most from now on.
    ///
    /// # Errors
    /// `Os`.
    pub fn hold_at_most(&self, bytes: u64) -> Result<(), MediaError> {
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.held.shrink(bytes).map(drop)
            }
            Kind::Recorded(recorder) => {
                recorder.take_held(recorder.held_bytes().unwrap_or(0).saturating_sub(bytes));
                Ok(())
            }
        }
    }

    /// Does an operation that needs about so many bytes of space. If the medium has none, what the pool holds becomes less by as
    /// much.
    ///
    /// # Errors
    /// Those of the operation; `NoSpace` if nothing was held, or other programs took it.
    pub fn with_held<T>(
        &self,
        bytes: u64,
        operation: impl FnMut() -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        match &self.0 {
            Kind::Folder(folder) => {
                with_held_of(&folder.held, whole_pages(folder.class, 0..bytes, u64::MAX).end, operation)
            }
            Kind::Recorded(recorder) => {
                with_held(bytes, |bytes| Ok(recorder.take_held(bytes) > 0), operation)
            }
        }
    }

    /// Names of the files, sorted.
    ///
    /// # Errors
    /// `Os`.
    pub fn list(&self) -> Result<Vec<String>, MediaError> {
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.list(|name| check_name(name).is_ok())
            }
            Kind::Recorded(recorder) => Ok(recorder.list()),
        }
    }

    /// Removes a file durably. Regions that map it stay usable.
    ///
    /// # Errors
    /// `NotFound`, `Name`, `Os`.
    pub fn remove(&self, name: &str) -> Result<(), MediaError> {
        check_name(name)?;
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.remove(name)
            }
            Kind::Recorded(recorder) => recorder.remove(name),
        }
    }

    /// True if the path of this folder and the name of the region's file still lead to the mapped file; false if
    /// one of them was removed, moved or replaced.
    ///
    /// # Errors
    /// `Os`: the path cannot be examined.
    pub fn holds(&self, region: &Region) -> Result<bool, MediaError> {
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                folder.holds(region)
            }
            Kind::Recorded(recorder) => Ok(recorder.holds(region.name())),
        }
    }

    /// Locks the pool for this process until the returned lock is dropped or the process ends, and removes the
    /// remains of crashed creations.
    ///
    /// # Errors
    /// `Locked`, `Os`.
    pub fn lock(&self) -> Result<PoolLock, MediaError> {
        match &self.0 {
            Kind::Folder(folder) => {
                let _operation = folder.begin();
                Ok(PoolLock { _held: HeldLock::Folder { _locked: folder.lock()? } })
            }
            Kind::Recorded(recorder) => {
                Ok(PoolLock { _held: HeldLock::Recorded { _lock: recorder.lock()? } })
            }
        }
    }
}

/// Exclusive ownership of a pool by this process.
#[derive(Debug)]
pub struct PoolLock {
    _held: HeldLock,
}

#[derive(Debug)]
enum HeldLock {
    Folder { _locked: [OwnedFd; 2] },
    Recorded { _lock: RecordedLock },
}

impl Folder {
    /// Counts an operation that may wait for the medium.
    fn begin(&self) -> Option<Operation> {
        self.watch.as_ref().and_then(Operation::begin)
    }

    fn create(&self, name: &str, (bytes, reserved): (u64, u64)) -> Result<Region, MediaError> {
        let unfinished = c_string(&format!("{UNFINISHED_PREFIX}{name}"))?;
        let finished = c_string(name)?;
        self.unlink(&unfinished)
            .or_else(|error| if error == MediaError::NotFound { Ok(()) } else { Err(error) })?;
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let file = self.open_at(&unfinished, flags)?;
        let made = self.fill_and_name(&file, (bytes, reserved), &unfinished, &finished);
        if made.is_err() {
            // The first error is the one that matters; the next lock removes a leftover.
            let _ = self.unlink(&unfinished);
        }
        made?;
        Region::mapped(name.to_owned(), file, self.class, (true, bytes), self.watch.as_ref())
    }

    fn create_transient(&self, name: &str, bytes: u64) -> Result<Region, MediaError> {
        let path = c_string(name)?;
        let file = self.open_at(&path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL)?;
        let made = allocate(&file, (bytes, bytes)).and_then(|()| {
            Region::mapped(name.to_owned(), file, self.class, (true, bytes), self.watch.as_ref())
        });
        if made.is_err() {
            // The error that matters is the first.
            let _ = self.unlink(&path);
        }
        made
    }

    /// The file of the held space: empty, and durable, so that its later space is not lost with its name.
    fn create_held(&self) -> Result<OwnedFd, MediaError> {
        let file = self.open_at(&c_string(HELD_FILE)?, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL)?;
        sync(&file)?;
        sync(&self.descriptor)?;
        Ok(file)
    }

    fn fill_and_name(
        &self,
        file: &OwnedFd,
        (bytes, reserved): (u64, u64),
        unfinished: &CStr,
        finished: &CStr,
    ) -> Result<(), MediaError> {
        allocate(file, (bytes, reserved))?;
        sync(file)?;
        let folder = self.descriptor.as_raw_fd();
        // SAFETY: the folder is open and both names end with zero.
        let named = unsafe {
            libc::renameat2(folder, unfinished.as_ptr(), folder, finished.as_ptr(), libc::RENAME_NOREPLACE)
        };
        if named != 0 {
            return Err(MediaError::last_os());
        }
        sync(&self.descriptor)
    }

    fn open(&self, name: &str, writable: bool, bytes_max: u64) -> Result<Region, MediaError> {
        let flags = if writable { libc::O_RDWR } else { libc::O_RDONLY };
        let file = self.open_at(&c_string(name)?, flags)?;
        Region::mapped(name.to_owned(), file, self.class, (writable, bytes_max), self.watch.as_ref())
    }

    fn open_at(&self, name: &CStr, flags: libc::c_int) -> Result<OwnedFd, MediaError> {
        // O_NONBLOCK: opening a pipe of that name does not wait; mapping it fails.
        let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        // SAFETY: the folder is open and the name ends with zero.
        let file = unsafe { libc::openat(self.descriptor.as_raw_fd(), name.as_ptr(), flags, 0o600) };
        if file < 0 {
            return Err(MediaError::last_os());
        }
        // SAFETY: the kernel just gave this descriptor to this process alone.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    fn free_bytes(&self) -> Option<u64> {
        // SAFETY: statvfs is plain data, for which zero is a value.
        let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and the structure is a local one.
        let said = unsafe { libc::fstatvfs(self.descriptor.as_raw_fd(), &raw mut found) };
        (said == 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn unlink(&self, name: &CStr) -> Result<(), MediaError> {
        // SAFETY: the folder is open and the name ends with zero.
        match unsafe { libc::unlinkat(self.descriptor.as_raw_fd(), name.as_ptr(), 0) } {
            0 => Ok(()),
            _ => Err(MediaError::last_os()),
        }
    }

    fn remove(&self, name: &str) -> Result<(), MediaError> {
        self.unlink(&c_string(name)?)?;
        sync(&self.descriptor)
    }

    fn holds(&self, region: &Region) -> Result<bool, MediaError> {
        let Some(file) = region.descriptor() else { return Ok(false) };
        let named = match std::fs::symlink_metadata(self.path.join(region.name())) {
            Ok(named) => named,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(false);
            }
            Err(error) => return Err(MediaError::of_io(&error)),
        };
        // SAFETY: stat is plain data, for which zero is a value.
        let mut mapped: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and the structure is a local one.
        let found = unsafe { libc::fstat(file.as_raw_fd(), &raw mut mapped) };
        Ok(found == 0 && (named.dev(), named.ino()) == (mapped.st_dev, mapped.st_ino))
    }

    fn list(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, MediaError> {
        let of_io = |error: std::io::Error| MediaError::of_io(&error);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(of_io)? {
            if let Ok(name) = entry.map_err(of_io)?.file_name().into_string()
                && wanted(&name)
            {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn lock(&self) -> Result<[OwnedFd; 2], MediaError> {
        let locked = [
            self.open_at(&c_string(LOCK_NAME)?, libc::O_RDWR | libc::O_CREAT)?,
            self.open_at(c".", libc::O_RDONLY | libc::O_DIRECTORY)?,
        ];
        for descriptor in &locked {
            // SAFETY: the descriptor is open.
            if unsafe { libc::flock(descriptor.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
                return Err(match MediaError::last_os() {
                    MediaError::Os(libc::EWOULDBLOCK) => MediaError::Locked,
                    error => error,
                });
            }
        }
        for leftover in self.list(|name| name.starts_with(UNFINISHED_PREFIX))? {
            self.unlink(&c_string(&leftover)?)?;
        }
        Ok(locked)
    }
}

fn sync(file: &OwnedFd) -> Result<(), MediaError> {
    // SAFETY: the descriptor is open.
    match unsafe { libc::fsync(file.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(MediaError::last_os()),
    }
}

fn check_name(name: &str) -> Result<(), MediaError> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name != LOCK_NAME
        && !name.starts_with('.')
        && !name.bytes().any(|byte| byte == b'/' || byte == 0);
    if fits { Ok(()) } else { Err(MediaError::Name) }
}

fn c_string(name: &str) -> Result<CString, MediaError> {
    CString::new(name).map_err(|_| MediaError::Name)
}
