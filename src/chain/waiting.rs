//! Which node leads, as another process can know it, and waiting until one does.

use super::told::{ChainStatus, Role};
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::health::PATIENCE;
use crate::process::Process;
use crate::say;
use crate::status::{Unanswered, ask};
use ipc::{Host, SystemHost, Time, Word};
use std::path::Path;
use std::time::Duration;

/// How often it is asked.
const LOOK: Duration = Duration::from_millis(20);
/// The same where the answer is expected at any moment.
const LOOK_SOON: Duration = Duration::from_millis(2);
/// How long a node may take to lead, with the recovery of its pool. A command that has waited so long for it fails, and gives the
/// reason.
const LEADS: Duration = Duration::from_secs(60);
/// How long a program waits for a node that leads before that is said.
const NOTICE: Duration = Duration::from_secs(1);
/// How long a command that starts nodes waits before it says for what, and before it says something else.
const NOTICE_OF_UP: Duration = Duration::from_secs(3);
/// How long the others may take to be in sync, and the mount to be there, before that is said.
const IN_SYNC: Duration = Duration::from_secs(10);

/// The reports of the nodes about their parts, of those that answer.
pub struct Parts(Vec<(u32, std::result::Result<ChainStatus, Unanswered>)>);

impl Parts {
    /// Asks all nodes.
    pub fn ask(cluster: &Cluster) -> Self {
        Self(cluster.settings.nodes.iter().map(|node| part(cluster, node, PATIENCE)).collect())
    }

    /// Asks all nodes, also for a user who is told only which of them leads.
    fn ask_as_any_user(cluster: &Cluster) -> Self {
        let ask = |node: &Node| match part(cluster, node, PATIENCE) {
            (_, Err(Unanswered::Forbidden(_))) => part_at(&cluster.lead(node), node, PATIENCE),
            part => part,
        };
        Self(cluster.settings.nodes.iter().map(ask).collect())
    }

    /// Asks one of them.
    fn of(cluster: &Cluster, node: &Node) -> Self {
        Self(vec![part(cluster, node, PATIENCE)])
    }

    /// The node that leads, or is about to.
    pub fn leader(&self) -> Option<(u32, &ChainStatus)> {
        let of = |role: Role| {
            let mut told = self.0.iter().filter_map(|(number, told)| Some((*number, told.as_ref().ok()?)));
            told.find(|(_, told)| told.role == role && !told.failed)
        };
        of(Role::Leads).or_else(|| of(Role::Beginning))
    }

    /// Whether this user may not ask.
    pub fn are_forbidden(&self) -> bool {
        self.0.iter().any(|(_, told)| matches!(told, Err(Unanswered::Forbidden(_))))
    }

    fn none_answers(&self) -> bool {
        self.0.iter().all(|(_, told)| matches!(told, Err(Unanswered::Absent(_))))
    }

    /// The events without which no node leads, each once, if all nodes say that an operator has to act first.
    fn repairs(&self) -> Option<String> {
        let mut events: Vec<&str> = Vec::new();
        for (_, told) in &self.0 {
            let waits = told.as_ref().ok().filter(|told| told.needs_operator)?.waits.as_deref()?;
            if !events.contains(&waits) {
                events.push(waits);
            }
        }
        Some(events.join("; "))
    }

    /// The events for which nodes wait, a sentence for each node that reports one.
    fn waits(&self) -> Vec<String> {
        let waits = |(number, told): &(u32, std::result::Result<ChainStatus, Unanswered>)| match told {
            Ok(told) => told.waits.as_ref().map(|waits| format!("node {number}: {waits}")),
            Err(why) => Some(format!("node {number}: {why}")),
        };
        self.0.iter().filter_map(waits).collect()
    }

    /// The same as the end of a sentence.
    fn waits_for(&self) -> String {
        let waits = self.waits();
        if waits.is_empty() { String::new() } else { format!(": {}", waits.join("; ")) }
    }
}

fn part(
    cluster: &Cluster,
    node: &Node,
    patience: Duration,
) -> (u32, std::result::Result<ChainStatus, Unanswered>) {
    part_at(&cluster.control(node), node, patience)
}

fn part_at(
    socket: &Path,
    node: &Node,
    patience: Duration,
) -> (u32, std::result::Result<ChainStatus, Unanswered>) {
    let told = ask(socket, patience);
    let told = told
        .and_then(|status| status.chain.ok_or_else(|| Unanswered::Absent("it is a node of one".to_owned())));
    (node.number, told)
}

/// Waits until a node leads, and, a while, until it is mounted and all others are in sync; says how it is. Gives the node that
/// leads.
///
/// # Errors
/// No node leads; the sentence says for what they wait.
pub fn for_leader(cluster: &Cluster) -> Result<&Node> {
    let (leader, told) = wait(cluster)?;
    say_chain(leader, &told);
    cluster.node(leader)
}

/// Waits until a node leads and all others are in sync. Gives the node that leads.
///
/// # Errors
/// The nodes do not get in sync; the sentence says for what they wait.
pub fn until_in_sync(cluster: &Cluster) -> Result<&Node> {
    let (leader, told) = wait(cluster)?;
    if told.in_sync.len() < cluster.settings.nodes.len() {
        return Err(Error::new("not all nodes are in sync"));
    }
    cluster.node(leader)
}

/// Whether a node leads, and its daemon has mounted it or has tried to.
pub fn leads_and_was_mounted(cluster: &Cluster, node: &Node) -> bool {
    let parts = Parts::of(cluster, node);
    parts.leader().is_some_and(|(_, told)| told.role == Role::Leads && !told.mounting)
}

/// Sentences about a wait: the first after [`NOTICE_OF_UP`], and another one that much later if the reason is another one.
#[derive(Default)]
struct Notices {
    last: Option<(Duration, String)>,
}

impl Notices {
    fn tell(&mut self, waited: Duration, reason: impl FnOnce() -> String) {
        if waited < self.last.as_ref().map_or(Duration::ZERO, |(at, _)| *at) + NOTICE_OF_UP {
            return;
        }
        let reason = reason();
        if self.last.as_ref().is_none_or(|(_, last)| *last != reason) {
            say::aside(format_args!("hearth: waiting {reason}"));
        }
        self.last = Some((waited, reason));
    }
}

/// No node answers, and none has a keeper.
fn all_are_down(cluster: &Cluster, parts: &Parts) -> bool {
    let is_down = |node: &Node| Process::load(&cluster.keeper_pid_file(node)).is_none();
    parts.none_answers() && cluster.settings.nodes.iter().all(is_down)
}

fn wait(cluster: &Cluster) -> Result<(u32, ChainStatus)> {
    let begin = SystemHost.now();
    let mut notices = Notices::default();
    loop {
        let parts = Parts::ask(cluster);
        let waited = SystemHost.now().since(begin);
        match parts.leader() {
            Some((leader, told)) if told.role == Role::Leads => {
                let all = told.in_sync.len() == cluster.settings.nodes.len();
                if all && !told.mounting || waited >= IN_SYNC {
                    return Ok((leader, told.clone()));
                }
                notices.tell(waited, || told.waits_for(leader));
            }
            _ if all_are_down(cluster, &parts) => {
                return Err(Error::new("no node leads: all nodes were ended meanwhile"));
            }
            _ if parts.repairs().is_some() => {
                let repairs = parts.repairs().unwrap_or_default();
                return Err(Error::new(format!("no node leads: {repairs}")));
            }
            _ if waited >= LEADS => {
                let waits = parts.waits().join("; ");
                return Err(Error::new(format!("no node leads after {} s: {waits}", LEADS.as_secs())));
            }
            _ => notices.tell(waited, || {
                format!("until a node leads, at most {} s{}", LEADS.as_secs(), parts.waits_for())
            }),
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
    }
}

/// Waits until a node leads or is about to, at most so long; says what for. If no node is up there is nothing to wait for. Gives
/// what the nodes say at the end.
pub fn until_any_leads(cluster: &Cluster, patience: Duration) -> Parts {
    let begin = SystemHost.now();
    let mut is_told = false;
    loop {
        let parts = Parts::ask_as_any_user(cluster);
        let waited = SystemHost.now().since(begin);
        let all_down = all_are_down(cluster, &parts);
        if parts.leader().is_some() || parts.are_forbidden() || all_down || waited >= patience {
            return parts;
        }
        if waited >= NOTICE && !std::mem::replace(&mut is_told, true) {
            say::aside(format_args!("hearth: waiting until a node leads{}", parts.waits_for()));
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
    }
}

/// Whether programs may run at a node, as its daemon says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lead {
    /// It serves, and no other node leads before this time.
    Serves(Time),
    /// The same, and it gives the lead to this node as soon as no program is attached.
    Gives(Time, u32),
    /// It gives the lead to this node as soon as no standby program runs, which are to be killed.
    GivesNow(u32),
    /// It is to lead, and does not serve yet; no other node leads before this time.
    Begins(Time),
    /// This other node leads.
    Other(u32),
    /// It leads, and has failed: another node may lead soon. A sentence says why.
    Failed(String),
    /// It does not lead, or says nothing; no other node is known to lead. A sentence says why.
    Unknown(String),
}

impl Lead {
    /// Asks a node, which may take so long to answer.
    ///
    /// # Errors
    /// This user may not ask.
    pub fn ask(cluster: &Cluster, node: &Node, patience: Duration) -> Result<Self> {
        match part(cluster, node, patience).1 {
            Ok(told) => Ok(Self::of(&told, node.number)),
            Err(Unanswered::Forbidden(why)) => {
                Err(Error::new(format!("only the user of node {} and root may ask it: {why}", node.number)))
            }
            Err(Unanswered::Silent) => Ok(Self::Unknown("its daemon does not answer".to_owned())),
            Err(Unanswered::Absent(_)) => Ok(Self::Unknown("it is down".to_owned())),
        }
    }

    fn of(told: &ChainStatus, own: u32) -> Self {
        let until = told.valid_until_ns.map(Time::from_ns);
        match (told.leader, until) {
            (Some(leader), _) if leader != own && !told.expired => Self::Other(leader),
            _ if told.failed => Self::failed(told),
            (Some(leader), Some(until)) if leader == own && told.role == Role::Leads => {
                match told.moving_to {
                    Some(to) if told.moving_now => Self::GivesNow(to),
                    Some(to) => Self::Gives(until, to),
                    None => Self::Serves(until),
                }
            }
            (Some(leader), Some(until)) if leader == own => Self::Begins(until),
            _ => Self::Unknown(told.waits.clone().unwrap_or_else(|| "no node leads".to_owned())),
        }
    }

    /// A time in the report of a node that has failed is no promise.
    fn failed(told: &ChainStatus) -> Self {
        Self::Failed(told.waits.clone().unwrap_or_else(|| "its daemon has failed".to_owned()))
    }

    /// When a caller that waits until it serves asks again.
    pub fn next_look(&self) -> Time {
        let soon = matches!(self, Self::Begins(_));
        SystemHost.now().after(if soon { LOOK_SOON } else { LOOK })
    }
}

/// Waits until this node leads.
///
/// # Errors
/// It does not lead for a long time; the sentence says for what it waits.
pub fn until_leads(cluster: &Cluster, node: &Node) -> Result<()> {
    let until = SystemHost.now().after(LEADS);
    loop {
        let part = Parts::of(cluster, node);
        if part.leader().is_some_and(|(_, told)| told.role == Role::Leads) {
            return Ok(());
        }
        if SystemHost.now() >= until {
            let (waits, seconds) = (part.waits(), LEADS.as_secs());
            let why = if waits.is_empty() { "it gives no reason".to_owned() } else { waits.join("; ") };
            let number = node.number;
            return Err(Error::new(format!(
                "node {number} does not lead after {seconds} s: {why}; see hearth status"
            )));
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK_SOON)));
    }
}

/// Waits while a node that has begun to lead makes its mount: a program would find a plain folder in its place. Not for
/// long, since the mount may not be possible; the node's log says why.
pub fn until_mounted(cluster: &Cluster, node: &Node) {
    let until = SystemHost.now().after(IN_SYNC);
    let mounts = || Parts::of(cluster, node).leader().is_some_and(|(_, told)| told.mounting);
    while mounts() {
        if SystemHost.now() >= until {
            say::aside(format_args!("hearth: node {} is not mounted yet", node.number));
            return;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a daemon says while it dies and starts again, a program is taken for one that may run only until the time that
    /// the daemon named, and not at all where another node leads.
    #[test]
    fn a_program_may_run_where_the_view_names_its_node_and_no_longer_than_that_holds() {
        let until = Time::from_ns(7);
        let told = |role, leader, valid_until_ns| ChainStatus {
            role,
            leader,
            valid_until_ns,
            ..ChainStatus::default()
        };
        let lead = |told: ChainStatus| Lead::of(&told, 1);
        assert_eq!(lead(told(Role::Leads, Some(1), Some(7))), Lead::Serves(until));
        let gives = ChainStatus { moving_to: Some(2), ..told(Role::Leads, Some(1), Some(7)) };
        assert_eq!(lead(gives.clone()), Lead::Gives(until, 2));
        assert_eq!(lead(ChainStatus { moving_now: true, ..gives }), Lead::GivesNow(2));
        assert_eq!(lead(told(Role::Beginning, Some(1), Some(7))), Lead::Begins(until));
        for role in [Role::Joining, Role::Follows, Role::Beginning, Role::Leads] {
            assert_eq!(lead(told(role, Some(2), Some(7))), Lead::Other(2));
            assert!(matches!(lead(told(role, None, Some(7))), Lead::Unknown(_)));
            assert!(matches!(lead(told(role, Some(1), None)), Lead::Unknown(_)));
            let expired = ChainStatus { expired: true, ..told(role, Some(2), Some(7)) };
            assert!(matches!(lead(expired), Lead::Unknown(_)), "the view may be an old one");
            let failed = ChainStatus { failed: true, ..told(role, Some(1), Some(7)) };
            assert!(matches!(lead(failed), Lead::Failed(_)), "it may give the lead away before that time");
        }
    }
}
