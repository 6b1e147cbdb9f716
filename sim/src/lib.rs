//! Runs the real parts under one seed, crashes them, judges; never shipped.

#![forbid(unsafe_code)]
