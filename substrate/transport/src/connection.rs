//! A connection to one peer, whatever provider carries it: messages, one-sided operations, their completions, what
//! arrives, and its end.
//!
//! **Order.** Within a connection, what one side posts takes effect at the other in the order of posting; a message or
//! immediate is taken after every byte written before it is in place. Between connections there is no order.
//!
//! **Completion.** [`Connection::wait`] says that the memory given to an operation is free again (a write) or filled
//! (a read). It does not say that a write has arrived, that the peer has seen it, or that it survives anything: that
//! is only known when the peer says so.
//!
//! **Back-pressure.** A side has at most `depth` operations under way, and at most the peer's `window` of messages and
//! immediates not taken by the peer's user; beyond, posting waits. Nothing queues without a bound on either side.
//!
//! **End.** [`Connection::close`] returns after the peer's right to write has ended. When the connection ends by itself
//! the same is done before anybody hears of it: that it is ending (`ending`) is known inside only, and what is told
//! (`ended`) is set when the fence stands. The end is reported once by [`Connection::take`]; every other call fails with
//! its reason from then on.
//!
//! Locks: `fencing`, then the link's own for driving, then `state`, then the link's own for posting and for what is pending. None is
//! held across a wait.

use crate::error::{Ended, Error};
use crate::handshake::Agreed;
use crate::link::{Arrival, Driver, Immediate, Link, Work};
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

/// What arrived from the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message.
    Message(Vec<u8>),
    /// The immediate of a write whose bytes are in place.
    Immediate(u32),
    /// The connection is over. Reported once, after everything that arrived before.
    Ended(Ended),
}

/// An operation under way. Tickets are in the order of posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A connection to one peer. Clones are the same connection; it is closed when the last one is dropped.
#[derive(Clone)]
pub struct Connection(Arc<Core>);

pub(crate) struct Core {
    host: Arc<dyn Host>,
    link: Arc<dyn Link>,
    /// The endpoint whose registered memory may be used here.
    endpoint: u64,
    /// What the handshake came to.
    peer: Agreed,
    settings: Settings,
    spin: Spin,
    /// Held by who takes the peer's rights away: another one waits until they are gone.
    fencing: Lock<()>,
    state: Lock<State>,
    /// 1 when the peer's rights are gone; outlives the connection.
    fenced: Arc<Word>,
}

struct State {
    up: bool,
    /// It is over, and the fence may not stand yet.
    ending: Option<Ended>,
    /// It is over, and may be told.
    ended: Option<Ended>,
    /// The goodbye was posted: what the peer does then is an answer to it.
    leaving: bool,
    end_told: bool,
    /// What the other side said instead of connecting.
    refusal: Option<Vec<u8>>,
    inbox: VecDeque<Event>,
    /// Operations: posted, done up to, and those between.
    issued: u64,
    done: u64,
    under_way: VecDeque<UnderWay>,
    /// Messages and immediates, counted modulo 2^32: sent, taken by the peer.
    sent: u32,
    taken_there: u32,
    /// The other direction: arrived, taken, taken as the peer knows.
    arrived: u32,
    taken: u32,
    told: u32,
    owes: Owes,
    heard: Time,
    /// When it was asked for a sign of life.
    pinged: Option<Time>,
    grants: Vec<Box<dyn Any + Send + Sync>>,
}

/// With so many operations under way, whoever posts looks for those that are done: else another thread would be woken
/// for each.
const LOOK_AT: u64 = 16;

struct UnderWay {
    done: bool,
    /// Keeps registered memory alive.
    _held: Option<Local>,
}

/// Frames to be sent as soon as there is room.
#[derive(Clone, Copy, Debug, Default)]
struct Owes {
    taken: bool,
    ping: bool,
    pong: bool,
}

impl Core {
    /// A connection to `peer` over a link that is about to come up.
    pub fn new(
        host: Arc<dyn Host>,
        link: Arc<dyn Link>,
        endpoint: u64,
        peer: Agreed,
        settings: &Settings,
    ) -> Arc<Self> {
        let state = State {
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
            owes: Owes::default(),
            heard: host.now(),
            pinged: None,
            grants: Vec::new(),
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

    /// 1 when the peer's rights are gone, and woken then; also when the connection is dropped.
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

    /// Waits until `ready` gives something: looks, polls for a bounded time, then sleeps. Who finds it at once makes no
    /// call of the provider.
    pub fn wait_for<T>(
        &self,
        until: Option<Time>,
        mut ready: impl FnMut(&Self) -> Option<Result<T, Error>>,
    ) -> Result<T, Error> {
        let news = self.link.news();
        let mut over = false;
        loop {
            let seen = news.seen();
            if let Some(result) = ready(self) {
                return result;
            }
            if over {
                return Err(Error::TimedOut);
            }
            // What another thread drove is told.
            let moved = || self.drive() || news.seen() != seen;
            if self.spin.poll(&*self.host, moved) {
                continue;
            }
            let now = self.host.now();
            self.tick(now);
            if until.is_some_and(|until| now >= until) {
                // The answer may have come together with the end.
                over = true;
                continue;
            }
            if !self.link.arm() {
                continue;
            }
            let wake = [until, self.link.next_due(), self.next_tick(now)].into_iter().flatten().min();
            match news.sleep(&*self.host, seen, wake) {
                Waited::Woken | Waited::TimedOut => {}
                Waited::Interrupted => return Err(Error::Interrupted),
            }
        }
    }

    /// See [`Link::arm`].
    pub fn arm(&self) -> bool {
        self.link.arm()
    }

    /// See [`Link::next_due`].
    pub fn next_due(&self) -> Option<Time> {
        self.link.next_due()
    }

    /// A deadline within which the own host's clock may be used.
    pub fn deadline(&self, span: std::time::Duration) -> Time {
        self.host.now().after(span)
    }

    /// Ends the connection, if it has not ended: when this returns no byte of the peer reaches memory of this side
    /// through it any more.
    pub fn end(&self, why: Ended) {
        self.state.lock().ending.get_or_insert(why);
        self.fence();
    }

    /// Ends what the peer can do here, then tells that it is over. Somebody has said why.
    fn fence(&self) {
        let fencing = self.fencing.lock();
        self.link.close();
        // Only now may what the peer could reach be taken away.
        let grants = std::mem::take(&mut self.state.lock().grants);
        drop(grants);
        let mut state = self.state.lock();
        state.ended = state.ending;
        drop(state);
        self.stands();
        drop(fencing);
        self.link.news().tell(&*self.host);
    }

    /// The fence stands.
    fn stands(&self) {
        // Release: pairs with the Acquire of who waits for it.
        self.fenced.store(1, Ordering::Release);
        self.host.wake(&self.fenced, WAKE_ALL);
    }

    /// Says goodbye, if there is somebody to say it to.
    fn say_goodbye(&self) {
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
            // However this ends: the close follows.
            let _ = self.wait_for(Some(until), |core| {
                let state = core.state.lock();
                (state.done >= ticket.0 || state.ending.is_some()).then_some(Ok(()))
            });
        }
    }

    /// Posts one frame if there is room. Frames of the user are counted by the caller.
    fn post_frame(&self, state: &mut State, kind: FrameKind, body: &[u8]) -> Result<Option<Ticket>, Error> {
        let head = FrameHead::new(kind, state.taken);
        self.post(state, &Work::Frame(head.as_bytes(), body), None)
    }

    /// Posts one write if there is room. Immediates are counted by the caller.
    fn post_write(
        &self,
        state: &mut State,
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
        self.post(state, &Work::Write { from: from.clone(), to, immediate }, held)
    }

    fn post(
        &self,
        state: &mut State,
        work: &Work<'_>,
        held: Option<&Local>,
    ) -> Result<Option<Ticket>, Error> {
        if let Some(why) = state.ending {
            return Err(Error::Ended(why));
        }
        let number = state.issued + 1;
        // Numbered before it is posted: a link may be done with it at once, but says so only when driven.
        if !self.link.post(number, work)? {
            return Ok(None);
        }
        state.issued = number;
        state.under_way.push_back(UnderWay { done: false, _held: held.cloned() });
        if work.has_count() {
            state.told = state.taken;
            state.owes.taken = false;
        }
        Ok(Some(Ticket(number)))
    }

    /// Sends what is owed, as far as there is room.
    fn pay(&self, state: &mut State) {
        let owes = state.owes;
        if owes.pong {
            state.owes.pong = !matches!(self.post_frame(state, FrameKind::Pong, &[]), Ok(Some(_)));
        }
        if owes.ping {
            state.owes.ping = !matches!(self.post_frame(state, FrameKind::Ping, &[]), Ok(Some(_)));
        }
        // Either of the two has told it already.
        if state.owes.taken {
            state.owes.taken = !matches!(self.post_frame(state, FrameKind::Taken, &[]), Ok(Some(_)));
        }
    }

    fn arrived(&self, state: &mut State, arrival: Arrival<'_>) {
        match arrival {
            Arrival::Up => state.up = true,
            Arrival::Refused(said) => {
                state.refusal = Some(said.to_vec());
                state.over(Ended::Lost);
            }
            Arrival::Done(number) => state.finish(number),
            Arrival::Immediate(it) => {
                if it.taken.is_none_or(|taken| state.hear_count(taken)) {
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

    fn frame(&self, state: &mut State, kind: FrameKind, taken: u32, body: &[u8]) {
        if !state.hear_count(taken) {
            return;
        }
        match kind {
            FrameKind::Message => self.keep(state, Event::Message(body.to_vec())),
            FrameKind::Taken | FrameKind::Pong => {}
            FrameKind::Ping => state.owes.pong = true,
            FrameKind::Goodbye => state.over(Ended::ClosedThere),
        }
    }

    fn keep(&self, state: &mut State, event: Event) {
        state.arrived = state.arrived.wrapping_add(1);
        if state.arrived.wrapping_sub(state.taken) > self.settings.window {
            return state.broke("more than its window");
        }
        state.inbox.push_back(event);
    }

    fn next_tick(&self, now: Time) -> Option<Time> {
        Some(now.after(self.settings.silence? / 2))
    }

    /// Waits for room and posts. `counted`: it takes a place in the peer's window.
    fn submit(
        &self,
        until: Option<Time>,
        counted: bool,
        mut begin: impl FnMut(&Self, &mut State) -> Result<Option<Ticket>, Error>,
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
                // The peer may be waiting for the same: each tells what it has taken, and one of the two goes on.
                state.owes.taken = state.taken != state.told;
                core.pay(&mut state);
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

impl State {
    /// The connection is over by what arrived.
    fn over(&mut self, why: Ended) {
        let why = if self.leaving { Ended::ClosedHere } else { why };
        self.ending.get_or_insert(why);
    }

    /// What the peer has taken so far; false if that cannot be.
    fn hear_count(&mut self, taken: u32) -> bool {
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

impl Driver for Core {
    fn drive(&self) -> bool {
        // Who finds nothing disturbs nobody; who finds much locks once.
        let mut locked = None;
        let mut signs = false;
        let moved = self.link.drive(&mut |arrival| {
            // That a ping left is no sign of life.
            signs |= matches!(arrival, Arrival::Frame(_) | Arrival::Immediate(_));
            self.arrived(locked.get_or_insert_with(|| self.state.lock()), arrival);
        });
        if !moved {
            return false;
        }
        let mut state = locked.unwrap_or_else(|| self.state.lock());
        if signs {
            // What comes may come before it is told that the link is up.
            state.up = true;
            state.heard = self.host.now();
            state.pinged = None;
        }
        if state.ending.is_none() {
            self.pay(&mut state);
        }
        let ending = state.ending.is_some();
        drop(state);
        if ending {
            self.fence();
        } else {
            self.link.news().tell(&*self.host);
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
            // After a pause of this machine, too, it has half of the time to answer.
            Some(at) if silent >= silence && now.since(at) >= silence / 2 => {
                state.ending = Some(Ended::Silent);
                drop(state);
                return self.fence();
            }
            None if silent >= silence / 2 => {
                state.pinged = Some(now);
                state.owes.ping = true;
            }
            _ => {}
        }
        self.pay(&mut state);
    }
}

impl Drop for Core {
    /// Frees what the connection held. Nothing is said to the peer.
    fn drop(&mut self) {
        self.link.close();
        let grants = std::mem::take(&mut self.state.lock().grants);
        drop(grants);
        self.stands();
    }
}
