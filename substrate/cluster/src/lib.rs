//! The cluster manager: the members of the cluster, the epoch, the replicas of each subtree.
//!
//! [`Manager`] is the interface: read and watch the view, change it under conditions, heartbeats, the audit trail. The
//! rules exist once, as pure code: [`View::apply`] defines the effect of a change, [`ManagerCore`] is a manager,
//! [`Agent`] is a member, [`Rules`] has the arithmetic of the fence. The backends run this code. `docs/cluster.md`
//! describes how everything works together. Source of the roles: Assise §3.1, §3.4.

#![forbid(unsafe_code)]

pub mod agent;
pub mod apply;
pub mod change;
pub mod client;
pub mod codec;
pub mod core;
pub mod detector;
pub mod error;
pub mod identity;
pub mod line;
pub mod manager;
pub mod membership;
pub mod peers;
pub mod rules;
pub mod server;
pub mod service;
pub mod store;
pub mod view;
pub mod wire;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

pub use agent::{Agent, Ticket};
pub use change::{Change, Done, Party, PoolReport, Record, Refusal};
pub use client::Remote;
pub use core::{Answer, Effects, Event, Expeller, ManagerCore};
pub use detector::Detector;
pub use error::Error;
pub use identity::PoolIdentity;
pub use line::Place;
pub use manager::Manager;
pub use membership::{Joining, Membership};
pub use peers::{CopyFacts, LagBound, Part, PeerFacts, PeerStep, Peers};
pub use rules::Rules;
pub use server::{Embedded, Limits, SOCKET_NAME};
pub use service::Service;
pub use store::{Store, StoredState};
pub use view::{Address, Member, Path, Placement, PoolCopy, Replica, Subtree, View};
