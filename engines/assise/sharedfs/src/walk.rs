//! Walks, leases, opens: the calls by which a session comes to hold inodes (a lease is only granted after a walk that
//! SharedFS made).
//!
//! Every check uses the attributes in the area, under a lease that the session holds at that moment, so changes that
//! other sessions made before are visible. The session's own records are digested when they could matter.

use crate::commits::Entries;
use crate::passes::Token;
use crate::recalls::Patience;
use crate::references::Rights;
use crate::replay::authorize::attributes;
use crate::session::MetInode;
use crate::state::{Core, State};
use ccnvm::{Effect, Event, Mode, Nanoseconds, SessionId, Ticket, Want};
use format::call::{
    AHEAD_MAX, InodeRequest, LEASE_READ, LEASE_UNITS_MAX, LEASE_WRITE, LeaseRequest, LeaseUnit, NodeReply,
    OpenRequest, RELEASE_UNITS_MAX, RENAME_UNIT, Status, WALK_NAMES_MAX, WalkRequest, WalkResponse, split,
};
use format::name::COOKIE_SLOTS;
use format::node::InodeItem;
use format::record::FileType;
use format::register::{KNOWN_MADE, KNOWN_READABLE, RegisterEntry};
use format::session::WORD_OWN_RANGE;
use format::{Cookie, InodeNumber, LogUid, Name, Sequence};
use ipc::Word;
use std::collections::BTreeSet;
use std::time::Duration;
use vfs::access;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// How often a step is repeated because others changed the tree meanwhile. Each lease is held for a while before it is
/// revoked, so this is rarely more than once.
const TRIES_MAX: usize = 256;
/// Tries without a pause before each.
const TRIES_AT_ONCE: usize = 16;
/// Pause before each further try.
const TRY_PAUSE: Duration = Duration::from_millis(1);

/// One step of a walk.
#[derive(Clone, Copy)]
enum StepTo<'a> {
    Parent,
    Child(Name<'a>),
}

/// The result of a step.
enum Stepped {
    To(InodeNumber, FileType, u16),
    /// The name does not exist; so many entries have its hash.
    Absent(u32),
}

/// Decodes the mode of a request: 0 means that any is enough.
fn mode_of(raw: u8) -> Result<Mode, Status> {
    match raw {
        0 | LEASE_READ => Ok(Mode::Read),
        LEASE_WRITE => Ok(Mode::Write),
        _ => Err(Status::Invalid),
    }
}

impl Core {
    /// Runs a step whose result may depend on the session's own records: if it reports that something does not exist or
    /// is not allowed, digests them and runs it again.
    pub fn with_own_records<T>(
        &self,
        id: SessionId,
        mut act: impl FnMut(&mut State) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let (first, up_to) = {
            let mut state = self.state.lock();
            let session = state.live(id)?;
            let up_to = session.shared.committed();
            let behind = up_to > state.digested_of(id).sequence;
            (act(&mut state), behind.then_some(up_to))
        };
        match (first, up_to) {
            (Err(Status::Access | Status::NotFound | Status::NotDirectory), Some(up_to)) => {
                self.digest_own(id, up_to)?;
                act(&mut self.state.lock())
            }
            (result, _) => result,
        }
    }

    /// Digests on behalf of the session itself; if its log is invalid before its last committed record, the session
    /// ends.
    pub fn digest_own(&self, id: SessionId, up_to: Sequence) -> Result<(), Status> {
        match self.digest(id, up_to) {
            Ok(crate::digest::Step::Cut(reason)) => {
                self.terminate(id, crate::session_end::TerminationReason::Cut(reason));
                Err(Status::Sealed)
            }
            Ok(_) => Ok(()),
            Err(_) => Err(Status::Media),
        }
    }

    /// Called before another try: the threads that revoke leases may need the processor, and after a few tries some
    /// time.
    fn let_others(&self, tries: usize) {
        if tries >= TRIES_AT_ONCE {
            self.host.wait(&Word::new(0), 0, Some(self.host.now().after(TRY_PAUSE)));
        }
    }

    /// Acquires a lease and describes the inode under it. The flag is that of [`Core::acquire`].
    fn hold(
        &self,
        id: SessionId,
        want: Want,
        slot: u16,
        patience: Patience,
    ) -> Result<(NodeReply, bool), Status> {
        let mut was_taken = false;
        for tries in 0..TRIES_MAX {
            was_taken |= self.acquire(id, &[want], patience)?;
            match self.with_own_records(id, |state| state.reply(id, want.unit, slot)) {
                // The lease was revoked again before it could be reported.
                Err(Status::WouldBlock) => self.let_others(tries),
                reply => return reply.map(|reply| (reply, was_taken)),
            }
        }
        Err(Status::Limit)
    }

    /// [`format::call::CallKind::Walk`].
    pub fn walk(&self, id: SessionId, body: &[u8], patience: Patience) -> Result<Vec<u8>, Status> {
        let (request, rest) = split::<WalkRequest>(body).map_err(|_| Status::Invalid)?;
        let steps = steps(rest, request.names.get().into())?;
        let (last, parent) = (mode_of(request.last_mode)?, mode_of(request.parent_mode)?);
        let mode = |index: usize| match steps.len() - index {
            0 => last,
            1 => parent,
            _ => Mode::Read,
        };
        if !self.state.lock().live(id)?.may_use(request.start) {
            return Err(Status::Invalid);
        }
        let (start, mut was_taken) =
            self.hold(id, Want { unit: request.start, mode: mode(0) }, 0, patience)?;
        let mut replies = vec![start];
        let (mut stopped, mut same_hash) = (Status::Ok, 0);
        for (index, step) in steps.iter().enumerate() {
            let at = replies.last().expect("the start is there").inode;
            let from = Want { unit: at, mode: mode(index) };
            match self.step(id, from, *step, mode(index + 1), patience) {
                Ok(Ok((reply, file_type, taken))) => {
                    was_taken = taken;
                    replies.push(reply);
                    if file_type == FileType::Symlink && index + 1 < steps.len() {
                        stopped = Status::Symlink;
                        break;
                    }
                }
                Ok(Err(absent)) => {
                    (stopped, same_hash) = (Status::NotFound, absent);
                    break;
                }
                Err(status @ (Status::Access | Status::NotDirectory | Status::NotFound)) => {
                    stopped = status;
                    break;
                }
                Err(status) => return Err(status),
            }
        }
        let head = WalkResponse {
            nodes: U16::new(u16::try_from(replies.len()).expect("names are bounded")),
            stopped: U16::new(stopped as u16),
            same_hash: U32::new(same_hash),
        };
        let wanted = usize::from(request.ahead.get()).min(AHEAD_MAX);
        if let (Status::Ok, Some(StepTo::Child(last)), [.., directory, _]) =
            (stopped, steps.last(), replies.as_slice())
            && wanted > 0
            && (was_taken || request.ahead_if_taken == 0)
        {
            let mode = mode_of(request.ahead_mode)?;
            // An inode that another session held is probably followed by more of them.
            let asks = was_taken && patience == Patience::Waits;
            replies.extend(self.walk_ahead(id, (directory.inode, *last), (wanted, mode), asks)?);
        }
        self.state.lock().trim_known(id, self.config.known_max);
        Ok([head.as_bytes(), replies.as_bytes()].concat())
    }

    /// Gives leases on entries of a directory, from a name on, in the order of the directory: on at most so many that
    /// the session lacks and that are free. With `asks`, others give back those that they hold: a revoked lease is free at once,
    /// and a recalled one may be free at the session's next call.
    fn walk_ahead(
        &self,
        id: SessionId,
        from: (InodeNumber, Name<'_>),
        (count_max, mode): (usize, Mode),
        mut asks: bool,
    ) -> Result<Vec<NodeReply>, Status> {
        loop {
            let mut guard = self.state_with_room(|_| Entries::plain(count_max));
            let state = &mut *guard;
            let now = self.host.now().as_ns();
            let wants = state.ahead_of(id, from, mode, count_max, asks)?;
            if !state.may_have_leases(&self.config, id, &wants) {
                return Ok(Vec::new());
            }
            if std::mem::take(&mut asks) && state.ask_back(id, &wants, now)? {
                drop(guard);
                self.run_revocations();
                continue;
            }
            let order: Vec<InodeNumber> = wants.iter().map(|want| want.unit).collect();
            let ticket = Ticket(state.next_ticket);
            state.next_ticket += 1;
            let event = Event::RequestFree { ticket, session: id, wants };
            let effects = state.leases.step(now, event);
            let mut granted = BTreeSet::new();
            for effect in &effects {
                if let Effect::Grant { grants, .. } = effect {
                    granted.extend(grants.iter().map(|(want, _)| want.unit));
                }
            }
            let absorbed = state.absorb(effects);
            state.guard(absorbed).map_err(|_| Status::Media)?;
            state.outcomes.remove(&ticket);
            let granted = order.into_iter().filter(|unit| granted.contains(unit));
            return granted.map(|unit| state.reply(id, unit, 0)).collect();
        }
    }

    /// One step of a walk: from a directory to the inode of an entry, with a lease. `Ok(Err)`: there is no such entry.
    fn step(
        &self,
        id: SessionId,
        from: Want,
        to: StepTo<'_>,
        mode: Mode,
        patience: Patience,
    ) -> Result<Result<(NodeReply, FileType, bool), u32>, Status> {
        for tries in 0..TRIES_MAX {
            self.acquire(id, &[from], patience)?;
            let found = self.with_own_records(id, |state| state.look(id, from.unit, to))?;
            let (child, file_type, slot) = match found {
                Stepped::To(child, file_type, slot) => (child, file_type, slot),
                Stepped::Absent(same_hash) => return Ok(Err(same_hash)),
            };
            match self.hold(id, Want { unit: child, mode }, slot, patience) {
                Ok((reply, was_taken)) => return Ok(Ok((reply, file_type, was_taken))),
                // The name may denote another inode by now: the name itself is looked up again.
                Err(Status::NotFound) => self.let_others(tries),
                Err(status) => return Err(status),
            }
        }
        Err(Status::Limit)
    }

    /// [`format::call::CallKind::Lease`].
    pub fn lease(&self, id: SessionId, body: &[u8], patience: Patience) -> Result<Vec<u8>, Status> {
        let (request, rest) = split::<LeaseRequest>(body).map_err(|_| Status::Invalid)?;
        let count = usize::try_from(request.count.get()).map_err(|_| Status::Invalid)?;
        if count == 0 || count > LEASE_UNITS_MAX || rest.len() != count * size_of::<LeaseUnit>() {
            return Err(Status::Invalid);
        }
        let mut wants = Vec::with_capacity(count);
        for chunk in rest.chunks_exact(size_of::<LeaseUnit>()) {
            let (unit, _) = split::<LeaseUnit>(chunk).map_err(|_| Status::Invalid)?;
            wants.push(Want { unit: unit.inode, mode: mode_of(unit.mode)? });
        }
        {
            let mut state = self.state.lock();
            let session = state.live(id)?;
            let knows = |want: &Want| want.unit == RENAME_UNIT || session.may_use(want.unit);
            if !wants.iter().all(knows) {
                return Err(Status::Invalid);
            }
        }
        for tries in 0..TRIES_MAX {
            self.acquire(id, &wants, patience)?;
            let replies = self.with_own_records(id, |state| {
                wants.iter().map(|want| state.reply(id, want.unit, 0)).collect::<Result<Vec<_>, _>>()
            });
            match replies {
                Err(Status::WouldBlock) => self.let_others(tries),
                Err(status) => return Err(status),
                Ok(replies) => return Ok(replies.as_bytes().to_vec()),
            }
        }
        Err(Status::Limit)
    }

    /// [`format::call::CallKind::Open`].
    pub fn open(&self, id: SessionId, body: &[u8], patience: Patience) -> Result<Vec<u8>, Status> {
        let (request, rest) = split::<OpenRequest>(body).map_err(|_| Status::Invalid)?;
        let token = match rest.len() {
            0 => None,
            _ => Some(Token::try_from(rest).map_err(|_| Status::Invalid)?),
        };
        let inode = request.inode;
        let mode = mode_of(request.mode)?;
        if request.access > 7 || !self.state.lock().live(id)?.may_use(inode) {
            return Err(Status::Invalid);
        }
        for tries in 0..TRIES_MAX {
            self.acquire(id, &[Want { unit: inode, mode }], patience)?;
            let replied = self.with_own_records(id, |state| {
                match &token {
                    Some(token) => state.check_pass(id, inode, request.access, token)?,
                    None => state.check_open(id, inode, request.access)?,
                }
                state.refer(self, id, inode, request.access)?;
                let reply = state.reply(id, inode, 0)?;
                if let Some(token) = &token {
                    state.end_pass(token);
                }
                Ok(reply)
            });
            match replied {
                Err(Status::WouldBlock) => self.let_others(tries),
                Err(status) => return Err(status),
                Ok(reply) => return Ok(reply.as_bytes().to_vec()),
            }
        }
        Err(Status::Limit)
    }

    /// [`format::call::CallKind::Close`].
    pub fn close(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let requests = <[InodeRequest]>::ref_from_bytes(body).map_err(|_| Status::Invalid)?;
        if requests.is_empty() || requests.len() > RELEASE_UNITS_MAX {
            return Err(Status::Invalid);
        }
        let mut reap = false;
        {
            let mut state = self.state.lock();
            state.live(id)?;
            for request in requests {
                reap |= state.end_reference(id, request.inode).map_err(|_| Status::Media)?;
            }
        }
        for request in requests.iter().filter(|request| request.flags.get() == 1) {
            self.release(id, request.inode)?;
        }
        if reap {
            self.announce_work();
        }
        Ok(Vec::new())
    }
}

/// Takes the names of a walk apart.
fn steps(mut rest: &[u8], count: usize) -> Result<Vec<StepTo<'_>>, Status> {
    if count > WALK_NAMES_MAX {
        return Err(Status::Invalid);
    }
    let mut steps = Vec::with_capacity(count);
    for _ in 0..count {
        let (length, after) = rest.split_first().ok_or(Status::Invalid)?;
        let (name, after) = after.split_at_checked(usize::from(*length)).ok_or(Status::Invalid)?;
        rest = after;
        steps.push(match name {
            [] => StepTo::Parent,
            name => StepTo::Child(Name::new(name).map_err(|_| Status::Invalid)?),
        });
    }
    Ok(steps)
}

impl State {
    /// Bounds the number of inodes that are remembered of a session's walks.
    pub fn trim_known(&mut self, id: SessionId, known_max: usize) {
        let references = &self.references;
        if let Some(session) = self.sessions.get_mut(&id) {
            session.trim_known(known_max, |inode| references.rights(id, inode).is_some());
        }
    }

    /// Whether a session may write contents whatever the mode says.
    pub fn may_write(&self, id: SessionId, inode: InodeNumber) -> bool {
        let open = self.copy.ledger.table().log(LogUid::new(id.0));
        open.is_some_and(|open| open.may_write_contents(inode)) || self.may_write_next(id, inode)
    }

    /// Whether it may under its next grant.
    pub fn may_write_next(&self, id: SessionId, inode: InodeNumber) -> bool {
        self.has_made(id, inode) || self.references.rights(id, inode).is_some_and(|rights| rights.write)
    }

    /// A session that made an inode and has it open keeps the right to use it, now that others may change owner and mode.
    pub fn keep_made(&mut self, id: SessionId, inode: InodeNumber) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let met = session.known.entry(inode).or_default();
        if met.add(KNOWN_READABLE | KNOWN_MADE) {
            self.register.note(RegisterEntry::of_known(id.0, &[(inode, met.bits())]));
        }
    }

    /// Whether a session made an inode and has kept the right to use it.
    fn has_made(&self, id: SessionId, inode: InodeNumber) -> bool {
        let met = self.sessions.get(&id).and_then(|session| session.known.get(&inode));
        met.is_some_and(|met| met.made)
    }

    /// An inode of the area.
    pub fn item(&self, inode: InodeNumber) -> Result<InodeItem, Status> {
        if self.reaping.contains(&inode) {
            return Err(Status::NotFound);
        }
        self.copy.tree.inode(inode).map_err(|_| Status::Media)?.ok_or(Status::NotFound)
    }

    /// Describes an inode that a session holds, as a reply; from now on the session has met the inode. `WouldBlock`: it
    /// does not hold it any more.
    fn reply(&mut self, id: SessionId, inode: InodeNumber, slot: u16) -> Result<NodeReply, Status> {
        let is_own = self.is_own(id, inode);
        let item = if inode == RENAME_UNIT { InodeItem::new_zeroed() } else { self.item(inode)? };
        let has_xattrs =
            inode != RENAME_UNIT && self.copy.tree.has_xattrs(inode).map_err(|_| Status::Media)?;
        let readable = inode != RENAME_UNIT && self.may_read(id, inode, &item);
        let writable = self.may_write(id, inode);
        let digested = self.digested_of(id).sequence;
        let session = self.live(id)?;
        let mut reply = NodeReply::new_zeroed();
        match session.held.get(&inode) {
            Some(held) if held.leaving => return Err(Status::WouldBlock),
            Some(held) => {
                reply.version = held.version;
                reply.ledger = held.ledger;
                reply.word = U32::new(held.word);
                reply.expected = U32::new(held.expected);
                reply.mode = if held.mode == Mode::Write { LEASE_WRITE } else { LEASE_READ };
                if held.word == WORD_OWN_RANGE {
                    reply.expected = U32::new(session.own_expected());
                }
            }
            None if is_own => {
                reply.version = session.version;
                reply.ledger = session.opened;
                reply.word = U32::new(WORD_OWN_RANGE);
                reply.expected = U32::new(session.own_expected());
                reply.mode = LEASE_WRITE;
            }
            None => return Err(Status::WouldBlock),
        }
        reply.inode = inode;
        reply.digested = digested;
        reply.slot = U16::new(slot);
        reply.writable = u8::from(writable);
        reply.item = item;
        reply.has_xattrs = u8::from(has_xattrs);
        if inode != RENAME_UNIT {
            let new = !session.known.contains_key(&inode);
            let known: &mut MetInode = session.known.entry(inode).or_default();
            let bits = u8::from(readable) * KNOWN_READABLE;
            if known.add(bits) || new {
                let bits = known.bits();
                self.register.note(RegisterEntry::of_known(id.0, &[(inode, bits)]));
            }
        }
        Ok(reply)
    }

    /// Looks one name up in a directory that the session holds.
    fn look(&mut self, id: SessionId, directory: InodeNumber, to: StepTo<'_>) -> Result<Stepped, Status> {
        let item = self.item(directory)?;
        let caller = &self.live(id)?.caller;
        access::search(caller, &attributes(directory, &item)).map_err(status_of)?;
        let name = match to {
            StepTo::Parent => {
                return Ok(Stepped::To(item.parent, FileType::Directory, 0));
            }
            StepTo::Child(name) => name,
        };
        let found = self.copy.tree.lookup(directory, name).map_err(|_| Status::Media)?;
        if let Some(entry) = found {
            let slot = u16::try_from(entry.cookie.get() % COOKIE_SLOTS).expect("slots are 15 bits");
            return Ok(Stepped::To(entry.inode, entry.file_type, slot));
        }
        let first = Cookie::of_name(name);
        let near = self.copy.tree.entries(directory, first, SAME_HASH_MAX).map_err(|_| Status::Media)?;
        let same = near.iter().take_while(|entry| entry.cookie.same_hash(first)).count();
        Ok(Stepped::Absent(u32::try_from(same).expect("bounded above")))
    }

    /// Leases that the session lacks on the inodes of entries from a name on; none if it may not list the directory, or
    /// does not hold it. Inodes that another session made and still holds are among them only if `with_made` says so.
    fn ahead_of(
        &mut self,
        id: SessionId,
        (directory, last): (InodeNumber, Name<'_>),
        mode: Mode,
        count_max: usize,
        with_made: bool,
    ) -> Result<Vec<Want>, Status> {
        let Ok(item) = self.item(directory) else { return Ok(Vec::new()) };
        let holds = self.holds(id, Want { unit: directory, mode: Mode::Read });
        let lists = holds && self.may_read(id, directory, &item);
        let session = self.live(id)?;
        let searches = access::search(&session.caller, &attributes(directory, &item)).is_ok();
        // The words for a walk, and for its last inode, stay free.
        let count_max = count_max.min(session.words_left().saturating_sub(WALK_NAMES_MAX));
        if !lists || !searches || count_max == 0 {
            return Ok(Vec::new());
        }
        let Some(entry) = self.copy.tree.lookup(directory, last).map_err(|_| Status::Media)? else {
            return Ok(Vec::new());
        };
        // Includes the name itself, whose lease may have to be strengthened.
        let from = entry.cookie;
        let entries = self.copy.tree.entries(directory, from, AHEAD_LOOKS).map_err(|_| Status::Media)?;
        let lacks = |want: &Want| {
            let owner = self.owner_of(want.unit).filter(|owner| self.is_own(*owner, want.unit));
            (with_made || owner.is_none()) && !self.holds(id, *want)
        };
        let wants = entries.iter().map(|entry| Want { unit: entry.inode, mode });
        Ok(wants.filter(lacks).take(count_max).collect())
    }

    /// Has others give back leases that a session is about to request; false if there are none that can be asked for.
    fn ask_back(&mut self, id: SessionId, wants: &[Want], now: Nanoseconds) -> Result<bool, Status> {
        // The sessions that made some of them hold these without an entry in the table of leases.
        wants.iter().for_each(|want| self.introduce(now, want.unit));
        let event = Event::AskBack { session: id, wants: wants.to_vec() };
        let effects = self.leases.step(now, event);
        let asked = !effects.is_empty();
        let absorbed = self.absorb(effects);
        self.guard(absorbed).map_err(|_| Status::Media)?;
        Ok(asked)
    }

    fn check_open(&mut self, id: SessionId, inode: InodeNumber, wanted: u8) -> Result<(), Status> {
        let item = self.item(inode)?;
        // The process that made the inode may use it as it was made; LibFS checks later opens by the mode that it gave.
        if self.is_own(id, inode) || self.has_made(id, inode) {
            return Ok(());
        }
        // So may a session with the right by a reference, such as one that another process gave, whatever the mode
        // says.
        let held = self.references.rights(id, inode).map_or(0, Rights::bits);
        if wanted & !held == 0 && self.references.rights(id, inode).is_some() {
            return Ok(());
        }
        let rights = [(1, access::READ), (2, access::WRITE), (4, access::EXECUTE)];
        let asked = rights.iter().filter(|(bit, _)| wanted & bit != 0).map(|(_, right)| right).sum();
        access::check(&self.live(id)?.caller, &attributes(inode, &item), asked).map_err(status_of)
    }

    /// Makes a reference. If it is one for writing, the ledger gets it with the next grant: under the present one the
    /// mode cannot change.
    fn refer(&mut self, core: &Core, id: SessionId, inode: InodeNumber, wanted: u8) -> Result<(), Status> {
        let rights = Rights { read: wanted & 1 != 0, write: wanted & 2 != 0 };
        let new = self.references.rights(id, inode).is_none();
        if new && self.references.count(id) >= core.config.references_max {
            return Err(Status::Limit);
        }
        self.refer_to(id, inode, rights);
        Ok(())
    }
}

/// Entries that are examined in search of free ones.
const AHEAD_LOOKS: usize = 4 * AHEAD_MAX;

/// Entries looked at to count those with one hash.
const SAME_HASH_MAX: usize = 64;

/// The status of a call for which permission is refused.
pub(crate) fn status_of(error: vfs::Error) -> Status {
    match error {
        vfs::Error::NotDirectory => Status::NotDirectory,
        vfs::Error::NotFound => Status::NotFound,
        vfs::Error::NoData => Status::NoAttribute,
        _ => Status::Access,
    }
}
