//! The two programs of a world. Each has operations with numbers: most write their number at their place in a file of the
//! program's own, some make a file in a folder that both use, and some read how far the other one is before. When their node
//! dies they go on at the next head from what is there, which is judged first.

use super::invariants::{History, prefix, synced};
use super::node::Life;
use super::{World, lock};
use format::call::{CallKind, InodeRequest, Status};
use format::{InodeNumber, Name, SegmentId};
use ipc::Host;
use ipc::sync::Ordering;
use libfs::{Attachment, Connector, Error, LibFs, Limits, Link};
use pmem::ReadMapping;
use sharedfs::Daemon;
use std::collections::BTreeSet;
use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, Weak};
use std::time::Duration;
use vfs::engine::{Access, At, Created, Handle, New, NewType, Sync, Target};
use vfs::{Caller, Engine};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Bytes that a write leaves from one number to the next.
const PLACE: usize = 600;
/// Bytes of an answer.
const ROOM: usize = 64 << 10;
/// Both rights.
const BOTH: Access = Access { read: true, write: true };
/// How long a program thinks, at most.
const THINKS_NS: u64 = 4_000_000;

/// Attaches within the process.
struct Local {
    daemon: Weak<Daemon>,
    pid: u32,
}

struct LocalLink {
    daemon: Weak<Daemon>,
    session: u64,
}

impl Connector for Local {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        let daemon = self.daemon.upgrade().ok_or(Error::Disconnected)?;
        let attached = daemon.attach_again(Caller::ROOT, self.pid, former).map_err(|_| Error::Refused)?;
        let session = attached.welcome.session.get();
        Ok(Attachment {
            welcome: attached.welcome,
            credential: attached.caller,
            log: attached.log,
            session: attached.session,
            leases: attached.leases,
            generations: attached.generations,
            link: Arc::new(LocalLink { daemon: self.daemon.clone(), session }),
        })
    }
}

impl LocalLink {
    fn daemon(&self) -> Result<Arc<Daemon>, Error> {
        self.daemon.upgrade().ok_or(Error::Disconnected)
    }
}

impl Link for LocalLink {
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error> {
        let (status, body) = self.daemon()?.call(self.session, kind as u16, &request.concat(), ROOM);
        *response = body;
        Ok(status)
    }

    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error> {
        let inode = InodeNumber::new(u64::from(segment.get()));
        let request = InodeRequest { inode, flags: U64::new(0) };
        let region = self.daemon()?.segment(self.session, request.as_bytes()).map_err(|_| Error::Refused)?;
        Ok(ReadMapping::from_region(region))
    }
}

/// The files of both programs, as one of them has them open.
struct Files {
    libfs: LibFs,
    folder: InodeNumber,
    own: [(Handle, InodeNumber); 2],
}

fn attach(life: &Life, daemon: &Arc<Daemon>, pid: u32) -> Result<LibFs, Error> {
    let limits = Limits { refill_blocks: 32, nodes: 12, entries: 4, purge_steps: 2, ..Limits::default() };
    LibFs::new(life.host.clone(), Arc::new(Local { daemon: Arc::downgrade(daemon), pid }), limits)
}

impl Files {
    /// Opens them; the first time they are made.
    fn open(libfs: LibFs) -> vfs::engine::Result<Self> {
        let root = libfs.root()?.inode;
        let make = |name: &str, kind| {
            let new = New { kind, mode: 0o755, umask: 0, exclusive: false };
            libfs.create(&Caller::ROOT, root, Name::new(name.as_bytes()).expect("a good name"), &new)
        };
        let folder = make("d", NewType::Directory)?;
        let folder = inode_of(&folder);
        let open = |name: &str| -> vfs::engine::Result<(Handle, InodeNumber)> {
            let inode = inode_of(&make(name, NewType::Regular(None))?);
            Ok((libfs.open(&Caller::ROOT, inode, BOTH, false)?.0, inode))
        };
        let own = [open("p0")?, open("p1")?];
        Ok(Self { folder, own, libfs })
    }

    fn size(&self, program: usize) -> vfs::engine::Result<usize> {
        Ok(self.libfs.getattr(Target::Open(self.own[program].0))?.size as usize)
    }

    /// The operations of a program that are there.
    fn operations(&self, program: usize) -> Result<BTreeSet<usize>, String> {
        let why = |error: vfs::Error| format!("reading what is there: {error:?}");
        let mut bytes = vec![0; self.size(program).map_err(why)?];
        let handle = self.own[program].0;
        let there = self.libfs.read(handle, 0, &mut [IoSliceMut::new(&mut bytes)]).map_err(why)?;
        if there != bytes.len() {
            return Err(format!("{there} bytes of {} of program {program}", bytes.len()));
        }
        let mut found = BTreeSet::new();
        for (index, place) in bytes.chunks(PLACE).enumerate() {
            let number = u64::from_le_bytes(place[..8].try_into().unwrap_or_default()) as usize;
            if number == 0 {
                continue;
            }
            if number != index + 1 || place != data(number) {
                return Err(format!("program {program}: not what was written at {index}: {number}"));
            }
            found.insert(number);
        }
        let caller = Caller::ROOT;
        let access = Access { read: true, write: false };
        let (folder, _) = self.libfs.open(&caller, self.folder, access, false).map_err(why)?;
        let prefix = format!("{program}.");
        let listed = self.libfs.readdir(folder, None, &mut |entry| {
            let name = String::from_utf8_lossy(entry.name.bytes()).into_owned();
            found.extend(name.strip_prefix(&prefix).and_then(|number| number.parse::<usize>().ok()));
            true
        });
        self.libfs.close(folder);
        listed.map_err(why)?;
        Ok(found)
    }

    /// One operation.
    fn operate(&self, program: usize, number: usize) -> vfs::engine::Result<()> {
        if is_file(number) {
            let name = format!("{program}.{number}");
            let name = Name::new(name.as_bytes()).expect("a good name");
            let new = New { kind: NewType::Regular(None), mode: 0o644, umask: 0, exclusive: true };
            let made = self.libfs.create(&Caller::ROOT, self.folder, name, &new)?;
            self.libfs.forget(&[inode_of(&made)]);
            return Ok(());
        }
        let at = At::Offset(((number - 1) * PLACE) as u64);
        let written =
            self.libfs.write(&Caller::ROOT, self.own[program].0, at, &[IoSlice::new(&data(number))])?;
        if written.bytes == PLACE { Ok(()) } else { Err(vfs::Error::NoSpace) }
    }

    /// How many operations of the other program are there, at least.
    fn look_at_other(&self, program: usize) -> vfs::engine::Result<usize> {
        Ok(self.size(1 - program)? / PLACE)
    }
}

fn inode_of(created: &Created) -> InodeNumber {
    match created {
        Created::New(attributes, _) | Created::Existing(attributes) => attributes.inode,
    }
}

/// Which operations make a file in the folder.
fn is_file(number: usize) -> bool {
    number.is_multiple_of(4)
}

/// The bytes that an operation writes.
fn data(number: usize) -> Vec<u8> {
    (number as u64).to_le_bytes().into_iter().cycle().take(PLACE).collect()
}

impl World {
    /// A head serves: the tree is judged, and both programs go on.
    pub(crate) fn begin_programs(self: &Arc<Self>, life: &Arc<Life>, daemon: &Arc<Daemon>) {
        let (world, theirs, daemon) = (self.clone(), life.clone(), daemon.clone());
        let body = move || {
            let Some(found) = world.judge(&theirs, &daemon) else { return };
            for (program, done) in found.into_iter().enumerate() {
                let (world, life, daemon) = (world.clone(), theirs.clone(), daemon.clone());
                life.programs.fetch_add(1, Ordering::AcqRel);
                let body = move || world.run_program(&life, &daemon, program, done);
                drop(theirs.host.spawn("program", Box::new(body)).expect("a simulated thread"));
            }
            theirs.programs.fetch_add(u32::MAX, Ordering::AcqRel);
        };
        life.programs.fetch_add(1, Ordering::AcqRel);
        drop(life.host.spawn("judge", Box::new(body)).expect("a simulated thread"));
    }

    /// The operations of the programs that a take-over left; none if they violate an invariant.
    fn judge(&self, life: &Arc<Life>, daemon: &Arc<Daemon>) -> Option<[usize; 2]> {
        let libfs = self.expect("the judge attaches", attach(life, daemon, 1))?;
        let files = Files::open(libfs).map_err(|error| format!("{error:?}"));
        let files = self.expect("the programs' files", files)?;
        let mut found = [0; 2];
        for (program, found) in found.iter_mut().enumerate() {
            let there = self.expect("at a take-over", files.operations(program))?;
            *found = self.expect("prefix", prefix::length(program, &there))?;
        }
        let judged = {
            let mut histories = lock(&self.invariants.histories);
            let judged = (0..2)
                .try_for_each(|program| synced::check(program, &histories[program], found[program]))
                .and_then(|()| prefix::check(&histories, found));
            for (history, found) in histories.iter_mut().zip(found) {
                // All that a life begins with is on every copy.
                (history.done, history.synced) = (found, found);
                history.seen.truncate(found);
            }
            judged
        };
        self.expect(&format!("at node {}, seed {}", life.node, self.seed), judged)?;
        Some(found)
    }

    fn run_program(&self, life: &Arc<Life>, daemon: &Arc<Daemon>, program: usize, done: usize) {
        let ran = self.operate_on(life, daemon, program, done);
        if let Err(error) = ran {
            self.violate(&format!("program {program} at node {}: {error:?}", life.node));
        }
        life.programs.fetch_add(u32::MAX, Ordering::AcqRel);
    }

    fn operate_on(
        &self,
        life: &Arc<Life>,
        daemon: &Arc<Daemon>,
        program: usize,
        done: usize,
    ) -> vfs::engine::Result<()> {
        let libfs = attach(life, daemon, 2 + program as u32).map_err(|_| vfs::Error::Io)?;
        let files = Files::open(libfs)?;
        for number in done + 1.. {
            if self.programs_end() {
                return Ok(());
            }
            let look = life.host.random().is_multiple_of(3);
            let seen = if look { files.look_at_other(program)? } else { 0 };
            self.note(program, |history| history.seen.push(seen));
            files.operate(program, number)?;
            self.note(program, |history| history.done = number);
            lock(&self.counts).operations += 1;
            if life.host.random().is_multiple_of(3) {
                let own = files.own[program].1;
                let what =
                    if life.host.random().is_multiple_of(2) { Sync::File(own) } else { Sync::Everything };
                files.libfs.sync(what)?;
                let late = self.invariants.one_head.check_sync(life);
                self.note(program, |history| history.synced = number);
                lock(&self.counts).syncs += 1;
                self.expect("an fsync", late);
            }
            self.pause(&life.host, Duration::from_nanos(life.host.random() % THINKS_NS));
        }
        Ok(())
    }

    fn note(&self, program: usize, note: impl FnOnce(&mut History)) {
        note(&mut lock(&self.invariants.histories)[program]);
    }
}
