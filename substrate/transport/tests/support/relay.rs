//! Relays between an initiator and a control listener that record, delay or change the messages of either side.

use super::spawn;
use format::wire::{ControlHead, WireChallenge, WireHello, WireProof, WireRequest, WireWelcome};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};

/// Length of a message on a control channel: head, then body.
pub const HEAD: usize = size_of::<ControlHead>();
pub const REQUEST: usize = HEAD + size_of::<WireRequest>();
pub const CHALLENGE: usize = HEAD + size_of::<WireChallenge>();
pub const WELCOME: usize = HEAD + size_of::<WireWelcome>();

pub const PROOF: usize = HEAD + size_of::<WireProof>();

/// Length of all messages of an initiator.
pub const SAID: usize = REQUEST + HEAD + size_of::<WireHello>() + PROOF;

/// Forwards one connection to the service, and records the initiator's bytes.
pub fn record(to: &str) -> (String, super::Running<()>, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let said = Arc::new(Mutex::new(Vec::new()));
    let (theirs, to) = (said.clone(), to.to_string());
    let thread = spawn("records", move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(to).unwrap();
        let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        let back = spawn("back", move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(Shutdown::Both);
        });
        let mut buffer = [0; 4096];
        while let Ok(bytes @ 1..) = near.read(&mut buffer) {
            theirs.lock().unwrap().extend_from_slice(&buffer[..bytes]);
            if far.write_all(&buffer[..bytes]).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Both);
        back.join();
    });
    (address, thread, said)
}

/// A change to the bytes of one direction.
#[derive(Clone, Copy, Debug)]
pub enum Meddling {
    Commits { at: usize, bit: usize },
    Cuts { at: usize },
}

impl Meddling {
    /// Changes bytes at an offset; false if the relay ends there.
    fn change(self, offset: usize, bytes: &mut Vec<u8>) -> bool {
        match self {
            Self::Commits { at, bit } => {
                if let Some(byte) = at.checked_sub(offset).and_then(|at| bytes.get_mut(at)) {
                    *byte ^= 1 << bit;
                }
                true
            }
            Self::Cuts { at } => {
                let goes_on = offset + bytes.len() < at;
                bytes.truncate(at.saturating_sub(offset));
                goes_on
            }
        }
    }
}

/// Forwards one channel, and changes the bytes of the initiator (`forth`) or of the acceptor (`back`).
pub fn meddle(to: &str, forth: Option<Meddling>, back: Option<Meddling>) -> (String, super::Running<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let to = to.to_string();
    let thread = spawn("meddles", move || {
        let (near, _) = listener.accept().unwrap();
        let far = TcpStream::connect(to).unwrap();
        let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let other = spawn("back", move || pass(far_too, near_too, back));
        pass(near, far, forth);
        other.join();
    });
    (address, thread)
}

fn pass(mut from: TcpStream, mut to: TcpStream, meddling: Option<Meddling>) {
    let (mut buffer, mut offset) = ([0; 4096], 0);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..count].to_vec();
        let goes_on = meddling.is_none_or(|meddling| meddling.change(offset, &mut bytes));
        offset += count;
        if to.write_all(&bytes).is_err() || !goes_on {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// The two ports that a handshake agrees on: of the initiator's connection, and of the acceptor's listener.
#[derive(Clone, Copy, Debug)]
pub struct Agreed {
    pub from: u16,
    pub to: u16,
}

/// Forwards one channel, and holds back the Welcome until it is released.
pub fn hold(to: &str) -> (String, mpsc::Receiver<Agreed>, mpsc::Sender<()>, super::Running<()>) {
    let far: SocketAddr = to.parse().unwrap();
    let listener = TcpListener::bind(SocketAddr::new(far.ip(), 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (tell, told) = mpsc::channel();
    let (go, gone) = mpsc::channel();
    let thread = spawn("holds", move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(far).unwrap();
        let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let forth = spawn("forth", move || {
            let mut said = [0; SAID];
            let (before, proof) = said.split_at_mut(SAID - PROOF);
            for part in [before, proof] {
                from.read_exact(part).unwrap();
                to.write_all(part).unwrap();
            }
            let end = spawn("ends", move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
            (port(&said[SAID - PROOF..]), end)
        });
        let mut challenge = [0; CHALLENGE];
        far.read_exact(&mut challenge).unwrap();
        near.write_all(&challenge).unwrap();
        let mut welcome = [0; WELCOME];
        far.read_exact(&mut welcome).unwrap();
        let (from, end) = forth.join();
        tell.send(Agreed { from, to: port(&welcome) }).unwrap();
        gone.recv().unwrap();
        // An initiator that has not waited receives nothing.
        let _ = near.write_all(&welcome);
        end.join();
    });
    (address, told, go, thread)
}

/// The port in a Proof or a Welcome.
fn port(message: &[u8]) -> u16 {
    u16::from_le_bytes([message[HEAD], message[HEAD + 1]])
}

/// Connects from a port of the loopback that another program has bound, if that program shares it.
pub fn connect_from(from: u16, to: SocketAddr) -> std::io::Result<TcpStream> {
    let name = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: from.to_be(),
        sin_addr: libc::in_addr { s_addr: std::net::Ipv4Addr::LOCALHOST.to_bits().to_be() },
        sin_zero: [0; 8],
    };
    let target = libc::sockaddr_in { sin_port: to.port().to_be(), ..name };
    let bytes = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    let one: libc::c_int = 1;
    // SAFETY: no memory is used.
    let raw = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(raw >= 0, "a socket can be had");
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = TcpStream::from(unsafe { OwnedFd::from_raw_fd(raw) });
    // SAFETY: the values are read only.
    let done = unsafe {
        libc::setsockopt(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, (&raw const one).cast(), 4) == 0
            && libc::bind(raw, (&raw const name).cast(), bytes) == 0
            && libc::connect(raw, (&raw const target).cast(), bytes) == 0
    };
    if done { Ok(socket) } else { Err(std::io::Error::last_os_error()) }
}
