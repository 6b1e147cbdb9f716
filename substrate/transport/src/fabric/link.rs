//! One connection over libfabric.
//!
//! An endpoint has two halves, each used under a lock: `completions` by the driving thread, `posting` by posting
//! threads. A close takes both locks, so no call on either half follows it. With FI_EP_MSG the close of the endpoint
//! ends the peer's access (tcp: its socket is no longer read; verbs: its queue pair is destroyed), and the provider
//! no longer touches the buffers.
//!
//! A waiting thread polls its own completions, then sleeps on the descriptors of the queue; of several that sleep, the others
//! wait for the counter. While no thread waits, the descriptors are armed in the progress thread's set, for one event.
//!
//! Locks: `sleeper`, then `completions`, then the state of the connection above, then `posting` or `pending`.

use super::sys::{
    Completion, DESCRIPTORS, DONE, Domain, FRAME, IMMEDIATE, Piece, RawEndpoint, Registered, View,
};
use super::{Running, event_descriptor};
use crate::error::{Ended, Error};
use crate::link::{Arrival, Driver, Immediate, Link, LinkShape, Operation};
use crate::memory::{Bytes, INLINE_BYTES_MAX, Local, Rights};
use format::wire::WireRegion;
use ipc::host::Waited;
use ipc::sync::{Ordering, Word};
use ipc::{EventCounter, Host, Lock, Time};
use pmem::Region;
use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;
use zerocopy::little_endian::U64;

/// Limit of frames in progress that are too long to be inline.
const SEND_BUFFERS: usize = 16;

/// Number of completions read in one call.
const BATCH: usize = 16;

/// Number of batches taken before other threads have a turn.
const BATCHES_MAX: usize = 16;

/// Contexts of receives: bit 63, and the number of the buffer. Other contexts: the number of the operation, and in
/// the low bits the number, from 1, of the send buffer that it frees.
const RECEIVE: u64 = 1 << 63;
const BUFFER_BITS: u32 = 8;

/// An event of the connection as a whole, passed on by the progress thread.
pub(super) enum LinkEvent {
    Up,
    Refused(Vec<u8>),
    Ended(Ended),
}

pub(crate) struct FabricLink {
    running: Arc<Running>,
    pub(super) id: u64,
    raw: RawEndpoint,
    shape: LinkShape,
    counter: Arc<EventCounter>,
    /// Receive buffers, then send buffers.
    buffers: Registered,
    completions: Lock<CompletionHalf>,
    posting: Lock<PostingHalf>,
    pending: Lock<VecDeque<LinkEvent>>,
    /// 1 while `pending` may contain events.
    has_pending: Word,
    driver: Lock<Option<Weak<dyn Driver>>>,
    /// 1 after the connection is up.
    up: Word,
    /// See [`Link::waiters`].
    waiters: Word,
    /// Held by the thread that sleeps on the descriptors.
    sleeper: Lock<()>,
    /// 1 while that thread may be asleep: then the descriptor `bell` wakes it.
    asleep: Word,
    bell: OwnedFd,
    /// Number of calls of `drive`.
    pub(super) driven: Word,
    /// The value of `driven` when the progress thread last checked it.
    pub(super) seen: Word,
}

struct CompletionHalf {
    open: bool,
    /// Buffer for completions.
    batch: [Completion; BATCH],
    /// The descriptors that the progress thread's set contains.
    set: Vec<i32>,
}

struct PostingHalf {
    open: bool,
    /// Free send buffers.
    free: Vec<usize>,
}

// SAFETY: the raw endpoint is used under its locks, and belongs to a domain that any thread may use.
unsafe impl Send for FabricLink {}
// SAFETY: as above.
unsafe impl Sync for FabricLink {}

impl FabricLink {
    /// Takes ownership of an endpoint that is neither connected nor accepted, and posts its receives.
    pub fn new(
        running: &Arc<Running>,
        raw: RawEndpoint,
        shape: LinkShape,
        counter: Arc<EventCounter>,
    ) -> Result<Arc<Self>, Error> {
        let host = running.host().clone();
        let receives = shape.receives as usize;
        let link = View::buffers(shape.frame_bytes * (receives + SEND_BUFFERS)).and_then(|view| {
            let whole = 0..shape.frame_bytes * (receives + SEND_BUFFERS);
            Registered::new(running.domain(), view, whole, None, host.random())
        });
        let buffers = match link {
            Ok(buffers) => buffers,
            Err(error) => {
                // SAFETY: it has no other user.
                unsafe { raw.close() };
                return Err(error);
            }
        };
        let half = CompletionHalf { open: true, batch: [Completion::default(); BATCH], set: Vec::new() };
        let posting = PostingHalf { open: true, free: (0..SEND_BUFFERS).collect() };
        let bell = match event_descriptor() {
            Ok(bell) => bell,
            Err(error) => {
                // SAFETY: it has no other user.
                unsafe { raw.close() };
                return Err(error);
            }
        };
        let link = Arc::new(Self {
            id: running.next_id(),
            running: running.clone(),
            raw,
            shape,
            counter,
            buffers,
            completions: Lock::new(host.clone(), half),
            posting: Lock::new(host.clone(), posting),
            pending: Lock::new(host.clone(), VecDeque::new()),
            has_pending: Word::new(0),
            driver: Lock::new(host.clone(), None),
            sleeper: Lock::new(host, ()),
            asleep: Word::new(0),
            bell,
            up: Word::new(0),
            waiters: Word::new(0),
            driven: Word::new(0),
            seen: Word::new(0),
        });
        for buffer in 0..receives {
            link.repost(buffer as u64)?;
        }
        Ok(link)
    }

    /// The address of the raw endpoint, which identifies it in the provider's events.
    pub(super) fn name(&self) -> usize {
        self.raw.posting as usize
    }

    pub(super) fn accept(&self) -> Result<(), Error> {
        let posting = self.posting.lock();
        assert!(posting.open, "a link is accepted before it is given to anybody");
        // SAFETY: open, and locked.
        unsafe { self.raw.accept() }
    }

    pub(super) fn connect(&self, ip: &str, port: u16, said: &[u8]) -> Result<(), Error> {
        let posting = self.posting.lock();
        assert!(posting.open, "a link is connected before it is given to anybody");
        // SAFETY: open, and locked.
        unsafe { self.raw.connect(ip, port, said) }
    }

    /// Adds an event of the progress thread.
    pub(super) fn push(&self, pending: LinkEvent) {
        if matches!(pending, LinkEvent::Up) {
            // Release: pairs with the load after a failed completion.
            self.up.store(1, Ordering::Release);
        }
        let mut queue = self.pending.lock();
        queue.push_back(pending);
        // Relaxed: the notification makes a thread look again, and the lock orders the rest.
        self.has_pending.store(1, Ordering::Relaxed);
    }

    pub(super) fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.driver.lock().as_ref().and_then(Weak::upgrade)
    }

    /// True if a thread waits for the connection.
    pub(super) fn is_waited_for(&self) -> bool {
        // Relaxed: see `Waiter`.
        self.waiters.load(Ordering::Relaxed) != 0
    }

    /// Posts a receive. The queue always has space, because the endpoint was created for this number of receives.
    fn repost(&self, buffer: u64) -> Result<(), Error> {
        let index = usize::try_from(buffer).expect("the number of a buffer");
        assert!(index < self.shape.receives as usize, "a receive of ours");
        let piece = self.buffers.piece(index * self.shape.frame_bytes, self.shape.frame_bytes);
        let posting = self.posting.lock();
        if !posting.open {
            return Ok(());
        }
        // SAFETY: open, and locked; the buffer is read only between its completion and here.
        if unsafe { self.raw.receive(&piece, RECEIVE | buffer) }? {
            return Ok(());
        }
        Err(Error::Provider { call: "fi_recv", code: libc::EAGAIN })
    }

    fn take_completion(
        &self,
        completion: &Completion,
        take: &mut dyn FnMut(Arrival<'_>),
    ) -> Result<(), Ended> {
        if completion.error != 0 {
            // A refused connection returns its receives before the event with the reason. Acquire: pairs with `push`.
            if self.up.load(Ordering::Acquire) == 0 {
                return Ok(());
            }
            let forbidden = [libc::EACCES, libc::EPERM, libc::EREMOTEIO].contains(&completion.error);
            let refused = forbidden && completion.kind == DONE;
            return Err(if refused { Ended::Forbidden } else { Ended::Lost });
        }
        let buffer = completion.context & !RECEIVE;
        match completion.kind {
            DONE => {
                let slot = (completion.context & ((1 << BUFFER_BITS) - 1)) as usize;
                if let Some(slot) = slot.checked_sub(1) {
                    self.posting.lock().free.push(slot);
                }
                take(Arrival::Done(completion.context >> BUFFER_BITS));
            }
            FRAME => {
                let bytes = usize::try_from(completion.bytes).unwrap_or(usize::MAX);
                if bytes > self.shape.frame_bytes {
                    return Err(Ended::Broke("a frame longer than its buffer"));
                }
                let index = usize::try_from(buffer).expect("the number of a buffer");
                let piece = self.buffers.piece(index * self.shape.frame_bytes, bytes);
                // SAFETY: the receive is used up and posted again only after `take` has returned, so no thread writes
                // the bytes.
                take(Arrival::Frame(unsafe { std::slice::from_raw_parts(piece.start, bytes) }));
                self.repost(buffer).map_err(|_| Ended::Lost)?;
            }
            IMMEDIATE => {
                take(Arrival::Immediate(self.immediate(completion.immediate)));
                if self.running.facts().immediate_uses_receive != 0 {
                    self.repost(buffer).map_err(|_| Ended::Lost)?;
                }
            }
            _ => return Err(Ended::Lost),
        }
        Ok(())
    }

    /// Splits an immediate: the user's half, and the count if the provider has space for it.
    fn immediate(&self, carried: u64) -> Immediate {
        let (value, taken) = (carried & u64::from(u32::MAX), carried >> u32::BITS);
        Immediate { value: value as u32, taken: self.counts_along().then_some(taken as u32) }
    }

    fn take_pending(&self, take: &mut dyn FnMut(Arrival<'_>)) -> bool {
        if self.has_pending.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut queue = self.pending.lock();
        let next = queue.pop_front();
        self.has_pending.store(u32::from(!queue.is_empty()), Ordering::Relaxed);
        drop(queue);
        let Some(pending) = next else { return false };
        match &pending {
            LinkEvent::Up => take(Arrival::Up),
            LinkEvent::Refused(said) => take(Arrival::Refused(said)),
            LinkEvent::Ended(why) => take(Arrival::Ended(*why)),
        }
        true
    }

    /// Posts a frame: the provider copies a short one; a longer one goes through a send buffer.
    fn post_frame(&self, number: u64, head: &[u8], body: &[u8]) -> Result<bool, Error> {
        let bytes = head.len() + body.len();
        if bytes > self.shape.frame_bytes {
            return Err(Error::TooLarge { bytes: bytes as u64, limit: self.shape.frame_bytes as u64 });
        }
        let mut posting = self.posting.lock();
        if !posting.open {
            return Err(Error::Ended(Ended::Lost));
        }
        let inline = bytes <= self.running.inline_bytes();
        let mut short = [0u8; INLINE_BYTES_MAX];
        let (piece, slot) = if inline {
            short[..head.len()].copy_from_slice(head);
            short[head.len()..bytes].copy_from_slice(body);
            (Piece { start: short.as_mut_ptr(), bytes, descriptor: std::ptr::null_mut() }, 0)
        } else {
            let Some(slot) = posting.free.pop() else { return Ok(false) };
            let start = (self.shape.receives as usize + slot) * self.shape.frame_bytes;
            let piece = self.buffers.piece(start, bytes);
            // SAFETY: the buffer is free, so the provider does not use it, and this is its only user while locked.
            unsafe {
                std::ptr::copy_nonoverlapping(head.as_ptr(), piece.start, head.len());
                std::ptr::copy_nonoverlapping(body.as_ptr(), piece.start.add(head.len()), body.len());
            }
            (piece, slot + 1)
        };
        let context = number << BUFFER_BITS | slot as u64;
        // SAFETY: open, and locked; a frame that is not copied lies in a buffer that is reserved until its
        // completion.
        let posted = unsafe { self.raw.send(&piece, context, inline) };
        if slot > 0 && !matches!(posted, Ok(true)) {
            posting.free.push(slot - 1);
        }
        posted
    }

    fn post_write(
        &self,
        number: u64,
        from: &Bytes<'_>,
        to: &WireRegion,
        immediate: Option<Immediate>,
    ) -> Result<bool, Error> {
        let immediate =
            immediate.map(|it| u64::from(it.taken.unwrap_or(0)) << u32::BITS | u64::from(it.value));
        let posting = self.posting.lock();
        if !posting.open {
            return Err(Error::Ended(Ended::Lost));
        }
        let remote = (to.base.get(), to.key.get());
        let context = number << BUFFER_BITS;
        match from {
            Bytes::Inline(bytes) => {
                let start = bytes.as_ptr().cast_mut();
                let piece = Piece { start, bytes: bytes.len(), descriptor: std::ptr::null_mut() };
                // SAFETY: open, and locked; the bytes are copied before this returns.
                unsafe { self.raw.write(&piece, remote, context, true, immediate) }
            }
            Bytes::Registered(local, range) => {
                let piece = piece_of(local, range);
                let short = piece.bytes <= self.running.inline_bytes();
                // SAFETY: open, and locked; the operation in progress keeps the memory alive until it is done.
                unsafe { self.raw.write(&piece, remote, context, short, immediate) }
            }
        }
    }
}

/// How a queue is that a thread wants to leave alone.
enum Quiet {
    /// It has something to do.
    Not,
    /// It is closed, and has no more events.
    Closed,
    /// It has nothing to do until one of so many descriptors has an event. Space for one more is behind them.
    Until([libc::pollfd; DESCRIPTORS + 1], usize),
}

impl FabricLink {
    fn quiet(&self, completions: &CompletionHalf) -> Quiet {
        if !completions.open {
            return Quiet::Closed;
        }
        if !self.pending.lock().is_empty() {
            return Quiet::Not;
        }
        // SAFETY: open, and locked.
        if !unsafe { self.raw.may_sleep(self.running.domain()) } {
            return Quiet::Not;
        }
        // SAFETY: open, and locked.
        let (found, count) = unsafe { self.raw.descriptors() };
        assert!(count > 0, "a queue that is asked can be waited for");
        let mut descriptors = [libc::pollfd { fd: -1, events: 0, revents: 0 }; DESCRIPTORS + 1];
        descriptors[..count].copy_from_slice(&found[..count]);
        // Bytes may move without completing an operation: the caller must drive again.
        if is_ready(&mut descriptors[..count]) { Quiet::Not } else { Quiet::Until(descriptors, count) }
    }

    /// Sleeps until a descriptor has an event; the last one is the bell.
    fn sleep_on(
        &self,
        descriptors: &mut [libc::pollfd],
        host: &dyn Host,
        seen: u32,
        until: Option<Time>,
    ) -> Waited {
        let left = until.map(|until| until.since(host.now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Waited::TimedOut;
        }
        // SeqCst: pairs with the load in `notify`. Either that sees the store, or this thread sees its count.
        self.asleep.store(1, Ordering::SeqCst);
        let slept = if self.counter.value() == seen { wait_for(descriptors, left) } else { Waited::Woken };
        self.asleep.store(0, Ordering::SeqCst);
        if descriptors.last().is_some_and(|bell| bell.revents != 0) {
            let mut count = [0u8; 8];
            // SAFETY: eight bytes of ours are written. With nothing to read the call ends at once.
            unsafe { libc::read(self.bell.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        }
        slept
    }
}

/// Waits until one of the descriptors is ready.
fn wait_for(descriptors: &mut [libc::pollfd], left: Option<Duration>) -> Waited {
    let left = left.map(|left| libc::timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let (first, count) = (descriptors.as_mut_ptr(), descriptors.len() as libc::nfds_t);
    // SAFETY: the descriptors and the time are ours, and only the returned events are written.
    match unsafe { libc::ppoll(first, count, left, std::ptr::null()) } {
        0 => Waited::TimedOut,
        1.. => Waited::Woken,
        _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => Waited::Interrupted,
        // The caller drives the link, and finds what is wrong.
        _ => Waited::Woken,
    }
}

/// True if one of the descriptors is ready.
fn is_ready(descriptors: &mut [libc::pollfd]) -> bool {
    // SAFETY: the descriptors are ours, and only their returned events are written.
    unsafe { libc::poll(descriptors.as_mut_ptr(), descriptors.len() as libc::nfds_t, 0) > 0 }
}

fn piece_of(local: &Local, range: &Range<u64>) -> Piece {
    let start = usize::try_from(range.start).expect("a checked range fits memory");
    let bytes = usize::try_from(range.end - range.start).expect("a checked range fits memory");
    local.handle::<Registered>().piece(start, bytes)
}

impl Link for FabricLink {
    fn counter(&self) -> &Arc<EventCounter> {
        &self.counter
    }

    fn attach(&self, driver: Weak<dyn Driver>) {
        *self.driver.lock() = Some(driver);
    }

    fn waiters(&self) -> Option<&Word> {
        Some(&self.waiters)
    }

    fn counts_along(&self) -> bool {
        self.running.facts().immediate_bytes >= 8
    }

    fn post(&self, number: u64, work: &Operation<'_>) -> Result<bool, Error> {
        match work {
            Operation::Frame(head, body) => self.post_frame(number, head, body),
            Operation::Write { from, to, immediate } => self.post_write(number, from, to, *immediate),
            Operation::Read { into, range, from } => {
                let posting = self.posting.lock();
                if !posting.open {
                    return Err(Error::Ended(Ended::Lost));
                }
                let piece = piece_of(into, range);
                let remote = (from.base.get(), from.key.get());
                // SAFETY: open, and locked; the operation in progress keeps the memory alive until it is done, and no
                // slice of it exists.
                unsafe { self.raw.read(&piece, remote, number << BUFFER_BITS) }
            }
        }
    }

    fn drive(&self, take: &mut dyn FnMut(Arrival<'_>)) -> bool {
        let Some(mut completions) = self.completions.try_lock() else { return false };
        if !completions.open {
            return false;
        }
        // Relaxed: only shows that the link was driven, and only the driving thread changes it.
        self.driven.store(self.driven.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        let mut moved = false;
        for _ in 0..BATCHES_MAX {
            // SAFETY: open, and locked.
            let count = unsafe { self.raw.completions(&mut completions.batch) };
            if count == 0 {
                // Events of the connection as a whole come after everything that arrived on it.
                return self.take_pending(take) || moved;
            }
            moved = true;
            for completion in &completions.batch[..count] {
                if let Err(why) = self.take_completion(completion, take) {
                    take(Arrival::Ended(why));
                    return true;
                }
            }
            // Checking again costs system calls, and the driving thread first handles what it has.
            if count < BATCH {
                return true;
            }
        }
        moved
    }

    fn arm(&self) -> bool {
        let Some(mut completions) = self.completions.try_lock() else { return false };
        match self.quiet(&completions) {
            Quiet::Closed => true,
            Quiet::Not => false,
            Quiet::Until(descriptors, count) => {
                self.running.watch(self.id, &descriptors[..count], &mut completions.set);
                true
            }
        }
    }

    fn sleep(&self, host: &dyn Host, seen: u32, until: Option<Time>) -> Option<Waited> {
        let Some(_sleeper) = self.sleeper.try_lock() else {
            // The other one drives the link and notifies the counter.
            return Some(self.counter.wait(host, seen, until));
        };
        let quiet = self.quiet(&*self.completions.try_lock()?);
        match quiet {
            Quiet::Closed => Some(self.counter.wait(host, seen, until)),
            Quiet::Not => None,
            Quiet::Until(mut descriptors, count) => {
                descriptors[count] =
                    libc::pollfd { fd: self.bell.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                Some(self.sleep_on(&mut descriptors[..=count], host, seen, until))
            }
        }
    }

    fn notify(&self, host: &dyn Host) {
        self.counter.notify(host);
        // SeqCst: pairs with the store in `sleep_on`.
        if self.asleep.load(Ordering::SeqCst) != 0 {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight bytes of ours are read. A counter that is full wakes too.
            unsafe { libc::write(self.bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    fn next_due(&self) -> Option<Time> {
        None
    }

    fn grant(
        &self,
        region: &Region,
        range: Range<u64>,
        rights: Rights,
    ) -> Result<(WireRegion, Box<dyn Any + Send + Sync>), Error> {
        let view = View::of(region, true)?;
        let start = usize::try_from(range.start).map_err(|_| Error::Range)?;
        let end = usize::try_from(range.end).map_err(|_| Error::Range)?;
        let address = view.at(start, end - start) as u64;
        let wanted_key = self.running.host().random();
        let registered = Registered::new(self.running.domain(), view, start..end, Some(rights), wanted_key)?;
        let base = if self.running.facts().virtual_addresses != 0 { address } else { 0 };
        let granted = WireRegion {
            key: U64::new(registered.key),
            base: U64::new(base),
            bytes: U64::new(range.end - range.start),
        };
        Ok((granted, Box::new(registered)))
    }

    fn close(&self) {
        let mut completions = self.completions.lock();
        let mut posting = self.posting.lock();
        if !std::mem::replace(&mut completions.open, false) {
            return;
        }
        posting.open = false;
        self.running.watch(self.id, &[], &mut completions.set);
        self.running.remove_link(self.id, self.name());
        // SAFETY: both halves are locked and marked closed, so no thread uses either now or later.
        unsafe { self.raw.close() };
    }
}

impl Drop for FabricLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// Registers memory for operations of this side.
pub(super) fn register(domain: &Arc<Domain>, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
    let view = View::of(region, true).or_else(|_| View::of(region, false))?;
    let bytes = usize::try_from(region.bytes()).map_err(|_| Error::Range)?;
    Ok(Box::new(Registered::new(domain, view, 0..bytes, None, 0)?))
}
