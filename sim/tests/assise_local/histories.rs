//! Histories of programs, and an oracle that gives the tree after any part of one.
//!
//! A program asks its engine for changes by inode and name, one record each, and notes each that was done together
//! with its place in the one order of all: LibFS asks its host for the time after it has made sure of its leases and
//! before the record counts, so for changes that concern each other these times are in the order in which they took
//! effect. The oracle plays any choice of changes, in that order, on the model engine.

use super::Local;
use super::stamped::Stamped;
use super::trees::{Tree, process, whole_tree};
use format::{InodeNumber, Name};
use libfs::LibFs;
use sim::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex, PoisonError};
use vfs::engine::{
    Access, At, Changes, Created, Handle, New, NewType, Removal, RenameMode, Step, Sync, Target,
};
use vfs::{Caller, Engine, Error, Model};

/// Both rights.
const BOTH: Access = Access { read: true, write: true };
/// Folders that are there at first, in the root: one of each program, and two for both.
pub const FOLDERS: [&str; 4] = ["p0", "p1", "s", "t"];
/// Names in a folder.
const NAMES: [&str; 4] = ["w", "x", "y", "z"];
/// Files that a program keeps open.
const OPEN_MAX: usize = 6;
/// Folders that a program knows.
const FOLDERS_MAX: usize = 7;

/// A folder and a name in it.
pub type NamePlace = (InodeNumber, &'static str);

/// A change, with what came of it.
#[derive(Clone, Debug)]
pub enum Change {
    Create {
        at: NamePlace,
        folder: bool,
        inode: InodeNumber,
    },
    /// At the end if there is no offset. The bytes tell their writer: see [`data`].
    Write {
        inode: InodeNumber,
        offset: Option<u64>,
        bytes: usize,
        end: u64,
    },
    Resize {
        inode: InodeNumber,
        size: u64,
    },
    Rename {
        from: NamePlace,
        to: NamePlace,
        mode: RenameMode,
    },
    Link {
        inode: InodeNumber,
        to: NamePlace,
    },
    Unlink {
        at: NamePlace,
        removal: Removal,
    },
}

/// A change that was done.
#[derive(Clone, Debug)]
pub struct ProgramChange {
    pub who: usize,
    /// Which of the program's changes it is, from 1.
    pub number: usize,
    /// Its place among all changes.
    pub stamp: i64,
    pub change: Change,
    /// The newest change of the other program that this one had read something of before.
    pub saw: usize,
}

/// Something that a program did.
#[derive(Clone, Debug)]
pub enum Event {
    /// A program begins a change; its result is not recorded.
    Begun(ProgramChange),
    /// It was refused.
    Refused { who: usize },
    /// It returned.
    Done(ProgramChange),
    /// A sync that began when so many events had been, and was of an inode or of everything.
    Synced { who: usize, inode: Option<InodeNumber>, begin: usize },
}

/// All that programs did, in order.
pub struct Trace {
    events: Mutex<Vec<Event>>,
    tell: Box<dyn Fn(usize) + Send + std::marker::Sync>,
}

impl Trace {
    /// `tell` is called with the index of each change and each sync that returned.
    pub fn new(tell: impl Fn(usize) + Send + std::marker::Sync + 'static) -> Arc<Self> {
        Arc::new(Self { events: Mutex::default(), tell: Box::new(tell) })
    }

    pub fn events(&self) -> Vec<Event> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) -> usize {
        self.lock().len()
    }

    fn push(&self, event: Event) {
        let mut events = self.lock();
        if matches!(event, Event::Done(_) | Event::Synced { .. }) {
            (self.tell)(events.len());
        }
        events.push(event);
    }
}

/// First byte of each eight that a change writes.
const MARK: u8 = 0xa5;

fn tag(who: usize, number: usize) -> [u8; 8] {
    let [low, high] = (number as u16).to_le_bytes();
    let check = (who as u32 + 1).wrapping_mul(0x9e37_79b9) ^ (number as u32).wrapping_mul(0x85eb_ca6b);
    let [a, b, c, d] = check.to_le_bytes();
    [MARK, who as u8, low, high, a, b, c, d]
}

/// The bytes of a program's change: its number, again and again.
pub fn data(who: usize, number: usize, bytes: usize) -> Vec<u8> {
    tag(who, number).into_iter().cycle().take(bytes).collect()
}

/// The newest change of a program that wrote any of these bytes.
fn newest(bytes: &[u8], who: usize) -> usize {
    let numbers = bytes.windows(8).filter(|word| word[0] == MARK && usize::from(word[1]) == who);
    let numbers = numbers.filter_map(|word| {
        let number = usize::from(u16::from_le_bytes([word[2], word[3]]));
        (tag(who, number) == *word).then_some(number)
    });
    numbers.max().unwrap_or(0)
}

fn name(text: &'static str) -> Name<'static> {
    Name::new(text.as_bytes()).expect("a good name")
}

/// Makes the folders.
pub fn make_folders(engine: &dyn Engine) -> Vec<InodeNumber> {
    let root = engine.root().expect("there is a root").inode;
    let new = New { kind: NewType::Directory, mode: 0o755, umask: 0, exclusive: true };
    let made = FOLDERS.map(|folder| engine.create(&Caller::ROOT, root, name(folder), &new));
    made.into_iter()
        .map(|made| match made.expect("it is new") {
            Created::New(attributes, _) | Created::Existing(attributes) => attributes.inode,
        })
        .collect()
}

/// One of two programs, by its seed.
pub struct Program {
    engine: Arc<LibFs>,
    local: Arc<Local>,
    stamped: Arc<Stamped>,
    trace: Arc<Trace>,
    random: Random,
    who: usize,
    /// Changes done.
    number: usize,
    saw: usize,
    folders: Vec<InodeNumber>,
    files: Vec<(InodeNumber, Handle)>,
}

impl Program {
    pub fn new(
        (engine, local): (Arc<LibFs>, Arc<Local>),
        stamped: Arc<Stamped>,
        trace: Arc<Trace>,
        seed: u64,
        who: usize,
    ) -> Self {
        let root = engine.root().expect("there is a root").inode;
        let mut folders = Vec::new();
        for folder in FOLDERS {
            let mut found = Vec::new();
            engine.walk(&Caller::ROOT, root, &[Step::Child(name(folder))], &mut found).expect("it is there");
            folders.push(found[0].inode);
        }
        // The other's folder is its own.
        folders.remove(1 - who);
        let random = Random::new(seed.wrapping_mul(2) + who as u64);
        Self { engine, local, stamped, trace, random, who, number: 0, saw: 0, folders, files: Vec::new() }
    }

    /// Does so many things.
    pub fn run(mut self, operations: usize) {
        for _ in 0..operations {
            if let Err(error) = self.operate() {
                // The file was not there, or was in the way: the other program was faster, or the random choice was
                // bad.
                let common = [
                    Error::NotFound,
                    Error::Exists,
                    Error::NotEmpty,
                    Error::IsDirectory,
                    Error::NotDirectory,
                    Error::Stale,
                    Error::Invalid,
                    // A name is that of a whiteout.
                    Error::NoDevice,
                ];
                assert!(common.contains(&error), "program {} got {error}", self.who);
            }
        }
        self.files.drain(..).for_each(|(_, handle)| self.engine.close(handle));
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    fn place(&mut self) -> NamePlace {
        // Its own folder comes first: a third of all.
        let folder = if self.below(3) == 0 { 0 } else { self.below(self.folders.len()) };
        (self.folders[folder], NAMES[self.below(NAMES.len())])
    }

    fn open_file(&mut self) -> Result<(InodeNumber, Handle), Error> {
        if self.files.is_empty() {
            return Err(Error::NotFound);
        }
        let index = self.below(self.files.len());
        Ok(self.files[index])
    }

    /// Makes a change; `make` gives what came of it.
    fn change(
        &mut self,
        wanted: Change,
        make: impl FnOnce(&LibFs) -> Result<Option<Change>, Error>,
    ) -> Result<(), Error> {
        let Self { who, saw, .. } = *self;
        let number = self.number + 1;
        self.trace.push(Event::Begun(ProgramChange { who, number, stamp: i64::MAX, change: wanted, saw }));
        let made = make(&self.engine);
        if let Ok(Some(change)) = made {
            self.number = number;
            self.trace.push(Event::Done(ProgramChange {
                who,
                number,
                stamp: self.stamped.last(),
                change,
                saw,
            }));
            return Ok(());
        }
        self.trace.push(Event::Refused { who });
        made.map(drop)
    }

    fn operate(&mut self) -> Result<(), Error> {
        match self.below(40) {
            0..7 => self.create(false),
            7..15 => self.write(true),
            15..20 => self.write(false),
            20..22 => self.resize(),
            22..26 => self.rename(),
            26..28 => self.link(),
            28..31 => self.unlink(Removal::File),
            31 => self.create(true),
            32 => self.unlink(Removal::Directory),
            33 => {
                if self.files.len() > 1 {
                    let index = self.below(self.files.len());
                    self.engine.close(self.files.swap_remove(index).1);
                }
                Ok(())
            }
            34..37 => self.read(),
            _ => self.sync(),
        }
    }

    fn create(&mut self, folder: bool) -> Result<(), Error> {
        let at = self.place();
        let kind = if folder { NewType::Directory } else { NewType::Regular(Some(BOTH)) };
        let new = New { kind, mode: if folder { 0o755 } else { 0o644 }, umask: 0, exclusive: folder };
        let mut created = None;
        self.change(Change::Create { at, folder, inode: InodeNumber::NONE }, |engine| {
            let result = engine.create(&Caller::ROOT, at.0, name(at.1), &new)?;
            created = Some(result);
            Ok(match result {
                Created::New(attributes, _) => Some(Change::Create { at, folder, inode: attributes.inode }),
                Created::Existing(_) => None,
            })
        })?;
        match created.expect("it returned") {
            Created::New(attributes, Some(handle)) => self.keep(attributes.inode, handle),
            Created::New(attributes, None) if self.folders.len() < FOLDERS_MAX => {
                self.folders.push(attributes.inode);
            }
            Created::New(..) => {}
            Created::Existing(attributes) => {
                let (handle, _) = self.engine.open(&Caller::ROOT, attributes.inode, BOTH, false)?;
                self.keep(attributes.inode, handle);
            }
        }
        Ok(())
    }

    fn keep(&mut self, inode: InodeNumber, handle: Handle) {
        if self.files.len() == OPEN_MAX {
            let index = self.below(OPEN_MAX);
            self.engine.close(self.files.swap_remove(index).1);
        }
        self.files.push((inode, handle));
    }

    fn write(&mut self, somewhere: bool) -> Result<(), Error> {
        let (inode, handle) = self.open_file()?;
        let offset = somewhere.then_some(self.random.below(9000));
        let bytes = match self.below(10) {
            0 => 8000 + self.below(5000),
            1..4 => 1 + self.below(4096),
            _ => 1 + self.below(200),
        };
        let bytes_written = data(self.who, self.number + 1, bytes);
        let at = offset.map_or(At::End, At::Offset);
        self.change(Change::Write { inode, offset, bytes, end: 0 }, |engine| {
            let written = engine.write(&Caller::ROOT, handle, at, &[IoSlice::new(&bytes_written)])?;
            assert_eq!(written.bytes, bytes, "what is shorter than a record is written whole");
            Ok(Some(Change::Write { inode, offset, bytes, end: written.end }))
        })
    }

    fn resize(&mut self) -> Result<(), Error> {
        let (inode, handle) = self.open_file()?;
        let size = self.random.below(6000);
        let changes = Changes { size: Some(size), ..Changes::default() };
        let change = Change::Resize { inode, size };
        self.change(change.clone(), |engine| {
            engine.setattr(&Caller::ROOT, Target::Open(handle), &changes)?;
            Ok(Some(change))
        })
    }

    fn rename(&mut self) -> Result<(), Error> {
        let (from, to) = (self.place(), self.place());
        let mode = match self.below(8) {
            0 => RenameMode::NoReplace { whiteout: false },
            1 => RenameMode::Exchange,
            2 => RenameMode::NoReplace { whiteout: true },
            3 => RenameMode::Replace { whiteout: true },
            _ => RenameMode::Replace { whiteout: false },
        };
        let (change, stamped, local) =
            (Change::Rename { from, to, mode }, self.stamped.clone(), self.local.clone());
        self.change(change.clone(), |engine| {
            let log = || (local.session(), engine.log_counters().map(|counters| counters.fences));
            let (before, asked) = (log(), stamped.last());
            engine.rename(&Caller::ROOT, (from.0, name(from.1)), (to.0, name(to.1)), mode)?;
            // Nothing is recorded if both are names of one file already, perhaps by a change of the other program that came
            // between an attempt, which asked for the time, and the last one.
            let after = log();
            let recorded = if before.0 == after.0 { before.1 != after.1 } else { asked != stamped.last() };
            Ok(recorded.then_some(change))
        })
    }

    fn link(&mut self) -> Result<(), Error> {
        let (inode, to) = (self.open_file()?.0, self.place());
        let change = Change::Link { inode, to };
        self.change(change.clone(), |engine| {
            engine.link(&Caller::ROOT, inode, to.0, name(to.1))?;
            Ok(Some(change))
        })
    }

    fn unlink(&mut self, removal: Removal) -> Result<(), Error> {
        let at = self.place();
        let change = Change::Unlink { at, removal };
        self.change(change.clone(), |engine| {
            engine.unlink(&Caller::ROOT, at.0, name(at.1), removal)?;
            Ok(Some(change))
        })
    }

    fn read(&mut self) -> Result<(), Error> {
        let (_, handle) = self.open_file()?;
        let mut bytes = vec![0; 1 << 16];
        let count = self.engine.read(handle, 0, &mut [IoSliceMut::new(&mut bytes)])?;
        self.saw = self.saw.max(newest(&bytes[..count], 1 - self.who));
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Error> {
        let begin = self.trace.count();
        let folder = self.below(self.folders.len());
        let (what, inode) = match (self.below(8), self.open_file()) {
            (0, _) => (Sync::Everything, None),
            (2..5, Ok((inode, _))) => (Sync::Data(inode), Some(inode)),
            (5.., Ok((inode, _))) => (Sync::File(inode), Some(inode)),
            _ => (Sync::File(self.folders[folder]), Some(self.folders[folder])),
        };
        self.engine.sync(what)?;
        self.trace.push(Event::Synced { who: self.who, inode, begin });
        Ok(())
    }
}

/// Changes in the order in which they took effect.
pub fn in_order(events: &[Event]) -> Vec<ProgramChange> {
    let mut changes: Vec<ProgramChange> = events
        .iter()
        .filter_map(|event| match event {
            Event::Done(done) => Some(done.clone()),
            _ => None,
        })
        .collect();
    changes.sort_by_key(|done| done.stamp);
    changes
}

/// Inodes that a change changed, by the programs' numbers; it depends on who changed them before.
pub type Touched = BTreeSet<InodeNumber>;

/// The model engine, with the numbers that inodes have there.
struct Oracle {
    model: Arc<Model>,
    inodes: BTreeMap<InodeNumber, InodeNumber>,
    handles: BTreeMap<InodeNumber, Handle>,
}

/// Why a choice of changes cannot be: one of them would have ended otherwise.
pub type Impossible = String;

impl Oracle {
    /// `folders` as the programs know them, with the root first.
    fn new(folders: &[InodeNumber]) -> Self {
        let model = Arc::new(Model::new(Arc::new(|| 0), vfs::model::Limits::default()));
        let made = make_folders(model.as_ref());
        let root = model.root().expect("there is a root").inode;
        let inodes = folders.iter().copied().zip([root].into_iter().chain(made)).collect();
        Self { model, inodes, handles: BTreeMap::new() }
    }

    fn inode(&self, inode: InodeNumber) -> Result<InodeNumber, Impossible> {
        self.inodes.get(&inode).copied().ok_or_else(|| format!("inode {inode:?} was not made"))
    }

    fn place(&self, at: NamePlace) -> Result<(InodeNumber, Name<'static>), Impossible> {
        Ok((self.inode(at.0)?, name(at.1)))
    }

    fn handle(&self, inode: InodeNumber) -> Result<Handle, Impossible> {
        self.handles.get(&inode).copied().ok_or_else(|| format!("file {inode:?} was not made"))
    }

    fn play(&mut self, done: &ProgramChange) -> Result<(), Impossible> {
        let model = self.model.clone();
        let failed = |error: Error| format!("{done:?} would end with {error}");
        match &done.change {
            Change::Create { at, folder, inode } => {
                let (parent, child) = self.place(*at)?;
                let kind = if *folder { NewType::Directory } else { NewType::Regular(Some(BOTH)) };
                let new = New { kind, mode: if *folder { 0o755 } else { 0o644 }, umask: 0, exclusive: true };
                match model.create(&Caller::ROOT, parent, child, &new).map_err(failed)? {
                    Created::New(attributes, handle) => {
                        self.inodes.insert(*inode, attributes.inode);
                        self.handles.extend(handle.map(|handle| (*inode, handle)));
                    }
                    Created::Existing(_) => return Err(format!("{done:?} would find it")),
                }
            }
            Change::Write { inode, offset, bytes, end } => {
                let (handle, bytes) = (self.handle(*inode)?, data(done.who, done.number, *bytes));
                let at = offset.map_or(At::End, At::Offset);
                let written = model.write(&Caller::ROOT, handle, at, &[IoSlice::new(&bytes)]);
                if written.map_err(failed)?.end != *end && done.stamp != i64::MAX {
                    return Err(format!("{done:?} would end elsewhere"));
                }
            }
            Change::Resize { inode, size } => {
                let changes = Changes { size: Some(*size), ..Changes::default() };
                let target = Target::Open(self.handle(*inode)?);
                model.setattr(&Caller::ROOT, target, &changes).map_err(failed)?;
            }
            Change::Rename { from, to, mode } => {
                model.rename(&Caller::ROOT, self.place(*from)?, self.place(*to)?, *mode).map_err(failed)?;
            }
            Change::Link { inode, to } => {
                let (parent, child) = self.place(*to)?;
                model.link(&Caller::ROOT, self.inode(*inode)?, parent, child).map_err(failed)?;
            }
            Change::Unlink { at, removal } => {
                let (parent, child) = self.place(*at)?;
                model.unlink(&Caller::ROOT, parent, child, *removal).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// The inode of a name, by the programs' number.
    fn found(&self, at: NamePlace) -> Option<InodeNumber> {
        let (parent, child) = self.place(at).ok()?;
        let mut found = Vec::new();
        self.model.walk(&Caller::ROOT, parent, &[Step::Child(child)], &mut found).ok()?;
        let wanted = found[0].inode;
        self.inodes.iter().find(|(_, inode)| **inode == wanted).map(|(inode, _)| *inode)
    }

    /// The inodes and names that a change reads and changes.
    fn touched(&self, change: &Change) -> Touched {
        let mut touched = Touched::default();
        let places = match change {
            Change::Create { at, inode, .. } => {
                touched.insert(*inode);
                vec![*at]
            }
            Change::Write { inode, .. } | Change::Resize { inode, .. } => {
                touched.insert(*inode);
                vec![]
            }
            Change::Rename { from, to, .. } => vec![*from, *to],
            Change::Link { inode, to } => {
                touched.insert(*inode);
                vec![*to]
            }
            Change::Unlink { at, .. } => vec![*at],
        };
        for at in places {
            touched.insert(at.0);
            touched.extend(self.found(at));
        }
        touched
    }
}

/// Plays changes on the model; gives the tree, and what each of them touched.
///
/// # Errors
/// The first that does not end as it did.
pub fn replay<'a>(
    folders: &[InodeNumber],
    changes: impl Iterator<Item = &'a ProgramChange>,
) -> Result<(Tree, Vec<Touched>), Impossible> {
    let mut oracle = Oracle::new(folders);
    let mut touched = Vec::new();
    for done in changes {
        touched.push(oracle.touched(&done.change));
        oracle.play(done)?;
    }
    Ok((whole_tree(&mut process(oracle.model.clone(), 1)), touched))
}
