//! M.5: the kernel stored the bytes of a write into its pages, and they were dropped and read again before the WRITE
//! arrived. A mapping may have made such a page dirty, so the bytes are stored into it again, before the answer: after
//! it they would undo the next write.

use super::*;
use crate::abi::{SetattrIn, fattr};
use std::time::Duration;

const PAGE: usize = 4096;

/// A file of three pages whose pages were dropped, and a gateway that repairs.
fn file(around: &Around) -> (u64, u64) {
    around.gateway.start_recalls().unwrap();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    write(around, node, handle, 0, &[1; 3 * PAGE]);
    around.recall(node);
    (node, handle)
}

fn write(around: &Around, node: u64, handle: u64, offset: u64, bytes: &[u8]) {
    let fields = WriteIn { handle, offset, bytes: bytes.len() as u32, ..WriteIn::default() };
    around.ask(opcode::WRITE, node, &[fields.as_bytes(), bytes]);
}

/// The offset and the length of each store since the last call.
fn stores(around: &Around) -> Vec<(u64, usize)> {
    let stores = std::mem::take(&mut *around.kernel.stores.lock().unwrap());
    stores.iter().map(|(offset, bytes)| (*offset, bytes.len())).collect()
}

#[test]
fn pages_that_were_read_before_a_write_that_the_kernel_has_made_get_its_bytes() {
    let around = Around::new();
    let (node, handle) = file(&around);
    write(&around, node, handle, 0, b"text");
    around.read(node, handle, 0);
    write(&around, node, handle, 0, b"text");
    assert_eq!(stores(&around), [], "nothing was dropped, so nothing was read again");
    around.recall(node);
    let dropped = around.kernel.drops();
    around.read(node, handle, 0);
    write(&around, node, handle, 0, b"text");
    assert_eq!(stores(&around), [(0, 4)]);
    write(&around, node, handle, 0, b"text");
    assert_eq!(stores(&around), [], "this write began after the one before it was answered");
    assert_eq!(around.kernel.drops(), dropped);
    around.recall(node);
    [0, 2].iter().for_each(|page| around.read(node, handle, page * PAGE as u64));
    write(&around, node, handle, PAGE as u64, b"text");
    assert_eq!(stores(&around), [], "a page that was not read");
    around.recall(node);
    [0, 1].iter().for_each(|page| around.read(node, handle, page * PAGE as u64));
    let fields = SetattrIn { valid: fattr::SIZE, size: PAGE as u64, ..SetattrIn::default() };
    around.attributes(opcode::SETATTR, node, &[fields.as_bytes()]);
    write(&around, node, handle, PAGE as u64, b"text");
    assert_eq!(stores(&around), [], "the kernel has dropped the page that was cut off");
    around.gateway.end_recalls();
}

/// A read that comes meanwhile may hold the page that is to be repaired.
#[test]
fn a_write_is_answered_when_its_bytes_are_in_the_pages_and_a_read_does_not_wait_for_that() {
    let around = Around::new();
    let (node, handle) = file(&around);
    around.read(node, handle, 0);
    around.kernel.lock_stores_below(u32::MAX);
    let writes = WriteIn { handle, bytes: PAGE as u32, ..WriteIn::default() };
    let writes = Around::message(opcode::WRITE, node, &[writes.as_bytes(), &[2; PAGE]]);
    let reads = ReadIn { handle, bytes: PAGE as u32, ..ReadIn::default() };
    let reads = Around::message(opcode::READ, node, &[reads.as_bytes()]);
    let order = &around.gateway.writes;
    std::thread::scope(|scope| {
        let arrival = order.arrives(&writes);
        let writer = scope.spawn(|| {
            around.gateway.answer(&writes, &mut Reply::new(8192)).unwrap();
            drop(arrival);
        });
        let reader = scope.spawn(|| order.arrives(&reads).wait());
        wait_while(&around.kernel.stores_begun, |begun| begun == 0);
        until(|| reader.is_finished());
        let soon = SystemHost.now().after(Duration::from_millis(20));
        SystemHost.wait(&ipc::Word::new(0), 0, Some(soon));
        assert!(!writer.is_finished(), "the page does not have the bytes yet");
        around.kernel.lock_stores_below(0);
        writer.join().unwrap();
    });
    assert_eq!(stores(&around), [(0, PAGE)]);
    around.gateway.end_recalls();
}

/// The kernel locks the last page until the answer if the write does not fill it, and the page was not complete.
#[test]
fn a_write_whose_last_page_stays_locked_is_answered() {
    let around = Around::new();
    let (node, handle) = file(&around);
    [0, 1].iter().for_each(|page| around.read(node, handle, page * PAGE as u64));
    around.kernel.lock_stores_below(PAGE as u32);
    write(&around, node, handle, 0, &[2; PAGE + 1]);
    assert_eq!(stores(&around), [(0, PAGE)]);
    around.kernel.lock_stores_below(0);
    until(|| around.kernel.stores.lock().unwrap().len() == 1);
    assert_eq!(stores(&around), [(PAGE as u64, 1)]);
    around.gateway.end_recalls();
}
