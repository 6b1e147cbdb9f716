//! Four programs at each door at the same hundred files, which they write, map and read, while what serves them is killed:
//! nothing that was written is lost, nobody reads what was there before a write that has returned, and each line that was
//! appended is there once, and whole. `HEARTH_STRESS` says how many kills.

use super::script_of;
use crate::harness;
use crate::processes::{Job, Node, count};
use ipc::{Host, SystemHost};
use std::process::Command;

/// How often the daemon, or the gateway, is killed; not at all unless it is asked for, as eight programs want a machine of their own.
fn times() -> u64 {
    count("HEARTH_STRESS", 0)
}

/// Programs at each door.
const WORKERS: usize = 4;
/// Lines that each of them appends between two kills, at least.
const LINES: usize = 5;

/// What is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Killed {
    Nothing,
    Daemon,
    Gateway,
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
        // What a program has mapped through a mount that is killed is lost with it. A daemon that is not there again in time, on a
        // busy machine, fails calls.
        let (library, mount): (&[&str], &[&str]) = match killed {
            Killed::Nothing => (&["maps"], &["maps"]),
            Killed::Daemon => (&["maps", "dies"], &["maps", "dies"]),
            Killed::Gateway => (&[], &["maps", "dies"]),
        };
        for number in 0..WORKERS {
            let words = stress.words("work", number, library);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            stress.jobs.push(stress.node.begin_program(&words));
        }
        for number in WORKERS..2 * WORKERS {
            let words = stress.words("work", number, mount);
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            stress.jobs.push(Job::of(command));
        }
        Some(stress)
    }

    fn words(&self, verb: &str, number: usize, flags: &[&str]) -> Vec<String> {
        let (script, number) = (script_of("stress.py"), number.to_string());
        let words = ["/usr/bin/python3", &script, verb, &self.node.path(""), &self.table, &number];
        words.iter().chain(flags).map(|word| (*word).to_owned()).collect()
    }

    /// Lines that a program has appended.
    fn appended(&self, number: usize) -> usize {
        let lines = std::fs::read_to_string(format!("{}/lines-{number}", self.table)).unwrap_or_default();
        lines.lines().filter(|line| line.starts_with('c')).count()
    }

    /// Waits until each program has gone on for a while.
    fn go_on(&mut self) {
        let before: Vec<usize> = (0..2 * WORKERS).map(|number| self.appended(number)).collect();
        let until = SystemHost.now().after(std::time::Duration::from_secs(120));
        for (number, before) in before.into_iter().enumerate() {
            while self.appended(number) < before + LINES {
                assert!(self.jobs[number].is_running(), "program {number} has ended");
                assert!(SystemHost.now() < until, "program {number} does not go on");
                let word = ipc::Word::new(0);
                SystemHost.wait(&word, 0, Some(SystemHost.now().after(std::time::Duration::from_millis(2))));
            }
        }
    }

    fn kill(&self, killed: Killed) {
        match killed {
            Killed::Nothing => {}
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
        let words = self.words("judge", 2 * WORKERS, &[]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let by_library = self.node.run(&words);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        let by_mount = Job::of(command).rest();
        assert!(by_library.starts_with("right"), "{by_library}");
        assert_eq!(by_mount, [by_library.trim()]);
        self.node.hearth(&["umount"]);
        let log = std::fs::read_to_string(format!("{}/node-1/gateway.log", self.node.dir())).unwrap();
        assert!(log.contains(" strays=0"), "pages were written back without a lease: {log}");
        self.node.check();
    }
}

fn stress(killed: Killed, kills: u64) {
    if kills == 0 {
        println!("no test: it takes minutes, and make prove-doors runs it");
        return;
    }
    let Some(mut stress) = Stress::new(killed) else { return };
    for _ in 0..kills {
        stress.go_on();
        stress.kill(killed);
    }
    stress.go_on();
    stress.end();
}

#[test]
fn programs_at_both_doors_share_their_files() {
    stress(Killed::Nothing, times());
}

#[test]
fn programs_at_both_doors_share_their_files_whatever_becomes_of_the_daemon() {
    stress(Killed::Daemon, times());
}

#[test]
fn programs_at_both_doors_share_their_files_whatever_becomes_of_the_gateway() {
    stress(Killed::Gateway, times());
}
