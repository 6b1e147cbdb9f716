//! Connections within one process, for tests and the simulator, that keep to the rules of verbs: remote memory by
//! exchanged key and base address, registered sources, a posted receive used up by each frame and each immediate,
//! nothing inline beyond 64 bytes, no remote atomics, order only within a connection. What a peer writes is a plain
//! store, volatile until the owner of the memory settles it.
//!
//! A [`Network`] can hold back one direction between two nodes, delay it, and break connections. Time passes by the
//! host's clock; nothing here has a thread. What is under way is moved by whoever calls, on either side, so a write
//! without delay lands while its target does nothing, as it does with verbs.
//!
//! Locks: of a side that is driven, then of the connection above, then of a wire, of the network, of a door.

use crate::Endpoint;
use crate::error::{Ended, Error};
use crate::handshake::Identity;
use crate::link::{
    Approach, Arrival, Door, Driver, Heard, Invitation, Judge, Link, Provider, Shape, Talk, Work,
};
use crate::memory::{Bytes, Rights};
use crate::news::News;
use crate::settings::Settings;
use format::Epoch;
use format::wire::{DoorHead, DoorKind, RefusalReason, WireRefusal, WireRegion};
use ipc::{Host, Lock, Time};
use pmem::Region;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

mod wire;

use wire::{Flight, Wire};

/// Links that wait at a door.
const KNOCKING_MAX: usize = 256;

/// All endpoints that can reach each other. Clones are the same network.
#[derive(Clone)]
pub struct Network(Arc<Inner>);

pub(crate) struct Inner {
    host: Arc<dyn Host>,
    state: Lock<State>,
}

struct State {
    doors: HashMap<String, Arc<LocalDoor>>,
    ways: HashMap<(String, String), Way>,
    wires: Vec<Weak<Wire>>,
    next_door: u64,
    next_invitation: u16,
}

/// What one direction between two nodes is like.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Way {
    cut: bool,
    delay_min: Duration,
    delay_max: Duration,
}

impl Network {
    /// A network without faults.
    pub fn new(host: Arc<dyn Host>) -> Self {
        let state = State {
            doors: HashMap::new(),
            ways: HashMap::new(),
            wires: Vec::new(),
            next_door: 1,
            next_invitation: 0,
        };
        let state = Lock::new(host.clone(), state);
        Self(Arc::new(Inner { host, state }))
    }

    /// An endpoint with a name on this network; faults are between names.
    ///
    /// # Errors
    /// `Unavailable`: impossible limits.
    pub fn endpoint(
        &self,
        name: &str,
        identity: Identity,
        epoch: Epoch,
        settings: Settings,
    ) -> Result<Endpoint, Error> {
        let node = Node { name: name.to_string(), network: self.0.clone(), shape: settings.shape() };
        Endpoint::new(self.0.host.clone(), Arc::new(node), identity, epoch, settings)
    }

    /// Holds back everything from one to the other, until it is healed. Nothing is lost: as on TCP, it comes later,
    /// or the connection ends first.
    pub fn cut(&self, from: &str, to: &str) {
        self.change(from, to, |way| way.cut = true);
    }

    /// Ends a cut.
    pub fn heal(&self, from: &str, to: &str) {
        self.change(from, to, |way| way.cut = false);
    }

    /// Delays what is sent from now on by a time between the two, never changing its order.
    pub fn delay(&self, from: &str, to: &str, min: Duration, max: Duration) {
        self.change(from, to, |way| (way.delay_min, way.delay_max) = (min, max));
    }

    /// Breaks every connection between two names; what was under way is lost.
    pub fn disconnect(&self, one: &str, other: &str) {
        for wire in self.wires() {
            if wire.joins(one, other) {
                wire.break_now();
            }
        }
    }

    fn change(&self, from: &str, to: &str, change: impl FnOnce(&mut Way)) {
        change(self.0.state.lock().ways.entry((from.to_string(), to.to_string())).or_default());
        self.wires().iter().for_each(|wire| wire.advance());
    }

    fn wires(&self) -> Vec<Arc<Wire>> {
        let mut state = self.0.state.lock();
        state.wires.retain(|wire| wire.strong_count() > 0);
        state.wires.iter().filter_map(Weak::upgrade).collect()
    }
}

impl Inner {
    fn way(&self, from: &str, to: &str) -> Way {
        let state = self.state.lock();
        state.ways.get(&(from.to_string(), to.to_string())).copied().unwrap_or_default()
    }

    /// When something sent now arrives.
    fn due(&self, from: &str, to: &str) -> Time {
        let way = self.way(from, to);
        let more = way.delay_max.saturating_sub(way.delay_min).as_nanos();
        let more = u64::try_from(more).unwrap_or(u64::MAX).saturating_add(1);
        let more = if way.delay_max.is_zero() { 0 } else { self.host.random() % more };
        self.host.now().after(way.delay_min + Duration::from_nanos(more))
    }
}

/// A node's way into the network.
#[derive(Clone)]
struct Node {
    name: String,
    network: Arc<Inner>,
    shape: Shape,
}

impl Provider for Node {
    fn register(&self, _region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        Ok(Box::new(()))
    }

    fn listen(&self, at: &str, news: Arc<News>) -> Result<Box<dyn Door>, Error> {
        let mut state = self.network.state.lock();
        let address =
            if at.is_empty() { format!("{}/{}", self.name, state.next_door) } else { at.to_string() };
        state.next_door += 1;
        // Anybody may talk.
        let door = self.network.open(&mut state, address, self, Arc::new(|_| Ok(())), news)?;
        Ok(Box::new(OpenDoor { node: self.clone(), door }))
    }

    fn talk(&self, to: &str, news: Arc<News>) -> Result<Arc<dyn Talk>, Error> {
        Ok(LocalTalk::new(self.reach(to, &[], news)?))
    }

    fn approach(&self, to: &str) -> Result<Box<dyn Approach>, Error> {
        Ok(Box::new(Coming { node: self.clone(), to: to.to_string() }))
    }
}

impl Node {
    /// A link to a door, at which it says something.
    fn reach(&self, to: &str, said: &[u8], news: Arc<News>) -> Result<Arc<LocalLink>, Error> {
        let door = self.network.state.lock().doors.get(to).cloned();
        let door = door.ok_or(Error::Unavailable("nobody listens there"))?;
        let theirs = News::heard_by(Some(door.news.clone()));
        let shapes = [self.shape, door.shape];
        let names = [self.name.clone(), door.name.clone()];
        let wire = Wire::new(self.network.host.clone(), self.network.clone(), names, [news, theirs], shapes);
        self.network.state.lock().wires.push(Arc::downgrade(&wire));
        let link = Arc::new(LocalLink::new(wire.clone(), 1));
        wire.send(0, Flight::Knock { said: said.to_vec(), door, link });
        Ok(Arc::new(LocalLink::new(wire, 0)))
    }
}

impl Inner {
    /// Makes a door known.
    fn open(
        &self,
        state: &mut State,
        address: String,
        node: &Node,
        judge: Judge,
        news: Arc<News>,
    ) -> Result<Arc<LocalDoor>, Error> {
        if state.doors.contains_key(&address) {
            return Err(Error::Unavailable("the address is taken"));
        }
        let queue = Lock::new(self.host.clone(), VecDeque::new());
        let (name, shape) = (node.name.clone(), node.shape);
        let door = Arc::new(LocalDoor { address: address.clone(), name, shape, judge, news, queue });
        state.doors.insert(address, door.clone());
        Ok(door)
    }
}

/// Where links come in: a door for talks, or an invitation for one connection.
pub(crate) struct LocalDoor {
    address: String,
    name: String,
    shape: Shape,
    judge: Judge,
    news: Arc<News>,
    queue: Lock<VecDeque<Arc<LocalLink>>>,
}

impl LocalDoor {
    /// Lets a link in, or gives the refusal.
    pub fn knock(&self, said: &[u8], link: Arc<LocalLink>) -> Result<(), Vec<u8>> {
        (self.judge)(said)?;
        let mut queue = self.queue.lock();
        if queue.len() >= KNOCKING_MAX {
            return Err(WireRefusal::new(RefusalReason::Full, Epoch::new(0)).as_bytes().to_vec());
        }
        queue.push_back(link);
        Ok(())
    }
}

struct OpenDoor {
    node: Node,
    door: Arc<LocalDoor>,
}

impl Door for OpenDoor {
    fn address(&self) -> String {
        self.door.address.clone()
    }

    fn next(&self) -> Result<Option<Arc<dyn Talk>>, Error> {
        let link = self.door.queue.lock().pop_front();
        Ok(link.map(|link| LocalTalk::new(link) as Arc<dyn Talk>))
    }

    fn arm(&self) {}

    fn invite(&self, _talk: &dyn Talk, _port: u16, judge: Judge) -> Result<Box<dyn Invitation>, Error> {
        let network = &self.node.network;
        let mut state = network.state.lock();
        state.next_invitation = state.next_invitation.wrapping_add(1);
        let port = state.next_invitation;
        let address = invitation_address(&self.door.address, port);
        let door = network.open(&mut state, address, &self.node, judge, self.door.news.clone())?;
        Ok(Box::new(OpenInvitation { network: network.clone(), door, port }))
    }
}

impl Drop for OpenDoor {
    fn drop(&mut self) {
        self.node.network.close(&self.door);
    }
}

/// Where one connection of somebody from a door is waited for.
fn invitation_address(door: &str, port: u16) -> String {
    format!("{door}:{port}")
}

impl Inner {
    fn close(&self, door: &LocalDoor) {
        let gone = self.state.lock().doors.remove(&door.address);
        drop(gone);
        let queue = std::mem::take(&mut *door.queue.lock());
        queue.iter().for_each(|link| link.close());
    }
}

struct OpenInvitation {
    network: Arc<Inner>,
    door: Arc<LocalDoor>,
    port: u16,
}

impl Invitation for OpenInvitation {
    fn port(&self) -> u16 {
        self.port
    }

    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
        let link = self.door.queue.lock().pop_front();
        Ok(link.map(|link| link as Arc<dyn Link>))
    }
}

impl Drop for OpenInvitation {
    fn drop(&mut self) {
        self.network.close(&self.door);
    }
}

/// A connection that is to be made.
struct Coming {
    node: Node,
    to: String,
}

impl Approach for Coming {
    fn port(&self) -> u16 {
        0
    }

    fn go(self: Box<Self>, port: u16, said: &[u8], news: Arc<News>) -> Result<Arc<dyn Link>, Error> {
        let link = self.node.reach(&invitation_address(&self.to, port), said, news)?;
        Ok(link)
    }
}

/// A talk: frames of a link of its own.
struct LocalTalk {
    link: Arc<LocalLink>,
    came: Lock<Talked>,
}

#[derive(Default)]
struct Talked {
    frames: VecDeque<Vec<u8>>,
    over: bool,
}

impl LocalTalk {
    fn new(link: Arc<LocalLink>) -> Arc<Self> {
        let came = Lock::new(link.wire.host.clone(), Talked::default());
        Arc::new(Self { link, came })
    }
}

impl Talk for LocalTalk {
    fn news(&self) -> &Arc<News> {
        self.link.news()
    }

    fn say(&self, kind: DoorKind, body: &[u8]) -> Result<(), Error> {
        let frame = [DoorHead::new(kind).as_bytes(), body].concat();
        self.link.wire.send(self.link.side, Flight::Frame { number: None, frame });
        Ok(())
    }

    fn hear(&self) -> Heard {
        let mut came = self.came.lock();
        self.link.drive(&mut |arrival| match arrival {
            Arrival::Frame(frame) => came.frames.push_back(frame.to_vec()),
            Arrival::Ended(_) | Arrival::Refused(_) => came.over = true,
            Arrival::Up | Arrival::Done(_) | Arrival::Immediate(_) => {}
        });
        match came.frames.pop_front() {
            Some(frame) => match DoorHead::decode(&frame) {
                Ok(Some((kind, body))) => Heard::Said(kind, body.to_vec()),
                _ => Heard::Noise,
            },
            None if came.over => Heard::Gone,
            None => Heard::Nothing,
        }
    }

    /// Whoever is talked to hears the end when the talk is dropped.
    fn hang_up(&self) {}

    fn arm(&self) {}

    fn next_due(&self) -> Option<Time> {
        self.link.next_due()
    }

    fn from(&self) -> Option<IpAddr> {
        None
    }
}

impl Drop for LocalTalk {
    fn drop(&mut self) {
        self.link.close();
    }
}

/// One side of a wire.
pub(crate) struct LocalLink {
    wire: Arc<Wire>,
    side: usize,
    driving: Lock<()>,
}

impl LocalLink {
    fn new(wire: Arc<Wire>, side: usize) -> Self {
        let driving = Lock::new(wire.host.clone(), ());
        Self { wire, side, driving }
    }
}

impl Link for LocalLink {
    fn news(&self) -> &Arc<News> {
        &self.wire.news[self.side]
    }

    /// Nobody drives but who waits.
    fn attach(&self, _driver: Weak<dyn Driver>) {}

    /// As over verbs.
    fn counts_along(&self) -> bool {
        false
    }

    fn post(&self, number: u64, work: &Work<'_>) -> Result<bool, Error> {
        let flight = match work {
            Work::Frame(head, body) => {
                let frame = [*head, *body].concat();
                self.wire.check_frame(self.side, frame.len())?;
                Flight::Frame { number: Some(number), frame }
            }
            Work::Write { from, to, immediate } => {
                let data = match from {
                    Bytes::Inline(bytes) => bytes.to_vec(),
                    Bytes::Registered(local, range) => copy_out(local.region(), range)?,
                };
                Flight::Write { number, data, to: *to, immediate: immediate.map(|it| it.value) }
            }
            Work::Read { into, range, from } => {
                Flight::Read { number, into: into.region().clone(), at: range.start, from: *from }
            }
        };
        self.wire.send(self.side, flight);
        Ok(true)
    }

    fn drive(&self, take: &mut dyn FnMut(Arrival<'_>)) -> bool {
        let Some(_driving) = self.driving.try_lock() else { return false };
        self.wire.advance();
        let arrivals = self.wire.arrivals(self.side);
        if arrivals.is_empty() {
            return false;
        }
        let mut used = 0;
        for arrival in &arrivals {
            used += arrival.receives();
            take(arrival.lend());
        }
        self.wire.repost(self.side, used);
        true
    }

    fn arm(&self) -> bool {
        true
    }

    fn next_due(&self) -> Option<Time> {
        self.wire.next_due()
    }

    fn grant(
        &self,
        region: &Region,
        range: Range<u64>,
        rights: Rights,
    ) -> Result<(WireRegion, Box<dyn Any + Send + Sync>), Error> {
        let host = &*self.wire.host;
        // An address within 47 bits, so that nothing is right by chance.
        let base = (host.random() >> 17 | 1 << 46) & !0xfff;
        let granted = WireRegion {
            key: U64::new(host.random()),
            base: U64::new(base),
            bytes: U64::new(range.end - range.start),
        };
        self.wire.grant(self.side, granted, region.clone(), range.start, rights)?;
        Ok((granted, Box::new(())))
    }

    fn close(&self) {
        self.wire.close(self.side);
    }
}

fn copy_out(region: &Region, range: &Range<u64>) -> Result<Vec<u8>, Error> {
    let mut data = vec![0; usize::try_from(range.end - range.start).map_err(|_| Error::Range)?];
    region.read(range.start, &mut data).map_err(|_| Error::Memory("the medium cannot be read"))?;
    Ok(data)
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Network")
    }
}

/// The reason with which both ends of a broken wire end.
const BROKEN: Ended = Ended::Lost;
