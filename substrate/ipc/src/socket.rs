//! The Unix socket between a LibFS and its SharedFS: handshake, version check, and passing of descriptors.
//!
//! A packet is a message (`format::message`). Guarantees: a packet from the other side gives a message or an error,
//! never a panic. It carries at most [`MESSAGE_DESCRIPTORS_MAX`] descriptors; those of a refused message are closed
//! at once, and all are close-on-exec and numbered above the range that programs use. Only
//! [`Connection::receive_until`] blocks: the handshake is the only wait for a descriptor instead of a word. The
//! simulator has no descriptors and sets its sessions up without a handshake.

use crate::error::Error;
use crate::host::{Host, Time};
use crate::peer::Peer;
use crate::ring::Link;
use crate::sys::{Descriptor, argument, check, syscall};
use format::DecodeError;
use format::message::{
    Hello, MESSAGE_BODY_MAX, MESSAGE_DESCRIPTORS_MAX, MessageHeader, MessageKind, REFUSED_MALFORMED,
    REFUSED_VERSION, Refusal,
};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Length of the kernel's queue of connections that are not accepted yet.
const BACKLOG: usize = 128;

/// Size of the largest packet.
const PACKET_BYTES_MAX: usize = size_of::<MessageHeader>() + MESSAGE_BODY_MAX;

/// Longest path that fits a socket address, without its terminating zero.
const ADDRESS_PATH_MAX: usize = 107;

/// The socket on which SharedFS accepts connections of LibFSes.
#[derive(Debug)]
pub struct Listener(Descriptor);

impl Listener {
    /// Listens at a path that does not exist yet. Every user may connect; the kernel tells the identity of the
    /// client.
    ///
    /// # Errors
    /// `System`: `EADDRINUSE` if the path exists.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let socket = socket()?;
        with_address(path, |address, bytes| {
            // SAFETY: `address` is a socket address of `bytes` bytes.
            check("bind", unsafe { syscall(libc::SYS_bind, [socket.argument(), address, bytes, 0, 0, 0]) })
        })?;
        // Independent of the umask: SharedFS authorizes a client by the identity that the kernel gives, not by the
        // mode.
        let name = std::ffi::CString::new(path.as_os_str().as_bytes()).expect("bind refused zeros");
        let arguments = [argument(libc::AT_FDCWD), name.as_ptr() as usize, 0o666, 0, 0, 0];
        // SAFETY: `name` is a string that ends with a zero byte.
        check("fchmodat", unsafe { syscall(libc::SYS_fchmodat, arguments) })?;
        // SAFETY: listen uses no memory.
        check("listen", unsafe { syscall(libc::SYS_listen, [socket.argument(), BACKLOG, 0, 0, 0, 0]) })?;
        Ok(Self(socket))
    }

    /// Takes over a socket that another process (the daemon's keeper) bound.
    pub fn from_descriptor(descriptor: Descriptor) -> Self {
        Self(descriptor)
    }

    /// The socket, for a process that only keeps it open.
    pub fn into_descriptor(self) -> Descriptor {
        self.0
    }

    /// The socket: readable when a connection waits to be accepted.
    pub fn descriptor(&self) -> &Descriptor {
        &self.0
    }

    /// Accepts the next connection; `None` if none waits.
    ///
    /// # Errors
    /// `System`: for example, no descriptor is free.
    pub fn accept(&self) -> Result<Option<Connection>, Error> {
        let flags = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as usize;
        // SAFETY: accept4 with a null address uses no memory.
        let result = unsafe { syscall(libc::SYS_accept4, [self.0.argument(), 0, 0, flags, 0, 0]) };
        match Descriptor::from_call("accept4", result) {
            Ok(descriptor) => Ok(Some(Connection(descriptor))),
            Err(Error::System { errno: libc::EAGAIN | libc::ECONNABORTED | libc::EINTR, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A received message, its body not yet decoded.
#[derive(Debug)]
pub struct Message {
    /// Kind of the message.
    pub kind: MessageKind,
    /// Body; unchecked.
    pub body: Vec<u8>,
    /// Descriptors that came with the message.
    pub descriptors: Vec<Descriptor>,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection(Descriptor);

impl Connection {
    /// Connects to the listener at `path`.
    ///
    /// # Errors
    /// `Disconnected` if no process listens there; `System`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let socket = raise(socket()?);
        let connected = with_address(path, |address, bytes| {
            // SAFETY: `address` is a socket address of `bytes` bytes.
            check("connect", unsafe {
                syscall(libc::SYS_connect, [socket.argument(), address, bytes, 0, 0, 0])
            })
        });
        match connected {
            Ok(_) => Ok(Self(socket)),
            // EAGAIN: the listener's queue is full; the caller tries again as after a refusal.
            Err(Error::System { errno: libc::ECONNREFUSED | libc::ENOENT | libc::EAGAIN, .. }) => {
                Err(Error::Disconnected)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a connection and returns both ends.
    ///
    /// # Errors
    /// `System`: no descriptor free.
    pub fn pair() -> Result<(Self, Self), Error> {
        let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as usize;
        let mut ends = [0i32; 2];
        let arguments = [argument(libc::AF_UNIX), kind, 0, ends.as_mut_ptr() as usize, 0, 0];
        // SAFETY: the kernel writes two descriptors there.
        check("socketpair", unsafe { syscall(libc::SYS_socketpair, arguments) })?;
        // SAFETY: the kernel has just made both for us.
        let [one, other] = ends.map(|raw| Self(unsafe { Descriptor::from_raw(raw) }));
        Ok((one, other))
    }

    /// Takes over an end of a connection that arrived as a descriptor.
    pub fn from_descriptor(descriptor: Descriptor) -> Self {
        Self(descriptor)
    }

    /// Gives up the connection and returns its descriptor.
    pub fn into_descriptor(self) -> Descriptor {
        self.0
    }

    /// The socket: readable when a message has arrived or the other side has gone.
    pub fn descriptor(&self) -> &Descriptor {
        &self.0
    }

    /// Sends a message whose body is the concatenation of `parts`. Never blocks.
    ///
    /// # Errors
    /// `Disconnected`; `TimedOut` if the other side does not read; `TooLarge`; `Limits` for too many descriptors.
    pub fn send(&self, kind: MessageKind, parts: &[&[u8]], descriptors: &[&Descriptor]) -> Result<(), Error> {
        let body: Vec<u8> = parts.concat();
        if body.len() > MESSAGE_BODY_MAX {
            return Err(Error::TooLarge { bytes: body.len(), limit: MESSAGE_BODY_MAX });
        }
        if descriptors.len() > MESSAGE_DESCRIPTORS_MAX {
            return Err(Error::Limits("descriptors of a message"));
        }
        let header = MessageHeader::new(kind, body.len() as u32, descriptors.len() as u32);
        self.send_packet(&[header.as_bytes(), &body].concat(), descriptors)
    }

    /// Sends bytes without a header. For [`Self::send`], and for tests that play the hostile side.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn send_packet(&self, packet: &[u8], descriptors: &[&Descriptor]) -> Result<(), Error> {
        let mut control = Control::new();
        let control_bytes = control.put(descriptors)?;
        let mut part = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
        let head = message_head(&mut part, &mut control, control_bytes);
        let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
        // SAFETY: `head` points to one part and a control buffer that outlive the call; the kernel only reads both.
        let result = unsafe {
            syscall(libc::SYS_sendmsg, [self.0.argument(), &raw const head as usize, flags, 0, 0, 0])
        };
        match check("sendmsg", result) {
            Ok(_) => Ok(()),
            Err(Error::System { errno: libc::EAGAIN, .. }) => Err(Error::TimedOut),
            Err(Error::System { errno: libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN, .. }) => {
                Err(Error::Disconnected)
            }
            Err(error) => Err(error),
        }
    }

    /// Receives the next message; `None` if none has arrived.
    ///
    /// # Errors
    /// `Disconnected`; `Message`: the packet is malformed and was discarded.
    pub fn receive(&self) -> Result<Option<Message>, Error> {
        // One byte more than the largest packet, so that an oversized one is detected by its length.
        let mut packet = vec![0u8; PACKET_BYTES_MAX + 1];
        let mut control = Control::new();
        let mut part = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
        let mut head = message_head(&mut part, &mut control, Control::BYTES);
        let flags = (libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as usize;
        // SAFETY: `head` points to one part and a control buffer that outlive the call, writable for their lengths.
        let result = unsafe {
            syscall(libc::SYS_recvmsg, [self.0.argument(), &raw mut head as usize, flags, 0, 0, 0])
        };
        let bytes = match check("recvmsg", result) {
            Ok(bytes) => bytes,
            Err(Error::System { errno: libc::EAGAIN | libc::EINTR, .. }) => return Ok(None),
            Err(Error::System { errno: libc::ECONNRESET, .. }) => return Err(Error::Disconnected),
            Err(error) => return Err(error),
        };
        // Taken first, so that the descriptors of a malformed message are closed.
        let descriptors = control.take(head.msg_controllen);
        if bytes == 0 {
            // The other side has gone, or it has sent an empty packet, which may carry descriptors nonetheless.
            return Err(Error::Disconnected);
        }
        if head.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(Error::DescriptorsLost);
        }
        if head.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(Error::Message(DecodeError::Field("packet")));
        }
        let (kind, announced, body) = MessageHeader::decode(&packet[..bytes])?;
        if announced != descriptors.len() {
            return Err(Error::Message(DecodeError::Field("descriptors")));
        }
        Ok(Some(Message {
            kind,
            body: body.to_vec(),
            descriptors: descriptors.into_iter().map(raise).collect(),
        }))
    }

    /// Receives the next message, and waits for it.
    ///
    /// # Errors
    /// As [`Self::receive`]; `TimedOut`, `Interrupted`.
    pub fn receive_until(&self, host: &dyn Host, until: Option<Time>) -> Result<Message, Error> {
        loop {
            if let Some(message) = self.receive()? {
                return Ok(message);
            }
            let left = match until {
                Some(until) => {
                    let left = until.since(host.now());
                    if left.is_zero() {
                        return Err(Error::TimedOut);
                    }
                    Some(left)
                }
                None => None,
            };
            let mut asked = [libc::pollfd { fd: self.0.raw(), events: libc::POLLIN, revents: 0 }];
            poll(&mut asked, left)?;
        }
    }

    /// Client side of the handshake: sends `hello` and returns SharedFS's Welcome message.
    ///
    /// # Errors
    /// `Refused` with the reason for the user; as [`Self::receive_until`].
    pub fn greet(&self, host: &dyn Host, hello: &Hello, until: Option<Time>) -> Result<Message, Error> {
        self.send(MessageKind::Hello, &[hello.as_bytes()], &[])?;
        let received = loop {
            match self.receive_until(host, until) {
                // A signal is no reason to abandon a session that is being set up.
                Err(Error::Interrupted) => {}
                received => break received,
            }
        };
        let message = match received {
            Err(Error::Message(DecodeError::Version(found))) => {
                return Err(Error::Refused(REFUSED_VERSION, format!("the daemon speaks protocol {found}")));
            }
            other => other?,
        };
        match message.kind {
            MessageKind::Welcome => Ok(message),
            MessageKind::Refusal => {
                let (refusal, text) =
                    Refusal::read_from_prefix(&message.body).map_err(|_| DecodeError::Truncated)?;
                Err(Error::Refused(refusal.reason.get(), String::from_utf8_lossy(text).into_owned()))
            }
            _ => Err(Error::Message(DecodeError::Kind)),
        }
    }

    /// Refuses a LibFS. It is no error if the LibFS has gone already.
    pub fn refuse(&self, reason: u32, text: &str) {
        let refusal = Refusal { reason: U32::new(reason), reserved: U32::new(0) };
        let text = &text.as_bytes()[..text.len().min(MESSAGE_BODY_MAX - size_of::<Refusal>())];
        let _ = self.send(MessageKind::Refusal, &[refusal.as_bytes(), text], &[]);
    }

    /// Server side of the handshake: receives the Hello of an accepted LibFS; `None` if it has not arrived. Refuses
    /// a library version other than `library`, and any message other than a Hello.
    ///
    /// # Errors
    /// `Refused`, `Message`, `Disconnected`: the caller must drop the connection.
    pub fn hello(&self, library: &str) -> Result<Option<Hello>, Error> {
        let message = match self.receive() {
            Ok(None) => return Ok(None),
            Ok(Some(message)) => message,
            Err(Error::Message(error)) => {
                let version = matches!(error, DecodeError::Version(_));
                let reason = if version { REFUSED_VERSION } else { REFUSED_MALFORMED };
                self.refuse(
                    reason,
                    &format!("the daemon, version {library}, could not read the greeting: {error}"),
                );
                return Err(Error::Message(error));
            }
            Err(error) => return Err(error),
        };
        let hello = match message.kind {
            MessageKind::Hello => Hello::read_from_bytes(&message.body).ok(),
            _ => None,
        };
        let Some(hello) = hello else {
            self.refuse(REFUSED_MALFORMED, "the first message was no greeting");
            return Err(Error::Message(DecodeError::Kind));
        };
        if hello.library != library_version(library) {
            let theirs = String::from_utf8_lossy(&hello.library);
            let theirs = theirs.trim_end_matches('\0');
            let text = format!("the library is of version {theirs}, the daemon of version {library}");
            self.refuse(REFUSED_VERSION, &text);
            return Err(Error::Refused(REFUSED_VERSION, text));
        }
        Ok(Some(hello))
    }
}

impl Link for Connection {
    /// False once the other side has closed its end or died; true while it is stopped. False, too, for a descriptor that
    /// this process does not have: a child between vfork and exec has connected, and has ended.
    fn is_up(&self) -> bool {
        let mut asked = [libc::pollfd { fd: self.0.raw(), events: libc::POLLRDHUP, revents: 0 }];
        let gone = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
        match poll(&mut asked, Some(std::time::Duration::ZERO)) {
            Ok(()) => asked[0].revents & gone == 0,
            // Interrupted, or out of kernel memory: the next check finds out.
            Err(_) => true,
        }
    }
}

/// The Hello of this library.
pub fn hello(library: &str, session: u64, role: u32) -> Hello {
    Hello {
        library: library_version(library),
        session: U64::new(session),
        role: U32::new(role),
        reserved: U32::new(0),
    }
}

/// Encodes a version for a Hello. Both sides truncate a version of more than 32 bytes alike.
fn library_version(text: &str) -> [u8; 32] {
    let mut version = [0; 32];
    let bytes = text.len().min(version.len());
    version[..bytes].copy_from_slice(&text.as_bytes()[..bytes]);
    version
}

/// Waits until an event of one of the descriptors occurs, at most for `left`.
///
/// # Errors
/// `Interrupted`, `System`. A timeout is no error: it returns without any event set.
pub fn poll(asked: &mut [libc::pollfd], left: Option<std::time::Duration>) -> Result<(), Error> {
    let time = left.map(|left| libc::timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(0, |time| std::ptr::from_ref(time) as usize);
    // SAFETY: the kernel reads and writes `asked.len()` entries; `time` is null or points to a local timespec,
    // which the system call may change and which is not read afterwards.
    let result =
        unsafe { syscall(libc::SYS_ppoll, [asked.as_mut_ptr() as usize, asked.len(), time, 0, 0, 0]) };
    match check("ppoll", result) {
        Ok(_) => Ok(()),
        Err(Error::System { errno: libc::EINTR, .. }) => Err(Error::Interrupted),
        Err(error) => Err(error),
    }
}

fn socket() -> Result<Descriptor, Error> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket uses no memory.
    let result = unsafe { syscall(libc::SYS_socket, [argument(libc::AF_UNIX), kind as usize, 0, 0, 0, 0]) };
    Descriptor::from_call("socket", result)
}

/// Calls `with` with the address of a path and its length. A path that is too long for a socket address is reached
/// through a descriptor of its folder.
fn with_address<R>(path: &Path, with: impl Fn(usize, usize) -> Result<R, Error>) -> Result<R, Error> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&0) {
        return Err(Error::Limits("a zero in a path"));
    }
    if bytes.len() <= ADDRESS_PATH_MAX {
        return with_short_address(bytes, with);
    }
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::Limits("a path without a name"));
    };
    let folder = std::ffi::CString::new(folder.as_os_str().as_bytes()).expect("checked for zeros above");
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let arguments = [argument(libc::AT_FDCWD), folder.as_ptr() as usize, flags as usize, 0, 0, 0];
    // SAFETY: `folder` is a string that ends with a zero byte.
    let folder = Descriptor::from_call("openat", unsafe { syscall(libc::SYS_openat, arguments) })?;
    let mut short = format!("/proc/self/fd/{}/", folder.raw()).into_bytes();
    short.extend_from_slice(name.as_bytes());
    if short.len() > ADDRESS_PATH_MAX {
        return Err(Error::Limits("name of a socket"));
    }
    with_short_address(&short, with)
}

fn with_short_address<R>(path: &[u8], with: impl Fn(usize, usize) -> Result<R, Error>) -> Result<R, Error> {
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = *from as libc::c_char;
    }
    let bytes = size_of::<libc::sa_family_t>() + path.len() + 1;
    with(&raw const address as usize, bytes)
}

/// Moves a descriptor to a number above those that programs use, because a program may rely on the lowest free
/// number or close descriptors that it does not know. If there is no such number, the descriptor keeps its own.
fn raise(descriptor: Descriptor) -> Descriptor {
    const HIGH: i32 = 768;
    let Some(limit) = descriptors_max() else { return descriptor };
    let least = HIGH.min(i32::try_from(limit / 4 * 3).unwrap_or(HIGH));
    descriptor.duplicate(least).unwrap_or(descriptor)
}

/// Limit of this process's descriptors; `None` if the kernel does not tell.
pub fn descriptors_max() -> Option<u64> {
    let mut limit = [0u64; 2];
    let arguments = [0, libc::RLIMIT_NOFILE as usize, 0, limit.as_mut_ptr() as usize, 0, 0];
    // SAFETY: the kernel writes a pair of 64-bit numbers there.
    let result = unsafe { syscall(libc::SYS_prlimit64, arguments) };
    (result == 0).then_some(limit[0])
}

/// Number of descriptors that this process may still open, counted up to `most`. The count opens no descriptor,
/// because other threads would miss it for a moment.
pub fn descriptors_left(most: usize) -> usize {
    /// Numbers tested by one call.
    const PART: i32 = 256;
    let Some(limit) = descriptors_max() else { return most };
    let (mut left, mut end) = (0, i32::try_from(limit).unwrap_or(i32::MAX));
    // The kernel assigns the lowest free number, so most free numbers are the highest.
    while end > 0 && left < most {
        let begin = (end - PART).max(0);
        let asked = |fd| libc::pollfd { fd, events: 0, revents: 0 };
        let mut part: Vec<_> = (begin..end).map(asked).collect();
        if poll(&mut part, Some(std::time::Duration::ZERO)).is_err() {
            return most;
        }
        left += part.iter().filter(|asked| asked.revents & libc::POLLNVAL != 0).count();
        end = begin;
    }
    left.min(most)
}

/// Buffer for the control message that carries descriptors, aligned for the kernel.
struct Control([u64; Self::BYTES / 8]);

impl Control {
    const HEAD: usize = size_of::<libc::cmsghdr>();
    const BYTES: usize = (Self::HEAD + MESSAGE_DESCRIPTORS_MAX * size_of::<i32>()).next_multiple_of(8);

    fn new() -> Self {
        Self([0; Self::BYTES / 8])
    }

    /// Writes one control message with these descriptors; returns its length, 0 without descriptors.
    fn put(&mut self, descriptors: &[&Descriptor]) -> Result<usize, Error> {
        if descriptors.len() > MESSAGE_DESCRIPTORS_MAX {
            return Err(Error::Limits("descriptors of a message"));
        }
        if descriptors.is_empty() {
            return Ok(0);
        }
        let length = Self::HEAD + descriptors.len() * size_of::<i32>();
        let bytes = self.0.as_mut_bytes();
        bytes[..8].copy_from_slice(&(length as u64).to_ne_bytes());
        bytes[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        bytes[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        for (place, descriptor) in bytes[Self::HEAD..].chunks_exact_mut(4).zip(descriptors) {
            place.copy_from_slice(&descriptor.raw().to_ne_bytes());
        }
        Ok(length.next_multiple_of(8))
    }

    /// Takes the descriptors out of `filled` bytes of control messages that the kernel wrote.
    fn take(&self, filled: usize) -> Vec<Descriptor> {
        let bytes = &self.0.as_bytes()[..filled.min(Self::BYTES)];
        let mut taken = Vec::new();
        let mut at = 0;
        while let Some(head) = bytes.get(at..at + Self::HEAD) {
            let int = |from: usize| i32::from_ne_bytes(head[from..from + 4].try_into().expect("four bytes"));
            let length = u64::from_ne_bytes(head[..8].try_into().expect("eight bytes")) as usize;
            let end = at.saturating_add(length).min(bytes.len());
            if length < Self::HEAD {
                break;
            }
            if int(8) == libc::SOL_SOCKET && int(12) == libc::SCM_RIGHTS {
                for raw in bytes[at + Self::HEAD..end].chunks_exact(4) {
                    let raw = i32::from_ne_bytes(raw.try_into().expect("four bytes"));
                    // SAFETY: the kernel has just added this descriptor to the table of this process, and no other
                    // code knows it.
                    taken.push(unsafe { Descriptor::from_raw(raw) });
                }
            }
            at = end.next_multiple_of(8);
        }
        taken
    }
}

const _: () = assert!(size_of::<libc::cmsghdr>() == 16 && size_of::<usize>() == 8);

fn message_head(part: &mut libc::iovec, control: &mut Control, control_bytes: usize) -> libc::msghdr {
    // SAFETY: msghdr is plain numbers and pointers, for which zero is a value.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_iov = part;
    head.msg_iovlen = 1;
    if control_bytes > 0 {
        head.msg_control = control.0.as_mut_ptr().cast();
        head.msg_controllen = control_bytes;
    }
    head
}

/// Accepts the next connection and asks the kernel for the identity of its client; `None` if no connection waits.
///
/// # Errors
/// `System`; `Disconnected` if the client has gone already.
pub fn accept_peer(listener: &Listener) -> Result<Option<Peer>, Error> {
    listener.accept()?.map(Peer::new).transpose()
}
