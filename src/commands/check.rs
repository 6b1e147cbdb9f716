//! `hearth check`: is everything in a pool where it should be, and what it should be?

use super::PoolFolder;
use crate::error::{Error, Result};
use crate::say;
use area::check::{Report, check};
use format::superblock::{FileKind, Superblock};
use format::{BLOCK_BYTES, DecodeError};
use pmem::{MediaError, Medium};
use std::process::ExitCode;

/// Names of pool files.
const LEDGER: &str = "ledger";
const TREE: &str = "tree";

pub(super) fn run(arguments: &PoolFolder) -> Result<ExitCode> {
    let medium = open(arguments)?;
    let _lock = medium.lock().map_err(Error::at("lock", &arguments.pool))?;
    let mut report = check(&medium).map_err(Error::at("check", &arguments.pool))?;
    if let Err(why) = ledger(&medium) {
        report.findings.push(format!("file {LEDGER}: {why}"));
    }
    match sharedfs::check(&medium) {
        Ok(findings) => report.findings.extend(findings),
        // What is wrong with the files as such was found before.
        Err(_) if !report.is_clean() => {}
        Err(why) => report.findings.push(why.to_string()),
    }
    if arguments.json {
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
    // What is wrong with the tree's file was found before.
    match superblock(TREE, FileKind::Tree) {
        Ok(tree) if tree.pool != ledger.pool => Err(MediaError::Damaged(DecodeError::Field("pool"))),
        _ => Ok(()),
    }
}

/// The pool's folder, of which a part may be gone by the time it is read. Which medium it was on does not matter for
/// reading.
pub(super) fn open(arguments: &PoolFolder) -> Result<Medium> {
    let medium = Medium::file(&arguments.pool).and_then(|medium| medium.guarded());
    medium.map_err(Error::at("open", &arguments.pool))
}

fn json(report: &Report) -> serde_json::Value {
    serde_json::json!({
        "clean": report.is_clean(),
        "findings": report.findings,
        "findings_more": report.findings_more,
        "notes": report.notes,
        "flip": report.flip.get(),
        "nodes": report.nodes,
        "items": report.items,
        "inodes": report.inodes,
        "entries": report.entries,
        "orphans": report.orphans,
        "data_blocks": report.data_blocks,
        "blocks_verified": report.blocks_verified,
        "segments": report.segments,
    })
}

fn print(report: &Report) {
    say::line(format_args!(
        "flip {}: {} inodes, {} names, {} orphans in {} nodes; {} data blocks in {} segments, {} verified",
        report.flip,
        report.inodes,
        report.entries,
        report.orphans,
        report.nodes,
        report.data_blocks,
        report.segments,
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
        found => say::line(format_args!("{found} findings, {} not shown", report.findings_more)),
    }
}
