//! A pool that is full: programs truncate files and write again to the blocks that they have, by the library, through the
//! mount, and with a copy.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, until};
use serde_json::Value;

/// A program fills the pool while another one is in the middle of a transaction, and is killed.
const FILL: &str = r#"cd $T; /usr/bin/python3 - <<'X'
import errno, os, signal, sqlite3, subprocess, sys
begun = """if 1:
    import signal, sqlite3
    base = sqlite3.connect('base', isolation_level=None)
    base.execute('pragma cache_size = 5')
    base.execute('create table t(id integer primary key, x)')
    base.executemany('insert into t(x) values(?)', [('a' * 2000,)] * 500)
    base.execute('begin')
    base.execute("update t set x = replace(x, 'a', 'b')")
    print('begun', flush=True)
    signal.pause()
"""
program = subprocess.Popen([sys.executable, "-c", begun], stdout=subprocess.PIPE)
assert program.stdout.readline() == b"begun\n"
with open("kept", "wb") as file: file.write(b"k" * 300000)
with open("given", "wb") as file: os.posix_fallocate(file.fileno(), 0, 100000)
for name in "odd", "even", "holes", "named": open(name, "wb").write(b"o" * 100000)
big = os.open("big", os.O_CREAT | os.O_WRONLY)
try:
    while True: os.write(big, b"f" * 65536)
except OSError as why: assert why.errno == errno.ENOSPC, why
os.close(big)
assert "base-journal" in os.listdir(".")
program.kill()
program.wait()
X
"#;

/// Nothing can be added then; all that removes or replaces data can be done.
const REPLACE: &str = r#"cd $T; /usr/bin/python3 - <<'X'
import errno, os, sqlite3
# The reservations of the programs before are there again.
rest = os.open("rest", os.O_CREAT | os.O_WRONLY)
for bytes in 1 << 16, 1 << 12, 1 << 12, 1 << 12:
    try:
        while True: os.write(rest, b"f" * bytes)
    except OSError as why: assert why.errno == errno.ENOSPC, why
os.close(rest)
def is_full():
    file = os.open("added", os.O_CREAT | os.O_WRONLY)
    try: os.write(file, b"a" * 100000) < 100000 or os.fsync(file)
    except OSError as why: assert why.errno == errno.ENOSPC, why
    else: assert os.fstat(file).st_size < 100000
    os.close(file)
    os.unlink("added")
is_full()
file = os.open("kept", os.O_RDWR)
assert os.pwrite(file, b"n" * 300000, 0) == 300000
for at in range(0, 200000, 5000): assert os.pwrite(file, b"p" * 300, at) == 300
os.fsync(file)
is_full()
base = sqlite3.connect("base")
assert base.execute("pragma integrity_check").fetchall() == [("ok",)]
assert base.execute("select count(*) from t where x = ?", ("a" * 2000,)).fetchall() == [(500,)]
base.close()
assert "base-journal" not in os.listdir(".")
given = os.open("given", os.O_RDWR)
assert os.pwrite(given, b"g" * 100000, 0) == 100000
os.truncate("odd", 50001)
os.truncate("even", 40960)
os.rename("named", "renamed")
os.chmod("renamed", 0o600)
X
fallocate -p -o 100 -l 30000 holes
fallocate -p -o 40960 -l 8192 holes
: > renamed
: > big
/usr/bin/python3 - <<'X'
kept = b"".join((b"p" * 300 + b"n" * 4700 for at in range(0, 200000, 5000))) + b"n" * 100000
assert open("kept", "rb").read() == kept
assert open("given", "rb").read() == b"g" * 100000
assert open("odd", "rb").read() == b"o" * 50001 and open("even", "rb").read() == b"o" * 40960
holes = b"o" * 100 + bytes(30000) + b"o" * 10860 + bytes(8192) + b"o" * 50848
assert open("holes", "rb").read() == holes
open("added", "wb").write(b"a" * 1000000)
X
rm added; cat renamed; stat -c %s big"#;

/// Each command that frees space on other file systems, and what keeps a database usable.
#[test]
fn on_a_full_pool_what_is_there_is_written_again_and_truncated() {
    let node = Node::of_mib(64);
    node.sh(FILL).expect_success();
    assert_eq!(node.sh(REPLACE).expect_success(), "0\n");
    node.sh("rm -f $T/*").expect_success();
    if harness::can_mount() {
        node.hearth(&["mount"]).expect_success();
        node.sh_mounted(FILL).expect_success();
        assert_eq!(node.sh_mounted(REPLACE).expect_success(), "0\n");
        node.hearth(&["umount"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// A copy has its data in other places, and space for the same.
#[test]
fn on_full_pools_copies_follow_what_is_written_again() {
    let node = Node::of_nodes_of(2, 4000, 4000, 64);
    assert_eq!(chain(&node, 1)["in_sync"], Value::from([1, 2]));
    node.sh(FILL).expect_success();
    assert_eq!(node.sh(REPLACE).expect_success(), "0\n");
    assert_eq!(chain(&node, 1)["in_sync"], Value::from([1, 2]));
    node.hearth(&["check", "--against", "2"]).expect_success();
    node.hearth(&["down"]).expect_success();
    [1, 2].iter().for_each(|number| node.check_of(*number));
}

/// The report of a node about the chain.
fn chain(node: &Node, number: usize) -> Value {
    let status = node.hearth(&["status", "--json"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    status[number - 1]["chain"].clone()
}

/// Fills the tree with long symbolic links, then with directories.
const FILL_TREE: &str = r#"/usr/bin/python3 - $T <<'X'
import errno, os, sys
os.chdir(sys.argv[1])
for folder, make in ("links", lambda name: os.symlink("t" * 4000, name)), ("folders", os.mkdir):
    os.mkdir(folder)
    open(folder + "/first", "w").close()
    count = 0
    try:
        while True:
            make("%s/%d" % (folder, count))
            count += 1
    except OSError as why: assert why.errno == errno.ENOSPC, why
    print(folder, count, flush=True)
    if folder == "links": [os.unlink("links/%d" % number) for number in range(count)]
X
"#;

/// The tree has no node for another inode. Programs begin and end, the daemon dies and starts again, and files can be removed.
#[test]
fn with_a_full_tree_programs_and_daemons_begin() {
    let node = Node::of_mib(16);
    node.sh(FILL_TREE).expect_success();
    for _ in 0..3 {
        assert_eq!(node.sh("ls $T").expect_success(), "folders\nlinks\n");
    }
    node.hearth(&["down", "--hard"]).expect_success();
    node.hearth(&["up", "--no-mount"]).expect_success();
    assert_eq!(node.sh("rm -r $T/folders && echo b > $T/new && cat $T/new").expect_success(), "b\n");
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// The same with a copy: it follows, takes over, and gets the other node back, while the tree of each has no node for another inode.
#[test]
fn with_a_full_tree_copies_follow_and_take_over() {
    let node = Node::of_nodes_of(2, 4000, 4000, 16);
    let begin_programs = |number: usize| {
        let tree = format!("{}/n{number}", node.dir());
        for _ in 0..3 {
            let listed = node.hearth(&["run", "--node", &number.to_string(), "--", "ls", &tree]);
            assert_eq!(listed.expect_success(), "folders\nlinks\n");
        }
    };
    node.sh(FILL_TREE).expect_success();
    begin_programs(1);
    assert_eq!(chain(&node, 1)["in_sync"], Value::from([1, 2]));
    node.hearth(&["check", "--against", "2"]).expect_success();
    node.hearth(&["down", "--node", "1", "--hard"]).expect_success();
    until("node 2 leads", || chain(&node, 2)["role"] == "leads");
    begin_programs(2);
    node.hearth(&["start", "--node", "1"]).expect_success();
    until("node 1 is in sync", || chain(&node, 2)["in_sync"] == Value::from([1, 2]));
    begin_programs(2);
    node.hearth(&["check", "--against", "1"]).expect_success();
    let tree = format!("{}/n2", node.dir());
    let remove = format!(
        "rm -r {tree}/folders && mkdir {tree}/again && echo b > {tree}/again/new && cat {tree}/again/new"
    );
    assert_eq!(node.hearth(&["run", "--node", "2", "--", "sh", "-c", &remove]).expect_success(), "b\n");
    assert_eq!(chain(&node, 2)["in_sync"], Value::from([1, 2]));
    node.hearth(&["check", "--against", "1"]).expect_success();
    node.hearth(&["down"]).expect_success();
    [1, 2].iter().for_each(|number| node.check_of(*number));
}
