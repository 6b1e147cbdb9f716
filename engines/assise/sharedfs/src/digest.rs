//! Digest of the logs of living sessions: the decisions that only the head makes, beside `replay`, and the consequences
//! for sessions (Assise §3.2.1).
//!
//! Guarantees: the log's owner is told last, when its records are in the area and may be overwritten.

use crate::commits::{DaemonCopy, Entries};
use crate::error::Error;
use crate::references::Rights;
use crate::replay::apply::CutReason;
use crate::replay::authorize;
use crate::replay::batch::{BatchLimits, Decisions, Digest, End, NO_FRAME, Role, digest_batch};
use crate::replay::script::reap_step;
use crate::state::{Core, State};
use area::Area;
use ccnvm::SessionId;
use format::node::InodeItem;
use format::{InodeNumber, Sequence};
use ipc::Digested;
use ipc::sync::Ordering;
use mirror::logs::{RING_START, bytes_between};

/// Inodes that one commit removes.
const REAP_AT_ONCE: usize = 64;

/// The background thread goes on with a log of which the fraction `1 / GO_ON_PART` was filled while it was digested.
const GO_ON_PART: u128 = 4;

/// How far a step of a digest came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// As far as was asked.
    Done,
    /// There is more.
    More,
    /// The log ends here, whatever its commit word says.
    Cut(CutReason),
}

impl Core {
    /// One batch: records of a session's log up to `up_to` at most, in one commit. The caller has the area.
    ///
    /// # Errors
    /// Failures of medium or tree, after which the daemon has stopped.
    pub fn digest_step(&self, area: &mut Area, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        let (log, shared, room, kept) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            if state.is_digested(id, up_to)? {
                return Ok(Step::Done);
            }
            // The watermark is read where it is acted on, and so is the room that copies leave.
            let has_room = state.copy.ledger.has_room_for_batch() || !state.copy.ledger.is_held_back();
            if self.digestible(state, id, up_to) < up_to || !has_room {
                return Ok(Step::More);
            }
            let Some(session) = state.sessions.get(&id) else { return Ok(Step::Done) };
            let kept = state.room.begin_batch(&state.copy.free, self.config.area.segment_blocks.into());
            (session.log, session.shared.clone(), state.room.of(id), kept)
        };
        area.keep(kept.blocks, kept.nodes);
        let is_open = |inode| self.state.lock().is_open(inode);
        let lend = |blocks| {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            state.room.lend(blocks, &state.copy.free)
        };
        // While a tree is sent a batch takes little more than was allowed.
        let is_awaited = || self.is_batch_awaited() || self.pace.is_kept();
        // Relaxed: a hint that makes a batch shorter.
        let awaited = || Sequence::new(shared.awaited.load(Ordering::Relaxed));
        let mut decisions = Decisions {
            is_open: &is_open,
            room: Some(room),
            lend: &lend,
            is_awaited: &is_awaited,
            awaited: &awaited,
        };
        let limits = BatchLimits::of(&self.config);
        let digest =
            digest_batch(area, &mut DaemonCopy(self), (log, up_to), limits, &mut decisions, Role::Head);
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.room.end_batch(id, decisions.taken());
        let step = digest.and_then(|digest| state.note_digest(self, id, &digest));
        state.guard(step)
    }

    /// Digests a session's log up to a record, for the background thread. If the session has filled much of its log
    /// meanwhile, the thread goes on with it next: it does not wait until the session asks again.
    ///
    /// # Errors
    /// As [`Self::digest`].
    pub fn digest_and_go_on(&self, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        let before = self.state.lock().digested_of(id);
        let step = self.digest_to(id, up_to)?;
        let mut state = self.state.lock();
        if state.has_much_to_digest(id, before)
            && let Some(session) = state.sessions.get_mut(&id)
        {
            session.wants_digest = true;
            drop(state);
            self.announce_work();
        }
        Ok(step)
    }

    /// Ends the references that idle processes have released; a failure stops the daemon.
    pub fn end_released(&self) {
        let mut state = self.state.lock();
        if !state.is_stopped() {
            let ended = state.end_released();
            let _ = state.guard(ended);
        }
    }

    /// One commit that removes inodes without a name that no process refers to, behind the entry that says so. True if
    /// there is more.
    ///
    /// # Errors
    /// Failures of medium or tree, after which the daemon has stopped.
    pub fn reap_step(&self) -> Result<bool, Error> {
        if self.state.lock().reapable.is_empty() {
            return Ok(false);
        }
        let mut area = self.area_for_other();
        let (inodes, entry) = {
            // Space for its entry is reserved for the thread that holds the area's lock.
            let mut guard = self.state_with_room_beside(&mut area, |_| Entries::plain(0));
            if guard.is_stopped() {
                return Err(Error::Stopped);
            }
            let inodes = guard.take_reapable();
            if inodes.is_empty() {
                return Ok(false);
            }
            let entry = guard.copy.ledger.reap(&inodes);
            guard.reaping.extend(&inodes);
            (inodes, guard.guard(entry)?)
        };
        let done = reap_step(&mut area, &mut DaemonCopy(self), &inodes, self.config.reap_items, entry);
        let mut state = self.state.lock();
        state.reaping.clear();
        let done = state.guard(done)?;
        // The rest gets an entry of its own: a copy of the tree that is taken in between finds it again.
        for inode in inodes[done..].iter().rev() {
            state.reapable.push_front(*inode);
        }
        Ok(!state.reapable.is_empty())
    }
}

impl State {
    /// Whether there is nothing of a session's log to be digested up to this record.
    ///
    /// # Errors
    /// `Stopped`.
    pub fn is_digested(&self, id: SessionId, up_to: Sequence) -> Result<bool, Error> {
        if self.is_stopped() {
            return Err(Error::Stopped);
        }
        let Some(session) = self.sessions.get(&id) else { return Ok(true) };
        Ok(self.copy.digested(session.log).sequence >= up_to)
    }

    /// A call waits until a session's log is digested up to a record.
    pub fn await_digest(&mut self, id: SessionId, up_to: Sequence) {
        if up_to > self.digested_of(id).sequence
            && let Some(session) = self.sessions.get_mut(&id)
        {
            session.begin_wait(up_to);
        }
    }

    /// The call does not wait any more.
    pub fn await_digest_no_more(&mut self, id: SessionId, up_to: Sequence) {
        if let Some(session) = self.sessions.get_mut(&id) {
            let mut left = true;
            session.end_waits(|awaited| awaited != up_to || !std::mem::take(&mut left));
        }
    }

    /// Whether the records that a session's log still has fill about the fraction `1 / GO_ON_PART` of it, if they are as
    /// long as those that were digested since `before`.
    fn has_much_to_digest(&self, id: SessionId, before: Digested) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        let at = self.copy.digested(session.log);
        let Some(file) = self.copy.logs.get(&session.log).and_then(|log| log.file.as_ref()) else {
            return false;
        };
        let records = |from: Sequence, to: Sequence| u128::from(to.get().saturating_sub(from.get()));
        // Without what a pad skips.
        let digested_bytes = bytes_between((RING_START, file.ring_end()), before, at).min(session.log_bytes);
        let left = records(at.sequence, session.shared.committed());
        let digested = records(before.sequence, at.sequence);
        digested > 0
            && left * u128::from(digested_bytes) * GO_ON_PART >= u128::from(session.log_bytes) * digested
    }

    /// Whether a process may have an inode open that loses its last name. A process that opens it has a lease on it first,
    /// for which the log that unlinks it has to be digested.
    fn is_open(&self, inode: InodeNumber) -> bool {
        self.references.any(inode)
            || self.sessions.values().any(|session| {
                session.knows(inode) && (session.open_files_unknown || session.shared.client.is_open(inode))
            })
            || self.detached.may_have_open(inode)
    }

    /// Inodes without a name that no process refers to, for one entry of the ledger.
    fn take_reapable(&mut self) -> Vec<InodeNumber> {
        let inodes_max = self.copy.ledger.reap_max().min(REAP_AT_ONCE);
        let mut inodes = Vec::new();
        while inodes.len() < inodes_max {
            let Some(inode) = self.reapable.pop_front() else { break };
            // One of them may have a name, or be gone: it is not removed, and calls must not miss it in the meantime. The digest
            // that takes its last name, or makes it without one, lists it again.
            let named =
                self.copy.tree.inode(inode).is_ok_and(|item| item.is_none_or(|item| item.links.get() > 0));
            if named || self.references.any(inode) {
                continue;
            }
            if self.may_be_open(inode) {
                self.kept.push(inode);
            } else {
                inodes.push(inode);
            }
        }
        inodes
    }

    /// Tells sessions of a batch: its orphans get references, its log's owner hears how far it came.
    fn note_digest(&mut self, core: &Core, id: SessionId, digest: &Digest) -> Result<Step, Error> {
        self.note_orphans(id, &digest.orphans)?;
        if digest.records > 0 {
            self.publish_reusable(core, id);
            if let Some(session) = self.sessions.get_mut(&id) {
                session.end_waits(|awaited| awaited > digest.at.sequence);
            }
        }
        Ok(match digest.end {
            End::Done => Step::Done,
            End::More => Step::More,
            End::NoFrame => Step::Cut(NO_FRAME),
            End::Cut(reason) => Step::Cut(reason),
            End::Differs => Step::Cut(CutReason::Changed),
        })
    }

    /// Inodes that lost their last name, or never had one: each session that has one open refers to it from now on, with the
    /// rights that its user has. Inodes that no session has open are removed.
    fn note_orphans(&mut self, id: SessionId, orphans: &[(InodeNumber, bool)]) -> Result<(), Error> {
        for (inode, kept) in orphans {
            let Some(item) = self.copy.tree.inode(*inode)? else { continue };
            // A later record of the batch gave it a name.
            if item.links.get() > 0 {
                continue;
            }
            self.note_nameless(*inode);
            let by_table = self.sessions.iter().filter(|(holder, session)| {
                (*kept && **holder == id) || (session.knows(*inode) && session.shared.client.is_open(*inode))
            });
            let holders: Vec<SessionId> = by_table.map(|(holder, _)| *holder).collect();
            for holder in holders {
                // Also more than `references_max`: the contents would be lost, and records for the inode would end the
                // session. Each takes an inode of the tree, of which there is a limited number.
                if self.references.rights(holder, *inode).is_none() {
                    let rights = self.rights_of_user(holder, *inode, &item);
                    self.refer_to(holder, *inode, rights);
                }
            }
            if !self.references.any(*inode) {
                self.reapable.push_back(*inode);
            }
        }
        Ok(())
    }

    /// Ends a session's reference to an inode; true if the inode has no name and is removed now.
    ///
    /// # Errors
    /// Failures of the tree.
    pub fn end_reference(&mut self, id: SessionId, inode: InodeNumber) -> Result<bool, Error> {
        let is_last = self.references.rights(id, inode).is_some() && self.refer_no_more(id, inode);
        let orphan = is_last && self.copy.tree.inode(inode)?.is_some_and(|item| item.links.get() == 0);
        if orphan {
            self.reapable.push_back(inode);
        }
        Ok(orphan)
    }

    /// Ends the references that processes have marked as released in their open tables, because they make no call: of
    /// each session whose log is digested to its end, since a later record for an inode would cut the log. The logs of
    /// the others are digested soon.
    ///
    /// # Errors
    /// Failures of the tree.
    fn end_released(&mut self) -> Result<(), Error> {
        let mut released = Vec::new();
        for (id, session) in &mut self.sessions {
            let digested = self.copy.digested(session.log).sequence;
            let has_none = self.references.of_session(*id).next().is_none();
            if has_none && session.shared.committed() <= digested {
                continue;
            }
            // The table first: the records of its inodes are committed by then.
            let marked = session.shared.client.released();
            if session.shared.committed() <= digested {
                released.extend(marked.into_iter().map(|inode| (*id, inode)));
            } else {
                session.wants_digest |= !marked.is_empty();
            }
        }
        for (id, inode) in released {
            self.end_reference(id, inode)?;
        }
        Ok(())
    }

    /// The rights of a session's user to an inode that the session has open.
    pub fn rights_of_user(&self, id: SessionId, inode: InodeNumber, item: &InodeItem) -> Rights {
        Rights {
            read: self.may_read(id, inode, item),
            write: self.may_write(id, inode) || self.permits_write(id, inode, item),
        }
    }

    fn permits_write(&self, id: SessionId, inode: InodeNumber, item: &InodeItem) -> bool {
        let found = authorize::attributes(inode, item);
        self.sessions
            .get(&id)
            .is_some_and(|session| vfs::access::permits(&session.caller, &found, vfs::access::WRITE))
    }
}
