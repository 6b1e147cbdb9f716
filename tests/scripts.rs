//! The scripts behind `make test`: their last output is the true result.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::{Command, Stdio};

fn script(name: &str) -> Command {
    Command::new(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name))
}

/// The last line that `sum-tests` says about an output, and whether it was content.
fn sum(output: &str) -> (String, bool) {
    sum_where(output, "")
}

/// The same where the variable CI is so.
fn sum_where(output: &str, ci: &str) -> (String, bool) {
    let mut command = script("sum-tests");
    command.env("CI", ci);
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
    assert_eq!(
        sum_where(&all, "true"),
        ("10 passed, 2 failed".to_string(), false),
        "CI installs and is root"
    );
    let lacking = all
        .replace("needs root", "needs an RDMA device: scripts/verbs")
        .replace("needs ip", "the loopback cannot be cut");
    assert_eq!(sum_where(&lacking, "true"), ("10 passed, 0 failed, 2 skipped".to_string(), true));
}

#[test]
fn what_a_child_process_runs_is_no_test() {
    let printed = "\nsuccesses:\n\n---- manager_process stdout ----\nno test: what a child process runs\n\n\nsuccesses:\n";
    let good =
        "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
    let all = format!("{FORMAT}{TWO_BINARIES}{printed}{good}check tests: ok\n");
    assert_eq!(sum(&all), ("7 passed, 0 failed".to_string(), true));
}

#[test]
fn how_long_building_took_is_told() {
    let all = format!("check compile: 61 s\n{FORMAT}check tests: 9 s\ncheck tests: ok\n");
    let mut command = script("sum-tests");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("awk is there");
    child.stdin.take().expect("the input is a pipe").write_all(all.as_bytes()).expect("the script reads all");
    let text = String::from_utf8(child.wait_with_output().expect("the script ends").stdout).expect("text");
    assert!(text.ends_with("\nbuilding 61 s, tests 9 s\n2 passed, 0 failed\n"), "{text}");
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
    let inherits = "exec 7</dev/null 12</dev/null; exec \"$0\" name ls /proc/self/fd";
    let check = script("check").get_program().to_owned();
    let output = Command::new("bash").arg("-c").arg(inherits).arg(check).output().expect("bash is there");
    let text = String::from_utf8(output.stdout).expect("text");
    // 3 is the folder that is listed.
    assert!(text.starts_with("0\n1\n2\n3\ncheck name: "), "{text}");
    let seconds = |text: &str| text.replace(char::is_numeric, "").replace("check name:  s\n", "");
    let (text, code) = run("true");
    assert_eq!((seconds(&text), code), ("check name: ok\n".to_string(), Some(0)));
    let (text, code) = run("false");
    assert_eq!((seconds(&text), code), ("check name: failed with status \n".to_string(), Some(1)));
}

/// Takes a cluster away at the end of its test, also of one that fails: its pool in memory is outside of its folder.
struct RemovedAtEnd(std::path::PathBuf, std::path::PathBuf);

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        for arguments in [["down", "--hard"], ["remove", "--yes"]] {
            let mut command = Command::new("timeout");
            let _ = command.arg("60").arg(&self.0).args(arguments).env("HEARTH_DIR", &self.1).output();
        }
    }
}

#[test]
fn what_is_installed_works_where_it_lies() {
    let folder = tempfile::tempdir().expect("a folder");
    let (built, prefix) = (folder.path().join("release"), folder.path().join("usr"));
    let hearth = std::path::Path::new(env!("CARGO_BIN_EXE_hearth"));
    std::fs::create_dir(&built).expect("a folder");
    for name in ["hearth", "libhearth.so"] {
        std::fs::copy(hearth.with_file_name(name), built.join(name)).expect("both are built");
    }
    let run = |command: &mut Command| {
        let output = command.output().expect("it can be run");
        assert!(output.status.success(), "{command:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    run(script("install").arg(&prefix).env("CARGO_TARGET_DIR", folder.path()));
    let page = std::fs::read_to_string(prefix.join("share/man/man1/hearth-run.1")).expect("a man page");
    assert!(page.contains("Run a program that sees the tree"));
    for completion in [
        "share/bash-completion/completions/hearth",
        "share/zsh/site-functions/_hearth",
        "share/fish/vendor_completions.d/hearth.fish",
    ] {
        let text = std::fs::read_to_string(prefix.join(completion)).expect("a completion");
        assert!(text.contains("umount"), "{completion}");
    }
    let dir = folder.path().join("cluster");
    let hearth_of = |program: &std::path::Path, arguments: &[&str]| {
        let mut command = Command::new("timeout");
        run(command.arg("60").arg(program).args(arguments).env("HEARTH_DIR", &dir))
    };
    let (installed, other) = (prefix.join("bin/hearth"), built.join("hearth"));
    let status = || -> serde_json::Value {
        serde_json::from_str(&hearth_of(&other, &["status", "--json"])).expect("what status says")
    };
    let daemon = || status()[0]["pid"].as_i64().expect("a daemon answers").to_string();
    let at_end = RemovedAtEnd(other.clone(), dir.clone());
    hearth_of(&installed, &["up", "--no-mount", "--medium", "memory", "--capacity", "64"]);
    let file = dir.join("n1/file").display().to_string();
    let script = format!("echo text > {file}; cat {file}");
    assert_eq!(hearth_of(&installed, &["run", "--", "sh", "-c", &script]), "text\n");
    // Another version takes its place, which cannot even be run: the node goes on with its own.
    std::fs::remove_file(&installed).expect("it is there");
    std::fs::write(&installed, "no program").expect("it can be replaced");
    let former = daemon();
    run(Command::new("kill").args(["-9", &former]));
    let script = format!("cat {file}");
    assert_eq!(hearth_of(&other, &["run", "--", "sh", "-c", &script]), "text\n");
    assert_ne!(daemon(), former);
    let pool = status()[0]["pool"].as_str().expect("a pool").to_owned();
    hearth_of(&other, &["down"]);
    drop(at_end);
    assert!(!std::path::Path::new(&pool).exists() && !dir.exists(), "{pool} is left");
}
