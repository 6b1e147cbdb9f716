//! The shared area: a copy-on-write tree in persistent memory, its allocator and extents.

#![forbid(unsafe_code)]
