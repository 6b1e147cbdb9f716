//! Hostile clients of the listener: greetings that are malformed, cut short, too long or with descriptors, and many
//! connections without a greeting. A client that greets correctly is still served, and no descriptor stays behind.

use crate::door::{LIBRARY, daemon_of, eventually, knock};
use crate::rounds::rounds;
use crate::support::Draws;
use format::message::{Hello, MessageHeader, MessageKind};
use ipc::shared::create;
use ipc::socket::{Connection, hello};
use ipc::sys::Descriptor;
use sharedfs::Config;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use zerocopy::IntoBytes;

/// Descriptors of this process, which is daemon and stranger in one, by what they lead to.
fn descriptors() -> Vec<String> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let leads_to = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let mut found: Vec<String> = leads_to.map(|path| path.to_string_lossy().into_owned()).collect();
    found.sort();
    found
}

/// Waits until no more descriptors are open than were; shows them if it is in vain.
fn closed(what: &str, before: &[String]) {
    let result = std::panic::catch_unwind(|| eventually(what, || descriptors().len() <= before.len()));
    assert!(result.is_ok(), "{what}: {before:#?} were open, and now {:#?}", descriptors());
}

fn connect(folder: &Path) -> Connection {
    loop {
        // More clients connect than the backlog holds: they try again, as a LibFS would.
        match Connection::connect(&folder.join("socket")) {
            Ok(connection) => return connection,
            Err(ipc::Error::Disconnected) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// A greeting with something wrong, or nearly none.
fn packet(draws: &mut Draws) -> Vec<u8> {
    let greeting: Hello = hello(LIBRARY, draws.below(4), draws.below(4) as u32);
    let descriptors = if draws.chance(70) { 0 } else { draws.below(40) as u32 };
    let kind =
        *draws.of(&[MessageKind::Hello, MessageKind::Hello, MessageKind::Welcome, MessageKind::Parcel]);
    let header = MessageHeader::new(kind, size_of::<Hello>() as u32, descriptors);
    let mut packet = [header.as_bytes(), greeting.as_bytes()].concat();
    match draws.below(5) {
        0 => packet.truncate(draws.below(packet.len() as u64 + 1) as usize),
        1 => packet.resize(draws.below(9000) as usize, draws.below(256) as u8),
        2 | 3 => {
            let place = draws.below(packet.len() as u64) as usize;
            packet[place] = draws.below(256) as u8;
        }
        _ => {}
    }
    packet
}

fn round(draws: &mut Draws) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let before = descriptors();
    let daemon = daemon_of(folder.path(), Config { sessions_max: 64, ..crate::client::tiny() });
    let with_daemon = descriptors();
    let mut strangers = Vec::new();
    for _ in 0..draws.below(40) {
        let stranger = connect(folder.path());
        let brought: Vec<Descriptor> = (0..if draws.chance(70) { 0 } else { draws.below(17) })
            .map(|_| create(c"brought", 4096).unwrap())
            .collect();
        for _ in 0..draws.below(3) {
            let brought: Vec<&Descriptor> = brought.iter().collect();
            // It may have been put out already.
            let _ = stranger.send_packet(&packet(draws), &brought);
        }
        if draws.chance(60) {
            strangers.push(stranger);
        }
    }
    let guest = knock(folder.path());
    guest.root();
    drop((guest, strangers));
    eventually("who is gone is seen to be gone", || daemon.sessions().is_empty());
    closed("what was brought is closed", &with_daemon);
    daemon.stop();
    drop(daemon);
    closed("a daemon keeps nothing", &before);
}

/// One at a time: it counts the descriptors of the process, which other tests open too.
#[test]
fn strangers_at_the_door_keep_nobody_out() {
    if std::env::var_os("HEARTH_FUZZ_SECONDS").is_none() {
        // Beside other tests only what needs no count.
        return rounds("hostile handshakes", 6, round_without_counts);
    }
    rounds("hostile handshakes", 6, round);
}

fn round_without_counts(draws: &mut Draws) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), Config { sessions_max: 64, ..crate::client::tiny() });
    let mut strangers = Vec::new();
    for _ in 0..draws.below(40) {
        let stranger = connect(folder.path());
        let _ = stranger.send_packet(&packet(draws), &[]);
        strangers.push(stranger);
    }
    knock(folder.path()).root();
    drop(strangers);
    eventually("who is gone is seen to be gone", || daemon.sessions().is_empty());
    daemon.stop();
}

/// A packet of no bytes is an end of the stream, and may still carry descriptors: a client that sent many of them made
/// the daemon run out of its own.
#[test]
fn what_an_empty_packet_brings_is_closed() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), crate::client::tiny());
    let (kept, brought) = UnixStream::pair().unwrap();
    kept.set_nonblocking(true).unwrap();
    let stranger = connect(folder.path());
    stranger.send_packet(&[], &[&Descriptor::from(OwnedFd::from(brought))]).unwrap();
    eventually("what was brought is closed", || matches!((&kept).read(&mut [0]), Ok(0)));
    daemon.stop();
}

/// More connections than the listener keeps send nothing: the next client is served when their time is over.
#[test]
fn many_half_open_connections_keep_nobody_out_for_long() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), crate::client::tiny());
    let silent: Vec<Connection> = (0..300).map(|_| connect(folder.path())).collect();
    knock(folder.path()).root();
    drop(silent);
    eventually("the guest is gone", || daemon.sessions().is_empty());
    daemon.stop();
}
