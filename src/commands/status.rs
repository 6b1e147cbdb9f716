//! `hearth status`: the state of each node, for people or machines: its daemon's answer, and which of its processes
//! run.

use super::Status;
use crate::chain;
use crate::chain::told::{ChainStatus, Role};
use crate::cluster::{Cluster, MediumKind, Node, open_settings};
use crate::error::{Error, Result};
use crate::health::{self, NodeHealth, PATIENCE};
use crate::mountpoint::{Stand, gateway, mount_command, stand};
use crate::process::Process;
use crate::say::{self, count, quoted};
use crate::status::{NodeStatus, ask};
use serde::Serialize;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code when a user may not ask.
const UNKNOWN: u8 = 3;

/// How a node is, in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum NodeState {
    /// All is well.
    Up,
    /// It serves, and a part of it is not as it should be.
    Degraded,
    /// Its daemon runs and refuses every call, for a reason that it says.
    Failed,
    /// Its keeper is starting a daemon.
    Starting,
    /// Its daemon runs and does not answer.
    Silent,
    /// Nothing of it runs.
    Down,
    /// This user may not know.
    Unknown,
}

/// A node that answers, or why it does not.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Up {
        #[serde(flatten)]
        status: Box<NodeStatus>,
        state: NodeState,
        /// Sentences on what is not as it should be.
        problems: Vec<String>,
        mount: Stand,
        /// Whether it is to be mounted when it starts.
        mounts: bool,
        /// Process of its mount.
        #[serde(skip_serializing_if = "Option::is_none")]
        gateway: Option<i32>,
    },
    Unknown {
        node: u32,
        state: NodeState,
        unknown: String,
        /// Of several nodes: the part that every user is told.
        #[serde(skip_serializing_if = "Option::is_none")]
        chain: Option<Box<ChainStatus>>,
    },
    Down {
        node: u32,
        state: NodeState,
        down: String,
        tree: PathBuf,
        mount: Stand,
        pool: PathBuf,
        medium: MediumKind,
        #[serde(skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
}

impl Answer {
    fn state(&self) -> NodeState {
        match self {
            Self::Up { state, .. } | Self::Unknown { state, .. } | Self::Down { state, .. } => *state,
        }
    }

    /// A node that serves is degraded with it.
    fn add_problem(&mut self, problem: &str) {
        if let Self::Up { state, problems, .. } = self {
            problems.push(problem.to_owned());
            if *state == NodeState::Up {
                *state = NodeState::Degraded;
            }
        }
    }
}

pub(super) fn run(arguments: &Status) -> Result<ExitCode> {
    let dir = arguments.place.dir()?;
    if open_settings(&dir).is_err_and(|why| why.kind() == ErrorKind::PermissionDenied) {
        let settings = dir.join("hearth.toml");
        say::aside(format_args!("hearth: not known: this user may not read {}", settings.display()));
        return Ok(ExitCode::from(UNKNOWN));
    }
    let (cluster, is_wrong) = arguments.place.cluster_or_found()?;
    let mut answers: Vec<Answer> = cluster.settings.nodes.iter().map(|node| answer(&cluster, node)).collect();
    if is_wrong {
        answers.iter_mut().for_each(|answer| {
            answer.add_problem("hearth.toml cannot be used: the daemon cannot be started again when it dies")
        });
    }
    if arguments.json {
        let text = serde_json::to_string_pretty(&answers)
            .map_err(|why| Error::new(format!("cannot write the status: {why}")))?;
        say::line(text);
    } else {
        answers.iter().for_each(print);
    }
    Ok(ExitCode::from(code(&answers.iter().map(Answer::state).collect::<Vec<_>>())))
}

/// 0 well, 1 degraded, 2 down, 3 not known.
fn code(states: &[NodeState]) -> u8 {
    let is_down = |state: &NodeState| matches!(state, NodeState::Down | NodeState::Silent);
    if states.contains(&NodeState::Unknown) {
        UNKNOWN
    } else if states.iter().all(|state| *state == NodeState::Up) {
        0
    } else if states.iter().all(is_down) {
        2
    } else {
        1
    }
}

fn answer(cluster: &Cluster, node: &Node) -> Answer {
    let (state, down) = match health::look(cluster, node) {
        NodeHealth::Answers(status) => return serving(cluster, node, status),
        NodeHealth::Unknown(why) => {
            let unknown =
                format!("this user may not ask the daemon, only the node's user and root may: {why}");
            let told = ask(&cluster.lead(node), PATIENCE).ok();
            let chain = told.and_then(|told| told.chain).map(Box::new);
            return Answer::Unknown { node: node.number, state: NodeState::Unknown, unknown, chain };
        }
        NodeHealth::Silent(daemon) => (NodeState::Silent, health::silence(cluster, node, &daemon)),
        NodeHealth::Starting { again: true } => (NodeState::Starting, "being started again".to_owned()),
        NodeHealth::Starting { again: false } => (NodeState::Starting, "being started".to_owned()),
        NodeHealth::Down => (NodeState::Down, "down".to_owned()),
    };
    Answer::Down {
        node: node.number,
        state,
        down,
        tree: cluster.tree(node),
        mount: stand(cluster, node),
        pool: node.pool.clone(),
        medium: cluster.settings.medium,
        failure: cluster.failure(node),
    }
}

fn serving(cluster: &Cluster, node: &Node, status: Box<NodeStatus>) -> Answer {
    let mount = stand(cluster, node);
    let problems = problems(cluster, node, &status, mount);
    let state = if status.stopped {
        NodeState::Failed
    } else if problems.is_empty() && status.losses.is_empty() {
        NodeState::Up
    } else {
        NodeState::Degraded
    };
    let gateway = gateway(cluster, node).map(|process| process.pid());
    let mounts = cluster.settings.mount;
    Answer::Up { status, state, problems, mount, mounts, gateway }
}

/// The problems of a node that answers, beside those that its daemon reports itself.
fn problems(cluster: &Cluster, node: &Node, status: &NodeStatus, mount: Stand) -> Vec<String> {
    let mut problems = Vec::new();
    match Process::load(&cluster.keeper_pid_file(node)) {
        None if status.kept => problems.push(format!(
            "its keeper is gone: nothing starts the daemon again when it dies; hearth start --dir {} gives it another keeper",
            quoted(&cluster.dir)
        )),
        Some(keeper) if keeper.is_stopped() => problems.push(format!(
            "its keeper (process {pid}) is stopped: nothing starts the daemon again when it dies; kill -CONT {pid} lets \
             it go on",
            pid = keeper.pid()
        )),
        _ => {}
    }
    if status.medium_is_full && !status.stopped {
        problems.push(format!(
            "the medium of its pool {} is full or nearly full: writes that need new space may get ENOSPC until files are removed or \
             there is space again",
            node.pool.display()
        ));
    }
    // A program reserves so many blocks when it starts, and the shell that starts it as many.
    let reserved = sharedfs::Config::default().room_blocks;
    if status.blocks_available.is_some_and(|free| free < 2 * reserved) && !status.stopped {
        problems.push(
            "the pool is full or nearly full: writes may get ENOSPC until files are removed".to_owned(),
        );
    }
    // Of settings that cannot be understood it is not known.
    if cluster.settings.capacity_bytes > 0 {
        problems.extend(cluster.capacity_warning(node));
    }
    problems.extend(status.disk_stalled_ms.map(|stalled_ms| hung_disk(cluster, status, stalled_ms)));
    if let Some(chain) = &status.chain {
        problems.extend(chain::manager::problem(cluster));
        problems.extend(chain.problems(status.node));
    }
    if mount == Stand::DeadMount {
        problems.push(format!(
            "the process of its mount is gone: calls through the mount fail; {} makes it anew",
            mount_command(cluster, node)
        ));
    }
    problems
}

/// A sentence about a disk that does not answer, and what comes of that.
fn hung_disk(cluster: &Cluster, status: &NodeStatus, stalled_ms: u64) -> String {
    let seconds = stalled_ms / 1000;
    let comes = match (&status.chain, &cluster.settings.chain) {
        (Some(told), _) if told.failed => "it has failed".to_owned(),
        (Some(told), Some(chain)) if told.role != Role::Follows && told.in_sync.len() > 1 => {
            let seconds = chain.disk_seconds;
            format!(
                "another node is to lead after {seconds} s, or later if the device completes other requests (disk_seconds)"
            )
        }
        (Some(told), _) if told.role == Role::Follows => "what it gets is not synced".to_owned(),
        _ => "programs that need the disk wait, and no other node can take its place".to_owned(),
    };
    format!("the disk of its pool has not answered for {seconds} s: {comes}")
}

fn print(answer: &Answer) {
    match answer {
        Answer::Unknown { node, unknown, chain, .. } => {
            say::line(format_args!("node {node}: not known ({unknown})"));
            let lines = chain.as_ref().map(|chain| chain.lines()).unwrap_or_default();
            lines.iter().for_each(|line| say::line(format_args!("  {line}")));
        }
        Answer::Down { node, down, tree, mount, pool, medium, failure, .. } => {
            say::line(format_args!("node {node}: {down}"));
            say::line(format_args!("  tree at {}, {}", tree.display(), mounted(*mount)));
            say::line(format_args!("  medium {medium}, pool {}", pool.display()));
            say_failure(failure.as_deref());
        }
        Answer::Up { status, state, problems, mount, mounts, gateway } => {
            let word = match state {
                NodeState::Failed => "failed",
                NodeState::Degraded => "degraded",
                _ => "up",
            };
            let NodeStatus { node, pid, tree, .. } = &**status;
            say::line(format_args!("node {node}: {word}, process {pid}, tree at {tree}"));
            problems.iter().for_each(|problem| say::line(format_args!("  PROBLEM: {problem}")));
            let chosen = if *mount == Stand::Nothing && !mounts { " (--no-mount was chosen)" } else { "" };
            say::line(format_args!("  {}{chosen}", mounted(*mount)));
            print_serving(status, *gateway);
        }
    }
}

fn print_serving(status: &NodeStatus, gateway: Option<i32>) {
    if let Some(chain) = &status.chain {
        chain.lines().iter().for_each(|line| say::line(format_args!("  {line}")));
    }
    if !status.stopped {
        say::line(format_args!("  an fsync survives: {}", survives(&status.survives)));
    }
    say::line(format_args!("  copies {}, medium {}, pool {}", status.copies, status.medium, status.pool));
    let free = status.blocks_available.unwrap_or(status.blocks_free);
    let used = status.blocks - free.min(status.blocks);
    say::line(format_args!(
        "  {} of {} MiB used, {}, {}",
        used >> 8,
        status.blocks >> 8,
        count(status.inodes, "inode"),
        count(status.commits, "commit")
    ));
    if status.restarts > 0 {
        let times = count(status.restarts, "time");
        let was = if status.restarts == 1 { "was started again" } else { "was started again each time" };
        say::line(format_args!("  the daemon died {times} and {was}: see its log"));
    }
    say_failure(status.failure.as_deref());
    for loss in &status.losses {
        say::line(format_args!("  LOST: {loss}"));
    }
    for end in &status.forced_ends {
        say::line(format_args!("  ended by force: {end}"));
    }
    for program in &status.programs {
        let is_mount = gateway.is_some_and(|gateway| i64::from(gateway) == i64::from(program.pid));
        let name = if is_mount {
            format!("the mount, process {}", program.pid)
        } else {
            format!("process {} of user {}", program.pid, program.uid)
        };
        say::line(format_args!(
            "  {name}: update log of {} KiB, {}",
            program.log_bytes >> 10,
            count(program.leases, "lease")
        ));
    }
}

fn say_failure(failure: Option<&str>) {
    if let Some(failure) = failure {
        say::line(format_args!("  FAILED: {failure}"));
    }
}

fn survives(class: &str) -> &str {
    match class {
        "process" => "the end of the program and of the daemon, not of the machine",
        "power" => "a power cut",
        other => other,
    }
}

fn mounted(mount: Stand) -> &'static str {
    match mount {
        Stand::Tree => "mounted",
        Stand::Nothing => "not mounted: hearth run shows it to a program, hearth mount to every one",
        Stand::DeadMount => {
            "mounted, but its gateway is gone: hearth mount makes it anew, and hearth umount takes it away"
        }
        Stand::Other => "not mounted, and the files there are not in the tree: move them away",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_of_all_nodes() {
        use NodeState::{Degraded, Down, Failed, Silent, Starting, Unknown, Up};
        assert_eq!([code(&[Up]), code(&[Up, Up])], [0, 0]);
        assert_eq!([Degraded, Failed, Starting].map(|state| code(&[state])), [1, 1, 1]);
        assert_eq!([code(&[Down]), code(&[Silent, Down])], [2, 2]);
        assert_eq!([code(&[Up, Down]), code(&[Down, Starting])], [1, 1]);
        assert_eq!(code(&[Unknown, Up]), 3);
    }
}
