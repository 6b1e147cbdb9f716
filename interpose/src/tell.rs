//! Messages to the program's user about calls that the library alone cannot serve: one line on standard error for each
//! process.

use crate::calls::data::mount;
use crate::raw;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

static TOLD: AtomicBool = AtomicBool::new(false);

/// Prints that an operation on the tree needs the node's mount.
#[cold]
pub fn needs_mount(what: &str) {
    if TOLD.swap(true, Ordering::Relaxed) {
        return;
    }
    let process = raw::process();
    let path = mount().kernel_path().map(|path| Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())));
    let line = match path.and_then(|path| Some((path, path.parent()?))) {
        Some((path, dir)) => format!(
            "hearth: process {process}: {what}, as the tree is not mounted at {}: hearth mount --dir {} does it\n",
            path.display(),
            dir.display()
        ),
        None => format!("hearth: process {process}: {what} without a mount of the tree\n"),
    };
    let _ = raw::write(libc::STDERR_FILENO, line.as_bytes());
}

/// Prints that the node's mount has refused an operation on the tree.
#[cold]
pub fn refused(what: &str) {
    if !TOLD.swap(true, Ordering::Relaxed) {
        let line = format!("hearth: process {}: {what}\n", raw::process());
        let _ = raw::write(libc::STDERR_FILENO, line.as_bytes());
    }
}
