//! The door of a node: plain TCP sockets of ours, at which strangers talk to us and to nothing else; and what follows
//! for who has proved the key.
//!
//! The provider's listener trusts whoever reaches it. So there is none but for one authenticated peer at a time: it has
//! a port of its own, hears only the address and port from which that peer said it would come (over `tcp`: a filter of
//! the kernel on its socket, [`sockets`]), takes one connection, which brings along what was agreed at the door, and is
//! closed. Over `verbs` there is no socket to guard; the rest is the same.
//!
//! A listener of libfabric 1.17 must not be closed while anything in the provider leads to it: a socket that connected
//! and said nothing, an event that nobody read. So the progress thread closes it, when there is neither.

use super::sockets::{self, system};
use super::sys::{Domain, RawInfo, RawListener};
use super::{FabricLink, Running, completions};
use crate::error::{Ended, Error};
use crate::link::{Approach, Door, Heard, Invitation, Judge, Link, Talk};
use crate::news::News;
use format::Epoch;
use format::wire::{DOOR_MESSAGE_MAX, DoorHead, DoorKind, RefusalReason, WireRefusal};
use ipc::sync::Ordering;
use ipc::{Host, Lock, Time};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Bytes that may wait to leave in a talk: more than a handshake says.
const OUT_BYTES_MAX: usize = 4 * DOOR_MESSAGE_MAX;

/// Somebody at the door, over TCP.
pub(super) struct TcpTalk {
    running: Arc<Running>,
    socket: TcpStream,
    id: u64,
    news: Arc<News>,
    bytes: Lock<TalkBytes>,
}

struct TalkBytes {
    /// What came and was not heard: [`DOOR_MESSAGE_MAX`] at most.
    came: Vec<u8>,
    /// What was said and has not left.
    out: Vec<u8>,
    over: bool,
}

impl TcpTalk {
    /// A talk over a socket that does not block.
    pub fn new(running: &Arc<Running>, socket: TcpStream, news: Arc<News>) -> Self {
        let id = running.hear(socket.as_raw_fd(), &news);
        let bytes = TalkBytes { came: Vec::new(), out: Vec::new(), over: false };
        let bytes = Lock::new(running.host().clone(), bytes);
        Self { running: running.clone(), socket, id, news, bytes }
    }
}

impl TalkBytes {
    /// Sends what waits, as far as there is room.
    fn leave(&mut self, mut socket: &TcpStream) {
        while !self.out.is_empty() && !self.over {
            match socket.write(&self.out) {
                Ok(count) => drop(self.out.drain(..count)),
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock => return,
                    _ => self.over = true,
                },
            }
        }
    }

    /// Takes what has come, no more than one message can have; false if there was nothing.
    fn come(&mut self, mut socket: &TcpStream) -> bool {
        let mut bytes = [0; DOOR_MESSAGE_MAX];
        let room = DOOR_MESSAGE_MAX - self.came.len();
        match socket.read(&mut bytes[..room]) {
            Ok(0) => self.over = true,
            Ok(count) => self.came.extend_from_slice(&bytes[..count]),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => return false,
                _ => self.over = true,
            },
        }
        true
    }
}

impl Talk for TcpTalk {
    fn news(&self) -> &Arc<News> {
        &self.news
    }

    fn say(&self, kind: DoorKind, body: &[u8]) -> Result<(), Error> {
        assert_eq!(body.len(), kind.body_bytes(), "a message has the length of its kind");
        let mut bytes = self.bytes.lock();
        if bytes.out.len() + size_of::<DoorHead>() + body.len() > OUT_BYTES_MAX {
            return Err(Error::Unavailable("the talk found no room"));
        }
        bytes.out.extend_from_slice(DoorHead::new(kind).as_bytes());
        bytes.out.extend_from_slice(body);
        bytes.leave(&self.socket);
        if bytes.over { Err(Error::Ended(Ended::Lost)) } else { Ok(()) }
    }

    fn hear(&self) -> Heard {
        let mut bytes = self.bytes.lock();
        bytes.leave(&self.socket);
        loop {
            match DoorHead::decode(&bytes.came) {
                Err(_) => return Heard::Noise,
                Ok(Some((kind, body))) => {
                    let body = body.to_vec();
                    bytes.came.drain(..size_of::<DoorHead>() + body.len());
                    return Heard::Said(kind, body);
                }
                Ok(None) if bytes.over => return Heard::Gone,
                Ok(None) => {
                    if !bytes.come(&self.socket) {
                        return Heard::Nothing;
                    }
                }
            }
        }
    }

    fn hang_up(&self) {
        // That it is broken already is heard.
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn arm(&self) {
        let out = if self.bytes.lock().out.is_empty() { 0 } else { libc::EPOLLOUT };
        let events = libc::EPOLLIN | out | libc::EPOLLONESHOT;
        self.running.inner.control(libc::EPOLL_CTL_MOD, self.socket.as_raw_fd(), events, self.id);
    }

    fn next_due(&self) -> Option<Time> {
        None
    }

    fn from(&self) -> Option<IpAddr> {
        self.socket.peer_addr().ok().map(|peer| peer.ip())
    }
}

impl Drop for TcpTalk {
    fn drop(&mut self) {
        self.running.hear_no_more(self.id);
    }
}

/// A door, open.
pub(super) struct OpenDoor {
    running: Arc<Running>,
    socket: TcpListener,
    address: SocketAddr,
    id: u64,
    news: Arc<News>,
}

impl OpenDoor {
    /// At a port of this node, or at any free one.
    pub fn new(running: &Arc<Running>, port: u16, news: Arc<News>) -> Result<Self, Error> {
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::AddrInUse => Error::Unavailable("the address is taken"),
            _ => system("listen", &error),
        };
        let socket = TcpListener::bind(SocketAddr::new(running.inner.ip, port)).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let id = running.hear(socket.as_raw_fd(), &news);
        Ok(Self { running: running.clone(), socket, address, id, news })
    }
}

impl Door for OpenDoor {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn next(&self) -> Result<Option<Arc<dyn Talk>>, Error> {
        loop {
            match self.socket.accept() {
                Ok((socket, _)) => {
                    // What cannot be had without blocking is not talked to.
                    if socket.set_nonblocking(true).is_err() {
                        continue;
                    }
                    let _ = socket.set_nodelay(true);
                    let news = News::heard_by(Some(self.news.clone()));
                    return Ok(Some(Arc::new(TcpTalk::new(&self.running, socket, news))));
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(None),
                    // Gone again before it was taken: that takes nothing from the next.
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ => return Err(system("accept", &error)),
                },
            }
        }
    }

    fn arm(&self) {
        let events = libc::EPOLLIN | libc::EPOLLONESHOT;
        self.running.inner.control(libc::EPOLL_CTL_MOD, self.socket.as_raw_fd(), events, self.id);
    }

    fn invite(&self, talk: &dyn Talk, port: u16, judge: Judge) -> Result<Box<dyn Invitation>, Error> {
        let running = &self.running;
        let from = talk.from().ok_or(Error::Ended(Ended::Lost))?;
        let peer = SocketAddr::new(from, port);
        let inviting = Inviting::new(running, peer, judge, self.news.clone())?;
        Ok(Box::new(OpenInvitation { running: running.clone(), inviting }))
    }
}

impl Drop for OpenDoor {
    fn drop(&mut self) {
        self.running.hear_no_more(self.id);
    }
}

/// A listener of the provider, for one peer.
pub(super) struct Inviting {
    pub raw: *mut RawListener,
    address: SocketAddr,
    peer: SocketAddr,
    /// The socket that is guarded, where the provider has one.
    socket: Option<RawFd>,
    judge: Judge,
    news: Arc<News>,
    came: Lock<Came>,
}

struct Came {
    /// One may still come.
    open: bool,
    /// It is over, and to be closed.
    over: bool,
    info: Option<*mut RawInfo>,
    /// The socket of the connection that was taken.
    taken: Option<RawFd>,
}

// SAFETY: the pointers are handles of a domain that any thread may use; each info is taken out once, under the lock.
unsafe impl Send for Inviting {}
// SAFETY: as above.
unsafe impl Sync for Inviting {}

impl Inviting {
    /// Listens, for `peer` only.
    fn new(running: &Running, peer: SocketAddr, judge: Judge, news: Arc<News>) -> Result<Arc<Self>, Error> {
        let inner = &running.inner;
        let (raw, port) = inner.domain.passive(&inner.ip.to_string())?;
        // The lock of events: what comes finds it in the table.
        let _events = inner.events.lock();
        match Self::guarded(running, raw, port, peer) {
            Ok((socket, port)) => {
                let came = Came { open: true, over: false, info: None, taken: None };
                let came = Lock::new(inner.host.clone(), came);
                let address = SocketAddr::new(inner.ip, port);
                let inviting = Arc::new(Self { raw, address, peer, socket, judge, news, came });
                inner.invitations.lock().insert(raw as usize, inviting.clone());
                inner.wake_up();
                Ok(inviting)
            }
            Err(error) => {
                // SAFETY: it is ours alone, and nobody was let near it.
                unsafe { inner.domain.close_listener(raw) };
                Err(error)
            }
        }
    }

    /// Guards the socket of a listener, then has it listen; gives both.
    fn guarded(
        running: &Running,
        raw: *mut RawListener,
        port: u16,
        peer: SocketAddr,
    ) -> Result<(Option<RawFd>, u16), Error> {
        let inner = &running.inner;
        let socket = if inner.has_sockets {
            let socket = sockets::one_at(SocketAddr::new(inner.ip, port))?;
            sockets::hear_only(socket, peer)?;
            Some(socket)
        } else {
            None
        };
        // SAFETY: made by the caller, and not closed.
        Ok((socket, unsafe { inner.domain.listen(raw) }?))
    }

    /// A connection comes. The lock of events is held.
    pub fn comes(&self, domain: &Domain, host: &dyn Host, said: &[u8], info: *mut RawInfo) {
        let judged = (self.judge)(said);
        let mut came = self.came.lock();
        let refusal = match judged {
            Ok(()) if came.open => {
                came.open = false;
                came.info = Some(info);
                drop(came);
                return self.news.tell(host);
            }
            Ok(()) => WireRefusal::new(RefusalReason::Full, Epoch::new(0)).as_bytes().to_vec(),
            Err(refusal) => refusal,
        };
        // SAFETY: the info came with this event for this listener, which is open while it is in the table.
        unsafe { domain.reject(self.raw, info, &refusal) };
    }

    /// Whether it is over and nothing leads to it; if something does, that is ended first.
    pub fn may_close(&self) -> bool {
        let came = self.came.lock();
        if !came.over {
            return false;
        }
        let Some(own) = self.socket else { return true };
        // Nobody else comes: whoever is there came before, and from this peer.
        let Ok(found) = sockets::at(self.address) else { return false };
        let mut may = sockets::hear_nobody(own).is_ok();
        for other in found.iter().filter(|found| found.socket != own && Some(found.socket) != came.taken) {
            if other.peer.is_none_or(|peer| peer == self.peer) {
                sockets::end(other.socket);
                may = false;
            }
        }
        may
    }

    /// The connection that came has no filter any more, and no other comes.
    fn take_over(&self) -> Result<(), Error> {
        let Some(own) = self.socket else { return Ok(()) };
        sockets::hear_nobody(own)?;
        let found = sockets::at(self.address)?;
        let taken = found.iter().find(|found| found.socket != own && found.peer == Some(self.peer));
        let taken = taken.ok_or(Error::Ended(Ended::Lost))?.socket;
        self.came.lock().taken = Some(taken);
        sockets::unfiltered(taken)
    }
}

/// An invitation as its user has it.
struct OpenInvitation {
    running: Arc<Running>,
    inviting: Arc<Inviting>,
}

impl Invitation for OpenInvitation {
    fn port(&self) -> u16 {
        self.inviting.address.port()
    }

    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
        let (inner, inviting) = (&self.running.inner, &self.inviting);
        let Some(info) = inviting.came.lock().info.take() else { return Ok(None) };
        if let Err(error) = inviting.take_over() {
            let refusal = WireRefusal::new(RefusalReason::Full, Epoch::new(0));
            // SAFETY: the info came with an event for this listener, and was taken out just now.
            unsafe { inner.domain.reject(inviting.raw, info, refusal.as_bytes()) };
            return Err(error);
        }
        let news = News::heard_by(Some(inviting.news.clone()));
        // SAFETY: the info came with an event, and was taken out just now.
        let raw = unsafe { inner.domain.accepting(info, completions(&inner.shape)) }?;
        let link = FabricLink::new(&self.running, raw, inner.shape, news)?;
        self.running.know(&link);
        link.accept()?;
        Ok(Some(link))
    }
}

impl Drop for OpenInvitation {
    fn drop(&mut self) {
        let (inner, inviting) = (&self.running.inner, &self.inviting);
        let info = {
            let mut came = inviting.came.lock();
            came.open = false;
            came.over = true;
            came.info.take()
        };
        if let Some(info) = info {
            let refusal = WireRefusal::new(RefusalReason::Full, Epoch::new(0));
            // SAFETY: the info came with an event for this listener, and was taken out just now; the listener is open
            // until `over` counts it.
            unsafe { inner.domain.reject(inviting.raw, info, refusal.as_bytes()) };
        }
        // Release: pairs with the Acquire in `close_invitations`.
        inner.over.fetch_add(1, Ordering::Release);
        inner.wake_up();
    }
}

/// A connection of this node that is to be made.
pub(super) struct Coming {
    running: Arc<Running>,
    to: IpAddr,
    /// What holds the port that it will come from, where the provider has sockets.
    from: Option<(*mut RawListener, u16)>,
}

impl Coming {
    pub fn new(running: &Arc<Running>, to: IpAddr) -> Result<Self, Error> {
        let inner = &running.inner;
        let from = if inner.has_sockets { Some(inner.domain.passive(&inner.ip.to_string())?) } else { None };
        Ok(Self { running: running.clone(), to, from })
    }
}

impl Approach for Coming {
    fn port(&self) -> u16 {
        self.from.map_or(0, |(_, port)| port)
    }

    fn go(self: Box<Self>, port: u16, said: &[u8], news: Arc<News>) -> Result<Arc<dyn Link>, Error> {
        let inner = &self.running.inner;
        let ip = self.to.to_string();
        let from = self.from.map(|(raw, _)| raw);
        // SAFETY: made in `new`, never listened, and used here only.
        let raw = unsafe { inner.domain.connecting(from, &ip, port, completions(&inner.shape)) }?;
        let link = FabricLink::new(&self.running, raw, inner.shape, news)?;
        self.running.know(&link);
        link.connect(&ip, port, said)?;
        inner.wake_up();
        Ok(link)
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        if let Some((raw, _)) = self.from {
            // SAFETY: made in `new`; it never listened, so that no event leads to it.
            unsafe { self.running.inner.domain.close_listener(raw) };
        }
    }
}
