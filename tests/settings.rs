//! Settings in `hearth.toml` that are wrong: each is refused with its line, and a cluster that runs meanwhile can be looked at and
//! ended.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node};
use std::fs;
use std::path::PathBuf;
use std::process::Output;

/// The settings of a cluster, which are changed.
struct SettingsFile {
    file: PathBuf,
    chosen: String,
}

impl SettingsFile {
    fn of(node: &Node) -> Self {
        let file = node.dir.path().join("hearth.toml");
        let chosen = fs::read_to_string(&file).unwrap();
        Self { file, chosen }
    }

    fn replace(&self, from: &str, to: &str) {
        assert!(self.chosen.contains(from), "{from} is a setting: {}", self.chosen);
        fs::write(&self.file, self.chosen.replace(from, to)).unwrap();
    }

    fn restore(&self) {
        fs::write(&self.file, &self.chosen).unwrap();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn pid(node: &Node, file: &str) -> i32 {
    let text = fs::read_to_string(node.dir.path().join(file)).unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Each node would serve a tree of its own if the table had no effect.
#[test]
fn nodes_without_their_chain_do_not_start_and_those_that_run_are_seen_and_ended() {
    let node = Node::of_nodes(2);
    let settings = SettingsFile::of(&node);
    let line = settings.chosen.lines().position(|line| line == "[chain]").unwrap() + 1;
    let chian = format!("line {line}: unknown field `chian`");
    // Misspelled, misspelled within a table, gone with all that is in it, and no TOML at all.
    let cut = &settings.chosen[settings.chosen.find("[chain]").unwrap()..];
    let cut = cut.split("[[nodes]]").next().unwrap();
    let wrong: [(&str, &str, &str); 6] = [
        ("number = 2", "number = 1", "the numbers 1, 1, and not those from 1 on"),
        ("number = 2", "number = 7", "the numbers 1, 7, and not those from 1 on"),
        ("[chain", "[chian", &chian),
        ("min_copies", "min_copeis", "the nearest known name is `min_copies`"),
        (cut, "", "2 nodes and no [chain]"),
        ("[chain]", "[chain", "cannot understand"),
    ];
    for (from, to, sentence) in wrong {
        settings.replace(from, to);
        let status = node.hearth(&["status", "--json"]);
        assert!(status.status.code() == Some(1) && said(&status).contains(sentence), "{status:?}");
        let nodes: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        for (at, number) in [(0, 1), (1, 2)] {
            assert_eq!(
                nodes[at]["pid"].as_i64(),
                Some(pid(&node, &format!("node-{number}/serve.pid")).into())
            );
            assert_eq!(nodes[at]["state"], "degraded", "{nodes}");
            assert!(nodes[at]["problems"].to_string().contains("hearth.toml"), "{nodes}");
        }
        for command in [&["up"][..], &["start", "--node", "2"], &["daemon", "--node", "1"]] {
            node.hearth(command).expect_failure(sentence);
        }
    }
    let files = ["node-1/keeper.pid", "node-1/serve.pid", "node-2/keeper.pid", "node-2/serve.pid"];
    let processes = [&files[..], &["manager-keeper.pid", "manager.pid"]].concat();
    let processes: Vec<i32> = processes.into_iter().map(|file| pid(&node, file)).collect();
    assert!(processes.iter().all(|pid| lives(*pid)));
    let down = node.hearth(&["down", "--hard"]);
    down.expect_success();
    assert!(said(&down).contains("cannot understand"), "{down:?}");
    assert!(!processes.iter().any(|pid| lives(*pid)));
    node.hearth(&["status"]).expect_failure("cannot understand");
    settings.restore();
    node.hearth(&["up"]).expect_success();
    settings.replace("[chain]", "[chian]");
    node.hearth(&["down"]).expect_success();
    settings.restore();
    node.check_of(1);
    node.check_of(2);
}

/// No text, no file, and none that was written by hand.
#[test]
fn settings_that_cannot_be_read_as_text_keep_no_command_waiting() {
    let node = Node::of_mib(64);
    let settings = SettingsFile::of(&node);
    let wrong: [(&str, &dyn Fn()); 4] = [
        ("line 2: the text is not UTF-8", &|| fs::write(&settings.file, b"# a comment\n# \xff\n").unwrap()),
        ("it is not a file", &|| fs::create_dir(&settings.file).unwrap()),
        ("it is not a file", &|| {
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, &settings.file, kind, 0o600.into(), 0).unwrap();
        }),
        ("it is longer than 1 MiB", &|| fs::write(&settings.file, "[".repeat(2 << 20)).unwrap()),
    ];
    for (sentence, make) in wrong {
        fs::remove_file(&settings.file).unwrap();
        make();
        let status = node.hearth(&["status"]);
        assert!(status.status.code() == Some(1) && said(&status).contains(sentence), "{status:?}");
        for command in ["up", "start"] {
            node.hearth(&[command]).expect_failure(sentence);
        }
        node.hearth(&["down"]).expect_success();
        if settings.file.is_dir() {
            fs::remove_dir(&settings.file).unwrap();
        } else {
            fs::remove_file(&settings.file).unwrap();
        }
        settings.restore();
        node.hearth(&["up"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn a_capacity_that_was_made_too_small_is_told() {
    let node = Node::of_mib(64);
    node.sh("head -c 40000000 /dev/zero > $T/file; sync").expect_success();
    let settings = SettingsFile::of(&node);
    let told = |output: &Output, sentence: &str| {
        let all = format!("{}{}", String::from_utf8_lossy(&output.stdout), said(output));
        assert!(all.contains(sentence), "{all}");
    };
    let status = node.hearth(&["status"]);
    assert!(!status.expect_success().contains("capacity_bytes"));
    node.hearth(&["down"]).expect_success();
    settings.replace("67108864", "0");
    node.hearth(&["start"]).expect_failure("capacity_bytes = 0 is not between");
    settings.replace("67108864", "16777216");
    let start = node.hearth(&["start"]);
    start.expect_success();
    told(&start, "capacity_bytes = 16777216 in hearth.toml, and the files of");
    let status = node.hearth(&["status"]);
    assert_eq!(status.status.code(), Some(1));
    told(&status, "PROBLEM: capacity_bytes = 16777216");
    assert_eq!(node.sh("wc -c < $T/file").expect_success().trim(), "40000000");
}
