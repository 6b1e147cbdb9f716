//! A daemon that dies at a step of an operation, which may be one of its own, and programs that start it again. A step
//! is an access to a shared word; all runs on one thread, whose words these are.

#![allow(dead_code, reason = "each test takes what it needs")]

use crate::assise_local::trees::process;
use crate::assise_local::{Local, Node};
use format::SegmentId;
use format::call::{CallKind, Status};
use ipc::Host;
use libfs::{Attachment, Connector, Error, LibFs, Limits, Link};
use pmem::{ReadMapping, Region};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vfs::Caller;
use vfs::conformance::Player;

thread_local! {
    /// Steps until the daemon dies; 0 for never.
    pub static LEFT: Cell<u64> = const { Cell::new(0) };
    /// At the first of these steps the daemon lives on, and only this program stands still; none that it does outside
    /// of its words is counted.
    pub static LIVES_ON: RefCell<Option<Arc<Local>>> = const { RefCell::new(None) };
    /// How often such a step came.
    pub static DEATHS: Cell<u64> = const { Cell::new(0) };
    /// How deep this thread is in the daemon's code.
    pub static INSIDE: Cell<u32> = const { Cell::new(0) };
    /// Whose daemon dies.
    pub static NODE: RefCell<Option<Arc<Node>>> = const { RefCell::new(None) };
    /// Steps from the first death to a second one; 0 for none.
    pub static AGAIN: Cell<u64> = const { Cell::new(0) };
    /// The daemon dies at the next connection request.
    pub static DIES_AT_DOOR: Cell<bool> = const { Cell::new(false) };
    /// The daemon stopped in the middle of something: it dies before it answers a call.
    pub static STUCK: Cell<bool> = const { Cell::new(false) };
    /// The operations of another program while the first one is stopped at its step.
    pub static MEANWHILE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    /// The operations of another thread of the program, tried at each step outside of the daemon until no lock is in
    /// its way.
    pub static OTHER_THREAD: RefCell<Option<Box<dyn FnMut() -> bool>>> = const { RefCell::new(None) };
    /// That is what runs now.
    pub static IS_OTHER: Cell<bool> = const { Cell::new(false) };
}

/// The value with which a thread of the daemon unwinds.
pub struct Died;

pub fn step() {
    if INSIDE.get() == 0
        && !std::thread::panicking()
        && let Some(mut other) = OTHER_THREAD.take()
        && !other()
    {
        OTHER_THREAD.set(Some(other));
    }
    let left = LEFT.get();
    if left == 0 || std::thread::panicking() {
        return;
    }
    let lives_on = LIVES_ON.take();
    if let Some(local) = &lives_on {
        LEFT.set(0);
        let is_inside = local.is_inside();
        LEFT.set(left);
        if left > 1 || !is_inside {
            LIVES_ON.set(lives_on.clone());
        }
        if !is_inside {
            return;
        }
    }
    LEFT.set(left - 1);
    if left > 1 {
        return;
    }
    DEATHS.set(DEATHS.get() + 1);
    if lives_on.is_some() {
        LEFT.set(AGAIN.take());
        return run_meanwhile();
    }
    let node = NODE.with_borrow(Clone::clone).expect("it is set when steps are counted");
    node.kill();
    drop(node);
    if INSIDE.get() > 0 {
        LEFT.set(AGAIN.take());
        resume_unwind(Box::new(Died));
    }
    run_meanwhile();
    LEFT.set(AGAIN.take());
}

fn run_meanwhile() {
    if let Some(meanwhile) = MEANWHILE.take() {
        meanwhile();
    }
}

/// Code of the daemon; it may die there.
pub fn inside<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    INSIDE.set(INSIDE.get() + 1);
    let done = catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(INSIDE.get() - 1);
    match done {
        Ok(done) => done,
        Err(payload) if payload.is::<Died>() => Err(Error::Disconnected),
        Err(payload) => resume_unwind(payload),
    }
}

/// A program whose daemon may die, and is started again at the next connection request.
struct Mortal {
    local: Arc<Local>,
    node: Arc<Node>,
    /// It lives by what it attached to, and does not start another daemon.
    ready: AtomicBool,
}

impl Connector for Mortal {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        let attachment = inside(|| {
            if DIES_AT_DOOR.take() {
                self.node.kill();
            }
            if self.node.daemon().is_none() {
                self.node.start();
            }
            self.local.attach(former)
        })?;
        if INSIDE.get() == 0 && self.ready.swap(true, Ordering::SeqCst) {
            run_meanwhile();
        }
        Ok(Attachment { link: Arc::new(MortalLink(attachment.link)), ..attachment })
    }
}

struct MortalLink(Arc<dyn Link>);

impl Link for MortalLink {
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error> {
        if STUCK.take()
            && let Some(node) = NODE.with_borrow(Clone::clone)
        {
            node.kill();
        }
        inside(|| self.0.call(kind, request, response))
    }

    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error> {
        inside(|| self.0.segment(segment))
    }

    fn lock_table(&self, session: u64) -> Result<Region, Error> {
        inside(|| self.0.lock_table(session))
    }
}

pub fn program(node: &Arc<Node>, id: u64) -> (Player<LibFs>, Arc<Local>) {
    let (libfs, local) = library(node, node.host.clone());
    (process(libfs, id), local)
}

pub fn library(node: &Arc<Node>, host: Arc<dyn Host>) -> (Arc<LibFs>, Arc<Local>) {
    let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
    let mortal = Mortal { local: local.clone(), node: node.clone(), ready: AtomicBool::new(false) };
    let libfs = LibFs::new(host, Arc::new(mortal), Limits::default()).expect("the daemon runs");
    (Arc::new(libfs), local)
}
