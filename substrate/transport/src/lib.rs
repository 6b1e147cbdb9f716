//! Between nodes: messages and one-sided operations, over libfabric or in process.
//!
//! An [`Endpoint`] listens and connects; a [`Connection`] carries messages, writes with or without an immediate, and
//! reads, to one peer that has proved the cluster's key, for one epoch. [`rpc`] makes calls of messages. What order
//! there is, and what a completion means and does not mean, stands in `docs/protocol.md`.
//!
//! Two providers behind one seam: [`fabric`], which is libfabric with whatever hardware it finds, and [`local`], which
//! keeps to the rules of verbs within one process. Ideas: Assise §4.2 (one-sided writes into the replica's log, which
//! the replica itself makes durable and acknowledges).

mod connection;
mod endpoint;
pub mod error;
pub mod fabric;
mod handshake;
mod link;
mod listener;
pub mod local;
mod memory;
mod news;
pub mod rpc;
mod secret;
mod settings;

pub use connection::{Connection, Event, Ticket};
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
