//! Failures: a request that panics, a server that is killed, a mount that is removed by force.

use crate::child::Process;
use crate::{Mount, errno};
use gateway::{Options, serve};
use ipc::{Host, SystemHost};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vfs::Model;
use vfs::model::Limits;

/// Serves an empty model, if possible also for other users.
pub fn serve_until_the_end(mountpoint: &Path, end: impl FnOnce()) {
    let other_users = rustix::process::geteuid().is_root();
    let options = Options { other_users, ..Options::default() };
    let model = Arc::new(Model::new(Arc::new(|| SystemHost.wall()), Limits::default()));
    let mounted = serve(model, Arc::new(SystemHost), mountpoint, &options).unwrap();
    end();
    mounted.unmount().unwrap();
    mounted.wait().unwrap();
}

/// Whether there is a mount at a path.
pub fn is_mount(path: &Path) -> bool {
    fs::metadata(path).unwrap().dev() != fs::metadata(path.parent().unwrap()).unwrap().dev()
}

#[test]
fn a_panic_is_an_error_of_one_request() {
    let Some(mount) = Mount::new() else { return };
    fs::write(mount.path("before"), b"kept").unwrap();
    for _ in 0..20 {
        mount.breaks.store(true, Ordering::Relaxed);
        assert_eq!(errno(fs::create_dir(mount.path("folder"))), libc::EIO);
        assert_eq!(fs::read(mount.path("before")).unwrap(), b"kept");
        fs::create_dir(mount.path("folder")).unwrap();
        fs::remove_dir(mount.path("folder")).unwrap();
    }
}

#[test]
fn a_mount_whose_server_was_killed_is_unmounted_or_mounted_anew() {
    if !crate::can_mount() {
        return;
    }
    let _alone = crate::ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let serve_and_die = || {
        let mut server = Process::start("serve", folder.path());
        server.said("serves");
        let mut open = File::create(folder.path().join("file")).unwrap();
        open.write_all(b"before").unwrap();
        server.killed_by(Signal::KILL);
        assert_eq!(errno(open.write_all(b"after")), libc::ENOTCONN);
        assert_eq!(errno(fs::metadata(folder.path())), libc::ENOTCONN);
    };
    serve_and_die();
    rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    assert!(!is_mount(folder.path()));
    serve_and_die();
    let mut server = Process::start("serve", folder.path());
    server.said("serves");
    fs::write(folder.path().join("file"), b"new").unwrap();
    server.finish();
    assert!(!is_mount(folder.path()));
}

#[test]
fn a_mount_in_use_is_taken_away_and_the_engine_gets_everything_back() {
    let Some(mount) = Mount::new() else { return };
    fs::create_dir(mount.path("folder")).unwrap();
    let path = mount.path("folder/file");
    let mut file = File::options().create_new(true).read(true).write(true).open(path).unwrap();
    file.write_all(b"text").unwrap();
    fs::remove_file(mount.path("folder/file")).unwrap();
    assert_eq!(mount.inodes(), 3, "it lives while it is open");
    mount.mounted.unmount().unwrap();
    mount.mounted.wait().unwrap();
    assert_eq!(errno(file.read(&mut [0; 8])), libc::ENOTCONN);
    assert_eq!(mount.inodes(), 2, "nothing keeps it any more");
    mount.mounted.unmount().unwrap();
    assert!(!is_mount(mount.folder.path()));
    let again = serve(mount.model.clone(), Arc::new(SystemHost), mount.folder.path(), &Options::default());
    let again = again.unwrap();
    assert!(mount.path("folder").is_dir());
    mount.mounted.unmount().unwrap();
    assert!(mount.path("folder").is_dir(), "one mount does not unmount another");
    again.unmount().unwrap();
    again.wait().unwrap();
}
