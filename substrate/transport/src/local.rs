//! Connections within one process, for tests and the simulator. They follow the rules of RDMA verbs: remote memory is
//! named by a key and a base address that the two sides exchange, sources are registered, each frame and each
//! immediate uses up a posted receive, at most 64 bytes are inline, there are no remote atomics, and order exists
//! only within a connection. A peer's write is a plain store, volatile until the owner of the memory syncs it.
//!
//! A [`Network`] can hold back one direction between two nodes, delay it, and break connections. Time is that of the
//! host's clock, and the module has no thread: a call on either side moves everything that is due. So a write without
//! delay lands although its target does nothing, as with verbs.
//!
//! Locks: that of a driven side, then that of the connection above it, then those of a wire, of the network, and of a
//! listener.

use crate::Endpoint;
use crate::error::{Ended, Error};
use crate::handshake::Identity;
use crate::link::{
    Arrival, ControlChannel, ControlInput, ControlListener, Driver, Link, LinkShape, Operation,
    PendingAccept, PendingConnect, Provider, TokenCheck,
};
use crate::memory::{Bytes, Rights};
use crate::settings::Settings;
use format::Epoch;
use format::wire::{ControlHead, ControlKind, RefusalReason, WireRefusal, WireRegion};
use ipc::{EventCounter, Host, Lock, Time};
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

/// Links that wait to be accepted.
const KNOCKING_MAX: usize = 256;

/// The endpoints that can reach each other. Clones refer to the same network.
#[derive(Clone)]
pub struct Network(Arc<Inner>);

pub(crate) struct Inner {
    host: Arc<dyn Host>,
    state: Lock<NetworkState>,
}

struct NetworkState {
    listeners: HashMap<String, Arc<LocalListener>>,
    ways: HashMap<(String, String), DirectionFaults>,
    wires: Vec<Weak<Wire>>,
    next_listener: u64,
    next_port: u16,
}

/// The faults of one direction between two nodes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DirectionFaults {
    cut: bool,
    delay_min: Duration,
    delay_max: Duration,
}

impl Network {
    /// Creates a network without faults.
    pub fn new(host: Arc<dyn Host>) -> Self {
        let state = NetworkState {
            listeners: HashMap::new(),
            ways: HashMap::new(),
            wires: Vec::new(),
            next_listener: 1,
            next_port: 0,
        };
        let state = Lock::new(host.clone(), state);
        Self(Arc::new(Inner { host, state }))
    }

    /// Creates an endpoint with a name on this network; faults apply between names.
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
        let node = LocalProvider { name: name.to_string(), network: self.0.clone(), shape: settings.shape() };
        Endpoint::new(self.0.host.clone(), Arc::new(node), identity, epoch, settings)
    }

    /// Holds back everything from one node to the other until `heal`. Nothing is lost: as over TCP, it arrives later,
    /// or the connection ends first.
    pub fn cut(&self, from: &str, to: &str) {
        self.change(from, to, |way| way.cut = true);
    }

    /// Ends a cut.
    pub fn heal(&self, from: &str, to: &str) {
        self.change(from, to, |way| way.cut = false);
    }

    /// Delays everything that is sent from now on by a random time between the two, without changing the order.
    pub fn delay(&self, from: &str, to: &str, min: Duration, max: Duration) {
        self.change(from, to, |way| (way.delay_min, way.delay_max) = (min, max));
    }

    /// Breaks every connection between two names; everything in flight is lost.
    pub fn disconnect(&self, one: &str, other: &str) {
        for wire in self.wires() {
            if wire.joins(one, other) {
                wire.break_now();
            }
        }
    }

    fn change(&self, from: &str, to: &str, change: impl FnOnce(&mut DirectionFaults)) {
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
    fn way(&self, from: &str, to: &str) -> DirectionFaults {
        let state = self.state.lock();
        state.ways.get(&(from.to_string(), to.to_string())).copied().unwrap_or_default()
    }

    /// The time at which something that is sent now arrives.
    fn due(&self, from: &str, to: &str) -> Time {
        let way = self.way(from, to);
        let more = way.delay_max.saturating_sub(way.delay_min).as_nanos();
        let more = u64::try_from(more).unwrap_or(u64::MAX).saturating_add(1);
        let more = if way.delay_max.is_zero() { 0 } else { self.host.random() % more };
        self.host.now().after(way.delay_min + Duration::from_nanos(more))
    }
}

/// A node as a provider of this network.
#[derive(Clone)]
struct LocalProvider {
    name: String,
    network: Arc<Inner>,
    shape: LinkShape,
}

impl Provider for LocalProvider {
    fn register(&self, _region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        Ok(Box::new(()))
    }

    fn listen(&self, at: &str, counter: Arc<EventCounter>) -> Result<Box<dyn ControlListener>, Error> {
        let mut state = self.network.state.lock();
        let address =
            if at.is_empty() { format!("{}/{}", self.name, state.next_listener) } else { at.to_string() };
        state.next_listener += 1;
        // Every node may open a control channel.
        let listener = self.network.open(&mut state, address, self, Arc::new(|_| Ok(())), counter)?;
        Ok(Box::new(LocalControlListener { node: self.clone(), listener }))
    }

    fn open_channel(&self, to: &str, counter: Arc<EventCounter>) -> Result<Arc<dyn ControlChannel>, Error> {
        Ok(LocalChannel::new(self.reach(to, &[], counter)?))
    }

    fn prepare_connect(&self, to: &str) -> Result<Box<dyn PendingConnect>, Error> {
        Ok(Box::new(LocalPendingConnect { node: self.clone(), to: to.to_string() }))
    }
}

impl LocalProvider {
    /// Opens a link to a listener, with a connect token.
    fn reach(&self, to: &str, said: &[u8], counter: Arc<EventCounter>) -> Result<Arc<LocalLink>, Error> {
        let listener = self.network.state.lock().listeners.get(to).cloned();
        let listener = listener.ok_or(Error::Unavailable("no process listens there"))?;
        let theirs = EventCounter::new(Some(listener.counter.clone()));
        let shapes = [self.shape, listener.shape];
        let names = [self.name.clone(), listener.name.clone()];
        let wire =
            Wire::new(self.network.host.clone(), self.network.clone(), names, [counter, theirs], shapes);
        self.network.state.lock().wires.push(Arc::downgrade(&wire));
        let link = Arc::new(LocalLink::new(wire.clone(), 1));
        wire.send(0, Flight::WireRequest { said: said.to_vec(), listener, link });
        Ok(Arc::new(LocalLink::new(wire, 0)))
    }
}

impl Inner {
    /// Registers a listener.
    fn open(
        &self,
        state: &mut NetworkState,
        address: String,
        node: &LocalProvider,
        judge: TokenCheck,
        counter: Arc<EventCounter>,
    ) -> Result<Arc<LocalListener>, Error> {
        if state.listeners.contains_key(&address) {
            return Err(Error::Unavailable("the address is taken"));
        }
        let queue = Lock::new(self.host.clone(), VecDeque::new());
        let (name, shape) = (node.name.clone(), node.shape);
        let listener =
            Arc::new(LocalListener { address: address.clone(), name, shape, judge, counter, queue });
        state.listeners.insert(address, listener.clone());
        Ok(listener)
    }
}

/// Accepts links: control channels, or one connection of an authenticated peer.
pub(crate) struct LocalListener {
    address: String,
    name: String,
    shape: LinkShape,
    judge: TokenCheck,
    counter: Arc<EventCounter>,
    queue: Lock<VecDeque<Arc<LocalLink>>>,
}

impl LocalListener {
    /// Queues a link to be accepted, or returns the refusal.
    pub fn request(&self, said: &[u8], link: Arc<LocalLink>) -> Result<(), Vec<u8>> {
        (self.judge)(said)?;
        let mut queue = self.queue.lock();
        if queue.len() >= KNOCKING_MAX {
            return Err(WireRefusal::new(RefusalReason::Full, Epoch::new(0)).as_bytes().to_vec());
        }
        queue.push_back(link);
        Ok(())
    }
}

struct LocalControlListener {
    node: LocalProvider,
    listener: Arc<LocalListener>,
}

impl ControlListener for LocalControlListener {
    fn address(&self) -> String {
        self.listener.address.clone()
    }

    fn next(&self) -> Result<Option<Arc<dyn ControlChannel>>, Error> {
        let link = self.listener.queue.lock().pop_front();
        Ok(link.map(|link| LocalChannel::new(link) as Arc<dyn ControlChannel>))
    }

    fn arm(&self) {}

    fn expect_peer(
        &self,
        _talk: &dyn ControlChannel,
        _port: u16,
        judge: TokenCheck,
    ) -> Result<Box<dyn PendingAccept>, Error> {
        let network = &self.node.network;
        let mut state = network.state.lock();
        state.next_port = state.next_port.wrapping_add(1);
        let port = state.next_port;
        let address = token_address(&self.listener.address, port);
        let listener = network.open(&mut state, address, &self.node, judge, self.listener.counter.clone())?;
        Ok(Box::new(LocalPendingAccept { network: network.clone(), listener, port }))
    }
}

impl Drop for LocalControlListener {
    fn drop(&mut self) {
        self.node.network.close(&self.listener);
    }
}

/// The address at which one authenticated peer connects.
fn token_address(listener: &str, port: u16) -> String {
    format!("{listener}:{port}")
}

impl Inner {
    fn close(&self, listener: &LocalListener) {
        let gone = self.state.lock().listeners.remove(&listener.address);
        drop(gone);
        let queue = std::mem::take(&mut *listener.queue.lock());
        queue.iter().for_each(|link| link.close());
    }
}

struct LocalPendingAccept {
    network: Arc<Inner>,
    listener: Arc<LocalListener>,
    port: u16,
}

impl PendingAccept for LocalPendingAccept {
    fn port(&self) -> u16 {
        self.port
    }

    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
        let link = self.listener.queue.lock().pop_front();
        Ok(link.map(|link| link as Arc<dyn Link>))
    }
}

impl Drop for LocalPendingAccept {
    fn drop(&mut self) {
        self.network.close(&self.listener);
    }
}

/// A connection that this side is about to open.
struct LocalPendingConnect {
    node: LocalProvider,
    to: String,
}

impl PendingConnect for LocalPendingConnect {
    fn port(&self) -> u16 {
        0
    }

    fn connect(
        self: Box<Self>,
        port: u16,
        said: &[u8],
        counter: Arc<EventCounter>,
    ) -> Result<Arc<dyn Link>, Error> {
        let link = self.node.reach(&token_address(&self.to, port), said, counter)?;
        Ok(link)
    }
}

/// A control channel: frames on a link of its own.
struct LocalChannel {
    link: Arc<LocalLink>,
    came: Lock<ReceivedFrames>,
}

#[derive(Default)]
struct ReceivedFrames {
    frames: VecDeque<Vec<u8>>,
    over: bool,
}

impl LocalChannel {
    fn new(link: Arc<LocalLink>) -> Arc<Self> {
        let came = Lock::new(link.wire.host.clone(), ReceivedFrames::default());
        Arc::new(Self { link, came })
    }
}

impl ControlChannel for LocalChannel {
    fn counter(&self) -> &Arc<EventCounter> {
        self.link.counter()
    }

    fn send(&self, kind: ControlKind, body: &[u8]) -> Result<(), Error> {
        let frame = [ControlHead::new(kind).as_bytes(), body].concat();
        self.link.wire.send(self.link.side, Flight::Frame { number: None, frame });
        Ok(())
    }

    fn receive(&self) -> ControlInput {
        let mut came = self.came.lock();
        self.link.drive(&mut |arrival| match arrival {
            Arrival::Frame(frame) => came.frames.push_back(frame.to_vec()),
            Arrival::Ended(_) | Arrival::Refused(_) => came.over = true,
            Arrival::Up | Arrival::Done(_) | Arrival::Immediate(_) => {}
        });
        match came.frames.pop_front() {
            Some(frame) => match ControlHead::decode(&frame) {
                Ok(Some((kind, body))) => ControlInput::Message(kind, body.to_vec()),
                _ => ControlInput::Malformed,
            },
            None if came.over => ControlInput::Closed,
            None => ControlInput::Empty,
        }
    }

    /// Does nothing: the other side sees the end when the channel is dropped.
    fn shut_down(&self) {}

    fn arm(&self) {}

    fn next_due(&self) -> Option<Time> {
        self.link.next_due()
    }

    fn peer_address(&self) -> Option<IpAddr> {
        None
    }
}

impl Drop for LocalChannel {
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
    fn counter(&self) -> &Arc<EventCounter> {
        &self.wire.counter[self.side]
    }

    /// Ignores the driver, because only waiting threads drive a link here.
    fn attach(&self, _driver: Weak<dyn Driver>) {}

    /// False, as over verbs.
    fn counts_along(&self) -> bool {
        false
    }

    fn post(&self, number: u64, work: &Operation<'_>) -> Result<bool, Error> {
        let flight = match work {
            Operation::Frame(head, body) => {
                let frame = [*head, *body].concat();
                self.wire.check_frame(self.side, frame.len())?;
                Flight::Frame { number: Some(number), frame }
            }
            Operation::Write { from, to, immediate } => {
                let data = match from {
                    Bytes::Inline(bytes) => bytes.to_vec(),
                    Bytes::Registered(local, range) => copy_out(local.region(), range)?,
                };
                Flight::Write { number, data, to: *to, immediate: immediate.map(|it| it.value) }
            }
            Operation::Read { into, range, from } => {
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
        // An address within 47 bits, so that no wrong address is valid by chance.
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

/// The reason of the end on both sides of a broken wire.
const BROKEN: Ended = Ended::Lost;
