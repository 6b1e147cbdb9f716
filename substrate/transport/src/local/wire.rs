//! The wire between the two sides of an in-process connection: data in flight, posted receives, granted memory. All
//! changes happen under its lock, and each direction keeps the order of posting.

use super::{BROKEN, Inner, LocalLink, LocalListener};
use crate::error::{Ended, Error};
use crate::link::{Arrival, Immediate, LinkShape};
use crate::memory::Rights;
use format::wire::{FrameHead, FrameKind, WireRegion};
use ipc::{EventCounter, Host, Lock, Time};
use pmem::Region;
use std::collections::VecDeque;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Data in flight to one side.
pub(super) enum Flight {
    WireRequest {
        said: Vec<u8>,
        listener: Arc<LocalListener>,
        link: Arc<LocalLink>,
    },
    Up,
    Refused(Vec<u8>),
    /// A frame, with a number if the sender wants a completion.
    Frame {
        number: Option<u64>,
        frame: Vec<u8>,
    },
    Write {
        number: u64,
        data: Vec<u8>,
        to: WireRegion,
        immediate: Option<u32>,
    },
    Read {
        number: u64,
        into: Region,
        at: u64,
        from: WireRegion,
    },
    Answer {
        number: u64,
        into: Region,
        at: u64,
        data: Vec<u8>,
    },
    Ended(Ended),
}

/// An event that a side can take.
pub(super) enum Delivered {
    Up,
    Refused(Vec<u8>),
    Done(u64),
    Frame(Vec<u8>),
    Immediate(u32),
    Ended(Ended),
}

impl Delivered {
    pub fn lend(&self) -> Arrival<'_> {
        match self {
            Self::Up => Arrival::Up,
            Self::Refused(said) => Arrival::Refused(said),
            Self::Done(number) => Arrival::Done(*number),
            Self::Frame(frame) => Arrival::Frame(frame),
            Self::Immediate(value) => Arrival::Immediate(Immediate { value: *value, taken: None }),
            Self::Ended(why) => Arrival::Ended(*why),
        }
    }

    /// Number of receives that the event uses up.
    pub fn receives(&self) -> u32 {
        u32::from(matches!(self, Self::Frame(_) | Self::Immediate(_)))
    }
}

struct GrantedRegion {
    remote: WireRegion,
    region: Region,
    at: u64,
    rights: Rights,
}

struct Side {
    open: bool,
    shape: LinkShape,
    /// In flight to this side, with the time of arrival.
    flights: VecDeque<(Time, Flight)>,
    /// Delivered, and not yet taken.
    arrived: VecDeque<Delivered>,
    /// Number of posted receives that are not used up.
    receives: u32,
    granted: Vec<GrantedRegion>,
    /// The count of taken messages in the last frame of this side.
    taken: u32,
}

struct WireState {
    sides: [Side; 2],
    /// Sides with new events whose counter was not notified yet.
    counter: [bool; 2],
}

pub(super) struct Wire {
    pub host: Arc<dyn Host>,
    network: Arc<Inner>,
    names: [String; 2],
    pub counter: [Arc<EventCounter>; 2],
    state: Lock<WireState>,
}

impl Wire {
    pub fn new(
        host: Arc<dyn Host>,
        network: Arc<Inner>,
        names: [String; 2],
        counter: [Arc<EventCounter>; 2],
        shapes: [LinkShape; 2],
    ) -> Arc<Self> {
        let side = |shape: LinkShape| Side {
            open: true,
            shape,
            flights: VecDeque::new(),
            arrived: VecDeque::new(),
            receives: shape.receives,
            granted: Vec::new(),
            taken: 0,
        };
        let state = WireState { sides: shapes.map(side), counter: [false; 2] };
        Arc::new(Self { state: Lock::new(host.clone(), state), host, network, names, counter })
    }

    pub fn joins(&self, one: &str, other: &str) -> bool {
        let [first, second] = &self.names;
        (first == one && second == other) || (first == other && second == one)
    }

    /// Sends data from a side to the other one.
    pub fn send(&self, from: usize, flight: Flight) {
        self.with(|wire, state| wire.put(state, from, flight));
    }

    /// Delivers everything that is due.
    pub fn advance(&self) {
        self.with(|_, _| {});
    }

    /// Executes a change, delivers everything that is due, and notifies the sides that received an event.
    fn with<R>(&self, change: impl FnOnce(&Self, &mut WireState) -> R) -> R {
        let (result, counter) = {
            let mut state = self.state.lock();
            let result = change(self, &mut state);
            self.deliver(&mut state);
            (result, std::mem::take(&mut state.counter))
        };
        for (side, told) in counter.into_iter().enumerate() {
            if told {
                self.counter[side].notify(&*self.host);
            }
        }
        result
    }

    fn put(&self, state: &mut WireState, from: usize, flight: Flight) {
        let to = 1 - from;
        if let Flight::Frame { frame, .. } = &flight
            && let Ok((_, taken, _)) = FrameHead::decode(frame)
        {
            state.sides[from].taken = taken;
        }
        let due = self.network.due(&self.names[from], &self.names[to]);
        let flights = &mut state.sides[to].flights;
        // Never earlier than the data sent before it.
        let due = flights.back().map_or(due, |(before, _)| due.max(*before));
        flights.push_back((due, flight));
        // A waiter may have computed its deadline before this.
        state.counter[to] = true;
    }

    /// Checks that a side's frame is not longer than those that it accepts, as if it went through one of its own
    /// buffers.
    pub fn check_frame(&self, side: usize, bytes: usize) -> Result<(), Error> {
        let limit = self.state.lock().sides[side].shape.frame_bytes;
        if bytes > limit {
            return Err(Error::TooLarge { bytes: bytes as u64, limit: limit as u64 });
        }
        Ok(())
    }

    pub fn arrivals(&self, side: usize) -> Vec<Delivered> {
        self.state.lock().sides[side].arrived.drain(..).collect()
    }

    pub fn repost(&self, side: usize, receives: u32) {
        if receives > 0 {
            self.with(|_, state| state.sides[side].receives += receives);
        }
    }

    pub fn next_due(&self) -> Option<Time> {
        let state = self.state.lock();
        let front = |to: usize| {
            let (due, _) = state.sides[to].flights.front()?;
            let way = self.network.way(&self.names[1 - to], &self.names[to]);
            (!way.cut).then_some(*due)
        };
        let now = self.host.now();
        // Data that is due and still in flight waits for a receive, not for the clock.
        (0..2).filter_map(front).filter(|due| *due > now).min()
    }

    pub fn grant(
        &self,
        side: usize,
        remote: WireRegion,
        region: Region,
        at: u64,
        rights: Rights,
    ) -> Result<(), Error> {
        let mut state = self.state.lock();
        if !state.sides[side].open {
            return Err(Error::Ended(BROKEN));
        }
        state.sides[side].granted.push(GrantedRegion { remote, region, at, rights });
        Ok(())
    }

    /// Closes a side: nothing is delivered to it any more.
    pub fn close(&self, side: usize) {
        let gone = self.with(|wire, state| {
            if !std::mem::replace(&mut state.sides[side].open, false) {
                return None;
            }
            wire.put(state, side, Flight::Ended(BROKEN));
            let own = &mut state.sides[side];
            own.arrived.clear();
            own.granted.clear();
            Some(std::mem::take(&mut own.flights))
        });
        // Dropped outside the lock: a connection request in flight holds a link of this wire.
        drop(gone);
    }

    /// Ends both sides now.
    pub fn break_now(&self) {
        let gone = self.with(|_, state| {
            let mut gone = Vec::new();
            for side in 0..2 {
                gone.push(std::mem::take(&mut state.sides[side].flights));
                state.end(side, BROKEN);
            }
            gone
        });
        drop(gone);
    }

    fn deliver(&self, state: &mut WireState) {
        let now = self.host.now();
        loop {
            let mut moved = false;
            for to in 0..2 {
                while state.sides[to].flights.front().is_some_and(|(due, _)| *due <= now) {
                    if self.network.way(&self.names[1 - to], &self.names[to]).cut || !state.has_receive(to) {
                        break;
                    }
                    let (_, flight) = state.sides[to].flights.pop_front().expect("looked at above");
                    self.land(state, to, flight);
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn land(&self, state: &mut WireState, to: usize, flight: Flight) {
        let from = 1 - to;
        if !state.sides[to].open {
            return;
        }
        match flight {
            Flight::WireRequest { said, listener, link } => {
                let answer = match listener.request(&said, link) {
                    Ok(()) => {
                        state.give(to, Delivered::Up);
                        Flight::Up
                    }
                    Err(refusal) => Flight::Refused(refusal),
                };
                self.put(state, to, answer);
            }
            Flight::Up => state.give(to, Delivered::Up),
            Flight::Refused(said) => state.give(to, Delivered::Refused(said)),
            Flight::Frame { number, frame } => {
                if let Some(number) = number {
                    state.give(from, Delivered::Done(number));
                }
                if frame.len() > state.sides[to].shape.frame_bytes {
                    return state.end_both(from, Ended::Forbidden);
                }
                if let Ok((FrameKind::Ping, ..)) = FrameHead::decode(&frame) {
                    // Answers at once, as a progress thread would, whatever the peer's other threads do.
                    let pong = FrameHead::new(FrameKind::Pong, state.sides[to].taken);
                    let pong = Flight::Frame { number: None, frame: pong.as_bytes().to_vec() };
                    return self.put(state, to, pong);
                }
                state.sides[to].receives -= 1;
                state.give(to, Delivered::Frame(frame));
            }
            Flight::Write { number, data, to: remote, immediate } => {
                let Some((region, at)) = state.allowed(to, &remote, Rights::may_write) else {
                    return state.end_both(from, Ended::Forbidden);
                };
                region.store(at, &data);
                state.give(from, Delivered::Done(number));
                if let Some(value) = immediate {
                    state.sides[to].receives -= 1;
                    state.give(to, Delivered::Immediate(value));
                }
            }
            Flight::Read { number, into, at, from: remote } => {
                let Some((region, start)) = state.allowed(to, &remote, Rights::may_read) else {
                    return state.end_both(from, Ended::Forbidden);
                };
                let bytes = usize::try_from(remote.bytes.get()).expect("a granted range fits memory");
                let mut data = vec![0; bytes];
                if region.read(start, &mut data).is_err() {
                    return state.end_both(from, BROKEN);
                }
                self.put(state, to, Flight::Answer { number, into, at, data });
            }
            Flight::Answer { number, into, at, data } => {
                into.store(at, &data);
                state.give(to, Delivered::Done(number));
            }
            Flight::Ended(why) => state.give(to, Delivered::Ended(why)),
        }
    }
}

impl WireState {
    fn give(&mut self, to: usize, arrived: Delivered) {
        if self.sides[to].open {
            self.sides[to].arrived.push_back(arrived);
            self.counter[to] = true;
        }
    }

    /// True if the next data to a side needs no receive, or a receive is posted.
    fn has_receive(&self, to: usize) -> bool {
        let side = &self.sides[to];
        let needs = matches!(
            side.flights.front(),
            Some((_, Flight::Frame { .. } | Flight::Write { immediate: Some(_), .. }))
        );
        !needs || side.receives > 0 || !side.open
    }

    /// The memory that a remote range names, if `side` has granted it with this right.
    fn allowed(&self, side: usize, range: &WireRegion, may: fn(Rights) -> bool) -> Option<(Region, u64)> {
        let granted = self.sides[side].granted.iter().find(|g| g.remote.key == range.key)?;
        let offset = range.base.get().checked_sub(granted.remote.base.get())?;
        let end = offset.checked_add(range.bytes.get())?;
        (may(granted.rights) && end <= granted.remote.bytes.get())
            .then(|| (granted.region.clone(), granted.at + offset))
    }

    fn end(&mut self, side: usize, why: Ended) {
        self.sides[side].granted.clear();
        self.give(side, Delivered::Ended(why));
    }

    /// Ends the connection on both sides because of an error of one side.
    fn end_both(&mut self, culprit: usize, why: Ended) {
        self.end(culprit, why);
        self.end(1 - culprit, BROKEN);
    }
}
