//! Detached sessions: the state that a process goes on with after its session was sealed, or after the daemon was
//! restarted: the inodes it had met, its open files, its locks. The process attaches again (same process and same user,
//! as the kernel attests), and its new session inherits this state. Leases are not inherited.
//!
//! A detached session is kept for as long as its process lives. Their number is bounded: for a new one, the oldest of
//! the user who has most is dropped.

use crate::fair::{first_of_most, may_take};
use crate::references::Rights;
use crate::register::{self, Identity};
use crate::session::{MetInode, Session, in_range};
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::register::{KNOWN_MADE, KNOWN_READABLE, RegisterEntry, RegisterKind};
use format::{InodeNumber, Sequence};
use ipc::host::Host;
use ipc::socket::Connection;
use ipc::sync::Ordering;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use zerocopy::little_endian::U64;

/// The state of a session without a client, kept for its successor.
pub(crate) struct DetachedSession {
    pid: u32,
    started: u64,
    pub uid: u32,
    gid: u32,
    pub session: SessionId,
    pub known: BTreeMap<InodeNumber, MetInode>,
    pub ranges: Vec<(InodeNumber, u64)>,
    /// How far its log was recovered, and the logs of the sessions before it.
    pub recovered: Vec<(u64, Sequence)>,
    /// All of its open files are among the references. Which files a program had open under a dead daemon is only known
    /// once the program reports them.
    pub synced: bool,
    /// Of files that were given away: the detached session ends when no process is left that could claim them.
    liveness_socket: Option<Arc<Connection>>,
}

/// Own ranges that are remembered of one process; the oldest are forgotten.
const RANGES_MAX: usize = 256;
/// Process number of a detached session whose successor is not known.
const NO_SUCCESSOR: u32 = u32::MAX;

impl DetachedSession {
    /// The session that an `Attach` entry describes.
    pub fn of_entry(session: SessionId, entry: &RegisterEntry) -> Self {
        let owner = entry.owner.get();
        Self {
            pid: entry.pid.get(),
            started: entry.last.get(),
            uid: owner as u32,
            gid: (owner >> 32) as u32,
            session,
            known: BTreeMap::new(),
            ranges: vec![(entry.inode, entry.first.get())],
            recovered: Vec::new(),
            synced: false,
            liveness_socket: None,
        }
    }

    /// The files and locks that a session of this user and group gives away.
    pub fn given(
        session: SessionId,
        (uid, gid): (u32, u32),
        known: BTreeMap<InodeNumber, MetInode>,
        liveness_socket: Arc<Connection>,
    ) -> Self {
        Self {
            pid: NO_SUCCESSOR,
            started: 0,
            uid,
            gid,
            session,
            known,
            ranges: vec![(InodeNumber::NONE, 0)],
            recovered: Vec::new(),
            synced: true,
            liveness_socket: Some(liveness_socket),
        }
    }

    /// Whether its successor is known.
    pub fn is_named(&self) -> bool {
        self.pid != NO_SUCCESSOR
    }

    /// Sets its successor.
    pub fn name(&mut self, pid: u32, started: u64) {
        (self.pid, self.started) = (pid, started);
    }

    /// Adds the state of another detached session of the same process.
    pub fn take_over(&mut self, left: Self) {
        for (inode, met) in left.known {
            self.known.entry(inode).or_default().add(met.bits());
        }
        self.ranges.extend(left.ranges);
        for (log, last) in left.recovered {
            register::note_recovered(&mut self.recovered, log, last);
        }
        self.synced &= left.synced;
    }

    /// Whether its successor may still come: its process lives, or, for files that were given away, the liveness socket
    /// is open.
    pub fn lives(&self, host: &dyn Host) -> bool {
        self.liveness_socket.is_some() || host.started(self.pid) == Some(self.started)
    }

    pub fn knows(&self, inode: InodeNumber) -> bool {
        self.known.contains_key(&inode) || self.ranges.iter().any(|range| in_range(inode, *range))
    }

    /// Adds it as entries of the register, without references and locks.
    pub fn put_entries(&self, entries: &mut Vec<RegisterEntry>) {
        let Self { pid, started, uid, gid, session, .. } = *self;
        if !self.is_named() {
            return;
        }
        let who = Identity { pid, started, uid, gid };
        let (first, former) =
            self.ranges.split_first().expect("a detached session begins with a session's own range");
        entries.push(register::attach_entry(session, &who, *first));
        register::put_possessions(session, former, &self.recovered, &self.known, entries);
    }

    /// Whether a session that goes on from session `former` inherits it.
    fn is_for(&self, session: &Session, former: u64) -> bool {
        // Only the process that was given the files knows this number.
        let comes_for_it = self.liveness_socket.is_some() && self.session.0 == former;
        comes_for_it
            || self.pid == session.pid
                && Some(self.started) == session.started
                && (self.uid, self.gid) == (session.caller.uid, session.caller.gid)
    }
}

/// All detached sessions. References and locks stay under the number of the former session.
#[derive(Default)]
pub(crate) struct DetachedSessions(VecDeque<DetachedSession>);

impl DetachedSessions {
    pub fn of(detached: impl Iterator<Item = DetachedSession>) -> Self {
        Self(detached.collect())
    }

    pub fn all(&self) -> impl Iterator<Item = &DetachedSession> {
        self.0.iter()
    }

    /// Whether a user may have one more.
    pub fn may_take(&self, uid: u32, max: usize) -> bool {
        let mine = self.0.iter().filter(|detached| detached.uid == uid).count();
        may_take(uid, mine, self.0.len(), max)
    }

    /// The one that is dropped for one more of a user, if that is one too many.
    fn oldest_of_most(&self, uid: u32, max: usize) -> Option<usize> {
        let users = self.0.iter().map(|detached| detached.uid);
        if self.may_take(uid, max) { None } else { first_of_most(users) }
    }

    /// Adds one.
    pub fn add(&mut self, detached: DetachedSession) {
        self.0.push_back(detached);
    }

    /// The one with this number.
    pub fn find(&mut self, session: SessionId) -> Option<&mut DetachedSession> {
        self.0.iter_mut().find(|detached| detached.session == session)
    }

    /// The liveness sockets of files that were given away.
    pub fn liveness_sockets(&self) -> Vec<(SessionId, Arc<Connection>)> {
        let given =
            self.0.iter().filter_map(|detached| Some((detached.session, detached.liveness_socket.clone()?)));
        given.collect()
    }

    /// Whether a process that has not come back yet may have the inode open without a reference.
    pub fn may_have_open(&self, inode: InodeNumber) -> bool {
        self.0.iter().any(|detached| !detached.synced && detached.knows(inode))
    }
}

impl State {
    /// Keeps the state of a session for when its process comes back.
    pub fn detach_session(&mut self, core: &Core, id: SessionId, session: &mut Session) {
        let Some(Identity { pid, started, uid, gid }) = session.identity() else { return };
        let noted: Vec<InodeNumber> = open_here(session);
        for inode in noted {
            if session.may_have_made(inode) {
                session.known.entry(inode).or_default().add(KNOWN_READABLE | KNOWN_MADE);
            }
            if self.references.rights(id, inode).is_none() {
                // Without a call, a file that is marked open is open with the rights of its mode; wider rights were
                // requested by call.
                self.refer_to(id, inode, Rights::default());
            }
        }
        let mut ranges = vec![(session.first_inode, session.inodes)];
        ranges.append(&mut session.former_ranges);
        forget_ranges(&mut ranges, &mut session.known, self.references.of_session(id));
        let detached = DetachedSession {
            pid,
            started,
            uid,
            gid,
            session: id,
            known: std::mem::take(&mut session.known),
            ranges,
            recovered: std::mem::take(&mut session.recovered),
            synced: !session.open_files_unknown,
            liveness_socket: None,
        };
        if let Some(index) = self.detached.oldest_of_most(uid, core.config.sessions_max) {
            self.drop_detached(index);
        }
        self.detached.0.push_back(detached);
    }

    /// Gives a new session the state of the detached sessions of its process. Returns how far the log of `former` was
    /// recovered, if the session goes on from that.
    pub fn inherit(&mut self, core: &Core, id: SessionId, former: u64) -> Option<Sequence> {
        // Files that their receiver has closed before this are not inherited.
        self.hear_liveness_sockets(core);
        loop {
            let session = self.sessions.get_mut(&id)?;
            let found = self.detached.0.iter().find(|detached| detached.is_for(session, former));
            let Some(number) = found.map(|detached| detached.session) else { break };
            self.name_successor_of(number, id);
            let session = self.sessions.get_mut(&id)?;
            let index = self.detached.0.iter().position(|detached| detached.session == number);
            let Some(index) = index else { break };
            let detached = self.detached.0.remove(index).expect("found above");
            for (inode, met) in detached.known {
                session.known.entry(inode).or_default().add(met.bits());
            }
            session.former_ranges.extend(detached.ranges);
            session.resume_unacknowledged = true;
            session.open_files_unknown |= !detached.synced;
            for (log, last) in detached.recovered {
                register::note_recovered(&mut session.recovered, log, last);
            }
            self.references.hand_over(detached.session, id);
            self.locks.hand_over(detached.session, id);
            let first = U64::new(detached.session.0);
            self.register.note(RegisterEntry { first, ..RegisterEntry::new(RegisterKind::Inherit, id.0) });
        }
        let session = self.sessions.get(&id)?;
        session.recovered.iter().find(|(log, _)| *log == former).map(|(_, last)| *last)
    }

    /// Reads which files a successor has open from the table that it has filled before its first call.
    pub fn sync_successor(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.open_files_unknown = false;
        let open = open_here(session);
        let made: Vec<_> = open.iter().copied().filter(|inode| session.may_have_made(*inode)).collect();
        made.iter().for_each(|inode| self.keep_made(id, *inode));
        for inode in open {
            // An inode with a name gets its reference when that name is removed.
            let Ok(Some(item)) = self.copy.tree.inode(inode) else { continue };
            if item.links.get() == 0 && self.references.rights(id, inode).is_none() {
                let rights = self.rights_of_user(id, inode, &item);
                self.refer_to(id, inode, rights);
            }
        }
        self.look_at_kept();
    }

    /// Whether a process may have an inode open without a reference and without having reported it yet.
    pub fn may_be_open(&self, inode: InodeNumber) -> bool {
        self.detached.may_have_open(inode)
            || self.sessions.values().any(|session| session.open_files_unknown && session.knows(inode))
    }

    /// Queues the inodes without a name that were kept for successors, to be examined again.
    fn look_at_kept(&mut self) {
        self.reapable.extend(std::mem::take(&mut self.kept));
    }

    /// Drops detached sessions whose processes are gone.
    pub fn drop_detached_of_dead(&mut self, core: &Core) {
        self.hear_liveness_sockets(core);
        while let Some(index) = self.detached.0.iter().position(|detached| !detached.lives(&*core.host)) {
            self.drop_detached(index);
        }
    }

    /// Drops the one with this number.
    pub fn drop_detached_of(&mut self, session: SessionId) {
        if let Some(index) = self.detached.0.iter().position(|detached| detached.session == session) {
            self.drop_detached(index);
        }
    }

    fn drop_detached(&mut self, index: usize) {
        let Some(detached) = self.detached.0.remove(index) else { return };
        self.end_locks(detached.session);
        // Inodes that have a name are skipped when their turn comes.
        let unreferred = self.references.end(detached.session);
        self.reapable.extend(unreferred);
        self.look_at_kept();
    }
}

/// A process knows the inodes in its own ranges because it may have made them. If it has used up so many ranges, or has
/// had so many sessions, the oldest ranges are forgotten, except for the inodes that it refers to.
fn forget_ranges(
    ranges: &mut Vec<(InodeNumber, u64)>,
    known: &mut BTreeMap<InodeNumber, MetInode>,
    referred: impl Iterator<Item = InodeNumber>,
) {
    if ranges.len() <= RANGES_MAX {
        return;
    }
    // Ranges are given out once, in their order; the session's own is the newest.
    ranges.sort_unstable_by_key(|(first, _)| Reverse(*first));
    let old = ranges.split_off(RANGES_MAX);
    for inode in referred.filter(|inode| old.iter().any(|range| in_range(*inode, *range))) {
        known.entry(inode).or_default();
    }
}

/// The inodes in a session's open-file table, as far as the session has met them.
fn open_here(session: &Session) -> Vec<InodeNumber> {
    let open = session.shared.client.open().iter();
    // Acquire: pairs with the Release by which the LibFS noted it.
    let numbers = open.map(|word| InodeNumber::new(word.load(Ordering::Acquire)));
    numbers.filter(|inode| *inode != InodeNumber::NONE && session.knows(*inode)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session_of_user(session: u64, uid: u32) -> DetachedSession {
        let owner = U64::new(uid.into());
        let entry = RegisterEntry { owner, ..RegisterEntry::new(RegisterKind::Attach, session) };
        DetachedSession::of_entry(SessionId(session), &entry)
    }

    #[test]
    fn the_oldest_of_the_user_who_has_most_gives_way() {
        const MAX: usize = 16;
        let (one, crowd) = (1, 1000);
        let mut detached = DetachedSessions::of(std::iter::once(session_of_user(0, one)));
        for session in 1..10 * MAX as u64 {
            if let Some(index) = detached.oldest_of_most(crowd, MAX) {
                detached.0.remove(index);
            }
            detached.add(session_of_user(session, crowd));
        }
        assert_eq!(detached.0[0].uid, one, "many sessions of one user leave another user theirs");
        assert!(detached.may_take(one, MAX) && detached.may_take(2, MAX) && !detached.may_take(crowd, MAX));
        assert_eq!(detached.oldest_of_most(2, MAX), None);
        while detached.0.len() < MAX {
            detached.add(session_of_user(1, crowd));
        }
        assert_eq!(detached.oldest_of_most(2, MAX), Some(1), "full: the oldest of the user with most");
    }

    #[test]
    fn ranges_that_are_forgotten_leave_what_is_open() {
        let all = 2 * RANGES_MAX as u64;
        let mut ranges: Vec<_> = (0..all).map(|range| (InodeNumber::new(100 * range), 100)).collect();
        let (old, young) = (InodeNumber::new(105), InodeNumber::new(100 * all - 1));
        let mut known = BTreeMap::new();
        forget_ranges(&mut ranges, &mut known, [old, young].into_iter());
        assert_eq!(ranges.len(), RANGES_MAX);
        assert!(in_range(young, ranges[0]), "the newest stay");
        assert_eq!(known.into_keys().collect::<Vec<_>>(), [old]);
    }
}
