//! `hearth daemon`: one daemon in the foreground. It recovers its pool, serves programs, and ends on SIGTERM with all
//! logs digested; or at once, with the reason, when a file of the pool is lost while it runs or the medium of the pool
//! is full. Its socket is its standard input, if that is a listening socket (a keeper holds it over the deaths of
//! daemons), or else its own. The daemon of a cluster of several nodes is [`crate::chain::daemon`].

use super::serve::ENVIRONMENT_RESTARTS;
use super::up::say_ready;
use super::{DaemonArguments, OneNode};
use crate::chain::remedy;
use crate::chain::settings::PoolShape;
use crate::cluster::{Cluster, MediumKind, Node, POOL_LOST};
use crate::daemon_lock::{self, DaemonLock};
use crate::disk::{self, DiskStall, Opening};
use crate::error::{Error, Result};
use crate::mountpoint;
use crate::pool_files::{self, LEDGER, TREE};
use crate::pool_space;
use crate::presence::Presence;
use crate::process::Process;
use crate::say::quoted;
use crate::spare;
use crate::status::{NodeStatus, ProgramStatus};
use format::{BLOCK_BYTES, InodeNumber, LogUid, PoolUid, Sequence};
use ipc::socket::Listener;
use ipc::{Descriptor, Host, SystemHost, Word};
use pmem::Medium;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use sharedfs::{Config, Daemon, ListenerSettings, Recovered, Repaired, format_pool, reject_all};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tracing::{error, info, warn};

/// Pause of the thread that answers status requests after it could not accept a connection.
const CONTROL_PAUSE: Duration = Duration::from_millis(50);
/// How long a report waits for the lock of the daemon's state before it lacks what is behind that: shorter than parents of standby
/// programs wait for the report.
pub(crate) const RESPONSIVE: Duration = Duration::from_millis(50);
/// Threads that answer status requests: one may have begun to read the state just before the disk stopped answering.
const CONTROLS: usize = 2;
/// How often the disk of a node of one is probed, which only `hearth status` needs.
const PROBE: Duration = Duration::from_secs(10);
/// How often the daemon looks whether its pool was removed.
pub(crate) const POOL_LOOK: Duration = Duration::from_millis(500);

pub(super) fn run(arguments: &DaemonArguments) -> Result<ExitCode> {
    super::speak();
    super::abort_on_panic();
    raise_descriptors();
    let OneNode { place, node } = &arguments.node;
    let mut cluster = place.cluster()?;
    if arguments.spare {
        if !spare::wait(&cluster, cluster.node(*node)?)? {
            return Ok(ExitCode::SUCCESS);
        }
        // The settings may have changed since.
        cluster = place.cluster()?;
    }
    let node = cluster.node(*node)?;
    if let Some(chain) = &cluster.settings.chain {
        return crate::chain::daemon::run(&cluster, node, chain);
    }
    let (sender, ends) = channel();
    forward_signals(sender.clone())?;

    // First of all: its socket is where programs wait meanwhile.
    let (listener, kept) = match kept_listener()? {
        Some(listener) => (listener, true),
        None => (own_listener(&cluster, node)?, false),
    };
    let opened = open(&cluster, node, &listener);
    if let Err(why) = &opened {
        note_failure(&cluster, node, &why.to_string());
    }
    let (daemon, losses, (medium, disk)) = opened?;
    let caches = mountpoint::caches_file(&cluster, node);
    daemon.watch_caches(Box::new(move || mountpoint::has_caches(&caches)));
    daemon.start().map_err(of_daemon("start"))?;
    daemon.listen(listener_settings(listener)).map_err(of_daemon("listen"))?;
    let daemon = Arc::new(daemon);
    tell_failure(&daemon, sender)?;
    let pool = Arc::new(pool_files(node)?);
    watch_pool(&daemon, &pool)?;
    let used = daemon.clone();
    disk::probe(&medium, PROBE, move || !used.sessions().is_empty())?;
    let control = listen_for_questions(&cluster, node)?;
    let process = Process::this()?;
    pool_space::leave(&cluster, node, &medium);
    process.save(&cluster.pid_file(node))?;
    say_ready()?;
    // The keeper hears first that the daemon serves: a daemon that dies after it told others so is started again.
    let asked = (cluster.clone(), node.clone(), daemon.clone());
    answer_status(control, move || {
        let (node, daemon) = ((&asked.0, &asked.1), &asked.2);
        let status = match daemon.is_responsive(RESPONSIVE) {
            true => daemon_status(node, daemon, &losses, &pool),
            false => process_status(node.0, node.1, None),
        };
        NodeStatus { disk_stalled_ms: disk.told_ms(), ..status }
    })?;
    info!(node = node.number, "serving");

    let end = ends.recv().expect("the threads that send never end");
    let code = match end {
        End::Signal(signal) => {
            info!(signal, "ending: digesting what is left");
            daemon.stop();
            ExitCode::SUCCESS
        }
        // Nothing more can be digested, and no session is ended: programs go on with the next daemon.
        End::Failed(failure) => {
            note_failure(&cluster, node, &failure);
            ExitCode::FAILURE
        }
    };
    let control = cluster.control(node);
    let files = [&control, &node.socket].map(PathBuf::as_path);
    process.remove_files(&cluster.pid_file(node), if kept { &files[..1] } else { &files });
    Ok(code)
}

/// Each session and each segment takes descriptors: there may be as many as this process is allowed.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(why) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        warn!(%why, "the limit of descriptors stays as it is");
    }
}

/// Why a daemon ends.
pub(crate) enum End {
    Signal(i32),
    /// The pool cannot be used: why, in a sentence.
    Failed(String),
}

pub(crate) fn forward_signals(sender: Sender<End>) -> Result<()> {
    // A file that may not be so long is an error of the call that writes it, not the end.
    let too_large = Signal::XFSZ.as_raw();
    let mut signals = Signals::new([SIGTERM, SIGINT, too_large])
        .map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let body = move || {
        for signal in signals.forever().filter(|signal| *signal != too_large) {
            if sender.send(End::Signal(signal)).is_err() {
                return;
            }
        }
    };
    spawn("signals", body)
}

/// Waits for a fatal error of the daemon. A lost file or a full medium is retryable, so the process ends and is
/// restarted; after any other error of the medium the state of the pool is unknown, so the process stays and refuses
/// every request.
pub(crate) fn tell_failure(daemon: &Arc<Daemon>, sender: Sender<End>) -> Result<()> {
    let daemon = daemon.clone();
    let body = move || {
        let failure = daemon.until_failure();
        error!(failure, "stopped");
        if daemon.may_be_followed() {
            // The receiver may have ended already.
            let _ = sender.send(End::Failed(failure));
        }
    };
    spawn("failure", body)
}

/// Files of a pool without which there is none.
pub(crate) fn pool_files(node: &Node) -> Result<Vec<Presence>> {
    let paths = [node.pool.clone(), node.pool.join("tree"), node.pool.join("ledger")];
    paths.iter().map(|path| Presence::of(path)).collect()
}

/// The first of them that was removed, with a sentence about it.
pub(crate) fn removed(pool: &[Presence]) -> Option<sharedfs::Error> {
    let found = pool.iter().find(|file| file.is_removed())?;
    Some(sharedfs::Error::Removed(found.path.display().to_string()))
}

/// Reports sessions that were ended by force and blocks that are found damaged, and stops the daemon when its pool is
/// removed: records that programs commit from then on would be acknowledged, and lost. The process stays until it is told
/// to end, since the contents of the pool can be copied through its descriptors.
pub(crate) fn watch_pool(daemon: &Arc<Daemon>, pool: &Arc<Vec<Presence>>) -> Result<()> {
    let (daemon, pool) = (daemon.clone(), pool.clone());
    let body = move || {
        let (mut told, mut told_ends) = (BTreeSet::new(), BTreeSet::new());
        let mut told_repairs = Vec::new();
        // The pool of a daemon that has ended is another one's to watch.
        while !daemon.has_ended() {
            if let Some(why) = removed(&pool) {
                return daemon.give_up(&why);
            }
            for block in daemon.damaged_blocks() {
                if told.insert(block) {
                    error!("{}", damaged_block(&block));
                }
            }
            let repairs = daemon.repaired();
            repairs.iter().filter(|repaired| !told_repairs.contains(*repaired)).for_each(tell_repaired);
            told_repairs = repairs;
            let ends = daemon.terminations();
            told_ends.retain(|(session, _)| ends.iter().any(|end| end.session == *session));
            for end in ends {
                if told_ends.insert((end.session, end.reason.clone())) {
                    warn!(
                        session = end.session,
                        user = end.uid,
                        reason = end.reason,
                        "a session was ended by force"
                    );
                }
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(POOL_LOOK)));
        }
    };
    spawn("pool", body)
}

/// Says that a log was not as it was at a copy.
fn tell_repaired(repaired: &Repaired) {
    let (log, node, from) = (repaired.log, repaired.node, repaired.after.next());
    warn!(%log, %from, up_to = %repaired.up_to, "records that were missing or wrong here were taken from node {node}");
}

/// The report of a damaged block of which a program wrote a part.
fn damaged_block((inode, block): &(InodeNumber, u64)) -> String {
    format!(
        "inode {inode}: the {BLOCK_BYTES} bytes from {} on are damaged, and a program wrote a part of them: reading them is an \
         error until they are written as a whole",
        block * BLOCK_BYTES as u64
    )
}

pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = SystemHost.spawn(name, Box::new(body));
    thread.map_err(|why| Error::new(format!("cannot start a thread: {why}"))).map(drop)
}

/// Leaves a sentence for `hearth status`.
pub(crate) fn note_failure(cluster: &Cluster, node: &Node, failure: &str) {
    // Without it the log still says it.
    let _ = fs::write(cluster.failure_file(node), failure);
}

pub(crate) fn of_daemon(what: &'static str) -> impl FnOnce(sharedfs::Error) -> Error {
    move |why| Error::new(format!("cannot {what}: {why}"))
}

/// The daemon of a pool, what was lost, and the disk.
type OpenedPool = (Daemon, Vec<String>, (Medium, Arc<DiskStall>));

/// Opens the pool, which is made first if the folder is empty; gives the losses, too. If the medium of a pool that was
/// there is full, the clients that wait at the socket are told.
fn open(cluster: &Cluster, node: &Node, listener: &Listener) -> Result<OpenedPool> {
    let pool = &node.pool;
    let (medium, config) = (guarded_medium(cluster, node)?, config(cluster));
    let disk = DiskStall::watch(&medium, pool)?;
    let opening = Opening::begin(cluster, node, &disk)?;
    make_new_pool(&medium, cluster, node)?;
    let begin = SystemHost.now();
    let opened = Daemon::open(Arc::new(SystemHost), &medium, config).inspect_err(|why| {
        if why.is_no_space() {
            reject_all(listener, why);
        }
    });
    let (daemon, recovered) = opened.map_err(Error::at("open", pool))?;
    opening.end();
    Ok((daemon, tell_recovered(&recovered, SystemHost.now().since(begin)), (medium, disk)))
}

/// [`medium`], whose files may be lost, and whose operations are counted.
pub(crate) fn guarded_medium(cluster: &Cluster, node: &Node) -> Result<Medium> {
    medium(cluster, node)?.guarded().map_err(Error::at("guard", &node.pool))
}

/// The medium of a node's pool, whose folder has to be there.
pub(crate) fn medium(cluster: &Cluster, node: &Node) -> Result<Medium> {
    let pool = &node.pool;
    if !pool.exists() {
        let lost = match cluster.settings.medium {
            MediumKind::Memory => {
                " (a pool in memory ends with the machine: remove the cluster's folder, and begin anew)"
                    .to_owned()
            }
            MediumKind::File if cluster.settings.chain.is_some() => format!(
                ": bring it back; or, if it is lost and hearth status --dir {} shows that another node leads, make the folder and \
                 remove {}, and the node gets the tree from that node",
                quoted(&cluster.dir),
                cluster.pool_made_file(node).display()
            ),
            MediumKind::File => String::new(),
        };
        return Err(Error::new(format!("the pool {} is gone{lost}", pool.display())));
    }
    pool_files::check(pool)?;
    match cluster.settings.medium {
        MediumKind::File => Medium::file(pool),
        MediumKind::Memory => Medium::memory(pool),
    }
    .map_err(Error::at("open", pool))
}

/// The settings of a daemon.
pub(crate) fn config(cluster: &Cluster) -> Config {
    let capacity_blocks = cluster.settings.capacity_bytes / format::BLOCK_BYTES as u64;
    let trusted_uid = rustix::process::geteuid().as_raw();
    let mut config = Config { trusted_uid, ..Config::default() };
    cluster.settings.limits.apply(&mut config);
    config.area.capacity_blocks = capacity_blocks;
    config.area.segment_blocks = segment_blocks(capacity_blocks);
    config
}

/// The settings of the daemon's listener.
pub(crate) fn listener_settings(listener: Listener) -> ListenerSettings {
    let uid = rustix::process::geteuid().as_raw();
    ListenerSettings { listener, library: env!("CARGO_PKG_VERSION").to_owned(), uid }
}

/// Says what was found when a daemon began to lead; gives what was lost.
pub(crate) fn tell_recovered(recovered: &Recovered, took: Duration) -> Vec<String> {
    info!(
        logs = recovered.logs.len(),
        records = recovered.records,
        orphans = recovered.orphans,
        microseconds = took.as_micros() as u64,
        "recovered"
    );
    for (log, reason) in &recovered.cuts {
        warn!(%log, ?reason, "the end of a log did not count");
    }
    recovered.repaired.iter().for_each(tell_repaired);
    let lost = |(log, last): &(LogUid, Sequence)| {
        format!("log {log}: the record after {last} is damaged; it and those behind it did not count")
    };
    let incomplete = |(log, last): &(LogUid, Sequence)| {
        format!(
            "log {log}: its file is missing, or is not as it was made; records after {last}, if there were any, did not count"
        )
    };
    let unjudged = |(last, names): &(Sequence, Vec<String>)| {
        let kept = names.join(", ");
        format!(
            "the ledger: the entry after {last} is damaged; records that need it did not count, and are kept: {kept}"
        )
    };
    let losses = recovered.damaged.iter().map(lost).chain(recovered.incomplete.iter().map(incomplete));
    let losses: Vec<String> = losses.chain(recovered.kept.iter().map(unjudged)).collect();
    losses.iter().for_each(|loss| error!(loss));
    losses
}

/// Data blocks of a segment in a pool of so many: so small that several users find segments of their own, and that an empty
/// one is soon found; from 4 MiB to 1 GiB.
fn segment_blocks(capacity_blocks: u64) -> u32 {
    const SEGMENTS: u64 = 32;
    (capacity_blocks / SEGMENTS).clamp(1 << 10, 256 << 10) as u32
}

/// The pool of one of several nodes that was in memory, and ended with the machine, may be made anew: the node gets the tree
/// from the others, and does not begin a cluster with it.
pub(crate) fn give_up_lost_pool(cluster: &Cluster, node: &Node) -> Result<()> {
    let (pool, made) = (&node.pool, cluster.pool_made_file(node));
    let is_lost = match fs::read_dir(pool) {
        Ok(mut files) => files.next().is_none(),
        Err(why) => why.kind() == ErrorKind::NotFound,
    };
    let may_be = cluster.settings.medium == MediumKind::Memory && cluster.settings.chain.is_some();
    if !(is_lost && may_be && made.exists()) {
        return Ok(());
    }
    warn!(pool = %pool.display(), "the pool is lost, and is made anew: the node gets the tree from the others");
    // First: if the making of the new one is interrupted, it is made again.
    fs::write(&made, POOL_LOST).map_err(Error::at("write", &made))?;
    match fs::DirBuilder::new().mode(0o700).create(pool) {
        Err(why) if why.kind() != ErrorKind::AlreadyExists => Err(Error::at("make", pool)(why)),
        _ => Ok(()),
    }
}

/// Makes the pool of a node that never had one, or whose pool was lost.
pub(crate) fn make_new_pool(medium: &Medium, cluster: &Cluster, node: &Node) -> Result<()> {
    let pool = &node.pool;
    let made = cluster.pool_made_file(node);
    let names = medium.list().map_err(Error::at("read", pool))?;
    // The making of one was interrupted: there is no tree, and these files are all.
    let is_begun = |name: &String| [LEDGER, TREE].contains(&name.as_str());
    let may_make = !made.exists() || cluster.pool_was_lost(node);
    let begun = may_make && names.iter().all(is_begun) && !sharedfs::is_pool(medium);
    if names.is_empty() || begun {
        // A new one would look as if the files had never been.
        if !may_make {
            let way = match &cluster.settings.chain {
                Some(_) => remedy::beside_a_leader(cluster, node),
                None => "or remove the cluster's folder and begin anew".to_owned(),
            };
            return Err(Error::new(format!(
                "the pool {} is empty, and a pool was made there: bring its files back, {way}",
                pool.display()
            )));
        }
        make_pool(medium, cluster, node)?;
        info!(pool = %pool.display(), "made the pool");
    }
    // Clusters of before have none.
    if !made.exists() {
        fs::write(&made, "").map_err(Error::at("write", &made))?;
    }
    Ok(())
}

fn make_pool(medium: &Medium, cluster: &Cluster, node: &Node) -> Result<()> {
    let shape = match &cluster.settings.chain {
        Some(chain) => chain.pools,
        None => PoolShape::new(cluster.settings.capacity_bytes)?,
    };
    let new = shape.format(PoolUid::new(SystemHost.random()));
    format_pool(medium, &new).map_err(|why| {
        // `up` says more about the space for a new cluster.
        let is_new = cluster.settings.nodes.iter().all(|node| !cluster.pool_made_file(node).exists());
        let remedy = if is_new { None } else { remedy::of_pool(cluster, node, &why) };
        remedy::with(remedy)(of_daemon("make the pool")(why))
    })
}

/// The socket that a keeper gave as standard input, if it did.
pub(crate) fn kept_listener() -> Result<Option<Listener>> {
    let stdin = std::io::stdin();
    if !rustix::net::sockopt::socket_acceptconn(&stdin).unwrap_or(false) {
        return Ok(None);
    }
    let own = stdin.as_fd().try_clone_to_owned();
    let own = own.map_err(|why| Error::new(format!("cannot take the keeper's socket: {why}")))?;
    Ok(Some(Listener::from_descriptor(Descriptor::from(own))))
}

/// The socket of a daemon that no keeper started, if the node has no other daemon.
pub(crate) fn own_listener(cluster: &Cluster, node: &Node) -> Result<Listener> {
    let Some(lock) = DaemonLock::take(cluster, node)? else {
        let named = Process::load(&cluster.pid_file(node));
        let process = named.or_else(|| daemon_lock::holders(cluster, node).into_iter().next());
        let process = process.map_or_else(String::new, |process| format!(" (process {})", process.pid()));
        return Err(Error::new(format!("node {} has a daemon or a keeper already{process}", node.number)));
    };
    // For as long as this process lives.
    std::mem::forget(lock);
    listen(&node.socket)
}

/// Makes a socket that programs attach to, in place of one at which no process listens any more. All users may connect;
/// the kernel tells their credentials.
pub(crate) fn listen(path: &Path) -> Result<Listener> {
    let _ = fs::remove_file(path);
    Listener::bind(path).map_err(Error::at("listen at", path))
}

/// The socket at which others ask how the node is; they wait there until they are answered.
pub(crate) fn listen_for_questions(cluster: &Cluster, node: &Node) -> Result<UnixListener> {
    let control = cluster.control(node);
    let _ = fs::remove_file(&control);
    UnixListener::bind(&control).map_err(Error::at("listen at", &control))
}

/// The socket at which any user may ask which node leads.
pub(crate) fn listen_for_users(cluster: &Cluster, node: &Node) -> Result<UnixListener> {
    let lead = cluster.lead(node);
    let _ = fs::remove_file(&lead);
    let listener = UnixListener::bind(&lead).map_err(Error::at("listen at", &lead))?;
    fs::set_permissions(&lead, Permissions::from_mode(0o666)).map_err(Error::at("set mode of", &lead))?;
    Ok(listener)
}

/// Starts the threads that tell each process that connects how the node is.
pub(crate) fn answer_status(
    listener: UnixListener,
    status: impl Fn() -> NodeStatus + Send + Sync + 'static,
) -> Result<()> {
    let (listener, status) = (Arc::new(listener), Arc::new(status));
    (0..CONTROLS).try_for_each(|_| answer_some(listener.clone(), status.clone()))
}

fn answer_some(
    listener: Arc<UnixListener>,
    status: Arc<impl Fn() -> NodeStatus + Send + Sync + 'static>,
) -> Result<()> {
    let body = move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else {
                // No descriptor is free: requests wait in the backlog.
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(CONTROL_PAUSE)));
                continue;
            };
            let text = serde_json::to_vec(&status()).unwrap_or_default();
            // A client that went away is not an error.
            let _ = stream.write_all(&text);
        }
    };
    spawn("control", body)
}

/// How a node is whose daemon serves.
pub(crate) fn daemon_status(
    (cluster, node): (&Cluster, &Node),
    daemon: &Daemon,
    losses: &[String],
    pool: &[Presence],
) -> NodeStatus {
    let failure = removed(pool).map(|why| {
        // It has been so by the time that it is told.
        daemon.give_up(&why);
        why.to_string()
    });
    let failure = failure.or_else(|| daemon.failure());
    let mut losses = losses.to_vec();
    losses.extend(daemon.damaged_blocks().iter().map(damaged_block));
    NodeStatus { losses, ..status(cluster, node, daemon, failure) }
}

/// `failure`: why the daemon does nothing any more.
fn status(cluster: &Cluster, node: &Node, daemon: &Daemon, failure: Option<String>) -> NodeStatus {
    let usage = daemon.usage();
    let programs = daemon
        .programs()
        .into_iter()
        .map(|program| ProgramStatus {
            pid: program.pid,
            uid: program.uid,
            log: program.log.get(),
            log_bytes: program.log_bytes,
            leases: program.leases as u64,
        })
        .collect();
    NodeStatus {
        blocks: usage.blocks,
        blocks_free: usage.blocks_free,
        blocks_available: Some(daemon.free_blocks(rustix::process::geteuid().as_raw())),
        medium_is_full: daemon.lacks_space(),
        inodes: usage.inodes,
        commits: daemon.commit().get(),
        requests: daemon.requests(),
        programs,
        estates: daemon.detached_sessions() as u64,
        references: daemon.references() as u64,
        forced_ends: daemon
            .terminations()
            .iter()
            .map(|end| format!("session {} of user {}: {}", end.session, end.uid, end.reason))
            .collect(),
        ..process_status(cluster, node, failure)
    }
}

/// The part of a status that every daemon reports, also one that serves no client. `failure`: why it has stopped.
pub(crate) fn process_status(cluster: &Cluster, node: &Node, failure: Option<String>) -> NodeStatus {
    NodeStatus {
        node: node.number,
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        tree: cluster.tree(node).display().to_string(),
        pool: node.pool.display().to_string(),
        medium: cluster.settings.medium.to_string(),
        copies: 1,
        // Of a folder that cannot be looked at no more is promised than of memory.
        survives: cluster.survives(node).unwrap_or("process").to_owned(),
        stopped: failure.is_some(),
        kept: std::env::var_os(ENVIRONMENT_RESTARTS).is_some(),
        failure: failure.or_else(|| {
            cluster.failure(node).map(|failure| format!("the daemon before this one: {failure}"))
        }),
        restarts: std::env::var(ENVIRONMENT_RESTARTS).ok().and_then(|count| count.parse().ok()).unwrap_or(0),
        ..NodeStatus::default()
    }
}
