//! The programs of `hearth bench programs`: programs that people use, as shell scripts that find a folder in `$T`,
//! their inputs in `$I`, and the name of their place in `$PLACE`.
//!
//! Each row has a script that runs before the clock (in a process of its own, so that the files are another program's),
//! the measured script, and a condition that must hold afterwards: a program that was fast and wrong has failed.

mod inputs;

pub use inputs::make;

/// A program at work.
#[derive(Debug)]
pub struct Row {
    /// Its name on the command line and in JSON.
    pub name: &'static str,
    /// Its description, for a table.
    pub told: &'static str,
    /// Programs that it needs.
    pub needs: &'static [&'static str],
    /// Done before.
    pub before: &'static str,
    /// Measured.
    pub measured: &'static str,
    /// Succeeds if the result is right.
    pub right: &'static str,
    /// Whether the library can be in it: a static program sees the tree only through the mount.
    pub takes_library: bool,
}

const fn row(name: &'static str, told: &'static str, needs: &'static [&'static str]) -> Row {
    Row { name, told, needs, before: "", measured: "", right: "", takes_library: true }
}

/// A copy of the tree of files in `$I`, made by another process than the one that is measured.
const TREE: &str = "cp -a $I/tree $T/tree";

/// In the order in which they run.
pub const ROWS: [Row; 26] = [
    Row {
        measured: "sqlite3 $T/a.db < $I/rollback.sql",
        right: "test $(sqlite3 $T/a.db 'select count(*) from t') = 3000",
        ..row("sqlite-rollback", "sqlite3, 3,000 transactions, rollback journal", &["sqlite3"])
    },
    Row {
        measured: "sqlite3 $T/a.db < $I/wal.sql > $T/said",
        right: "test $(sqlite3 $T/a.db 'select count(*) from t') = 3000; grep -qx wal $T/said",
        ..row("sqlite-wal", "sqlite3, 3,000 transactions, WAL", &["sqlite3"])
    },
    Row {
        measured: "python3 $I/web.py $T/a.db delete",
        right: "test $(sqlite3 $T/a.db 'select count(*) from t') = 300",
        ..row("web-rollback", "a web application in Python, rollback journal", &["python3", "sqlite3"])
    },
    Row {
        measured: "python3 $I/web.py $T/a.db wal",
        right: "test $(sqlite3 $T/a.db 'select count(*) from t') = 300",
        ..row("web-wal", "a web application in Python, WAL", &["python3", "sqlite3"])
    },
    Row {
        measured: "db_bench --benchmarks=fillsync --num=20000 --db=$T/db",
        right: "ls $T/db/*.log",
        ..row("rocksdb-fillsync", "RocksDB, 20,000 synced writes", &["db_bench"])
    },
    Row {
        measured: "db_bench --benchmarks=fillrandom,readrandom --num=60000 --db=$T/db",
        right: "ls $T/db/CURRENT",
        ..row("rocksdb-read", "RocksDB, 60,000 writes and random reads", &["db_bench"])
    },
    Row {
        measured: "git clone -q $I/repository $T/clone",
        right: "cd $T/clone; git fsck --strict; diff -r --exclude=.git . $I/tree",
        ..row("git-clone", "git clone", &["git"])
    },
    Row {
        before: "git clone -q $I/repository $T/clone",
        measured: "cd $T/clone; for f in */f00[0-4]*; do echo more >> $f; done; git commit -qam change; git log -p | \
                   tail -1; git gc -q",
        right: "cd $T/clone; git fsck --strict; test -z \"$(git status --porcelain)\"",
        ..row("git-commit", "git commit, log, gc", &["git"])
    },
    Row {
        before: "cp -a $I/crate $T/crate",
        measured: "cd $T/crate; cargo build -q --offline --target-dir $T/crate/target",
        right: "test $($T/crate/target/debug/built) = 20",
        ..row("cargo", "cargo build of a small crate", &["cargo", "cc"])
    },
    Row {
        before: "cp -a $I/c $T/c",
        measured: "make -s -j2 -C $T/c",
        right: "test $($T/c/built) = 40",
        ..row("make", "make -j2 of 40 C files", &["make", "cc"])
    },
    Row {
        measured: "tar xf $I/tree.tar -C $T",
        right: "diff -r $T/tree $I/tree",
        ..row("untar", "tar x", &["tar"])
    },
    Row {
        measured: "rsync -a $I/tree/ $T/tree",
        right: "diff -r $T/tree $I/tree",
        ..row("rsync-in", "rsync -a in", &["rsync"])
    },
    Row {
        before: "rsync -a $I/tree/ $T/tree",
        measured: "rsync -a $I/tree/ $T/tree",
        right: "test -z \"$(rsync -ani $I/tree/ $T/tree)\"",
        ..row("rsync-again", "rsync -a again", &["rsync"])
    },
    Row {
        before: TREE,
        measured: "rsync -a $T/tree/ $I/out-$PLACE",
        right: "diff -r $I/out-$PLACE $I/tree; rm -r $I/out-$PLACE",
        ..row("rsync-out", "rsync -a out", &["rsync"])
    },
    Row {
        before: TREE,
        measured: "tar c -C $T tree | wc -c",
        right: "diff -r $T/tree $I/tree",
        ..row("tar", "tar c", &["tar"])
    },
    Row {
        before: TREE,
        measured: "find $T/tree -type f -print0 | xargs -0 stat | wc -l",
        right: "test $(find $T/tree -type f | wc -l) = 4000",
        ..row("stat", "find, stat of all", &["find"])
    },
    Row {
        before: TREE,
        measured: "find $T/tree -type f -print0 | xargs -0 -n20 stat | wc -l",
        right: "test $(find $T/tree -type f | wc -l) = 4000",
        ..row("stat-20", "find, a stat for each 20 files", &["find"])
    },
    Row {
        before: TREE,
        measured: "test $(grep -rl needle $T/tree | wc -l) = 40",
        right: "true",
        ..row("grep", "grep -r", &["grep"])
    },
    Row {
        before: TREE,
        measured: "du -s $T/tree; diff -r $T/tree $I/tree",
        right: "true",
        ..row("diff", "du, diff -r", &["diff"])
    },
    Row {
        before: TREE,
        measured: "cp -a $T/tree $T/copy",
        right: "diff -r $T/copy $I/tree",
        ..row("cp", "cp -a in the tree", &["cp"])
    },
    Row {
        before: TREE,
        measured: "rm -rf $T/tree",
        right: "test ! -e $T/tree",
        ..row("rm", "rm -rf", &["rm"])
    },
    Row {
        before: "cp $I/tree/d000/f0001 $T/text",
        measured: "for i in 1 2 3 4 5; do printf 'a\\nline\\n.\\nw\\nq\\n' | ed -s $T/text; done",
        right: "test $(grep -cx line $T/text) = 5",
        ..row("ed", "ed, 5 times", &["ed"])
    },
    Row {
        before: "mkdir $T/go; for i in 1 2 3 4 5; do cp $I/a.go $T/go/a$i.go; done",
        measured: "gofmt -w $T/go",
        right: "test -z \"$(gofmt -l $T/go)\"",
        takes_library: false,
        ..row("gofmt", "gofmt -w, a static program", &["gofmt"])
    },
    Row {
        before: "mkdir $T/node",
        measured: "node $I/files.js $T/node",
        right: "test $(ls $T/node | wc -l) = 500",
        ..row("node", "node, 500 files", &["node"])
    },
    Row {
        measured: "dd if=/dev/zero of=$T/large bs=1M count=256 status=none; dd if=$T/large of=/dev/null bs=1M status=none",
        right: "test $(stat -c %s $T/large) = 268435456",
        ..row("dd", "dd of 256 MiB, and back", &["dd"])
    },
    Row {
        measured: "python3 -m venv --without-pip $T/venv",
        right: "$T/venv/bin/python -c 'import os'",
        ..row("venv", "python3 -m venv", &["python3"])
    },
];
