//! POSIX semantics over an engine: paths, open files, permissions and the numbers of errors are the same for every
//! engine and stand here; what stores the files stands behind [`Engine`]. The in-memory model engine is the
//! oracle that every other engine is compared with.

#![forbid(unsafe_code)]

pub mod access;
pub mod engine;
pub mod errno;
pub mod error;
pub mod locks;
pub mod model;

pub use access::Caller;
pub use engine::Engine;
pub use error::Error;
pub use model::Model;
