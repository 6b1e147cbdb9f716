//! `hearth move`: a planned hand-over of the lead.

use super::Move;
use super::mount::{UnmountResult, show_if_wanted, take_away};
use super::run::ENVIRONMENT_STANDBY;
use super::standby::STANDBY_NAME;
use crate::chain::orders::{MoveOrder, order_move};
use crate::chain::told::{ChainStatus, CopyTold, Role};
use crate::chain::waiting::{Parts, until_leads, until_mounted};
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::health::PATIENCE;
use crate::mountpoint;
use crate::process::{descends_from, variable_of};
use crate::say::{self, quoted};
use crate::standby_lock;
use crate::status::ask;
use ipc::{Host, SystemHost, Word};
use rustix::process::Pid;
use serde::Serialize;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// How long a process may go on before it keeps the lead where it is, and how often that is looked at.
const ENDING: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_millis(10);
/// How often it is tried to take a mount away that is in use.
const LOOK_AT_MOUNT: Duration = Duration::from_millis(50);
/// How long processes that have ended may take to be noticed.
const ENDED: Duration = Duration::from_secs(2);

/// A move that was made, for machines.
#[derive(Serialize)]
struct Moved {
    /// The node that led before.
    from: u32,
    /// The node that leads.
    to: u32,
    /// From the start of the command until it leads, in ms; 0 if it led before.
    took_ms: f64,
}

pub(super) fn run(arguments: &Move) -> Result<ExitCode> {
    let begin = SystemHost.now();
    let cluster = arguments.place.cluster()?;
    let to = cluster.node(arguments.to)?;
    if cluster.settings.chain.is_none() {
        return Err(Error::new("the cluster has one node, which always leads"));
    }
    let parts = Parts::ask(&cluster);
    if parts.are_forbidden() {
        return Err(Error::new("this user may not ask the nodes: only their user and root may"));
    }
    let Some((leader, told)) = parts.leader() else {
        let dir = quoted(&cluster.dir);
        return Ok(refused(format_args!(
            "no node leads now (hearth status --dir {dir} says what they wait for)"
        )));
    };
    if leader == to.number {
        until_leads(&cluster, to)?;
        until_mounted(&cluster, to);
        tell(arguments, &Moved { from: leader, to: leader, took_ms: 0.0 })?;
        return Ok(ExitCode::SUCCESS);
    }
    let from = cluster.node(leader)?;
    if let Some(why) = cannot_lead(told, to.number) {
        return Ok(refused(format_args!("{why}")));
    }
    let attached = Attached::for_a_while(&cluster, from, arguments.force)?;
    if !attached.others.is_empty() && !arguments.force {
        return Ok(refused(format_args!("{}", attached.refusal(&cluster, from))));
    }
    let has_standbys = attached.has_standbys || standby_lock::is_any_running(&cluster, from)?;
    let unmounted = take_away(&cluster, from, arguments.force && !has_standbys)?;
    if let UnmountResult::Busy(users) = &unmounted
        && !has_standbys
    {
        return Ok(refused(format_args!(
            "the mount at {} is busy{users}: end what uses it, or move all the same with --force",
            cluster.tree(from).display()
        )));
    }
    // A process that has just ended counts until its end is noticed.
    let grace = match has_standbys {
        true => Duration::from_secs(arguments.grace),
        false if arguments.force => Duration::ZERO,
        false => ENDED,
    };
    let order = MoveOrder { to: to.number, force: arguments.force, grace_ms: grace.as_millis() as u64 };
    let moved = match unmounted {
        UnmountResult::Busy(_) => order_with_mount(&cluster, from, order)?,
        UnmountResult::Nothing | UnmountResult::Away => order_move(&cluster, from, &order),
    };
    if let Err(why) = moved {
        show_if_wanted(&cluster, from);
        return Ok(refused(format_args!("{why}")));
    }
    until_leads(&cluster, to)?;
    let took_ms = SystemHost.now().since(begin).as_secs_f64() * 1000.0;
    until_mounted(&cluster, to);
    tell(arguments, &Moved { from: leader, to: to.number, took_ms })?;
    Ok(ExitCode::SUCCESS)
}

/// Gives the order while standby programs use the mount for the files that they map: they are told to end by the order. The
/// mount is taken away as soon as nothing uses it, or by force when most of the time is over, if the move is forced.
fn order_with_mount(cluster: &Cluster, from: &Node, order: MoveOrder) -> Result<Result<()>> {
    let (sender, ended) = channel();
    let place = (cluster.clone(), from.clone());
    let body = move || {
        // The receiver is gone when this command has failed.
        let _ = sender.send(order_move(&place.0, &place.1, &order));
    };
    let thread = SystemHost.spawn("order", Box::new(body));
    thread.map_err(|why| Error::new(format!("cannot start a thread: {why}")))?;
    let late = SystemHost.now().after(Duration::from_millis(order.grace_ms) * 3 / 4);
    let mut is_mounted = true;
    loop {
        match ended.recv_timeout(LOOK_AT_MOUNT) {
            Ok(moved) => return Ok(moved),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::new("the thread of the order ended")),
        }
        if is_mounted {
            let forced = order.force && SystemHost.now() >= late;
            is_mounted = matches!(take_away(cluster, from, forced)?, UnmountResult::Busy(_));
        }
    }
}

fn refused(why: std::fmt::Arguments<'_>) -> ExitCode {
    say::aside(format_args!("hearth: {why}"));
    ExitCode::FAILURE
}

fn tell(arguments: &Move, moved: &Moved) -> Result<()> {
    let Moved { from, to, took_ms } = moved;
    if arguments.json {
        let text = serde_json::to_string_pretty(moved);
        say::line(text.map_err(|why| Error::new(format!("cannot write the answer: {why}")))?);
    } else if from == to {
        say::line(format_args!("node {to} leads already"));
    } else {
        say::line(format_args!("node {to} leads after {took_ms:.0} ms, and node {from} follows it"));
    }
    Ok(())
}

/// Why a node cannot take the place of the one that says this.
fn cannot_lead(told: &ChainStatus, to: u32) -> Option<String> {
    if told.role != Role::Leads {
        return Some("the node that is to lead does not serve yet: try again".to_owned());
    }
    if told.in_sync.contains(&to) {
        return None;
    }
    let copy = told.copies.iter().find(|copy| copy.node == to);
    let lack = copy.map_or_else(|| "it is no copy".to_owned(), CopyTold::lack);
    Some(format!("node {to} is not in sync: {lack}"))
}

/// Whether `hearth run --standby` has started a process.
fn is_standby_program(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| variable_of(pid, ENVIRONMENT_STANDBY).is_some())
}

/// Programs that are attached to a node.
struct Attached {
    /// There are some that end when they are asked to, since `hearth run --standby` started them.
    has_standbys: bool,
    /// Numbers of the others.
    others: Vec<u32>,
}

impl Attached {
    /// Those that stay: a process that was told to end just now has a moment for it.
    fn for_a_while(cluster: &Cluster, node: &Node, force: bool) -> Result<Self> {
        let until = SystemHost.now().after(ENDING);
        loop {
            let attached = Self::to(cluster, node)?;
            if attached.others.is_empty() || force || SystemHost.now() >= until {
                return Ok(attached);
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
        }
    }

    /// Those that are alive, without the mount.
    fn to(cluster: &Cluster, node: &Node) -> Result<Self> {
        let status = ask(&cluster.control(node), PATIENCE);
        let status = status.map_err(|why| Error::new(format!("node {}: {why}", node.number)))?;
        let gateway = mountpoint::gateway(cluster, node).map(|process| process.pid().unsigned_abs());
        let pids = status.programs.iter().map(|program| program.pid);
        let alive = pids.filter(|pid| SystemHost.started(*pid).is_some() && Some(*pid) != gateway);
        let (standbys, others): (Vec<u32>, Vec<u32>) =
            alive.partition(|pid| is_standby_program(*pid) || descends_from(*pid, STANDBY_NAME));
        Ok(Self { has_standbys: !standbys.is_empty(), others })
    }

    fn refusal(&self, cluster: &Cluster, node: &Node) -> String {
        let pids: Vec<String> = self.others.iter().map(u32::to_string).collect();
        format!(
            "programs are attached to node {} (process {}): end them, or move all the same with --force, after which their \
             calls get EIO; hearth status --dir {} names them",
            node.number,
            pids.join(", "),
            quoted(&cluster.dir)
        )
    }
}
