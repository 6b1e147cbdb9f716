//! A pool on a disk that becomes full: programs are told, acknowledged data stays, and all goes on when there is space again.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use rustix::io::Errno;

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

/// The pool has room, what it lies on has none for the log of one more program.
#[test]
fn a_program_that_finds_no_space_for_its_log_is_told() {
    let script = "set -e
        $hearth up --no-mount --dir $disk/c --medium memory --capacity 16 >/dev/null
        $hearth run --dir $disk/c -- sh -c \"echo kept > $disk/c/n1/kept\"
        # Its log's room is not there for the next one.
        until $hearth status --dir $disk/c --json | tr -d ' \\n' | grep -qF '\"programs\":[]'; do :; done
        mkfifo $disk/never
        dd if=/dev/zero of=$disk/full bs=4096 2>/dev/null || true
        # Those whose logs were ready stay; one that finds none is told, and ends.
        for program in 1 2 3 4; do
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

/// The medium of the pool is full before the pool is: no acknowledged data is given up, and with more space all of it
/// is there.
#[test]
fn a_full_disk_under_the_pool_costs_nothing_acknowledged() {
    let script = r#"
        $hearth up --no-mount --dir $disk/c --medium memory --capacity 256 >/dev/null
        $hearth run --dir $disk/c -- /usr/bin/python3 - $disk/c/n1 <<'X' &
import os, sys
for number in range(400):
    try:
        file = os.open('%s/f%d' % (sys.argv[1], number), os.O_CREAT | os.O_WRONLY)
        left = bytes([number % 251]) * (1 << 20)
        while left: left = left[os.write(file, left):]
    except OSError as why: sys.exit('errno %d' % why.errno)
    print(number, file=open('/dev/stderr', 'w'))
X
        until $hearth status --dir $disk/c | grep -o -m 1 'no space on the medium'; do :; done
        # Whether the program finds it or the daemon, the program is told, before the daemon is given up.
        wait $! || true
        mount -o remount,size=500m $disk
        $hearth start --dir $disk/c >/dev/null
        $hearth run --dir $disk/c -- /usr/bin/python3 - $disk/c/n1 <<'X'
import os, sys
for number in range(400):
    try: data = open('%s/f%d' % (sys.argv[1], number), 'rb').read()
    except FileNotFoundError: break
    if data != bytes([number % 251]) * (1 << 20): break
print(number)
X
        $hearth status --dir $disk/c --json | grep -c 'Cut'
        "#;
    let Some(output) = on_a_small_disk("150m", script) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    let acknowledged = said.lines().filter(|line| line.parse::<u32>().is_ok()).count();
    let found: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    assert!((20..200).contains(&acknowledged), "{acknowledged}: {said}");
    assert!(said.contains(&format!("errno {}\n", Errno::NOSPC.raw_os_error())), "{said}");
    let [full, whole, cuts] = &found[..] else { panic!("{found:?}\n{said}") };
    assert_eq!((full.as_str(), cuts.as_str()), ("no space on the medium", "0"));
    assert!(whole.parse::<usize>().unwrap() >= acknowledged, "{whole} of {acknowledged}");
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

/// A node that is down is started on a disk that became full: the command says how much space is needed.
#[test]
fn a_start_on_a_full_disk_says_how_much_space_it_needs() {
    let script = "
        $hearth up --no-mount --dir $disk/c --capacity 16 >/dev/null || exit 1
        $hearth run --dir $disk/c -- sh -c \"echo 1 > $disk/c/n1/one; echo 2 > $disk/c/n1/two\" || exit 2
        $hearth down --dir $disk/c >/dev/null || exit 3
        dd if=/dev/zero of=$disk/full bs=4096 2>/dev/null
        $hearth start --dir $disk/c && exit 4
        truncate -s -4M $disk/full
        $hearth start --dir $disk/c >/dev/null || exit 5
        $hearth run --dir $disk/c -- rm $disk/c/n1/one || exit 6
        $hearth run --dir $disk/c -- cat $disk/c/n1/two";
    let Some(output) = on_a_small_disk("80m", script) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2\n");
    assert!(said.contains("is full: with 4 MiB free there the node starts"), "{said}");
}
