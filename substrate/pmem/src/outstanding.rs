//! Operations on the files of a pool that have not returned. A medium that stops answering (a dying disk, a network file
//! system, a suspended device) gives no error: the thread that waits for it waits without an end.
//!
//! Each thread has a slot, in which it counts the begin and the end of each of its operations on a guarded medium
//! ([`crate::Medium::guarded`]). The count is odd while an operation has not returned. Counting takes two stores, and no
//! look at a clock. A [`StallMeter`] reads all slots at each look; an operation has stalled for as long as the looks find
//! the same odd count.
//!
//! Guarantee: a meter counts no time in which its own thread did not run, beyond a step for each look. So a process that
//! was stopped and continues, or that gets little of its processor, does not blame the medium for the pause.
//!
//! The slots are global to the process, because a thread uses several media. If more threads live than there are slots,
//! the operations of the others are not seen.

use crate::guard::Watch;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, compiler_fence};
use std::time::Duration;

/// Limit of the threads whose operations are seen.
const THREADS_MAX: usize = 4096;

/// The count of one thread, in a cache line of its own.
#[repr(align(64))]
struct Slot {
    /// It belongs to a thread.
    taken: AtomicBool,
    /// The address of the watch of the medium that the thread used last.
    medium: AtomicUsize,
    /// Odd while an operation has not returned. Never goes back, also when another thread gets the slot.
    count: AtomicU64,
}

static SLOTS: [Slot; THREADS_MAX] =
    [const { Slot { taken: AtomicBool::new(false), medium: AtomicUsize::new(0), count: AtomicU64::new(0) } };
        THREADS_MAX];

/// Slots behind this one were never taken.
static USED: AtomicUsize = AtomicUsize::new(0);

std::thread_local! {
    static OWN: ThreadSlot = ThreadSlot::take();
}

/// The slot of this thread, until the thread ends.
struct ThreadSlot(Option<&'static Slot>);

impl ThreadSlot {
    fn take() -> Self {
        let take = |slot: &&Slot| {
            slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let found = SLOTS.iter().enumerate().find(|(_, slot)| take(slot));
        Self(found.map(|(index, slot)| {
            USED.fetch_max(index + 1, Ordering::AcqRel);
            slot
        }))
    }
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.taken.store(false, Ordering::Release);
        }
    }
}

/// An operation of this thread, until it is dropped.
pub(crate) struct Operation(&'static Slot);

impl Operation {
    /// Counts the begin of an operation on a medium; `None` if it is a part of another one, or is not counted.
    #[inline]
    pub fn begin(watch: &Arc<Watch>) -> Option<Self> {
        let slot = OWN.try_with(|own| own.0).ok().flatten()?;
        // Relaxed: only this thread writes the count. The meter reads it again and again, and needs no order with
        // anything else.
        let count = slot.count.load(Ordering::Relaxed);
        if !count.is_multiple_of(2) {
            return None;
        }
        slot.medium.store(Arc::as_ptr(watch).addr(), Ordering::Relaxed);
        slot.count.store(count + 1, Ordering::Relaxed);
        // Pairs with the one in `drop`: the compiler keeps the operation between the stores.
        compiler_fence(Ordering::SeqCst);
        Some(Self(slot))
    }
}

impl Drop for Operation {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let count = self.0.count.load(Ordering::Relaxed);
        self.0.count.store(count + 1, Ordering::Relaxed);
    }
}

/// The operation of this thread has made progress, and goes on.
pub(crate) fn note_progress() {
    let Some(slot) = OWN.try_with(|own| own.0).ok().flatten() else { return };
    let count = slot.count.load(Ordering::Relaxed);
    if !count.is_multiple_of(2) {
        slot.count.store(count + 2, Ordering::Relaxed);
    }
}

/// Measures for how long the oldest outstanding operation on a medium has made no progress.
#[derive(Debug)]
pub struct StallMeter {
    watch: Arc<Watch>,
    step_max: Duration,
    /// Of each slot: the count at the last look, and for how long the operation has stalled.
    seen: Vec<(u64, Duration)>,
}

impl StallMeter {
    pub(crate) fn new(watch: &Arc<Watch>, step_max: Duration) -> Self {
        Self { watch: watch.clone(), step_max, seen: Vec::new() }
    }

    /// Looks at all operations. `elapsed`: the time since the last look, of which at most a step counts. For how long the
    /// oldest one that has not returned has stalled; `None` if there is none.
    pub fn look(&mut self, elapsed: Duration) -> Option<Duration> {
        let step = elapsed.min(self.step_max);
        let medium = Arc::as_ptr(&self.watch).addr();
        self.seen.resize(USED.load(Ordering::Acquire), (0, Duration::ZERO));
        let stalls = SLOTS.iter().zip(&mut self.seen).filter_map(|(slot, (seen, stalled))| {
            let count = slot.count.load(Ordering::Acquire);
            let is_outstanding = !count.is_multiple_of(2) && slot.medium.load(Ordering::Relaxed) == medium;
            *stalled = if is_outstanding && count == *seen { *stalled + step } else { Duration::ZERO };
            *seen = count;
            is_outstanding.then_some(*stalled)
        });
        stalls.max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const STEP: Duration = Duration::from_millis(100);

    #[test]
    fn an_operation_stalls_from_the_first_look_that_finds_it_until_it_returns() {
        let watch = Arc::new(Watch::default());
        let mut meter = StallMeter::new(&watch, STEP * 2);
        assert_eq!(meter.look(STEP), None);
        let operation = Operation::begin(&watch).unwrap();
        assert_eq!((0..3).map(|_| meter.look(STEP)).collect::<Vec<_>>(), [0, 1, 2].map(|n| Some(STEP * n)));
        assert!(Operation::begin(&watch).is_none(), "a part of the other one");
        drop(operation);
        assert_eq!(meter.look(STEP), None);
        // The next one is not the same one.
        let _next = Operation::begin(&watch).unwrap();
        assert_eq!(meter.look(STEP), Some(Duration::ZERO));
    }

    #[test]
    fn a_thread_that_goes_on_with_its_operations_never_stalls() {
        let watch = Arc::new(Watch::default());
        let mut meter = StallMeter::new(&watch, STEP);
        for _ in 0..10 {
            let _operation = Operation::begin(&watch).unwrap();
            assert_eq!(meter.look(STEP), Some(Duration::ZERO));
        }
        let operation = Operation::begin(&watch).unwrap();
        for _ in 0..10 {
            assert_eq!(meter.look(STEP), Some(Duration::ZERO));
            note_progress();
        }
        drop(operation);
        note_progress();
        assert_eq!(meter.look(STEP), None);
    }

    #[test]
    fn a_pause_of_the_process_counts_as_one_step() {
        let watch = Arc::new(Watch::default());
        let mut meter = StallMeter::new(&watch, STEP);
        let _operation = Operation::begin(&watch).unwrap();
        meter.look(STEP);
        assert_eq!(meter.look(Duration::from_secs(3600)), Some(STEP));
    }

    #[test]
    fn a_meter_sees_all_threads_and_its_own_medium_only() {
        let [one, other] = [(), ()].map(|()| Arc::new(Watch::default()));
        let mut meters = [&one, &other].map(|watch| StallMeter::new(watch, STEP));
        let ((begun, has_begun), (end, ends)) = (channel(), channel::<()>());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _operation = Operation::begin(&one).unwrap();
                begun.send(()).unwrap();
                let _ = { ends }.recv();
            });
            has_begun.recv().unwrap();
            let looks = || meters.each_mut().map(|meter| meter.look(STEP));
            let mut looks = looks;
            assert_eq!(looks(), [Some(Duration::ZERO), None]);
            // An operation of another thread changes nothing.
            drop(Operation::begin(&one));
            assert_eq!(looks(), [Some(STEP), None]);
            drop(end);
        });
        assert_eq!(meters.each_mut().map(|meter| meter.look(STEP)), [None, None]);
    }
}
