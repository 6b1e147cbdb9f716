//! Room that is promised in parts is enough for a write that needs several of them.

mod assise_local;

use assise_local::trees::{at, process};
use assise_local::{Node, tiny};
use libfs::Limits;
use sharedfs::Config;
use std::sync::Arc;
use vfs::Caller;
use vfs::conformance::{Actor, Answer, Call};

/// Half of what the pool can promise: four parts at least.
const BYTES: usize = 8 << 20;

#[test]
fn one_write_needs_more_than_is_promised_at_once() {
    let node = Node::new(Config { log_bytes: 1 << 20, log_bytes_max: 64 << 20, ..tiny() });
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let mut player = process(Arc::new(libfs), 1);
    let mut done = |call: Call| match player.call(&call) {
        Answer::Failed(why) => panic!("answered {why}"),
        answer => answer,
    };
    done(Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
    let written = done(Call::Pwrite { slot: 0, offset: 0, data: vec![7; BYTES] });
    assert_eq!(written, Answer::Number(BYTES as u64), "whole");
}
