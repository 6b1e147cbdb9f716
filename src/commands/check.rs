//! `hearth check`: is everything in a pool where it should be, and what it should be? With `--against` see [`super::compare`].

use super::{Check, compare};
use crate::error::{Error, Result};
use crate::pool_files::{self, LEDGER, TREE};
use crate::process::with_mapping;
use crate::say::{self, count, quoted};
use area::check::{Report, check};
use format::superblock::{FileKind, Superblock};
use format::{BLOCK_BYTES, DecodeError};
use pmem::{MediaError, Medium, PoolLock};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(super) fn run(arguments: &Check) -> Result<ExitCode> {
    match (&arguments.pool, arguments.against) {
        (_, Some(against)) => compare::run(arguments.dir.as_deref(), against, arguments.json),
        (Some(pool), None) => check_pool(pool, arguments.json),
        (None, None) => Err(Error::new("say which pool, or --against which node")),
    }
}

fn check_pool(pool: &Path, is_json: bool) -> Result<ExitCode> {
    let medium = open(pool)?;
    let _lock = lock(&medium, pool)?;
    let mut report = check(&medium).map_err(Error::at("check", pool))?;
    if let Err(why) = ledger(&medium) {
        report.findings.push(format!("file {LEDGER}: {why}"));
    }
    match sharedfs::check(&medium) {
        Ok(findings) => report.findings.extend(findings),
        // Damage of the files themselves was found before.
        Err(_) if !report.is_clean() => {}
        Err(why) => report.findings.push(why.to_string()),
    }
    if is_json {
        say::line(json(&report));
    } else {
        print(&report);
    }
    Ok(ExitCode::from(if report.is_clean() { 0 } else { 1 }))
}

/// The ledger's file, without which no daemon starts.
fn ledger(medium: &Medium) -> std::result::Result<(), MediaError> {
    let superblock = |name, kind| {
        let region = medium.open_read_only(name)?;
        let mut bytes = vec![0; (BLOCK_BYTES as u64).min(region.bytes()) as usize];
        region.read(0, &mut bytes)?;
        let found = Superblock::decode(&bytes, kind).map_err(MediaError::Damaged)?;
        let whole = found.file_bytes.get() == region.bytes();
        if whole { Ok(found) } else { Err(MediaError::Damaged(DecodeError::Field("file_bytes"))) }
    };
    let ledger = superblock(LEDGER, FileKind::Ledger)?;
    // Damage of the tree's file was found before.
    match superblock(TREE, FileKind::Tree) {
        Ok(tree) if tree.pool != ledger.pool => Err(MediaError::Damaged(DecodeError::Field("pool"))),
        _ => Ok(()),
    }
}

/// The pool's folder, of which a part may be gone by the time it is read. Which medium it was on does not matter for
/// reading.
pub(super) fn open(pool: &Path) -> Result<Medium> {
    pool_files::check(pool)?;
    let medium = Medium::file(pool).and_then(|medium| medium.guarded());
    medium.map_err(Error::at("open", pool))
}

/// Takes the pool, which no daemon may use meanwhile.
pub(super) fn lock(medium: &Medium, pool: &Path) -> Result<PoolLock> {
    // The lock's file would be made.
    if !pool_files::are_in(pool) {
        return Err(Error::new(format!("there is no pool in {}", pool.display())));
    }
    medium.lock().map_err(|why| match daemon_of(pool).filter(|_| why == MediaError::Locked) {
        Some((pid, node, dir)) => Error::new(format!(
            "the pool {} is in use: node {node} is up and uses it (process {pid}): hearth down --dir {} first",
            pool.display(),
            quoted(&dir)
        )),
        None => Error::at("lock", pool)(why),
    })
}

/// The daemon that uses a pool, as far as this user may know: its process, the number of its node, and its cluster.
fn daemon_of(pool: &Path) -> Option<(i32, String, PathBuf)> {
    let ledger = pool.canonicalize().ok()?.join(LEDGER);
    with_mapping(&ledger).into_iter().find_map(|process| {
        let words = fs::read(format!("/proc/{}/cmdline", process.pid())).ok()?;
        let words: Vec<&OsStr> = words.split(|byte| *byte == 0).map(OsStr::from_bytes).collect();
        let behind = |name: &str| {
            let at = words.iter().position(|word| *word == name)?;
            words.get(at + 1).copied()
        };
        let (dir, node) = (behind("--dir")?, behind("--node")?);
        words.contains(&OsStr::new("daemon")).then(|| (process.pid(), node.display().to_string(), dir.into()))
    })
}

fn json(report: &Report) -> serde_json::Value {
    serde_json::json!({
        "clean": report.is_clean(),
        "findings": report.findings,
        "findings_more": report.findings_more,
        "notes": report.notes,
        "commit": report.commit.get(),
        "nodes": report.nodes,
        "items": report.items,
        "inodes": report.inodes,
        "entries": report.entries,
        "orphans": report.orphans,
        "data_blocks": report.data_blocks,
        "blocks_verified": report.blocks_verified,
        "blocks_unwritten": report.blocks_unwritten,
        "segments": report.segments,
    })
}

fn print(report: &Report) {
    say::line(format_args!(
        "commit {}: {}, {}, {} in {} of the tree",
        report.commit,
        count(report.inodes, "inode"),
        count(report.entries, "name"),
        count(report.orphans, "orphan"),
        count(report.nodes, "node")
    ));
    let unwritten = match report.blocks_unwritten {
        0 => String::new(),
        blocks => format!(", {blocks} reserved and never written"),
    };
    say::line(format_args!(
        "{} in {}: {} verified{unwritten}",
        count(report.data_blocks, "data block"),
        count(report.segments, "segment"),
        report.blocks_verified
    ));
    for note in &report.notes {
        say::line(format_args!("note: {note}"));
    }
    for finding in &report.findings {
        say::line(format_args!("wrong: {finding}"));
    }
    match report.findings.len() as u64 + report.findings_more {
        0 => say::line("clean"),
        found => say::line(format_args!("{}, {} not shown", count(found, "finding"), report.findings_more)),
    }
}
