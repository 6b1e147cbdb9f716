//! A live listener over tcp among strangers: raw sockets that say nothing, half a message, garbage, too much, or what
//! somebody else once said, whole, changed, cut short, at once or a byte at a time; peers with another key or cluster;
//! and who looks for the provider's own listener behind the door. Nobody of them gets in, memory and descriptors stay
//! bounded, and legitimate peers go on.
//!
//! HEARTH_PROVE=1: more strangers, every bit of a handshake changed, and ten minutes of those that come and go.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::Epoch;
use format::wire::{DoorHead, DoorKind, Knock, RefusalReason, WIRE_MAGIC, WIRE_VERSION, WireRefusal};
use ipc::Host;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::relay::{CHALLENGE, HEAD, KNOCK, Meddling, SAID, WELCOME, connect_from, hold, meddle, record};
use support::{Bed, host, id, identity, in_ms, message, soon, spawn};
use transport::{ClusterKey, Connection, Endpoint, Error, Event, Fabric, Identity, Listener, Settings};
use zerocopy::{FromZeros, IntoBytes};

fn proves() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some()
}

/// Strangers that stay connected at once.
fn strangers() -> usize {
    if proves() { 5000 } else { 1000 }
}

fn settings() -> Settings {
    Settings { half_open_max: 8, silence: Some(support::LIMIT), ..Settings::default() }
}

/// Memory and descriptors are those of the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

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
                // One that gave up when the handshake was almost done says nothing.
                let Ok(Event::Message(said)) = connection.take(Some(soon())) else { continue };
                let_in += 1;
                connection.send(&said, Some(soon())).unwrap();
                connection.close();
            }
            Err(Error::TimedOut) => {}
            Err(error) => panic!("the listener: {error}"),
        }
        assert!(listener.half_open() <= 64);
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

/// Nothing of theirs stays open when they have gone.
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
    let knock = |at: usize| {
        let connection = one.connect(&service.address, id(2), soon());
        talk(&connection.unwrap_or_else(|error| panic!("a legitimate peer among {at} strangers: {error}")));
    };
    knock(0);
    let (before, before_kb) = (descriptors(), resident_kb());
    let mut silent = Vec::new();
    let garbage: Vec<u8> = (0..4096u32).map(|at| ((at * 131) >> 2) as u8).collect();
    let like_a_knock = [DoorHead::new(DoorKind::Knock).as_bytes(), &garbage[..54]].concat();
    for stranger in 0..strangers() {
        let mut socket = TcpStream::connect(&service.address).unwrap();
        // Whoever is found out may be hung up on while it still speaks.
        let _ = match stranger % 7 {
            0 => Ok(()),
            1 => socket.write_all(&like_a_knock[..9]),
            2 => socket.write_all(&garbage),
            3 => socket.write_all(&like_a_knock),
            4 => socket.write_all(&[&like_a_knock[..6], &[0xff; 4000]].concat()),
            5 => socket.write_all(&opening(&garbage[..54], 54)),
            _ => socket.write_all(b"GET / HTTP/1.1\r\n\r\n"),
        };
        silent.push(socket);
        if stranger % 50 == 0 {
            knock(stranger);
        }
    }
    knock(strangers());
    // Their own ends, and those that are not done.
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
    knock(strangers());
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
        // It is hung up on: no Welcome, no echo of what was said inside.
        let mut heard = Vec::new();
        let _ = socket.read_to_end(&mut heard);
        assert!(!heard.windows(5).any(|part| part == b"well?"), "a recorded handshake was accepted");
    }
    talk(&one.connect(&service.address, id(2), soon()).unwrap());
    assert_eq!(service.stop(), 2, "only the two legitimate connections were let in");
}

/// What the door says to somebody who says this and no more.
fn answer(address: &str, said: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(support::LIMIT)).unwrap();
    // Whoever is found out may be hung up on while it still speaks.
    let _ = socket.write_all(said);
    let _ = socket.shutdown(Shutdown::Write);
    let mut heard = Vec::new();
    let _ = socket.read_to_end(&mut heard);
    heard
}

/// The refusal at the end of what the door said.
fn refusal(heard: &[u8]) -> Option<RefusalReason> {
    let at = heard.len().checked_sub(HEAD + size_of::<WireRefusal>())?;
    let (kind, body) = DoorHead::decode(&heard[at..]).ok()??;
    (kind == DoorKind::Refusal).then(|| WireRefusal::decode(body).unwrap().1)
}

#[test]
fn another_version_is_told_so() {
    let _alone = ALONE.lock().unwrap_or_else(|other| other.into_inner());
    let bed = Bed::Tcp;
    let two = bed.endpoint(2, &settings());
    let service = Service::start(&two);
    let mut knock = Knock::new_zeroed();
    (knock.magic, knock.version_min, knock.version_max) = (WIRE_MAGIC, WIRE_VERSION + 1, WIRE_VERSION + 2);
    let newer = [DoorHead::new(DoorKind::Knock).as_bytes(), knock.as_bytes(), &[7; 300]].concat();
    assert_eq!(refusal(&answer(&service.address, &newer)), Some(RefusalReason::Version));
    assert_eq!(service.stop(), 0);
}

/// Each from an initiator that lives, so that all before the change is right, and was never heard before.
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
                refused(Some(Meddling::Flips { at, bit }), None);
            }
            if at < CHALLENGE + WELCOME {
                refused(None, Some(Meddling::Flips { at, bit }));
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
            // Nobody answers: not even that there is no listener.
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
            // It listened for one.
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

/// On one machine even the port can be had that a peer has bound: then the entry is wanting, and what came instead of
/// the peer's connection leaves nothing behind, whatever it said.
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
        // Long enough to be heard.
        let _ = ipc::SystemHost.wait(&ipc::Word::new(0), 0, Some(in_ms(50)));
        go.send(()).unwrap();
        // Once the provider has hung up on the other, the port is the peer's again.
        if let Ok(connection) = connecting.join() {
            talk(&connection);
            served += 1;
        }
        holding.join();
        imposter.set_read_timeout(Some(support::LIMIT)).unwrap();
        // The provider hangs up, at the latest when the invitation is over.
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

/// Numbers that look random, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// A stranger that says its piece a few bytes at a time.
struct Slow {
    socket: TcpStream,
    rest: Vec<u8>,
}

impl Slow {
    /// What it says is made of what a legitimate peer said: the first `knock` bytes are its knock.
    fn new(address: &str, said: &[u8], knock: usize, numbers: &mut Numbers) -> Self {
        let mut all = said.to_vec();
        // What is said at once; the rest comes slowly.
        let mut at_once = 0;
        match numbers.below(7) {
            // Replayed, all of it.
            0 => at_once = all.len(),
            // A knock that is right, and then a handshake that never ends.
            1 => at_once = knock,
            // Nothing comes quickly.
            2 => {}
            // Changed somewhere: other versions, clusters, lengths, kinds among them.
            3 => {
                for _ in 0..=numbers.below(3) {
                    let at = numbers.below(all.len());
                    all[at] ^= 1 << numbers.below(8);
                }
                at_once = all.len();
            }
            // Cut short.
            4 => {
                all.truncate(numbers.below(all.len()));
                at_once = all.len();
            }
            // A right knock, then garbage.
            5 => {
                all.truncate(knock);
                all.extend((0..numbers.below(3000)).map(|_| numbers.below(256) as u8));
                at_once = all.len();
            }
            // A message that says it is huge.
            _ => {
                all.truncate(knock);
                all.extend_from_slice(DoorHead::new(DoorKind::Hello).as_bytes());
                all.resize(all.len() - 2, 0xff);
                all.resize(all.len() + 4096, 0xff);
                at_once = all.len();
            }
        }
        let mut socket = TcpStream::connect(address).unwrap();
        // A thousand a second that end in order would use up every port.
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
            // Whoever was hung up on says no more.
            self.rest.drain(..if self.socket.write_all(&[byte]).is_ok() { 1 } else { self.rest.len() });
        }
    }
}

/// Descriptors that this process has open.
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
    // One that was there before them goes on all the time.
    let (before, after) = support::join(&bed, &one, &two);
    let (descriptors_before, before_kb) = (descriptors(), resident_kb());
    let mut numbers = Numbers(7);
    let mut strangers: std::collections::VecDeque<Slow> = std::collections::VecDeque::new();
    let (mut came, mut served, mut refused, mut slowest) = (0, 0, 0, std::time::Duration::ZERO);
    let end = in_ms(seconds * 1000);
    while ipc::SystemHost.now() < end {
        strangers.push_back(Slow::new(&service.address, &said, KNOCK, &mut numbers));
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
            // Strangers with a recorded knock take room from it for a moment: then it comes again.
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
    // The recorded one, and those that were counted; a connection that was refused half way may have got in.
    let let_in = service.stop();
    assert!(
        let_in > served && let_in <= 1 + served + refused,
        "{let_in} were let in, {served} legitimate, {refused}"
    );
}
