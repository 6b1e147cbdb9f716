//! The file with the cluster's key: `DIR/key`, readable by its owner only. Who has it is a node of the cluster.

use crate::error::{Error, Result};
use ipc::{Host, SystemHost};
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
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
    let mode = opened.metadata().map_err(Error::at("read", file))?.mode();
    if mode & 0o077 != 0 {
        let file = file.display();
        return Err(Error::new(format!("others can use the cluster key {file}: chmod 600 {file}")));
    }
    let mut bytes = Vec::new();
    opened.take(BYTES_MAX).read_to_end(&mut bytes).map_err(Error::at("read", file))?;
    let secret = std::str::from_utf8(&bytes).ok().and_then(Secret::parse);
    secret.ok_or_else(|| Error::new(format!("{} is no cluster key", file.display())))
}

/// Reads the cluster's key; a new one is made if there is none.
///
/// # Errors
/// As [`read`]; it cannot be written.
pub fn read_or_make(file: &Path) -> Result<Secret> {
    if !file.exists() {
        let unfinished = unfinished(file);
        let made = make(&unfinished, file);
        let _ = fs::remove_file(&unfinished);
        made?;
    }
    read(file)
}

/// A name beside the file that nobody else has.
fn unfinished(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:016x}", SystemHost.random()));
    file.with_file_name(name)
}

/// Makes a key in `unfinished`, and gives it its name when it is whole; the folder is made if it is missing.
fn make(unfinished: &Path, file: &Path) -> Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
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
        // Whoever was faster has made the cluster's key: this one is not used then.
        Err(why) if why.kind() == ErrorKind::AlreadyExists => return Ok(()),
        linked => linked.map_err(Error::at("write", file))?,
    }
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::at("write", folder))
}
