//! The connection of a program to its SharedFS: a socket for the greeting and for descriptors, a ring for calls.
//!
//! Only the descriptor of the socket stays open; all descriptors that arrive with the Welcome are mapped and closed.
//! The front end protects the socket from the program's own `close` and `dup2` ([`SocketConnector::new`]).

use crate::error::Error;
use crate::session::{Attachment, Connector, Link};
use format::call::{CallKind, Status};
use format::message::{MessageKind, Parcel, RingShape};
use format::session::{GENERATIONS_BYTES, SESSION_BYTES, Welcome, lease_bytes};
use format::{DecodeError, SegmentId};
use ipc::ring::{Call, RingClient, RingLimits};
use ipc::shared::{Access, Mapping};
use ipc::socket::{Connection, Message, hello};
use ipc::{Descriptor, Host, Lock, Time};
use pmem::medium::Class;
use pmem::{ReadMapping, Region};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vfs::Caller;
use zerocopy::FromBytes;

/// How long a daemon may take to accept a session, including the recovery of its pool.
const GREETING: Duration = Duration::from_secs(10);
/// How long a call may take: a daemon that does not answer within this time counts as dead.
const CALL: Duration = Duration::from_secs(60);
/// How long a client polls its ring before it sleeps: longer than a copy takes to answer an fsync.
const SPIN_NS: u32 = 100_000;
/// Limit of the body of a response: extents, entries, a piece of a file, an attribute's value.
const LONG_RESPONSE_BYTES: usize = 128 << 10;
/// The same limit for calls that answer with a few structures.
const SHORT_RESPONSE_BYTES: usize = 1536;
/// Number of descriptors in a Welcome.
const DESCRIPTORS: usize = 5;

/// Gets a descriptor that stays open, and returns it at a number that the program does not use. `None` if no number is
/// free.
pub type Keep = fn(Descriptor) -> Option<Descriptor>;

/// Attaches by a Unix socket.
pub struct SocketConnector {
    host: Arc<dyn Host>,
    path: PathBuf,
    library: String,
    role: u32,
    keep: Keep,
    /// Counts requests over the whole lifetime of the LibFS.
    requests: Arc<AtomicU64>,
}

impl SocketConnector {
    /// Attaches at this path, as a library of this version; `role` is that of [`format::message::Hello`]. `keep` gets
    /// each descriptor that stays open.
    pub fn new(host: Arc<dyn Host>, path: PathBuf, library: &str, role: u32, keep: Keep) -> Self {
        let requests = Arc::new(AtomicU64::new(1));
        Self { host, path, library: library.to_owned(), role, keep, requests }
    }
}

impl Connector for SocketConnector {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        let until = Some(self.host.now().after(GREETING));
        let connection = Connection::connect(&self.path)?.into_descriptor();
        let connection = Connection::from_descriptor((self.keep)(connection).ok_or(Error::Descriptors)?);
        let message = connection.greet(&*self.host, &hello(&self.library, former, self.role), until)?;
        let (shape, rest) = split::<RingShape>(&message.body)?;
        let (welcome, _) = split::<Welcome>(rest)?;
        let descriptors: [Descriptor; DESCRIPTORS] =
            message.descriptors.try_into().map_err(|_| Error::Response)?;
        let [log, session, leases, ring, generations] = descriptors;

        let limits = ring_limits(&shape);
        let words = usize::try_from(welcome.lease_words.get()).map_err(|_| Error::Response)?;
        let class = if welcome.syncs_file.get() == 1 { Class::File } else { Class::Memory };
        let log = Region::from_fd(OwnedFd::from(log), class)?;
        let connection = Arc::new(connection);
        let ring = Mapping::new(&ring, limits.bytes()?, Access::Write)?;
        let ring = RingClient::new(self.host.clone(), Box::new(connection.clone()), ring, limits, SPIN_NS)?;
        Ok(Attachment {
            welcome,
            credential: credential(&welcome),
            log,
            session: Mapping::new(&session, SESSION_BYTES, Access::Write)?,
            leases: Mapping::new(&leases, lease_bytes(words), Access::Read)?,
            generations: Mapping::new(&generations, GENERATIONS_BYTES, Access::Read)?,
            link: Arc::new(SocketLink {
                host: self.host.clone(),
                connection,
                ring,
                class,
                requests: self.requests.clone(),
                parcels: Parcels::new(&self.host),
            }),
        })
    }
}

/// The user of this process, with its present supplementary groups, which are those that the daemon got from the
/// kernel.
fn credential(welcome: &Welcome) -> Caller {
    let groups = rustix::process::getgroups().unwrap_or_default();
    Caller {
        uid: welcome.uid.get(),
        gid: welcome.gid.get(),
        groups: groups.into_iter().map(|group| group.as_raw()).collect(),
    }
}

fn ring_limits(shape: &RingShape) -> RingLimits {
    RingLimits {
        slots: shape.slots.get(),
        inline_bytes: shape.inline_bytes.get(),
        bulk_buffers: shape.bulk_buffers.get(),
        bulk_bytes: shape.bulk_bytes.get(),
    }
}

fn split<T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable>(
    bytes: &[u8],
) -> Result<(T, &[u8]), Error> {
    format::call::split(bytes).map_err(|_: DecodeError| Error::Response)
}

/// One session's socket and ring.
struct SocketLink {
    host: Arc<dyn Host>,
    connection: Arc<Connection>,
    ring: RingClient,
    class: Class,
    requests: Arc<AtomicU64>,
    parcels: Parcels,
}

/// Limit of parcels that wait for their threads. There are never more, because each belongs to a pending request.
const PARCELS_MAX: usize = 64;

impl SocketLink {
    fn until(&self) -> Option<Time> {
        Some(self.host.now().after(CALL))
    }
}

/// Descriptors that have arrived and that the thread of their request has not taken yet: kind of the request, number of
/// the object, descriptor. A log, a segment and a liveness socket may have the same number, so the number alone is
/// ambiguous.
struct Parcels(Lock<Vec<(u16, u64, Descriptor)>>);

impl Parcels {
    fn new(host: &Arc<dyn Host>) -> Self {
        Self(Lock::new(host.clone(), Vec::new()))
    }

    /// The descriptor that SharedFS sent for object `what`. It was sent before the response, so it has arrived.
    fn take(&self, connection: &Connection, kind: CallKind, what: u64) -> Result<Descriptor, Error> {
        let mut parcels = self.0.lock();
        loop {
            let is_it = |(of, other, _): &(u16, u64, Descriptor)| (*of, *other) == (kind as u16, what);
            if let Some(index) = parcels.iter().position(is_it) {
                return Ok(parcels.swap_remove(index).2);
            }
            let Some(message) = connection.receive()? else { return Err(Error::Refused) };
            let (parcel, descriptor) = open_parcel(message)?;
            if parcels.len() == PARCELS_MAX {
                parcels.remove(0);
            }
            let kind = match kind_of(parcel.request.get()) {
                // The lock table comes with the first lock lease, which may be offered by either.
                kind if kind == CallKind::TestLock as u16 => CallKind::Lock as u16,
                kind => kind,
            };
            parcels.push((kind, parcel.what.get(), descriptor));
        }
    }
}

/// The id of a request: a counter and the kind of the call. A parcel contains the id of its request.
fn request_id(count: u64, kind: CallKind) -> u64 {
    count << u16::BITS | u64::from(kind as u16)
}

fn kind_of(request: u64) -> u16 {
    (request & u64::from(u16::MAX)) as u16
}

/// The space that a response may need: a long one uses one of the ring's few buffers.
fn response_bytes_max(kind: CallKind) -> usize {
    match kind {
        CallKind::Walk
        | CallKind::Entries
        | CallKind::Extents
        | CallKind::Read
        | CallKind::Readlink
        | CallKind::GetXattr
        | CallKind::ListXattr => LONG_RESPONSE_BYTES,
        _ => SHORT_RESPONSE_BYTES,
    }
}

fn open_parcel(message: Message) -> Result<(Parcel, Descriptor), Error> {
    if message.kind != MessageKind::Parcel {
        return Err(Error::Response);
    }
    let (parcel, _) = split::<Parcel>(&message.body)?;
    let [descriptor]: [Descriptor; 1] = message.descriptors.try_into().map_err(|_| Error::Response)?;
    Ok((parcel, descriptor))
}

impl Link for SocketLink {
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error> {
        let body = request.concat();
        let call = Call {
            id: request_id(self.requests.fetch_add(1, Ordering::Relaxed), kind),
            kind: kind as u16,
            body: &body,
            response_bytes_max: response_bytes_max(kind),
        };
        // A `Recalls` call may be pending without a limit. The end of the daemon ends it.
        let until = if kind == CallKind::Recalls { None } else { self.until() };
        let answer = self.ring.call(&call, until)?;
        *response = answer.body;
        Ok(Status::from_raw(answer.status))
    }

    fn is_up(&self) -> bool {
        ipc::Link::is_up(&*self.connection)
    }

    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error> {
        let descriptor = self.parcels.take(&self.connection, CallKind::MapSegment, segment.get().into())?;
        Ok(ReadMapping::from_fd(OwnedFd::from(descriptor))?)
    }

    fn lifeline(&self, number: u64) -> Result<Descriptor, Error> {
        self.parcels.take(&self.connection, CallKind::Share, number)
    }

    fn lock_table(&self, session: u64) -> Result<Region, Error> {
        let descriptor = self.parcels.take(&self.connection, CallKind::Lock, session)?;
        Ok(Region::from_fd(OwnedFd::from(descriptor), self.class)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::BLOCK_BYTES;
    use ipc::{SystemHost, shared};
    use std::fs::File;
    use zerocopy::IntoBytes;
    use zerocopy::little_endian::U64;

    /// Threads wait for a lock table, a segment of the same number, and a liveness socket, and any of them may receive
    /// first: each gets its own descriptor. With a wrong one, a program once read a log as its file.
    #[test]
    fn what_has_one_number_is_not_taken_for_each_other() {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let kinds = [(CallKind::Lock, 1), (CallKind::MapSegment, 2), (CallKind::Share, 3)];
        for first in 0..kinds.len() {
            let (ours, theirs) = Connection::pair().unwrap();
            for (count, (kind, blocks)) in (7..).zip(kinds) {
                let request = U64::new(request_id(count, kind));
                let parcel = Parcel { request, what: U64::new(1), bytes: U64::new(0) };
                let descriptor = shared::create(c"parcel", blocks * BLOCK_BYTES).unwrap();
                theirs.send(MessageKind::Parcel, &[parcel.as_bytes()], &[&descriptor]).unwrap();
            }
            let parcels = Parcels::new(&host);
            for turn in 0..kinds.len() {
                let (kind, blocks) = kinds[(first + turn) % kinds.len()];
                let found = File::from(OwnedFd::from(parcels.take(&ours, kind, 1).unwrap()));
                assert_eq!(found.metadata().unwrap().len(), (blocks * BLOCK_BYTES) as u64, "{kind:?}");
            }
            assert!(matches!(parcels.take(&ours, CallKind::MapSegment, 1), Err(Error::Refused)), "each once");
        }
    }

    #[test]
    fn a_lock_table_comes_with_a_lock_or_a_test_of_one() {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        for kind in [CallKind::Lock, CallKind::TestLock] {
            let (ours, theirs) = Connection::pair().unwrap();
            let request = U64::new(request_id(7, kind));
            let parcel = Parcel { request, what: U64::new(1), bytes: U64::new(0) };
            let table = shared::create(c"parcel", BLOCK_BYTES).unwrap();
            theirs.send(MessageKind::Parcel, &[parcel.as_bytes()], &[&table]).unwrap();
            assert!(Parcels::new(&host).take(&ours, CallKind::Lock, 1).is_ok(), "{kind:?}");
        }
    }
}
