//! Space: inode numbers, reservations of blocks, space in the log (Assise §3.2.1, digest; schedules 2.3, 2.7). All of
//! it is requested without the state's lock; a writer waits here, and never while it is inside.

use crate::calls::error_of;
use crate::engine::LibFs;
use crate::need::RecordCost;
use crate::state::{Session, State};
use format::call::{CallKind, GrowRequest, RefillRequest, RefillResponse, Status};
use format::{BLOCK_BYTES, Sequence};
use ipc::sync::Ordering;
use std::time::Duration;
use vfs::engine::Result;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Factor by which later requests for blocks may be larger than the first.
const REFILL_GROWTH: u64 = 8;
/// Requests for records that replace blocks after a refusal, before space for any record is requested again.
const FULL_FOR: u32 = 64;
/// Refusals of space for a record that replaces blocks, each after some tens of milliseconds, before there is none.
const REFUSALS_MAX: u32 = 16;
/// A writer that finds the log full waits until the fraction `1 / PART` of its records is digested, or about this number of
/// bytes if that is less.
const PART: u64 = 8;
const PART_BYTES_MAX: u64 = 2 << 20;
/// A log gets space for twice as many bytes as it has, and at most for so many more, so that the writer does not wait long.
const LOG_STEP_MAX: u64 = 4 << 20;
/// A frame that takes at most the fraction `1 / SMALL_FRAME` of the log is small: the digest of some records frees
/// enough space for it.
const SMALL_FRAME: u64 = 16;
/// A writer pauses when less than `1 / SCARCE_PART` of the largest log is free: the daemon catches up before the log is
/// full, so that many short waits replace a long one.
const SCARCE_PART: u64 = 4;
/// Between two pauses a writer fills at most this fraction of the free space, or [`PAUSE_STEP_MIN`] if that is more.
const PAUSE_STEP_PART: u64 = 64;
const PAUSE_STEP_MIN: u64 = 64 << 10;
/// Duration of the pause for one step.
const PAUSE: Duration = Duration::from_micros(400);
/// A record that takes several steps pauses for each of them, but at most for this number.
const PAUSE_STEPS_MAX: u64 = 3;

fn request(inodes: u64, room_blocks: u64) -> RefillRequest {
    let (shared, replaces) = (U32::new(0), U32::new(0));
    RefillRequest { inodes: U64::new(inodes), room_blocks: U64::new(room_blocks), shared, replaces }
}

impl LibFs {
    fn refill(&self, request: RefillRequest) -> Result<Option<RefillResponse>> {
        let line = self.line()?;
        let mut response = Vec::new();
        let granted = match self.call(&line, CallKind::Refill, &[request.as_bytes()], &mut response)? {
            Status::Ok => {
                let (granted, _) =
                    format::call::split::<RefillResponse>(&response).map_err(|_| vfs::Error::Io)?;
                granted
            }
            Status::Sealed => return Ok(None),
            Status::NoSpace => RefillResponse {
                first_inode: format::InodeNumber::NONE,
                inodes: U64::new(0),
                room_blocks: U64::new(0),
            },
            refused => return Err(error_of(refused)),
        };
        let mut state = self.state();
        if state.era != line.era {
            return Ok(None);
        }
        if granted.inodes.get() > 0 {
            state.refilled_inodes(granted.first_inode, granted.inodes.get());
        }
        if let Some(session) = state.session.as_mut() {
            match request.replaces.get() {
                0 => session.room += granted.room_blocks.get(),
                _ => session.room_to_replace += granted.room_blocks.get(),
            }
            session.room_granted += granted.room_blocks.get();
            if request.replaces.get() == 1 {
                session.full_for = session.full_for.saturating_sub(1);
            } else if request.room_blocks.get() > 0 {
                session.full_for = if granted.room_blocks.get() == 0 { FULL_FOR } else { 0 };
            }
        }
        Ok(Some(granted))
    }

    /// Extends the reservation for a record of this cost, and for some more.
    ///
    /// # Errors
    /// `NoSpace`: even after a digest of all records, which frees reserved blocks that were not used.
    pub(crate) fn get_room(&self, cost: RecordCost) -> Result<()> {
        if cost.replaces && self.state().session.as_ref().is_some_and(Session::is_full) {
            // It gets other space, too, if there is some again.
            return self.get_room_to_replace(cost);
        }
        match self.get_room_to_add(cost.blocks) {
            Err(vfs::Error::NoSpace) if cost.replaces => self.get_room_to_replace(cost),
            got => got,
        }
    }

    /// Extends the reservation for a record that replaces blocks, by no more than it needs: all programs share what there is.
    ///
    /// # Errors
    /// `NoSpace`: even after a digest of all records. They may have taken what there is for such a record, and give it back.
    pub(crate) fn get_room_to_replace(&self, cost: RecordCost) -> Result<()> {
        let (mut digested, mut refusals) = (None, 0);
        for _ in 0..self.limits.attempts {
            let available =
                self.state().session.as_ref().map_or(0, |session| session.room + session.room_to_replace);
            let wanted = cost.blocks.saturating_sub(available).max(1);
            let granted = self.refill(RefillRequest { replaces: U32::new(1), ..request(0, wanted) })?;
            let has_room = self.state().session.as_ref().is_none_or(|session| session.has_room(cost));
            match granted {
                Some(granted) if !has_room && granted.room_blocks.get() == 0 => {
                    let last = self.last();
                    if digested == Some(last) {
                        refusals += 1;
                        // Other programs may have it at the moment.
                        if refusals == REFUSALS_MAX {
                            break;
                        }
                    } else {
                        self.get_digested(last)?;
                        digested = Some(last);
                    }
                }
                Some(_) if !has_room => {}
                _ => return Ok(()),
            }
        }
        Err(vfs::Error::NoSpace)
    }

    /// Extends the reservation for a record of so many blocks. SharedFS may grant less than requested.
    fn get_room_to_add(&self, blocks: u64) -> Result<()> {
        let mut digested = None;
        let few = self.limits.refill_blocks;
        let had = self.state().session.as_ref().map_or(0, |session| session.room_granted);
        let wanted = blocks.max(had.clamp(few, few * REFILL_GROWTH));
        for _ in 0..self.limits.attempts {
            let granted = self.refill(request(0, wanted))?;
            let nothing = match (granted, self.state().session.as_ref()) {
                (Some(granted), Some(session)) if session.room < blocks => granted.room_blocks.get() == 0,
                _ => return Ok(()),
            };
            if nothing {
                let last = self.last();
                // Other threads may have used the blocks that the digest freed; then their digest frees some in turn.
                if digested == Some(last) {
                    break;
                }
                self.get_digested(last)?;
                digested = Some(last);
                // The blocks of removed files become free when this process has no reference to the files any more.
                let give_back = self.state().take_give_back();
                self.close_calls(&give_back);
            }
        }
        Err(vfs::Error::NoSpace)
    }

    /// Makes the reservation usable for other users' files.
    ///
    /// # Errors
    /// Those of [`Self::get_room`].
    pub(crate) fn share_room(&self) -> Result<()> {
        for all_digested in [false, true] {
            let line = self.line()?;
            let request = RefillRequest { shared: U32::new(1), ..request(0, 0) };
            match self.call(&line, CallKind::Refill, &[request.as_bytes()], &mut Vec::new())? {
                Status::Ok => {
                    let mut state = self.state();
                    if state.era == line.era
                        && let Some(session) = state.session.as_mut()
                    {
                        session.room_is_shared = true;
                    }
                    return Ok(());
                }
                Status::Sealed => return Ok(()),
                Status::NoSpace if !all_digested => self.get_digested(self.last())?,
                refused => return Err(error_of(refused)),
            }
        }
        Err(vfs::Error::NoSpace)
    }

    /// Requests new inode numbers. If the range cannot be extended, the session ends, and the next one begins with a
    /// new range.
    pub(crate) fn get_inodes(&self) -> Result<()> {
        let granted = self.refill(request(self.limits.refill_inodes, 0))?;
        if granted.is_some_and(|granted| granted.inodes.get() == 0) {
            self.get_digested(self.last())?;
            self.state().end_session();
        }
        Ok(())
    }

    /// The last record of the log.
    fn last(&self) -> Sequence {
        self.state().session.as_ref().map_or(Sequence::new(0), |session| session.last())
    }

    /// Returns when own records up to this one are in the area, and dropped from the caches.
    pub(crate) fn get_digested(&self, sequence: Sequence) -> Result<()> {
        let line = self.line()?;
        self.digest_call(&line, sequence, true)?;
        self.state().purge();
        Ok(())
    }

    /// Releases every reference that waits for a digest.
    pub(crate) fn release_closed(&self) {
        // A failure is seen by the next call; SharedFS keeps the inodes until then.
        let _ = self.get_digested(self.last());
        let give_back = self.state().take_give_back();
        self.close_calls(&give_back);
    }

    /// Requests space for more of the log, and a digest, without waiting for it, if more than half of the log is full apart
    /// from records that are already digested; releases references whose last records are digested. Pauses if little of the
    /// log is free. Maps memory of the log; if only that is due, nothing else is done.
    pub(crate) fn relieve(&self) {
        let (due, is_all) = {
            let mut state = self.state();
            state.half_full = false;
            let Some(session) = state.session.as_mut() else { return };
            let due = session.memory.next(session.ring.tail().position, session.log_bytes);
            let due = due.map(|part| (session.ring.region().clone(), part));
            let is_all = !session.is_half_full()
                && session.ring.free_bytes() >= session.pause_below
                && session.purging.is_none();
            (due, is_all)
        };
        if let Some((log, part)) = due {
            log.touch(part);
            if is_all {
                return;
            }
        }
        let (era, grow, ask, give_back, pause) = {
            let mut state = self.state();
            let era = state.era;
            let give_back = state.take_give_back();
            let Some(session) = state.session.as_ref() else { return };
            // A purge visits the whole index of a file that has many pieces, so it runs once for each digest.
            let scarce = session.ring.free_bytes() < session.pause_below;
            let is_due = session.purging.is_some() || session.words.digested().0 >= session.digest_asked;
            if is_due || scarce {
                state.purge_some(self.limits.purge_steps.max(2));
            }
            let Some(session) = state.session.as_mut() else { return };
            // Until a purge is over, space that it frees counts as full.
            let is_purging = session.purging.is_some();
            let pause = if is_purging { Duration::ZERO } else { session.next_pause() };
            let full = !is_purging && session.ring.live_bytes() > session.ring.bytes() / 2;
            let grow = (full && session.grows_ahead()).then(|| session.larger_log(0)).flatten();
            let ask = full && session.words.digested().0 >= session.digest_asked;
            if ask {
                session.digest_asked = session.last();
            }
            (era, grow, ask.then(|| session.last()), give_back, pause)
        };
        self.close_calls(&give_back);
        if let Some(up_to) = ask
            && let Ok(line) = self.line()
        {
            // A failure is seen by the writer that finds the log full.
            let _ = self.digest_call(&line, up_to, false);
        }
        if let Some(log_bytes) = grow {
            // A failure is seen by the writer that finds the log full.
            let _ = self.grow_log(era, log_bytes);
        }
        if !pause.is_zero() {
            ipc::pause(&*self.host, pause);
        }
    }

    /// Makes space in the log for a frame of so many bytes: in more of its file where that can be used, and otherwise by a
    /// digest.
    ///
    /// # Errors
    /// `NoSpace`: there is no space for more of the file, and the frame does not fit what there is.
    pub(crate) fn get_log_space(&self, bytes: u64) -> Result<()> {
        let (era, larger, fits, was_refused) = {
            let mut state = self.state();
            state.purge();
            let era = state.era;
            let Some(session) = state.session.as_ref() else { return Ok(()) };
            if session.ring.free_bytes() >= 2 * bytes {
                return Ok(());
            }
            // A frame fits an empty ring, wherever the ring begins, if it takes at most half of it.
            (era, session.larger_log(bytes), session.ring.bytes() >= 2 * bytes, session.log_refused)
        };
        match larger {
            Some(log_bytes) => match self.grow_log(era, log_bytes) {
                Err(vfs::Error::NoSpace) if fits => self.wait_for_log_space(bytes),
                // The data of a write is cut into shorter records from now on.
                Err(vfs::Error::NoSpace) if !was_refused => Ok(()),
                grown => grown,
            },
            None => self.wait_for_log_space(bytes),
        }
    }

    /// Waits for a digest that frees space for a frame of so many bytes. For a small frame the writer continues as soon as
    /// there is enough, while the rest is digested.
    fn wait_for_log_space(&self, bytes: u64) -> Result<()> {
        let (digested, last, is_small, parts) = {
            let state = self.state();
            let Some(session) = state.session.as_ref() else { return Ok(()) };
            let is_small = bytes <= session.ring.bytes() / SMALL_FRAME;
            let parts = PART.max(session.ring.bytes() / PART_BYTES_MAX);
            (session.words.digested().0, session.last(), is_small, parts)
        };
        let part = last.get().saturating_sub(digested.get()) / parts;
        let first = Sequence::new(digested.get() + part);
        self.get_digested(if is_small && part > 0 { first } else { last })
    }

    /// Requests space for so many bytes of the log's file, and uses them, if the session is still that of the log.
    ///
    /// # Errors
    /// `NoSpace`: there is no space for it.
    fn grow_log(&self, era: u64, log_bytes: u64) -> Result<()> {
        let line = self.line()?;
        if line.era != era {
            return Ok(());
        }
        let request = GrowRequest { bytes: U64::new(log_bytes) };
        let granted = self.call(&line, CallKind::GrowLog, &[request.as_bytes()], &mut Vec::new())?;
        let mut state = self.state();
        if state.era != line.era {
            return Ok(());
        }
        let Some(session) = state.session.as_mut() else { return Ok(()) };
        session.log_refused = granted != Status::Ok;
        match granted {
            Status::Ok => session.use_log(log_bytes),
            Status::Sealed => {}
            Status::NoSpace | Status::Limit => return Err(vfs::Error::NoSpace),
            refused => return Err(error_of(refused)),
        }
        Ok(())
    }

    /// Wakes the threads in [`Self::wait_while`].
    pub(crate) fn turn(&self) {
        // Release: pairs with the Acquire in `wait_while`.
        self.turn.fetch_add(1, Ordering::Release);
        self.host.wake(&self.turn, ipc::WAKE_ALL);
    }

    /// Waits for another thread of this process that communicates with SharedFS.
    ///
    /// # Errors
    /// `Io`: it takes too long.
    pub(crate) fn wait_while(&self, busy: impl Fn(&State) -> bool) -> Result<()> {
        loop {
            // Acquire: pairs with the Release in `turn`.
            let turn = self.turn.load(Ordering::Acquire);
            if !busy(&self.state()) {
                return Ok(());
            }
            let until = self.host.now().after(self.limits.wait);
            if self.host.wait(&self.turn, turn, Some(until)) == ipc::Waited::TimedOut {
                return Err(vfs::Error::Io);
            }
        }
    }
}

impl Session {
    /// The last record that was appended.
    pub fn last(&self) -> Sequence {
        Sequence::new(self.ring.tail().sequence.get() - 1)
    }

    /// Whether more than half of the log is full, and a call about that is useful: after one for a digest, no other is until
    /// the digest is done.
    #[inline]
    pub fn is_half_full(&self) -> bool {
        self.ring.live_bytes() > self.ring.bytes() / 2
            && (self.grows_ahead() || self.words.digested().0 >= self.digest_asked)
    }

    /// Whether more of the log's file is requested before the log is full.
    #[inline]
    fn grows_ahead(&self) -> bool {
        self.can_grow() && !self.ring.is_wrapped()
    }

    /// How many bytes of the log's file should have space next, so that a frame of so many bytes fits; `None` if the log has
    /// its largest size, or goes on at its start, where more space behind its end is of no use.
    fn larger_log(&self, bytes: u64) -> Option<u64> {
        let is_useful = self.log_bytes < self.log_bytes_max && !self.ring.is_wrapped();
        let needed = self.ring.tail().position.saturating_add(2 * bytes).saturating_add(BLOCK_BYTES as u64);
        let larger = (self.log_bytes + self.log_bytes.min(LOG_STEP_MAX)).max(needed);
        is_useful.then(|| larger.next_multiple_of(BLOCK_BYTES as u64).min(self.log_bytes_max))
    }

    /// So many bytes of the log's file have space now.
    fn use_log(&mut self, log_bytes: u64) {
        if log_bytes > self.log_bytes {
            self.log_bytes = log_bytes;
            self.ring.use_up_to(log_bytes);
            self.memory.has_more(log_bytes);
        }
    }

    /// Space of the log was freed: the next pause comes when one step of it is full.
    pub fn has_more_space(&mut self) {
        if !self.can_grow() {
            let (_, below) = pause(0, self.ring.free_bytes(), self.ring.bytes());
            self.pause_below = self.pause_below.max(below);
        }
    }

    /// Whether the log may get more space than it has.
    fn can_grow(&self) -> bool {
        self.log_bytes < self.log_bytes_max && !self.log_refused
    }

    /// How long the writer pauses now; also determines the next pause. A log that can still grow gets more space instead.
    fn next_pause(&mut self) -> Duration {
        let (free, bytes) = (self.ring.free_bytes(), self.ring.bytes());
        let (pause, below) =
            if self.can_grow() { (Duration::ZERO, 0) } else { pause(self.pause_below, free, bytes) };
        self.pause_below = below;
        pause
    }
}

/// How long a writer pauses that should pause with less than `below` bytes free, if `free` of `bytes` are free in the
/// log; and the free space below which it pauses next.
fn pause(below: u64, free: u64, bytes: u64) -> (Duration, u64) {
    let scarce = bytes / SCARCE_PART;
    if free >= scarce {
        return (Duration::ZERO, scarce);
    }
    let step = (free / PAUSE_STEP_PART).max(PAUSE_STEP_MIN);
    let steps = below.saturating_sub(free).div_ceil(step).min(PAUSE_STEPS_MAX);
    (PAUSE * steps as u32, free.saturating_sub(step))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pauses of a writer of frames of so many bytes until the log is full, while nothing is digested.
    fn pauses(bytes: u64, frame: u64) -> Vec<Duration> {
        let (mut free, mut below, mut pauses) = (bytes, 0, Vec::new());
        while free >= frame {
            free -= frame;
            if free < below || (below == 0 && free <= bytes / 2) {
                let (paused, next) = pause(below, free, bytes);
                below = next;
                pauses.push(paused);
            }
        }
        pauses.into_iter().filter(|pause| !pause.is_zero()).collect()
    }

    #[test]
    fn before_the_log_is_full_a_writer_pauses_often_and_never_for_long() {
        for frame in [4160, 64 << 10, 1 << 20] {
            let pauses = pauses(64 << 20, frame);
            assert!(pauses.iter().all(|pause| *pause <= PAUSE * PAUSE_STEPS_MAX as u32), "{frame}");
            let all: Duration = pauses.iter().sum();
            // With short frames, the pauses add up to the time in which a daemon digests the rest of the log at 1.2 GB
            // a second.
            assert!(all >= Duration::from_millis(if frame < 1 << 20 { 40 } else { 15 }), "{frame}: {all:?}");
        }
    }

    #[test]
    fn a_writer_with_much_free_space_never_pauses() {
        for free in [16 << 20, 32 << 20, 64 << 20] {
            assert_eq!(pause(0, free, 64 << 20), (Duration::ZERO, 16 << 20));
        }
        // The first check of a scarce log only determines the first pause.
        assert_eq!(pause(0, 8 << 20, 64 << 20).0, Duration::ZERO);
    }
}
