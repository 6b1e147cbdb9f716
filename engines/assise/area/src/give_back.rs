//! Space of segments on a full medium: how many free blocks have some, and which of it goes back to the medium.

use crate::AreaError;
use crate::segment::Segment;
use crate::space::Space;
use format::BLOCK_BYTES;
use format::superblock::OWNER_DAEMON;

impl Space {
    /// Blocks that files with any key can take, and for which there is space in the medium.
    pub fn provided_shared(&self) -> u64 {
        let of = |segment: &Segment| u64::from(segment.allocatable() - segment.unprovided());
        let daemons = self.segments.values().filter(|segment| segment.file.owner == OWNER_DAEMON);
        daemons.map(of).sum()
    }

    /// Gives back to the medium the space of free blocks that only their users can take, up to so many bytes; returns how many.
    pub fn give_back(&mut self, bytes_max: u64) -> Result<u64, AreaError> {
        let mut given = 0;
        for segment in self.segments.values_mut().filter(|segment| segment.file.owner != OWNER_DAEMON) {
            let left = bytes_max.saturating_sub(given).div_ceil(BLOCK_BYTES as u64);
            given += segment.give_back(u32::try_from(left).unwrap_or(u32::MAX))?;
        }
        Ok(given)
    }

    /// Whether time passes before more could be given back.
    pub fn has_resting_blocks(&self) -> bool {
        let own = self.segments.values().filter(|segment| segment.file.owner != OWNER_DAEMON);
        own.into_iter().any(|segment| segment.allocator.has_resting_chunks())
    }

    /// Blocks that are free from here on keep their space until the next call.
    pub fn note_time(&mut self) {
        self.segments.values_mut().for_each(|segment| segment.allocator.note_time());
    }
}
