//! The planted bugs of tests/planted can still be planted: each patch applies to the tree as it is, and names a command
//! that can be run. Whether it is found is asked by `make prove-planted`.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Command;

fn patches() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/planted");
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    let paths = entries.map(|entry| entry.expect("it can be listed").path());
    let mut patches: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|ending| ending == "patch")).collect();
    patches.sort();
    patches
}

#[test]
fn every_planted_bug_can_still_be_planted() {
    let patches = patches();
    assert!(patches.len() >= 15, "bugs to plant: {patches:?}");
    let mut bad = Vec::new();
    for patch in &patches {
        let mut git = Command::new("git");
        let checked = git.args(["apply", "--check"]).arg(patch).current_dir(env!("CARGO_MANIFEST_DIR"));
        let checked = checked.output().expect("git is there");
        if !checked.status.success() {
            bad.push(format!("{}: {}", patch.display(), String::from_utf8_lossy(&checked.stderr)));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn every_planted_bug_says_what_it_is_and_what_has_to_fail() {
    for patch in patches() {
        let text = std::fs::read_to_string(&patch).expect("it can be read");
        let head = text.split("\ndiff --git ").next().unwrap_or_default();
        assert!(!head.starts_with("command: ") && head.trim().lines().count() > 1, "{}", patch.display());
        let commands: Vec<&str> = head.lines().filter_map(|line| line.strip_prefix("command: ")).collect();
        let [command] = commands[..] else { panic!("{} names {commands:?}", patch.display()) };
        // With more rounds than a test has, where these find it seldom.
        let longer = ["env HEARTH_PROVE=1 ", "env HEARTH_STRESS=10 "];
        let command = longer.iter().find_map(|longer| command.strip_prefix(longer)).unwrap_or(command);
        let words: Vec<&str> = command.split(' ').collect();
        assert_eq!(words[..2], ["cargo", "test"], "{}", patch.display());
        // One package and one of its binaries, so that it is quick.
        assert_eq!(words.iter().filter(|word| **word == "-p").count(), 1, "{}", patch.display());
        // The tests of this one need its example, which cargo builds only with the whole package.
        let is_whole = words[2..] == ["-p", "interpose"];
        let is_one = words.iter().any(|word| matches!(*word, "--test" | "--lib" | "--bin"));
        assert!(is_whole || is_one, "{}", patch.display());
    }
}
