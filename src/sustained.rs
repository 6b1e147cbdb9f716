//! The measurements of `hearth bench sustained`: how fast a process that never pauses writes, through libc, in a folder
//! of the tree or of a tmpfs.
//!
//! The clock stops when all that was written lies in the shared area: `lseek(SEEK_DATA)` waits for that, and costs nothing
//! on a tmpfs. Each load runs in a process of its own.

use crate::error::{Error, Result};
use ipc::{Host, SystemHost, Time};
use nix::unistd::{Whence, lseek};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a block.
const BLOCK: usize = 4096;
/// A call that takes longer is counted as a stall.
const STALL_NS: u64 = 2_000_000;
/// Bytes that are written at once to make the file of an overwrite.
const FILL_BYTES: usize = 1 << 20;
/// Pages of the database of a rollback journal.
const DATABASE_PAGES: u64 = 1024;
/// Shape of one commit with a rollback journal: bytes and offset of the journal's writes before the first sync.
const JOURNAL_WRITES: [(usize, u64); 4] = [(512, 0), (4, 512), (BLOCK, 516), (4, 4612)];

/// A way of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Load {
    /// Blocks of 4 KiB at random places of a file of so many bytes.
    Overwrite(u64),
    /// A file that grows by so many bytes a call.
    Append(usize),
    /// A file is made, gets 4 KiB and its last name.
    Replace,
    /// A database commits with a rollback journal.
    Journal,
}

/// The measurements of one process. A call of [`Load::Replace`] and [`Load::Journal`] is a file, and a commit.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Calls.
    pub calls: u64,
    /// From the first call until all is digested.
    pub all_ns: u64,
    /// 99 of 100 calls took at most this.
    pub p99_ns: u64,
    /// The longest call.
    pub longest_ns: u64,
    /// Time in calls of over 2 ms.
    pub stalled_ns: u64,
}

impl Figure {
    /// Calls a second.
    pub fn rate(&self) -> f64 {
        self.calls as f64 * 1e9 / self.all_ns.max(1) as f64
    }

    /// Which part of the time went into calls of over 2 ms.
    pub fn stalled(&self) -> f64 {
        self.stalled_ns as f64 / self.all_ns.max(1) as f64
    }
}

impl Load {
    /// Writes `bytes` in a folder, and removes what it made.
    ///
    /// # Errors
    /// A call failed.
    pub fn run(self, folder: &Path, bytes: u64) -> Result<Figure> {
        let done = match self {
            Self::Overwrite(file_bytes) => overwrite(folder, file_bytes, bytes),
            Self::Append(call_bytes) => append(folder, call_bytes, bytes),
            Self::Replace => replace(folder, bytes),
            Self::Journal => journal(folder, bytes),
        };
        done.map_err(Error::at("write in", folder))
    }
}

/// The times of calls, one after the other.
struct Times {
    begin: Time,
    spent_ns: Vec<u64>,
}

impl Times {
    fn new(calls: u64) -> Self {
        // Its memory is there before the clock starts.
        let mut spent_ns = vec![1; usize::try_from(calls).expect("times of all calls fit memory")];
        spent_ns.clear();
        Self { begin: SystemHost.now(), spent_ns }
    }

    fn call(&mut self, call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let begin = SystemHost.now();
        call()?;
        self.spent_ns.push(SystemHost.now().since(begin).as_nanos() as u64);
        Ok(())
    }

    /// All that was written is digested now.
    fn end(mut self) -> Figure {
        let all_ns = SystemHost.now().since(self.begin).as_nanos() as u64;
        self.spent_ns.sort_unstable();
        let calls = self.spent_ns.len();
        let stalls = self.spent_ns.iter().filter(|ns| **ns > STALL_NS);
        Figure {
            calls: calls as u64,
            all_ns,
            p99_ns: self.spent_ns.get(calls * 99 / 100).copied().unwrap_or(0),
            longest_ns: self.spent_ns.last().copied().unwrap_or(0),
            stalled_ns: stalls.sum(),
        }
    }
}

/// Waits until all records of this process are digested. A file without data returns from it, too.
fn digested(file: &File) -> io::Result<()> {
    match lseek(file, 0, Whence::SeekData) {
        Ok(_) | Err(nix::errno::Errno::ENXIO) => Ok(()),
        Err(why) => Err(why.into()),
    }
}

fn make(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path)
}

fn overwrite(folder: &Path, file_bytes: u64, bytes: u64) -> io::Result<Figure> {
    let path = folder.join("overwritten");
    let file = make(&path)?;
    let filling = vec![1; FILL_BYTES];
    for offset in (0..file_bytes).step_by(FILL_BYTES) {
        file.write_all_at(&filling, offset)?;
    }
    digested(&file)?;
    let (block, blocks) = ([7; BLOCK], file_bytes / BLOCK as u64);
    let calls = bytes / BLOCK as u64;
    let mut random = 1u64;
    let mut times = Times::new(calls);
    for _ in 0..calls {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = (random >> 33) % blocks * BLOCK as u64;
        times.call(|| file.write_all_at(&block, offset))?;
    }
    digested(&file)?;
    let figure = times.end();
    fs::remove_file(&path)?;
    Ok(figure)
}

fn append(folder: &Path, call_bytes: usize, bytes: u64) -> io::Result<Figure> {
    let path = folder.join("appended");
    let file = make(&path)?;
    let calls = bytes / call_bytes as u64;
    let block = vec![7; call_bytes];
    let mut times = Times::new(calls);
    for index in 0..calls {
        times.call(|| file.write_all_at(&block, index * call_bytes as u64))?;
    }
    digested(&file)?;
    let figure = times.end();
    fs::remove_file(&path)?;
    Ok(figure)
}

fn replace(folder: &Path, bytes: u64) -> io::Result<Figure> {
    let calls = bytes / BLOCK as u64;
    let block = [7; BLOCK];
    let mut times = Times::new(calls);
    let mut last = None;
    for index in 0..calls {
        let (new, name) = (folder.join(format!("new{index}")), folder.join(format!("file{index}")));
        times.call(|| {
            let file = make(&new)?;
            file.write_all_at(&block, 0)?;
            last = Some(file);
            fs::rename(&new, &name)
        })?;
    }
    last.as_ref().map_or(Ok(()), digested)?;
    let figure = times.end();
    for index in 0..calls {
        fs::remove_file(folder.join(format!("file{index}")))?;
    }
    Ok(figure)
}

/// As SQLite does it: the old page goes to a journal of its own, then the page is replaced, then the journal goes.
fn journal(folder: &Path, bytes: u64) -> io::Result<Figure> {
    let (path, journal) = (folder.join("database"), folder.join("database-journal"));
    let database = make(&path)?;
    let page = [7; BLOCK];
    for index in 0..DATABASE_PAGES {
        database.write_all_at(&page, index * BLOCK as u64)?;
    }
    digested(&database)?;
    let commit_bytes = JOURNAL_WRITES.iter().map(|(bytes, _)| *bytes).sum::<usize>() + 2 * BLOCK;
    let commits = bytes / commit_bytes as u64;
    let mut times = Times::new(commits);
    for index in 0..commits {
        times.call(|| {
            let file = make(&journal)?;
            for (bytes, offset) in JOURNAL_WRITES {
                file.write_all_at(&page[..bytes], offset)?;
            }
            file.sync_data()?;
            file.write_all_at(&page[..12], 0)?;
            file.sync_data()?;
            database.write_all_at(&page, 0)?;
            database.write_all_at(&page, (1 + index % (DATABASE_PAGES - 1)) * BLOCK as u64)?;
            database.sync_data()?;
            drop(file);
            fs::remove_file(&journal)
        })?;
    }
    digested(&database)?;
    let figure = times.end();
    fs::remove_file(&path)?;
    Ok(figure)
}
