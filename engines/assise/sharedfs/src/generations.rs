//! The page of generations: one for the node, written here, mapped read-only by every LibFS, so that blocks can be
//! used again without waiting for readers (schedule 1.19).

use crate::error::Error;
use format::InodeNumber;
use ipc::shared::{self, Access, Mapping, Words};
use ipc::sys::Descriptor;
use ipc::words::{GENERATIONS, Generation};
use std::sync::Arc;

/// The page.
pub(crate) struct Generations {
    memory: Descriptor,
    mapping: Arc<Mapping>,
    words: Words<Generation>,
}

impl Generations {
    pub fn new() -> Result<Self, Error> {
        let bytes = GENERATIONS * size_of::<Generation>();
        let memory = shared::create(c"hearth-generations", bytes)?;
        let mapping = Mapping::new(&memory, bytes, Access::Write)?;
        let words = mapping.words(0, GENERATIONS)?;
        Ok(Self { memory, mapping, words })
    }

    /// The memory, to be handed to a LibFS of this process.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// A descriptor that can only be read, to be handed to a LibFS of another process.
    pub fn read_only(&self) -> Result<Descriptor, Error> {
        Ok(shared::read_only(&self.memory)?)
    }

    /// Ends what readers of these files have copied and not yet checked; their blocks may be used again afterwards.
    pub fn raise(&self, inodes: &[InodeNumber]) {
        for inode in inodes {
            self.words[Generation::index_of(*inode)].raise();
        }
    }

    /// Lower half of a file's generation: what a batch of extents is good for.
    pub fn of(&self, inode: InodeNumber) -> u32 {
        let generation = self.words[Generation::index_of(inode)].before_copy();
        (generation & u64::from(u32::MAX)) as u32
    }
}
