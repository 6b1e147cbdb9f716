//! The measurements of `hearth bench latency --nodes`: a write and its fsync, through libc, beside the floor with as
//! many processes, a tmpfs, and a file system on a disk.
//!
//! The process runs under `hearth run`. The places take turns of a few calls each, so that other load of the machine slows
//! all of them. Hearth's processes and those of the floor are held on the same processors, in one placement after the other.

use crate::error::{Error, Result};
use crate::floor::Floor;
use crate::measure::timed;
use crate::placement::{Placement, hold};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Sizes of a write, and the part of the measured calls that each gets.
const SIZES: [(usize, usize); 3] = [(128, 1), (4 << 10, 1), (64 << 10, 4)];
/// Calls in each placement before those that are measured.
const WARM_UP: usize = 100;
/// Calls of a turn.
const TURN: usize = 25;
/// The same on a disk, which takes milliseconds for each.
const DISK_TURN: usize = 1;
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
    let mut rows = Vec::new();
    for (bytes, part) in SIZES {
        let calls = (count / part / placements.len()).max(TURN);
        let payload: Vec<u8> = (0..bytes).map(|index| (index * 31) as u8).collect();
        let mut all = [const { Vec::new() }; 4];
        let mut placed = Vec::new();
        for placement in &placements {
            hold(Pid::from_raw(head), placement.head)?;
            hold(Pid::from_raw(copy), placement.copy)?;
            floor.hold(placement)?;
            hold(None, placement.program)?;
            let mut samples = [const { Vec::new() }; 4];
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
                    place(0, TURN, &mut |index| tree.sync(&payload, index))?;
                }
                place(1, TURN, &mut |_| floor.round(&payload))?;
                if !tree_is_first {
                    place(0, TURN, &mut |index| tree.sync(&payload, index))?;
                }
                place(2, TURN, &mut |index| scratch.sync(&payload, index))?;
                place(3, DISK_TURN, &mut |index| beside.sync(&payload, index))?;
            }
            placed.push(PlacedTimes {
                processors: [placement.program, placement.head, placement.copy],
                hearth_ns: times(samples[0].clone()).p50_ns,
                floor_ns: times(samples[1].clone()).p50_ns,
            });
            all.iter_mut().zip(samples).for_each(|(all, samples)| all.extend(samples));
        }
        let [hearth, floor, tmpfs, beside] = all.map(times);
        rows.push(SyncRow { bytes, hearth, floor, tmpfs, beside, placements: placed });
    }
    Ok(rows)
}
