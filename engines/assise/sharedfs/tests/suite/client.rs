//! A little LibFS for the tests: it attaches within the process, takes leases by call, and appends records by hand.
//! Honest unless a test makes it otherwise.

use format::call::{
    CallKind, DigestRequest, DigestResponse, EntriesRequest, EntriesResponse, EntryReply, GrowRequest,
    InodeRequest, LEASE_READ, LEASE_WRITE, LeaseRequest, LeaseUnit, NodeReply, OpenRequest, RangeRequest,
    RefillRequest, RefillResponse, Status, WalkRequest, WalkResponse, split,
};
use format::checksum::Salt;
use format::record::{
    CreateBody, Kind, Record, RecordHeader, RenameBody, SetAttrBody, UNNAMED_LINKABLE, room_blocks,
};
use format::{Cookie, Envelope, InodeNumber, Name, Sequence};
use ipc::words::{Entered, FenceBy, LeaseState, Seal};
use ipc::{ClientPages, DaemonView, SystemHost};
use pmem::ring::{AppendError, AppendRing, RingPosition};
use pmem::{Medium, Recorder};
use sharedfs::{Attached, Config, Daemon, Format, RING_START, Recovered, format_pool};
use std::sync::Arc;
use std::time::Duration;
use vfs::Caller;
use zerocopy::{FromZeros, IntoBytes};

pub const ROOT: InodeNumber = InodeNumber::ROOT;
pub const ROOM: usize = 1 << 20;
pub const FILE: u32 = 0o100_000;
pub const DIRECTORY: u32 = 0o040_000;
pub const SYMLINK: u32 = 0o120_000;

/// Limits as small as they work, so that everything that can run out does.
pub fn tiny() -> Config {
    Config {
        grace: Duration::from_millis(20),
        grace_starved: Duration::from_millis(20),
        recall_patience: Duration::from_secs(60),
        hold_min: Duration::ZERO,
        log_bytes: 64 << 10,
        log_bytes_max: 256 << 10,
        ready_logs: 1,
        ledger_bytes: 32 << 10,
        own_range: 1000,
        room_blocks: 200,
        room_reserve: 16,
        replace_reserve_max: 0,
        held_spare_max: 1 << 20,
        lease_words: 64,
        known_max: 64,
        references_max: 16,
        locks_max: 16,
        lock_limits: ccnvm::LockLimits::default(),
        sessions_max: 8,
        greetings_max: 4,
        batch_records: 16,
        batch_bytes: 32 << 10,
        batch_changes: 16,
        reap_items: 4,
        join_leaves: 4,
        join_blocks: 64,
        idle_digest: Duration::from_millis(5),
        ring: ipc::ring::RingLimits { slots: 2, inline_bytes: 512, bulk_buffers: 1, bulk_bytes: 64 << 10 },
        spin_ns: 0,
        // A process that another test starts has the pool's lock for a moment, from its fork to its exec.
        lock_patience: Duration::from_secs(10),
        trusted_uid: u32::MAX,
        node: format::NodeId::new(1),
        area: area::Limits {
            capacity_blocks: 4096,
            segment_blocks: 512,
            step_blocks: 64,
            reserve_blocks: 8,
            reserve_nodes: 8,
            lives_max: 16,
            cached_nodes: 64,
            batch_nodes_max: 512,
            batch_blocks_max: 64,
            reap_items_max: 4,
        },
    }
}

pub fn new_pool(medium: &Medium) {
    let new = Format {
        pool: format::PoolUid::new(77),
        tree_nodes_max: 2048,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
        time_ns: 1,
        ledger_bytes: tiny().ledger_bytes,
    };
    format_pool(medium, &new).unwrap();
}

pub fn open(medium: &Medium) -> (Arc<Daemon>, Recovered) {
    let (daemon, recovered) = Daemon::open(Arc::new(SystemHost), medium, tiny()).unwrap();
    (Arc::new(daemon), recovered)
}

/// A new pool on the test medium, and its daemon.
pub fn fresh() -> (Recorder, Arc<Daemon>) {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let daemon = open(&recorder.medium()).0;
    (recorder, daemon)
}

pub fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, groups: Vec::new() }
}

pub struct Client {
    pub daemon: Arc<Daemon>,
    pub attached: Attached,
    pub session: u64,
    pub pages: ClientPages,
    pub view: DaemonView,
    pub ring: AppendRing,
    pub next_inode: u64,
    pub time_ns: i64,
    /// The rest of the reservation, for a client that does not exceed it.
    pub room: Option<u64>,
    /// A record was not appended, because it costs more than is left.
    pub is_out_of_room: bool,
}

impl Client {
    pub fn attach(daemon: &Arc<Daemon>, caller: Caller) -> Self {
        Self::attach_as(daemon, caller, 1)
    }

    pub fn attach_as(daemon: &Arc<Daemon>, caller: Caller, pid: u32) -> Self {
        Self::try_attach_as(daemon, caller, pid).unwrap()
    }

    pub fn try_attach_as(daemon: &Arc<Daemon>, caller: Caller, pid: u32) -> Result<Self, sharedfs::Error> {
        let attached = daemon.attach(caller, pid)?;
        let welcome = &attached.welcome;
        let pages = ClientPages::new(&attached.session).unwrap();
        let view = DaemonView::new(&attached.leases, welcome.lease_words.get() as usize).unwrap();
        let salt = Salt::of_log(welcome.log, welcome.incarnation);
        let mut ring = AppendRing::empty(attached.log.clone(), RING_START, salt, Sequence::new(1));
        ring.use_up_to(attached.welcome.log_bytes.get());
        Ok(Self {
            daemon: daemon.clone(),
            session: welcome.session.get(),
            pages,
            view,
            ring,
            next_inode: welcome.first_inode.get(),
            time_ns: 1_000,
            room: None,
            is_out_of_room: false,
            attached,
        })
    }

    pub fn call(&self, kind: CallKind, parts: &[&[u8]]) -> Result<Vec<u8>, Status> {
        match self.daemon.call(self.session, kind as u16, &parts.concat(), ROOM) {
            (Status::Ok, body) => Ok(body),
            (status, _) => Err(status),
        }
    }

    /// Takes leases; the replies in the order of the units.
    pub fn lease(&self, units: &[(InodeNumber, u8)]) -> Result<Vec<NodeReply>, Status> {
        let head = LeaseRequest { count: (units.len() as u32).into(), reserved: 0.into() };
        let units: Vec<_> = units
            .iter()
            .map(|(inode, mode)| LeaseUnit { inode: *inode, mode: *mode, reserved: [0; 7] })
            .collect();
        let body = self.call(CallKind::Lease, &[head.as_bytes(), units.as_bytes()])?;
        Ok(body.chunks_exact(size_of::<NodeReply>()).map(|chunk| split(chunk).unwrap().0).collect())
    }

    pub fn write_lease(&self, inode: InodeNumber) -> NodeReply {
        self.lease(&[(inode, LEASE_WRITE)]).unwrap()[0]
    }

    pub fn read_lease(&self, inode: InodeNumber) -> NodeReply {
        self.lease(&[(inode, LEASE_READ)]).unwrap()[0]
    }

    /// Whether the word still says what a reply said.
    pub fn still_holds(&self, reply: &NodeReply) -> bool {
        let lease = if reply.word.get() == format::session::WORD_OWN_RANGE {
            self.view.own_range()
        } else {
            self.view.lease(reply.word.get())
        };
        let held = matches!(lease.state, LeaseState::Read | LeaseState::Write);
        held && lease.generation as u32 == reply.expected.get()
    }

    /// Walks from a directory; how it ended, and what it met.
    pub fn walk_from(
        &self,
        start: InodeNumber,
        names: &[&[u8]],
        (last_mode, parent_mode): (u8, u8),
    ) -> Result<(Status, Vec<NodeReply>), Status> {
        let head = WalkRequest {
            start,
            names: (names.len() as u16).into(),
            last_mode,
            parent_mode,
            ahead: 0.into(),
            ahead_mode: 0,
            ahead_if_taken: 0,
        };
        let mut body = head.as_bytes().to_vec();
        for name in names {
            body.push(name.len() as u8);
            body.extend_from_slice(name);
        }
        let answer = self.call(CallKind::Walk, &[&body])?;
        let (head, rest) = split::<WalkResponse>(&answer).unwrap();
        let replies: Vec<NodeReply> =
            rest.chunks_exact(size_of::<NodeReply>()).map(|chunk| split(chunk).unwrap().0).collect();
        assert_eq!(replies.len(), usize::from(head.nodes.get()));
        Ok((Status::from_raw(head.stopped.get()), replies))
    }

    /// Walks from the root; the last node if everything was found.
    pub fn walk(&self, path: &str) -> Result<NodeReply, Status> {
        let names: Vec<&[u8]> = path.split('/').filter(|name| !name.is_empty()).map(str::as_bytes).collect();
        match self.walk_from(ROOT, &names, (LEASE_READ, LEASE_READ))? {
            (Status::Ok, replies) => Ok(*replies.last().unwrap()),
            (status, _) => Err(status),
        }
    }

    pub fn open(&self, inode: InodeNumber, access: u8, mode: u8) -> Result<NodeReply, Status> {
        let request = OpenRequest { inode, access, mode, reserved: [0; 6] };
        Ok(split(&self.call(CallKind::Open, &[request.as_bytes()])?).unwrap().0)
    }

    pub fn close(&self, inode: InodeNumber, flags: u64) {
        self.call(CallKind::Close, &[InodeRequest { inode, flags: flags.into() }.as_bytes()]).unwrap();
    }

    pub fn read(&self, inode: InodeNumber, offset: u64, length: u64) -> Result<Vec<u8>, Status> {
        let request = RangeRequest { inode, offset: offset.into(), length: length.into() };
        self.call(CallKind::Read, &[request.as_bytes()])
    }

    pub fn entries(&self, inode: InodeNumber) -> Result<Vec<(Vec<u8>, InodeNumber)>, Status> {
        let request = EntriesRequest { inode, from: 0.into(), same_hash: 0.into(), reserved: 0.into() };
        let body = self.call(CallKind::Entries, &[request.as_bytes()])?;
        let (head, mut rest) = split::<EntriesResponse>(&body).unwrap();
        let mut found = Vec::new();
        for _ in 0..head.count.get() {
            let (entry, after) = split::<EntryReply>(rest).unwrap();
            let (name, after) = after.split_at(entry.name_bytes.into());
            found.push((name.to_vec(), entry.inode));
            rest = after;
        }
        Ok(found)
    }

    /// Asks for so many blocks more; how many there are.
    pub fn refill(&self, blocks: u64, shared: bool) -> Result<u64, Status> {
        let (inodes, shared) = (0.into(), u32::from(shared).into());
        let request = RefillRequest { inodes, room_blocks: blocks.into(), shared, replaces: 0.into() };
        let body = self.call(CallKind::Refill, &[request.as_bytes()])?;
        Ok(split::<RefillResponse>(&body).unwrap().0.room_blocks.get())
    }

    /// The same for records that replace blocks.
    pub fn refill_to_replace(&self, blocks: u64) -> Result<u64, Status> {
        let (inodes, shared) = (0.into(), 0.into());
        let request = RefillRequest { inodes, room_blocks: blocks.into(), shared, replaces: 1.into() };
        let body = self.call(CallKind::Refill, &[request.as_bytes()])?;
        Ok(split::<RefillResponse>(&body).unwrap().0.room_blocks.get())
    }

    pub fn digest(&self, wait: bool) -> Result<Sequence, Status> {
        let up_to = self.pages.commit().load();
        let request = DigestRequest { up_to, wait: u32::from(wait).into(), reserved: 0.into() };
        let body = self.call(CallKind::Digest, &[request.as_bytes()])?;
        Ok(split::<DigestResponse>(&body).unwrap().0.digested)
    }

    pub fn header(&mut self, kind: Kind, inode: InodeNumber) -> RecordHeader {
        self.time_ns += 1;
        RecordHeader {
            envelope: Envelope::new(kind as u8, 0, 0),
            inode,
            time_ns: self.time_ns.into(),
            ..RecordHeader::new_zeroed()
        }
    }

    /// Takes the cost of a record from the reservation; false if less is left.
    fn take_room(&mut self, header: &RecordHeader, payload: &[u8]) -> bool {
        let Some(room) = self.room else { return true };
        let frame = [header.as_bytes(), payload].concat();
        let cost = room_blocks(&Record::decode(&frame).unwrap().operation);
        self.is_out_of_room = cost > room;
        if !self.is_out_of_room {
            self.room = Some(room - cost);
        }
        !self.is_out_of_room
    }

    /// Appends a record and commits it, a pad before it too; false if the log is sealed, or the reservation is not enough. A
    /// full log is digested.
    pub fn append(&mut self, mut header: RecordHeader, payload: &[&[u8]]) -> bool {
        let payload = payload.concat();
        header.envelope.payload_bytes.set(payload.len() as u32);
        if !self.take_room(&header, &payload) {
            return false;
        }
        let bytes: [u8; 64] = zerocopy::transmute!(header);
        let appended = match self.ring.append(bytes, &[payload.as_slice().into()]) {
            Err(AppendError::Full) => {
                if self.digest(true).is_err() {
                    return false;
                }
                self.release();
                self.ring.append(bytes, &[payload.as_slice().into()])
            }
            appended => appended,
        }
        .unwrap();
        self.pages.commit().commit(appended.sequence, FenceBy::Operation);
        match self.view.seal() {
            Seal::Open => true,
            Seal::Sealing => panic!("one thread at a time"),
            Seal::Sealed(cut) => appended.sequence <= cut,
        }
    }

    /// Lets log space that was digested be used again.
    pub fn release(&mut self) {
        let digested = self.view.digested();
        self.ring
            .release_to(RingPosition { position: digested.position, sequence: digested.sequence.next() });
    }

    /// Gets space for so many bytes of the log's file, and uses them.
    pub fn grow_log(&mut self, bytes: u64) {
        self.call(CallKind::GrowLog, &[GrowRequest { bytes: bytes.into() }.as_bytes()]).unwrap();
        self.ring.use_up_to(bytes);
    }

    /// An operation under leases: false if one of them is not held any more, or the log is sealed.
    pub fn under(&mut self, held: &[NodeReply], act: impl FnOnce(&mut Self) -> bool) -> bool {
        let entered: Entered = self.pages.inside().enter(Some(0), FenceBy::Operation);
        let done = held.iter().all(|reply| self.still_holds(reply)) && act(self);
        self.pages.inside().leave(entered);
        done
    }

    pub fn new_inode(&mut self) -> InodeNumber {
        self.next_inode += 1;
        InodeNumber::new(self.next_inode - 1)
    }

    pub fn create(&mut self, parent: InodeNumber, name: &[u8], mode: u32) -> (InodeNumber, bool) {
        let inode = self.new_inode();
        let done = self.create_as(inode, parent, name, mode, self.attached.caller.uid);
        (inode, done)
    }

    pub fn create_as(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        uid: u32,
    ) -> bool {
        self.create_with(inode, (parent, name), (mode, uid), &[])
    }

    /// A file without a name, which may get one.
    pub fn create_unnamed(&mut self, parent: InodeNumber) -> (InodeNumber, bool) {
        let (inode, uid) = (self.new_inode(), self.attached.caller.uid.into());
        let body = CreateBody { mode: (FILE | 0o644).into(), uid, gid: uid, ..CreateBody::new_zeroed() };
        let mut header = self.header(Kind::CreateUnnamed, inode);
        header.parent = parent;
        header.envelope.flags = UNNAMED_LINKABLE;
        let done = self.append(header, &[body.as_bytes()]);
        (inode, done)
    }

    /// Of a new inode.
    pub fn symlink(&mut self, parent: InodeNumber, name: &[u8], target: &[u8]) -> bool {
        let inode = self.new_inode();
        self.create_with(inode, (parent, name), (SYMLINK | 0o777, self.attached.caller.uid), target)
    }

    fn create_with(
        &mut self,
        inode: InodeNumber,
        (parent, name): (InodeNumber, &[u8]),
        (mode, uid): (u32, u32),
        target: &[u8],
    ) -> bool {
        let body = CreateBody {
            mode: mode.into(),
            uid: uid.into(),
            gid: uid.into(),
            name_bytes: (name.len() as u16).into(),
            target_bytes: (target.len() as u16).into(),
            rdev: 0.into(),
        };
        let mut header = self.header(Kind::Create, inode);
        header.parent = parent;
        header.extra.set(cookie(name));
        self.append(header, &[body.as_bytes(), name, target])
    }

    pub fn write(&mut self, inode: InodeNumber, offset: u64, bytes: &[u8]) -> bool {
        let mut header = self.header(Kind::Write, inode);
        header.offset.set(offset);
        self.append(header, &[bytes])
    }

    pub fn unlink(&mut self, parent: InodeNumber, name: &[u8], inode: InodeNumber, flags: u8) -> bool {
        let mut header = self.header(Kind::Unlink, inode);
        header.envelope.flags = flags;
        header.parent = parent;
        header.extra.set(cookie(name));
        self.append(header, &[name])
    }

    pub fn rename(
        &mut self,
        inode: InodeNumber,
        (old_parent, old_name): (InodeNumber, &[u8]),
        (new_parent, new_name): (InodeNumber, &[u8]),
        replaced: InodeNumber,
    ) -> bool {
        let body = RenameBody {
            old_parent,
            new_parent,
            old_cookie: cookie(old_name).into(),
            new_cookie: cookie(new_name).into(),
            replaced,
            old_name_bytes: (old_name.len() as u16).into(),
            new_name_bytes: (new_name.len() as u16).into(),
            reserved: 0.into(),
        };
        let header = self.header(Kind::Rename, inode);
        self.append(header, &[body.as_bytes(), old_name, new_name])
    }

    pub fn set_mode(&mut self, inode: InodeNumber, mode: u32) -> bool {
        let mut body = SetAttrBody::new_zeroed();
        body.mask.set(format::record::SET_MODE);
        body.mode.set(mode);
        let header = self.header(Kind::SetAttr, inode);
        self.append(header, &[body.as_bytes()])
    }
}

pub fn cookie(name: &[u8]) -> u64 {
    Cookie::of_name(Name::new(name).unwrap()).get()
}
