//! `hearth down`: end daemons, politely or as a power cut does.

use super::Down;
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::process::{Process, with_environment, with_mapping};
use rustix::process::Signal;
use std::process::ExitCode;
use std::time::Duration;

/// A daemon digests what its programs wrote before it ends.
const ORDERLY: Duration = Duration::from_secs(60);
/// The kernel frees the memory of a killed process.
const KILLED: Duration = Duration::from_secs(30);

pub(super) fn run(arguments: &Down) -> Result<ExitCode> {
    let cluster = arguments.place.cluster()?;
    let nodes: Vec<&Node> = match arguments.node {
        Some(number) => vec![cluster.node(number)?],
        None => cluster.settings.nodes.iter().collect(),
    };
    let mut ended = 0;
    for node in nodes {
        if stop(&cluster, node, arguments.hard)? {
            println!("node {} is down", node.number);
            ended += 1;
        } else {
            println!("node {} was down", node.number);
        }
    }
    if ended == 0 && arguments.node.is_some() {
        return Err(Error::new("nothing was running"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Ends one node; false if its daemon was not running and nothing was attached.
fn stop(cluster: &Cluster, node: &Node, hard: bool) -> Result<bool> {
    let daemon = Process::load(&cluster.folder(node).join("serve.pid"));
    if !hard {
        return match daemon {
            Some(daemon) => daemon.end(Signal::TERM, ORDERLY).map(|()| true),
            None => Ok(false),
        };
    }
    // The daemon first: what a program does after that has not been done, as after a power cut.
    let mut programs = with_environment(ENVIRONMENT_SOCKET, &node.socket);
    programs.extend(with_mapping(&node.pool.join("log-")));
    let any = daemon.is_some() || !programs.is_empty();
    for process in daemon.into_iter().chain(programs) {
        process.end(Signal::KILL, KILLED)?;
    }
    Ok(any)
}

/// The variable by which `run` tells a program's library where to attach.
pub(super) const ENVIRONMENT_SOCKET: &str = "HEARTH_SOCKET";
