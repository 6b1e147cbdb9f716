//! `hearth mount` and `hearth umount`: the gateway, a process of its own that shows the tree to every program.

use super::down::{NOTICE, takes_nothing, tell_waiting};
use super::run::LIBRARY;
use super::up::{say_ready, wait_until_ready};
use super::{Mount, Umount, standby};
use crate::chain::waiting::{Parts, leads_and_was_mounted};
use crate::cluster::{Cluster, Node};
use crate::cluster_lock::ClusterLock;
use crate::error::{Error, Result};
use crate::mapped::{Outcome, Programs};
use crate::mountpoint::{self, Stand, ends_file, gateway_file};
use crate::process::{Process, this_program, using};
use crate::say::{self, quoted};
use format::message::ROLE_GATEWAY;
use gateway::{Ended, Guarding, Mounted, Options, serve_guarded};
use ipc::{Host, SystemHost};
use libfs::socket::SocketConnector;
use libfs::{LibFs, Limits};
use rustix::io::Errno;
use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Processes that are named when a mount is in use.
const USERS_SHOWN: usize = 3;
/// How long an unmount may take: programs that use the mount are waited for.
const UNMOUNT: Duration = Duration::from_secs(30);

pub(super) fn mount(arguments: &Mount) -> Result<ExitCode> {
    let cluster = arguments.node.place.cluster()?;
    let node = cluster.node(arguments.node.node)?;
    let options = Options { set_ids: arguments.suid, devices: arguments.dev, ..Options::default() };
    if (arguments.suid || arguments.dev) && !rustix::process::geteuid().is_root() {
        return Err(Error::new("--suid and --dev are for root"));
    }
    if arguments.foreground {
        return show(&cluster, node, &options);
    }
    if arguments.standby {
        // Which mounts it by itself, unless it is not to be mounted.
        standby::wait(&cluster, node)?;
    }
    if let Some(process) = mountpoint::gateway_that_stays(&cluster, node)? {
        if arguments.suid || arguments.dev {
            return Err(Error::new(format!(
                "node {} is mounted already, without --suid or --dev perhaps: hearth umount comes first",
                node.number
            )));
        }
        // `up` and `start` mount by themselves: the requested mount is there.
        say::line(format_args!("node {} is mounted already (process {})", node.number, process.pid()));
        return Ok(ExitCode::SUCCESS);
    }
    if !is_up(&cluster, node) {
        return Err(Error::new(format!(
            "node {} is down, so there is nothing to mount: hearth start --dir {} brings it back",
            node.number,
            quoted(&cluster.dir)
        )));
    }
    if cluster.settings.chain.is_some()
        && let Some((leader, _)) = Parts::ask(&cluster).leader()
        && leader != node.number
    {
        say::aside(format_args!(
            "hearth: node {leader} leads, not node {}: that one is mounted",
            node.number
        ));
        return Ok(ExitCode::FAILURE);
    }
    take_away_killed(&cluster, node)?;
    if mountpoint::stand(&cluster, node) == Stand::Other {
        let tree = cluster.tree(node);
        let tree = tree.display();
        say::aside(format_args!("hearth: the mount hides the files in {tree}, which are not in the tree"));
    }
    let chosen = [(arguments.suid, "--suid"), (arguments.dev, "--dev")];
    let chosen = chosen.iter().filter_map(|(is_chosen, option)| is_chosen.then_some(*option));
    let command: Vec<&str> = ["mount", "--foreground"].into_iter().chain(chosen).collect();
    wait_until_ready(&cluster, node, &command, "gateway.log")?;
    say::line(format_args!("node {} is mounted at {}", node.number, cluster.tree(node).display()));
    Ok(ExitCode::SUCCESS)
}

/// Mounts a node that was started, unless it is mounted or is not to be. That it may not be is no failure: the line says what
/// is missing.
pub(crate) fn show_if_wanted(cluster: &Cluster, node: &Node) {
    if !cluster.settings.mount {
        return;
    }
    match show_unless_shown(cluster, node) {
        Ok(true) => say::line(format_args!("node {} is mounted, for every program", node.number)),
        Ok(false) => {}
        Err(why) => say::aside(format_args!(
            "hearth: {why}; hearth run shows the tree all the same, but without shared maps of files (--no-mount does not try)"
        )),
    }
}

/// The same for one of several, if it leads: its daemon mounts it only when it begins to lead, and the process of that mount may
/// have died since.
pub(crate) fn show_if_it_leads(cluster: &Cluster, node: &Node) {
    if cluster.settings.chain.is_none() || leads_and_was_mounted(cluster, node) {
        show_if_wanted(cluster, node);
    }
}

/// Mounts a node; false if it was mounted.
fn show_unless_shown(cluster: &Cluster, node: &Node) -> Result<bool> {
    if mountpoint::gateway_that_stays(cluster, node)?.is_some() {
        return Ok(false);
    }
    // Else it would stay below the new mount.
    take_away_killed(cluster, node)?;
    if mountpoint::stand(cluster, node) == Stand::Other {
        let tree = cluster.tree(node);
        let tree = tree.display();
        return Err(Error::new(format!(
            "node {} is not mounted, because a mount would hide the files in {tree}: move them away, then hearth mount \
             --dir {} mounts it",
            node.number,
            quoted(&cluster.dir)
        )));
    }
    wait_until_ready(cluster, node, &["mount", "--foreground"], "gateway.log")?;
    Ok(true)
}

pub(super) fn umount(arguments: &Umount) -> Result<ExitCode> {
    let cluster = arguments.node.place.cluster()?;
    let node = cluster.node(arguments.node.node)?;
    match take_away(&cluster, node, arguments.force)? {
        UnmountResult::Nothing => return Err(Error::new(format!("node {} is not mounted", node.number))),
        UnmountResult::Away => say::line(format_args!("node {} is not mounted any more", node.number)),
        UnmountResult::Busy(users) => {
            say::aside(format_args!(
                "hearth: the mount at {} is busy{users}: end what uses it, or take it away from there with --force",
                cluster.tree(node).display()
            ));
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The result of unmounting.
pub(super) enum UnmountResult {
    /// There was none.
    Nothing,
    /// It is gone.
    Away,
    /// It stays, because processes use it: their names, as the end of a sentence.
    Busy(String),
}

/// Takes a node's mount away; by force also if it is in use.
pub(super) fn take_away(cluster: &Cluster, node: &Node, force: bool) -> Result<UnmountResult> {
    let tree = cluster.tree(node);
    let of_gateway = |why: gateway::Error| Error::at("unmount", &tree)(why);
    if let Some(process) = mountpoint::gateway(cluster, node) {
        if !force {
            match gateway::unmount(&tree) {
                Err(gateway::Error::System { errno, .. }) if errno == Errno::BUSY.raw_os_error() => {
                    return Ok(UnmountResult::Busy(users(&tree)));
                }
                unmounted => unmounted.map_err(of_gateway)?,
            }
        }
        // It ends by itself when its mount is gone.
        process.end_with_notice(
            Signal::TERM,
            (NOTICE, UNMOUNT),
            || tell_waiting(cluster, node, &process),
            || takes_nothing(cluster, node),
        )?;
    } else if mountpoint::stand(cluster, node) == Stand::DeadMount {
        gateway::detach(&tree).map_err(of_gateway)?;
    } else {
        return Ok(UnmountResult::Nothing);
    }
    // A gateway that was killed has not done it.
    mountpoint::tidy(cluster, node);
    Ok(UnmountResult::Away)
}

/// Takes away the mount of a gateway that was killed, when its guard has made the kernel drop all that it has of it.
pub(super) fn take_away_killed(cluster: &Cluster, node: &Node) -> Result<()> {
    mountpoint::end_guard(cluster, node)?;
    let tree = cluster.tree(node);
    if mountpoint::stand(cluster, node) == Stand::DeadMount {
        gateway::detach(&tree).map_err(Error::at("unmount", &tree))?;
    }
    mountpoint::tidy(cluster, node);
    Ok(())
}

/// The processes that use a mount, as the end of a sentence.
fn users(tree: &Path) -> String {
    let users = using(tree);
    let named: Vec<_> = users
        .iter()
        .take(USERS_SHOWN)
        .map(|(pid, name)| format!("{} ({name})", pid.as_raw_nonzero()))
        .collect();
    match (named.is_empty(), users.len() > named.len()) {
        (true, _) => String::new(),
        (false, more) => {
            format!(", used by process {}{}", named.join(", "), if more { " and others" } else { "" })
        }
    }
}

/// The gateway's own process: serves the mount until it is told to end, or the mount is taken away.
fn show(cluster: &Cluster, node: &Node, options: &Options) -> Result<ExitCode> {
    super::speak();
    let _ = rustix::process::setsid();
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let host = gateway::sharing(Arc::new(SystemHost));
    let version = env!("CARGO_PKG_VERSION");
    let connector = SocketConnector::new(host.clone(), node.socket.clone(), version, ROLE_GATEWAY, Some);
    // Its leases are withheld from others from here on, if the daemon dies.
    let lock = mountpoint::lock_caches(&mountpoint::caches_file(cluster, node))?;
    let engine = LibFs::new(host.clone(), Arc::new(connector), limits())
        .map_err(|why| Error::new(format!("cannot attach to node {}: {why}", node.number)))?;
    let (engine, tree) = (Arc::new(engine), cluster.tree(node));
    let mounted = Arc::new(place(cluster, node, (engine.clone(), options), &host, lock)?);
    let (told, ends) = (mounted.clone(), ends_file(cluster, node));
    let listen = move || {
        if signals.forever().next().is_some() {
            unmount_as_told(&told, &ends);
        }
    };
    host.spawn("signals", Box::new(listen))
        .map_err(|why| Error::new(format!("cannot start a thread: {why}")))?;
    say_ready()?;
    tracing::info!(node = node.number, "mounted");
    let ended = mounted.wait().map_err(Error::at("serve", &tree));
    let messages = mounted.messages();
    let messages: Vec<String> = messages.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let calls = engine.calls_made();
    let calls: Vec<String> = calls.iter().map(|(kind, count)| format!("{count} {kind:?}")).collect();
    let (messages, calls, strays) = (messages.join(", "), calls.join(", "), mounted.stray_write_backs());
    let ((_, inodes), overdue_sizes) = (mounted.inodes(), mounted.overdue_sizes());
    tracing::info!(messages, calls, strays, overdue_sizes, inodes, "not mounted any more");
    ended?;
    Process::this()?.remove_files(&gateway_file(cluster, node), &[&ends_file(cluster, node)]);
    mountpoint::tidy(cluster, node);
    Ok(ExitCode::SUCCESS)
}

/// Unmounts; a command that wants to mount waits for the end of this process from here on.
fn unmount_as_told(mounted: &Mounted, ends_file: &Path) {
    if let Err(why) = Process::this().and_then(|this| this.save(ends_file)) {
        tracing::warn!(%why, "a command that mounts does not wait for the end of this process");
    }
    if let Err(why) = mounted.unmount() {
        tracing::error!(%why, "cannot unmount");
        let _ = std::fs::remove_file(ends_file);
    }
}

/// The gateway's limits of memory. The kernel keeps attributes and names under leases, so the gateway's own copies only
/// serve requests that the kernel repeats.
fn limits() -> Limits {
    Limits { nodes: 1 << 14, entries: 1 << 16, ..Limits::default() }
}

/// Whether a node has a keeper, or a daemon.
fn is_up(cluster: &Cluster, node: &Node) -> bool {
    let files = [cluster.keeper_pid_file(node), cluster.pid_file(node)];
    files.iter().any(|file| Process::load(file).is_some())
}

/// Makes the folder and mounts there; others who would remove it again wait meanwhile.
fn place(
    cluster: &Cluster,
    node: &Node,
    (engine, options): (Arc<LibFs>, &Options),
    host: &Arc<dyn Host>,
    lock: File,
) -> Result<Mounted> {
    let tree = cluster.tree(node);
    let _alone = ClusterLock::wait(&cluster.dir)?;
    // A command that held the lock may have ended the node.
    if !is_up(cluster, node) {
        return Err(Error::new(format!("node {} was ended meanwhile", node.number)));
    }
    mountpoint::make(cluster, node)?;
    // Before the mount is there: a mount without this file is one whose gateway is gone.
    Process::this()?.save(&gateway_file(cluster, node))?;
    let guarding = Guarding { lock, start: Box::new(start_guard) };
    let mounted = serve_guarded(engine, host.clone(), &tree, options, Some(guarding))
        .map_err(Error::at("mount", &tree));
    if mounted.is_err() {
        let _ = std::fs::remove_file(gateway_file(cluster, node));
        mountpoint::remove(cluster, node);
    }
    mounted
}

/// Starts this program as a mount's guard. It speaks where this process does.
fn start_guard(gateway: OwnedFd) -> std::io::Result<()> {
    let child = this_program()
        .arg("guard")
        .current_dir("/")
        .stdin(Stdio::from(gateway))
        .stdout(Stdio::null())
        .spawn()?;
    // It lives longer than this process, or ends with the mount.
    drop(child);
    Ok(())
}

/// The guard's own process.
pub(super) fn guard() -> Result<ExitCode> {
    super::speak();
    // The end of the gateway's process group must not end this process.
    let _ = rustix::process::setsid();
    let cannot = |why: &dyn std::fmt::Display| Error::new(format!("cannot guard a mount: {why}"));
    let gateway = std::io::stdin().as_fd().try_clone_to_owned().map_err(|why| cannot(&why))?;
    let nothing = File::open("/dev/null").map_err(|why| cannot(&why))?;
    rustix::stdio::dup2_stdin(nothing).map_err(|why| cannot(&why))?;
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let end_programs = |device| {
        let Outcome { ended, left } = Programs { device, library: LIBRARY }.end(&*host);
        let why = "they had mapped files of this mount under hearth run";
        if !ended.is_empty() {
            tracing::error!("ended the processes {ended:?} by SIGBUS or SIGKILL: {why}");
        }
        if !left.is_empty() {
            tracing::error!("cannot end the processes {left:?}: {why}, and may use data that is lost");
        }
    };
    match gateway::guard(&host, &gateway, end_programs).map_err(|why| cannot(&why))? {
        Ended::InOrder => {}
        Ended::Poisoned => {
            tracing::error!(
                "the gateway died or stood still: its mount fails from now on, and hearth mount makes another"
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}
