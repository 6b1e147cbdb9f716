//! `hearth manager`: the embedded cluster manager in the foreground. It keeps its state in `DIR/manager`; it may be
//! killed and started again at any time. It ends on SIGTERM, and with an error when its medium fails: then it answers
//! no request any more, and has to be started again.

use super::Where;
use super::cluster::told;
use crate::chain;
use crate::cluster::{Cluster, SOCKET_PATH_BYTES_MAX};
use crate::error::{Error, Result};
use crate::key;
use crate::say;
use ::cluster::line::{EPOCH, settings};
use ::cluster::{Change, Embedded, Limits, Manager, Rules, SOCKET_NAME, Service};
use clap::Args;
use format::{ChangeNumber, NodeId};
use ipc::{Host, Lock, SystemHost, Time};
use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use transport::{Fabric, Listener};

/// Lease of a cluster for which none is asked: detection within a second and a bit, and room for a busy machine.
const LEASE_MS: u64 = 1000;

/// Drift bound of a cluster for which none is asked; quartz clocks stay within a fifth of it.
const DRIFT_PPM: u32 = 1000;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    place: Where,
    /// Where nodes of other machines reach it: an address of this machine, with a port or without for a free one
    /// [default: only this machine does, by DIR/manager/socket]
    #[arg(long, value_name = "IP[:PORT]")]
    listen: Option<String>,
    /// The cluster's key, which every node has to have; made if it is missing [default: DIR/key]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// How long a member may be silent before it is expelled, in ms, 10 to 3600000; only for a new cluster, an old one
    /// keeps its own [default: 1000]
    #[arg(long, value_name = "MS")]
    lease: Option<u64>,
    /// By how many parts in a million a clock may be wrong, at most 100000; only for a new cluster, an old one keeps its
    /// own [default: 1000]
    #[arg(long, value_name = "PPM")]
    drift: Option<u32>,
    /// Run the manager as a process of its own, and start it again when it dies: `hearth up --nodes` does it
    #[arg(long, hide = true, conflicts_with_all = ["listen", "key", "drift"])]
    keep: bool,
}

/// Where a cluster's manager keeps its files.
pub(crate) fn folder(dir: &Path) -> PathBuf {
    dir.join("manager")
}

/// Where a cluster's key is, if nothing else is said.
pub(crate) fn key_file(dir: &Path) -> PathBuf {
    dir.join("key")
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    super::speak();
    super::abort_on_panic();
    let dir = arguments.place.dir()?;
    if arguments.keep {
        return chain::manager::keep(&dir, arguments.lease);
    }
    let folder = folder(&dir);
    let ending = Arc::new(Ending::new());
    hear_signals(&ending)?;
    chain::manager::note_process(&dir)?;
    // All checks come before anything is made or changed.
    let key = arguments.key.clone().unwrap_or_else(|| key_file(&dir));
    let (rules, is_new) = rules(arguments, &folder)?;
    let had_key = key.exists();
    let listener = arguments.listen.as_deref().map(|at| listen(at, &key)).transpose()?;
    let address = listener.as_ref().map(Listener::address);
    if is_new && had_key && !is_first(&dir) {
        warn!(key = %key.display(), "a new cluster begins: there is a key, and no log of a manager in {}", folder.display());
    }
    let manager = Embedded::start(Arc::new(SystemHost), &folder, rules, Limits::default(), listener)
        .map_err(|why| not_started(why, &folder))?;
    ending.runs(manager.service());
    let socket = manager.socket().display().to_string();
    let cluster = format!("{:016x}", manager.service().cluster());
    let seen = manager
        .service()
        .watch(ChangeNumber::new(0), Time::from_ns(0))
        .map(|view| view.number)
        .unwrap_or_default();
    info!(cluster, socket, address, change = seen.get(), "the cluster manager serves");
    say::line(format_args!("serving at {}", address.as_deref().unwrap_or(&socket)));
    let service = manager.service().clone();
    // On a thread of its own: a reader of the log that has stopped must not stop the manager.
    let telling = SystemHost.spawn("changes", Box::new(move || tell_changes(&service, seen)));
    if let Err(why) = telling {
        warn!(%why, "changes are not told here, but by hearth cluster history");
    }
    let never = ChangeNumber::new(u64::MAX);
    // No view is newer: this ends when the manager does.
    while manager.service().watch(never, Time::from_ns(u64::MAX)).is_ok() {}
    let failure = manager.service().failure();
    manager.stop();
    match failure {
        Some(why) if why != ::cluster::Error::Failed => Err(Error::new(format!(
            "the cluster manager in {} cannot go on: {why}; see to it, then start it again",
            folder.display()
        ))),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Whether the cluster in a folder never had several nodes: `hearth up` makes the key first, and then the manager.
fn is_first(dir: &Path) -> bool {
    let has_pool = |cluster: &Cluster| {
        cluster.settings.nodes.iter().skip(1).any(|node| cluster.pool_made_file(node).exists())
    };
    Cluster::open(dir).is_ok_and(|cluster| !has_pool(&cluster))
}

/// Tells what is changed after a change, until the manager ends.
fn tell_changes(service: &Service, mut seen: ChangeNumber) {
    let forever = Time::from_ns(u64::MAX);
    while service.watch(seen, forever).is_ok() {
        let records = service.history(seen.next(), format::cluster::HISTORY_COUNT_MAX, forever);
        for record in records.into_iter().flatten() {
            if record.number != seen.next() {
                warn!(
                    after = seen.get(),
                    before = record.number.get(),
                    "there were more changes than could be told"
                );
            }
            let (change, epoch, what) = (record.number.get(), record.epoch.get(), told::words(&record));
            match record.change {
                Change::Complain { .. } | Change::Expel { .. } => warn!(change, epoch, "{what}"),
                _ => info!(change, epoch, "{what}"),
            }
            seen = record.number;
        }
    }
}

/// The process that a signal ends: none yet, or the manager.
struct Ending(Lock<Ends>);

#[derive(Default)]
struct Ends {
    service: Option<Arc<Service>>,
    /// There was a signal.
    asked: bool,
}

impl Ending {
    fn new() -> Self {
        Self(Lock::new(Arc::new(SystemHost), Ends::default()))
    }

    fn ask(&self) {
        let mut ends = self.0.lock();
        ends.asked = true;
        ends.look();
    }

    fn runs(&self, service: &Arc<Service>) {
        let mut ends = self.0.lock();
        ends.service = Some(service.clone());
        ends.look();
    }
}

impl Ends {
    fn look(&self) {
        if let Some(service) = self.service.as_ref().filter(|_| self.asked) {
            service.stop();
        }
    }
}

/// Starts the thread that a signal wakes. It ends with the process.
fn hear_signals(ending: &Arc<Ending>) -> Result<()> {
    // A file that may not grow is an error of the call that lets it, not the end.
    let too_large = Signal::XFSZ.as_raw();
    let mut signals = Signals::new([SIGTERM, SIGINT, too_large])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let ending = ending.clone();
    let body = move || {
        let signal = signals.forever().find(|signal| *signal != too_large);
        ending.ask();
        info!(?signal, "ending");
    };
    SystemHost
        .spawn("signals", Box::new(body))
        .map_err(|why| Error::new(format!("cannot start a thread: {why}")))
        .map(drop)
}

fn not_started(why: ::cluster::Error, folder: &Path) -> Error {
    match why {
        ::cluster::Error::Media(pmem::MediaError::Locked) => {
            Error::new(format!("another cluster manager runs in {}", folder.display()))
        }
        ::cluster::Error::Damaged(_) => Error::new(format!(
            "cannot start the cluster manager in {}: {why}; nothing was changed, and a backup can be put in its place",
            folder.display()
        )),
        why => Error::at("start the cluster manager in", folder)(why),
    }
}

/// The rules of the cluster: its own if it is there, else those that are asked for; and whether it is new.
fn rules(arguments: &Arguments, folder: &Path) -> Result<(Rules, bool)> {
    let socket = folder.join(SOCKET_NAME);
    if socket.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        return Err(Error::new(format!(
            "{} is too long for a socket's path ({SOCKET_PATH_BYTES_MAX} bytes): choose a shorter --dir",
            socket.display()
        )));
    }
    let lease = Duration::from_millis(arguments.lease.unwrap_or(LEASE_MS));
    let drift = arguments.drift.unwrap_or(DRIFT_PPM);
    let wanted = Rules::new(lease, drift).ok_or_else(|| {
        Error::new(match Rules::new(lease, DRIFT_PPM) {
            None => {
                format!("impossible rules: a lease has 10 ms to an hour, and not {} ms", lease.as_millis())
            }
            Some(_) => {
                format!("impossible rules: a drift is at most 100000 parts in a million, and not {drift}")
            }
        })
    })?;
    let Some(kept) = Embedded::rules(folder).map_err(|why| not_started(why, folder))? else {
        return Ok((wanted, true));
    };
    let other = arguments.lease.is_some_and(|_| kept.lease() != lease)
        || arguments.drift.is_some_and(|_| kept.drift_ppm() != drift);
    if other {
        return Err(Error::new(format!(
            "this cluster was made with a lease of {} ms and a drift of {} parts in a million, which stay",
            kept.lease().as_millis(),
            kept.drift_ppm()
        )));
    }
    Ok((kept, false))
}

/// The address at which nodes of other machines connect.
fn listen(at: &str, key: &Path) -> Result<Listener> {
    let (ip, port) = match (at.parse::<SocketAddr>(), at.parse::<IpAddr>()) {
        (Ok(address), _) => (address.ip(), address.port()),
        (_, Ok(ip)) => (ip, 0),
        _ => return Err(Error::new(format!("'{at}' is no address: IP or IP:PORT, and no host name"))),
    };
    let why = |why: &dyn std::fmt::Display| Error::new(format!("cannot listen at {at}: {why}"));
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    if ip.is_multicast() || is_broadcast {
        return Err(why(&"no single machine has this address"));
    }
    if ip.is_unspecified() {
        return Err(why(&"nodes are told this address: name the one of this machine by which they reach it"));
    }
    // Of others the kernel says best what is wrong with them, and nothing was made yet.
    drop(TcpListener::bind((ip, port)).map_err(|error| why(&error))?);
    let identity = key::read_or_make(key)?.identity(NodeId::MANAGER);
    let fabric = Fabric::tcp(&ip.to_string());
    let endpoint = fabric.endpoint(Arc::new(SystemHost), identity, EPOCH, settings()).map_err(|e| why(&e))?;
    endpoint.listen(&port.to_string()).map_err(|error| why(&error))
}
