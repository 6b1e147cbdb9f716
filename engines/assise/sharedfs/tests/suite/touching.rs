//! A copy touches the memory of a new log before records arrive for it.

use crate::pair::{COPY, config, sync};
use crate::pair_threads::{Nodes, begin_program, wait_for};
use std::path::Path;

/// KiB of each mapping of a log below a folder, and how much of it is in memory.
fn mapped_logs(folder: &Path) -> Vec<(u64, u64)> {
    let (logs, mut is_log, mut size) = (format!("{}/log-", folder.display()), false, 0);
    let mut found = Vec::new();
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap(), words.next().unwrap_or_default());
        match first {
            "Size:" => size = second.parse().unwrap(),
            "Rss:" if is_log => found.push((size, second.parse().unwrap())),
            _ if first.ends_with(':') => {}
            _ => is_log = line.contains(&logs),
        }
    }
    found
}

#[test]
fn the_memory_of_a_log_is_there_before_its_records() {
    let mut nodes = Nodes::new(config);
    let (mut client, file) = begin_program(&nodes.daemon, 1);
    assert!(client.write(file, 0, b"one record"));
    sync(&client, &[(file, 1)]).unwrap();
    let copy = nodes.folder.path().join(format!("n{COPY}"));
    // The thread that executes maps the log, too, and does not write to it.
    wait_for("all of the log is in memory", || {
        mapped_logs(&copy).into_iter().any(|(size, touched)| touched == size)
    });
    nodes.follower.end();
    nodes.daemon.stop();
}
