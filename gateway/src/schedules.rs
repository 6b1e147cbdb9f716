//! Schedules of the kernel's caches with requests and recalls, in orders that a real kernel shows only rarely: the
//! gateway runs between a simulated kernel and leases that the test controls. `docs/mount.md` has their numbers.

mod around;
mod creations;
mod ends;
mod overtaken;

use crate::abi::{
    EntryOut, InHeader, OutHeader, ReadIn, SetattrIn, WRITE_FROM_CACHE, WriteIn, fattr, opcode,
};
use crate::reply::Reply;
use crate::units::VALID_SECONDS;
use around::*;
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, SystemHost};
use std::cell::RefCell;
use std::collections::BTreeSet;
use vfs::LeaseMode;
use zerocopy::{FromBytes, IntoBytes};

/// The kernel does not say that a program has called `sync`.
#[test]
fn a_change_is_persisted_though_no_program_asks_for_it() {
    let around = Around::new();
    around.gateway.start_recalls().unwrap();
    let until = SystemHost.now().after(LONG);
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    around.write(node, handle, 0);
    while around.model.syncs() == 0 && SystemHost.now() < until {
        let _ = SystemHost.wait(&ipc::Word::new(0), 0, Some(SystemHost.now().after(LONG / 6000)));
    }
    assert!(around.model.syncs() > 0);
    around.gateway.end();
}

/// M.3, M.4: a READ has its page locked when the pass reaches it, and fills the page after the pass.
#[test]
fn a_read_is_answered_while_its_page_is_to_be_dropped_and_the_page_is_dropped_once_more() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    around.write(node, handle, 0);
    around.kernel.lock();
    let recall = around.begin_recall(node);
    wait_while(&around.kernel.begun, |begun| begun == 0);
    let mut reply = Reply::new(8192);
    let fields = ReadIn { handle, bytes: 4096, ..ReadIn::default() };
    assert_eq!(around.ask_slowly(opcode::READ, node, &[fields.as_bytes()], &mut reply), b"text");
    around.kernel.unlock();
    // Passes are made, but the answer is not sent.
    wait_while(&around.kernel.begun, |begun| begun < 4);
    assert_eq!(around.given_back(), [0; 0], "a page may come still");
    let before = around.kernel.drops();
    reply.sent();
    recall.join().unwrap();
    assert!(around.kernel.drops() > before, "a pass begins after the answer was sent");
    assert_eq!(around.given_back(), [node]);
}

/// M.4: the first page comes after the recall began, and before its first pass.
#[test]
fn a_page_that_comes_before_the_first_pass_is_dropped() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    let mut reply = Reply::new(8192);
    around.ask_slowly(opcode::GETATTR, node, &[&[0; 16]], &mut reply);
    let recall = around.begin_recall(node);
    let is_recalled = || {
        let table = around.gateway.units.table.lock();
        matches!(table.units[&InodeNumber::new(node)].phase, crate::units::Phase::Recalled(_))
    };
    until(is_recalled);
    around.read(node, handle, 0);
    assert_eq!(around.kernel.drops(), 0, "it waits for an answer that is kept");
    reply.sent();
    recall.join().unwrap();
    assert!(around.kernel.pages.load(Ordering::SeqCst) > 0, "pages are dropped, and not attributes alone");
    assert_eq!(around.given_back(), [node]);
}

/// M.6: the kernel sends an append that crosses the end of a page in two messages.
#[test]
fn nothing_comes_between_the_parts_of_an_append() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    let append = |offset, bytes: &[u8]| {
        let flags = libc::O_APPEND as u32;
        let fields = WriteIn { handle, offset, bytes: bytes.len() as u32, flags, ..WriteIn::default() };
        around.ask(opcode::WRITE, node, &[fields.as_bytes(), bytes]);
    };
    let patience = &around.gateway.units.rest_of_append_ms;
    patience.store(LONG.as_millis() as u32, Ordering::SeqCst);
    append(0, &[1; 4096]);
    let recall = around.begin_recall(node);
    wait_while(&around.kernel.begun, |begun| begun == 0);
    until(|| around.gateway.units.waiting.load(Ordering::SeqCst) > 0);
    assert_eq!(around.given_back(), [0; 0], "the rest may come");
    append(4096, b"rest");
    recall.join().unwrap();
    assert_eq!(around.given_back(), [node]);
    // The wait for a missing second part is short.
    patience.store(1, Ordering::SeqCst);
    append(4100, &[1; 8192 - 4100]);
    around.recall(node);
}

/// M.7: the kernel was told of an inode that it has not created yet.
#[test]
fn an_inode_that_the_kernel_is_about_to_make_is_dropped_when_it_is_there() {
    let around = Around::new();
    let (EntryOut { node, .. }, _) = around.create(b"file");
    around.kernel.absent.store(3, Ordering::SeqCst);
    around.recall(node);
    assert_eq!((around.kernel.drops(), around.given_back()), (4, vec![node]));
    // After the end of the connection no inode is created.
    around.attributes(opcode::GETATTR, node, &[&[0; 16]]);
    around.kernel.absent.store(3, Ordering::SeqCst);
    around.gateway.units.end_connection();
    around.recall(node);
    assert_eq!(around.kernel.drops(), 5);
}

/// M.8: answers that the kernel accepts even if it was told meanwhile to drop the inode.
#[test]
fn answers_that_nothing_overtakes_are_not_kept() {
    let around = Around::new();
    let (new, handle) = around.create(b"file");
    assert_eq!((new.attr_valid, new.entry_valid), (VALID_SECONDS, VALID_SECONDS));
    let (found, again) = around.create(b"file");
    assert_eq!((found.node, found.attr_valid), (new.node, 0));
    let fields = SetattrIn { valid: fattr::MODE, mode: 0o600, ..SetattrIn::default() };
    assert_eq!(around.attributes(opcode::SETATTR, new.node, &[fields.as_bytes()]).valid, 0);
    let linked = around.entry(opcode::LINK, ROOT, &[new.node.as_bytes(), b"other\0"]);
    assert_eq!((linked.node, linked.attr_valid), (new.node, 0));
    let asked = around.attributes(opcode::GETATTR, new.node, &[&[0; 16]]);
    assert_eq!((asked.valid, asked.attr.mode & 0o777, asked.attr.links), (VALID_SECONDS, 0o600, 2));
    [handle, again].iter().for_each(|handle| around.release(new.node, *handle));
}

/// M.29: names and attributes are read when the kernel was already told to drop them.
#[test]
fn what_is_asked_for_during_a_recall_is_not_kept() {
    let around = Around::new();
    let (EntryOut { node, .. }, _) = around.create(b"file");
    for of in [node, ROOT] {
        around.kernel.lock();
        let (before, recall) = (around.kernel.drops(), around.begin_recall(of));
        wait_while(&around.kernel.begun, |begun| begun == before);
        assert_eq!(around.attributes(opcode::GETATTR, of, &[&[0; 16]]).valid, 0);
        let found = around.entry(opcode::LOOKUP, ROOT, &[b"file\0"]);
        let absent = self::absent(&around, b"none\0");
        let valid =
            if of == ROOT { (VALID_SECONDS, 0, None) } else { (0, VALID_SECONDS, Some(VALID_SECONDS)) };
        assert_eq!((found.attr_valid, found.entry_valid, absent), valid);
        around.kernel.unlock();
        recall.join().unwrap();
        assert_eq!(around.leases.mode(of), None);
        assert_eq!(around.attributes(opcode::GETATTR, of, &[&[0; 16]]).valid, VALID_SECONDS);
    }
}

/// How long the kernel may cache that a name does not exist; none if the answer is an error.
fn absent(around: &Around, name: &[u8]) -> Option<u64> {
    let header = InHeader { opcode: opcode::LOOKUP, node: ROOT, unique: 2, ..InHeader::default() };
    let mut reply = Reply::new(8192);
    let answer = around.gateway.answer(&[header.as_bytes(), name].concat(), &mut reply).unwrap().to_vec();
    reply.sent();
    let (header, rest) = OutHeader::read_from_prefix(&answer).unwrap();
    (header.error == 0).then(|| EntryOut::read_from_prefix(rest).unwrap().0.entry_valid)
}

/// M.15, M.28: while a file is open for writing, its unit is held for writing, or not held.
#[test]
fn an_open_file_that_may_be_written_is_held_for_writing() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    around.release(node, handle);
    around.recall(node);
    let reads = around.open(node, libc::O_RDONLY);
    let fields = ReadIn { handle: reads, bytes: 4096, ..ReadIn::default() };
    around.ask(opcode::READ, node, &[fields.as_bytes()]);
    assert_eq!(around.leases.mode(node), Some(LeaseMode::Read));
    let writes = around.open(node, libc::O_WRONLY);
    assert_eq!(around.leases.mode(node), Some(LeaseMode::Write), "before the kernel knows that it is open");
    around.recall(node);
    around.attributes(opcode::GETATTR, node, &[&[0; 16]]);
    assert_eq!(around.leases.mode(node), Some(LeaseMode::Write), "attributes, too, are held by this alone");
    [reads, writes].iter().for_each(|handle| around.release(node, *handle));
    around.recall(node);
    around.attributes(opcode::GETATTR, node, &[&[0; 16]]);
    assert_eq!(around.leases.mode(node), Some(LeaseMode::Read));
}

/// M.28: a file is opened for writing while another thread gets its lease for reading.
#[test]
fn a_file_is_not_open_for_writing_before_a_lease_for_reading_is_raised() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    around.release(node, handle);
    around.recall(node);
    let before = around.leases.waiting.load(Ordering::SeqCst);
    around.leases.withheld.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| around.attributes(opcode::GETATTR, node, &[&[0; 16]]));
        wait_while(&around.leases.waiting, |waiting| waiting == before);
        let opens = scope.spawn(|| {
            around.open(node, libc::O_RDWR);
            around.leases.mode(node)
        });
        let units = &around.gateway.units;
        until(|| units.table.lock().units.get(&InodeNumber::new(node)).is_some_and(|unit| unit.writers > 0));
        around.leases.withheld.store(0, Ordering::SeqCst);
        SystemHost.wake(&around.leases.withheld, ipc::WAKE_ALL);
        assert_eq!(opens.join().unwrap(), Some(LeaseMode::Write));
        asks.join().unwrap();
    });
}

/// The kernel forgets an inode, and looks it up again before the gateway processes that.
#[test]
fn an_inode_that_the_kernel_was_told_of_anew_stays_held() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    around.release(node, handle);
    let (units, nodes, inode) = (&around.gateway.units, &around.gateway.nodes, InodeNumber::new(node));
    assert!(nodes.forget(&*around.gateway.engine, inode, 1));
    around.entry(opcode::LOOKUP, ROOT, &[b"file\0"]);
    units.forget(nodes, inode);
    assert!(around.leases.mode(node).is_some());
    around.recall(node);
    assert_eq!(around.given_back(), [node]);
    assert!(around.kernel.drops() > 0);
}

/// M.14: a page is written back when its lease is gone.
#[test]
fn pages_written_back_without_a_lease_are_counted() {
    let around = Around::new();
    let (EntryOut { node, .. }, handle) = around.create(b"file");
    around.kernel.lock();
    let recall = around.begin_recall(node);
    wait_while(&around.kernel.begun, |begun| begun == 0);
    around.write(node, handle, WRITE_FROM_CACHE);
    around.kernel.unlock();
    recall.join().unwrap();
    assert_eq!(around.gateway.units.strays(), 0);
    around.write(node, handle, WRITE_FROM_CACHE);
    assert_eq!(around.gateway.units.strays(), 1);
}

/// M.11: one epoch serves all directories that are recalled after it, and none is needed if the kernel got no names.
#[test]
fn an_epoch_serves_all_directories() {
    let around = Around::new();
    let fields = crate::abi::MkdirIn { mode: FOLDER, umask: 0 };
    let folder = around.entry(opcode::MKDIR, ROOT, &[fields.as_bytes(), b"folder\0"]).node;
    around.recall(folder);
    assert_eq!(around.kernel.epochs.load(Ordering::SeqCst), 0, "no name of it was told");
    around.attributes(opcode::GETATTR, folder, &[&[0; 16]]);
    let inner = around.entry(opcode::MKDIR, folder, &[fields.as_bytes(), b"inner\0"]);
    assert_eq!(inner.entry_valid, VALID_SECONDS);
    [ROOT, folder].iter().for_each(|node| around.recall(*node));
    assert_eq!(around.kernel.epochs.load(Ordering::SeqCst), 1);
    assert_eq!(around.entry(opcode::LOOKUP, folder, &[b"inner\0"]).entry_valid, VALID_SECONDS);
    around.recall(folder);
    assert_eq!(around.kernel.epochs.load(Ordering::SeqCst), 2);
}

/// The number of inodes that the kernel knows is bounded: it is asked to forget those with the lowest numbers, then the
/// next. It keeps the inodes in use, and is not asked again for each new inode.
#[test]
fn the_kernel_is_asked_to_forget_inodes_when_it_knows_too_many() {
    let around = Around::new();
    let (gateway, engine) = (&around.gateway, &*around.gateway.engine);
    // Creates a file; returns the inodes that the kernel is then asked to forget.
    let make = |number: usize| {
        let (entry, handle) = around.create(format!("file-{number}").as_bytes());
        around.release(entry.node, handle);
        if gateway.nodes.take_crowded() == Some(true) {
            gateway.forget_some();
        }
        (entry.node, std::mem::take(&mut *around.kernel.forgotten.lock().unwrap()))
    };
    let mut files = Vec::new();
    for number in 1..5 * INODES_MAX {
        let (file, forgotten) = make(number);
        files.push(file);
        let wanted = if gateway.nodes.counts().0 > INODES_MAX { INODES_MAX / 8 + 1 } else { 0 };
        assert_eq!(forgotten, files[..wanted], "file {number}");
        for node in files.drain(..wanted) {
            assert!(gateway.nodes.forget(engine, InodeNumber::new(node), 1));
        }
    }
    assert_eq!(gateway.nodes.counts(), (files.len() + 1, INODES_MAX + 1));
    let asked = (0..INODES_MAX).filter(|number| !make(1000 + number).1.is_empty()).count();
    assert!((1..=INODES_MAX / 2).contains(&asked), "{asked} times");
    // No other inodes are left to ask for, so the requests begin again at the lowest number.
    let (all, mut round) = (gateway.nodes.counts().0 - 1, Vec::new());
    while round.len() < all {
        round.extend(gateway.nodes.next_to_forget());
    }
    round.sort_unstable();
    round.dedup();
    assert!(round.len() == all && !round.contains(&InodeNumber::ROOT), "{} of {all}", round.len());
}

/// The kernel is asked to forget an inode that may have no name: it is not open, and no lease is held, or it is known to
/// have no name. It is asked again until it has forgotten the inode, or until the inode has a name under a lease.
#[test]
fn the_kernel_is_asked_to_forget_inodes_that_may_have_no_name_until_it_has() {
    let around = Around::new();
    let gateway = &around.gateway;
    // Collects the inodes of notifications, until there are so many.
    let asked = |count: usize| {
        let all = RefCell::new(BTreeSet::new());
        until(|| {
            gateway.forget_orphans(&gateway.orphans.take_due(SystemHost.now()).0);
            all.borrow_mut().extend(std::mem::take(&mut *around.kernel.forgotten.lock().unwrap()));
            all.borrow().len() >= count
        });
        all.into_inner().into_iter().collect::<Vec<_>>()
    };
    let set_nameless = |nodes: &[u64]| {
        *around.leases.nameless.lock().unwrap() = nodes.iter().map(|node| InodeNumber::new(*node)).collect();
    };
    let names = ["named", "recalled", "removed", "open", "later"].map(str::as_bytes);
    let files = names.map(|name| around.create(name));
    let [named, recalled, removed, open, later] = files.map(|(entry, _)| entry.node);
    set_nameless(&[removed, open]);
    for (entry, handle) in &files[..3] {
        around.release(entry.node, *handle);
    }
    let second = around.open(open, libc::O_RDONLY);
    around.release(open, files[3].1);
    [recalled, later].iter().for_each(|node| around.recall(*node));
    assert_eq!(asked(2), [recalled, removed], "not {named}, {open}, {later}");
    assert!(gateway.nodes.forget(&*gateway.engine, InodeNumber::new(recalled), 1));
    assert_eq!(asked(1), [removed], "it was not forgotten");
    set_nameless(&[open]);
    around.release(open, second);
    around.release(later, files[4].1);
    assert_eq!(asked(2), [open, later], "{removed} has a name again");
}

/// When too many leases are held, several are given back together. But closed units are given back before a thread
/// waits for requests on another unit, because these need threads that may wait for the closed ones.
#[test]
fn room_is_made_by_few_calls_and_no_closed_unit_waits_for_the_requests_of_another() {
    let around = Around::new();
    let mut files = Vec::new();
    for number in 0..=HELD_MAX {
        let (entry, handle) = around.create(format!("file-{number}").as_bytes());
        if number == 9 {
            around.write(entry.node, handle, 0);
        }
        around.release(entry.node, handle);
        files.push(entry.node);
    }
    around.kernel.page_locked.store(1, Ordering::SeqCst);
    let gateway = around.gateway.clone();
    let evict = move || drop(gateway.units.evict(&gateway.nodes, &gateway.notices));
    let evict = SystemHost.spawn("evicts", Box::new(evict)).unwrap();
    until(|| around.kernel.pages.load(Ordering::SeqCst) == 1);
    assert_eq!(around.given_back(), files[..9]);
    around.kernel.page_locked.store(0, Ordering::SeqCst);
    SystemHost.wake(&around.kernel.page_locked, ipc::WAKE_ALL);
    evict.join().unwrap();
    let given_back = around.given_back();
    assert!(given_back.len() >= HELD_MAX / 8 && given_back[..] == files[..given_back.len()]);
    assert_eq!(around.leases.calls.load(Ordering::SeqCst), 2, "{} leases", given_back.len());
}

/// Leases that another session needs at once are given back by few calls, under the same rule.
#[test]
fn inodes_that_are_recalled_together_are_given_back_together() {
    let around = Around::new();
    let files: Vec<u64> = (0..8)
        .map(|number| {
            let (entry, handle) = around.create(format!("file-{number}").as_bytes());
            if number == 5 {
                around.write(entry.node, handle, 0);
            }
            around.release(entry.node, handle);
            entry.node
        })
        .collect();
    around.kernel.page_locked.store(1, Ordering::SeqCst);
    let (gateway, recalled) =
        (around.gateway.clone(), files.iter().map(|node| InodeNumber::new(*node)).collect::<Vec<_>>());
    let recall = SystemHost.spawn("recalls", Box::new(move || gateway.recall(&recalled))).unwrap();
    until(|| around.kernel.pages.load(Ordering::SeqCst) == 1);
    assert_eq!(around.given_back(), files[..5]);
    around.kernel.page_locked.store(0, Ordering::SeqCst);
    SystemHost.wake(&around.kernel.page_locked, ipc::WAKE_ALL);
    recall.join().unwrap();
    assert_eq!(around.given_back(), files);
    assert_eq!(around.leases.calls.load(Ordering::SeqCst), 2);
    // A lease that is not held any more is given back all the same: the engine may hold it.
    around.recall(files[0]);
    assert_eq!(around.given_back().last(), Some(&files[0]));
}
