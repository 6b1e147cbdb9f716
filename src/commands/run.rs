//! `hearth run`: the command itself, in this process, with the library loaded before its own; with `--standby` it is a child
//! ([`standby`]).

use super::down::ENVIRONMENT_SOCKET;
use super::{Run, Within, standby};
use crate::chain::waiting::until_any_leads;
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::health;
use crate::mountpoint;
use crate::process::{Process, this_program};
use crate::say::{self, quoted};
use crate::status::reach;
use std::env;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// The variable that says where the program sees the tree.
const ENVIRONMENT_AT: &str = "HEARTH_AT";
/// The same for the program itself, as a part of what is promised to it.
const ENVIRONMENT_TREE: &str = "HEARTH_TREE";
/// The variable by which the library hands open files to the next program.
const ENVIRONMENT_INHERIT: &str = "HEARTH_INHERIT";
/// The variable that says where the tree is mounted, if it is.
const ENVIRONMENT_MOUNT: &str = "HEARTH_MOUNT";
/// The variable by which a program that `run --standby` started is known, which ends when it is asked to.
pub(super) const ENVIRONMENT_STANDBY: &str = "HEARTH_STANDBY";
/// File name of the library.
pub(super) const LIBRARY: &str = "libhearth.so";

pub(super) fn run(arguments: &Run) -> Result<ExitCode> {
    let cluster = arguments.place.cluster()?;
    let chosen = match arguments.node.filter(|_| arguments.standby) {
        Some(number) => Ok(cluster.node(number)?),
        None => chosen(&cluster, arguments.node, Duration::from_secs(arguments.wait))?,
    };
    let node = match chosen {
        Ok(node) => node,
        Err(why) => {
            say::aside(format_args!("hearth: {why}"));
            return Ok(ExitCode::FAILURE);
        }
    };
    let at = seen_at(arguments, &cluster, node)?;
    let [program, rest @ ..] = &arguments.command[..] else {
        return Err(Error::new("no command was given"));
    };
    mountpoint::tidy(&cluster, node);
    let mut command = preloaded(Path::new(program), &cluster, node, &at)?;
    warn(program, &cluster, node, &at)?;
    let own = env::current_exe().map_err(|why| Error::new(format!("cannot find this program: {why}")))?;
    let within = || preloaded(&own, &cluster, node, &at);
    if arguments.standby {
        return standby::run(&cluster, node, || {
            let mut command = within()?;
            command.arg("within").args(["--under", &std::process::id().to_string(), "--"]);
            command.args(&arguments.command).env(ENVIRONMENT_STANDBY, "1");
            Ok(command)
        });
    }
    match reach(&cluster.control(node)).map_err(|why| why.kind()) {
        Err(ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            tell_that_no_daemon_serves(&cluster, node, &at)
        }
        // A user to whom the daemon's own socket is closed (`PermissionDenied`) is served all the same.
        _ => tell_of_silence(&cluster, node),
    }
    let mut why = command.args(rest).exec();
    // It may lie in the tree, which this process does not see, but one that is preloaded does.
    if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) {
        why = within()?.args(["within", "--"]).args(&arguments.command).exec();
    }
    Ok(not_run(program, &why))
}

/// Where the program sees the tree.
fn seen_at(arguments: &Run, cluster: &Cluster, node: &Node) -> Result<PathBuf> {
    let at = match &arguments.at {
        Some(path) if path == Path::new("/") => {
            return Err(Error::new("--at / would hide every other file"));
        }
        Some(path) if path.is_absolute() && !path.components().any(|part| part == Component::ParentDir) => {
            path.clone()
        }
        Some(path) => {
            return Err(Error::new(format!("--at {} must be an absolute path without ..", path.display())));
        }
        None => cluster.tree(node),
    };
    if let Some((mount, kind)) = mountpoint::of_the_kernel(&at) {
        return Err(Error::new(format!(
            "--at {} would hide {}, a file system of the kernel ({kind}) that programs need",
            at.display(),
            mount.display()
        )));
    }
    Ok(at)
}

/// Says what the user who started the program may not expect.
fn warn(program: &OsStr, cluster: &Cluster, node: &Node, at: &Path) -> Result<()> {
    if let Some(warning) = mountpoint::warning_at(cluster, node, at) {
        say::aside(format_args!("hearth: {warning}"));
    }
    if let Some(outer) = outer_tree(node, at) {
        say::aside(format_args!(
            "hearth: warning: this is a hearth run within another: the program does not see the tree at {}, only that at {}",
            outer.display(),
            at.display()
        ));
    }
    if let Some(closed) = closed_to_others(&library()?).filter(|_| rustix::process::geteuid().is_root()) {
        say::aside(format_args!(
            "hearth: warning: other users cannot reach {}, so a program that becomes another user and starts the next one \
             loses the tree; install hearth and libhearth.so elsewhere, or open it",
            closed.display()
        ));
    }
    if let Some(why) = crate::program::cannot_see_the_tree(program) {
        say::aside(format_args!(
            "hearth: warning: {why}, so the library does not reach it and it does not see the tree; hearth mount --dir {} \
             shows it to every program",
            quoted(&cluster.dir)
        ));
    }
    Ok(())
}

/// The node on which a program runs; or why there is none for it now.
fn chosen(
    cluster: &Cluster,
    named: Option<u32>,
    patience: Duration,
) -> Result<std::result::Result<&Node, String>> {
    let node = cluster.node(named.unwrap_or(1))?;
    if cluster.settings.chain.is_none() {
        return Ok(Ok(node));
    }
    let parts = until_any_leads(cluster, patience);
    match (parts.leader(), named) {
        (Some((leader, _)), None) => Ok(Ok(cluster.node(leader)?)),
        (Some((leader, _)), Some(named)) if leader == named => Ok(Ok(node)),
        (Some((leader, _)), Some(named)) => Ok(Err(format!(
            "node {leader} leads, not node {named}: hearth run --dir {} --node {leader}",
            quoted(&cluster.dir)
        ))),
        (None, _) if parts.are_forbidden() => Ok(Err(format!(
            "this user may not search the folders of the nodes in {}, and so cannot attach a program",
            quoted(&cluster.dir)
        ))),
        (None, _) => Ok(Err(format!(
            "no node leads now (hearth status --dir {} says what they wait for)",
            quoted(&cluster.dir)
        ))),
    }
}

/// Where this process, under a `hearth run` itself, sees a tree that the program to run will not see.
fn outer_tree(node: &Node, at: &Path) -> Option<PathBuf> {
    let (socket, outer) = (env::var_os(ENVIRONMENT_SOCKET)?, env::var_os(ENVIRONMENT_AT)?);
    let loaded = env::var_os("LD_PRELOAD").is_some_and(|all| all.display().to_string().contains(LIBRARY));
    let same = socket == node.socket && outer == at;
    (loaded && !same).then(|| outer.into())
}

/// Runs this program anew without the library, if a program under `hearth run` has started it: a daemon or a mount must not use
/// the tree that it serves, and the kernel finds no mount where the library shows the tree. Returns only to say why it cannot.
pub(super) fn leave_the_tree() -> Option<std::io::Error> {
    let preload = env::var_os("LD_PRELOAD")?;
    let all = preload.as_encoded_bytes().split(|byte| matches!(byte, b':' | b' ')).map(OsStr::from_bytes);
    let (ours, others): (Vec<_>, Vec<_>) =
        all.filter(|one| !one.is_empty()).partition(|one| Path::new(one).ends_with(LIBRARY));
    if ours.is_empty() {
        return None;
    }
    let mut command = this_program();
    command.args(env::args_os().skip(1));
    // A library that serves the tree restores what is missing in the environment of the next program. So the first exec only
    // tells it to serve none, and the next one removes it.
    if env::var_os(ENVIRONMENT_SOCKET).is_some_and(|socket| !socket.is_empty()) {
        return Some(command.env(ENVIRONMENT_SOCKET, "").exec());
    }
    for variable in
        [ENVIRONMENT_SOCKET, ENVIRONMENT_AT, ENVIRONMENT_MOUNT, ENVIRONMENT_TREE, ENVIRONMENT_INHERIT]
    {
        command.env_remove(variable);
    }
    match others.is_empty() {
        true => command.env_remove("LD_PRELOAD"),
        false => command.env("LD_PRELOAD", others.join(OsStr::new(":"))),
    };
    Some(command.exec())
}

/// `hearth within`: runs the command as it is seen from inside.
pub(super) fn within(arguments: &Within) -> Result<ExitCode> {
    let [program, rest @ ..] = &arguments.command[..] else {
        return Err(Error::new("no command was given"));
    };
    if let Some(parent) = arguments.under {
        standby::die_with(parent)?;
    }
    let why = Command::new(program).args(rest).exec();
    Ok(not_run(program, &why))
}

/// As shells answer: 127 if there is no such program, 126 if it cannot be run.
fn not_run(program: &OsStr, why: &std::io::Error) -> ExitCode {
    say::aside(format_args!("hearth: cannot run {}: {why}", program.display()));
    ExitCode::from(if why.kind() == ErrorKind::NotFound { 127 } else { 126 })
}

/// A daemon that is stopped serves no call; one that is only busy does soon.
fn tell_of_silence(cluster: &Cluster, node: &Node) {
    if let Some(daemon) = Process::load(&cluster.pid_file(node)).filter(Process::is_stopped) {
        say::aside(format_args!("hearth: node {}: {}", node.number, health::silence(cluster, node, &daemon)));
    }
}

/// The program's calls will fail, which the user who started it may not know.
fn tell_that_no_daemon_serves(cluster: &Cluster, node: &Node, at: &Path) {
    say::aside(format_args!(
        "hearth: node {} is not served now; until it is, each call on {} waits {} seconds and gets EIO (hearth start --dir {})",
        node.number,
        at.display(),
        libfs::FIRST_WAIT.as_secs(),
        quoted(&cluster.dir)
    ));
    if let Some(failure) = cluster.failure(node) {
        say::aside(format_args!("hearth: node {}: FAILED: {failure}", node.number));
    }
}

/// A command that sees the node's tree at a path.
pub(super) fn preloaded(program: &Path, cluster: &Cluster, node: &Node, at: &Path) -> Result<Command> {
    let mut preload = library()?.into_os_string();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", preload).env(ENVIRONMENT_SOCKET, &node.socket).env(ENVIRONMENT_AT, at);
    command.env(ENVIRONMENT_MOUNT, cluster.tree(node)).env(ENVIRONMENT_TREE, at);
    Ok(command)
}

/// The obstacle for users other than owner and group to read a file: the first folder above it that they may not
/// search, or the file.
fn closed_to_others(file: &Path) -> Option<PathBuf> {
    let mut way: Vec<&Path> = file.ancestors().collect();
    way.reverse();
    let lacks = |path: &&&Path| {
        let right = if **path == file { 0o004 } else { 0o001 };
        path.metadata().is_ok_and(|found| found.mode() & right == 0)
    };
    way.iter().find(lacks).map(|path| path.to_path_buf())
}

/// `libhearth.so`, which stands beside this program.
fn library() -> Result<PathBuf> {
    let program = env::current_exe().map_err(|why| Error::new(format!("cannot find this program: {why}")))?;
    let beside = program.with_file_name(LIBRARY);
    // Where `make install` puts it.
    let installed =
        program.parent().and_then(Path::parent).map(|prefix| prefix.join("lib/hearth").join(LIBRARY));
    let library = installed.filter(|library| !beside.exists() && library.exists()).unwrap_or(beside);
    if !library.exists() {
        return Err(Error::new(format!("{} is missing: build it with make build", library.display())));
    }
    let spaced = |path: &OsString| path.as_encoded_bytes().iter().any(|byte| matches!(byte, b' ' | b':'));
    if spaced(&library.clone().into_os_string()) {
        return Err(Error::new(format!(
            "{} has a space or a colon in its path, which the loader takes for the end of the path",
            library.display()
        )));
    }
    Ok(library)
}
