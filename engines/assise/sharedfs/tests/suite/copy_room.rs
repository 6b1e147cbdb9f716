//! The free blocks of a copy cover what the head reserved: an import makes no segment a user's own. A copy that has no block for an
//! entry all the same gets the tree of the head.

use crate::client::{Client, DIRECTORY, FILE, ROOT, user};
use crate::given_up::{fail_to_add, let_replace, pair_with, small};
use crate::join::assert_equal;
use crate::pair::{COPY, HEAD, Pair};
use crate::still::StillHost;
use format::{BLOCK_BYTES, InodeNumber, NodeId};
use mirror::Error::TreeGivenUp;
use pmem::Recorder;
use sharedfs::{Config, Standby};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks of one record.
const AT_ONCE: u64 = 10;

/// A program of this user, and a file in a folder of all.
fn begin(pair: &Pair, folder: InodeNumber, uid: u32) -> (Client, InodeNumber) {
    let mut client = Client::attach_as(&pair.daemon, user(uid), uid);
    client.walk("all").unwrap();
    let file = create(&mut client, folder, &format!("of-{uid}"));
    (client, file)
}

fn create(client: &mut Client, folder: InodeNumber, name: &str) -> InodeNumber {
    client.write_lease(folder);
    let (file, made) = client.create(folder, name.as_bytes(), FILE | 0o644);
    assert!(made);
    client.digest(true).unwrap();
    client.release();
    file
}

/// Writes blocks from one on, as many as can be reserved and no more than this; returns how many.
fn write(client: &mut Client, file: InodeNumber, from: u64, blocks: u64) -> u64 {
    let mut written = 0;
    client.write_lease(file);
    while written < blocks {
        let wanted = AT_ONCE.min(blocks - written) + 1;
        let Ok(reserved) = client.refill(wanted, false) else { break };
        let count = reserved.saturating_sub(1).min(blocks - written).min(AT_ONCE);
        if count == 0 {
            break;
        }
        let bytes = vec![(from + written) as u8; (count * BLOCK) as usize];
        assert!(client.write(file, (from + written) * BLOCK, &bytes));
        client.digest(true).unwrap();
        client.release();
        written += count;
    }
    written
}

/// At the head the blocks of files that go lie together, and those of files that stay. An import brings them to a copy file by
/// file. Then another user fills the pool of the head: the copy has a block for each record.
#[test]
fn a_copy_that_got_a_tree_has_room_for_all_that_is_reserved() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut root = pair.attach();
    root.write_lease(ROOT);
    let (folder, _) = root.create(ROOT, b"all", DIRECTORY | 0o755);
    assert!(root.set_mode(folder, 0o777));
    root.digest(true).unwrap();
    pair.daemon.end(root.session);
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    let (mut five, _) = begin(&pair, folder, 5);
    let files: Vec<_> = (0..24).map(|number| create(&mut five, folder, &format!("{number}"))).collect();
    for (parity, blocks) in [(0, 100), (1, 1)] {
        for file in files.iter().skip(parity).step_by(2) {
            assert_eq!(write(&mut five, *file, 0, blocks), blocks);
        }
    }
    pair.daemon.add_copy(pair.connect()).unwrap();
    for (number, file) in files.iter().enumerate().step_by(2) {
        five.write_lease(*file);
        five.write_lease(folder);
        assert!(five.unlink(folder, format!("{number}").as_bytes(), *file, 0));
        five.digest(true).unwrap();
        five.release();
    }
    pair.daemon.end(five.session);
    pair.daemon.tidy();
    let (mut six, file) = begin(&pair, folder, 6);
    let written = write(&mut six, file, 0, u64::MAX);
    assert!(written > 3200, "{written}");
    assert_eq!(pair.daemon.terminations(), []);
    pair.daemon.end(six.session);
    pair.quiesce();
    assert_eq!(pair.follows.borrow().standby.failure(), None);
    assert_equal([&recorders[0], &recorders[1]]);
}

/// The area of a copy has no block for an entry that it has synced: the pool can be opened, executes no more, and gets the tree
/// of the head in the place of its own.
#[test]
fn a_copy_without_a_block_for_an_entry_gets_the_tree() {
    let recorders = [Recorder::new(), Recorder::new()];
    // Segments of which each holds fewer blocks than the entry takes.
    let of_copy = |blocks| {
        let config = small(blocks);
        Config { area: area::Limits { segment_blocks: 8, ..config.area }, ..config }
    };
    let pair = pair_with(&recorders, of_copy(400));
    let usage = pair.follows.borrow().standby.usage().unwrap().0;
    let used = usage.blocks - usage.blocks_free;
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"more", FILE | 0o644);
    one.digest(true).unwrap();
    pair.quiesce();
    pair.follows.borrow_mut().paused = u32::MAX;
    one.write_lease(file);
    assert!(one.write(file, 0, &vec![7; 10 * BLOCK as usize]));
    // It is digested for another program, which does not wait until the copy has executed that.
    let two = Client::attach_as(&pair.daemon, user(0), 2);
    two.read_lease(file);
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    pair.follows.borrow().standby.stop();
    let standby = Standby::open(StillHost::again(), &recorders[1].medium(), of_copy(used)).unwrap();
    pair.follows.borrow_mut().standby = standby.clone();
    pair.follows.borrow_mut().paused = 0;
    let state = standby.state();
    assert!(state.executed < state.ledger, "{state:?}");
    assert!(!standby.execute().unwrap() && standby.failure().is_none());
    for name in ["file-0", "file-1"] {
        let file = one.walk(name).unwrap().inode;
        one.write_lease(file);
        one.write_lease(ROOT);
        assert!(one.unlink(ROOT, name.as_bytes(), file, 0));
        one.digest(true).unwrap();
    }
    pair.daemon.end(two.session);
    pair.daemon.end(one.session);
    pair.daemon.tidy();
    let_replace(&pair, HEAD);
    assert_eq!(fail_to_add(&pair), TreeGivenUp);
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
}
