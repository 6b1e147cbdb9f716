//! `hearth check`: is everything in a pool where it should be, and what it should be?

use super::PoolFolder;
use crate::error::{Error, Result};
use area::check::{Report, check};
use pmem::Medium;
use std::process::ExitCode;

pub(super) fn run(arguments: &PoolFolder) -> Result<ExitCode> {
    let medium = open(arguments)?;
    let _lock = medium.lock().map_err(Error::at("lock", &arguments.pool))?;
    let report = check(&medium).map_err(Error::at("check", &arguments.pool))?;
    if arguments.json {
        println!("{}", json(&report));
    } else {
        print(&report);
    }
    Ok(ExitCode::from(if report.is_clean() { 0 } else { 1 }))
}

/// The pool's folder. Which medium it was on does not matter for reading.
pub(super) fn open(arguments: &PoolFolder) -> Result<Medium> {
    Medium::file(&arguments.pool).map_err(Error::at("open", &arguments.pool))
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
    println!(
        "flip {}: {} inodes, {} names, {} orphans in {} nodes; {} data blocks in {} segments, {} verified",
        report.flip,
        report.inodes,
        report.entries,
        report.orphans,
        report.nodes,
        report.data_blocks,
        report.segments,
        report.blocks_verified
    );
    for note in &report.notes {
        println!("note: {note}");
    }
    for finding in &report.findings {
        println!("wrong: {finding}");
    }
    match report.findings.len() as u64 + report.findings_more {
        0 => println!("clean"),
        found => println!("{found} findings, {} not shown", report.findings_more),
    }
}
