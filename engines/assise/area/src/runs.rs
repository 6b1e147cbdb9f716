//! Sets of blocks of data segments, kept as runs.

use crate::space::Run;
use format::{Block, SegmentId};
use std::collections::BTreeMap;

/// A set of blocks. Runs in it never overlap.
#[derive(Debug, Default)]
pub(crate) struct RunSet(BTreeMap<(SegmentId, Block), u32>);

impl RunSet {
    /// Adds blocks that are not in the set.
    pub fn add(&mut self, run: Run) {
        let before = self.0.range_mut(..(run.segment, run.block)).next_back();
        if let Some(((segment, block), blocks)) = before
            && *segment == run.segment
        {
            assert!(block.get() + *blocks <= run.block.get(), "the blocks are not in the set");
            if block.get() + *blocks == run.block.get() {
                *blocks += run.blocks;
                return;
            }
        }
        self.0.insert((run.segment, run.block), run.blocks);
    }

    /// Cuts a run into parts that are in the set (true) and parts that are not, in order.
    pub fn split(&self, run: Run) -> Vec<(Run, bool)> {
        let mut parts = Vec::new();
        let (mut at, end) = (run.block.get(), run.block.get() + run.blocks);
        let mut push = |from: u32, to: u32, within| {
            if from < to {
                parts.push((Run { block: Block::new(from), blocks: to - from, ..run }, within));
            }
        };
        let first = self.0.range(..=(run.segment, run.block)).next_back().map(|(key, _)| *key);
        let first = first.unwrap_or((run.segment, run.block));
        for ((segment, block), blocks) in self.0.range(first..(run.segment, Block::new(end))) {
            let (from, to) = (block.get().max(at), (block.get() + blocks).min(end));
            if *segment == run.segment && from < to {
                push(at, from, false);
                push(from, to, true);
                at = to;
            }
        }
        push(at, end, false);
        parts
    }

    /// Takes blocks out of the set; those that are not in it are given back.
    pub fn remove(&mut self, run: Run) -> Vec<(Run, bool)> {
        let parts = self.split(run);
        for (part, _) in parts.iter().filter(|(_, within)| *within) {
            self.remove_part(*part);
        }
        parts
    }

    fn remove_part(&mut self, part: Run) {
        let holder = self.0.range(..=(part.segment, part.block)).next_back();
        let ((segment, block), blocks) = holder.map(|(key, blocks)| (*key, *blocks)).expect("it is in a run");
        self.0.remove(&(segment, block));
        let (end, part_end) = (block.get() + blocks, part.block.get() + part.blocks);
        if block < part.block {
            self.0.insert((segment, block), part.block.get() - block.get());
        }
        if part_end < end {
            self.0.insert((segment, Block::new(part_end)), end - part_end);
        }
    }

    /// All of it, leaving nothing.
    pub fn take(&mut self) -> impl Iterator<Item = Run> + use<> {
        let runs = std::mem::take(&mut self.0);
        runs.into_iter().map(|((segment, block), blocks)| Run { segment, block, blocks })
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
            let wanted = run(number % 2, number / 2 % 50, 1 + number / 100 % 9);
            let parts = runs.split(wanted);
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
    }
}
