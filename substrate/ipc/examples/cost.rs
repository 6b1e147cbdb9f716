//! Cost of the shared words and of the ring on this machine, beside the cost of the instructions that they consist of.
//!
//! `cargo run --release -p ipc --example cost`. Nanoseconds; best of 20 rounds, as the machine may be busy.

use format::Sequence;
use ipc::shared::create;
use ipc::words::{CommitWord, FenceBy, Inside, LeaseState, LeaseWord, Overflow, Slot};
use ipc::{
    Access, Call, Error, Host, Link, LongWord, Mapping, RingClient, RingLimits, RingServer, SystemHost,
};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Up;

impl Link for Up {
    fn is_up(&self) -> bool {
        true
    }
}

fn best(name: &str, turns: u64, mut body: impl FnMut(u64)) {
    let round = |first: u64, body: &mut dyn FnMut(u64)| {
        let start = SystemHost.now();
        (first..first + turns).for_each(body);
        SystemHost.now().since(start).as_nanos() as f64 / turns as f64
    };
    let times = (0..20).map(|index| round(index * turns, &mut body));
    println!("{name:60} {:8.2}", times.fold(f64::INFINITY, f64::min));
}

fn main() -> Result<(), Error> {
    let plain = AtomicU64::new(0);
    let word = LongWord::new(0);
    best("load, std", 1_000_000, |_| {
        black_box(black_box(&plain).load(Ordering::Acquire));
    });
    best("load, shared word", 1_000_000, |_| {
        black_box(black_box(&word).load(Ordering::Acquire));
    });
    best("locked exchange, std", 1_000_000, |turn| {
        black_box(plain.swap(turn, Ordering::SeqCst));
    });
    best("locked exchange, shared word", 1_000_000, |turn| {
        black_box(word.exchange_full(turn));
    });

    let slots = [Slot::new()];
    let overflow = Overflow::new();
    let inside = Inside { slots: &slots, overflow: &overflow };
    let lease = LeaseWord::new();
    let granted = lease.grant(LeaseState::Write);
    let commit = CommitWord::new(Sequence::new(0));
    for (name, fence) in [("own fences", FenceBy::Operation), ("the revoker's", FenceBy::Revoker)] {
        best(&format!("enter, lease, commit, leave, {name}"), 1_000_000, |turn| {
            let entered = inside.enter(Some(0), fence);
            assert!(lease.load() == granted);
            commit.commit(Sequence::new(turn + 1), fence);
            inside.leave(entered);
        });
    }
    best("fence in the threads of others", 10_000, |_| assert!(SystemHost.fence_others()));

    let limits = RingLimits::DEFAULT;
    let memory = create(c"ring", limits.bytes()?)?;
    let map = || Mapping::new(&memory, limits.bytes()?, Access::Write);
    let host = Arc::new(SystemHost);
    let server = Arc::new(RingServer::new(host.clone(), map()?, limits, 20_000)?);
    let client = RingClient::new(host.clone(), Box::new(Up), map()?, limits, 20_000)?;
    let theirs = server.clone();
    let serve = move || {
        while let Ok(taken) = theirs.next(None) {
            // The client is told if its answer does not fit.
            let _ = theirs.respond(taken, 0, &[0; 64]);
        }
    };
    let thread = host.spawn("server", Box::new(serve))?;
    best("ring round trip, 64 B each way", 20_000, |id| {
        let call = Call { id, kind: 1, body: &[0; 64], response_bytes_max: 64 };
        assert!(client.call(&call, None).is_ok());
    });
    server.close();
    thread.join()
}
