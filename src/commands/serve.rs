//! `hearth serve`: keeps a node up. It holds the socket to which programs connect, runs the daemon (`hearth daemon`) as
//! a child with that socket as standard input, and starts it again when it dies.
//!
//! A daemon that dies while it serves is replaced at once; programs stall until then, and go on. One that does not get
//! as far as serving, or dies of itself soon after, is tried again after pauses, and given up after [`ATTEMPTS`] in a
//! row; if it is the first, the command that started the node says why, and that is all. SIGTERM ends the daemon in order
//! and then the keeper; so does the removal of the node's folder, since no command reaches the node after that.
//!
//! A daemon outlives its keeper's death; it is only not started again. A new keeper takes over the daemon that it finds: it
//! waits for the end of that process, which is no child of its own, and then makes a socket anew for the next one. The
//! lock that daemons hold ([`crate::daemon_lock`]) tells it also of a daemon that begins; that one it waits for.

use super::OneNode;
use super::daemon::listen;
use super::up::{READY, say_ready};
use crate::cluster::{Cluster, Node};
use crate::daemon_lock::{self, DaemonLock};
use crate::error::{Error, Result};
use crate::presence::Presence;
use crate::process::{Process, this_program};
use crate::spare::Spare;
use ipc::{Host, SystemHost, Word};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use tracing::{error, info, warn};

/// How often in a row a daemon may die before it serves, or soon after; with the pauses, about a minute.
const ATTEMPTS: u32 = 20;
/// A daemon that dies of itself sooner after it began to serve would do so for ever.
const SOON: Duration = Duration::from_secs(10);
/// How long a keeper that begins may take to say which process it is, and how often it is looked for.
const BEGINS: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);
/// How long the daemon of another keeper may take to serve, or to end, before that is said.
const OTHER_BEGINS: Duration = Duration::from_secs(60);
/// How often the keeper looks whether the node's folder was removed.
const FOLDER_LOOK: Duration = Duration::from_millis(500);
/// Pause before the second attempt; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// An event for which a keeper waits.
enum Event {
    /// The daemon serves.
    Ready,
    /// The daemon is gone.
    Ended(ExitStatus),
    /// The daemon that another keeper started is gone.
    AdoptedEnded,
    /// The keeper is to end.
    Signal,
    /// The node's folder was removed.
    FolderRemoved,
}

/// Keeps keepers from the node for as long as it is held.
pub(super) fn alone(cluster: &Cluster, node: &Node) -> Result<fs::File> {
    let path = cluster.folder(node);
    let folder = fs::File::open(&path).map_err(Error::at("open", &path))?;
    if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
        return Ok(folder);
    }
    // One that has just begun does not say yet which process it is.
    let until = SystemHost.now().after(BEGINS);
    loop {
        if let Some(process) = Process::load(&cluster.keeper_pid_file(node)) {
            let (number, pid) = (node.number, process.pid());
            return Err(Error::new(format!("node {number} has a keeper already (process {pid})")));
        }
        if SystemHost.now() >= until {
            return Err(Error::new(format!("another process holds the lock of {}", path.display())));
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
    }
}

/// The daemon that runs now.
struct Running {
    /// Not its number: that may be another's by the time a signal is sent.
    process: OwnedFd,
}

/// A keeper at work.
struct Keeper<'a> {
    cluster: &'a Cluster,
    node: &'a Node,
    /// None while the daemon of another keeper listens.
    socket: Option<Socket>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    /// Of a node of several: takes the place of the daemon when that dies.
    spare: Option<Spare>,
    /// Daemons that died while they served.
    restarts: u64,
    /// The command that started the keeper knows that the node is up.
    told: bool,
}

/// The socket for daemons to come, and the right to make it.
struct Socket {
    listener: OwnedFd,
    lock: DaemonLock,
}

/// The daemon of a node, as a keeper that begins finds it.
enum Found {
    /// A daemon that serves.
    Daemon(OwnedFd),
    /// There is none.
    Nothing(DaemonLock),
    /// The keeper is to end.
    Ending,
}

pub(super) fn run(arguments: &OneNode) -> Result<ExitCode> {
    super::speak();
    super::abort_on_panic();
    let cluster = arguments.place.cluster()?;
    let node = cluster.node(arguments.node)?;
    let _alone = alone(&cluster, node)?;
    // A session of its own: a terminal that closes ends the programs in it, not the node.
    let _ = rustix::process::setsid();
    let (sender, events) = channel();
    forward_signals(sender.clone())?;
    tell_when_removed(&cluster.folder(node), sender.clone())?;
    let cluster = &cluster;
    let mut keeper =
        Keeper { cluster, node, socket: None, events, sender, spare: None, restarts: 0, told: false };
    let process = Process::this()?;
    process.save(&cluster.keeper_pid_file(node))?;
    let ended = keeper.run();
    // That of another keeper's daemon stays for as long as that one lives.
    let lock = match keeper.socket.take() {
        Some(socket) => Some(socket.lock),
        None => DaemonLock::take(cluster, node).unwrap_or_default(),
    };
    let files = [node.socket.as_path()];
    process.remove_files(&cluster.keeper_pid_file(node), if lock.is_some() { &files } else { &[] });
    if !node.socket.exists() {
        cluster.remove_socket_folder(node);
    }
    ended
}

/// SIGTERM and SIGINT become events.
fn forward_signals(sender: Sender<Event>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let body = move || {
        for _ in signals.forever() {
            if sender.send(Event::Signal).is_err() {
                return;
            }
        }
    };
    spawn("signals", body)
}

/// The removal of a folder becomes an event.
fn tell_when_removed(folder: &Path, sender: Sender<Event>) -> Result<()> {
    let folder = Presence::of(folder)?;
    let body = move || {
        while !folder.is_removed() {
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(FOLDER_LOOK)));
        }
        error!(folder = %folder.path.display(), "the node's folder was removed: ending");
        // The receiver is gone when the keeper itself ends.
        let _ = sender.send(Event::FolderRemoved);
    };
    spawn("folder", body)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    SystemHost
        .spawn(name, Box::new(body))
        .map_err(|why| Error::new(format!("cannot start a thread: {why}")))
        .map(drop)
}

impl Keeper<'_> {
    /// Takes over the daemon that runs, if there is one, and starts others from then on.
    fn run(&mut self) -> Result<ExitCode> {
        loop {
            match self.find()? {
                Found::Daemon(process) => {
                    if let Some(code) = self.adopt(process)? {
                        return Ok(code);
                    }
                }
                Found::Nothing(lock) => {
                    self.listen(lock)?;
                    return self.keep();
                }
                Found::Ending => {
                    for daemon in daemon_lock::holders(self.cluster, self.node) {
                        daemon.end(Signal::TERM, OTHER_BEGINS)?;
                    }
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
    }

    /// Looks for a daemon; one that begins or ends is waited for.
    fn find(&self) -> Result<Found> {
        let mut until = Some(SystemHost.now().after(OTHER_BEGINS));
        loop {
            let named = Process::load(&self.cluster.pid_file(self.node));
            if let Some(process) = named.and_then(|daemon| daemon.descriptor()) {
                return Ok(Found::Daemon(process));
            }
            if let Some(lock) = DaemonLock::take(self.cluster, self.node)? {
                return Ok(Found::Nothing(lock));
            }
            if until.take_if(|until| SystemHost.now() >= *until).is_some() {
                let holder = daemon_lock::holders(self.cluster, self.node).into_iter().next();
                let pid = holder.map(|process| process.pid());
                warn!(pid, "waiting for the daemon of an earlier keeper, which neither serves nor ends");
            }
            if self.told_to_end_within(LOOK) {
                return Ok(Found::Ending);
            }
        }
    }

    /// Makes the socket for the daemons to come.
    fn listen(&mut self, lock: DaemonLock) -> Result<()> {
        let listener = OwnedFd::from(listen(&self.node.socket)?.into_descriptor());
        self.socket = Some(Socket { listener, lock });
        if !self.told {
            // Files that earlier daemons left.
            for path in [self.cluster.failure_file(self.node), self.cluster.pid_file(self.node)] {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }

    /// Takes over a daemon whose keeper died; gives the result if the keeper is to end, and nothing when the daemon ended.
    fn adopt(&mut self, process: OwnedFd) -> Result<Option<ExitCode>> {
        let waited = process.try_clone();
        let waited = waited.map_err(|why| Error::new(format!("cannot hold the daemon: {why}")))?;
        let sender = self.sender.clone();
        spawn("daemon", move || {
            while poll(&mut [PollFd::new(&waited, PollFlags::IN)], None) == Err(Errno::INTR) {}
            let _ = sender.send(Event::AdoptedEnded);
        })?;
        info!("took over the daemon that runs");
        say_ready()?;
        self.told = true;
        match self.next() {
            Event::AdoptedEnded => {
                self.restarts += 1;
                warn!(restarts = self.restarts, "the daemon ended: starting it again");
                Ok(None)
            }
            _ => self.end(&Running { process }).map(Some),
        }
    }

    /// One daemon after the other, until it is told to end or no daemon gets as far as serving.
    fn keep(&mut self) -> Result<ExitCode> {
        let mut failures = 0;
        loop {
            let running = self.start()?;
            match self.next() {
                Event::Ready => {
                    if !self.told {
                        say_ready()?;
                        self.told = true;
                    }
                    self.keep_a_spare(self.restarts + 1);
                    let since = SystemHost.now();
                    let Event::Ended(how) = self.next() else { return self.end(&running) };
                    self.restarts += 1;
                    warn!(%how, restarts = self.restarts, "the daemon died{}: starting it again", reason(how));
                    let soon = SystemHost.now().since(since) < SOON;
                    failures = if soon && of_itself(how) { failures + 1 } else { 0 };
                }
                Event::Signal | Event::FolderRemoved | Event::AdoptedEnded => return self.end(&running),
                Event::Ended(how) => {
                    failures += 1;
                    warn!(%how, failures, "the daemon died before it served{}", reason(how));
                }
            }
            // The first daemon tells whether the node can be started at all; the command that started it gets the
            // reason if not.
            if !self.told || failures == ATTEMPTS {
                error!(failures, "the daemon does not get as far as serving, or not for long: given up");
                return Ok(ExitCode::FAILURE);
            }
            if failures > 0 && self.told_to_end_within(pause(failures)) {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }

    fn next(&self) -> Event {
        self.events.recv().expect("the keeper holds a sender itself")
    }

    /// Starts a daemon, and the threads that tell of it.
    fn start(&mut self) -> Result<Running> {
        // Also the first one: it must not pass the lock on to the process of the mount, which it may start.
        self.keep_a_spare(self.restarts);
        let spare = self.spare.take();
        let Socket { listener, lock } =
            self.socket.as_ref().expect("the keeper listens before it starts a daemon");
        let mut child = match spare.and_then(|spare| spare.begin(listener.as_fd(), lock.as_fd())) {
            Some(child) => child,
            None => {
                let socket = listener.try_clone();
                let socket = socket.map_err(|why| Error::new(format!("cannot pass the socket on: {why}")))?;
                let mut command = self.command(self.restarts);
                let command = command.stdin(Stdio::from(socket)).stdout(Stdio::piped());
                let child = lock.with_child(|| command.spawn())?;
                child.map_err(|why| Error::new(format!("cannot start a daemon: {why}")))?
            }
        };
        // It is not waited for yet, so the number is its own.
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a child has a number");
        let process = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|why| Error::new(format!("cannot hold the daemon: {why}")))?;
        let sender = self.sender.clone();
        spawn("daemon", move || watch(&mut child, &sender))?;
        Ok(Running { process })
    }

    /// The command of a daemon before which so many died.
    fn command(&self, restarts: u64) -> Command {
        let mut command = this_program();
        command.arg("daemon").args([Path::new("--dir"), &self.cluster.dir]);
        command.args(["--node", &self.node.number.to_string()]);
        command.env(ENVIRONMENT_RESTARTS, restarts.to_string());
        command
    }

    /// A daemon alone starts in milliseconds; one of several loads libraries that take long. `restarts`: daemons that will
    /// have died before it begins.
    fn keep_a_spare(&mut self, restarts: u64) {
        if self.cluster.settings.chain.is_none() || self.spare.is_some() {
            return;
        }
        match Spare::start(self.command(restarts)) {
            Ok(spare) => self.spare = Some(spare),
            Err(why) => warn!(%why, "no spare daemon"),
        }
    }

    /// Ends the daemon in order.
    fn end(&self, running: &Running) -> Result<ExitCode> {
        // An error is a daemon that is gone: its end is told all the same.
        let _ = pidfd_send_signal(&running.process, Signal::TERM);
        loop {
            match self.next() {
                Event::Ended(how) => {
                    info!(%how, "the daemon ended");
                    return Ok(if how.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
                }
                Event::AdoptedEnded => {
                    info!("the daemon ended");
                    return Ok(ExitCode::SUCCESS);
                }
                Event::Ready | Event::Signal | Event::FolderRemoved => {}
            }
        }
    }

    fn told_to_end_within(&self, time: Duration) -> bool {
        !matches!(self.events.recv_timeout(time), Err(RecvTimeoutError::Timeout))
    }
}

/// Tells when a daemon serves, and when it is gone.
fn watch(child: &mut Child, sender: &Sender<Event>) {
    let mut said = String::new();
    let mut stdout = child.stdout.take().expect("the child was started with a pipe");
    let heard = stdout.read_to_string(&mut said);
    if heard.is_ok() && said.trim() == READY && sender.send(Event::Ready).is_err() {
        return;
    }
    if let Ok(how) = child.wait() {
        // The receiver is gone when the keeper itself ends.
        let _ = sender.send(Event::Ended(how));
    }
}

/// Whether a daemon's end was its own doing; SIGKILL is somebody's will, and says nothing of the next one.
fn of_itself(how: ExitStatus) -> bool {
    how.signal() != Some(Signal::KILL.as_raw())
}

/// The known cause of a daemon's end beside the number of a signal.
fn reason(how: ExitStatus) -> &'static str {
    if how.signal() == Some(Signal::BUS.as_raw()) {
        " because a file of its pool was cut, or the medium is gone, where it read or wrote (hearth check says where)"
    } else {
        ""
    }
}

/// The pause after so many failures.
fn pause(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(PAUSE_MAX)
}

/// How a daemon knows how often its predecessors died.
pub(super) const ENVIRONMENT_RESTARTS: &str = "HEARTH_RESTARTS";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bound() {
        assert_eq!([1, 2, 3].map(pause), [10, 20, 40].map(Duration::from_millis));
        assert_eq!([10, 40].map(pause), [PAUSE_MAX; 2]);
        let all: Duration = (1..ATTEMPTS).map(pause).sum();
        assert!((30..90).contains(&all.as_secs()), "{all:?}");
    }
}
