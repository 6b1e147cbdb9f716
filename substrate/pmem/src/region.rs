//! One file of a pool, mapped whole: read, write, and the three verbs that make writes durable.
//!
//! | medium | `write`, `persist` | `fence` | `settle` |
//! | --- | --- | --- | --- |
//! | memory | non-temporal stores, clwb | sfence | sfence |
//! | file | the same; the page is dirty | nothing that counts | fdatasync; msync without a descriptor |
//! | recorded | logged | logged | logged |
//!
//! A fence covers what the same thread wrote or persisted in the same region before. A failed settle poisons the
//! region: what the medium holds is unknown, and every later settle fails too. Regions have no locks; concurrent
//! writes to the same bytes leave either's.

use crate::copy::{Fault, Sink, Source};
use crate::fold::{self, Folder, State};
use crate::guard::{Guard, Watch};
use crate::mapping::Mapping;
use crate::medium::Class;
use crate::read_mapping::CopyError;
use crate::recorded::RecordedFile;
use crate::{MediaError, primitives};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// A file of a pool. Clones are the same region.
#[derive(Clone)]
pub struct Region(Arc<Inner>);

struct Inner {
    name: String,
    bytes: u64,
    class: Class,
    backing: Backing,
    poisoned: AtomicBool,
    counts: Counts,
}

enum Backing {
    /// The guard first: fields go in this order.
    Mapped {
        guard: Option<Guard>,
        mapping: Mapping,
        file: Option<OwnedFd>,
    },
    Recorded(RecordedFile),
}

impl Region {
    /// Maps a file that came as a descriptor, which is closed: a log, passed over a socket, for a program that may
    /// close whatever number it likes. Its children do not have the mapping. Its name is unknown here, thus empty. In
    /// memory its pages are mapped at once, as large ones where the kernel can make such of them: a first touch would
    /// cost a small write as much as all the rest.
    ///
    /// # Errors
    /// `Length` (an empty file), `Os`.
    pub fn from_fd(file: OwnedFd, class: Class) -> Result<Self, MediaError> {
        let mapping = Mapping::new(file.as_fd(), true, u64::MAX)?.not_for_children()?;
        if class == Class::Memory {
            mapping.make_ready();
        }
        let bytes = mapping.bytes();
        Ok(Self::new(String::new(), bytes, class, Backing::Mapped { guard: None, mapping, file: None }))
    }

    /// Maps memory of this process's own, as [`Self::from_fd`] does; the descriptor stays, for who maps it a second time.
    ///
    /// # Errors
    /// `Length` (an empty file), `Os`.
    pub fn own(file: OwnedFd) -> Result<Self, MediaError> {
        let region = Self::mapped(String::new(), file, Class::Memory, (true, u64::MAX), None)?;
        if let Backing::Mapped { mapping, .. } = &region.0.backing {
            mapping.make_ready();
        }
        Ok(region)
    }

    pub(crate) fn mapped(
        name: String,
        file: OwnedFd,
        class: Class,
        (writable, bytes_max): (bool, u64),
        watch: Option<&Arc<Watch>>,
    ) -> Result<Self, MediaError> {
        let mapping = Mapping::new(file.as_fd(), writable, bytes_max)?;
        let guard = watch.map(|watch| mapping.guard(watch, &name)).transpose()?;
        let bytes = mapping.bytes();
        Ok(Self::new(name, bytes, class, Backing::Mapped { guard, mapping, file: Some(file) }))
    }

    pub(crate) fn recorded(name: String, bytes: u64, file: RecordedFile) -> Self {
        Self::new(name, bytes, Class::Recorded, Backing::Recorded(file))
    }

    fn new(name: String, bytes: u64, class: Class, backing: Backing) -> Self {
        let poisoned = AtomicBool::new(false);
        Self(Arc::new(Inner { name, bytes, class, backing, poisoned, counts: Counts::default() }))
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The file's name in its pool; empty if it came as a descriptor.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What the medium survives.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// The descriptor, with the rights it was opened with, to be passed to another process; `None` of a region that came
    /// as one, and on a medium that exists only in this process.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.0.backing {
            Backing::Mapped { file, .. } => file.as_ref().map(OwnedFd::as_fd),
            Backing::Recorded(_) => None,
        }
    }

    /// Copies bytes out, each fetched once.
    ///
    /// # Errors
    /// `Unreadable`; `Lost` of a guarded medium.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), MediaError> {
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                mapping.read(offset, target);
                check_guard(guard)
            }
            Backing::Recorded(file) => file.read(offset, target),
        }
    }

    /// Copies `bytes` bytes to memory that a program gave.
    ///
    /// # Errors
    /// `Media(Unreadable)`, `Media(Lost)`, or `Fault` if the program's memory cannot be written.
    ///
    /// # Panics
    /// If the range is not within the region, or the sink is shorter.
    pub fn read_to(&self, offset: u64, sink: &mut Sink<'_>, bytes: usize) -> Result<(), CopyError> {
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                mapping.read_to(offset, sink, bytes)?;
                Ok(check_guard(guard)?)
            }
            Backing::Recorded(file) => {
                let mut copied = vec![0; bytes];
                file.read(offset, &mut copied)?;
                sink.put(&copied).map_err(CopyError::from)
            }
        }
    }

    /// Stores bytes and moves them towards the medium. Durable in the sense of [`Region::persist`].
    ///
    /// # Panics
    /// If the range is not within the region, or the region was opened for reading.
    #[inline]
    pub fn write(&self, offset: u64, source: &[u8]) {
        self.0.counts.wrote(source.len());
        match &self.0.backing {
            Backing::Mapped { mapping, .. } => mapping.write(offset, source),
            Backing::Recorded(file) => file.write(offset, source),
        }
    }

    /// [`Region::write`] of whole lines, given as words.
    ///
    /// # Panics
    /// As [`Region::write`]; if offset and length are not those of whole lines.
    #[inline]
    pub(crate) fn write_words(&self, offset: u64, words: &[u64]) {
        self.0.counts.wrote(size_of_val(words));
        match &self.0.backing {
            Backing::Mapped { mapping, .. } => mapping.write_words(offset, words),
            Backing::Recorded(file) => file.write(offset, words.as_bytes()),
        }
    }

    /// [`Region::write`] of whole lines from memory that a program gave, which may change meanwhile: `keep` gets what was
    /// stored.
    ///
    /// # Errors
    /// `Fault`: an unknown part of the range was overwritten.
    ///
    /// # Panics
    /// As [`Region::write`]; if offset and length are not those of whole lines, or the source is shorter.
    #[inline]
    pub(crate) fn write_lines(
        &self,
        offset: u64,
        source: &mut Source<'_>,
        keep: &mut [MaybeUninit<u8>],
    ) -> Result<(), Fault> {
        self.0.counts.wrote(keep.len());
        match &self.0.backing {
            Backing::Mapped { mapping, .. } => mapping.write_lines(offset, source, keep),
            Backing::Recorded(file) => {
                // SAFETY: `keep` is ours, and as long as is said.
                unsafe { source.take_raw(keep.as_mut_ptr().cast(), keep.len())? };
                // SAFETY: filled just now.
                file.write(offset, unsafe { keep.assume_init_ref() });
                Ok(())
            }
        }
    }

    /// [`Region::write`] of whole strides from memory that a program gave, which may change meanwhile: what was stored is
    /// folded into the state.
    ///
    /// # Errors
    /// `Fault`: an unknown part of the range was overwritten.
    ///
    /// # Panics
    /// As [`Region::write`]; if offset and length are not those of whole lines and strides, or the source is shorter.
    #[inline]
    pub(crate) fn write_folded(
        &self,
        folder: Folder,
        offset: u64,
        (source, bytes): (&mut Source<'_>, usize),
        state: &mut State,
    ) -> Result<(), Fault> {
        self.0.counts.wrote(bytes);
        match &self.0.backing {
            Backing::Mapped { mapping, .. } => mapping.write_folded(folder, offset, (source, bytes), state),
            Backing::Recorded(file) => {
                let mut kept = vec![0; bytes];
                source.take(&mut kept)?;
                fold::fold(folder, state, &kept);
                file.write(offset, &kept);
                Ok(())
            }
        }
    }

    /// Stores bytes and leaves them in the cache: for what is written again soon, and persisted once.
    ///
    /// # Panics
    /// If the range is not within the region, or the region was opened for reading.
    pub fn store(&self, offset: u64, source: &[u8]) {
        self.0.counts.wrote(source.len());
        match &self.0.backing {
            Backing::Mapped { mapping, .. } => mapping.store(offset, source),
            Backing::Recorded(file) => file.store(offset, source),
        }
    }

    /// Moves a range towards the medium: it is there after the next fence (memory) or settle (file).
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn persist(&self, range: Range<u64>) {
        add(&self.0.counts.persists, 1);
        match &self.0.backing {
            Backing::Mapped { mapping, .. } => mapping.write_back(range),
            Backing::Recorded(file) => file.persist(range),
        }
    }

    /// Orders: what this thread wrote or persisted here before reaches the medium before what it writes later.
    #[inline]
    pub fn fence(&self) {
        add(&self.0.counts.fences, 1);
        match &self.0.backing {
            Backing::Mapped { .. } => primitives::fence(),
            Backing::Recorded(file) => file.fence(),
        }
    }

    /// Makes what was written or persisted survive all that this medium can survive.
    ///
    /// # Errors
    /// What the medium said, or `Lost`, of a guarded medium; from then on `Poisoned`.
    pub fn settle(&self) -> Result<(), MediaError> {
        add(&self.0.counts.settles, 1);
        // Pairs with the store below; SeqCst because a settle that starts after another failed must see it.
        if self.0.poisoned.load(Ordering::SeqCst) {
            return Err(MediaError::Poisoned);
        }
        let settled = match &self.0.backing {
            Backing::Mapped { guard, mapping, file } => {
                settle_mapped(self.0.class, mapping, file.as_ref()).and_then(|()| check_guard(guard))
            }
            Backing::Recorded(file) => file.settle(),
        };
        if settled.is_err() {
            self.0.poisoned.store(true, Ordering::SeqCst);
        }
        settled
    }

    /// Whether all that was read and written here until now was the file. To be asked before a decision that rests on
    /// writes which were not settled; a region of a medium that is not guarded says nothing.
    ///
    /// # Errors
    /// `Lost`: the file was cut, or its medium failed, where it was read or written.
    pub fn check(&self) -> Result<(), MediaError> {
        match &self.0.backing {
            Backing::Mapped { guard, .. } => check_guard(guard),
            Backing::Recorded(_) => Ok(()),
        }
    }

    /// What was done since the region was opened.
    pub fn counters(&self) -> Counters {
        self.0.counts.get()
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({:?}, {} bytes, {})", self.0.name, self.0.bytes, self.0.class.name())
    }
}

#[inline]
fn check_guard(guard: &Option<Guard>) -> Result<(), MediaError> {
    if guard.as_ref().is_some_and(Guard::is_lost) { Err(MediaError::Lost) } else { Ok(()) }
}

fn settle_mapped(class: Class, mapping: &Mapping, file: Option<&OwnedFd>) -> Result<(), MediaError> {
    primitives::fence();
    if class == Class::Memory {
        return Ok(());
    }
    // The same to the kernel: it syncs the data of the file behind the mapping.
    let Some(file) = file else { return mapping.sync() };
    // SAFETY: the descriptor is open.
    if unsafe { libc::fdatasync(file.as_raw_fd()) } != 0 {
        return Err(MediaError::last_os());
    }
    Ok(())
}

/// What was done to a region through this process: the costs that tests assert. Exact while one thread uses the
/// region; with several some may be lost, because a locked addition would cost as much as a small write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of `write` and `store`.
    pub writes: u64,
    /// Bytes they wrote.
    pub bytes: u64,
    /// Calls of `persist`.
    pub persists: u64,
    /// Calls of `fence`.
    pub fences: u64,
    /// Calls of `settle`, failed ones too.
    pub settles: u64,
}

impl Counters {
    /// What was done after an earlier look.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            writes: self.writes - earlier.writes,
            bytes: self.bytes - earlier.bytes,
            persists: self.persists - earlier.persists,
            fences: self.fences - earlier.fences,
            settles: self.settles - earlier.settles,
        }
    }
}

#[derive(Default)]
struct Counts {
    writes: AtomicU64,
    bytes: AtomicU64,
    persists: AtomicU64,
    fences: AtomicU64,
    settles: AtomicU64,
}

impl Counts {
    #[inline]
    fn wrote(&self, bytes: usize) {
        add(&self.writes, 1);
        add(&self.bytes, bytes as u64);
    }

    fn get(&self) -> Counters {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counters {
            writes: get(&self.writes),
            bytes: get(&self.bytes),
            persists: get(&self.persists),
            fences: get(&self.fences),
            settles: get(&self.settles),
        }
    }
}

/// Relaxed, and not one atomic step: see [`Counters`].
#[inline]
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}
