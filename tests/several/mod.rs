//! Parts of the tests of copies.

pub mod cluster;
pub mod database;
pub mod worker;
