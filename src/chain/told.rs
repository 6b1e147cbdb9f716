//! The report of a node about its part in the chain, for `hearth status`.

use serde::{Deserialize, Serialize};

/// The part of a node.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It is no member yet: it waits for the cluster manager.
    #[default]
    Joining,
    /// It holds a copy, or is about to.
    Follows,
    /// It is to lead, and brings its pool and the copies to where it can.
    Beginning,
    /// It leads.
    Leads,
}

/// A copy at another node, as the node that leads sees it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct CopyTold {
    /// The node.
    pub node: u32,
    /// It is a member of the cluster.
    pub member: bool,
    /// It holds all that was acknowledged, and an fsync waits for it.
    pub in_sync: bool,
    /// There is a connection to it.
    pub connected: bool,
    /// About how many bytes of logs it lacks.
    pub behind_bytes: u64,
    /// For so long it lacks something and has not moved, in ms.
    pub stalled_ms: Option<u64>,
    /// Why it does not become a copy.
    pub problem: Option<String>,
    /// How far the tree is, while it is sent to it.
    #[serde(default)]
    pub sending: Option<SendingTold>,
}

/// How much of the tree was sent to a node that joins. Each round counts what it sends itself.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct SendingTold {
    /// About so many bytes were sent.
    pub sent_bytes: u64,
    /// About so many there are to send.
    pub bytes: u64,
}

/// The last time that a node began to lead.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct TakeOver {
    /// When it served, in nanoseconds since 1970.
    pub at_ns: i64,
    /// From the view that named it to the time at which the first client was accepted, in microseconds.
    pub took_us: u64,
    /// The node that led before, as far as this one heard; its own number after its daemon was started again.
    pub after: Option<u32>,
}

/// A node's part in the chain. The schema is stable: fields are added, never changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ChainStatus {
    /// The node's part.
    pub role: Role,
    /// The node that leads.
    pub leader: Option<u32>,
    /// All nodes, in the chain's order.
    pub nodes: Vec<u32>,
    /// Those that hold all that was acknowledged.
    pub in_sync: Vec<u32>,
    /// How many of those there have to be: an fsync waits while there are fewer.
    #[serde(default)]
    pub min_copies: u32,
    /// Epoch of the cluster.
    pub epoch: u32,
    /// Version of the chain.
    pub version: u64,
    /// The node from which entries come.
    pub follows: Option<u32>,
    /// The last entry of the ledger that is synced here.
    pub ledger: u64,
    /// The last entry of the ledger that was executed here.
    pub executed: u64,
    /// Copies at other nodes, if this one leads.
    pub copies: Vec<CopyTold>,
    /// When it began to lead, if it leads.
    pub take_over: Option<TakeOver>,
    /// The event for which the node waits.
    pub waits: Option<String>,
    /// That does not come before an operator acts; `waits` names the next step.
    #[serde(default)]
    pub needs_operator: bool,
    /// Why it stopped following a head, if that was its own doing and it is not in sync since.
    #[serde(default)]
    pub follow_end: Option<String>,
    /// The node to which it is about to give the lead (`hearth move`).
    pub moving_to: Option<u32>,
    /// It waits for that no longer: standby programs that still run are to be killed (`hearth move --force`).
    #[serde(default)]
    pub moving_now: bool,
    /// Until when it is a member for certain, on CLOCK_BOOTTIME of its machine, in nanoseconds. If it leads, no other node does
    /// before that.
    pub valid_until_ns: Option<u64>,
    /// That time has passed, and the view may be an old one: the cluster manager does not answer, or does not know the node any more.
    #[serde(default)]
    pub expired: bool,
    /// It leads, and its tree is being mounted.
    #[serde(default)]
    pub mounting: bool,
    /// The node itself has failed: it serves no program, and does not lead before it is started again.
    #[serde(default)]
    pub failed: bool,
}

fn numbers(nodes: &[u32]) -> String {
    nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

impl ChainStatus {
    /// The part that every user may know: enough to find the node that leads.
    pub fn for_all_users(self) -> Self {
        Self {
            role: self.role,
            leader: self.leader,
            nodes: self.nodes,
            in_sync: self.in_sync,
            min_copies: self.min_copies,
            needs_operator: self.needs_operator,
            expired: self.expired,
            failed: self.failed,
            ..Self::default()
        }
    }

    /// The problems, a sentence each.
    pub fn problems(&self, node: u32) -> Vec<String> {
        // Just after its start it has not found out yet.
        let waits = self.waits.as_ref().map(|waits| format!(": {waits}")).unwrap_or_default();
        match self.role {
            Role::Joining => vec![format!("it is no member of the cluster{waits}")],
            Role::Beginning if self.failed => vec![format!("it serves no program{waits}")],
            Role::Follows | Role::Beginning if self.expired => {
                vec![format!("it is no member any more, and does not know which node leads{waits}")]
            }
            Role::Beginning => vec![format!("it is to lead, and does not yet{waits}")],
            Role::Follows if self.leader.is_none() => vec![format!("no node leads{waits}")],
            Role::Follows if !self.in_sync.contains(&node) => {
                let end = self.follow_end.as_ref().map(|why| format!("; it stopped following: {why}"));
                let end = end.unwrap_or_default();
                let waits = self.waits.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
                vec![format!("it does not hold all that was acknowledged: it cannot take over{end}{waits}")]
            }
            Role::Follows => Vec::new(),
            Role::Leads => {
                self.too_few().into_iter().chain(self.copies.iter().filter_map(CopyTold::fault)).collect()
            }
        }
    }

    /// The events for which a command that starts nodes waits while this node leads, as the end of a sentence.
    pub fn waits_for(&self, own: u32) -> String {
        let copies = self.copies.iter().filter(|copy| !copy.in_sync);
        let mut waits: Vec<String> =
            copies.map(|copy| format!("until node {} is in sync ({})", copy.node, copy.lack())).collect();
        if self.mounting {
            waits.push(format!("until node {own} is mounted"));
        }
        if waits.is_empty() { "until all nodes are in sync".to_owned() } else { waits.join(", ") }
    }

    fn too_few(&self) -> Option<String> {
        let (have, wanted) = (self.in_sync.len(), self.min_copies);
        (have < wanted as usize).then(|| {
            format!("each fsync waits: {have} of the {wanted} nodes that there have to be hold all that was acknowledged (min_copies)")
        })
    }

    /// How it is, in lines.
    pub fn lines(&self) -> Vec<String> {
        let part = match (self.role, self.leader) {
            (Role::Follows | Role::Beginning, _) if self.expired => "it follows no node".to_owned(),
            (Role::Leads, _) => "it leads".to_owned(),
            (Role::Beginning, _) if self.failed => "it has failed".to_owned(),
            (Role::Beginning, _) => "it is to lead".to_owned(),
            (Role::Follows, Some(leader)) => format!("it follows node {leader}"),
            (Role::Follows, None) => "it follows no node".to_owned(),
            (Role::Joining, _) => "it is no member yet".to_owned(),
        };
        let copies = if self.in_sync.is_empty() || self.expired {
            String::new()
        } else {
            format!("; an fsync is on node {}", numbers(&self.in_sync))
        };
        let mut lines = vec![format!("{part}{copies}")];
        for copy in self.copies.iter().filter(|copy| copy.behind_bytes > 0) {
            lines.push(format!("node {} lacks about {} bytes of logs", copy.node, copy.behind_bytes));
        }
        if let Some(to) = self.moving_to {
            lines.push(format!("it gives the lead to node {to} when no program is attached any more"));
        }
        if let Some(take_over) = &self.take_over {
            let after = match take_over.after {
                Some(node) => format!(" after node {node}"),
                None => String::new(),
            };
            lines.push(format!("it began to lead{after} in {:.1} ms", take_over.took_us as f64 / 1000.0));
        }
        lines
    }
}

impl CopyTold {
    /// Why it is not in sync, as the end of a sentence.
    pub fn lack(&self) -> String {
        match (self.sending, &self.problem) {
            (Some(SendingTold { sent_bytes, bytes }), _) if bytes >= 1 << 20 => {
                let (sent, all) = (sent_bytes >> 20, bytes.max(sent_bytes) >> 20);
                format!("it is being brought up: {sent} of about {all} MiB are sent")
            }
            (Some(_), _) => "it is being brought up".to_owned(),
            _ if !self.member => "it is not up".to_owned(),
            (None, Some(problem)) => problem.clone(),
            (None, None) => "it is being brought up".to_owned(),
        }
    }

    fn fault(&self) -> Option<String> {
        let node = self.node;
        let why = self.problem.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        match (self.in_sync, self.connected, self.member) {
            (true, true, _) => None,
            (true, false, _) => {
                Some(format!("node {node} has no connection, and an fsync waits for it{why}"))
            }
            (false, ..) => Some(format!("node {node} is no copy: {}", self.lack())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_is_none_has_a_reason() {
        let problem = Some("closed by the peer".to_owned());
        let copy = CopyTold { node: 2, member: true, ..CopyTold::default() };
        let sending = Some(SendingTold { sent_bytes: 312 << 20, bytes: 2048 << 20 });
        let little = Some(SendingTold { sent_bytes: 0, bytes: 8192 });
        let part_is_sent = "it is being brought up: 312 of about 2048 MiB are sent";
        for (copy, lack) in [
            (CopyTold { sending, ..copy.clone() }, part_is_sent),
            (CopyTold { sending, problem: problem.clone(), ..copy.clone() }, part_is_sent),
            (CopyTold { sending: little, ..copy.clone() }, "it is being brought up"),
            (copy.clone(), "it is being brought up"),
            (CopyTold { problem: problem.clone(), ..copy.clone() }, "closed by the peer"),
            (CopyTold { member: false, problem, ..copy }, "it is not up"),
        ] {
            assert_eq!(copy.lack(), lack);
            assert_eq!(copy.fault(), Some(format!("node 2 is no copy: {lack}")));
        }
    }

    #[test]
    fn a_copy_says_itself_why_it_does_not_follow() {
        let told = ChainStatus {
            role: Role::Follows,
            leader: Some(1),
            in_sync: vec![1],
            follow_end: Some("no space is left in the medium".to_owned()),
            ..ChainStatus::default()
        };
        let said = told.problems(2).join("; ");
        assert!(said.ends_with("it cannot take over; it stopped following: no space is left in the medium"));
        let empty = ChainStatus { waits: Some("it gave up its own tree".to_owned()), ..told.clone() };
        assert!(
            empty.problems(2).join("; ").ends_with("no space is left in the medium; it gave up its own tree")
        );
        assert_eq!(ChainStatus { in_sync: vec![1, 2], ..told }.problems(2), Vec::<String>::new());
    }

    #[test]
    fn a_view_that_may_be_an_old_one_is_not_told_as_true() {
        let told = ChainStatus {
            role: Role::Follows,
            leader: Some(2),
            in_sync: vec![1, 2],
            waits: Some("the manager is away".to_owned()),
            ..ChainStatus::default()
        };
        assert_eq!(told.problems(1), Vec::<String>::new());
        assert_eq!(told.lines(), ["it follows node 2; an fsync is on node 1, 2"]);
        let expired = ChainStatus { expired: true, ..told };
        let problem = "it is no member any more, and does not know which node leads: the manager is away";
        assert_eq!(expired.problems(1), [problem]);
        assert_eq!(expired.lines(), ["it follows no node"]);
        let joining = ChainStatus { role: Role::Joining, in_sync: Vec::new(), ..expired };
        assert_eq!(joining.lines(), ["it is no member yet"]);
    }
}
