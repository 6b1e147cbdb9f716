//! Identity of the process at the other end of a connection, as the kernel gives it, and detection of that
//! process's end.
//!
//! The end of a process has two signs: the socket hangs up, and the pidfd becomes readable. Either one ends the
//! session, because a child that inherited the socket keeps it open, and a process can close its socket and live
//! on.

use crate::error::Error;
use crate::ring::Link;
use crate::socket::{Connection, poll};
use crate::sys::{Descriptor, check, syscall};
use std::time::Duration;

/// Largest number of supplementary groups of a process on Linux.
const GROUPS_MAX: usize = 65_536;

/// Identity of a process at the time when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Process number in the daemon's namespace; 0 if the process is not visible there. Only for messages to
    /// people: the kernel reuses numbers.
    pub pid: i32,
}

/// A connected process.
#[derive(Debug)]
pub struct Peer {
    connection: Connection,
    credentials: Credentials,
    process: Descriptor,
}

impl Peer {
    /// Asks the kernel for the identity of the process at the other end.
    ///
    /// # Errors
    /// `Disconnected` if the process has ended; `System`.
    pub fn new(connection: Connection) -> Result<Self, Error> {
        let [pid, uid, gid] = who(&connection)?;
        let pid = pid.cast_signed();
        let groups = groups(&connection)?;
        let process = process(&connection, pid)?;
        Ok(Self { connection, credentials: Credentials { uid, gid, groups, pid }, process })
    }

    /// Identity of the process.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The connection; its descriptor is readable when a message has arrived or the other end is closed.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether a thread of the process runs or waits for a processor (or for a disk). False if the process is stopped, if all of its
    /// threads sleep, or if the daemon may not look.
    pub fn is_runnable(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.credentials.pid));
        let runnable = threads.is_ok_and(|threads| {
            threads
                .flatten()
                .any(|thread| std::fs::read(thread.path().join("stat")).is_ok_and(|stat| is_runnable(&stat)))
        });
        // Looked at last: the number is that of this process only as long as the process lives.
        runnable && self.is_up()
    }

    /// The pidfd; it is readable once the process has ended.
    pub fn process(&self) -> &Descriptor {
        &self.process
    }
}

impl Link for Peer {
    /// True while the process lives and its end of the connection is open.
    fn is_up(&self) -> bool {
        let mut asked = [libc::pollfd { fd: self.process.raw(), events: libc::POLLIN, revents: 0 }];
        let ended = poll(&mut asked, Some(Duration::ZERO)).is_ok() && asked[0].revents != 0;
        !ended && self.connection.is_up()
    }
}

/// Whether the `stat` line of a thread says that it runs, waits for a processor or waits for a disk.
fn is_runnable(stat: &[u8]) -> bool {
    // The name in parentheses may contain anything.
    let name_end = stat.iter().rposition(|byte| *byte == b')');
    name_end.and_then(|end| stat.get(end + 2)).is_some_and(|state| matches!(state, b'R' | b'D'))
}

/// User of a process at the time when it connected.
///
/// # Errors
/// `System`.
pub fn uid_of(connection: &Connection) -> Result<u32, Error> {
    Ok(who(connection)?[1])
}

/// Number, user and group of a process at the time when it connected.
fn who(connection: &Connection) -> Result<[u32; 3], Error> {
    let mut cred = [0; 3];
    option(connection, libc::SO_PEERCRED, as_bytes_mut(&mut cred))?;
    Ok(cred)
}

/// Reads a socket option and returns its length.
fn option(connection: &Connection, name: i32, value: &mut [u8]) -> Result<usize, Error> {
    let mut bytes = u32::try_from(value.len()).expect("options are short");
    let arguments = [
        connection.descriptor().argument(),
        libc::SOL_SOCKET as usize,
        name as usize,
        value.as_mut_ptr() as usize,
        &raw mut bytes as usize,
        0,
    ];
    // SAFETY: the kernel writes at most `bytes` bytes to `value`, and the length to `bytes`.
    check("getsockopt", unsafe { syscall(libc::SYS_getsockopt, arguments) })?;
    Ok(bytes as usize)
}

fn as_bytes_mut(numbers: &mut [u32]) -> &mut [u8] {
    zerocopy::IntoBytes::as_mut_bytes(numbers)
}

fn groups(connection: &Connection) -> Result<Vec<u32>, Error> {
    let mut groups = vec![0u32; 32];
    loop {
        match option(connection, libc::SO_PEERGROUPS, as_bytes_mut(&mut groups)) {
            Ok(bytes) => {
                groups.truncate(bytes / size_of::<u32>());
                return Ok(groups);
            }
            Err(Error::System { errno: libc::ERANGE, .. }) if groups.len() < GROUPS_MAX => {
                groups.resize(groups.len() * 8, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Opens a pidfd of the process. Kernels before 6.5 cannot return the process of a socket. There the process is
/// looked up by its number, which names another process if the first has ended and its number was used again
/// meanwhile. In that case the socket has hung up, or a child holds it, whose session then ends with that other
/// process: late, but certainly.
fn process(connection: &Connection, pid: i32) -> Result<Descriptor, Error> {
    let mut raw = [0u32; 1];
    match option(connection, libc::SO_PEERPIDFD, as_bytes_mut(&mut raw)) {
        // SAFETY: the kernel has just created this descriptor for this process.
        Ok(_) => return Ok(unsafe { Descriptor::from_raw(raw[0].cast_signed()) }),
        Err(Error::System { errno: libc::ENOPROTOOPT, .. }) => {}
        Err(Error::System { errno: libc::ESRCH | libc::EINVAL | libc::ENODATA, .. }) => {
            return Err(Error::Disconnected);
        }
        Err(error) => return Err(error),
    }
    // SAFETY: pidfd_open uses no memory.
    let result = unsafe { syscall(libc::SYS_pidfd_open, [pid.cast_unsigned() as usize, 0, 0, 0, 0, 0]) };
    match Descriptor::from_call("pidfd_open", result) {
        Err(Error::System { errno: libc::ESRCH | libc::EINVAL, .. }) => Err(Error::Disconnected),
        other => other,
    }
}
