//! `hearth bench latency --nodes`: a write and its fsync on several nodes, beside its floor.

use super::bench::{self, Measuring, folder_beside, line, print_json, ratio, us, with_cluster};
use super::{FloorProcess, Latency};
use crate::error::{Error, Result};
use crate::floor;
use crate::process::Process;
use crate::say;
use crate::syncs::{SyncRow, Times};
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

/// Data that the pools of the measurement may hold, in MiB.
const CAPACITY_MIB: u64 = 256;

pub(super) fn latency(arguments: &Latency) -> Result<ExitCode> {
    let Some(nodes) = arguments.nodes else { return bench::latency(&arguments.bench) };
    let beside = folder_beside(arguments.beside.as_deref())?;
    let (medium, count) = (arguments.bench.medium, arguments.count.to_string());
    let rows: Vec<SyncRow> = with_cluster((medium, nodes), CAPACITY_MIB, |measuring| {
        let mut rest =
            vec![OsStr::new("--beside"), beside.as_os_str(), OsStr::new("--count"), OsStr::new(&count)];
        let daemons = daemons(measuring)?;
        daemons.iter().for_each(|daemon| rest.extend([OsStr::new("--daemon"), OsStr::new(daemon)]));
        measuring.part("syncs", &rest)
    })?;
    if arguments.bench.json {
        print_json(&rows)?;
    } else {
        print(arguments, &beside, &rows);
    }
    Ok(ExitCode::SUCCESS)
}

/// Processes of the daemons, that of the head first.
fn daemons(measuring: &Measuring<'_>) -> Result<Vec<String>> {
    let (cluster, head) = (measuring.cluster, measuring.node);
    let others = cluster.settings.nodes.iter().filter(|node| node.number != head.number);
    let daemons = std::iter::once(head).chain(others).map(|node| {
        let daemon = Process::load(&cluster.pid_file(node));
        daemon.map(|daemon| daemon.pid().to_string()).ok_or_else(|| Error::new("a daemon has ended"))
    });
    daemons.collect()
}

fn print(arguments: &Latency, beside: &Path, rows: &[SyncRow]) {
    say::line(format_args!(
        "Medium {}; microseconds of a write and its fsync on {} nodes of this machine. The floor is three processes that",
        arguments.bench.medium,
        arguments.nodes.unwrap_or(1)
    ));
    say::line(
        "store the same bytes at two places and do nothing else, over the same connection. All take turns in this run;",
    );
    say::line(format_args!("disk is {}.", beside.display()));
    let table = |name: &str, of: &dyn Fn(&Times) -> u64| {
        say::line("");
        line(&["bytes", name, "floor", "ratio", "tmpfs", "disk"].map(String::from));
        for row in rows {
            let [hearth, floor, tmpfs, disk] = [&row.hearth, &row.floor, &row.tmpfs, &row.beside].map(of);
            line(&[row.bytes.to_string(), us(hearth), us(floor), ratio(hearth, floor), us(tmpfs), us(disk)]);
        }
    };
    table("median", &|times| times.p50_ns);
    table("99 of 100", &|times| times.p99_ns);
    say::line("");
    say::line(
        "Medians of a program that sleeps for a millisecond before each write, and of the floor after the same pause:",
    );
    line(&["bytes", "hearth", "floor", "ratio"].map(String::from));
    for row in rows {
        let (hearth, floor) = (row.paused.p50_ns, row.paused_floor.p50_ns);
        line(&[row.bytes.to_string(), us(hearth), us(floor), ratio(hearth, floor)]);
    }
    for row in rows {
        let Some(first) = row.first_pass else { continue };
        say::line("");
        say::line(format_args!(
            "While the kernel still provides the memory of the program's log, {} bytes take {}: not in the tables.",
            row.bytes,
            us(first.p50_ns)
        ));
    }
    say::line("");
    say::line(
        "Medians by the processors of program, head and copy, which are the same for Hearth and the floor:",
    );
    line(&["bytes", "processors", "hearth", "floor", "ratio"].map(String::from));
    for row in rows {
        for placed in &row.placements {
            let processors = placed.processors.map(|processor| processor.to_string()).join(" ");
            let (hearth, floor) = (placed.hearth_ns, placed.floor_ns);
            line(&[row.bytes.to_string(), processors, us(hearth), us(floor), ratio(hearth, floor)]);
        }
    }
}

/// `hearth floor`: a process of the floor.
pub(super) fn floor(process: &FloorProcess) -> Result<ExitCode> {
    match process {
        FloorProcess::Head { folder, replica } => floor::head(folder, replica)?,
        FloorProcess::Replica { folder } => floor::replica(folder)?,
    }
    Ok(ExitCode::SUCCESS)
}
