//! A cluster whose nodes are killed and come back, as the tests of copies see it.

use crate::JOBS;
use crate::harness::until;
use crate::prefix::{Listing, Random};
use crate::processes::{Job, Killer, Node, spin};
use crate::several::worker::{Live, Said, differences};
use std::ops::Deref;

/// Nanoseconds between two things that a test does, at most.
const DELAY_MAX: u64 = 2_000_000;
/// Operations before a kill, at most.
const OPERATIONS_MAX: u64 = 300;

/// A cluster of several nodes.
pub struct Chain {
    node: Node,
    count: u32,
}

impl Deref for Chain {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Chain {
    /// Of so many nodes, with this lease in ms.
    pub fn up(count: u32, lease: u64) -> Self {
        Self::patient(count, lease, if lease < 1000 { 250 } else { lease * 5 / 8 })
    }

    /// The same, where a copy may be silent for so many ms.
    pub fn patient(count: u32, lease: u64, patience: u64) -> Self {
        Self { node: Node::several_with(count, lease, patience), count }
    }

    /// The same, with pools on a medium of a kind.
    pub fn on(medium: &str, count: u32, lease: u64, patience: u64) -> Self {
        Self { node: Node::several_on(medium, count, lease, patience), count }
    }

    /// Takes all down, changes a setting of the cluster, and takes all up again.
    pub fn set(&self, key: &str, value: u64) {
        self.node.hearth(&["down"]);
        let file = format!("{}/hearth.toml", self.node.dir());
        let text = std::fs::read_to_string(&file).unwrap();
        let change = |line: &str| match line.split_once(" = ") {
            Some((name, _)) if name == key => format!("{key} = {value}\n"),
            _ => format!("{line}\n"),
        };
        let changed: String = text.lines().map(change).collect();
        assert_ne!(changed, text, "{key} is a setting");
        std::fs::write(file, changed).unwrap();
        self.node.hearth(&["up"]);
    }

    /// Two nodes with this lease, and room for what RocksDB allocates ahead.
    pub fn for_databases(lease: u64) -> Self {
        Self { node: Node::several_of(2, lease, lease * 5 / 8, 512), count: 2 }
    }

    fn part(&self, number: u32) -> serde_json::Value {
        self.node.statuses()[number as usize - 1]["chain"].clone()
    }

    /// How often a member in sync left, or came back, as the manager says.
    pub fn changes_in_sync(&self) -> usize {
        let log = std::fs::read_to_string(format!("{}/manager.log", self.node.dir())).unwrap();
        log.lines().filter(|line| line.contains("in sync of") || line.contains("was expelled")).count()
    }

    /// The role of a node.
    pub fn role(&self, number: u32) -> String {
        self.part(number)["role"].as_str().unwrap_or_default().to_owned()
    }

    /// The event for which a node waits.
    pub fn waits(&self, number: u32) -> String {
        self.part(number)["waits"].as_str().unwrap_or_default().to_owned()
    }

    /// Which nodes are in sync, as one says.
    pub fn in_sync(&self, number: u32) -> Vec<u64> {
        let part = self.part(number);
        part["in_sync"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_u64).collect()
    }

    /// Whether the node that leads says that a copy lacks something, or is none.
    pub fn lacks(&self, leader: u32, copy: u32) -> bool {
        let part = self.part(leader);
        let copies = part["copies"].as_array().into_iter().flatten();
        let lacks = |told: &serde_json::Value| {
            told["behind_bytes"].as_u64() != Some(0)
                || !told["stalled_ms"].is_null()
                || told["in_sync"] == false
        };
        copies.filter(|told| told["node"] == copy).any(lacks)
    }

    /// Why the daemon of a node does nothing, why the one before it ended, or why it stopped following.
    pub fn failure(&self, number: u32) -> String {
        let status = &self.node.statuses()[number as usize - 1];
        let said =
            [&status["failure"], &status["chain"]["follow_end"]].map(|why| why.as_str().unwrap_or_default());
        said.join(" ").trim().to_lowercase()
    }

    /// The node that leads, if one does.
    pub fn leader(&self) -> Option<u32> {
        let statuses = self.node.statuses();
        let leads = statuses.iter().position(|status| status["chain"]["role"] == "leads");
        leads.map(|index| index as u32 + 1)
    }

    /// Waits until a node leads; none of these.
    pub fn until_leads_but(&self, gone: &[u32]) -> u32 {
        let mut found = None;
        until(&format!("a node leads that is none of {gone:?}"), || {
            found = self.leader().filter(|leader| !gone.contains(leader));
            found.is_some()
        });
        found.unwrap()
    }

    /// Waits until all are in sync; the node that leads.
    pub fn until_whole(&self) -> u32 {
        let mut found = 0;
        until("all nodes are in sync", || {
            let Some(leader) = self.leader() else { return false };
            found = leader;
            self.part(leader)["in_sync"].as_array().is_some_and(|nodes| nodes.len() == self.count as usize)
        });
        found
    }

    /// All copies are equal, whatever programs do meanwhile; the node that leads.
    pub fn until_equal(&self) -> u32 {
        let leader = self.until_whole();
        for number in (1..=self.count).filter(|number| *number != leader) {
            until(&format!("node {number} is compared with node {leader}"), || {
                let done = self.node.try_hearth(&["check", "--against", &number.to_string()]);
                let said = String::from_utf8_lossy(&done.stdout);
                assert_ne!(
                    done.status.code(),
                    Some(1),
                    "the copies of nodes {leader} and {number} differ: {said}"
                );
                done.status.success()
            });
        }
        leader
    }

    /// `kill -9` of all of a node.
    pub fn cut(&self, number: u32) {
        self.node.hearth(&["down", "--node", &number.to_string(), "--hard"]);
    }

    /// Ends a node in order.
    pub fn end(&self, number: u32) {
        self.node.hearth(&["down", "--node", &number.to_string()]);
    }

    /// Starts a node, without waiting for what it becomes.
    pub fn start(&self, number: u32) {
        self.node.try_hearth(&["start", "--node", &number.to_string()]);
    }

    /// Starts all that do not run, and waits until all are in sync, and equal; the node that leads.
    pub fn all_back(&self) -> u32 {
        (1..=self.count).for_each(|number| self.start(number));
        self.until_equal()
    }

    /// The process of a node's daemon, if it answers.
    pub fn daemon_of(&self, number: u32) -> Option<i32> {
        let pid = self.node.statuses()[number as usize - 1]["pid"].as_i64();
        pid.map(|pid| i32::try_from(pid).unwrap())
    }

    /// A path in the tree, as a node has it.
    pub fn path_at(&self, number: u32, name: &str) -> String {
        format!("{}/n{number}/{name}", self.node.dir())
    }

    /// Removes a folder with all that is in it.
    pub fn remove_at(&self, number: u32, root: &str) {
        let number = number.to_string();
        let path = format!("{}/n{number}/{root}", self.node.dir());
        self.node.hearth(&["run", "--node", &number, "--", "rm", "-r", &path]);
    }

    /// All that is below a folder, as a node that leads has it.
    pub fn listing_at(&self, number: u32, root: &str) -> Listing {
        let mut job = self.node.begin_at(number, JOBS, &["list", &self.path_at(number, root)]);
        let mut lines = job.rest();
        assert_eq!(lines.pop().as_deref(), Some("listed"), "the listing ends well: {lines:?}");
        let pairs = lines.iter().map(|line| line.split_once(": ").unwrap());
        pairs.map(|(path, line)| (path.into(), line.into())).collect()
    }

    /// Two workers at a node, in a folder of their own that is on all copies.
    pub fn begin_workers(&self, number: u32, root: &str, seed: u64) -> [Job; 2] {
        let path = self.path_at(number, root);
        assert_eq!(self.begin_at(number, JOBS, &["make", &path]).line().as_deref(), Some("made"));
        let seed = seed.to_string();
        [0, 1].map(|who: u32| self.begin_at(number, JOBS, &["work", &path, &seed, &who.to_string()]))
    }

    /// Lets both sync something; then something is done, in the middle of what they do; then they are killed, and heard to
    /// their end.
    pub fn during(
        &self,
        mut jobs: [Job; 2],
        random: &mut Random,
        act: impl FnOnce(&Self, &Live),
    ) -> [Said; 2] {
        let (at, delay) = (1 + random.below(OPERATIONS_MAX), random.below(DELAY_MAX));
        let killer = Killer::of(&jobs);
        let [first, second] = &mut jobs;
        let mut said = [Said::default(), Said::default()];
        let live = Live::of(&said);
        let [said_first, said_second] = &mut said;
        std::thread::scope(|scope| {
            let killer = killer;
            scope.spawn(move || said_second.hear_rest(second));
            said_first.hear(first, at);
            let heard = scope.spawn(move || said_first.hear_rest(first));
            until("both workers synced something", || live.are_beyond([0, 0]));
            spin(delay);
            act(self, &live);
            drop(killer);
            heard.join().unwrap();
        });
        said
    }

    /// The trees of all nodes are equal: one after the other leads, and is asked, and ends in order, until the last one is
    /// left; then all come back. Gives the node that leads in the end.
    pub fn compare(&self, found: &[(&str, &Listing)]) -> u32 {
        let mut ended = Vec::new();
        self.until_whole();
        loop {
            let leader = self.until_leads_but(&ended);
            for (root, found) in found {
                let there = self.listing_at(leader, root);
                assert_eq!(differences(&there, found), "", "node {leader} has another tree in {root}");
            }
            if ended.len() + 1 == self.count as usize {
                break;
            }
            self.end(leader);
            ended.push(leader);
        }
        ended.iter().for_each(|number| self.start(*number));
        self.until_equal()
    }

    /// All end in order, and each pool is as it should be.
    pub fn close(&self) {
        self.node.hearth(&["down"]);
        (1..=self.count).for_each(|number| self.node.check_of(number));
    }
}
