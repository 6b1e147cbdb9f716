//! What a process goes on with after its session was sealed, or after the daemon was started again: the inodes it had
//! met, the files it had open, its locks. It attaches anew (same process, same user, as the kernel vouches for both),
//! and its new session inherits them; leases it does not get back.
//!
//! An estate is kept for as long as its process lives, and bounded in number: for a new one the oldest of the user who has
//! most is dropped.

use crate::fair::{first_of_most, may_take};
use crate::references::Rights;
use crate::register::{self, Identity};
use crate::session::{Known, Session, in_range};
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::register::{RegisterEntry, RegisterKind};
use format::{InodeNumber, Sequence};
use ipc::host::Host;
use ipc::socket::Connection;
use ipc::sync::Ordering;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use zerocopy::little_endian::U64;

/// What a session left.
pub(crate) struct Estate {
    pid: u32,
    started: u64,
    pub uid: u32,
    gid: u32,
    pub session: SessionId,
    pub known: BTreeMap<InodeNumber, Known>,
    pub ranges: Vec<(InodeNumber, u64)>,
    /// How far its log was recovered, and those of the sessions it went on from.
    pub recovered: Vec<(u64, Sequence)>,
    /// Everything that it had open is among the references. What a dead daemon's program had open is only known when
    /// the program says so.
    pub synced: bool,
    /// Of what was given away: ends when nobody is left who could come for it.
    lifeline: Option<Arc<Connection>>,
}

/// Own ranges that are remembered of one process, the newest.
const RANGES_MAX: usize = 256;
/// Process of an estate whose heir nobody has named.
const NOBODY: u32 = u32::MAX;

impl Estate {
    /// The session of an `Attach` entry.
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
            lifeline: None,
        }
    }

    /// What a session of this user and group gives away.
    pub fn given(
        session: SessionId,
        (uid, gid): (u32, u32),
        known: BTreeMap<InodeNumber, Known>,
        lifeline: Arc<Connection>,
    ) -> Self {
        Self {
            pid: NOBODY,
            started: 0,
            uid,
            gid,
            session,
            known,
            ranges: vec![(InodeNumber::NONE, 0)],
            recovered: Vec::new(),
            synced: true,
            lifeline: Some(lifeline),
        }
    }

    /// Whether it is known whose it is.
    pub fn is_named(&self) -> bool {
        self.pid != NOBODY
    }

    /// Says whose it is.
    pub fn name(&mut self, pid: u32, started: u64) {
        (self.pid, self.started) = (pid, started);
    }

    /// Takes what another estate of the same process had.
    pub fn take_over(&mut self, left: Self) {
        self.known.extend(left.known);
        self.ranges.extend(left.ranges);
        for (log, last) in left.recovered {
            register::note_recovered(&mut self.recovered, log, last);
        }
        self.synced &= left.synced;
    }

    /// Whether its process lives; who may come for what was given is told by the lifeline.
    pub fn lives(&self, host: &dyn Host) -> bool {
        self.lifeline.is_some() || host.started(self.pid) == Some(self.started)
    }

    pub fn knows(&self, inode: InodeNumber) -> bool {
        self.known.contains_key(&inode) || self.ranges.iter().any(|range| in_range(inode, *range))
    }

    /// As entries of the register, references and locks not included.
    pub fn put_entries(&self, entries: &mut Vec<RegisterEntry>) {
        let Self { pid, started, uid, gid, session, .. } = *self;
        if !self.is_named() {
            return;
        }
        let who = Identity { pid, started, uid, gid };
        let (first, former) = self.ranges.split_first().expect("an estate begins with a session's own range");
        entries.push(register::attach_entry(session, &who, *first));
        register::put_possessions(session, former, &self.recovered, &self.known, entries);
    }

    /// Whether a session that goes on from session `former` inherits it.
    fn is_for(&self, session: &Session, former: u64) -> bool {
        // The number of what was given is known to nobody else.
        let comes_for_it = self.lifeline.is_some() && self.session.0 == former;
        comes_for_it
            || self.pid == session.pid
                && Some(self.started) == session.started
                && (self.uid, self.gid) == (session.caller.uid, session.caller.gid)
    }
}

/// What sessions left. References and locks stay under the former session's number.
#[derive(Default)]
pub(crate) struct Heirs(VecDeque<Estate>);

impl Heirs {
    pub fn of(estates: impl Iterator<Item = Estate>) -> Self {
        Self(estates.collect())
    }

    pub fn all(&self) -> impl Iterator<Item = &Estate> {
        self.0.iter()
    }

    /// Whether a user may have one more.
    pub fn may_take(&self, uid: u32, max: usize) -> bool {
        let mine = self.0.iter().filter(|estate| estate.uid == uid).count();
        may_take(uid, mine, self.0.len(), max)
    }

    /// Which gives way to one more of a user, if that is one too many.
    fn who_gives_way(&self, uid: u32, max: usize) -> Option<usize> {
        let users = self.0.iter().map(|estate| estate.uid);
        if self.may_take(uid, max) { None } else { first_of_most(users) }
    }

    /// One more.
    pub fn add(&mut self, estate: Estate) {
        self.0.push_back(estate);
    }

    /// The one under this number.
    pub fn find(&mut self, session: SessionId) -> Option<&mut Estate> {
        self.0.iter_mut().find(|estate| estate.session == session)
    }

    /// The lifelines of what was given away.
    pub fn lifelines(&self) -> Vec<(SessionId, Arc<Connection>)> {
        let given = self.0.iter().filter_map(|estate| Some((estate.session, estate.lifeline.clone()?)));
        given.collect()
    }

    /// Whether a process that did not come back yet may have the inode open without a reference.
    pub fn may_have_open(&self, inode: InodeNumber) -> bool {
        self.0.iter().any(|estate| !estate.synced && estate.knows(inode))
    }
}

impl State {
    /// Keeps what a session had, for when its process comes back.
    pub fn leave_estate(&mut self, core: &Core, id: SessionId, session: &mut Session) {
        let Some(Identity { pid, started, uid, gid }) = session.identity() else { return };
        let noted: Vec<InodeNumber> = open_here(session);
        for inode in noted {
            if self.references.rights(id, inode).is_none() {
                // By a note a file is open for what its mode allows; more was asked for by call.
                self.refer_to(id, inode, Rights::default());
            }
        }
        let mut ranges = vec![(session.first_inode, session.inodes)];
        ranges.append(&mut session.former_ranges);
        forget_ranges(&mut ranges, &mut session.known, self.references.of_session(id));
        let estate = Estate {
            pid,
            started,
            uid,
            gid,
            session: id,
            known: std::mem::take(&mut session.known),
            ranges,
            recovered: std::mem::take(&mut session.recovered),
            synced: !session.unsynced,
            lifeline: None,
        };
        if let Some(index) = self.heirs.who_gives_way(uid, core.config.sessions_max) {
            self.drop_estate(index);
        }
        self.heirs.0.push_back(estate);
    }

    /// Gives a new session what earlier ones of the same process left. Says how far `former`'s log was recovered, if
    /// the session goes on from that.
    pub fn inherit(&mut self, core: &Core, id: SessionId, former: u64) -> Option<Sequence> {
        // What its process closed before it came, it does not get.
        self.hear_lifelines(core);
        loop {
            let session = self.sessions.get_mut(&id)?;
            let found = self.heirs.0.iter().find(|estate| estate.is_for(session, former));
            let Some(number) = found.map(|estate| estate.session) else { break };
            self.name_heir_of(number, id);
            let session = self.sessions.get_mut(&id)?;
            let index = self.heirs.0.iter().position(|estate| estate.session == number);
            let Some(index) = index else { break };
            let estate = self.heirs.0.remove(index).expect("found above");
            for (inode, Known { readable }) in estate.known {
                session.known.entry(inode).or_default().readable |= readable;
            }
            session.former_ranges.extend(estate.ranges);
            session.unheard = true;
            session.unsynced |= !estate.synced;
            for (log, last) in estate.recovered {
                register::note_recovered(&mut session.recovered, log, last);
            }
            self.references.hand_over(estate.session, id);
            self.locks.hand_over(estate.session, id);
            let first = U64::new(estate.session.0);
            self.register.note(RegisterEntry { first, ..RegisterEntry::new(RegisterKind::Inherit, id.0) });
        }
        let session = self.sessions.get(&id)?;
        session.recovered.iter().find(|(log, _)| *log == former).map(|(_, last)| *last)
    }

    /// Takes in what an heir has open, by the table that it has filled before its first call.
    pub fn sync_heir(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.unsynced = false;
        for inode in open_here(session) {
            // What has a name is referred to when that is taken.
            let Ok(Some(item)) = self.copy.tree.inode(inode) else { continue };
            if item.links.get() == 0 && self.references.rights(id, inode).is_none() {
                let rights = self.rights_of_user(id, inode, &item);
                self.refer_to(id, inode, rights);
            }
        }
        self.look_at_kept();
    }

    /// Whether somebody may have an inode open without a reference and without having said so.
    pub fn may_be_open(&self, inode: InodeNumber) -> bool {
        self.heirs.may_have_open(inode)
            || self.sessions.values().any(|session| session.unsynced && session.knows(inode))
    }

    /// Inodes without a name that were kept for somebody are looked at again.
    fn look_at_kept(&mut self) {
        self.reapable.extend(std::mem::take(&mut self.kept));
    }

    /// Drops what processes left that are gone.
    pub fn drop_estates_of_dead(&mut self, core: &Core) {
        self.hear_lifelines(core);
        while let Some(index) = self.heirs.0.iter().position(|estate| !estate.lives(&*core.host)) {
            self.drop_estate(index);
        }
    }

    /// Drops the one under this number.
    pub fn drop_estate_of(&mut self, session: SessionId) {
        if let Some(index) = self.heirs.0.iter().position(|estate| estate.session == session) {
            self.drop_estate(index);
        }
    }

    fn drop_estate(&mut self, index: usize) {
        let Some(estate) = self.heirs.0.remove(index) else { return };
        self.locks.end(estate.session);
        // What has a name is left alone when its turn comes.
        let unreferred = self.references.end(estate.session);
        self.reapable.extend(unreferred);
        self.look_at_kept();
        self.register.note(RegisterEntry::new(RegisterKind::End, estate.session.0));
    }
}

/// Own ranges say what a process met because it made it. Who used up so many, or whose sessions were ended by force so
/// often, has forgotten the oldest, but for what it has open.
fn forget_ranges(
    ranges: &mut Vec<(InodeNumber, u64)>,
    known: &mut BTreeMap<InodeNumber, Known>,
    referred: impl Iterator<Item = InodeNumber>,
) {
    if ranges.len() <= RANGES_MAX {
        return;
    }
    // Numbers are given out once, in their order; the session's own are the newest.
    ranges.sort_unstable_by_key(|(first, _)| Reverse(*first));
    let old = ranges.split_off(RANGES_MAX);
    for inode in referred.filter(|inode| old.iter().any(|range| in_range(*inode, *range))) {
        known.entry(inode).or_default();
    }
}

/// What a session's open table says, of what it knows.
fn open_here(session: &Session) -> Vec<InodeNumber> {
    let open = session.shared.client.open().iter();
    // Acquire: pairs with the Release by which the LibFS noted it.
    let numbers = open.map(|word| InodeNumber::new(word.load(Ordering::Acquire)));
    numbers.filter(|inode| *inode != InodeNumber::NONE && session.knows(*inode)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estate(session: u64, uid: u32) -> Estate {
        let owner = U64::new(uid.into());
        let entry = RegisterEntry { owner, ..RegisterEntry::new(RegisterKind::Attach, session) };
        Estate::of_entry(SessionId(session), &entry)
    }

    #[test]
    fn the_oldest_of_the_user_who_has_most_gives_way() {
        const MAX: usize = 16;
        let (one, crowd) = (1, 1000);
        let mut heirs = Heirs::of(std::iter::once(estate(0, one)));
        for session in 1..10 * MAX as u64 {
            if let Some(index) = heirs.who_gives_way(crowd, MAX) {
                heirs.0.remove(index);
            }
            heirs.add(estate(session, crowd));
        }
        assert_eq!(heirs.0[0].uid, one, "a crowd of one user's leaves another his");
        assert!(heirs.may_take(one, MAX) && heirs.may_take(2, MAX) && !heirs.may_take(crowd, MAX));
        assert_eq!(heirs.who_gives_way(2, MAX), None);
        while heirs.0.len() < MAX {
            heirs.add(estate(1, crowd));
        }
        assert_eq!(heirs.who_gives_way(2, MAX), Some(1), "full: the oldest of who has most");
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
