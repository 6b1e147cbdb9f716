//! The deterministic part of SharedFS: makes the tree from the ledger and the update logs (Assise §3.2.1, digest; §3.3,
//! the replicated lease log).
//!
//! Two inputs, entries of the ledger and frames of update logs; one output, the shared area. A daemon that leads
//! decides what is digested, reaped, granted and ended, and writes each decision into the ledger. A daemon that
//! executes the ledger over the same logs, after a crash or on another node, repeats these decisions and makes none:
//! names, attributes, contents and stamps become the same. Each copy decides by itself where blocks lie, where batches
//! end, and when a commit is made.
//!
//! - [`table`]: which logs live and which rights they have, according to the entries;
//! - [`authorize`]: whether a record counts, by table and attributes;
//! - [`apply`]: a record that counts, into a batch of the area;
//! - [`batch`]: frames of one log, into one commit;
//! - [`copy`]: the tree, the ledger and the logs that one node has, and its commits;
//! - [`script`]: entries that were read, executed one after the other.
//!
//! Inputs that only the head knows are [`batch::Decisions`]. Nothing here waits, and nothing here knows a session, a
//! lease or a process.

pub mod apply;
pub mod authorize;
pub mod batch;
pub mod copy;
pub mod script;
pub mod table;
