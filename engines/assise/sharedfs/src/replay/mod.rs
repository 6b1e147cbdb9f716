//! The deterministic part of SharedFS: what the ledger and the update logs make of the tree (Assise §3.2.1, digest;
//! §3.3, the replicated lease log).
//!
//! Two inputs, entries of the ledger and frames of update logs; one output, the shared area. A daemon that leads decides
//! what is digested, reaped, granted and ended, and writes each decision into the ledger; whoever executes the ledger over
//! the same logs, after a crash or on another node, repeats these decisions and makes none: names, attributes, contents
//! and stamps become the same. Where blocks lie, where batches end, and when a commit is made is each copy's own.
//!
//! - [`table`]: which logs live and what they are entitled to, as the entries say;
//! - [`authorize`]: whether a record counts, by table and attributes;
//! - [`apply`]: a record that counts, into a batch of the area;
//! - [`batch`]: frames of one log, into one commit;
//! - [`copy`]: the tree, the ledger and the logs that one node has, and its commits;
//! - [`script`]: entries that were read, executed one after the other.
//!
//! What only the head knows comes in as [`batch::Decisions`]. Nothing here waits, and nothing here knows a session, a
//! lease or a process.

pub mod apply;
pub mod authorize;
pub mod batch;
pub mod copy;
pub mod script;
pub mod table;
