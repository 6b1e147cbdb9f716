//! The data blocks of the records that a copy has received and not executed: the copy holds space for them, because it has to execute
//! them on a full medium, too.

use format::Sequence;
use std::collections::VecDeque;

/// Those of one log, by the record behind which they are needed.
#[derive(Debug, Default)]
pub(crate) struct Unexecuted {
    records: VecDeque<(Sequence, u64)>,
    blocks: u64,
}

/// Records that need few blocks are counted together, up to so many blocks.
const TOGETHER: u64 = 64;

impl Unexecuted {
    /// How many there are.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// A record arrived that needs so many.
    pub fn add(&mut self, record: Sequence, blocks: u64) {
        self.blocks = self.blocks.saturating_add(blocks);
        match self.records.back_mut() {
            Some((last, sum)) if *sum + blocks <= TOGETHER => (*last, *sum) = (record, *sum + blocks),
            _ => self.records.push_back((record, blocks)),
        }
    }

    /// The records up to this one are executed.
    pub fn executed(&mut self, up_to: Sequence) {
        while let Some((_, blocks)) = self.records.pop_front_if(|(record, _)| *record <= up_to) {
            self.blocks = self.blocks.saturating_sub(blocks);
        }
    }

    /// The records behind this one are dropped, and arrive again. Some of them may count until those before are executed.
    pub fn drop_behind(&mut self, end: Sequence) {
        while let Some((_, blocks)) = self.records.pop_back_if(|(record, _)| *record > end) {
            self.blocks = self.blocks.saturating_sub(blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_count_from_the_arrival_of_a_record_to_its_execution() {
        let mut unexecuted = Unexecuted::default();
        for (record, blocks) in [(1, 1), (2, 60), (3, 0), (4, 10), (5, 1000), (6, 1)] {
            unexecuted.add(Sequence::new(record), blocks);
        }
        assert_eq!(unexecuted.blocks(), 1072);
        unexecuted.executed(Sequence::new(2));
        assert_eq!(unexecuted.blocks(), 1072, "the third is counted with them");
        unexecuted.executed(Sequence::new(3));
        assert_eq!(unexecuted.blocks(), 1011);
        unexecuted.drop_behind(Sequence::new(5));
        assert_eq!(unexecuted.blocks(), 1010);
        unexecuted.executed(Sequence::new(9));
        assert_eq!(unexecuted.blocks(), 0);
    }
}
