//! End to end on one node: the real program, the real daemon, real programs under the library, real `kill -9`.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[test]
fn what_one_program_writes_the_next_one_reads() {
    let node = Node::up();
    node.sh("echo hello > $T/greeting; mkdir $T/folder; echo there > $T/folder/file").expect_success();
    assert_eq!(node.sh("cat $T/greeting $T/folder/file").expect_success(), "hello\nthere\n");
    node.hearth(&["down"]).expect_success();
    node.check();
    node.hearth(&["up"]).expect_success();
    assert_eq!(node.sh("cat $T/greeting $T/folder/file").expect_success(), "hello\nthere\n");
}

/// A script that locks a file, so that it runs once, starts a node.
#[test]
fn a_node_keeps_nothing_open_that_its_starter_had_open() {
    let node = Node::up();
    node.hearth(&["down"]).expect_success();
    let script = "exec 9> \"$1/lock\" && flock 9 && \"$2\" up --dir \"$1\" > \"$1/said\" && exec 9>&- &&
        flock -n \"$1/lock\" true && echo free";
    let program = env!("CARGO_BIN_EXE_hearth");
    let done = harness::limited(&["sh"], &["-c", script, "sh", node.dir(), program]);
    assert_eq!(done.expect_success(), "free\n");
    node.sh("echo hello > $T/greeting").expect_success();
}

#[test]
fn what_a_program_knows_from_a_listing_only_it_can_open_and_remove() {
    let node = Node::up();
    node.sh("mkdir $T/d; for i in 1 2 3 4; do echo $i > $T/d/$i; done").expect_success();
    node.sh("for f in $T/d/*; do echo more >> $f; done").expect_success();
    assert_eq!(node.sh("cat $T/d/*").expect_success(), "1\nmore\n2\nmore\n3\nmore\n4\nmore\n");
    node.sh("rm -r $T/d; ! ls $T/d").expect_success();
}

#[test]
fn library_and_mount_see_each_others_writes_at_once() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.hearth(&["mount"]).expect_success();
    let file = node.path("file");
    // By children: one that is being started for another test would have a file of this process open.
    node.sh_mounted("echo through the mount > $T/file").expect_success();
    assert_eq!(
        node.sh("cat $T/file; echo through the library >> $T/file").expect_success(),
        "through the mount\n"
    );
    assert_eq!(node.sh_mounted("cat $T/file").expect_success(), "through the mount\nthrough the library\n");
    assert!(node.hearth(&["mount"]).expect_success().contains("is mounted already"));
    node.hearth(&["umount"]).expect_success();
    assert!(!Path::new(&file).exists(), "without the mount the folder is empty for others");
    node.hearth(&["umount"]).expect_failure("is not mounted");
}

#[test]
fn a_daemon_that_is_killed_between_programs_loses_nothing() {
    let node = Node::up();
    for round in 0..5 {
        node.sh(&format!("echo {round} >> $T/rounds; mkdir $T/d{round}; mv $T/d{round} $T/moved{round}"))
            .expect_success();
        node.kill_daemon();
        node.hearth(&["start"]).expect_success();
    }
    assert_eq!(node.sh("cat $T/rounds; ls $T").expect_success().lines().count(), 5 + 6);
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn sqlite_commits_survive_the_kill_of_the_program() {
    let node = Node::up();
    let database = node.path("rows.db");
    node.hearth(&["run", "--", "sqlite3", &database, "create table t(id integer primary key, text);"])
        .expect_success();
    let mut writer = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["run", "--dir", node.dir(), "--", "sqlite3", &database])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = writer.stdin.take().unwrap();
    let output = writer.stdout.take().unwrap();
    let feeder = std::thread::Builder::new().spawn(move || {
        use std::io::Write;
        for row in 1..=1_000_000 {
            let line = format!("insert into t values({row}, 'row {row}'); select {row};\n");
            if input.write_all(line.as_bytes()).is_err() {
                break;
            }
        }
    });
    // Killed in the middle of its work, when two hundred commits are acknowledged.
    use std::io::BufRead;
    let mut lines = std::io::BufReader::new(output).lines();
    let mut acknowledged = 0;
    while acknowledged < 200 {
        acknowledged = lines.next().expect("the writer goes on").unwrap().parse().unwrap();
    }
    writer.kill().unwrap();
    for line in lines.map_while(Result::ok) {
        acknowledged = line.parse().unwrap_or(acknowledged);
    }
    writer.wait().unwrap();
    feeder.unwrap().join().unwrap();
    let answer = node
        .hearth(&["run", "--", "sqlite3", &database, "select count(*) from t; pragma integrity_check;"])
        .expect_success();
    let (count, integrity) = answer.trim().split_once('\n').unwrap();
    assert!(
        count.parse::<u64>().unwrap() >= acknowledged,
        "{acknowledged} were acknowledged, {count} are there"
    );
    assert_eq!(integrity, "ok");
}

#[test]
fn no_more_is_promised_of_a_pool_than_its_folder_survives() {
    let node = Node::in_memory_as_files();
    let said = node.hearth(&["status", "--json"]).expect_success();
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said[0]["medium"], &said[0]["survives"]), (&"file".into(), &"process".into()));
}

/// A child may go on as another user, who may see nothing of what its parent's user writes from then on.
#[test]
fn children_do_not_map_their_parents_log_nor_segments() {
    let node = Node::up();
    let script = "maps() { while read -r line; do case $line in */pool/*) echo \"$1 $line\" ;; esac; done </proc/self/maps; }
        echo first >$T/file; read -r line <$T/file
        maps parent
        ( maps child )
        ( read -r line <$T/file; maps attached )";
    let said = node.sh(script).expect_success();
    let of = |who: &str| said.lines().filter(|line| line.starts_with(who)).count();
    assert!(of("parent") > 0 && of("attached") > 0, "{said}");
    assert_eq!(of("child"), 0, "{said}");
}

#[test]
fn mistakes_are_told_in_a_sentence() {
    let node = Node::up();
    assert!(node.hearth(&["up"]).expect_success().contains("node 1 is up already"));
    node.hearth(&["down"]).expect_success();
    assert_eq!(node.hearth(&["status"]).status.code(), Some(2));
    let run = node.hearth(&["run", "--", "true"]);
    let told = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(
        told.contains("node 1 is not served now") && told.contains("waits 2 seconds and gets EIO"),
        "{told}"
    );
    run.expect_success();
    node.sh("cat $T/file").expect_failure("Input/output error");
    // The user of the program may start the node meanwhile: its next call is served.
    let hearth = env!("CARGO_BIN_EXE_hearth");
    let script =
        format!("! cat $T/file; LD_PRELOAD= {hearth} start --dir {} && echo there > $T/file", node.dir());
    node.sh(&script).expect_success();
    assert_eq!(node.sh("cat $T/file").expect_success(), "there\n");
    node.hearth(&["down"]).expect_success();
    node.hearth(&["up", "--medium", "file"]).expect_failure("cannot be changed");
    node.hearth(&["run", "--at", "/tmp/../there", "--", "true"])
        .expect_failure("an absolute path without ..");
    let nowhere: PathBuf = node.dir.path().join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    limited(&[env!("CARGO_BIN_EXE_hearth"), "run", "--dir", nowhere, "--"], &["true"])
        .expect_failure("there is no cluster");
    limited(&[env!("CARGO_BIN_EXE_hearth"), "check"], &[nowhere]).expect_failure("nowhere");
}

#[test]
fn an_inherited_file_is_never_taken_for_another_that_has_its_name_now() {
    let node = Node::up();
    let script = "exec 3>> $T/log; echo first >&3; mv $T/log $T/old; echo other > $T/log\n\
                  ! sh -c 'echo astray >&3' 2> /dev/null || true";
    node.sh(script).expect_success();
    assert_eq!(node.sh("cat $T/log").expect_success(), "other\n");
}

#[test]
fn every_operation_is_measured_in_the_tree_and_beside_it() {
    let beside = tempfile::tempdir().unwrap();
    let folder = beside.path().to_str().unwrap();
    let told = limited(
        &[env!("CARGO_BIN_EXE_hearth")],
        &["bench", "ops", "--json", "--count", "20", "--beside", folder],
    );
    let places: serde_json::Value = serde_json::from_str(&told.expect_success()).unwrap();
    let places = places.as_array().unwrap();
    let names: Vec<_> = places.iter().map(|place| place["place"].as_str().unwrap()).collect();
    assert_eq!(names, ["hearth", "tmpfs", "beside"]);
    let operations = |place: &serde_json::Value| {
        let figures = place["operations"].as_array().unwrap().clone();
        assert!(figures.iter().all(|figure| figure["median_ns"].as_u64() > Some(0)), "{place}");
        figures.iter().map(|figure| figure["operation"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(operations(&places[0]).len(), 12);
    assert!(places.iter().all(|place| operations(place) == operations(&places[0])));
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn an_fsync_on_two_nodes_is_measured_beside_its_floor() {
    let beside = tempfile::tempdir().unwrap();
    let folder = beside.path().to_str().unwrap();
    let told = limited(
        &[env!("CARGO_BIN_EXE_hearth")],
        &["bench", "latency", "--nodes", "2", "--json", "--count", "50", "--beside", folder],
    );
    let rows: serde_json::Value = serde_json::from_str(&told.expect_success()).unwrap();
    let rows = rows.as_array().unwrap();
    let sizes: Vec<_> = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [128, 4096, 65536]);
    let first: Vec<_> =
        rows.iter().map(|row| row["first_pass"]["p50_ns"].as_u64().is_some_and(|ns| ns > 0)).collect();
    assert_eq!(first, [false, false, true]);
    let places = ["hearth", "floor", "tmpfs", "beside", "paused", "paused_floor"];
    for (row, place) in rows.iter().flat_map(|row| places.map(|at| (row, at))) {
        let [p50, p99] = ["p50_ns", "p99_ns"].map(|name| row[place][name].as_u64().unwrap());
        assert!(p50 > 0 && p99 >= p50, "{place}: {row}");
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn writers_without_a_pause_are_measured_in_the_tree_and_on_a_tmpfs() {
    let rows = ["append-4k-fresh", "append-1m", "overwrite-two", "replace", "journal"];
    let told = limited(
        &[env!("CARGO_BIN_EXE_hearth")],
        &["bench", "sustained", "--json", "--rounds", "1", "--mib", "2", "--only", &rows.join(",")],
    );
    let lines: serde_json::Value = serde_json::from_str(&told.expect_success()).unwrap();
    let lines = lines.as_array().unwrap();
    let names: Vec<_> = lines.iter().map(|line| line["row"].as_str().unwrap()).collect();
    assert_eq!(names, rows);
    for (line, place) in lines.iter().flat_map(|line| ["tree", "tmpfs"].map(|place| (line, &line[place]))) {
        let figure = |name: &str| place[name].as_f64().unwrap();
        assert!(figure("per_second") > 0.0 && figure("p99_us") > 0.0, "{line}");
        // Two units of one time: the last digit may differ.
        assert!(figure("longest_ms") * 1000.1 >= figure("p99_us"), "{line}");
        assert!(line.get("one_node").is_none(), "{line}");
    }
    let told = limited(
        &[env!("CARGO_BIN_EXE_hearth")],
        &[
            "bench",
            "sustained",
            "--nodes",
            "2",
            "--json",
            "--rounds",
            "1",
            "--mib",
            "2",
            "--only",
            "append-4k",
        ],
    );
    let lines: serde_json::Value = serde_json::from_str(&told.expect_success()).unwrap();
    for place in ["tree", "tmpfs", "one_node"] {
        assert!(lines[0][place]["per_second"].as_f64().unwrap() > 0.0, "{lines}");
    }
    assert!(lines[0]["ratio_to_one_node"].as_f64().unwrap() > 0.0, "{lines}");
}

/// Those that every machine of ours has; a mount only where it may be.
#[test]
fn programs_are_measured_through_both_doors_beside_a_tmpfs() {
    let rows = ["make", "untar", "cp", "rm"];
    let told = limited(
        &[env!("CARGO_BIN_EXE_hearth")],
        &["bench", "programs", "--json", "--rounds", "1", "--only", &rows.join(",")],
    );
    let lines: serde_json::Value = serde_json::from_str(&told.expect_success()).unwrap();
    let lines = lines.as_array().unwrap();
    let names: Vec<_> = lines.iter().map(|line| line["row"].as_str().unwrap()).collect();
    assert_eq!(names, rows);
    for line in lines {
        for place in [Some(&line["tmpfs"]), Some(&line["library"]), line.get("mount")].into_iter().flatten() {
            assert!(place["failed"] == 0 && place["seconds"].as_f64().unwrap() > 0.0, "{line}");
        }
        assert!(line["library"]["requests"].as_u64().unwrap() > 0, "the daemon is asked for files: {line}");
    }
    let wrong = limited(&[env!("CARGO_BIN_EXE_hearth")], &["bench", "programs", "--only", "no-such-program"]);
    wrong.expect_failure("no-such-program");
}

/// As every program: SIGPIPE ends it, and a shell says 141.
#[test]
fn a_reader_that_goes_away_ends_a_command_quietly() {
    let node = Node::up();
    let pool = format!("{}/node-1/pool", node.dir());
    for command in
        [&["status"][..], &["status", "--json"], &["start"], &["up"], &["down"], &["check"], &["inspect"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut hearth = Command::new(env!("CARGO_BIN_EXE_hearth"));
        hearth.arg(command[0]);
        match command[0] {
            "check" | "inspect" => hearth.arg(&pool),
            _ => hearth.args(["--dir", node.dir()]),
        };
        let output = hearth.args(&command[1..]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.signal(), said.as_ref()), (Some(13), ""), "{command:?}");
    }
}

#[test]
fn a_new_cluster_that_cannot_start_is_taken_away_again() {
    let dir = tempfile::tempdir().unwrap();
    let there = dir.path().join("there");
    std::fs::create_dir(&there).unwrap();
    let (within, beneath) =
        (there.to_str().unwrap().to_owned(), there.join("a/b").to_str().unwrap().to_owned());
    let up = |dir: &str, mib: &str, medium: &str| {
        let hearth = [env!("CARGO_BIN_EXE_hearth"), "up", "--dir", dir];
        limited(&hearth, &["--capacity", mib, "--medium", medium])
    };
    for folder in [&within, &beneath] {
        let failed = up(folder, "10000000", "memory");
        failed.expect_failure("no space on the medium (--capacity 10000000");
        assert_eq!(String::from_utf8_lossy(&failed.stderr).lines().count(), 1, "a sentence");
        assert_eq!(std::fs::read_dir(&there).unwrap().count(), 0, "what was made is gone");
    }
    up(&within, "64", "file").expect_success();
    limited(&[env!("CARGO_BIN_EXE_hearth"), "down", "--dir"], &[&within]).expect_success();
}

/// Its pool in memory lies where `rm -r` of the folder would leave it.
#[test]
fn a_cluster_that_is_down_is_removed_with_its_pools_and_nothing_else() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cluster = dir.path().join("cluster");
    let path = cluster.to_str().unwrap();
    let hearth =
        |command: &str, rest: &[&str]| limited(&[env!("CARGO_BIN_EXE_hearth"), command, "--dir", path], rest);
    for nodes in ["1", "2"] {
        let made = ["--nodes", nodes, "--medium", "memory", "--capacity", "64", "--no-mount"];
        hearth("up", &made).expect_success();
        let told: serde_json::Value = serde_json::from_slice(&hearth("status", &["--json"]).stdout).unwrap();
        let pools: Vec<_> = told.as_array().unwrap().iter().map(|node| node["pool"].as_str()).collect();
        let pools: Vec<PathBuf> = pools.into_iter().flatten().map(PathBuf::from).collect();
        assert_eq!(pools.len().to_string(), nodes, "{told}");
        let there = || pools.iter().filter(|pool| pool.exists()).count();
        hearth("remove", &["--yes"]).expect_failure("node 1 is up");
        hearth("down", &["--node", "1"]).expect_success();
        hearth("down", &[]).expect_success();
        let asked = hearth("remove", &[]);
        asked.expect_failure("nothing was removed");
        assert_eq!((asked.status.code(), there()), (Some(1), pools.len()));
        let listed = String::from_utf8_lossy(&asked.stdout).into_owned();
        assert!(pools.iter().all(|pool| listed.contains(pool.to_str().unwrap())), "{listed}");
        let own = cluster.join("own");
        if nodes == "1" {
            std::fs::write(&own, "").unwrap();
        }
        hearth("remove", &["--yes"]).expect_success();
        assert_eq!(there(), 0, "{pools:?}");
        let left = std::fs::read_dir(&cluster).into_iter().flatten().flatten().map(|entry| entry.path());
        assert_eq!(left.collect::<Vec<_>>(), if nodes == "1" { vec![own.clone()] } else { Vec::new() });
        let _ = std::fs::remove_file(own);
        assert!(nodes == "1" || !cluster.exists());
        hearth("remove", &["--yes"]).expect_failure("there is no cluster in");
    }
}

/// The limits in `hearth.toml`: few leases are enough for any number of files; impossible settings are refused by name.
#[test]
fn limits_of_the_settings_hold_from_the_next_start_on() {
    let node = Node::up();
    node.sh("mkdir $T/d; cd $T/d; for i in $(seq 600); do echo $i > f$i; done").expect_success();
    let file = node.dir.path().join("hearth.toml");
    let chosen = std::fs::read_to_string(&file).unwrap();
    let with = |limits: &str| {
        node.hearth(&["down"]).expect_success();
        std::fs::write(&file, format!("{chosen}\n[limits]\n{limits}\n")).unwrap();
        node.hearth(&["start"])
    };
    with("leases = 128\nlog_mib = 2").expect_success();
    let script =
        "cd $T/d; ls -l | wc -l; cat f* | wc -l; head -c 9000000 /dev/zero > large; rm -r $T/d; ls $T";
    let words = node.sh(script).expect_success().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words, ["601", "600"]);
    let refused = |limits: &str, sentence: &str| {
        std::fs::write(&file, format!("{chosen}\n[limits]\n{limits}\n")).unwrap();
        node.hearth(&["status"]).expect_failure(sentence);
    };
    refused("leases = 3", "leases = 3 in [limits] is not between 128 and 1048576");
    refused("log_mib = 65", "log_mib = 65");
    refused("leases = 1000\nknown_inodes = 999", "known_inodes = 999");
    refused("programs = 0", "programs = 0");
    refused("lease = 1000", "unknown field `lease`");
    std::fs::write(&file, chosen).unwrap();
}

/// The kernel copies new blocks into segments, and refuses that behind a limit of the daemon's process for the size of files.
#[test]
fn a_daemon_with_a_limit_for_files_writes_to_those_that_are_longer() {
    let node = Node::of_mib(64);
    node.sh("head -c 3200000 /dev/zero > $T/first").expect_success();
    node.hearth(&["down"]).expect_success();
    assert!(std::fs::metadata(node.dir.path().join("node-1/pool/segment-1")).unwrap().len() > 4_000_000);
    // In units of 1,024 bytes: logs are shorter.
    let limit = format!("ulimit -f 2048; exec {} start --dir {}", env!("CARGO_BIN_EXE_hearth"), node.dir());
    limited(&["bash", "-c"], &[&limit]).expect_success();
    let daemon = || std::fs::read_to_string(node.dir.path().join("node-1/serve.pid")).unwrap();
    let before = daemon();
    node.sh("seq 60000 > $T/second; sync").expect_success();
    let numbers = node.sh("cat $T/second; cat $T/first | tr -d '\\0' | wc -c").expect_success();
    assert!(numbers.ends_with("\n60000\n0\n"), "{}", numbers.len());
    assert_eq!(daemon(), before, "it was started again");
    node.hearth(&["down"]).expect_success();
    node.check();
}
