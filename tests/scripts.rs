//! The scripts behind `make test`: what they say in the end is what happened.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::{Command, Stdio};

fn script(name: &str) -> Command {
    Command::new(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name))
}

/// The last line that `sum-tests` says about an output, and whether it was content.
fn sum(output: &str) -> (String, bool) {
    let mut command = script("sum-tests");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("awk is there");
    let mut input = child.stdin.take().expect("the input is a pipe");
    input.write_all(output.as_bytes()).expect("the script reads all");
    drop(input);
    let finished = child.wait_with_output().expect("the script ends");
    let text = String::from_utf8(finished.stdout).expect("the script says text");
    assert!(text.starts_with(output), "what was read is shown");
    (text.lines().last().unwrap_or_default().to_string(), finished.status.success())
}

const FORMAT: &str = "check format: ok\n";
const TWO_BINARIES: &str = "     Running unittests src/lib.rs (target/debug/deps/a-1)\n\nrunning 2 tests\n\
    test a ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n\
    \x20    Running tests/b.rs (target/debug/deps/b-1)\n";

#[test]
fn all_binaries_and_checks_are_summed() {
    let good =
        "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
    let all = format!("{FORMAT}{TWO_BINARIES}{good}check tests: ok\n");
    assert_eq!(sum(&all), ("8 passed, 0 failed".to_string(), true));
    let own_main = format!("{TWO_BINARIES}9 passed, 0 failed\ncheck tests: ok\n");
    assert_eq!(sum(&own_main), ("11 passed, 0 failed".to_string(), true));
}

#[test]
fn a_test_that_was_skipped_is_none_that_passed() {
    let printed = "\nsuccesses:\n\n---- users::first stdout ----\nskipped: needs root\nskipped: needs root\n\n\
        ---- second stdout ----\n7 passed, 0 failed\n\n\nsuccesses:\n    users::first\n    second\n\n";
    let good =
        "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
    let own_main =
        "     Running tests/c.rs (target/debug/deps/c-1)\ntcp: skipped: needs ip\n3 passed, 0 failed\n";
    let all = format!("{FORMAT}{TWO_BINARIES}{printed}{good}{own_main}check tests: ok\n");
    assert_eq!(sum(&all), ("10 passed, 0 failed, 2 skipped".to_string(), true));
}

#[test]
fn a_failed_test_fails() {
    let bad =
        "test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
    let all = format!("{FORMAT}{TWO_BINARIES}{bad}check tests: failed with status 101\n");
    assert_eq!(sum(&all), ("7 passed, 1 failed".to_string(), false));
}

#[test]
fn a_binary_that_died_without_a_result_fails() {
    let all = format!("{TWO_BINARIES}check tests: failed with status 101\n");
    assert_eq!(sum(&all), ("2 passed, 1 failed".to_string(), false));
    assert_eq!(sum(TWO_BINARIES), ("0 passed, 1 failed".to_string(), false), "cut off before its end");
}

#[test]
fn a_failed_check_or_no_check_at_all_fails() {
    assert_eq!(sum("check format: failed with status 1\n"), ("0 passed, 1 failed".to_string(), false));
    assert_eq!(sum("error: could not compile\n"), ("0 passed, 0 failed".to_string(), false));
}

#[test]
fn a_check_says_how_it_ended() {
    let run = |command: &str| {
        let output = script("check").args(["name", command]).output().expect("a shell is there");
        (String::from_utf8(output.stdout).expect("text"), output.status.code())
    };
    assert_eq!(run("true"), ("check name: ok\n".to_string(), Some(0)));
    assert_eq!(run("false"), ("check name: failed with status 1\n".to_string(), Some(1)));
}
