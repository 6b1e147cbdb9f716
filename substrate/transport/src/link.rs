//! The interface to a provider: the control channel on which two nodes authenticate each other, the bare connection
//! (link) that follows and that [`crate::Connection`] drives, and registered memory. Both providers follow the rules
//! of RDMA verbs, because code that follows these rules is right on every fabric.
//!
//! A link never calls into the layer above on its own: the thread that drives the link passes the function that
//! takes the arrivals. So each side of an in-process connection runs only its own code, as on two machines.

use crate::error::{Ended, Error};
use crate::memory::{Bytes, Local, Rights};
use format::wire::{ControlKind, WireRegion};
use ipc::host::Waited;
use ipc::sync::{Ordering, Word};
use ipc::{EventCounter, Host, Time};
use pmem::Region;
use std::any::Any;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// An operation to be posted on a link.
pub(crate) enum Operation<'a> {
    /// Sends one frame: its head, then its body.
    Frame(&'a [u8], &'a [u8]),
    /// Writes into the peer's memory.
    Write { from: Bytes<'a>, to: WireRegion, immediate: Option<Immediate> },
    /// Reads from the peer's memory.
    Read { into: &'a Local, range: Range<u64>, from: WireRegion },
}

impl Operation<'_> {
    /// True if the operation tells the peer how many of its messages were taken.
    pub fn has_count(&self) -> bool {
        match self {
            Self::Frame(..) => true,
            Self::Write { immediate, .. } => immediate.is_some_and(|immediate| immediate.taken.is_some()),
            Self::Read { .. } => false,
        }
    }

    /// Number of bytes that go to the peer.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Frame(head, body) => (head.len() + body.len()) as u64,
            Self::Write { from, .. } => from.count(),
            Self::Read { .. } => 0,
        }
    }
}

/// The value that accompanies a write, delivered when all bytes of the write are in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Immediate {
    /// The user's value.
    pub value: u32,
    /// Number of messages and immediates that the sender has taken so far; only if [`Link::counts_along`].
    pub taken: Option<u32>,
}

/// An event of a link. Events are delivered in order.
pub(crate) enum Arrival<'a> {
    /// The link is connected.
    Up,
    /// The peer refused the connection, with this message.
    Refused(&'a [u8]),
    /// The operation with this number is complete: its memory is free again, or holds the bytes that were read.
    Done(u64),
    /// A frame. Its receive is posted again after the driver has taken the frame.
    Frame(&'a [u8]),
    /// The immediate of a write by the peer, all of whose bytes are in place.
    Immediate(Immediate),
    /// The link has ended.
    Ended(Ended),
}

/// Sizes for which the buffers and queues of a link are allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkShape {
    /// Bytes of the longest frame.
    pub frame_bytes: usize,
    /// Number of receives that are always posted.
    pub receives: u32,
    /// Limit of operations in progress.
    pub depth: u32,
}

/// The connection above a link, as the progress thread calls it.
pub(crate) trait Driver: Send + Sync {
    /// Handles the events that have arrived; false if there were none.
    fn drive(&self) -> bool;

    /// Checks at time `now` whether the peer has been silent for too long.
    fn tick(&self, now: Time);
}

/// A bare connection.
pub(crate) trait Link: Send + Sync {
    /// Notified when an event arrives.
    fn counter(&self) -> &Arc<EventCounter>;

    /// Sets the driver that the progress thread calls while no user waits for the connection.
    fn attach(&self, driver: Weak<dyn Driver>);

    /// Number of threads that wait for the connection, polling or asleep; `None` if no other thread drives the link. While
    /// there are some, one of them drives it, or sleeps until it has an event.
    fn waiters(&self) -> Option<&Word> {
        None
    }

    /// True if an immediate can carry the count of taken messages; otherwise the count needs a frame of its own.
    fn counts_along(&self) -> bool;

    /// Posts an operation; false if the queue is full.
    fn post(&self, number: u64, operation: &Operation<'_>) -> Result<bool, Error>;

    /// Passes all arrived events to `take`; false if there were none. Only one thread drives a link at a time; a
    /// concurrent call returns false.
    fn drive(&self, take: &mut dyn FnMut(Arrival<'_>)) -> bool;

    /// Prepares for sleeping: the next event will notify the counter. False: the caller must drive again first.
    fn arm(&self) -> bool;

    /// Sleeps until the next event, or until the counter has another value than `seen`. `None`: the caller must drive again first.
    fn sleep(&self, host: &dyn Host, seen: u32, until: Option<Time>) -> Option<Waited> {
        self.arm().then(|| self.counter().wait(host, seen, until))
    }

    /// Notifies the counter, and wakes the threads that sleep in [`Self::sleep`].
    fn notify(&self, host: &dyn Host) {
        self.counter().notify(host);
    }

    /// The time at which something will arrive without an event, if there is one.
    fn next_due(&self) -> Option<Time>;

    /// Gives the peer access to a range of memory, until the returned handle is dropped.
    fn grant(
        &self,
        region: &Region,
        range: Range<u64>,
        rights: Rights,
    ) -> Result<(WireRegion, Box<dyn Any + Send + Sync>), Error>;

    /// Ends the link. After the return the peer can never again reach memory of this side through it, and no event
    /// arrives.
    fn close(&self);
}

/// Counts a thread that waits for a link, also if the thread unwinds.
pub(crate) struct Waiter<'a> {
    link: &'a dyn Link,
    host: &'a dyn Host,
}

impl<'a> Waiter<'a> {
    pub fn new(link: &'a dyn Link, host: &'a dyn Host) -> Self {
        // SeqCst, here and below: a thread that leaves sees each one that went to sleep because this one was driving.
        link.waiters().inspect(|waiters| _ = waiters.fetch_add(1, Ordering::SeqCst));
        Self { link, host }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let before = self.link.waiters().map_or(0, |waiters| waiters.fetch_add(u32::MAX, Ordering::SeqCst));
        // One of the others drives the link from now on.
        if before > 1 {
            self.link.notify(self.host);
        }
    }
}

/// The result of reading from a control channel.
pub(crate) enum ControlInput {
    /// No complete message has arrived.
    Empty,
    /// A message with the body length of its kind.
    Message(ControlKind, Vec<u8>),
    /// Bytes that are not a message.
    Malformed,
    /// The other side has closed the channel, and all its messages were read.
    Closed,
}

/// A control channel: a few short messages in each direction, with a program that may not be a node at all. Dropping
/// the channel closes it; messages that were sent before still leave.
pub(crate) trait ControlChannel: Send + Sync {
    /// Notified when there may be something to read.
    fn counter(&self) -> &Arc<EventCounter>;

    /// Queues a message. The queue has space for a whole handshake; bytes that the socket does not accept now leave
    /// in a later call of `receive`.
    fn send(&self, kind: ControlKind, body: &[u8]) -> Result<(), Error>;

    /// Returns the next message of the other side.
    fn receive(&self) -> ControlInput;

    /// Closes the sending direction.
    fn shut_down(&self);

    /// Prepares for sleeping: the next arrival will notify the counter.
    fn arm(&self);

    /// The time at which something will arrive without an event, if there is one.
    fn next_due(&self) -> Option<Time>;

    /// The address of the other side, if the provider has addresses.
    fn peer_address(&self) -> Option<IpAddr>;
}

/// Checks the connect token that accompanies a connection request; the error is the refusal to send.
pub(crate) type TokenCheck = Arc<dyn Fn(&[u8]) -> Result<(), Vec<u8>> + Send + Sync>;

/// Listens for control channels.
pub(crate) trait ControlListener: Send + Sync {
    /// The address to which other nodes connect.
    fn address(&self) -> String;

    /// Accepts the next control channel, if there is one.
    fn next(&self) -> Result<Option<Arc<dyn ControlChannel>>, Error>;

    /// Prepares for sleeping: the next control channel will notify the counter.
    fn arm(&self);

    /// Starts to listen for one connection from the peer of a control channel, from its port `port` if that is not 0.
    /// The connection is accepted if `check_token` accepts its token.
    fn expect_peer(
        &self,
        channel: &dyn ControlChannel,
        port: u16,
        check_token: TokenCheck,
    ) -> Result<Box<dyn PendingAccept>, Error>;
}

/// Listens for one connection of one authenticated peer. Dropping it stops listening.
pub(crate) trait PendingAccept: Send + Sync {
    /// The port, at the address of the control listener.
    fn port(&self) -> u16;

    /// Returns the connection, once.
    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error>;
}

/// A connection that this side is about to open.
pub(crate) trait PendingConnect {
    /// The local port from which the connection will come; 0 if the provider does not know it.
    fn port(&self) -> u16;

    /// Starts to connect to a port of the peer, with a connect token.
    fn connect(
        self: Box<Self>,
        port: u16,
        token: &[u8],
        counter: Arc<EventCounter>,
    ) -> Result<Arc<dyn Link>, Error>;
}

/// An implementation of connections.
pub(crate) trait Provider: Send + Sync {
    /// Registers memory for operations of this side.
    fn register(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error>;

    /// Listens for control channels at an address.
    fn listen(&self, at: &str, counter: Arc<EventCounter>) -> Result<Box<dyn ControlListener>, Error>;

    /// Opens a control channel to the listener at an address.
    fn open_channel(&self, to: &str, counter: Arc<EventCounter>) -> Result<Arc<dyn ControlChannel>, Error>;

    /// Prepares a connection to the node whose control listener has this address.
    fn prepare_connect(&self, to: &str) -> Result<Box<dyn PendingConnect>, Error>;
}
