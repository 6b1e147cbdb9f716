//! Finds the sockets that the provider has opened in this process, and restricts a listening socket to one peer.
//!
//! The provider `tcp` trusts every program that reaches its listener: libfabric 1.17 crashes if a program sends it
//! changed or truncated messages. So only a peer that has proved the key at the control listener may reach it. A
//! filter on the listening socket makes the kernel drop the segments of all others before a connection exists.

use crate::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A descriptor of this process that is a socket with a certain address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub socket: RawFd,
    /// The peer's address, if it is connected.
    pub peer: Option<SocketAddr>,
}

/// The sockets of this process with this local address.
pub(super) fn at(address: SocketAddr) -> Result<Vec<Found>, Error> {
    let failed = |error: std::io::Error| system("/proc/self/fd", &error);
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(socket) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if name_of(socket, libc::getsockname) == Some(address) {
            found.push(Found { socket, peer: name_of(socket, libc::getpeername) });
        }
    }
    Ok(found)
}

/// The only unconnected socket of this process with this local address.
pub(super) fn one_at(address: SocketAddr) -> Result<RawFd, Error> {
    let unconnected: Vec<RawFd> =
        at(address)?.iter().filter(|found| found.peer.is_none()).map(|found| found.socket).collect();
    match unconnected[..] {
        [socket] => Ok(socket),
        _ => Err(Error::NoProvider("its listener has no socket that could be guarded".to_string())),
    }
}

type NameCall = unsafe extern "C" fn(RawFd, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn name_of(socket: RawFd, call: NameCall) -> Option<SocketAddr> {
    // SAFETY: all of it zero is a value.
    let mut name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut bytes = length::<libc::sockaddr_storage>();
    let start = (&raw mut name).cast::<libc::sockaddr>();
    // SAFETY: at most `bytes` bytes are written there. The call fails for a descriptor that is not a socket, or is closed by now.
    if unsafe { call(socket, start, &raw mut bytes) } != 0 {
        return None;
    }
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what it is, and it is large enough.
            let name = unsafe { *start.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
            Some(SocketAddr::new(ip.into(), u16::from_be(name.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let name = unsafe { *start.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
            Some(SocketAddr::new(ip.into(), u16::from_be(name.sin6_port)))
        }
        _ => None,
    }
}

fn length<T>() -> libc::socklen_t {
    size_of::<T>() as libc::socklen_t
}

pub(super) fn system(call: &'static str, error: &std::io::Error) -> Error {
    Error::Host(ipc::Error::System { call, errno: error.raw_os_error().unwrap_or(libc::EIO) })
}

/// Base of offsets into the network header in a filter (SKF_NET_OFF); other offsets are relative to the TCP header.
const NETWORK: u32 = 0xfff0_0000;

/// Makes a listening socket accept segments of this peer only; its connections inherit the filter.
pub(super) fn accept_only(socket: RawFd, peer: SocketAddr) -> Result<(), Error> {
    // Each step loads a word or half-word and compares it. Equality continues with the next step, a difference goes
    // to the last one.
    let (words, first): (Vec<u32>, u32) = match peer.ip() {
        IpAddr::V4(ip) => (vec![ip.to_bits()], 12),
        IpAddr::V6(ip) => (ip.octets().chunks(4).map(word).collect(), 8),
    };
    let steps = 2 * (words.len() as u8 + 1) + 2;
    let mut program = Vec::new();
    let mut compare = |load: u32, at: u32, value: u32| {
        program.push(step(load | libc::BPF_ABS, 0, at));
        let left = steps - 2 - program.len() as u8;
        program.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, left, value));
    };
    for (index, value) in (0u32..).zip(words) {
        compare(libc::BPF_LD | libc::BPF_W, NETWORK + first + 4 * index, value);
    }
    compare(libc::BPF_LD | libc::BPF_H, 0, peer.port().into());
    program.push(step(libc::BPF_RET | libc::BPF_K, 0, u32::MAX));
    program.push(step(libc::BPF_RET | libc::BPF_K, 0, 0));
    filter(socket, &mut program)
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn step(code: u32, unequal: u8, value: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: unequal, k: value }
}

/// Makes a listening socket drop all segments.
pub(super) fn accept_none(socket: RawFd) -> Result<(), Error> {
    filter(socket, &mut [step(libc::BPF_RET | libc::BPF_K, 0, 0)])
}

/// Installs such a filter on a socket that no peer uses.
pub(super) fn try_filter() -> Result<(), Error> {
    let socket =
        std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| system("bind", &error))?;
    accept_none(socket.as_raw_fd())
}

fn filter(socket: RawFd, program: &mut [libc::sock_filter]) -> Result<(), Error> {
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let (start, bytes) = ((&raw const program).cast(), length::<libc::sock_fprog>());
    // SAFETY: the program and its head are read only, and copied.
    let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, start, bytes) };
    if result != 0 {
        return Err(system("SO_ATTACH_FILTER", &std::io::Error::last_os_error()));
    }
    Ok(())
}

/// Removes the filter that a connection has inherited.
pub(super) fn unfiltered(socket: RawFd) -> Result<(), Error> {
    let nothing: libc::c_int = 0;
    let (start, bytes) = ((&raw const nothing).cast(), length::<libc::c_int>());
    // SAFETY: the value is read only.
    let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, start, bytes) };
    if result != 0 {
        return Err(system("SO_DETACH_FILTER", &std::io::Error::last_os_error()));
    }
    Ok(())
}

/// Shuts down a connection of the provider, so that the provider closes it.
pub(super) fn end(socket: RawFd) {
    // SAFETY: no memory is used. The call fails without effect if the socket is no longer connected.
    unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
}

/// An address in the kernel's form.
fn raw_name(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all of it zero is a value.
    let mut name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let start = &raw mut name;
    match address {
        SocketAddr::V4(address) => {
            // SAFETY: all of it zero is a value.
            let mut four: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            four.sin_family = libc::AF_INET as libc::sa_family_t;
            four.sin_port = address.port().to_be();
            four.sin_addr.s_addr = address.ip().to_bits().to_be();
            // SAFETY: it is large enough for every name, and aligned for it.
            unsafe { start.cast::<libc::sockaddr_in>().write(four) };
            (name, length::<libc::sockaddr_in>())
        }
        SocketAddr::V6(address) => {
            // SAFETY: as above.
            let mut six: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            six.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            six.sin6_port = address.port().to_be();
            six.sin6_addr.s6_addr = address.ip().octets();
            six.sin6_scope_id = address.scope_id();
            // SAFETY: as above.
            unsafe { start.cast::<libc::sockaddr_in6>().write(six) };
            (name, length::<libc::sockaddr_in6>())
        }
    }
}

/// Starts to connect from the address of this node, from which the connection of the provider will come too.
pub(super) fn connect(from: IpAddr, to: SocketAddr) -> Result<TcpStream, Error> {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is used.
    let raw = unsafe { libc::socket(family, kind, 0) };
    if raw < 0 {
        return Err(system("socket", &std::io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = TcpStream::from(unsafe { OwnedFd::from_raw_fd(raw) });
    let one: libc::c_int = 1;
    // Chooses the port only when connecting, so a port that is in use towards another address is possible.
    // SAFETY: the value is read only; where the kernel does not know the option nothing is lost.
    unsafe {
        let bytes = length::<libc::c_int>();
        let option = libc::IP_BIND_ADDRESS_NO_PORT;
        libc::setsockopt(raw, libc::IPPROTO_IP, option, (&raw const one).cast(), bytes)
    };
    let (own, bytes) = raw_name(SocketAddr::new(from, 0));
    // SAFETY: the name is read only.
    if unsafe { libc::bind(socket.as_raw_fd(), (&raw const own).cast(), bytes) } != 0 {
        return Err(system("bind", &std::io::Error::last_os_error()));
    }
    let (name, bytes) = raw_name(to);
    // SAFETY: the name is read only.
    if unsafe { libc::connect(socket.as_raw_fd(), (&raw const name).cast(), bytes) } != 0 {
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINPROGRESS) {
            return Err(match error.kind() {
                std::io::ErrorKind::ConnectionRefused => Error::Ended(crate::error::Ended::Lost),
                _ => system("connect", &error),
            });
        }
    }
    // The messages are short and wait for answers. A failure only makes them slower.
    let _ = socket.set_nodelay(true);
    Ok(socket)
}
