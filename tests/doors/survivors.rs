//! Programs that had mapped a file when its mount ended. If the gateway was killed, those of the library still have their locks,
//! by which others would believe that the mapped pages are still in use; so they end before there is another mount. If the mount
//! was removed by force, no store is lost.

use super::{Actor, MountAndLibrary, script, through_mount};
use crate::processes::{Job, Node};
use std::process::Command;

fn in_library(node: &Node) -> Actor {
    Actor(node.begin_program(&["/usr/bin/python3", &script()]))
}

/// The program ends without an answer, however long it would have waited for a line.
fn ends(mut actor: Actor) {
    assert_eq!(actor.0.line(), None);
}

#[test]
fn programs_of_the_library_that_map_a_file_of_a_killed_mount_end() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.mapped("file");
    let [mut maps, mut blocks, mut opens] = [(); 3].map(|()| in_library(&doors.node));
    for actor in [&mut maps, &mut blocks, &mut opens] {
        actor.does(&format!("open {file} O_RDWR"));
    }
    blocks.does("block_sigbus");
    blocks.does(&format!("map {file} 8192"));
    maps.does(&format!("map {file} 8192"));
    maps.does(&format!("lock {file}"));
    opens.says(&format!("lock {file}"), "BlockingIOError 11");
    doors.node.gateway().kill();
    ends(maps);
    ends(blocks);
    // It has not mapped the file, and goes on.
    opens.does(&format!("lock {file}"));
    opens.does(&format!("write {file} 200 WRITTEN"));
    // It has lost its file, and is not harmed.
    doors.mount.says(&format!("read {file} 200 7"), "OSError 107");
    doors.node.hearth(&["mount"]);
    doors.mount = through_mount();
    doors.mount.does(&format!("open {file} O_RDWR"));
    doors.mount.says(&format!("read {file} 200 7"), "WRITTEN");
    drop(opens);
    doors.end();
}

/// The index of a database in WAL mode is a file that each program maps while it has the database open. A program that opens
/// the database makes the index again only if no other has it open.
#[test]
fn rows_that_were_committed_in_wal_mode_outlive_the_mount_that_had_their_index() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.path("wal.db");
    let mut idle = in_library(&doors.node);
    idle.does(&format!("database {file}"));
    idle.does("row 1");
    doors.mount.does(&format!("database {file}"));
    for row in 2..10 {
        doors.mount.does(&format!("row {row}"));
    }
    // The index that the next program would find.
    doors.mount.does("sync_all");
    for row in 10..30 {
        idle.does(&format!("row {row}"));
    }
    let gateway = doors.node.gateway();
    gateway.kill();
    gateway.wait();
    doors.node.hearth(&["mount"]);
    doors.library.does(&format!("database {file}"));
    doors.library.does("row 30");
    doors.mount = through_mount();
    doors.mount.does(&format!("database {file}"));
    doors.mount.does("row 31");
    doors.mount.says("rows", "31 ok");
    ends(idle);
    doors.end();
}

/// Stores numbers to a mapped file, and notes each in another file once it is stored.
const STORES: &str = "import mmap, os, sys
mapped, noted = (os.open(path, os.O_RDWR) for path in sys.argv[1:])
stored = memoryview(mmap.mmap(mapped, 8)).cast('Q')
last = memoryview(mmap.mmap(noted, 8)).cast('Q')
for number in range(1, 1 << 60):
    stored[0] = number
    last[0] = number
    if number == 1:
        print('begins', flush=True)
";

#[test]
fn no_store_succeeds_and_is_lost_when_a_mount_is_removed_by_force() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let number = |bytes: Vec<u8>| u64::from_le_bytes(bytes.try_into().unwrap());
    for round in 0..3 {
        let (file, noted) = (doors.path(&format!("file-{round}")), format!("{}/noted", doors.node.dir()));
        std::fs::write(&noted, [0; 8]).unwrap();
        std::fs::write(&file, [0; 8]).unwrap();
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", STORES, &file, &noted]);
        let mut stores = Job::of(command);
        stores.expect("begins");
        doors.node.hearth(&["umount", "--force"]);
        assert_eq!(stores.line(), None);
        doors.node.hearth(&["mount"]);
        let (there, noted) = (number(std::fs::read(&file).unwrap()), number(std::fs::read(&noted).unwrap()));
        assert!(noted > 0 && [noted, noted + 1].contains(&there), "{there} is there, and {noted} was stored");
    }
    doors.mount = through_mount();
    doors.end();
}
