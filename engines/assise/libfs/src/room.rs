//! Room: inode numbers, blocks that are promised, space in the log (Assise §3.2.1, digest; schedules 2.3, 2.7). All of
//! it is got without the state's lock; a writer waits here, never inside.

use crate::calls::{Line, error_of};
use crate::engine::LibFs;
use crate::error::Error;
use crate::state::{State, empty_ring};
use format::Sequence;
use format::call::{CallKind, GrowRequest, GrowResponse, RefillRequest, RefillResponse, Status};
use ipc::sync::Ordering;
use pmem::Region;
use vfs::engine::Result;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// How many times what is asked for first may be asked for later.
const REFILL_GROWTH: u64 = 8;
/// A writer that finds the log full waits for one part of so many of its records.
const PART: u64 = 4;
/// A frame that takes at most one part of so many of the log is small: some records that go make space for it.
const SMALL_FRAME: u64 = 64;

fn request(inodes: u64, room_blocks: u64) -> RefillRequest {
    let (shared, reserved) = (U32::new(0), U32::new(0));
    RefillRequest { inodes: U64::new(inodes), room_blocks: U64::new(room_blocks), shared, reserved }
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
            session.room += granted.room_blocks.get();
            session.room_granted += granted.room_blocks.get();
        }
        Ok(Some(granted))
    }

    /// Room for a record of so many blocks, and for some more. It is promised in parts.
    ///
    /// # Errors
    /// `NoSpace`: also after everything is digested, which gives back what was promised and not used.
    pub(crate) fn get_room(&self, blocks: u64) -> Result<()> {
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
                // Other threads may have used what a digest gave back; then theirs gives something back in turn.
                if digested == Some(last) {
                    break;
                }
                self.get_digested(last)?;
                digested = Some(last);
                // Files that this process removed give their room when it does not refer to them any more.
                let give_back = self.state().take_give_back();
                self.close_calls(&give_back);
            }
        }
        Err(vfs::Error::NoSpace)
    }

    /// Room that is good for other users' files.
    ///
    /// # Errors
    /// As [`Self::get_room`].
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

    /// New inode numbers. A range that cannot be made longer is left: a new session begins with a new one.
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

    /// The own records up to this one are in the area, and in no cache any more.
    pub(crate) fn get_digested(&self, sequence: Sequence) -> Result<()> {
        let line = self.line()?;
        self.digest_call(&line, sequence, true)?;
        self.state().purge();
        Ok(())
    }

    /// Asks for a digest without waiting for it, if more than half of the log is full even without what is digested
    /// already; gives back references whose last records are.
    pub(crate) fn relieve(&self) {
        let (ask, give_back) = {
            let mut state = self.state();
            state.half_full = false;
            let give_back = state.take_give_back();
            let Some(session) = state.session.as_ref() else { return };
            // Dropping what was digested looks at every node with records that are not: once for each digest.
            if session.words.digested().0 >= session.digest_asked {
                state.purge();
            }
            let Some(session) = state.session.as_mut() else { return };
            let full = session.ring.live_bytes() > session.ring.bytes() / 2;
            let ask = full && session.words.digested().0 >= session.digest_asked;
            if ask {
                session.digest_asked = session.last();
            }
            (ask.then(|| session.last()), give_back)
        };
        self.close_calls(&give_back);
        if let Some(up_to) = ask
            && let Ok(line) = self.line()
        {
            // If it fails, the writer that finds the log full sees it.
            let _ = self.digest_call(&line, up_to, false);
        }
    }

    /// Space in the log for a frame of so many bytes.
    pub(crate) fn get_log_space(&self, bytes: u64) -> Result<()> {
        let (largest, digested, last, log_bytes, log_bytes_max) = {
            let mut state = self.state();
            state.purge();
            let Some(session) = state.session.as_ref() else { return Ok(()) };
            if session.ring.free_bytes() >= 2 * bytes {
                return Ok(());
            }
            let max = session.welcome.log_bytes_max.get().min(self.limits.log_bytes_max);
            let digested = session.words.digested().0;
            (session.ring.bytes(), digested, session.last(), session.log_bytes, max)
        };
        // A frame is in an empty ring wherever that begins if it takes at most half of it.
        let mut wanted = log_bytes;
        while wanted - (log_bytes - largest) < 2 * bytes && wanted < log_bytes_max {
            wanted = (wanted * 2).min(log_bytes_max);
        }
        if wanted == log_bytes {
            // In the largest log a writer goes on when there is space, while the rest is digested.
            let goes_on = log_bytes == log_bytes_max && bytes <= largest / SMALL_FRAME;
            let part = last.get().saturating_sub(digested.get()) / PART;
            let first = Sequence::new(digested.get() + part);
            self.get_digested(if goes_on && part > 0 { first } else { last })?;
            wanted = (log_bytes * 2).min(log_bytes_max);
        }
        if wanted > log_bytes { self.grow_log(wanted, largest >= 2 * bytes) } else { Ok(()) }
    }

    /// Replaces the log by a larger one. Nothing is appended meanwhile. If there is no space for it this one goes on, if
    /// the frame that is to be written `fits` it.
    ///
    /// # Errors
    /// `NoSpace`: for the larger one, and the frame does not fit this one.
    fn grow_log(&self, file_bytes: u64, fits: bool) -> Result<()> {
        let line = self.line()?;
        let last = {
            let mut state = self.state();
            if state.log_frozen || state.era != line.era {
                return Ok(());
            }
            let Some(session) = state.session.as_ref() else { return Ok(()) };
            let last = session.last();
            state.log_frozen = true;
            last
        };
        let grown = self.replace_log(&line, last, file_bytes, fits);
        let mut state = self.state();
        if state.era == line.era {
            state.log_frozen = false;
        }
        drop(state);
        self.turn();
        grown
    }

    fn replace_log(&self, line: &Line, last: Sequence, file_bytes: u64, fits: bool) -> Result<()> {
        self.digest_call(line, last, true)?;
        let request = GrowRequest { file_bytes: U64::new(file_bytes) };
        let mut response = Vec::new();
        match self.call(line, CallKind::GrowLog, &[request.as_bytes()], &mut response) {
            Ok(Status::Ok) => {}
            Ok(Status::Sealed) => return Ok(()),
            Ok(Status::NoSpace | Status::Limit) if fits => return Ok(()),
            Ok(Status::NoSpace | Status::Limit) => return Err(vfs::Error::NoSpace),
            failed => {
                // SharedFS may read another log by now, and not find there what would be appended here.
                self.end_of(line)?;
                return Err(failed.map_or_else(|error| error, error_of));
            }
        }
        let grown = format::call::split::<GrowResponse>(&response).map_err(|_| Error::Response);
        let taken = grown.and_then(|(grown, _)| Ok((grown, line.link.grown_log(&grown)?)));
        let mut state = self.state();
        if state.era != line.era {
            return Ok(());
        }
        state.purge();
        let replaced = taken.and_then(|(grown, log)| state.take_log(&grown, log, last));
        if replaced.is_err() {
            // SharedFS reads a log that is not here: only a new session helps.
            state.end_session();
        }
        match replaced {
            // The session ended after its log had grown: the operation goes on in the next one.
            Err(Error::Refused | Error::Disconnected) => Ok(()),
            replaced => Ok(replaced?),
        }
    }

    /// Says to those who wait in [`Self::wait_while`] that something has ended.
    pub(crate) fn turn(&self) {
        // Release: pairs with the Acquire of those who wait.
        self.turn.fetch_add(1, Ordering::Release);
        self.host.wake(&self.turn, ipc::WAKE_ALL);
    }

    /// Waits for another thread of this process that is about something with SharedFS.
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

impl State {
    /// Goes on in a larger log; everything up to `last` is digested.
    fn take_log(
        &mut self,
        grown: &GrowResponse,
        log: Region,
        last: Sequence,
    ) -> std::result::Result<(), Error> {
        let Some(session) = self.session.as_mut() else { return Ok(()) };
        if session.purged != last {
            return Err(Error::Response);
        }
        session.welcome.log = grown.log;
        session.log_bytes = log.bytes();
        session.ring = empty_ring(log, &session.welcome, grown.incarnation, last.next())?;
        // Who copies from the old one outside of the lock finds out.
        session.released.store(last.next().get(), Ordering::SeqCst);
        Ok(())
    }
}
