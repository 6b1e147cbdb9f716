//! A connection to one peer, independent of the provider: messages, one-sided operations, completions, and the end.
//!
//! **Order.** Within a connection, the operations of one side take effect at the peer in the order of posting. The
//! peer takes a message or an immediate only after every byte written before it is in place. Between connections
//! there is no order.
//!
//! **Completion.** [`Connection::wait`] returns when the memory of an operation is free again (a write) or filled (a
//! read). It does not mean that a write has arrived, that the peer has seen it, or that it is durable; only a message
//! of the peer can say that.
//!
//! **Back-pressure.** A side has at most `depth` operations in progress, and at most the peer's `window` of messages
//! and immediates that the peer's user has not taken. Posting waits above these limits, so no queue grows without a
//! bound.
//!
//! **End.** [`Connection::close`] returns after the peer has lost its access to memory of this side (the fence). A
//! connection that ends by itself is fenced before its end is reported: `ending` holds the reason until then, and
//! `ended` is set after the fence. [`Connection::take`] reports the end once; all other calls then fail with its
//! reason.
//!
//! Locks: `fencing`, then the link's lock for driving, then `state`, then the link's locks for posting and for
//! pending events. None is held across a wait.

use crate::error::{Ended, Error};
use crate::handshake::Agreed;
use crate::link::{Arrival, Driver, Immediate, Link, Operation, Waiter};
use crate::memory::{Bytes, INLINE_BYTES_MAX, Local, Rights, check_range};
use crate::settings::Settings;
use format::wire::{FrameHead, FrameKind, WireRegion};
use format::{Epoch, NodeId};
use ipc::sync::Ordering;
use ipc::{Guard, Host, Lock, Spin, Time, WAKE_ALL, Waited, Word};
use pmem::Region;
use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

mod user;

/// An arrival from the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message.
    Message(Vec<u8>),
    /// The immediate of a write whose bytes are in place.
    Immediate(u32),
    /// The connection has ended. Reported once, after everything that arrived before.
    Ended(Ended),
}

/// The operations and bytes that a side has handed to the provider on a connection, pings and counts included: the cost that
/// tests assert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames, writes and reads.
    pub operations: u64,
    /// Bytes of the frames, heads included, and of the writes.
    pub bytes: u64,
}

/// An operation in progress. Tickets are ordered by posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A connection to one peer. Clones refer to the same connection, which is closed when the last one is dropped.
#[derive(Clone)]
pub struct Connection(Arc<ConnectionCore>);

pub(crate) struct ConnectionCore {
    host: Arc<dyn Host>,
    link: Arc<dyn Link>,
    /// Id of the endpoint whose registered memory may be used here.
    endpoint: u64,
    /// The result of the handshake.
    peer: Agreed,
    settings: Settings,
    spin: Spin,
    /// Held by the thread that executes the fence; a second thread waits for the fence here.
    fencing: Lock<()>,
    state: Lock<ConnectionState>,
    /// 1 after the fence. Outlives the connection.
    fenced: Arc<Word>,
}

struct ConnectionState {
    up: bool,
    /// The reason of the end; the fence may not have been executed yet.
    ending: Option<Ended>,
    /// The reason of the end, after the fence.
    ended: Option<Ended>,
    /// The goodbye was posted, so a following end by the peer is its answer.
    leaving: bool,
    end_told: bool,
    /// The refusal of the peer, if it did not accept the connection.
    refusal: Option<Vec<u8>>,
    inbox: VecDeque<Event>,
    /// Number of operations posted, number of operations up to which all are done, and the operations in between.
    issued: u64,
    done: u64,
    under_way: VecDeque<UnderWay>,
    /// Messages and immediates in the sending direction, modulo 2^32: sent, and taken by the peer.
    sent: u32,
    taken_there: u32,
    /// In the other direction: arrived, taken by the user, and the count that the peer was told.
    arrived: u32,
    taken: u32,
    told: u32,
    due: DueFrames,
    heard: Time,
    /// The time of a ping that has no answer yet.
    pinged: Option<Time>,
    grants: Vec<Box<dyn Any + Send + Sync>>,
    traffic: Traffic,
}

/// From this many operations in progress on, a posting thread handles completions itself. Otherwise every completion
/// would wake the progress thread.
const LOOK_AT: u64 = 16;

struct UnderWay {
    done: bool,
    /// Keeps the registered memory alive.
    _held: Option<Local>,
}

/// Frames to be sent as soon as the queue has space.
#[derive(Clone, Copy, Debug, Default)]
struct DueFrames {
    taken: bool,
    ping: bool,
    pong: bool,
}

impl ConnectionCore {
    /// Creates a connection to `peer` over a link that is about to come up.
    pub fn new(
        host: Arc<dyn Host>,
        link: Arc<dyn Link>,
        endpoint: u64,
        peer: Agreed,
        settings: &Settings,
    ) -> Arc<Self> {
        let state = ConnectionState {
            up: false,
            ending: None,
            ended: None,
            leaving: false,
            end_told: false,
            refusal: None,
            inbox: VecDeque::new(),
            issued: 0,
            done: 0,
            under_way: VecDeque::new(),
            sent: 0,
            taken_there: 0,
            arrived: 0,
            taken: 0,
            told: 0,
            due: DueFrames::default(),
            heard: host.now(),
            pinged: None,
            grants: Vec::new(),
            traffic: Traffic::default(),
        };
        let core = Arc::new(Self {
            spin: Spin::by_calls(settings.spin_ns),
            fencing: Lock::new(host.clone(), ()),
            state: Lock::new(host.clone(), state),
            fenced: Arc::new(Word::new(0)),
            settings: settings.clone(),
            host,
            link,
            endpoint,
            peer,
        });
        let driver: Arc<dyn Driver> = core.clone();
        core.link.attach(Arc::downgrade(&driver));
        core
    }

    pub fn ended(&self) -> Option<Ended> {
        self.state.lock().ended
    }

    /// A word that becomes 1, with a wake, after the fence; also when the connection is dropped.
    pub fn fenced(&self) -> &Arc<Word> {
        &self.fenced
    }

    pub fn peer(&self) -> Agreed {
        self.peer
    }

    pub fn is_up(&self) -> bool {
        self.state.lock().up
    }

    pub fn refusal(&self) -> Option<Vec<u8>> {
        self.state.lock().refusal.take()
    }

    /// Waits until `ready` returns a result: checks it, polls for a bounded time, then sleeps. If the result is there
    /// at once, the call does not enter the provider.
    pub fn wait_for<T>(
        &self,
        until: Option<Time>,
        mut ready: impl FnMut(&Self) -> Option<Result<T, Error>>,
    ) -> Result<T, Error> {
        let counter = self.link.counter();
        let mut over = false;
        // Since when this thread sleeps.
        let mut slept = None;
        let mut waiter = None;
        // Whether something came that was not the result.
        let mut has_taken = false;
        loop {
            let seen = counter.value();
            if let Some(result) = ready(self) {
                slept.inspect(|begin| self.spin.learn(self.host.now().since(*begin)));
                return result;
            }
            if over {
                return Err(Error::TimedOut);
            }
            let now = self.host.now();
            if until.is_some_and(|until| now >= until) {
                // Checks once more, with what has arrived: a caller whose deadline is over does not poll.
                self.drive();
                self.tick(now);
                over = true;
                continue;
            }
            if has_taken {
                // The peer's answer comes after what it is sent, and the peer may need this processor for it.
                self.host.yield_now();
            }
            waiter.get_or_insert_with(|| Waiter::new(&*self.link, &*self.host));
            // Another thread that drives the link notifies the counter.
            let moved = || self.drive() || counter.value() != seen;
            has_taken = self.spin.poll(&*self.host, moved);
            if has_taken {
                continue;
            }
            let now = self.host.now();
            self.tick(now);
            let wake = [until, self.link.next_due(), self.next_tick(now)].into_iter().flatten().min();
            match self.link.sleep(&*self.host, seen, wake) {
                Some(Waited::Woken | Waited::TimedOut) => _ = slept.get_or_insert(now),
                Some(Waited::Interrupted) => return Err(Error::Interrupted),
                None => {}
            }
        }
    }

    /// The connection is up and has a user: its events wake no thread that waits for another connection.
    pub fn leave_listener(&self) {
        self.link.counter().detach();
    }

    /// See [`Link::arm`].
    pub fn arm(&self) -> bool {
        self.link.arm()
    }

    /// See [`Link::next_due`].
    pub fn next_due(&self) -> Option<Time> {
        self.link.next_due()
    }

    /// The time after a span, on the clock of this host.
    pub fn deadline(&self, span: std::time::Duration) -> Time {
        self.host.now().after(span)
    }

    /// Ends the connection, if it has not ended. After the return no byte of the peer reaches memory of this side
    /// through it.
    pub fn end(&self, why: Ended) {
        self.state.lock().ending.get_or_insert(why);
        self.fence();
    }

    /// Ends the peer's access, then reports the end, whose reason is already in `ending`.
    fn fence(&self) {
        let fencing = self.fencing.lock();
        self.link.close();
        // After the close, the memory that the peer could reach is no longer in use.
        let grants = std::mem::take(&mut self.state.lock().grants);
        drop(grants);
        let mut state = self.state.lock();
        state.ended = state.ending;
        drop(state);
        self.mark_fenced();
        drop(fencing);
        self.link.notify(&*self.host);
    }

    /// Marks the fence as executed, and wakes the threads that wait for it.
    fn mark_fenced(&self) {
        // Release: pairs with the Acquire loads in `endpoint`.
        self.fenced.store(1, Ordering::Release);
        self.host.wake(&self.fenced, WAKE_ALL);
    }

    /// Sends a goodbye, if the connection is up.
    fn send_goodbye(&self) {
        let ticket = {
            let mut state = self.state.lock();
            if state.ending.is_some() || !state.up {
                return;
            }
            state.leaving = true;
            self.post_frame(&mut state, FrameKind::Goodbye, &[])
        };
        if let Ok(Some(ticket)) = ticket {
            let until = self.deadline(self.settings.goodbye);
            // The result does not matter, because the connection is closed next.
            let _ = self.wait_for(Some(until), |core| {
                let state = core.state.lock();
                (state.done >= ticket.0 || state.ending.is_some()).then_some(Ok(()))
            });
        }
    }

    /// Posts one frame if the queue has space. The caller counts frames of the user.
    fn post_frame(
        &self,
        state: &mut ConnectionState,
        kind: FrameKind,
        body: &[u8],
    ) -> Result<Option<Ticket>, Error> {
        let head = FrameHead::new(kind, state.taken);
        self.post(state, &Operation::Frame(head.as_bytes(), body), None)
    }

    /// Posts one write if the queue has space. The caller counts immediates.
    fn post_write(
        &self,
        state: &mut ConnectionState,
        from: &Bytes<'_>,
        to: WireRegion,
        immediate: Option<u32>,
    ) -> Result<Option<Ticket>, Error> {
        let taken = self.link.counts_along().then_some(state.taken);
        let immediate = immediate.map(|value| Immediate { value, taken });
        let held = match from {
            Bytes::Inline(_) => None,
            Bytes::Registered(local, _) => Some(*local),
        };
        self.post(state, &Operation::Write { from: from.clone(), to, immediate }, held)
    }

    fn post(
        &self,
        state: &mut ConnectionState,
        work: &Operation<'_>,
        held: Option<&Local>,
    ) -> Result<Option<Ticket>, Error> {
        if let Some(why) = state.ending {
            return Err(Error::Ended(why));
        }
        let number = state.issued + 1;
        // The link may complete the operation at once, but reports it only when driven, after the number is stored.
        if !self.link.post(number, work)? {
            return Ok(None);
        }
        state.issued = number;
        state.traffic.operations += 1;
        state.traffic.bytes += work.bytes();
        state.under_way.push_back(UnderWay { done: false, _held: held.cloned() });
        if work.has_count() {
            state.told = state.taken;
            state.due.taken = false;
        }
        Ok(Some(Ticket(number)))
    }

    /// Sends the frames that are due, as far as the queue has space.
    fn send_due(&self, state: &mut ConnectionState) {
        let due = state.due;
        if due.pong {
            state.due.pong = !matches!(self.post_frame(state, FrameKind::Pong, &[]), Ok(Some(_)));
        }
        if due.ping {
            state.due.ping = !matches!(self.post_frame(state, FrameKind::Ping, &[]), Ok(Some(_)));
        }
        // A ping or pong has already carried the count.
        if state.due.taken {
            state.due.taken = !matches!(self.post_frame(state, FrameKind::Taken, &[]), Ok(Some(_)));
        }
    }

    fn arrived(&self, state: &mut ConnectionState, arrival: Arrival<'_>) {
        match arrival {
            Arrival::Up => state.up = true,
            Arrival::Refused(said) => {
                state.refusal = Some(said.to_vec());
                state.over(Ended::Lost);
            }
            Arrival::Done(number) => state.finish(number),
            Arrival::Immediate(it) => {
                if it.taken.is_none_or(|taken| state.process_count(taken)) {
                    self.keep(state, Event::Immediate(it.value));
                }
            }
            Arrival::Ended(why) => state.over(why),
            Arrival::Frame(frame) => match FrameHead::decode(frame) {
                Ok((kind, taken, body)) => self.frame(state, kind, taken, body),
                Err(_) => state.broke("a frame that is none"),
            },
        }
    }

    fn frame(&self, state: &mut ConnectionState, kind: FrameKind, taken: u32, body: &[u8]) {
        if !state.process_count(taken) {
            return;
        }
        match kind {
            FrameKind::Message => self.keep(state, Event::Message(body.to_vec())),
            FrameKind::Taken | FrameKind::Pong => {}
            FrameKind::Ping => state.due.pong = true,
            FrameKind::Goodbye => state.over(Ended::ClosedThere),
        }
    }

    fn keep(&self, state: &mut ConnectionState, event: Event) {
        state.arrived = state.arrived.wrapping_add(1);
        if state.arrived.wrapping_sub(state.taken) > self.settings.window {
            return state.broke("more than its window");
        }
        state.inbox.push_back(event);
    }

    fn next_tick(&self, now: Time) -> Option<Time> {
        Some(now.after(self.settings.silence? / 2))
    }

    /// Waits for space and posts an operation. `counted`: the operation takes a slot of the peer's window.
    fn submit(
        &self,
        until: Option<Time>,
        counted: bool,
        mut begin: impl FnMut(&Self, &mut ConnectionState) -> Result<Option<Ticket>, Error>,
    ) -> Result<Ticket, Error> {
        self.wait_for(until, |core| {
            let mut state = core.state.lock();
            if let Some(why) = state.ended {
                return Some(Err(Error::Ended(why)));
            }
            if state.ending.is_some() {
                return None;
            }
            if counted && state.sent.wrapping_sub(state.taken_there) >= core.peer.window.window {
                // The peer may be waiting for the same reason. Both sides send their counts, so at least one of them
                // continues.
                state.due.taken = state.taken != state.told;
                core.send_due(&mut state);
                return None;
            }
            if state.issued - state.done >= u64::from(core.settings.depth) {
                return None;
            }
            match begin(core, &mut state) {
                Ok(Some(ticket)) => {
                    state.sent = state.sent.wrapping_add(u32::from(counted));
                    let under_way = state.issued - state.done;
                    drop(state);
                    if under_way >= LOOK_AT {
                        core.drive();
                    }
                    Some(Ok(ticket))
                }
                Ok(None) => None,
                Err(error) => Some(Err(error)),
            }
        })
    }
}

impl ConnectionState {
    /// Ends the connection because of an arrival.
    fn over(&mut self, why: Ended) {
        let why = if self.leaving { Ended::ClosedHere } else { why };
        self.ending.get_or_insert(why);
    }

    /// Processes the peer's count of taken messages; false, and a protocol violation, if the count is impossible.
    fn process_count(&mut self, taken: u32) -> bool {
        let is_possible = self.sent.wrapping_sub(taken) <= self.sent.wrapping_sub(self.taken_there);
        if is_possible {
            self.taken_there = taken;
        } else {
            self.broke("took more than was sent");
        }
        is_possible
    }

    fn broke(&mut self, what: &'static str) {
        self.ending.get_or_insert(Ended::Broke(what));
    }

    fn finish(&mut self, number: u64) {
        let place = number.checked_sub(self.done + 1).and_then(|index| usize::try_from(index).ok());
        let under_way = place.and_then(|index| self.under_way.get_mut(index));
        under_way.expect("a link is done with what it was given, once").done = true;
        while self.under_way.front().is_some_and(|first| first.done) {
            self.under_way.pop_front();
            self.done += 1;
        }
    }
}

impl Driver for ConnectionCore {
    fn drive(&self) -> bool {
        // Takes the lock only if there are events, and once for all of them.
        let mut locked = None;
        let mut signs = false;
        let moved = self.link.drive(&mut |arrival| {
            // Only arrivals show that the peer lives, not completions of this side.
            signs |= matches!(arrival, Arrival::Frame(_) | Arrival::Immediate(_));
            self.arrived(locked.get_or_insert_with(|| self.state.lock()), arrival);
        });
        if !moved {
            return false;
        }
        let mut state = locked.unwrap_or_else(|| self.state.lock());
        if signs {
            // A frame may arrive before the event that the link is up.
            state.up = true;
            state.heard = self.host.now();
            state.pinged = None;
        }
        if state.ending.is_none() {
            self.send_due(&mut state);
        }
        let ending = state.ending.is_some();
        drop(state);
        if ending {
            self.fence();
        } else {
            self.link.notify(&*self.host);
        }
        true
    }

    fn tick(&self, now: Time) {
        let Some(silence) = self.settings.silence else { return };
        let mut state = self.state.lock();
        if !state.up || state.ending.is_some() {
            return;
        }
        let silent = now.since(state.heard);
        match state.pinged {
            // The peer has half of the time to answer, also after a pause of this machine.
            Some(at) if silent >= silence && now.since(at) >= silence / 2 => {
                state.ending = Some(Ended::Silent);
                drop(state);
                return self.fence();
            }
            None if silent >= silence / 2 => {
                state.pinged = Some(now);
                state.due.ping = true;
            }
            _ => {}
        }
        self.send_due(&mut state);
    }
}

impl Drop for ConnectionCore {
    /// Frees the resources of the connection without sending a goodbye.
    fn drop(&mut self) {
        self.link.close();
        let grants = std::mem::take(&mut self.state.lock().grants);
        drop(grants);
        self.mark_fenced();
    }
}
