//! `hearth manager`: the embedded cluster manager in the foreground. What it keeps is in `DIR/manager`; it may be killed
//! and started again at any time. It ends on SIGTERM, and with an error when its medium fails: then nothing is answered
//! any more, and it is to be started anew.

use super::Where;
use crate::error::{Error, Result};
use crate::key;
use crate::say;
use ::cluster::line::{EPOCH, MANAGER, settings};
use ::cluster::{Embedded, Limits, Manager, Rules};
use clap::Args;
use format::ChangeNumber;
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time, Word};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tracing::info;
use transport::Fabric;

/// Lease of a cluster for which none is asked: detection within a second and a bit, and room for a busy machine.
const LEASE_MS: u64 = 1000;

/// Drift bound of a cluster for which none is asked; quartz clocks stay within a fifth of it.
const DRIFT_PPM: u32 = 1000;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    place: Where,
    /// Where nodes of other machines reach it: an address of this machine, with a port or without for a free one
    /// [default: only this machine does, by DIR/manager/socket]
    #[arg(long, value_name = "IP[:PORT]")]
    listen: Option<String>,
    /// The cluster's key, which every node has to have; made if it is missing [default: DIR/key]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// How long a member may be silent before it is expelled, in ms; only for a new cluster [default: 1000]
    #[arg(long, value_name = "MS")]
    lease: Option<u64>,
    /// By how many parts in a million a clock may be wrong; only for a new cluster [default: 1000]
    #[arg(long, value_name = "PPM")]
    drift: Option<u32>,
}

/// Where a cluster's manager keeps its files.
pub(super) fn folder(dir: &Path) -> PathBuf {
    dir.join("manager")
}

/// Where a cluster's key is, if nothing else is said.
pub(super) fn key_file(dir: &Path) -> PathBuf {
    dir.join("key")
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    super::speak();
    let dir = arguments.place.dir()?;
    let signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let mut manager = start(arguments, &folder(&dir))?;
    let address = match &arguments.listen {
        Some(at) => Some(listen(&mut manager, at, arguments.key.clone().unwrap_or_else(|| key_file(&dir)))?),
        None => None,
    };
    let socket = manager.socket().display().to_string();
    let cluster = format!("{:016x}", manager.service().cluster());
    info!(cluster, socket, address, "the cluster manager serves");
    say::line(format_args!("serving at {}", address.as_deref().unwrap_or(&socket)));
    let asked = wait(&manager, signals)?;
    manager.stop();
    if asked {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Error::new("the cluster manager cannot write its log any more: see to its disk, then start it again"))
}

fn start(arguments: &Arguments, folder: &Path) -> Result<Embedded> {
    let lease = Duration::from_millis(arguments.lease.unwrap_or(LEASE_MS));
    let wanted = Rules::new(lease, arguments.drift.unwrap_or(DRIFT_PPM)).ok_or_else(|| {
        Error::new(
            "impossible rules: a lease has 10 ms to an hour, a drift at most 100000 parts in a million",
        )
    })?;
    let manager = Embedded::start(Arc::new(SystemHost), folder, wanted, Limits::default()).map_err(
        |why| match why {
            ::cluster::Error::Media(pmem::MediaError::Locked) => {
                Error::new(format!("another cluster manager runs in {}", folder.display()))
            }
            why => Error::at("start the cluster manager in", folder)(why),
        },
    )?;
    let view = manager.service().watch(ChangeNumber::new(0), SystemHost.now());
    let rules = view.map_err(Error::at("read the view in", folder))?.rules;
    let other = arguments.lease.is_some_and(|_| rules.lease() != lease)
        || arguments.drift.is_some_and(|drift| rules.drift_ppm() != drift);
    if other {
        manager.stop();
        return Err(Error::new(format!(
            "this cluster was made with a lease of {} ms and a drift of {} parts in a million, which stay",
            rules.lease().as_millis(),
            rules.drift_ppm()
        )));
    }
    Ok(manager)
}

/// Has nodes of other machines let in; gives where.
fn listen(manager: &mut Embedded, at: &str, key: PathBuf) -> Result<String> {
    let (ip, port) = match (at.parse::<SocketAddr>(), at.parse::<IpAddr>()) {
        (Ok(address), _) => (address.ip(), address.port()),
        (_, Ok(ip)) => (ip, 0),
        _ => return Err(Error::new(format!("{at} is no address: IP or IP:PORT"))),
    };
    let identity = key::read_or_make(&key)?.identity(MANAGER);
    let why = |why: &dyn std::fmt::Display| Error::new(format!("cannot listen at {at}: {why}"));
    let fabric = Fabric::tcp(&ip.to_string());
    let endpoint = fabric.endpoint(Arc::new(SystemHost), identity, EPOCH, settings()).map_err(|e| why(&e))?;
    manager.listen(&endpoint, &port.to_string()).map_err(|error| why(&error))
}

/// Waits until a signal asks for the end, or the manager cannot go on; true for the signal.
fn wait(manager: &Embedded, mut signals: Signals) -> Result<bool> {
    let asked = Arc::new(Word::new(0));
    let (theirs, service) = (asked.clone(), manager.service().clone());
    let body = move || {
        let signal = signals.forever().next();
        info!(?signal, "ending");
        // Release: pairs with the load below.
        theirs.store(1, Ordering::Release);
        service.stop();
    };
    // It ends with the process.
    let _waits = SystemHost
        .spawn("signals", Box::new(body))
        .map_err(|why| Error::new(format!("cannot start a thread: {why}")))?;
    let never = ChangeNumber::new(u64::MAX);
    // No view is newer: this ends when the manager does.
    while manager.service().watch(never, Time::from_ns(u64::MAX)).is_ok() {}
    // Acquire: pairs with the store above.
    Ok(asked.load(Ordering::Acquire) == 1)
}
