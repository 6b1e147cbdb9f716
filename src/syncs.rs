//! The measurements of `hearth bench latency --nodes`: a write and its fsync, through libc, beside the floor with as
//! many processes, a tmpfs, and a file system on a disk.
//!
//! The process runs under `hearth run`. The places take turns of a few calls each, so that other load of the machine slows
//! all of them. Hearth's processes and those of the floor are held on the same processors, in one placement after the other.
//!
//! A program that has just begun writes to a log whose memory the kernel has to provide, on both nodes. That takes longer than
//! all else in a call of 64 KB, and the floor has its memory from the start. So the first calls are measured apart, until the
//! log's memory is there.

use crate::error::{Error, Result};
use crate::floor::Floor;
use crate::measure::timed;
use crate::placement::{Placement, hold};
use ipc::sync::Word;
use ipc::{Host, SystemHost};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// Sizes of a write, and the part of the measured calls that each gets.
const SIZES: [(usize, usize); 3] = [(128, 1), (4 << 10, 1), (64 << 10, 4)];
/// The longest of them.
const SIZE_MAX: usize = SIZES[SIZES.len() - 1].0;
/// Bytes of the calls before all others, at most: twice the longest log.
const FIRST_BYTES: usize = 128 << 20;
/// Calls in each placement before those that are measured.
const WARM_UP: usize = 100;
/// Calls of a turn.
const TURN: usize = 25;
/// The same on a disk, which takes milliseconds for each.
const DISK_TURN: usize = 1;
/// Calls of a turn with pauses.
const PAUSED_TURN: usize = 5;
/// Rows of samples in one placement.
const PLACES: usize = 6;
/// A pause before a call: all threads that wait for it go to sleep.
const PAUSE: Duration = Duration::from_millis(1);
/// The file is written over from the start after so many bytes.
const FILE_BYTES: usize = 16 << 20;

/// Times of a place.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Times {
    /// The median, in nanoseconds.
    pub p50_ns: u64,
    /// 99 of 100 calls took at most this.
    pub p99_ns: u64,
}

/// All places at one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SyncRow {
    /// Bytes of the write.
    pub bytes: usize,
    /// In the tree.
    pub hearth: Times,
    /// Three processes that do nothing else.
    pub floor: Times,
    /// On a tmpfs.
    pub tmpfs: Times,
    /// In the folder that was named.
    pub beside: Times,
    /// In the tree, by a program that sleeps for a millisecond before each call.
    pub paused: Times,
    /// The floor after the same pause.
    pub paused_floor: Times,
    /// In the tree, while the program writes to its log for the first time; of the longest write.
    pub first_pass: Option<Times>,
    /// Hearth and the floor in each placement. The other figures are of all placements together.
    pub placements: Vec<PlacedTimes>,
}

/// Medians in one placement.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PlacedTimes {
    /// The processors of program, head and copy.
    pub processors: [usize; 3],
    /// In the tree, in nanoseconds.
    pub hearth_ns: u64,
    /// The floor, in nanoseconds.
    pub floor_ns: u64,
}

fn times(mut samples: Vec<u64>) -> Times {
    samples.sort_unstable();
    let at = |percent: usize| samples.get(samples.len() * percent / 100).copied().unwrap_or(0);
    Times { p50_ns: at(50), p99_ns: at(99) }
}

/// A file that is removed with this value.
struct Scratch<'a>(&'a Path, File);

impl<'a> Scratch<'a> {
    fn new(path: &'a Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        Ok(Self(path, file.map_err(Error::at("create", path))?))
    }

    fn sync(&self, bytes: &[u8], index: usize) -> Result<()> {
        let offset = index * bytes.len() % FILE_BYTES;
        let done = self.1.write_all_at(bytes, offset as u64).and_then(|()| self.1.sync_all());
        done.map_err(Error::at("write", self.0))
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.0);
    }
}

/// The first calls of the program, half of them measured: the log's memory is there afterwards.
fn first_pass(tree: &Scratch<'_>, count: usize) -> Result<Times> {
    let payload = vec![7; SIZE_MAX];
    let calls = (FIRST_BYTES / SIZE_MAX).min(count).next_multiple_of(2);
    let all = (0..calls).map(|index| timed(|| tree.sync(&payload, index))).collect::<Result<Vec<u64>>>()?;
    Ok(times(all[..calls / 2].to_vec()))
}

/// One placement of the processes. The samples of the tree, the floor, the tmpfs and the disk, then those with pauses of the tree and
/// of the floor.
fn measure_placed(
    floor: &mut Floor,
    [tree, scratch, beside]: [&Scratch<'_>; 3],
    payload: &[u8],
    calls: usize,
) -> Result<[Vec<u64>; PLACES]> {
    let mut samples = [const { Vec::new() }; PLACES];
    for first in (0..WARM_UP + calls).step_by(TURN) {
        let mut place = |place: usize, calls: usize, call: &mut dyn FnMut(usize) -> Result<()>| {
            for index in first..first + calls {
                let spent_ns = timed(|| call(index))?;
                if first >= WARM_UP {
                    samples[place].push(spent_ns);
                }
            }
            Ok::<(), Error>(())
        };
        // The first one after the disk finds the other processes asleep.
        let tree_is_first = (first / TURN).is_multiple_of(2);
        if tree_is_first {
            place(0, TURN, &mut |index| tree.sync(payload, index))?;
        }
        place(1, TURN, &mut |_| floor.round(payload))?;
        if !tree_is_first {
            place(0, TURN, &mut |index| tree.sync(payload, index))?;
        }
        place(2, TURN, &mut |index| scratch.sync(payload, index))?;
        place(3, DISK_TURN, &mut |index| beside.sync(payload, index))?;
    }
    // After all others: waiters that slept for a while poll for a shorter time at first.
    let mut paused = |place: usize, call: &mut dyn FnMut(usize) -> Result<()>| {
        for index in 0..PAUSED_TURN {
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(PAUSE)));
            samples[place].push(timed(|| call(index))?);
        }
        Ok::<(), Error>(())
    };
    for _ in 0..calls.div_ceil(TURN) {
        paused(4, &mut |index| tree.sync(payload, index))?;
        paused(5, &mut |_| floor.round(payload))?;
    }
    Ok(samples)
}

/// Measures all sizes, with `count` calls of the shortest. Of the three folders the first lies in Hearth, the second on a
/// tmpfs, the third on a disk. `daemons` are those of head and copy.
///
/// # Errors
/// A call failed, or a process cannot be held on a processor.
pub fn measure(folders: [&Path; 3], count: usize, daemons: &[i32]) -> Result<Vec<SyncRow>> {
    let &[head, copy] = daemons else { return Err(Error::new("measuring syncs takes two daemons")) };
    let mut floor = Floor::start(folders[1])?;
    let name = format!("hearth-syncs-{}", std::process::id());
    let paths = folders.map(|folder| folder.join(&name));
    let [tree, scratch, beside] = paths.each_ref().map(|path| Scratch::new(path));
    let (tree, scratch, beside) = (tree?, scratch?, beside?);
    let placements = Placement::all()?;
    let first_pass = first_pass(&tree, count)?;
    let mut rows = Vec::new();
    for (bytes, part) in SIZES {
        let calls = (count / part / placements.len()).max(TURN);
        let payload: Vec<u8> = (0..bytes).map(|index| (index * 31) as u8).collect();
        let mut all = [const { Vec::new() }; PLACES];
        let mut placed = Vec::new();
        for placement in &placements {
            hold(Pid::from_raw(head), placement.head)?;
            hold(Pid::from_raw(copy), placement.copy)?;
            floor.hold(placement)?;
            hold(None, placement.program)?;
            let samples = measure_placed(&mut floor, [&tree, &scratch, &beside], &payload, calls)?;
            placed.push(PlacedTimes {
                processors: [placement.program, placement.head, placement.copy],
                hearth_ns: times(samples[0].clone()).p50_ns,
                floor_ns: times(samples[1].clone()).p50_ns,
            });
            all.iter_mut().zip(samples).for_each(|(all, samples)| all.extend(samples));
        }
        let [hearth, floor, tmpfs, beside, paused, paused_floor] = all.map(times);
        let first_pass = (bytes == SIZE_MAX).then_some(first_pass);
        rows.push(SyncRow {
            bytes,
            hearth,
            floor,
            tmpfs,
            beside,
            paused,
            paused_floor,
            first_pass,
            placements: placed,
        });
    }
    Ok(rows)
}
