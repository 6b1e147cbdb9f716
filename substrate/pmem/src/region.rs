//! One file of a pool, mapped as a whole: reads, writes, and the three operations that make writes durable.
//!
//! | medium | `write`, `persist` | `fence` | `sync` |
//! | --- | --- | --- | --- |
//! | memory | non-temporal stores, clwb | sfence | sfence |
//! | file | the same; the page is dirty | no effect on the medium | fdatasync; msync without a descriptor |
//! | recorded | logged | logged | logged |
//!
//! A fence covers the bytes that the same thread wrote or persisted in the same region before. A failed `sync`
//! poisons the region: the contents on the medium are unknown, and every later one fails too. Regions have no
//! locks; of two concurrent writes to the same bytes either may win.

use crate::copy::{Fault, Sink, Source};
use crate::counters::{Counters, Counts, add};
use crate::file_space::{give_back, pages_within, read_at, reserve, whole_pages};
use crate::filled::Filled;
use crate::fold::{self, FoldState, Folder};
use crate::guard::{CopyGuard, Guard, Watch};
use crate::mapping::{HUGE_PAGE_BYTES, Mapping};
use crate::medium::Class;
use crate::outstanding::Operation;
use crate::read_mapping::{CopyError, ReadMapping};
use crate::recorded::RecordedFile;
use crate::{MediaError, primitives};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::IntoBytes;

/// A file of a pool. Clones refer to the same region.
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
    /// Fields are dropped in this order: the guard first.
    Mapped {
        guard: Option<Guard>,
        mapping: Mapping,
        file: Option<OwnedFd>,
        /// For files in memory.
        filled: Option<Filled>,
    },
    Recorded(RecordedFile),
}

/// Bytes of a large page.
pub const LARGE_PAGE_BYTES: u64 = HUGE_PAGE_BYTES as u64;
/// Bytes of a piece of which [`Region::touch`] maps the pages. On memory that the machine never used this takes milliseconds.
pub const READY_PIECE_BYTES: u64 = HUGE_PAGE_BYTES as u64;

impl Region {
    /// Maps a file that came as a descriptor, and closes the descriptor: a log, passed over a socket to a program
    /// that may close any number. The program's children do not inherit the mapping. The name is unknown here, thus
    /// empty.
    ///
    /// # Errors
    /// `Length` (an empty file), `Os`.
    pub fn from_fd(file: OwnedFd, class: Class) -> Result<Self, MediaError> {
        let mapping = Mapping::new(file.as_fd(), true, u64::MAX)?.not_for_children()?;
        let bytes = mapping.bytes();
        Ok(Self::new(
            String::new(),
            bytes,
            class,
            Backing::Mapped { guard: None, mapping, file: None, filled: None },
        ))
    }

    /// Maps memory of this process, all of it at once, and keeps the descriptor for a second mapping.
    ///
    /// # Errors
    /// `Length` (an empty file), `Os`.
    pub fn own(file: OwnedFd) -> Result<Self, MediaError> {
        let region = Self::mapped(String::new(), file, Class::Memory, (true, u64::MAX), None)?;
        region.make_ready();
        Ok(region)
    }

    /// Maps the pages at once, as large pages where the kernel can form them; a second mapping finds them formed. Nothing on
    /// other media than memory.
    pub fn make_ready(&self) {
        if let (Class::Memory, Backing::Mapped { mapping, .. }) = (self.0.class, &self.0.backing) {
            mapping.make_ready();
        }
    }

    /// Has the kernel form large pages of a part, as far as it can: for all that map the file. A store to the part meanwhile waits
    /// for some milliseconds, also in another process. Nothing on other media than memory.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn form_large_pages(&self, range: Range<u64>) {
        if let (Class::Memory, Backing::Mapped { mapping, .. }) = (self.0.class, &self.0.backing) {
            mapping.form_large_pages(range);
        }
    }

    /// Allocates space for a part of a file that was made by [`crate::Medium::create_in_steps`], and leaves what the part
    /// contains; nothing else writes there meanwhile. Like data, it is durable after the next [`Self::sync`].
    ///
    /// # Errors
    /// `NoSpace`, `Os`.
    pub fn reserve(&self, range: Range<u64>) -> Result<(), MediaError> {
        match &self.0.backing {
            Backing::Mapped { file: Some(file), filled, guard, .. } => {
                let _operation = begin(guard);
                reserve(file.as_fd(), whole_pages(self.0.class, range, self.0.bytes))?;
                filled.as_ref().map_or(Ok(()), |filled| filled.note_space(file))
            }
            Backing::Mapped { .. } => Ok(()),
            Backing::Recorded(file) => file.reserve(range),
        }
    }

    /// Gives back the space of a part, whose contents are lost: see [`Self::reserve`]. Nothing else uses the part meanwhile.
    ///
    /// # Errors
    /// `Os`: the file system cannot do that.
    pub fn give_back(&self, range: Range<u64>) -> Result<(), MediaError> {
        match &self.0.backing {
            Backing::Mapped { file: Some(file), filled, guard, .. } => {
                let _operation = begin(guard);
                let range = pages_within(self.0.class, range);
                if range.is_empty() {
                    return Ok(());
                }
                give_back(file.as_fd(), range)?;
                filled.as_ref().map_or(Ok(()), |filled| filled.note_space(file))
            }
            Backing::Mapped { .. } => Ok(()),
            Backing::Recorded(file) => {
                file.give_back(range);
                Ok(())
            }
        }
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
        let filled = (class == Class::Memory && writable).then(|| Filled::new(&file, bytes)).transpose()?;
        Ok(Self::new(name, bytes, class, Backing::Mapped { guard, mapping, file: Some(file), filled }))
    }

    pub(crate) fn recorded(name: String, bytes: u64, file: RecordedFile) -> Self {
        Self::new(name, bytes, Class::Recorded, Backing::Recorded(file))
    }

    fn new(name: String, bytes: u64, class: Class, backing: Backing) -> Self {
        let poisoned = AtomicBool::new(false);
        Self(Arc::new(Inner { name, bytes, class, backing, poisoned, counts: Counts::default() }))
    }

    /// Touches memory that nothing was written to yet, so that no store waits for the kernel; its contents stay. Nothing on
    /// other media than memory.
    pub fn touch(&self, range: Range<u64>) {
        if let (Class::Memory, Backing::Mapped { mapping, .. }) = (self.0.class, &self.0.backing) {
            mapping.touch(range);
        }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Name of the file in its pool; empty if the file came as a descriptor.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Kind of the medium.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// The descriptor, with the rights with which it was opened, for passing to another process. `None` for a
    /// region that came as a descriptor, and on a medium that exists only in this process.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.0.backing {
            Backing::Mapped { file, .. } => file.as_ref().map(OwnedFd::as_fd),
            Backing::Recorded(_) => None,
        }
    }

    /// [`Self::read`] by the kernel: a part without space stays without it, where reading the mapping would allocate it. Zeros
    /// behind the end of a truncated file.
    ///
    /// # Errors
    /// `Os`; those of [`Self::read`] on a medium without files.
    pub fn read_by_kernel(&self, offset: u64, target: &mut [u8]) -> Result<(), MediaError> {
        let Some(file) = self.descriptor() else { return self.read(offset, target) };
        let _operation = self.begin();
        let done = read_at(file, offset, target)?;
        target[done..].fill(0);
        Ok(())
    }

    /// A second mapping, for reading a file whose owner may truncate it: where the file is gone, a copy from the mapping ends
    /// with `Unreadable`, and the region is not lost. The mapping may be shorter than the region. Reading a part of a file in
    /// memory that has no space allocates it. `None` where such faults are not caught (without a guard, and on some
    /// processors), and on other media than memory.
    pub fn map_for_reading(&self) -> Option<ReadMapping> {
        match &self.0.backing {
            Backing::Mapped { guard: Some(guard), file: Some(file), .. }
                if self.0.class == Class::Memory && CopyGuard::WORKS =>
            {
                ReadMapping::guarded(file.as_fd(), self.0.bytes, guard.watch()).ok()
            }
            _ => None,
        }
    }

    /// The first offset from this one on that may have been written to; `u64::MAX` if there is none.
    pub fn next_written(&self, offset: u64) -> u64 {
        let Some(file) = self.descriptor() else { return offset };
        let from = libc::off_t::try_from(offset).expect("an offset in a file");
        let _operation = self.begin();
        // SAFETY: the descriptor is open; its position is used nowhere else.
        match unsafe { libc::lseek(file.as_raw_fd(), from, libc::SEEK_DATA) } {
            found if found >= 0 => found.unsigned_abs(),
            _ if MediaError::last_os() == MediaError::Os(libc::ENXIO) => u64::MAX,
            _ => offset,
        }
    }

    /// Copies bytes out; each byte is loaded once.
    ///
    /// # Errors
    /// `Unreadable`; `Lost` of a guarded medium.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), MediaError> {
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.read(offset, target);
                check_guard(guard)
            }
            Backing::Recorded(file) => file.read(offset, target),
        }
    }

    /// Copies `bytes` bytes to memory of a program.
    ///
    /// # Errors
    /// `Media(Unreadable)`, `Media(Lost)`, or `Fault` if the program's memory cannot be written.
    ///
    /// # Panics
    /// If the range is not within the region, or the sink is shorter.
    pub fn read_to(&self, offset: u64, sink: &mut Sink<'_>, bytes: usize) -> Result<(), CopyError> {
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
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

    /// Stores bytes and moves them towards the medium, as [`Region::persist`] does.
    ///
    /// # Panics
    /// If the range is not within the region, or the region is read-only.
    #[inline]
    pub fn write(&self, offset: u64, source: &[u8]) {
        self.0.counts.wrote(source.len());
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.write(offset, source);
            }
            Backing::Recorded(file) => file.write(offset, source),
        }
    }

    /// [`Region::write`] for a place to which this process has written nothing yet. In memory the kernel copies the bytes: it
    /// takes less time than the fault of the first store to a page.
    ///
    /// # Panics
    /// As [`Region::write`].
    pub fn fill(&self, offset: u64, source: &[u8]) {
        let Backing::Mapped { mapping, filled: Some(filled), file: Some(file), .. } = &self.0.backing else {
            return self.write(offset, source);
        };
        self.0.counts.wrote(source.len());
        let end = offset.checked_add(source.len() as u64);
        assert!(end.is_some_and(|end| end <= self.0.bytes), "a place within the region");
        // If the kernel does not take all, the file is gone or the machine has no memory: a store reports it.
        let _operation = self.begin();
        let done = filled.write(file, offset, source);
        mapping.write(offset + done as u64, &source[done..]);
    }

    /// [`Region::write`] for a place to which this process has written before, perhaps by [`Region::fill`].
    ///
    /// # Panics
    /// As [`Region::write`].
    pub fn overwrite(&self, offset: u64, source: &[u8]) {
        if let Backing::Mapped { mapping, filled: Some(filled), .. } = &self.0.backing {
            let range = offset..self.0.bytes.min(offset.saturating_add(source.len() as u64));
            for piece in filled.take_unmapped(range) {
                mapping.touch(piece.start..self.0.bytes.min(piece.end));
            }
        }
        self.write(offset, source);
    }

    /// [`Region::write`] of whole cache lines, given as words.
    ///
    /// # Panics
    /// As [`Region::write`]; if offset and length are not multiples of a line.
    #[inline]
    pub(crate) fn write_words(&self, offset: u64, words: &[u64]) {
        self.0.counts.wrote(size_of_val(words));
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.write_words(offset, words);
            }
            Backing::Recorded(file) => file.write(offset, words.as_bytes()),
        }
    }

    /// [`Region::write`] of whole cache lines from memory of a program, which may change meanwhile: `keep` receives
    /// the bytes that were stored.
    ///
    /// # Errors
    /// `Fault`: an unknown part of the range was overwritten.
    ///
    /// # Panics
    /// As [`Region::write`]; if offset and length are not multiples of a line, or the source is shorter.
    #[inline]
    pub(crate) fn write_lines(
        &self,
        offset: u64,
        source: &mut Source<'_>,
        keep: &mut [MaybeUninit<u8>],
    ) -> Result<(), Fault> {
        self.0.counts.wrote(keep.len());
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.write_lines(offset, source, keep)
            }
            Backing::Recorded(file) => {
                // SAFETY: `keep` is a local buffer of this length.
                unsafe { source.take_raw(keep.as_mut_ptr().cast(), keep.len())? };
                // SAFETY: the call above filled it.
                file.write(offset, unsafe { keep.assume_init_ref() });
                Ok(())
            }
        }
    }

    /// [`Region::write`] of whole strides from memory of a program, which may change meanwhile: the stored bytes
    /// are folded into the state.
    ///
    /// # Errors
    /// `Fault`: an unknown part of the range was overwritten.
    ///
    /// # Panics
    /// As [`Region::write`]; if offset and length are not multiples of a line and a stride, or the source is
    /// shorter.
    #[inline]
    pub(crate) fn write_folded(
        &self,
        folder: Folder,
        offset: u64,
        (source, bytes): (&mut Source<'_>, usize),
        state: &mut FoldState,
    ) -> Result<(), Fault> {
        self.0.counts.wrote(bytes);
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.write_folded(folder, offset, (source, bytes), state)
            }
            Backing::Recorded(file) => {
                let mut kept = vec![0; bytes];
                source.take(&mut kept)?;
                fold::fold(folder, state, &kept);
                file.write(offset, &kept);
                Ok(())
            }
        }
    }

    /// Stores bytes and leaves them in the cache: for bytes that are written again soon and persisted once.
    ///
    /// # Panics
    /// If the range is not within the region, or the region is read-only.
    pub fn store(&self, offset: u64, source: &[u8]) {
        self.0.counts.wrote(source.len());
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.store(offset, source);
            }
            Backing::Recorded(file) => file.store(offset, source),
        }
    }

    /// Moves a range towards the medium. The range is there after the next fence (memory) or [`Region::sync`]
    /// (file).
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn persist(&self, range: Range<u64>) {
        add(&self.0.counts.persists, 1);
        match &self.0.backing {
            Backing::Mapped { mapping, guard, .. } => {
                let _operation = begin(guard);
                mapping.write_back(range);
            }
            Backing::Recorded(file) => file.persist(range),
        }
    }

    /// Orders stores: the bytes that this thread wrote or persisted here reach the medium before its later ones.
    #[inline]
    pub fn fence(&self) {
        add(&self.0.counts.fences, 1);
        match &self.0.backing {
            Backing::Mapped { .. } => primitives::fence(),
            Backing::Recorded(file) => file.fence(),
        }
    }

    /// Syncs the region: all bytes that were written or persisted survive everything that this medium can survive.
    ///
    /// # Errors
    /// The error of the medium, or `Lost` of a guarded medium; `Poisoned` from then on.
    pub fn sync(&self) -> Result<(), MediaError> {
        add(&self.0.counts.syncs, 1);
        // Pairs with the store below; SeqCst because a sync that starts after another one failed must see the
        // failure.
        if self.0.poisoned.load(Ordering::SeqCst) {
            return Err(MediaError::Poisoned);
        }
        let synced = match &self.0.backing {
            Backing::Mapped { guard, mapping, file, filled } => {
                let _operation = begin(guard);
                if let (Some(filled), Some(file), Some(guard)) = (filled, file, guard)
                    && filled.lacks_blocks(file)
                {
                    guard.mark_lost();
                }
                sync_mapped(self.0.class, mapping, file.as_ref()).and_then(|()| check_guard(guard))
            }
            Backing::Recorded(file) => file.sync(),
        };
        if synced.is_err() {
            self.0.poisoned.store(true, Ordering::SeqCst);
        }
        synced
    }

    /// Whether [`Self::sync`] may wait for a device.
    pub fn syncs_slowly(&self) -> bool {
        self.0.class == Class::File
    }

    /// Succeeds if all earlier reads and writes here accessed the file. The caller must ask this before a decision
    /// that depends on writes which were not synced. Without a guard the call always succeeds.
    ///
    /// # Errors
    /// `Lost`: the file was truncated, or its medium failed, where it was read or written.
    pub fn check(&self) -> Result<(), MediaError> {
        match &self.0.backing {
            Backing::Mapped { guard, .. } => check_guard(guard),
            Backing::Recorded(_) => Ok(()),
        }
    }

    /// Counts an operation that may wait for the medium: see [`crate::outstanding`].
    fn begin(&self) -> Option<Operation> {
        match &self.0.backing {
            Backing::Mapped { guard, .. } => begin(guard),
            Backing::Recorded(_) => None,
        }
    }

    /// Number of operations since the region was opened.
    pub fn counters(&self) -> Counters {
        self.0.counts.get()
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({:?}, {} bytes, {})", self.0.name, self.0.bytes, self.0.class.name())
    }
}

/// Counts an operation on a guarded medium. A process without a guard, such as a program with the library, counts none.
#[inline]
fn begin(guard: &Option<Guard>) -> Option<Operation> {
    guard.as_ref().and_then(|guard| Operation::begin(guard.watch()))
}

#[inline]
fn check_guard(guard: &Option<Guard>) -> Result<(), MediaError> {
    if guard.as_ref().is_some_and(Guard::is_lost) { Err(MediaError::Lost) } else { Ok(()) }
}

fn sync_mapped(class: Class, mapping: &Mapping, file: Option<&OwnedFd>) -> Result<(), MediaError> {
    primitives::fence();
    if class == Class::Memory {
        return Ok(());
    }
    // Equivalent for the kernel: it syncs the data of the file behind the mapping.
    let Some(file) = file else { return mapping.sync() };
    // SAFETY: the descriptor is open.
    if unsafe { libc::fdatasync(file.as_raw_fd()) } != 0 {
        return Err(MediaError::last_os());
    }
    Ok(())
}
