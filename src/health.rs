//! The state of a node, as another process can know it: the answer of its daemon, and which of its processes live.
//! Every question has an answer within [`PATIENCE`], also if the daemon does not answer.

use crate::cluster::{Cluster, Node};
use crate::daemon_lock;
use crate::process::Process;
use crate::say::quoted;
use crate::status::{NodeStatus, Unanswered, ask};
use ipc::{Host, SystemHost, Word};
use std::time::Duration;

/// How long a daemon may take to answer before it counts as one that does not.
pub const PATIENCE: Duration = Duration::from_millis(1500);
/// Pause before the processes of a node are looked at again.
const LOOK: Duration = Duration::from_millis(10);

/// How a node is.
#[derive(Debug)]
pub enum NodeHealth {
    /// Its daemon answers.
    Answers(Box<NodeStatus>),
    /// Its daemon runs, and does not answer.
    Silent(Process),
    /// No daemon serves, and one is being started: its keeper runs, or it holds the node's lock.
    Starting {
        /// There was a daemon before.
        again: bool,
    },
    /// Neither a keeper nor a daemon runs.
    Down,
    /// This user may not ask: why.
    Unknown(String),
}

/// Asks the daemon of a node, and looks at its processes if it does not answer.
pub fn look(cluster: &Cluster, node: &Node) -> NodeHealth {
    let until = SystemHost.now().after(PATIENCE);
    loop {
        let left = until.since(SystemHost.now()).max(LOOK);
        let answer = ask(&cluster.control(node), left);
        let daemon = Process::load(&cluster.pid_file(node));
        match (answer, daemon) {
            (Ok(status), _) => return NodeHealth::Answers(Box::new(status)),
            (Err(Unanswered::Forbidden(why)), _) => return NodeHealth::Unknown(why),
            (Err(Unanswered::Silent), Some(daemon)) => return NodeHealth::Silent(daemon),
            (Err(_), None) => return without_daemon(cluster, node),
            // It begins or ends just now, or its socket was removed.
            (Err(Unanswered::Absent(_)), Some(daemon)) if SystemHost.now() >= until => {
                return NodeHealth::Silent(daemon);
            }
            (Err(Unanswered::Absent(_)), Some(_)) => {
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
            }
        }
    }
}

fn without_daemon(cluster: &Cluster, node: &Node) -> NodeHealth {
    if Process::load(&cluster.keeper_pid_file(node)).is_none() {
        // A daemon whose keeper died may not serve yet.
        let begins = !daemon_lock::holders(cluster, node).is_empty();
        return if begins { NodeHealth::Starting { again: false } } else { NodeHealth::Down };
    }
    // A keeper begins without them: a daemon that died leaves its pid file, one that failed the reason.
    let again = cluster.pid_file(node).exists() || cluster.failure_file(node).exists();
    NodeHealth::Starting { again }
}

/// A sentence on a daemon that does not answer, and what can be done.
pub fn silence(cluster: &Cluster, node: &Node, daemon: &Process) -> String {
    let (pid, dir) = (daemon.pid(), quoted(&cluster.dir));
    let why = if daemon.is_ending() {
        return format!(
            "process {pid} has ended, but for a thread that waits for its disk, and that no signal reaches: when the disk answers, or is \
             removed, the node is started again"
        );
    } else if daemon.is_stopped() {
        format!("it is stopped, and kill -CONT {pid} lets it go on")
    } else {
        format!("it is busy, or hangs: see {}", cluster.folder(node).join("serve.log").display())
    };
    format!("process {pid} does not answer: {why}; hearth down --hard --dir {dir} ends it at once")
}
