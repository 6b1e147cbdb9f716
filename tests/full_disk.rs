//! A pool on a disk or in a memory that becomes full: writes that need new space fail, everything else goes on, no daemon ends,
//! acknowledged data stays, and the space is used again when there is some.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

/// Runs a script with a small disk of its own at `$disk`, in memory, and the program as `$hearth`; none if that needs
/// root. A cluster in `$disk/c` is taken down afterwards.
fn on_a_small_disk(size: &str, script: &str) -> Option<std::process::Output> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let script = format!(
        // Ours alone, also where the root is no mount point, as in a folder that was changed into.
        "hearth={} disk={}\nmount --make-rprivate / 2>/dev/null || mount --make-rprivate /dev/shm || exit 1\n\
         mount -t tmpfs -o size={size} none $disk\n\
         trap '$hearth down --dir $disk/c --hard >/dev/null 2>&1' EXIT\n{script}",
        env!("CARGO_BIN_EXE_hearth"),
        folder.path().display()
    );
    Some(harness::limited(&["unshare", "-m", "--propagation", "unchanged", "bash", "-c", &script], &[]))
}

/// The same with the cluster in `$disk/c`, which has all space that it needs, and a small memory in place of `/dev/shm`, where the
/// pools are. Functions of the script: `up`, `fill` (another program takes all memory), `lead` (the node that leads, waited for),
/// `daemon` (its process), `run` (a program at that node, with the tree as `$T`), `says` (waits for words of the status), `begun` (waits until
/// files are noted).
fn in_a_small_memory(size: &str, script: &str) -> Option<std::process::Output> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let script = format!(
        r#"hearth={} disk={} shm=/dev/shm
        mount --make-rprivate / 2>/dev/null || mount --make-rprivate $shm || exit 1
        mount -t tmpfs -o size={size} none $shm
        trap '$hearth down --dir $disk/c --hard >/dev/null 2>&1' EXIT
        up() {{ $hearth up --no-mount --dir $disk/c --medium memory "$@" >$disk/up || exit 90; cat $disk/up >&2; }}
        # The log of a program that has just ended may give back its space meanwhile.
        fill() {{ until dd if=/dev/zero bs=4096 >> $shm/filler 2>/dev/null; [ $(stat -f -c %a $shm) = 0 ]; do :; done; }}
        lead() {{
            until $hearth status --dir $disk/c --json > $disk/json; $python - $disk/json <<'X'
import json, sys
for node in json.load(open(sys.argv[1])):
    if node.get('state') in ('up', 'degraded') and (node.get('chain') or {{'role': 'leads'}}).get('role') == 'leads':
        print(node['node']); sys.exit(0)
sys.exit(1)
X
            do :; done
        }}
        daemon() {{ read pid rest < $disk/c/node-$1/serve.pid; echo $pid; }}
        run() {{ local n=$(lead); T=$disk/c/n$n $hearth run --dir $disk/c --node $n -- "$@"; }}
        says() {{ until $hearth status --dir $disk/c | grep -q "$1"; do :; done; }}
        begun() {{ until [ $(wc -l < $disk/noted) -gt 30 ]; do kill -0 $1 || exit 92; done; }}
        python=/usr/bin/python3
        : > $disk/noted
{WORKER}{script}"#,
        env!("CARGO_BIN_EXE_hearth"),
        folder.path().display()
    );
    Some(harness::limited(&["unshare", "-m", "--propagation", "unchanged", "bash", "-c", &script], &[]))
}

/// Files for the scripts: `fills` writes files and syncs each, until there is no space; then it does what needs none. `judges` finds
/// all that was synced, and does the same. `grows` writes until it has written so many MiB.
const WORKER: &str = r#"
        cat > $disk/common.py <<'X'
import errno, os, sys, time
root, noted = os.environ['T'], sys.argv[1]
def data(name): return (name.encode() * 70000)[:65536]
def path(name): return root + '/' + name
def put(name):
    file = os.open(path(name), os.O_CREAT | os.O_WRONLY)
    try:
        left = data(name)
        while left: left = left[os.write(file, left):]
        os.fsync(file)
    finally: os.close(file)
def note(line):
    with open(noted, 'a') as file: file.write(line + '\n')
def needs_nothing(name, other, gone):
    file = os.open(path(name), os.O_RDWR)
    assert os.pwrite(file, data(name)[:8192], 0) == 8192
    os.fsync(file)
    os.close(file)
    os.rename(path(other), path('moved')); os.rename(path('moved'), path(other))
    os.unlink(path(gone))
    note('gone ' + gone)
def names():
    lines = [line.split() for line in open(noted)]
    gone = {line[1] for line in lines if line[0] == 'gone'}
    return [line[1] for line in lines if line[0] == 'synced' and line[1] not in gone]
X
        cat > $disk/fills.py <<'X'
from common import *
try:
    for number in range(100000):
        put('f%d' % number)
        note('synced f%d' % number)
        time.sleep(0.002)
except OSError as why: assert why.errno == errno.ENOSPC, why
else: sys.exit('it was never full')
files = names()
needs_nothing(*files[:3])
print('goes on', flush=True)
X
        cat > $disk/judges.py <<'X'
from common import *
files = names()
for name in files: assert open(path(name), 'rb').read() == data(name), name
needs_nothing(*files[:3])
print('all is there', flush=True)
X
        cat > $disk/grows.py <<'X'
from common import *
until = time.monotonic() + 60
for number in range(int(sys.argv[2]) * 16):
    while True:
        try: put('g%d' % number); break
        except OSError as why:
            assert why.errno == errno.ENOSPC and time.monotonic() < until, (number, why)
            time.sleep(0.02)
print('grew', flush=True)
X
"#;

/// Where the script went through; each line is what it printed.
fn went_through(output: &std::process::Output, lines: &[&str]) {
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{:?}: {printed}\n{said}", output.status);
    assert_eq!(printed.lines().collect::<Vec<_>>(), lines, "{said}");
}

/// Another program fills the memory in which the pool is, down to the last byte, while programs write. Writes fail, nothing else
/// does, the daemon lives, and starts again; with space all goes on.
#[test]
fn a_memory_that_another_program_fills_costs_new_space_only() {
    let script = r#"
        up --capacity 512 2>$disk/warned
        grep -q 'may hold 512 MiB of data (--capacity), and its file system has [34][0-9][0-9] MiB for it' $disk/warned || exit 2
        run $python $disk/fills.py $disk/noted & fills=$!
        begun $fills
        fill
        wait $fills || exit 1
        fill
        says 'the medium of its pool .* is full' || exit 3
        # A daemon that is killed, and one that is started.
        before=$(daemon 1); kill -9 $before
        until [ "$(daemon 1)" != $before ] && $hearth status --dir $disk/c | grep -q 'died 1 time'; do :; done
        run $python $disk/judges.py $disk/noted || exit 4
        $hearth down --dir $disk/c >/dev/null || exit 5
        fill
        $hearth start --dir $disk/c >/dev/null || exit 6
        run $python $disk/judges.py $disk/noted || exit 7
        $hearth status --dir $disk/c | grep -qE 'died|LOST|FAILED' && exit 8
        rm $shm/filler
        run $python $disk/grows.py $disk/noted 20 || exit 9
        run $python $disk/judges.py $disk/noted || exit 10
        $hearth down --dir $disk/c >/dev/null
        $hearth check $shm/hearth-* >/dev/null || exit 11"#;
    let Some(output) = in_a_small_memory("400m", script) else { return };
    went_through(&output, &["goes on", "all is there", "all is there", "grew", "all is there"]);
}

/// Two nodes are in that memory. The copy may leave, because its space ends first.
#[test]
fn a_memory_that_is_filled_under_two_nodes_ends_neither() {
    let script = r#"
        up --nodes 2 --capacity 128
        one=$(daemon 1) two=$(daemon 2)
        run $python $disk/fills.py $disk/noted & fills=$!
        begun $fills
        fill
        wait $fills || exit 1
        run $python $disk/judges.py $disk/noted || exit 2
        [ $(daemon 1) = $one ] && [ $(daemon 2) = $two ] || exit 3
        $hearth down --dir $disk/c >/dev/null || exit 4
        fill
        for node in 1 2; do $hearth start --dir $disk/c --node $node >/dev/null || exit 5; done
        run $python $disk/judges.py $disk/noted || exit 6
        rm $shm/filler
        run $python $disk/grows.py $disk/noted 8 || exit 7
        for node in 1 2; do says 'an fsync is on node 1, 2'; done
        $hearth check --dir $disk/c --against $((3 - $(lead))) >/dev/null || exit 8
        run $python $disk/judges.py $disk/noted || exit 9"#;
    let Some(output) = in_a_small_memory("260m", script) else { return };
    went_through(&output, &["goes on", "all is there", "all is there", "grew", "all is there"]);
}

/// A file that is removed on a full memory makes room for another one.
#[test]
fn removed_files_make_room_on_a_full_memory() {
    let script = r#"
        up --capacity 512
        run $python $disk/grows.py $disk/noted 24 || exit 1
        fill
        run $python $disk/fills.py $disk/noted || exit 2
        run sh -c 'rm $T/g*; for round in 1 2 3; do head -c 4000000 /dev/zero > $T/big || exit 1; rm $T/big; done' || exit 3
        run $python $disk/judges.py $disk/noted || exit 5
        $hearth status --dir $disk/c | grep -qE 'died|LOST|FAILED' && exit 6
        $hearth down --dir $disk/c >/dev/null
        $hearth check $shm/hearth-* >/dev/null || exit 7"#;
    let Some(output) = in_a_small_memory("400m", script) else { return };
    went_through(&output, &["grew", "goes on", "all is there"]);
}

/// The same on a disk, whose file system keeps files in extents and gives space back late.
#[test]
fn a_disk_that_another_program_fills_costs_new_space_only() {
    let script = r#"
        truncate -s 500M $disk/image
        mkfs.ext4 -q -F -b 4096 $disk/image && mkdir $disk/c && mount -o loop $disk/image $disk/c || { echo skipped: no ext4 on a loop device; exit 0; }
        $hearth up --no-mount --dir $disk/c --capacity 256 >/dev/null || exit 1
        run $python $disk/fills.py $disk/noted & fills=$!
        begun $fills
        dd if=/dev/zero of=$disk/c/filler bs=1M 2>/dev/null
        wait $fills || exit 2
        $hearth status --dir $disk/c | grep -qE 'died|LOST|FAILED' && exit 3
        run $python $disk/judges.py $disk/noted || exit 4
        rm $disk/c/filler
        run $python $disk/grows.py $disk/noted 8 || exit 5
        run $python $disk/judges.py $disk/noted || exit 6
        $hearth down --dir $disk/c >/dev/null
        $hearth check $disk/c/node-1/pool >/dev/null || exit 7
        umount $disk/c"#;
    let Some(output) = in_a_small_memory("100m", script) else { return };
    if String::from_utf8_lossy(&output.stdout).starts_with("skipped") {
        println!("skipped: no ext4 on a loop device");
        return;
    }
    went_through(&output, &["goes on", "all is there", "grew", "all is there"]);
}

/// The pool has room, what it lies on has none for the log of one more program than the pool holds space for.
#[test]
fn a_program_that_finds_no_space_for_its_log_is_told() {
    let script = "set -e
        $hearth up --no-mount --dir $disk/c --medium memory --capacity 16 >/dev/null
        $hearth run --dir $disk/c -- sh -c \"echo kept > $disk/c/n1/kept\"
        # Its log's room is not there for the next one.
        until $hearth status --dir $disk/c --json | tr -d ' \\n' | grep -qF '\"programs\":[]'; do :; done
        mkfifo $disk/never
        dd if=/dev/zero of=$disk/full bs=4096 2>/dev/null || true
        # Those whose logs were ready, or find space that is held, stay; one that finds none is told, and ends.
        for program in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
            $hearth run --dir $disk/c -- sh -c \"exec 3< $disk/c/n1/kept && read line < $disk/never\" &
        done
        wait -n || true
        kill $(jobs -p) || true
        wait
        rm $disk/full
        $hearth run --dir $disk/c -- cat $disk/c/n1/kept";
    let Some(output) = on_a_small_disk("100m", script) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("No space left on device"), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "kept\n", "{said}");
}

/// A program fills the pool faster than the daemon digests, on a disk that has little more space than the pool's capacity: its log
/// takes none of what is promised to data, so that the files can be removed again.
#[test]
fn a_log_leaves_the_space_in_which_it_is_digested() {
    let script = "
        $hearth up --no-mount --dir $disk/c --medium memory --capacity 32 >/dev/null
        $hearth run --dir $disk/c -- dd if=/dev/zero of=$disk/c/n1/big bs=64k count=4000 2>/dev/null
        $hearth run --dir $disk/c -- rm $disk/c/n1/big && echo removed
        $hearth run --dir $disk/c -- sh -c \"echo again > $disk/c/n1/small; cat $disk/c/n1/small\"";
    let Some(output) = on_a_small_disk("64m", script) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "removed\nagain\n", "{said}");
}

/// A node that is down is started on a disk that became full, where its folder is, too. Of a pool that holds nothing the command says how
/// much space the start needs.
#[test]
fn a_start_on_a_full_disk_needs_the_space_that_the_pool_holds() {
    let script = "
        $hearth up --no-mount --dir $disk/c --capacity 16 >/dev/null || exit 1
        $hearth run --dir $disk/c -- sh -c \"echo 1 > $disk/c/n1/one; echo 2 > $disk/c/n1/two\" || exit 2
        $hearth down --dir $disk/c >/dev/null || exit 3
        dd if=/dev/zero of=$disk/full bs=4096 2>/dev/null
        $hearth start --dir $disk/c >/dev/null || exit 4
        $hearth run --dir $disk/c -- rm $disk/c/n1/one || exit 5
        $hearth down --dir $disk/c >/dev/null || exit 6
        rm $disk/c/node-1/pool/held
        dd if=/dev/zero of=$disk/more bs=4096 2>/dev/null
        $hearth start --dir $disk/c && exit 7
        truncate -s -16M $disk/full
        $hearth start --dir $disk/c >/dev/null || exit 8
        $hearth run --dir $disk/c -- cat $disk/c/n1/two";
    let Some(output) = on_a_small_disk("80m", script) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2\n");
    assert!(said.contains("is full: with 16 MiB free there the node starts"), "{said}");
}
