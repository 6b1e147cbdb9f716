//! Sets of blocks of data segments, kept as bits: a batch adds and takes out blocks one by one, in any order.

use crate::segment::Run;
use format::{Block, SegmentId};
use std::collections::BTreeMap;

/// Words of bits that stand together.
const PAGE_WORDS: usize = 64;
/// Blocks of one page of bits.
const PAGE_BLOCKS: u32 = PAGE_WORDS as u32 * u64::BITS;

/// A set of blocks.
#[derive(Debug, Default)]
pub(crate) struct RunSet {
    /// Bits by segment and first block, over [`PAGE_BLOCKS`]. A page without bits may stand here.
    pages: BTreeMap<(SegmentId, u32), Box<[u64; PAGE_WORDS]>>,
}

/// The parts of a run that lie in one word of bits: its page, the word there, and the bits.
fn words(run: Run) -> impl Iterator<Item = (u32, usize, u64)> {
    let (mut at, end) = (run.block.get(), run.block.get() + run.blocks);
    std::iter::from_fn(move || {
        let first = at % u64::BITS;
        let count = (u64::BITS - first).min(end - at);
        if count == 0 {
            return None;
        }
        let bits = (u64::MAX >> (u64::BITS - count)) << first;
        let word = (at / PAGE_BLOCKS, (at % PAGE_BLOCKS / u64::BITS) as usize, bits);
        at += count;
        Some(word)
    })
}

impl RunSet {
    /// Adds blocks that are not in the set.
    pub fn add(&mut self, run: Run) {
        for (page, word, bits) in words(run) {
            let page = self.pages.entry((run.segment, page)).or_insert_with(|| Box::new([0; PAGE_WORDS]));
            assert!(page[word] & bits == 0, "the blocks are not in the set");
            page[word] |= bits;
        }
    }

    /// Whether none of these blocks is in the set.
    pub fn is_disjoint(&self, run: Run) -> bool {
        self.pages.is_empty()
            || words(run).all(|(page, word, bits)| {
                self.pages.get(&(run.segment, page)).is_none_or(|page| page[word] & bits == 0)
            })
    }

    /// Cuts a run into parts that are in the set (true) and parts that are not, in order.
    pub fn split(&self, run: Run) -> Vec<(Run, bool)> {
        let mut parts: Vec<(Run, bool)> = Vec::new();
        let mut at = run.block.get();
        for (page, word, mut bits) in words(run) {
            let set = self.pages.get(&(run.segment, page)).map_or(0, |page| page[word]);
            while bits != 0 {
                let first = bits.trailing_zeros();
                let within = set >> first & 1 != 0;
                let alike = if within { bits & set } else { bits & !set };
                let count = (alike >> first).trailing_ones();
                match parts.last_mut() {
                    Some((last, last_within)) if *last_within == within => last.blocks += count,
                    _ => parts.push((Run { block: Block::new(at), blocks: count, ..run }, within)),
                }
                at += count;
                bits &= u64::MAX.checked_shl(first + count).unwrap_or(0);
            }
        }
        parts
    }

    /// Takes blocks out of the set; those that are not in it are given back.
    pub fn remove(&mut self, run: Run) -> Vec<(Run, bool)> {
        let parts = self.split(run);
        for (page, word, bits) in words(run) {
            if let Some(page) = self.pages.get_mut(&(run.segment, page)) {
                page[word] &= !bits;
            }
        }
        parts
    }

    /// All of it, leaving nothing.
    pub fn take(&mut self) -> impl Iterator<Item = Run> + use<> {
        let pages = std::mem::take(&mut self.pages);
        pages.into_iter().flat_map(|((segment, page), words)| {
            let all = Run { segment, block: Block::new(page * PAGE_BLOCKS), blocks: PAGE_BLOCKS };
            let set = Self { pages: BTreeMap::from([((segment, page), words)]) };
            set.split(all).into_iter().filter(|(_, within)| *within).map(|(run, _)| run)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn agrees_with_a_set_of_single_blocks() {
        let run = |segment, block, blocks| Run {
            segment: SegmentId::new(segment),
            block: Block::new(block),
            blocks,
        };
        let mut runs = RunSet::default();
        let mut model = BTreeSet::new();
        let mut random = 1_u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (random >> 33) as u32;
            let block = [0, PAGE_BLOCKS - 25][number as usize / 7 % 2] + number / 2 % 50;
            let wanted = run(number % 2, block, 1 + number / 100 % 9 * [1, 17][number as usize / 3 % 2]);
            let parts = runs.split(wanted);
            assert_eq!(runs.is_disjoint(wanted), parts.iter().all(|(_, within)| !within));
            assert!(parts.windows(2).all(|two| two[0].1 != two[1].1), "parts are as long as they can be");
            assert_eq!(parts.iter().map(|(part, _)| part.blocks).sum::<u32>(), wanted.blocks);
            for (part, within) in parts {
                for block in part.block.get()..part.block.get() + part.blocks {
                    assert_eq!(model.contains(&(part.segment, block)), within);
                }
            }
            let removing = (number / 1000).is_multiple_of(2);
            for (part, within) in if removing { runs.remove(wanted) } else { runs.split(wanted) } {
                if !removing && !within {
                    runs.add(part);
                }
                for block in part.block.get()..part.block.get() + part.blocks {
                    if removing {
                        model.remove(&(part.segment, block))
                    } else {
                        model.insert((part.segment, block))
                    };
                }
            }
        }
        let mut left = BTreeSet::new();
        for run in runs.take() {
            left.extend((run.block.get()..run.block.get() + run.blocks).map(|block| (run.segment, block)));
        }
        assert!(left == model && runs.take().next().is_none());
    }
}
