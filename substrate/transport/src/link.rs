//! What a provider gives: the talk at a door, where two nodes come to trust each other; the bare connection that
//! follows, under [`crate::Connection`]; and registered memory. The rules that both providers keep are those of verbs,
//! since code that keeps them is right everywhere.
//!
//! A link never calls upwards on its own: whoever drives it hands in what takes the arrivals. So each side of an
//! in-process connection runs its own code only, as it would on two machines.

use crate::error::{Ended, Error};
use crate::memory::{Bytes, Local, Rights};
use crate::news::News;
use format::wire::{DoorKind, WireRegion};
use ipc::Time;
use pmem::Region;
use std::any::Any;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// What is given to a link to do.
pub(crate) enum Work<'a> {
    /// Sends one frame: its head, then its body.
    Frame(&'a [u8], &'a [u8]),
    /// Writes into the peer's memory.
    Write { from: Bytes<'a>, to: WireRegion, immediate: Option<Immediate> },
    /// Reads from the peer's memory.
    Read { into: &'a Local, range: Range<u64>, from: WireRegion },
}

impl Work<'_> {
    /// Whether it tells the peer what was taken of what it sent.
    pub fn has_count(&self) -> bool {
        match self {
            Self::Frame(..) => true,
            Self::Write { immediate, .. } => immediate.is_some_and(|immediate| immediate.taken.is_some()),
            Self::Read { .. } => false,
        }
    }
}

/// What goes with a write and is told when its bytes are in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Immediate {
    /// The user's.
    pub value: u32,
    /// How much the sender has taken so far; only where [`Link::counts_along`].
    pub taken: Option<u32>,
}

/// What comes out of a link, in order.
pub(crate) enum Arrival<'a> {
    /// It is connected.
    Up,
    /// The other side refused it; what it said.
    Refused(&'a [u8]),
    /// The work with this number is done: its memory is free again, or holds what was read.
    Done(u64),
    /// A frame; the receive that it used up is posted again when this was taken.
    Frame(&'a [u8]),
    /// The immediate of a write of the peer, whose bytes are all in place.
    Immediate(Immediate),
    /// It is over.
    Ended(Ended),
}

/// Receives are sized for this.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes of the longest frame.
    pub frame_bytes: usize,
    /// Receives that are always posted.
    pub receives: u32,
    /// Work that may be under way.
    pub depth: u32,
}

/// Takes what comes out of a link: the connection above it.
pub(crate) trait Driver: Send + Sync {
    /// Takes what has arrived; false if nothing had.
    fn drive(&self) -> bool;

    /// Looks at the clock: is the peer silent?
    fn tick(&self, now: Time);
}

/// A bare connection.
pub(crate) trait Link: Send + Sync {
    /// Told when something arrives.
    fn news(&self) -> &Arc<News>;

    /// Has `driver` called by whatever drives links while nobody waits.
    fn attach(&self, driver: Weak<dyn Driver>);

    /// Whether its immediates have room for what was taken: else it takes a frame of its own to tell.
    fn counts_along(&self) -> bool;

    /// Begins some work; false if there is no room now.
    fn post(&self, number: u64, work: &Work<'_>) -> Result<bool, Error>;

    /// Hands over what has arrived; false if nothing had. Only one thread drives at a time; another gets false.
    fn drive(&self, take: &mut dyn FnMut(Arrival<'_>)) -> bool;

    /// Sees to it that arrivals are told while the caller sleeps; false: look again first.
    fn arm(&self) -> bool;

    /// When something is due by itself.
    fn next_due(&self) -> Option<Time>;

    /// Lets the peer at some memory, until the value that is returned is dropped.
    fn grant(
        &self,
        region: &Region,
        range: Range<u64>,
        rights: Rights,
    ) -> Result<(WireRegion, Box<dyn Any + Send + Sync>), Error>;

    /// Ends it: when this returns, nothing of the peer reaches memory of this side through it, ever, and nothing
    /// arrives.
    fn close(&self);
}

/// What came out of a talk.
pub(crate) enum Heard {
    /// Nothing yet.
    Nothing,
    /// A message, of the length that its kind has.
    Said(DoorKind, Vec<u8>),
    /// Bytes that are no message.
    Noise,
    /// The other side has gone, after all that it said.
    Gone,
}

/// A talk at a door: a few short messages each way, with somebody who may be anybody. It ends when it is dropped; what
/// was said before still leaves.
pub(crate) trait Talk: Send + Sync {
    /// Told when something may be heard.
    fn news(&self) -> &Arc<News>;

    /// Says something. There is room for all that a handshake says; what finds none on its way leaves later, while
    /// somebody hears.
    fn say(&self, kind: DoorKind, body: &[u8]) -> Result<(), Error>;

    /// The next thing that the other side said.
    fn hear(&self) -> Heard;

    /// Nothing more will be said.
    fn hang_up(&self);

    /// Sees to it that what comes is told.
    fn arm(&self);

    /// When something is due by itself.
    fn next_due(&self) -> Option<Time>;

    /// The address of the other side, where it has one.
    fn from(&self) -> Option<IpAddr>;
}

/// Judges what came with the wish for a connection; the refusal, if it is one.
pub(crate) type Judge = Arc<dyn Fn(&[u8]) -> Result<(), Vec<u8>> + Send + Sync>;

/// Where talks come in.
pub(crate) trait Door: Send + Sync {
    /// Where it is, for others to connect to.
    fn address(&self) -> String;

    /// The next talk.
    fn next(&self) -> Result<Option<Arc<dyn Talk>>, Error>;

    /// Sees to it that the next talk is told.
    fn arm(&self);

    /// Waits for one connection: of who is talked to, from its port `port` if that is not 0, which brings along what
    /// `judge` accepts.
    fn invite(&self, talk: &dyn Talk, port: u16, judge: Judge) -> Result<Box<dyn Invitation>, Error>;
}

/// Waits for one connection; nobody else comes in by it. Over when it is dropped.
pub(crate) trait Invitation: Send + Sync {
    /// Where, at the address of the door.
    fn port(&self) -> u16;

    /// The connection, once.
    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error>;
}

/// A connection that is to be made.
pub(crate) trait Approach {
    /// The port that it will come from; 0 where none is known.
    fn port(&self) -> u16;

    /// Begins it, towards where it is waited for, bringing something along.
    fn go(self: Box<Self>, port: u16, said: &[u8], news: Arc<News>) -> Result<Arc<dyn Link>, Error>;
}

/// A kind of connections.
pub(crate) trait Provider: Send + Sync {
    /// Registers memory for work of this side.
    fn register(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error>;

    /// Opens a door.
    fn listen(&self, at: &str, news: Arc<News>) -> Result<Box<dyn Door>, Error>;

    /// Begins a talk at a door.
    fn talk(&self, to: &str, news: Arc<News>) -> Result<Arc<dyn Talk>, Error>;

    /// Prepares a connection to the node behind a door.
    fn approach(&self, to: &str) -> Result<Box<dyn Approach>, Error>;
}
