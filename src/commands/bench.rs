//! `hearth bench`: a cluster of its own for as long as it measures, and a table at the end.

use super::{Bench, Measure, Ops, down, run, sustained, up};
use crate::chain::settings::{ChainSettings, PoolShape};
use crate::chain::{self, waiting};
use crate::cluster::{Cluster, MediumKind, Node};
use crate::error::{Error, Result};
use crate::making::CreatedFiles;
use crate::measure::{self, Row};
use crate::operations::{self, Figure};
use crate::say;
use crate::syncs;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Data that the measurement's pool may hold, in MiB.
const CAPACITY_MIB: u64 = 1024;

pub(super) fn latency(arguments: &Bench) -> Result<ExitCode> {
    let rows = with_cluster((arguments.medium, 1), CAPACITY_MIB, |measuring| {
        let mut rows: Vec<Row> = measuring.part("writes", &[])?;
        let file = measuring.scratch.join("rows");
        let text = serde_json::to_vec(&rows).map_err(|why| Error::new(why.to_string()))?;
        fs::write(&file, text).map_err(Error::at("write", &file))?;
        rows = measuring.part("reads", &[])?;
        Ok(rows)
    })?;
    if arguments.json {
        print_json(&rows)?;
    } else {
        print(arguments.medium, &rows);
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn ops(arguments: &Ops) -> Result<ExitCode> {
    let beside = folder_beside(arguments.beside.as_deref())?;
    let count = arguments.count.to_string();
    let rest = [OsStr::new("--beside"), beside.as_os_str(), OsStr::new("--count"), OsStr::new(&count)];
    let places: Vec<PlaceFigures> = with_cluster((arguments.bench.medium, 1), CAPACITY_MIB, |measuring| {
        measuring.part("operations", &rest)
    })?;
    if arguments.bench.json {
        print_json(&places)?;
    } else {
        print_operations(arguments.bench.medium, &beside, &places);
    }
    Ok(ExitCode::SUCCESS)
}

/// The folder of the file system that is measured beside: the present one if none was named.
pub(super) fn folder_beside(named: Option<&Path>) -> Result<PathBuf> {
    let beside = match named {
        Some(folder) => folder.to_owned(),
        None => std::env::current_dir().map_err(|why| Error::new(format!("where is this: {why}")))?,
    };
    beside.canonicalize().map_err(Error::at("find", &beside))
}

/// Operations in one folder.
#[derive(Debug, Serialize, Deserialize)]
struct PlaceFigures {
    /// `hearth`, `tmpfs` or `beside`.
    place: String,
    /// Their times.
    operations: Vec<Figure>,
}

/// A cluster that is there to be measured.
pub(super) struct Measuring<'a> {
    pub cluster: &'a Cluster,
    /// The node that leads.
    pub node: &'a Node,
    /// Folder on a tmpfs.
    pub scratch: PathBuf,
}

/// Lines of a node's log that a measurement which failed repeats; the first ones say how it began.
const TROUBLES_MAX: usize = 20;

/// Runs measurements on a cluster of its own, which goes with them.
pub(super) fn with_cluster<T>(
    (medium, nodes): (MediumKind, u32),
    capacity_mib: u64,
    measure: impl FnOnce(&Measuring<'_>) -> Result<T>,
) -> Result<T> {
    let folder = Scratch::new()?;
    let capacity_bytes = capacity_mib << 20;
    let chain = if nodes > 1 { Some(ChainSettings::new(PoolShape::new(capacity_bytes)?)) } else { None };
    let mut cluster = Cluster::create(
        &folder.0.join("cluster"),
        (medium, capacity_bytes),
        (nodes, chain),
        &mut CreatedFiles::default(),
    )?;
    // A node of several mounts itself when it leads.
    cluster.settings.mount = false;
    cluster.save()?;
    let scratch = folder.0.join("scratch");
    fs::create_dir_all(&scratch).map_err(Error::at("make", &scratch))?;
    chain::manager::start(&cluster)?;
    let measured = started(&cluster)
        .and_then(|node| measure(&Measuring { cluster: &cluster, node, scratch: scratch.clone() }));
    if measured.is_err() {
        cluster.settings.nodes.iter().for_each(|node| tell_troubles(&cluster, node));
    }
    for node in cluster.settings.nodes.iter().rev() {
        down::stop(&cluster, node, measured.is_err())?;
    }
    chain::manager::stop(&cluster, measured.is_err())?;
    for node in &cluster.settings.nodes {
        // A pool in memory does not lie in the folder that goes with the scratch space.
        let _ = fs::remove_dir_all(&node.pool);
    }
    measured
}

/// Says what went wrong at a node: its log goes with the cluster.
fn tell_troubles(cluster: &Cluster, node: &Node) {
    let log = fs::read_to_string(cluster.folder(node).join("serve.log")).unwrap_or_default();
    let troubles = log.lines().filter(|line| [" WARN ", " ERROR "].iter().any(|level| line.contains(level)));
    for line in troubles.take(TROUBLES_MAX) {
        say::aside(format_args!("node {}: {line}", node.number));
    }
}

/// Starts all nodes; gives the one that leads when all are in sync.
fn started(cluster: &Cluster) -> Result<&Node> {
    for node in &cluster.settings.nodes {
        up::start_node(cluster, node)?;
    }
    if cluster.settings.chain.is_some() { waiting::until_in_sync(cluster) } else { cluster.node(1) }
}

impl Measuring<'_> {
    /// Runs a part of a measurement in a program of its own that sees the tree.
    pub fn part<T: DeserializeOwned>(&self, what: &str, rest: &[&OsStr]) -> Result<T> {
        say::aside(format_args!("measuring {what} ..."));
        let program =
            std::env::current_exe().map_err(|why| Error::new(format!("cannot find this program: {why}")))?;
        let tree = self.cluster.tree(self.node);
        let mut command = run::preloaded(&program, self.cluster, self.node, &tree)?;
        command.args(["measure", what]).arg(&tree).arg(&self.scratch).arg(self.cluster.control(self.node));
        let answer = command.args(rest).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let answer = answer.map_err(Error::at("run", &program))?;
        if !answer.status.success() {
            return Err(Error::new(format!("measuring {what} failed: {}", answer.status)));
        }
        serde_json::from_slice(&answer.stdout).map_err(Error::at("understand", &program))
    }
}

/// `hearth measure`: one part, inside.
pub(super) fn measure(arguments: &Measure) -> Result<ExitCode> {
    let (tree, scratch) = (&arguments.tree, &arguments.scratch);
    let text = match arguments.what.as_str() {
        "writes" => serde_json::to_string(&measure::writes(tree, scratch, &arguments.control)?),
        "reads" => {
            let file = scratch.join("rows");
            let text = fs::read(&file).map_err(Error::at("read", &file))?;
            let mut rows: Vec<Row> = serde_json::from_slice(&text).map_err(Error::at("understand", &file))?;
            measure::reads(tree, scratch, &mut rows)?;
            serde_json::to_string(&rows)
        }
        "syncs" => {
            let beside = arguments.beside.as_deref().unwrap_or(scratch);
            let folders = [tree, scratch, beside];
            let rows = syncs::measure(folders, arguments.count as usize, &arguments.daemons)?;
            serde_json::to_string(&rows)
        }
        "folder" | "sustained" => serde_json::to_string(&sustained::measure(arguments)?),
        _ => {
            let folders =
                [("hearth", Some(tree)), ("tmpfs", Some(scratch)), ("beside", arguments.beside.as_ref())];
            let mut places = Vec::new();
            for (place, folder) in folders {
                let Some(folder) = folder else { continue };
                let operations = operations::measure(folder, arguments.count as usize)?;
                places.push(PlaceFigures { place: place.to_owned(), operations });
            }
            serde_json::to_string(&places)
        }
    };
    say::line(text.map_err(|why| Error::new(why.to_string()))?);
    Ok(ExitCode::SUCCESS)
}

pub(super) fn print_json(figures: &impl Serialize) -> Result<()> {
    say::line(serde_json::to_string_pretty(figures).map_err(|why| Error::new(why.to_string()))?);
    Ok(())
}

fn print_operations(medium: MediumKind, beside: &Path, places: &[PlaceFigures]) {
    say::line(format_args!(
        "Medium {medium}; operations a second, and median microseconds of one, one after the other in a folder"
    ));
    say::line(format_args!(
        "that no other process uses: in the tree, on a tmpfs, and beside them in {}.",
        beside.display()
    ));
    say::line("readdir is one listing of all files there; ratio: the tree's rate, of that of the tmpfs.");
    say::line("");
    let row = |operation: &str, cells: &[String]| {
        let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>10}")).collect();
        say::line(format_args!("{operation:>27} {}", cells.join(" ")));
    };
    row("", &["tree/s", "us", "tmpfs/s", "us", "ratio", "beside/s", "us"].map(String::from));
    let Some((tree, others)) = places.split_first() else { return };
    for (index, own) in tree.operations.iter().enumerate() {
        let mut cells = vec![own.per_second.to_string(), us(own.median_ns)];
        for (place, other) in others.iter().enumerate() {
            let other = &other.operations[index];
            cells.extend([other.per_second.to_string(), us(other.median_ns)]);
            if place == 0 {
                cells.push(ratio(own.per_second, other.per_second));
            }
        }
        row(&own.operation, &cells);
    }
}

fn print(medium: MediumKind, rows: &[Row]) {
    say::line(format_args!(
        "Medium {medium}; median microseconds a call. The floor of a write is a non-temporal copy with checksum"
    ));
    say::line(
        "and fence of the same bytes, that of a read a memcpy, both measured in this run, in turns with what they",
    );
    say::line("are compared with; small calls in rows, as many in each. Writes come in bursts");
    let log_bytes = rows.iter().map(|row| row.log_bytes).min().unwrap_or(0);
    say::line(format_args!(
        "of at most half of the update log, {} MiB; sustained is the rate of a writer that never pauses.",
        log_bytes >> 20
    ));
    say::line("");
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
    say::line("");
    line(&["bytes", "write+fsync", "ratio", "tmpfs", "", "", ""].map(String::from));
    for row in rows {
        let cells = [us(row.sync_ns), ratio(row.sync_ns, row.persist_ns), us(row.tmpfs_sync_ns)];
        let [sync, times, tmpfs] = cells;
        line(&[row.bytes.to_string(), sync, times, tmpfs, String::new(), String::new(), String::new()]);
    }
    say::line("");
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

pub(super) fn line(cells: &[String]) {
    let text: Vec<_> = cells.iter().map(|cell| format!("{cell:>11}")).collect();
    say::line(text.join(" ").trim_end());
}

pub(super) fn us(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1000.0)
}

pub(super) fn ratio(ns: u64, floor_ns: u64) -> String {
    format!("{:.2}x", ns as f64 / floor_ns.max(1) as f64)
}

/// A folder on a tmpfs that goes with the command.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(1);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!("/dev/shm/hearth-bench-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(Error::at("make", &path))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
