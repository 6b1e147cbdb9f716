//! The real request ring and the real shared words under thousands of schedules, with kills and pauses.
//!
//! Which tool finds what: a check in the wrong order, a forgotten scan, a missing seal, a lost wake, an answer to the
//! wrong caller are found here. A slot entered by a plain store, or a fence left out, cannot be: one thread runs at a
//! time, so every store is seen at once. Loom finds those, in `ipc`'s `tests/loom.rs`.
//!
//! HEARTH_SEEDS multiplies the numbers of seeds.

#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use format::Sequence;
use ipc::shared::create;
use ipc::sync::Ordering;
use ipc::words::{CommitWord, FenceBy, Inside, Lease, LeaseState, LeaseWord, Overflow, Seal, SealWord, Slot};
use ipc::{
    Access, Call, Error, Host, Join, LongWord, Mapping, RingClient, RingLimits, RingServer, Time, Words,
};
use sim::{Ended, Limits, SimHost, Simulation};
use std::sync::Arc;
use std::time::Duration;

fn seeds(count: u64) -> std::ops::Range<u64> {
    let times = std::env::var("HEARTH_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    0..count * times
}

fn start(host: &Arc<SimHost>, name: &str, body: impl FnOnce() + Send + 'static) -> Box<dyn Join> {
    host.spawn(name, Box::new(body)).unwrap()
}

/// The faults, and the process that each one hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    Kill,
    Pause,
}

/// A thread of its own process that does `fault` to `victim` after some random steps.
fn mischief(on: &Arc<SimHost>, victim: &Arc<SimHost>, fault: Fault, steps_max: u64) -> Box<dyn Join> {
    let (host, victim) = (on.clone(), victim.clone());
    start(on, "mischief", move || {
        (0..host.random() % steps_max).for_each(|_| host.step());
        match fault {
            Fault::None => {}
            Fault::Kill => victim.kill(),
            Fault::Pause => {
                victim.pause();
                (0..host.random() % steps_max).for_each(|_| host.step());
                victim.resume();
            }
        }
    })
}

/// Where every simulated clock begins.
const START: Time = Time::from_ns(1_000_000_000);

const RING: RingLimits = RingLimits { slots: 2, inline_bytes: 64, bulk_buffers: 1, bulk_bytes: 4096 };

/// Three client threads on two slots, one server thread, faults; gives how many calls were answered.
fn ring(seed: u64, to_client: Fault, to_server: Fault) -> (Ended, usize) {
    let simulation = Simulation::new(seed, Limits { interrupted_one_in: 20, ..Limits::default() });
    let (clients, servers, outside) =
        (simulation.process("client"), simulation.process("server"), simulation.process("outside"));
    let memory = create(c"ring", RING.bytes().unwrap()).unwrap();
    let map = || Mapping::new(&memory, RING.bytes().unwrap(), Access::Write).unwrap();
    let spin_ns = if seed.is_multiple_of(2) { 0 } else { 2000 };
    let server = Arc::new(RingServer::new(servers.clone(), map(), RING, spin_ns).unwrap());
    let client = Arc::new(RingClient::new(clients.clone(), servers.link(), map(), RING, spin_ns).unwrap());
    let answered = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let callers: Vec<_> = (0..3u64)
        .map(|thread| {
            let (client, answered) = (client.clone(), answered.clone());
            start(&clients, "caller", move || {
                for turn in 0..4 {
                    let id = thread << 32 | turn;
                    let mut body = id.to_le_bytes().to_vec();
                    body.resize(if turn == 2 { 500 } else { 20 }, turn as u8);
                    let call = Call { id, kind: 1, body: &body, response_bytes_max: 500 };
                    match client.call(&call, None) {
                        Ok(response) => {
                            body.reverse();
                            assert!(response.body == body, "the answer is the caller's own");
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(Error::Disconnected) => return,
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        })
        .collect();
    let theirs = server.clone();
    drop(start(&servers, "server", move || {
        loop {
            match theirs.next(None) {
                Ok(taken) => {
                    let body: Vec<u8> = taken.body.iter().rev().copied().collect();
                    theirs.respond(taken, 0, &body).unwrap();
                }
                Err(Error::Disconnected) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }));
    drop(mischief(&outside, &clients, to_client, 150));
    drop(mischief(&outside, &servers, to_server, 150));
    drop(start(&outside, "end", move || {
        for caller in callers {
            caller.join().unwrap();
        }
        server.close();
    }));
    let ended = simulation.run();
    let ended = ended.unwrap_or_else(|stuck| panic!("seed {seed}, {to_client:?}, {to_server:?}: {stuck}"));
    (ended, answered.load(Ordering::Relaxed))
}

#[test]
fn the_ring_answers_everybody_or_says_that_the_server_is_gone() {
    let faults = [Fault::None, Fault::Kill, Fault::Pause];
    let mut cut_short = 0;
    for seed in seeds(1000) {
        let (to_client, to_server) = (faults[(seed / 3 % 3) as usize], faults[(seed % 3) as usize]);
        let (ended, answered) = ring(seed, to_client, to_server);
        if to_client != Fault::Kill && to_server != Fault::Kill {
            assert_eq!(answered, 12, "seed {seed}");
            // Both sides look by themselves after 50 ms and more: a lost wake would show as time.
            let took = ended.now.since(START);
            assert!(took < Duration::from_millis(20), "seed {seed}: somebody was not woken, {took:?}");
        } else {
            cut_short += usize::from(answered < 12);
        }
    }
    assert!(cut_short > 200, "most kills come while calls are under way: {cut_short}");
}

#[test]
fn one_seed_gives_one_run_of_the_ring() {
    for seed in 0..20 {
        assert_eq!(ring(seed, Fault::Pause, Fault::Kill), ring(seed, Fault::Pause, Fault::Kill));
    }
}

/// The bug that is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// A writer looks at the lease before it goes inside.
    CheckBeforeEntry,
    /// A writer looks at the lease never.
    NoCheck,
    /// SharedFS does not wait for those who are inside.
    NoScan,
    /// SharedFS does not seal the logs when the grace period is over.
    NoSeal,
    /// SharedFS reads the cut before it seals.
    CutBeforeSeal,
    /// A writer looks at the seal before it commits.
    SealBeforeCommit,
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrote {
    Yes,
    /// The lease is gone, or the record lies behind the cut.
    No,
    /// The log was just being sealed.
    Unknown(Sequence),
}

/// Writers with a slot, and those that share the overflow.
const PLACES: [Option<usize>; 4] = [Some(0), Some(1), None, None];

/// The memory of one session: words that its LibFS writes, and the page that SharedFS writes.
struct Session {
    lease: Words<LeaseWord>,
    slots: Words<Slot>,
    overflow: Words<Overflow>,
    /// One log a writer, to do without an append lock.
    commits: Words<CommitWord>,
    seals: Words<SealWord>,
    records: Words<LongWord>,
}

impl Session {
    fn new() -> Self {
        let memory = create(c"session", 8192).unwrap();
        let mapping = Mapping::new(&memory, 8192, Access::Write).unwrap();
        Self {
            lease: mapping.words(0, 1).unwrap(),
            slots: mapping.words(64, 2).unwrap(),
            overflow: mapping.words(192, 1).unwrap(),
            commits: mapping.words(1024, PLACES.len()).unwrap(),
            seals: mapping.words(1024 + 512, PLACES.len()).unwrap(),
            records: mapping.words(2048, 256).unwrap(),
        }
    }

    fn inside(&self) -> Inside<'_> {
        Inside { slots: &self.slots, overflow: &self.overflow[0] }
    }

    /// Makes one write; returns its outcome.
    fn write(&self, writer: usize, granted: Lease, bug: Bug) -> Wrote {
        let inside = self.inside();
        // Either side may fence: the simulator runs one thread at a time.
        let fence = [FenceBy::Operation, FenceBy::Revoker][writer % 2];
        let early = bug != Bug::CheckBeforeEntry || self.lease[0].load() == granted;
        let entered = inside.enter(PLACES[writer], fence);
        let holds = match bug {
            Bug::CheckBeforeEntry => early,
            Bug::NoCheck => true,
            _ => self.lease[0].load() == granted,
        };
        let mut wrote = Wrote::No;
        if holds {
            let commit = &self.commits[writer];
            let next = commit.load().next();
            self.records[writer * 64 + next.get() as usize % 64].store(next.get(), Ordering::Relaxed);
            let seen = if bug == Bug::SealBeforeCommit { self.seals[writer].load() } else { Seal::Open };
            commit.commit(next, fence);
            let seal = if bug == Bug::SealBeforeCommit { seen } else { self.seals[writer].load() };
            wrote = match seal {
                Seal::Open => Wrote::Yes,
                Seal::Sealed(cut) if next <= cut => Wrote::Yes,
                Seal::Sealed(_) => Wrote::No,
                Seal::Sealing => Wrote::Unknown(next),
            };
        }
        inside.leave(entered);
        wrote
    }

    /// Takes the lease away within `grace`; gives the cut of every log and whether they were sealed.
    fn revoke(&self, host: &dyn Host, grace: Duration, bug: Bug) -> (Vec<Sequence>, bool) {
        let early: Vec<_> = self.commits.iter().map(CommitWord::load).collect();
        self.lease[0].revoke();
        let inside = self.inside();
        let mut scan = inside.scan();
        let end = host.now().after(grace);
        while bug != Bug::NoScan && !scan.done(&inside) {
            if host.now() >= end {
                return match bug {
                    Bug::NoSeal => (self.commits.iter().map(CommitWord::load).collect(), true),
                    Bug::CutBeforeSeal => {
                        for (seal, commit) in self.seals.iter().zip(self.commits.iter()) {
                            seal.seal(commit, || ());
                        }
                        (early, true)
                    }
                    _ => {
                        let logs = self.seals.iter().zip(self.commits.iter());
                        (logs.map(|(seal, commit)| seal.seal(commit, || ())).collect(), true)
                    }
                };
            }
        }
        (self.commits.iter().map(CommitWord::load).collect(), false)
    }
}

/// Four writers against one revocation; an error says which promise broke. Gives whether it came to a seal.
fn revocation(seed: u64, fault: Fault, bug: Bug) -> Result<bool, String> {
    let simulation = Simulation::new(seed, Limits::default());
    let (libfs, sharedfs) = (simulation.process("libfs"), simulation.process("sharedfs"));
    let session = Arc::new(Session::new());
    let granted = session.lease[0].grant(LeaseState::Write);
    let wrote: Arc<Vec<_>> = Arc::new(PLACES.iter().map(|_| std::sync::atomic::AtomicU64::new(0)).collect());
    let unknown: Arc<Vec<_>> =
        Arc::new(PLACES.iter().map(|_| std::sync::atomic::AtomicU64::new(0)).collect());
    for writer in 0..PLACES.len() {
        let (session, wrote, theirs) = (session.clone(), wrote.clone(), unknown.clone());
        drop(start(&libfs, &format!("writer {writer}"), move || {
            for _ in 0..20 {
                match session.write(writer, granted, bug) {
                    Wrote::Yes => {}
                    Wrote::No => break,
                    // Told when the cut is known.
                    Wrote::Unknown(next) => {
                        theirs[writer].store(next.get(), Ordering::Relaxed);
                        break;
                    }
                }
                wrote[writer].fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    let cuts = Arc::new(std::sync::Mutex::new((Vec::new(), false)));
    let (theirs, found, host) = (session.clone(), cuts.clone(), sharedfs.clone());
    drop(start(&sharedfs, "revoker", move || {
        (0..host.random() % 100).for_each(|_| host.step());
        let outcome = theirs.revoke(host.as_ref(), Duration::from_micros(20), bug);
        *found.lock().unwrap() = outcome;
    }));
    drop(mischief(&sharedfs, &libfs, fault, 100));
    simulation.run().map_err(|stuck| stuck.to_string())?;
    let (cuts, sealed) = std::mem::take(&mut *cuts.lock().unwrap());
    for writer in 0..PLACES.len() {
        let (cut, last) = (cuts[writer].get(), session.commits[writer].load().get());
        let in_doubt = unknown[writer].load(Ordering::Relaxed);
        let told = wrote[writer].load(Ordering::Relaxed) + u64::from(in_doubt != 0 && in_doubt <= cut);
        if session.seals[writer].load() == Seal::Open && last != cut {
            return Err(format!("seed {seed}: log {writer} was cut at {cut} and went on to {last}"));
        }
        // A killed writer may have committed records without a report.
        if told > cut || (told != cut && fault != Fault::Kill) {
            return Err(format!("seed {seed}: {told} writes were told, log {writer} holds {cut}"));
        }
        for record in 1..=cut {
            if session.records[writer * 64 + record as usize].load(Ordering::Relaxed) != record {
                return Err(format!("seed {seed}: record {record} of log {writer} is not there"));
            }
        }
    }
    Ok(sealed)
}

#[test]
fn no_write_is_lost_or_late_whatever_the_schedule() {
    let mut seals = 0;
    for seed in seeds(3000) {
        let fault = [Fault::None, Fault::Kill, Fault::Pause][(seed % 3) as usize];
        seals += u64::from(revocation(seed, fault, Bug::None).unwrap());
    }
    assert!(seals > 100, "both ways to end a revocation are taken: {seals} seals");
    assert!(seals < 2900 * seeds(1).end, "both ways to end a revocation are taken: {seals} seals");
}

#[test]
fn planted_bugs_in_the_revocation_are_found() {
    for bug in [
        Bug::CheckBeforeEntry,
        Bug::NoCheck,
        Bug::NoScan,
        Bug::NoSeal,
        Bug::CutBeforeSeal,
        Bug::SealBeforeCommit,
    ] {
        let found = (0..1000).find(|&seed| revocation(seed, Fault::Pause, bug).is_err());
        assert!(found.is_some(), "{bug:?} was not found by 1,000 seeds");
    }
}
