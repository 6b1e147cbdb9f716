//! Crashes at every fence, sync, creation and removal of a take-over and of what follows it, on the one-thread bed of `pair`: the
//! copy leads alone, the former head returns and gets the tree, and both go on. The former head has records that no copy has.
//!
//! The oracle is that of `pair`: a pool recovers a prefix of the operations, with all that was synced while it counted.

use crate::client::{DIRECTORY, FILE, ROOT};
use crate::crash::{Run, SYNCED, check_pool, judge, limits, limits_of_recovery, prove_on_both};
use crate::pair::{Pair, recover_node, sync};
use crate::still::drive_by;
use pmem::Recorder;
use pmem::crash::{Counts, Limits, crash_recorded};

/// Operations of the head that only it has when it dies.
const ALONE: u64 = 2;

/// How the former head gets what it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Return {
    /// By the stream: its ledger is a beginning of the next head's.
    Stream,
    /// As a whole tree: its ledger has an entry that no copy has.
    Import,
}

/// Operations on two nodes, then at the second alone, then on both again. Gives how many there were when the former head began
/// to return, before the last one.
fn take_over_and_return([former, next]: [&Recorder; 2], by: Return) -> u64 {
    let pair = Pair::on(former, next);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (shared, _) = one.create(folder, b"shared", FILE | 0o644);
    let mut run = Run { recorders: vec![former.clone(), next.clone()], folder, shared, done: 0 };
    let both = [(folder, 1), (shared, 1)];
    run.operate(&mut one);
    sync(&one, &both).unwrap();
    run.mark_synced();
    run.operate(&mut one);
    sync(&one, &both).unwrap();
    run.mark_synced();
    pair.quiesce();
    // No call waits for these entries, and they are not sent. The next head repeats them, with the same contents.
    run.recorders = vec![former.clone()];
    let synced = run.done;
    drive_by(Box::new(|| false));
    (0..ALONE).for_each(|_| run.operate(&mut one));
    drop(one);
    if by == Return::Import {
        drop(pair.attach());
    }
    run.done = synced;
    run.recorders = vec![next.clone()];
    let pair = pair.change_places(former);
    let mut two = pair.attach();
    two.walk("folder/shared").unwrap();
    for _ in 0..=ALONE {
        run.operate(&mut two);
        sync(&two, &both).unwrap();
        run.mark_synced();
    }
    two.digest(true).unwrap();
    run.operate(&mut two);
    // From here on the former head may have all of it.
    let returns = run.done;
    former.returned(returns);
    pair.daemon.add_copy(pair.connect()).unwrap();
    run.recorders = vec![former.clone(), next.clone()];
    run.operate(&mut two);
    sync(&two, &both).unwrap();
    run.mark_synced();
    pair.daemon.end(two.session);
    pair.quiesce();
    assert_eq!(run.done, returns + 1);
    returns
}

fn prove(limits: &Limits, node: usize, by: Return) -> Counts {
    let recorders = [Recorder::new(), Recorder::new()];
    let returns = take_over_and_return([&recorders[0], &recorders[1]], by);
    drive_by(Box::new(|| false));
    prove_on_both(
        |model| format!("sharedfs, take-over, {by:?}, node {}, {model:?}, {limits:?}", node + 1),
        |model| {
            crash_recorded(
                &recorders[node],
                model,
                limits,
                recover_node(node),
                |mut opened, medium, point| {
                    // A member that returns gets digested records before the entry that opens their log (C2). It never leads with
                    // that, and a daemon that did would keep these records aside. So does a recovery that finds what another one,
                    // which was cut off, had copied before it closed the logs.
                    let is_back = point.returned.contains(&(SYNCED + returns + 1));
                    let returned_in_part = node == 0 && point.returned.contains(&returns) && !is_back;
                    if let Some((_, recovered)) = &mut opened
                        && (returned_in_part || limits.recovery_images > 0)
                    {
                        recovered.kept = None;
                    }
                    judge(opened, medium, point, false)
                },
            )
        },
    )
}

/// Crashes of the history alone: in these no crash is taken for damage.
fn of_history() -> Limits {
    Limits { recovery_images: 0, ..limits() }
}

#[test]
fn a_crash_of_the_next_head_leaves_all_that_was_synced() {
    assert!(prove(&of_history(), 1, Return::Stream).images > 300);
}

#[test]
fn a_crash_of_the_former_head_leaves_what_it_was_or_what_came() {
    assert!(prove(&of_history(), 0, Return::Stream).images > 300);
    assert!(prove(&of_history(), 0, Return::Import).images > 300);
}

#[test]
fn a_crash_of_recovery_in_a_take_over_is_recovered() {
    let few = Limits { recovery_every: 4, ..limits_of_recovery() };
    let ways = [(0, Return::Stream), (0, Return::Import), (1, Return::Stream)];
    let images: u64 = ways.iter().map(|(node, by)| prove(&few, *node, *by).recovery_images).sum();
    assert!(images > 100);
}

/// The history itself, without a crash: both have all operations, and nothing of the former head's own.
#[test]
fn the_former_head_returns_and_both_have_the_same() {
    for by in [Return::Stream, Return::Import] {
        let recorders = [Recorder::new(), Recorder::new()];
        let done = take_over_and_return([&recorders[0], &recorders[1]], by) + 1;
        drive_by(Box::new(|| false));
        for (node, recorder) in recorders.iter().enumerate() {
            let image = Recorder::of_image(recorder.image());
            let opened = recover_node(node)(&image.medium()).unwrap().unwrap();
            assert_eq!(check_pool(&opened.0, &image.medium()).unwrap(), done);
        }
    }
}
