//! A copy gets space for a log, and touches its memory, before records arrive for it.

use crate::pair::{COPY, config, sync};
use crate::pair_threads::{Nodes, begin_program, wait_for};
use sharedfs::{Config, log_file};
use std::os::unix::fs::MetadataExt;
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

/// The copy's file of a log has space for more than has arrived, and not for all.
#[test]
fn a_copy_of_a_log_gets_its_space_in_steps() {
    const MIB: u64 = 1 << 20;
    let large = |node| Config { log_bytes: MIB, log_bytes_max: 8 * MIB, ..config(node) };
    let mut nodes = Nodes::new(large);
    let (mut client, file) = begin_program(&nodes.daemon, 1);
    let welcome = client.attached.welcome;
    let log = nodes.folder.path().join(format!("n{COPY}")).join(log_file(welcome.log, welcome.incarnation));
    client.grow_log(2 * MIB);
    let mut end = 0;
    for _ in 0..17 {
        let before = client.ring.tail().position;
        assert!(client.write(file, 0, &[7; 100_000]));
        sync(&client, &[(file, 1)]).unwrap();
        end = client.ring.tail().position.max(before);
        let space = std::fs::metadata(&log).unwrap().blocks() * 512;
        let expected = if end <= MIB { MIB..=MIB } else { 3 * MIB..=3 * MIB + MIB / 8 };
        assert!(expected.contains(&space), "{space} for {end}");
    }
    assert!(end > 3 * MIB / 2, "{end}");
    nodes.follower.end();
    nodes.daemon.stop();
}
