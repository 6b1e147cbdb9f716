//! The page of generations: one for the node, written here, mapped read-only by every LibFS, so that blocks can be
//! used again without waiting for readers; behind them the word that says whether the daemon lives.

use crate::error::Error;
use format::InodeNumber;
use format::session::{ALIVE_OFFSET, GENERATIONS_BYTES};
use ipc::Alive;
use ipc::host::Host;
use ipc::shared::{self, Access, Mapping, Words};
use ipc::sys::Descriptor;
use ipc::words::{GENERATIONS, Generation};
use std::sync::Arc;

const _: () = assert!(GENERATIONS * size_of::<Generation>() == ALIVE_OFFSET);

/// The page.
pub(crate) struct Generations {
    memory: Descriptor,
    mapping: Arc<Mapping>,
    words: Words<Generation>,
    alive: Alive,
}

impl Generations {
    /// New ones, and the word that says that this daemon lives.
    pub fn new(host: &dyn Host) -> Result<Self, Error> {
        let memory = shared::create(c"hearth-generations", GENERATIONS_BYTES)?;
        let mapping = Mapping::new(&memory, GENERATIONS_BYTES, Access::Write)?;
        let words = mapping.words(0, GENERATIONS)?;
        let alive = Alive::claim(host, &mapping, ALIVE_OFFSET)?;
        Ok(Self { memory, mapping, words, alive })
    }

    /// Marks that the daemon ends in order.
    pub fn end(&self) {
        self.alive.end();
    }

    /// The memory, to be handed to a LibFS of this process.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// A read-only descriptor, to be sent to a LibFS of another process.
    pub fn read_only(&self) -> Result<Descriptor, Error> {
        Ok(shared::read_only(&self.memory)?)
    }

    /// Invalidates copies of these files' blocks that readers have made and not yet checked; the blocks may be reused
    /// afterwards.
    pub fn raise(&self, inodes: &[InodeNumber]) {
        for inode in inodes {
            self.words[Generation::index_of(*inode)].raise();
        }
    }

    /// Lower half of a file's generation: a batch of extents is valid as long as it does not change.
    pub fn of(&self, inode: InodeNumber) -> u32 {
        let generation = self.words[Generation::index_of(inode)].before_copy();
        (generation & u64::from(u32::MAX)) as u32
    }
}
