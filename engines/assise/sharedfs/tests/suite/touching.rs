//! A copy touches the memory of a new log before records arrive for it.

use crate::pair::{COPY, config, sync};
use crate::pair_threads::{Nodes, begin_program, wait_for};
use std::path::Path;

/// Bytes of the mappings of logs below a folder, and how many of them are in memory.
fn mapped_logs(folder: &Path) -> (u64, u64) {
    let (logs, mut is_log) = (format!("{}/log-", folder.display()), false);
    let (mut bytes, mut touched) = (0, 0);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap(), words.next().unwrap_or_default());
        match first {
            "Size:" if is_log => bytes += second.parse::<u64>().unwrap(),
            "Rss:" if is_log => touched += second.parse::<u64>().unwrap(),
            _ if first.ends_with(':') => {}
            _ => is_log = line.contains(&logs),
        }
    }
    (bytes, touched)
}

#[test]
fn the_memory_of_a_log_is_there_before_its_records() {
    let mut nodes = Nodes::new(config);
    let (mut client, file) = begin_program(&nodes.daemon, 1);
    assert!(client.write(file, 0, b"one record"));
    sync(&client, &[(file, 1)]).unwrap();
    let copy = nodes.folder.path().join(format!("n{COPY}"));
    wait_for("all of the log is in memory", || {
        let (bytes, touched) = mapped_logs(&copy);
        bytes > 0 && touched == bytes
    });
    nodes.follower.end();
    nodes.daemon.stop();
}
