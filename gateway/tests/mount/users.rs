//! Several users on one mount.

use crate::child::Process;
use crate::{Mount, as_user, errno};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const ALICE: u32 = 12_001;
const BOB: u32 = 12_002;
const TEAM: u32 = 12_100;
/// `fusermount3` wants a user with a name.
const NOBODY: u32 = 65_534;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn each_user_gets_what_the_mode_gives_him() {
    let Some(mount) = Mount::new() else { return };
    set_mode(&mount.path(""), 0o1777);
    let (file, folder) = (mount.path("file"), mount.path("folder"));
    as_user(ALICE, &[], || {
        fs::write(&file, b"alice's").unwrap();
        set_mode(&file, 0o600);
        fs::create_dir(&folder).unwrap();
        set_mode(&folder, 0o700);
        fs::write(folder.join("inner"), b"inner").unwrap();
    });
    let owner = fs::metadata(&file).unwrap();
    assert_eq!((owner.uid(), owner.gid()), (ALICE, ALICE));
    as_user(BOB, &[], || {
        assert_eq!(errno(fs::read(&file)), libc::EACCES);
        assert_eq!(errno(fs::write(&file, b"bob's")), libc::EACCES);
        assert_eq!(errno(fs::metadata(folder.join("inner"))), libc::EACCES);
        assert_eq!(errno(fs::set_permissions(&file, Permissions::from_mode(0o666))), libc::EPERM);
        assert_eq!(errno(fs::remove_file(&file)), libc::EPERM, "the folder is sticky");
        assert_eq!(errno(std::env::set_current_dir(&folder)), libc::EACCES);
    });
    let mut other = Process::start_as(BOB, "append", &file);
    assert!(!other.ends(), "a process of another user cannot open it");
    let kept = as_user(ALICE, &[], || File::options().write(true).open(&file).unwrap());
    set_mode(&file, 0o000);
    as_user(BOB, &[], || {
        use std::io::Write;
        (&kept).write_all(b"by right of the opening").unwrap();
        assert_eq!(errno(kept.set_len(3)), 0, "so may the size");
    });
    assert_eq!(fs::read(&file).unwrap(), b"by ");
}

#[test]
fn groups_count_as_they_are_at_each_request() {
    let Some(mount) = Mount::new() else { return };
    let file = mount.path("file");
    fs::write(&file, b"the team's").unwrap();
    chown(&file, Some(0), Some(TEAM)).unwrap();
    set_mode(&file, 0o640);
    for round in 0..3 {
        as_user(ALICE, &[7, TEAM], || assert_eq!(fs::read(&file).unwrap(), b"the team's", "{round}"));
        // The same thread, a moment later, without groups.
        as_user(ALICE, &[7], || assert_eq!(errno(fs::read(&file)), libc::EACCES, "{round}"));
    }
    as_user(ALICE, &[TEAM], || {
        assert_eq!(errno(chown(&file, None, Some(TEAM))), libc::EPERM);
    });
    chown(&file, Some(ALICE), None).unwrap();
    as_user(ALICE, &[], || assert_eq!(errno(chown(&file, None, Some(TEAM + 1))), libc::EPERM));
    as_user(ALICE, &[TEAM + 1], || assert_eq!(errno(chown(&file, None, Some(TEAM + 1))), 0));
}

#[test]
fn a_foreign_write_or_chown_clears_set_id_bits() {
    let Some(mount) = Mount::new() else { return };
    let file = mount.path("file");
    fs::write(&file, b"x").unwrap();
    chown(&file, Some(ALICE), Some(ALICE)).unwrap();
    let mode = || fs::metadata(&file).unwrap().mode() & 0o7777;
    set_mode(&file, 0o6777);
    as_user(BOB, &[], || {
        use std::io::Write;
        File::options().write(true).open(&file).unwrap().write_all(b"y").unwrap();
    });
    assert_eq!(mode(), 0o777);
    set_mode(&file, 0o6777);
    as_user(BOB, &[], || File::options().write(true).truncate(true).open(&file).map(drop).unwrap());
    assert_eq!(mode(), 0o777);
    set_mode(&file, 0o6755);
    as_user(ALICE, &[], || chown(&file, None, None).unwrap());
    assert_eq!(mode(), 0o755, "a chown to nobody is one too");
}

#[test]
fn pipes_and_sockets_are_closed_to_who_may_not_use_them() {
    let Some(mount) = Mount::new() else { return };
    set_mode(&mount.path(""), 0o755);
    let (pipe, socket) = (mount.path("pipe"), mount.path("socket"));
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    set_mode(&socket, 0o600);
    let opens = || errno(File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe));
    assert_eq!((opens(), errno(UnixStream::connect(&socket))), (0, 0));
    as_user(BOB, &[], || {
        assert_eq!((opens(), errno(UnixStream::connect(&socket))), (libc::EACCES, libc::EACCES));
    });
}

#[test]
fn a_program_is_run_by_who_may_execute_it() {
    let Some(mount) = Mount::new() else { return };
    let program = mount.path("program");
    fs::copy("/bin/true", &program).unwrap();
    let run = |mode| {
        set_mode(&program, mode);
        let mut command = Command::new(&program);
        errno(command.uid(BOB).gid(BOB).status().map(|status| assert!(status.success())))
    };
    assert_eq!(run(0o755), 0);
    assert_eq!(run(0o711), 0, "who may execute need not read");
    assert_eq!(run(0o744), libc::EACCES);
}

/// Opens the device to all users, for this thread and the processes that it starts, as Debian does with udev.
fn open_device_to_everybody() {
    const DEVICE: &str = "/dev/fuse";
    if as_user(NOBODY, &[], || File::open(DEVICE).is_ok()) {
        return;
    }
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
    // The mounts of other tests would not end while they exist in this namespace too.
    for line in fs::read_to_string("/proc/thread-self/mounts").unwrap().lines() {
        if let [_, path, kind, ..] = line.split(' ').collect::<Vec<_>>()[..]
            && (kind == "fuse" || kind.starts_with("fuse."))
        {
            // A mount whose folder was removed meanwhile is gone.
            match unmount(path, UnmountFlags::DETACH) {
                Ok(()) | Err(Errno::NOENT | Errno::INVAL) => {}
                Err(error) => panic!("{path}: {error}"),
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let device = folder.path().join("fuse");
    mount("none", folder.path(), "tmpfs", MountFlags::empty(), None).unwrap();
    let number = fs::metadata(DEVICE).unwrap().rdev();
    mknodat(CWD, &device, FileType::CharacterDevice, Mode::empty(), number).unwrap();
    set_mode(&device, 0o666);
    mount_bind(&device, DEVICE).unwrap();
    unmount(folder.path(), UnmountFlags::DETACH).unwrap();
}

#[test]
fn who_is_not_root_mounts_for_himself() {
    if !crate::can_mount() {
        return;
    }
    if !Path::new("/usr/bin/fusermount3").exists() {
        println!("skipped: needs fusermount3");
        return;
    }
    open_device_to_everybody();
    let _alone = crate::ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let mut server = Process::start_as(NOBODY, "serve", folder.path());
    server.said("serves");
    assert_eq!(errno(fs::metadata(folder.path())), libc::EACCES, "not even for root");
    let looks = |script| {
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh"]).arg(folder.path()).uid(NOBODY).gid(NOBODY);
        shell.status().unwrap().success()
    };
    assert!(looks("mountpoint -q $1 && test -z \"$(ls -A $1)\""));
    // The model's root belongs to root and is not writable for others.
    assert!(!looks("echo x 2>/dev/null >$1/file"));
    server.finish();
    assert!(!looks("mountpoint -q $1"));
}
