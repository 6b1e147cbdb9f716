//! What a process goes on with after its session was sealed: the inodes it had met, and the files it had open. It
//! attaches anew (same process, same credential, as the kernel vouches for both), and its new session inherits them;
//! leases and locks it does not get back.
//!
//! Bounded in number and time: who does not come back in time has lost what it had open.

use crate::references::Rights;
use crate::session::{Known, Session};
use crate::state::State;
use ccnvm::SessionId;
use format::InodeNumber;
use ipc::host::Time;
use ipc::sync::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use vfs::Caller;

/// Estates that are kept.
const HEIRS_MAX: usize = 64;
/// How long one is kept.
pub(crate) const KEPT: Duration = Duration::from_secs(60);

/// What a sealed session left.
struct Estate {
    pid: u32,
    caller: Caller,
    session: SessionId,
    known: BTreeMap<InodeNumber, Known>,
    ranges: Vec<(InodeNumber, u64)>,
    until: Time,
}

/// What sealed sessions left. Open references stay under the sealed session's number.
#[derive(Default)]
pub(crate) struct Heirs(VecDeque<Estate>);

impl State {
    /// Keeps what a session had, for when its process comes back.
    pub fn leave_estate(&mut self, id: SessionId, session: &mut Session, now: Time) {
        let noted: Vec<InodeNumber> = {
            let open = session.shared.client.open().iter();
            // Acquire: pairs with the Release by which the LibFS noted it.
            let numbers = open.map(|word| InodeNumber::new(word.load(Ordering::Acquire)));
            numbers.filter(|inode| session.knows(*inode)).collect()
        };
        for inode in noted {
            if self.references.rights(id, inode).is_none() {
                // By a note a file is open for what its mode allows; more was asked for by call.
                self.references.open(id, inode, Rights::default());
            }
        }
        let mut ranges = std::mem::take(&mut session.former_ranges);
        ranges.push((session.first_inode, session.inodes));
        self.heirs.0.push_back(Estate {
            pid: session.pid,
            caller: session.caller.clone(),
            session: id,
            known: std::mem::take(&mut session.known),
            ranges,
            until: now.after(KEPT),
        });
        while self.heirs.0.len() > HEIRS_MAX {
            self.drop_oldest();
        }
    }

    /// Gives a new session what an earlier one of the same process left.
    pub fn inherit(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let is_of = |estate: &Estate| estate.pid == session.pid && estate.caller == session.caller;
        while let Some(index) = self.heirs.0.iter().position(is_of) {
            let estate = self.heirs.0.remove(index).expect("found above");
            session.known.extend(estate.known);
            session.former_ranges.extend(estate.ranges);
            self.references.hand_over(estate.session, id);
        }
    }

    /// Drops what nobody came for.
    pub fn expire_estates(&mut self, now: Time) {
        while self.heirs.0.front().is_some_and(|estate| estate.until <= now) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(estate) = self.heirs.0.pop_front() {
            let unreferred = self.references.end(estate.session);
            // What has a name is left alone when its turn comes.
            self.reapable.extend(unreferred);
        }
    }
}
