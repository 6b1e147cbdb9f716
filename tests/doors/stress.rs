//! Four programs at the mount and four at the library, at the same hundred files, which they write, map and read while
//! the serving processes are killed: no written byte is lost, no read returns data from before a write that has
//! returned, and each line that was appended is there once, and whole. Two more programs, one at each side, write rows into one
//! database of SQLite's in WAL mode: it stays intact, and has each row that was committed once.
//! `HEARTH_STRESS` says for how many seconds; the test does not run without it, as ten programs want a machine of their own.

use super::script_of;
use crate::harness;
use crate::processes::{Job, Node, count};
use ipc::{Host, SystemHost, Time, Word};
use std::process::Command;
use std::time::Duration;

/// Time between two kills, at least.
const PAUSE: Duration = Duration::from_secs(3);

/// Programs on each side.
const WORKERS: usize = 4;
/// Lines that each of them appends between two kills, at least.
const LINES: usize = 5;
/// The programs that write into the database, by the side where they are.
const DATABASES: [&str; 2] = ["library", "mount"];
/// Rows that each of them commits between two kills, at least.
const ROWS: usize = 5;

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Nothing,
    Daemon,
    Gateway,
    /// One after the other.
    Both,
}

struct Stress {
    node: Node,
    jobs: Vec<Job>,
    table: String,
}

impl Stress {
    fn new(killed: Killed) -> Option<Self> {
        if !harness::can_mount() {
            return None;
        }
        let node = Node::up();
        node.hearth(&["mount"]);
        let table = format!("{}/table", node.dir());
        std::fs::create_dir(&table).unwrap();
        for number in 0..100 {
            std::fs::write(node.path(&format!("file-{number:03}")), [0; 8192]).unwrap();
        }
        std::fs::write(node.path("log"), b"").unwrap();
        let mut stress = Self { node, jobs: Vec::new(), table };
        // The dirty pages of a file that is mapped through a mount that is killed are lost with it, and programs of the library
        // that have mapped one end. A daemon that dies fails no call. Half of the library's programs map no file, and use the
        // library alone.
        let dies: &[&str] = match killed {
            Killed::Nothing | Killed::Daemon => &[],
            Killed::Gateway | Killed::Both => &["dies"],
        };
        let maps = &[&["maps"], dies].concat();
        for number in 0..WORKERS {
            let words = stress.words("work", number, if number % 2 == 0 { maps } else { &[] });
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            stress.jobs.push(stress.node.begin_program(&words));
        }
        for number in WORKERS..2 * WORKERS {
            let words = stress.words("work", number, maps);
            stress.begin_at_mount(&words);
        }
        stress.begin_databases(dies);
        Some(stress)
    }

    fn begin_at_mount(&mut self, words: &[String]) {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        self.jobs.push(Job::of(command));
    }

    /// The index of a database in WAL mode is mapped, by either side through the mount.
    fn begin_databases(&mut self, dies: &[&str]) {
        let made = self.rows_words("make", &[]);
        self.node.run(&made.iter().map(String::as_str).collect::<Vec<_>>());
        for name in DATABASES {
            let words = self.rows_words("write", &[&[&*self.table, name], dies].concat());
            if name == "mount" {
                self.begin_at_mount(&words);
            } else {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                self.jobs.push(self.node.begin_program(&words));
            }
        }
    }

    fn rows_words(&self, verb: &str, rest: &[&str]) -> Vec<String> {
        let (script, database) = (script_of("rows.py"), self.node.path("wal.db"));
        let words = ["/usr/bin/python3", &script, verb, &database];
        words.iter().chain(rest).map(|word| (*word).to_owned()).collect()
    }

    fn words(&self, verb: &str, number: usize, flags: &[&str]) -> Vec<String> {
        let (script, number) = (script_of("stress.py"), number.to_string());
        let words = ["/usr/bin/python3", &script, verb, &self.node.path(""), &self.table, &number];
        words.iter().chain(flags).map(|word| (*word).to_owned()).collect()
    }

    /// Lines that a program has appended, or rows that it has committed.
    fn completed(&self, number: usize) -> usize {
        let name = match number.checked_sub(2 * WORKERS) {
            None => format!("lines-{number}"),
            Some(database) => format!("rows-{}", DATABASES[database]),
        };
        let lines = std::fs::read_to_string(format!("{}/{name}", self.table)).unwrap_or_default();
        lines.lines().filter(|line| line.starts_with('c')).count()
    }

    /// Waits for a while, and until each program has gone on.
    fn go_on(&mut self) {
        let before: Vec<usize> = (0..self.jobs.len()).map(|number| self.completed(number)).collect();
        let (pause, until) =
            (SystemHost.now().after(PAUSE), SystemHost.now().after(Duration::from_secs(120)));
        while SystemHost.now() < pause {
            wait_until(pause);
        }
        for (number, before) in before.into_iter().enumerate() {
            let least = before + if number < 2 * WORKERS { LINES } else { ROWS };
            while self.completed(number) < least {
                assert!(self.jobs[number].is_running(), "program {number} has ended");
                assert!(SystemHost.now() < until, "program {number} does not go on");
                wait_until(SystemHost.now().after(Duration::from_millis(2)));
            }
        }
    }

    fn kill(&self, killed: Killed, round: u64) {
        match killed {
            Killed::Nothing => {}
            Killed::Both => self.kill([Killed::Daemon, Killed::Gateway][round as usize % 2], round),
            Killed::Daemon => {
                self.node.wait_until_up();
                self.node.daemon().kill();
            }
            Killed::Gateway => {
                let gateway = self.node.gateway();
                gateway.kill();
                gateway.wait();
                self.node.hearth(&["mount"]);
            }
        }
    }

    fn end(mut self) {
        std::fs::write(format!("{}/stop", self.table), b"").unwrap();
        for job in &mut self.jobs {
            let said = job.rest();
            assert!(said.last().is_some_and(|line| line.starts_with("worked")), "{said:?}");
        }
        self.jobs.clear();
        self.node.wait_until_up();
        self.judge(&self.words("judge", 2 * WORKERS, &[]));
        self.judge(&self.rows_words("judge", &[&self.table, DATABASES[0], DATABASES[1]]));
        self.node.hearth(&["umount"]);
        let log = std::fs::read_to_string(format!("{}/node-1/gateway.log", self.node.dir())).unwrap();
        assert!(log.contains(" strays=0"), "pages were written back without a lease: {log}");
        self.node.check();
    }

    /// Both sides find what there has to be, and the same.
    fn judge(&self, words: &[String]) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let by_library = self.node.run(&words);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        let by_mount = Job::of(command).rest();
        assert!(by_library.starts_with("right"), "{by_library}");
        assert_eq!(by_mount, [by_library.trim()]);
    }
}

fn wait_until(time: Time) {
    SystemHost.wait(&Word::new(0), 0, Some(time));
}

fn stress(killed: Killed) {
    let seconds = count("HEARTH_STRESS", 0);
    if seconds == 0 {
        println!("no test: it takes minutes, and make prove-doors runs it");
        return;
    }
    let Some(mut stress) = Stress::new(killed) else { return };
    let until = SystemHost.now().after(Duration::from_secs(seconds));
    let mut rounds = 0;
    while SystemHost.now() < until {
        stress.go_on();
        stress.kill(killed, rounds);
        rounds += 1;
    }
    stress.go_on();
    stress.end();
    println!("{killed:?} killed {rounds} times in {seconds} s: all is right");
}

#[test]
fn programs_at_both_doors_share_their_files() {
    stress(Killed::Nothing);
}

#[test]
fn programs_at_both_doors_share_their_files_whatever_becomes_of_the_daemon() {
    stress(Killed::Daemon);
}

#[test]
fn programs_at_both_doors_share_their_files_whatever_becomes_of_the_gateway() {
    stress(Killed::Gateway);
}

#[test]
fn programs_at_both_doors_share_their_files_whatever_becomes_of_both() {
    stress(Killed::Both);
}
