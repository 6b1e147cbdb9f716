//! Connections between nodes: messages and one-sided operations, over libfabric or within one process.
//!
//! An [`Endpoint`] listens and connects. A [`Connection`] carries messages, writes with or without an immediate, and
//! reads, to one peer that has proved that it has the cluster's key; it is valid for one epoch. [`rpc`] makes calls
//! over messages. `docs/protocol.md` says which order is guaranteed and what a completion means.
//!
//! Two providers implement one interface: [`fabric`] uses libfabric with the hardware that it finds, and [`local`]
//! follows the rules of RDMA verbs within one process. The source of the idea is Assise §4.2: a node writes one-sided
//! into its replica's log, and the replica makes the log durable and acknowledges it.

mod connection;
mod endpoint;
pub mod error;
pub mod fabric;
mod handshake;
mod link;
mod listener;
pub mod local;
mod memory;
pub mod rpc;
mod secret;
mod settings;

pub use connection::{Connection, Event, Ticket, Traffic};
pub use endpoint::Endpoint;
pub use error::{Ended, Error};
pub use fabric::Fabric;
pub use handshake::{ClusterKey, Identity};
pub use listener::Listener;
pub use local::Network;
pub use memory::{Bytes, INLINE_BYTES_MAX, Local, Rights, dram};
pub use rpc::Rpc;
pub use secret::Secret;
pub use settings::Settings;
