//! A read of the kernel asks for the size of a file that programs elsewhere have extended.

use super::*;
use crate::abi::{GETATTR_HANDLE, GetattrIn, SetattrIn, fattr};
use std::io::IoSlice;
use vfs::Caller;
use vfs::engine::{At, Handle};

/// The request of a read beyond the end that the kernel knows; returns the size in the answer.
fn ask_size(around: &Around, node: u64, handle: u64) -> u64 {
    let fields = GetattrIn { flags: GETATTR_HANDLE, handle, ..GetattrIn::default() };
    around.attributes(opcode::GETATTR, node, &[fields.as_bytes()]).attr.size
}

/// The stores into the kernel's pages since the last call.
fn stored(around: &Around) -> Vec<(u64, Vec<u8>)> {
    std::mem::take(&mut around.kernel.stores.lock().unwrap())
}

/// A program elsewhere writes.
fn write_elsewhere(around: &Around, handle: u64, offset: u64, bytes: &[u8]) {
    around.recall(around.gateway.files.get(handle).unwrap().inode.get());
    let written = around.gateway.engine.write(
        &Caller::ROOT,
        Handle::new(handle),
        At::Offset(offset),
        &[IoSlice::new(bytes)],
    );
    assert_eq!(written.unwrap().bytes, bytes.len());
}

/// The kernel may ignore the size in an answer (`ends.rs` says when), so it gets the last byte before.
#[test]
fn the_kernel_has_the_last_byte_of_a_file_before_it_is_told_the_size() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    assert_eq!(ask_size(&around, node, handle), 0);
    write_elsewhere(&around, handle, 0, b"longer");
    assert_eq!(ask_size(&around, node, handle), 6);
    assert_eq!(stored(&around), [(5, b"r".to_vec())]);
    assert_eq!(ask_size(&around, node, handle), 6);
    assert_eq!(around.attributes(opcode::GETATTR, node, &[&[0; 16]]).attr.size, 6);
    assert_eq!(stored(&around), [], "the kernel has it");
    write_elsewhere(&around, handle, 6, b" still");
    assert_eq!(ask_size(&around, node, handle), 12);
    assert_eq!(stored(&around), [(11, b"l".to_vec())]);
    around.gateway.end_recalls();
}

/// `fstat` asks without the open file, and the program may map as much as it is told.
#[test]
fn the_kernel_has_the_last_page_of_an_open_file_before_a_program_is_told_its_size() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    let size = || around.attributes(opcode::GETATTR, node, &[&[0; 16]]).attr.size;
    assert_eq!(size(), 0);
    write_elsewhere(&around, handle, 0, &[b'x'; 5000]);
    assert_eq!(size(), 5000);
    assert_eq!(stored(&around), [(4999, b"x".to_vec())]);
    write_elsewhere(&around, handle, 5000, &[b'x'; 3192]);
    assert_eq!(size(), 8192);
    assert_eq!(stored(&around), [(8191, b"x".to_vec())]);
    write_elsewhere(&around, handle, 8192, b"x");
    assert_eq!(size(), 8193);
    assert_eq!(stored(&around), [(8192, b"x".to_vec())]);
    let (EntryOut { node: closed, .. }, other) = around.create(b"other");
    around.release(node, handle);
    write_elsewhere(&around, other, 0, &[b'x'; 5000]);
    around.release(closed, other);
    assert_eq!(around.attributes(opcode::GETATTR, closed, &[&[0; 16]]).attr.size, 5000);
    assert_eq!(stored(&around), [], "no program has it open");
    around.gateway.end_recalls();
}

/// The kernel would clear its page behind the larger size, perhaps after bytes were read into it that came later.
#[test]
fn the_kernel_takes_no_larger_size_of_an_open_file_from_the_answer_for_a_name() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    let dropped = || {
        let before = around.kernel.drops();
        let size = around.entry(opcode::LOOKUP, ROOT, &[b"file\0"]).attr.size;
        (size, around.kernel.drops() - before)
    };
    assert_eq!(dropped(), (0, 0));
    write_elsewhere(&around, handle, 0, b"longer");
    assert_eq!(dropped(), (6, 1));
    assert_eq!(ask_size(&around, node, handle), 6);
    assert_eq!(dropped(), (6, 0), "the kernel has it");
    write_elsewhere(&around, handle, 6, b" still");
    assert_eq!(dropped(), (12, 1));
    around.release(node, handle);
    assert_eq!(dropped(), (12, 0), "no program has it open");
    around.gateway.end_recalls();
}

/// `lseek(SEEK_END)` asks in the same way. A notification alone would let the kernel ignore the size in the answer.
#[test]
fn the_kernel_has_the_last_byte_of_a_file_that_is_open_for_writing_only() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, writer) = around.create(b"file");
    let only = around.open(node, libc::O_WRONLY);
    write_elsewhere(&around, writer, 0, b"longer");
    assert_eq!(ask_size(&around, node, only), 6);
    assert_eq!(stored(&around), [(5, b"r".to_vec())]);
    for handle in [writer, only] {
        around.release(node, handle);
    }
    around.gateway.end_recalls();
}

/// A mapping behind the end that the kernel knows would be a SIGBUS: it gets the last byte before an open is answered, also
/// if no program of the mount has the file open.
#[test]
fn the_kernel_has_the_last_byte_of_a_file_that_grew_elsewhere_when_it_is_opened() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, first) = around.create(b"file");
    around.release(node, first);
    let access = vfs::engine::Access { read: true, write: true };
    let (elsewhere, _) =
        around.gateway.engine.open(&Caller::ROOT, InodeNumber::new(node), access, false).unwrap();
    let append = |bytes: &[u8]| {
        around.recall(node);
        let written = around.gateway.engine.write(&Caller::ROOT, elsewhere, At::End, &[IoSlice::new(bytes)]);
        assert_eq!(written.unwrap().bytes, bytes.len());
    };
    append(b"longer");
    let reader = around.open(node, libc::O_RDONLY);
    assert_eq!(stored(&around), [(5, b"r".to_vec())]);
    let again = around.open(node, libc::O_RDWR);
    assert_eq!(stored(&around), [], "the kernel has it");
    append(&[b'x'; 5000]);
    // Another program has created the file since the kernel looked its name up.
    let created = around.create_with(b"file", libc::O_RDWR).1;
    assert_eq!(stored(&around), [(5005, b"x".to_vec())]);
    for handle in [reader, again, created] {
        around.release(node, handle);
    }
    around.gateway.engine.close(elsewhere);
    around.gateway.end_recalls();
}

/// All ways in which the kernel learns that the file is shorter.
#[test]
fn a_file_that_was_cut_and_grows_again_has_its_last_byte_stored_again() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    let cut = |size| {
        let fields = SetattrIn { valid: fattr::SIZE, size, ..SetattrIn::default() };
        around.attributes(opcode::SETATTR, node, &[fields.as_bytes()]);
    };
    let cuts: [&dyn Fn(); 3] = [
        &|| cut(3),
        // Another process has created the file since the kernel looked it up.
        &|| around.release(node, around.create_with(b"file", libc::O_RDWR | libc::O_TRUNC).1),
        // Truncated elsewhere, which a read finds.
        &|| {
            let changes = vfs::engine::Changes { size: Some(1), ..Default::default() };
            let target = vfs::engine::Target::Open(Handle::new(handle));
            around.recall(node);
            around.gateway.engine.setattr(&Caller::ROOT, target, &changes).unwrap();
            around.read(node, handle, 0);
        },
    ];
    for (round, cut) in cuts.iter().enumerate() {
        write_elsewhere(&around, handle, 0, b"text");
        assert_eq!(ask_size(&around, node, handle), 4);
        assert_eq!(stored(&around), [(3, b"t".to_vec())], "round {round}");
        cut();
    }
    around.gateway.end_recalls();
}

/// The kernel truncates no file that it considers new, so its pages are dropped.
#[test]
fn a_file_that_another_process_has_just_created_is_truncated_by_create_with_its_pages() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    write_elsewhere(&around, handle, 0, b"text");
    around.read(node, handle, 0);
    let pages = || around.kernel.pages.load(ipc::sync::Ordering::SeqCst);
    let dropped = pages();
    let (entry, again) = around.create_with(b"file", libc::O_RDWR | libc::O_TRUNC);
    assert_eq!((entry.node, entry.attr.size), (node, 0));
    assert_eq!(pages(), dropped + 1);
    let (_, new) = around.create_with(b"new", libc::O_RDWR | libc::O_TRUNC);
    assert_eq!(pages(), dropped + 1, "a new file has no pages");
    for (node, handle) in [(node, again), (node, handle), (node, new)] {
        around.release(node, handle);
    }
    around.gateway.end_recalls();
}
