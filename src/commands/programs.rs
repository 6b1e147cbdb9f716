//! `hearth bench programs`: programs that people use, through the library, through the mount and on a tmpfs, in turns.
//!
//! The library and the mount have a cluster each, so that neither takes the other's leases; both clusters are mounted, since
//! programs with the library map files through the mount. The time is that of the whole
//! process, its start included. Before each run through the mount the kernel's caches of names and attributes are dropped,
//! where this may be done.

use super::bench::{Measuring, folder_beside, print_json, with_cluster};
use super::mount::{UnmountResult, take_away};
use super::up::wait_until_ready;
use super::{Programs, run};
use crate::error::{Error, Result};
use crate::health::PATIENCE;
use crate::programs::{ROWS, Row, make};
use crate::say;
use crate::status::ask;
use clap::builder::PossibleValuesParser;
use ipc::{Host, SystemHost};
use serde::Serialize;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};

/// Data that a pool may hold, in MiB.
const CAPACITY_MIB: u64 = 3 << 10;
/// Lines of a program that failed that are told.
const LINES_MAX: usize = 5;

/// Takes names of rows on the command line.
pub(super) fn row_names() -> PossibleValuesParser {
    PossibleValuesParser::new(ROWS.iter().map(|row| row.name))
}

/// Where a program runs.
struct MeasuredPlace<'a> {
    name: &'static str,
    folder: PathBuf,
    /// The cluster whose tree it is, if it is one.
    measuring: Option<&'a Measuring<'a>>,
    /// By the library; else by the kernel.
    by_library: bool,
}

/// One run.
#[derive(Clone, Copy)]
struct Figure {
    seconds: f64,
    /// Requests that the daemon got meanwhile.
    requests: u64,
}

/// One place of a row, as it is told.
#[derive(Clone, Debug, Serialize)]
struct PlaceReport {
    /// Median of the rounds that succeeded; none if none did.
    seconds: Option<f64>,
    /// Median of the rounds' ratios to the tmpfs.
    ratio: Option<f64>,
    /// Requests to the daemon, of the last round.
    requests: u64,
    /// Rounds that failed, or whose result was wrong.
    failed: usize,
}

/// A row as it is told.
#[derive(Debug, Serialize)]
struct Line {
    row: &'static str,
    tmpfs: PlaceReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    library: Option<PlaceReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mount: Option<PlaceReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<PlaceReport>,
}

pub(super) fn programs(arguments: &Programs) -> Result<ExitCode> {
    let beside = arguments.beside.as_deref().map(|folder| folder_beside(Some(folder))).transpose()?;
    let wanted = |row: &&Row| arguments.only.is_empty() || arguments.only.iter().any(|name| name == row.name);
    let mut rows = Vec::new();
    for row in ROWS.iter().filter(wanted) {
        match row.needs.iter().find(|program| !is_there(program)) {
            Some(program) => {
                say::aside(format_args!("{}: left out: {program} is not on this machine", row.told));
            }
            None => rows.push(row),
        }
    }
    let medium = arguments.bench.medium;
    let lines = with_cluster((medium, 1), CAPACITY_MIB, |library| {
        with_cluster((medium, 1), CAPACITY_MIB, |mounted| {
            // Programs with the library map files through a mount, as after `hearth up`.
            let may_mount = mount(mounted) && mount(library);
            let measured = measure(arguments, &rows, (library, mounted), beside.as_deref(), may_mount);
            for Measuring { cluster, node, .. } in [mounted, library] {
                if let UnmountResult::Busy(users) = take_away(cluster, node, false)? {
                    say::aside(format_args!("hearth: the mount is busy{users}: it is taken away by force"));
                    take_away(cluster, node, true)?;
                }
            }
            measured
        })
    })?;
    if arguments.bench.json {
        print_json(&lines)?;
    } else {
        print(arguments, &rows, &lines);
    }
    let failed = |told: &Option<PlaceReport>| told.as_ref().is_some_and(|told| told.failed > 0);
    let any = lines.iter().any(|line| failed(&line.library) || failed(&line.mount));
    Ok(if any { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn is_there(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Mounts the cluster's tree; false, and why, if it may not be mounted.
fn mount(measuring: &Measuring<'_>) -> bool {
    let mounted =
        wait_until_ready(measuring.cluster, measuring.node, &["mount", "--foreground"], "gateway.log");
    mounted.inspect_err(|why| say::aside(format_args!("the mount is left out: {why}"))).is_ok()
}

fn measure(
    arguments: &Programs,
    rows: &[&'static Row],
    (library, mounted): (&Measuring<'_>, &Measuring<'_>),
    beside: Option<&Path>,
    may_mount: bool,
) -> Result<Vec<Line>> {
    let inputs = library.scratch.join("inputs");
    fs::create_dir(&inputs).map_err(Error::at("make", &inputs))?;
    say::aside("making what the programs work on ...");
    make(&inputs)?;
    finish_inputs(&inputs)?;
    let tree = |measuring: &Measuring<'_>| measuring.cluster.tree(measuring.node);
    let tmpfs = library.scratch.join("tmpfs");
    let mut places = vec![
        MeasuredPlace { name: "tmpfs", folder: tmpfs, measuring: None, by_library: false },
        MeasuredPlace { name: "library", folder: tree(library), measuring: Some(library), by_library: true },
    ];
    if may_mount {
        let folder = tree(mounted);
        places.push(MeasuredPlace { name: "mount", folder, measuring: Some(mounted), by_library: false });
    }
    if let Some(folder) = beside {
        let folder = folder.join(format!("hearth-programs-{}", std::process::id()));
        places.push(MeasuredPlace { name: "beside", folder, measuring: None, by_library: false });
    }
    let mut lines = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        say::aside(format_args!("{} of {}: {} ...", index + 1, rows.len(), row.told));
        let mut figures: Vec<Vec<Option<Figure>>> = vec![Vec::new(); places.len()];
        for _ in 0..arguments.rounds {
            for (place, figures) in places.iter().zip(&mut figures) {
                if row.takes_library || !place.by_library {
                    figures.push(round(row, place, &inputs)?);
                }
            }
        }
        lines.push(line_of(row, &places, &figures));
    }
    for place in &places {
        // Only those that lie beside are left by now.
        let _ = fs::remove_dir(&place.folder);
    }
    Ok(lines)
}

/// Makes the inputs that other programs produce from the first ones.
fn finish_inputs(inputs: &Path) -> Result<()> {
    let script = "cd $I; tar cf tree.tar tree; if command -v git; then cp -a tree repository; cd repository; git init -q; \
                  git add .; git commit -qm all; fi";
    let done = shell(Command::new("/bin/sh"), script, inputs, inputs, "inputs")?;
    if done.status.success() {
        return Ok(());
    }
    Err(Error::new(format!("cannot make the inputs: {}", last_lines(&done))))
}

/// Runs a script; git finds a user.
fn shell(mut command: Command, script: &str, inputs: &Path, folder: &Path, place: &str) -> Result<Output> {
    command.args(["-ec", script]).env("I", inputs).env("T", folder).env("PLACE", place);
    for name in ["GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"] {
        command.env(name, "hearth");
    }
    // A clone of another user's repository is none of the measurement's business, and gc is a row's own.
    let settings = [("safe.directory", "*"), ("gc.auto", "0"), ("maintenance.auto", "false")];
    command.env("GIT_CONFIG_COUNT", settings.len().to_string());
    for (number, (key, value)) in settings.iter().enumerate() {
        command.env(format!("GIT_CONFIG_KEY_{number}"), key).env(format!("GIT_CONFIG_VALUE_{number}"), value);
    }
    let output = command.stdin(Stdio::null()).output();
    output.map_err(|why| Error::new(format!("cannot run /bin/sh: {why}")))
}

/// One row at one place: none if it failed, which is told.
fn round(row: &Row, place: &MeasuredPlace<'_>, inputs: &Path) -> Result<Option<Figure>> {
    let folder = place.folder.join(row.name);
    let script = |script: &str| {
        let program = match place.measuring {
            Some(Measuring { cluster, node, .. }) if place.by_library => {
                run::preloaded(Path::new("/bin/sh"), cluster, node, &cluster.tree(node))?
            }
            _ => Command::new("/bin/sh"),
        };
        shell(program, script, inputs, &folder, place.name)
    };
    let told = |what: &str, output: &Output| {
        let lines = last_lines(output);
        say::aside(format_args!("{}: {what} at {}: {lines}", row.told, place.name));
    };
    let before = script(&format!("rm -rf $T; mkdir -p $T; {}", row.before))?;
    if !before.status.success() {
        told("failed before it was measured", &before);
        return Ok(None);
    }
    if place.name != "tmpfs" && !place.by_library {
        // Not permitted, or not wanted in a container: then the caches are warm.
        let _ = fs::write("/proc/sys/vm/drop_caches", "2");
    }
    let requests = || -> Option<u64> {
        let Measuring { cluster, node, .. } = place.measuring?;
        ask(&cluster.control(node), PATIENCE).ok().map(|status| status.requests)
    };
    let before = requests();
    let begin = SystemHost.now();
    let measured = script(row.measured)?;
    let seconds = SystemHost.now().since(begin).as_secs_f64();
    let requests = requests().zip(before).map_or(0, |(after, before)| after.saturating_sub(before));
    if !measured.status.success() {
        told("failed", &measured);
        return Ok(None);
    }
    let right = script(row.right)?;
    if !right.status.success() {
        told("gave a wrong result", &right);
        return Ok(None);
    }
    script("rm -rf $T")?;
    Ok(Some(Figure { seconds, requests }))
}

fn last_lines(output: &Output) -> String {
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(LINES_MAX)..].join("; ");
    format!("{} ({last})", output.status)
}

fn line_of(row: &Row, places: &[MeasuredPlace<'_>], figures: &[Vec<Option<Figure>>]) -> Line {
    let of = |name: &str| {
        let index = places.iter().position(|place| place.name == name)?;
        (!figures[index].is_empty()).then(|| told(&figures[index], &figures[0]))
    };
    let tmpfs = told(&figures[0], &figures[0]);
    Line { row: row.name, tmpfs, library: of("library"), mount: of("mount"), beside: of("beside") }
}

fn told(own: &[Option<Figure>], tmpfs: &[Option<Figure>]) -> PlaceReport {
    let ratios = own.iter().zip(tmpfs).filter_map(|(own, tmpfs)| Some((*own)?.seconds / (*tmpfs)?.seconds));
    PlaceReport {
        seconds: median(own.iter().flatten().map(|figure| figure.seconds)),
        ratio: median(ratios),
        requests: own.iter().flatten().last().map_or(0, |figure| figure.requests),
        failed: own.iter().filter(|figure| figure.is_none()).count(),
    }
}

fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

fn print(arguments: &Programs, rows: &[&Row], lines: &[Line]) {
    say::line(format_args!(
        "Medium {}; wall time of the whole process, start included, medians of {} rounds in turns. x: of the time on the",
        arguments.bench.medium, arguments.rounds
    ));
    say::line(
        "tmpfs; requests: to the daemon, in the last round. The kernel's caches are dropped before each run through the",
    );
    say::line("mount, if this user may.");
    say::line("");
    let has_beside = lines.iter().any(|line| line.beside.is_some());
    let print = |name: &str, mut cells: Vec<String>| {
        if !has_beside {
            cells.truncate(5);
        }
        let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>9}")).collect();
        say::line(format_args!("{name:>46} {}", cells.join(" ")));
    };
    print("", ["tmpfs s", "library", "requests", "mount", "requests", "beside"].map(String::from).to_vec());
    for (row, line) in rows.iter().zip(lines) {
        let ratio = |told: &Option<PlaceReport>| match told {
            None => "-".to_owned(),
            Some(told) if told.failed > 0 => "fails".to_owned(),
            Some(told) => told.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}x")),
        };
        let requests = |told: &Option<PlaceReport>| {
            told.as_ref().map_or_else(String::new, |told| told.requests.to_string())
        };
        let tmpfs = line.tmpfs.seconds.map_or_else(|| "fails".to_owned(), |seconds| format!("{seconds:.3}"));
        let cells = vec![
            tmpfs,
            ratio(&line.library),
            requests(&line.library),
            ratio(&line.mount),
            requests(&line.mount),
            ratio(&line.beside),
        ];
        print(row.told, cells);
    }
}
