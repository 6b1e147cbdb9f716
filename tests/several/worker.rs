//! A worker that does operations from a seed and says what became of them, and the oracle: how much of it is there.

use crate::harness::until;
use crate::prefix::{HOMES, Listing, Operation, Plan, Worker, list, owner};
use crate::processes::{Job, say};
use crate::several::pour::{pour, poured};
use ipc::{Host, SystemHost, Time};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Does a job, and ends the process.
pub fn job(words: &[String]) -> ! {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["make", root] => make_homes(Path::new(root)),
        ["pour", path] => pour(Path::new(path)),
        ["poured", path] => poured(Path::new(path)),
        ["work", root, seed, who] => work(Path::new(root), seed.parse().unwrap(), who.parse().unwrap()),
        ["list", root] => {
            for (path, line) in list(Path::new(root)).unwrap() {
                say(&format!("{path}: {line}"));
            }
            say("listed");
        }
        _ => panic!("no such job: {words:?}"),
    }
    std::process::exit(0);
}

/// Makes the folders of a round, on all copies.
fn make_homes(root: &Path) {
    for home in HOMES {
        std::fs::create_dir_all(root.join(home)).unwrap();
    }
    for folder in [root.to_owned(), root.parent().unwrap().to_owned(), root.join(HOMES[0])] {
        File::open(folder).unwrap().sync_all().unwrap();
    }
    say("made");
}

/// Does operations and syncs until it is killed, or fails.
fn work(root: &Path, seed: u64, who: usize) {
    let mut plan = Plan::new(seed, who, true);
    let mut worker = Worker::default();
    let (own, others) = (root.join(HOMES[who]), root.join(Plan::count_file(HOMES[1 - who])));
    loop {
        let operation = plan.next();
        let number = plan.number();
        if let Err(why) = worker.play(root, &operation, &plan) {
            let what = if why.raw_os_error().is_some() { "failed" } else { "wrong" };
            return say(&format!("{what} {number} {operation:?}: {why}"));
        }
        say(&format!("did {number}"));
        if matches!(operation, Operation::Sync(_)) {
            say(&format!("synced {number}"));
        } else if number.is_multiple_of(8) {
            match File::open(&own).and_then(|folder| folder.sync_all()) {
                Ok(()) => say(&format!("synced {number}")),
                Err(why) => return say(&format!("failed {number} fsync: {why}")),
            }
        }
        let mut seen = [0; 8];
        if number.is_multiple_of(4)
            && File::open(&others).is_ok_and(|file| file.read_exact_at(&mut seen, 0).is_ok())
        {
            say(&format!("saw {number} {}", u64::from_le_bytes(seen)));
        }
    }
}

/// The output of a worker.
#[derive(Clone, Debug, Default)]
pub struct Said {
    /// Its last operation that returned.
    pub did: u64,
    /// All up to this one was synced.
    pub synced: u64,
    /// Behind which operation it saw which of the other worker's.
    saw: Vec<(u64, u64)>,
    /// Its last other output.
    pub last: String,
    /// [`Self::synced`] and [`Self::last`], for a thread that reads them meanwhile.
    live: Arc<(AtomicU64, OnceLock<String>)>,
    /// When its last line was heard.
    heard: Option<Time>,
    /// The longest time between two of its lines.
    pub stall: Duration,
}

/// How far the workers are that are being heard.
pub struct Live([Arc<(AtomicU64, OnceLock<String>)>; 2]);

impl Live {
    /// Of workers that are heard into these.
    pub fn of(said: &[Said; 2]) -> Self {
        Self(said.each_ref().map(|said| Arc::clone(&said.live)))
    }

    /// The operations that each of them had synced when it was heard last.
    pub fn synced(&self) -> [u64; 2] {
        self.0.each_ref().map(|worker| worker.0.load(Ordering::Relaxed))
    }

    /// Why a worker ended by itself, if one did.
    fn failure(&self) -> Option<&String> {
        self.0.iter().find_map(|worker| worker.1.get())
    }

    /// Whether each of them has synced more than this.
    pub fn are_beyond(&self, before: [u64; 2]) -> bool {
        self.synced().iter().zip(before).all(|(now, before)| *now > before)
    }

    /// Waits until each of them has synced something that it did from now on.
    pub fn until_they_go_on(&self) {
        self.until_they_go_on_or_fail();
        assert_eq!(self.failure(), None, "a worker ended by itself");
    }

    /// The same, or until one has ended by itself.
    pub fn until_they_go_on_or_fail(&self) {
        for _ in 0..2 {
            let before = self.synced();
            until("both workers sync more", || self.are_beyond(before) || self.failure().is_some());
        }
    }
}

impl Said {
    /// Takes in a line; the last one may be cut by a kill.
    fn take_in(&mut self, line: &str) {
        let now = SystemHost.now();
        self.stall = self.stall.max(self.heard.map_or(Duration::ZERO, |heard| now.since(heard)));
        self.heard = Some(now);
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
        match (words[0], number(1), number(2)) {
            ("did", Some(number), None) => self.did = number,
            ("synced", Some(number), None) => {
                self.synced = number;
                self.live.0.store(number, Ordering::Relaxed);
            }
            ("saw", Some(number), Some(seen)) => self.saw.push((number, seen)),
            _ => {
                assert!(!line.starts_with("wrong"), "{line}, after {}", self.did);
                line.clone_into(&mut self.last);
                self.live.1.get_or_init(|| line.to_owned());
            }
        }
    }

    /// Hears a job until it has done so much.
    pub fn hear(&mut self, job: &mut Job, at: u64) {
        while self.did < at
            && let Some(line) = job.line()
        {
            self.take_in(&line);
        }
    }

    /// Hears a job until it ends.
    pub fn hear_rest(&mut self, job: &mut Job) {
        while let Some(line) = job.line() {
            self.take_in(&line);
        }
    }

    /// The operations of the other worker that have to be there if these of this one are.
    fn needs(&self, there: u64) -> u64 {
        self.saw.iter().filter(|(number, _)| *number < there).map(|(_, seen)| *seen).max().unwrap_or(0)
    }
}

/// The oracle takes what it has to take, and refuses a lost synced operation, and one that was seen and is not there.
pub fn the_oracle_refuses_what_is_lost() {
    let there = [40, 30];
    let mut plans = [0, 1].map(|who| Plan::new(7, who, true));
    let mut found = Listing::new();
    for (plan, number) in plans.iter_mut().zip(there) {
        while plan.number() < number {
            plan.next();
        }
        found.extend(plan.tree.listing());
    }
    let said = there.map(|number| Said { did: number, synced: number, ..Said::default() });
    assert_eq!(judge(&found, 7, &said), there);
    let refuses = |said: [Said; 2]| {
        assert!(std::panic::catch_unwind(|| judge(&found, 7, &said)).is_err(), "{said:?}");
    };
    let mut lost = said.clone();
    // Far enough that the listing changes.
    (lost[0].did, lost[0].synced) = (60, 60);
    refuses(lost);
    let mut unseen = said.clone();
    unseen[0].saw.push((20, 60));
    refuses(unseen);
    let mut never_done = said;
    (never_done[1].did, never_done[1].synced) = (10, 10);
    refuses(never_done);
}

/// The part of a listing that belongs to one worker.
fn part(listing: &Listing, who: usize) -> Listing {
    let own = listing.iter().filter(|(path, _)| owner(path) == who);
    own.map(|(path, line)| (path.clone(), line.clone())).collect()
}

/// How two listings differ.
pub fn differences(found: &Listing, wanted: &Listing) -> String {
    let paths: std::collections::BTreeSet<_> = found.keys().chain(wanted.keys()).collect();
    let differ = paths.into_iter().filter(|path| found.get(*path) != wanted.get(*path));
    let line = |path| format!("\n    {path}: found {:?}, wanted {:?}", found.get(path), wanted.get(path));
    differ.map(line).collect()
}

/// After which numbers of operations a worker's part of the tree is what was found: of those, of which at least as many are
/// there as were synced.
fn fitting(found: &Listing, seed: u64, who: usize, said: &Said) -> Result<Vec<u64>, String> {
    let mut plan = Plan::new(seed, who, true);
    let found = part(found, who);
    let mut fitting = Vec::new();
    let mut nearest: Option<(usize, String)> = None;
    for number in 0..=said.did + 1 {
        if number > 0 {
            plan.next();
        }
        if number < said.synced {
            continue;
        }
        let wanted = plan.tree.listing();
        if found == wanted {
            fitting.push(number);
        } else {
            let differ = differences(&found, &wanted);
            if nearest.as_ref().is_none_or(|(lines, _)| differ.lines().count() < *lines) {
                nearest = Some((differ.lines().count(), format!("nearest is {number}:{differ}")));
            }
        }
    }
    if fitting.is_empty() { Err(nearest.map(|(_, differ)| differ).unwrap_or_default()) } else { Ok(fitting) }
}

/// The oracle: synced operations are there, the rest is a prefix of each worker, and the operations that one had seen
/// of the other are there too.
pub fn judge(found: &Listing, seed: u64, said: &[Said; 2]) -> [u64; 2] {
    let fits = [0, 1].map(|who| {
        fitting(found, seed, who, &said[who])
            .unwrap_or_else(|why| panic!("worker {who}: no prefix of what it did: {why}\n  {said:?}"))
    });
    let pairs = fits[0].iter().flat_map(|first| fits[1].iter().map(move |second| [*first, *second]));
    let mut closed =
        pairs.filter(|[first, second]| *second >= said[0].needs(*first) && *first >= said[1].needs(*second));
    closed
        .next_back()
        .unwrap_or_else(|| panic!("one saw of the other what is not there: {fits:?}\n  {said:?}"))
}
