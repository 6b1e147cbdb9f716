//! `hearth check --against`: are the copies of two nodes equal, while programs go on?

use crate::chain::comparison::{Differs, TreeDifference, TreesCompared};
use crate::chain::orders::order_comparison;
use crate::chain::told::CopyTold;
use crate::chain::waiting::Parts;
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::say::{self, count, quoted};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;
use std::process::ExitCode;

pub(super) fn run(dir: Option<&Path>, against: u32, is_json: bool) -> Result<ExitCode> {
    let dir = dir.map_or_else(Cluster::default_dir, |dir| Ok(dir.to_owned()))?;
    let cluster = Cluster::open(&dir)?;
    cluster.node(against)?;
    if cluster.settings.chain.is_none() {
        return Err(Error::new(
            "the cluster has one node: there is no other copy (hearth check POOL verifies it)",
        ));
    }
    let parts = Parts::ask(&cluster);
    if parts.are_forbidden() {
        return Err(Error::new("this user may not ask the nodes: only their user and root may"));
    }
    let Some((leader, told)) = parts.leader() else {
        let dir = quoted(&cluster.dir);
        return Err(Error::new(format!(
            "no node leads now (hearth status --dir {dir} says what they wait for)"
        )));
    };
    if leader == against {
        return Err(Error::new(format!(
            "node {against} leads: say which of the other nodes it is compared with"
        )));
    }
    if !told.in_sync.contains(&against) {
        let copy = told.copies.iter().find(|copy| copy.node == against);
        let lack = copy.map_or_else(|| "it is no copy".to_owned(), CopyTold::lack);
        return Err(Error::new(format!("node {against} is not in sync: {lack}")));
    }
    let progress = Progress::new();
    let told = &mut |done, total| progress.show(done, total);
    let compared = order_comparison(&cluster, cluster.node(leader)?, against, told);
    progress.0.finish_and_clear();
    let compared = compared?;
    if is_json {
        let text = serde_json::to_string_pretty(&compared);
        say::line(text.map_err(|why| Error::new(format!("cannot write the answer: {why}")))?);
    } else {
        print(&compared);
    }
    Ok(ExitCode::from(if compared.different == 0 { 0 } else { 1 }))
}

/// How far it is, on standard error if that is a terminal.
struct Progress(ProgressBar);

impl Progress {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template(
            "{wide_bar} {human_pos} of {human_len} files and folders, {eta} left",
        );
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn show(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }
}

fn print(compared: &TreesCompared) {
    let TreesCompared { leader, copy, entry, inodes, different, .. } = compared;
    for difference in &compared.differences {
        say::line(line(difference, *leader, *copy));
    }
    let shown = compared.differences.len() as u64;
    if *different > shown {
        say::line(format_args!("and {} more", different - shown));
    }
    let what =
        format!("nodes {leader} and {copy} at entry {entry} of the ledger: {}", count(*inodes, "inode"));
    match different {
        0 => say::line(format_args!("{what}, all equal")),
        different => say::line(format_args!("{what}, {different} different")),
    }
}

fn line(difference: &TreeDifference, leader: u32, copy: u32) -> String {
    let subject = match &difference.path {
        Some(path) if path.is_empty() => "the root".to_owned(),
        Some(path) => path.clone(),
        None => format!("inode {}", difference.inode),
    };
    let what = difference.what.iter().map(|differs| match differs {
        Differs::OnlyAtLeader => format!("only at node {leader}"),
        Differs::OnlyAtCopy => format!("only at node {copy}"),
        Differs::Attributes => "attributes differ".to_owned(),
        Differs::Contents => "contents differ".to_owned(),
        Differs::Xattrs => "extended attributes differ".to_owned(),
        Differs::DamagedAtLeader => format!("a block is damaged at node {leader}"),
        Differs::DamagedAtCopy => format!("a block is damaged at node {copy}"),
    });
    format!("{subject}: {}", what.collect::<Vec<_>>().join(", "))
}
