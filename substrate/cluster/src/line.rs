//! Messages to and from a manager, each with a deadline, in one of two ways: over a Unix socket, where the permissions
//! of its folder say who may open it; or over [`transport`], where both sides have proved the cluster's key. There a
//! message of the manager travels in as many messages of the connection as it takes: its head says how long it is.

use crate::error::Error;
use format::cluster::{ClusterHead, ClusterKind};
use format::wire::RefusalReason;
use format::{Epoch, NodeId};
use ipc::{Host, Time};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use transport::{Connection, Endpoint, Event, Settings};

/// Bytes of a head.
const HEAD_BYTES: usize = size_of::<ClusterHead>();

/// The epoch of all connections to a manager: who wants to join is in none yet.
pub const EPOCH: Epoch = Epoch::new(0);

/// Limits of an endpoint on either side of a connection to a manager, which is [`EPOCH`]'s: little memory, no polling.
pub fn settings() -> Settings {
    let silence = Some(Duration::from_secs(5));
    Settings { message_bytes: 4096, window: 8, depth: 8, spin_ns: 0, silence, ..Settings::default() }
}

/// Where a manager is.
#[derive(Clone, Debug)]
pub enum Place {
    /// Behind the socket at this path, on this machine.
    Socket(PathBuf),
    /// Where the manager listens for nodes, by an endpoint with [`settings`], in [`EPOCH`].
    Node {
        /// The own end.
        endpoint: Endpoint,
        /// Address of the manager.
        address: String,
    },
}

/// One connection.
pub struct Line {
    host: Arc<dyn Host>,
    way: Way,
}

enum Way {
    Socket(UnixStream),
    Node(Node),
}

/// A connection of [`transport`] as a stream of bytes.
struct Node {
    connection: Connection,
    arrived: Vec<u8>,
    /// How much of it was read.
    read: usize,
}

/// Why nothing was read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineError {
    /// The deadline came.
    TimedOut,
    /// The other side is gone, or what it sent is no message: the connection is of no more use.
    Broken,
}

impl Line {
    /// Connects to the manager at this place.
    ///
    /// # Errors
    /// `Unreachable`; `NotLetIn`.
    pub fn connect(host: Arc<dyn Host>, place: &Place, until: Time) -> Result<Self, Error> {
        let way = match place {
            Place::Socket(path) => Way::Socket(knock(path).map_err(of_knock)?),
            Place::Node { endpoint, address } => {
                Way::of(endpoint.connect(address, NodeId::MANAGER, until).map_err(of_handshake)?)
            }
        };
        Ok(Self { host, way })
    }

    /// A connection that was accepted on the socket.
    pub fn accepted(host: Arc<dyn Host>, stream: UnixStream) -> Self {
        Self { host, way: Way::Socket(stream) }
    }

    /// A connection of a node that has proved the key.
    pub fn of_node(host: Arc<dyn Host>, connection: Connection) -> Self {
        Self { host, way: Way::of(connection) }
    }

    /// True if it is known to be of no more use.
    pub fn is_over(&self) -> bool {
        matches!(&self.way, Way::Node(node) if node.connection.ended().is_some())
    }

    /// Sends a message. One that failed was not sent whole, so the other side does not take it for one.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn send(&mut self, message: &[u8], until: Time) -> Result<(), LineError> {
        let mut rest = message;
        while !rest.is_empty() {
            let left = self.left(until)?;
            let count = match &mut self.way {
                Way::Socket(stream) => write_some(stream, rest, left)?,
                Way::Node(node) => node.send_some(rest, until)?,
            };
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Waits for the first byte of a message; none when `until` has come.
    ///
    /// # Errors
    /// `Broken`.
    pub fn first_byte(&mut self, until: Time) -> Result<Option<u8>, LineError> {
        let mut byte = [0];
        match self.fill(&mut byte, until) {
            Ok(()) => Ok(Some(byte[0])),
            Err(LineError::TimedOut) => Ok(None),
            Err(LineError::Broken) => Err(LineError::Broken),
        }
    }

    /// Receives the rest of a message that begins with this byte: its head, its kind, its body.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn receive(
        &mut self,
        first: u8,
        until: Time,
    ) -> Result<(ClusterHead, ClusterKind, Vec<u8>), LineError> {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0] = first;
        self.fill(&mut bytes[1..], until)?;
        let head = ClusterHead::decode(&bytes).map_err(|_| LineError::Broken)?;
        let kind = ClusterKind::from_raw(head.kind.get()).map_err(|_| LineError::Broken)?;
        // The head is checked: no more than a message may have.
        let mut body = vec![0; head.body_bytes.get() as usize];
        self.fill(&mut body, until)?;
        head.check_body(&body).map_err(|_| LineError::Broken)?;
        Ok((head, kind, body))
    }

    fn fill(&mut self, target: &mut [u8], until: Time) -> Result<(), LineError> {
        let mut filled = 0;
        while filled < target.len() {
            let left = self.left(until)?;
            filled += match &mut self.way {
                Way::Socket(stream) => read_some(stream, &mut target[filled..], left)?,
                Way::Node(node) => node.read_some(&mut target[filled..], until)?,
            };
        }
        Ok(())
    }

    fn left(&self, until: Time) -> Result<Duration, LineError> {
        let left = until.since(self.host.now());
        if left.is_zero() { Err(LineError::TimedOut) } else { Ok(left) }
    }
}

impl Way {
    fn of(connection: Connection) -> Self {
        Self::Node(Node { connection, arrived: Vec::new(), read: 0 })
    }
}

impl Node {
    /// Sends the beginning of some bytes; gives how many.
    fn send_some(&self, bytes: &[u8], until: Time) -> Result<usize, LineError> {
        let count = bytes.len().min(self.connection.message_bytes_max());
        match self.connection.send(&bytes[..count], Some(until)) {
            Ok(_) => Ok(count),
            Err(transport::Error::Interrupted) => Ok(0),
            Err(transport::Error::TimedOut) => Err(LineError::TimedOut),
            Err(_) => Err(LineError::Broken),
        }
    }

    fn read_some(&mut self, target: &mut [u8], until: Time) -> Result<usize, LineError> {
        if self.read == self.arrived.len() {
            self.arrived = match self.connection.take(Some(until)) {
                Ok(Event::Message(bytes)) if !bytes.is_empty() => bytes,
                Err(transport::Error::Interrupted) => return Ok(0),
                Err(transport::Error::TimedOut) => return Err(LineError::TimedOut),
                Ok(_) | Err(_) => return Err(LineError::Broken),
            };
            self.read = 0;
        }
        let rest = &self.arrived[self.read..];
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        self.read += count;
        Ok(count)
    }
}

/// Connects at once or not at all: a manager that is stopped accepts nobody, and where its backlog is full the kernel would
/// wait for it without end.
///
/// # Errors
/// What the kernel says: `CONNREFUSED` if nobody listens there, `AGAIN` if whoever does has no room.
pub fn knock(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    // From here on each call has its time.
    ioctl_fionbio(&stream, false)?;
    Ok(stream)
}

/// What a knock that failed means: a manager that is not there now, or a place where there is none for this user.
fn of_knock(errno: Errno) -> Error {
    match errno {
        Errno::ACCESS | Errno::PERM | Errno::NOTDIR | Errno::LOOP | Errno::PROTOTYPE | Errno::NAMETOOLONG => {
            Error::System { call: "connect", errno: errno.raw_os_error() }
        }
        _ => Error::Unreachable,
    }
}

/// Writes the beginning of some bytes; gives how many, none if the time was up.
fn write_some(stream: &mut UnixStream, bytes: &[u8], left: Duration) -> Result<usize, LineError> {
    stream.set_write_timeout(Some(left)).map_err(|_| LineError::Broken)?;
    match stream.write(bytes) {
        Ok(0) => Err(LineError::Broken),
        Ok(count) => Ok(count),
        Err(error) => may_go_on(&error).map(|()| 0),
    }
}

fn read_some(stream: &mut UnixStream, target: &mut [u8], left: Duration) -> Result<usize, LineError> {
    stream.set_read_timeout(Some(left)).map_err(|_| LineError::Broken)?;
    match stream.read(target) {
        Ok(0) => Err(LineError::Broken),
        Ok(count) => Ok(count),
        Err(error) => may_go_on(&error).map(|()| 0),
    }
}

/// What a handshake that failed means: a refusal for good, or a manager that is not there now.
fn of_handshake(error: transport::Error) -> Error {
    let passes = [RefusalReason::Full, RefusalReason::Late];
    match error {
        transport::Error::Refused { reason, .. } if !passes.contains(&reason) => Error::NotLetIn(error),
        transport::Error::Address(_) => Error::NotLetIn(error),
        _ => Error::Unreachable,
    }
}

/// A call that was interrupted, or whose time was up, is followed by a look at the clock.
fn may_go_on(error: &std::io::Error) -> Result<(), LineError> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(LineError::Broken),
    }
}
