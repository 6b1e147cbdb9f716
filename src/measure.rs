//! What `hearth bench latency` measures: latencies of file calls through libc, beside the floor of the same bytes and
//! a tmpfs, all in one process of one run (floors of Assise §5.2's figure 3).
//!
//! The process stands under `hearth run`: calls below the tree go to Hearth, all others to the kernel. Figures are
//! nanoseconds; each is the median of its samples.
//!
//! **Bursts.** A write is an append to the update log for as long as that has room; what a writer gets that never
//! pauses is the daemon's rate of digest. Both are shown: writes are measured in bursts of at most half of the log as
//! it is, each begun with an empty one, and beside them the sustained rate.

use crate::error::{Error, Result};
use crate::status::ask;
use format::checksum::{self, Salt};
use format::envelope::frame_bytes;
use ipc::{Host, SystemHost};
use nix::unistd::{Whence, lseek};
use pmem::{Medium, Region};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Sizes of a call, in bytes.
pub const SIZES: [usize; 5] = [128, 1 << 10, 4 << 10, 64 << 10, 1 << 20];

/// Bytes of all samples of one figure, at most.
const SAMPLED_BYTES: usize = 24 << 20;
/// Bytes of the write before all others. It is one record, so the log becomes large enough for it.
const GROWING_BYTES: usize = 15 << 20;
/// Samples of one figure, at most.
const SAMPLES_MAX: usize = 4000;
/// Samples of calls that wait for a medium.
const SYNC_SAMPLES_MAX: usize = 300;
/// Bytes written for the sustained rate.
const SUSTAINED_BYTES: usize = 256 << 20;

/// Medians at one size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Bytes of a call.
    pub bytes: usize,
    /// Non-temporal copy and fence.
    pub copy_ns: u64,
    /// Non-temporal copy, checksum and fence: the floor of a write.
    pub persist_ns: u64,
    /// memcpy from a mapping: the floor of a read.
    pub memcpy_ns: u64,
    /// Sequential write.
    pub write_ns: u64,
    /// The same on a tmpfs.
    pub tmpfs_write_ns: u64,
    /// Write, then fsync.
    pub sync_ns: u64,
    /// The same on a tmpfs.
    pub tmpfs_sync_ns: u64,
    /// Read of what this process wrote or read just before.
    pub hit_ns: u64,
    /// The same on a tmpfs.
    pub tmpfs_hit_ns: u64,
    /// First read of what lies in the shared area.
    pub first_ns: u64,
    /// Sequential writes of 256 MiB in one go: nanoseconds a call.
    pub sustained_ns: u64,
    /// Bytes of the update log during the bursts.
    #[serde(default)]
    pub log_bytes: u64,
    /// Writes in one burst.
    #[serde(default)]
    pub burst_calls: usize,
}

/// First half: writes, and the file that [`reads`] reads. `tree` lies in Hearth, `scratch` on a tmpfs; the daemon
/// answers at `control`.
///
/// # Errors
/// A call failed.
pub fn writes(tree: &Path, scratch: &Path, control: &Path) -> Result<Vec<Row>> {
    let pool = scratch.join("pool");
    std::fs::create_dir_all(&pool).map_err(Error::at("make", &pool))?;
    let medium = Medium::memory(&pool).map_err(Error::at("use", &pool))?;
    let region = medium.create("floor", (2 * SAMPLED_BYTES) as u64).map_err(Error::at("use", &pool))?;
    // Every page is there before anything is measured: a first touch costs more than any copy.
    let zeros = vec![0u8; 1 << 20];
    for offset in (0..region.bytes()).step_by(zeros.len()) {
        region.write(offset, &zeros);
    }
    let name = tree.join("growing");
    write_at(&create(&name)?, &vec![1; GROWING_BYTES], 0)?;
    std::fs::remove_file(&name).map_err(Error::at("remove", &name))?;
    SIZES.iter().map(|bytes| write_row(tree, scratch, (&region, control), *bytes)).collect()
}

/// Second half, in a process of its own: what the first half wrote lies in the shared area by now.
///
/// # Errors
/// A call failed.
pub fn reads(tree: &Path, scratch: &Path, rows: &mut [Row]) -> Result<()> {
    for row in rows {
        let count = samples(row.bytes, SAMPLES_MAX);
        let file = open(&tree.join(row.bytes.to_string()))?;
        row.first_ns = read_median(&file, row.bytes, count)?;
        row.hit_ns = read_median(&file, row.bytes, count)?;
        let other = open(&scratch.join(row.bytes.to_string()))?;
        read_median(&other, row.bytes, count)?;
        row.tmpfs_hit_ns = read_median(&other, row.bytes, count)?;
    }
    Ok(())
}

fn write_row(tree: &Path, scratch: &Path, (region, control): (&Region, &Path), bytes: usize) -> Result<Row> {
    let payload: Vec<u8> = (0..bytes).map(|i| (i * 31) as u8).collect();
    let count = samples(bytes, SAMPLES_MAX);
    let at = |index: usize| ((index * bytes) % SAMPLED_BYTES) as u64;
    let copy_ns = median(count, |index| {
        region.write(at(index), black_box(&payload));
        region.fence();
        Ok(())
    })?;
    let persist_ns = median(count, |index| {
        black_box(checksum::of(Salt::NONE, black_box(&payload)));
        region.write(at(index), &payload);
        region.fence();
        Ok(())
    })?;
    let mut target = vec![0u8; bytes];
    let memcpy_ns = median(count, |index| {
        region.read(at(index), black_box(&mut target)).map_err(|why| Error::new(why.to_string()))
    })?;

    let name = bytes.to_string();
    let (file, other) = (create(&tree.join(&name))?, create(&scratch.join(&name))?);
    let log_bytes = own_log_bytes(control)?;
    let burst_calls = ((log_bytes / 2 / frame_bytes(bytes as u64)) as usize).max(1);
    // Before a burst there is nothing in the log: where a file's data is only the area can say.
    let begin = |index: usize| {
        if index.is_multiple_of(burst_calls) {
            let found = lseek(&file, 0, Whence::SeekData);
            found.map_err(|why| Error::new(format!("lseek: {why}")))?;
        }
        Ok(())
    };
    let write = |file: &File, index: usize| write_at(file, black_box(&payload), index * bytes);
    write(&file, 0)?;
    let write_ns = median_after(count, begin, |index| write(&file, index))?;
    let tmpfs_write_ns = median(count, |index| write(&other, index))?;
    let sync = |file: &File, index: usize| {
        write(file, index)?;
        file.sync_all().map_err(|why| Error::new(format!("fsync: {why}")))
    };
    let syncs = samples(bytes, SYNC_SAMPLES_MAX);
    let sync_ns = median_after(syncs, begin, |index| sync(&file, index))?;
    let tmpfs_sync_ns = median(syncs, |index| sync(&other, index))?;
    let sustained_ns = sustained(&tree.join(format!("sustained-{name}")), &payload)?;
    Ok(Row {
        bytes,
        copy_ns,
        persist_ns,
        memcpy_ns,
        write_ns,
        tmpfs_write_ns,
        sync_ns,
        tmpfs_sync_ns,
        hit_ns: 0,
        tmpfs_hit_ns: 0,
        first_ns: 0,
        sustained_ns,
        log_bytes,
        burst_calls,
    })
}

/// Nanoseconds a call of a row of writes that is several times as long as the log.
fn sustained(path: &Path, payload: &[u8]) -> Result<u64> {
    let long = create(path)?;
    let writes = SUSTAINED_BYTES / payload.len().max(4096);
    let begin = SystemHost.now();
    for index in 0..writes {
        write_at(&long, payload, index * payload.len())?;
    }
    let spent_ns = SystemHost.now().since(begin).as_nanos() as u64;
    drop(long);
    std::fs::remove_file(path).map_err(Error::at("remove", path))?;
    Ok(spent_ns / writes as u64)
}

/// Bytes of this process's update log as it is now.
fn own_log_bytes(control: &Path) -> Result<u64> {
    let programs = ask(control)?.programs;
    let own = programs.iter().find(|program| program.pid == std::process::id());
    own.map(|program| program.log_bytes).ok_or_else(|| Error::new("the daemon does not know this process"))
}

fn write_at(file: &File, bytes: &[u8], offset: usize) -> Result<()> {
    file.write_all_at(bytes, offset as u64).map_err(|why| Error::new(format!("write: {why}")))
}

fn samples(bytes: usize, max: usize) -> usize {
    (SAMPLED_BYTES / bytes).clamp(1, max)
}

fn create(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(Error::at("create", path))
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(Error::at("open", path))
}

fn read_median(file: &File, bytes: usize, count: usize) -> Result<u64> {
    let mut target = vec![0u8; bytes];
    median(count, |index| {
        file.read_exact_at(black_box(&mut target), (index * bytes) as u64)
            .map_err(|why| Error::new(format!("read: {why}")))
    })
}

/// Median time of one call, less the time of reading the clock.
fn median(count: usize, call: impl FnMut(usize) -> Result<()>) -> Result<u64> {
    median_after(count, |_| Ok(()), call)
}

/// The same of calls before each of which something else is done.
fn median_after(
    count: usize,
    mut before: impl FnMut(usize) -> Result<()>,
    mut call: impl FnMut(usize) -> Result<()>,
) -> Result<u64> {
    let clock = {
        let mut times: Vec<u64> = (0..101).map(|_| timed(|| Ok(()))).collect::<Result<_>>()?;
        times.sort_unstable();
        times[50]
    };
    let mut times = Vec::with_capacity(count);
    for index in 0..count {
        before(index)?;
        times.push(timed(|| call(index))?);
    }
    times.sort_unstable();
    Ok(times[count / 2].saturating_sub(clock))
}

/// Nanoseconds that a call takes.
pub fn timed(call: impl FnOnce() -> Result<()>) -> Result<u64> {
    let begin = SystemHost.now();
    call()?;
    Ok(SystemHost.now().since(begin).as_nanos() as u64)
}
