//! Copies from and to memory that is not mapped return an error, and the append leaves the ring unchanged.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use format::checksum::Salt;
use format::{Envelope, HEADER_BYTES, Sequence};
use pmem::read_mapping::CopyError;
use pmem::ring::{self, AppendError, AppendRing, RingPosition};
use pmem::{Fault, Medium, Sink, Source};
use zerocopy::IntoBytes;

/// The handler that the preloaded library installs: a fault in a copy continues at the landing address, and every other
/// fault ends the process.
extern "C" fn on_fault(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO the context of the interrupted code.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let instruction = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
    match pmem::copy::landing_of(*instruction as usize) {
        Some(landing) => *instruction = landing as i64,
        None => std::process::abort(),
    }
}

fn install() {
    // SAFETY: the handler only changes the context it is given; the structure is plain old data.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut()), 0);
    }
}

const PAGE: usize = 4096;

/// Two pages, of which the second is not accessible.
fn half_mapped() -> *mut u8 {
    // SAFETY: new mappings touch nothing that exists.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let start = libc::mmap(std::ptr::null_mut(), 2 * PAGE, protection, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(start.byte_add(PAGE), PAGE, libc::PROT_NONE), 0);
        start.cast()
    }
}

#[test]
fn copies_that_fault_are_errors() {
    install();
    let folder = tempfile::tempdir().unwrap();
    let region = Medium::memory(folder.path()).unwrap().create("log", 1 << 20).unwrap();
    let memory = half_mapped();
    let mut ring = AppendRing::empty(region.clone(), 0, Salt::NONE, Sequence::new(1));
    let header = |bytes: usize| {
        let mut header = [0; HEADER_BYTES];
        let envelope = Envelope::new(2, 0, bytes as u32);
        header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
        header
    };
    ring.append(header(3), &[Source::from(b"one")]).unwrap();
    let tail = ring.tail();
    // Every path of the copy: each class of lengths, with a fault at the start, in the middle and at the last byte.
    for bytes in [1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 129, 500, 5000, 9000] {
        for mapped in [0, 1, bytes / 2, bytes - 1].map(|mapped| mapped.min(bytes - 1).min(PAGE)) {
            // SAFETY: faults are caught by the handler above.
            let source = unsafe { Source::from_raw(memory.add(PAGE - mapped), bytes) };
            // As the only source, and as one of two, which takes another path.
            for sources in [&[source][..], &[Source::from(b""), source]] {
                let appended = ring.append(header(bytes), sources);
                assert_eq!(appended, Err(AppendError::Fault), "{mapped} of {bytes} bytes are there");
                assert_eq!(ring.tail(), tail);
            }
        }
        // SAFETY: as above, and no reference to the memory exists.
        let mut sink = unsafe { Sink::from_raw(memory.add(PAGE - bytes.min(PAGE) + 1), bytes) };
        assert_eq!(region.read_to(0, &mut sink, bytes), Err(CopyError::Fault(Fault)));
    }
    // SAFETY: the first page is mapped.
    let whole = unsafe { Source::from_raw(memory, PAGE) };
    ring.append(header(PAGE), &[whole]).unwrap();
    let from = RingPosition { position: 0, sequence: Sequence::new(1) };
    assert_eq!(ring::scan(&region, 0, Salt::NONE, from, u64::MAX).count(), 2);
}
