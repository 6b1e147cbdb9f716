//! `hearth cluster`: shows the state of the cluster manager, either of the embedded one (by its socket, or over the
//! network with the cluster's key) or of one on ZooKeeper; and makes the two changes that an operator makes there: it
//! expels a member, and accepts a pool as the last copy.

use super::Where;
use super::manager::{folder, key_file};
use crate::chain;
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::key;
use crate::say;
use ::cluster::line::{EPOCH, knock, settings};
use ::cluster::{Change, Manager, Party, Place, Record, Refusal, Remote, SOCKET_NAME, View};
use clap::{Args, Subcommand};
use format::{ChangeNumber, NodeId};
use ipc::{Host, SystemHost, Time, Word};
use rustix::io::Errno;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use transport::Fabric;

mod accept_pool;
pub(super) mod told;

use told::{ChangeTold, MemberTold, StatusTold};

/// How long a manager may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// A wait of which people are told.
const LONG: Duration = Duration::from_secs(2);

/// Records asked for at once.
const PAGE: u32 = format::cluster::HISTORY_COUNT_MAX;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Epoch, members, subtrees with their chains: exit code 0 well, 1 degraded, waiting or unserved (see
    /// docs/cluster.md), 2 it cannot be told
    Status(Asked),
    /// The members: exit code 0 shown, 2 they cannot be shown
    Members(Asked),
    /// Remove a member that is silent, as soon as its last heartbeat counts no more: exit code 0 expelled, 1 it is alive
    /// or no member, 2 it cannot be done
    Expel(Expel),
    /// Accept the pool of a node that is up as the last copy, if the manager does not know it in its present state (see
    /// docs/replication.md): exit code 0 accepted, 1 refused, or without --yes; 2 it cannot be done
    AcceptPool(AcceptPool),
    /// The changes that are kept, oldest first: the last 1,024 of the embedded manager, on ZooKeeper all. Exit code 0 told,
    /// 2 it cannot be told
    History(History),
}

#[derive(Debug, Args)]
pub(super) struct Asked {
    #[command(flatten)]
    place: Where,
    /// Which manager: IP:PORT, a socket's path, or zookeeper://HOST:PORT,HOST:PORT/ROOT [default: the one in DIR/manager]
    #[arg(long, value_name = "ADDRESS")]
    manager: Option<String>,
    /// The cluster's key, for IP:PORT [default: DIR/key]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// For machines: docs/cluster.md has the fields
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Expel {
    #[command(flatten)]
    asked: Asked,
    /// The member's number, as `hearth cluster members` gives it
    #[arg(value_name = "NODE")]
    node: u32,
}

#[derive(Debug, Args)]
pub(super) struct AcceptPool {
    #[command(flatten)]
    asked: Asked,
    /// The node of the last copy, as `hearth cluster status` gives it
    #[arg(value_name = "NODE")]
    node: u32,
    /// The pool is certainly the newest state of the last copy. Without this the command only says what to consider
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Args)]
pub(super) struct History {
    #[command(flatten)]
    asked: Asked,
    /// Only this many of the newest [default: all that are kept]
    #[arg(long, value_name = "COUNT")]
    last: Option<u64>,
}

pub(super) fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Status(asked) => status(asked),
        Command::Members(asked) => members(asked),
        Command::Expel(expel) => self::expel(&expel.asked, NodeId::new(expel.node)),
        Command::AcceptPool(accept) => accept_pool::run(accept),
        Command::History(history) => self::history(&history.asked, history.last),
    }
}

/// The purpose for which a command connects to a manager.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Aim {
    Read,
    Expel,
}

fn soon() -> Time {
    SystemHost.now().after(ANSWER)
}

impl Asked {
    /// An error of the manager, or of the connection to it.
    fn failed(&self, why: ::cluster::Error) -> Error {
        let at = match (&self.manager, self.place.dir()) {
            (Some(named), _) => named.clone(),
            (None, Ok(dir)) => folder(&dir).join(SOCKET_NAME).display().to_string(),
            (None, Err(error)) => return error,
        };
        match why {
            ::cluster::Error::Unreachable => Error::new(format!(
                "the cluster manager at {at} does not answer (waited more than {} s): is it running?",
                ANSWER.as_secs()
            )),
            why => Error::new(format!("{at}: {why}")),
        }
    }

    /// The manager that is meant, for what this command does.
    fn connect(&self, aim: Aim) -> Result<Arc<dyn Manager>> {
        let dir = self.place.dir()?;
        let named = self.manager.as_deref();
        if let Some(rest) = named.and_then(|name| name.strip_prefix("zookeeper://")) {
            return zookeeper(rest, aim);
        }
        let place = match named {
            None => Place::Socket(socket(&folder(&dir).join(SOCKET_NAME))?),
            Some(path) if path.contains('/') => Place::Socket(socket(Path::new(path))?),
            Some(address) => self.node(address, &dir)?,
        };
        Ok(Arc::new(Remote::at(Arc::new(SystemHost), place)))
    }

    fn node(&self, address: &str, dir: &Path) -> Result<Place> {
        let to: SocketAddr = address.parse().map_err(|_| {
            Error::new(format!(
                "'{address}' is no manager: IP:PORT (no host name), a socket's path (with a slash), or \
                 zookeeper://HOST:PORT/ROOT"
            ))
        })?;
        if to.port() == 0 {
            return Err(Error::new(format!("{address} is no manager: no port is 0")));
        }
        let secret = key::read(&self.key.clone().unwrap_or_else(|| key_file(dir)))?;
        let why = |why: &dyn std::fmt::Display| Error::new(format!("cannot reach {address}: {why}"));
        // Nothing is sent: the kernel says which of our addresses it would send from.
        let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
        let own = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(to)?;
            socket.local_addr()
        });
        let own = own.map_err(|error| why(&error))?.ip().to_string();
        let endpoint = Fabric::tcp(&own)
            .endpoint(Arc::new(SystemHost), secret.identity(NodeId::OPERATOR), EPOCH, settings())
            .map_err(|error| why(&error))?;
        Ok(Place::Node { endpoint, address: address.to_owned() })
    }

    fn view(&self, manager: &dyn Manager) -> Result<Arc<View>> {
        let limit = soon();
        loop {
            // The present one, with no wait for a newer.
            match manager.watch(ChangeNumber::new(0), SystemHost.now()) {
                Err(::cluster::Error::Unreachable) if SystemHost.now() < limit => {}
                seen => return seen.map_err(|why| self.failed(why)),
            }
        }
    }

    /// Prints for machines or for people.
    fn tell<T: Serialize>(&self, told: &T, print: impl FnOnce(&T)) -> Result<()> {
        if !self.json {
            print(told);
            return Ok(());
        }
        let text = serde_json::to_string_pretty(told)
            .map_err(|why| Error::new(format!("cannot write the answer: {why}")))?;
        say::line(text);
        Ok(())
    }
}

/// Whether the folder in which a manager's folder would be is that of a cluster's nodes.
fn has_nodes(socket: &Path) -> bool {
    let cluster = socket.parent().and_then(Path::parent);
    cluster.is_some_and(|cluster| cluster.join("hearth.toml").exists())
}

/// The socket of a manager on this machine, if a manager listens there. Does not wait for one that is being restarted.
fn socket(path: &Path) -> Result<PathBuf> {
    let no_manager = |why: &str| {
        let path = path.display();
        Error::new(format!("{why} {path}: hearth manager runs one, --manager names another"))
    };
    let found = std::fs::metadata(path).map_err(|why| match why.kind() {
        ErrorKind::NotFound if has_nodes(path) => Error::new(format!(
            "there is no cluster manager at {}, as a cluster of one node has none: hearth status says how it is",
            path.display()
        )),
        ErrorKind::NotFound => no_manager("there is no cluster manager at"),
        _ => Error::at("reach the cluster manager at", path)(why),
    })?;
    if !found.file_type().is_socket() {
        return Err(Error::new(format!("{} is no cluster manager: it is no socket", path.display())));
    }
    match knock(path) {
        Err(Errno::CONNREFUSED) => Err(no_manager("the cluster manager has ended that listened at")),
        // Whatever else is wrong the connection says that is used.
        _ => Ok(path.to_owned()),
    }
}

#[cfg(feature = "zookeeper")]
fn zookeeper(rest: &str, aim: Aim) -> Result<Arc<dyn Manager>> {
    let (ensemble, root) = rest
        .split_once('/')
        .filter(|(ensemble, root)| !ensemble.is_empty() && !root.is_empty())
        .ok_or_else(|| Error::new("an ensemble is named zookeeper://HOST:PORT,HOST:PORT/ROOT"))?;
    let zoo =
        ::cluster::zookeeper::ZooKeeper::open(Arc::new(SystemHost), ensemble, &format!("/{root}"), soon())
            .map_err(|why| Error::new(format!("no cluster at zookeeper://{rest}: {why}")))?;
    if aim == Aim::Expel {
        // Its detector knows when a heartbeat was seen for long enough. A command that only reads must not expel
        // members.
        zoo.start_expeller().map_err(|why| Error::new(format!("zookeeper://{rest}: {why}")))?;
    }
    Ok(zoo)
}

#[cfg(not(feature = "zookeeper"))]
fn zookeeper(_rest: &str, _aim: Aim) -> Result<Arc<dyn Manager>> {
    Err(Error::new(
        "this program was built without ZooKeeper: cargo build --release -p hearth --features zookeeper",
    ))
}

fn status(asked: &Asked) -> Result<ExitCode> {
    let manager = asked.connect(Aim::Read)?;
    let mut told = StatusTold::of(&*asked.view(&*manager)?);
    if asked.manager.is_none()
        && let Ok((cluster, _)) = Cluster::open_or_found(&asked.place.dir()?)
    {
        told.add_problem(chain::manager::problem(&cluster));
    }
    asked.tell(&told, StatusTold::print)?;
    Ok(ExitCode::from(u8::from(told.degraded)))
}

fn members(asked: &Asked) -> Result<ExitCode> {
    let manager = asked.connect(Aim::Read)?;
    let view = asked.view(&*manager)?;
    let told: Vec<MemberTold> =
        view.members.iter().map(|(node, member)| MemberTold::of(*node, member, &view)).collect();
    asked.tell(&told, |told| {
        if told.is_empty() {
            say::aside("no members");
        }
        told.iter().for_each(MemberTold::print);
    })?;
    Ok(ExitCode::SUCCESS)
}

fn history(asked: &Asked, last: Option<u64>) -> Result<ExitCode> {
    let manager = asked.connect(Aim::Read)?;
    let newest = asked.view(&*manager)?.number.get();
    let mut from = last.map_or(1, |last| newest.saturating_sub(last) + 1);
    let mut records: Vec<Record> = Vec::new();
    while from <= newest {
        let page = manager.history(ChangeNumber::new(from), PAGE, soon()).map_err(|why| asked.failed(why))?;
        // The oldest may be gone: then the page begins later.
        let Some(end) = page.last().map(|record| record.number.get()) else { break };
        records.extend(page);
        from = end + 1;
    }
    let told: Vec<ChangeTold> = records.iter().map(ChangeTold::of).collect();
    asked.tell(&told, |told| told.iter().for_each(ChangeTold::print))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Expelled {
    node: u32,
    life: u32,
}

/// Says why nothing was changed.
fn refused(why: std::fmt::Arguments<'_>) -> ExitCode {
    say::aside(format_args!("hearth: {why}"));
    ExitCode::from(1)
}

/// Expels a member as soon as its heartbeat has been seen for as long as the rules ask.
fn expel(asked: &Asked, node: NodeId) -> Result<ExitCode> {
    let manager = asked.connect(Aim::Expel)?;
    let view = asked.view(&*manager)?;
    let Some(member) = view.members.get(&node) else {
        return Ok(refused(format_args!("node {node} is no member")));
    };
    let party = Party { node, life: member.life };
    let gone = || {
        asked.tell(&Expelled { node: node.get(), life: party.life.get() }, |_| {
            say::line(format_args!("node {node} is expelled"));
        })
    };
    let end = SystemHost.now().after(view.rules.expel_after() * 2 + ANSWER);
    let never = Word::new(0);
    // By the start of the manager, which a version's upper half is: one that starts anew begins with new versions.
    let mut first = BTreeMap::new();
    let mut epoch = view.epoch;
    let mut is_told = view.rules.expel_after() < LONG;
    while SystemHost.now() < end {
        let beat = match manager.beat_of(party, soon()) {
            Err(::cluster::Error::Refused(Refusal::NotMember)) => return gone().map(|()| ExitCode::SUCCESS),
            beat => beat.map_err(|why| asked.failed(why))?,
        };
        let alive = *first.entry(beat.get() >> 32).or_insert(beat) != beat;
        match manager.propose(&Change::Expel { party, beat, epoch }, soon()) {
            Ok(_) | Err(::cluster::Error::Refused(Refusal::NotMember)) => {
                return gone().map(|()| ExitCode::SUCCESS);
            }
            Err(::cluster::Error::Refused(Refusal::StaleEpoch(present))) => epoch = present,
            Err(::cluster::Error::Refused(Refusal::TooEarly | Refusal::StaleBeat(_))) if !alive => {
                if !std::mem::replace(&mut is_told, true) {
                    let most = view.rules.expel_after().as_secs_f64().ceil();
                    say::aside(format_args!(
                        "node {node} may still think that it may serve: waiting, for {most} s at most"
                    ));
                }
                let pause = SystemHost.now().after(view.rules.lease() / 20);
                let _ = SystemHost.wait(&never, 0, Some(pause));
            }
            Err(::cluster::Error::Refused(Refusal::TooEarly | Refusal::StaleBeat(_))) => {
                return Ok(refused(format_args!(
                    "node {node} is alive: it wrote a heartbeat just now; stop its daemon first"
                )));
            }
            // Asked again: it may have been done.
            Err(::cluster::Error::Unknown) => {}
            Err(why) => return Err(asked.failed(why)),
        }
    }
    Err(Error::new(format!("node {node} could not be expelled in time: is the manager well?")))
}
