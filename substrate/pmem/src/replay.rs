//! Replays the log of a recorder, and computes for each moment which stores are durable and which may be on the
//! medium.
//!
//! **Lines**: the unit is a cache line. Any prefix of the stores to a line since the last fence that covered it may
//! be on the medium. A store of more than eight bytes may be torn between its aligned eight-byte words, in ascending
//! order. A range that was persisted is durable after the next fence or sync of the same thread in the same file. A
//! store that was never persisted may reach the medium at any later time, or never.
//!
//! **Pages**: the unit is a page of 4 KB. Any version of a page since the last sync of its file may be on the medium.
//! A sync covers the pages in which a range was persisted, with all stores to them before.

use crate::LINE_BYTES;
use crate::image::{Image, PAGE_BYTES};
use crate::recorded::{Event, FileId, Recorder};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::thread::ThreadId;

/// The size of an aligned store that is never torn.
const WORD_BYTES: usize = 8;

/// The crash model: the unit that reaches the medium as one, and the operation that makes it durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// Cache lines, durable after a fence: persistent memory.
    Lines,
    /// Pages, durable after a sync: a mapped file.
    Pages,
}

impl Model {
    const fn unit_bytes(self) -> usize {
        match self {
            Self::Lines => LINE_BYTES,
            Self::Pages => PAGE_BYTES,
        }
    }
}

/// A replay of a log.
pub(crate) struct Replay {
    model: Model,
    durable: Image,
    names: BTreeMap<FileId, Arc<str>>,
    pending: BTreeMap<(FileId, u64), VecDeque<Store>>,
    covered: Vec<PersistedStores>,
    stores: u64,
    log: std::vec::IntoIter<Event>,
    /// The creation or removal in progress.
    entry: Option<(Event, Arc<str>)>,
    returned: Vec<u64>,
    /// Number of events replayed.
    events: usize,
    /// True after the moment before the next event was returned.
    stopped: bool,
    ended: bool,
}

/// A store to one unit.
struct Store {
    number: u64,
    /// Offset within the unit.
    offset: usize,
    bytes: Box<[u8]>,
}

/// The stores to a unit with numbers below `up_to` were persisted.
struct PersistedStores {
    thread: ThreadId,
    file: FileId,
    unit: u64,
    up_to: u64,
}

/// A unit that has several possible versions.
pub(crate) struct Choice {
    pub name: Arc<str>,
    pub offset: u64,
    /// From the durable version to the newest; adjacent versions differ.
    pub versions: Vec<Box<[u8]>>,
    /// Indexes of the versions that are not torn, among them the first and the last.
    pub whole: Vec<usize>,
}

/// A file whose creation or removal may be on the medium or not.
pub(crate) struct EntryChoice {
    pub name: Arc<str>,
    /// Length of a file that is being created; `None` for a removal.
    pub made: Option<u64>,
}

/// The possible states of the medium at one moment.
pub(crate) struct Moment<'a> {
    pub durable: &'a Image,
    pub choices: Vec<Choice>,
    pub entry: Option<EntryChoice>,
    pub returned: &'a [u64],
    pub event: usize,
}

impl Replay {
    pub fn new(recorder: &Recorder, model: Model) -> Self {
        let (durable, names, log) = recorder.history();
        Self {
            model,
            durable,
            names,
            pending: BTreeMap::new(),
            covered: Vec::new(),
            stores: 0,
            log: log.into_iter(),
            entry: None,
            returned: Vec::new(),
            events: 0,
            stopped: false,
            ended: false,
        }
    }

    /// Advances to the next moment at which a crash can differ from earlier ones: before an event that makes stores
    /// durable, after a call returned, and at the end.
    pub fn next_moment(&mut self) -> Option<Moment<'_>> {
        self.advance().then(|| self.moment())
    }

    /// [`Self::next_moment`] without building the choices; false at the end.
    pub fn advance(&mut self) -> bool {
        if let Some((event, name)) = self.entry.take() {
            self.change_entry(&event, name);
        }
        loop {
            let stop = match self.log.as_slice().first() {
                None if self.ended => return false,
                None => {
                    self.ended = true;
                    return true;
                }
                Some(Event::Fence { .. }) => self.model == Model::Lines,
                Some(Event::Sync { .. }) => true,
                Some(_) => false,
            };
            if stop && !self.stopped {
                self.stopped = true;
                return true;
            }
            self.stopped = false;
            let event = self.log.next().expect("there is a first event");
            self.events += 1;
            if self.play(event) {
                return true;
            }
        }
    }

    /// Number of events replayed.
    pub fn events(&self) -> usize {
        self.events
    }

    /// The possible states of the medium now.
    pub fn moment(&mut self) -> Moment<'_> {
        self.durable.fold();
        let entry = self.entry.as_ref().map(|(event, name)| EntryChoice {
            name: name.clone(),
            made: if let Event::Create { bytes, .. } = event { Some(*bytes) } else { None },
        });
        Moment {
            choices: self.choices(),
            durable: &self.durable,
            entry,
            returned: &self.returned,
            event: self.events,
        }
    }

    /// Replays one event; returns true if a crash after it can differ from earlier ones.
    fn play(&mut self, event: Event) -> bool {
        match event {
            Event::Create { file, ref name, .. } => {
                let name = name.clone();
                self.names.insert(file, name.clone());
                self.entry = Some((event, name));
                return true;
            }
            Event::Remove { file } => {
                let name = self.names[&file].clone();
                self.entry = Some((event, name));
                return true;
            }
            Event::Returned { operation } => {
                self.returned.push(operation);
                return true;
            }
            Event::Store { file, offset, bytes } => self.store(file, offset, &bytes),
            Event::Persist { file, range, thread } => self.persist(file, range, thread),
            Event::Fence { file, thread } => {
                if self.model == Model::Lines {
                    self.make_certain(|covered| covered.file == file && covered.thread == thread);
                }
            }
            Event::Sync { file, thread } => {
                let any_thread = self.model == Model::Pages;
                self.make_certain(|covered| covered.file == file && (any_thread || covered.thread == thread));
            }
        }
        false
    }

    fn change_entry(&mut self, event: &Event, name: Arc<str>) {
        match event {
            Event::Create { bytes, .. } => self.durable.create(name, *bytes),
            Event::Remove { file } => {
                self.durable.remove(&name);
                self.pending.retain(|(of, _), _| of != file);
                self.covered.retain(|covered| covered.file != *file);
                self.names.remove(file);
            }
            other => unreachable!("{other:?} changes no entry"),
        }
    }

    fn store(&mut self, file: FileId, offset: u64, bytes: &[u8]) {
        let unit_bytes = self.model.unit_bytes();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let within = (at % unit_bytes as u64) as usize;
            let part = (unit_bytes - within).min(bytes.len() - done);
            let store = Store { number: self.stores, offset: within, bytes: bytes[done..done + part].into() };
            self.pending.entry((file, at / unit_bytes as u64)).or_default().push_back(store);
            done += part;
        }
        self.stores += 1;
    }

    fn persist(&mut self, file: FileId, range: Range<u64>, thread: ThreadId) {
        let unit_bytes = self.model.unit_bytes() as u64;
        let (first, end) = (range.start / unit_bytes, range.end.div_ceil(unit_bytes));
        for (&(_, unit), _) in self.pending.range((file, first)..(file, end)) {
            self.covered.push(PersistedStores { thread, file, unit, up_to: self.stores });
        }
    }

    /// Makes the selected persisted stores durable.
    fn make_certain(&mut self, chosen: impl Fn(&PersistedStores) -> bool) {
        let unit_bytes = self.model.unit_bytes() as u64;
        let covered = std::mem::take(&mut self.covered);
        for covered in covered {
            if !chosen(&covered) {
                self.covered.push(covered);
                continue;
            }
            let key = (covered.file, covered.unit);
            let Some(stores) = self.pending.get_mut(&key) else { continue };
            while stores.front().is_some_and(|store| store.number < covered.up_to) {
                let store = stores.pop_front().expect("there is a first store");
                let offset = covered.unit * unit_bytes + store.offset as u64;
                self.durable.write(&self.names[&covered.file], offset, &store.bytes);
            }
            if stores.is_empty() {
                self.pending.remove(&key);
            }
        }
    }

    fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        for (&(file, unit), stores) in &self.pending {
            let name = &self.names[&file];
            let choice = self.choice(name, unit, stores);
            if choice.versions.len() > 1 {
                choices.push(choice);
            }
        }
        choices
    }

    fn choice(&self, name: &Arc<str>, unit: u64, stores: &VecDeque<Store>) -> Choice {
        let unit_bytes = self.model.unit_bytes();
        let offset = unit * unit_bytes as u64;
        let file_bytes = self.durable.bytes(name).expect("a file that is stored to is there");
        let mut now = vec![0; unit_bytes.min((file_bytes - offset) as usize)];
        self.durable.read(name, offset, &mut now);
        let mut versions: Vec<Box<[u8]>> = vec![now.clone().into()];
        let mut whole = vec![0];
        for store in stores {
            for part in self.parts(store) {
                let from = part.start - store.offset;
                now[part.clone()].copy_from_slice(&store.bytes[from..from + part.len()]);
                if versions.last().is_some_and(|last| **last != *now) {
                    versions.push(now.clone().into());
                }
            }
            if whole.last() != Some(&(versions.len() - 1)) {
                whole.push(versions.len() - 1);
            }
        }
        Choice { name: name.clone(), offset, versions, whole }
    }

    /// The ranges in which a store reaches its unit one after the other.
    fn parts(&self, store: &Store) -> Vec<Range<usize>> {
        let all = store.offset..store.offset + store.bytes.len();
        if self.model == Model::Pages {
            return vec![all];
        }
        let words = all.start / WORD_BYTES..all.end.div_ceil(WORD_BYTES);
        words.map(|word| (word * WORD_BYTES).max(all.start)..((word + 1) * WORD_BYTES).min(all.end)).collect()
    }
}
