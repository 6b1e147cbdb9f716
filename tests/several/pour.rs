//! A program that writes a file over and over without a pause and syncs each pass, and the check of what is there of it.

use crate::JOBS;
use crate::processes::{Job, say};
use crate::several::cluster::Chain;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

const CHUNK_BYTES: usize = 64 << 10;
/// 8 MiB: many times what a segment or a new log holds.
const CHUNKS: u64 = 128;

/// The job: writes until it is killed, or a call fails.
pub fn pour(path: &Path) {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    for pass in 1_u64.. {
        let chunk = pass.to_le_bytes().repeat(CHUNK_BYTES / 8);
        let written = (0..CHUNKS).try_for_each(|at| file.write_all_at(&chunk, at * CHUNK_BYTES as u64));
        match written.and_then(|()| file.sync_all()) {
            Ok(()) => say(&format!("poured {pass}")),
            Err(why) => return say(&format!("failed {pass}: {why}")),
        }
    }
}

/// The job that prints the last pass of which all data is there. The data is that of all calls up to some one.
pub fn poured(path: &Path) {
    let file = File::open(path).unwrap();
    let passes: Vec<u64> = (0..CHUNKS).map(|at| pass_of(&file, at)).collect();
    let (newest, oldest) = (passes[0], passes[passes.len() - 1]);
    assert!(passes.is_sorted_by(|one, next| one >= next) && newest - oldest < 2, "no prefix: {passes:?}");
    say(&format!("there {oldest}"));
}

/// The pass in which a chunk was written; 0 if it was in none.
fn pass_of(file: &File, at: u64) -> u64 {
    let mut chunk = vec![0; CHUNK_BYTES];
    match file.read_exact_at(&mut chunk, at * CHUNK_BYTES as u64) {
        Err(why) if why.kind() == ErrorKind::UnexpectedEof => return 0,
        read => read.unwrap(),
    }
    let (first, rest) = chunk.split_at(8);
    assert!(rest.chunks(8).all(|word| word == first), "chunk {at} is of several writes");
    u64::from_le_bytes(first.try_into().unwrap())
}

/// A program that pours. It is heard when it is ended.
pub struct Pouring {
    name: String,
    job: Job,
}

impl Pouring {
    /// Starts it at a node.
    pub fn begin(chain: &Chain, at: u32, name: &str) -> Self {
        let job = chain.begin_at(at, JOBS, &["pour", &chain.path_at(at, name)]);
        Self { name: name.to_owned(), job }
    }

    /// Kills it, unless it was killed; none of its calls failed. Gives the last pass that it had synced.
    pub fn end(mut self) -> Poured {
        self.job.kill();
        let mut synced = 0;
        for line in self.job.rest() {
            let pass = line.strip_prefix("poured ").and_then(|pass| pass.parse().ok());
            // The last line may be cut.
            synced = pass.unwrap_or_else(|| {
                assert!(!line.starts_with("failed"), "{line}");
                synced
            });
        }
        Poured { name: self.name, synced }
    }
}

/// The output of a program that was killed.
pub struct Poured {
    name: String,
    pub synced: u64,
}

impl Poured {
    /// All that it had synced is there, at the node that leads.
    pub fn check(&self, chain: &Chain, at: u32) {
        let lines = chain.begin_at(at, JOBS, &["poured", &chain.path_at(at, &self.name)]).rest();
        let there = lines.iter().find_map(|line| line.strip_prefix("there ")?.parse::<u64>().ok());
        let there = there.unwrap_or_else(|| panic!("{} cannot be read: {lines:?}", self.name));
        assert!(there >= self.synced, "{}: {} passes were synced, {there} are there", self.name, self.synced);
    }
}
