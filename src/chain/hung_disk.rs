//! A node whose disk does not answer. Its heartbeats go on, so the manager would let it lead for as long as that lasts, and no
//! call of a program that needs its disk, or a copy of what it wrote, would return.
//!
//! Guarantees:
//! - When an operation on the disk of a node that leads, or is to lead, has made no progress for `disk_seconds`, or for thrice as long
//!   if the device completes other requests, and another member has all acknowledged data, the other member leads. Until then, and if
//!   there is no such member, the node waits for its disk.
//! - Before the manager is asked, no program takes this node for the leader any more: its sessions have ended
//!   ([`sharedfs::Daemon::abandon`]), its reports say that it has failed, and the time has passed until which an earlier report said
//!   that no other node leads. Then the process is killed, so that it does nothing when the disk answers again.
//! - The thread that does this takes no lock that another thread holds while it waits for the disk, and waits for no line of
//!   the log, which may be on the same disk.

use super::member::{Member, PROPOSE};
use crate::commands::daemon::note_failure;
use crate::disk::{self, LOOK};
use crate::error::Result;
use cluster::{Change, Membership, Party, Path, Replica, Subtree};
use format::NodeId;
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time, WAKE_ALL, Word};
use std::sync::Arc;
use std::time::Duration;
use tracing::error;

/// The disk is probed so many times in the time for which it may not answer.
const PROBES: u32 = 4;
/// Pause before the manager is asked again.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the note for `hearth status` may take: it may be on the same disk.
const NOTE: Duration = Duration::from_millis(200);

/// Stages of a node that gives the lead away because of its disk: it has begun, the reason is to be noted, and is noted.
const BEGUN: u32 = 1;
const TO_BE_NOTED: u32 = 2;
const NOTED: u32 = 3;

impl Member {
    /// The thread that gives the lead away when the disk does not answer.
    pub fn watch_disk(&self) {
        let bound = self.begun.chain.disk_patience();
        // Acquire: pairs with the Release of `stop`. A daemon that ends in order waits for its disk, too.
        while self.stopping.load(Ordering::Acquire) < 2 {
            let stalled = self.begun.disk.time().filter(|_| self.begun.disk.is_hung(bound));
            if let Some(stalled) = stalled {
                self.leave_lead_to_a_copy(stalled);
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
        }
    }

    /// Starts the thread that probes the disk while the node leads and programs are attached.
    ///
    /// # Errors
    /// No thread is left.
    pub fn probe_disk(self: &Arc<Self>) -> Result<()> {
        let member = self.clone();
        disk::probe(&self.medium, self.begun.chain.disk_patience() / PROBES, move || {
            let head = member.now.lock().head.clone();
            head.is_some_and(|head| !head.daemon.sessions().is_empty())
        })
    }

    /// The thread that writes why the node gives the lead away. Both files may be on the disk that does not answer.
    pub fn note_hung_disk(&self) {
        // Acquire: pairs with the Release of the thread that watches the disk.
        loop {
            match self.hung.load(Ordering::Acquire) {
                TO_BE_NOTED => break,
                stage => drop(SystemHost.wait(&self.hung, stage, None)),
            }
        }
        let why = self.now.lock().failure.as_ref().map(|failure| failure.why().to_owned());
        let why = self.replaced(&why.unwrap_or_default());
        note_failure(&self.begun.cluster, &self.begun.node, &why);
        error!(why, "this node has failed");
        self.set_hung(NOTED);
    }

    fn set_hung(&self, stage: u32) {
        // Release: pairs with the Acquire of the other threads.
        self.hung.store(stage, Ordering::Release);
        SystemHost.wake(&self.hung, WAKE_ALL);
    }

    /// Whether the disk has stalled for so long that the node gives the lead away: only the thread of this module acts for it
    /// any more.
    pub(super) fn is_hung(&self) -> bool {
        self.hung.load(Ordering::Acquire) != 0
    }

    /// If the node leads, or is to lead, and another one can take its place, that one leads, and this process ends.
    fn leave_lead_to_a_copy(&self, stalled: Duration) {
        let membership = self.now.lock().membership.clone();
        let Some((membership, (party, subtree, other))) =
            membership.and_then(|membership| self.next_head(&membership).map(|next| (membership, next)))
        else {
            return;
        };
        let why = sharedfs::Error::NoAnswer(stalled.as_secs());
        // The thread that looks at the view decides nothing from here on, and reports name no later time.
        self.set_hung(BEGUN);
        let (reported_until, _) = self.set_own_failure(&why.to_string());
        let head = {
            let mut now = self.now.lock();
            now.waits = Some(format!("its daemon has failed ({why}), and node {other} is to lead"));
            now.head.clone()
        };
        if let Some(head) = head {
            head.daemon.abandon(&why);
        }
        self.set_hung(TO_BE_NOTED);
        self.wait_for_note(SystemHost.now().after(NOTE));
        while SystemHost.now() < reported_until {
            SystemHost.wait(&Word::new(0), 0, Some(reported_until));
        }
        self.give_up_place(&membership, party, subtree);
        self.end_at_once(&format!("{why}, and another node can lead"));
    }

    /// The view in which this node leads or is to lead, and the node that may lead in its place.
    fn next_head(&self, membership: &Membership) -> Option<(Party, Subtree, NodeId)> {
        let (party, view) = (membership.party()?, membership.view()?);
        let subtree = view.subtrees.get(&Path::root())?;
        if subtree.manager != Some(self.id) || !subtree.in_sync().any(|node| node == self.id) {
            return None;
        }
        let is_other = |replica: &&Replica| {
            replica.node != self.id && view.members.get(&replica.node).is_some_and(|member| !member.refused)
        };
        let other = subtree.living(&view.members).find(is_other)?.node;
        Some((party, subtree.clone(), other))
    }

    /// Leaves the in-sync set, so that the next member leads. Returns when the manager has said so, or when no member can take the
    /// place of this node any more: then the next daemon leads, when the disk answers.
    fn give_up_place(&self, membership: &Membership, mut party: Party, mut subtree: Subtree) {
        loop {
            let (path, version, node) = (Path::root(), subtree.version, self.id);
            let change = Change::SetSync { path, version, by: party, node, in_sync: false };
            let until = SystemHost.now().after(PROPOSE);
            if membership.give(&Path::root(), version, &change, until).is_ok() {
                return;
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(PAUSE)));
            // If the answer was lost, a later view shows that the change was made.
            match self.next_head(membership) {
                Some((still, newer, _)) => (party, subtree) = (still, newer),
                None => return,
            }
        }
    }

    fn wait_for_note(&self, until: Time) {
        while self.hung.load(Ordering::Acquire) != NOTED && SystemHost.now() < until {
            SystemHost.wait(&self.hung, TO_BE_NOTED, Some(until));
        }
    }
}
