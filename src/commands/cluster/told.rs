//! The output of `hearth cluster`, for people and as JSON. The schema is stable: fields are added, never changed.

use crate::say;
use ::cluster::{Change, Member, Record, Subtree, View};
use format::{ChangeNumber, NodeId};
use serde::Serialize;

/// A replica of a subtree.
#[derive(Serialize)]
struct ReplicaTold {
    node: u32,
    hot: bool,
    in_sync: bool,
    member: bool,
    /// The node is a member with another pool than the one that holds everything.
    other_pool: bool,
    /// The same pool, in a state that the manager does not know.
    #[serde(skip)]
    other_generation: bool,
}

/// A subtree with its chain.
#[derive(Serialize)]
struct SubtreeTold {
    path: String,
    version: u64,
    copies: usize,
    copies_min: u8,
    lease_manager: Option<u32>,
    chain: Vec<ReplicaTold>,
}

/// How a cluster is: as well as its worst subtree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum ClusterState {
    Well,
    /// A replica is missing or joining, or a member is about to be expelled.
    Degraded,
    /// A subtree has fewer copies than it has to have: an fsync there waits.
    Waiting,
    /// No member has a copy of some subtree: it is not served until one of its last holders is back.
    Unserved,
}

/// The whole view, without heartbeats.
#[derive(Serialize)]
pub(super) struct StatusTold {
    cluster: String,
    state: ClusterState,
    epoch: u32,
    change: u64,
    lease_ms: u64,
    drift_ppm: u32,
    /// `state` is not `well`.
    pub degraded: bool,
    members: usize,
    refused: usize,
    subtrees: Vec<SubtreeTold>,
    /// The newest change that a pool has seen and this manager does not have: it was set back to an older state.
    #[serde(skip_serializing_if = "Option::is_none")]
    set_back: Option<u64>,
    /// The problem of the manager's processes on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl StatusTold {
    pub fn of(view: &View) -> Self {
        let refused = view.members.values().filter(|member| member.refused).count();
        let subtrees: Vec<SubtreeTold> = view
            .subtrees
            .iter()
            .map(|(path, subtree)| subtree_told(view, &path.to_string(), subtree))
            .collect();
        let refusing =
            if refused > 0 || view.set_back.is_some() { ClusterState::Degraded } else { ClusterState::Well };
        let state = subtrees.iter().map(SubtreeTold::state).fold(refusing, ClusterState::max);
        Self {
            cluster: format!("{:016x}", view.cluster),
            state,
            epoch: view.epoch.get(),
            change: view.number.get(),
            lease_ms: u64::try_from(view.rules.lease().as_millis()).unwrap_or(u64::MAX),
            drift_ppm: view.rules.drift_ppm(),
            degraded: state != ClusterState::Well,
            members: view.members.len(),
            refused,
            subtrees,
            set_back: view.set_back.map(ChangeNumber::get),
            problem: None,
        }
    }

    /// Adds the problem of the manager's processes, if there is one: the cluster is not well with it.
    pub fn add_problem(&mut self, problem: Option<String>) {
        if problem.is_some() {
            self.state = self.state.max(ClusterState::Degraded);
            self.degraded = true;
        }
        self.problem = problem;
    }

    pub fn print(&self) {
        say::line(format_args!(
            "cluster {}: {}",
            self.cluster,
            match self.state {
                ClusterState::Well => "well",
                ClusterState::Degraded => "degraded",
                ClusterState::Waiting => "waiting: an fsync waits for more copies",
                ClusterState::Unserved => "unserved: a subtree has no living copy",
            }
        ));
        let members = counted(self.members, "member");
        say::line(format_args!("  epoch {}, change {}, {members}", self.epoch, self.change));
        say::line(format_args!(
            "  lease {} ms, clocks wrong by at most {} parts in a million",
            self.lease_ms, self.drift_ppm
        ));
        if self.refused > 0 {
            let refused = counted(self.refused, "member");
            say::line(format_args!("  {refused} not heard any more after a complaint, to be expelled"));
        }
        if let Some(number) = self.set_back {
            say::line(format_args!(
                "  PROBLEM: the manager was set back: a pool has seen change {number}, which it does not have. It gives no role \
                 any more; put the newest copy of its folder back"
            ));
        }
        if let Some(problem) = &self.problem {
            say::line(format_args!("  PROBLEM: {problem}"));
        }
        for subtree in &self.subtrees {
            let manager = subtree.lease_manager.map_or("no node".to_owned(), |node| format!("node {node}"));
            let chain: Vec<String> = subtree.chain.iter().map(replica_text).collect();
            say::line(format_args!(
                "  {}: lease manager {manager}, {} of at least {}",
                subtree.path,
                counted(subtree.copies, "copy"),
                subtree.copies_min
            ));
            say::line(format_args!("    chain {}", chain.join(", ")));
        }
    }
}

impl SubtreeTold {
    fn state(&self) -> ClusterState {
        if self.copies == 0 {
            ClusterState::Unserved
        } else if self.copies < usize::from(self.copies_min) {
            ClusterState::Waiting
        } else if self.chain.iter().all(|replica| replica.member && replica.in_sync && !replica.other_pool) {
            ClusterState::Well
        } else {
            ClusterState::Degraded
        }
    }
}

fn subtree_told(view: &View, path: &str, subtree: &Subtree) -> SubtreeTold {
    let chain = subtree.chain.iter().map(|replica| ReplicaTold {
        node: replica.node.get(),
        hot: replica.hot,
        in_sync: replica.in_sync,
        member: view.members.contains_key(&replica.node),
        other_pool: replica.in_sync
            && view.members.contains_key(&replica.node)
            && !replica.lives(&view.members),
        other_generation: view
            .members
            .get(&replica.node)
            .is_some_and(|member| member.pool.uid == replica.pool.uid && member.pool != replica.pool),
    });
    SubtreeTold {
        path: path.to_owned(),
        version: subtree.version.get(),
        copies: view.copies(subtree),
        copies_min: subtree.copies_min,
        lease_manager: subtree.manager.map(NodeId::get),
        chain: chain.collect(),
    }
}

fn replica_text(replica: &ReplicaTold) -> String {
    let state = match (replica.member, replica.in_sync) {
        (true, true) if replica.other_pool && replica.other_generation => {
            "there with the pool of the last copy in a state that the manager does not know"
        }
        (true, true) if replica.other_pool => "there with another pool than the last copy",
        (true, true) => "in sync",
        (true, false) => "joining",
        (false, true) => "gone with the last copy",
        (false, false) => "gone",
    };
    format!("{} ({}, {state})", replica.node, if replica.hot { "hot" } else { "warm" })
}

/// A member.
#[derive(Serialize)]
pub(super) struct MemberTold {
    node: u32,
    /// The epoch in which it joined.
    life: u32,
    address: String,
    medium: u8,
    /// Its heartbeats are refused after a complaint.
    refused: bool,
    /// Subtrees whose lease manager it is.
    manages: Vec<String>,
}

impl MemberTold {
    pub fn of(node: NodeId, member: &Member, view: &View) -> Self {
        let manages = view.subtrees.iter().filter(|(_, subtree)| subtree.manager == Some(node));
        Self {
            node: node.get(),
            life: member.life.get(),
            address: member.address.as_str().to_owned(),
            medium: member.medium,
            refused: member.refused,
            manages: manages.map(|(path, _)| path.to_string()).collect(),
        }
    }

    pub fn print(&self) {
        let address = if self.address.is_empty() { "no address" } else { &self.address };
        let medium = match self.medium {
            0 => "memory",
            1 => "file",
            _ => "another medium",
        };
        let manages = if self.manages.is_empty() {
            String::new()
        } else {
            format!(", manages {}", self.manages.join(", "))
        };
        let refused = if self.refused { ", not heard any more after a complaint" } else { "" };
        say::line(format_args!(
            "node {}: since epoch {}, {address}, {medium}{manages}{refused}",
            self.node, self.life
        ));
    }
}

/// A change that was made.
#[derive(Serialize)]
pub(super) struct ChangeTold {
    number: u64,
    epoch: u32,
    /// By the wall clock of the node that made it, UTC.
    at: String,
    /// `start`, `join`, `leave`, `expel`, `complain`, `set_subtree`, `remove_subtree`, `set_sync`, `set_manager`.
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// Whose heartbeats a complaint has refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<u32>,
    /// In words.
    text: String,
}

impl ChangeTold {
    pub fn of(record: &Record) -> Self {
        let (kind, node, text) = change_told(record);
        Self {
            number: record.number.get(),
            epoch: record.epoch.get(),
            at: utc(record.wall_ns),
            kind,
            node: node.map(NodeId::get),
            path: record.change.path().map(ToString::to_string),
            refused: record.refused.map(NodeId::get),
            text,
        }
    }

    pub fn print(&self) {
        say::line(format_args!("{:>6}  {}  epoch {:<5}  {}", self.number, self.at, self.epoch, self.text));
    }
}

/// Describes a change in words.
pub fn words(record: &Record) -> String {
    change_told(record).2
}

/// Kind, node and words of a change.
fn change_told(record: &Record) -> (&'static str, Option<NodeId>, String) {
    match &record.change {
        Change::Start => ("start", None, "the manager started".to_owned()),
        Change::Join { node, replaces, address, .. } => {
            let after = replaces.map_or(String::new(), |life| format!(", after its life since epoch {life}"));
            (
                "join",
                Some(*node),
                format!("node {node} joined{after} {}", address.as_str()).trim_end().to_owned(),
            )
        }
        Change::Leave { party } => ("leave", Some(party.node), format!("node {} left", party.node)),
        Change::Expel { party, .. } => {
            let why = if record.refused.is_some() { "after a complaint" } else { "it was silent" };
            ("expel", Some(party.node), format!("node {} was expelled: {why}", party.node))
        }
        Change::Complain { by, about, path, .. } => {
            let refused = record.refused.map_or(String::new(), |node| {
                format!(": node {node} is not heard any more, and will be expelled")
            });
            let text = format!("node {} complained about node {about}, of {path}{refused}", by.node);
            ("complain", Some(*about), text)
        }
        Change::SetSubtree { path, chain, copies_min, founder, version } => {
            let chain: Vec<String> = chain.iter().map(|place| place.node.to_string()).collect();
            let is_accepted = founder.is_some() && *version != ChangeNumber::new(0);
            let accepted = if is_accepted { "; an operator accepted a pool as its last copy" } else { "" };
            let text =
                format!("{path} has chain {}, at least {copies_min} copies{accepted}", chain.join(" "));
            ("set_subtree", None, text)
        }
        Change::RemoveSubtree { path, .. } => {
            ("remove_subtree", None, format!("{path} has no chain of its own any more"))
        }
        Change::SetSync { path, node, in_sync, .. } => {
            let text =
                format!("node {node} is {} of {path}", if *in_sync { "in sync" } else { "out of sync" });
            ("set_sync", Some(*node), text)
        }
        Change::SetManager { path, to, .. } => {
            ("set_manager", Some(*to), format!("node {to} is lease manager of {path}"))
        }
    }
}

/// So many of something.
fn counted(count: usize, what: &str) -> String {
    match (count, what.strip_suffix('y')) {
        (1, _) => format!("1 {what}"),
        (_, Some(stem)) => format!("{count} {stem}ies"),
        _ => format!("{count} {what}s"),
    }
}

/// A wall clock's time as `2026-01-31 23:59:59.999`, UTC.
fn utc(wall_ns: i64) -> String {
    let (seconds, millis) =
        (wall_ns.div_euclid(1_000_000_000), wall_ns.rem_euclid(1_000_000_000) / 1_000_000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years that begin in March, so that the day of a leap year comes last; 400 of them have 146,097 days.
    let day = days + 719_468;
    let (era, day) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{of_month:02} {hour:02}:{minute:02}:{second:02}.{millis:03}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_what_date_says() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00.000"),
            (951_827_696, "2000-02-29 12:34:56.000"),
            (951_868_800, "2000-03-01 00:00:00.000"),
            (1_798_761_599, "2026-12-31 23:59:59.000"),
            (4_107_542_400, "2100-03-01 00:00:00.000"),
        ] {
            assert_eq!(utc(seconds * 1_000_000_000), text);
        }
        assert_eq!(utc(-1_000_000), "1969-12-31 23:59:59.999");
    }
}
