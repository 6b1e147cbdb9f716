//! A medium that another program fills: records with a reservation can be digested, at each point, and by the next daemon.

use crate::client::{Client, FILE, new_pool, tiny, user};
use crate::support::Draws;
use format::InodeNumber;
use ipc::SystemHost;
use pmem::Recorder;
use sharedfs::{Config, Daemon};
use std::sync::Arc;

const BLOCK: u64 = 4096;

fn config() -> Config {
    Config { replace_reserve_max: 32, room_blocks: 8, ..tiny() }
}

fn open(recorder: &Recorder) -> Arc<Daemon> {
    let (daemon, recovered) =
        Daemon::open(Arc::new(SystemHost), &recorder.medium(), config()).expect("it starts on a full medium");
    assert!(recovered.cuts.is_empty() && recovered.damaged.is_empty(), "{recovered:?}");
    Arc::new(daemon)
}

/// A session of a user with a file of its own, whose blocks are counted.
struct Writer {
    client: Client,
    file: InodeNumber,
    blocks: u64,
}

impl Writer {
    fn new(daemon: &Arc<Daemon>, uid: u32, folder: InodeNumber) -> Self {
        let mut client = Client::attach(daemon, user(uid));
        client.walk("a").unwrap();
        client.write_lease(folder);
        let (file, made) = client.create(folder, format!("of-{uid}").as_bytes(), FILE | 0o644);
        assert!(made);
        client.digest(true).unwrap();
        client.room = Some(0);
        Self { client, file, blocks: 0 }
    }

    /// Appends some blocks to the file, with a reservation; false if there is none.
    fn write(&mut self, blocks: u64) -> bool {
        let cost = blocks + 1;
        while self.client.room < Some(cost) {
            match self.client.refill(cost, false) {
                Ok(more) => self.client.room = self.client.room.map(|room| room + more),
                Err(_) => return false,
            }
        }
        let written = self.client.write(self.file, self.blocks * BLOCK, &vec![7; (blocks * BLOCK) as usize]);
        self.blocks += if written { blocks } else { 0 };
        written
    }
}

/// Three programs write while the medium becomes full, and digest at random times. Nothing that was reserved finds no space, and the
/// daemon, the next one included, lives.
fn write_on_a_full_medium(seed: u64) {
    let recorder = Recorder::new();
    recorder.limit_space(64 << 20);
    new_pool(&recorder.medium());
    let daemon = open(&recorder);
    let mut random = Draws(seed);
    let mut root = Client::attach(&daemon, user(0));
    let root_inode = root.walk("").unwrap().inode;
    root.write_lease(root_inode);
    let (folder, made) = root.create(root_inode, b"a", 0o040_777);
    assert!(made);
    root.digest(true).unwrap();
    daemon.end(root.session);
    let mut writers: Vec<Writer> = (5..8).map(|uid| Writer::new(&daemon, uid, folder)).collect();
    let filled_at = random.below(40);
    let (mut refused, mut step) = (0, 0);
    while refused < 12 {
        if step == filled_at {
            recorder.fill_space();
        }
        step += 1;
        let writer = &mut writers[random.below(3) as usize];
        refused += u64::from(!writer.write(1 + random.below(6)));
        if random.below(4) == 0 || refused > 0 {
            writer.client.digest(true).unwrap();
        }
        assert_eq!(daemon.failure(), None, "seed {seed}, step {step}");
        assert!(daemon.terminations().is_empty(), "seed {seed}: {:?}", daemon.terminations());
        assert!(step < 10_000, "seed {seed}: it is never full");
    }
    assert!(daemon.lacks_space() && recorder.space_left() < Some(1 << 20));
    // Logs of which a part is not digested, and a new daemon on the full medium.
    let blocks: Vec<u64> = writers.iter().map(|writer| writer.blocks).collect();
    let after = recorder.after_kill();
    drop((writers, daemon));
    let daemon = open(&after);
    let reader = Client::try_attach_as(&daemon, user(5), 1).map_err(|why| {
        format!("seed {seed}: {why}, {:?} left, {:?} held", after.space_left(), after.medium().held_bytes())
    });
    let reader = reader.unwrap();
    for (uid, blocks) in (5..8).zip(blocks) {
        let file = reader.walk(&format!("a/of-{uid}")).unwrap();
        assert_eq!(file.item.size.get(), blocks * BLOCK, "seed {seed}, user {uid}");
    }
    assert_eq!(daemon.failure(), None);
}

#[test]
fn what_is_reserved_can_be_digested_on_a_full_medium() {
    (1..=12).for_each(write_on_a_full_medium);
}
