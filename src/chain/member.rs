//! A node as a member of its cluster: it joins, follows the view, and has the part that the view gives it.
//!
//! Guarantees: the node serves programs only while it is the lease manager in a view of its present life, and while its
//! heartbeat is valid. Every node that was in sync in that view has all acknowledged data, and has the first entries of
//! the new life before the first client is accepted. A standby accepts nothing from a head of an older version than the
//! newest view has.
//!
//! One thread looks at the view, whenever it changes and every [`LOOK`]. Nothing else gives the node another part.

use super::daemon::Begun;
use super::ending::Ending;
use super::failed::OwnFailure;
use super::head::{Head, Turn};
use super::last_copy::JoinFailure;
use super::links::Links;
use super::settings::NODES_MAX;
use super::standby_listener::StandbyListener;
use super::step_down::LeadMove;
use super::told::TakeOver;
use crate::cluster::MediumKind;
use crate::commands::daemon::{End, listener_settings, note_failure, of_daemon, spawn, tell_recovered};
use crate::commands::mount::show_if_wanted;
use crate::error::Result;
use cluster::{
    Address, Change, Done, Manager, Membership, Part, Party, Path, Placement, PoolIdentity, Refusal, Remote,
    Subtree, View,
};
use format::{ChangeNumber, NodeId, PoolUid};
use ipc::sync::Ordering;
use ipc::{Host, Lock, SystemHost, Time, Word};
use pmem::Medium;
use sharedfs::{Daemon, Term};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use tracing::{info, warn};
use transport::Connection;

/// How often the node looks at how it is, if nothing changes.
pub(super) const LOOK: Duration = Duration::from_millis(20);
/// How long one attempt to join is.
const JOIN: Duration = Duration::from_secs(2);
/// Pause before the next one.
const JOIN_PAUSE: Duration = Duration::from_millis(50);
/// How long a copy may take to answer before the node that is to lead looks at the view again.
const CONNECT: Duration = Duration::from_millis(100);
/// How long the manager may take to answer, before the view is looked at again.
pub(super) const PROPOSE: Duration = Duration::from_millis(500);
/// How long a node that ends waits for the manager.
pub(super) const LEAVE: Duration = Duration::from_secs(2);
/// A node that leads ends so long before its heartbeat does not hold any more.
const MARGIN: Duration = Duration::from_millis(10);

/// The parts of a member.
pub struct Parts {
    pub begun: Begun,
    pub medium: Medium,
    pub pool: PoolUid,
    pub links: Links,
    pub listener: StandbyListener,
    pub manager: Arc<Remote>,
    pub ends: Sender<End>,
}

/// See the module.
pub struct Member {
    pub(super) begun: Begun,
    pub(super) id: NodeId,
    pool: PoolUid,
    pub(super) medium: Medium,
    pub(super) links: Arc<Links>,
    pub(super) listener: StandbyListener,
    manager: Arc<Remote>,
    pub(super) ends: Sender<End>,
    pub(super) now: Lock<Now>,
    /// Held while the view is looked at.
    pub(super) looking: Lock<()>,
    /// 1 when the node ends; 2 when it does not serve any more.
    pub(super) stopping: Word,
    pub(super) ending: Ending,
    /// Not 0 once the node gives the lead away because its disk does not answer: see `hung_disk`.
    pub(super) hung: Word,
}

/// The present part of the node.
#[derive(Default)]
pub(super) struct Now {
    pub(super) membership: Option<Arc<Membership>>,
    pub(super) head: Option<Arc<Head>>,
    /// It is to lead since then, in views in which nothing else changed.
    pub(super) beginning: Option<Time>,
    pub(super) take_over: Option<TakeOver>,
    pub(super) waits: Option<String>,
    /// The event for which it waits does not come before an operator acts.
    pub(super) needs_operator: bool,
    pub(super) moving: Option<LeadMove>,
    /// It leads, and its tree is being mounted.
    pub(super) mounting: bool,
    pub(super) failure: Option<OwnFailure>,
}

impl Member {
    /// A node that is no member yet.
    pub fn new(parts: Parts) -> Self {
        let Parts { begun, medium, pool, links, listener, manager, ends } = parts;
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        Self {
            id: NodeId::new(begun.node.number),
            medium,
            now: Lock::new(host.clone(), Now::default()),
            looking: Lock::new(host, ()),
            links: Arc::new(links),
            stopping: Word::new(0),
            ending: Ending::default(),
            hung: Word::new(0),
            begun,
            pool,
            listener,
            manager,
            ends,
        }
    }

    /// The thread that follows the view, until the node ends.
    pub fn run(self: &Arc<Self>) {
        let Some(membership) = self.join() else { return };
        loop {
            // Acquire: pairs with the Release of the thread that changes it.
            let seen = membership.news().load(Ordering::Acquire);
            {
                let _looking = self.looking.lock();
                if self.is_stopping() {
                    return;
                }
                self.look(&membership);
            }
            SystemHost.wait(membership.news(), seen, Some(SystemHost.now().after(LOOK)));
        }
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release of `stop`.
        self.stopping.load(Ordering::Acquire) != 0
    }

    pub(super) fn set_waits(&self, why: Option<String>) {
        self.set_waits_for(why, false);
    }

    /// The same, which an operator may have to end.
    pub(super) fn set_waits_for(&self, why: Option<String>, needs_operator: bool) {
        let is_new = {
            let mut now = self.now.lock();
            now.needs_operator = needs_operator;
            std::mem::replace(&mut now.waits, why.clone()) != why
        };
        // Without the lock: the disk of the log may not answer.
        if let Some(why) = why.filter(|_| is_new) {
            info!(why, "waits");
        }
    }

    /// Joins the cluster, however long that takes; none if the node ends before it, or may not be in it.
    fn join(&self) -> Option<Arc<Membership>> {
        loop {
            let joined = self.try_to_join();
            let _looking = self.looking.lock();
            match joined {
                Ok(membership) if self.is_stopping() => {
                    let _ = membership.leave(SystemHost.now().after(LEAVE));
                    return None;
                }
                Ok(membership) => {
                    self.set_waits(None);
                    self.now.lock().membership = Some(membership.clone());
                    return Some(membership);
                }
                Err(_) if self.is_stopping() => return None,
                Err(JoinFailure::Final(why)) => {
                    // The receiver may have ended already.
                    let _ = self.ends.send(End::Failed(why));
                    return None;
                }
                Err(JoinFailure::Passing(why)) => self.set_waits(Some(why)),
                Err(JoinFailure::UntilRepaired(why)) => self.set_waits_for(Some(why), true),
            }
            SystemHost.wait(&self.stopping, 0, Some(SystemHost.now().after(JOIN_PAUSE)));
        }
    }

    /// One attempt.
    fn try_to_join(&self) -> std::result::Result<Arc<Membership>, JoinFailure> {
        let why = |why: cluster::Error| JoinFailure::of(&self.begun.cluster, &why);
        let identity = PoolIdentity::open(&self.medium, self.pool, self.id).map_err(why)?;
        let class = class_of(self.begun.cluster.settings.medium);
        let address = Address::new(&self.links.address).unwrap_or_default();
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let until = SystemHost.now().after(JOIN);
        let membership = Membership::join_pool(host, self.manager.clone(), identity, (class, address), until);
        let membership = membership.map_err(why)?;
        let life = membership.party().map(|party| party.life.get());
        info!(life, address = self.links.address, "joined the cluster");
        Ok(membership)
    }

    /// Looks at the view, and does what it asks of this node.
    fn look(self: &Arc<Self>, membership: &Arc<Membership>) {
        let Some(party) = membership.party() else {
            let why = membership.pool_failure().map(|why| format!("its pool could note no view: {why}"));
            if let Some(why) = &why {
                note_failure(&self.begun.cluster, &self.begun.node, why);
            }
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            self.end_at_once(&format!("this node is no member of the cluster any more{why}"));
        };
        if self.is_hung() {
            return;
        }
        let Some(view) = membership.view() else { return };
        self.links.advance(&view);
        let head = self.now.lock().head.clone();
        let subtree = view.subtrees.get(&Path::root());
        self.note_worth(party, &view, subtree);
        let part = Part::of(subtree, self.id, head.is_some());
        let failure = self.own_failure(head.as_deref()).filter(|_| part != Part::End);
        if let Some(why) = failure {
            return self.fail(party, &view, &why);
        }
        match (part, subtree, head) {
            (Part::Lead, Some(subtree), Some(head)) => {
                let disk_stalls =
                    self.begun.disk.time().is_some_and(|time| time >= self.begun.chain.patience());
                let turn = Turn { party, view: &view, subtree, links: &self.links, disk_stalls };
                self.place_new_members(&view, subtree);
                head.look(&turn, |change| self.propose(change));
            }
            (Part::Begin, Some(subtree), _) => self.begin(membership, party, &view, subtree),
            (Part::Follow, Some(subtree), _) => self.follow(&view, subtree),
            (Part::End, ..) => self.end_at_once("another node leads"),
            (Part::Found, ..) | (_, None, _) | (Part::Lead, _, None) => self.found(&view),
        }
    }

    /// The first node of a new cluster places the tree on all of them: its pool is what the others copy.
    fn found(&self, view: &View) {
        if self.begun.chain.founder != self.begun.node.number {
            return self
                .set_waits(Some(format!("node {} has to begin the cluster", self.begun.chain.founder)));
        }
        if self.begun.cluster.pool_was_lost(&self.begun.node) || self.begun.standby.has_given_up() {
            let why = "the tree of the pool is lost, and the manager knows no other one: remove the cluster's folder, and begin anew";
            return self.set_waits(Some(why.to_owned()));
        }
        let placed = |number: u32| Placement { node: NodeId::new(number), hot: true };
        let chain = self.begun.cluster.settings.nodes.iter().map(|node| placed(node.number)).collect();
        let (path, version, founder) = (Path::root(), ChangeNumber::default(), Some(self.pool));
        let copies_min = self.copies_min(self.begun.cluster.settings.nodes.len());
        let change = Change::SetSubtree { path, version, chain, copies_min, founder };
        if let Err(why) = self.propose(&change) {
            warn!(%why, epoch = view.epoch.get(), "the tree could not be placed");
        }
    }

    /// Members that came to the cluster later get copies, too, behind those that were there; and the cluster is told of how many
    /// copies there have to be.
    fn place_new_members(&self, view: &View, subtree: &Subtree) {
        let placed = |node: &NodeId| subtree.chain.iter().any(|replica| replica.node == *node);
        let mut new = view.members.keys().copied().filter(|node| !placed(node)).peekable();
        let has_room = subtree.chain.len() < NODES_MAX as usize;
        let copies_min = self.copies_min(subtree.chain.len());
        if !(has_room && new.peek().is_some()) && subtree.copies_min == copies_min {
            return;
        }
        let chain = subtree.chain.iter().map(|replica| Placement { node: replica.node, hot: replica.hot });
        let chain =
            chain.chain(new.map(|node| Placement { node, hot: true })).take(NODES_MAX as usize).collect();
        let (path, version) = (Path::root(), subtree.version);
        let change = Change::SetSubtree { path, version, chain, copies_min, founder: None };
        if let Err(why) = self.propose(&change) {
            // The next look tries again.
            warn!(%why, "a new member is not placed");
        }
    }

    /// Copies that there have to be, of so many nodes.
    fn copies_min(&self, nodes: usize) -> u8 {
        u8::try_from(nodes.min(self.begun.chain.min_copies as usize)).unwrap_or(u8::MAX).max(1)
    }

    /// Another node leads, or none.
    fn follow(&self, view: &View, subtree: &Subtree) {
        let leader = subtree.manager.unwrap_or(NodeId::NONE);
        self.begun.standby.fence_but(subtree.version.get(), leader);
        self.now.lock().beginning = None;
        match subtree.manager {
            Some(leader) => {
                self.listener.reject(&format!("node {leader} leads, not node {}", self.id));
                self.set_waits(self.lack_of_tree(subtree));
            }
            None => {
                self.listener.hold();
                self.wait_for_last_copy(view, subtree);
            }
        }
        if subtree.in_sync().any(|node| node == self.id) {
            self.links.forget_follow_end();
        }
    }

    /// This node is to lead.
    fn begin(self: &Arc<Self>, membership: &Arc<Membership>, party: Party, view: &View, subtree: &Subtree) {
        let begun = SystemHost.now();
        let after = self.begun.standby.state().head;
        self.begun.standby.fence(subtree.version.get());
        self.listener.hold();
        let since = *self.now.lock().beginning.get_or_insert(begun);
        if !membership.may_serve(&Path::root()) {
            return self.set_waits(Some("a heartbeat has to be answered before it may lead".to_owned()));
        }
        let Some(copies) = self.connect_to_copies(party, view, subtree, since) else { return };
        let term = Term { node: self.id, epoch: view.epoch, version: subtree.version.get() };
        match self.begun.standby.lead(term, copies) {
            Ok((daemon, recovered)) => {
                let losses = tell_recovered(&recovered, SystemHost.now().since(begun));
                if let Err(why) = self.serve(membership, daemon, losses, subtree) {
                    return self.fail(party, view, &format!("cannot serve: {why}"));
                }
                let took_us = SystemHost.now().since(since).as_micros() as u64;
                let after = after.map(NodeId::get);
                info!(took_us, after, version = subtree.version.get(), "leads");
                let mut now = self.now.lock();
                (now.beginning, now.waits) = (None, None);
                now.take_over = Some(TakeOver { at_ns: SystemHost.wall(), took_us, after });
            }
            Err(why) => self.not_led(party, (view, subtree), since, &why),
        }
    }

    /// Connections to all others that are in sync; none if one cannot be reached now.
    fn connect_to_copies(
        &self,
        party: Party,
        view: &View,
        subtree: &Subtree,
        since: Time,
    ) -> Option<Vec<Connection>> {
        let others =
            subtree.living(&view.members).map(|replica| replica.node).filter(|node| *node != self.id);
        let mut copies = Vec::new();
        for node in others {
            match self.links.connect(view, node, SystemHost.now().after(CONNECT)) {
                Ok(connection) => copies.push(connection),
                Err(why) => {
                    self.set_waits(Some(format!("node {node}, which is in sync, cannot be reached: {why}")));
                    // All nodes may be starting, and another one may have records that were damaged here. A node that is gone is
                    // expelled before that.
                    let patience = self.begun.chain.patience().max(self.begun.chain.expulsion());
                    if SystemHost.now().since(since) >= patience {
                        self.drop_copy(party, subtree, node);
                    }
                    return None;
                }
            }
        }
        Some(copies)
    }

    /// A copy that keeps this node from leading for too long is none any more.
    fn drop_unless_patient(&self, party: Party, subtree: &Subtree, node: NodeId, since: Time) {
        if SystemHost.now().since(since) >= self.begun.chain.patience() {
            self.drop_copy(party, subtree, node);
        }
    }

    fn drop_copy(&self, party: Party, subtree: &Subtree, node: NodeId) {
        let (path, version) = (Path::root(), subtree.version);
        let change = Change::SetSync { path, version, by: party, node, in_sync: false };
        let done = if node == self.id { self.give(version, &change) } else { self.propose(&change) };
        if let Err(why) = done {
            warn!(%why, node = node.get(), "a copy stays one");
        }
    }

    /// Reacts to a failure to lead.
    fn not_led(&self, party: Party, (view, subtree): (&View, &Subtree), since: Time, why: &sharedfs::Error) {
        warn!(%why, "does not lead");
        self.set_waits(Some(format!("it does not lead: {why}")));
        match why {
            // The next one leads.
            sharedfs::Error::CopyIsAhead(_) | sharedfs::Error::TreeGivenUp => {
                self.drop_copy(party, subtree, self.id)
            }
            sharedfs::Error::NeedsImport(node) => self.drop_copy(party, subtree, *node),
            sharedfs::Error::Copy(node, _) => self.drop_unless_patient(party, subtree, *node, since),
            _ => return self.fail(party, view, &format!("it cannot lead: {why}")),
        }
        if let Err(why) = self.begun.standby.start() {
            self.end_failed(&why.to_string());
        }
    }

    /// Serves programs.
    fn serve(
        self: &Arc<Self>,
        membership: &Arc<Membership>,
        daemon: Daemon,
        losses: Vec<String>,
        subtree: &Subtree,
    ) -> Result<()> {
        daemon.start().map_err(of_daemon("start"))?;
        let head = Arc::new(Head::new(daemon, losses, &self.begun, subtree)?);
        let (watched, member, led) = (membership.clone(), self.clone(), head.clone());
        spawn("valid", move || member.end_when_over(&watched, &led))?;
        if !membership.may_serve(&Path::root()) {
            self.end_at_once("its membership ended while it began to lead");
        }
        {
            // First: a program whose call was answered by this node finds it leading.
            let mut now = self.now.lock();
            (now.head, now.mounting) = (Some(head.clone()), true);
        }
        head.daemon.listen(listener_settings(self.listener.release()?)).map_err(of_daemon("listen"))?;
        let member = self.clone();
        spawn("mount", move || {
            show_if_wanted(&member.begun.cluster, &member.begun.node);
            member.now.lock().mounting = false;
        })
    }

    /// Ends the process in time, when no heartbeat was answered: from then on another node may lead.
    fn end_when_over(&self, membership: &Membership, head: &Head) {
        loop {
            // Acquire: pairs with the Release of `stop`.
            let seen = self.stopping.load(Ordering::Acquire);
            // A daemon that has ended answers nobody.
            if seen > 1 || head.daemon.has_ended() {
                return;
            }
            let now = SystemHost.now();
            let left = membership.valid_until().map(|until| until.since(now)).unwrap_or_default();
            if left <= MARGIN {
                self.end_at_once("no heartbeat was answered in time: another node may lead from now on");
            }
            SystemHost.wait(&self.stopping, seen, Some(now.after(left - MARGIN)));
        }
    }

    pub(super) fn propose(&self, change: &Change) -> std::result::Result<Done, cluster::Error> {
        let done = self.manager.propose(change, SystemHost.now().after(PROPOSE));
        info!(?change, made = done.is_ok(), "proposed");
        done
    }

    /// Proposes what may cost this node the lead: it does not serve again before a view shows that it leads all the same.
    pub(super) fn give(
        &self,
        version: ChangeNumber,
        change: &Change,
    ) -> std::result::Result<Done, cluster::Error> {
        let membership = self.now.lock().membership.clone();
        let membership = membership.ok_or(cluster::Error::Refused(Refusal::NotMember))?;
        let done = membership.give(&Path::root(), version, change, SystemHost.now().after(PROPOSE));
        info!(?change, made = done.is_ok(), "proposed");
        done
    }

    /// Ends in order: the standby programs of the node end, the node serves no more, and it tells the cluster that it leaves.
    pub fn stop(&self) {
        let leads = self.now.lock().head.clone();
        let _no_programs = leads.as_ref().and_then(|head| self.end_standby_programs(head));
        // Release: pairs with the Acquire of the threads.
        self.stopping.store(1, Ordering::Release);
        SystemHost.wake(&self.stopping, ipc::WAKE_ALL);
        let _looking = self.looking.lock();
        let (head, membership) = {
            let now = self.now.lock();
            (now.head.clone(), now.membership.clone())
        };
        match head {
            Some(head) => stop_for_good(&head),
            None => self.begun.standby.stop(),
        }
        self.stopping.store(2, Ordering::Release);
        if let Some(membership) = membership
            && let Err(why) = membership.leave(SystemHost.now().after(LEAVE))
        {
            warn!(%why, "the cluster manager did not hear that this node goes");
        }
    }
}

/// Ends a daemon that leads, before its process ends: copies that answer get all that it has, so that this pool is one of them
/// again when it comes back.
fn stop_for_good(head: &Head) {
    if !head.daemon.copies().iter().all(|copy| copy.connected) {
        return head.daemon.stop();
    }
    if let Err(why) = head.daemon.stop_level(SystemHost.now().after(LEAVE)) {
        warn!(%why, "a copy did not get the last records of programs");
    }
}

/// The class of a pool's medium, as the cluster encodes it.
fn class_of(medium: MediumKind) -> u8 {
    match medium {
        MediumKind::Memory => 0,
        MediumKind::File => 1,
    }
}
