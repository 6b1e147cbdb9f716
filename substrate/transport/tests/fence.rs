//! The fence: the test closes a connection at random moments while the peer writes at its highest rate. After the
//! return of the close, no byte of the peer changes the memory, also after the memory was registered again for
//! another peer.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::wire::WireRegion;
use ipc::{Host, SystemHost};
use std::time::Duration;
use support::{Bed, id, soon, spawn};
use transport::{Bytes, Connection, Endpoint, Error, Event, Listener, Local, Rights, Settings, dram};
use zerocopy::{FromBytes, IntoBytes};

/// Number of rounds on each bed; the full proof runs a thousand.
const ROUNDS: u32 = 60;

const REGION_BYTES: u64 = 256 << 10;

/// The writer's operations. Every second one is long enough to be interrupted in the middle.
const LONG_BYTES: u64 = 48 << 10;

fn rounds() -> u32 {
    if std::env::var_os("HEARTH_PROVE").is_some() { 1000 } else { ROUNDS }
}

/// Writes until the connection ends; returns the number of writes.
fn write_on(connection: &Connection, local: &Local, remote: &WireRegion) -> u64 {
    let mut count = 0u64;
    loop {
        // Each write has its own value, so no byte is written twice with the same value.
        let fill = count.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let at = fill % (REGION_BYTES - LONG_BYTES);
        let result = if count.is_multiple_of(2) {
            local.region().store(at % 4096, &fill.to_le_bytes());
            connection.write(Bytes::Registered(local, 0..LONG_BYTES), remote, at, Some(1), Some(soon()))
        } else {
            connection.write(Bytes::Inline(&[fill as u8; 64]), remote, at, Some(2), Some(soon()))
        };
        match result {
            Ok(_) => count += 1,
            Err(Error::Ended(_)) => return count,
            Err(error) => panic!("the writer: {error}"),
        }
    }
}

fn content(region: &pmem::Region) -> Vec<u8> {
    let mut bytes = vec![0; REGION_BYTES as usize];
    region.read(0, &mut bytes).unwrap();
    bytes
}

struct Round<'a> {
    bed: &'a Bed,
    one: &'a Endpoint,
    listener: &'a Listener,
    local: &'a Local,
}

impl Round<'_> {
    fn connect(&self) -> (Connection, Connection) {
        let (one, address) = (self.one.clone(), self.listener.address());
        let connecting = spawn("connects", move || one.connect(&address, id(2), soon()).unwrap());
        let there = self.bed.inside(2, || self.listener.accept(Some(soon())).unwrap());
        (connecting.join(), there)
    }

    /// Runs one close; returns the number of writes that the peer had begun.
    fn run(&self, region: &pmem::Region, number: u32) -> u64 {
        let (here, there) = self.connect();
        let remote = there.grant(region, 0..REGION_BYTES, Rights::Write).unwrap();
        here_is_told(&here, &there, &remote);
        let local = self.local.clone();
        let writer = spawn("writes", move || write_on(&here, &local, &remote));
        let takes = SystemHost.random() % 40;
        for _ in 0..takes {
            assert!(matches!(there.take(Some(soon())), Ok(Event::Immediate(_))));
        }
        let instant = SystemHost.now().after(Duration::from_nanos(SystemHost.random() % 200_000));
        while SystemHost.now() < instant {
            std::hint::spin_loop();
        }
        there.close();
        let at_close = content(region);
        // Registers the memory at once for another peer, under another key.
        let (next_here, next_there) = self.connect();
        let again = next_there.grant(region, 0..REGION_BYTES, Rights::Write).unwrap();
        assert!(content(region) == at_close, "round {number}: bytes changed after the close");
        let ours = vec![number as u8 ^ 0x5a; REGION_BYTES as usize];
        region.store(0, &ours);
        next_here.write(Bytes::Inline(&[0xff; 64]), &again, 0, Some(7), Some(soon())).unwrap();
        assert_eq!(next_there.take(Some(soon())), Ok(Event::Immediate(7)));
        let count = writer.join();
        let found = content(region);
        assert!(
            found[..64] == [0xff; 64] && found[64..] == ours[64..],
            "round {number}: late bytes in reused memory"
        );
        next_there.close();
        let synced = content(region);
        assert!(synced == found, "round {number}: bytes changed after the second close");
        count
    }
}

impl Round<'_> {
    /// Runs one close while another thread waits for the end: the memory that it reads then never changes again.
    fn hear(&self, region: &pmem::Region, number: u32) {
        let (here, there) = self.connect();
        let remote = there.grant(region, 0..REGION_BYTES, Rights::Write).unwrap();
        here_is_told(&here, &there, &remote);
        let local = self.local.clone();
        let writer = spawn("writes", move || write_on(&here, &local, &remote));
        let (theirs, memory) = (there.clone(), region.clone());
        let hearer = spawn("hears", move || {
            while !matches!(theirs.take(Some(soon())), Ok(Event::Ended(_))) {}
            content(&memory)
        });
        let instant = SystemHost.now().after(Duration::from_nanos(SystemHost.random() % 500_000));
        while SystemHost.now() < instant {
            std::hint::spin_loop();
        }
        there.close();
        let heard = hearer.join();
        writer.join();
        assert!(content(region) == heard, "round {number}: bytes changed after the end was told");
    }
}

/// Sends the peer the description of the memory that it may write.
fn here_is_told(here: &Connection, there: &Connection, remote: &WireRegion) {
    there.send(remote.as_bytes(), Some(soon())).unwrap();
    let told = support::message(here);
    assert_eq!(WireRegion::read_from_bytes(&told).unwrap(), *remote);
}

fn on(bed: &Bed, body: impl FnOnce(&Round<'_>, &pmem::Region)) {
    let settings = Settings { window: 64, depth: 32, ..support::patient() };
    let (one, two) = (bed.endpoint(1, &settings), bed.endpoint(2, &settings));
    let listener = bed.inside(2, || two.listen("").unwrap());
    let region = dram(REGION_BYTES).unwrap();
    let local = one.register(&dram(REGION_BYTES).unwrap()).unwrap();
    body(&Round { bed, one: &one, listener: &listener, local: &local }, &region);
}

fn prove(bed: &Bed) {
    on(bed, |round, region| prove_closes(bed, round, region));
    on(bed, |round, region| (0..rounds()).for_each(|number| round.hear(region, number)));
}

fn prove_closes(bed: &Bed, round: &Round<'_>, region: &pmem::Region) {
    let writes: u64 = (0..rounds()).map(|number| round.run(region, number)).sum();
    println!("{}: {} closes in the middle of {writes} writes", bed.name(), rounds());
    assert!(writes > u64::from(rounds()), "the peer hardly wrote");
}

#[test]
fn no_byte_changes_after_a_close_in_process() {
    prove(&Bed::local());
}

#[test]
fn no_byte_changes_after_a_close_over_tcp() {
    prove(&Bed::Tcp);
}

#[test]
fn no_byte_changes_after_a_close_over_verbs() {
    let Some(bed) = Bed::verbs() else {
        println!("skipped: needs an RDMA device: scripts/verbs");
        return;
    };
    prove(&bed);
}
