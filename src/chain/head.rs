//! The node that leads, and its copies: who is fed, who is in sync, and who is waited for no longer.
//!
//! Guarantees (`docs/replication.md`, C8): a node is in sync in the view only while the daemon counts it, so that every
//! fsync waits for it. It counts before the view is asked to say so, and until a view says that it is none any more; where
//! the answer to that question was lost it counts until a newer version of the chain shows how it ended.

use super::daemon::Begun;
use super::links::Links;
use super::member::LOOK;
use super::told::CopyTold;
use crate::commands::daemon::{pool_files, spawn, watch_pool};
use crate::error::Result;
use crate::presence::Presence;
use cluster::{Change, Done, Party, Path, Subtree, View};
use format::{ChangeNumber, Epoch, NodeId};
use ipc::{Host, Lock, SystemHost, Time};
use sharedfs::{CopyState, Daemon};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// Pause before a node that could not be made a copy is tried again.
const PAUSE: Duration = Duration::from_millis(200);
/// The same for one that was a copy and did not keep up.
const PAUSE_AFTER_STALL: Duration = Duration::from_secs(2);
/// A node that is looked at in time is looked at so many times less often than it could be.
const LOOKS_PART: u32 = 2;
/// How long an attempt to connect is.
const CONNECT: Duration = Duration::from_millis(500);

/// What is looked at in one turn.
pub struct Turn<'a> {
    pub party: Party,
    pub view: &'a Arc<View>,
    pub subtree: &'a Subtree,
    pub links: &'a Arc<Links>,
}

/// What is known of another node beside what the view and the daemon say.
#[derive(Clone, Debug, Default)]
struct Peer {
    /// Somebody connects to it and brings it up.
    is_busy: bool,
    next_try: Option<Time>,
    /// Since when there is no connection to it.
    lost_at: Option<Time>,
    /// How long it had kept programs waiting when it was looked at last, and how often in a row it had not moved.
    waited: Duration,
    waited_looks: u32,
    /// The version at which the view was asked to call it in sync.
    proposed: Option<ChangeNumber>,
    /// The life in which its pool was found to be of no use.
    refused: Option<Epoch>,
    problem: Option<String>,
}

/// A node that leads.
pub struct Head {
    pub daemon: Arc<Daemon>,
    pub losses: Vec<String>,
    pub pool: Arc<Vec<Presence>>,
    patience: Duration,
    min_copies: usize,
    peers: Lock<BTreeMap<NodeId, Peer>>,
    version: Lock<ChangeNumber>,
}

/// How another node is, of what decides what is done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    is_member: bool,
    /// So the view says.
    in_sync: bool,
    /// A question whether it is in sync may still be answered with yes.
    is_open: bool,
    /// It counts, and how it is.
    copy: Option<CopySeen>,
    /// It may be tried to connect to it and bring it up.
    may_try: bool,
    is_busy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopySeen {
    is_connected: bool,
    is_level: bool,
    /// It kept programs waiting for too long.
    is_stuck: bool,
}

/// What is done about another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// Connect, count it, bring it up.
    Add,
    /// Ask the view to call it in sync.
    SaySync,
    /// Ask the view to call it that no more.
    SayLost,
    /// Ask for a new version of the chain, which shows how an open question ended.
    AskAnew,
    /// It counts no more.
    Forget,
}

impl Seen {
    fn step(&self) -> Step {
        let adds = self.is_member && self.may_try && !self.is_busy;
        let Some(copy) = self.copy else {
            return match self.in_sync {
                // It is waited for by nobody, so it must not be called in sync.
                true => Step::SayLost,
                false if adds => Step::Add,
                false => Step::Nothing,
            };
        };
        let is_lost = copy.is_stuck || !self.is_member;
        match (self.in_sync, self.is_open) {
            (true, _) if copy.is_stuck => Step::SayLost,
            (false, true) if is_lost => Step::AskAnew,
            (false, false) if is_lost && !self.is_busy => Step::Forget,
            _ if !copy.is_connected && adds => Step::Add,
            (false, _) if copy.is_connected && copy.is_level && !self.is_busy => Step::SaySync,
            _ => Step::Nothing,
        }
    }
}

impl Head {
    /// A daemon that serves from now on, or soon.
    ///
    /// # Errors
    /// Its pool is gone, or no thread is left.
    pub fn new(daemon: Daemon, losses: Vec<String>, begun: &Begun, subtree: &Subtree) -> Result<Self> {
        let daemon = Arc::new(daemon);
        let pool = Arc::new(pool_files(&begun.node)?);
        watch_pool(&daemon, &pool)?;
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let min_copies = begun.chain.min_copies as usize;
        // Before the first program is let in.
        daemon.set_short(subtree.in_sync().count() < min_copies);
        Ok(Self {
            min_copies,
            daemon,
            losses,
            pool,
            patience: begun.chain.patience(),
            peers: Lock::new(host.clone(), BTreeMap::new()),
            version: Lock::new(host, subtree.version),
        })
    }

    /// Whether nothing is done any more.
    pub fn is_over(&self) -> bool {
        self.daemon.failure().is_some()
    }

    /// Looks at all other nodes, and does what there is to do. `propose` asks the manager for a change.
    pub fn look(
        self: &Arc<Self>,
        turn: &Turn<'_>,
        propose: impl Fn(&Change) -> std::result::Result<Done, cluster::Error>,
    ) {
        let version = turn.subtree.version;
        if std::mem::replace(&mut *self.version.lock(), version) != version {
            self.daemon.lead_on(version.get());
        }
        // Before one of them counts no more, so that no fsync is answered with fewer.
        self.daemon.set_short(turn.subtree.in_sync().count() < self.min_copies);
        // What they said and no call has taken counts.
        self.daemon.hear_copies();
        let copies = self.daemon.copies();
        for replica in turn.subtree.chain.iter().filter(|replica| replica.node != turn.party.node) {
            let node = replica.node;
            let copy = copies.iter().find(|copy| copy.node == node);
            let seen = self.see(turn, node, replica.in_sync, copy);
            self.act(seen.step(), turn, node, &propose);
        }
    }

    fn see(&self, turn: &Turn<'_>, node: NodeId, in_sync: bool, copy: Option<&CopyState>) -> Seen {
        let now = SystemHost.now();
        let mut peers = self.peers.lock();
        let peer = peers.entry(node).or_default();
        let member = turn.view.members.get(&node);
        let copy = copy.map(|copy| {
            let lost = (!copy.connected).then(|| now.since(*peer.lost_at.get_or_insert(now)));
            if copy.connected {
                peer.lost_at = None;
            }
            let waited = if copy.connected { copy.stalled } else { lost };
            let goes_on = waited.is_some_and(|waited| waited > peer.waited);
            peer.waited_looks = if goes_on { peer.waited_looks.saturating_add(1) } else { 0 };
            peer.waited = waited.unwrap_or_default();
            // A node that gets too little of its processor to look in time does not blame another one for it.
            let is_stuck = waited.is_some_and(|waited| waited > self.patience)
                && LOOK * peer.waited_looks * LOOKS_PART >= self.patience;
            CopySeen { is_connected: copy.connected, is_level: copy.level, is_stuck }
        });
        let is_refused = member.is_some_and(|member| peer.refused == Some(member.life));
        Seen {
            is_member: member.is_some(),
            in_sync,
            is_open: !in_sync && peer.proposed.is_some_and(|proposed| turn.subtree.version <= proposed),
            copy,
            may_try: peer.next_try.is_none_or(|next| now >= next) && !is_refused,
            is_busy: peer.is_busy,
        }
    }

    fn act(
        self: &Arc<Self>,
        step: Step,
        turn: &Turn<'_>,
        node: NodeId,
        propose: &impl Fn(&Change) -> std::result::Result<Done, cluster::Error>,
    ) {
        let (path, version, by) = (Path::root(), turn.subtree.version, turn.party);
        let ask = |change: Change| {
            if let Err(why) = propose(&change) {
                // The next view, or the same one again, says what is to be done.
                warn!(%why, node = node.get(), "the chain is not changed");
            }
        };
        match step {
            Step::Nothing => {}
            Step::Add => self.begin_to_add(turn, node),
            Step::SaySync => {
                self.peers.lock().entry(node).or_default().proposed = Some(version);
                ask(Change::SetSync { path, version, by, node, in_sync: true });
            }
            Step::SayLost => {
                let mut peers = self.peers.lock();
                let peer = peers.entry(node).or_default();
                peer.problem = Some("it did not answer in time".to_owned());
                peer.next_try = Some(SystemHost.now().after(PAUSE_AFTER_STALL));
                drop(peers);
                ask(Change::SetSync { path, version, by, node, in_sync: false });
            }
            Step::AskAnew => ask(Change::SetManager { path, version, by, to: by.node }),
            Step::Forget => {
                info!(node = node.get(), version = version.get(), "is no copy any more");
                self.daemon.remove_copy(node);
                let mut peers = self.peers.lock();
                let peer = peers.entry(node).or_default();
                // Its pool is replaced when it joins again.
                (peer.proposed, peer.lost_at, peer.refused) = (None, None, None);
                peer.next_try.get_or_insert(SystemHost.now().after(PAUSE));
            }
        }
    }

    /// Starts the thread that connects to a node and makes it a copy.
    fn begin_to_add(self: &Arc<Self>, turn: &Turn<'_>, node: NodeId) {
        self.peers.lock().entry(node).or_default().is_busy = true;
        let (head, links, view) = (self.clone(), turn.links.clone(), turn.view.clone());
        let spawned = spawn("add-copy", move || head.add(&links, &view, node));
        if let Err(why) = spawned {
            self.note_attempt(node, Err((why.to_string(), None)));
        }
    }

    fn add(&self, links: &Links, view: &View, node: NodeId) {
        let connected = links.connect(view, node, SystemHost.now().after(CONNECT));
        let added = match connected {
            Ok(connection) => self.daemon.add_copy(connection).map_err(|why| {
                let useless =
                    matches!(why, sharedfs::Error::NeedsImport(_) | sharedfs::Error::CopyIsAhead(_));
                let life = view.members.get(&node).map(|member| member.life);
                (why.to_string(), life.filter(|_| useless))
            }),
            Err(why) => Err((why.to_string(), None)),
        };
        self.note_attempt(node, added);
    }

    /// How an attempt ended: an error has the life of the node if another one is of no use.
    fn note_attempt(&self, node: NodeId, added: std::result::Result<(), (String, Option<Epoch>)>) {
        let mut peers = self.peers.lock();
        let peer = peers.entry(node).or_default();
        peer.is_busy = false;
        match added {
            Ok(()) => {
                info!(node = node.get(), "is level");
                (peer.problem, peer.refused, peer.next_try) = (None, None, None);
            }
            Err((why, refused)) => {
                if peer.problem.as_ref() != Some(&why) {
                    info!(node = node.get(), why, "is no copy");
                }
                (peer.problem, peer.refused) = (Some(why), refused);
                peer.next_try = Some(SystemHost.now().after(PAUSE));
            }
        }
    }

    /// The other nodes as this one sees them.
    pub fn told(&self, own: NodeId, view: &View, subtree: &Subtree) -> Vec<CopyTold> {
        let copies = self.daemon.copies();
        let peers = self.peers.lock();
        let others = subtree.chain.iter().filter(|replica| replica.node != own);
        let told = others.map(|replica| {
            let copy = copies.iter().find(|copy| copy.node == replica.node);
            CopyTold {
                node: replica.node.get(),
                member: view.members.contains_key(&replica.node),
                in_sync: replica.in_sync,
                connected: copy.is_some_and(|copy| copy.connected),
                behind_bytes: copy.map_or(0, |copy| copy.behind_bytes),
                stalled_ms: copy.and_then(|copy| copy.stalled).map(|time| time.as_millis() as u64),
                problem: peers.get(&replica.node).and_then(|peer| peer.problem.clone()),
            }
        });
        told.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy() -> CopySeen {
        CopySeen { is_connected: true, is_level: true, is_stuck: false }
    }

    fn seen() -> Seen {
        Seen {
            is_member: true,
            in_sync: true,
            is_open: false,
            copy: Some(copy()),
            may_try: true,
            is_busy: false,
        }
    }

    /// Every state that there can be.
    fn all() -> impl Iterator<Item = Seen> + Clone {
        (0..1 << 9).filter_map(|bits: u32| {
            let bit = |number: u32| bits >> number & 1 == 1;
            let copy = CopySeen { is_connected: bit(0), is_level: bit(1), is_stuck: bit(2) };
            let seen = Seen {
                copy: bit(3).then_some(copy),
                is_member: bit(4),
                in_sync: bit(5),
                is_open: bit(6),
                may_try: bit(7),
                is_busy: bit(8),
            };
            // A view that calls it in sync has answered.
            (!(seen.in_sync && seen.is_open)).then_some(seen)
        })
    }

    #[test]
    fn a_node_is_called_in_sync_only_while_it_counts_and_is_level() {
        let asked = all().filter(|seen| seen.step() == Step::SaySync);
        let counts = |copy: CopySeen| copy.is_connected && copy.is_level && !copy.is_stuck;
        assert!(asked.clone().count() > 0);
        assert!(asked.clone().all(|seen| seen.copy.is_some_and(counts) && seen.is_member && !seen.is_busy));
    }

    #[test]
    fn a_node_counts_until_a_view_shows_that_it_is_no_copy() {
        for seen in all().filter(|seen| seen.step() == Step::Forget) {
            assert!(!seen.in_sync && !seen.is_open, "{seen:?}");
        }
    }

    #[test]
    fn nobody_waits_for_ever_for_a_node_that_is_lost() {
        let stuck = all().filter(|seen| seen.copy.is_some_and(|copy| copy.is_stuck));
        // An attempt to make it a copy ends by itself.
        for seen in stuck.filter(|seen| seen.in_sync || seen.is_open || !seen.is_busy) {
            assert!(matches!(seen.step(), Step::SayLost | Step::AskAnew | Step::Forget), "{seen:?}");
        }
    }

    #[test]
    fn a_connection_that_ended_is_made_again_and_a_copy_that_is_well_is_left_alone() {
        assert_eq!(seen().step(), Step::Nothing);
        let lost = Seen { copy: Some(CopySeen { is_connected: false, ..copy() }), ..seen() };
        assert_eq!(lost.step(), Step::Add);
        assert_eq!(Seen { is_busy: true, ..lost }.step(), Step::Nothing);
        assert_eq!(Seen { copy: None, in_sync: false, ..seen() }.step(), Step::Add);
        assert_eq!(Seen { copy: None, ..seen() }.step(), Step::SayLost);
    }
}
