//! POSIX semantics over an engine; access and errno; the in-memory model engine.

#![forbid(unsafe_code)]
