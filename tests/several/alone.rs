//! A mount namespace for one test, in which it and all processes that it starts see file systems that no other process
//! sees.

use crate::harness::limited;
use std::process::{Command, Stdio};

/// Set where the test runs in it.
const INSIDE: &str = "HEARTH_TEST_NAMESPACE";
/// Seconds that the test may take in it.
const LIMIT_S: &str = "7200";
/// Mounts are private, also where the root is no mount point, as in a folder that was changed into. Files that the test
/// leaves in memory go with the namespace.
const SCRIPT: &str = "mount --make-rprivate / 2>/dev/null || mount --make-rprivate /dev/shm || exit 1
    mount -t tmpfs none /dev/shm && exec \"$0\" \"$@\"";

/// Runs a test of this binary again in a namespace of its own; true in there, where the caller goes on.
pub fn in_own_namespace(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return false;
    }
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", LIMIT_S, "unshare", "-m", "--propagation", "unchanged"]);
    command.args(["bash", "-c", SCRIPT]).arg(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    let done = command.env(INSIDE, "1").stdin(Stdio::null()).output().unwrap();
    print!("{}", String::from_utf8_lossy(&done.stdout));
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{test}: {}", done.status);
    false
}

/// A file system in memory of so many MiB takes the place of a folder, with what is in it.
pub fn give_own_disk(folder: &str, mib: u64) {
    let aside = format!("{folder}.aside");
    let run = |program: &[&str]| {
        let done = limited(program, &[]);
        assert!(done.status.success(), "{program:?}: {done:?}");
    };
    run(&["cp", "-a", folder, &aside]);
    run(&["mount", "-t", "tmpfs", "-o", &format!("size={mib}m,mode=711"), "none", folder]);
    run(&["cp", "-a", &format!("{aside}/."), folder]);
    run(&["rm", "-r", &aside]);
}
