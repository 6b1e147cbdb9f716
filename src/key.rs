//! The file with the cluster's key: `DIR/key`, readable by its owner only. A process that has the key is a node of the
//! cluster.

use crate::error::{Error, Result};
use ipc::{Host, SystemHost};
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tracing::info;
use transport::Secret;

/// A pipe is opened without waiting for its writer.
const NO_WAIT: i32 = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();

/// More than any key file has.
const BYTES_MAX: u64 = 4096;

/// Reads the cluster's key.
///
/// # Errors
/// It is missing, readable by others, or no key.
pub fn read(file: &Path) -> Result<Secret> {
    let opened = OpenOptions::new().read(true).custom_flags(NO_WAIT).open(file).map_err(|why| match why.kind() {
        ErrorKind::NotFound => Error::new(format!(
            "there is no cluster key at {} (hearth manager --listen makes one: copy it from there, mode 600)",
            file.display()
        )),
        _ => Error::at("read", file)(why),
    })?;
    let found = opened.metadata().map_err(Error::at("read", file))?;
    if !found.is_file() {
        return Err(Error::new(format!("{} is no cluster key: it is no file", file.display())));
    }
    if found.mode() & 0o077 != 0 {
        let file = file.display();
        return Err(Error::new(format!("others can use the cluster key {file}: chmod 600 {file}")));
    }
    let mut bytes = Vec::new();
    opened.take(BYTES_MAX).read_to_end(&mut bytes).map_err(Error::at("read", file))?;
    let secret = std::str::from_utf8(&bytes).ok().and_then(Secret::parse);
    secret.ok_or_else(|| Error::new(format!("{} is no cluster key", file.display())))
}

/// Reads the cluster's key for its manager; a new one is made if there is none.
///
/// # Errors
/// As [`read`]; the key belongs to another user, who could admit any node; it cannot be written.
pub fn read_or_make(file: &Path) -> Result<Secret> {
    if !file.exists() {
        let unfinished = unfinished(file);
        let made = make(&unfinished, file);
        let _ = fs::remove_file(&unfinished);
        made?;
        info!(key = %file.display(), "the cluster's key was made");
    }
    remove_unfinished(file);
    let owner = fs::metadata(file).map_err(Error::at("read", file))?.uid();
    if owner != geteuid().as_raw() {
        return Err(Error::new(format!("the cluster key {} is that of another user", file.display())));
    }
    read(file)
}

/// Removes the files of processes that were killed while they made the key. The key is there, so those files are not
/// needed any more.
fn remove_unfinished(file: &Path) {
    let Some(name) = file.file_name().and_then(OsStr::to_str) else { return };
    let is_unfinished = |other: &OsStr| {
        let rest = other.to_str().and_then(|other| other.strip_prefix(name)?.strip_prefix('.'));
        rest.is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|digit| digit.is_ascii_hexdigit()))
    };
    for entry in fs::read_dir(folder_of(file)).into_iter().flatten().flatten() {
        if is_unfinished(&entry.file_name()) {
            // One that stays is readable by its owner only, as the key.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A unique name beside the file.
fn unfinished(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:016x}", SystemHost.random()));
    file.with_file_name(name)
}

/// Makes a key in `unfinished`, and gives it its name when it is whole; the folder is made if it is missing.
fn make(unfinished: &Path, file: &Path) -> Result<()> {
    let folder = folder_of(file);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(Error::at("make", folder))?;
    let mut made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(unfinished)
        .map_err(Error::at("write", unfinished))?;
    let text = Secret::generate(&SystemHost).text();
    let written = made.write_all(text.as_bytes()).and_then(|()| made.sync_all());
    written.map_err(Error::at("write", unfinished))?;
    match fs::hard_link(unfinished, file) {
        // Another process was faster and has made the cluster's key, and may have removed this one.
        Err(_) if file.exists() => return Ok(()),
        linked => linked.map_err(Error::at("write", file))?,
    }
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::at("write", folder))
}
