//! `/dev/fuse`: mounting and unmounting, with and without root. Root mounts itself; other users need the program
//! `fusermount3`, which is set-user-id and passes the open device on.

use crate::error::Error;
use crate::options::Options;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx, syncfs};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";

/// A mount that this process serves.
pub(crate) struct Device {
    pub(crate) file: File,
    mountpoint: PathBuf,
    /// Device number, which distinguishes it from another mount at the same path.
    pub(crate) number: Option<(u32, u32)>,
}

fn failed(call: &'static str, path: &Path, errno: i32) -> Error {
    Error::System { call, path: path.to_path_buf(), errno }
}

fn io_failed(call: &'static str, path: &Path, error: &std::io::Error) -> Error {
    failed(call, path, error.raw_os_error().unwrap_or(libc::EIO))
}

impl Device {
    /// Mounts. First removes the mount of a gateway that was killed, which is unusable.
    pub(crate) fn mount(mountpoint: &Path, root_mode: u32, options: &Options) -> Result<Self, Error> {
        if let Err(error) = std::fs::metadata(mountpoint)
            && error.raw_os_error() == Some(libc::ENOTCONN)
        {
            unmount_at(mountpoint, UnmountFlags::DETACH)?;
        }
        let path =
            std::fs::canonicalize(mountpoint).map_err(|error| io_failed("realpath", mountpoint, &error))?;
        let file = match Self::mount_as_root(&path, root_mode, options) {
            Err(Error::System { errno: libc::EPERM | libc::EACCES, .. }) => mount_by_helper(&path, options)?,
            result => result?,
        };
        let number = number_at(&path);
        Ok(Self { file, mountpoint: path, number })
    }

    fn mount_as_root(path: &Path, root_mode: u32, options: &Options) -> Result<File, Error> {
        let device = Path::new(DEVICE);
        let opened = OpenOptions::new().read(true).write(true).open(device);
        let file = opened.map_err(|error| io_failed("open", device, &error))?;
        let mut data = format!(
            "fd={},rootmode={root_mode:o},user_id={},group_id={},max_read={}",
            file.as_raw_fd(),
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
            options.message_bytes_max,
        );
        for option in shared_options(options) {
            data.push(',');
            data.push_str(option);
        }
        let data = CString::new(data).expect("no option holds a zero byte");
        let mut flags = MountFlags::empty();
        flags.set(MountFlags::NOSUID, !options.set_ids);
        flags.set(MountFlags::NODEV, !options.devices);
        rustix::mount::mount(&*options.name, path, "fuse.hearth", flags, Some(&*data))
            .map_err(|errno| failed("mount", path, errno.raw_os_error()))?;
        Ok(file)
    }

    /// Unmounts, if this mount is still at its path. If programs use it, `give_up_pages` is called, and then the mount is
    /// removed by force.
    pub(crate) fn unmount(&self, give_up_pages: impl FnOnce()) -> Result<(), Error> {
        if number_at(&self.mountpoint) != self.number {
            return Ok(());
        }
        match unmount_at(&self.mountpoint, UnmountFlags::empty()) {
            Err(Error::System { errno: libc::EBUSY, .. }) => {
                give_up_pages();
                if let Ok(root) = File::open(&self.mountpoint) {
                    // Where the kernel caches nothing under leases, `give_up_pages` does nothing, and this begins to write
                    // mapped pages back; the kernel does not wait for them.
                    let _ = syncfs(&root);
                }
                unmount_at(&self.mountpoint, UnmountFlags::DETACH | UnmountFlags::FORCE)
            }
            result => result,
        }
    }
}

/// Device number of the mount at a path, without a request to its server.
fn number_at(path: &Path) -> Option<(u32, u32)> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor))
}

/// Options with the same names for the kernel and the helper.
fn shared_options(options: &Options) -> impl Iterator<Item = &'static str> {
    let allow_other = options.other_users.then_some("allow_other");
    let kernel_checks = options.kernel_checks.then_some("default_permissions");
    allow_other.into_iter().chain(kernel_checks)
}

/// Unmounts the mount at a path, if it is unused; its gateway ends then. A missing mount is no error.
///
/// # Errors
/// `System` (EBUSY: a program uses it), `Helper`, `HelperMissing`.
pub fn unmount(path: &Path) -> Result<(), Error> {
    unmount_at(path, UnmountFlags::empty())
}

/// Removes a mount whose gateway is gone.
///
/// # Errors
/// `System`, `Helper`, `HelperMissing`.
pub fn detach(path: &Path) -> Result<(), Error> {
    unmount_at(path, UnmountFlags::DETACH)
}

fn unmount_at(path: &Path, flags: UnmountFlags) -> Result<(), Error> {
    match rustix::mount::unmount(path, flags) {
        // The mount is already gone.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(Errno::PERM) => unmount_by_helper(path, flags),
        Err(errno) => Err(failed("umount", path, errno.raw_os_error())),
    }
}

/// The error for a helper that could not be run.
fn of_helper(error: &std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error::HelperMissing,
        _ => Error::Helper(error.to_string()),
    }
}

fn unmount_by_helper(path: &Path, flags: UnmountFlags) -> Result<(), Error> {
    let mut command = Command::new(HELPER);
    command.arg("-u").args(flags.contains(UnmountFlags::DETACH).then_some("-z")).arg("--").arg(path);
    let output = command.output().map_err(|error| of_helper(&error))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
    if said.contains("busy") { Err(failed("umount", path, libc::EBUSY)) } else { Err(Error::Helper(said)) }
}

/// Mounts by the helper, which sends the open device over a socket whose number is in its environment.
fn mount_by_helper(path: &Path, options: &Options) -> Result<File, Error> {
    let socket = |errno: Errno| failed("socketpair", path, errno.raw_os_error());
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(socket)?;
    fcntl_setfd(&theirs, FdFlags::empty()).map_err(socket)?;
    let mut list = vec![format!("fsname={}", options.name), "subtype=hearth".to_string()];
    list.push(format!("max_read={}", options.message_bytes_max));
    list.extend(shared_options(options).map(str::to_string));
    let child = Command::new(HELPER)
        .arg("-o")
        .arg(list.join(","))
        .arg("--")
        .arg(path)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| of_helper(&error))?;
    drop(theirs);
    let device = receive(&ours);
    let output = child.wait_with_output().map_err(|error| Error::Helper(error.to_string()))?;
    let said = || Error::Helper(String::from_utf8_lossy(&output.stderr).trim().to_string());
    if !output.status.success() {
        return Err(said());
    }
    device.map(File::from).ok_or_else(said)
}

fn receive(socket: &OwnedFd) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    let mut into = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}
