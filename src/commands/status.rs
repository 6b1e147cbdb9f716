//! `hearth status`: what each daemon says of itself, for people or machines.

use super::Status;
use crate::cluster::MediumKind;
use crate::error::{Error, Result};
use crate::mountpoint::{Stand, stand};
use crate::say;
use crate::status::{NodeStatus, ask};
use serde::Serialize;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code when a user may not ask.
const UNKNOWN: u8 = 3;

/// A node that answers, or why it does not.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Up {
        #[serde(flatten)]
        status: Box<NodeStatus>,
        mount: Stand,
    },
    /// Whether it is up only others may know.
    Unknown { node: u32, unknown: String },
    Down {
        node: u32,
        down: String,
        tree: PathBuf,
        mount: Stand,
        pool: PathBuf,
        medium: MediumKind,
        #[serde(skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
}

pub(super) fn run(arguments: &Status) -> Result<ExitCode> {
    let settings = arguments.place.dir()?.join("hearth.toml");
    if fs::File::open(&settings).is_err_and(|why| why.kind() == ErrorKind::PermissionDenied) {
        say::aside(format_args!("hearth: not known: this user may not read {}", settings.display()));
        return Ok(ExitCode::from(UNKNOWN));
    }
    let cluster = arguments.place.cluster()?;
    let answers: Vec<Answer> = cluster
        .settings
        .nodes
        .iter()
        .map(|node| match ask(&cluster.control(node)) {
            Ok(status) => Answer::Up { status: Box::new(status), mount: stand(&cluster, node) },
            Err(why) if is_forbidden(&cluster.control(node)) => Answer::Unknown {
                node: node.number,
                unknown: format!(
                    "this user may not ask the daemon, only the node's user and root may: {why}"
                ),
            },
            Err(why) => Answer::Down {
                node: node.number,
                down: why.to_string(),
                tree: cluster.tree(node),
                mount: stand(&cluster, node),
                pool: node.pool.clone(),
                medium: cluster.settings.medium,
                failure: cluster.failure(node),
            },
        })
        .collect();
    if arguments.json {
        let text = serde_json::to_string_pretty(&answers)
            .map_err(|why| Error::new(format!("cannot write the status: {why}")))?;
        say::line(text);
    } else {
        answers.iter().for_each(print);
    }
    if answers.iter().any(|answer| matches!(answer, Answer::Unknown { .. })) {
        return Ok(ExitCode::from(UNKNOWN));
    }
    let up = answers.iter().filter(|answer| matches!(answer, Answer::Up { .. })).count();
    Ok(ExitCode::from(match up {
        0 => 2,
        up if up < answers.len() => 1,
        _ => 0,
    }))
}

/// The kernel says so before it says whether somebody listens.
fn is_forbidden(control: &Path) -> bool {
    UnixStream::connect(control).is_err_and(|why| why.kind() == ErrorKind::PermissionDenied)
}

fn print(answer: &Answer) {
    let (status, mount) = match answer {
        Answer::Unknown { node, unknown } => {
            return say::line(format_args!("node {node}: not known ({unknown})"));
        }
        Answer::Down { node, down, tree, mount, pool, medium, failure } => {
            say::line(format_args!("node {node}: down ({down})"));
            say::line(format_args!("  tree at {}, {}", tree.display(), mounted(*mount)));
            say::line(format_args!("  medium {medium}, pool {}", pool.display()));
            return say_failure(failure.as_deref());
        }
        Answer::Up { status, mount } => (status, mount),
    };
    say::line(format_args!("node {}: up, process {}, tree at {}", status.node, status.pid, status.tree));
    say::line(format_args!("  {}", mounted(*mount)));
    say::line(format_args!("  an fsync survives: {}", survives(&status.survives)));
    say::line(format_args!("  copies {}, medium {}, pool {}", status.copies, status.medium, status.pool));
    let used = status.blocks - status.blocks_free.min(status.blocks);
    say::line(format_args!(
        "  {} of {} MiB used, {} inodes, {} flips",
        used >> 8,
        status.blocks >> 8,
        status.inodes,
        status.flips
    ));
    if status.restarts > 0 {
        say::line(format_args!(
            "  the daemon died {} times and was started again: see its log",
            status.restarts
        ));
    }
    say_failure(status.failure.as_deref());
    for loss in &status.losses {
        say::line(format_args!("  LOST: {loss}"));
    }
    for end in &status.forced_ends {
        say::line(format_args!("  ended by force: {end}"));
    }
    for program in &status.programs {
        say::line(format_args!(
            "  process {} of user {}: log {} of {} KiB, {} leases",
            program.pid,
            program.uid,
            program.log,
            program.log_bytes >> 10,
            program.leases
        ));
    }
}

fn say_failure(failure: Option<&str>) {
    if let Some(failure) = failure {
        say::line(format_args!("  FAILED: {failure}"));
    }
}

fn survives(class: &str) -> &str {
    match class {
        "process" => "the end of the program and of the daemon, not of the machine",
        "power" => "a power cut",
        other => other,
    }
}

fn mounted(mount: Stand) -> &'static str {
    match mount {
        Stand::Tree => "mounted",
        Stand::Nothing => "not mounted: hearth run shows it to a program, hearth mount to every one",
        Stand::DeadMount => "mounted, but its gateway is gone: hearth umount takes it away",
        Stand::Other => "not mounted, and what lies there is not in the tree: move it away",
    }
}
