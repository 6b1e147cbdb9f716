//! Whether a daemon lives, as a word that every program of its node may read (CC-NVM's fence of a node that died,
//! Assise §3.4, for the daemon alone).
//!
//! The daemon ties the word to its life: when it dies in any way the kernel says so in the word, as it does for the
//! owner of a robust futex (`set_robust_list(2)`), and it does that before it lets go of what the process had open,
//! so also before the pool's lock is free.
//!
//! Guarantees: whoever takes the pool's lock after the daemon's death knows that every program finds the word
//! saying so, without having told one. What a program did and then found the daemon alive came before that.

use crate::error::Error;
use crate::host::{Host, Join, SystemHost, WAKE_ALL};
use crate::shared::{Mapping, Reads, Words};
use crate::sync::{Ordering, Word};
use crate::sys::{check, syscall};
use std::sync::Arc;

/// The bit that the kernel sets: the owner of the futex died. Below it stands the owner's thread number.
const DIED: u32 = 0x4000_0000;
/// The bit that a daemon sets itself when it ends in order. To the kernel it means a waiter; here nobody waits.
const ENDED: u32 = 0x8000_0000;

/// What the word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The daemon lives.
    Alive,
    /// It died, and is started again.
    Died,
    /// It ended in order.
    Ended,
}

/// The word. 0 before a daemon took it.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct AliveWord(pub(crate) Word);

impl AliveWord {
    /// What it says.
    #[inline]
    pub fn load(&self) -> Life {
        // SeqCst: comes after the loads of a copy, and after the commit before it: by the commit's own fence, or by
        // that which the next daemon has put here before it reads a log (`Host::fence_others`). Either it sees that
        // the daemon died, or what came before is seen by who reads after the death.
        match self.0.load(Ordering::SeqCst) {
            value if value < DIED => Life::Alive,
            value if value & ENDED != 0 => Life::Ended,
            _ => Life::Died,
        }
    }

    /// Does what the kernel does when the owner dies. For a machine without processes: the simulator's.
    pub fn set_died(&self) {
        self.0.store(DIED, Ordering::SeqCst);
    }

    /// Says that the word has an owner, without tying it to anybody's life; as [`Self::set_died`].
    pub fn set_alive(&self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

/// The daemon's hold on the word; the word says `Died` when this goes.
pub struct Alive {
    word: Words<AliveWord>,
    _tie: Box<dyn Send + Sync>,
}

impl Alive {
    /// Ties the word at `offset` to the life of this process.
    ///
    /// # Errors
    /// `Memory`: outside of the mapping. `System`: no thread to be had.
    pub fn claim(host: &dyn Host, mapping: &Arc<Mapping>, offset: usize) -> Result<Self, Error> {
        let word = mapping.words(offset, 1)?;
        let tie = host.tie(mapping.words(offset, 1)?)?;
        Ok(Self { word, _tie: tie })
    }

    /// Says that the daemon ended in order: its programs need not wait for another.
    pub fn end(&self) {
        self.word[0].0.fetch_or(ENDED, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Alive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alive").field("word", &self.word[0]).finish_non_exhaustive()
    }
}

/// The word as a program sees it.
#[derive(Debug)]
pub struct AliveView(Reads<AliveWord>);

impl AliveView {
    /// The word at `offset`.
    ///
    /// # Errors
    /// `Memory`: outside of the mapping.
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Result<Self, Error> {
        Ok(Self(mapping.reads(offset, 1)?))
    }

    /// What it says.
    #[inline]
    pub fn life(&self) -> Life {
        self.0.read(0)
    }

    /// Whether the daemon lives. What this thread did before was done in its life.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.life() == Life::Alive
    }
}

/// The kernel's `struct robust_list_head` with the one entry of its list behind it.
#[repr(C)]
struct RobustList {
    first: usize,
    /// From an entry to its futex.
    futex_offset: isize,
    pending: usize,
    entry: usize,
}

/// What the thread that owns the word and its daemon tell each other.
struct Owned {
    word: Words<AliveWord>,
    stage: Word,
}

const STARTING: u32 = 0;
const OWNED: u32 = 1;
const FAILED: u32 = 2;
const OVER: u32 = 3;

/// A thread that owns the word and does nothing else: it dies with the process.
struct Owner {
    owned: Arc<Owned>,
    thread: Option<Box<dyn Join>>,
}

/// Starts the thread, and waits until the word is its.
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

/// The thread: owns the word until it is told that it is over.
fn own(owned: &Owned) {
    let word = &owned.word[0];
    let mut list = Box::new(RobustList { first: 0, futex_offset: 0, pending: 0, entry: 0 });
    let head = (&raw const *list).addr();
    let entry = (&raw const list.entry).addr();
    list.first = entry;
    // The list is a ring: the last entry leads to the head.
    list.entry = head;
    list.futex_offset = word.0.address().wrapping_sub(entry).cast_signed();
    let head_bytes = 3 * size_of::<usize>();
    // SAFETY: gettid uses no memory.
    let thread = unsafe { syscall(libc::SYS_gettid, [0; 6]) };
    // SAFETY: the list stays where it is until it is taken back below, and the word is mapped as long as `owned`; the
    // kernel reads both when this thread ends, and compares the word with the thread's number before it writes.
    let set = unsafe { syscall(libc::SYS_set_robust_list, [head, head_bytes, 0, 0, 0, 0]) };
    let tied = check("set_robust_list", set).is_ok();
    if tied {
        word.0.store(u32::try_from(thread).expect("a thread's number is small"), Ordering::SeqCst);
    }
    // Release: pairs with the Acquire of who waits for it.
    owned.stage.store(if tied { OWNED } else { FAILED }, Ordering::Release);
    SystemHost.wake(&owned.stage, WAKE_ALL);
    while owned.stage.load(Ordering::Acquire) == OWNED {
        SystemHost.wait(&owned.stage, OWNED, None);
    }
    // The daemon goes, the process stays: the kernel's part is done here.
    word.0.fetch_or(DIED, Ordering::SeqCst);
    // SAFETY: no list from here on, so that the kernel reads nothing that is freed.
    let _ = unsafe { syscall(libc::SYS_set_robust_list, [0, head_bytes, 0, 0, 0, 0]) };
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `own`.
        self.owned.stage.store(OVER, Ordering::Release);
        SystemHost.wake(&self.owned.stage, WAKE_ALL);
        if let Some(thread) = self.thread.take() {
            // It cannot panic in a way that matters any more.
            let _ = thread.join();
        }
    }
}

/// When a process started, in ticks of the machine's clock; none if it is gone or only waits to be reaped.
pub(crate) fn started(process: u32) -> Option<u64> {
    if process == 0 {
        return None;
    }
    started_of(&std::fs::read(format!("/proc/{process}/stat")).ok()?)
}

/// When a process started, as its line of `/proc` says; none if it has ended.
fn started_of(stat: &[u8]) -> Option<u64> {
    // The name in parentheses may hold anything, also spaces and parentheses.
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(stat.get(after + 1..)?).ok()?.split_whitespace();
    let state = fields.next()?;
    let threads = fields.nth(16)?;
    // A main thread that has ended stays until the last one has, and the process lives so long.
    if state == "X" || (state == "Z" && matches!(threads, "0" | "1")) {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

/// The first half of the kernel's number for this run of the machine.
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
