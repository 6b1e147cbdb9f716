//! The gateway as programs use it: the model engine on a real mount, used through the kernel by several users and
//! processes. Needs root and `/dev/fuse`.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]
#![forbid(unsafe_code)]

#[path = "../../../vfs/tests/kernel/actor.rs"]
#[allow(dead_code, reason = "the comparison with the model asks for more")]
mod actor;
mod child;
mod failing;
mod files;
mod kept;
mod locks;
mod names;
mod running;
mod users;

use format::record::FileType;
use gateway::{Mounted, Options, serve};
use ipc::SystemHost;
use ipc::{Host, Time};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use vfs::conformance::{CASES, play};
use vfs::model::Limits;
use vfs::{Engine, Model};

/// The umask belongs to the process, and users to its threads, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Time limit for events that happen at once.
const SOON: Duration = Duration::from_secs(20);

/// An empty model on a mount of its own.
struct Mount {
    model: Arc<Model>,
    mounted: Mounted,
    /// The next read of the model's clock panics.
    breaks: Arc<AtomicBool>,
    folder: TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// Whether a mount is possible; prints the reason if not.
fn can_mount() -> bool {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return false;
    }
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: needs /dev/fuse");
        return false;
    }
    true
}

impl Mount {
    fn new() -> Option<Self> {
        Self::with(&Options::default())
    }

    fn with(options: &Options) -> Option<Self> {
        if !can_mount() {
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        let breaks = Arc::new(AtomicBool::new(false));
        let theirs = breaks.clone();
        let clock = move || {
            assert!(!theirs.swap(false, Ordering::Relaxed), "the clock breaks, as it was told to");
            SystemHost.wall()
        };
        let model = Arc::new(Model::new(Arc::new(clock), Limits::default()));
        let folder = tempfile::tempdir().unwrap();
        // Other users must be able to reach the mount.
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mounted = serve(model.clone(), Arc::new(SystemHost), folder.path(), options).unwrap();
        Some(Self { model, mounted, breaks, folder, _alone: alone })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Inodes that the engine keeps.
    fn inodes(&self) -> u64 {
        let space = self.model.statfs().unwrap();
        space.inodes - space.inodes_free
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.mounted.unmount().unwrap();
        self.mounted.wait().unwrap();
    }
}

/// Waits until a condition holds that the kernel meets a little later.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end: Time = SystemHost.now().after(SOON);
    while !holds() {
        assert!(SystemHost.now() < end, "{what}");
        pause(Duration::from_millis(2));
    }
}

/// Waits for a time.
fn pause(span: Duration) {
    let word = ipc::Word::new(0);
    let until = SystemHost.now().after(span);
    while SystemHost.wait(&word, 0, Some(until)) != ipc::Waited::TimedOut {}
}

/// Runs a function as another user, in this thread.
fn as_user<T>(uid: u32, groups: &[u32], act: impl FnOnce() -> T) -> T {
    use rustix::process::{Gid, Uid};
    use rustix::thread;
    let list: Vec<_> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    thread::set_thread_groups(&list).unwrap();
    thread::set_thread_res_gid(None, Gid::from_raw(uid), None).unwrap();
    thread::set_thread_res_uid(None, Uid::from_raw(uid), None).unwrap();
    let result = act();
    thread::set_thread_res_uid(None, Uid::ROOT, None).unwrap();
    thread::set_thread_res_gid(None, Gid::ROOT, None).unwrap();
    thread::set_thread_groups(&[]).unwrap();
    result
}

/// The errno of a failure; 0 for success.
fn errno<T>(result: std::io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap())
}

#[test]
fn the_conformance_table_holds_on_the_mount() {
    let Some(mount) = Mount::new() else { return };
    let mut wrong = Vec::new();
    for (name, text) in CASES {
        let mut kernel = actor::Kernel::at(mount.folder.path().to_str().unwrap());
        if let Err(why) = play(&mut kernel, text) {
            wrong.push(format!("{name}: {why}"));
        }
        kernel.end();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} cases", CASES.len());
    eventually("the root is all that is left", || mount.inodes() == 1);
}

#[test]
fn both_doors_see_each_other_at_once() {
    let Some(mount) = Mount::new() else { return };
    let player = vfs::conformance::Player::new(mount.model.clone()).unwrap();
    let library = player.vfs();
    for round in 0..200 {
        let text = format!("round {round}");
        std::fs::write(mount.path("file"), &text).unwrap();
        let file = library.open(vfs::Place::cwd(b"file"), libc::O_RDWR | libc::O_APPEND, 0).unwrap();
        let mut bytes = [0; 32];
        let count = library.read(&file, &mut [std::io::IoSliceMut::new(&mut bytes)]).unwrap();
        assert_eq!(&bytes[..count], text.as_bytes());
        library.write(&file, &[std::io::IoSlice::new(b", and more")]).unwrap();
        library.close(&file, true);
        assert_eq!(std::fs::metadata(mount.path("file")).unwrap().len(), text.len() as u64 + 10);
        assert_eq!(std::fs::read_to_string(mount.path("file")).unwrap(), text + ", and more");
    }
    let mut ours = std::fs::File::options().append(true).open(mount.path("file")).unwrap();
    let theirs = library.open(vfs::Place::cwd(b"file"), libc::O_RDWR | libc::O_APPEND, 0).unwrap();
    let mut expected = std::fs::read_to_string(mount.path("file")).unwrap();
    for _ in 0..10 {
        ours.write_all(b" ours").unwrap();
        library.write(&theirs, &[std::io::IoSlice::new(b" theirs")]).unwrap();
        expected += " ours theirs";
    }
    library.close(&theirs, true);
    assert_eq!(
        std::fs::read_to_string(mount.path("file")).unwrap(),
        expected,
        "the end is where the engine says"
    );
    for number in 1..20 {
        // The attributes are read before each change, so cached ones would be out of date.
        let before = std::fs::metadata(mount.path("file")).unwrap().len();
        let file = library.open(vfs::Place::cwd(b"file"), libc::O_WRONLY | libc::O_APPEND, 0).unwrap();
        library.write(&file, &[std::io::IoSlice::new(b"!")]).unwrap();
        library.close(&file, true);
        assert_eq!(std::fs::metadata(mount.path("file")).unwrap().len(), before + 1, "{number}");
    }
    library.unlink(vfs::Place::cwd(b"file")).unwrap();
    assert_eq!(errno(std::fs::metadata(mount.path("file"))), libc::ENOENT);
    library.mkdir(vfs::Place::cwd(b"made"), 0o755).unwrap();
    assert!(mount.path("made").is_dir());
    std::fs::remove_dir(mount.path("made")).unwrap();
    let gone = library.stat(vfs::Subject::Path(vfs::Place::cwd(b"made")));
    assert_eq!(gone.err(), Some(vfs::Stop::Failed(vfs::Error::NotFound)));
    let root = mount.model.root().unwrap();
    assert_eq!(root.file_type, FileType::Directory);
    mount.model.forget(&[root.inode]);
    player.end();
}
