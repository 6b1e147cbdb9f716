//! The notes of daemons on a full tree: after many lives of daemons, and many sessions of processes with many groups, they take no more
//! nodes than after a few.

use crate::client::{Client, FILE, ROOT, user};
use crate::reservation::{Bench, SIZES, Size, create, settings};
use format::call::{LEASE_READ, LEASE_WRITE, Status};
use pmem::Recorder;
use sharedfs::Daemon;
use std::sync::Arc;
use vfs::Caller;

/// Lives of daemons over one pool.
const LIVES: u32 = 400;
/// After so many the nodes in use are counted for the first time: no list of lives or of logs grows any more.
const FIRST: u32 = 40;

/// A pool of which all nodes that programs may take are in use, and the names of files of user 5 in folder `a`.
fn full_tree(size: Size) -> (Recorder, Vec<Vec<u8>>) {
    let mut bench = Bench::new(size, 1, false);
    let (folder, mut names) = (bench.folders[0], Vec::new());
    while let Ok(room) = bench.one.refill(64, false) {
        bench.one.room = Some(room);
        loop {
            let name = bench.name(names.len() as u64, 40);
            if !create(&mut bench, folder, &name, FILE | 0o644) {
                break;
            }
            names.push(name);
        }
        bench.one.digest(true).unwrap();
    }
    let nodes_free = bench.daemon.usage().nodes_free;
    assert!(nodes_free < size.nodes / 4, "{nodes_free} nodes are free");
    let Bench { recorder, daemon, one, .. } = bench;
    daemon.end(one.session);
    (recorder, names)
}

#[test]
fn what_daemons_note_on_a_full_tree_takes_no_more_nodes_over_many_lives() {
    let size = SIZES[0];
    let (recorder, _) = full_tree(size);
    let used = || {
        let report = area::check::check(&recorder.medium()).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        report.nodes
    };
    let mut first = 0;
    for life in 1..=LIVES {
        let medium = recorder.medium();
        let opened = Daemon::open(Arc::new(ipc::SystemHost), &medium, settings(size));
        let daemon = Arc::new(opened.unwrap_or_else(|why| panic!("life {life}: {why}")).0);
        for session in 0..3 {
            // No process has the groups of an earlier one.
            let groups = (0..life % 7 * 40).map(|group| life * 1000 + session * 300 + group).collect();
            let caller = Caller { uid: 5 + session, gid: 5, groups };
            let client = Client::attach_as(&daemon, caller, 1);
            // The last one is there when the daemon dies.
            if session < 2 {
                daemon.end(client.session);
            }
        }
        assert_eq!(daemon.failure(), None, "life {life}");
        drop(daemon);
        match life {
            FIRST => first = used(),
            life if life % FIRST == 0 => {
                assert!(used() <= first, "{} nodes, then {} after {life}", first, used())
            }
            _ => {}
        }
    }
}

/// Programs take leases for writing on all files of a full tree. Each grant takes a part of a node: when few are left, the daemon
/// refuses more to a program that has some until it has given others back, and does not stop.
#[test]
fn leases_on_a_full_tree_leave_nodes_to_the_daemon() {
    let size = SIZES[0];
    let (recorder, files) = full_tree(size);
    let mut settings = settings(size);
    (settings.lease_words, settings.known_max) = (1 << 16, 1 << 16);
    let medium = recorder.medium();
    let daemon = Arc::new(Daemon::open(Arc::new(ipc::SystemHost), &medium, settings).unwrap().0);
    let mut clients = Vec::new();
    for uid in [0, 5, 0, 5, 0, 5] {
        let client = match Client::try_attach_as(&daemon, user(uid), 1) {
            Ok(client) => client,
            Err(why) => {
                assert!(matches!(why, sharedfs::Error::Area(area::AreaError::NoSpace)), "{why}");
                break;
            }
        };
        client.walk("a").unwrap();
        let (mut held, mut given_back) = (Vec::new(), 0);
        // The files of another program are taken from it.
        for name in &files {
            let lease = || match client.walk_from(ROOT, &[b"a", name], (LEASE_WRITE, LEASE_READ)) {
                Ok((Status::Ok, replies)) => Some(replies.last().unwrap().inode),
                Err(Status::Limit) => None,
                other => panic!("{other:?}: {:?}", daemon.failure()),
            };
            let leased = lease().or_else(|| {
                for inode in held.drain(..) {
                    client.close(inode, 1);
                    given_back += 1;
                }
                lease()
            });
            held.push(leased.expect("a program without leases gets one"));
        }
        println!("user {uid}: {given_back} of {} given back, {:?}", files.len(), daemon.usage());
        assert_eq!(daemon.failure(), None);
        clients.push(client);
    }
    assert!(clients.len() > 1);
    clients.iter().for_each(|client| daemon.end(client.session));
    // There is room again.
    let mut last = Client::attach(&daemon, user(5));
    let folder = last.walk("a").unwrap().inode;
    last.write_lease(folder);
    for name in &files[..100] {
        let inode =
            last.walk_from(ROOT, &[b"a", name], (LEASE_WRITE, LEASE_READ)).unwrap().1.last().unwrap().inode;
        assert!(last.unlink(folder, name, inode, 0));
    }
    last.digest(true).unwrap();
    assert_eq!(daemon.failure(), None);
}
