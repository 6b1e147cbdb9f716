//! The cost of an append: counts bytes, stores and fences, and shows that it allocates nothing and makes no system call.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use format::checksum::Salt;
use format::{Envelope, HEADER_BYTES, Sequence};
use pmem::ring::AppendRing;
use pmem::{Medium, Region, Source};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use zerocopy::IntoBytes;

struct Counting;

std::thread_local! {
    /// Allocations of this thread; the test runner has other threads that allocate.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: it does what the system's allocator does, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The form of a payload: a long payload is stored in a different way if it comes in two pieces.
#[derive(Clone, Copy, Debug)]
enum PayloadForm {
    Whole,
    InTwo,
}

/// True if the processor can compute the checksum of a payload while it copies it.
fn folds() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("vpclmulqdq") && std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn append(ring: &mut AppendRing, payload: &[u8], given: PayloadForm) -> bool {
    let mut header = [0; HEADER_BYTES];
    let envelope = Envelope::new(2, 0, payload.len() as u32);
    header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    let (first, second) = payload.split_at(payload.len() / 128 * 64);
    match given {
        PayloadForm::Whole => ring.append(header, &[Source::from(payload)]).is_ok(),
        PayloadForm::InTwo => ring.append(header, &[Source::from(first), Source::from(second)]).is_ok(),
    }
}

fn ring(region: &Region) -> AppendRing {
    AppendRing::empty(region.clone(), 0, Salt::NONE, Sequence::new(1))
}

#[test]
fn an_append_costs_its_bytes_and_one_fence() {
    let folder = tempfile::tempdir().unwrap();
    let region = Medium::memory(folder.path()).unwrap().create("log", 1 << 20).unwrap();
    let mut ring = ring(&region);
    let payload = vec![7; 100_000];
    // The first calls select the variants for this processor.
    assert!(append(&mut ring, &payload[..10_000], PayloadForm::Whole));
    assert!(append(&mut ring, &payload[..10_000], PayloadForm::InTwo));
    let allocations = ALLOCATIONS.get();
    for (payload_bytes, bytes, folded, by_pieces) in [
        (128, 192, 1, 1),
        (0, 64, 1, 1),
        (1, 128, 1, 1),
        (256, 320, 1, 1),
        (257, 384, 3, 3),
        (4096, 4160, 2, 2),
        (10_000, 10_112, 3, 5),
        (100_000, 100_096, 3, 27),
    ] {
        for given in [PayloadForm::Whole, PayloadForm::InTwo] {
            let before = region.counters();
            assert!(append(&mut ring, &payload[..payload_bytes], given));
            let cost = region.counters().since(&before);
            // A second source begins a write of its own.
            let writes = match given {
                PayloadForm::Whole if folds() => folded,
                PayloadForm::Whole => by_pieces,
                PayloadForm::InTwo => by_pieces + u64::from(payload_bytes > 256),
            };
            assert_eq!((cost.bytes, cost.writes), (bytes, writes), "{payload_bytes} bytes, {given:?}");
            assert_eq!((cost.fences, cost.persists, cost.syncs), (1, 0, 0));
        }
    }
    assert_eq!(ALLOCATIONS.get(), allocations, "an append allocates");
    makes_no_system_call(&mut ring, &payload[..5_000]);
}

/// Appends in a child process that the kernel kills at its first system call but `exit`.
fn makes_no_system_call(ring: &mut AppendRing, payload: &[u8]) {
    // SAFETY: the child calls only what needs no lock and no allocator, and ends without running destructors.
    let status = unsafe {
        let child = libc::fork();
        assert!(child >= 0, "fork works");
        if child == 0 {
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT);
            let done = append(ring, payload, PayloadForm::Whole)
                && append(ring, payload, PayloadForm::InTwo)
                && append(ring, &payload[..128], PayloadForm::Whole);
            libc::syscall(libc::SYS_exit, if done { 0 } else { 1 });
        }
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        status
    };
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with {status:#x}");
}
