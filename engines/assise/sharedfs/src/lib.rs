//! The daemon half of Assise: ledger, leases, digest, recovery.

#![forbid(unsafe_code)]
