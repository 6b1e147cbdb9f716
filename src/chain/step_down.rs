//! A planned move: the node that leads gives the lead to a copy, and is a copy itself from then on.
//!
//! Guarantees: before it asks the manager, no standby program runs at the node, whether it has used the tree or not
//! ([`crate::standby_lock`]), the node serves no client any more, and every copy in sync has all its data.
//! So the next head has this node as a copy from its first entry on. If the manager refuses, or its answer is lost, a
//! view shows which node leads; if that is this node, it leads again, as after a restart.

use super::head::Head;
use super::member::{Member, PROPOSE};
use super::orders::MoveOrder;
use crate::standby_lock::{NoStandbyPrograms, StandbyLock};
use cluster::{Change, Membership, Party, Path, Subtree};
use format::{ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Word};
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// How often it is looked whether programs have ended.
const LOOK: Duration = Duration::from_millis(2);
/// How long standby programs may take to end when the daemon of their node ends in order.
const ENDING: Duration = Duration::from_secs(10);
/// How long parents may take to kill their standby programs, before the daemon kills both.
const KILLED: Duration = Duration::from_secs(5);
/// How long the programs that the daemon has killed may take to be gone.
const KILLED_HERE: Duration = Duration::from_secs(1);
/// How long the copies may take to get what the last sessions left.
const LEVEL: Duration = Duration::from_secs(1);

/// Why a move is not made, in a sentence.
type Refused<T> = std::result::Result<T, String>;

/// A move that is being made.
#[derive(Clone, Copy)]
pub(super) struct LeadMove {
    /// The node that is to lead.
    pub(super) to: u32,
    /// Standby programs have had their time, and are killed.
    pub(super) at_once: bool,
}

impl Member {
    /// Gives the lead to another node.
    ///
    /// # Errors
    /// Why not. If the daemon had ended its sessions by then, it leads again.
    pub(super) fn give_lead_away(&self, order: &MoveOrder) -> Refused<()> {
        let (head, ..) = self.may_move(order.to)?;
        self.set_moving(order.to, false);
        // Its lock is held until a view names the next node: no standby program begins before that.
        let waited = self.wait_for_programs(&head, order);
        let moved = waited.as_ref().map_err(String::clone).and_then(|_| self.give_lead(order.to, &head));
        self.now.lock().moving = None;
        drop(waited);
        if let Err(why) = &moved {
            warn!(to = order.to, why, "the lead stays");
        }
        moved
    }

    /// Ends the standby programs of a node that leads and whose daemon is to end: another node in sync leads then. Their parents tell
    /// them to end, and kill them after a while. As long as the result lives, no other begins.
    pub(super) fn end_standby_programs(&self, head: &Head) -> Option<NoStandbyPrograms<'_>> {
        let membership = self.now.lock().membership.clone();
        let subtree =
            membership.and_then(|membership| membership.view()?.subtrees.get(&Path::root()).cloned());
        let next = subtree.and_then(|subtree| subtree.in_sync().find(|node| *node != self.id))?.get();
        let begun = SystemHost.now();
        let mut killed = false;
        loop {
            let waited = SystemHost.now().since(begun);
            self.set_moving(next, waited >= ENDING);
            if waited >= ENDING + KILLED && !std::mem::replace(&mut killed, true) {
                self.begun.standby_programs.kill_programs();
            }
            let why = match self.begun.standby_programs.take() {
                Ok(Some(none)) => return Some(none),
                Ok(None) if waited < ENDING + KILLED + KILLED_HERE && !head.is_over() => {
                    SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
                    continue;
                }
                Ok(None) => still_running("standby programs run", &parents(&self.begun.standby_programs)),
                Err(why) => format!("it cannot be told whether standby programs run: {why}"),
            };
            warn!(why, "ending all the same");
            return None;
        }
    }

    fn set_moving(&self, to: u32, at_once: bool) {
        self.now.lock().moving = Some(LeadMove { to, at_once });
    }

    /// Waits until no standby program runs and no program is attached, and lets none in from then on. If the move is forced, standby
    /// programs are killed after their time, and the others are not waited for.
    fn wait_for_programs(&self, head: &Head, order: &MoveOrder) -> Refused<Option<NoStandbyPrograms<'_>>> {
        let lock = &self.begun.standby_programs;
        let until = SystemHost.now().after(Duration::from_millis(order.grace_ms));
        let (mut none, mut killed) = (None, false);
        loop {
            if none.is_none() {
                none = lock
                    .take()
                    .map_err(|why| format!("it cannot be told whether standby programs run: {why}"))?;
            }
            // Only then, so that no call of a program that is told to end fails.
            if none.is_some() && head.daemon.close_if_unused() {
                return Ok(none);
            }
            let late = SystemHost.now().since(until);
            if SystemHost.now() >= until {
                match (order.force, &none) {
                    (true, None) if late < KILLED => self.set_moving(order.to, true),
                    (true, None) if late < KILLED + KILLED_HERE => {
                        if !std::mem::replace(&mut killed, true) {
                            lock.kill_programs();
                        }
                    }
                    (true, _) => return Ok(none),
                    (false, None) => return Err(still_running("standby programs run", &parents(lock))),
                    (false, Some(_)) => return Err(still_running("programs are attached", &attached(head))),
                }
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
        }
    }

    /// Gives what the move needs: the head that leads here, if a node can take its place now.
    fn may_move(&self, to: u32) -> Refused<(Arc<Head>, Arc<Membership>, Party, Subtree)> {
        let (head, membership) = {
            let now = self.now.lock();
            (now.head.clone(), now.membership.clone())
        };
        let (Some(head), Some(membership)) = (head, membership) else {
            return Err("this node does not lead".to_owned());
        };
        if let Some(why) = head.daemon.failure() {
            return Err(format!("its daemon has failed: {why}"));
        }
        let subtree = membership.view().and_then(|view| view.subtrees.get(&Path::root()).cloned());
        let (Some(party), Some(subtree)) = (membership.party(), subtree) else {
            return Err("this node is no member of the cluster now".to_owned());
        };
        let node = NodeId::new(to);
        let copy = head.daemon.copies().into_iter().find(|copy| copy.node == node);
        let is_level = copy.is_some_and(|copy| copy.connected && copy.level);
        if !is_level || !subtree.in_sync().any(|other| other == node) {
            return Err(format!("node {to} is not in sync"));
        }
        Ok((head, membership, party, subtree))
    }

    /// Ends the head, and asks the manager to let another node lead.
    fn give_lead(&self, to: u32, head: &Head) -> Refused<()> {
        // The view is not looked at meanwhile: it would have this node lead again.
        let _looking = self.looking.lock();
        let begun = SystemHost.now();
        let still = self.may_move(to);
        // This daemon accepts no client any more: the next one does, here or on the other node.
        let level = self.step_down(head);
        let (_, membership, party, subtree) = still?;
        level.map_err(|why| {
            format!("sessions were ended, and a copy did not get the last records of programs: {why}")
        })?;
        let (path, version) = (Path::root(), subtree.version);
        let change = Change::SetManager { path, version, by: party, to: NodeId::new(to) };
        let done = self.give(version, &change);
        let done = done.map_err(|why| {
            format!("sessions were ended, and the cluster manager did not let node {to} lead: {why}")
        })?;
        until_seen(&membership, done.number);
        let took_us = SystemHost.now().since(begun).as_micros() as u64;
        info!(to, took_us, "gave the lead away");
        Ok(())
    }

    /// From a node that leads to one that follows, in the same process. An error is of a copy: this node follows all the same.
    fn step_down(&self, head: &Head) -> Result<(), sharedfs::Error> {
        let level = head.daemon.stop_level(SystemHost.now().after(LEVEL));
        if head.is_over() {
            // The next look at the view takes the node out of the in-sync set.
            return level.and(Err(sharedfs::Error::Stopped));
        }
        let standby = &self.begun.standby;
        let follows = standby.resume(&head.daemon).and_then(|()| standby.start());
        if let Err(why) = follows {
            self.end_at_once(&format!("cannot follow with this pool: {why}"));
        }
        {
            let mut now = self.now.lock();
            (now.head, now.take_over, now.beginning) = (None, None, None);
        }
        if let Err(why) = self.listener.take_back() {
            self.end_at_once(&format!("cannot turn programs away: {why}"));
        }
        level
    }
}

/// Why the lead stays.
fn still_running(which: &str, pids: &[String]) -> String {
    // Those of another user are not seen.
    if pids.is_empty() { which.to_owned() } else { format!("{which} (process {})", pids.join(", ")) }
}

fn attached(head: &Head) -> Vec<String> {
    head.daemon.programs().iter().map(|program| program.pid.to_string()).collect()
}

/// The parents of standby programs.
fn parents(lock: &StandbyLock) -> Vec<String> {
    lock.parents().iter().map(|parent| parent.pid().to_string()).collect()
}

/// Waits a while for the view with this change.
fn until_seen(membership: &Membership, number: ChangeNumber) {
    let until = SystemHost.now().after(PROPOSE);
    loop {
        // Acquire: pairs with the Release of the thread that changes it.
        let seen = membership.news().load(Ordering::Acquire);
        let has_come = membership.view().is_some_and(|view| view.number >= number);
        if has_come || SystemHost.now() >= until {
            return;
        }
        SystemHost.wait(membership.news(), seen, Some(until));
    }
}
