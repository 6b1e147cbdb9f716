//! Rights to open a file once, which a session passes to the node's mount: a random token for each, which the session
//! shows to the gateway in the name that it opens ([`format::pass`]). Files that the kernel has to see are used through
//! the mount in this way, without their own names: a file that was renamed or removed meanwhile is still the same file.

use crate::references::Rights;
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::InodeNumber;
use format::call::{OpenRequest, PassResponse, Status, split};
use format::pass::TOKEN_BYTES;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Unused rights of one session: a further one ends the oldest.
const PASSES_MAX: usize = 64;

/// A token as it is sent.
pub(crate) type Token = [u8; TOKEN_BYTES];

/// One right.
#[derive(Clone, Copy, Debug)]
struct Pass {
    token: Token,
    inode: InodeNumber,
    rights: Rights,
}

/// The rights of one session, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Passes(VecDeque<Pass>);

impl Passes {
    fn add(&mut self, pass: Pass) {
        if self.0.len() == PASSES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(pass);
    }
}

impl Core {
    /// [`format::call::CallKind::Pass`].
    pub fn pass(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<OpenRequest>(body).map_err(|_| Status::Invalid)?;
        if request.access & !3 != 0 || !self.state.lock().live(id)?.knows(request.inode) {
            return Err(Status::Invalid);
        }
        let mut token = [0; TOKEN_BYTES];
        for half in token.as_chunks_mut::<8>().0 {
            *half = self.host.random().to_le_bytes();
        }
        let (inode, rights) = (request.inode, Rights::of_bits(request.access));
        self.with_own_records(id, |state| {
            if state.rights_to_give(id, inode, rights)? != rights {
                return Err(Status::Access);
            }
            state.live(id)?.passes.add(Pass { token, inode, rights });
            Ok(())
        })?;
        Ok(PassResponse { token }.as_bytes().to_vec())
    }
}

impl State {
    /// Whether a session may open a file by a token. Only what serves a mount may: it is root's, or the daemon's user's.
    pub fn check_pass(
        &mut self,
        id: SessionId,
        inode: InodeNumber,
        wanted: u8,
        token: &Token,
    ) -> Result<(), Status> {
        if !self.live(id)?.is_trusted() {
            return Err(Status::Access);
        }
        let fits =
            |pass: &Pass| pass.token == *token && pass.inode == inode && wanted & !pass.rights.bits() == 0;
        let known = self.sessions.values().any(|session| session.passes.0.iter().any(fits));
        if known { Ok(()) } else { Err(Status::Access) }
    }

    /// The right was used.
    pub fn end_pass(&mut self, token: &Token) {
        for session in self.sessions.values_mut() {
            session.passes.0.retain(|pass| pass.token != *token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_unused_right_gives_way() {
        let mut passes = Passes::default();
        for number in 0..PASSES_MAX as u8 + 2 {
            let (inode, rights) = (InodeNumber::new(5), Rights { read: true, write: false });
            passes.add(Pass { token: [number; TOKEN_BYTES], inode, rights });
        }
        assert_eq!(passes.0.len(), PASSES_MAX);
        assert_eq!(passes.0[0].token, [2; TOKEN_BYTES]);
    }
}
