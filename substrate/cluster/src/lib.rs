//! Who is alive, in which epoch, who replicates which subtree.
//!
//! [`Manager`] is the seam: the view, watching it, changing it on conditions, heartbeats, the audit trail. The rules
//! are written once and are pure: [`View::apply`] says what a change does, [`Core`] is a manager, [`Agent`] a member,
//! [`Rules`] the arithmetic of the fence. Around them stand the backends. `docs/cluster.md` shows how it all works
//! together. Source of the roles: Assise §3.1, §3.4.

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
pub use core::{Answer, Core, Effects, Event, Expeller};
pub use detector::Detector;
pub use error::Error;
pub use identity::PoolIdentity;
pub use line::Place;
pub use manager::Manager;
pub use membership::{Joining, Membership};
pub use rules::Rules;
pub use server::{Embedded, Limits, SOCKET_NAME};
pub use service::Service;
pub use store::{Kept, Store};
pub use view::{Address, Member, Path, Placement, PoolCopy, Replica, Subtree, View};
