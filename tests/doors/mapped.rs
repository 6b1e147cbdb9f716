//! The cost of a file that a program of the library creates, locks, maps and removes, as SQLite does with the shared memory
//! of a write-ahead log at each connection: requests to the daemon, and messages of the kernel to the gateway.

use crate::counts;
use crate::harness;
use crate::processes::Node;

/// The arguments are the folder and the number of files.
const FILES: &str = "import fcntl, mmap, os, struct, sys
name = sys.argv[1] + '/mapped'
for number in range(int(sys.argv[2])):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4096)
    found = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0))
    assert found[:2] == struct.pack('h', fcntl.F_UNLCK)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    area = mmap.mmap(fd, 4096)
    area[number] = 1
    os.unlink(name)
    area.close()
    os.close(fd)
print('done')
";
const FEW: u64 = 5;
const MANY: u64 = 45;
/// Requests for a file. Of the process, among others: the test of the lock, which brings its lease, the right to open at
/// the mount, the walk to the name that is removed, the close. Of the gateway: the open, the extents, the recall, the release,
/// the close after the kernel has forgotten the inode.
const REQUESTS: u64 = 11;
/// Messages for a file: GETATTR of the folder, LOOKUP of the token, OPEN, GETATTR of the file, FLUSH, READ, WRITE,
/// RELEASE. Without FORGET: the number of inodes in one depends on the time.
const MESSAGES: u64 = 8;

/// Requests that the daemon gets from a program that works on so many files.
fn requests_of(node: &Node, count: u64) -> u64 {
    let before = node.status()["requests"].as_u64().unwrap();
    let count = count.to_string();
    assert_eq!(node.run(&["/usr/bin/python3", "-c", FILES, &node.path("folder"), &count]), "done\n");
    node.status()["requests"].as_u64().unwrap() - before
}

#[test]
fn a_file_that_is_created_locked_mapped_and_removed_costs_few_requests_and_messages() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.run(&["mkdir", &node.path("folder")]);
    node.hearth(&["mount"]);
    // The difference leaves out the start of the program.
    let (few, many) = (requests_of(&node, FEW), requests_of(&node, MANY));
    let files = MANY - FEW;
    let spare = files / 4;
    assert!(many - few <= files * REQUESTS + spare, "{few} {many}");
    node.hearth(&["umount"]);
    let log = std::fs::read_to_string(format!("{}/node-1/gateway.log", node.dir())).unwrap();
    let [messages, _] = counts(&log);
    let waits = messages.iter().filter(|(kind, _)| !matches!(kind.as_str(), "FORGET" | "BATCH_FORGET"));
    let sum: u64 = waits.map(|(_, count)| count).sum();
    assert!(sum <= (FEW + MANY) * MESSAGES + spare, "{messages:?}");
    node.check();
}

/// The arguments are the folder and the number of syncs.
const SYNCS: &str = "import mmap, os, sys
fd = os.open(sys.argv[1] + '/synced', os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 65536)
area = mmap.mmap(fd, 65536, prot=mmap.PROT_READ)
for number in range(int(sys.argv[2])):
    os.pwrite(fd, b'x' * 4096, number % 16 * 4096)
    os.fdatasync(fd)
print('done')
";

/// As LMDB does for each transaction. If a sync took the file's lease from the gateway, the next write would take it back.
#[test]
fn a_mapped_file_that_is_written_and_synced_costs_no_requests() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.run(&["mkdir", &node.path("folder")]);
    node.hearth(&["mount"]);
    let requests = |count: &str| {
        let before = node.status()["requests"].as_u64().unwrap();
        assert_eq!(node.run(&["/usr/bin/python3", "-c", SYNCS, &node.path("folder"), count]), "done\n");
        node.status()["requests"].as_u64().unwrap() - before
    };
    let (few, many) = (requests("5"), requests("205"));
    assert!(many <= few + 100, "{few} {many}");
    node.hearth(&["umount"]);
    node.check();
}
