//! `hearth up` and `hearth start`: start daemons and wait until they serve.

use super::down::stop;
use super::{OneNode, Up, mount};
use crate::chain::links::Links;
use crate::chain::settings::{ChainSettings, PoolShape};
use crate::chain::{self, waiting};
use crate::cluster::{Cluster, MediumKind, Node};
use crate::cluster_lock::ClusterLock;
use crate::error::{Error, Result};
use crate::health::{self, NodeHealth};
use crate::making::CreatedFiles;
use crate::mountpoint;
use crate::obstacles;
use crate::pool_space;
use crate::process::{Process, this_program};
use crate::say::{self, quoted};
use crate::settings::CAPACITY_MIB;
use crate::status::ask;
use ipc::{Host, SystemHost, Word};
use rustix::fs::statvfs;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

/// How often it is looked whether a daemon answers again.
const LOOK: Duration = Duration::from_millis(5);

/// Data that a new pool may hold.
const CAPACITY_MIB_DEFAULT: u64 = 4096;

/// Settings of the gateway's allocator, if the environment has no others. Memory that one thread allocated and others
/// freed is collected by the first thread, and the gateway's threads rest for long: so each collects after every
/// hundred searches for memory, and free memory goes back to the system after 10 ms.
const GATEWAY_ALLOCATOR: [(&str, &str); 2] =
    [("MIMALLOC_GENERIC_COLLECT", "100"), ("MIMALLOC_PURGE_DELAY", "10")];

/// The line that a process in the background prints when it is ready.
pub(super) const READY: &str = "ready";

pub(super) fn run(arguments: &Up) -> Result<ExitCode> {
    let dir = arguments.place.dir()?;
    let capacity_bytes = capacity_bytes(arguments.capacity.unwrap_or(CAPACITY_MIB_DEFAULT))?;
    let is_new = !dir.join("hearth.toml").exists();
    obstacles::check_limits(if is_new { capacity_bytes } else { 0 })?;
    let mut made = CreatedFiles::default();
    made.shared(&dir)?;
    let alone = ClusterLock::wait(&dir)?;
    let cluster = if dir.join("hearth.toml").exists() {
        let mut cluster = Cluster::open(&dir)?;
        obstacles::check_limits(cluster.settings.capacity_bytes)?;
        agree(&cluster, arguments)?;
        if let Some(nodes) = arguments.nodes.filter(|nodes| *nodes as usize > cluster.settings.nodes.len()) {
            chain::growth::grow(&mut cluster, nodes, (arguments.lease, arguments.patience))?;
            say_small_media(&cluster);
        }
        choose_mount(&mut cluster, arguments)?;
        start_all(&cluster).map_err(|failed| failed.told(&cluster))?;
        cluster
    } else {
        let begun = begin(&dir, arguments, capacity_bytes, &mut made);
        match begun {
            Ok(cluster) => {
                say_room(&cluster);
                cluster
            }
            Err(why) => {
                made.take_away();
                return Err(why);
            }
        }
    };
    // The process that serves a mount takes the same lock when it makes it.
    drop(alone);
    let node = match &cluster.settings.chain {
        Some(_) => waiting::for_leader(&cluster)?,
        None => cluster.node(1)?,
    };
    mount::show_if_it_leads(&cluster, node);
    say::line(format_args!("Run programs with: hearth run --dir {} -- COMMAND", quoted(&cluster.dir)));
    say::line(format_args!("They see the tree at {}", cluster.tree(node).display()));
    Ok(ExitCode::SUCCESS)
}

/// Remembers whether nodes are to be mounted.
fn choose_mount(cluster: &mut Cluster, arguments: &Up) -> Result<()> {
    let wanted = if arguments.no_mount { false } else { arguments.mount || cluster.settings.mount };
    if wanted != cluster.settings.mount {
        cluster.settings.mount = wanted;
        cluster.save()?;
    }
    Ok(())
}

/// Prints how much space the pools of a new cluster take on their media, which is more than their contents.
fn say_room(cluster: &Cluster) {
    for node in &cluster.settings.nodes {
        let bytes = obstacles::used_bytes(&node.pool);
        say::line(format_args!(
            "Its pool {} takes {} MiB from the start, and more as files come: it may hold {} MiB of data (--capacity)",
            node.pool.display(),
            bytes >> 20,
            cluster.settings.capacity_bytes >> 20
        ));
    }
    say_small_media(cluster);
}

fn say_small_media(cluster: &Cluster) {
    obstacles::small_media(cluster).iter().for_each(|warning| say::aside(format_args!("hearth: {warning}")));
}

/// Makes a cluster and starts it for the first time.
fn begin(dir: &Path, arguments: &Up, capacity_bytes: u64, made: &mut CreatedFiles) -> Result<Cluster> {
    let none =
        |why: &dyn std::fmt::Display| Error::new(format!("no cluster was made in {}: {why}", dir.display()));
    let medium = arguments.medium.unwrap_or(MediumKind::File);
    let nodes = arguments.nodes.unwrap_or(1);
    let chain = match nodes {
        1 => None,
        _ => {
            let chain = Links::may_connect().and_then(|()| chain_settings(arguments, capacity_bytes));
            Some(chain.map_err(|why| none(&why))?)
        }
    };
    let created = Cluster::create(dir, (medium, capacity_bytes), (nodes, chain), made);
    let mut cluster = created.map_err(|why| none(&why))?;
    choose_mount(&mut cluster, arguments)?;
    if let Err(NotStarted { why, .. }) = start_all(&cluster) {
        // Processes that were started before it failed.
        for node in &cluster.settings.nodes {
            let _ = stop(&cluster, node, true);
        }
        let _ = chain::manager::stop(&cluster, true);
        let mib = 1 << 20;
        let failed = cluster.settings.nodes.iter().find_map(|node| Some((node, cluster.failure(node)?)));
        return Err(match failed {
            Some((node, failure)) => {
                let room = statvfs(&node.pool).map_or(0, |medium| medium.f_bavail * medium.f_frsize);
                none(&format_args!(
                    "{failure} (--capacity {}, and {} MiB are free where the pool was to lie){}",
                    capacity_bytes / mib,
                    room / mib,
                    obstacles::limits()
                ))
            }
            None => none(&why),
        });
    }
    Ok(cluster)
}

/// The settings that the nodes of a new cluster share.
fn chain_settings(arguments: &Up, capacity_bytes: u64) -> Result<ChainSettings> {
    ChainSettings::new(PoolShape::new(capacity_bytes)?).with_times(arguments.lease, arguments.patience)
}

/// Starts every node that is not up, and says so. If one does not start, the others do: one of them may lead.
fn start_all(cluster: &Cluster) -> std::result::Result<(), NotStarted> {
    let failed = |why| NotStarted { why, others: 0 };
    cluster.settings.nodes.iter().for_each(|node| pool_space::make_way(cluster, node));
    chain::manager::start(cluster).map_err(failed)?;
    let (mut failure, mut others) = (None, 0);
    for node in &cluster.settings.nodes {
        look_at_node(cluster, node);
        match start_node_or_say(cluster, node) {
            Ok(start) => {
                say_start(node.number, &start);
                others += 1;
            }
            Err(why) if failure.is_none() => failure = Some(why),
            Err(why) => say::aside(format_args!("hearth: {why}")),
        }
    }
    failure.map_or(Ok(()), |why| Err(NotStarted { why, others }))
}

/// A node of a cluster was not started.
struct NotStarted {
    why: Error,
    /// How many others are up.
    others: usize,
}

impl NotStarted {
    fn told(self, cluster: &Cluster) -> Error {
        if self.others == 0 {
            return self.why;
        }
        let dir = quoted(&cluster.dir);
        Error::new(format!(
            "{}; the other nodes were started: hearth status --dir {dir} tells how they are",
            self.why
        ))
    }
}

pub(super) fn start(arguments: &OneNode) -> Result<ExitCode> {
    let cluster = arguments.place.cluster()?;
    obstacles::check_limits(cluster.settings.capacity_bytes)?;
    let alone = ClusterLock::wait(&cluster.dir)?;
    let node = cluster.node(arguments.node)?;
    pool_space::make_way(&cluster, node);
    chain::manager::start(&cluster)?;
    look_at_node(&cluster, node);
    say_start(arguments.node, &start_node_or_say(&cluster, node)?);
    drop(alone);
    mount::show_if_it_leads(&cluster, node);
    Ok(ExitCode::SUCCESS)
}

fn say_start(number: u32, start: &Start) {
    match start {
        Start::Done => say::line(format_args!("node {number} is up")),
        Start::Already(pid) => say::line(format_args!("node {number} is up already (process {pid})")),
        Start::Kept(pid) => {
            say::line(format_args!("node {number} is up (process {pid}), and has a keeper again"));
        }
    }
}

/// A folder where the tree is seen though it is not mounted, which clusters of before have, goes if it is empty. Tells what is not
/// as it should be at a node that is about to start.
fn look_at_node(cluster: &Cluster, node: &Node) {
    mountpoint::remove(cluster, node);
    if let Some(warning) = mountpoint::warning(cluster, node) {
        say::aside(format_args!("hearth: {warning}"));
    }
    if let Some(warning) = cluster.capacity_warning(node) {
        say::aside(format_args!("hearth: node {}: {warning}", node.number));
    }
}

/// Bytes of so many MiB of data.
fn capacity_bytes(mib: u64) -> Result<u64> {
    if !CAPACITY_MIB.contains(&mib) {
        let (least, most) = (CAPACITY_MIB.start(), CAPACITY_MIB.end());
        return Err(Error::new(format!("a pool holds {least} to {most} MiB, not {mib}")));
    }
    Ok(mib << 20)
}

/// The settings of an existing cluster stay: another choice now would be silently ignored.
fn agree(cluster: &Cluster, arguments: &Up) -> Result<()> {
    let settings = &cluster.settings;
    let other_medium = arguments.medium.is_some_and(|medium| medium != settings.medium);
    let other_capacity =
        arguments.capacity.is_some_and(|mib| mib.saturating_mul(1 << 20) != settings.capacity_bytes);
    let nodes = settings.nodes.len();
    if arguments.nodes.is_some_and(|wanted| (wanted as usize) < nodes) {
        return Err(Error::new(format!(
            "the cluster in {} exists with --nodes {nodes}: it can get more nodes, and not fewer",
            cluster.dir.display()
        )));
    }
    // One node that gets others is given them.
    let given = settings.chain.is_none() && arguments.nodes.is_some_and(|wanted| wanted > 1);
    let other = |wanted: Option<u64>, has: Option<u64>| !given && wanted.is_some() && wanted != has;
    if other(arguments.lease, settings.chain.map(|chain| chain.lease_ms))
        || other(arguments.patience, settings.chain.map(|chain| chain.patience_ms))
    {
        return Err(Error::new(format!(
            "the cluster in {} exists with another lease or patience; these are given when several nodes are made",
            cluster.dir.display()
        )));
    }
    if other_medium || other_capacity {
        return Err(Error::new(format!(
            "the cluster in {} exists with --medium {} and capacity {} MiB; these cannot be changed",
            cluster.dir.display(),
            settings.medium,
            settings.capacity_bytes >> 20
        )));
    }
    Ok(())
}

/// The result of starting a node.
pub(super) enum Start {
    /// It is up now, or again.
    Done,
    /// It was up; its daemon.
    Already(i32),
    /// Its daemon was up without a keeper, and has one again.
    Kept(i32),
}

/// Starts a node; an error names what keeps its processes from starting, if it is known.
fn start_node_or_say(cluster: &Cluster, node: &Node) -> Result<Start> {
    start_node(cluster, node).map_err(|why| Error::new(format!("{why}{}", obstacles::of_node(cluster, node))))
}

/// Starts a node and waits until programs may attach.
pub(super) fn start_node(cluster: &Cluster, node: &Node) -> Result<Start> {
    let health = health::look(cluster, node);
    let keeper = Process::load(&cluster.keeper_pid_file(node));
    match (health, keeper) {
        (NodeHealth::Answers(status), _) if status.stopped => {
            return Err(Error::new(format!(
                "node {} failed ({}): hearth down --dir {dir}, then hearth start --dir {dir}",
                node.number,
                status.failure.unwrap_or_default(),
                dir = quoted(&cluster.dir)
            )));
        }
        (NodeHealth::Answers(status), None) if status.kept => {
            wait_until_ready(cluster, node, &["serve"], "serve.log")?;
            return Ok(Start::Kept(status.pid));
        }
        (NodeHealth::Answers(status), _) => return Ok(Start::Already(status.pid)),
        (NodeHealth::Silent(daemon), _) => {
            let silence = health::silence(cluster, node, &daemon);
            return Err(Error::new(format!("node {}: {silence}", node.number)));
        }
        (NodeHealth::Unknown(why), _) => return Err(Error::new(why)),
        // A daemon that just died is being started again.
        (NodeHealth::Starting { .. } | NodeHealth::Down, Some(_)) => wait_until_answered(cluster, node)?,
        (NodeHealth::Starting { .. } | NodeHealth::Down, None) => {
            cluster.make_socket_folder(node)?;
            let started = wait_until_ready(cluster, node, &["serve"], "serve.log");
            // A command that was killed may have started a keeper just before.
            if started.is_err() && Process::load(&cluster.keeper_pid_file(node)).is_some() {
                wait_until_answered(cluster, node)?;
            } else {
                started?;
            }
        }
    }
    Ok(Start::Done)
}

/// Waits until a daemon that its keeper starts again answers.
fn wait_until_answered(cluster: &Cluster, node: &Node) -> Result<()> {
    loop {
        let answer = ask(&cluster.control(node), health::PATIENCE);
        if answer.is_ok() || Process::load(&cluster.keeper_pid_file(node)).is_none() {
            let failure = cluster.failure(node);
            return answer.map(drop).map_err(|why| Error::new(failure.unwrap_or_else(|| why.to_string())));
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
    }
}

/// Starts this program anew in the background, for a node, and waits until it says that it is ready.
pub(crate) fn wait_until_ready(cluster: &Cluster, node: &Node, command: &[&str], log: &str) -> Result<()> {
    let log = cluster.folder(node).join(log);
    let mut arguments: Vec<OsString> = command.iter().map(OsString::from).collect();
    let number = node.number.to_string();
    arguments.extend(["--dir".into(), cluster.dir.clone().into(), "--node".into(), number.into()]);
    let Err(why) = run_in_background(&arguments, &log)? else { return Ok(()) };
    let log = log.display();
    Err(Error::new(if command == ["serve"] {
        let pool = node.pool.display();
        format!(
            "node {} did not start: {why} (all of it: {log}; hearth check {pool} says what the pool holds)",
            node.number
        )
    } else {
        format!("node {} was not mounted: {why} (all of it: {log})", node.number)
    }))
}

/// Starts this program anew in the background, and waits until it says that it is ready; an error within is why it ended
/// before that.
pub(crate) fn run_in_background(
    arguments: &[OsString],
    log: &Path,
) -> Result<std::result::Result<(), String>> {
    // All users who come to the socket may search the folder, but only its owner may read the daemon's output.
    let stderr = OpenOptions::new().create(true).append(true).mode(0o600).open(log);
    let stderr = stderr.map_err(Error::at("open", log))?;
    let before = stderr.metadata().map_or(0, |log| log.len() as usize);
    let is_gateway = arguments.first().is_some_and(|command| command == "mount");
    let allocator: &[_] = if is_gateway { &GATEWAY_ALLOCATOR } else { &[] };
    let mut child = this_program()
        .args(arguments)
        .envs(allocator.iter().filter(|(name, _)| std::env::var_os(name).is_none()).copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .map_err(|why| Error::new(format!("cannot start a process in the background: {why}")))?;
    // It closes its end when it is ready, or when it dies: no time limit is needed, and a long recovery is waited
    // for.
    let mut said = String::new();
    let mut stdout = child.stdout.take().expect("the child was started with a pipe");
    let heard = stdout.read_to_string(&mut said);
    heard.map_err(|why| Error::new(format!("cannot hear the process in the background: {why}")))?;
    if said.trim() == READY {
        return Ok(Ok(()));
    }
    // It is gone or goes; until then it may still write.
    let _ = child.wait();
    // The output of earlier starts is not the reason. A log that is shorter than before began anew meanwhile.
    let text = fs::read(log).unwrap_or_default();
    Ok(Err(reason(&String::from_utf8_lossy(text.get(before..).unwrap_or(&text)))))
}

/// Why a process ended, of what it wrote to its log: its last word to a person, if there is one, else the last lines.
fn reason(log: &str) -> String {
    if let Some(why) = log.lines().rev().find_map(|line| line.strip_prefix("hearth: ")) {
        return why.to_owned();
    }
    let mut last: Vec<_> = log.lines().rev().take(3).collect();
    last.reverse();
    last.join(" | ")
}

/// Tells who started this process that it is ready, and lets go of the pipe.
pub(crate) fn say_ready() -> Result<()> {
    let why = |why: &dyn std::fmt::Display| Error::new(format!("cannot tell that it is ready: {why}"));
    let mut stdout = std::io::stdout();
    match writeln!(stdout, "{READY}").and_then(|()| stdout.flush()) {
        // The process that wanted to know is gone: this one goes on without it.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        told => told.map_err(|error| why(&error))?,
    }
    let nothing = OpenOptions::new().write(true).open("/dev/null").map_err(|error| why(&error))?;
    rustix::stdio::dup2_stdout(nothing).map_err(|error| why(&error))
}
