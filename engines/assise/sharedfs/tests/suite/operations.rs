//! A session that does the operations of the area's table (`engines/assise/area/tests/support/cases.rs`) as records of
//! its log, beside the naive model that has the tree after each of them. Media events are recorded from
//! [`World::record`] on, to be crashed.

use crate::client::{Client, ROOT, cookie, tiny, user};
use crate::still::StillHost;
use crate::support::{AreaState, At, Op, Step, model, state_of, time_of, whiteout_body};
use area::Area;
use format::call::{CallKind, DigestRequest};
use format::record::{
    ALLOCATE_KEEP_SIZE, ALLOCATE_PUNCH_HOLE, CreateBody, FileType, Kind, RENAME_EXCHANGE,
    RENAME_REPLACED_OPEN, RENAME_WHITEOUT, RecordHeader, RenameBody, SET_MODE, SET_UID, SetAttrBody,
    UNLINK_DIRECTORY, UNLINK_OPEN, UNNAMED_LINKABLE,
};
use format::{BLOCK_BYTES, Envelope, InodeNumber, PoolUid};
use pmem::{Medium, Recorder};
use sharedfs::{Config, Daemon, Format, RING_START, format_pool};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

/// Marks of the recorder from here on say that operations up to the number less this were synced.
pub const SYNCED: u64 = 1_000_000;

/// The lease that a session needs to move directories between directories.
const RENAMES: InodeNumber = InodeNumber::new(u64::MAX);

/// Numbers that the first life of a pool gives out lie so far behind those of the table.
const FIRST_LIFE: u64 = 1 << 44;

/// The inode that a number of the table stands for.
fn inode_of(number: u64) -> InodeNumber {
    let is_given_out = number > InodeNumber::ROOT.get() && number < FIRST_LIFE;
    InodeNumber::new(if is_given_out { number + FIRST_LIFE } else { number })
}

/// The number of the table that stands for an inode.
fn number_of(inode: u64) -> u64 {
    inode.checked_sub(FIRST_LIFE).unwrap_or(inode)
}

/// A state with the table's numbers.
fn numbered(state: AreaState) -> AreaState {
    let of_table = |(inode, mut found): (u64, crate::support::Inode)| {
        found.parent = number_of(found.parent);
        for (inode, _, _) in found.entries.values_mut() {
            *inode = number_of(*inode);
        }
        (number_of(inode), found)
    };
    state.into_iter().map(of_table).collect()
}

/// Room for everything in the table; the first session's own range has the table's numbers.
pub fn config() -> Config {
    let tiny = tiny();
    Config { own_range: 10_000, log_bytes: 512 << 10, log_bytes_max: 4 << 20, room_blocks: 1_000, ..tiny }
}

/// A new pool, the same each time.
pub fn make_pool(medium: &Medium, ledger_bytes: u64) {
    let new = Format {
        pool: PoolUid::new(77),
        tree_nodes_max: 2048,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
        time_ns: 5,
        ledger_bytes,
    };
    format_pool(medium, &new).unwrap();
}

/// A daemon, one session that does operations, another one that is there if it is needed.
pub struct World {
    pub recorder: Recorder,
    daemon: Arc<Daemon>,
    one: Client,
    two: Option<Client>,
    /// The other one has the root.
    lent: bool,
    now: AreaState,
    /// The trees at the beginning of the recording and after each operation since.
    pub states: Vec<AreaState>,
    done: u64,
    /// The last operation of the first session: its syncs cover it.
    own: u64,
}

impl World {
    /// A new pool on which these steps were done.
    pub fn new<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Self {
        Self::with_ledger(config().ledger_bytes, steps)
    }

    /// The same, with a ledger of so many bytes.
    pub fn with_ledger<'a>(ledger_bytes: u64, steps: impl IntoIterator<Item = &'a Step>) -> Self {
        let recorder = Recorder::new();
        make_pool(&recorder.medium(), ledger_bytes);
        let config = Config { ledger_bytes, ..config() };
        let daemon = Daemon::open(StillHost::first(), &recorder.medium(), config).unwrap().0;
        let daemon = Arc::new(daemon);
        let one = Client::attach_as(&daemon, user(0), 1);
        one.write_lease(ROOT);
        one.write_lease(RENAMES);
        let (now, states) = (model::new(), Vec::new());
        let mut world = Self { recorder, daemon, one, two: None, lent: false, now, states, done: 0, own: 0 };
        for step in steps {
            world.step(step);
        }
        world.digest();
        world
    }

    /// Everything up to now is on the medium; from here on it is recorded.
    pub fn record(&mut self) {
        self.daemon.tidy();
        self.recorder.begin_here();
        self.states = vec![self.now.clone()];
        (self.done, self.own) = (0, 0);
    }

    /// Whether the step contradicts nothing that is there.
    pub fn fits(&self, step: &Step) -> bool {
        model::apply(&mut self.now.clone(), step, 0).is_ok()
    }

    /// An operation of the first session.
    pub fn step(&mut self, step: &Step) {
        if self.lent {
            self.one.write_lease(ROOT);
            self.lent = false;
        }
        let number = self.number();
        assert!(
            append(&mut self.one, step, time_of(number)),
            "the log is sealed: {:?}",
            self.daemon.terminations()
        );
        self.was_done(step, number);
        self.own = self.done;
    }

    fn number(&self) -> u64 {
        // Times of what was done before the recording and of what came after are not to be the same.
        self.done + 1 + if self.states.is_empty() { 0 } else { 1 << 20 }
    }

    fn was_done(&mut self, step: &Step, number: u64) {
        model::apply(&mut self.now, step, number)
            .unwrap_or_else(|_| panic!("{step:?} contradicts the model"));
        self.clear_set_ids(step);
        self.done += 1;
        if !self.states.is_empty() {
            self.states.push(self.now.clone());
        }
        self.recorder.returned(self.done);
    }

    /// Applies a record to the model. SharedFS decides which bits the new owner may have: set-user-id is cleared with
    /// the change of owner (`vfs::access::change`).
    fn clear_set_ids(&mut self, step: &Step) {
        let Op::SetAttr { mask, .. } = step.op else { return };
        let inode = self.now.get_mut(&step.inode).unwrap();
        if mask & SET_UID != 0
            && mask & SET_MODE == 0
            && FileType::of_mode(inode.mode) != Some(FileType::Directory)
        {
            inode.mode &= !vfs::access::SET_UID;
        }
    }

    /// Syncs as fsync does: the log's file, then the ledger up to the newest grant.
    pub fn sync(&mut self) {
        self.one.attached.log.sync().unwrap();
        let up_to = self.one.lease(&[(InodeNumber::ROOT, format::call::LEASE_READ)]).unwrap()[0].ledger;
        let request = DigestRequest { up_to, wait: 0.into(), reserved: 0.into() };
        self.one.call(CallKind::SyncLedger, &[request.as_bytes()]).unwrap();
        self.recorder.returned(SYNCED + self.own);
    }

    /// Everything is digested.
    pub fn digest(&mut self) {
        self.one.digest(true).unwrap_or_else(|status| panic!("{status:?}: {:?}", self.daemon.terminations()));
        self.one.release();
        self.recorder.returned(SYNCED + self.own);
    }

    /// The first session's records are digested, and nothing else changes.
    pub fn digest_alone(&mut self) {
        self.one.digest(true).unwrap_or_else(|status| panic!("{status:?}: {:?}", self.daemon.terminations()));
        self.one.release();
    }

    /// The log uses twice as much of its file.
    pub fn grow(&mut self) {
        let bytes = 2 * (RING_START + self.one.ring.bytes()).next_multiple_of(BLOCK_BYTES as u64);
        self.one.grow_log(bytes);
    }

    /// Another session attaches, if there is none.
    fn other(&mut self) -> &mut Client {
        let daemon = &self.daemon;
        self.two.get_or_insert_with(|| Client::attach_as(daemon, user(0), 2))
    }

    /// The other session takes the root and makes a name there.
    pub fn hand_over(&mut self) {
        let number = self.number();
        let two = self.other();
        two.write_lease(ROOT);
        let inode = number_of(two.new_inode().get());
        let step = crate::support::file(inode, 1, format!("theirs-{inode}"));
        assert!(append(two, &step, time_of(number)));
        self.lent = true;
        self.was_done(&step, number);
    }

    /// The other session makes a name and ends: its log is digested and removed.
    pub fn end_other(&mut self) {
        self.hand_over();
        self.end_two();
    }

    /// The other session, which has the root, ends.
    pub fn end_two(&mut self) {
        let two = self.two.take().expect("it took the root just now");
        self.daemon.end(two.session);
        self.recorder.returned(SYNCED + self.done);
    }

    /// The daemon dies with its sessions, and another takes over; gives the recorder of the pool.
    pub fn take_over(self) -> Recorder {
        let Self { recorder, daemon, one, two, .. } = self;
        drop((one, two, daemon));
        let config = Config { ledger_bytes: config().ledger_bytes, ..config() };
        let (daemon, recovered) = Daemon::open(StillHost::again(), &recorder.medium(), config).unwrap();
        assert_eq!((recovered.cuts, recovered.damaged), (vec![], vec![]));
        drop(daemon);
        recorder
    }

    /// Runs the background work of a daemon to its end.
    pub fn finish(&mut self) {
        self.daemon.tidy();
        self.recorder.returned(SYNCED + self.done);
        assert_eq!(self.daemon.terminations(), [], "an honest session was put out");
    }

    /// Checks that the tree equals the model.
    pub fn agrees(&self) {
        let (found, expected) = (tree(&self.recorder.medium()).unwrap(), named(&self.now));
        assert!(found == expected, "digested: {found:#?}\nmodel: {expected:#?}");
    }
}

/// The items of a tree, without inodes that have no name: these are removed later.
pub fn tree(medium: &Medium) -> Result<AreaState, String> {
    tree_of(medium, config().area)
}

/// The same, of a daemon with other limits.
pub fn tree_of(medium: &Medium, limits: area::Limits) -> Result<AreaState, String> {
    let area = Area::open(medium, limits).map_err(|error| error.to_string())?;
    Ok(named(&numbered(state_of(&area).map_err(|error| error.to_string())?)))
}

/// A state without the inodes that have no name.
pub fn named(state: &AreaState) -> AreaState {
    state.iter().filter(|(_, inode)| !inode.orphan).map(|(number, inode)| (*number, inode.clone())).collect()
}

/// A step as the record that a LibFS would append.
pub fn append(client: &mut Client, step: &Step, time_ns: i64) -> bool {
    let (kind, flags, parts) = encoded(step);
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    client.append(header_of(step, kind, flags, time_ns), &parts)
}

/// The header of its record.
pub fn header_of(step: &Step, kind: Kind, flags: u8, time_ns: i64) -> RecordHeader {
    let mut header = RecordHeader {
        envelope: Envelope::new(kind as u8, flags, 0),
        inode: inode_of(step.inode),
        time_ns: time_ns.into(),
        ..RecordHeader::new_zeroed()
    };
    let mut place = |at: &At| {
        header.parent = inode_of(at.parent);
        header.extra.set(at.cookie().get());
    };
    match &step.op {
        Op::Create { at, .. } | Op::Link { at } | Op::Unlink { at, .. } => place(at),
        Op::CreateUnnamed { parent, .. } => header.parent = inode_of(*parent),
        Op::Write { offset, .. } => header.offset.set(*offset),
        Op::Truncate { size } => header.offset.set(*size),
        Op::Allocate { offset, bytes, .. } => {
            header.offset.set(*offset);
            header.extra.set(*bytes);
        }
        Op::SetXattr { name, .. } => header.offset.set(name.len() as u64),
        Op::Rename { .. } | Op::SetAttr { .. } | Op::RemoveXattr { .. } => {}
        Op::Reap { .. } => unreachable!("not a record"),
    }
    header
}

/// Kind, flags and payload.
pub fn encoded(step: &Step) -> (Kind, u8, Vec<Vec<u8>>) {
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    let keeps = |open: bool, flag_of_kind: u8| flag(open, flag_of_kind);
    match &step.op {
        Op::Write { bytes, .. } => (Kind::Write, 0, vec![bytes.clone()]),
        Op::Truncate { .. } => (Kind::Truncate, 0, vec![]),
        Op::Allocate { keep_size, punch_hole, .. } => {
            let flags = flag(*keep_size, ALLOCATE_KEEP_SIZE) | flag(*punch_hole, ALLOCATE_PUNCH_HOLE);
            (Kind::Allocate, flags, vec![])
        }
        Op::Create { at, target, .. } => {
            let made = step.with_operation(|operation| match operation {
                format::record::Operation::Create { body, .. } => *body,
                _ => unreachable!("a create"),
            });
            let name_bytes = (at.name.len() as u16).into();
            let body = CreateBody { name_bytes, target_bytes: (target.len() as u16).into(), ..made };
            (Kind::Create, 0, vec![body.as_bytes().to_vec(), at.name.clone(), target.clone()])
        }
        Op::CreateUnnamed { linkable, .. } => {
            let body = step.with_operation(|operation| match operation {
                format::record::Operation::CreateUnnamed { body, .. } => *body,
                _ => unreachable!("a create"),
            });
            (Kind::CreateUnnamed, flag(*linkable, UNNAMED_LINKABLE), vec![body.as_bytes().to_vec()])
        }
        Op::Link { at } => (Kind::Link, 0, vec![at.name.clone()]),
        Op::Unlink { at, directory, keep_open } => {
            let flags = flag(*directory, UNLINK_DIRECTORY) | keeps(*keep_open, UNLINK_OPEN);
            (Kind::Unlink, flags, vec![at.name.clone()])
        }
        Op::Rename { old, new, replaced, exchange, keep_open, whiteout } => {
            let body = RenameBody {
                old_parent: inode_of(old.parent),
                new_parent: inode_of(new.parent),
                old_cookie: (cookie(&old.name) + old.slot).into(),
                new_cookie: (cookie(&new.name) + new.slot).into(),
                replaced: inode_of(*replaced),
                old_name_bytes: (old.name.len() as u16).into(),
                new_name_bytes: (new.name.len() as u16).into(),
                reserved: 0.into(),
            };
            let flags = flag(*exchange, RENAME_EXCHANGE)
                | keeps(*keep_open, RENAME_REPLACED_OPEN)
                | flag(*whiteout != 0, RENAME_WHITEOUT);
            let mut parts = vec![body.as_bytes().to_vec(), old.name.clone(), new.name.clone()];
            if *whiteout != 0 {
                parts.push(whiteout_body(inode_of(*whiteout)).as_bytes().to_vec());
            }
            (Kind::Rename, flags, parts)
        }
        Op::SetAttr { mask, mode, uid, gid, atime_ns, mtime_ns } => {
            let body = SetAttrBody {
                mask: (*mask).into(),
                mode: (*mode).into(),
                uid: (*uid).into(),
                gid: (*gid).into(),
                atime_ns: (*atime_ns).into(),
                mtime_ns: (*mtime_ns).into(),
            };
            (Kind::SetAttr, 0, vec![body.as_bytes().to_vec()])
        }
        Op::SetXattr { name, value } => (Kind::SetXattr, 0, vec![name.to_vec(), value.clone()]),
        Op::RemoveXattr { name } => (Kind::RemoveXattr, 0, vec![name.to_vec()]),
        Op::Reap { .. } => unreachable!("not a record"),
    }
}
