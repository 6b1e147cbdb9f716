//! The head cannot read its own pool where a copy would get the data from. The head stops, so that the copy can take its place: the
//! copy keeps its connection and is not blamed.

use crate::client::{Client, FILE, ROOT, user};
use crate::pair::Pair;
use pmem::Recorder;

#[test]
fn a_head_that_cannot_read_what_a_copy_lacks_stops_and_keeps_the_copy() {
    for is_ledger in [false, true] {
        let recorders = [Recorder::new(), Recorder::new()];
        let pair = Pair::on(&recorders[0], &recorders[1]);
        let mut client = Client::attach(&pair.daemon, user(0));
        client.write_lease(ROOT);
        assert!(client.create(ROOT, b"file", FILE | 0o644).1);
        let log = client.attached.log.name().to_owned();
        recorders[0].fail_reads(if is_ledger { "ledger" } else { &log }, 0..u64::MAX);
        assert!(pair.daemon.feed_copies().is_err());
        let failure = pair.daemon.failure().unwrap_or_default();
        assert!(failure.contains("cannot be read"), "{failure}");
        assert!(pair.daemon.copies().iter().all(|copy| copy.connected));
    }
}
