//! A pool of which all that can be reserved is in use: truncations to borders of blocks need no reservation, and records
//! that replace blocks are never refused to a session whose records are digested. None is cut.

use crate::client::{Client, FILE, user};
use crate::reservation::{BLOCK, Bench, REPLACE_RESERVE, RESERVE, SIZES, Size, create, truncate};
use crate::support::Draws;
use format::InodeNumber;
use format::record::Kind;

/// Blocks of a file that lie apart.
fn write_apart(bench: &mut Bench, file: InodeNumber, count: u64) {
    for _ in 0..count {
        let block = bench.random.below(1 << 12);
        assert!(bench.one.write(file, block * BLOCK, &[1; BLOCK as usize]));
    }
}

/// With nothing reserved, in a tree that has nodes for nothing else.
fn truncate_to_borders(size: Size) {
    let mut bench = Bench::new(size, 1, false);
    bench.make_files(20);
    let files = bench.files[4..].to_vec();
    for file in &files {
        write_apart(&mut bench, *file, 15);
    }
    bench.one.digest(true).unwrap();
    let mut reserved = 0;
    while let Ok(more) = bench.one.refill(u64::MAX, false) {
        reserved += more;
    }
    bench.one.room = Some(reserved);
    let mut count = 0;
    loop {
        let name = bench.name(count, 255);
        let block = bench.random.below(1 << 40);
        let appended = match size.nodes < 4096 {
            true => {
                let folder = bench.folders[0];
                create(&mut bench, folder, &name, FILE | 0o644)
            }
            false => bench.one.write(bench.files[0], block * BLOCK, &[1; BLOCK as usize]),
        };
        if !appended {
            break;
        }
        count += 1;
    }
    assert!(bench.one.is_out_of_room);
    bench.one.digest(true).unwrap();
    bench.one.room = Some(0);
    let (nodes, blocks) = bench.usage();
    for step in (0..32).rev() {
        for file in &files {
            let border = bench.random.below(128) + step * 128;
            assert!(truncate(&mut bench, *file, if step == 0 { 0 } else { border * BLOCK }));
        }
        if step % 8 == 0 {
            assert!(bench.one.digest(true).is_ok(), "{:?}", bench.daemon.terminations());
        }
    }
    assert!(bench.daemon.terminations().is_empty(), "{:?}", bench.daemon.terminations());
    let (nodes_now, blocks_now) = bench.usage();
    assert!(nodes_now <= nodes, "{nodes} nodes, then {nodes_now}");
    assert!(blocks_now < blocks - 200, "{blocks} blocks, then {blocks_now}");
}

/// A session on a full pool, and what it has reserved for records that replace blocks.
struct Replacer {
    client: Client,
    file: InodeNumber,
    blocks: u64,
    to_replace: u64,
}

impl Replacer {
    fn digest(&mut self) {
        let digested = self.client.digest(true);
        assert!(digested.is_ok(), "{digested:?}: {:?}", self.client.daemon.terminations());
    }

    /// Appends a record that replaces or removes data; false if it costs more than is reserved.
    fn replace(&mut self, random: &mut Draws) -> bool {
        let at = random.below(self.blocks * BLOCK);
        let bytes = (1 + random.below(4 * BLOCK)).min(self.blocks * BLOCK - at);
        self.client.room = Some(self.to_replace);
        let appended = match random.below(3) {
            // The file has its size again, and a block that a hole takes is written again by the next one.
            0 => {
                let mut header = self.client.header(Kind::Truncate, self.file);
                header.offset.set(self.blocks * BLOCK - random.below(BLOCK));
                self.client.append(header, &[])
            }
            _ => self.client.write(self.file, at, &vec![random.below(256) as u8; bytes as usize]),
        };
        self.to_replace = self.client.room.take().unwrap();
        appended
    }
}

/// Programs of several users replace data on a full pool, and append where they may. The bound: space for records that
/// replace data is never refused to a session whose records are digested, and none of them is cut.
fn replace_on_a_full_pool(seed: u64) {
    let size = Size { nodes: 16 << 10, blocks: 4096 };
    let bench = Bench::new(size, seed, false);
    let Bench { recorder, daemon, mut one, mut random, folders, .. } = bench;
    assert!(one.set_mode(folders[0], 0o777));
    one.digest(true).unwrap();
    daemon.end(one.session);
    let (mut replacers, mut idle): (Vec<Replacer>, Vec<Client>) = Default::default();
    for uid in [5, 6, 7] {
        // Another program of one of them, such as its shell, has space reserved and does nothing.
        if uid == 5 {
            idle.push(Client::attach(&daemon, user(uid)));
            assert_eq!(idle.last().unwrap().refill(60, false), Ok(60));
        }
        let mut client = Client::attach(&daemon, user(uid));
        client.walk("a").unwrap();
        client.write_lease(folders[0]);
        let (file, made) = client.create(folders[0], format!("of-{uid}").as_bytes(), FILE | 0o644);
        assert!(made);
        replacers.push(Replacer { client, file, blocks: 0, to_replace: 0 });
    }
    // They fill the pool together, each in segments of its own.
    let mut refused = 0;
    while refused < 3 {
        refused = 0;
        for replacer in &mut replacers {
            match replacer.client.refill(64, false) {
                Ok(blocks) if blocks > 1 => {
                    let at = replacer.blocks * BLOCK;
                    assert!(replacer.client.write(
                        replacer.file,
                        at,
                        &vec![1; ((blocks - 1) * BLOCK) as usize]
                    ));
                    replacer.blocks += blocks - 1;
                    replacer.digest();
                }
                _ => refused += 1,
            }
        }
    }
    for replaced in 0..1000 {
        let at = random.below(3) as usize;
        if random.below(8) == 0 {
            let replacer = &mut replacers[at];
            if let Ok(more) = replacer.client.refill(1 + random.below(4), false) {
                let blocks = more - 1;
                if blocks > 0 {
                    let at = replacer.blocks * BLOCK;
                    assert!(replacer.client.write(replacer.file, at, &vec![2; (blocks * BLOCK) as usize]));
                    replacer.blocks += blocks;
                }
            }
        }
        while !replacers[at].replace(&mut random) {
            match replacers[at].client.refill_to_replace(1 + random.below(16)) {
                Ok(more) => replacers[at].to_replace += more,
                Err(_) => {
                    replacers[at].digest();
                    let more = replacers[at].client.refill_to_replace(1);
                    assert!(more.is_ok(), "seed {seed}, after {replaced}: {more:?}");
                    replacers[at].to_replace += more.unwrap();
                }
            }
        }
        if random.below(30) == 0 {
            replacers[at].digest();
        }
    }
    replacers.iter_mut().for_each(Replacer::digest);
    assert!(daemon.terminations().is_empty(), "{:?}", daemon.terminations());
    let report = area::check::check(&recorder.medium()).unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    assert!(
        report.data_blocks <= size.blocks - RESERVE - REPLACE_RESERVE - 60 * idle.len() as u64,
        "{} data blocks",
        report.data_blocks
    );
}

#[test]
fn truncations_to_borders_of_blocks_need_none() {
    for size in SIZES {
        truncate_to_borders(size);
    }
}

#[test]
fn what_replaces_data_on_a_full_pool_is_never_refused_for_good() {
    for seed in 1..=3 {
        replace_on_a_full_pool(seed);
    }
}
