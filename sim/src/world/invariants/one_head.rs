//! At most one node serves at a time, by true time; and when an fsync returns, no later head serves.

use super::{Believes, HeadLife};
use crate::world::lock;
use crate::world::node::Life;
use ipc::Time;
use std::sync::{Arc, Mutex};

/// The nodes that began to serve.
#[derive(Default)]
pub struct OneHead(Mutex<Vec<Arc<HeadLife>>>);

impl OneHead {
    /// A life serves from now on.
    pub(crate) fn begins(&self, life: Arc<Life>, version: u64, believes: Believes) {
        lock(&self.0).push(Arc::new(HeadLife { life, version, believes }));
    }

    /// The run is over. The beliefs of each life hold references to the world, which would keep the memory of every
    /// run.
    pub(crate) fn clear(&self) {
        let heads = std::mem::take(&mut *lock(&self.0));
        drop(heads);
    }

    fn alive(&self) -> Vec<Arc<HeadLife>> {
        lock(&self.0).iter().filter(|head| head.life.host.is_alive()).cloned().collect()
    }

    /// # Errors
    /// Two nodes believe that they may serve.
    pub(crate) fn check(&self, truth: Time) -> Result<(), String> {
        let serving: Vec<_> = self.alive().into_iter().filter(|head| (head.believes)(truth)).collect();
        match &serving[..] {
            [one, other, ..] => Err(format!(
                "nodes {} (version {}) and {} (version {}) both serve",
                one.life.node, one.version, other.life.node, other.version
            )),
            _ => Ok(()),
        }
    }

    /// An fsync returned at a life.
    ///
    /// # Errors
    /// A later head had begun to serve.
    pub(crate) fn check_sync(&self, life: &Life) -> Result<(), String> {
        let heads = lock(&self.0);
        let own = heads.iter().rposition(|head| head.life.number == life.number);
        match own {
            Some(own) if own + 1 < heads.len() => Err(format!(
                "an fsync returned at node {} when node {} served",
                life.node,
                heads[heads.len() - 1].life.node
            )),
            _ => Ok(()),
        }
    }
}
