//! Leases that are held for a cache outside the engine, as in [`vfs::CacheLeases`]. SharedFS asks this session for its
//! leases instead of revoking them, and the owner of the cache gives them back.
//!
//! Guarantees: a lease that is held outside is not released because there are too many, and its inode is not forgotten.
//! It ends by [`CacheLeases::give_back`] or with the session, which [`Recalled::Lost`] reports. A lease that is being
//! released cannot be held outside before it is released. After a session was lost, SharedFS gives no other session a
//! lease until [`CacheLeases::dropped`] was reported ([`RecallsRequest::dropped`]).

use crate::engine::LibFs;
use crate::need::{Need, Step};
use crate::state::State;
use format::InodeNumber;
use format::call::{CallKind, LEASE_READ, LEASE_WRITE, RECALLS_MAX, RecallsRequest, Status};
use ipc::Word;
use std::time::Duration;
use vfs::engine::Result;
use vfs::{CacheLeases, LeaseMode, Recalled};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Pause before another attempt to reach a daemon.
const PAUSE: Duration = Duration::from_millis(50);
/// Pause before a pending call is cancelled again.
const AGAIN: Duration = Duration::from_millis(1);

/// The state of the leases that are held outside.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    /// SharedFS knows that this session answers recalls.
    answers: bool,
    /// A session that answered recalls has ended, and the loss is not reported yet.
    lost: bool,
    /// No thread may wait for recalls any more.
    ended: bool,
    /// Threads in [`CacheLeases::recalls`].
    waiting: u32,
    /// Number of reported losses after which the outside cache has not dropped all of its data yet.
    dropping: u32,
    /// For [`CacheLeases::take_orphans`].
    orphans: Vec<InodeNumber>,
}

impl Outside {
    /// An operation has removed the last name of an inode that is pinned or open.
    pub fn note_orphan(&mut self, inode: InodeNumber) {
        if self.answers {
            self.orphans.push(inode);
        }
    }

    /// Notes the end of the session.
    pub fn end_session(&mut self) {
        self.lost |= std::mem::take(&mut self.answers);
    }
}

impl State {
    /// False if SharedFS does not know yet that this session answers recalls.
    fn hold_outside(&mut self, inode: InodeNumber, mode: LeaseMode) -> Step<bool> {
        let index = self.pinned(inode)?;
        if self.is_given_back(inode) {
            return Err(Need::GivenBack(inode).into());
        }
        self.hold(index, raw(mode))?;
        if !self.outside.answers {
            return Ok(false);
        }
        self.nodes.get_mut(index).held_outside = true;
        Ok(true)
    }
}

fn raw(mode: LeaseMode) -> u8 {
    match mode {
        LeaseMode::Read => LEASE_READ,
        LeaseMode::Write => LEASE_WRITE,
    }
}

impl LibFs {
    /// Asks SharedFS once for leases that other sessions request; `None` if the session ended meanwhile.
    fn ask_for_recalls(&self, wait: bool) -> Result<Option<Vec<InodeNumber>>> {
        let line = self.line()?;
        let dropped = {
            let state = self.state();
            !state.outside.lost && state.outside.dropping == 0 && state.era == line.era
        };
        let request = RecallsRequest { wait: U32::new(wait.into()), dropped: U32::new(dropped.into()) };
        let mut response = Vec::new();
        match self.call(&line, CallKind::Recalls, &[request.as_bytes()], &mut response)? {
            Status::Ok => {}
            Status::Sealed => return Ok(None),
            refused => return Err(crate::calls::error_of(refused)),
        }
        let mut state = self.state();
        if state.era != line.era || state.session.is_none() {
            return Ok(None);
        }
        state.outside.answers = true;
        drop(state);
        let (whole, _) = response.as_chunks::<8>();
        Ok(Some(whole.iter().map(|bytes| InodeNumber::new(u64::from_le_bytes(*bytes))).collect()))
    }
}

impl CacheLeases for LibFs {
    fn begin(&self) -> Result<()> {
        self.ask_for_recalls(false).map(drop)
    }

    fn hold(&self, node: InodeNumber, mode: LeaseMode) -> Result<()> {
        for _ in 0..self.limits.attempts {
            if self.run(|state| state.hold_outside(node, mode))? {
                return Ok(());
            }
            self.ask_for_recalls(false)?;
        }
        Err(vfs::Error::Io)
    }

    fn hold_at_once(&self, node: InodeNumber, mode: LeaseMode) -> bool {
        let mut state = self.state();
        state.begin();
        matches!(state.hold_outside(node, mode), Ok(true))
    }

    fn give_back(&self, nodes: &[InodeNumber]) {
        {
            let mut state = self.state();
            for inode in nodes {
                if let Some(index) = state.nodes.find(*inode) {
                    state.nodes.get_mut(index).held_outside = false;
                }
            }
            state.giving_back.extend(nodes);
        }
        for units in nodes.chunks(RECALLS_MAX) {
            // A lease that was not released ended with its session.
            let _ = self.release_all(units);
        }
    }

    fn leave(&self, node: InodeNumber) {
        let mut state = self.state();
        if let Some(index) = state.nodes.find(node) {
            state.nodes.get_mut(index).held_outside = false;
        }
    }

    fn is_nameless(&self, node: InodeNumber) -> bool {
        let mut state = self.state();
        let Some(index) = state.nodes.find(node) else { return false };
        let is_held = matches!(state.holds(index, LEASE_READ), Ok(true));
        let node = state.nodes.get(index);
        node.nameless || (is_held && node.item.links.get() == 0)
    }

    fn take_orphans(&self) -> Vec<InodeNumber> {
        std::mem::take(&mut self.state().outside.orphans)
    }

    fn held_max(&self) -> usize {
        self.state().words_max() / 4 * 3
    }

    fn recalls(&self) -> Recalled {
        self.state().outside.waiting += 1;
        let _waits = Waits(self);
        self.wait_for_recalls()
    }

    fn dropped(&self) {
        {
            let mut state = self.state();
            state.outside.dropping -= 1;
        }
        // The next call reports it too.
        let _ = self.ask_for_recalls(false);
    }

    /// The call makes SharedFS answer a pending one. A call that is still on its way arrives later, so this is repeated
    /// until the waiting thread has seen the end.
    fn end_recalls(&self) {
        self.state().outside.ended = true;
        loop {
            let has_session = {
                let state = self.state();
                if state.outside.waiting == 0 {
                    return;
                }
                state.session.is_some()
            };
            if has_session {
                // If the session has ended, so has the pending call.
                let _ = self.ask_for_recalls(false);
            }
            self.host.wait(&Word::new(0), 0, Some(self.host.now().after(AGAIN)));
        }
    }
}

/// Counts a thread in [`CacheLeases::recalls`].
struct Waits<'a>(&'a LibFs);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.state().outside.waiting -= 1;
    }
}

impl LibFs {
    fn wait_for_recalls(&self) -> Recalled {
        loop {
            let answers = {
                let mut state = self.state();
                if state.outside.ended {
                    return Recalled::Ended;
                }
                // The loss is reported only when the next session answers recalls: until then other sessions get no
                // leases, and this one gets the leases that the outside cache needs while it drops its data.
                if state.outside.answers && std::mem::take(&mut state.outside.lost) {
                    state.outside.dropping += 1;
                    return Recalled::Lost;
                }
                state.outside.answers
            };
            match self.ask_for_recalls(answers) {
                Ok(Some(units)) if !units.is_empty() => return Recalled::Units(units),
                Ok(_) => {}
                Err(_) => {
                    self.host.wait(&Word::new(0), 0, Some(self.host.now().after(PAUSE)));
                }
            }
        }
    }
}
