//! CREATE of a file that exists, while others change its size.

use super::*;
use crate::abi::{FallocateIn, MkdirIn};
use ipc::{Join, Word};
use std::sync::Arc;

/// A thread creates in a directory from here on, or in none.
fn creating(around: &Around, directory: Option<u64>) {
    around.kernel.creating.store(directory.unwrap_or(0) as u32, Ordering::SeqCst);
    SystemHost.wake(&around.kernel.creating, ipc::WAKE_ALL);
}

/// Sends a request from another thread; `answered` grows when the answer was sent.
fn ask_elsewhere(
    around: &Arc<Around>,
    (opcode, node): (u32, u64),
    body: Vec<u8>,
) -> (Arc<Word>, Box<dyn Join>) {
    let answered = Arc::new(Word::new(0));
    let (theirs, tells) = (around.clone(), answered.clone());
    let ask = move || {
        theirs.ask(opcode, node, &[&body]);
        tells.fetch_add(1, Ordering::SeqCst);
    };
    (answered, SystemHost.spawn("asks", Box::new(ask)).unwrap())
}

/// The kernel accepts the size in an answer to CREATE whatever happened meanwhile, and drops the pages behind it.
#[test]
fn a_change_of_the_size_is_answered_when_the_answer_to_an_older_create_was_taken_over() {
    let around = Arc::new(Around::new());
    around.gateway.start_recalls().unwrap();
    around.gateway.size_holds.patience_ms.store(LONG.as_millis() as u32, Ordering::SeqCst);
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    assert_eq!(around.kernel.names.load(Ordering::SeqCst), 0, "a new file has no older size");
    let write = WriteIn { handle, offset: 4096, bytes: 4, ..WriteIn::default() };
    let size = SetattrIn { valid: fattr::SIZE, size: 9000, ..SetattrIn::default() };
    let allocate = FallocateIn { handle, offset: 0, bytes: 10000, ..FallocateIn::default() };
    let requests = [
        (opcode::WRITE, [write.as_bytes(), b"text"].concat(), 4100),
        (opcode::SETATTR, size.as_bytes().to_vec(), 9000),
        (opcode::FALLOCATE, allocate.as_bytes().to_vec(), 10000),
    ];
    for (round, (opcode, body, size)) in requests.into_iter().enumerate() {
        creating(&around, Some(ROOT));
        let before = around.attributes(opcode::GETATTR, node, &[&[0; 16]]).attr.size;
        let (found, again) = around.create(b"file");
        assert_eq!((found.node, found.attr.size), (node, before));
        wait_while(&around.kernel.names, |names| names <= round as u32);
        let (answered, asks) = ask_elsewhere(&around, (opcode, node), body);
        until(|| around.attributes(opcode::GETATTR, node, &[&[0; 16]]).attr.size == size);
        // Another file's requests are answered.
        let (other, theirs) = around.create(format!("other-{round}").as_bytes());
        around.write(other.node, theirs, 0);
        assert_eq!(
            answered.load(Ordering::SeqCst),
            0,
            "opcode {opcode}: the kernel has the older size still"
        );
        creating(&around, None);
        asks.join().unwrap();
        around.release(node, again);
    }
    around.gateway.end_recalls();
}

/// The kernel may hold a page for the request that the thread that sent CREATE waits for.
#[test]
fn an_answer_does_not_wait_for_ever() {
    let around = Arc::new(Around::new());
    around.gateway.start_recalls().unwrap();
    around.gateway.size_holds.patience_ms.store(1, Ordering::SeqCst);
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    creating(&around, Some(ROOT));
    let _ = around.create(b"file");
    assert_eq!(around.gateway.size_holds.overdue(), 0);
    around.write(node, handle, 0);
    assert_eq!(around.gateway.size_holds.overdue(), 1);
    creating(&around, None);
    around.gateway.end_recalls();
}

/// Threads that create in one directory for long hold up no answer about a file of another one, and one notification serves
/// all of a directory that came before it.
#[test]
fn a_directory_in_which_others_create_holds_up_no_other() {
    let around = Arc::new(Around::new());
    around.gateway.start_recalls().unwrap();
    around.gateway.size_holds.patience_ms.store(5000, Ordering::SeqCst);
    let directory = MkdirIn { mode: 0o755, ..MkdirIn::default() };
    let EntryOut { node: elsewhere, .. } =
        around.entry(opcode::MKDIR, ROOT, &[directory.as_bytes(), b"directory\0"]);
    let (busy, handle) = around.create(b"busy");
    let (free, other) = around.create_in(elsewhere, b"free", libc::O_RDWR);
    creating(&around, Some(ROOT));
    for _ in 0..5 {
        let (_, again) = around.create(b"busy");
        around.release(busy.node, again);
    }
    let write = WriteIn { handle, offset: 0, bytes: 4, ..WriteIn::default() };
    let (answered, asks) =
        ask_elsewhere(&around, (opcode::WRITE, busy.node), [write.as_bytes(), b"text"].concat());
    for _ in 0..5 {
        let _ = around.create_in(elsewhere, b"free", libc::O_RDWR);
        around.write(free.node, other, 0);
    }
    assert_eq!(answered.load(Ordering::SeqCst), 0, "the kernel has the older size still");
    creating(&around, None);
    asks.join().unwrap();
    // One that began at once, one for the four behind it, and five of the other directory.
    assert_eq!(around.kernel.names.load(Ordering::SeqCst), 7);
    assert_eq!(around.gateway.size_holds.overdue(), 0);
    around.gateway.end_recalls();
}
