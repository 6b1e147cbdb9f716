//! `hearth status`: what each daemon says of itself, for people or machines.

use super::Status;
use crate::error::{Error, Result};
use crate::say;
use crate::status::{NodeStatus, ask};
use serde::Serialize;
use std::process::ExitCode;

/// A node that answers, or why it does not.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Up(Box<NodeStatus>),
    Down {
        node: u32,
        down: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
}

pub(super) fn run(arguments: &Status) -> Result<ExitCode> {
    let cluster = arguments.place.cluster()?;
    let answers: Vec<Answer> = cluster
        .settings
        .nodes
        .iter()
        .map(|node| match ask(&cluster.control(node)) {
            Ok(status) => Answer::Up(Box::new(status)),
            Err(why) => {
                Answer::Down { node: node.number, down: why.to_string(), failure: cluster.failure(node) }
            }
        })
        .collect();
    if arguments.json {
        let text = serde_json::to_string_pretty(&answers)
            .map_err(|why| Error::new(format!("cannot write the status: {why}")))?;
        say::line(text);
    } else {
        answers.iter().for_each(print);
    }
    let up = answers.iter().filter(|answer| matches!(answer, Answer::Up(_))).count();
    Ok(ExitCode::from(match up {
        0 => 2,
        up if up < answers.len() => 1,
        _ => 0,
    }))
}

fn print(answer: &Answer) {
    let status = match answer {
        Answer::Down { node, down, failure } => {
            say::line(format_args!("node {node}: down ({down})"));
            return say_failure(failure.as_deref());
        }
        Answer::Up(status) => status,
    };
    say::line(format_args!("node {}: up, process {}, tree at {}", status.node, status.pid, status.tree));
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
