//! Room that is promised in parts is enough for a write that needs several of them; an answer about more space for a log that
//! is lost takes nothing with it, and without more space the log goes on with what it has, or the program is told.

mod assise_local;

use assise_local::trees::{at, process};
use assise_local::{Local, Node, tiny};
use format::SegmentId;
use format::call::{CallKind, DigestRequest, GrowRequest, Status, split};
use ipc::{Host, Join, Time, Waited, Word};
use libfs::{Attachment, Connector, Error, LibFs, Limits, Link};
use pmem::{ReadMapping, Region};
use sharedfs::Config;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vfs::Caller;
use vfs::conformance::{Actor, Answer, Call, Player};

/// Half of what the pool can promise: four parts at least.
const BYTES: usize = 8 << 20;

#[test]
fn one_write_needs_more_than_is_promised_at_once() {
    let node = Node::new(Config { log_bytes: 1 << 20, log_bytes_max: 64 << 20, ..tiny() });
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let mut player = process(Arc::new(libfs), 1);
    let mut done = |call: Call| match player.call(&call) {
        Answer::Failed(why) => panic!("answered {why}"),
        answer => answer,
    };
    done(Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
    let written = done(Call::Pwrite { slot: 0, offset: 0, data: vec![7; BYTES] });
    assert_eq!(written, Answer::Number(BYTES as u64), "whole");
}

/// A way to the daemon on which the answer to the first `GrowLog` is lost, or each is refused that is for more bytes
/// than `refused_above`.
struct Lossy {
    local: Arc<Local>,
    answer: Result<Status, ()>,
    refused_above: Option<u64>,
    lost: Arc<AtomicBool>,
    /// Bytes of the largest log that was granted.
    granted: Arc<AtomicU64>,
    /// Calls that wait for a digest.
    waits: Arc<AtomicU64>,
}

struct LossyLink {
    link: Arc<dyn Link>,
    answer: Result<Status, ()>,
    refused_above: Option<u64>,
    lost: Arc<AtomicBool>,
    /// Bytes of the largest log that was granted.
    granted: Arc<AtomicU64>,
    /// Calls that wait for a digest.
    waits: Arc<AtomicU64>,
}

impl Connector for Lossy {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        let attachment = self.local.attach(former)?;
        let (answer, refused_above, lost) = (self.answer, self.refused_above, self.lost.clone());
        let (granted, waits) = (self.granted.clone(), self.waits.clone());
        let link = LossyLink { link: attachment.link, answer, refused_above, lost, granted, waits };
        Ok(Attachment { link: Arc::new(link), ..attachment })
    }
}

impl Link for LossyLink {
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error> {
        if kind == CallKind::Digest {
            let (request, _) = split::<DigestRequest>(request[0]).expect("a request of its kind");
            self.waits.fetch_add(u64::from(request.wait.get()), Ordering::SeqCst);
        }
        if kind != CallKind::GrowLog {
            return self.link.call(kind, request, response);
        }
        let (asked, _) = split::<GrowRequest>(request[0]).expect("a request of its kind");
        if self.refused_above.is_some_and(|most| asked.bytes.get() > most) {
            self.lost.store(true, Ordering::SeqCst);
            return self.answer.map_err(|()| Error::TimedOut);
        }
        let called = self.link.call(kind, request, response);
        if called == Ok(Status::Ok) {
            self.granted.fetch_max(asked.bytes.get(), Ordering::SeqCst);
        }
        if self.refused_above.is_none() && !self.lost.swap(true, Ordering::SeqCst) {
            return self.answer.map_err(|()| Error::TimedOut);
        }
        called
    }

    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error> {
        self.link.segment(segment)
    }

    fn lock_table(&self, session: u64) -> Result<Region, Error> {
        self.link.lock_table(session)
    }
}

/// The program does not know that its log has more space: it asks again.
#[test]
fn the_answer_to_a_larger_log_is_lost() {
    const BLOCK: usize = 4000;
    for answer in [Err(()), Ok(Status::Media)] {
        let node = Node::new(tiny());
        let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
        let lossy = Lossy {
            local,
            answer,
            refused_above: None,
            lost: Arc::default(),
            granted: Arc::default(),
            waits: Arc::default(),
        };
        let lost = lossy.lost.clone();
        let libfs =
            LibFs::new(node.host.clone(), Arc::new(lossy), Limits::default()).expect("the daemon runs");
        let mut player = process(Arc::new(libfs), 1);
        player.call(&Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
        let mut written = Vec::new();
        for number in 1..40u8 {
            let offset = u64::from(number) * BLOCK as u64;
            let call = Call::Pwrite { slot: 0, offset, data: vec![number; BLOCK] };
            match player.call(&call) {
                Answer::Number(bytes) if bytes == BLOCK as u64 => written.push(number),
                // The one that asked for the log is told that its daemon did not answer.
                Answer::Failed(_) => assert!(lost.load(Ordering::SeqCst)),
                answer => panic!("{answer:?}"),
            }
        }
        assert!(lost.load(Ordering::SeqCst) && written.len() >= 38, "{}", written.len());
        let (reader, _) = node.attach(Caller::ROOT, Limits::default());
        for mut player in [player, process(Arc::new(reader), 2)] {
            player.call(&Call::Open { slot: 1, path: at("f"), flags: 0, mode: 0 });
            for number in &written {
                let offset = u64::from(*number) * BLOCK as u64;
                let read = player.call(&Call::Pread { slot: 1, offset, bytes: BLOCK });
                assert!(read == Answer::Bytes(vec![*number; BLOCK]), "{answer:?}: write {number} is lost");
            }
        }
    }
}

/// Records that fit the present log go through it, and a longer write is cut into records that do.
#[test]
fn there_is_no_space_for_a_larger_log() {
    let config = Config { log_bytes: 64 << 10, log_bytes_max: 1 << 20, ..tiny() };
    for answer in [Status::NoSpace, Status::Limit] {
        let node = Node::new(config);
        let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
        let lossy = Lossy {
            local,
            answer: Ok(answer),
            refused_above: Some(0),
            lost: Arc::default(),
            granted: Arc::default(),
            waits: Arc::default(),
        };
        let asked = lossy.lost.clone();
        let libfs =
            LibFs::new(node.host.clone(), Arc::new(lossy), Limits::default()).expect("the daemon runs");
        let mut player = process(Arc::new(libfs), 1);
        player.call(&Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
        let answer = player.call(&Call::Pwrite { slot: 0, offset: 0, data: vec![1; 100 << 10] });
        assert_eq!(answer, Answer::Number(100 << 10));
        assert!(asked.load(Ordering::SeqCst));
        for number in 0..20 {
            let answer =
                player.call(&Call::Pwrite { slot: 0, offset: number << 14, data: vec![2; 16 << 10] });
            assert_eq!(answer, Answer::Number(16 << 10));
        }
    }
}

/// A log becomes larger step by step until there is no space, and goes on with what it has.
#[test]
fn there_is_space_for_a_log_of_twice_the_size_only() {
    const LOG_BYTES: u64 = 64 << 10;
    let config = Config { log_bytes: LOG_BYTES, log_bytes_max: 1 << 20, ..tiny() };
    let node = Node::new(config);
    let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
    let lossy = Lossy {
        local,
        answer: Ok(Status::NoSpace),
        refused_above: Some(2 * LOG_BYTES),
        lost: Arc::default(),
        granted: Arc::default(),
        waits: Arc::default(),
    };
    let (asked, granted) = (lossy.lost.clone(), lossy.granted.clone());
    let libfs = LibFs::new(node.host.clone(), Arc::new(lossy), Limits::default()).expect("the daemon runs");
    let mut player = process(Arc::new(libfs), 1);
    player.call(&Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
    for number in 0..40 {
        let answer = player.call(&Call::Pwrite { slot: 0, offset: number << 13, data: vec![2; 8 << 10] });
        assert_eq!(answer, Answer::Number(8 << 10));
    }
    assert!(asked.load(Ordering::SeqCst), "more than twice the size is asked for");
    assert_eq!(granted.load(Ordering::SeqCst), 2 * LOG_BYTES);
}

/// A program that writes without a pause gets more space for its log before the log is full, and waits for no digest until the
/// log has its largest size.
#[test]
fn a_log_gets_more_space_before_it_is_full() {
    const LARGEST: u64 = 1 << 20;
    let config = Config { log_bytes: 64 << 10, log_bytes_max: LARGEST, ..tiny() };
    let node = Node::new(config);
    let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
    let lossy = Lossy {
        local,
        answer: Ok(Status::NoSpace),
        refused_above: Some(LARGEST),
        lost: Arc::default(),
        granted: Arc::default(),
        waits: Arc::default(),
    };
    let (granted, waits) = (lossy.granted.clone(), lossy.waits.clone());
    let libfs = LibFs::new(node.host.clone(), Arc::new(lossy), Limits::default()).expect("the daemon runs");
    let mut player = process(Arc::new(libfs), 1);
    player.call(&Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
    let before = waits.load(Ordering::SeqCst);
    for number in 0..110 {
        let answer = player.call(&Call::Pwrite { slot: 0, offset: number << 13, data: vec![2; 8 << 10] });
        assert_eq!(answer, Answer::Number(8 << 10));
        if number == 5 {
            assert_eq!(granted.load(Ordering::SeqCst), 128 << 10, "while a quarter of the log is free");
        }
    }
    assert_eq!(granted.load(Ordering::SeqCst), LARGEST);
    assert_eq!(waits.load(Ordering::SeqCst), before);
}

/// The host of a program, which counts how often the program sleeps for a time.
struct Sleeps(Arc<dyn Host>, AtomicU64);

impl Host for Sleeps {
    fn now(&self) -> Time {
        self.0.now()
    }

    fn wall(&self) -> i64 {
        self.0.wall()
    }

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        self.0.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        self.1.fetch_add(u64::from(until.is_some()), Ordering::SeqCst);
        self.0.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        self.0.wake(word, count);
    }
}

/// The log was full once, and a digest has freed a part of it: the program pauses before that part is full, too.
#[test]
fn after_its_log_was_full_a_program_pauses_again() {
    const LOG_BYTES: u64 = 1 << 20;
    const STEP: u64 = 8 << 10;
    let node = Node::new(Config { log_bytes: LOG_BYTES, log_bytes_max: LOG_BYTES, ..tiny() });
    let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
    let lossy = Lossy {
        local,
        answer: Ok(Status::NoSpace),
        refused_above: Some(LOG_BYTES),
        lost: Arc::default(),
        granted: Arc::default(),
        waits: Arc::default(),
    };
    let waits = lossy.waits.clone();
    let host = Arc::new(Sleeps(node.host.clone(), AtomicU64::new(0)));
    let libfs = LibFs::new(host.clone(), Arc::new(lossy), Limits::default()).expect("the daemon runs");
    let mut player = process(Arc::new(libfs), 1);
    player.call(&Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
    let (mut slept, mut waited) = (0, waits.load(Ordering::SeqCst));
    let mut full = 0;
    for number in 0..4 * LOG_BYTES / STEP {
        let offset = number % 64 * STEP;
        let written = player.call(&Call::Pwrite { slot: 0, offset, data: vec![2; STEP as usize] });
        assert_eq!(written, Answer::Number(STEP));
        if waits.load(Ordering::SeqCst) > waited {
            let pauses = host.1.load(Ordering::SeqCst) - slept;
            assert!(pauses > 0, "full {full} times, and without a pause in between");
            full += 1;
            (slept, waited) = (host.1.load(Ordering::SeqCst), waits.load(Ordering::SeqCst));
        }
    }
    assert!(full > 3, "{full}");
}

/// The daemon frees space of a log in steps: it makes one batch of 20 MiB in short records, and two of long ones.
#[test]
fn a_batch_of_long_records_is_shorter() {
    const BYTES: u64 = 20 << 20;
    let commits = |record: u64| {
        let area = assise_local::sharedfs_area(1 << 15);
        let log_bytes = 64 << 20;
        let config = Config { log_bytes, log_bytes_max: log_bytes, ledger_bytes: 1 << 20, area, ..tiny() };
        let node = Node::with_nodes(config, 1 << 14);
        let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
        let mut player = process(Arc::new(libfs), 1);
        player.call(&Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
        for offset in (0..BYTES).step_by(record as usize) {
            let call = Call::Pwrite { slot: 0, offset, data: vec![2; record as usize] };
            assert_eq!(player.call(&call), Answer::Number(record));
        }
        let daemon = node.daemon().expect("it runs");
        let before = daemon.commit();
        node.tidy();
        daemon.commit().get() - before.get()
    };
    assert_eq!((commits(32 << 10), commits(1 << 20)), (1, 2));
}

/// A pool that is full, and a process that filled it. Of the files in it, `kept` has data, `given` has reserved blocks, and
/// `sparse` has a hole.
struct FullPool {
    node: Arc<Node>,
    player: Player<LibFs>,
    /// The contents of `kept`.
    kept: Vec<u8>,
}

const ENOSPC: i32 = 28;
const O_RDWR_CREAT: i32 = 0o102;
const KEPT: usize = 0;
const GIVEN: usize = 1;
const SPARSE: usize = 2;
const BIG: usize = 3;
const BLOCK: u64 = 4096;

impl FullPool {
    fn new() -> Self {
        Self::with(|_| ())
    }

    /// A full pool in which there is something else, too.
    fn with(make: impl FnOnce(&mut Player<LibFs>)) -> Self {
        let node = Node::new(Config { area: assise_local::sharedfs_area(1 << 11), ..tiny() });
        let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
        let mut player = process(Arc::new(libfs), 1);
        make(&mut player);
        for (slot, name) in [(KEPT, "kept"), (GIVEN, "given"), (SPARSE, "sparse"), (BIG, "big")] {
            player.call(&Call::Open { slot, path: at(name), flags: O_RDWR_CREAT, mode: 0o644 });
        }
        let kept: Vec<u8> = (0..60 * BLOCK).map(|byte| (byte / 100) as u8).collect();
        let mut pool = Self { node, player, kept: kept.clone() };
        pool.done(&Call::Pwrite { slot: KEPT, offset: 0, data: kept });
        pool.done(&Call::Fallocate { slot: GIVEN, mode: 0, offset: 0, bytes: 20 * BLOCK });
        pool.done(&Call::Ftruncate { slot: SPARSE, size: 1 << 30 });
        let mut end = 0;
        // A digest gives back what records cost less than was reserved for them.
        for bytes in [3 * BLOCK, BLOCK, BLOCK] {
            let data = vec![7; bytes as usize];
            while let Answer::Number(more) =
                pool.player.call(&Call::Pwrite { slot: BIG, offset: end, data: data.clone() })
            {
                end += more;
            }
            pool.node.tidy();
        }
        pool.is_full();
        pool
    }

    fn done(&mut self, call: &Call) -> Answer {
        match self.player.call(call) {
            Answer::Failed(why) => panic!("{call:?}: {why}"),
            answer => answer,
        }
    }

    /// Nothing more can be added.
    fn is_full(&mut self) {
        for (slot, offset) in [(SPARSE, 1 << 20), (SPARSE, 2 << 30), (GIVEN, 100 * BLOCK)] {
            let answer = self.player.call(&Call::Pwrite { slot, offset, data: vec![9; BLOCK as usize] });
            assert_eq!(answer, Answer::Failed(ENOSPC), "{slot} at {offset}");
        }
    }

    fn overwrite(&mut self, offset: u64, byte: u8, bytes: usize) {
        let answer = self.done(&Call::Pwrite { slot: KEPT, offset, data: vec![byte; bytes] });
        assert_eq!(answer, Answer::Number(bytes as u64), "{bytes} at {offset}");
        self.kept[offset as usize..][..bytes].fill(byte);
    }

    /// The same, after the file has become longer.
    fn kept_is_there_up_to(&mut self, end: u64) {
        let end = self.kept.len().max(end as usize);
        self.kept.resize(end, 0);
        self.kept_is_there();
    }

    /// All processes find in `kept` what was written.
    fn kept_is_there(&mut self) {
        let (other, _) = self.node.attach(Caller::ROOT, Limits::default());
        let mut other = process(Arc::new(other), 2);
        other.call(&Call::Open { slot: KEPT, path: at("kept"), flags: 0, mode: 0 });
        for player in [&mut self.player, &mut other] {
            let read = player.call(&Call::Pread { slot: KEPT, offset: 0, bytes: 1 << 20 });
            assert!(read == Answer::Bytes(self.kept.clone()));
        }
        self.node.tidy();
    }
}

/// As in every file system, a program can write again to the blocks of a file, and to those that are reserved for it.
#[test]
fn on_a_full_pool_what_is_there_can_be_written_again() {
    let mut pool = FullPool::new();
    pool.overwrite(0, 1, 60 * BLOCK as usize);
    pool.overwrite(5000, 2, 3);
    let given = Call::Pwrite { slot: GIVEN, offset: 1, data: vec![3; 20 * BLOCK as usize - 1] };
    assert_eq!(pool.done(&given), Answer::Number(20 * BLOCK - 1));
    pool.kept_is_there();
    // Again and again, also where data was written that is not digested.
    for round in 0..200 {
        pool.overwrite(round * 1000 % (50 * BLOCK), round as u8, 1 + (round as usize * 977) % 20_000);
        pool.overwrite(round * 1000 % (50 * BLOCK), round as u8, 100);
        if round % 50 == 0 {
            pool.is_full();
            pool.kept_is_there();
        }
    }
    let read = pool.done(&Call::Pread { slot: GIVEN, offset: 0, bytes: 1 << 20 });
    let given = [&[0][..], &vec![3; 20 * BLOCK as usize - 1]].concat();
    assert!(read == Answer::Bytes(given));
    pool.kept_is_there();
}

/// A daemon that dies then digests all of it when it starts.
#[test]
fn on_a_full_pool_nothing_that_was_written_again_is_lost_with_the_daemon() {
    let mut pool = FullPool::new();
    for round in 0..20u64 {
        for step in 0..=round {
            pool.overwrite(step * 3 * BLOCK, (round + step) as u8, 2 * BLOCK as usize);
        }
        pool.node.kill();
        let recovered = pool.node.start();
        assert!(recovered.cuts.is_empty(), "{:?}", recovered.cuts);
        pool.kept_is_there();
    }
}

/// The blocks that many programs have reserved, whose records are not digested, are there for the next one.
#[test]
fn on_a_full_pool_idle_programs_leave_what_others_need() {
    const PROGRAMS: u64 = 20;
    let own = |number: u64| format!("own-{number}");
    let mut pool = FullPool::with(|player| {
        for number in 0..PROGRAMS {
            let path = at(&own(number));
            player.call(&Call::Open { slot: 6, path, flags: O_RDWR_CREAT, mode: 0o644 });
            player.call(&Call::Pwrite { slot: 6, offset: 0, data: vec![7; 2 * BLOCK as usize] });
            player.call(&Call::Close(6));
        }
    });
    let mut others = Vec::new();
    for number in 0..PROGRAMS {
        let (other, _) = pool.node.attach(Caller::ROOT, Limits::default());
        let mut other = process(Arc::new(other), number + 10);
        other.call(&Call::Open { slot: 0, path: at(&own(number)), flags: 2, mode: 0 });
        let written = other.call(&Call::Pwrite { slot: 0, offset: 100, data: vec![8; BLOCK as usize] });
        assert_eq!(written, Answer::Number(BLOCK), "program {number}");
        others.push(other);
    }
    pool.kept_is_there();
}

/// A program that knew where a file had holes, before it reserved blocks for them.
#[test]
fn on_a_full_pool_blocks_are_written_that_were_holes_before() {
    const SEEK_DATA: i32 = 3;
    let mut given = None;
    let mut pool = FullPool::with(|player| {
        let path = at("late");
        player.call(&Call::Open { slot: 6, path, flags: O_RDWR_CREAT, mode: 0o644 });
        player.call(&Call::Ftruncate { slot: 6, size: 100 * BLOCK as i64 });
        player.call(&Call::Pwrite { slot: 6, offset: 90 * BLOCK, data: vec![1] });
        player.call(&Call::Fsync(6));
        player.call(&Call::Lseek { slot: 6, by: 0, whence: SEEK_DATA });
        given = Some(player.call(&Call::Fallocate { slot: 6, mode: 0, offset: 0, bytes: 10 * BLOCK }));
    });
    assert!(!matches!(given, Some(Answer::Failed(_))));
    pool.done(&Call::Pwrite { slot: 6, offset: 0, data: vec![2; 10 * BLOCK as usize] });
    pool.kept_is_there();
}

/// A range of which the file has all blocks is reserved already; only the size may change.
#[test]
fn on_a_full_pool_what_is_there_can_be_reserved_again() {
    const KEEP_SIZE: i32 = 1;
    let mut pool = FullPool::new();
    // Data that is digested and data that is not, blocks that were cut by half, and blocks that are reserved.
    pool.overwrite(5000, 2, 3);
    pool.done(&Call::Ftruncate { slot: KEPT, size: 59 * BLOCK as i64 + 10 });
    pool.kept.truncate(59 * BLOCK as usize + 10);
    pool.done(&Call::Fallocate { slot: KEPT, mode: 3, offset: 8 * BLOCK, bytes: 100 });
    pool.kept[8 * BLOCK as usize..][..100].fill(0);
    for (mode, offset, bytes) in
        [(0, 0, 59 * BLOCK), (KEEP_SIZE, 4 * BLOCK, 56 * BLOCK), (0, 100, 60 * BLOCK - 100)]
    {
        pool.done(&Call::Fallocate { slot: KEPT, mode, offset, bytes });
        pool.kept_is_there_up_to(if mode == 0 { offset + bytes } else { 0 });
    }
    pool.done(&Call::Fallocate { slot: GIVEN, mode: 0, offset: 1, bytes: 20 * BLOCK - 1 });
    // One block more, at either end of the range.
    for (slot, offset) in [(KEPT, 0), (GIVEN, 19 * BLOCK)] {
        let answer = pool.player.call(&Call::Fallocate { slot, mode: 0, offset, bytes: 61 * BLOCK });
        assert_eq!(answer, Answer::Failed(ENOSPC), "{slot}");
    }
    pool.kept_is_there();
}

/// A range is cleared and reserved, or stays as it is.
#[test]
fn on_a_full_pool_a_range_is_not_cleared_without_space_to_reserve_it() {
    const FALLOC_FL_ZERO_RANGE: i32 = 0x10;
    let mut pool = FullPool::new();
    let cleared = pool.player.call(&Call::Fallocate {
        slot: KEPT,
        mode: FALLOC_FL_ZERO_RANGE,
        offset: 0,
        bytes: 40 * BLOCK,
    });
    assert_eq!(cleared, Answer::Failed(ENOSPC));
    pool.kept_is_there();
}

/// Removing data needs no space, and space is there afterwards.
#[test]
fn on_a_full_pool_files_are_truncated() {
    let mut pool = FullPool::new();
    // Within a block, at a border of blocks, and holes.
    for size in [59 * BLOCK + 1, 58 * BLOCK, 57 * BLOCK - 1] {
        pool.done(&Call::Ftruncate { slot: KEPT, size: size as i64 });
        pool.kept.truncate(size as usize);
        pool.kept_is_there();
    }
    for (offset, bytes) in [(8 * BLOCK, 4 * BLOCK), (3 * BLOCK + 5, 2 * BLOCK), (100, 7)] {
        pool.done(&Call::Fallocate { slot: KEPT, mode: 3, offset, bytes });
        pool.kept[offset as usize..][..bytes as usize].fill(0);
        pool.kept_is_there();
    }
    // A write to the hole needs space for more data; the blocks that the hole freed may be enough.
    let filled = Call::Pwrite { slot: KEPT, offset: 8 * BLOCK, data: vec![5; 4 * BLOCK as usize] };
    let answer = pool.player.call(&filled);
    if answer == Answer::Number(4 * BLOCK) {
        pool.kept[8 * BLOCK as usize..][..4 * BLOCK as usize].fill(5);
    }
    pool.kept_is_there();
    // Names and attributes need no data blocks.
    pool.done(&Call::Mkdir { path: at("folder"), mode: 0o755 });
    pool.done(&Call::Chmod { path: at("given"), mode: 0o600 });
    // Data that is not digested, too; then there is space for the data of others.
    pool.overwrite(0, 4, 2 * BLOCK as usize);
    pool.done(&Call::Open { slot: 5, path: at("kept"), flags: 0o1001, mode: 0 });
    pool.kept.clear();
    pool.kept_is_there();
    pool.done(&Call::Truncate { path: at("big"), size: 12345 });
    pool.done(&Call::Pwrite { slot: KEPT, offset: 0, data: vec![6; 40 * BLOCK as usize] });
    pool.kept.resize(40 * BLOCK as usize, 6);
    pool.kept_is_there();
}
