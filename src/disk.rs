//! The disk of a node's pool: for how long the oldest operation on it has not returned. A dying disk, a network file system or a
//! suspended device gives no error, so only the time tells. A disk that is busy completes other requests meanwhile, if the kernel
//! counts them, and is given more time.
//!
//! Guarantees: the thread that looks takes no lock and writes no log, so it goes on whatever the disk does. Time in which this
//! process did not run does not count ([`pmem::StallMeter`]).

use crate::cluster::{Cluster, Node};
use crate::commands::daemon::{note_failure, spawn};
use crate::error::{Error, Result};
use format::BLOCK_BYTES;
use ipc::sync::Ordering;
use ipc::{Host, LongWord, SystemHost, WAKE_ALL, Word};
use pmem::{Class, Medium, Region, StallMeter};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// How often the thread looks.
pub const LOOK: Duration = Duration::from_millis(50);
/// The largest time that counts for one look: this thread may get its processor late.
const STEP_MAX: Duration = Duration::from_millis(100);
/// So long a disk may take before that is told. A flush of a busy disk may take a second.
const TOLD: Duration = Duration::from_secs(2);
/// From here on an operation may be one that never returns.
const STALL: Duration = Duration::from_millis(100);
/// How often it is looked whether the log has to tell something.
const LOG_LOOK: Duration = Duration::from_millis(500);
/// No operation is outstanding.
const NOTHING: u64 = u64::MAX;
/// A device that completes other requests may take so many times longer.
const BUSY: u32 = 3;

/// See the module.
pub struct DiskStall {
    /// For how long the oldest operation has stalled, in nanoseconds.
    time_ns: LongWord,
    /// For how long the device has completed no request meanwhile, in nanoseconds.
    silence_ns: LongWord,
}

impl DiskStall {
    /// Starts the threads that look at the operations on a guarded medium, whose files are in this folder, and that tell the log.
    ///
    /// # Errors
    /// The medium has no guard, or no thread is left.
    pub fn watch(medium: &Medium, folder: &Path) -> Result<Arc<Self>> {
        let meter = medium.stall_meter(STEP_MAX);
        let meter = meter.ok_or_else(|| Error::new("the medium is not guarded"))?;
        let device = CompletedRequests::of(folder);
        let this = Arc::new(Self { time_ns: LongWord::new(NOTHING), silence_ns: LongWord::new(0) });
        let (looks, tells) = (this.clone(), this.clone());
        spawn("disk", move || looks.measure(meter, &device))?;
        spawn("disk-log", move || tells.tell())?;
        Ok(this)
    }

    /// For how long the oldest operation that has not returned has made no progress.
    pub fn time(&self) -> Option<Duration> {
        // Relaxed: the value stands for itself.
        let time = self.time_ns.load(Ordering::Relaxed);
        (time != NOTHING).then(|| Duration::from_nanos(time))
    }

    /// Whether the disk counts as one that does not answer any more, if it may take so long.
    pub fn is_hung(&self, patience: Duration) -> bool {
        let silence = Duration::from_nanos(self.silence_ns.load(Ordering::Relaxed));
        self.time().is_some_and(|time| time >= patience && (silence >= patience || time >= patience * BUSY))
    }

    /// The same in ms, if it is long enough to be told.
    pub fn told_ms(&self) -> Option<u64> {
        self.time().filter(|time| *time >= TOLD).map(|time| time.as_millis() as u64)
    }

    fn measure(&self, mut meter: StallMeter, device: &CompletedRequests) {
        let (mut last, mut silence) = (SystemHost.now(), Silence::default());
        loop {
            SystemHost.wait(&Word::new(0), 0, Some(last.after(LOOK)));
            let now = SystemHost.now();
            let elapsed = now.since(last);
            let time = meter.look(elapsed);
            last = now;
            // Only then it is read: operations that take no longer are no stall.
            let silence = match time.is_some_and(|time| time >= STALL) {
                true => silence.step(elapsed.min(STEP_MAX), device.number()),
                false => Duration::ZERO,
            };
            self.silence_ns.store(silence.as_nanos() as u64, Ordering::Relaxed);
            let time_ns = time.map_or(NOTHING, |time| time.as_nanos() as u64);
            self.time_ns.store(time_ns, Ordering::Relaxed);
        }
    }

    /// Says in the log when the disk stops answering, and when it answers again. The log may be on the same disk.
    fn tell(&self) {
        let mut longest_ms = None;
        loop {
            match (self.told_ms(), longest_ms) {
                (Some(ms), None) => warn!(seconds = ms / 1000, "the disk of the pool does not answer"),
                (None, Some(ms)) => info!(after_seconds = ms / 1000, "the disk of the pool answers again"),
                _ => {}
            }
            longest_ms = self.told_ms();
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOG_LOOK)));
        }
    }
}

/// For how long a device has completed no request.
#[derive(Default)]
struct Silence {
    completed: Option<u64>,
    time: Duration,
}

impl Silence {
    /// The time that has passed since the last step, and the number of requests that the device has completed, if that is known.
    fn step(&mut self, elapsed: Duration, completed: Option<u64>) -> Duration {
        let goes_on = completed.is_some() && completed != self.completed;
        self.time = if goes_on { Duration::ZERO } else { self.time + elapsed };
        self.completed = completed;
        self.time
    }
}

/// The number of requests that the block device below a folder has completed, as the kernel counts them.
struct CompletedRequests {
    /// None where there is no such device, as with a network file system.
    file: Option<PathBuf>,
}

impl CompletedRequests {
    fn of(folder: &Path) -> Self {
        let device = std::fs::metadata(folder).map(|found| found.dev());
        let file = device.map(|device| {
            let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
            PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"))
        });
        Self { file: file.ok().filter(|file| file.exists()) }
    }

    fn number(&self) -> Option<u64> {
        completed_in(&std::fs::read_to_string(self.file.as_ref()?).ok()?)
    }
}

/// The completed reads, writes, discards and flushes in the text of a device's `stat`; earlier kernels do not count the last two.
fn completed_in(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let [reads, writes] = [0, 4].map(|at| fields.get(at).copied());
    let others: u64 = [11, 15].into_iter().filter_map(|at| fields.get(at)).sum();
    Some(reads? + writes? + others)
}

/// Name of the file that probes write to. It has this name for a moment only.
const PROBE_FILE: &str = "probe";
const PROBE_BYTES: u64 = BLOCK_BYTES as u64;

/// Starts the thread that writes and syncs a block on the disk, from time to time while `is_used` says that a program may wait for
/// the disk. A program writes to its own log itself, so the daemon may have nothing to do on a disk that does not answer.
///
/// # Errors
/// No thread is left.
pub fn probe(medium: &Medium, period: Duration, is_used: impl Fn() -> bool + Send + 'static) -> Result<()> {
    if medium.class() != Class::File {
        return Ok(());
    }
    let medium = medium.clone();
    spawn("disk-probe", move || {
        let mut file = None;
        loop {
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(period)));
            if is_used() {
                probe_once(&medium, &mut file);
            }
        }
    })
}

/// Writes a block, whatever comes of it: an error of the medium is found by the work of the daemon, which depends on it.
fn probe_once(medium: &Medium, file: &mut Option<Region>) {
    if file.is_none() {
        // That of a process that was killed.
        let _ = medium.remove_transient(PROBE_FILE);
        *file = medium.create_transient(PROBE_FILE, PROBE_BYTES).ok();
        let _ = medium.remove_transient(PROBE_FILE);
    }
    if let Some(region) = file {
        region.write(0, &SystemHost.now().as_ns().to_le_bytes());
        let _ = region.sync();
    }
}

/// The opening of a pool. The daemon answers no question meanwhile; if its disk does not answer, the note for `hearth status` says
/// so until the pool is open.
pub struct Opening {
    stage: Arc<Word>,
}

/// The stages of an opening.
const OPENING: u32 = 0;
const OPEN: u32 = 1;
const FAILED: u32 = 2;

impl Opening {
    /// Starts the thread that looks.
    ///
    /// # Errors
    /// No thread is left.
    pub fn begin(cluster: &Cluster, node: &Node, disk: &Arc<DiskStall>) -> Result<Self> {
        let stage = Arc::new(Word::new(OPENING));
        let (cluster, node, disk, seen) = (cluster.clone(), node.clone(), disk.clone(), stage.clone());
        spawn("opening", move || note_while_opening((&cluster, &node), &disk, &seen))?;
        Ok(Self { stage })
    }

    /// The pool is open.
    pub fn end(self) {
        self.set(OPEN);
    }

    fn set(&self, stage: u32) {
        // Release: pairs with the Acquire of the thread. A stage that was set before stays.
        let _ = self.stage.compare_exchange(OPENING, stage, Ordering::AcqRel, Ordering::Acquire);
        SystemHost.wake(&self.stage, WAKE_ALL);
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        // The reason of the failure takes the place of the note.
        self.set(FAILED);
    }
}

fn note_while_opening((cluster, node): (&Cluster, &Node), disk: &DiskStall, stage: &Word) {
    let mut noted = None;
    // Acquire: pairs with the Release above.
    while stage.load(Ordering::Acquire) == OPENING {
        // The reason for which the daemon before this one ended says more.
        if disk.told_ms().is_some() && noted.is_none() && cluster.failure(node).is_none() {
            let note = "the disk of its pool does not answer, and the daemon waits for it to open the pool"
                .to_owned();
            note_failure(cluster, node, &note);
            noted = Some(note);
        }
        SystemHost.wait(stage, OPENING, Some(SystemHost.now().after(LOG_LOOK)));
    }
    if noted.is_some() && stage.load(Ordering::Acquire) == OPEN && noted == cluster.failure(node) {
        let _ = std::fs::remove_file(cluster.failure_file(node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_completes_other_requests_is_not_silent() {
        const STEP: Duration = Duration::from_millis(100);
        let mut silence = Silence::default();
        let counts = [7, 7, 7, 8, 8, 9].map(Some);
        assert_eq!(
            counts.map(|count| silence.step(STEP, count)),
            [0, 1, 2, 0, 1, 0].map(|steps| STEP * steps)
        );
        let mut unknown = Silence::default();
        assert_eq!([None; 3].map(|count| unknown.step(STEP, count)), [1, 2, 3].map(|steps| STEP * steps));
    }

    #[test]
    fn a_busy_disk_may_take_three_times_as_long() {
        let is_hung = |time: u64, silence: u64| {
            let [time_ns, silence_ns] = [time, silence].map(|seconds| LongWord::new(seconds * 1_000_000_000));
            DiskStall { time_ns, silence_ns }.is_hung(Duration::from_secs(10))
        };
        assert!(is_hung(10, 10) && is_hung(30, 0));
        assert!(!is_hung(9, 10) && !is_hung(29, 9));
        let idle = DiskStall { time_ns: LongWord::new(NOTHING), silence_ns: LongWord::new(0) };
        assert!(!idle.is_hung(Duration::ZERO));
    }

    #[test]
    fn requests_are_counted_where_the_kernel_counts_them() {
        let stat = " 4 1 80 2 30 2 900 7 0 9 9 500 0 8 1 6000 5\n";
        assert_eq!(completed_in(stat), Some(6534));
        assert_eq!(completed_in("4 1 80 2 30 2 900 7 0 9 9\n"), Some(34));
        assert_eq!(completed_in(""), None);
        assert_eq!(CompletedRequests::of(Path::new("/proc")).number(), None);
    }
}
