//! The measurements of `hearth bench latency`: latencies of file calls through libc, beside the floor of the same bytes
//! and a tmpfs, all in one process of one run (floors of Assise §5.2's figure 3).
//!
//! The process stands under `hearth run`: calls below the tree go to Hearth, all others to the kernel. Figures are
//! nanoseconds a call; each is the median of its samples.
//!
//! **Samples.** A sample of small calls is a row of them, as many for the floor as for Hearth and for the tmpfs. On
//! some machines the clock has a resolution of ten nanoseconds; and the processor goes on before its stores past the
//! caches are done, so that a clock read after a single store sees a part of its cost, while in a row each store waits
//! for the one before. The compared calls are sampled in turns, a few samples each: other load of the machine slows all
//! of them.
//!
//! **Bursts.** A write is an append to the update log for as long as that has space; a writer that never pauses gets
//! the daemon's rate of digest. Both are shown: writes are measured in bursts of at most half of the log as it is, each
//! begun with an empty one, and beside them the sustained rate.

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
use std::time::Duration;

/// Sizes of a call, in bytes.
pub const SIZES: [usize; 5] = [128, 1 << 10, 4 << 10, 64 << 10, 1 << 20];

/// Bytes of all samples of one figure, at most.
const SAMPLED_BYTES: usize = 24 << 20;
/// Bytes of the write before all others. It is one record, so the log becomes large enough for it.
const GROWING_BYTES: usize = 15 << 20;
/// Calls of one figure, at most.
const CALLS_MAX: usize = 16_000;
/// Bytes of the calls of one sample, at least, if they are not [`ROW_CALLS_MAX`].
const ROW_BYTES: usize = 16 << 10;
/// Calls of one sample, at most.
const ROW_CALLS_MAX: usize = 16;
/// Turns that the compared calls take, at least.
const TURNS: usize = 24;
/// Calls that wait for a medium, at most; each is a sample.
const SYNC_CALLS_MAX: usize = 300;
/// How long the daemon, which has much to do, may take to say how it is.
const ANSWER: Duration = Duration::from_secs(10);
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
    let region = touched(scratch)?;
    let name = tree.join("growing");
    write_at(&create(&name)?, &vec![1; GROWING_BYTES], 0)?;
    std::fs::remove_file(&name).map_err(Error::at("remove", &name))?;
    SIZES.iter().map(|bytes| write_row(tree, scratch, (&region, control), *bytes)).collect()
}

/// Second half, in a process of its own: the data of the first half is in the shared area by now.
///
/// # Errors
/// A call failed.
pub fn reads(tree: &Path, scratch: &Path, rows: &mut [Row]) -> Result<()> {
    let region = touched(scratch)?;
    for row in rows {
        let bytes = row.bytes;
        let shape = Shape::new(bytes, CALLS_MAX);
        let name = bytes.to_string();
        let (file, other) = (open(&tree.join(&name))?, open(&scratch.join(&name))?);
        let (mut one, mut two, mut three) = (vec![0u8; bytes], vec![0u8; bytes], vec![0u8; bytes]);
        let mut copy = |index: usize| {
            let read = region.read(offset(index, bytes), black_box(&mut one));
            read.map_err(|why| Error::new(why.to_string()))
        };
        let mut ours = |index: usize| read_at(&file, black_box(&mut two), index * bytes);
        let mut kernels = |index: usize| read_at(&other, black_box(&mut three), index * bytes);
        let idle = || Ok(());
        [row.first_ns, _, _] = in_turns(&shape, idle, [&mut ours, &mut copy, &mut kernels])?;
        [row.hit_ns, row.memcpy_ns, row.tmpfs_hit_ns] =
            in_turns(&shape, idle, [&mut ours, &mut copy, &mut kernels])?;
    }
    Ok(())
}

/// A region in memory, each of whose pages is there: a first touch costs more than any copy.
fn touched(scratch: &Path) -> Result<Region> {
    let pool = scratch.join(format!("pool-{}", std::process::id()));
    std::fs::create_dir_all(&pool).map_err(Error::at("make", &pool))?;
    let medium = Medium::memory(&pool).map_err(Error::at("use", &pool))?;
    let region = medium.create("floor", SAMPLED_BYTES as u64).map_err(Error::at("use", &pool))?;
    let zeros = vec![0u8; 1 << 20];
    for offset in (0..region.bytes()).step_by(zeros.len()) {
        region.write(offset, &zeros);
    }
    Ok(region)
}

/// Where in a region of [`SAMPLED_BYTES`] a call works.
fn offset(index: usize, bytes: usize) -> u64 {
    ((index * bytes) % SAMPLED_BYTES) as u64
}

fn write_row(tree: &Path, scratch: &Path, (region, control): (&Region, &Path), bytes: usize) -> Result<Row> {
    let payload: Vec<u8> = (0..bytes).map(|i| (i * 31) as u8).collect();
    let name = bytes.to_string();
    let (file, other) = (create(&tree.join(&name))?, create(&scratch.join(&name))?);
    let log_bytes = own_log_bytes(control)?;
    let burst_calls = ((log_bytes / 2 / frame_bytes(bytes as u64)) as usize).max(1);
    // Before a burst there is nothing in the log: where a file's data is only the area can say.
    let begin = || {
        let found = lseek(&file, 0, Whence::SeekData);
        found.map(drop).map_err(|why| Error::new(format!("lseek: {why}")))
    };
    let mut copy = |index: usize| {
        region.write(offset(index, bytes), black_box(&payload));
        region.fence();
        Ok(())
    };
    let mut floor = |index: usize| {
        black_box(checksum::of(Salt::NONE, black_box(&payload)));
        region.write(offset(index, bytes), &payload);
        region.fence();
        Ok(())
    };
    let write = |file: &File, index: usize| write_at(file, black_box(&payload), index * bytes);
    write(&file, 0)?;
    let shape = Shape::new(bytes, CALLS_MAX).in_bursts(burst_calls);
    let (mut ours, mut kernels) = (|index: usize| write(&file, index), |index: usize| write(&other, index));
    let [write_ns, persist_ns, copy_ns, tmpfs_write_ns] =
        in_turns(&shape, begin, [&mut ours, &mut floor, &mut copy, &mut kernels])?;
    let sync = |file: &File, index: usize| {
        write(file, index)?;
        file.sync_all().map_err(|why| Error::new(format!("fsync: {why}")))
    };
    let shape = Shape { row: 1, ..Shape::new(bytes, SYNC_CALLS_MAX) }.in_bursts(burst_calls);
    let (mut ours, mut kernels) = (|index: usize| sync(&file, index), |index: usize| sync(&other, index));
    let [sync_ns, tmpfs_sync_ns] = in_turns(&shape, begin, [&mut ours, &mut kernels])?;
    let sustained_ns = sustained(&tree.join(format!("sustained-{name}")), &payload)?;
    Ok(Row {
        bytes,
        copy_ns,
        persist_ns,
        memcpy_ns: 0,
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
    let answer = ask(control, ANSWER).map_err(|why| Error::new(why.to_string()));
    let programs = answer?.programs;
    let own = programs.iter().find(|program| program.pid == std::process::id());
    own.map(|program| program.log_bytes).ok_or_else(|| Error::new("the daemon does not know this process"))
}

fn write_at(file: &File, bytes: &[u8], offset: usize) -> Result<()> {
    file.write_all_at(bytes, offset as u64).map_err(|why| Error::new(format!("write: {why}")))
}

fn read_at(file: &File, into: &mut [u8], offset: usize) -> Result<()> {
    file.read_exact_at(into, offset as u64).map_err(|why| Error::new(format!("read: {why}")))
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

/// How something is sampled.
#[derive(Clone, Copy)]
struct Shape {
    /// Calls.
    calls: usize,
    /// Calls of a sample.
    row: usize,
    /// Calls of a turn, at most.
    turn: usize,
}

impl Shape {
    /// Of so many calls at most; fewer of long ones.
    fn new(bytes: usize, calls_max: usize) -> Self {
        let calls = (SAMPLED_BYTES / bytes).clamp(1, calls_max);
        Self { calls, row: (ROW_BYTES / bytes).clamp(1, ROW_CALLS_MAX), turn: (calls / TURNS).max(1) }
    }

    /// With turns of so many calls at most.
    fn in_bursts(self, calls: usize) -> Self {
        Self { turn: self.turn.min(calls), row: self.row.min(calls), ..self }
    }
}

/// Medians of the time of a call, less the time of reading the clock, of calls that take turns. Before each round of
/// turns `begin` runs.
fn in_turns<const N: usize>(
    shape: &Shape,
    mut begin: impl FnMut() -> Result<()>,
    mut calls: [&mut dyn FnMut(usize) -> Result<()>; N],
) -> Result<[u64; N]> {
    let mut clock: Vec<u64> = (0..101).map(|_| timed(|| Ok(()))).collect::<Result<_>>()?;
    clock.sort_unstable();
    let rows_a_turn = (shape.turn / shape.row).max(1);
    let rows: Vec<usize> = (0..(shape.calls / shape.row).max(1)).collect();
    let mut samples = [const { Vec::new() }; N];
    for turn in rows.chunks(rows_a_turn) {
        begin()?;
        for (call, samples) in calls.iter_mut().zip(&mut samples) {
            for row in turn {
                let indices = row * shape.row..(row + 1) * shape.row;
                let spent_ns = timed(|| indices.into_iter().try_for_each(&mut **call))?;
                samples.push(spent_ns.saturating_sub(clock[50]));
            }
        }
    }
    Ok(samples.map(|mut samples| {
        samples.sort_unstable();
        (samples[samples.len() / 2] as f64 / shape.row as f64).round() as u64
    }))
}

/// Nanoseconds that something takes.
pub fn timed(call: impl FnOnce() -> Result<()>) -> Result<u64> {
    let begin = SystemHost.now();
    call()?;
    Ok(SystemHost.now().since(begin).as_nanos() as u64)
}
