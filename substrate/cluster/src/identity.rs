//! What a pool knows durably of its place in the cluster, in a file of the pool. Format: [`format::identity`].
//!
//! A copy is a pool, not a node. The manager counts a pool only if it knows the generation with which it last was a copy.
//! So the next generation is drawn and settled before each join, and stays the same until that join is known to have been
//! made: whatever became of the question, the pool knows the generation that the manager may have recorded, and an older
//! copy of the folder does not.
//!
//! Guarantees: after a crash at any point the identity is that before or after the call under way; what a call returned
//! is there. A file in which no slot is whole is an identity that never joined, which counts nowhere.

use crate::change::{Done, PoolReport};
use crate::view::PoolCopy;
use format::identity::IdentitySlot;
use format::{BLOCK_BYTES, ChainNumber, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use pmem::{MediaError, Medium, Region};

/// Name of the file.
const FILE: &str = "identity";

/// One block a slot.
const BYTES: u64 = 2 * BLOCK_BYTES as u64;

/// The identity of a pool. The caller holds the pool's lock.
pub struct PoolIdentity {
    region: Region,
    slot: IdentitySlot,
}

impl PoolIdentity {
    /// Opens the identity of this pool, or begins it.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn open(medium: &Medium, pool: PoolUid, node: NodeId) -> Result<Self, MediaError> {
        let region = match medium.open(FILE) {
            Ok(region) if region.bytes() == BYTES => region,
            _ if medium.list()?.iter().any(|name| name == FILE) => {
                medium.remove(FILE)?;
                medium.create(FILE, BYTES)?
            }
            _ => medium.create(FILE, BYTES)?,
        };
        let slots = (0..2).map(|index| {
            let mut bytes = [0; size_of::<IdentitySlot>()];
            region.read(index * BLOCK_BYTES as u64, &mut bytes)?;
            Ok(IdentitySlot::decode(&bytes).ok())
        });
        let slots = slots.collect::<Result<Vec<_>, MediaError>>()?;
        let found = slots.into_iter().flatten().max_by_key(|slot| slot.number.get());
        // The file of another pool, or of this one under another node, says nothing of this one.
        let found = found.filter(|slot| (slot.pool, slot.node) == (pool, node));
        let new = IdentitySlot { pool, node, chain: ChainNumber::ONLY, ..IdentitySlot::default() };
        Ok(Self { region, slot: found.unwrap_or(new) })
    }

    /// The generation to ask with, settled when this returns, and all that the pool says when its node joins. `random` is
    /// used if none is under way.
    ///
    /// # Errors
    /// Those of the medium; nothing may be asked then.
    pub fn ask(&mut self, random: u64) -> Result<PoolReport, MediaError> {
        if self.slot.asked == PoolGeneration::NONE {
            self.slot.asked = PoolGeneration::new(random.max(1));
            self.write()?;
        }
        Ok(PoolReport {
            cluster: (self.slot.cluster.get() != 0).then_some(self.slot.cluster.get()),
            copy: PoolCopy { uid: self.slot.pool, generation: self.slot.asked },
            former: self.slot.joined,
            newest: self.slot.newest,
        })
    }

    /// The node has joined this cluster as it asked.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn joined(&mut self, cluster: u64, done: Done) -> Result<(), MediaError> {
        self.slot.cluster = cluster.into();
        (self.slot.joined, self.slot.asked) = (self.slot.asked, PoolGeneration::NONE);
        (self.slot.life, self.slot.newest) = (done.epoch, self.slot.newest.max(done.number));
        self.write()
    }

    /// The node has seen a view with this change.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn saw(&mut self, number: ChangeNumber) -> Result<(), MediaError> {
        if number <= self.slot.newest {
            return Ok(());
        }
        self.slot.newest = number;
        self.write()
    }

    /// The newest change that it knows.
    pub fn newest(&self) -> ChangeNumber {
        self.slot.newest
    }

    /// The node of the pool.
    pub fn node(&self) -> NodeId {
        self.slot.node
    }

    /// The life in which its node joined last, if it has: what a join replaces.
    pub fn last_life(&self) -> Option<Epoch> {
        (self.slot.life != Epoch::default()).then_some(self.slot.life)
    }

    fn write(&mut self) -> Result<(), MediaError> {
        let number = self.slot.number.get() + 1;
        self.slot.number = number.into();
        let at = number % 2 * BLOCK_BYTES as u64;
        self.region.write(at, &self.slot.encode());
        self.region.settle()
    }
}
