//! A minimal owner of a ring or a map: two root slots of one line each. The slot with a valid checksum and the larger
//! commit number is the root.

use format::checksum::{self, Salt};
use pmem::Region;

pub const WORDS: usize = 6;

/// The contents of a root slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Root {
    pub commit: u64,
    pub words: [u64; WORDS],
}

pub struct RootPair {
    region: Region,
    /// Distance between the slots: a line, or a page where pages are the unit.
    slot_bytes: u64,
    /// A planted bug: accepts a torn slot.
    ignores_checksum: bool,
}

impl RootPair {
    pub fn new(region: Region, slot_bytes: u64, ignores_checksum: bool) -> Self {
        Self { region, slot_bytes, ignores_checksum }
    }

    /// Stores a root; the caller syncs the region.
    pub fn write(&self, root: &Root) {
        let mut bytes = [0; 64];
        bytes[8..16].copy_from_slice(&root.commit.to_le_bytes());
        for (index, word) in root.words.iter().enumerate() {
            bytes[16 + 8 * index..24 + 8 * index].copy_from_slice(&word.to_le_bytes());
        }
        let sum = u64::from(checksum::of(Salt::NONE, &bytes[8..]));
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        self.region.write(root.commit % 2 * self.slot_bytes, &bytes);
    }

    /// The valid root with the larger commit number.
    pub fn read(&self) -> Result<Option<Root>, String> {
        let mut newest: Option<Root> = None;
        for slot in 0..2 {
            let mut bytes = [0; 64];
            self.region.read(slot * self.slot_bytes, &mut bytes).map_err(|error| error.to_string())?;
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            let valid = word(0) == u64::from(checksum::of(Salt::NONE, &bytes[8..])) || self.ignores_checksum;
            let root = Root { commit: word(8), words: std::array::from_fn(|index| word(16 + 8 * index)) };
            if valid && root.commit > newest.map_or(0, |newest| newest.commit) {
                newest = Some(root);
            }
        }
        Ok(newest)
    }
}
