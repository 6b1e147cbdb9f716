//! Reports of a copy that executes entries.

use crate::client::{FILE, ROOT};
use crate::pair::{COPY, HEAD, Pair, config, format_for, sync};
use crate::still::StillHost;
use pmem::Recorder;
use sharedfs::Config;

/// The copy applies each record in a commit of its own. The head hears of the first one before the entry is executed, so that the
/// space of the log is used again. Reports that the head is slow to take are left out, and hold nothing up.
#[test]
fn the_head_hears_of_a_batch_in_the_middle_of_an_entry() {
    let recorders = [Recorder::new(), Recorder::new()];
    let host = StillHost::first();
    format_for(&recorders[0].medium(), HEAD);
    format_for(&recorders[1].medium(), COPY);
    let small = Config { batch_records: 1, ..config(COPY) };
    let pair = Pair::apart(host, &recorders[0], &recorders[1], small);
    pair.daemon.add_copy(pair.connect()).unwrap();
    let mut client = pair.attach();
    client.write_lease(ROOT);
    let (file, _) = client.create(ROOT, b"file", FILE | 0o644);
    client.digest(true).unwrap();
    pair.quiesce();
    let before = client.view.digested().sequence;
    (0..10).for_each(|round| assert!(client.write(file, round * 100, &[7; 100])));
    let last = client.pages.commit().load();
    sync(&client, &[(ROOT, 1)]).unwrap();
    // One entry, which the copy executes all at once while the head takes no message.
    pair.follows.borrow_mut().paused = u32::MAX;
    pair.daemon.tidy();
    pair.quiesce();
    assert_eq!(client.view.digested().sequence, before);
    pair.follows.borrow_mut().paused = 0;
    while pair.follows.borrow_mut().step() {}
    let mut heard = Vec::new();
    while pair.daemon.hear_copies() {
        heard.push(client.view.digested().sequence);
    }
    heard.dedup();
    heard.retain(|at| *at > before);
    assert!(heard.len() > 1, "{heard:?}");
    assert_eq!((heard.first(), heard.last()), (Some(&before.next()), Some(&last)));
}
