//! The durable identity of a pool in the cluster, in a file of the pool. Format: [`format::identity`].
//!
//! A copy is a pool, not a node. The manager accepts a pool as a copy only if the pool knows the generation with which
//! it last was a copy. So the next generation is chosen and synced before each join, and stays the same until the pool
//! knows that this join was made. Whatever happens to the request, the pool knows the generation that the manager may
//! have recorded, and an older copy of the folder does not.
//!
//! Guarantees: after a crash at any point, the file has the identity before or after the call in progress, and the
//! effect of a call that returned is durable. A file without a valid slot is an identity that has never joined. The
//! identity of a pool that belongs to another node is never changed: the manager knows the pool by it.

use crate::change::{Done, PoolReport};
use crate::error::Error;
use crate::view::PoolCopy;
use format::identity::IdentitySlot;
use format::{BLOCK_BYTES, ChainNumber, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use pmem::{MediaError, Medium, Region};

/// Name of the file.
const FILE: &str = "identity";

/// One block for each slot.
const BYTES: u64 = 2 * BLOCK_BYTES as u64;

/// The identity of a pool. The caller holds the pool's lock.
pub struct PoolIdentity {
    region: Region,
    slot: IdentitySlot,
}

impl PoolIdentity {
    /// Opens the identity of this pool, or creates it.
    ///
    /// # Errors
    /// `OtherNode`: the pool belongs to another node; `Pool`: an error of the medium.
    pub fn open(medium: &Medium, pool: PoolUid, node: NodeId) -> Result<Self, Error> {
        let region = Self::open_file(medium).map_err(Error::Pool)?;
        let found = newest_slot(&region).map_err(Error::Pool)?;
        // If the file belongs to another pool, its contents are ignored.
        let found = found.filter(|slot| slot.pool == pool);
        if let Some(slot) = found.filter(|slot| slot.node != node) {
            return Err(Error::OtherNode(slot.node));
        }
        let new = IdentitySlot { pool, node, chain: ChainNumber::ONLY, ..IdentitySlot::default() };
        Ok(Self { region, slot: found.unwrap_or(new) })
    }

    fn open_file(medium: &Medium) -> Result<Region, MediaError> {
        match medium.open(FILE) {
            Ok(region) if region.bytes() == BYTES => Ok(region),
            _ if medium.list()?.iter().any(|name| name == FILE) => {
                medium.remove(FILE)?;
                medium.create(FILE, BYTES)
            }
            _ => medium.create(FILE, BYTES),
        }
    }

    /// The pool and the node of the identity on a medium, if there is one. Changes nothing, so the caller needs no lock.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn owner(medium: &Medium) -> Result<Option<(PoolUid, NodeId)>, MediaError> {
        if !medium.list()?.iter().any(|name| name == FILE) {
            return Ok(None);
        }
        let region = medium.open(FILE)?;
        if region.bytes() != BYTES {
            return Ok(None);
        }
        Ok(newest_slot(&region)?.map(|slot| (slot.pool, slot.node)))
    }

    /// The state of the pool for a join, with a generation that is synced when this returns. If no join is in progress,
    /// the generation is `random`.
    ///
    /// # Errors
    /// Those of the medium; then no join may be requested.
    pub fn ask(&mut self, random: u64) -> Result<PoolReport, MediaError> {
        if self.slot.asked == PoolGeneration::NONE {
            self.slot.asked = PoolGeneration::new(random.max(1));
            self.write()?;
        }
        Ok(self.report())
    }

    /// The state of the pool with the generation that it has already, the requested one if a join is in progress. A
    /// manager that is sent this knows the pool afterwards as it knew it before.
    pub fn report(&self) -> PoolReport {
        let is_asking = self.slot.asked != PoolGeneration::NONE;
        let generation = if is_asking { self.slot.asked } else { self.slot.joined };
        PoolReport {
            cluster: self.cluster(),
            copy: PoolCopy { uid: self.slot.pool, generation },
            former: self.slot.joined,
            newest: self.slot.newest,
        }
    }

    /// The cluster in which it is, if it has joined one.
    pub fn cluster(&self) -> Option<u64> {
        (self.slot.cluster.get() != 0).then_some(self.slot.cluster.get())
    }

    /// Notes that the node has joined this cluster with the requested generation.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn joined(&mut self, cluster: u64, done: Done) -> Result<(), MediaError> {
        self.slot.cluster = cluster.into();
        (self.slot.joined, self.slot.asked) = (self.slot.asked, PoolGeneration::NONE);
        (self.slot.life, self.slot.newest) = (done.epoch, self.slot.newest.max(done.number));
        self.write()
    }

    /// Notes that the node has seen a view with this change.
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

    /// The life in which its node joined last, if it has joined: the next join replaces it.
    pub fn last_life(&self) -> Option<Epoch> {
        (self.slot.life != Epoch::default()).then_some(self.slot.life)
    }

    fn write(&mut self) -> Result<(), MediaError> {
        let number = self.slot.number.get() + 1;
        self.slot.number = number.into();
        let at = number % 2 * BLOCK_BYTES as u64;
        self.region.write(at, &self.slot.encode());
        self.region.sync()
    }
}

/// The valid slot with the larger number.
fn newest_slot(region: &Region) -> Result<Option<IdentitySlot>, MediaError> {
    let slots = (0..2).map(|index| {
        let mut bytes = [0; size_of::<IdentitySlot>()];
        region.read(index * BLOCK_BYTES as u64, &mut bytes)?;
        Ok(IdentitySlot::decode(&bytes).ok())
    });
    let slots = slots.collect::<Result<Vec<_>, MediaError>>()?;
    Ok(slots.into_iter().flatten().max_by_key(|slot| slot.number.get()))
}
