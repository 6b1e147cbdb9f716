//! A node's connections to the others: it listens for the one that leads, and connects to those that follow.

use crate::commands::daemon::spawn;
use crate::error::{Error, Result};
use cluster::View;
use format::mirror::MirrorRefusal;
use format::wire::RefusalReason;
use format::{Epoch, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Lock, SystemHost, Time, Word};
use sharedfs::Standby;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use transport::{Connection, Endpoint, Fabric, Listener, Secret};

/// Connections that are followed at once. One is of the head, one of a comparison; others come while a disk does not answer, for
/// which each of them waits.
const FOLLOWED_MAX: u32 = 8;
/// Pause before another attempt to connect.
const PAUSE: Duration = Duration::from_millis(5);

/// The node's end of its connections.
pub struct Links {
    endpoint: Endpoint,
    /// Where others reach it.
    pub address: String,
    follow_end: FollowEnd,
}

/// Why the standby stopped following a head, if it was its own doing.
type FollowEnd = Arc<Lock<Option<String>>>;

impl Links {
    /// Listens at an address of this machine, at a free port, and lets the standby follow each head that connects. `remedy`: of a
    /// pool without room for its former tree and that of the head, which it cannot give up.
    ///
    /// # Errors
    /// The machine has no such address, no libfabric, or no thread left.
    pub fn open(
        address: IpAddr,
        secret: &Secret,
        node: NodeId,
        (standby, remedy): (&Standby, String),
    ) -> Result<Self> {
        let (endpoint, listener) = listen(address, secret, node)?;
        let address = listener.address();
        let standby = standby.clone();
        let follow_end = FollowEnd::new(Lock::new(Arc::new(SystemHost), None));
        let told = follow_end.clone();
        spawn("links", move || accept(&listener, &standby, (&told, &remedy)))?;
        Ok(Self { endpoint, address, follow_end })
    }

    /// Why the standby stopped following a head, if it was its own doing.
    pub fn follow_end(&self) -> Option<String> {
        self.follow_end.lock().clone()
    }

    /// It is in sync: that reason is over.
    pub fn forget_follow_end(&self) {
        *self.follow_end.lock() = None;
    }

    /// Refuses an address at which no node could be reached.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn try_to_listen(address: IpAddr, secret: &Secret) -> Result<()> {
        Self::may_connect()?;
        listen(address, secret, NodeId::NONE).map(drop)
    }

    /// Refuses a machine, or a user, for which the kernel does not install the filters by which only nodes with the cluster's key
    /// reach each other: no copy could follow.
    ///
    /// # Errors
    /// The kernel's.
    pub fn may_connect() -> Result<()> {
        Fabric::try_filter().map_err(|why| {
            Error::new(format!(
                "nodes cannot be connected here, because the kernel refuses the filters of their sockets to this user ({why}): begin \
                 as root, or with one node"
            ))
        })
    }

    /// The view has these members in this epoch: connections of a life that is over are closed when this returns.
    pub fn advance(&self, view: &View) {
        if self.endpoint.epoch() != view.epoch {
            self.endpoint.advance(view.epoch, Some(view.lives()));
        }
    }

    /// Connects to a member, trying until then: the other side may not have seen the epoch yet.
    ///
    /// # Errors
    /// Why the last attempt failed.
    pub fn connect(
        &self,
        view: &View,
        node: NodeId,
        until: Time,
    ) -> std::result::Result<Connection, transport::Error> {
        let Some(member) = view.members.get(&node) else {
            return Err(transport::Error::Address("it is no member".to_owned()));
        };
        loop {
            match self.endpoint.connect(member.address.as_str(), node, until) {
                Err(transport::Error::Refused { reason, .. })
                    if is_passing(reason) && SystemHost.now() < until =>
                {
                    SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(PAUSE)));
                }
                connected => return connected,
            }
        }
    }
}

/// Loads what is needed to listen at an address, which takes long the first time in a process.
///
/// # Errors
/// The machine has no such address or no libfabric.
pub fn prepare(address: IpAddr) -> Result<()> {
    let prepared = Fabric::tcp(&address.to_string()).prepare();
    prepared.map_err(|why| Error::new(format!("cannot listen for other nodes at {address}: {why}")))
}

/// Listens at an address of this machine, at a free port.
fn listen(address: IpAddr, secret: &Secret, node: NodeId) -> Result<(Endpoint, Listener)> {
    let why = |why: &dyn std::fmt::Display| {
        Error::new(format!("cannot listen for other nodes at {address}: {why}"))
    };
    let fabric = Fabric::tcp(&address.to_string());
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let endpoint = fabric.endpoint(host, secret.identity(node), Epoch::default(), mirror::settings());
    let endpoint = endpoint.map_err(|error| why(&error))?;
    let listener = endpoint.listen("0").map_err(|error| why(&error))?;
    Ok((endpoint, listener))
}

/// The number of connections that are followed.
#[derive(Clone)]
struct FollowedConnections(Arc<Word>);

/// Counts a connection for as long as it is followed.
struct Following(FollowedConnections);

impl FollowedConnections {
    /// Counts one more; none beyond the limit. Only the thread that accepts calls this.
    fn begin(&self) -> Option<Following> {
        // Acquire: pairs with the Release of a thread that ends.
        let has_room = self.0.load(Ordering::Acquire) < FOLLOWED_MAX;
        has_room.then(|| {
            self.0.fetch_add(1, Ordering::Relaxed);
            Following(self.clone())
        })
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the thread that accepts.
        self.0.0.fetch_add(u32::MAX, Ordering::Release);
    }
}

/// Whether the same attempt may succeed a moment later.
fn is_passing(reason: RefusalReason) -> bool {
    use RefusalReason::{Full, Late, NewEpoch, NotMember, OldEpoch};
    matches!(reason, OldEpoch | NewEpoch | NotMember | Full | Late)
}

/// Whether a copy cannot follow because of itself: its medium fails or is full, or it cannot take the tree in.
fn is_of_copy(why: &sharedfs::Error) -> bool {
    use mirror::Error::{Import, ImportRoom, Media, PoolRoom, TreeGivenUp, TreeKept};
    let sharedfs::Error::Copy(_, why) = why else { return false };
    if *why == mirror::Error::Refused(MirrorRefusal::Space) {
        return true;
    }
    matches!(why, Media(_) | Import(_) | ImportRoom | TreeGivenUp | TreeKept(_) | PoolRoom)
}

/// Each connection is followed on a thread of its own, until it ends or a later one comes. Beyond the limit connections are closed: the
/// other side tries again.
fn accept(listener: &Listener, standby: &Standby, (follow_end, remedy): (&FollowEnd, &str)) {
    let (mut last, followed) = (None, FollowedConnections(Arc::new(Word::new(0))));
    loop {
        match listener.accept(None) {
            Ok(connection) => {
                last = None;
                let Some(following) = followed.begin() else {
                    connection.close();
                    continue;
                };
                let (standby, told, remedy) = (standby.clone(), follow_end.clone(), remedy.to_owned());
                let follow = move || {
                    let _following = following;
                    let head = connection.node();
                    let ended = standby.follow(&connection).err();
                    let why = ended.as_ref().map(|why| match why {
                        sharedfs::Error::Copy(_, mirror::Error::TreeKept(_)) => format!("{why}: {remedy}"),
                        why => why.to_string(),
                    });
                    let is_own = ended.is_some_and(|why| is_of_copy(&why));
                    // The head tries again and again, and the reason is told once.
                    if !is_own || std::mem::replace(&mut *told.lock(), why.clone()) != why {
                        info!(node = head.get(), why, "followed");
                    }
                };
                if let Err(why) = spawn("follow", follow) {
                    warn!(%why, "a connection of another node is not followed");
                }
            }
            Err(transport::Error::TimedOut | transport::Error::Interrupted) => {}
            Err(why) => {
                // The other side tries again and again, and the reason is told once.
                if last.as_ref() != Some(&why) {
                    warn!(%why, "no connection of another node is taken for a while");
                }
                last = Some(why);
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(PAUSE * 20)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_wait_for_a_disk_are_few() {
        let followed = FollowedConnections(Arc::new(Word::new(0)));
        let mut all: Vec<Following> = std::iter::from_fn(|| followed.begin()).take(1000).collect();
        assert_eq!(all.len(), FOLLOWED_MAX as usize);
        all.pop();
        let one = followed.begin();
        assert!(one.is_some() && followed.begin().is_none());
        drop((one, all));
        assert!(followed.begin().is_some());
    }
}
