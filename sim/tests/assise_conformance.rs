//! `vfs`'s conformance suite against LibFS and SharedFS in one process.

mod assise_local;

use assise_local::{Node, tiny};
use libfs::Limits;
use std::sync::Arc;
use vfs::Caller;

#[test]
fn libfs_does_what_the_kernel_does() {
    let mut ejected = Vec::new();
    let mut nodes: Vec<Arc<Node>> = Vec::new();
    let failures = vfs::conformance::run(&mut || {
        let node = Node::new(tiny());
        let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
        nodes.push(node);
        Arc::new(libfs)
    });
    for daemon in nodes.iter().filter_map(|node| node.daemon()) {
        ejected.extend(daemon.terminations());
    }
    assert!(ejected.is_empty(), "an honest LibFS was cut: {ejected:?}");
    let told: Vec<_> = failures.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), told.join("\n"));
}
