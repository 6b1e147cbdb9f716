//! A node that cannot go on by itself: the medium of its pool failed, its tree or an entry of its ledger cannot be read or executed, or
//! its daemon cannot begin to serve.
//!
//! Guarantees:
//! - While another member has all acknowledged data, this node leaves the in-sync set, so that it counts as no copy whatever becomes of
//!   its pool, and the other one leads if this one did. Then its process ends, and its keeper starts it again as a standby.
//! - A node that leads leaves when no program takes it for the leader any more: its sessions have ended, its reports say that it has
//!   failed, and no standby program runs at it, or the time has passed until which an earlier report said that no other node leads. The
//!   parents of standby programs end them when they read such a report.
//! - If no other member has all acknowledged data, nothing is asked of the manager. The pool remains the copy that counts. The process
//!   ends if the next one may find the pool whole; otherwise it remains, refuses every call, and reports the reason.
//! - A head that has failed decides nothing about its copies.

use super::head::Head;
use super::member::{LEAVE, Member};
use crate::commands::daemon::{End, note_failure};
use crate::say::quoted;
use cluster::{Change, Party, Path, Replica, View};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time};
use std::time::Duration;
use tracing::{error, warn};

/// Pause before the manager is asked again.
const PAUSE: Duration = Duration::from_millis(500);

/// The failure of the node itself.
pub(super) struct OwnFailure {
    why: String,
    /// Until then an earlier report may have said that no other node leads.
    reported_until: Time,
    /// When the manager was asked last, without success.
    asked: Option<Time>,
}

impl OwnFailure {
    pub(super) fn why(&self) -> &str {
        &self.why
    }
}

impl Member {
    /// Why this node cannot go on, if so.
    pub(super) fn own_failure(&self, head: Option<&Head>) -> Option<String> {
        let noted = self.now.lock().failure.as_ref().map(|failure| failure.why.clone());
        noted.or_else(|| match head {
            Some(head) => head.daemon.failure(),
            None => self.begun.standby.failure(),
        })
    }

    /// One step towards the end of a node that has failed; the next look takes the next one.
    pub(super) fn fail(&self, party: Party, view: &View, why: &str) {
        let (reported_until, asked) = self.note_own_failure(why);
        let head = self.now.lock().head.clone();
        let subtree = view.subtrees.get(&Path::root());
        let subtree = subtree.filter(|subtree| subtree.in_sync().any(|node| node == self.id));
        let Some(subtree) = subtree else { return self.end_failed(why) };
        let is_other = |replica: &&Replica| {
            replica.node != self.id && view.members.get(&replica.node).is_some_and(|member| !member.refused)
        };
        let Some(other) = subtree.living(&view.members).find(is_other) else {
            let remains = head.is_some_and(|head| head.is_over() && !head.daemon.may_be_followed());
            return match remains {
                true => self.set_waits(Some(self.alone(why))),
                false => self.end_failed(&self.alone(why)),
            };
        };
        let leads = subtree.manager == Some(self.id);
        if leads {
            self.set_waits(Some(format!(
                "its daemon has failed ({why}), and node {} is to lead",
                other.node
            )));
        }
        if let Some(head) = head {
            // Programs must not go on with what they have cached when another node leads.
            head.daemon.give_up(&sharedfs::Error::Stopped);
        }
        let now = SystemHost.now();
        // Held until the manager has answered, so that no parent starts a program. The parents of those that run end them first.
        let no_programs = leads.then(|| self.begun.standby_programs.take().ok().flatten()).flatten();
        let may_leave = !leads || no_programs.is_some() || now >= reported_until;
        if !may_leave || asked.is_some_and(|asked| now.since(asked) < PAUSE) {
            return;
        }
        let (path, version, node) = (Path::root(), subtree.version, self.id);
        let change = Change::SetSync { path, version, by: party, node, in_sync: false };
        match if leads { self.give(version, &change) } else { self.propose(&change) } {
            Ok(_) => self.end_failed(&self.replaced(why)),
            Err(refused) => {
                warn!(why, %refused, "this pool is still a copy");
                if let Some(failure) = &mut self.now.lock().failure {
                    failure.asked = Some(now);
                }
            }
        }
    }

    /// [`Self::set_own_failure`], with the reason in the log and in the note for `hearth status`.
    fn note_own_failure(&self, why: &str) -> (Time, Option<Time>) {
        let is_new = self.now.lock().failure.is_none();
        let noted = self.set_own_failure(why);
        if is_new {
            error!(why, "this node has failed");
            // Also for the case that the process is killed meanwhile.
            note_failure(&self.begun.cluster, &self.begun.node, why);
        }
        noted
    }

    /// From here on reports say that the node has failed. Until when an earlier one may have said that no other node leads, and when
    /// the manager was asked last.
    pub(super) fn set_own_failure(&self, why: &str) -> (Time, Option<Time>) {
        let mut now = self.now.lock();
        // A report reads this time before it takes the lock, so none has named a later one.
        let until = now.membership.as_ref().and_then(|membership| membership.valid_until());
        let failure = now.failure.get_or_insert_with(|| OwnFailure {
            why: why.to_owned(),
            reported_until: until.unwrap_or_else(|| SystemHost.now()),
            asked: None,
        });
        (failure.reported_until, failure.asked)
    }

    /// The process ends, and the view is looked at no more.
    pub(super) fn end_failed(&self, why: &str) {
        // Release: pairs with the Acquire of the threads.
        self.stopping.store(1, Ordering::Release);
        SystemHost.wake(&self.stopping, ipc::WAKE_ALL);
        // The receiver may have ended already.
        let _ = self.ends.send(End::Failed(why.to_owned()));
    }

    /// After a failure: tells the cluster that this node goes.
    pub fn leave(&self) {
        // Of a daemon that has failed no call succeeds.
        self.stopping.store(2, Ordering::Release);
        SystemHost.wake(&self.stopping, ipc::WAKE_ALL);
        let membership = self.now.lock().membership.clone();
        // Else it is found to be silent.
        let _ = membership.map(|membership| membership.leave(SystemHost.now().after(LEAVE)));
    }

    /// The sentence for a node whose pool is no copy any more.
    pub(super) fn replaced(&self, why: &str) -> String {
        let (number, dir) = (self.id, quoted(&self.begun.cluster.dir));
        format!(
            "{why}; another node has all data, and this one gets it when it can open its pool and write to it: repair the medium, then \
             hearth start --node {number} --dir {dir}"
        )
    }

    /// The sentence for a node that has failed, and whose pool is the only one with all acknowledged data.
    fn alone(&self, why: &str) -> String {
        let (number, dir, pool) = (self.id, quoted(&self.begun.cluster.dir), quoted(&self.begun.node.pool));
        format!(
            "{why}; no other node has all acknowledged data, so none takes its place: hearth down --node {number} --dir {dir}, repair the \
             medium, see what hearth check {pool} says, then hearth start --node {number} --dir {dir}"
        )
    }
}
