//! `hearth down`: end daemons, politely or as a power cut does.

use super::Down;
use super::mount::{UnmountResult, take_away, take_away_killed};
use crate::chain::{self, waiting::Parts};
use crate::cluster::{Cluster, Node};
use crate::cluster_lock::{self, ClusterLock};
use crate::daemon_lock::{self, DaemonLock};
use crate::error::{Error, Result};
use crate::health::{self, NodeHealth};
use crate::mountpoint;
use crate::process::{Process, descendants_without, subcommand, variable_of, with_environment, with_mapping};
use crate::say::{self, quoted};
use crate::standby_lock;
use rustix::process::{Pid, Signal, getpid};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::time::Duration;

/// A daemon digests what its programs wrote before it ends.
const ORDERLY: Duration = Duration::from_secs(60);
/// How long an orderly end may take before it is said what is waited for.
pub(super) const NOTICE: Duration = Duration::from_secs(3);
/// How long a command that starts or ends nodes is waited for.
const OTHERS: Duration = Duration::from_secs(60);
/// How many such commands are killed, if one follows the other.
const HOLDERS_MAX: u32 = 8;
/// The kernel frees the memory of a killed process.
const KILLED: Duration = Duration::from_secs(30);

pub(super) fn run(arguments: &Down) -> Result<ExitCode> {
    let (mut cluster, _) = arguments.place.cluster_or_found()?;
    let alone = match arguments.node {
        Some(_) => None,
        None => Some(alone(&cluster, arguments.hard)?),
    };
    if alone.is_some() {
        // The holder of the lock may have added nodes.
        (cluster, _) = Cluster::open_or_found(&cluster.dir)?;
    }
    let nodes: Vec<&Node> = match arguments.node {
        Some(number) => vec![cluster.node(number)?],
        None => in_order(&cluster, arguments.hard),
    };
    let mut ended = 0;
    for node in nodes {
        // While there is a daemon that takes what is written back.
        let mount =
            if arguments.hard { Ok(UnmountResult::Nothing) } else { take_away(&cluster, node, false) };
        let stopped = stop(&cluster, node, arguments.hard)?;
        cluster.remove_socket_folder(node);
        if let Some(alone) = &alone {
            mountpoint::tidy_locked(&cluster, node, alone);
        }
        if let Some(stays) =
            mount.map_or_else(|why| Some(why.to_string()), |taken| stays(&cluster, node, &taken))
        {
            say::aside(format_args!("hearth: {stays}"));
        }
        if stopped {
            say::line(format_args!("node {} is down", node.number));
            ended += 1;
        } else {
            say::line(format_args!("node {} was down", node.number));
        }
    }
    if arguments.node.is_none() {
        chain::manager::stop(&cluster, arguments.hard)?;
    }
    if ended == 0 && arguments.node.is_some() {
        return Err(Error::new("nothing was running"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Keeps other commands from starting nodes, and from ending them, while all nodes and the manager end. By force, it kills the
/// command that has not let go of the lock after [`NOTICE`], as a power cut does.
fn alone(cluster: &Cluster, hard: bool) -> Result<ClusterLock> {
    let dir = &cluster.dir;
    if !hard {
        let tell = || {
            say::aside(format_args!(
                "hearth: waiting for {}, which starts or ends nodes of this cluster; {}",
                cluster_lock::holder(dir),
                self::hard(cluster)
            ));
        };
        let lock = ClusterLock::within(dir, (NOTICE, OTHERS), tell)?;
        return lock.ok_or_else(|| {
            Error::new(format!(
                "{}, which starts or ends nodes of this cluster, did not end within {} s, so no node was ended: {}",
                cluster_lock::holder(dir),
                OTHERS.as_secs(),
                self::hard(cluster)
            ))
        });
    }
    for _ in 0..HOLDERS_MAX {
        if let Some(lock) = ClusterLock::within(dir, (NOTICE, NOTICE), || ())? {
            return Ok(lock);
        }
        for holder in cluster_lock::holders(dir) {
            say::aside(format_args!(
                "hearth: killing process {}, which starts or ends nodes of this cluster",
                holder.pid()
            ));
            holder.end(Signal::KILL, KILLED)?;
        }
    }
    let holder = cluster_lock::holder(dir);
    Err(Error::new(format!("{holder} holds the lock of {}: no node was ended", dir.display())))
}

/// All nodes, in the order in which they end: the one that leads last, else another one would take its place.
fn in_order(cluster: &Cluster, hard: bool) -> Vec<&Node> {
    let mut nodes: Vec<&Node> = cluster.settings.nodes.iter().collect();
    if nodes.len() > 1 && !hard {
        let leader = Parts::ask(cluster).leader().map(|(number, _)| number);
        nodes.sort_by_key(|node| Some(node.number) == leader);
    }
    nodes
}

/// The warning about a mount without a daemon.
fn stays(cluster: &Cluster, node: &Node, taken: &UnmountResult) -> Option<String> {
    let UnmountResult::Busy(users) = taken else { return None };
    let (tree, dir) = (cluster.tree(node), quoted(&cluster.dir));
    Some(format!(
        "the mount at {} stays, as it is in use{users}: calls on it get EIO until hearth start --dir {dir}; \
         hearth umount --force --dir {dir} takes it away",
        tree.display()
    ))
}

/// Ends one node; false if neither its keeper nor its daemon was running and nothing was attached.
pub(super) fn stop(cluster: &Cluster, node: &Node, hard: bool) -> Result<bool> {
    if !hard {
        let keeper = Process::load(&cluster.keeper_pid_file(node));
        if let Some(keeper) = &keeper {
            // It ends its daemon in order.
            end_in_order(cluster, node, keeper)?;
        }
        // The daemon of a keeper that died.
        let daemons = daemons(cluster, node);
        for daemon in &daemons {
            end_in_order(cluster, node, daemon)?;
        }
        return Ok(keeper.is_some() || !daemons.is_empty());
    }
    let any = kill(cluster, node)?;
    // As after a power cut, nothing is mounted.
    take_away_killed(cluster, node)?;
    Ok(any)
}

/// Kills all processes of a node but the guard of its mount; false if there was none.
fn kill(cluster: &Cluster, node: &Node) -> Result<bool> {
    // First the keeper, which would start a daemon again, then the daemon: later calls of programs have not happened,
    // as after a power cut.
    let keeper = Process::load(&cluster.keeper_pid_file(node));
    // A program that has noticed that the daemon is gone has unmapped its log.
    let mut programs = programs(node);
    if let Some(keeper) = &keeper {
        keeper.end(Signal::KILL, KILLED)?;
    }
    let mut any = keeper.is_some();
    loop {
        // A keeper that is among them may start another daemon meanwhile.
        let daemons = daemons(cluster, node);
        if daemons.is_empty() {
            break;
        }
        any = true;
        for process in daemons {
            process.end(Signal::KILL, KILLED)?;
        }
    }
    // As after an orderly end: no process waits for another daemon. A keeper that began meanwhile has the lock, and a socket of its own.
    if let Some(_lock) = DaemonLock::take(cluster, node)? {
        let _ = fs::remove_file(&node.socket);
    }
    programs.extend(self::programs(node));
    let pids: Vec<Pid> = programs.iter().map(Process::raw).collect();
    programs.extend(descendants_without(&pids, |pid| is_command(pid) || is_of_another_node(pid, node)));
    programs.retain(|process| process.raw() != getpid());
    // It has unmapped its log when it has noticed that the daemon is gone, and would then wait for another daemon.
    programs.extend(mountpoint::gateway(cluster, node));
    any |= !programs.is_empty();
    // All before the first is waited for: a program that waits for an answer of the mount ends after the gateway.
    for process in &programs {
        if let Some(descriptor) = process.descriptor() {
            let _ = rustix::process::pidfd_send_signal(&descriptor, Signal::KILL);
        }
    }
    for process in programs {
        process.end(Signal::KILL, KILLED)?;
    }
    Ok(any)
}

/// Programs of a node, as far as this user may know. One that overwrites its environment, as those do that show a title of their
/// own, is found while it uses the tree, or as the descendant of one that is found.
fn programs(node: &Node) -> Vec<Process> {
    let mut programs = with_environment(ENVIRONMENT_SOCKET, &node.socket);
    programs.retain(|process| !is_command(process.raw()));
    programs.extend(with_mapping(&node.pool.join("log-")));
    // One with a relative path as an argument may have looked for it in the tree of the program that started it.
    programs.retain(|process| subcommand(process.raw()).is_none_or(|name| name != "run"));
    programs
}

/// Whether a process is a command of this program, which has the environment of the program that started it and nothing else of that
/// program's node: `hearth run --standby` is the parent of a program at a node of its own.
fn is_command(pid: Pid) -> bool {
    subcommand(pid).is_some_and(|name| !["within", "measure"].contains(&name.as_str()))
}

/// Whether a later `hearth run` has started a process for another node, which may be of another cluster.
fn is_of_another_node(pid: Pid, node: &Node) -> bool {
    let socket = variable_of(pid, ENVIRONMENT_SOCKET).filter(|socket| !socket.is_empty());
    socket.is_some_and(|socket| socket != node.socket.as_os_str().as_bytes())
}

/// A node's daemon, also one that begins, and a keeper that began meanwhile.
fn daemons(cluster: &Cluster, node: &Node) -> Vec<Process> {
    let mut daemons = daemon_lock::holders(cluster, node);
    // Of a version without the lock.
    let named = Process::load(&cluster.pid_file(node)).filter(|daemon| !daemons.contains(daemon));
    daemons.extend(named);
    daemons
}

/// Ends a keeper or a daemon with everything digested, and says what it waits for when that takes long.
fn end_in_order(cluster: &Cluster, node: &Node, process: &Process) -> Result<()> {
    let ended = process.end_with_notice(
        Signal::TERM,
        (NOTICE, ORDERLY),
        || tell_waiting(cluster, node, process),
        || stopped(cluster, node, process).is_some(),
    );
    ended.map_err(|why| {
        let hard = hard(cluster);
        Error::new(format!("{why}: {hard}, and what programs wrote is digested by the next start"))
    })
}

/// The way out that a message about a long wait names.
fn hard(cluster: &Cluster) -> String {
    format!("hearth down --hard --dir {} ends it at once", quoted(&cluster.dir))
}

/// The process of a node that keeps a process of it from ending, because it is stopped.
fn stopped(cluster: &Cluster, node: &Node, process: &Process) -> Option<Process> {
    let daemon = Process::load(&cluster.pid_file(node));
    daemon.into_iter().chain([*process]).find(Process::is_stopped)
}

/// Whether the daemon of a node takes nothing that its mount has to write back: it is stopped or has failed.
pub(super) fn takes_nothing(cluster: &Cluster, node: &Node) -> bool {
    if Process::load(&cluster.pid_file(node)).is_some_and(|daemon| daemon.is_stopped()) {
        return true;
    }
    match health::look(cluster, node) {
        NodeHealth::Answers(status) => status.stopped,
        NodeHealth::Down => true,
        NodeHealth::Silent(_) | NodeHealth::Starting { .. } | NodeHealth::Unknown(_) => false,
    }
}

/// Says why a process of a node has not ended yet: it is stopped, or the daemon is, or the daemon digests.
pub(super) fn tell_waiting(cluster: &Cluster, node: &Node, process: &Process) {
    let waits = match stopped(cluster, node, process) {
        Some(stopped) => {
            let pid = stopped.pid();
            format!("process {pid} is stopped and cannot end: kill -CONT {pid} lets it go on")
        }
        None if takes_nothing(cluster, node) => {
            format!("process {} waits for the daemon, which has failed", process.pid())
        }
        None if standby_lock::is_any_running(cluster, node).unwrap_or(false) => {
            "waiting for its standby programs, which were told to end".to_owned()
        }
        None => match Process::load(&cluster.pid_file(node)) {
            Some(daemon) => {
                format!("waiting for process {}, which digests what programs wrote", daemon.pid())
            }
            None => format!("waiting for process {}, which has not begun to serve", process.pid()),
        },
    };
    say::aside(format_args!("hearth: node {}: {waits}; {}", node.number, hard(cluster)));
}

/// The variable by which `run` tells a program's library where to attach.
pub(super) const ENVIRONMENT_SOCKET: &str = "HEARTH_SOCKET";
