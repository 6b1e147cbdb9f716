//! Digest of the logs of living sessions: what the head decides beside `replay`, and what follows for sessions (Assise
//! §3.2.1).
//!
//! Guarantees: the log's owner is told last, when its records are in the area and may be overwritten.

use crate::error::Error;
use crate::references::Rights;
use crate::replay::apply::CutReason;
use crate::replay::authorize;
use crate::replay::batch::{BatchLimits, Decisions, End, NO_FRAME, Role};
use crate::room::{Free, SessionRoom};
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::node::InodeItem;
use format::session::OPEN_TABLE;
use format::{InodeNumber, Sequence};

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

impl State {
    /// One batch: records of a session's log up to `up_to` at most, in one flip.
    pub fn digest_step(&mut self, core: &Core, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        if self.is_stopped() {
            return Err(Error::Stopped);
        }
        let step = self.digest_batch(core, id, up_to);
        self.guard(step)
    }

    /// What was promised is kept from the batch that comes next.
    fn keep_promised(&mut self) {
        let free = Free::of(&self.copy.area);
        self.copy.area.keep(self.room.kept(&free), self.room.kept_nodes());
    }

    fn digest_batch(&mut self, core: &Core, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        let Some(log) = self.sessions.get(&id).map(|session| session.log) else { return Ok(Step::Done) };
        if self.copy.digested(log).sequence >= up_to {
            return Ok(Step::Done);
        }
        self.keep_promised();
        let (sessions, references, heirs) = (&self.sessions, &self.references, &self.heirs);
        let is_open = |inode: InodeNumber| {
            references.any(inode)
                || sessions.values().any(|session| {
                    session.knows(inode) && (session.unsettled || session.shared.client.is_open(inode))
                })
                || heirs.may_have_open(inode)
        };
        let room = Some(SessionRoom { room: &mut self.room, session: id });
        let is_awaited = || core.state.is_wanted();
        let mut decisions = Decisions { is_open: &is_open, room, is_awaited: &is_awaited };
        let limits = BatchLimits::of(&core.config);
        let digest = self.copy.digest_batch(log, up_to, limits, &mut decisions, Role::Head)?;
        self.note_orphans(core, id, &digest.orphans)?;
        if digest.records > 0 {
            let session = self.sessions.get(&id).expect("looked up above");
            session.shared.daemon.publish_digested(digest.at);
        }
        Ok(match digest.end {
            End::Done => Step::Done,
            End::More => Step::More,
            End::NoFrame => Step::Cut(NO_FRAME),
            End::Cut(reason) => Step::Cut(reason),
        })
    }

    /// Inodes that lost their last name: whoever has one open refers to it from now on, with the rights that its
    /// user has; what nobody has open goes.
    fn note_orphans(
        &mut self,
        core: &Core,
        id: SessionId,
        orphans: &[(InodeNumber, bool)],
    ) -> Result<(), Error> {
        for (inode, kept) in orphans {
            let Some(item) = self.copy.area.inode(*inode)? else { continue };
            let by_table = self.sessions.iter().filter(|(holder, session)| {
                (*kept && **holder == id) || (session.knows(*inode) && session.shared.client.is_open(*inode))
            });
            let holders: Vec<SessionId> = by_table.map(|(holder, _)| *holder).collect();
            for holder in holders {
                // More than a session may refer to are not kept for it.
                let bounded = self.references.count(holder) < core.config.references_max.max(OPEN_TABLE);
                if bounded && self.references.rights(holder, *inode).is_none() {
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

    /// What a session's user may do with an inode that it has open.
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
