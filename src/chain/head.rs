//! The node that leads, and its copies: which nodes are sent records, which are in sync, and which are waited for no
//! longer.
//!
//! [`cluster::Peers`] decides these questions, and documents the guarantees; this module carries the decisions out.

use super::daemon::Begun;
use super::links::Links;
use super::member::LOOK;
use super::told::{CopyTold, SendingTold};
use crate::commands::daemon::{pool_files, spawn, watch_pool};
use crate::error::Result;
use crate::presence::Presence;
use cluster::{Change, CopyFacts, Done, Party, Path, PeerFacts, PeerStep, Peers, Subtree, View};
use format::{ChangeNumber, Epoch, NodeId};
use ipc::{Host, Lock, SystemHost};
use sharedfs::{CopyState, Daemon};
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// How long an attempt to connect is.
const CONNECT: Duration = Duration::from_millis(500);

/// The inputs of one turn.
pub struct Turn<'a> {
    pub party: Party,
    pub view: &'a Arc<View>,
    pub subtree: &'a Subtree,
    pub links: &'a Arc<Links>,
    /// The disk of this node has not answered for as long as a copy may keep programs waiting.
    pub disk_stalls: bool,
}

/// A node that leads.
pub struct Head {
    pub daemon: Arc<Daemon>,
    pub losses: Vec<String>,
    pub pool: Arc<Vec<Presence>>,
    min_copies: usize,
    peers: Lock<Peers>,
    version: Lock<ChangeNumber>,
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
        // Before the first client is accepted.
        daemon.set_short(subtree.in_sync().count() < min_copies);
        Ok(Self {
            min_copies,
            daemon,
            losses,
            pool,
            peers: Lock::new(host.clone(), Peers::new(begun.chain.patience(), begun.chain.lag(), LOOK)),
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
        // Messages that have arrived, and that no call has processed yet, count.
        self.daemon.hear_copies();
        let copies = self.daemon.copies();
        for replica in turn.subtree.chain.iter().filter(|replica| replica.node != turn.party.node) {
            let node = replica.node;
            let copy = copies.iter().find(|copy| copy.node == node);
            let facts = PeerFacts {
                life: turn.view.members.get(&node).map(|member| member.life),
                in_sync: replica.in_sync,
                version,
                copy: copy.map(|copy| facts_of(copy, turn.disk_stalls)),
            };
            let step = self.peers.lock().step(SystemHost.now(), node, &facts);
            self.act(step, turn, node, &propose);
        }
    }

    fn act(
        self: &Arc<Self>,
        step: PeerStep,
        turn: &Turn<'_>,
        node: NodeId,
        propose: &impl Fn(&Change) -> std::result::Result<Done, cluster::Error>,
    ) {
        let (path, version, by) = (Path::root(), turn.subtree.version, turn.party);
        let ask = |change: Change| {
            let proposed = propose(&change);
            if let Err(why) = &proposed {
                // The next view, or the same one again, says what is to be done.
                warn!(%why, node = node.get(), "the chain is not changed");
            }
            proposed.is_ok()
        };
        match step {
            PeerStep::Nothing => {}
            PeerStep::Add => self.begin_to_add(turn, node),
            PeerStep::SaySync => {
                ask(Change::SetSync { path, version, by, node, in_sync: true });
            }
            PeerStep::SayLost => {
                let copy = self.daemon.copies().into_iter().find(|copy| copy.node == node);
                let asked = ask(Change::SetSync { path, version, by, node, in_sync: false });
                if let Some(copy) = copy.filter(|_| asked) {
                    let (node, connected, behind_bytes) = (node.get(), copy.connected, copy.behind_bytes);
                    let stalled_ms = copy.stalled.map(|time| time.as_millis() as u64);
                    info!(node, connected, behind_bytes, stalled_ms, "asked the manager to give the copy up");
                }
            }
            PeerStep::AskAnew => {
                ask(Change::SetManager { path, version, by, to: by.node });
            }
            PeerStep::Forget => {
                info!(node = node.get(), version = version.get(), "is no copy any more");
                self.daemon.remove_copy(node);
            }
        }
    }

    /// Starts the thread that connects to a node and makes it a copy.
    fn begin_to_add(self: &Arc<Self>, turn: &Turn<'_>, node: NodeId) {
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
        let why = added.as_ref().err().map(|(why, _)| why.clone());
        let is_new = self.peers.lock().added(SystemHost.now(), node, added);
        match why {
            None => info!(node = node.get(), "is level"),
            Some(why) if is_new => info!(node = node.get(), why, "is no copy"),
            Some(_) => {}
        }
    }

    /// The other nodes as this one sees them.
    pub fn told(&self, own: NodeId, view: &View, subtree: &Subtree) -> Vec<CopyTold> {
        let copies = self.daemon.copies();
        let sent = self.daemon.tree_sent();
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
                problem: peers.problem(replica.node),
                sending: sent
                    .filter(|sent| sent.node == replica.node)
                    .map(|sent| SendingTold { sent_bytes: sent.sent_bytes, bytes: sent.bytes }),
            }
        });
        told.collect()
    }
}

/// How a copy is, of what decides what is done about it. While the disk of this node does not answer, the node may not send what a
/// copy lacks, and does not blame the copy for it: a copy that is given up could not lead in place of this node.
fn facts_of(copy: &CopyState, disk_stalls: bool) -> CopyFacts {
    let is_judged = !(disk_stalls && copy.connected);
    CopyFacts {
        connected: copy.connected,
        level: copy.level,
        stalled: copy.stalled.filter(|_| is_judged),
        behind_bytes: if is_judged { copy.behind_bytes } else { 0 },
        executed_bytes: copy.executed_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::Sequence;

    #[test]
    fn a_connected_copy_is_not_blamed_while_the_own_disk_does_not_answer() {
        let copy = CopyState {
            node: NodeId::new(2),
            connected: true,
            level: true,
            stalled: Some(Duration::from_secs(3)),
            behind_bytes: 64 << 20,
            executed_bytes: 7,
            ledger: Sequence::new(1),
            executed: Sequence::new(1),
        };
        let of = |copy: &CopyState, disk_stalls| {
            let facts = facts_of(copy, disk_stalls);
            (facts.stalled, facts.behind_bytes, facts.executed_bytes)
        };
        assert_eq!(of(&copy, false), (copy.stalled, copy.behind_bytes, 7));
        assert_eq!(of(&copy, true), (None, 0, 7));
        let lost = CopyState { connected: false, ..copy };
        assert_eq!(
            of(&lost, true),
            (copy.stalled, copy.behind_bytes, 7),
            "a node that is gone sends nothing"
        );
    }
}
