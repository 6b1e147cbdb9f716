//! SharedFS against little LibFSes that append records by hand: honest, hostile, several at once, and crashed at
//! every fence.

#![allow(clippy::unwrap_used, reason = "tests")]

mod beside;
mod client;
mod common_history;
mod compare;
mod copy_room;
mod crash;
mod crash_operations;
mod crash_reports;
mod crash_take_over;
mod damaged_ledger;
mod door;
mod ending;
mod fences;
mod full_medium;
mod full_pool;
mod given_up;
mod greetings;
mod hand_over;
mod hostile;
mod hostile_copies;
mod hostile_door;
mod hostile_files;
mod hostile_logs;
mod hostile_memory;
mod join;
mod live_repair;
mod lock_leases;
mod locks;
mod one_session;
mod operations;
mod own_failures;
mod pair;
mod pair_threads;
mod passes;
mod progress;
mod ready;
mod recalls;
mod repair;
mod reservation;
mod restarts;
mod returns;
mod rounds;
mod rules;
mod second_copy;
mod share;
mod still;
mod together;
mod touching;

#[path = "../../../area/tests/support/mod.rs"]
mod support;
