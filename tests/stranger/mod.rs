//! A client of the daemon that is no LibFS: it greets as one, and then calls and appends what it likes.

use format::call::{CallKind, Status, split};
use format::checksum::Salt;
use format::message::{MessageKind, RingShape};
use format::record::{Kind, RecordHeader};
use format::session::{SESSION_BYTES, Welcome};
use format::{Envelope, InodeNumber, Sequence};
use ipc::ring::{Call, RingClient, RingLimits};
use ipc::shared::{Access, Mapping};
use ipc::socket::{Connection, hello};
use ipc::words::{FenceBy, Seal};
use ipc::{ClientPages, DaemonView, Descriptor, Host, SystemHost};
use pmem::ring::AppendRing;
use pmem::{Class, Region};
use rustix::fs::{OFlags, fcntl_getfl};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromZeros;

/// Where a log's ring begins: behind its superblock.
pub const RING_START: u64 = format::BLOCK_BYTES as u64;

/// A session, as its process has it.
pub struct Stranger {
    connection: Arc<Connection>,
    pub welcome: Welcome,
    pub log: Region,
    pages: ClientPages,
    view: DaemonView,
    calls: RingClient,
    ring: AppendRing,
    /// The descriptors that came with the Welcome beside the log, the words of the session and the ring.
    pub others: Vec<OwnedFd>,
    next_call: u64,
}

impl Stranger {
    /// Greets as a program of this version does.
    pub fn attach(socket: &Path) -> Self {
        let connection = Connection::connect(socket).unwrap();
        let until = SystemHost.now().after(Duration::from_secs(30));
        let greeting = hello(env!("CARGO_PKG_VERSION"), 0, 0);
        let message = connection.greet(&SystemHost, &greeting, Some(until)).unwrap();
        let (shape, rest) = split::<RingShape>(&message.body).unwrap();
        let (welcome, _) = split::<Welcome>(rest).unwrap();
        let mut descriptors = message.descriptors.into_iter();
        let mut next = || descriptors.next().unwrap();
        let (log, session, leases, ring) = (next(), next(), next(), next());
        let log = Region::from_fd(OwnedFd::from(log), Class::Memory).unwrap();
        let limits = RingLimits::from(shape);
        let map = |memory: &Descriptor, bytes| Mapping::new(memory, bytes, Access::Write).unwrap();
        let pages = ClientPages::new(&map(&session, SESSION_BYTES)).unwrap();
        let words = welcome.lease_words.get() as usize;
        let bytes = format::session::lease_bytes(words);
        let view = DaemonView::new(&Mapping::new(&leases, bytes, Access::Read).unwrap(), words).unwrap();
        let memory = map(&ring, limits.bytes().unwrap());
        let connection = Arc::new(connection);
        let link = Box::new(connection.clone());
        let calls = RingClient::new(Arc::new(SystemHost), link, memory, limits, 0).unwrap();
        let salt = Salt::of_log(welcome.log, welcome.incarnation);
        let ring = AppendRing::empty(log.clone(), RING_START, salt, Sequence::new(1));
        let others = std::iter::once(leases).chain(descriptors).map(OwnedFd::from).collect();
        Self { connection, welcome, log, pages, view, calls, ring, others, next_call: 1 }
    }

    /// One call.
    pub fn call(&mut self, kind: CallKind, body: &[u8]) -> Result<Vec<u8>, Status> {
        let call = Call { id: self.next_call, kind: kind as u16, body, response_bytes_max: 100_000 };
        self.next_call += 1;
        let until = SystemHost.now().after(Duration::from_secs(30));
        // A session that was ended answers nothing.
        let response = self.calls.call(&call, Some(until)).map_err(|_| Status::Sealed)?;
        match Status::from_raw(response.status) {
            Status::Ok => Ok(response.body),
            status => Err(status),
        }
    }

    /// The descriptors that the daemon sent beside an answer.
    pub fn parcels(&self) -> Vec<OwnedFd> {
        let mut found = Vec::new();
        while let Ok(Some(message)) = self.connection.receive() {
            assert_eq!(message.kind, MessageKind::Parcel);
            found.extend(message.descriptors.into_iter().map(OwnedFd::from));
        }
        found
    }

    /// A record with a right checksum, committed; false if the log is sealed.
    pub fn append(
        &mut self,
        kind: Kind,
        inode: u64,
        set: impl FnOnce(&mut RecordHeader),
        payload: &[u8],
    ) -> bool {
        let mut header = RecordHeader {
            envelope: Envelope::new(kind as u8, 0, payload.len() as u32),
            inode: InodeNumber::new(inode),
            time_ns: 1.into(),
            ..RecordHeader::new_zeroed()
        };
        set(&mut header);
        let bytes: [u8; 64] = zerocopy::transmute!(header);
        let appended = self.ring.append(bytes, &[payload.into()]).unwrap();
        self.pages.commit().commit(appended.sequence, FenceBy::Operation);
        self.view.seal() == Seal::Open
    }

    /// The last record of its log.
    pub fn last(&self) -> Sequence {
        self.pages.commit().load()
    }
}

/// Whether nothing can be written through a descriptor, as it is or opened again.
pub fn is_for_reading_only(descriptor: &OwnedFd) -> bool {
    let flags = fcntl_getfl(descriptor).unwrap();
    let again = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let opened = std::fs::File::options().write(true).open(again);
    flags & OFlags::RWMODE == OFlags::RDONLY && opened.is_err()
}
