//! The embedded cluster manager of a cluster on this machine: a process of its own, and a keeper that starts it again when it
//! dies. Members go on for as long as their heartbeats hold; so one that is away for a moment is not missed.
//!
//! The manager outlives the death of its keeper; it is only not started again. A new keeper takes over the manager that it finds:
//! it waits for the end of that process, which is no child of its own, and starts the next ones itself.

use crate::cluster::Cluster;
use crate::commands::daemon::spawn;
use crate::commands::manager::folder;
use crate::commands::up::{run_in_background, say_ready};
use crate::error::{Error, Result};
use crate::log_file::former;
use crate::obstacles;
use crate::presence::Presence;
use crate::process::{Process, this_program};
use crate::say::{self, quoted};
use cluster::SOCKET_NAME;
use cluster::line::knock;
use ipc::{Host, SystemHost, Word};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tracing::{info, warn};

/// How long the manager may take to end in order.
const ORDERLY: Duration = Duration::from_secs(10);
/// Pause before it is started again; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// A manager that lived so long begins with the shortest pause again.
const LONG: Duration = Duration::from_secs(10);
/// Numbers in the keeper's word for the process: there is none; it is to end.
const NONE: i32 = 0;
const ENDING: i32 = -1;

/// How a manager knows that a keeper started it.
const ENVIRONMENT_KEPT: &str = "HEARTH_KEPT";

fn pid_file(dir: &Path) -> PathBuf {
    dir.join("manager.pid")
}

fn keeper_pid_file(dir: &Path) -> PathBuf {
    dir.join("manager-keeper.pid")
}

/// Holds what the manager and its keeper say.
pub fn log_file(dir: &Path) -> PathBuf {
    dir.join("manager.log")
}

/// The files beside the manager's folder.
pub fn files(dir: &Path) -> [PathBuf; 4] {
    let log = log_file(dir);
    [pid_file(dir), keeper_pid_file(dir), former(&log), log]
}

/// Whether there is a manager, or a keeper of one.
pub fn runs(cluster: &Cluster) -> bool {
    let [process, keeper, ..] = files(&cluster.dir);
    [process, keeper].iter().any(|file| Process::load(file).is_some()) || answers(cluster)
}

/// A sentence about a manager that would not be started again if it died, or that does not run.
pub fn problem(cluster: &Cluster) -> Option<String> {
    let dir = quoted(&cluster.dir);
    match [keeper_pid_file(&cluster.dir), pid_file(&cluster.dir)].map(|file| Process::load(&file)) {
        [Some(keeper), _] if keeper.is_stopped() => Some(format!(
            "the keeper of the cluster manager (process {pid}) is stopped: nothing starts the manager again when it dies; kill -CONT \
             {pid} lets it go on",
            pid = keeper.pid()
        )),
        [None, Some(_)] => Some(format!(
            "the keeper of the cluster manager is gone: nothing starts the manager again when it dies; hearth up --dir {dir} gives it \
             another keeper"
        )),
        [None, None] if !answers(cluster) => Some(format!(
            "no cluster manager runs, and without one the nodes stop: hearth up --dir {dir} starts it"
        )),
        _ => None,
    }
}

/// Whether a manager listens at the socket.
pub fn answers(cluster: &Cluster) -> bool {
    knock(&folder(&cluster.dir).join(SOCKET_NAME)).is_ok()
}

/// Starts the manager, if it does not run; one whose keeper died gets another keeper.
///
/// # Errors
/// It does not start: why.
pub fn start(cluster: &Cluster) -> Result<()> {
    let dir = &cluster.dir;
    let Some(chain) = &cluster.settings.chain else { return Ok(()) };
    let lost_its_keeper = Process::load(&pid_file(dir)).is_some();
    // A manager that the operator runs is as good.
    if Process::load(&keeper_pid_file(dir)).is_some() || !lost_its_keeper && answers(cluster) {
        return Ok(());
    }
    let arguments: Vec<OsString> = vec![
        "manager".into(),
        "--keep".into(),
        "--dir".into(),
        dir.into(),
        "--lease".into(),
        chain.lease_ms.to_string().into(),
    ];
    let log = log_file(dir);
    match run_in_background(&arguments, &log)? {
        Ok(()) if lost_its_keeper => {
            say::line("the cluster manager has a keeper again");
            Ok(())
        }
        // A command that was killed may have started one just before.
        Err(_) if answers(cluster) => Ok(()),
        started => started.map_err(|why| {
            let obstacles = obstacles::of_manager(cluster);
            let log = log.display();
            Error::new(format!("the cluster manager did not start: {why} (all of it: {log}){obstacles}"))
        }),
    }
}

/// Ends the manager; by force as a power cut does.
///
/// # Errors
/// It does not end.
pub fn stop(cluster: &Cluster, hard: bool) -> Result<()> {
    let signal = if hard { Signal::KILL } else { Signal::TERM };
    end(&keeper_pid_file(&cluster.dir), signal)?;
    end(&pid_file(&cluster.dir), signal)
}

fn end(file: &Path, signal: Signal) -> Result<()> {
    if let Some(process) = Process::load(file) {
        process.end(signal, ORDERLY)?;
    }
    let _ = fs::remove_file(file);
    Ok(())
}

/// `hearth manager --keep`: runs the manager, or takes over the one that runs, and starts it again when it dies.
///
/// # Errors
/// The first one does not serve.
pub fn keep(dir: &Path, lease_ms: Option<u64>) -> Result<ExitCode> {
    let _ = rustix::process::setsid();
    let process = Arc::new(AtomicI32::new(NONE));
    let (sender, events) = channel();
    end_on_signal(process.clone(), sender.clone())?;
    let keeper = Process::this()?;
    keeper.save(&keeper_pid_file(dir))?;
    let mut pause = PAUSE_MIN;
    let mut told = false;
    let mut place = None;
    if let Some(manager) = Process::load(&pid_file(dir)) {
        place = Some(Presence::of(&folder(dir))?);
        told = true;
        let is_told_to_end = || process.load(Ordering::Acquire) == ENDING;
        let ended = adopt(&manager, (sender, &events), is_told_to_end);
        if ended.is_err() || is_told_to_end() {
            keeper.remove_files(&keeper_pid_file(dir), &[]);
            return ended.map(|()| ExitCode::SUCCESS);
        }
        still_in_place(&keeper, dir, place.as_ref())?;
        warn!("the cluster manager ended: starting it again");
    }
    loop {
        let begin = SystemHost.now();
        let mut child = begin_manager(dir, lease_ms)?;
        let pid = i32::try_from(child.id()).unwrap_or(NONE);
        let ends = process.compare_exchange(NONE, pid, Ordering::AcqRel, Ordering::Acquire).is_err();
        if ends {
            signal(pid);
        }
        let serves = serves(&mut child);
        if serves && !told {
            // From here on it may be removed.
            place = Some(Presence::of(&folder(dir))?);
            say_ready()?;
            told = true;
        }
        let how = child.wait().map_err(|why| Error::new(format!("cannot wait for the manager: {why}")))?;
        let ended = process.compare_exchange(pid, NONE, Ordering::AcqRel, Ordering::Acquire).is_err();
        if ended || ends || !told {
            keeper.remove_files(&keeper_pid_file(dir), &[]);
            return Ok(if told { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        still_in_place(&keeper, dir, place.as_ref())?;
        warn!(%how, "the cluster manager ended: starting it again");
        pause = if SystemHost.now().since(begin) > LONG { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(pause)));
        if process.load(Ordering::Acquire) == ENDING {
            keeper.remove_files(&keeper_pid_file(dir), &[]);
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Takes over a manager whose keeper died: returns when it has ended, by itself or, after a signal, in order.
fn adopt(
    manager: &Process,
    (sender, events): (Sender<()>, &Receiver<()>),
    is_told_to_end: impl Fn() -> bool,
) -> Result<()> {
    let Some(waited) = manager.descriptor() else { return say_ready() };
    spawn("manager", move || {
        while poll(&mut [PollFd::new(&waited, PollFlags::IN)], None) == Err(Errno::INTR) {}
        // The receiver is gone when the keeper itself ends.
        let _ = sender.send(());
    })?;
    info!(pid = manager.pid(), "took over the cluster manager that runs");
    say_ready()?;
    // An error would be a thread for signals that has ended, and it never does.
    let _ = events.recv();
    if is_told_to_end() { manager.end(Signal::TERM, ORDERLY) } else { Ok(()) }
}

/// Refuses to start a manager in another folder, where it would begin a new cluster.
fn still_in_place(keeper: &Process, dir: &Path, place: Option<&Presence>) -> Result<()> {
    let Some(place) = place.filter(|place| !place.is_in_place()) else { return Ok(()) };
    keeper.remove_files(&keeper_pid_file(dir), &[]);
    let path = place.path.display();
    Err(Error::new(format!("the cluster manager ended, and {path} is gone: it is not started again")))
}

fn begin_manager(dir: &Path, lease_ms: Option<u64>) -> Result<Child> {
    let mut command = this_program();
    command.args([Path::new("manager"), Path::new("--dir"), dir]);
    if let Some(lease_ms) = lease_ms {
        command.args(["--lease", &lease_ms.to_string()]);
    }
    command.env(ENVIRONMENT_KEPT, "1").stdin(Stdio::null()).stdout(Stdio::piped());
    command.spawn().map_err(|why| Error::new(format!("cannot start a manager: {why}")))
}

/// Waits until the manager says that it serves; false if it ends first.
fn serves(child: &mut Child) -> bool {
    let Some(stdout) = child.stdout.take() else { return false };
    let mut said = String::new();
    let heard = BufReader::new(stdout).read_line(&mut said);
    heard.is_ok() && said.starts_with("serving at")
}

/// A signal to the keeper ends the manager, and then the keeper.
fn end_on_signal(process: Arc<AtomicI32>, sender: Sender<()>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    spawn("signals", move || {
        for _ in signals.forever() {
            info!("ending");
            // A manager that is being started just now is ended by the thread that starts it.
            signal(process.swap(ENDING, Ordering::AcqRel));
            // A keeper that has not taken a manager over listens to nothing.
            let _ = sender.send(());
        }
    })
}

fn signal(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid).filter(|_| pid > 0) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

/// A manager that a keeper started says for `hearth down` which process it is.
///
/// # Errors
/// It cannot be written down.
pub fn note_process(dir: &Path) -> Result<()> {
    if std::env::var_os(ENVIRONMENT_KEPT).is_none() {
        return Ok(());
    }
    Process::this()?.save(&pid_file(dir))
}
