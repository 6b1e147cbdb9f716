//! A live listener over tcp among strangers: raw sockets that say nothing, half a message, garbage, too much, or what
//! somebody else once said; peers with another key or cluster. Nobody of them gets in, memory stays bounded, and
//! legitimate peers go on.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use support::{Bed, id, identity, in_ms, message, soon, spawn};
use transport::{ClusterKey, Connection, Endpoint, Error, Identity, Listener, Settings};

/// Strangers of each kind.
const STRANGERS: usize = 150;

fn strangers() -> usize {
    if std::env::var_os("HEARTH_PROVE").is_some() { 1000 } else { STRANGERS }
}

fn settings() -> Settings {
    Settings { half_open_max: 8, ..Settings::default() }
}

/// Each half-open socket is a descriptor of this process, twice.
fn raise_descriptors() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is ours.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}

fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Accepts all the time; legitimate peers are answered.
struct Service {
    address: String,
    stop: Arc<AtomicBool>,
    thread: support::Running<usize>,
}

impl Service {
    fn start(two: &Endpoint) -> Self {
        let listener = two.listen("").unwrap();
        let address = listener.address();
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = stop.clone();
        let thread = spawn("serves", move || serve(&listener, &theirs));
        Self { address, stop, thread }
    }

    /// Stops; gives how many were let in.
    fn stop(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join()
    }
}

fn serve(listener: &Listener, stop: &AtomicBool) -> usize {
    let mut let_in = 0;
    while !stop.load(Ordering::SeqCst) {
        match listener.accept(Some(in_ms(50))) {
            Ok(connection) => {
                let_in += 1;
                let said = message(&connection);
                connection.send(&said, Some(soon())).unwrap();
                connection.close();
            }
            Err(Error::TimedOut) => {}
            Err(error) => panic!("the listener: {error}"),
        }
        assert!(listener.half_open() <= settings().half_open_max);
    }
    let_in
}

fn talk(connection: &Connection) {
    connection.send(b"well?", Some(soon())).unwrap();
    assert_eq!(message(connection), b"well?");
}

/// What comes first on a connection of this provider: a head of 16 bytes with the length of what follows, then that.
fn opening(said: &[u8], announced: u16) -> Vec<u8> {
    let mut bytes = vec![3, 0];
    bytes.extend_from_slice(&announced.to_be_bytes());
    bytes.resize(16, 0);
    bytes.extend_from_slice(said);
    bytes
}

#[test]
fn strangers_cost_little_and_legitimate_peers_go_on() {
    raise_descriptors();
    let bed = Bed::Tcp;
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    let service = Service::start(&two);
    let knock = |at: usize| {
        let connection = one.connect(&service.address, id(2), soon());
        talk(&connection.unwrap_or_else(|error| panic!("a legitimate peer among {at} strangers: {error}")));
    };
    knock(0);
    let before_kb = resident_kb();
    let mut silent = Vec::new();
    let garbage: Vec<u8> = (0..4096u32).map(|at| ((at * 131) >> 2) as u8).collect();
    for stranger in 0..strangers() {
        let mut socket = TcpStream::connect(&service.address).unwrap();
        // Whoever is found out may be hung up on while it still speaks.
        let _ = match stranger % 5 {
            0 => Ok(()),
            1 => socket.write_all(&opening(b"", 0)[..9]),
            2 => socket.write_all(&garbage),
            3 => socket.write_all(&opening(&garbage[..54], 54)),
            _ => socket.write_all(&opening(&garbage[..200], 65_535)),
        };
        silent.push(socket);
        if stranger % 30 == 0 {
            knock(stranger);
        }
    }
    knock(strangers());
    let wrong = [
        Identity { key: ClusterKey::new([9; 32]), ..identity(1) },
        Identity { cluster: [9; 16], ..identity(1) },
    ];
    for stranger in wrong {
        let endpoint = bed.endpoint_of(stranger, 1, settings());
        for _ in 0..10 {
            assert!(matches!(endpoint.connect(&service.address, id(2), soon()), Err(Error::Refused { .. })));
        }
    }
    knock(strangers());
    let grown_kb = resident_kb().saturating_sub(before_kb);
    println!("{} strangers, {grown_kb} KB more resident", strangers());
    assert!(grown_kb < 64 << 10, "strangers took {grown_kb} KB");
    drop(silent);
    service.stop();
}

/// Forwards one connection to the service, and keeps what the initiator said.
fn record(to: &str) -> (String, support::Running<()>, Arc<Mutex<Vec<u8>>>) {
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

#[test]
fn what_was_recorded_opens_no_door() {
    let bed = Bed::Tcp;
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    let service = Service::start(&two);
    let (address, recorder, said) = record(&service.address);
    talk(&one.connect(&address, id(2), soon()).unwrap());
    recorder.join();
    let said = said.lock().unwrap().clone();
    assert!(said.len() > 54 + 72 + 32, "the handshake was recorded");
    for _ in 0..5 {
        let mut socket = TcpStream::connect(&service.address).unwrap();
        socket.write_all(&said).unwrap();
        socket.set_read_timeout(Some(support::LIMIT)).unwrap();
        // It is hung up on: no Welcome, no echo of what was said inside.
        let mut heard = Vec::new();
        let _ = socket.read_to_end(&mut heard);
        assert!(!heard.windows(5).any(|part| part == b"well?"), "a recorded handshake was accepted");
    }
    talk(&one.connect(&service.address, id(2), soon()).unwrap());
    assert_eq!(service.stop(), 2, "only the two legitimate connections were let in");
}
