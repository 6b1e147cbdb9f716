//! The medium of the tests: files in memory, and a log of every operation on them. [`crate::crash`] builds from the
//! log every image that a crash may leave.
//!
//! It models the weakest real medium: a fence covers only what the same thread wrote or persisted in the same file.
//! It can be told to misbehave: to skip the n-th persist, fence or sync, to fail a sync, to fail reads of a range, or
//! to delay calls. With these faults a test shows that it would notice a missing persist, fence or sync.
//!
//! Locks: one lock, of the recorder; no other lock is taken under it.

use crate::MediaError;
use crate::counted_space::CountedSpace;
use crate::footprint::{Footprint, ReadPage};
use crate::image::Image;
use crate::medium::Medium;
use crate::region::Region;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;

/// Work of another thread, done between the operations of this one; false once there is no more.
type Meanwhile = Box<dyn FnMut() -> bool + Send>;

/// Identifies a file by the order of creation: a later file with the same name has another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileId(pub u32);

/// An entry of the recorder's log.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Event {
    /// A file was created durably.
    Create { file: FileId, name: Arc<str>, bytes: u64 },
    /// A file was removed.
    Remove { file: FileId },
    /// Bytes were stored.
    Store { file: FileId, offset: u64, bytes: Arc<[u8]> },
    /// A range was moved towards the medium.
    Persist { file: FileId, range: Range<u64>, thread: ThreadId },
    /// All bytes that the thread persisted in the file have reached the medium.
    Fence { file: FileId, thread: ThreadId },
    /// The file was synced.
    Sync { file: FileId, thread: ThreadId },
    /// A call returned to the user of the structure under test.
    Returned { operation: u64 },
}

/// An operation that the recorder can skip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// The write-back of one write or persist.
    Persist,
    /// A fence.
    Fence,
    /// A sync ([`Region::sync`]).
    Sync,
}

/// An operation that the recorder can delay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldCall {
    /// A sync of any file.
    Sync,
    /// A read of the file with this name.
    Read(String),
}

/// Delays calls until it is dropped.
#[derive(Debug)]
#[must_use = "the calls go on when this is dropped"]
pub struct Hold(Recorder);

impl Hold {
    /// Number of calls that are waiting.
    pub fn waiting(&self) -> u64 {
        self.0.state().waiting
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.state().held = None;
        self.0.1.notify_all();
    }
}

/// All files of a recorded pool, and the log of the operations on them. Clones refer to the same recorder. The
/// condition variable is notified when delayed calls may continue.
#[derive(Clone)]
pub struct Recorder(Arc<Mutex<RecorderState>>, Arc<Condvar>);

#[derive(Default)]
struct RecorderState {
    initial: Image,
    /// Ids and names of the files of `initial`.
    first_ids: BTreeMap<FileId, Arc<str>>,
    live: Image,
    ids: BTreeMap<Arc<str>, FileId>,
    next_file: u32,
    log: Vec<Event>,
    locked: bool,
    faults: Faults,
    space: CountedSpace,
    held: Option<HeldCall>,
    /// See [`Recorder::meanwhile`].
    meanwhile: Option<Meanwhile>,
    /// Number of delayed calls.
    waiting: u64,
    /// The bytes of `initial` that were read, if they are tracked.
    footprint: Option<Footprint>,
}

#[derive(Default)]
struct Faults {
    persists: Countdown,
    fences: Countdown,
    syncs: Countdown,
    sync_errors: Countdown,
    /// No file gets space.
    full: bool,
    unreadable: Vec<(String, Range<u64>)>,
    /// Files that change after each read, and the ranges that were read.
    restless: Vec<(String, Vec<Range<u64>>)>,
}

/// Counts calls, and selects one of them.
#[derive(Default)]
struct Countdown {
    calls: u64,
    meant: Option<u64>,
}

impl Countdown {
    /// Counts a call; true if it is the selected one.
    fn strikes(&mut self) -> bool {
        let call = self.calls;
        self.calls += 1;
        self.meant == Some(call)
    }
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// An empty pool.
    pub fn new() -> Self {
        Self::of_image(Image::default())
    }

    /// A pool with the files of an image, and an empty log.
    pub fn of_image(image: Image) -> Self {
        let mut state = RecorderState::default();
        for name in image.names() {
            let file = FileId(state.next_file);
            state.ids.insert(name.clone(), file);
            state.first_ids.insert(file, name.clone());
            state.next_file += 1;
        }
        state.live = image.clone();
        state.initial = image;
        Self(Arc::new(Mutex::new(state)), Arc::default())
    }

    /// [`Self::of_image`] with tracking of the bytes that are read.
    pub(crate) fn of_watched_image(image: Image) -> Self {
        let recorder = Self::of_image(image);
        let mut state = recorder.state();
        state.footprint = Some(Footprint::new(state.next_file));
        drop(state);
        recorder
    }

    /// The bytes of the image that were read, if they are tracked.
    pub(crate) fn parts(&self) -> Vec<ReadPage> {
        self.state().footprint.as_ref().map(Footprint::parts).unwrap_or_default()
    }

    /// Adds the reads of a run that started from `later`, an image that this recorder's log may leave.
    pub(crate) fn absorb(&self, parts: &[ReadPage], later: &Image) {
        let mut state = self.state();
        let state = &mut *state;
        if let Some(footprint) = &mut state.footprint {
            footprint.absorb(parts, &state.initial, later);
        }
    }

    /// The same folder after the process that used it was killed: everything that it stored is there, and what it did not
    /// make durable may still be lost. Later stores of that process's threads do not reach it.
    #[must_use]
    pub fn after_kill(&self) -> Self {
        let state = self.state();
        let copy = RecorderState {
            initial: state.initial.clone(),
            first_ids: state.first_ids.clone(),
            live: state.live.clone(),
            ids: state.ids.clone(),
            next_file: state.next_file,
            log: state.log.clone(),
            space: state.space.clone(),
            ..RecorderState::default()
        };
        Self(Arc::new(Mutex::new(copy)), Arc::default())
    }

    /// The pool's folder.
    pub fn medium(&self) -> Medium {
        Medium::recorded(self)
    }

    /// Records that an operation of the structure under test returned. A crash after this point must preserve the
    /// effects that the operation guarantees. The test chooses the meaning of the number.
    pub fn returned(&self, operation: u64) {
        self.state().log.push(Event::Returned { operation });
    }

    /// Makes all files durable as they are now, and clears the log.
    pub fn begin_here(&self) {
        let mut state = self.state();
        state.initial = state.live.clone();
        state.log.clear();
        // Open regions refer to their files by id.
        state.first_ids = state.ids.iter().map(|(name, file)| (*file, name.clone())).collect();
    }

    /// Skips the `call`-th call of `verb` (from 0, over all files), which reports success.
    pub fn leave_out(&self, verb: Verb, call: u64) {
        let mut state = self.state();
        let faults = &mut state.faults;
        let countdown = match verb {
            Verb::Persist => &mut faults.persists,
            Verb::Fence => &mut faults.fences,
            Verb::Sync => &mut faults.syncs,
        };
        countdown.meant = Some(call);
    }

    /// Number of calls of `verb`.
    pub fn calls(&self, verb: Verb) -> u64 {
        let state = self.state();
        match verb {
            Verb::Persist => state.faults.persists.calls,
            Verb::Fence => state.faults.fences.calls,
            Verb::Sync => state.faults.syncs.calls,
        }
    }

    /// Makes the `call`-th sync (from 0, over all files) fail with EIO and sync nothing.
    pub fn fail_sync(&self, call: u64) {
        self.state().faults.sync_errors.meant = Some(call);
    }

    /// While the medium is full no file can be made, and no part of one gets space.
    pub fn set_full(&self, full: bool) {
        self.state().faults.full = full;
    }

    /// From now on the medium has space for so many bytes more, beside what its files have, which is counted from here.
    pub fn limit_space(&self, bytes: u64) {
        self.state().space = CountedSpace::of(bytes);
    }

    /// Another program takes all space that is left.
    pub fn fill_space(&self) {
        self.state().space.fill();
    }

    /// Bytes for which the medium has space, held ones not included; `None` without a limit.
    pub fn space_left(&self) -> Option<u64> {
        self.state().space.left()
    }

    pub(crate) fn held_bytes(&self) -> Option<u64> {
        self.state().space.held()
    }

    pub(crate) fn hold_space(&self, more: u64) -> Result<(), MediaError> {
        let mut state = self.state();
        if state.faults.full { Err(MediaError::NoSpace) } else { state.space.hold(more) }
    }

    pub(crate) fn take_held(&self, bytes: u64) -> u64 {
        self.state().space.take_held(bytes)
    }

    /// Delays all matching calls from now on, each in its own thread, as a slow medium does. One hold at a time.
    pub fn hold(&self, call: HeldCall) -> Hold {
        self.state().held = Some(call);
        Hold(self.clone())
    }

    /// Does this before each persist, fence and sync from now on until it returns false, but not within itself: so one thread
    /// plays two, in the same order in each run.
    pub fn meanwhile(&self, act: impl FnMut() -> bool + Send + 'static) {
        self.state().meanwhile = Some(Box::new(act));
    }

    fn do_meanwhile(&self) {
        let taken = self.state().meanwhile.take();
        if let Some(mut act) = taken
            && act()
        {
            self.state().meanwhile.get_or_insert(act);
        }
    }

    /// Locks the state, after waiting while this call is delayed.
    fn state_for(&self, is_call: impl Fn(&HeldCall) -> bool) -> MutexGuard<'_, RecorderState> {
        let mut state = self.state();
        while state.held.as_ref().is_some_and(&is_call) {
            state.waiting += 1;
            state = self.1.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            state.waiting -= 1;
        }
        state
    }

    /// Makes every later read that touches the range fail.
    pub fn fail_reads(&self, name: &str, range: Range<u64>) {
        self.state().faults.unreadable.push((name.to_owned(), range));
    }

    /// Inverts every byte of a file after its first read, as a hostile process may do that has mapped the file.
    pub fn change_after_reads(&self, name: &str) {
        self.state().faults.restless.push((name.to_owned(), Vec::new()));
    }

    /// The current contents of the files, as a program reads them.
    pub fn image(&self) -> Image {
        self.state().live.clone()
    }

    /// An independent copy of this recorder and its log.
    pub(crate) fn snapshot(&self) -> Self {
        let state = self.state();
        let copy = RecorderState {
            initial: state.initial.clone(),
            first_ids: state.first_ids.clone(),
            live: state.live.clone(),
            ids: state.ids.clone(),
            next_file: state.next_file,
            log: state.log.clone(),
            locked: false,
            held: None,
            meanwhile: None,
            waiting: 0,
            faults: Faults::default(),
            space: state.space.clone(),
            footprint: None,
        };
        Self(Arc::new(Mutex::new(copy)), Arc::default())
    }

    /// An independent copy whose log lacks one event, as if the call had been skipped.
    pub(crate) fn without(&self, event: usize) -> Self {
        let copy = self.snapshot();
        copy.state().log.remove(event);
        copy
    }

    /// True if the log contains a store, a creation or a removal.
    pub(crate) fn has_changes(&self) -> bool {
        let changes = |event: &Event| {
            matches!(event, Event::Store { .. } | Event::Create { .. } | Event::Remove { .. })
        };
        self.state().log.iter().any(changes)
    }

    /// A hash of the log: equal for two runs that did the same.
    pub(crate) fn log_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.state().log.hash(&mut hasher);
        hasher.finish()
    }

    /// The initial image with its file ids, and the log.
    pub(crate) fn history(&self) -> (Image, BTreeMap<FileId, Arc<str>>, Vec<Event>) {
        let state = self.state();
        (state.initial.clone(), state.first_ids.clone(), state.log.clone())
    }

    pub(crate) fn create(&self, name: &str, (bytes, reserved): (u64, u64)) -> Result<Region, MediaError> {
        let mut state = self.state();
        if state.ids.contains_key(name) {
            return Err(MediaError::Exists);
        }
        if state.faults.full {
            return Err(MediaError::NoSpace);
        }
        let (file, shared) = (FileId(state.next_file), Arc::<str>::from(name));
        state.space.take(file, 0..reserved)?;
        state.next_file += 1;
        state.ids.insert(shared.clone(), file);
        state.live.create(shared.clone(), bytes);
        state.log.push(Event::Create { file, name: shared.clone(), bytes });
        drop(state);
        Ok(self.region(shared, file, bytes, true))
    }

    pub(crate) fn open(&self, name: &str, writable: bool) -> Result<Region, MediaError> {
        let state = self.state();
        let (shared, file) = state.ids.get_key_value(name).ok_or(MediaError::NotFound)?;
        let (shared, file) = (shared.clone(), *file);
        let bytes = state.live.bytes(name).expect("a file with an id is in the image");
        drop(state);
        Ok(self.region(shared, file, bytes, writable))
    }

    fn region(&self, name: Arc<str>, file: FileId, bytes: u64, writable: bool) -> Region {
        let recorded = RecordedFile { recorder: self.clone(), file, name: name.clone(), bytes, writable };
        Region::recorded(name.to_string(), bytes, recorded)
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        self.state().ids.contains_key(name)
    }

    pub(crate) fn list(&self) -> Vec<String> {
        self.state().ids.keys().map(ToString::to_string).collect()
    }

    pub(crate) fn remove(&self, name: &str) -> Result<(), MediaError> {
        let mut state = self.state();
        let file = state.ids.remove(name).ok_or(MediaError::NotFound)?;
        state.space.forget(file);
        state.live.remove(name);
        state.log.push(Event::Remove { file });
        Ok(())
    }

    pub(crate) fn lock(&self) -> Result<RecordedLock, MediaError> {
        let mut state = self.state();
        if state.locked {
            return Err(MediaError::Locked);
        }
        state.locked = true;
        Ok(RecordedLock(self.clone()))
    }

    fn state(&self) -> MutexGuard<'_, RecorderState> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        write!(f, "Recorder({} files, {} events)", state.ids.len(), state.log.len())
    }
}

/// Lock of a recorded pool.
#[derive(Debug)]
pub(crate) struct RecordedLock(Recorder);

impl Drop for RecordedLock {
    fn drop(&mut self) {
        self.0.state().locked = false;
    }
}

/// A file of a recorded pool, used by a region. After its removal it can still be written, and reads as zeros.
pub(crate) struct RecordedFile {
    recorder: Recorder,
    file: FileId,
    name: Arc<str>,
    bytes: u64,
    writable: bool,
}

impl RecordedFile {
    pub fn reserve(&self, range: Range<u64>) -> Result<(), MediaError> {
        let mut state = self.recorder.state();
        if state.faults.full { Err(MediaError::NoSpace) } else { state.space.take(self.file, range) }
    }

    pub fn give_back(&self, range: Range<u64>) {
        self.recorder.state().space.give_back(self.file, range);
    }

    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), MediaError> {
        let range = self.range(offset, target.len());
        let is_of_this = |held: &HeldCall| matches!(held, HeldCall::Read(name) if **name == *self.name);
        let mut state = self.recorder.state_for(is_of_this);
        let touches = |(name, bad): &(String, Range<u64>)| {
            **name == *self.name && bad.start < range.end && range.start < bad.end
        };
        if state.faults.unreadable.iter().any(touches) {
            return Err(MediaError::Unreadable);
        }
        if state.ids.get(&self.name) == Some(&self.file) {
            state.live.read(&self.name, offset, target);
            if let Some(footprint) = &mut state.footprint {
                footprint.note_read(self.file, range.clone());
            }
        } else {
            target.fill(0);
        }
        for (_, read) in state.faults.restless.iter_mut().filter(|(name, _)| **name == *self.name) {
            for before in read.iter() {
                let (from, to) = (before.start.max(range.start), before.end.min(range.end));
                let again = from.saturating_sub(range.start)..to.saturating_sub(range.start);
                if from < to {
                    target[again.start as usize..again.end as usize]
                        .iter_mut()
                        .for_each(|byte| *byte = !*byte);
                }
            }
            read.push(range.clone());
        }
        Ok(())
    }

    pub fn write(&self, offset: u64, source: &[u8]) {
        self.store(offset, source);
        self.persist(self.range(offset, source.len()));
    }

    pub fn store(&self, offset: u64, source: &[u8]) {
        assert!(self.writable, "a store into a region that was opened for reading");
        let range = self.range(offset, source.len());
        let mut state = self.recorder.state();
        if state.ids.get(&self.name) == Some(&self.file) {
            assert!(state.space.covers(self.file, &range), "a store where file {} has no space", self.name);
            state.live.write(&self.name, offset, source);
            if let Some(footprint) = &mut state.footprint {
                footprint.note_store(self.file, range);
            }
            state.log.push(Event::Store { file: self.file, offset, bytes: source.into() });
        }
    }

    pub fn persist(&self, range: Range<u64>) {
        assert!(range.end <= self.bytes, "a persist beyond the region");
        self.recorder.do_meanwhile();
        let mut state = self.recorder.state();
        if !state.faults.persists.strikes() {
            let thread = std::thread::current().id();
            state.log.push(Event::Persist { file: self.file, range, thread });
        }
    }

    pub fn fence(&self) {
        self.recorder.do_meanwhile();
        let mut state = self.recorder.state();
        if !state.faults.fences.strikes() {
            let thread = std::thread::current().id();
            state.log.push(Event::Fence { file: self.file, thread });
        }
    }

    pub fn sync(&self) -> Result<(), MediaError> {
        self.recorder.do_meanwhile();
        let mut state = self.recorder.state_for(|held| *held == HeldCall::Sync);
        if state.faults.sync_errors.strikes() {
            return Err(MediaError::Os(libc::EIO));
        }
        if !state.faults.syncs.strikes() {
            let thread = std::thread::current().id();
            state.log.push(Event::Sync { file: self.file, thread });
        }
        Ok(())
    }

    fn range(&self, offset: u64, bytes: usize) -> Range<u64> {
        let end = offset.checked_add(bytes as u64).filter(|end| *end <= self.bytes);
        let end =
            end.unwrap_or_else(|| panic!("access of {bytes} bytes at {offset} in {} bytes", self.bytes));
        offset..end
    }
}
