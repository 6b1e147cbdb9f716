//! Leases for a cache that is kept outside of an engine: pages, attributes and names that the kernel has of a mount. The
//! engine's own caches are good for as long as a lease is held, and are dropped when it is taken away. A cache outside has
//! to be told first, and takes its time: so the one who keeps it holds the leases by name, is asked for those that others
//! want, and gives each back when its cache has nothing of it any more.

use crate::engine::Result;
use format::InodeNumber;

/// Right that a lease gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LeaseMode {
    /// The inode does not change.
    Read,
    /// No other holder reads or changes it.
    Write,
}

/// The request to the holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recalled {
    /// Others want these. No more are asked for than were held, and each is asked for again only after it was given back and
    /// held anew; it may be one that the cache does not hold, but the engine.
    Units(Vec<InodeNumber>),
    /// All that was held is lost, without having been given back. The cache drops everything that it has under these leases,
    /// changes written to the engine first, and then calls [`CacheLeases::dropped`].
    Lost,
    /// [`CacheLeases::end_recalls`] was called.
    Ended,
}

/// The leases of an engine, for a cache outside of it. From [`Self::hold`] on a lease is the cache's until it is given back by
/// [`Self::give_back`]: whatever the engine does, no other holder changes the inode until then (`Read`), or reads it
/// (`Write`).
pub trait CacheLeases: Send + Sync {
    /// Says that leases of this engine will be held for a cache that is empty now. Comes before everything else: until then
    /// the engine gets no lease if the node withholds leases because of a cache of before.
    ///
    /// # Errors
    /// Those of the engine.
    fn begin(&self) -> Result<()>;

    /// Gets a lease on a pinned inode, if it is not held, and holds it for the cache. Waits for that, also for what
    /// the caller itself holds of other inodes.
    ///
    /// # Errors
    /// `Stale`, `TooManyFiles` (as many are held as can be), `Io`.
    fn hold(&self, node: InodeNumber, mode: LeaseMode) -> Result<()>;

    /// The same, if the engine has the lease already: false if it does not.
    fn hold_at_once(&self, node: InodeNumber, mode: LeaseMode) -> bool;

    /// The cache has nothing of these any more. Operations under way on them end first.
    fn give_back(&self, nodes: &[InodeNumber]);

    /// The cache has nothing of this one any more, but nobody asked for it: the engine may keep the lease.
    fn leave(&self, node: InodeNumber);

    /// Whether an inode has no name any more, as far as that is known under a lease. Makes no call.
    fn is_nameless(&self, node: InodeNumber) -> bool;

    /// The pinned inodes whose last names operations of this engine have removed since the last call.
    fn take_orphans(&self) -> Vec<InodeNumber>;

    /// How many leases may be held for the cache; a little more can.
    fn held_max(&self) -> usize;

    /// Waits until others want leases that this engine has. For one thread at a time.
    fn recalls(&self) -> Recalled;

    /// The cache has nothing any more of what it had when [`Recalled::Lost`] came; once for each. Until then no other holder
    /// changes, or reads, what it had leases for. [`Self::recalls`] is to be called meanwhile: the next session may be lost, too.
    fn dropped(&self);

    /// Ends a wait in [`Self::recalls`], and all that follow.
    fn end_recalls(&self);
}
