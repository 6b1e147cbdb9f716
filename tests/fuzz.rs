//! A slice of fuzzing: each target's body over its committed seeds and over random changes of them that are the
//! same at every run. `make prove-fuzz` does it with a fuzzer, for minutes.

#![forbid(unsafe_code)]

#[path = "../fuzz/src/lib.rs"]
mod bodies;

use std::path::Path;

/// Changed inputs for each target.
const INPUTS: usize = 100_000;

/// Longest input: a node and its block number.
const INPUT_BYTES_MAX: usize = 4200;

/// Numbers that are the same at every run (xorshift64*).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("the rest is below a usize")
    }
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let entries = folder.read_dir().expect("a target has seeds");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("seeds can be read").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a seed can be read")).collect()
}

/// Changes an input in one of the ways in which bytes go wrong.
fn change(input: &mut Vec<u8>, numbers: &mut Numbers, others: &[Vec<u8>]) {
    const EDGES: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff_ffff_ffff, u64::MAX];
    let at = numbers.below(input.len() + 1);
    match numbers.below(6) {
        0 => input.truncate(at),
        1 => input.resize((input.len() + numbers.below(300)).min(INPUT_BYTES_MAX), numbers.next() as u8),
        2 if at < input.len() => input[at] ^= 1 << numbers.below(8),
        3 if at < input.len() => input[at] = numbers.next() as u8,
        4 => {
            let edge = EDGES[numbers.below(EDGES.len())].to_le_bytes();
            input[at..].iter_mut().zip(&edge[..1 << numbers.below(4)]).for_each(|(byte, new)| *byte = *new);
        }
        _ => {
            let other = &others[numbers.below(others.len())];
            let from = at.min(other.len());
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
    }
}

#[test]
fn every_body_holds_on_seeds_and_their_changes() {
    for (target, body) in bodies::TARGETS {
        let seeds = seeds(target);
        assert!(!seeds.is_empty(), "{target} has no seed");
        seeds.iter().for_each(|seed| body(seed));
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
        for _ in 0..INPUTS {
            let mut input = seeds[numbers.below(seeds.len())].clone();
            for _ in 0..=numbers.below(4) {
                change(&mut input, &mut numbers, &seeds);
            }
            body(&input);
        }
    }
}

/// The manifest of the fuzzer and the list of bodies name the same targets.
#[test]
fn every_body_is_a_target() {
    let manifest =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/Cargo.toml")).unwrap();
    let named: Vec<&str> =
        manifest.lines().filter_map(|l| l.strip_prefix("name = \"")?.strip_suffix('"')).skip(1).collect();
    let bodies: Vec<&str> = bodies::TARGETS.iter().map(|(name, _)| *name).collect();
    assert_eq!(named, bodies);
}
