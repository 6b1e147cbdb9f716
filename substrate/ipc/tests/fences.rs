//! Two real processes on two processors race for a lease and for the cut of a log, and the working process leaves
//! its fences to the revoking one. Loom cannot test this, since it has no fence in the threads of other processes.
//! Without the kernel's fence hundreds of the rounds fail.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

use format::Sequence;
use ipc::shared::create;
use ipc::sync::{LongWord, Ordering};
use ipc::words::{CommitWord, FenceBy, Inside, LeaseState, LeaseWord, Overflow, Seal, SealWord, Slot};
use ipc::{Access, Descriptor, Host, Mapping, SystemHost, Word, Words};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

const ROUNDS: u64 = 20_000;
const BYTES: usize = 4096;
/// The whole test takes a second; only a failure takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Outcomes of a round, as the other process reports them.
const COUNTS: u64 = 1;
const DOES_NOT: u64 = 2;

/// The words of one session, and the gates that make both processes begin a round together.
struct Session {
    commit: Words<CommitWord>,
    overflow: Words<Overflow>,
    slots: Words<Slot>,
    lease: Words<LeaseWord>,
    seal: Words<SealWord>,
    /// The seal word as a raw value: it is reset for each round.
    seal_raw: Words<LongWord>,
    /// Gates: the round that may begin, the round that the other process is ready for, the round that it has
    /// finished, and the outcome.
    gates: Words<LongWord>,
}

impl Session {
    fn new(memory: &Descriptor) -> Self {
        let mapping = Mapping::new(memory, BYTES, Access::Write).unwrap();
        Self {
            commit: mapping.words(0, 1).unwrap(),
            overflow: mapping.words(64, 1).unwrap(),
            slots: mapping.words(256, 1).unwrap(),
            lease: mapping.words(512, 1).unwrap(),
            seal: mapping.words(576, 1).unwrap(),
            seal_raw: mapping.words(576, 1).unwrap(),
            gates: mapping.words(640, 32).unwrap(),
        }
    }

    fn gate(&self, index: usize) -> &LongWord {
        &self.gates[index * 8]
    }

    fn wait_for(&self, gate: usize, round: u64) {
        let until = SystemHost.now().after(PATIENCE);
        let mut looks = 0u32;
        while self.gate(gate).load(Ordering::Acquire) < round {
            looks = looks.wrapping_add(1);
            assert!(!looks.is_multiple_of(1 << 16) || SystemHost.now() < until, "the other process is gone");
            if looks.is_multiple_of(1 << 12) {
                // On a machine of one processor the other one runs meanwhile.
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_micros(1))));
            }
            std::hint::spin_loop();
        }
    }

    fn inside(&self) -> Inside<'_> {
        Inside { slots: &self.slots, overflow: &self.overflow[0] }
    }

    /// One write of the other process; returns true if the record is valid.
    fn write(&self, round: u64) -> bool {
        let next = Sequence::new(round);
        self.gate(1).store(round, Ordering::SeqCst);
        self.wait_for(0, round);
        let granted = self.lease[0].load();
        (0..round % 64).for_each(|_| std::hint::spin_loop());
        let inside = self.inside();
        let entered = inside.enter(Some(0), FenceBy::Revoker);
        let mut seal = None;
        if granted.state == LeaseState::Write && self.lease[0].load() == granted {
            store_frame(round);
            self.commit[0].commit(next, FenceBy::Revoker);
            seal = Some(self.seal[0].load());
        }
        inside.leave(entered);
        loop {
            match seal {
                None => return false,
                Some(Seal::Open) => return true,
                Some(Seal::Sealed(cut)) => return next <= cut,
                Some(Seal::Sealing) => seal = Some(self.seal[0].load()),
            }
        }
    }

    /// Revokes the lease, in every other round by a seal. Returns the cut.
    fn revoke(&self, round: u64) -> Sequence {
        (0..round / 64 % 64).for_each(|_| std::hint::spin_loop());
        self.lease[0].revoke();
        if round.is_multiple_of(2) {
            return self.seal[0].seal(&self.commit[0], || assert!(SystemHost.fence_others()));
        }
        assert!(SystemHost.fence_others());
        let inside = self.inside();
        let mut scan = inside.scan();
        while !scan.done(&inside) {
            std::hint::spin_loop();
        }
        self.commit[0].load()
    }
}

/// Does what an append does before its commit: stores past the caches and a fence for stores, for which the
/// commit's store waits.
#[cfg(target_arch = "x86_64")]
fn store_frame(round: u64) {
    use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
    #[repr(align(64))]
    struct Frame(std::cell::UnsafeCell<[i64; 512]>);
    thread_local! {
        static FRAME: Frame = const { Frame(std::cell::UnsafeCell::new([0; 512])) };
    }
    // SAFETY: the stores stay within the frame, which only this function of this thread uses.
    FRAME.with(|frame| unsafe {
        (0..512)
            .for_each(|index| _mm_stream_si64(frame.0.get().cast::<i64>().add(index), round.cast_signed()));
        _mm_sfence();
    });
}

#[cfg(not(target_arch = "x86_64"))]
fn store_frame(_round: u64) {}

fn works(memory: &str) {
    assert!(SystemHost.accept_fences(), "a process with one thread accepts fences");
    assert!(SystemHost.accept_fences(), "and still does");
    let file = File::options().read(true).write(true).open(memory).unwrap();
    let session = Session::new(&Descriptor::from(OwnedFd::from(file)));
    pin(1);
    for round in 1..=ROUNDS {
        let outcome = if session.write(round) { COUNTS } else { DOES_NOT };
        session.gate(3).store(outcome, Ordering::SeqCst);
        session.gate(2).store(round, Ordering::SeqCst);
    }
}

/// Binds this thread to a processor of its own, if the machine has two: two processes that share a processor take
/// turns and do not race.
fn pin(wanted: usize) {
    // SAFETY: a set of bits; all of them zero is a value.
    let (mut set, mut one): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a local value, and its length is right.
    assert!(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } == 0);
    // SAFETY: the numbers are below the set's length.
    let mine = (0..libc::CPU_SETSIZE as usize).filter(|at| unsafe { libc::CPU_ISSET(*at, &set) });
    let Some(at) = mine.take(2).nth(wanted) else { return };
    // SAFETY: as above.
    unsafe { libc::CPU_SET(at, &mut one) };
    // SAFETY: the set is read only.
    assert!(unsafe { libc::sched_setaffinity(0, size_of_val(&one), &raw const one) } == 0);
}

/// Another process, killed when this is dropped.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_record_counts_if_and_only_if_it_does_not_lie_behind_the_cut() {
    let memory = create(c"fences", BYTES).unwrap();
    let session = Session::new(&memory);
    session.lease[0].grant(LeaseState::Write);
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.raw());
    let mut command = Command::new(std::env::current_exe().unwrap());
    let mut other = Other(command.arg("--other").arg(path).spawn().unwrap());
    // Read before this thread is bound to one of them.
    let processors = std::thread::available_parallelism().unwrap().get();
    pin(0);
    let (mut counted, mut wrong) = (0, Vec::new());
    for round in 1..=ROUNDS {
        session.wait_for(1, round);
        session.gate(0).store(round, Ordering::SeqCst);
        let cut = session.revoke(round);
        session.wait_for(2, round);
        let counts = session.gate(3).load(Ordering::SeqCst) == COUNTS;
        if counts != (cut == Sequence::new(round)) {
            wrong.push(round);
        }
        counted += u64::from(counts);
        session.commit[0].begin(Sequence::new(round));
        session.seal_raw[0].store(0, Ordering::SeqCst);
        session.lease[0].grant(LeaseState::Write);
    }
    assert!(other.0.wait().unwrap().success());
    println!("{counted} of {ROUNDS} records counted");
    assert!(wrong.is_empty(), "{} rounds went wrong, the first is {}", wrong.len(), wrong[0]);
    let both = counted > ROUNDS / 100 && counted < ROUNDS - ROUNDS / 100;
    assert!(both || processors == 1, "both come first now and then");
}

/// The registration for fences needs a process with one thread, so the standard test harness is not used.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|argument| argument == "--other") {
        works(&arguments[2]);
        return ExitCode::SUCCESS;
    }
    let outcome = std::panic::catch_unwind(a_record_counts_if_and_only_if_it_does_not_lie_behind_the_cut);
    let (passed, failed) = if outcome.is_ok() { (1, 0) } else { (0, 1) };
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
