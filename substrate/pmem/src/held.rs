//! Space that a pool holds: the file `held`, which contains nothing and has space. When the medium has no space for another file of
//! the pool, `held` becomes shorter by as much, and the other file gets that space. These are two steps of the kernel, and a program
//! that fills the medium may take the space between them: then more is taken of `held`, up to [`TRIES`] times.
//!
//! Guarantees: nothing depends on the contents of the file. Its length is never more than the space that it has.

use crate::MediaError;
use crate::file_space::{reserve, space_of};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Name of the file.
pub const HELD_FILE: &str = "held";

/// How often space is taken of what is held for one operation.
const TRIES: u32 = 4;

/// The held space of a folder.
#[derive(Debug, Default)]
pub(crate) struct HeldSpace {
    /// None while the pool holds nothing.
    file: Mutex<Option<OwnedFd>>,
    bytes: AtomicU64,
}

impl HeldSpace {
    fn lock(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are held.
    pub fn bytes(&self) -> u64 {
        // Relaxed: the file itself says whether there is space.
        self.bytes.load(Ordering::Relaxed)
    }

    /// Uses the file that the pool has. A copied file may lack the space that its length says.
    pub fn open(&self, file: OwnedFd) -> Result<(), MediaError> {
        let mut held = self.lock();
        let bytes = file_bytes(&file)?;
        if space_of(file.as_fd())? < bytes && reserve(file.as_fd(), 0..bytes).is_err() {
            shorten(&file, 0)?;
        }
        self.bytes.store(file_bytes(&file)?, Ordering::Relaxed);
        *held = Some(file);
        Ok(())
    }

    /// Holds `more` further bytes, in a file that `create` makes if there is none.
    pub fn grow(
        &self,
        more: u64,
        create: impl FnOnce() -> Result<OwnedFd, MediaError>,
    ) -> Result<(), MediaError> {
        let mut held = self.lock();
        if held.is_none() {
            *held = Some(create()?);
        }
        let file = held.as_ref().expect("it was made above");
        let (before, after) = (self.bytes(), self.bytes().saturating_add(more));
        let grown = reserve(file.as_fd(), before..after);
        if grown.is_err() {
            // A part may have got its space.
            shorten(file, before)?;
        }
        grown?;
        self.bytes.store(after, Ordering::Relaxed);
        Ok(())
    }

    /// Holds this many bytes at most; true if that is less than before.
    pub fn shrink(&self, bytes: u64) -> Result<bool, MediaError> {
        let held = self.lock();
        let Some(file) = held.as_ref().filter(|_| bytes < self.bytes()) else { return Ok(false) };
        shorten(file, bytes)?;
        self.bytes.store(bytes, Ordering::Relaxed);
        Ok(true)
    }

    /// Gives up so many bytes, or all if that is less; false if nothing is held.
    fn take(&self, bytes: u64) -> Result<bool, MediaError> {
        self.shrink(self.bytes().saturating_sub(bytes))
    }
}

/// Does an operation that needs about so many bytes of space. If the medium has none, `take` gives some up for it.
pub(crate) fn with_held<T>(
    bytes: u64,
    take: impl Fn(u64) -> Result<bool, MediaError>,
    mut operation: impl FnMut() -> Result<T, MediaError>,
) -> Result<T, MediaError> {
    for _ in 0..TRIES {
        match operation() {
            Err(MediaError::NoSpace) => {}
            done => return done,
        }
        if !take(bytes)? {
            break;
        }
    }
    operation()
}

/// [`with_held`] of a folder's held space.
pub(crate) fn with_held_of<T>(
    held: &HeldSpace,
    bytes: u64,
    operation: impl FnMut() -> Result<T, MediaError>,
) -> Result<T, MediaError> {
    with_held(bytes, |bytes| held.take(bytes), operation)
}

fn shorten(file: &OwnedFd, bytes: u64) -> Result<(), MediaError> {
    let length = libc::off_t::try_from(bytes).map_err(|_| MediaError::Length)?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::ftruncate(file.as_raw_fd(), length) } {
        0 => Ok(()),
        _ => Err(MediaError::last_os()),
    }
}

fn file_bytes(file: &OwnedFd) -> Result<u64, MediaError> {
    // SAFETY: the descriptor is open; its position is used nowhere else.
    let end = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| MediaError::last_os())
}
