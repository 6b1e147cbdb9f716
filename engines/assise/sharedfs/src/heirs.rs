//! What a process goes on with after its session was sealed, or after the daemon was started again: the inodes it had
//! met, the files it had open, its locks. It attaches anew (same process, same user, as the kernel vouches for both),
//! and its new session inherits them; leases it does not get back.
//!
//! An estate is kept for as long as its process lives, and bounded in number: the oldest is dropped for a new one.

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
    pub settled: bool,
    /// Of what was given away: ends when nobody is left who could come for it.
    lifeline: Option<Arc<Connection>>,
}

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
            settled: false,
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
            settled: true,
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
        self.settled &= left.settled;
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
        self.0.iter().any(|estate| !estate.settled && estate.knows(inode))
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
        let estate = Estate {
            pid,
            started,
            uid,
            gid,
            session: id,
            known: std::mem::take(&mut session.known),
            ranges,
            recovered: std::mem::take(&mut session.recovered),
            settled: !session.unsettled,
            lifeline: None,
        };
        self.heirs.0.push_back(estate);
        while self.heirs.0.len() > core.config.sessions_max {
            self.drop_estate(0);
        }
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
            session.unsettled |= !estate.settled;
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
    pub fn settle_heir(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.unsettled = false;
        for inode in open_here(session) {
            // What has a name is referred to when that is taken.
            let Ok(Some(item)) = self.area.inode(inode) else { continue };
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
            || self.sessions.values().any(|session| session.unsettled && session.knows(inode))
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

/// What a session's open table says, of what it knows.
fn open_here(session: &Session) -> Vec<InodeNumber> {
    let open = session.shared.client.open().iter();
    // Acquire: pairs with the Release by which the LibFS noted it.
    let numbers = open.map(|word| InodeNumber::new(word.load(Ordering::Acquire)));
    numbers.filter(|inode| *inode != InodeNumber::NONE && session.knows(*inode)).collect()
}
