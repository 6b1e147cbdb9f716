//! The measurements of `hearth bench ops`: operations on names and small files through libc, one after the other in a
//! folder that no other process uses, in Hearth's tree and in folders of the kernel's file systems alike.
//!
//! The process stands under `hearth run`. Of each operation the middle time is given, and how many of them were done a
//! second, pauses for the daemon included.

use crate::error::{Error, Result};
use crate::measure::timed;
use ipc::{Host, SystemHost};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of a write.
const BLOCK_BYTES: usize = 4096;
/// Blocks of the file that is written to.
const BLOCKS: usize = 64;
/// Operations that wait for a medium, and listings: at most.
const SLOW_MAX: usize = 100;

/// The times of one operation in one folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// The operation.
    pub operation: String,
    /// Middle of the times, in nanoseconds.
    pub median_ns: u64,
    /// How many a second.
    pub per_second: u64,
}

/// Measures all operations, `count` of each, in a folder that is made below `parent` and removed again.
///
/// # Errors
/// A call failed.
pub fn measure(parent: &Path, count: usize) -> Result<Vec<Figure>> {
    let folder = Folder::new(parent)?;
    let slow = count.min(SLOW_MAX);
    let block = [7u8; BLOCK_BYTES];
    let path = |kind: &str, index: usize| folder.0.join(format!("{kind}{index}"));
    let mut figures = vec![
        figure("mkdir", count, |index| fs::create_dir(path("folder", index)))?,
        figure("create", count, |index| make(&path("file", index)).map(drop))?,
        figure("stat", count, |index| fs::metadata(path("file", index)).map(drop))?,
        figure("open", count, |index| File::open(path("file", index)).map(drop))?,
        figure("readdir", slow, |_| fs::read_dir(&folder.0)?.try_for_each(|entry| entry.map(drop)))?,
        figure("rename", count, |index| fs::rename(path("file", index), path("moved", index)))?,
        figure("unlink", count, |index| fs::remove_file(path("moved", index)))?,
        figure("rmdir", count, |index| fs::remove_dir(path("folder", index)))?,
    ];
    let contents = folder.0.join("contents");
    let file = make(&contents).map_err(Error::at("create", &contents))?;
    let write = |index: usize| file.write_all_at(&block, (index % BLOCKS * BLOCK_BYTES) as u64);
    figures.push(figure("write 4 KiB", count, write)?);
    figures.push(figure("write 4 KiB, fsync", slow, |index| write(index).and_then(|()| file.sync_all()))?);
    let log = folder.0.join("log");
    let mut file =
        OpenOptions::new().append(true).create_new(true).open(&log).map_err(Error::at("create", &log))?;
    figures.push(figure("append 128 B", count, |_| file.write_all(&block[..128]))?);
    // The calls of programs that replace a file as a whole; the last name is there from the second round on.
    let last = folder.0.join("last");
    figures.push(figure("create, write 4 KiB, rename", count, |index| {
        let new = path("new", index);
        make(&new)?.write_all(&block)?;
        fs::rename(&new, &last)
    })?);
    Ok(figures)
}

fn make(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

fn figure(
    operation: &str,
    count: usize,
    mut run: impl FnMut(usize) -> std::io::Result<()>,
) -> Result<Figure> {
    let mut times = Vec::with_capacity(count);
    let begin = SystemHost.now();
    for index in 0..count {
        times.push(timed(|| run(index).map_err(|why| Error::new(format!("{operation}: {why}"))))?);
    }
    let all_ns = SystemHost.now().since(begin).as_nanos().max(1);
    times.sort_unstable();
    let per_second = count as u128 * 1_000_000_000 / all_ns;
    Ok(Figure { operation: operation.to_owned(), median_ns: times[count / 2], per_second: per_second as u64 })
}

/// A folder that is removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn new(parent: &Path) -> Result<Self> {
        let path = parent.join(format!("hearth-operations-{}", std::process::id()));
        fs::create_dir(&path).map_err(Error::at("make", &path))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
