//! Open file descriptions: created by `open`, shared by `dup`, `fork` and descriptor passing.
//!
//! The front end assigns descriptor numbers and maps them to descriptions. It also decides where offset and flags
//! are stored: in [`LocalState`] for a description of one process, in shared memory for a description that several
//! processes have.
//!
//! Lock order: the offset's lock, then the locks of the engine. The offset's lock is held while the engine reads or
//! writes at the offset, as in Linux, so that two readers of one description never get the same bytes.

use crate::engine::{Access, Handle, LockOwner};
use crate::error::Error;
use format::InodeNumber;
use format::record::FileType;
use libc::c_int;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Offset and status flags of a description, visible to all processes that share it.
pub trait OpenState: Send + Sync {
    /// Runs `change` on the offset with exclusive access.
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64));

    /// Access mode and status flags, as `F_GETFL` returns them.
    fn flags(&self) -> c_int;

    /// Replaces the flags.
    fn set_flags(&self, flags: c_int);
}

/// State of a description that belongs to one process.
#[derive(Debug, Default)]
pub struct LocalState {
    offset: Mutex<u64>,
    flags: AtomicI32,
}

impl OpenState for LocalState {
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64)) {
        change(&mut self.offset.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn flags(&self) -> c_int {
        self.flags.load(Ordering::SeqCst)
    }

    fn set_flags(&self, flags: c_int) {
        self.flags.store(flags, Ordering::SeqCst);
    }
}

/// An open file description. It holds a pin of its inode and an open file of the engine, without any right if it was
/// opened with `O_PATH`; [`crate::Vfs::close`] releases both.
pub struct File {
    pub(crate) inode: InodeNumber,
    pub(crate) file_type: FileType,
    pub(crate) handle: Option<Handle>,
    pub(crate) access: Access,
    pub(crate) owner: LockOwner,
    is_path: bool,
    state: Box<dyn OpenState>,
}

impl File {
    pub(crate) fn new(
        inode: InodeNumber,
        file_type: FileType,
        handle: Option<Handle>,
        access: Access,
        flags: c_int,
    ) -> Self {
        let state = LocalState::default();
        state.set_flags(flags);
        let owner = LockOwner::Description(handle.map_or(0, Handle::get));
        let is_path = flags & libc::O_PATH != 0;
        Self { inode, file_type, handle, access, owner, is_path, state: Box::new(state) }
    }

    /// The same description with its offset and flags in `state`, and its locks under a number that all processes
    /// with the description use. The new state takes over offset and flags.
    #[must_use]
    pub fn shared(self, state: Box<dyn OpenState>, owner: u64) -> Self {
        let mut offset = 0;
        self.state.with_offset(&mut |own| offset = *own);
        state.with_offset(&mut |shared| *shared = offset);
        state.set_flags(self.state.flags());
        Self { state, owner: LockOwner::Description(owner), ..self }
    }

    /// Inode of the file.
    pub fn inode(&self) -> InodeNumber {
        self.inode
    }

    /// Type of the file.
    pub fn file_type(&self) -> FileType {
        self.file_type
    }

    /// Access mode and status flags.
    #[inline]
    pub fn flags(&self) -> c_int {
        self.state.flags()
    }

    pub(crate) fn set_flags(&self, flags: c_int) {
        self.state.set_flags(flags);
    }

    /// Runs a function that uses the offset and may change it.
    pub(crate) fn with_offset<T>(&self, mut change: impl FnMut(&mut u64) -> T) -> T {
        let mut result = None;
        self.state.with_offset(&mut |offset| result = Some(change(offset)));
        result.expect("a state runs what it is given")
    }

    /// Whether it was opened with `O_PATH`.
    pub(crate) fn is_path(&self) -> bool {
        self.is_path
    }

    /// The engine's open file; `BadDescriptor` for a description opened with `O_PATH`.
    pub(crate) fn handle(&self) -> Result<Handle, Error> {
        self.handle.filter(|_| !self.is_path).ok_or(Error::BadDescriptor)
    }

    pub(crate) fn readable(&self) -> Result<Handle, Error> {
        if self.access.read { self.handle() } else { Err(Error::BadDescriptor) }
    }

    pub(crate) fn writable(&self) -> Result<Handle, Error> {
        if self.access.write { self.handle() } else { Err(Error::BadDescriptor) }
    }
}
