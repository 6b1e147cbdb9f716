//! The functions of the table: each serves one system call that concerns a file of ours, in one file for each subject.
//! They decode the kernel's arguments, call the mount, and encode its result as the kernel would.

pub mod copies;
pub mod data;
pub mod directory;
pub mod maps;
pub mod names;
pub mod numbers;
pub mod opens;
pub mod process;
pub mod refused;
pub mod rings;
pub mod sizes;
pub mod special;
pub mod status;
mod two_paths;
pub mod waits;
