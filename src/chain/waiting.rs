//! Which node leads, as another process can know it, and waiting until one does.

use super::told::{ChainStatus, Role};
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::health::PATIENCE;
use crate::say;
use crate::status::{Unanswered, ask};
use ipc::{Host, SystemHost, Word};
use std::time::Duration;

/// How often it is asked.
const LOOK: Duration = Duration::from_millis(20);
/// The same where the answer is expected at any moment.
const LOOK_SOON: Duration = Duration::from_millis(2);
/// How long a node may take to lead before it is said what is waited for.
const LEADS: Duration = Duration::from_secs(60);
/// How long the others may take to be in sync before that is said.
const IN_SYNC: Duration = Duration::from_secs(10);

/// What each node says of its part, if it answers.
pub struct Parts(Vec<(u32, std::result::Result<ChainStatus, Unanswered>)>);

impl Parts {
    /// Asks all nodes.
    pub fn ask(cluster: &Cluster) -> Self {
        Self(cluster.settings.nodes.iter().map(|node| part(cluster, node)).collect())
    }

    /// Asks one of them.
    fn of(cluster: &Cluster, node: &Node) -> Self {
        Self(vec![part(cluster, node)])
    }

    /// The node that leads, or is about to.
    pub fn leader(&self) -> Option<(u32, &ChainStatus)> {
        let of = |role: Role| {
            let mut told = self.0.iter().filter_map(|(number, told)| Some((*number, told.as_ref().ok()?)));
            told.find(|(_, told)| told.role == role)
        };
        of(Role::Leads).or_else(|| of(Role::Beginning))
    }

    /// Whether this user may not ask.
    pub fn are_forbidden(&self) -> bool {
        self.0.iter().any(|(_, told)| matches!(told, Err(Unanswered::Forbidden(_))))
    }

    /// What nodes wait for, a sentence for each that says it.
    fn waits(&self) -> Vec<String> {
        let waits = |(number, told): &(u32, std::result::Result<ChainStatus, Unanswered>)| match told {
            Ok(told) => told.waits.as_ref().map(|waits| format!("node {number}: {waits}")),
            Err(why) => Some(format!("node {number}: {why}")),
        };
        self.0.iter().filter_map(waits).collect()
    }
}

fn part(cluster: &Cluster, node: &Node) -> (u32, std::result::Result<ChainStatus, Unanswered>) {
    let told = ask(&cluster.control(node), PATIENCE);
    let told = told
        .and_then(|status| status.chain.ok_or_else(|| Unanswered::Absent("it is a node of one".to_owned())));
    (node.number, told)
}

/// Waits until a node leads, and, a while, until all others are in sync; says how it is. Gives the node that leads.
///
/// # Errors
/// None leads: what they wait for.
pub fn for_leader(cluster: &Cluster) -> Result<&Node> {
    let begin = SystemHost.now();
    loop {
        let parts = Parts::ask(cluster);
        let waited = SystemHost.now().since(begin);
        match parts.leader() {
            Some((leader, told)) if told.role == Role::Leads => {
                let all = told.in_sync.len() == cluster.settings.nodes.len();
                if all || waited >= IN_SYNC {
                    say_chain(leader, told);
                    return cluster.node(leader);
                }
            }
            _ if waited >= LEADS => {
                return Err(Error::new(format!("no node leads: {}", parts.waits().join("; "))));
            }
            _ => {}
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
    }
}

/// Waits until this node leads.
///
/// # Errors
/// It does not, for a long time: what it waits for.
pub fn until_leads(cluster: &Cluster, node: &Node) -> Result<()> {
    let until = SystemHost.now().after(LEADS);
    loop {
        let part = Parts::of(cluster, node);
        if part.leader().is_some_and(|(_, told)| told.role == Role::Leads) {
            return Ok(());
        }
        if SystemHost.now() >= until {
            let waits = part.waits().join("; ");
            return Err(Error::new(format!("node {} does not lead: {waits}", node.number)));
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK_SOON)));
    }
}

fn say_chain(leader: u32, told: &ChainStatus) {
    let in_sync: Vec<String> = told.in_sync.iter().map(u32::to_string).collect();
    say::line(format_args!("node {leader} leads, and an fsync is on node {}", in_sync.join(", ")));
    for copy in told.copies.iter().filter(|copy| !copy.in_sync) {
        say::aside(format_args!("hearth: node {} is no copy yet: {}", copy.node, copy.lack()));
    }
}
