//! Messages over a Unix socket, each with a deadline. Who may open the socket is decided by its folder's permissions:
//! it is for one machine, as the embedded manager is.

use crate::error::Error;
use format::cluster::{ClusterHead, ClusterKind};
use ipc::{Host, Time};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a head.
const HEAD_BYTES: usize = size_of::<ClusterHead>();

/// One connection.
pub struct Line {
    host: Arc<dyn Host>,
    stream: UnixStream,
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
    /// Connects to the manager at this path.
    ///
    /// # Errors
    /// `System`.
    pub fn connect(host: Arc<dyn Host>, path: &Path) -> Result<Self, Error> {
        let stream = UnixStream::connect(path).map_err(|error| Error::of_io("connect", &error))?;
        Ok(Self { host, stream })
    }

    /// A connection that was accepted.
    pub fn accepted(host: Arc<dyn Host>, stream: UnixStream) -> Self {
        Self { host, stream }
    }

    /// Sends a message. One that failed was not sent whole, so the other side does not take it for one.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn send(&mut self, message: &[u8], until: Time) -> Result<(), LineError> {
        let mut rest = message;
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(self.left(until)?)).map_err(|_| LineError::Broken)?;
            match self.stream.write(rest) {
                Ok(0) => return Err(LineError::Broken),
                Ok(count) => rest = &rest[count..],
                Err(error) => may_go_on(&error)?,
            }
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
            self.stream.set_read_timeout(Some(self.left(until)?)).map_err(|_| LineError::Broken)?;
            match self.stream.read(&mut target[filled..]) {
                Ok(0) => return Err(LineError::Broken),
                Ok(count) => filled += count,
                Err(error) => may_go_on(&error)?,
            }
        }
        Ok(())
    }

    fn left(&self, until: Time) -> Result<std::time::Duration, LineError> {
        let left = until.since(self.host.now());
        if left.is_zero() { Err(LineError::TimedOut) } else { Ok(left) }
    }
}

/// A call that was interrupted, or whose time was up, is followed by a look at the clock.
fn may_go_on(error: &std::io::Error) -> Result<(), LineError> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(LineError::Broken),
    }
}
