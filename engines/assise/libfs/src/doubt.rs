//! Handling of records whose daemon died, or stalls while it seals the log: such a record is valid only if the next
//! session says so (see `ipc::alive`; Assise §3.4).
//!
//! An attempt begins with a live daemon, so the cached state is current then. If the daemon is still alive after the
//! attempt has appended a record, the record was there before any other process could recover the log. If not, the
//! record is in doubt: the log may have been read before. The Welcome of the session that continues this one contains
//! the last valid record. Depending on it, the result of the attempt stands, or the attempt is repeated.

use crate::need::{Need, Step};
use crate::nodes::NodeIndex;
use crate::state::State;
use format::Sequence;
use format::envelope::HEADER_BYTES;
use ipc::sync::{Ordering, fence};
use ipc::words::Seal;
use ipc::{Life, Word};
use pmem::ring::Appended;
use std::time::Duration;
use vfs::engine::Handle;

/// Limit of former sessions whose last valid record is kept. A thread asks for it right after the daemon's death.
const RECOVERED_MAX: usize = 64;

/// How long an operation waits for the cut of its log. A live daemon takes microseconds to determine the cut.
const SEAL_WAIT: Duration = Duration::from_millis(100);
/// Interval at which the operation checks the seal word.
const SEAL_LOOK: Duration = Duration::from_micros(20);

/// A record that may be valid or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Doubt {
    session: u64,
    last: Sequence,
    /// The file and the pin that its attempt took. Other threads may take some before the doubt is resolved.
    pub taken: AttemptResources,
}

/// The file and the pin that an attempt took with its record or after it.
pub(crate) type AttemptResources = (Option<Handle>, Option<NodeIndex>);

impl State {
    /// The doubt about an attempt's last record: the daemon died before it was seen alive after the commit (a process
    /// that recovers the log may have read it without the record), or it stalled while it sealed the log.
    #[inline]
    pub fn doubt(&mut self) -> Option<Doubt> {
        if self.appended == Sequence::new(0) {
            return None;
        }
        let session = self.session.as_ref()?;
        if session.words.is_alive() && !self.cut_unknown {
            // The operation is done: if another thread finds the session over, this record is in no doubt.
            self.appended = Sequence::new(0);
            return None;
        }
        self.doubted()
    }

    #[cold]
    fn doubted(&mut self) -> Option<Doubt> {
        let session = self.session.as_ref()?;
        let taken = std::mem::take(&mut self.taken);
        let doubt = Doubt { session: session.welcome.session.get(), last: self.appended, taken };
        let counts = matches!(session.words.seal(), Seal::Sealed(cut) if self.appended <= cut);
        let unknown = session.words.life() == Life::Died || (self.cut_unknown && !counts);
        self.end_session();
        // A daemon that ended in order has digested all valid records.
        unknown.then_some(doubt)
    }

    /// Handles a record that was committed to a log that is sealed, or is being sealed: it is valid if it is not after
    /// the cut. Its leases are over in any case; the next operation notices that.
    #[cold]
    pub fn sealed(&mut self, appended: Appended, seal: Seal) -> Step<Appended> {
        match self.after_sealing(seal) {
            Seal::Open => Ok(appended),
            Seal::Sealed(cut) if appended.sequence <= cut => Ok(appended),
            Seal::Sealed(_) => self.refused(appended),
            Seal::Sealing => {
                self.cut_unknown = true;
                Ok(appended)
            }
        }
    }

    /// The value of the seal word after the daemon has finished sealing; waits only a moment. This is the only wait
    /// under the state's lock: a daemon that seals the log is about to end the session.
    fn after_sealing(&self, mut seal: Seal) -> Seal {
        let Some(session) = self.session.as_ref() else { return seal };
        let until = self.host.now().after(SEAL_WAIT);
        while seal == Seal::Sealing && session.words.life() != Life::Died && self.host.now() < until {
            self.host.wait(&Word::new(0), 0, Some(self.host.now().after(SEAL_LOOK)));
            seal = session.words.seal();
        }
        seal
    }

    /// Handles a record after the cut: it is not valid, and the session is over. The frame is overwritten, so that a
    /// process that recovers the log from now on does not read it as valid. If the daemon is already dead, its
    /// successor may have read the frame before, and decides.
    fn refused(&mut self, appended: Appended) -> Step<Appended> {
        let session = self.session.as_mut().expect("it has just appended");
        let log = session.ring.region();
        log.write(appended.position, &[0; HEADER_BYTES]);
        log.fence();
        // Pairs with the locks of a daemon that begins: either it sees the overwritten frame, or this thread sees that
        // its predecessor is dead.
        fence(Ordering::SeqCst);
        if session.words.life() == Life::Died {
            return Ok(appended);
        }
        self.appended = Sequence::new(0);
        self.end_session();
        let taken = std::mem::take(&mut self.taken);
        self.undo(taken);
        Err(Need::Attach.into())
    }

    /// Releases the file and the pin of an attempt whose result is not valid and which is repeated.
    pub fn undo(&mut self, (file, pin): AttemptResources) {
        let opened = file.and_then(|handle| self.remove_file(handle));
        if let Some(index) = pin {
            let node = self.nodes.get_mut(index);
            node.pins = node.pins.saturating_sub(1);
        }
        if let Some(index) = pin.or(opened) {
            self.drop_if_unused(index);
        }
    }

    /// Whether a daemon that cannot be reached will be restarted: true unless it ended in order.
    pub fn expects_daemon(&self) -> bool {
        self.last.as_ref().is_some_and(|(words, _)| words.life() != Life::Ended)
    }

    /// Whether a record in doubt is valid; none if that is not known.
    pub fn counted(&self, doubt: &Doubt) -> Option<bool> {
        let of_session = self.recovered.iter().find(|(session, _)| *session == doubt.session);
        of_session.map(|(_, last)| *last >= doubt.last)
    }

    /// Notes the last valid record of the former session's log, which the new session continues.
    pub fn note_recovered(&mut self, last: Sequence) {
        if self.recovered.len() == RECOVERED_MAX {
            self.recovered.pop_front();
        }
        self.recovered.push_back((self.former, last));
        self.note_losses(last);
    }
}
