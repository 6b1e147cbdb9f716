//! Ways into the tree while it is mounted. The kernel would find all of them at the mount, and each call would be a message to
//! the gateway, which takes the leases of its files from the program; a program with the library takes none of them there.
//! Requests to the daemon and messages to the gateway are counted.

use crate::counts;
use crate::harness;
use crate::processes::{Job, Node};
use std::os::unix::fs::symlink;
use std::process::Command;

/// Files that each way makes.
const FILES: u64 = 100;
/// Requests that do not depend on the number of files: a process attaches, fetches the directories' leases, and leaves.
const REQUESTS_OF_A_WAY: u64 = 40;
/// Messages of a shell that goes into the mount before it starts a program with the library: of names and attributes.
const MESSAGES_OF_A_SHELL: u64 = 10;

/// Goes down from `/` by a descriptor at a time, as `rsync` does, and works at the last one.
const DOWN_BY_DESCRIPTORS: &str = "
import os, sys
here = os.open('/', os.O_PATH)
for name in sys.argv[1].split('/')[1:]:
    os.stat(name, dir_fd=here, follow_symlinks=False)
    here = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
above = os.open(sys.argv[1] + '/..', os.O_PATH)
os.mkdir('by-descriptor', dir_fd=here)
for number in range(int(sys.argv[2])):
    file = os.open(f'by-descriptor/.{number}', os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(file, b'text')
    os.close(file)
    os.rename(f'by-descriptor/.{number}', f'n1/by-descriptor/{number}', src_dir_fd=here, dst_dir_fd=above)
    assert os.stat(f'./n1/by-descriptor/{number}', dir_fd=above).st_size == 4
print(len(os.listdir('/proc/self/fd/%d/by-descriptor' % here)))
";

/// Requests that the daemon gets from a shell script, under the library or about to start programs under it.
fn requests_of(node: &Node, script: &str) -> u64 {
    let before = node.status()["requests"].as_u64().unwrap();
    let said = Job::of(shell(node, script)).rest();
    assert_eq!(said, [FILES.to_string()], "{script}");
    node.status()["requests"].as_u64().unwrap() - before
}

fn shell(node: &Node, script: &str) -> Command {
    let run = format!("{} run --dir {} --", env!("CARGO_BIN_EXE_hearth"), node.dir());
    let mut command = Command::new("/bin/sh");
    command.args(["-ec", script]).env("D", node.dir()).env("RUN", run).env("FILES", FILES.to_string());
    command.env("DOWN", DOWN_BY_DESCRIPTORS).env("LC_ALL", "C");
    command
}

#[test]
fn a_program_with_the_library_makes_no_call_on_the_mount_whatever_way_it_takes() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    let ways = [
        "$RUN rsync -a $D/source/ $D/n1/copy; $RUN find $D/n1/copy -type f | wc -l",
        "$RUN /usr/bin/python3 -c \"$DOWN\" $D/n1 $FILES",
        "$RUN sh -ec 'cd $D/link; mkdir linked; cp $D/source/* linked; cd linked; ls ../linked | wc -l'",
    ];
    let from_within =
        "cd $D/n1; $RUN sh -ec 'mkdir within; cp $D/source/* within; cd within; ls ../within | wc -l'";
    std::fs::create_dir(format!("{}/source", node.dir())).unwrap();
    for number in 0..FILES {
        std::fs::write(format!("{}/source/{number}", node.dir()), vec![b'x'; 100]).unwrap();
    }
    symlink(format!("{}/n1", node.dir()), format!("{}/link", node.dir())).unwrap();
    let without_mount: Vec<u64> = ways.iter().map(|way| requests_of(&node, way)).collect();
    node.run(&["sh", "-ec", &format!("rm -r {}/*", node.path(""))]);
    node.hearth(&["mount"]);
    for (way, without_mount) in ways.iter().zip(without_mount) {
        let requests = requests_of(&node, way);
        assert!(requests <= without_mount + REQUESTS_OF_A_WAY, "{requests}, not {without_mount}: {way}");
    }
    let requests = requests_of(&node, from_within);
    assert!(requests <= 2 * REQUESTS_OF_A_WAY, "{requests}: {from_within}");
    node.hearth(&["umount"]);
    let log = std::fs::read_to_string(format!("{}/node-1/gateway.log", node.dir())).unwrap();
    let [messages, _] = counts(&log);
    assert!(messages.values().sum::<u64>() <= MESSAGES_OF_A_SHELL, "{messages:?}");
    node.check();
}
