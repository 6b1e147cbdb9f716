//! Programs that had mapped a file when the gateway of its mount was killed. Those of the library keep their locks, by which
//! others would believe that the mapped pages are still in use; so they end before there is another mount.

use super::{Actor, MountAndLibrary, script, through_mount};
use crate::processes::Node;

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
    doors.node.gateway().kill();
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
