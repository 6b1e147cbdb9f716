//! Control channels over plain TCP sockets of this process, and the listeners of the provider behind them.
//!
//! The provider's listener trusts every program that reaches it. So a program without the cluster's key only ever
//! reaches the control listener. After a peer has proved that it has the key, the module opens a listener of the
//! provider for this peer alone. That listener has a port of its own and accepts segments only from the address and
//! port that the peer has announced (over `tcp`: a kernel filter on its socket, [`sockets`]). It takes one
//! connection, checks its connect token, and is closed. Over `verbs` there is no socket to filter; the rest is the
//! same.
//!
//! A listener of libfabric 1.17 must not be closed while the provider has a reference to it: a socket that connected
//! and sent nothing, or an unread event. So the progress thread closes it when neither exists.

use super::sockets::{self, system};
use super::sys::{Domain, RawInfo, RawListener};
use super::{FabricLink, Running, completions};
use crate::error::{Ended, Error};
use crate::link::{
    ControlChannel, ControlInput, ControlListener, Link, PendingAccept, PendingConnect, TokenCheck,
};
use format::Epoch;
use format::wire::{CONTROL_MESSAGE_MAX, ControlHead, ControlKind, RefusalReason, WireRefusal};
use ipc::sync::Ordering;
use ipc::{EventCounter, Host, Lock, Time};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Limit of bytes that wait to be sent on a channel: more than a handshake needs.
const OUT_BYTES_MAX: usize = 4 * CONTROL_MESSAGE_MAX;

/// A control channel over TCP.
pub(super) struct TcpChannel {
    running: Arc<Running>,
    socket: TcpStream,
    id: u64,
    counter: Arc<EventCounter>,
    bytes: Lock<ChannelBuffers>,
}

struct ChannelBuffers {
    /// Bytes received and not yet read as messages: at most [`CONTROL_MESSAGE_MAX`].
    state: Vec<u8>,
    /// Bytes that the socket has not accepted yet.
    out: Vec<u8>,
    over: bool,
}

impl TcpChannel {
    /// Creates a channel over a non-blocking socket.
    pub fn new(running: &Arc<Running>, socket: TcpStream, counter: Arc<EventCounter>) -> Self {
        let id = running.watch_socket(socket.as_raw_fd(), &counter);
        let bytes = ChannelBuffers { state: Vec::new(), out: Vec::new(), over: false };
        let bytes = Lock::new(running.host().clone(), bytes);
        Self { running: running.clone(), socket, id, counter, bytes }
    }
}

impl ChannelBuffers {
    /// Sends waiting bytes, as far as the socket accepts them.
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

    /// Receives bytes, at most up to the length of one message; false if there were none.
    fn come(&mut self, mut socket: &TcpStream) -> bool {
        let mut bytes = [0; CONTROL_MESSAGE_MAX];
        let room = CONTROL_MESSAGE_MAX - self.state.len();
        match socket.read(&mut bytes[..room]) {
            Ok(0) => self.over = true,
            Ok(count) => self.state.extend_from_slice(&bytes[..count]),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => return false,
                _ => self.over = true,
            },
        }
        true
    }
}

impl ControlChannel for TcpChannel {
    fn counter(&self) -> &Arc<EventCounter> {
        &self.counter
    }

    fn send(&self, kind: ControlKind, body: &[u8]) -> Result<(), Error> {
        assert_eq!(body.len(), kind.body_bytes(), "a message has the length of its kind");
        let mut bytes = self.bytes.lock();
        if bytes.out.len() + size_of::<ControlHead>() + body.len() > OUT_BYTES_MAX {
            return Err(Error::Unavailable("the talk found no room"));
        }
        bytes.out.extend_from_slice(ControlHead::new(kind).as_bytes());
        bytes.out.extend_from_slice(body);
        bytes.leave(&self.socket);
        if bytes.over { Err(Error::Ended(Ended::Lost)) } else { Ok(()) }
    }

    fn receive(&self) -> ControlInput {
        let mut bytes = self.bytes.lock();
        bytes.leave(&self.socket);
        loop {
            match ControlHead::decode(&bytes.state) {
                Err(_) => return ControlInput::Malformed,
                Ok(Some((kind, body))) => {
                    let body = body.to_vec();
                    bytes.state.drain(..size_of::<ControlHead>() + body.len());
                    return ControlInput::Message(kind, body);
                }
                Ok(None) if bytes.over => return ControlInput::Closed,
                Ok(None) => {
                    if !bytes.come(&self.socket) {
                        return ControlInput::Empty;
                    }
                }
            }
        }
    }

    fn shut_down(&self) {
        // A broken connection is noticed by the next `receive`.
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

    fn peer_address(&self) -> Option<IpAddr> {
        self.socket.peer_addr().ok().map(|peer| peer.ip())
    }
}

impl Drop for TcpChannel {
    fn drop(&mut self) {
        self.running.unwatch_socket(self.id);
    }
}

/// A control listener over TCP.
pub(super) struct TcpControlListener {
    running: Arc<Running>,
    socket: TcpListener,
    address: SocketAddr,
    id: u64,
    counter: Arc<EventCounter>,
}

impl TcpControlListener {
    /// Listens at a port of this node; port 0 is any free one.
    pub fn new(running: &Arc<Running>, port: u16, counter: Arc<EventCounter>) -> Result<Self, Error> {
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::AddrInUse => Error::Unavailable("the address is taken"),
            _ => system("listen", &error),
        };
        let socket = TcpListener::bind(SocketAddr::new(running.inner.ip, port)).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let id = running.watch_socket(socket.as_raw_fd(), &counter);
        Ok(Self { running: running.clone(), socket, address, id, counter })
    }
}

impl ControlListener for TcpControlListener {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn next(&self) -> Result<Option<Arc<dyn ControlChannel>>, Error> {
        loop {
            match self.socket.accept() {
                Ok((socket, _)) => {
                    // A socket that cannot be non-blocking is closed.
                    if socket.set_nonblocking(true).is_err() {
                        continue;
                    }
                    let _ = socket.set_nodelay(true);
                    let counter = EventCounter::new(Some(self.counter.clone()));
                    return Ok(Some(Arc::new(TcpChannel::new(&self.running, socket, counter))));
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(None),
                    // The peer has gone before the accept: the next one may be there.
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

    fn expect_peer(
        &self,
        channel: &dyn ControlChannel,
        port: u16,
        check_token: TokenCheck,
    ) -> Result<Box<dyn PendingAccept>, Error> {
        let running = &self.running;
        let from = channel.peer_address().ok_or(Error::Ended(Ended::Lost))?;
        let peer = SocketAddr::new(from, port);
        let listener = PeerListener::new(running, peer, check_token, self.counter.clone())?;
        Ok(Box::new(FabricPendingAccept { running: running.clone(), listener }))
    }
}

impl Drop for TcpControlListener {
    fn drop(&mut self) {
        self.running.unwatch_socket(self.id);
    }
}

/// A listener of the provider for one peer.
pub(super) struct PeerListener {
    pub raw: *mut RawListener,
    address: SocketAddr,
    peer: SocketAddr,
    /// The filtered socket, if the provider has one.
    socket: Option<RawFd>,
    check_token: TokenCheck,
    counter: Arc<EventCounter>,
    state: Lock<AcceptState>,
}

struct AcceptState {
    /// True while a connection may still be accepted.
    open: bool,
    /// True if the listener is finished and has to be closed.
    over: bool,
    info: Option<*mut RawInfo>,
    /// The socket of the accepted connection.
    taken: Option<RawFd>,
}

// SAFETY: the pointers are handles of a domain that any thread may use; each info is taken out once, under the lock.
unsafe impl Send for PeerListener {}
// SAFETY: as above.
unsafe impl Sync for PeerListener {}

impl PeerListener {
    /// Listens for `peer` only.
    fn new(
        running: &Running,
        peer: SocketAddr,
        check_token: TokenCheck,
        counter: Arc<EventCounter>,
    ) -> Result<Arc<Self>, Error> {
        let inner = &running.inner;
        let (raw, port) = inner.domain.passive(&inner.ip.to_string())?;
        // Under the lock of events, so that a connection request finds the listener in the table.
        let _events = inner.events.lock();
        match Self::guarded(running, raw, port, peer) {
            Ok((socket, port)) => {
                let state = AcceptState { open: true, over: false, info: None, taken: None };
                let state = Lock::new(inner.host.clone(), state);
                let address = SocketAddr::new(inner.ip, port);
                let listener = Arc::new(Self { raw, address, peer, socket, check_token, counter, state });
                inner.peer_listeners.lock().insert(raw as usize, listener.clone());
                inner.wake_up();
                Ok(listener)
            }
            Err(error) => {
                // SAFETY: it has no other user, and is not in the table.
                unsafe { inner.domain.close_listener(raw) };
                Err(error)
            }
        }
    }

    /// Filters the socket of a listener, then starts to listen; returns socket and port.
    fn guarded(
        running: &Running,
        raw: *mut RawListener,
        port: u16,
        peer: SocketAddr,
    ) -> Result<(Option<RawFd>, u16), Error> {
        let inner = &running.inner;
        let socket = if inner.has_sockets {
            let socket = sockets::one_at(SocketAddr::new(inner.ip, port))?;
            sockets::accept_only(socket, peer)?;
            Some(socket)
        } else {
            None
        };
        // SAFETY: made by the caller, and not closed.
        Ok((socket, unsafe { inner.domain.listen(raw) }?))
    }

    /// Handles a connection request. The caller holds the lock of events.
    pub fn comes(&self, domain: &Domain, host: &dyn Host, said: &[u8], info: *mut RawInfo) {
        let judged = (self.check_token)(said);
        let mut state = self.state.lock();
        let refusal = match judged {
            Ok(()) if state.open => {
                state.open = false;
                state.info = Some(info);
                drop(state);
                return self.counter.notify(host);
            }
            Ok(()) => WireRefusal::new(RefusalReason::Full, Epoch::new(0)).as_bytes().to_vec(),
            Err(refusal) => refusal,
        };
        // SAFETY: the info came with this event for this listener, which is open while it is in the table.
        unsafe { domain.reject(self.raw, info, &refusal) };
    }

    /// True if the listener is finished and nothing in the provider refers to it. Closes sockets that still do.
    pub fn may_close(&self) -> bool {
        let state = self.state.lock();
        if !state.over {
            return false;
        }
        let Some(own) = self.socket else { return true };
        // Only this peer passes the filter, so every other socket at this address is a connection of the peer.
        let Ok(found) = sockets::at(self.address) else { return false };
        let mut may = sockets::accept_none(own).is_ok();
        for other in found.iter().filter(|found| found.socket != own && Some(found.socket) != state.taken) {
            if other.peer.is_none_or(|peer| peer == self.peer) {
                sockets::end(other.socket);
                may = false;
            }
        }
        may
    }

    /// Removes the filter from the accepted connection, and accepts no other.
    fn take_over(&self) -> Result<(), Error> {
        let Some(own) = self.socket else { return Ok(()) };
        sockets::accept_none(own)?;
        let found = sockets::at(self.address)?;
        let taken = found.iter().find(|found| found.socket != own && found.peer == Some(self.peer));
        let taken = taken.ok_or(Error::Ended(Ended::Lost))?.socket;
        self.state.lock().taken = Some(taken);
        sockets::unfiltered(taken)
    }
}

/// Waits for the connection of a peer listener.
struct FabricPendingAccept {
    running: Arc<Running>,
    listener: Arc<PeerListener>,
}

impl PendingAccept for FabricPendingAccept {
    fn port(&self) -> u16 {
        self.listener.address.port()
    }

    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
        let (inner, listener) = (&self.running.inner, &self.listener);
        let Some(info) = listener.state.lock().info.take() else { return Ok(None) };
        if let Err(error) = listener.take_over() {
            let refusal = WireRefusal::new(RefusalReason::Failed, Epoch::new(0));
            // SAFETY: the info came with an event for this listener, and was taken out just now.
            unsafe { inner.domain.reject(listener.raw, info, refusal.as_bytes()) };
            return Err(error);
        }
        let counter = EventCounter::new(Some(listener.counter.clone()));
        // SAFETY: the info came with an event, and was taken out just now.
        let raw = unsafe { inner.domain.accepting(info, completions(&inner.shape)) }?;
        let link = FabricLink::new(&self.running, raw, inner.shape, counter)?;
        self.running.add_link(&link);
        link.accept()?;
        Ok(Some(link))
    }
}

impl Drop for FabricPendingAccept {
    fn drop(&mut self) {
        let (inner, listener) = (&self.running.inner, &self.listener);
        let info = {
            let mut state = listener.state.lock();
            state.open = false;
            state.over = true;
            state.info.take()
        };
        if let Some(info) = info {
            let refusal = WireRefusal::new(RefusalReason::Full, Epoch::new(0));
            // SAFETY: the info came with an event for this listener, and was taken out just now; the listener is open
            // until `over` counts it.
            unsafe { inner.domain.reject(listener.raw, info, refusal.as_bytes()) };
        }
        // Release: pairs with the Acquire in `close_peer_listeners`.
        inner.over.fetch_add(1, Ordering::Release);
        inner.wake_up();
    }
}

/// A connection that this node is about to open.
pub(super) struct FabricPendingConnect {
    running: Arc<Running>,
    to: IpAddr,
    /// Reserves the local port, if the provider has sockets.
    from: Option<(*mut RawListener, u16)>,
}

impl FabricPendingConnect {
    pub fn new(running: &Arc<Running>, to: IpAddr) -> Result<Self, Error> {
        let inner = &running.inner;
        let from = if inner.has_sockets { Some(inner.domain.passive(&inner.ip.to_string())?) } else { None };
        Ok(Self { running: running.clone(), to, from })
    }
}

impl PendingConnect for FabricPendingConnect {
    fn port(&self) -> u16 {
        self.from.map_or(0, |(_, port)| port)
    }

    fn connect(
        self: Box<Self>,
        port: u16,
        said: &[u8],
        counter: Arc<EventCounter>,
    ) -> Result<Arc<dyn Link>, Error> {
        let inner = &self.running.inner;
        let ip = self.to.to_string();
        let from = self.from.map(|(raw, _)| raw);
        // SAFETY: made in `new`, never listened, and used here only.
        let raw = unsafe { inner.domain.connecting(from, &ip, port, completions(&inner.shape)) }?;
        let link = FabricLink::new(&self.running, raw, inner.shape, counter)?;
        self.running.add_link(&link);
        link.connect(&ip, port, said)?;
        inner.wake_up();
        Ok(link)
    }
}

impl Drop for FabricPendingConnect {
    fn drop(&mut self) {
        if let Some((raw, _)) = self.from {
            // SAFETY: made in `new`; it never listened, so that no event leads to it.
            unsafe { self.running.inner.domain.close_listener(raw) };
        }
    }
}
