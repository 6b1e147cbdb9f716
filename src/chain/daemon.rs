//! The daemon of a node of a cluster of several nodes. Its pool is opened as a standby and follows the head from there
//! on; the view of the cluster manager decides which part the node has ([`super::member`]). On SIGTERM it ends in order
//! and leaves the cluster.
//!
//! A node that must not serve any more ends its process at once, as by SIGKILL: a process that is gone cannot
//! acknowledge anything. Its keeper starts it again, as a standby.

use super::comparison::TreesCompared;
use super::links::Links;
use super::member::{Member, Parts};
use super::orders::{self, MoveOrder, Obey};
use super::settings::ChainSettings;
use super::standby_listener::StandbyListener;
use super::{owner, pool_watch, remedy};
use crate::cluster::{Cluster, Node};
use crate::commands::daemon::{
    End, answer_status, config, forward_signals, give_up_lost_pool, guarded_medium, kept_listener,
    listen_for_questions, listen_for_users, make_new_pool, note_failure, of_daemon, own_listener, spawn,
};
use crate::commands::manager::{folder, key_file};
use crate::commands::up::say_ready;
use crate::disk::{DiskStall, Opening};
use crate::error::{Error, Result};
use crate::key;
use crate::pool_space;
use crate::process::Process;
use crate::standby_lock::StandbyLock;
use cluster::{Place, Remote, SOCKET_NAME};
use format::NodeId;
use ipc::socket::Listener;
use ipc::{Host, SystemHost};
use sharedfs::Standby;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use tracing::{error, info};

/// The node with its pool.
pub struct Begun {
    pub cluster: Cluster,
    pub node: Node,
    pub chain: ChainSettings,
    pub standby: Standby,
    pub standby_programs: StandbyLock,
    pub disk: Arc<DiskStall>,
}

/// Runs the daemon until it ends.
///
/// # Errors
/// Why it could not begin.
pub fn run(cluster: &Cluster, node: &Node, chain: &ChainSettings) -> Result<ExitCode> {
    let (sender, ends) = channel();
    forward_signals(sender.clone())?;
    // First of all: its socket is where programs wait meanwhile.
    let (listener, kept) = match kept_listener()? {
        Some(listener) => (listener, true),
        None => (own_listener(cluster, node)?, false),
    };
    owner::check(cluster, node).inspect_err(|why| note_failure(cluster, node, &why.to_string()))?;
    let begun = begin((cluster, node, chain), listener, sender);
    let tell = |why: &Error| note_failure(cluster, node, &why.to_string());
    let member = Arc::new(begun.inspect_err(tell)?);
    let (control, commands) = (listen_for_questions(cluster, node)?, orders::listen(cluster, node)?);
    let users = listen_for_users(cluster, node)?;
    let process = Process::this()?;
    process.save(&cluster.pid_file(node))?;
    say_ready()?;
    let asked = member.clone();
    answer_status(control, move || asked.status())?;
    let asked = member.clone();
    answer_status(users, move || asked.status().for_all_users())?;
    orders::obey(commands, member.clone())?;
    let (running, ends_process, watches, notes) =
        (member.clone(), member.clone(), member.clone(), member.clone());
    spawn("end", move || ends_process.end_when_told())?;
    spawn("disk-notes", move || notes.note_hung_disk())?;
    spawn("disk-lead", move || watches.watch_disk())?;
    pool_watch::begin(&member)?;
    member.probe_disk()?;
    spawn("chain", move || running.run())?;
    info!(node = node.number, "holds its pool");
    let code = end((cluster, node), &member, &ends);
    let (control, orders, lead) = (cluster.control(node), cluster.orders(node), cluster.lead(node));
    let files = [&control, &orders, &lead, &node.socket].map(PathBuf::as_path);
    process.remove_files(&cluster.pid_file(node), if kept { &files[..3] } else { &files });
    Ok(code)
}

impl Obey for Member {
    fn move_to(&self, order: &MoveOrder) -> std::result::Result<(), String> {
        self.give_lead_away(order)
    }

    fn compare(
        &self,
        with: u32,
        told: &mut dyn FnMut(u64, u64),
    ) -> std::result::Result<TreesCompared, String> {
        self.compare_with(with, told)
    }
}

/// Waits until the daemon is to end.
fn end((cluster, node): (&Cluster, &Node), member: &Member, ends: &Receiver<End>) -> ExitCode {
    match ends.recv().expect("the threads that send never end") {
        End::Signal(signal) => {
            info!(signal, "ending");
            member.stop();
            ExitCode::SUCCESS
        }
        End::Failed(failure) => {
            error!(failure, "ending");
            note_failure(cluster, node, &failure);
            member.leave();
            ExitCode::FAILURE
        }
    }
}

/// Opens the pool, made first if the folder is empty, and listens for other nodes.
fn begin(
    (cluster, node, chain): (&Cluster, &Node, &ChainSettings),
    listener: Listener,
    ends: Sender<End>,
) -> Result<Member> {
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    give_up_lost_pool(cluster, node)?;
    let medium = guarded_medium(cluster, node)?;
    let disk = DiskStall::watch(&medium, &node.pool)?;
    let opening = Opening::begin(cluster, node, &disk)?;
    make_new_pool(&medium, cluster, node)?;
    let standby = Standby::open(host.clone(), &medium, config(cluster)).map_err(|why| {
        let remedy = remedy::of_pool(cluster, node, &why);
        remedy::with(remedy)(Error::at("open", &node.pool)(why))
    })?;
    let pool = standby.pool().ok_or_else(|| Error::new("the standby has no pool"))?;
    let id = NodeId::new(node.number);
    opening.end();
    standby.start().map_err(of_daemon("start"))?;
    let standby_programs = StandbyLock::open(cluster, node)?;
    let secret = key::read(&key_file(&cluster.dir)).map_err(remedy::with(remedy::of_key()))?;
    let without_room = remedy::without_room(cluster, node);
    let links = Links::open(chain.address, &secret, id, (&standby, without_room))
        .map_err(remedy::with(remedy::of_address(chain.address)))?;
    let socket = folder(&cluster.dir).join(SOCKET_NAME);
    let manager = Arc::new(Remote::at(host, Place::Socket(socket)));
    pool_space::leave(cluster, node, &medium);
    let (cluster, node, chain) = (cluster.clone(), node.clone(), *chain);
    let begun = Begun { cluster, node, chain, standby, standby_programs, disk };
    let listener = StandbyListener::open(listener)?;
    Ok(Member::new(Parts { begun, medium, pool, links, listener, manager, ends }))
}
