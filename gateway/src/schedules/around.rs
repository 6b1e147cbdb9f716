//! The gateway between a simulated kernel and leases that a test controls.

use crate::abi::{
    AttrOut, CreateIn, EntryOut, InHeader, OpenIn, OpenOut, OutHeader, ReadIn, ReleaseIn, WriteIn, opcode,
};
use crate::gateway::Gateway;
use crate::handshake::Agreed;
use crate::notices::{ForgetOut, InvalidateInodeOut, InvalidateNameOut, StoreOut, notice};
use crate::options::Options;
use crate::reply::Reply;
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Join, SystemHost, Word};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vfs::engine::Result;
use vfs::model::Limits;
use vfs::{CacheLeases, LeaseMode, Model, Recalled};
use zerocopy::{FromBytes, IntoBytes};

pub(super) const LONG: Duration = Duration::from_secs(60);
pub(super) const FOLDER: u32 = libc::S_IFDIR | 0o755;
pub(super) const ROOT: u64 = 1;
/// Limit of held units.
pub(super) const HELD_MAX: usize = 400;
/// Limit of inodes that the kernel knows.
pub(super) const INODES_MAX: usize = 64;

/// Leases that are all granted and recorded.
#[derive(Default)]
pub(super) struct FreeLeases {
    pub(super) held: Mutex<BTreeMap<InodeNumber, LeaseMode>>,
    /// 1 while no read lease is granted.
    pub(super) withheld: Word,
    /// Threads that wait for the end of that.
    pub(super) waiting: Word,
    pub(super) given_back: Mutex<Vec<InodeNumber>>,
    /// Inodes without a name.
    pub(super) nameless: Mutex<Vec<InodeNumber>>,
    /// Number of calls that gave leases back.
    pub(super) calls: Word,
}

impl FreeLeases {
    pub(super) fn mode(&self, node: u64) -> Option<LeaseMode> {
        self.held.lock().unwrap().get(&InodeNumber::new(node)).copied()
    }
}

impl CacheLeases for FreeLeases {
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    fn hold(&self, node: InodeNumber, mode: LeaseMode) -> Result<()> {
        if mode == LeaseMode::Read {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            SystemHost.wake(&self.waiting, ipc::WAKE_ALL);
            wait_while(&self.withheld, |withheld| withheld == 1);
        }
        let mut held = self.held.lock().unwrap();
        let now = held.get(&node).copied().map_or(mode, |before| before.max(mode));
        held.insert(node, now);
        Ok(())
    }

    fn hold_at_once(&self, node: InodeNumber, mode: LeaseMode) -> bool {
        self.hold(node, mode).is_ok()
    }

    fn give_back(&self, nodes: &[InodeNumber]) {
        self.held.lock().unwrap().retain(|node, _| !nodes.contains(node));
        self.given_back.lock().unwrap().extend(nodes);
        self.calls.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self, node: InodeNumber) {
        self.held.lock().unwrap().remove(&node);
    }

    fn is_nameless(&self, node: InodeNumber) -> bool {
        self.nameless.lock().unwrap().contains(&node)
    }

    fn take_orphans(&self) -> Vec<InodeNumber> {
        Vec::new()
    }

    fn held_max(&self) -> usize {
        HELD_MAX
    }

    fn recalls(&self) -> Recalled {
        Recalled::Ended
    }

    fn dropped(&self) {}

    fn end_recalls(&self) {}
}

/// A simulated kernel that receives notifications.
#[derive(Default)]
pub(super) struct Kernel {
    /// 1 while a request holds the page that a notification should drop.
    pub(super) locked: Word,
    /// 1 while a request holds a page, and only notifications about attributes continue.
    pub(super) page_locked: Word,
    /// Number of notifications that began to drop data.
    pub(super) begun: Word,
    /// Number of those that drop pages.
    pub(super) pages: Word,
    /// The offset and the bytes of each store into pages.
    pub(super) stores: Mutex<Vec<(u64, Vec<u8>)>>,
    /// Number of stores that began.
    pub(super) stores_begun: Word,
    /// Stores of fewer bytes wait for a page that is locked.
    pub(super) locked_below: Word,
    /// Number of the next notifications that find no inode.
    pub(super) absent: Word,
    pub(super) epochs: Word,
    /// The directory in which a thread creates, or 0.
    pub(super) creating: Word,
    /// Number of notifications about names that began.
    pub(super) names: Word,
    /// The inodes that it was asked to forget, in order.
    pub(super) forgotten: Mutex<Vec<u64>>,
}

impl Kernel {
    pub(super) fn hear(&self, message: &[u8]) -> std::result::Result<(), i32> {
        let (header, rest) = OutHeader::read_from_prefix(message).unwrap();
        match header.error as u32 {
            notice::INVALIDATE_INODE => {
                let (fields, _) = InvalidateInodeOut::read_from_prefix(rest).unwrap();
                self.pages.fetch_add(u32::from(fields.offset >= 0), Ordering::SeqCst);
                self.begun.fetch_add(1, Ordering::SeqCst);
                SystemHost.wake(&self.begun, ipc::WAKE_ALL);
                wait_while(&self.locked, |locked| locked == 1);
                wait_while(&self.page_locked, |locked| locked == 1 && fields.offset >= 0);
                let absent = self.absent.load(Ordering::SeqCst);
                self.absent.store(absent.saturating_sub(1), Ordering::SeqCst);
                if absent > 0 { Err(libc::ENOENT) } else { Ok(()) }
            }
            notice::STORE => {
                let (fields, bytes) = StoreOut::read_from_prefix(rest).unwrap();
                self.stores_begun.fetch_add(1, Ordering::SeqCst);
                SystemHost.wake(&self.stores_begun, ipc::WAKE_ALL);
                wait_while(&self.locked_below, |bytes| fields.bytes < bytes);
                self.stores.lock().unwrap().push((fields.offset, bytes.to_vec()));
                Ok(())
            }
            notice::INVALIDATE_NAME => {
                let (fields, name) = InvalidateNameOut::read_from_prefix(rest).unwrap();
                assert_eq!((fields.bytes as usize + 1, name.last()), (name.len(), Some(&0)));
                self.names.fetch_add(1, Ordering::SeqCst);
                SystemHost.wake(&self.names, ipc::WAKE_ALL);
                wait_while(&self.creating, |creating| u64::from(creating) == fields.directory);
                Ok(())
            }
            notice::RAISE_EPOCH => {
                self.epochs.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
            notice::FORGET => {
                let (fields, numbers) = ForgetOut::read_from_prefix(rest).unwrap();
                let numbers = numbers.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
                self.forgotten.lock().unwrap().extend(numbers.clone());
                assert_eq!(fields.count as usize, numbers.count());
                Ok(())
            }
            code => panic!("a notice with code {code}"),
        }
    }

    pub(super) fn lock(&self) {
        self.locked.store(1, Ordering::SeqCst);
    }

    pub(super) fn unlock(&self) {
        self.locked.store(0, Ordering::SeqCst);
        SystemHost.wake(&self.locked, ipc::WAKE_ALL);
    }

    pub(super) fn lock_stores_below(&self, bytes: u32) {
        self.locked_below.store(bytes, Ordering::SeqCst);
        SystemHost.wake(&self.locked_below, ipc::WAKE_ALL);
    }

    pub(super) fn drops(&self) -> u32 {
        self.begun.load(Ordering::SeqCst)
    }
}

/// Waits while a word has a value that it should not keep; fails after a time limit.
pub(super) fn wait_while(word: &Word, stays: impl Fn(u32) -> bool) {
    let until = SystemHost.now().after(LONG);
    loop {
        let value = word.load(Ordering::SeqCst);
        if !stays(value) {
            return;
        }
        assert!(SystemHost.now() < until, "it stays {value}");
        SystemHost.wait(word, value, Some(until));
    }
}

/// Waits until a condition holds; fails after a time limit.
pub(super) fn until(is_so: impl Fn() -> bool) {
    let until = SystemHost.now().after(LONG);
    while !is_so() {
        assert!(SystemHost.now() < until, "it does not come to be");
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(1))));
    }
}

/// A gateway, its simulated kernel and its leases.
pub(super) struct Around {
    pub(super) gateway: Arc<Gateway>,
    pub(super) model: Arc<Model>,
    pub(super) leases: Arc<FreeLeases>,
    pub(super) kernel: Arc<Kernel>,
}

impl Around {
    pub(super) fn new() -> Self {
        let (leases, kernel) = (Arc::new(FreeLeases::default()), Arc::new(Kernel::default()));
        let model = Model::new(Arc::new(|| SystemHost.wall()), Limits::default()).with_leases(leases.clone());
        let model = Arc::new(model);
        let (engine, host): (Arc<dyn vfs::Engine>, Arc<dyn Host>) = (model.clone(), Arc::new(SystemHost));
        let hears = kernel.clone();
        let ways: (crate::gateway::Send, crate::notices::SendNotice) =
            (Box::new(|_| ()), Box::new(move |message| hears.hear(message)));
        let root = engine.root().unwrap();
        let options = Options { waits_max: 8, inodes_max: INODES_MAX, ..Options::default() };
        let agreed = Agreed { maps_shared: true, caches: true, forgets: true };
        let gateway = Arc::new(Gateway::new(engine, host, &options, ways, &agreed, None));
        gateway.nodes.tell(&*gateway.engine, root.inode);
        Self { gateway, model, leases, kernel }
    }

    pub(super) fn message(opcode: u32, node: u64, parts: &[&[u8]]) -> Vec<u8> {
        let header = InHeader { opcode, node, unique: 2, ..InHeader::default() };
        [header.as_bytes(), &parts.concat()].concat()
    }

    /// Returns the answer, which counts as sent only after `reply.sent()`.
    pub(super) fn ask_slowly(&self, opcode: u32, node: u64, parts: &[&[u8]], reply: &mut Reply) -> Vec<u8> {
        let message = Self::message(opcode, node, parts);
        let answer = self.gateway.answer(&message, reply).expect("an answer").to_vec();
        let (header, rest) = OutHeader::read_from_prefix(&answer).unwrap();
        assert_eq!(header.error, 0, "opcode {opcode}");
        rest.to_vec()
    }

    pub(super) fn ask(&self, opcode: u32, node: u64, parts: &[&[u8]]) -> Vec<u8> {
        let mut reply = Reply::new(8192);
        let answer = self.ask_slowly(opcode, node, parts, &mut reply);
        reply.sent();
        answer
    }

    pub(super) fn entry(&self, opcode: u32, node: u64, parts: &[&[u8]]) -> EntryOut {
        EntryOut::read_from_prefix(&self.ask(opcode, node, parts)).unwrap().0
    }

    pub(super) fn attributes(&self, opcode: u32, node: u64, parts: &[&[u8]]) -> AttrOut {
        AttrOut::read_from_prefix(&self.ask(opcode, node, parts)).unwrap().0
    }

    /// Creates a file, or opens an existing one; returns the kernel's answer and the handle.
    pub(super) fn create(&self, name: &[u8]) -> (EntryOut, u64) {
        self.create_with(name, libc::O_RDWR)
    }

    pub(super) fn create_with(&self, name: &[u8], flags: i32) -> (EntryOut, u64) {
        self.create_in(ROOT, name, flags)
    }

    pub(super) fn create_in(&self, directory: u64, name: &[u8], flags: i32) -> (EntryOut, u64) {
        let fields = CreateIn { flags: flags as u32, mode: libc::S_IFREG | 0o644, ..CreateIn::default() };
        let answer = self.ask(opcode::CREATE, directory, &[fields.as_bytes(), name, b"\0"]);
        let (entry, rest) = EntryOut::read_from_prefix(&answer).unwrap();
        (entry, OpenOut::read_from_prefix(rest).unwrap().0.handle)
    }

    pub(super) fn open(&self, node: u64, flags: i32) -> u64 {
        let fields = OpenIn { flags: flags as u32, ..OpenIn::default() };
        OpenOut::read_from_prefix(&self.ask(opcode::OPEN, node, &[fields.as_bytes()])).unwrap().0.handle
    }

    pub(super) fn release(&self, node: u64, handle: u64) {
        self.ask(opcode::RELEASE, node, &[ReleaseIn { handle, ..ReleaseIn::default() }.as_bytes()]);
    }

    pub(super) fn read(&self, node: u64, handle: u64, offset: u64) {
        let fields = ReadIn { handle, offset, bytes: 4096, ..ReadIn::default() };
        self.ask(opcode::READ, node, &[fields.as_bytes()]);
    }

    pub(super) fn write(&self, node: u64, handle: u64, write_flags: u32) {
        let fields = WriteIn { handle, bytes: 4, write_flags, ..WriteIn::default() };
        self.ask(opcode::WRITE, node, &[fields.as_bytes(), b"text"]);
    }

    /// Begins a recall of an inode for another session.
    pub(super) fn begin_recall(&self, node: u64) -> Box<dyn Join> {
        let gateway = self.gateway.clone();
        let recall = move || gateway.recall(&[InodeNumber::new(node)]);
        SystemHost.spawn("recalls", Box::new(recall)).unwrap()
    }

    pub(super) fn recall(&self, node: u64) {
        self.begin_recall(node).join().unwrap();
    }

    pub(super) fn given_back(&self) -> Vec<u64> {
        self.leases.given_back.lock().unwrap().iter().map(|node| node.get()).collect()
    }
}
