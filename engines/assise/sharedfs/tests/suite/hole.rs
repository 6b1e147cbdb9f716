//! Entries behind a hole in the ledger: nobody waited for them, so a mapped file may keep their page and not the one
//! before. Recovery goes on where the hole is; what stands behind it must not come back when new entries fill it.

use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use format::BLOCK_BYTES;
use ipc::SystemHost;
use pmem::crash::{Failure, Limits, Model, each_image};
use pmem::{Medium, Recorder};
use sharedfs::{Config, Daemon, Recovered};
use std::sync::Arc;
use vfs::Caller;

/// The ledger's file.
const LEDGER: &str = "ledger";
/// The second page of the ledger's ring.
const BORDER: u64 = 2 * BLOCK_BYTES as u64;
/// Grants that fill the first page behind an OpenLog without groups: 128 bytes each, as that.
const GRANTS: usize = 31;

fn open_with(medium: &Medium) -> (Arc<Daemon>, Recovered) {
    // No flip comes between that would contain a part of the entries.
    let config = Config { batch_changes: 64, ..tiny() };
    let (daemon, recovered) = Daemon::open(Arc::new(SystemHost), medium, config).unwrap();
    (Arc::new(daemon), recovered)
}

fn name(file: usize) -> String {
    format!("{file:02}")
}

fn pool_with_files(medium: &Medium) {
    new_pool(medium);
    let daemon = open_with(medium).0;
    let mut maker = Client::attach(&daemon, user(0));
    maker.write_lease(ROOT);
    for file in 0..GRANTS {
        assert!(maker.create(ROOT, name(file).as_bytes(), FILE | 0o644).1);
    }
    daemon.end(maker.session);
}

fn take(client: &Client, files: usize) {
    for file in 0..files {
        let inode = client.walk(&name(file)).unwrap().inode;
        client.write_lease(inode);
    }
}

/// A session whose entries end where the first page does, in the places that those of the life before had: an
/// OpenLog of 320 bytes, two grants fewer, a CloseLog of 64. Then the daemon dies; gives whether the entry behind
/// the border is the one that would come next, and who lives according to the recovery.
fn live_up_to_the_border(medium: &Medium, opened: u64) -> (bool, Recovered) {
    let (daemon, _) = open_with(medium);
    let caller = Caller { uid: 0, gid: 0, groups: (1..=56).collect() };
    let client = Client::attach(&daemon, caller);
    let next = client.attached.welcome.ledger.get() == opened + 1;
    take(&client, GRANTS - 2);
    daemon.end(client.session);
    drop(client);
    drop(daemon);
    (next, open_with(medium).1)
}

#[test]
fn what_stands_behind_a_hole_does_not_come_back() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    pool_with_files(&medium);
    let daemon = open_with(&medium).0;
    let first = Client::attach(&daemon, user(0));
    let opened = first.attached.welcome.ledger.get();
    recorder.begin_here();
    take(&first, GRANTS);
    // Its OpenLog is the first entry of the next page; the crash comes before it is settled.
    Client::attach(&daemon, user(0));
    let mut holes = 0;
    let few = Limits {
        complete_max: 8,
        near_max: 128,
        sampled: 0,
        recovery_images: 0,
        recovery_every: 1,
        seed: 15,
    };
    let judged = each_image(&recorder, Model::Pages, &few, |_, image| {
        let mut behind = [0; 8];
        image.read(LEDGER, BORDER, &mut behind);
        let (next, recovered) = live_up_to_the_border(&Recorder::of_image(image).medium(), opened);
        holes += u64::from(next && behind != [0; 8]);
        if recovered.logs.is_empty() {
            return Ok(());
        }
        Err(Failure::from(format!("logs live that ended: {:?}", recovered.logs)))
    });
    judged.unwrap_or_else(|violation| panic!("{violation}"));
    assert!(holes > 0, "no image had the later page alone");
}
