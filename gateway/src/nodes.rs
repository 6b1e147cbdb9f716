//! Which inodes the kernel knows, and how often it was told: a node of the kernel is an inode number, and stays good
//! until the kernel has forgotten it as often as it was told. The engine is asked for one pin of each.

use format::InodeNumber;
use ipc::{Host, Lock};
use std::collections::BTreeMap;
use std::sync::Arc;
use vfs::Engine;

pub(crate) struct Nodes {
    told: Lock<BTreeMap<InodeNumber, u64>>,
}

impl Nodes {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self { told: Lock::new(host, BTreeMap::new()) }
    }

    /// The kernel is told of an inode that the engine has just pinned. Only the first pin is kept.
    pub(crate) fn tell(&self, engine: &dyn Engine, inode: InodeNumber) {
        let count = {
            let mut told = self.told.lock();
            let count = told.entry(inode).or_insert(0);
            *count += 1;
            *count
        };
        if count > 1 {
            engine.forget(&[inode]);
        }
    }

    /// Whether the kernel was told of an inode, and has not forgotten it.
    pub(crate) fn knows(&self, inode: InodeNumber) -> bool {
        self.told.lock().contains_key(&inode)
    }

    /// The kernel forgets what it was told so many times; true if it knows nothing of it any more.
    pub(crate) fn forget(&self, engine: &dyn Engine, inode: InodeNumber, times: u64) -> bool {
        let gone = {
            let mut told = self.told.lock();
            match told.get_mut(&inode) {
                Some(count) if *count > times => {
                    *count -= times;
                    false
                }
                _ => told.remove(&inode).is_some(),
            }
        };
        if gone {
            engine.forget(&[inode]);
        }
        gone
    }

    /// The kernel has gone, and with it all that it knew.
    pub(crate) fn forget_all(&self, engine: &dyn Engine) {
        let told = std::mem::take(&mut *self.told.lock());
        engine.forget(&told.into_keys().collect::<Vec<_>>());
    }
}
