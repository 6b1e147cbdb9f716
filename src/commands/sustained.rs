//! `hearth bench sustained`: writers that never pause, in the tree and on a tmpfs, in turns.
//!
//! Each round has a cluster of its own, so that its first row finds a pool that was never written; with several nodes it has a
//! further one of one node. Figures are medians of the rounds.
//!
//! A virtual machine gets memory from its host page by page when it first uses it, and gives back what is free for a few seconds.
//! That takes as long as all else in a write. So as much memory as a row uses is taken and freed just before each run.

use super::bench::{Measuring, print_json, with_cluster};
use super::{Measure, Sustained, run};
use crate::error::{Error, Result};
use crate::say;
use crate::sustained::{Figure, Load};
use clap::builder::PossibleValuesParser;
use rustix::fs::statvfs;
use serde::Serialize;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// Data that the pool of a round may hold, in MiB: more than a row writes, since what it removed is freed a moment later.
const CAPACITY_MIB: u64 = 6 << 10;

/// Bytes of a write that takes memory.
const PIECE_BYTES: usize = 1 << 20;
/// Memory that a row uses on a node beside what it writes, in MiB: the logs, and the longest file before its blocks are replaced.
const BESIDE_MIB: u64 = 1536;

/// A row of the table.
struct Row {
    name: &'static str,
    told: &'static str,
    load: Load,
    /// Processes that write at once, each in a folder of its own. They share the bytes.
    writers: u32,
}

const fn row(name: &'static str, told: &'static str, load: Load) -> Row {
    Row { name, told, load, writers: 1 }
}

/// In the order in which they run.
const ROWS: [Row; 9] = [
    row("append-4k-fresh", "append 4 KiB, pool never written", Load::Append(4 << 10)),
    row("append-4k", "append 4 KiB", Load::Append(4 << 10)),
    row("append-1k", "append 1 KiB", Load::Append(1 << 10)),
    row("append-1m", "append 1 MiB", Load::Append(1 << 20)),
    row("overwrite-64m", "overwrite 4 KiB of 64 MiB", Load::Overwrite(64 << 20)),
    Row { writers: 2, ..row("overwrite-two", "the same by two processes", Load::Overwrite(64 << 20)) },
    row("overwrite-1g", "overwrite 4 KiB of 1 GiB", Load::Overwrite(1 << 30)),
    row("replace", "create, write 4 KiB, rename", Load::Replace),
    row("journal", "commit, rollback journal", Load::Journal),
];

/// Takes names of rows on the command line.
pub(super) fn row_names() -> PossibleValuesParser {
    PossibleValuesParser::new(ROWS.iter().map(|row| row.name))
}

/// One place of a row.
#[derive(Clone, Copy, Debug, Serialize)]
struct PlaceRates {
    /// Calls; of `replace` files, of `journal` commits.
    per_second: f64,
    p99_us: f64,
    longest_ms: f64,
    /// Which part of the time went into calls of over 2 ms.
    over_2ms_percent: f64,
}

/// A row as it is told.
#[derive(Debug, Serialize)]
struct Line {
    row: &'static str,
    tree: PlaceRates,
    tmpfs: PlaceRates,
    /// Median of the rounds' ratios of the two rates.
    ratio: f64,
    /// The tree of one node, if that of several is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    one_node: Option<PlaceRates>,
    /// Median of the rounds' ratios of the rates on several nodes and on one.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_one_node: Option<f64>,
}

/// The measurements of the writers of one row in one round.
#[derive(Clone, Debug, Default)]
struct Round {
    tree: Vec<Figure>,
    tmpfs: Vec<Figure>,
    /// In the tree of one node, if that of several is measured.
    one_node: Option<Vec<Figure>>,
}

pub(super) fn sustained(arguments: &Sustained) -> Result<ExitCode> {
    let wanted = |row: &&Row| arguments.only.is_empty() || arguments.only.iter().any(|name| name == row.name);
    let rows: Vec<&Row> = ROWS.iter().filter(wanted).collect();
    let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); rows.len()];
    let (medium, nodes) = (arguments.bench.medium, arguments.nodes.unwrap_or(1));
    for number in 1..=arguments.rounds {
        let tell = |row: &Row, on: &str| {
            say::aside(format_args!("round {number} of {}: {}{on} ...", arguments.rounds, row.told));
        };
        with_cluster((medium, nodes), CAPACITY_MIB, |measuring| {
            for (row, rounds) in rows.iter().zip(&mut rounds) {
                tell(row, "");
                let tree = in_tree(measuring, row, arguments.mib)?;
                let scratch = &measuring.scratch;
                take_memory(measuring, arguments.mib)?;
                let tmpfs =
                    writers(measuring, row, arguments.mib, scratch, &|| Ok(Command::new(program()?)))?;
                rounds.push(Round { tree, tmpfs, one_node: None });
            }
            Ok(())
        })?;
        if nodes == 1 {
            continue;
        }
        with_cluster((medium, 1), CAPACITY_MIB, |measuring| {
            for (row, rounds) in rows.iter().zip(&mut rounds) {
                tell(row, ", on one node");
                let round = rounds.last_mut().expect("it was measured on several");
                round.one_node = Some(in_tree(measuring, row, arguments.mib)?);
            }
            Ok(())
        })?;
    }
    let lines: Vec<Line> = rows.iter().zip(&rounds).map(|(row, rounds)| line_of(row, rounds)).collect();
    if arguments.bench.json {
        print_json(&lines)?;
    } else {
        print(arguments, &rows, &lines);
    }
    Ok(ExitCode::SUCCESS)
}

fn program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|why| Error::new(format!("cannot find this program: {why}")))
}

/// One row in the tree.
fn in_tree(measuring: &Measuring<'_>, row: &Row, mib: u32) -> Result<Vec<Figure>> {
    take_memory(measuring, mib)?;
    let (tree, program) = (measuring.cluster.tree(measuring.node), program()?);
    let preloaded = || run::preloaded(&program, measuring.cluster, measuring.node, &tree);
    writers(measuring, row, mib, &tree, &preloaded)
}

/// Takes as much memory from the machine as a row uses, and frees it. At most half of what the tmpfs has.
fn take_memory(measuring: &Measuring<'_>, mib: u32) -> Result<()> {
    let path = measuring.scratch.join("memory");
    let free = statvfs(&measuring.scratch)
        .map(|found| found.f_bavail.saturating_mul(found.f_frsize))
        .map_err(Error::at("examine", &measuring.scratch))?;
    let nodes = measuring.cluster.settings.nodes.len() as u64;
    let wanted = ((u64::from(mib) + BESIDE_MIB) << 20) * nodes;
    let file = File::create_new(&path).map_err(Error::at("make", &path))?;
    let piece = vec![1; PIECE_BYTES];
    let written = (0..wanted.min(free / 2) / PIECE_BYTES as u64)
        .try_for_each(|index| file.write_all_at(&piece, index * PIECE_BYTES as u64));
    fs::remove_file(&path).map_err(Error::at("remove", &path))?;
    written.map_err(Error::at("write", &path))
}

/// Lets the writers of a row write below a folder, at once. A process of its own makes the folders, so that the writers did
/// not.
fn writers(
    measuring: &Measuring<'_>,
    row: &Row,
    mib: u32,
    parent: &Path,
    program: &dyn Fn() -> Result<Command>,
) -> Result<Vec<Figure>> {
    let command = |what: &str, writer: u32| -> Result<Command> {
        let mut command = program()?;
        command.args(["measure", what]).arg(parent.join(format!("{}-{writer}", row.name)));
        command.arg(&measuring.scratch).arg(measuring.cluster.control(measuring.node));
        let count = (mib / row.writers).max(1).to_string();
        command.args(["--row", row.name, "--count", &count]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        Ok(command)
    };
    let start =
        |what: &str, writer| command(what, writer)?.spawn().map_err(|why| Error::new(why.to_string()));
    for what in ["folder", "sustained"] {
        let running: Vec<Child> =
            (0..row.writers).map(|writer| start(what, writer)).collect::<Result<_>>()?;
        let mut figures = Vec::new();
        for child in running {
            let answer = child.wait_with_output().map_err(|why| Error::new(why.to_string()))?;
            if !answer.status.success() {
                return Err(Error::new(format!("{} failed: {}", row.told, answer.status)));
            }
            if what == "sustained" {
                let understood = serde_json::from_slice(&answer.stdout);
                figures.push(understood.map_err(|why| Error::new(why.to_string()))?);
            }
        }
        if !figures.is_empty() {
            return Ok(figures);
        }
    }
    Ok(Vec::new())
}

/// `hearth measure folder` and `hearth measure sustained`.
pub(super) fn measure(arguments: &Measure) -> Result<Option<Figure>> {
    let folder = &arguments.tree;
    if arguments.what == "folder" {
        fs::create_dir(folder).map_err(Error::at("make", folder))?;
        return Ok(None);
    }
    let row = ROWS.iter().find(|row| Some(row.name) == arguments.row.as_deref());
    let row = row.ok_or_else(|| Error::new("there is no such row"))?;
    row.load.run(folder, u64::from(arguments.count) << 20).map(Some)
}

fn line_of(row: &Row, rounds: &[Round]) -> Line {
    let ratio = |of: f64, to: f64| of / to.max(f64::MIN_POSITIVE);
    let one_node = || rounds.iter().filter_map(|round| Some((round, round.one_node.as_deref()?)));
    let is_beside_one = one_node().next().is_some();
    Line {
        row: row.name,
        tree: place(rounds.iter().map(|round| &round.tree[..])),
        tmpfs: place(rounds.iter().map(|round| &round.tmpfs[..])),
        ratio: median(rounds.iter().map(|round| ratio(rate(&round.tree), rate(&round.tmpfs)))),
        one_node: is_beside_one.then(|| place(one_node().map(|(_, figures)| figures))),
        ratio_to_one_node: is_beside_one
            .then(|| median(one_node().map(|(round, one)| ratio(rate(&round.tree), rate(one))))),
    }
}

/// Calls a second of all writers.
fn rate(writers: &[Figure]) -> f64 {
    writers.iter().map(Figure::rate).sum()
}

/// Medians of the rounds; of several writers the slowest counts.
fn place<'a>(rounds: impl Iterator<Item = &'a [Figure]> + Clone) -> PlaceRates {
    let most = |of: &dyn Fn(&Figure) -> f64| {
        median(rounds.clone().map(|writers| writers.iter().map(of).fold(0.0, f64::max)))
    };
    PlaceRates {
        per_second: median(rounds.clone().map(rate)),
        p99_us: most(&|figure| figure.p99_ns as f64 / 1e3),
        longest_ms: most(&|figure| figure.longest_ns as f64 / 1e6),
        over_2ms_percent: most(&|figure| figure.stalled() * 100.0),
    }
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}

fn print(arguments: &Sustained, rows: &[&Row], lines: &[Line]) {
    let nodes = match arguments.nodes {
        Some(nodes) => format!("; {nodes} nodes, and one node beside them"),
        None => String::new(),
    };
    say::line(format_args!(
        "Medium {}{nodes}; {} MiB each without a pause, until all is digested; calls a second (files, commits). Medians of {} \
         rounds,",
        arguments.bench.medium, arguments.mib, arguments.rounds
    ));
    say::line(
        "tree and tmpfs in turns, each after as much memory was written and freed. Calls of over 2 ms: percentage of",
    );
    say::line("the time that went into them.");
    say::line("");
    let told = |name: &str, cells: &[String]| {
        let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>9}")).collect();
        say::line(format_args!("{name:>32} {}", cells.join(" ")));
    };
    let mut head =
        vec!["tree/s", "tmpfs/s", "ratio", "p99 us", "tmpfs", "longest ms", "tmpfs", ">2 ms %", "tmpfs"];
    if arguments.nodes.is_some() {
        head.extend(["one node/s", "ratio", "p99 us", "longest ms", ">2 ms %"]);
    }
    told("", &head.iter().map(ToString::to_string).collect::<Vec<_>>());
    for (row, Line { tree, tmpfs, ratio, one_node, ratio_to_one_node, .. }) in rows.iter().zip(lines) {
        let mut cells = vec![
            format!("{:.0}", tree.per_second),
            format!("{:.0}", tmpfs.per_second),
            format!("{ratio:.2}x"),
            format!("{:.1}", tree.p99_us),
            format!("{:.1}", tmpfs.p99_us),
            format!("{:.1}", tree.longest_ms),
            format!("{:.1}", tmpfs.longest_ms),
            format!("{:.1}", tree.over_2ms_percent),
            format!("{:.1}", tmpfs.over_2ms_percent),
        ];
        if let (Some(one), Some(ratio)) = (one_node, ratio_to_one_node) {
            cells.extend([
                format!("{:.0}", one.per_second),
                format!("{ratio:.2}x"),
                format!("{:.1}", one.p99_us),
                format!("{:.1}", one.longest_ms),
                format!("{:.1}", one.over_2ms_percent),
            ]);
        }
        told(row.told, &cells);
    }
}
