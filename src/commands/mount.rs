//! `hearth mount` and `hearth umount`: the gateway, a process of its own that shows the tree to every program.

use super::up::{alone, say_ready, wait_until_ready};
use super::{Mount, OneNode};
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::mountpoint::{self, gateway_file};
use crate::process::Process;
use crate::say;
use format::message::ROLE_GATEWAY;
use gateway::{Mounted, Options, serve};
use ipc::{Host, SystemHost};
use libfs::socket::SocketConnector;
use libfs::{LibFs, Limits};
use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// How long an unmount may take: programs that use the mount are waited for.
const UNMOUNT: Duration = Duration::from_secs(30);

pub(super) fn mount(arguments: &Mount) -> Result<ExitCode> {
    let cluster = arguments.node.place.cluster()?;
    let node = cluster.node(arguments.node.node)?;
    if arguments.foreground {
        return show(&cluster, node);
    }
    if let Some(process) = mountpoint::gateway(&cluster, node) {
        return Err(Error::new(format!(
            "node {} is mounted already (process {})",
            node.number,
            process.pid()
        )));
    }
    wait_until_ready(&cluster, node, &["mount", "--foreground"], "gateway.log")?;
    say::line(format_args!("node {} is mounted at {}", node.number, cluster.tree(node).display()));
    Ok(ExitCode::SUCCESS)
}

pub(super) fn umount(arguments: &OneNode) -> Result<ExitCode> {
    let cluster = arguments.place.cluster()?;
    let node = cluster.node(arguments.node)?;
    let Some(process) = mountpoint::gateway(&cluster, node) else {
        return Err(Error::new(format!("node {} is not mounted", node.number)));
    };
    process.end(Signal::TERM, UNMOUNT)?;
    // A gateway that was killed has not done it.
    mountpoint::tidy(&cluster, node);
    say::line(format_args!("node {} is not mounted any more", node.number));
    Ok(ExitCode::SUCCESS)
}

/// The gateway's own process: serves the mount until it is told to end, or the mount is taken away.
fn show(cluster: &Cluster, node: &Node) -> Result<ExitCode> {
    super::speak();
    let _ = rustix::process::setsid();
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let version = env!("CARGO_PKG_VERSION");
    let connector = SocketConnector::new(host.clone(), node.socket.clone(), version, ROLE_GATEWAY, Some);
    let engine = LibFs::new(host.clone(), Arc::new(connector), Limits::default())
        .map_err(|why| Error::new(format!("cannot attach to node {}: {why}", node.number)))?;
    let tree = cluster.tree(node);
    let mounted = Arc::new(place(cluster, node, Arc::new(engine), &host)?);
    let told = mounted.clone();
    let listen = move || {
        if signals.forever().next().is_some()
            && let Err(why) = told.unmount()
        {
            tracing::error!(%why, "cannot unmount");
        }
    };
    host.spawn("signals", Box::new(listen))
        .map_err(|why| Error::new(format!("cannot start a thread: {why}")))?;
    say_ready()?;
    tracing::info!(node = node.number, "mounted");
    mounted.wait().map_err(Error::at("serve", &tree))?;
    let _ = std::fs::remove_file(gateway_file(cluster, node));
    mountpoint::tidy(cluster, node);
    Ok(ExitCode::SUCCESS)
}

/// Makes the folder and mounts there; others who would remove it again wait meanwhile.
fn place(cluster: &Cluster, node: &Node, engine: Arc<LibFs>, host: &Arc<dyn Host>) -> Result<Mounted> {
    let tree = cluster.tree(node);
    let _alone = alone(&cluster.dir)?;
    mountpoint::make(cluster, node)?;
    let mounted = serve(engine, host.clone(), &tree, &Options::default()).map_err(Error::at("mount", &tree));
    match &mounted {
        Ok(_) => Process::this()?.save(&gateway_file(cluster, node))?,
        Err(_) => mountpoint::remove(cluster, node),
    }
    mounted
}
