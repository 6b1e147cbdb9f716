//! `hearth bench latency`: a cluster of its own for as long as it measures, and a table at the end.

use super::{Bench, Measure, run, up};
use crate::cluster::{Cluster, MediumKind, Node};
use crate::error::{Error, Result};
use crate::measure::{self, Row};
use crate::process::Process;
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

/// Data that the measurement's pool may hold, in MiB.
const CAPACITY_MIB: u64 = 1024;

pub(super) fn latency(arguments: &Bench) -> Result<ExitCode> {
    let folder = Scratch::new()?;
    let cluster = Cluster::create(&folder.0.join("cluster"), arguments.medium, CAPACITY_MIB << 20)?;
    let node = cluster.node(1)?;
    up::start_node(&cluster, node)?;
    let rows = measured(&cluster, node, &folder.0);
    if let Some(daemon) = Process::load(&cluster.pid_file(node)) {
        daemon.end(Signal::TERM, Duration::from_secs(60))?;
    }
    // A pool in memory does not lie in the folder that goes with the scratch space.
    let _ = fs::remove_dir_all(&node.pool);
    let rows = rows?;
    if arguments.json {
        let text = serde_json::to_string_pretty(&rows).map_err(|why| Error::new(why.to_string()))?;
        println!("{text}");
    } else {
        print(arguments.medium, &rows);
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs both halves, each in a program of its own that sees the tree.
fn measured(cluster: &Cluster, node: &Node, folder: &Path) -> Result<Vec<Row>> {
    let program =
        std::env::current_exe().map_err(|why| Error::new(format!("cannot find this program: {why}")))?;
    let (tree, scratch) = (cluster.tree(node), folder.join("scratch"));
    fs::create_dir_all(&scratch).map_err(Error::at("make", &scratch))?;
    let mut rows = Vec::new();
    for half in ["writes", "reads"] {
        eprintln!("measuring {half} ...");
        let mut command = run::preloaded(&program, node, &tree)?;
        command.args(["measure", half]).arg(&tree).arg(&scratch);
        let answer = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let answer = answer.map_err(Error::at("run", &program))?;
        if !answer.status.success() {
            return Err(Error::new(format!("measuring {half} failed: {}", answer.status)));
        }
        rows = serde_json::from_slice(&answer.stdout).map_err(Error::at("understand", &program))?;
        let file = scratch.join("rows");
        fs::write(&file, &answer.stdout).map_err(Error::at("write", &file))?;
    }
    Ok(rows)
}

/// `hearth measure`: one half, inside.
pub(super) fn measure(arguments: &Measure) -> Result<ExitCode> {
    let rows = match arguments.half.as_str() {
        "writes" => measure::writes(&arguments.tree, &arguments.scratch)?,
        _ => {
            let file = arguments.scratch.join("rows");
            let text = fs::read(&file).map_err(Error::at("read", &file))?;
            let mut rows: Vec<Row> = serde_json::from_slice(&text).map_err(Error::at("understand", &file))?;
            measure::reads(&arguments.tree, &arguments.scratch, &mut rows)?;
            rows
        }
    };
    println!("{}", serde_json::to_string(&rows).map_err(|why| Error::new(why.to_string()))?);
    Ok(ExitCode::SUCCESS)
}

fn print(medium: MediumKind, rows: &[Row]) {
    println!(
        "Medium {medium:?}; median microseconds a call. The floor of a write is a non-temporal copy with checksum"
    );
    println!("and fence of the same bytes, that of a read a memcpy, both measured in this run.");
    println!();
    let head = ["bytes", "bare copy", "floor", "write", "ratio", "tmpfs", "sustained"];
    line(&head.map(String::from));
    for row in rows {
        line(&[
            row.bytes.to_string(),
            us(row.copy_ns),
            us(row.persist_ns),
            us(row.write_ns),
            ratio(row.write_ns, row.persist_ns),
            us(row.tmpfs_write_ns),
            us(row.sustained_ns),
        ]);
    }
    println!();
    line(&["bytes", "write+fsync", "ratio", "tmpfs", "", "", ""].map(String::from));
    for row in rows {
        let cells = [us(row.sync_ns), ratio(row.sync_ns, row.persist_ns), us(row.tmpfs_sync_ns)];
        let [sync, times, tmpfs] = cells;
        line(&[row.bytes.to_string(), sync, times, tmpfs, String::new(), String::new(), String::new()]);
    }
    println!();
    line(&["bytes", "memcpy", "read hit", "ratio", "tmpfs", "first read", "ratio"].map(String::from));
    for row in rows {
        line(&[
            row.bytes.to_string(),
            us(row.memcpy_ns),
            us(row.hit_ns),
            ratio(row.hit_ns, row.memcpy_ns),
            us(row.tmpfs_hit_ns),
            us(row.first_ns),
            ratio(row.first_ns, row.memcpy_ns),
        ]);
    }
}

fn line(cells: &[String; 7]) {
    let text: Vec<_> = cells.iter().map(|cell| format!("{cell:>11}")).collect();
    println!("{}", text.join(" ").trim_end());
}

fn us(ns: u64) -> String {
    format!("{:.2}", ns as f64 / 1000.0)
}

fn ratio(ns: u64, floor_ns: u64) -> String {
    format!("{:.2}x", ns as f64 / floor_ns.max(1) as f64)
}

/// A folder on a tmpfs that goes with the command.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let path = PathBuf::from(format!("/dev/shm/hearth-bench-{}", std::process::id()));
        fs::create_dir(&path).map_err(Error::at("make", &path))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
