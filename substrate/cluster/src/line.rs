//! Connections to a manager, of two kinds: over a Unix socket, where the permissions of its folder control the access;
//! and over [`transport`], where both sides have proved the cluster's key. Each message has a deadline. Over
//! [`transport`], a message of the manager may take several messages of the connection, as its head contains its
//! length.

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

/// The epoch of all connections to a manager, because a joining node has no epoch yet.
pub const EPOCH: Epoch = Epoch::new(0);

/// Settings of an endpoint on either side of a connection to a manager, in [`EPOCH`]: little memory, no polling.
pub fn settings() -> Settings {
    let silence = Some(Duration::from_secs(5));
    Settings { message_bytes: 4096, window: 8, depth: 8, spin_ns: 0, silence, ..Settings::default() }
}

/// The place of a manager.
#[derive(Clone, Debug)]
pub enum Place {
    /// The path of a socket on this machine.
    Socket(PathBuf),
    /// The address at which the manager listens for nodes, in [`EPOCH`].
    Node {
        /// The local endpoint, with [`settings`].
        endpoint: Endpoint,
        /// Address of the manager.
        address: String,
    },
}

/// A connection to a manager, or of a client.
pub struct ManagerConnection {
    host: Arc<dyn Host>,
    channel: Channel,
}

enum Channel {
    Socket(UnixStream),
    Node(NodeStream),
}

/// A connection of [`transport`] as a stream of bytes.
struct NodeStream {
    connection: Connection,
    arrived: Vec<u8>,
    /// Number of its bytes that were read.
    read: usize,
}

/// The reason for which nothing was read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionError {
    /// The deadline has passed.
    TimedOut,
    /// The other side is gone, or has sent an invalid message: the connection cannot be used any more.
    Broken,
}

impl ManagerConnection {
    /// Connects to the manager at this place.
    ///
    /// # Errors
    /// `Unreachable`; `NotLetIn`.
    pub fn connect(host: Arc<dyn Host>, place: &Place, until: Time) -> Result<Self, Error> {
        let channel = match place {
            Place::Socket(path) => Channel::Socket(knock(path).map_err(of_connect)?),
            Place::Node { endpoint, address } => {
                Channel::of(endpoint.connect(address, NodeId::MANAGER, until).map_err(of_handshake)?)
            }
        };
        Ok(Self { host, channel })
    }

    /// A connection that the socket has accepted.
    pub fn accepted(host: Arc<dyn Host>, stream: UnixStream) -> Self {
        Self { host, channel: Channel::Socket(stream) }
    }

    /// A connection of a node that has proved the key.
    pub fn of_node(host: Arc<dyn Host>, connection: Connection) -> Self {
        Self { host, channel: Channel::of(connection) }
    }

    /// True if it is known to be broken.
    pub fn is_over(&self) -> bool {
        matches!(&self.channel, Channel::Node(node) if node.connection.ended().is_some())
    }

    /// Sends a message. After a failure the message was not sent completely, so the other side does not execute it.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub fn send(&mut self, message: &[u8], until: Time) -> Result<(), ConnectionError> {
        let mut rest = message;
        while !rest.is_empty() {
            let left = self.left(until)?;
            let count = match &mut self.channel {
                Channel::Socket(stream) => write_some(stream, rest, left)?,
                Channel::Node(node) => node.send_some(rest, until)?,
            };
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Waits for the first byte of a message; `None` at the deadline.
    ///
    /// # Errors
    /// `Broken`.
    pub fn first_byte(&mut self, until: Time) -> Result<Option<u8>, ConnectionError> {
        let mut byte = [0];
        match self.fill(&mut byte, until) {
            Ok(()) => Ok(Some(byte[0])),
            Err(ConnectionError::TimedOut) => Ok(None),
            Err(ConnectionError::Broken) => Err(ConnectionError::Broken),
        }
    }

    /// Receives the rest of a message that begins with this byte: its head, its kind, its body.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub fn receive(
        &mut self,
        first: u8,
        until: Time,
    ) -> Result<(ClusterHead, ClusterKind, Vec<u8>), ConnectionError> {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0] = first;
        self.fill(&mut bytes[1..], until)?;
        let head = ClusterHead::decode(&bytes).map_err(|_| ConnectionError::Broken)?;
        let kind = ClusterKind::from_raw(head.kind.get()).map_err(|_| ConnectionError::Broken)?;
        // The head was checked, so the length is within the limit of a message.
        let mut body = vec![0; head.body_bytes.get() as usize];
        self.fill(&mut body, until)?;
        head.check_body(&body).map_err(|_| ConnectionError::Broken)?;
        Ok((head, kind, body))
    }

    fn fill(&mut self, target: &mut [u8], until: Time) -> Result<(), ConnectionError> {
        let mut filled = 0;
        while filled < target.len() {
            let left = self.left(until)?;
            filled += match &mut self.channel {
                Channel::Socket(stream) => read_some(stream, &mut target[filled..], left)?,
                Channel::Node(node) => node.read_some(&mut target[filled..], until)?,
            };
        }
        Ok(())
    }

    fn left(&self, until: Time) -> Result<Duration, ConnectionError> {
        let left = until.since(self.host.now());
        if left.is_zero() { Err(ConnectionError::TimedOut) } else { Ok(left) }
    }
}

impl Channel {
    fn of(connection: Connection) -> Self {
        Self::Node(NodeStream { connection, arrived: Vec::new(), read: 0 })
    }
}

impl NodeStream {
    /// Sends the first bytes of a slice; returns their number.
    fn send_some(&self, bytes: &[u8], until: Time) -> Result<usize, ConnectionError> {
        let count = bytes.len().min(self.connection.message_bytes_max());
        match self.connection.send(&bytes[..count], Some(until)) {
            Ok(_) => Ok(count),
            Err(transport::Error::Interrupted) => Ok(0),
            Err(transport::Error::TimedOut) => Err(ConnectionError::TimedOut),
            Err(_) => Err(ConnectionError::Broken),
        }
    }

    fn read_some(&mut self, target: &mut [u8], until: Time) -> Result<usize, ConnectionError> {
        if self.read == self.arrived.len() {
            self.arrived = match self.connection.take(Some(until)) {
                Ok(Event::Message(bytes)) if !bytes.is_empty() => bytes,
                Err(transport::Error::Interrupted) => return Ok(0),
                Err(transport::Error::TimedOut) => return Err(ConnectionError::TimedOut),
                Ok(_) | Err(_) => return Err(ConnectionError::Broken),
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

/// Connects at once or fails: a stopped manager accepts no connection, and if its backlog is full, the kernel would
/// wait without end.
///
/// # Errors
/// Those of the kernel: `CONNREFUSED` if no process listens there, `AGAIN` if its backlog is full.
pub fn knock(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    // From here on, each call has its own timeout.
    ioctl_fionbio(&stream, false)?;
    Ok(stream)
}

/// The error for a failed connection request: a manager that is not there now, or a path where this user cannot reach
/// one.
fn of_connect(errno: Errno) -> Error {
    match errno {
        Errno::ACCESS | Errno::PERM | Errno::NOTDIR | Errno::LOOP | Errno::PROTOTYPE | Errno::NAMETOOLONG => {
            Error::System { call: "connect", errno: errno.raw_os_error() }
        }
        _ => Error::Unreachable,
    }
}

/// Writes the first bytes of a slice; returns their number, 0 after a timeout.
fn write_some(stream: &mut UnixStream, bytes: &[u8], left: Duration) -> Result<usize, ConnectionError> {
    stream.set_write_timeout(Some(left)).map_err(|_| ConnectionError::Broken)?;
    match stream.write(bytes) {
        Ok(0) => Err(ConnectionError::Broken),
        Ok(count) => Ok(count),
        Err(error) => may_go_on(&error).map(|()| 0),
    }
}

fn read_some(stream: &mut UnixStream, target: &mut [u8], left: Duration) -> Result<usize, ConnectionError> {
    stream.set_read_timeout(Some(left)).map_err(|_| ConnectionError::Broken)?;
    match stream.read(target) {
        Ok(0) => Err(ConnectionError::Broken),
        Ok(count) => Ok(count),
        Err(error) => may_go_on(&error).map(|()| 0),
    }
}

/// The error for a failed handshake: a permanent refusal, or a manager that is not there now.
fn of_handshake(error: transport::Error) -> Error {
    let passes = [RefusalReason::Full, RefusalReason::Late, RefusalReason::Failed];
    match error {
        transport::Error::Refused { reason, .. } if !passes.contains(&reason) => Error::NotLetIn(error),
        transport::Error::Address(_) => Error::NotLetIn(error),
        _ => Error::Unreachable,
    }
}

/// After an interrupted call or a timeout, the caller checks the clock and continues.
fn may_go_on(error: &std::io::Error) -> Result<(), ConnectionError> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(ConnectionError::Broken),
    }
}
