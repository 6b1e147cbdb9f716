//! Every crash of a pool's identity: afterwards the pool knows the requested generation, and the one with which it has
//! joined.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use cluster::{Done, Error, PoolIdentity, PoolReport};
use format::{ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use pmem::Medium;
use pmem::crash::{Limits, Model, Point, enumerate};
use pmem::recorded::{Recorder, Verb};

const POOL: PoolUid = PoolUid::new(7);
const NODE: NodeId = NodeId::new(1);

fn open(medium: &Medium) -> Result<PoolIdentity, String> {
    PoolIdentity::open(medium, POOL, NODE).map_err(|error| error.to_string())
}

fn done(number: u64) -> Done {
    Done { number: ChangeNumber::new(number), epoch: Epoch::new(number as u32) }
}

/// Three lives, each with a request, a join, and a newer view. Marks count the calls that have returned.
fn workload(recorder: &Recorder) {
    let medium = recorder.medium();
    let mut identity = open(&medium).unwrap();
    for life in 0..3 {
        identity.ask(100 + life).unwrap();
        recorder.returned(3 * life + 1);
        identity.joined(5, done(10 * (life + 1))).unwrap();
        recorder.returned(3 * life + 2);
        identity.saw(ChangeNumber::new(10 * (life + 1) + 5)).unwrap();
        recorder.returned(3 * life + 3);
    }
}

/// The generations that the manager may have recorded after this number of calls. The call that notes a join comes
/// after it.
fn recorded(calls: u64, report: &PoolReport) -> Vec<u64> {
    let lives = calls.div_ceil(3);
    let last = (lives > 0).then(|| 99 + lives);
    let noted = last.map(PoolGeneration::new) == Some(report.former);
    let before = (calls % 3 == 1 && lives > 1 && !noted).then(|| 98 + lives);
    last.into_iter().chain(before).collect()
}

fn knows(report: &PoolReport, generation: u64) -> bool {
    [report.former, report.copy.generation].contains(&PoolGeneration::new(generation))
}

fn check(mut identity: PoolIdentity, _: &Medium, point: &Point) -> Result<(), String> {
    let calls = point.returned.last().copied().unwrap_or(0);
    let report = identity.ask(999).map_err(|error| error.to_string())?;
    for generation in recorded(calls, &report) {
        if !knows(&report, generation) {
            return Err(format!("after {calls} calls generation {generation} is not known: {report:?}"));
        }
    }
    let newest = (0..=calls).rev().find_map(|call| match call % 3 {
        0 if call > 0 => Some(10 * (call / 3) + 5),
        2 => Some(10 * (call / 3 + 1)),
        _ => None,
    });
    if report.newest < ChangeNumber::new(newest.unwrap_or(0)) {
        return Err(format!("after {calls} calls {newest:?} was the newest seen change: {report:?}"));
    }
    Ok(())
}

#[test]
fn no_crash_forgets_a_generation() {
    for model in [Model::Lines, Model::Pages] {
        let counts = enumerate(model, &Limits::default(), workload, open, check);
        let counts = counts.unwrap_or_else(|found| panic!("{found}"));
        println!("{model:?}: {counts}");
        assert!(counts.images + counts.same > 10, "{counts}");
    }
}

#[test]
fn an_omitted_sync_is_found() {
    each_left_out_is_found(Verb::Sync, Model::Pages);
}

#[test]
fn an_omitted_persist_is_found() {
    each_left_out_is_found(Verb::Persist, Model::Lines);
}

fn each_left_out_is_found(verb: Verb, model: Model) {
    let recorder = Recorder::new();
    workload(&recorder);
    let calls = recorder.calls(verb);
    assert!(calls > 0, "no {verb:?} was made");
    for call in 0..calls {
        let broken = |recorder: &Recorder| {
            recorder.leave_out(verb, call);
            workload(recorder);
        };
        let found = enumerate(model, &Limits::default(), broken, open, check);
        assert!(found.is_err(), "the omission of {verb:?} {call} of {calls} was not found");
    }
}

/// A generation stays the same until the pool knows of its join; the identity of another pool is ignored, and that of
/// another node is not changed.
#[test]
fn a_repeated_request_has_the_same_generation() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let first = open(&medium).unwrap().ask(1).unwrap();
    let mut identity = open(&medium).unwrap();
    assert_eq!(identity.ask(2).unwrap(), first);
    identity.joined(5, done(3)).unwrap();
    let mut identity = open(&medium).unwrap();
    assert_eq!(identity.last_life(), Some(Epoch::new(3)));
    let next = identity.ask(4).unwrap();
    assert_eq!((next.cluster, next.former), (Some(5), first.copy.generation));
    assert_eq!(next.copy.generation, PoolGeneration::new(4));
    assert_eq!(PoolIdentity::owner(&medium), Ok(Some((POOL, NODE))));
    let other = PoolIdentity::open(&medium, POOL, NodeId::new(NODE.get() + 1)).map(drop);
    assert_eq!(other, Err(Error::OtherNode(NODE)));
    assert_eq!(open(&medium).unwrap().ask(5).unwrap(), next);
    let other = PoolIdentity::open(&medium, PoolUid::new(8), NODE).unwrap().last_life();
    assert_eq!(other, None);
}
