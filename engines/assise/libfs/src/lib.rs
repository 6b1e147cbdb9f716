//! The client half of Assise: update log, log index, caches, leases held.

#![forbid(unsafe_code)]
