//! SQLite and RocksDB: programs that commit until they are killed, and what of it is there when they go on elsewhere.

use crate::harness::{Expect, until};
use crate::processes::{Job, Killer, spin};
use crate::several::cluster::Chain;
use std::sync::atomic::{AtomicU64, Ordering};

/// Commits pairs of rows, one after the other, from the number that is next; each is said when it is committed.
const COMMITS: &str = "
import sqlite3, sys
base = sqlite3.connect(sys.argv[1], isolation_level=None)
# Without memory that processes share, which a tree that is not mounted has not.
base.execute('pragma locking_mode = exclusive')
base.execute('pragma journal_mode = ' + sys.argv[2])
# A deleted journal that comes back would roll the last commit back.
base.execute('pragma synchronous = ' + ('extra' if sys.argv[2] == 'delete' else 'full'))
for table in 'a', 'b': base.execute(f'create table if not exists {table}(id integer primary key, text)')
number = base.execute('select coalesce(max(id), 0) from a').fetchone()[0]
try:
    while True:
        number += 1
        base.execute('begin immediate')
        base.execute('insert into a values(?, hex(randomblob(20 + ? % 100)))', (number, number * 7))
        base.execute('insert into b select * from a where id = ?', (number,))
        base.execute('commit')
        print('committed', number, flush=True)
except Exception as why: print('failed', repr(why), flush=True)
";

/// Whether a database is whole, how many pairs there are, and whether each is one and the last one is as high as their number.
const ASK: &str = "pragma integrity_check; select count(*) from a; \
                   select (select count(*) from b) = count(*) and max(id) = count(*) from a; \
                   select count(*) from a join b using(id) where a.text != b.text;";

/// Keys and values, each synced, said after every ten.
const PUT: &str =
    "db_bench --sync=1 --num=100000000 --value_size=100 --compression_type=none --stats_interval=10";
const FIND: &str = "db_bench --use_existing_db=1 --value_size=100 --compression_type=none";

/// Acknowledgements of a database before a round goes on.
const SOME: u64 = 20;

/// A program with a database of its own.
#[derive(Clone, Copy, Debug)]
pub enum Database {
    /// In this journal mode.
    Sqlite(&'static str),
    Rocks,
}

impl Database {
    fn path(self, chain: &Chain, at: u32, root: &str) -> String {
        let name = match self {
            Self::Sqlite(mode) => mode,
            Self::Rocks => "rocks",
        };
        chain.path_at(at, &format!("{root}/{name}"))
    }

    /// Starts its program at a node; again after another one has ended.
    fn begin(self, chain: &Chain, at: u32, root: &str, again: bool) -> Job {
        let path = self.path(chain, at, root);
        match self {
            Self::Sqlite(mode) => {
                chain.begin_program_at(at, &["/usr/bin/python3", "-c", COMMITS, &path, mode])
            }
            Self::Rocks => {
                let how = if again { "overwrite --use_existing_db=1" } else { "fillseq" };
                let script = format!("exec {PUT} --db={path} --benchmarks={how} 2>&1");
                chain.begin_program_at(at, &["sh", "-c", &script])
            }
        }
    }

    /// How much a line acknowledges.
    fn acknowledged(self, line: &str) -> Option<u64> {
        match self {
            Self::Sqlite(_) => line.strip_prefix("committed ")?.parse().ok(),
            Self::Rocks => line.split_once(") ops and")?.0.rsplit_once(',')?.1.parse().ok(),
        }
    }

    /// Checks that acknowledged data is there, and that the database is whole. Returns how much there is.
    fn check(self, chain: &Chain, at: u32, root: &str, acknowledged: u64) -> u64 {
        let path = self.path(chain, at, root);
        let run = |program: &[&str]| {
            chain.try_hearth(&[&["run", "--node", &at.to_string(), "--"], program].concat()).expect_success()
        };
        match self {
            Self::Sqlite(_) => {
                // As its program does: else it would share memory.
                let told = run(&["sqlite3", "-cmd", "pragma locking_mode = exclusive", &path, ASK]);
                let lines: Vec<&str> = told.lines().filter(|line| *line != "exclusive").collect();
                let ["ok", rows, "1", "0"] = lines[..] else { panic!("{self:?} is not whole: {told}") };
                let rows = rows.parse().unwrap();
                assert!(rows >= acknowledged, "{self:?}: {acknowledged} were committed, {rows} are there");
                rows
            }
            Self::Rocks => {
                let find = format!("{FIND} --db={path} --benchmarks=readrandom --num={acknowledged} 2>&1");
                let told = run(&["sh", "-c", &find]);
                let wanted = format!("({acknowledged} of {acknowledged} found)");
                assert!(told.contains(&wanted), "{acknowledged} keys were put: {told}");
                acknowledged
            }
        }
    }
}

/// The last acknowledgement of a program, and the last line that was something else.
type JobOutput = (u64, String);

/// Runs a program for each database until a fault has hit their node, and each has ended: returns the output of each.
/// `first` says how much each has to have acknowledged before.
fn during(
    chain: &Chain,
    programs: &[(Database, u64)],
    at: u32,
    root: &str,
    delay: u64,
    act: impl FnOnce(&dyn Fn(u64)),
) -> Vec<JobOutput> {
    let again = programs.iter().any(|(_, first)| *first > 0);
    let live: Vec<AtomicU64> = programs.iter().map(|_| AtomicU64::new(0)).collect();
    let goes_on = |more: u64| {
        let before: Vec<u64> = live.iter().map(|live| live.load(Ordering::Relaxed)).collect();
        until("each database commits", || {
            live.iter().zip(&before).all(|(live, before)| live.load(Ordering::Relaxed) >= before + more)
        });
    };
    let mut jobs: Vec<Job> =
        programs.iter().map(|(database, _)| database.begin(chain, at, root, again)).collect();
    let killer = Killer::of(&jobs);
    std::thread::scope(|scope| {
        let killer = killer;
        let heard = jobs.iter_mut().zip(programs.iter().zip(&live));
        let threads: Vec<_> = heard
            .map(|(job, ((database, _), live))| scope.spawn(move || hear(job, *database, live)))
            .collect();
        goes_on(SOME);
        spin(delay);
        act(&goes_on);
        drop(killer);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Hears a program to its end.
fn hear(job: &mut Job, database: Database, live: &AtomicU64) -> JobOutput {
    let mut last = String::new();
    while let Some(line) = job.line() {
        match database.acknowledged(&line) {
            Some(number) => live.store(number, Ordering::Relaxed),
            None => {
                // Else the reason why it does not go on is lost.
                if line.starts_with("failed") {
                    println!("{database:?} {line}");
                }
                last = line;
            }
        }
    }
    (live.load(Ordering::Relaxed), last)
}

/// A round: databases at the node that leads are committing when it is killed, go on at the next one, and go on when all are
/// back. Gives how many commits were acknowledged, and the node that leads in the end.
pub fn round(chain: &Chain, leader: u32, root: &str, databases: &[Database], delay: u64) -> (u64, u32) {
    let script = format!("mkdir {0} && sync {0} {0}/..", chain.path_at(leader, root));
    chain.hearth(&["run", "--node", &leader.to_string(), "--", "sh", "-c", &script]);
    let fresh: Vec<(Database, u64)> = databases.iter().map(|database| (*database, 0)).collect();
    let said = during(chain, &fresh, leader, root, delay, |_| chain.cut(leader));
    let next = chain.until_leads_but(&[leader]);
    let there = |at: u32, said: &[JobOutput]| {
        databases
            .iter()
            .zip(said)
            .map(|(database, (number, _))| (*database, database.check(chain, at, root, *number)))
            .collect::<Vec<_>>()
    };
    let programs = there(next, &said);
    let mut at = next;
    let more = during(chain, &programs, next, root, 0, |goes_on| {
        at = chain.all_back();
        goes_on(1);
    });
    assert_eq!(at, next, "the node that took over leads");
    let failed = said.iter().chain(&more).find(|(_, last)| last.starts_with("failed"));
    assert_eq!(failed, None, "no program fails, and each goes on when a node returns");
    // The acknowledgements of SQLite count from the first row on; RocksDB overwrites keys, and those of earlier rounds
    // are there.
    let wanted = databases.iter().zip(said.iter().zip(&more)).map(|(database, (said, more))| {
        (if matches!(database, Database::Rocks) { said.0 } else { more.0 }, String::new())
    });
    there(at, &wanted.collect::<Vec<_>>());
    let found = chain.listing_at(at, root);
    let leader = chain.compare(&[(root, &found)]);
    (said.iter().chain(&more).map(|(number, _)| number).sum(), leader)
}
