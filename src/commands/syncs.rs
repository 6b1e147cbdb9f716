//! `hearth bench latency --nodes`: a write and its fsync on several nodes, beside its floor.

use super::bench::{self, folder_beside, line, print_json, ratio, us, with_cluster};
use super::{FloorProcess, Latency};
use crate::error::Result;
use crate::floor;
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
        let rest = [OsStr::new("--beside"), beside.as_os_str(), OsStr::new("--count"), OsStr::new(&count)];
        measuring.part("syncs", &rest)
    })?;
    if arguments.bench.json {
        print_json(&rows)?;
    } else {
        print(arguments, &beside, &rows);
    }
    Ok(ExitCode::SUCCESS)
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
}

/// `hearth floor`: a process of the floor.
pub(super) fn floor(process: &FloorProcess) -> Result<ExitCode> {
    match process {
        FloorProcess::Head { folder, replica } => floor::head(folder, replica)?,
        FloorProcess::Replica { folder } => floor::replica(folder)?,
    }
    Ok(ExitCode::SUCCESS)
}
