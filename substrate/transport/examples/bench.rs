//! Measures connections over tcp on the loopback between two processes.
//!
//! bench rounds BYTES COUNT SPIN_NS: writes with an immediate, each answered by an 8-byte write with an immediate;
//! prints the median time of a round in nanoseconds. bench stream BYTES COUNT SPIN_NS: writes at the highest rate;
//! prints bytes per second. Waiting threads poll for at most SPIN_NS.
//! bench idle: the cost of idle connections. `scripts/bench-transport` prints each beside its lower bound.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made ends with its reason")]

use format::wire::WireRegion;
use format::{Epoch, NodeId};
use ipc::{Host, SystemHost, Time};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use transport::{Bytes, ClusterKey, Connection, Endpoint, Event, Fabric, Identity, Rights, Settings, dram};
use zerocopy::{FromBytes, IntoBytes};

const REGION_BYTES: u64 = 1 << 20;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).map_or(0, |word| word.parse::<u64>().unwrap());
    match words.first().map(String::as_str) {
        Some("rounds") => rounds(number(1), number(2), number(3)),
        Some("stream") => stream(number(1), number(2), number(3)),
        Some("idle") => idle(),
        Some("answers") => answer(&words),
        _ => println!("bench rounds BYTES COUNT SPIN_NS | stream BYTES COUNT SPIN_NS | idle"),
    }
}

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(60))
}

fn endpoint(node: u32, spin_ns: u64) -> Endpoint {
    let identity = Identity { cluster: [1; 16], key: ClusterKey::new([1; 32]), node: NodeId::new(node) };
    let spin_ns = u32::try_from(spin_ns).unwrap();
    let settings = Settings { spin_ns, window: 64, ..Settings::default() };
    Fabric::tcp("127.0.0.1").endpoint(Arc::new(SystemHost), identity, Epoch::new(1), settings).unwrap()
}

/// Pins this thread to a processor. Two polling threads on one processor would wait for the scheduler, not for each
/// other. The thread of the endpoint is not pinned.
fn pin(processor: usize) {
    // SAFETY: a set of bits; all of them zero is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours, and longer than any number of a processor here.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: the set is read only. Where there is no such processor nothing is changed.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
}

/// Starts the other process, and connects to it.
fn other(words: &[&str], spin_ns: u64) -> (Endpoint, Connection, std::process::Child, WireRegion) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("answers")
        .args(words)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut address).unwrap();
    let one = endpoint(1, spin_ns);
    let connection = one.connect(address.trim(), NodeId::new(2), soon()).unwrap();
    let remote = remote(&connection);
    (one, connection, child, remote)
}

fn remote(connection: &Connection) -> WireRegion {
    match connection.take(Some(soon())).unwrap() {
        Event::Message(told) => WireRegion::read_from_bytes(&told).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn offer(connection: &Connection) -> pmem::Region {
    let region = dram(REGION_BYTES).unwrap();
    let granted = connection.grant(&region, 0..REGION_BYTES, Rights::Write).unwrap();
    connection.send(granted.as_bytes(), Some(soon())).unwrap();
    region
}

fn rounds(bytes: u64, count: u64, spin_ns: u64) {
    let (one, connection, mut child, to) =
        other(&["rounds", &count.to_string(), &spin_ns.to_string()], spin_ns);
    let _region = offer(&connection);
    let local = one.register(&dram(REGION_BYTES).unwrap()).unwrap();
    let until = Some(soon());
    pin(0);
    let mut times: Vec<u64> = (0..count)
        .map(|_| {
            let start = SystemHost.now();
            let from = Bytes::Registered(&local, 0..bytes);
            connection.write(from, &to, 0, Some(7), until).unwrap();
            assert!(matches!(connection.take(until).unwrap(), Event::Immediate(_)));
            u64::try_from(SystemHost.now().since(start).as_nanos()).unwrap()
        })
        .collect();
    connection.close();
    child.wait().unwrap();
    times.sort_unstable();
    println!("{}", times[times.len() / 2]);
}

fn stream(bytes: u64, count: u64, spin_ns: u64) {
    let (one, connection, mut child, to) =
        other(&["stream", &count.to_string(), &spin_ns.to_string()], spin_ns);
    let local = one.register(&dram(REGION_BYTES).unwrap()).unwrap();
    pin(0);
    let start = SystemHost.now();
    for number in 1..=count {
        let from = Bytes::Registered(&local, 0..bytes);
        // Notifies the peer now and then; the peer answers the last one.
        let told = (number % 16 == 0 || number == count).then_some(0);
        connection.write(from, &to, number % 8 * 65_536, told, Some(soon())).unwrap();
    }
    assert!(matches!(connection.take(Some(soon())).unwrap(), Event::Message(_)));
    let took = SystemHost.now().since(start).as_secs_f64();
    println!("{:.0}", (bytes * count) as f64 / took);
    connection.close();
    child.wait().unwrap();
}

fn answer(words: &[String]) {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let (count, two) = (number(2), endpoint(2, number(3)));
    let listener = two.listen("").unwrap();
    println!("{}", listener.address());
    std::io::stdout().flush().unwrap();
    let connection = listener.accept(Some(soon())).unwrap();
    let _region = offer(&connection);
    pin(1);
    if words[1] == "rounds" {
        let to = remote(&connection);
        let until = Some(soon());
        for _ in 0..count {
            assert!(matches!(connection.take(until).unwrap(), Event::Immediate(_)));
            connection.write(Bytes::Inline(&[0; 8]), &to, 0, Some(1), until).unwrap();
        }
    } else {
        for _ in 0..count.div_ceil(16) {
            assert!(matches!(connection.take(Some(soon())).unwrap(), Event::Immediate(_)));
        }
        connection.send(b"all", Some(soon())).unwrap();
    }
    while !matches!(connection.take(Some(soon())), Ok(Event::Ended(_))) {}
}

/// A line of /proc/self/status, in kilobytes.
fn memory_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Processor time that this process has used.
fn busy() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

fn idle() {
    let (one, two) = (endpoint(1, 20_000), endpoint(2, 20_000));
    let listener = two.listen("").unwrap();
    let address = listener.address();
    let mut kept = Vec::new();
    let mut join = || {
        let (one, address) = (one.clone(), address.clone());
        let (here, theirs) = (Arc::new(std::sync::Mutex::new(None)), ());
        let slot = here.clone();
        let body =
            move || *slot.lock().unwrap() = Some(one.connect(&address, NodeId::new(2), soon()).unwrap());
        let thread = SystemHost.spawn("connects", Box::new(body)).unwrap();
        let there = listener.accept(Some(soon())).unwrap();
        thread.join().unwrap();
        let () = theirs;
        kept.push((here.lock().unwrap().take().unwrap(), there));
    };
    join();
    let word = ipc::Word::new(0);
    let before = busy();
    SystemHost.wait(&word, 0, Some(SystemHost.now().after(Duration::from_secs(3))));
    let used = busy() - before;
    println!("one idle connection, both ends: {} us of processor time in 3 s", used.as_micros());
    let (memory, start) = (memory_kb(), SystemHost.now());
    (0..200).for_each(|_| join());
    let took = SystemHost.now().since(start);
    println!(
        "a connection, both ends: {} KB resident, {} us to make",
        (memory_kb() - memory) / 200,
        took.as_micros() / 200
    );
}
