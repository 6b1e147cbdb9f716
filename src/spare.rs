//! A process that has loaded what takes long before it is needed, and becomes a node's daemon as soon as it is told to.
//!
//! The libraries below libfabric sleep for a fifth of a second while they are loaded. A daemon that is started after its
//! predecessor died would be silent for longer than a copy may be: it would leave the copies that count at each restart. So the
//! keeper of a node of several keeps a spare. A spare waits on its standard input for the socket that programs attach to and for
//! the lock of the node's daemon, puts the socket in the place of its standard input, and goes on as every daemon does. It ends
//! when its keeper does.

use crate::chain::links;
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use rustix::io::IoSlice;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use tracing::warn;

/// The message that carries the socket and the lock.
const BEGIN: &[u8] = b"begin";

/// A spare, for the process that started it.
#[derive(Debug)]
pub struct Spare {
    child: Child,
    line: UnixStream,
}

impl Spare {
    /// Starts a process by a command for `hearth daemon`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let (line, theirs) = UnixStream::pair()?;
        let child = command
            .arg("--spare")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self { child, line })
    }

    /// Lets it be the daemon behind a socket, with the lock of the node's daemon; none if it has died.
    pub fn begin(mut self, socket: BorrowedFd<'_>, lock: BorrowedFd<'_>) -> Option<Child> {
        let is_there = matches!(self.child.try_wait(), Ok(None));
        if is_there && let Err(why) = send(&self.line, [socket, lock]) {
            warn!(%why, "the spare daemon does not begin: another is started");
            let _ = self.child.kill();
        } else if is_there {
            return Some(self.child);
        }
        let _ = self.child.wait();
        None
    }
}

fn send(line: &UnixStream, descriptors: [BorrowedFd<'_>; 2]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut passed = SendAncillaryBuffer::new(&mut space);
    passed.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(line, &[IoSlice::new(BEGIN)], &mut passed, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// In the spare: prepares, waits, and puts the socket that it gets in the place of standard input. False if its keeper has
/// ended.
///
/// # Errors
/// The message did not carry a socket and a lock.
pub fn wait(cluster: &Cluster, node: &Node) -> Result<bool> {
    if let Some(chain) = &cluster.settings.chain
        && let Err(why) = links::prepare(chain.address)
    {
        // It is said again, and to more, when the node needs it.
        warn!(%why, node = node.number, "cannot prepare");
    }
    let Some([socket, lock]) = receive(std::io::stdin().as_fd())? else { return Ok(false) };
    // For as long as this process lives.
    std::mem::forget(lock);
    let put = rustix::stdio::dup2_stdin(socket);
    put.map_err(|why| Error::new(format!("cannot take the keeper's socket: {why}")))?;
    Ok(true)
}

fn receive(line: BorrowedFd<'_>) -> Result<Option<[OwnedFd; 2]>> {
    let cannot = |why: &dyn std::fmt::Display| Error::new(format!("cannot hear the keeper: {why}"));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut passed = RecvAncillaryBuffer::new(&mut space);
    let mut message = [0; BEGIN.len()];
    let received = loop {
        match recvmsg(line, &mut [IoSliceMut::new(&mut message)], &mut passed, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received.map_err(|why| cannot(&why))?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let descriptors = passed.drain().flat_map(|part| match part {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    match <[OwnedFd; 2]>::try_from(descriptors.collect::<Vec<_>>()) {
        Ok(both) if message == BEGIN => Ok(Some(both)),
        _ => Err(cannot(&"it sent no socket and no lock")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::ExitStatus;

    #[test]
    fn a_socket_comes_over_the_line_and_the_end_of_the_keeper_too() {
        let dir = tempfile::tempdir().unwrap();
        let socket = UnixListener::bind(dir.path().join("socket")).unwrap();
        let (line, theirs) = UnixStream::pair().unwrap();
        let lock = std::fs::File::create(dir.path().join("lock")).unwrap();
        send(&line, [socket.as_fd(), lock.as_fd()]).unwrap();
        let [passed, _] = receive(theirs.as_fd()).unwrap().expect("a socket was sent");
        assert!(rustix::net::sockopt::socket_acceptconn(&passed).unwrap());
        drop(line);
        assert!(receive(theirs.as_fd()).unwrap().is_none());
    }

    #[test]
    fn what_is_no_socket_is_refused() {
        let (line, theirs) = UnixStream::pair().unwrap();
        rustix::io::write(&line, BEGIN).unwrap();
        receive(theirs.as_fd()).unwrap_err();
    }

    #[test]
    fn a_spare_that_died_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let socket = UnixListener::bind(dir.path().join("socket")).unwrap();
        let mut spare = Spare::start(Command::new("false")).unwrap();
        let ended: ExitStatus = spare.child.wait().unwrap();
        assert!(!ended.success());
        assert!(spare.begin(socket.as_fd(), socket.as_fd()).is_none());
    }
}
