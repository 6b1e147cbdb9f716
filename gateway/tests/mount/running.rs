//! Programs that are being executed: the kernel refuses to change them, and to execute a file that is open for writing.
//! The gateway must have changed nothing by then.

use crate::{Mount, errno};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A copy of `cat`, which runs until its input ends.
fn program(mount: &Mount) -> std::path::PathBuf {
    let path = mount.path("program");
    // Copied by a child process: otherwise a process that is being started for another test would have the copy open for
    // writing.
    assert!(Command::new("cp").args(["-L", "/bin/cat"]).arg(&path).status().unwrap().success());
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

fn start(path: &Path) -> Child {
    Command::new(path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

/// Lets the program end; fails if it did not run to its end.
fn ends(mut program: Child) {
    drop(program.stdin.take());
    assert!(program.wait().unwrap().success());
}

#[test]
fn a_running_program_is_neither_opened_for_writing_nor_truncated() {
    let Some(mount) = Mount::new() else { return };
    let path = program(&mount);
    let alias = mount.path("alias");
    fs::hard_link(&path, &alias).unwrap();
    let contents = fs::read(&path).unwrap();
    let running = start(&path);
    let write = libc::O_WRONLY;
    let truncate = libc::O_TRUNC;
    for path in [&path, &alias] {
        for flags in [
            write,
            libc::O_RDWR,
            write | libc::O_APPEND,
            write | truncate,
            truncate,
            truncate | libc::O_CREAT,
        ] {
            // The standard library does not open with O_TRUNC for reading only.
            let opened =
                rustix::fs::open(path, rustix::fs::OFlags::from_bits_retain(flags as u32), 0o644.into());
            assert_eq!(opened.err().map(|error| error.raw_os_error()), Some(libc::ETXTBSY), "{flags:#o}");
        }
        let cut = Command::new("truncate").args(["-s", "5"]).arg(path).stderr(Stdio::null()).status();
        assert!(!cut.unwrap().success());
    }
    assert!(fs::read(&path).unwrap() == contents, "nothing was changed");
    ends(running);
    File::options().read(true).custom_flags(truncate).open(&path).unwrap();
    assert_eq!(fs::metadata(&alias).unwrap().len(), 0, "the program has ended");
}

#[test]
fn a_file_that_is_open_for_writing_is_not_executed() {
    let Some(mount) = Mount::new() else { return };
    let path = program(&mount);
    let script = mount.path("script");
    fs::write(&script, "#!/bin/sh\nread line\n").unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    for path in [&path, &script] {
        let writer = File::options().write(true).open(path).unwrap();
        assert_eq!(errno(Command::new(path).spawn()), libc::ETXTBSY);
        drop(writer);
    }
    ends(start(&path));
    // A script is read like any other file, so it may be changed while its interpreter runs.
    let mut running = start(&script);
    File::options().write(true).truncate(true).open(&script).unwrap();
    running.kill().unwrap();
    running.wait().unwrap();
}
