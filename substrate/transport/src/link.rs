//! What a provider gives: the bare connection under [`crate::Connection`], the door under [`crate::Listener`], and
//! registered memory. The rules that both providers keep are those of verbs, since code that keeps them is right
//! everywhere.
//!
//! A link never calls upwards on its own: whoever drives it hands in what takes the arrivals. So each side of an
//! in-process connection runs its own code only, as it would on two machines.

use crate::error::{Ended, Error};
use crate::memory::{Bytes, Local, Rights};
use crate::news::News;
use format::wire::WireRegion;
use ipc::Time;
use pmem::Region;
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// What is given to a link to do.
pub(crate) enum Work<'a> {
    /// Sends one frame: its head, then its body.
    Frame(&'a [u8], &'a [u8]),
    /// Writes into the peer's memory.
    Write { from: Bytes<'a>, to: WireRegion, immediate: Option<u32> },
    /// Reads from the peer's memory.
    Read { into: &'a Local, range: Range<u64>, from: WireRegion },
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
    Immediate(u32),
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

/// Judges the knock that came with the wish for a connection; the refusal, if it is one.
pub(crate) type Judge = Arc<dyn Fn(&[u8]) -> Result<(), Vec<u8>> + Send + Sync>;

/// Where links come in.
pub(crate) trait Door: Send + Sync {
    /// Where it is, for others to connect to.
    fn address(&self) -> String;

    /// The next link that wants in.
    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error>;
}

/// A kind of connections.
pub(crate) trait Provider: Send + Sync {
    /// Registers memory for work of this side.
    fn register(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error>;

    /// Opens a door.
    fn listen(&self, at: &str, judge: Judge, news: Arc<News>) -> Result<Box<dyn Door>, Error>;

    /// Begins a connection.
    fn connect(&self, to: &str, knock: &[u8], news: Arc<News>) -> Result<Arc<dyn Link>, Error>;
}
