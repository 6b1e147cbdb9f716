//! What an attempt's answer is worth when the daemon died, or stands still while it seals the log: nothing, unless its
//! last record counts, which the next session is told (see `ipc::alive`; Assise §3.4).
//!
//! An attempt begins with a daemon that lives, so what is cached is true then. If it appended a record, and the
//! daemon is alive still afterwards, the record was there before anybody could recover the log. If not, it is in
//! doubt: the log may have been read before. The session that goes on from this one is told how far; then the
//! answer stands, or the attempt is made again.

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

/// Logs of dead daemons of which it is remembered how far they were recovered: a thread asks after one right after its
/// daemon's death.
const RECOVERED_MAX: usize = 64;

/// How long an operation waits to be told where its log is cut; microseconds, unless the daemon stands still.
const SEAL_WAIT: Duration = Duration::from_millis(100);
/// It looks every so often.
const SEAL_LOOK: Duration = Duration::from_micros(20);

/// A record of which it is not known whether it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Doubt {
    session: u64,
    last: Sequence,
    /// What its attempt took: until it is resolved, other threads take things, too.
    pub taken: Taken,
}

/// The file and the pin that an attempt took with its record or after it.
pub(crate) type Taken = (Option<Handle>, Option<NodeIndex>);

impl State {
    /// What is in doubt after an attempt: its last record, if the daemon died before it was seen alive (whoever recovers
    /// the log may have read it before the record was there), or stood still while it sealed the log.
    #[inline]
    pub fn doubt(&mut self) -> Option<Doubt> {
        if self.appended == Sequence::new(0) {
            return None;
        }
        let session = self.session.as_ref()?;
        if session.words.is_alive() && !self.cut_unknown {
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
        // A daemon that ended in order has digested all that counts.
        unknown.then_some(doubt)
    }

    /// A record that was committed to a log that is sealed, or is being sealed: it counts if the cut is it or behind it.
    /// Its leases are over either way; the next operation learns that.
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

    /// What a seal word says that said this, when the daemon is through with sealing; waited for only a moment. The lock
    /// is held, as for no other wait: a daemon that seals is about to end the session.
    fn after_sealing(&self, mut seal: Seal) -> Seal {
        let Some(session) = self.session.as_ref() else { return seal };
        let until = self.host.now().after(SEAL_WAIT);
        while seal == Seal::Sealing && session.words.life() != Life::Died && self.host.now() < until {
            self.host.wait(&Word::new(0), 0, Some(self.host.now().after(SEAL_LOOK)));
            seal = session.words.seal();
        }
        seal
    }

    /// A record behind the cut: it does not count, and the session is over. The frame is made void, so that nobody who
    /// recovers the log from now on takes it for one that counts; a daemon that is dead already may have a successor
    /// that has read it, which knows.
    fn refused(&mut self, appended: Appended) -> Step<Appended> {
        let session = self.session.as_mut().expect("it has just appended");
        let log = session.ring.region();
        log.write(appended.position, &[0; HEADER_BYTES]);
        log.fence();
        // Pairs with the locks of a daemon that begins: it sees the frame void, or its predecessor is seen dead here.
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

    /// An attempt that is not to be believed is made again: gives back what it took.
    pub fn undo(&mut self, (file, pin): Taken) {
        let opened = file.and_then(|handle| self.remove_file(handle));
        if let Some(index) = pin {
            let node = self.nodes.get_mut(index);
            node.pins = node.pins.saturating_sub(1);
        }
        if let Some(index) = pin.or(opened) {
            self.drop_if_unused(index);
        }
    }

    /// Whether a daemon that cannot be reached will be there again: unless it ended in order.
    pub fn expects_daemon(&self) -> bool {
        self.last.as_ref().is_some_and(|(words, _)| words.life() != Life::Ended)
    }

    /// Whether what was in doubt counts; none if that is not known.
    pub fn counted(&self, doubt: &Doubt) -> Option<bool> {
        let of_session = self.recovered.iter().find(|(session, _)| *session == doubt.session);
        of_session.map(|(_, last)| *last >= doubt.last)
    }

    /// The session that begins goes on from the former one: of the log of that so much counts.
    pub fn note_recovered(&mut self, last: Sequence) {
        if self.recovered.len() == RECOVERED_MAX {
            self.recovered.pop_front();
        }
        self.recovered.push_back((self.former, last));
    }
}
