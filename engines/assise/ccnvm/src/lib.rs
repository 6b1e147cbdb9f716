//! Decides grants, revocations and cuts; no IO.

#![forbid(unsafe_code)]
