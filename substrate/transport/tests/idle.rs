//! Idle objects use no processor time: an idle connection, its progress threads, a listener with a waiting thread,
//! and clients of the listener that send nothing.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use ipc::{Host, SystemHost};
use std::net::TcpStream;
use std::time::Duration;
use support::{Bed, in_ms, join};
use transport::Error;

/// Processor time that this process has used.
fn used() -> Duration {
    // SAFETY: all of it zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

#[test]
fn who_does_nothing_costs_nothing() {
    let bed = Bed::Tcp;
    let settings = support::patient();
    let (one, two) = (bed.endpoint(1, &settings), bed.endpoint(2, &settings));
    let (here, there) = join(&bed, &one, &two);
    let listener = two.listen("").unwrap();
    let strangers: Vec<_> = (0..10).map(|_| TcpStream::connect(listener.address()).unwrap()).collect();
    let (start, before) = (SystemHost.now(), used());
    assert!(matches!(listener.accept(Some(in_ms(1500))), Err(Error::TimedOut)));
    let (span, used) = (SystemHost.now().since(start), used() - before);
    println!("{} us of processor time in {} ms", used.as_micros(), span.as_millis());
    // A single thread that never sleeps would use all of it.
    assert!(used < span / 10, "{used:?} in {span:?}");
    assert_eq!((here.ended(), there.ended()), (None, None));
    drop(strangers);
}
