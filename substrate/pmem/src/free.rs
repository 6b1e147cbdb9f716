//! The free blocks of one file: a bit each, and a second set for the chunks of 64 that are free whole.
//!
//! Blocks are found lowest first, so that memory which was written before is written again, before memory that never was.
//!
//! Costs: to add or remove blocks takes time in proportion to a 64th of them, to find some takes constant time.

use crate::alloc::Fit;

/// Blocks of one chunk, one word of the set.
pub const CHUNK_BLOCKS: u32 = u64::BITS;

/// Where no chunk is free, so many runs are looked at for one that is long enough.
const RUNS_MAX: usize = 16;

/// A set of numbers below a bound. Each level has a bit for every word of the level below that is not zero.
struct BitSet(Vec<Vec<u64>>);

impl BitSet {
    fn new(numbers: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = (numbers as usize).div_ceil(64).max(1);
        loop {
            levels.push(vec![0; words]);
            if words == 1 {
                return Self(levels);
            }
            words = words.div_ceil(64);
        }
    }

    fn word(&self, index: u32) -> u64 {
        self.0[0].get(index as usize).copied().unwrap_or(0)
    }

    /// Sets a word; gives what stood there.
    fn set_word(&mut self, index: u32, word: u64) -> u64 {
        let before = std::mem::replace(&mut self.0[0][index as usize], word);
        let (mut at, mut is_set) = (index, word != 0);
        let mut changed = (before != 0) != is_set;
        for level in 1..self.0.len() {
            if !changed {
                break;
            }
            let above = &mut self.0[level][(at / 64) as usize];
            let was_set = *above != 0;
            *above ^= 1 << (at % 64);
            is_set = *above != 0;
            changed = was_set != is_set;
            at /= 64;
        }
        before
    }

    fn put(&mut self, number: u32, is_in: bool) {
        let (index, bit) = (number / 64, 1 << (number % 64));
        let word = self.word(index);
        self.set_word(index, if is_in { word | bit } else { word & !bit });
    }

    /// The lowest number in the set that is not below `from`.
    fn next(&self, from: u32) -> Option<u32> {
        let (mut level, mut at) = (0, from);
        // Upwards, until a word has a bit behind the place.
        loop {
            let words = self.0.get(level)?;
            let word = words.get((at / 64) as usize).copied().unwrap_or(0) & (u64::MAX << (at % 64));
            if word != 0 {
                at = at / 64 * 64 + word.trailing_zeros();
                break;
            }
            at = at / 64 + 1;
            level += 1;
        }
        while level > 0 {
            level -= 1;
            at = at * 64 + self.0[level][at as usize].trailing_zeros();
        }
        Some(at)
    }
}

/// Blocks that can be allocated.
pub(crate) struct FreeBlocks {
    free: BitSet,
    /// Chunks of which all blocks are free.
    chunks: BitSet,
    /// How many.
    pub blocks: u32,
}

impl FreeBlocks {
    /// None of so many is free.
    pub fn new(blocks: u32) -> Self {
        Self { free: BitSet::new(blocks), chunks: BitSet::new(blocks.div_ceil(CHUNK_BLOCKS)), blocks: 0 }
    }

    /// Adds blocks that are not free.
    pub fn insert(&mut self, start: u32, count: u32) {
        self.set(start, count, true);
        self.blocks += count;
    }

    /// Removes blocks, all of which are free.
    pub fn remove(&mut self, start: u32, count: u32) {
        self.set(start, count, false);
        self.blocks -= count;
    }

    fn set(&mut self, start: u32, count: u32, is_free: bool) {
        let end = start + count;
        let mut at = start;
        while at < end {
            let (chunk, first) = (at / CHUNK_BLOCKS, at % CHUNK_BLOCKS);
            let blocks = (CHUNK_BLOCKS - first).min(end - at);
            let mask = (u64::MAX >> (CHUNK_BLOCKS - blocks)) << first;
            let word = self.free.word(chunk);
            let new = if is_free { word | mask } else { word & !mask };
            assert!(word & mask == if is_free { 0 } else { mask }, "blocks at {at} are free twice, or not");
            self.free.set_word(chunk, new);
            if (word == u64::MAX) != (new == u64::MAX) {
                self.chunks.put(chunk, new == u64::MAX);
            }
            at += blocks;
        }
    }

    /// How many blocks are free from one on, `count_max` at most.
    fn run(&self, start: u32, count_max: u32) -> u32 {
        let mut count = 0;
        while count < count_max {
            let at = start + count;
            let left = CHUNK_BLOCKS - at % CHUNK_BLOCKS;
            let free = (self.free.word(at / CHUNK_BLOCKS) >> (at % CHUNK_BLOCKS)).trailing_ones().min(left);
            count += free;
            if free < left {
                break;
            }
        }
        count.min(count_max)
    }

    /// At most `count_max` free blocks from `block` on.
    pub fn at(&self, block: u32, count_max: u32) -> Option<(u32, u32)> {
        let count = self.run(block, count_max);
        (count > 0).then_some((block, count))
    }

    /// Whether there is a whole chunk.
    pub fn has_chunk(&self) -> bool {
        self.chunks.next(0).is_some()
    }

    /// At most `count_max` free blocks.
    pub fn find(&self, count_max: u32, fit: Fit) -> Option<(u32, u32)> {
        if fit == Fit::Lowest || count_max == 1 {
            return self.at(self.free.next(0)?, count_max);
        }
        if let Some(chunk) = self.chunks.next(0) {
            // With what is free right before it.
            let before = chunk.checked_sub(1).map_or(0, |before| self.free.word(before).leading_ones());
            return self.at(chunk * CHUNK_BLOCKS - before, count_max);
        }
        let (mut best, mut from) = (None::<(u32, u32)>, 0);
        for _ in 0..RUNS_MAX {
            let Some(start) = self.free.next(from) else { break };
            let count = self.run(start, count_max);
            if best.is_none_or(|(_, longest)| count > longest) {
                best = Some((start, count));
            }
            if count == count_max {
                break;
            }
            from = start + count;
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_set_finds_what_is_in_it(numbers in 1u32..300_000, puts in prop::collection::vec((any::<u32>(), any::<bool>()), 0..200)) {
            let (mut set, mut model) = (BitSet::new(numbers), BTreeSet::new());
            for (number, is_in) in puts {
                // Near each other, so that some are put twice.
                let number = number % numbers / 50 * 50 % numbers;
                set.put(number, is_in);
                if is_in { model.insert(number) } else { model.remove(&number) };
            }
            for from in model.iter().flat_map(|number| [number.saturating_sub(1), *number, number + 1]).chain([0, numbers]) {
                prop_assert_eq!(set.next(from), model.range(from..).next().copied());
            }
        }
    }

    #[test]
    fn long_runs_begin_in_whole_chunks_and_short_ones_at_the_lowest_block() {
        let mut free = FreeBlocks::new(1000);
        free.insert(3, 1);
        free.insert(60, 400);
        assert_eq!(free.find(1, Fit::Run), Some((3, 1)));
        assert_eq!(free.find(64, Fit::Lowest), Some((3, 1)));
        assert_eq!(free.find(300, Fit::Run), Some((60, 300)), "with what is free before the chunk");
        assert_eq!(free.find(1000, Fit::Run), Some((60, 400)));
        free.remove(60, 380);
        assert!(!free.has_chunk());
        assert_eq!(free.find(64, Fit::Run), Some((440, 20)), "the longest");
        assert_eq!(free.blocks, 21);
    }
}
