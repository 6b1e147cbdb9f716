//! The calls of one process on a tree: system calls with plain types, one method for each family.
//!
//! This module implements everything that is the same for each engine: paths, flags, modes and the umask, offsets,
//! and the order in which errors are detected. Calls on descriptors return `Result`; calls on paths return
//! [`Outcome`], since a path can leave the tree.
//!
//! Lock order: the lock on the process's state is held only to copy or change the state, never across a call of the
//! engine.

mod attributes;
mod directory;
mod io;
mod locks;
mod names;
mod open;

pub use attributes::{AccessIds, Owner, Subject, TimeToSet};
pub use locks::{LockRequest, Patience, Pause, RangeAnswer, RangeKind};

use crate::access::Caller;
use crate::engine::{Attributes, Engine, LockOwner, Space, Sync as SyncWhat};
use crate::error::Error;
use crate::file::File;
use crate::path::{Base, Last, Outcome, PATH_BYTES_MAX, Place, Stop, Walker};
use crate::protections::Protections;
use format::record::FileType;
use format::{InodeNumber, Name};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Limit of the resolutions of a path in one call. The target may be removed each time before it is used: a process
/// that renames over the name without a pause causes about ten repetitions.
const WALKS_MAX: u32 = 1000;

/// State of a process that its calls depend on.
struct Process {
    /// The ids that count for files.
    caller: Arc<Caller>,
    /// The real ids, for `access`.
    real: Arc<Caller>,
    /// Working directory; pinned.
    cwd: InodeNumber,
}

/// A process's view of a tree.
pub struct Vfs<E: Engine> {
    engine: Arc<E>,
    root: InodeNumber,
    owner: LockOwner,
    /// Credentials at the start, and a flag that is set once they changed. Most processes never change them, so a
    /// write takes no lock to learn its caller.
    first: Arc<Caller>,
    changed: AtomicBool,
    process: RwLock<Process>,
    /// Apart from the others, because every call that creates may set it first.
    umask: AtomicU32,
    /// The settings of the machine about links and shared directories; asked for only if the answer may matter.
    protections: fn() -> Protections,
}

impl<E: Engine> Vfs<E> {
    /// Makes the view of a process whose working directory is the root and whose umask is 022. `owner` identifies
    /// the owner of its locks.
    ///
    /// # Errors
    /// Those of [`Engine::root`].
    pub fn new(engine: Arc<E>, caller: Caller, owner: LockOwner) -> Result<Self, Error> {
        // Two pins: for the root, and for the working directory.
        let root = engine.root()?.inode;
        let cwd = engine.root()?.inode;
        let caller = Arc::new(caller);
        let process = Process { caller: caller.clone(), real: caller.clone(), cwd };
        let (changed, process) = (AtomicBool::new(false), RwLock::new(process));
        let protections = || Protections::NONE;
        let umask = AtomicU32::new(0o022);
        Ok(Self { engine, root, owner, first: caller, changed, process, umask, protections })
    }

    /// The same view under the settings of a machine.
    #[must_use]
    pub fn protected_by(self, protections: fn() -> Protections) -> Self {
        Self { protections, ..self }
    }

    /// Ends the view: releases locks and pins. All files must be closed before.
    pub fn end(self) {
        let cwd = self.process(|process| process.cwd);
        self.engine.release(self.owner, None);
        self.engine.forget(&[self.root, cwd]);
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<E> {
        &self.engine
    }

    /// Sets the credentials of the process: the ids that count for files, and the real ones.
    pub fn set_caller(&self, caller: Caller, real: Caller) {
        self.process_mut(|process| {
            process.caller = Arc::new(caller);
            process.real = Arc::new(real);
            // Release: pairs with the Acquire in `with_caller`. Set under the lock that every reader of a set flag
            // takes.
            self.changed.store(true, Ordering::Release);
        });
    }

    /// Runs a call of the engine with the process's credentials.
    #[inline]
    fn with_caller<T>(&self, act: impl FnOnce(&Caller) -> T) -> T {
        // Acquire: pairs with the Release in `set_caller`.
        if self.changed.load(Ordering::Acquire) { act(&self.caller()) } else { act(&self.first) }
    }

    /// Credentials of the process.
    pub fn caller(&self) -> Arc<Caller> {
        self.process(|process| process.caller.clone())
    }

    /// Sets the umask.
    pub fn set_umask(&self, mask: u32) {
        // Relaxed, here and below: no other data depends on it.
        self.umask.store(mask & 0o777, Ordering::Relaxed);
    }

    fn current_umask(&self) -> u32 {
        self.umask.load(Ordering::Relaxed)
    }

    /// Changes the working directory.
    ///
    /// # Errors
    /// `NotDirectory`, `Denied`; those of paths.
    pub fn chdir(&self, place: Place<'_>) -> Outcome<()> {
        let caller = self.caller();
        let node = self.walking(&caller, place, |walker| {
            let attributes = walker.walk_to_end(place.path, true)?;
            crate::access::search(&caller, &attributes)?;
            Ok(self.keep(walker, attributes.inode)?)
        })?;
        self.replace_cwd(node);
        Ok(())
    }

    /// Changes the working directory to an open directory.
    ///
    /// # Errors
    /// `NotDirectory`, `Denied`.
    pub fn fchdir(&self, file: &File) -> Result<(), Error> {
        let caller = self.caller();
        let mut found = Vec::with_capacity(1);
        self.engine.walk(&caller, file.inode, &[], &mut found)?;
        let node = found.first().expect("a walk without steps answers its start");
        if let Err(error) = crate::access::search(&caller, node) {
            self.engine.forget(&[node.inode]);
            return Err(error);
        }
        self.replace_cwd(node.inode);
        Ok(())
    }

    /// Capacity and free space of the tree.
    ///
    /// # Errors
    /// Those of paths.
    pub fn statfs(&self, subject: Subject<'_>) -> Outcome<Space> {
        self.subject(subject, |_, _| Ok(self.engine.statfs()?))
    }

    /// Makes all earlier changes durable (`syncfs`).
    ///
    /// # Errors
    /// Those of [`Engine::sync`].
    pub fn sync(&self) -> Result<(), Error> {
        self.engine.sync(SyncWhat::Everything)
    }

    /// The same for a program that gets no answer (`sync`).
    ///
    /// # Errors
    /// Those of [`Engine::sync`].
    pub fn sync_untold(&self) -> Result<(), Error> {
        self.engine.sync(SyncWhat::EverythingUntold)
    }

    /// Makes all earlier changes of this process durable (`msync`, which persists the stores to a mapping elsewhere).
    ///
    /// # Errors
    /// Those of [`Engine::sync`].
    pub fn sync_process(&self) -> Result<(), Error> {
        self.engine.sync(SyncWhat::Process)
    }

    fn replace_cwd(&self, node: InodeNumber) {
        let old = self.process_mut(|process| std::mem::replace(&mut process.cwd, node));
        self.engine.forget(&[old]);
    }

    fn process<T>(&self, read: impl FnOnce(&Process) -> T) -> T {
        read(&self.process.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn process_mut<T>(&self, change: impl FnOnce(&mut Process) -> T) -> T {
        change(&mut self.process.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Resolves a path with a walker, and then forgets the walker's pins. The target may be removed before it is
    /// used: then the path is resolved again, as the kernel does, and the result is that of the tree at that time.
    fn walking<T>(
        &self,
        caller: &Caller,
        place: Place<'_>,
        mut resolve: impl FnMut(&mut Walker<'_, E>) -> Outcome<T>,
    ) -> Outcome<T> {
        for _ in 1..WALKS_MAX {
            match self.walking_once(caller, place, &mut resolve) {
                Err(Stop::Failed(Error::Stale)) => {}
                answer => return answer,
            }
        }
        self.walking_once(caller, place, &mut resolve)
    }

    /// One attempt of [`Self::walking`]. Calls with two paths use it for the second path, which is resolved again
    /// together with the first.
    fn walking_once<T>(
        &self,
        caller: &Caller,
        place: Place<'_>,
        resolve: impl FnOnce(&mut Walker<'_, E>) -> Outcome<T>,
    ) -> Outcome<T> {
        if place.path.is_empty() {
            return Err(Error::NotFound.into());
        }
        if place.path.len() > PATH_BYTES_MAX {
            return Err(Error::NameTooLong.into());
        }
        let start = match place.base {
            _ if place.path.starts_with(b"/") => self.root,
            Base::Root => self.root,
            Base::Cwd => self.process(|process| process.cwd),
            Base::At(file) if file.file_type != FileType::Directory => {
                return Err(Error::NotDirectory.into());
            }
            Base::At(file) => file.inode,
            Base::Node(node) => node,
        };
        let mut walker = Walker::new(&*self.engine, caller, self.protections, start);
        let result = resolve(&mut walker);
        if !walker.pins.is_empty() {
            self.engine.forget(&walker.pins);
        }
        result
    }

    /// Removes a pin from those that the walker will forget.
    fn keep(&self, walker: &mut Walker<'_, E>, node: InodeNumber) -> Result<InodeNumber, Error> {
        match walker.pins.iter().position(|pin| *pin == node) {
            Some(index) => {
                walker.pins.swap_remove(index);
            }
            // The inode is the start of the walk: pin it once more.
            None => self.engine.walk(&Caller::ROOT, node, &[], &mut Vec::with_capacity(1))?,
        }
        Ok(node)
    }

    /// Runs a call on a directory and a name in it; `no_name` gives the error of a path that ends in no name.
    fn on_entry<T>(
        &self,
        place: Place<'_>,
        no_name: impl Fn(&Last) -> Error,
        act: impl Fn(&Caller, Entry<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let caller = self.caller();
        self.walking(&caller, place, |walker| at_entry(walker, place, &no_name, &act))
    }

    /// Attributes of the inode that an entry refers to.
    fn look(&self, caller: &Caller, entry: &Entry<'_>) -> Outcome<Attributes> {
        let mut found = Vec::with_capacity(1);
        let steps = [crate::engine::Step::Child(entry.name)];
        self.engine.walk(caller, entry.parent, &steps, &mut found)?;
        let attributes = found.pop().expect("a walk of one step answers one");
        self.engine.forget(&[attributes.inode]);
        Ok(attributes)
    }
}

/// Resolves a path up to its directory, and runs a call on that and the last name.
fn at_entry<T, E: Engine>(
    walker: &mut Walker<'_, E>,
    place: Place<'_>,
    no_name: impl Fn(&Last) -> Error,
    act: impl Fn(&Caller, Entry<'_>) -> Outcome<T>,
) -> Outcome<T> {
    let last = walker.walk_to_parent(place.path)?;
    match last.name()? {
        Some((name, slash)) => act(walker.caller(), Entry { parent: walker.at(), name, slash }),
        None => Err(no_name(&last).into()),
    }
}

/// The entry that a call is about.
#[derive(Clone, Copy)]
struct Entry<'a> {
    parent: InodeNumber,
    name: Name<'a>,
    /// True if slashes follow the name.
    slash: bool,
}

/// A failure as the outcome of a call on a path.
fn failed<T>(error: Error) -> Outcome<T> {
    Err(Stop::Failed(error))
}
