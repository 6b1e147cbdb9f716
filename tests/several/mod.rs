//! Parts of the tests of copies.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod alone;
pub mod cluster;
pub mod database;
pub mod device;
pub mod pour;
pub mod worker;
