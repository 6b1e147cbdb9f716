//! Programs as they are, under `hearth run`: working directory in the tree, paths relative and absolute. Each test
//! is one subject; it ends at the first step that does not do what it does on a file system of the kernel's.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node};

/// Runs a bash script in the tree, which is `$T`; every step of it must succeed.
fn in_tree(script: &str) -> String {
    let node = Node::up();
    let printed = run(&node, script);
    node.hearth(&["down"]).expect_success();
    node.check();
    printed
}

fn run(node: &Node, script: &str) -> String {
    let script = format!("export T={} LC_ALL=C; cd $T\n{script}", node.path(""));
    node.hearth(&["run", "--", "bash", "-eo", "pipefail", "-c", &script]).expect_success()
}

/// The system's own: another one may lie in front of it, which is a script of its own.
const PYTHON: &str = "/usr/bin/python3 -";

#[test]
fn shells_redirect_append_and_share_offsets() {
    let printed = in_tree(
        "echo b > b; (echo a; cat b; echo c) > shared; { echo 1; sh -c 'echo 2'; echo 3; } > nested
        cat > here <<X\none\ntwo\nX
        for i in 1 2 3; do echo $i >> appended; done
        (read first; read second; echo $first$second; cat) < shared > rest
        exec 3<>both; echo hello >&3; exec 3>&-; read word < both; exec 5>>both; sh -c 'echo more >&5'
        seq 20000 | tee up | sort -rn > down; sort -n down | cmp - up
        tr -d '\\n' < shared; tr -d '\\n' < nested
        tr -d '\\n' < appended; tr -d '\\n' < rest; wc -l < both; wc -l < here",
    );
    assert_eq!(printed, "abc123123abc2\n2\n");
}

#[test]
fn the_root_and_other_directories_are_inherited_as_working_directory() {
    let printed = in_tree(
        "mkdir -p a/b; echo x > a/b/f; sh -c 'cat a/b/f; [ \"$(pwd)/\" = $T ]'
        cd a/b; sh -c 'cat f; cat ../b/f; cat $T/a/b/f; [ \"$(pwd)\" = ${T}a/b ]'
        (cd ../..; ls); exec 7< $T; bash -c 'ls /proc/self/fd/7/ > /dev/null || true'",
    );
    assert_eq!(printed, "x\nx\nx\nx\na\n");
}

#[test]
fn trees_are_copied_compared_archived_and_removed() {
    let printed = in_tree(
        "mkdir -p tree/deep/er; seq 3000 > tree/numbers; echo hi > tree/deep/er/f; ln tree/numbers tree/hard
        ln -s ../numbers tree/deep/soft
        ln -s /nowhere tree/dangling; : > 'tree/sp ace'; chmod 4711 tree/deep/er/f
        touch -d '2001-02-03 04:05:06.123456789' tree/numbers
        cp -a tree one; tar czf t.tgz tree; mkdir two; tar xzpf t.tgz -C two; rsync -aH tree/ three/
        (cd tree; find . -depth -print0 | cpio -0pdm --quiet $T/four)
        for copy in one two/tree three four; do
            diff -r --no-dereference tree $copy
            [ \"$(stat -c '%h %Y' $copy/hard)\" = \"$(stat -c '%h %Y' tree/hard)\" ]
            [ $(stat -c %a $copy/deep/er/f) = 4711 ]; [ $(readlink $copy/dangling) = /nowhere ]
        done
        [ -z \"$(rsync -aHi tree/ three/)\" ]
        [ \"$(stat -c %y one/hard)\" = \"$(stat -c %y tree/hard)\" ]
        mv one two/moved; diff -r --no-dereference tree two/moved
        grep -r hi $T/tree; find . -name f -print0 | xargs -0 cat | wc -l
        rm -r tree two three four t.tgz; ls -A",
    );
    assert!(printed.ends_with("/tree/deep/er/f:hi\n5\n"), "{printed}");
}

#[test]
fn git_keeps_a_history() {
    let printed = in_tree(
        "export HOME=$T GIT_CONFIG_NOSYSTEM=1; git init -q -b main g; cd g
        git config user.email a@example.com; git config user.name a
        for i in 1 2 3; do echo $i >> f; mkdir -p d$i; echo $i > d$i/f; git add .; git commit -qm $i; done
        git gc -q; git fsck --strict; git checkout -q -b other HEAD~1; git merge -q main
        git clone -q . ../copy; diff -r -x .git . ../copy; rm f; git checkout -q f; git status --porcelain
        git log --oneline | wc -l",
    );
    assert_eq!(printed, "3\n");
}

#[test]
fn c_programs_are_made_and_run_from_the_tree() {
    let printed = in_tree(
        r#"mkdir p; cd p; printf '#include <stdio.h>\nint f(void); int main() { printf("%%d\\n", f()); }\n' > m.c
        echo 'int f(void) { return 42; }' > f.c
        printf 'prog: m.o lib.a\n\tcc -o $@ m.o lib.a\n' > Makefile
        printf 'lib.a: f.o\n\tar rcs $@ f.o\n%%.o: %%.c\n\tcc -g -c -o $@ $<\n' >> Makefile
        make -s -j2; make -q; ./prog; ${T}p/prog
        printf '#!/bin/sh\necho script $1\n' > s; chmod +x s; ./s a"#,
    );
    assert_eq!(printed, "42\n42\nscript a\n");
}

#[test]
fn python_databases_temporary_files_and_processes() {
    let printed = in_tree(&format!(
        r#"{PYTHON} <<'X'
import multiprocessing, os, shutil, sqlite3, subprocess, tempfile
base = sqlite3.connect("rows.db"); base.execute("create table t(a, b)")
base.executemany("insert into t values(?, ?)", [(i, "x" * 100) for i in range(200)])
base.commit(); base.execute("vacuum"); print(base.execute("pragma integrity_check").fetchone()[0])
tempfile.tempdir = os.environ["T"]
with tempfile.TemporaryFile() as file: file.write(b"abc"); file.seek(0); assert file.read() == b"abc"
with tempfile.TemporaryDirectory() as d:
    os.makedirs(d + "/a/b"); shutil.copy2("rows.db", d + "/a/b"); shutil.copytree(d, "copy")
assert not os.path.exists(d); assert os.listdir("copy/a/b") == ["rows.db"]; shutil.rmtree("copy")
with open("lines", "w", buffering=1) as lines:
    work = lambda: [lines.write(f"{{os.getpid()}} {{i}}\n") for i in range(50)]
    workers = [multiprocessing.Process(target=work) for _ in range(3)]
    [w.start() for w in workers]; [w.join() for w in workers]
print(len(open("lines").readlines()))
with open("out", "w") as out:
    subprocess.check_call(["echo", "a"], stdout=out)
    subprocess.check_call(["sh", "-c", "echo b"], stdout=out); out.write("c")
print(open("out").read())
X
"#
    ));
    assert_eq!(printed, "ok\n150\na\nb\nc\n");
}

#[test]
fn small_tools_work_in_place() {
    let printed = in_tree(
        "printf 'one\\ntwo\\n' > f; sed -i s/one/uno/ f; perl -pi -e s/two/dos/ f; cp f g; echo tres >> g
        (diff -u f g || true) > p; patch -s f p; cmp f g; sort -S 50k -T . -o f f; tail -1 f
        seq 3000 > n; split -l 100 n part_; cat part_* | cmp - n; gzip -k n; zcat n.gz | cmp - n
        dd if=/dev/zero of=d bs=1M count=4 conv=fsync status=none; dd if=n of=d bs=1k seek=7 conv=notrunc status=none
        cp --sparse=always d e; cmp d e; truncate -s 1G e; stat -c %s e; md5sum n f > sums; md5sum -c --quiet sums
        setfattr -n user.x -v y f; getfattr --only-values -n user.x f; echo; install -m 700 f i; stat -c %a i",
    );
    assert_eq!(printed, "uno\n1073741824\ny\n700\n");
}

#[test]
fn thousands_of_names_in_one_directory() {
    let printed = in_tree(
        "mkdir m; cd m; seq 3000 | xargs touch; ls | wc -l; seq 2 2 3000 | xargs rm; ls | wc -l; rm -r $T/m; ls $T",
    );
    assert_eq!(printed, "3000\n1500\n");
}

#[test]
fn rocksdb_writes_and_reads() {
    let printed = in_tree(
        "mkdir r; db_bench --db=r/db --benchmarks=fillsync,fillrandom,readrandom --num=2000 --compression_type=none 2>&1",
    );
    for name in ["fillsync", "fillrandom", "readrandom"] {
        assert!(
            printed.lines().any(|line| line.starts_with(name) && line.contains("micros/op")),
            "{printed}"
        );
    }
}

/// By design: a mapping that writes for others to see is refused with ENODEV, and a pipe is not opened.
#[test]
fn what_is_refused_is_refused_loudly() {
    let printed = in_tree(&format!(
        r#"mkfifo pipe; [ -p pipe ]; ! cat pipe 2> why; grep -c 'not supported' why
        {PYTHON} <<'X'
import errno, mmap, os
fd = os.open("f", os.O_RDWR | os.O_CREAT); os.write(fd, b"x" * 5000)
assert mmap.mmap(fd, 5000, flags=mmap.MAP_PRIVATE)[4999] == ord("x")
try: mmap.mmap(fd, 5000); print("mapped")
except OSError as why: print(errno.errorcode[why.errno])
X
"#
    ));
    assert_eq!(printed, "1\nENODEV\n");
}
