//! POSIX semantics over an engine: paths, open files, permissions and error numbers, which are the same for every
//! engine. An [`Engine`] stores the files. The in-memory model engine is the reference that the tests compare every
//! other engine with.

#![forbid(unsafe_code)]

pub mod access;
pub mod cache_leases;
mod changes;
pub mod conformance;
pub mod copy;
mod creation;
pub mod engine;
pub mod errno;
pub mod error;
pub mod file;
pub mod locks;
pub mod model;
pub mod path;
pub mod protections;
pub mod ranges;
pub mod table;
pub mod vfs;

pub use access::Caller;
pub use cache_leases::{CacheLeases, LeaseMode, Recalled};
pub use engine::Engine;
pub use error::Error;
pub use file::File;
pub use model::Model;
pub use path::{Base, Leaves, Outcome, Place, Restriction, Scope, Stop};
pub use protections::Protections;
pub use vfs::{Subject, Vfs};
