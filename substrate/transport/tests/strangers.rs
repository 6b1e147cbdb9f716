//! A listener over tcp that unauthenticated clients attack. Raw sockets send nothing, half a message, garbage, too
//! much, or a recorded handshake: complete, changed, truncated, at once or one byte at a time. Peers use another key
//! or cluster, and clients look for the provider's listener behind the control listener. None of them gets a
//! connection, memory and descriptors stay bounded, and legitimate peers are served.
//!
//! HEARTH_PROVE=1: more clients, a change of every bit of a handshake, and ten minutes of clients that come and go.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::Epoch;
use format::wire::{
    ControlHead, ControlKind, RefusalReason, WIRE_MAGIC, WIRE_VERSION, WireRefusal, WireRequest,
};
use ipc::Host;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::relay::{CHALLENGE, HEAD, Meddling, REQUEST, SAID, WELCOME, connect_from, hold, meddle, record};
use support::{Bed, host, id, identity, in_ms, message, soon, spawn};
use transport::{ClusterKey, Connection, Endpoint, Error, Event, Fabric, Identity, Listener, Settings};
use zerocopy::{FromZeros, IntoBytes};

fn proves() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some()
}

/// Number of unauthenticated clients that stay connected at once.
fn strangers() -> usize {
    if proves() { 5000 } else { 1000 }
}

fn settings() -> Settings {
    Settings { half_open_max: 8, silence: Some(support::LIMIT), ..Settings::default() }
}

/// One test at a time, because memory and descriptors are measured for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

/// Raises the limit of descriptors: each half-open connection uses two of this process.
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

/// Accepts connections on a thread, and answers legitimate peers.
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

    /// Stops the thread; returns the number of accepted connections.
    fn stop(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join()
    }
}

fn serve(listener: &Listener, stop: &AtomicBool) -> usize {
    let mut admit = 0;
    while !stop.load(Ordering::SeqCst) {
        match listener.accept(Some(in_ms(50))) {
            Ok(connection) => {
                // A peer that gave up near the end of its handshake sends nothing.
                let Ok(Event::Message(said)) = connection.take(Some(soon())) else { continue };
                admit += 1;
                connection.send(&said, Some(soon())).unwrap();
                connection.close();
            }
            Err(Error::TimedOut) => {}
            Err(error) => panic!("the listener: {error}"),
        }
        assert!(listener.half_open() <= 64);
    }
    admit
}

fn talk(connection: &Connection) {
    connection.send(b"well?", Some(soon())).unwrap();
    assert_eq!(message(connection), b"well?");
}

/// The first bytes on a connection of this provider: a head of 16 bytes with the length of the payload, then the
/// payload.
fn opening(said: &[u8], announced: u16) -> Vec<u8> {
    let mut bytes = vec![3, 0];
    bytes.extend_from_slice(&announced.to_be_bytes());
    bytes.resize(16, 0);
    bytes.extend_from_slice(said);
    bytes
}

/// Waits until the process has closed the descriptors of all clients that have gone.
fn await_descriptors(limit: usize) {
    let until = soon();
    while descriptors() > limit {
        assert!(ipc::SystemHost.now() < until, "{} descriptors stayed, not {limit}", descriptors());
        let _ = ipc::SystemHost.wait(&ipc::Word::new(0), 0, Some(in_ms(20)));
    }
}

#[test]
fn strangers_cost_little_and_legitimate_peers_go_on() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    raise_descriptors();
    let bed = Bed::Tcp;
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    let service = Service::start(&two);
    let request = |at: usize| {
        let connection = one.connect(&service.address, id(2), soon());
        talk(&connection.unwrap_or_else(|error| panic!("a legitimate peer among {at} strangers: {error}")));
    };
    request(0);
    let (before, before_kb) = (descriptors(), resident_kb());
    let mut silent = Vec::new();
    let garbage: Vec<u8> = (0..4096u32).map(|at| ((at * 131) >> 2) as u8).collect();
    let like_a_request = [ControlHead::new(ControlKind::Request).as_bytes(), &garbage[..54]].concat();
    for stranger in 0..strangers() {
        let mut socket = TcpStream::connect(&service.address).unwrap();
        // The listener may close a connection while the client is still sending.
        let _ = match stranger % 7 {
            0 => Ok(()),
            1 => socket.write_all(&like_a_request[..9]),
            2 => socket.write_all(&garbage),
            3 => socket.write_all(&like_a_request),
            4 => socket.write_all(&[&like_a_request[..6], &[0xff; 4000]].concat()),
            5 => socket.write_all(&opening(&garbage[..54], 54)),
            _ => socket.write_all(b"GET / HTTP/1.1\r\n\r\n"),
        };
        silent.push(socket);
        if stranger % 50 == 0 {
            request(stranger);
        }
    }
    request(strangers());
    // The clients' own sockets, and the handshakes that are not finished.
    let most = descriptors().saturating_sub(before + silent.len());
    assert!(most <= 64, "{most} descriptors of {} strangers", silent.len());
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
    request(strangers());
    let grown_kb = resident_kb().saturating_sub(before_kb);
    println!("{} strangers, {grown_kb} KB more resident, {most} descriptors", strangers());
    assert!(grown_kb < 16 << 10, "strangers took {grown_kb} KB");
    drop(silent);
    await_descriptors(before);
    service.stop();
}

#[test]
fn what_was_recorded_opens_no_door() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    let bed = Bed::Tcp;
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    let service = Service::start(&two);
    let (address, recorder, said) = record(&service.address);
    talk(&one.connect(&address, id(2), soon()).unwrap());
    recorder.join();
    let said = said.lock().unwrap().clone();
    assert_eq!(said.len(), SAID, "the handshake was recorded");
    for _ in 0..5 {
        let mut socket = TcpStream::connect(&service.address).unwrap();
        socket.write_all(&said).unwrap();
        socket.set_read_timeout(Some(support::LIMIT)).unwrap();
        // The listener closes the connection without a Welcome or an echo of the recorded messages.
        let mut heard = Vec::new();
        let _ = socket.read_to_end(&mut heard);
        assert!(!heard.windows(5).any(|part| part == b"well?"), "a recorded handshake was accepted");
    }
    talk(&one.connect(&service.address, id(2), soon()).unwrap());
    assert_eq!(service.stop(), 2, "only the two legitimate connections were let in");
}

/// The bytes with which the listener answers a client that sends these bytes and no more.
fn answer(address: &str, said: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(support::LIMIT)).unwrap();
    // The listener may close a connection while the client is still sending.
    let _ = socket.write_all(said);
    let _ = socket.shutdown(Shutdown::Write);
    let mut heard = Vec::new();
    let _ = socket.read_to_end(&mut heard);
    heard
}

/// The refusal at the end of an answer.
fn refusal(heard: &[u8]) -> Option<RefusalReason> {
    let at = heard.len().checked_sub(HEAD + size_of::<WireRefusal>())?;
    let (kind, body) = ControlHead::decode(&heard[at..]).ok()??;
    (kind == ControlKind::Refusal).then(|| WireRefusal::decode(body).unwrap().1)
}

#[test]
fn another_version_is_told_so() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    let bed = Bed::Tcp;
    let two = bed.endpoint(2, &settings());
    let service = Service::start(&two);
    let mut request = WireRequest::new_zeroed();
    (request.magic, request.version_min, request.version_max) =
        (WIRE_MAGIC, WIRE_VERSION + 1, WIRE_VERSION + 2);
    let newer = [ControlHead::new(ControlKind::Request).as_bytes(), request.as_bytes(), &[7; 300]].concat();
    assert_eq!(refusal(&answer(&service.address, &newer)), Some(RefusalReason::Version));
    assert_eq!(service.stop(), 0);
}

/// Each change is made to a live handshake, so that all messages before it are valid and new.
#[test]
fn what_was_changed_or_cut_short_opens_no_door() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    let bed = Bed::Tcp;
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    let service = Service::start(&two);
    let connect = |forth, back| {
        let (address, meddler) = meddle(&service.address, forth, back);
        let connected = one.connect(&address, id(2), soon());
        connected.map(|connection| {
            talk(&connection);
            connection.close();
            meddler.join();
        })
    };
    connect(None, None).unwrap();
    let before = descriptors();
    let refused = |forth, back| {
        let error = connect(forth, back).expect_err("a changed handshake let somebody in");
        let by_what_was_said = matches!(error, Error::Refused { .. } | Error::Ended(_) | Error::Message(_));
        assert!(by_what_was_said, "{forth:?}, {back:?}: {error}");
    };
    for at in 0..SAID.max(CHALLENGE + WELCOME) {
        for bit in (0..8).filter(|bit| proves() || *bit == at % 8) {
            if at < SAID {
                refused(Some(Meddling::Commits { at, bit }), None);
            }
            if at < CHALLENGE + WELCOME {
                refused(None, Some(Meddling::Commits { at, bit }));
            }
        }
        if at < SAID {
            refused(Some(Meddling::Cuts { at }), None);
        }
        if at < CHALLENGE + WELCOME {
            refused(None, Some(Meddling::Cuts { at }));
        }
    }
    connect(None, None).unwrap();
    await_descriptors(before);
    assert_eq!(service.stop(), 2, "only the two that nobody meddled with were let in");
}

#[test]
fn nobody_else_reaches_the_listener_behind_the_door() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    for ip in ["127.0.0.1", "::1"] {
        let endpoint = |node| {
            Fabric::tcp(ip).endpoint(host(), identity(node), Epoch::new(1), Settings::default()).unwrap()
        };
        let (one, two) = (endpoint(1), endpoint(2));
        let service = Service::start(&two);
        let before = descriptors();
        for _ in 0..3 {
            let (address, told, go, holding) = hold(&service.address);
            let connector = one.clone();
            let connecting = spawn("connects", move || connector.connect(&address, id(2), soon()).unwrap());
            let behind = SocketAddr::new(ip.parse().unwrap(), told.recv().unwrap().to);
            // No answer comes, not even a reset for a closed port.
            let strangers: Vec<_> = (0..4)
                .map(|_| {
                    spawn("strange", move || TcpStream::connect_timeout(&behind, Duration::from_millis(150)))
                })
                .collect();
            for stranger in strangers {
                let error = stranger.join().expect_err("a stranger reached the provider's listener");
                assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{ip}: {error}");
            }
            go.send(()).unwrap();
            talk(&connecting.join());
            holding.join();
            // The listener accepts one connection only.
            let error = TcpStream::connect_timeout(&behind, Duration::from_millis(500)).map(|_| ());
            assert!(error.is_err(), "a listener stayed");
        }
        await_descriptors(before);
        assert_eq!(service.stop(), 3);
    }
}

#[test]
fn who_was_welcome_and_does_not_come_leaves_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    let bed = Bed::Tcp;
    let short = Settings { handshake: Duration::from_secs(1), ..settings() };
    let (hasty, one, two) =
        (bed.endpoint(3, &short), bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    let service = Service::start(&two);
    talk(&one.connect(&service.address, id(2), soon()).unwrap());
    let before = descriptors();
    for _ in 0..3 {
        let (address, told, go, holding) = hold(&service.address);
        assert_eq!(hasty.connect(&address, id(2), soon()).unwrap_err(), Error::TimedOut);
        told.recv().unwrap();
        go.send(()).unwrap();
        holding.join();
    }
    await_descriptors(before);
    talk(&one.connect(&service.address, id(2), soon()).unwrap());
    assert_eq!(service.stop(), 2);
}

/// On one machine a program can even use the port that a peer has bound. Then it lacks the connect token, and its
/// connection leaves no state behind, whatever it sends.
#[test]
fn who_comes_in_the_place_of_a_peer_gets_no_further() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    let bed = Bed::Tcp;
    let short = Settings { handshake: Duration::from_secs(2), ..settings() };
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &short));
    let service = Service::start(&two);
    talk(&one.connect(&service.address, id(2), soon()).unwrap());
    let before = descriptors();
    let entry = [&WIRE_MAGIC[..], &[7; 32]].concat();
    let sayings =
        [vec![], vec![3], opening(&entry, 36)[..30].to_vec(), vec![0xff; 3000], opening(&entry, 36)];
    let mut served = 1;
    for said in &sayings {
        let (address, told, go, holding) = hold(&service.address);
        let connector = one.clone();
        let connecting = spawn("connects", move || connector.connect(&address, id(2), soon()));
        let agreed = told.recv().unwrap();
        let behind = SocketAddr::from(([127, 0, 0, 1], agreed.to));
        let mut imposter = connect_from(agreed.from, behind).unwrap();
        imposter.write_all(said).unwrap();
        // Long enough for the listener to process it.
        let _ = ipc::SystemHost.wait(&ipc::Word::new(0), 0, Some(in_ms(50)));
        go.send(()).unwrap();
        // After the provider has closed the other connection, the peer can use its port again.
        if let Ok(connection) = connecting.join() {
            talk(&connection);
            served += 1;
        }
        holding.join();
        imposter.set_read_timeout(Some(support::LIMIT)).unwrap();
        // The provider closes the connection at the latest when the peer listener is closed.
        let ended = imposter.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
        assert_ne!(ended, Err(std::io::ErrorKind::WouldBlock), "it was kept: {said:?}");
        drop(imposter);
        talk(&one.connect(&service.address, id(2), soon()).unwrap());
        served += 1;
    }
    println!("{} in the place of a peer, {served} connections of peers", sayings.len());
    await_descriptors(before);
    assert_eq!(service.stop(), served);
}

/// Pseudo-random numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// A client that sends its bytes a few at a time.
struct Slow {
    socket: TcpStream,
    rest: Vec<u8>,
}

impl Slow {
    /// Derives the bytes from a recorded handshake, of which the first `request` bytes are the request.
    fn new(address: &str, said: &[u8], request: usize, numbers: &mut Numbers) -> Self {
        let mut all = said.to_vec();
        // Sends some bytes at once, and the rest slowly.
        let mut at_once = 0;
        match numbers.below(7) {
            // A complete replay.
            0 => at_once = all.len(),
            // A valid request, then a handshake that never ends.
            1 => at_once = request,
            // Sends no bytes at once.
            2 => {}
            // A changed byte: among others in versions, clusters, lengths and kinds.
            3 => {
                for _ in 0..=numbers.below(3) {
                    let at = numbers.below(all.len());
                    all[at] ^= 1 << numbers.below(8);
                }
                at_once = all.len();
            }
            // A truncated handshake.
            4 => {
                all.truncate(numbers.below(all.len()));
                at_once = all.len();
            }
            // A valid request, then garbage.
            5 => {
                all.truncate(request);
                all.extend((0..numbers.below(3000)).map(|_| numbers.below(256) as u8));
                at_once = all.len();
            }
            // A message with a huge length.
            _ => {
                all.truncate(request);
                all.extend_from_slice(ControlHead::new(ControlKind::Hello).as_bytes());
                all.resize(all.len() - 2, 0xff);
                all.resize(all.len() + 4096, 0xff);
                at_once = all.len();
            }
        }
        let mut socket = TcpStream::connect(address).unwrap();
        // Resets on close: a thousand orderly closes a second would use up all ports.
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        let bytes = libc::socklen_t::try_from(size_of::<libc::linger>()).unwrap();
        // SAFETY: the option's value is read only.
        unsafe {
            let value = (&raw const linger).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, bytes);
        }
        let _ = socket.write_all(&all[..at_once]);
        socket.set_nonblocking(true).unwrap();
        Self { socket, rest: all.split_off(at_once) }
    }

    fn say_one_byte(&mut self) {
        if let Some(byte) = self.rest.first().copied() {
            // A client whose connection was closed sends no more.
            self.rest.drain(..if self.socket.write_all(&[byte]).is_ok() { 1 } else { self.rest.len() });
        }
    }
}

/// Number of open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn strangers_come_and_go_all_the_time() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    raise_descriptors();
    let (at_once, seconds) = if proves() { (1000, 600) } else { (300, 5) };
    let bed = Bed::Tcp;
    let (one, two) =
        (bed.endpoint(1, &settings()), bed.endpoint(2, &Settings { half_open_max: 64, ..settings() }));
    let service = Service::start(&two);
    let (address, recorder, said) = record(&service.address);
    talk(&one.connect(&address, id(2), soon()).unwrap());
    recorder.join();
    let said = said.lock().unwrap().clone();
    // A connection that existed before the attack is used all the time.
    let (before, after) = support::join(&bed, &one, &two);
    let (descriptors_before, before_kb) = (descriptors(), resident_kb());
    let mut numbers = Numbers(7);
    let mut strangers: std::collections::VecDeque<Slow> = std::collections::VecDeque::new();
    let (mut came, mut served, mut refused, mut slowest) = (0, 0, 0, std::time::Duration::ZERO);
    let end = in_ms(seconds * 1000);
    while ipc::SystemHost.now() < end {
        strangers.push_back(Slow::new(&service.address, &said, REQUEST, &mut numbers));
        came += 1;
        if strangers.len() > at_once {
            let gone = numbers.below(strangers.len());
            strangers.remove(gone);
        }
        for _ in 0..8 {
            let speaks = numbers.below(strangers.len());
            strangers[speaks].say_one_byte();
        }
        if came % 25 == 0 {
            let began = ipc::SystemHost.now();
            // Clients with a recorded request may occupy all slots for a moment: then the peer tries again.
            let mut why = Vec::new();
            let connection = (0..20).find_map(|_| {
                one.connect(&service.address, id(2), soon()).map_err(|error| why.push(error)).ok()
            });
            refused += why.len();
            let connection =
                connection.unwrap_or_else(|| panic!("a legitimate peer among {came} strangers: {why:?}"));
            talk(&connection);
            slowest = slowest.max(ipc::SystemHost.now().since(began));
            served += 1;
            before.send(b"still", Some(soon())).unwrap();
            assert_eq!(message(&after), b"still");
        }
        let _ = ipc::SystemHost.wait(&ipc::Word::new(0), 0, Some(in_ms(2)));
    }
    let (most_descriptors, most_kb) = (descriptors(), resident_kb());
    drop(strangers);
    await_descriptors(descriptors_before);
    println!(
        "{seconds} s, {came} strangers, {at_once} at once: {served} legitimate peers served, {refused} had to come again, \
         the slowest took {slowest:?}; {} KB more resident, {most_descriptors} descriptors, {} afterwards",
        most_kb.saturating_sub(before_kb),
        descriptors()
    );
    assert!(most_kb.saturating_sub(before_kb) < 16 << 10, "strangers took memory");
    // The recorded connection, and those that were counted; a connection refused half way may have been accepted.
    let admit = service.stop();
    assert!(
        admit > served && admit <= 1 + served + refused,
        "{admit} were let in, {served} legitimate, {refused}"
    );
}
