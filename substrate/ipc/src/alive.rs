//! Tells every program of a node whether the node's daemon is alive, by one word in shared memory (CC-NVM's fence
//! of a failed node, Assise §3.4, applied to the daemon).
//!
//! The word is a robust futex (`set_robust_list(2)`) of a thread of the daemon. When the daemon dies, for whatever
//! reason, the kernel marks the word. It does so before it closes the descriptors of the process, so before the
//! pool's file lock is released.
//!
//! Guarantees: once a new daemon has acquired the pool's lock, every program finds its predecessor's death in the
//! word, without a message. Whatever a program did before it found the daemon alive happened before the death.

use crate::error::Error;
use crate::host::{Host, Join, SystemHost, WAKE_ALL};
use crate::shared::{Mapping, Reads, Words};
use crate::sync::{Ordering, Word};
use crate::sys::{check, syscall};
use std::sync::Arc;

/// Bit that the kernel sets when the owner of the futex died. The bits below hold the owner's thread number.
const DIED: u32 = 0x4000_0000;
/// Bit that a daemon sets itself at an orderly shutdown. The kernel interprets the bit as "has waiters"; this futex
/// has none.
const ENDED: u32 = 0x8000_0000;

/// State of the daemon as the word gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The daemon is running.
    Alive,
    /// The daemon died and is being started again.
    Died,
    /// The daemon shut down in order.
    Ended,
}

/// The shared word. Zero until a daemon claims it.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct AliveWord(pub(crate) Word);

impl AliveWord {
    /// Decodes the word.
    #[inline]
    pub fn load(&self) -> Life {
        // SeqCst: ordered after the loads of a copy, and after the commit before it. The commit's own fence does
        // that, or the fence that the next daemon executes in this thread before it reads a log
        // (`Host::fence_others`). Either this load sees the death, or a reader after the death sees everything
        // before this load.
        match self.0.load(Ordering::SeqCst) {
            value if value < DIED => Life::Alive,
            value if value & ENDED != 0 => Life::Ended,
            _ => Life::Died,
        }
    }

    /// Marks the death as the kernel would. Only for the simulator, which has no processes.
    pub fn set_died(&self) {
        self.0.store(DIED, Ordering::SeqCst);
    }

    /// Marks the word as owned without tying it to a process. Only for the simulator, as [`Self::set_died`].
    pub fn set_alive(&self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

/// Ownership of the word by a daemon. Dropping it makes the word say `Died`.
pub struct Alive {
    word: Words<AliveWord>,
    _tie: Box<dyn Send + Sync>,
}

impl Alive {
    /// Ties the word at `offset` to the life of this process.
    ///
    /// # Errors
    /// `Memory`: the word lies outside of the mapping. `System`: no thread can be started.
    pub fn claim(host: &dyn Host, mapping: &Arc<Mapping>, offset: usize) -> Result<Self, Error> {
        let word = mapping.words(offset, 1)?;
        let tie = host.tie(mapping.words(offset, 1)?)?;
        Ok(Self { word, _tie: tie })
    }

    /// Announces an orderly shutdown, so that programs do not wait for another daemon.
    pub fn end(&self) {
        self.word[0].0.fetch_or(ENDED, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Alive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alive").field("word", &self.word[0]).finish_non_exhaustive()
    }
}

/// Read-only view of the word, for programs.
#[derive(Debug)]
pub struct AliveView(Reads<AliveWord>);

impl AliveView {
    /// A view of the word at `offset`.
    ///
    /// # Errors
    /// `Memory`: the word lies outside of the mapping.
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Result<Self, Error> {
        Ok(Self(mapping.reads(offset, 1)?))
    }

    /// State of the daemon.
    #[inline]
    pub fn life(&self) -> Life {
        self.0.read(0)
    }

    /// True while the daemon runs. Everything that this thread did before the call happened in the daemon's
    /// lifetime.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.life() == Life::Alive
    }
}

/// The kernel's `struct robust_list_head`, followed by the only entry of the list.
#[repr(C)]
struct RobustList {
    first: usize,
    /// Distance from an entry to its futex.
    futex_offset: isize,
    pending: usize,
    entry: usize,
}

/// State shared by the daemon and the thread that owns the word.
struct Owned {
    word: Words<AliveWord>,
    stage: Word,
}

const STARTING: u32 = 0;
const OWNED: u32 = 1;
const FAILED: u32 = 2;
const OVER: u32 = 3;

/// A thread whose only task is to own the word: it dies with the process.
struct Owner {
    owned: Arc<Owned>,
    thread: Option<Box<dyn Join>>,
}

/// Starts the owner thread, and waits until that thread owns the word.
pub(crate) fn tie_to_process(word: Words<AliveWord>) -> Result<Box<dyn Send + Sync>, Error> {
    let owned = Arc::new(Owned { word, stage: Word::new(STARTING) });
    let theirs = owned.clone();
    let thread = SystemHost.spawn("alive", Box::new(move || own(&theirs)))?;
    loop {
        // Acquire: pairs with the Release in `own`.
        match owned.stage.load(Ordering::Acquire) {
            STARTING => drop(SystemHost.wait(&owned.stage, STARTING, None)),
            OWNED => {
                return Ok(Box::new(crate::lock::Lock::new(
                    Arc::new(SystemHost),
                    Owner { owned, thread: Some(thread) },
                )));
            }
            _ => return Err(Error::System { call: "set_robust_list", errno: libc::ENOSYS }),
        }
    }
}

/// Body of the owner thread: owns the word until `Owner` is dropped.
fn own(owned: &Owned) {
    let word = &owned.word[0];
    let mut list = Box::new(RobustList { first: 0, futex_offset: 0, pending: 0, entry: 0 });
    let head = (&raw const *list).addr();
    let entry = (&raw const list.entry).addr();
    list.first = entry;
    // The list is circular: its last entry points to the head.
    list.entry = head;
    list.futex_offset = word.0.address().wrapping_sub(entry).cast_signed();
    let head_bytes = 3 * size_of::<usize>();
    // SAFETY: gettid uses no memory.
    let thread = unsafe { syscall(libc::SYS_gettid, [0; 6]) };
    // SAFETY: the list stays in place until the call below takes it back, and the word is mapped as long as
    // `owned`. The kernel reads both when this thread ends, and writes the word only if it holds this thread's
    // number.
    let set = unsafe { syscall(libc::SYS_set_robust_list, [head, head_bytes, 0, 0, 0, 0]) };
    let tied = check("set_robust_list", set).is_ok();
    if tied {
        word.0.store(u32::try_from(thread).expect("a thread's number is small"), Ordering::SeqCst);
    }
    // Release: pairs with the Acquire in `tie_to_process`.
    owned.stage.store(if tied { OWNED } else { FAILED }, Ordering::Release);
    SystemHost.wake(&owned.stage, WAKE_ALL);
    while owned.stage.load(Ordering::Acquire) == OWNED {
        SystemHost.wait(&owned.stage, OWNED, None);
    }
    // The daemon has ended and its process goes on: this thread does the kernel's part.
    word.0.fetch_or(DIED, Ordering::SeqCst);
    // SAFETY: the thread has no robust list from here on, so the kernel reads no freed memory.
    let _ = unsafe { syscall(libc::SYS_set_robust_list, [0, head_bytes, 0, 0, 0, 0]) };
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `own`.
        self.owned.stage.store(OVER, Ordering::Release);
        SystemHost.wake(&self.owned.stage, WAKE_ALL);
        if let Some(thread) = self.thread.take() {
            // A panic of the owner thread has no consequence any more.
            let _ = thread.join();
        }
    }
}

/// Start time of a process, in ticks of the machine's clock; `None` if the process is gone or is a zombie.
pub(crate) fn started(process: u32) -> Option<u64> {
    if process == 0 {
        return None;
    }
    started_of(&std::fs::read(format!("/proc/{process}/stat")).ok()?)
}

/// Start time of a process from its `/proc/PID/stat` line; `None` if the process has ended.
fn started_of(stat: &[u8]) -> Option<u64> {
    // The process name in parentheses may contain anything, spaces and parentheses included.
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(stat.get(after + 1..)?).ok()?.split_whitespace();
    let state = fields.next()?;
    let threads = fields.nth(16)?;
    // A main thread that has ended remains as a zombie while other threads run; the process lives until the last
    // one ends.
    if state == "X" || (state == "Z" && matches!(threads, "0" | "1")) {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

/// The parent of a process that runs in its parent's memory.
pub(crate) fn lender(process: u32) -> Option<u32> {
    if process == 0 {
        return None;
    }
    let parent = parent_of(&std::fs::read(format!("/proc/{process}/stat")).ok()?)?;
    let arguments = [process as usize, parent as usize, KCMP_VM, 0, 0, 0];
    // SAFETY: kcmp uses no memory of this process.
    let compared = unsafe { syscall(libc::SYS_kcmp, arguments) };
    matches!(check("kcmp", compared), Ok(0)).then_some(parent)
}

/// The kernel's number for the comparison of two processes' memory.
const KCMP_VM: usize = 1;

/// The parent of a process from its `/proc/PID/stat` line.
fn parent_of(stat: &[u8]) -> Option<u32> {
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    let parent: u32 =
        std::str::from_utf8(stat.get(after + 1..)?).ok()?.split_whitespace().nth(1)?.parse().ok()?;
    (parent != 0).then_some(parent)
}

/// First 64 bits of the kernel's boot id, which differs after each start of the machine.
pub(crate) fn boot() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::{Access, create};

    fn mapping() -> Arc<Mapping> {
        Mapping::new(&create(c"alive", 4096).unwrap(), 4096, Access::Write).unwrap()
    }

    #[test]
    fn the_word_says_what_became_of_the_daemon() {
        let mapping = mapping();
        let view = AliveView::new(&mapping, 64).unwrap();
        let alive = Alive::claim(&SystemHost, &mapping, 64).unwrap();
        assert_eq!(view.life(), Life::Alive);
        drop(alive);
        assert_eq!(view.life(), Life::Died);
        let alive = Alive::claim(&SystemHost, &mapping, 64).unwrap();
        assert!(view.is_alive());
        alive.end();
        assert_eq!(view.life(), Life::Ended);
        drop(alive);
        assert_eq!(view.life(), Life::Ended);
        assert!(Alive::claim(&SystemHost, &mapping, 4096).is_err());
    }

    #[test]
    fn a_process_is_known_by_when_it_started() {
        let this = std::process::id();
        assert!(started(this).is_some());
        assert_eq!(started(this), SystemHost.started(this));
        assert_eq!((started(0), started(u32::MAX)), (None, None));
        assert_ne!(SystemHost.boot(), 0);
    }

    #[test]
    fn a_process_lives_as_long_as_one_of_its_threads() {
        let line = |state: &str, threads: u32| {
            let before = "1 1 1 0 -1 4 9 0 0 0 1 2 3 4 20 0";
            started_of(format!("77 (a ) b) {state} {before} {threads} 0 5001 8192 3").as_bytes())
        };
        assert_eq!(line("S", 1), Some(5001));
        assert_eq!(line("Z", 3), Some(5001), "only its main thread has ended");
        assert_eq!(line("Z", 1), None);
        assert_eq!(line("X", 1), None);
        assert!(started(std::process::id()).is_some());
    }
}
