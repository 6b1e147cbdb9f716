//! Open file descriptions: what `open` makes and what `dup`, `fork` and descriptor passing share.
//!
//! Descriptor numbers belong to the front end, which maps them to descriptions. So does the place where offset and
//! flags live: [`LocalState`] for one process, memory shared between processes where a description is.
//!
//! Lock order: the offset's lock, then whatever the engine locks. It is held while the engine reads or writes at
//! the offset, as Linux does, so that two readers of one description never get the same bytes.

use crate::engine::{Access, Handle, LockOwner};
use crate::error::Error;
use format::InodeNumber;
use format::record::FileType;
use libc::c_int;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Offset and status flags of a description, where all who share it see them.
pub trait OpenState: Send + Sync {
    /// Runs `change` on the offset, while nobody else does.
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64));

    /// The flags: access mode and status flags, as `F_GETFL` tells them.
    fn flags(&self) -> c_int;

    /// Sets them.
    fn set_flags(&self, flags: c_int);
}

/// The state of a description that one process has.
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

/// An open file description. It holds a pin of its inode, and an open file of the engine unless it was opened with
/// `O_PATH`; [`crate::Vfs::close`] gives them back.
pub struct File {
    pub(crate) inode: InodeNumber,
    pub(crate) file_type: FileType,
    pub(crate) handle: Option<Handle>,
    pub(crate) access: Access,
    pub(crate) owner: LockOwner,
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
        Self { inode, file_type, handle, access, owner, state: Box::new(state) }
    }

    /// The same description, with its offset and flags kept elsewhere, and its locks under a number that all who
    /// share it use. The new state takes over offset and flags.
    #[must_use]
    pub fn shared(self, state: Box<dyn OpenState>, owner: u64) -> Self {
        let mut offset = 0;
        self.state.with_offset(&mut |own| offset = *own);
        state.with_offset(&mut |shared| *shared = offset);
        state.set_flags(self.state.flags());
        Self { state, owner: LockOwner::Description(owner), ..self }
    }

    /// Its inode.
    pub fn inode(&self) -> InodeNumber {
        self.inode
    }

    /// Its type.
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

    /// Runs something that uses the offset and may move it.
    pub(crate) fn with_offset<T>(&self, mut change: impl FnMut(&mut u64) -> T) -> T {
        let mut result = None;
        self.state.with_offset(&mut |offset| result = Some(change(offset)));
        result.expect("a state runs what it is given")
    }

    /// The engine's open file; `BadDescriptor` for one that is only a path.
    pub(crate) fn handle(&self) -> Result<Handle, Error> {
        self.handle.ok_or(Error::BadDescriptor)
    }

    pub(crate) fn readable(&self) -> Result<Handle, Error> {
        if self.access.read { self.handle() } else { Err(Error::BadDescriptor) }
    }

    pub(crate) fn writable(&self) -> Result<Handle, Error> {
        if self.access.write { self.handle() } else { Err(Error::BadDescriptor) }
    }
}
