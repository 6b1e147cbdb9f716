//! Room that is promised in parts is enough for a write that needs several of them; an answer about more space for a log that
//! is lost takes nothing with it, and without more space the log goes on with what it has, or the program is told.

mod assise_local;

use assise_local::trees::{at, process};
use assise_local::{Local, Node, tiny};
use format::SegmentId;
use format::call::{CallKind, DigestRequest, GrowRequest, Status, split};
use libfs::{Attachment, Connector, Error, LibFs, Limits, Link};
use pmem::{ReadMapping, Region};
use sharedfs::Config;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vfs::Caller;
use vfs::conformance::{Actor, Answer, Call};

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
