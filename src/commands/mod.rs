//! One file a command; here their arguments and what is common to all: how an error is told, how a command ends.

mod bench;
mod check;
mod cluster;
mod compare;
pub(crate) mod daemon;
mod down;
mod inspect;
pub(crate) mod manager;
pub(crate) mod mount;
mod move_lead;
mod pages;
mod programs;
mod remove;
mod run;
pub(crate) mod serve;
mod standby;
mod status;
mod sustained;
mod syncs;
pub(crate) mod up;

use crate::chain::settings::NODES_MAX;
use crate::cluster::{Cluster, MediumKind};
use crate::error::{Error, Result};
use crate::log_file::LogFile;
use crate::say::{self, quoted};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing::level_filters::LevelFilter;
use tracing::warn;

/// The commands that most people need, behind the list of commands.
const EXAMPLES: &str = "\
The first five minutes:
  hearth up --dir /tmp/h --medium memory
  hearth run --dir /tmp/h -- sqlite3 /tmp/h/n1/a.db 'create table t(x)'
  hearth status --dir /tmp/h
  hearth down --dir /tmp/h

`run` loads a library into a program, which then works on the tree at the speed of memory. The mount, which `up` makes where it
may, is slower, and shows the tree to every program, static ones too; programs under `run` that map files use it for those.
docs/semantics.md says more.

`up` starts the parts of a node itself. Under another supervisor they run in the foreground: `hearth help serve`, `hearth help
manager`.";

/// Keeps a program's files in durable memory on the machine where it runs.
#[derive(Debug, Parser)]
#[command(name = "hearth", version, propagate_version = true, after_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a cluster and start it; one that was stopped is started again
    Up(Up),
    /// Run a program that sees the tree
    Run(Run),
    /// Show the tree at DIR/nK to every program, by FUSE, if `up` did not do it
    Mount(Mount),
    /// Take the mount away: exit code 1 if programs use it
    Umount(Umount),
    /// Say how the cluster is: exit code 0 well, 1 degraded, 2 down, 3 not known, for lack of permission
    Status(Status),
    /// Stop the cluster, or one node of it
    Down(Down),
    /// Let another node lead: a planned hand-over to one in sync, after which the former one is a standby
    ///
    /// Exit code 0: node K leads (it may have led before); 1: refused, and the reason says whether sessions were ended; 2: it
    /// could not be asked for.
    Move(Move),
    /// Remove a cluster that is down, with all files in it
    ///
    /// Without --yes it says what would be removed. Exit code 0: it is removed; 1: nothing was removed, for the reason that is told.
    Remove(Remove),
    /// Start a stopped node
    Start(OneNode),
    /// Measure, each figure beside its floor
    #[command(subcommand)]
    Bench(Benches),
    /// Verify a pool that no daemon uses, or compare the copies of two nodes while programs go on
    ///
    /// With --against both nodes keep their tree as of the same moment and read all of it, with all data. Exit code 0: nothing is
    /// wrong, or the copies are equal; 1: something is wrong, or they differ; 2: it could not be found out.
    Check(Check),
    /// Print what a pool holds, in words
    Inspect(PoolFolder),
    /// Keep a node up in the foreground: run its daemon, and start it again when it dies (`up` does this for you)
    #[command(hide = true)]
    Serve(OneNode),
    /// Run a node's daemon in the foreground, with no keeper; the socket may come as standard input
    #[command(hide = true)]
    Daemon(DaemonArguments),
    /// Run the embedded cluster manager in the foreground: for clusters of several nodes
    #[command(hide = true)]
    Manager(manager::Arguments),
    /// Show the state of the cluster manager, expel a member, or accept a pool as the last copy
    #[command(subcommand)]
    Cluster(cluster::Command),
    /// Run a program that lies in the tree: `run` does it, inside a program that sees the tree
    #[command(hide = true)]
    Within(Within),
    /// Hold a mount's connection, so that nothing of it is left when the process that serves it dies: `mount` starts it
    #[command(hide = true)]
    Guard,
    /// One part of a measurement, inside a program that sees the tree
    #[command(hide = true)]
    Measure(Measure),
    /// A process of the floor of an fsync on two nodes
    #[command(hide = true, subcommand)]
    Floor(FloorProcess),
    /// Write man pages and shell completions into a folder: `make install` does it
    #[command(hide = true)]
    Pages(Pages),
}

#[derive(Debug, Args)]
struct Where {
    /// The cluster's folder [default: $HEARTH_DIR, else ~/.hearth]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Where {
    fn dir(&self) -> Result<PathBuf> {
        let dir = self.dir.clone().map_or_else(Cluster::default_dir, Ok)?;
        if dir.to_str().is_none() {
            return Err(Error::new(format!("{}: the path of a cluster has to be UTF-8", quoted(&dir))));
        }
        if let Ok(target) = fs::read_link(&dir)
            && !dir.exists()
        {
            let target = target.display();
            return Err(Error::new(format!(
                "{} is a symbolic link to {target}, which does not exist",
                dir.display()
            )));
        }
        Ok(dir)
    }

    fn cluster(&self) -> Result<Cluster> {
        Cluster::open(&self.dir()?)
    }

    /// The same for a command that starts nothing and has to work beside wrong settings, too; tells what is wrong with them.
    fn cluster_or_found(&self) -> Result<(Cluster, bool)> {
        let (cluster, wrong) = Cluster::open_or_found(&self.dir()?)?;
        if let Some(why) = &wrong {
            say::aside(format_args!(
                "hearth: {why}; no node starts before that is mended, and this command relies on the folders and processes in {}",
                quoted(&cluster.dir)
            ));
        }
        Ok((cluster, wrong.is_some()))
    }
}

#[derive(Debug, Args)]
struct Up {
    #[command(flatten)]
    place: Where,
    /// How many nodes, each with a copy of all files: an fsync returns when every one of them has what was written. All are on
    /// this machine. A cluster that exists gets more, and never fewer; one of one node has to be down for that [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    nodes: Option<u32>,
    /// How long a node may be silent before another one takes its place, in ms, 10 to 3600000; only when several nodes are
    /// made [default: 1000]
    #[arg(long, value_name = "MS", requires = "nodes")]
    lease: Option<u64>,
    /// How long a copy may keep programs waiting before it does not count any more, in ms; only when several nodes are made
    /// [default: 250]
    #[arg(long, value_name = "MS", requires = "nodes")]
    patience: Option<u64>,
    /// Where the pools lie; only for a new cluster [default: file]
    #[arg(long, value_enum, value_name = "MEDIUM")]
    medium: Option<MediumKind>,
    /// Data that a pool may hold, in MiB; only for a new cluster [default: 4096]
    #[arg(long, value_name = "MIB")]
    capacity: Option<u64>,
    /// Do not mount the nodes, now and when they start again
    #[arg(long, conflicts_with = "mount")]
    no_mount: bool,
    /// Mount them again, where they may be: takes --no-mount back
    #[arg(long)]
    mount: bool,
}

#[derive(Debug, Args)]
struct Down {
    #[command(flatten)]
    place: Where,
    /// Only this node
    #[arg(long, value_name = "K")]
    node: Option<u32>,
    /// Kill the daemon, the process of the mount and every attached program at once, as a power cut does
    #[arg(long)]
    hard: bool,
}

#[derive(Debug, Args)]
struct Remove {
    #[command(flatten)]
    place: Where,
    /// Remove it; without this only what would be removed is told
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Args)]
struct Move {
    #[command(flatten)]
    place: Where,
    /// The node that leads then
    #[arg(long, value_name = "K")]
    to: u32,
    /// Move also while programs are attached or use the mount: their data is kept, and their calls get EIO from then on
    #[arg(long)]
    force: bool,
    /// How long programs under hearth run --standby may take to end when they are asked to
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3600))]
    grace: u64,
    /// For machines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct OneNode {
    #[command(flatten)]
    place: Where,
    /// The node
    #[arg(long, value_name = "K", default_value_t = 1)]
    node: u32,
}

#[derive(Debug, Args)]
struct DaemonArguments {
    #[command(flatten)]
    node: OneNode,
    /// Wait until the keeper sends the socket over standard input
    #[arg(long, hide = true)]
    spare: bool,
}

#[derive(Debug, Args)]
struct Mount {
    #[command(flatten)]
    node: OneNode,
    /// Serve the mount in this process, until SIGTERM
    #[arg(long)]
    foreground: bool,
    /// Of a node of several: wait until it leads
    #[arg(long, conflicts_with = "foreground")]
    standby: bool,
    /// Set-user-id and set-group-id bits of programs count; for root
    #[arg(long)]
    suid: bool,
    /// Device files can be opened; for root
    #[arg(long)]
    dev: bool,
}

#[derive(Debug, Args)]
struct Umount {
    #[command(flatten)]
    node: OneNode,
    /// Take it away from programs that use it, too: their calls fail from then on
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct Run {
    #[command(flatten)]
    place: Where,
    /// The node on which it runs: of several the one that leads [default: that one]
    #[arg(long, value_name = "K")]
    node: Option<u32>,
    /// Wait until node K leads, then run the program, and end it when another node may lead; then wait again. The exit code is
    /// the program's, 128 + N if signal N ended it; while it waits signals end the command. Says on standard error what it waits
    /// for
    #[arg(long, requires = "node")]
    standby: bool,
    /// Of several nodes: how long it waits for one to lead, if none does
    #[arg(long, value_name = "SECONDS", default_value_t = 30, conflicts_with = "standby")]
    wait: u64,
    /// Where the program sees the tree; needs no mount. The program finds this path in its variable HEARTH_TREE [default: DIR/nK]
    #[arg(long, value_name = "PATH")]
    at: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Debug, Args)]
struct Within {
    /// End with the process of this number, which started this one
    #[arg(long, value_name = "PID")]
    under: Option<u32>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Debug, Args)]
struct Status {
    #[command(flatten)]
    place: Where,
    /// For machines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct PoolFolder {
    /// Folder of the pool: DIR/node-K/pool, or what `hearth status` calls pool
    #[arg(value_name = "POOL")]
    pool: PathBuf,
    /// For machines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Check {
    /// Folder of the pool: DIR/node-K/pool, or what `hearth status` calls pool
    #[arg(value_name = "POOL", required_unless_present = "against", conflicts_with = "against")]
    pool: Option<PathBuf>,
    /// Compare the copy at node K with that at the node that leads
    #[arg(long, value_name = "K")]
    against: Option<u32>,
    /// The cluster's folder [default: $HEARTH_DIR, else ~/.hearth]
    #[arg(long, value_name = "DIR", requires = "against")]
    dir: Option<PathBuf>,
    /// For machines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Pages {
    /// The folder
    folder: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Benches {
    /// Write, write+fsync, read hit and first read, at five sizes, beside floor and tmpfs; with --nodes write+fsync
    Latency(Latency),
    /// Create, stat, rename and so on, each a second and its middle time, beside tmpfs and a file system of a disk
    Ops(Ops),
    /// Overwrite, append, replace and commit without a pause: rates and stalls beside tmpfs, in three rounds
    Sustained(Sustained),
    /// SQLite, RocksDB, git, compilers, tar, rsync and so on, those that are here, through library and mount beside tmpfs
    ///
    /// Exit code 1: a program failed, or its result was wrong.
    Programs(Programs),
}

#[derive(Debug, Args)]
struct Bench {
    /// Where the measurement's own pool lies
    #[arg(long, value_enum, value_name = "MEDIUM", default_value = "memory")]
    medium: MediumKind,
    /// For machines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Latency {
    #[command(flatten)]
    bench: Bench,
    /// Measure a write and its fsync on so many nodes, at three sizes, beside a floor with as many processes, a tmpfs
    /// and a file system of a disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=2))]
    nodes: Option<u32>,
    /// A folder of the file system that is measured beside [default: the present folder]
    #[arg(long, value_name = "DIR", requires = "nodes")]
    beside: Option<PathBuf>,
    /// How many writes of each size, at most; fewer of long ones
    #[arg(long, value_name = "N", default_value_t = 4000, requires = "nodes",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
}

#[derive(Debug, Args)]
struct Ops {
    #[command(flatten)]
    bench: Bench,
    /// A folder of the file system that is measured beside [default: the present folder]
    #[arg(long, value_name = "DIR")]
    beside: Option<PathBuf>,
    /// How many of each operation
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
}

#[derive(Debug, Args)]
struct Sustained {
    #[command(flatten)]
    bench: Bench,
    /// Measure clusters of so many nodes of this machine, and beside them one of one node
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=3))]
    nodes: Option<u32>,
    /// MiB that each row writes
    #[arg(long, value_name = "MIB", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
    /// Rounds, each on a cluster of its own
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only these rows
    #[arg(long, value_name = "ROW", value_delimiter = ',', value_parser = sustained::row_names())]
    only: Vec<String>,
}

#[derive(Debug, Args)]
struct Programs {
    #[command(flatten)]
    bench: Bench,
    /// A folder of a further file system that is measured beside
    #[arg(long, value_name = "DIR")]
    beside: Option<PathBuf>,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only these programs
    #[arg(long, value_name = "ROW", value_delimiter = ',', value_parser = programs::row_names())]
    only: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum FloorProcess {
    /// Sends what the program stores to the replica
    Head {
        /// Folder on a tmpfs
        folder: PathBuf,
        /// Where the replica listens
        replica: String,
    },
    /// Stores what the head sends
    Replica {
        /// Folder on a tmpfs
        folder: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Measure {
    /// `writes`, `reads`, `syncs`, `operations`, `folder` or `sustained`
    what: String,
    /// Folder in the tree
    tree: PathBuf,
    /// Folder on a tmpfs
    scratch: PathBuf,
    /// Where the daemon answers
    control: PathBuf,
    /// A folder of a third file system
    #[arg(long)]
    beside: Option<PathBuf>,
    /// How many of each operation; MiB of a sustained load
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// The row of a sustained load
    #[arg(long)]
    row: Option<String>,
    /// Processes of the daemons of head and copy
    #[arg(long = "daemon")]
    daemons: Vec<i32>,
}

/// Does what was asked, and says on standard error why it could not.
pub fn run(arguments: Arguments) -> ExitCode {
    if !matches!(arguments.command, Command::Run(_) | Command::Within(_) | Command::Measure(_))
        && let Some(why) = run::leave_the_tree()
    {
        say::aside(format_args!("hearth: cannot leave the tree of hearth run: {why}"));
        return ExitCode::from(FAILED);
    }
    if matches!(arguments.command, Command::Up(_) | Command::Start(_) | Command::Mount(_)) {
        // A node lives on, and would keep what its starter had open or locked.
        ipc::pass_no_descriptors_on();
    }
    let done = match arguments.command {
        Command::Up(up) => up::run(&up),
        Command::Down(down) => down::run(&down),
        Command::Remove(arguments) => remove::run(&arguments),
        Command::Move(arguments) => move_lead::run(&arguments),
        Command::Start(node) => up::start(&node),
        Command::Run(run) => run::run(&run),
        Command::Within(within) => run::within(&within),
        Command::Mount(arguments) => mount::mount(&arguments),
        Command::Umount(arguments) => mount::umount(&arguments),
        Command::Guard => mount::guard(),
        Command::Bench(Benches::Latency(latency)) => syncs::latency(&latency),
        Command::Bench(Benches::Ops(ops)) => bench::ops(&ops),
        Command::Bench(Benches::Sustained(arguments)) => sustained::sustained(&arguments),
        Command::Bench(Benches::Programs(arguments)) => programs::programs(&arguments),
        Command::Measure(measure) => bench::measure(&measure),
        Command::Floor(party) => syncs::floor(&party),
        Command::Status(status) => status::run(&status),
        Command::Check(arguments) => check::run(&arguments),
        Command::Inspect(pool) => inspect::run(&pool),
        Command::Manager(manager) => manager::run(&manager),
        Command::Cluster(command) => cluster::run(&command),
        Command::Serve(node) => serve::run(&node),
        Command::Daemon(node) => daemon::run(&node),
        Command::Pages(pages) => pages::run(&pages),
    };
    done.unwrap_or_else(|why| {
        say::aside(format_args!("hearth: {why}"));
        ExitCode::from(FAILED)
    })
}

/// Exit code of a command that could not do what it was asked. For `status` it means down.
const FAILED: u8 = 2;

/// From here on what happens is told on standard error, which is a log file ([`LogFile`]); `HEARTH_LOG` says how much.
pub(crate) fn speak() {
    let chosen = std::env::var("HEARTH_LOG").unwrap_or_default();
    let level = match chosen.as_str() {
        "" => Some(LevelFilter::INFO),
        chosen => chosen.parse().ok(),
    };
    tracing_subscriber::fmt()
        .with_writer(LogFile::of_stderr())
        .with_ansi(false)
        // A log that cannot be written is no reason to end, and the message about it would panic.
        .log_internal_errors(false)
        .with_max_level(level.unwrap_or(LevelFilter::INFO))
        .init();
    if level.is_none() {
        warn!("HEARTH_LOG={chosen} is none of error, warn, info, debug: it is info");
    }
}

/// From here on a panic on any thread ends the process, once it is reported. For processes that keep data on which
/// others rely: no other thread sees a half-finished change, and the process that is started next recovers.
pub(crate) fn abort_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}
