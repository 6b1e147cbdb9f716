//! What each system call does when it concerns a file of ours: the functions that the table names, one file a
//! subject. They decode the kernel's arguments, ask the mount, and encode its answer as the kernel would.

pub mod border;
pub mod copies;
pub mod data;
pub mod maps;
pub mod names;
pub mod numbers;
pub mod opens;
pub mod places;
pub mod process;
pub mod refused;
pub mod rings;
pub mod sizes;
pub mod special;
pub mod status;
pub mod waits;
