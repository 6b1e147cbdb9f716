//! The space that a pool needs on its medium, beside what its files have already: another program may fill the medium. The pool
//! holds it ahead ([`pmem::held`]).
//!
//! The held space has three parts. The *base* is for what a daemon needs to start and to go on: logs of programs that begin, the
//! register, headers of segments. The second part backs reservations. The rest is *spare*: a program that asks for a reservation does
//! not wait for the kernel. A thread in the background holds more before the spare is used up.
//!
//! Guarantees: the reservations of all sessions together are never more than the free blocks in segments of the daemon that have
//! space, and what is held beyond the base. So a batch of acknowledged records finds space on a full medium: see `area::space`.

use crate::config::Config;
use crate::register::REGISTER_BYTES_MIN;
use crate::state::Core;
use area::Area;
use format::BLOCK_BYTES;
use ipc::host::Time;
use pmem::alloc::CHUNK_BLOCKS;
use pmem::{MediaError, Medium};
use std::ops::DerefMut;
use std::time::Duration;

/// Bytes of a block.
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Logs for which the base has space: of programs that begin on a full medium, to remove files.
const LOGS: u64 = 2;
/// Parts of segments in the base: a part gets its space for one block, and a segment has a header.
const PARTS: u64 = 4;
/// One of so many held blocks is for headers of segments.
const HEADER_PART: u64 = 128;
/// So much is held at once: the kernel provides it in about a millisecond.
const STEP_BYTES: u64 = 4 << 20;
/// The least, where there is little.
const STEP_BYTES_MIN: u64 = 64 << 10;
/// The last bytes of a medium are for the small files of the node itself, and of others.
const LEFT_BYTES: u64 = 256 << 10;
/// A request that finds nothing held holds so much by itself.
const CALL_BYTES: u64 = 1 << 20;
/// The spare grows to so many times its least while programs write.
const SPARE_GROWTH: u64 = 2;
/// A copy that left for lack of space returns when this part of the spare is there.
const RETURN_PART: u64 = 4;
/// So long reservations are counted to find how much is reserved soon.
const WINDOW: Duration = Duration::from_millis(100);
/// A full medium is asked again after so long.
const RETRY: Duration = Duration::from_millis(50);
/// Free blocks keep their space for so long at least: a program may be in the middle of reading what was there.
const REST: Duration = Duration::from_millis(200);

/// How a pool holds space; clones are of the same pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolSpace {
    medium: Medium,
    /// Bytes that back no reservation, and those of them that are not for logs.
    base: u64,
    base_without_logs: u64,
    /// Bytes for records that replace blocks.
    replacing: u64,
    /// Spare bytes, at least.
    spare: u64,
}

impl PoolSpace {
    pub fn of(medium: &Medium, config: &Config) -> Self {
        let unit = medium.space_unit();
        let part = unit.max(u64::from(CHUNK_BLOCKS) * BLOCK);
        let base_without_logs = PARTS * part + REGISTER_BYTES_MIN;
        let log_bytes = config.log_bytes.next_multiple_of(unit) + BLOCK;
        Self {
            medium: medium.clone(),
            base: base_without_logs + LOGS * log_bytes,
            base_without_logs,
            replacing: config.replace_reserve() * BLOCK,
            spare: config.held_spare(),
        }
    }

    /// Blocks that may be reserved, where the daemon's segments have space for so many; those for replacing included.
    pub fn backed(&self, provided: u64) -> u64 {
        let Some(held) = self.medium.held_bytes() else { return u64::MAX };
        match held.checked_sub(self.base) {
            Some(beyond) => provided + (beyond / BLOCK - (beyond / BLOCK).div_ceil(HEADER_PART)),
            // A chunk of a segment got its space from the base: its blocks are the base now.
            None => provided.saturating_sub((self.base - held).div_ceil(BLOCK)),
        }
    }

    /// Blocks for which the medium has space that is not held.
    pub fn free_blocks(&self) -> u64 {
        self.medium.free_bytes().map_or(u64::MAX, |bytes| bytes / BLOCK)
    }

    /// Whether a log may take so many bytes of the base, beside reservations of so many blocks of which so many have space.
    pub fn has_log(&self, bytes: u64, (reserved, provided): (u64, u64)) -> bool {
        let held = self.medium.held_bytes().unwrap_or(u64::MAX);
        bytes <= held.saturating_sub(self.base_without_logs + with_headers(reserved.saturating_sub(provided)))
    }

    /// Bytes that should be held, with so much spare.
    fn wanted(&self, (reserved, provided): (u64, u64), spare: u64) -> u64 {
        let backing = reserved.saturating_mul(BLOCK) + self.replacing + spare;
        let backing = backing.saturating_sub(provided.saturating_mul(BLOCK));
        self.base + with_headers(backing.div_ceil(BLOCK))
    }

    /// The spare while so many blocks were reserved in a short time.
    fn spare_for(&self, recent: u64) -> u64 {
        (recent.saturating_mul(2 * BLOCK)).clamp(self.spare, SPARE_GROWTH * self.spare)
    }

    /// Holds at most so many bytes more; true if it holds at least some. Where there is no space for all, less.
    pub fn hold(&self, bytes: u64) -> bool {
        let mut step = bytes.next_multiple_of(BLOCK);
        if let Some(free) = self.medium.free_bytes() {
            step = step.min(free.saturating_sub(LEFT_BYTES) / BLOCK * BLOCK);
        }
        if step < STEP_BYTES_MIN.min(bytes) {
            return false;
        }
        loop {
            match self.medium.hold(step) {
                Ok(()) => return true,
                Err(MediaError::NoSpace) if step > STEP_BYTES_MIN => step = (step / 4).max(STEP_BYTES_MIN),
                // The pool then backs less.
                Err(_) => return false,
            }
        }
    }

    /// Holds what a pool needs at its start, as far as there is space: so many blocks need some, and so many have some.
    pub fn hold_at_start(&self, blocks: (u64, u64)) {
        let wanted = self.wanted(blocks, self.spare);
        while let Some(missing) = self.missing(wanted)
            && self.hold(missing.min(STEP_BYTES))
        {}
    }

    /// Blocks for which a copy that left for lack of space has to have some again, beside those that it knows of.
    pub fn blocks_to_return(&self) -> u64 {
        self.spare / RETURN_PART / BLOCK
    }

    /// Bytes that are missing of those that are wanted.
    fn missing(&self, wanted: u64) -> Option<u64> {
        let held = self.medium.held_bytes()?;
        wanted.checked_sub(held).filter(|missing| *missing > 0)
    }
}

/// Bytes for blocks that may need segments of their own.
fn with_headers(blocks: u64) -> u64 {
    (blocks + blocks.div_ceil(HEADER_PART - 1)).saturating_mul(BLOCK)
}

/// The results of earlier rounds of the thread that holds space.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    /// Blocks that were reserved since the start, when they were looked at last, and how many before that.
    seen: u64,
    recent: u64,
    window_end: Option<Time>,
    /// The medium had no space, and is asked again then.
    retry: Option<Time>,
    /// When free blocks began to rest.
    rests_since: Option<Time>,
    /// The medium lacks space that the pool should hold.
    pub is_short: bool,
}

/// The result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldStep {
    /// All is held that should be.
    Done,
    /// There is more to do.
    More,
    /// The medium is full.
    Short,
    /// It is, and free blocks give their space back soon.
    ShortForNow,
}

impl PoolSpace {
    /// One step towards what should be held. `blocks`: those that need space, and those that have some. `granted`: how many were
    /// reserved since the start. If the medium is full, free blocks in the segments of `area` give their space back.
    pub fn step<A: DerefMut<Target = Area>>(
        &self,
        holding: &mut Holding,
        (blocks, granted): ((u64, u64), u64),
        (now, is_idle): (Time, bool),
        area: impl FnOnce() -> Option<A>,
    ) -> HoldStep {
        if holding.window_end.is_none_or(|end| now >= end) {
            (holding.recent, holding.seen) = (granted - holding.seen, granted);
            holding.window_end = Some(now.after(WINDOW));
        }
        let wanted = self.wanted(blocks, self.spare_for(holding.recent));
        let Some(missing) = self.missing(wanted) else {
            holding.is_short = false;
            let much = wanted + self.spare / 2;
            if is_idle && self.medium.held_bytes().is_some_and(|held| held > much) {
                // The next idle round tries again after an error.
                let _ = self.medium.hold_at_most(wanted);
            }
            return HoldStep::Done;
        };
        if holding.retry.is_some_and(|retry| now < retry) {
            return HoldStep::Short;
        }
        if self.hold(missing.min(STEP_BYTES)) {
            (holding.retry, holding.is_short) = (None, false);
            return HoldStep::More;
        }
        holding.is_short = true;
        let step = match area() {
            Some(mut area) => holding.give_back(&mut area, missing.min(STEP_BYTES), now),
            None => HoldStep::ShortForNow,
        };
        if step == HoldStep::Short {
            holding.retry = Some(now.after(RETRY));
        }
        step
    }

    /// Whether there is space for so many blocks, of which so many have some; holds more if that is too little.
    pub fn has(&self, blocks: u64, provided: u64) -> bool {
        loop {
            let missing = blocks.saturating_sub(self.backed(provided));
            if missing == 0 {
                return true;
            }
            if !self.hold(with_headers(missing).clamp(CALL_BYTES, STEP_BYTES)) {
                return false;
            }
        }
    }
}

impl Holding {
    /// Gives space of free blocks back to the medium.
    fn give_back(&mut self, area: &mut Area, bytes: u64, now: Time) -> HoldStep {
        let given = area.give_back(bytes);
        let comes = area.has_resting_blocks();
        if self.rests_since.is_none_or(|since| now >= since.after(REST)) {
            area.note_time();
            self.rests_since = Some(now);
        }
        match given {
            Ok(given) if given > 0 => HoldStep::More,
            // A file system without holes keeps what it has.
            Ok(_) if comes => HoldStep::ShortForNow,
            _ => HoldStep::Short,
        }
    }
}

impl Core {
    /// One step towards what should be held. Called by the background thread, and by calls that found nothing.
    pub fn hold_step(&self, is_idle: bool) -> HoldStep {
        let now = self.host.now();
        let (space, blocks, granted) = {
            let state = self.state.lock();
            let free = &state.copy.free;
            let Some(space) = free.space.clone() else { return HoldStep::Done };
            (space, (state.room.reserved(), free.provided), state.room.granted())
        };
        let mut holding = self.holding.lock();
        space.step(&mut holding, (blocks, granted), (now, is_idle), || self.area.try_lock())
    }

    /// Holds space for the blocks that a session begins with, as far as there is too little.
    pub fn hold_for_session(&self) {
        let (space, blocks, provided) = {
            let state = self.state.lock();
            let free = &state.copy.free;
            let Some(space) = free.space.clone() else { return };
            (
                space,
                state.room.reserved() + self.config.room_blocks + self.config.replace_reserve(),
                free.provided,
            )
        };
        // If there is no space, the session begins with less.
        let _ = space.has(blocks, provided);
    }

    /// Holds some space at once for a request for so many blocks that found too few held. True if there is some.
    pub fn hold_for_call(&self, blocks: u64) -> bool {
        let space = self.state.lock().copy.free.space.clone();
        space.is_some_and(|space| space.hold(with_headers(blocks).clamp(CALL_BYTES, STEP_BYTES)))
    }

    /// Whether the medium lacks space that the pool should hold.
    pub fn lacks_space(&self) -> bool {
        self.holding.lock().is_short
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::room::{Free, Room};
    use area::{FreeBlocks, Usage};
    use ccnvm::SessionId;
    use pmem::Recorder;

    const RESERVE_TO_REPLACE: u64 = 64;

    /// Free space in a pool that is nearly empty, and of which so many blocks have space.
    fn free(space: &PoolSpace, provided: u64) -> Free {
        let usage = Usage {
            blocks: 100_000,
            blocks_free: 90_000,
            blocks_unmade: 80_000,
            nodes: 9000,
            nodes_free: 9000,
            inodes: 1,
        };
        let blocks = FreeBlocks { shared: 90_000, own: [(7, 500)].into() };
        Free { usage, blocks, provided, space: Some(space.clone()) }
    }

    #[test]
    fn no_more_is_reserved_than_is_held_beyond_the_base() {
        let recorder = Recorder::new();
        recorder.limit_space(100 << 20);
        let medium = recorder.medium();
        let config = Config { replace_reserve_max: RESERVE_TO_REPLACE, ..Config::default() };
        let space = PoolSpace::of(&medium, &config);
        let mut room = Room::new(16, RESERVE_TO_REPLACE);
        let [one, two] = [1, 2].map(SessionId);
        room.begin(one, 7);
        room.begin(two, 8);
        medium.hold(space.base).unwrap();
        assert_eq!(
            (space.backed(0), room.promise(one, 1000, &free(&space, 0))),
            (0, 0),
            "the base is for none"
        );
        medium.hold(512 * BLOCK).unwrap();
        let full = free(&space, 100);
        assert_eq!(space.backed(100), 100 + 512 - 4);
        // A user's own free blocks need no shared ones of the pool, but space as all others.
        assert_eq!(room.promise(one, 1000, &full), 608 - RESERVE_TO_REPLACE);
        assert_eq!((room.promise(two, 1, &full), room.missing_in_medium(two, 5, &full)), (0, 5));
        assert_eq!(room.promise_to_replace(two, 8, &full), 8);
        assert!(!room.lend(1, &full));
        // A batch takes held space for segments: their blocks have it then.
        medium.hold_at_most(medium.held_bytes().unwrap() - 256 * BLOCK).unwrap();
        room.end_batch(one, 200);
        assert_eq!(room.promise(one, 1000, &free(&space, 100 + 256 - 200)), 0);
        room.end(one);
        assert_eq!(room.promise(two, 1000, &free(&space, 0)), 512 - 256 - 2 - 8 - RESERVE_TO_REPLACE);
    }

    #[test]
    fn programs_that_begin_on_a_full_medium_have_logs_and_what_is_reserved_stays() {
        let recorder = Recorder::new();
        recorder.limit_space(100 << 20);
        let (medium, config) = (recorder.medium(), Config::default());
        let space = PoolSpace::of(&medium, &config);
        medium.hold(space.base + with_headers(100)).unwrap();
        recorder.fill_space();
        let log = || space.has_log(config.log_bytes, (100, 0)) && recorder.space_left() == Some(0);
        for _ in 0..LOGS {
            assert!(log());
            medium.hold_at_most(medium.held_bytes().unwrap() - config.log_bytes - BLOCK).unwrap();
            recorder.fill_space();
        }
        assert!(!log() && !space.has(101, 0));
    }

    #[test]
    fn the_spare_grows_with_what_is_reserved_and_is_given_up_when_nothing_is() {
        let recorder = Recorder::new();
        recorder.limit_space(500 << 20);
        let (medium, config) = (recorder.medium(), Config::default());
        let space = PoolSpace::of(&medium, &config);
        space.hold_at_start((0, 0));
        let spare = config.held_spare();
        assert_eq!(medium.held_bytes(), Some(space.wanted((0, 0), spare)));
        let (mut holding, mut ms) = (Holding::default(), 1);
        let mut until_done = |blocks, granted, is_idle| {
            ms += 200;
            let now = (Time::from_ns(ms * 1_000_000), is_idle);
            let step =
                |holding: &mut Holding| space.step(holding, (blocks, granted), now, || None::<&mut Area>);
            while step(&mut holding) == HoldStep::More {}
            medium.held_bytes().unwrap()
        };
        assert_eq!(until_done((5000, 0), 20_000, false), space.wanted((5000, 0), SPARE_GROWTH * spare));
        assert_eq!(until_done((5000, 0), 20_000, true), space.wanted((5000, 0), spare));
        recorder.fill_space();
        let held = until_done((50_000, 0), 65_000, false);
        assert!(held == medium.held_bytes().unwrap() && holding.is_short);
    }
}
