//! Two users that share nothing, and a daemon that belongs to neither: Bob attacks Alice's files by calls, by /proc,
//! and by a client program that guesses numbers and forges records. Bob learns and changes nothing.
//!
//! Needs root, to become them.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod stranger;

use format::call::{
    CallKind, DigestRequest, GrowRequest, InodeRequest, LEASE_READ, LEASE_WRITE, LeaseRequest, LeaseUnit,
    NodeReply, OpenRequest, RangeRequest, Status, WalkRequest, WalkResponse,
};
use format::record::{Kind, RENAME_EXCHANGE, RenameBody, SET_MODE, SET_UID, SetAttrBody};
use format::superblock::Superblock;
use format::{Cookie, InodeNumber, Name};
use harness::{Expect, limited};
use ipc::socket::Connection;
use ipc::sync::Word;
use ipc::{Host, SystemHost};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use stranger::{RING_START, Stranger, is_for_reading_only};
use zerocopy::{FromZeros, IntoBytes};

const ALICE: &str = "64101";
const BOB: &str = "64102";
/// The contents of all of Alice's files that no other user may see.
const SECRET: &str = "nobody-else-shall-read-this";
/// The arguments of a job: the socket, then inode numbers of Alice's.
const JOB: &str = "HEARTH_TEST_STRANGER";

/// A cluster that users of the machine can come to, and the programs where they can run them.
struct Machine {
    dir: tempfile::TempDir,
}

/// A program of a user's that waits until it is told to end.
struct Waiting(Child);

impl Waiting {
    /// Starts it, and waits for its word that it is ready; a test's own binary says more before that.
    fn begin(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert!(
            lines.map_while(Result::ok).any(|line| line.ends_with("ready")),
            "it ends before it is ready"
        );
        Self(child)
    }
}

/// The command line that runs a command as a user, without any right beside the user's own.
fn of_user(uid: &str) -> [&str; 5] {
    ["--reuid", uid, "--regid", uid, "--clear-groups"]
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    fn up() -> Self {
        let dir = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let machine = Self { dir };
        let built = Path::new(env!("CARGO_BIN_EXE_hearth"));
        for (from, name) in [
            (built.to_owned(), "hearth"),
            (built.with_file_name("libhearth.so"), "libhearth.so"),
            (std::env::current_exe().unwrap(), "isolation"),
        ] {
            // By a child: one that is being started for another test would have the copy open for writing.
            limited(&["cp", from.to_str().unwrap()], &[&machine.text(name)]).expect_success();
        }
        machine.hearth(&["up", "--no-mount", "--medium", "memory", "--capacity", "256"]).expect_success();
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// `hearth COMMAND --dir DIR REST` as root.
    fn hearth(&self, arguments: &[&str]) -> Output {
        let (command, rest) = arguments.split_first().unwrap();
        limited(&[&self.text("hearth"), command, "--dir", &self.text("c")], rest)
    }

    /// A command as a user without any right beside its own.
    fn user(&self, uid: &str, command: &[&str]) -> Output {
        limited(&[&["setpriv"][..], &of_user(uid)].concat(), command)
    }

    /// A shell script of a user's under the library; `$T` is the tree.
    fn sh(&self, uid: &str, script: &str) -> Output {
        let script = format!("T={}\n{script}", self.text("c/n1"));
        let (hearth, dir) = (self.text("hearth"), self.text("c"));
        self.user(uid, &[&hearth, "run", "--dir", &dir, "--", "sh", "-ec", &script])
    }

    /// The same, going on in the background once it has said a line.
    fn begin(&self, uid: &str, script: &str) -> Waiting {
        let script = format!("T={}\n{script}", self.text("c/n1"));
        let mut command = Command::new("setpriv");
        command.args(of_user(uid)).args(["timeout", "300"]);
        command.args([&self.text("hearth"), "run", "--dir", &self.text("c"), "--", "sh", "-ec", &script]);
        Waiting::begin(&mut command)
    }

    fn status(&self) -> serde_json::Value {
        let status = self.hearth(&["status", "--json"]);
        let answers: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        answers[0].clone()
    }

    /// Alice's files: one in a folder of hers, one where all users may make names, one that all may read.
    fn of_alice(&self) -> Vec<u64> {
        self.sh(
            "0",
            &format!(
                "mkdir $T/alice $T/bob $T/common; chmod 1777 $T/common; chmod 700 $T/alice $T/bob
             chown {ALICE}:{ALICE} $T/alice; chown {BOB}:{BOB} $T/bob"
            ),
        )
        .expect_success();
        self.sh(
            ALICE,
            &format!(
                "umask 077; mkdir $T/alice/deep; for f in alice/file alice/deep/file common/hers; do
               for i in $(seq 400); do echo {SECRET} $i; done > $T/$f
             done; echo public > $T/common/public; chmod 644 $T/common/public; ln -s {SECRET} $T/alice/link"
            ),
        )
        .expect_success();
        let numbers = self
            .sh(ALICE, "stat -c %i $T/alice $T/alice/file $T/alice/deep/file $T/common/hers $T/alice/link");
        numbers.expect_success().lines().map(|line| line.parse().unwrap()).collect()
    }

    /// All that Alice has, contents, owners, modes, times of change, names.
    fn alice_has(&self) -> String {
        let all = "cd $T; for f in alice alice/file alice/deep alice/deep/file common/hers common/public; do
             stat -c '%n %i %f %u %g %h %s %Y %Z' $f; done
             ls -a alice alice/deep; readlink alice/link; cksum alice/file alice/deep/file common/hers common/public";
        self.sh(ALICE, all).expect_success()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.hearth(&["down", "--hard"]);
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

#[test]
fn by_calls_a_user_reads_and_changes_nothing_of_anothers() {
    if !is_root() {
        return;
    }
    let machine = Machine::up();
    machine.of_alice();
    let quiet = machine.sh(BOB, "true");
    assert_eq!(String::from_utf8_lossy(&quiet.stderr), "", "a node that is served is no news to a user");
    let before = machine.alice_has();
    let attempts = [
        "ls $T/alice",
        "cat $T/alice/file",
        "stat $T/alice/file",
        "cd $T/alice",
        "cat $T/alice/deep/file",
        "readlink $T/alice/link",
        "cat $T/common/hers",
        "echo x >> $T/common/hers",
        ": > $T/common/hers",
        "echo x >> $T/common/public",
        "truncate -s 0 $T/common/public",
        "rm -f $T/common/hers",
        "rm -f $T/common/public",
        "mv $T/common/hers $T/bob/mine",
        "mv $T/common/public $T/common/moved",
        "echo x > $T/bob/x; mv -f $T/bob/x $T/common/hers",
        "rm -rf $T/alice",
        "rmdir $T/alice",
        "mv $T/alice $T/bob/a",
        "chmod 777 $T/alice",
        "chmod 777 $T/common/hers",
        "chown $(id -u) $T/common/hers",
        "touch -d 2001-01-01 $T/common/public",
        "touch $T/common/hers",
        "mkdir $T/alice/new",
        "touch $T/alice/new",
        "ln -s x $T/alice/new",
        "mkfifo $T/alice/new",
        "ln $T/alice/file $T/bob/linked",
        "mknod $T/bob/device b 1 1",
        "chown 0 $T/bob",
        "touch $T/new",
        "rmdir $T/common",
        "chmod 4777 $T/common/public",
        "setfattr -n user.a -v b $T/common/public",
        "setfattr -n trusted.a -v b $T/bob",
    ];
    for attempt in attempts {
        let tried = machine.sh(BOB, &format!("{attempt} && echo DONE"));
        let said = String::from_utf8_lossy(&tried.stdout).into_owned();
        assert!(!said.contains("DONE") && !said.contains(SECRET), "{attempt}: {said}");
    }
    // A link to a file that may not be opened shows only its attributes.
    machine
        .sh(BOB, "ln $T/common/hers $T/bob/linked && ! cat $T/bob/linked && rm $T/bob/linked || true")
        .expect_success();
    machine
        .sh(BOB, "test \"$(cat $T/common/public)\" = public; echo own > $T/bob/own; cat $T/bob/own")
        .expect_success();
    let after = machine.alice_has();
    let without_ctime_of_hers =
        |text: &str| text.lines().filter(|line| !line.starts_with("common/hers ")).count();
    assert_eq!(without_ctime_of_hers(&before), without_ctime_of_hers(&after));
    assert_eq!(lines_but_link_time(&before), lines_but_link_time(&after));
}

/// The listing without the time of status change of the one file that Bob may give a second name.
fn lines_but_link_time(text: &str) -> Vec<String> {
    let cut = |line: &str| match line.strip_prefix("common/hers ") {
        Some(rest) => rest.rsplit_once(' ').unwrap().0.to_owned(),
        None => line.to_owned(),
    };
    text.lines().map(cut).collect()
}

#[test]
fn neither_proc_nor_the_pools_folder_shows_anything() {
    if !is_root() {
        return;
    }
    let machine = Machine::up();
    machine.of_alice();
    let before = machine.alice_has();
    let hers = machine.begin(
        ALICE,
        &format!("exec 5<> $T/alice/file; read -r line <&5; S={SECRET}; export S; echo ready; read -r line"),
    );
    let daemon = machine.status()["pid"].as_i64().unwrap().to_string();
    // `timeout`, and the shell: `hearth run` became it. Other tests have programs of hers too.
    let all =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let (uid, dir) = (format!("\t{ALICE}\t"), machine.text("c"));
    let is_hers = |pid: &String| {
        let of = |what: &str| fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
        let says = |what: &str, word: &str| String::from_utf8_lossy(&of(what)).contains(word);
        says("status", &uid) && says("cmdline", &dir)
    };
    let mut victims: Vec<String> = all.filter(is_hers).collect();
    assert!(victims.contains(&hers.0.id().to_string()) && victims.len() >= 2, "{victims:?}");
    victims.push(daemon.clone());
    for pid in &victims {
        for what in ["fd", "map_files", "fdinfo", "task/$p/fd"] {
            let tried =
                machine.user(BOB, &["sh", "-c", &format!("p={pid}; ls -A /proc/$p/{what} && echo DONE")]);
            tried.expect_failure("denied");
        }
        for what in ["mem", "environ", "maps", "smaps", "pagemap", "auxv", "stack", "syscall"] {
            let tried = machine
                .user(BOB, &["sh", "-c", &format!("head -c 1 /proc/{pid}/{what} > /dev/null && echo DONE")]);
            assert!(
                !String::from_utf8_lossy(&tried.stdout).contains("DONE"),
                "/proc/{pid}/{what} can be read"
            );
        }
        for fd in 0..40 {
            let tried = format!("head -c 1 /proc/{pid}/fd/{fd} > /dev/null && echo DONE");
            let tried = machine.user(BOB, &["sh", "-c", &tried]);
            assert!(!String::from_utf8_lossy(&tried.stdout).contains("DONE"), "descriptor {fd} of {pid}");
        }
        machine.user(BOB, &["sh", "-c", &format!("kill -0 {pid}")]).expect_failure("");
    }
    let node = machine.text("c/node-1");
    for path in ["", "/pool", "/pool/tree", "/serve.log"] {
        let tried = machine.user(
            BOB,
            &[
                "sh",
                "-c",
                &format!("ls {node}{path}/ || cat {node}{path}; echo; cat {node}{path} && echo DONE"),
            ],
        );
        let said = String::from_utf8_lossy(&tried.stdout).into_owned();
        assert!(!said.contains("DONE") && !said.contains("log-"), "{path}: {said}");
    }
    let pool = machine.status()["pool"].as_str().map_or_else(|| format!("{node}/pool"), str::to_owned);
    machine.user(BOB, &["ls", &pool]).expect_failure("denied");
    for file in fs::read_dir(&pool).unwrap() {
        let file = file.unwrap().path();
        machine.user(BOB, &["cat", file.to_str().unwrap()]).expect_failure("denied");
        machine.user(BOB, &["truncate", "-s", "0", file.to_str().unwrap()]).expect_failure("denied");
    }
    for command in ["down", "up", "start"] {
        let (hearth, dir) = (machine.text("hearth"), machine.text("c"));
        let _ = machine.user(BOB, &[&hearth, command, "--dir", &dir]);
        assert_eq!(
            machine.status()["pid"].as_i64().unwrap().to_string(),
            daemon,
            "hearth {command} as another user"
        );
    }
    drop(hers);
    assert_eq!(before, machine.alice_has());
}

#[test]
fn a_client_that_guesses_numbers_and_forges_records_gets_nothing() {
    if !is_root() {
        return;
    }
    let machine = Machine::up();
    let numbers = machine.of_alice();
    let before = machine.alice_has();
    // Digested, so that the daemon has something to give away.
    machine.sh("0", "sync").expect_success();
    let socket = format!("{}/socket", machine.text("c/node-1"));
    let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
    for job in ["guess", "forge", "forge and die"] {
        let words = format!("{socket}\n{job}\n{}", words.join("\n"));
        let environment = format!("{JOB}={words}");
        let program = machine.text("isolation");
        let said = machine.user(BOB, &["env", &environment, &program, "job", "--exact", "--nocapture"]);
        let said = said.expect_success();
        assert!(said.contains("the stranger is done"), "{said}");
        if job == "forge and die" {
            let daemon = machine.status()["pid"].as_i64().unwrap();
            let pid = rustix::process::Pid::from_raw(i32::try_from(daemon).unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            while machine.status()["pid"].as_i64().is_none_or(|pid| pid == daemon) {
                let _ = machine.hearth(&["start"]);
            }
        }
        assert_eq!(before, machine.alice_has(), "after a stranger's {job}");
    }
    machine.hearth(&["down"]).expect_success();
    let node = machine.text("c/node-1/pool");
    limited(&[&machine.text("hearth"), "check"], &[&node]).expect_success();
}

/// Alice's programs get sessions while Bob holds more connections than the listener keeps, sends nothing on them, and
/// opens another for each that is closed.
#[test]
fn a_crowd_that_says_nothing_keeps_no_other_user_out() {
    if !is_root() {
        return;
    }
    let machine = Machine::up();
    machine.of_alice();
    let job = format!("{JOB}={}/socket\ncrowd", machine.text("c/node-1"));
    let program = machine.text("isolation");
    let words = ["env", &job, &program, "job", "--exact", "--nocapture"];
    let crowd =
        Waiting::begin(Command::new("setpriv").args(of_user(BOB)).args(["timeout", "300"]).args(words));
    // Had each of them to wait until the crowd's time is over, this would take longer than any program may.
    let asked = machine.sh(ALICE, "for i in $(seq 60); do cat $T/common/public; done");
    assert_eq!(asked.expect_success(), "public\n".repeat(60));
    drop(crowd);
}

/// More connections than the listener keeps of clients that have sent nothing.
const CROWD: usize = 400;

/// Holds connections and says nothing; goes when its standard input ends.
fn crowd(socket: &Path) {
    let until_told = || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    };
    SystemHost.spawn("told", Box::new(until_told)).unwrap();
    let mut held: Vec<Connection> = Vec::new();
    let mut said = false;
    loop {
        held.retain(|connection| matches!(connection.receive(), Ok(None)));
        while held.len() < CROWD {
            // The backlog is full.
            let Ok(connection) = Connection::connect(socket) else { break };
            held.push(connection);
        }
        if !said && held.len() > CROWD / 2 {
            println!("ready");
            said = true;
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(1))));
    }
}

/// Not a test by itself: the job of Bob's process.
#[test]
fn job() {
    let Ok(words) = std::env::var(JOB) else { return };
    let mut words = words.lines();
    let socket = PathBuf::from(words.next().unwrap());
    let job = words.next().unwrap();
    let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    match job {
        "guess" => guess(&socket, &numbers),
        "forge" => forge(&socket, &numbers),
        "crowd" => crowd(&socket),
        _ => {
            let stranger = forge_superblock(&socket, &numbers);
            println!("the stranger is done");
            // As a crash would leave it: nothing is closed in order.
            std::mem::forget(stranger);
            std::process::exit(0);
        }
    }
    println!("the stranger is done");
}

fn inode_body(inode: u64) -> Vec<u8> {
    InodeRequest { inode: InodeNumber::new(inode), flags: 0.into() }.as_bytes().to_vec()
}

fn lease_body(inode: u64, mode: u8) -> Vec<u8> {
    let head = LeaseRequest { count: 1.into(), reserved: 0.into() };
    let unit = LeaseUnit { inode: InodeNumber::new(inode), mode, reserved: [0; 7] };
    [head.as_bytes(), unit.as_bytes()].concat()
}

fn walk_body(start: u64, names: &[&[u8]]) -> Vec<u8> {
    let head = WalkRequest {
        start: InodeNumber::new(start),
        names: (names.len() as u16).into(),
        last_mode: LEASE_READ,
        parent_mode: LEASE_READ,
        ahead: u16::MAX.into(),
        ahead_mode: LEASE_WRITE,
        ahead_if_taken: 0,
    };
    let names = names.iter().flat_map(|name| [&[name.len() as u8], *name].concat());
    head.as_bytes().iter().copied().chain(names).collect()
}

fn shows_nothing(what: &str, bytes: &[u8]) {
    let secret = SECRET.as_bytes();
    assert!(!bytes.windows(secret.len()).any(|window| window == secret), "{what} shows what it may not");
}

/// Every call with every number that there may be, Alice's among them.
fn guess(socket: &Path, hers: &[u64]) {
    let mut stranger = Stranger::attach(socket);
    for descriptor in &stranger.others {
        assert!(is_for_reading_only(descriptor), "what the daemon writes can be written");
    }
    let own = stranger.welcome.first_inode.get();
    let guessed =
        (2..600).chain(hers.iter().copied()).filter(|number| *number < own || hers.contains(number));
    for number in guessed.collect::<Vec<_>>() {
        let inode = InodeNumber::new(number);
        let range = RangeRequest { inode, offset: 0.into(), length: 65_536.into() };
        for access in 0..4 {
            let open = OpenRequest { inode, access, mode: LEASE_READ, reserved: [0; 6] };
            let opened = stranger.call(CallKind::Open, open.as_bytes());
            assert!(opened.is_err(), "{number} was opened");
        }
        let calls = [
            (CallKind::Lease, lease_body(number, LEASE_READ)),
            (CallKind::Lease, lease_body(number, LEASE_WRITE)),
            (CallKind::Walk, walk_body(number, &[b"file"])),
            (CallKind::Walk, walk_body(number, &[])),
            (CallKind::Entries, inode_body(number)),
            (CallKind::Extents, range.as_bytes().to_vec()),
            (CallKind::Read, range.as_bytes().to_vec()),
            (CallKind::Readlink, inode_body(number)),
            (CallKind::GetXattr, [inode_body(number), b"user.a".to_vec()].concat()),
            (CallKind::ListXattr, inode_body(number)),
        ];
        for (kind, body) in calls {
            if let Ok(answer) = stranger.call(kind, &body) {
                assert!(!hers.contains(&number) || answer.len() <= 16, "{kind:?} of {number}: {answer:?}");
                shows_nothing(&format!("{kind:?} of {number}"), &answer);
            }
        }
    }
    // Up to her folder and no further.
    for names in [&[&b"alice"[..], b"file"][..], &[b"alice", b"deep", b"file"], &[b"alice", b"link"]] {
        let answer = stranger.call(CallKind::Walk, &walk_body(1, names)).unwrap_or_default();
        shows_nothing("a walk", &answer);
        let nodes = answer.len().saturating_sub(size_of::<WalkResponse>()) / size_of::<NodeReply>();
        assert!(nodes <= 2, "a walk goes into a folder that is closed");
    }
    let _ = stranger.call(CallKind::Walk, &walk_body(1, &[b"common", b"hers"]));
    let range = RangeRequest { inode: InodeNumber::new(hers[3]), offset: 0.into(), length: 65_536.into() };
    for kind in [CallKind::Read, CallKind::Extents] {
        assert!(
            stranger.call(kind, range.as_bytes()).is_err(),
            "{kind:?} of what was met and may not be read"
        );
    }
    segments(&mut stranger);
}

/// Maps whatever it is given, by every number of a segment, and grows its log; nothing of Alice's is in it.
fn segments(stranger: &mut Stranger) {
    for segment in (0..200).chain([u64::from(u32::MAX), 1 << 32, u64::MAX]) {
        let _ = stranger.call(CallKind::MapSegment, &inode_body(segment));
    }
    for bytes in [0, 1, 4096, 2 << 20, 1 << 40, u64::MAX] {
        let request = GrowRequest { bytes: bytes.into() };
        let _ = stranger.call(CallKind::GrowLog, request.as_bytes());
    }
    for parcel in stranger.parcels() {
        let mut bytes = Vec::new();
        fs::File::from(parcel).read_to_end(&mut bytes).unwrap();
        shows_nothing("a descriptor that was sent", &bytes);
    }
    let mut log = vec![0; usize::try_from(stranger.log.bytes()).unwrap()];
    stranger.log.read(0, &mut log).unwrap();
    shows_nothing("a log", &log);
}

/// Records that name what is Alice's, each in a session of its own, since one is enough to end it.
fn forge(socket: &Path, hers: &[u64]) {
    let [folder, file, deep, common, _] = hers[..] else { panic!("five numbers") };
    let mut attributes = SetAttrBody::new_zeroed();
    attributes.mask.set(SET_MODE | SET_UID);
    (attributes.mode, attributes.uid) = (0o777.into(), BOB.parse::<u32>().unwrap().into());
    let name = Name::new(b"file").unwrap();
    let cookie = Cookie::of_name(name).get();
    let mut rename = RenameBody::new_zeroed();
    (rename.old_parent, rename.new_parent) = (InodeNumber::new(folder), InodeNumber::new(1));
    (rename.old_cookie, rename.new_cookie) = (cookie.into(), cookie.into());
    (rename.old_name_bytes, rename.new_name_bytes) = (4.into(), 4.into());
    let rename = [rename.as_bytes(), b"file", b"file"].concat();
    let records: [(Kind, u64, u64, u8, &[u8]); 10] = [
        (Kind::Write, file, 0, 0, b"forged"),
        (Kind::Write, common, 0, 0, b"forged"),
        (Kind::Truncate, deep, 0, 0, b""),
        (Kind::SetAttr, file, 0, 0, attributes.as_bytes()),
        (Kind::SetAttr, folder, 0, 0, attributes.as_bytes()),
        (Kind::SetAttr, common, 0, 0, attributes.as_bytes()),
        (Kind::Unlink, file, folder, 0, b"file"),
        (Kind::Link, file, 1, 0, b"file"),
        (Kind::Rename, file, 0, 0, &rename),
        (Kind::Rename, file, 0, RENAME_EXCHANGE, &rename),
    ];
    for (kind, inode, parent, flags, payload) in records {
        let mut stranger = Stranger::attach(socket);
        // With whatever it may have.
        let _ = stranger.call(CallKind::Walk, &walk_body(1, &[b"common", b"hers"]));
        let _ = stranger.call(CallKind::Walk, &walk_body(1, &[b"alice", b"file"]));
        for number in [1, inode, parent, folder, u64::MAX] {
            let _ = stranger.call(CallKind::Lease, &lease_body(number, LEASE_WRITE));
        }
        stranger.append(
            kind,
            inode,
            |header| {
                header.envelope.flags = flags;
                header.parent = InodeNumber::new(parent);
                header.extra.set(cookie);
            },
            payload,
        );
        let request = DigestRequest { up_to: stranger.last(), wait: 1.into(), reserved: 0.into() };
        let ended = stranger.call(CallKind::Digest, request.as_bytes());
        assert_eq!(ended, Err(Status::Sealed), "{kind:?} of {inode}");
    }
}

/// A log that says in its first block that it is Alice's, with a record that would be hers to write; left as it is.
fn forge_superblock(socket: &Path, hers: &[u64]) -> Stranger {
    let mut stranger = Stranger::attach(socket);
    let mut block = vec![0; usize::try_from(RING_START).unwrap()];
    stranger.log.read(0, &mut block).unwrap();
    let mut superblock = Superblock::decode(&block, format::superblock::FileKind::Log).unwrap();
    superblock.owner.set(ALICE.parse().unwrap());
    stranger.log.write(0, &superblock.encode());
    stranger.append(Kind::Write, hers[1], |_| {}, b"forged");
    std::io::stdout().flush().unwrap();
    stranger
}
