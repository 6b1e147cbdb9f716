//! The manager's log, crashed at every fence, sync, creation and removal: no acknowledged change is lost, no change
//! appears that was never requested, and the manager continues from there.
//!
//! HEARTH_PROVE=1 enumerates with the full limits.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use cluster::{
    Address, Change, Event, Expeller, ManagerCore, Path, Placement, PoolCopy, PoolReport, Rules, Store,
    StoredState, View,
};
use format::checksum::Salt;
use format::cluster::{CLUSTER_VERSION, ClusterFrame, ClusterFrameHead};
use format::{ChangeNumber, Incarnation, LogUid, NodeId, PoolGeneration, PoolUid, Sequence};
use ipc::Time;
use pmem::crash::{Limits, Model, Point, enumerate};
use pmem::ring::{AppendRing, RingPosition, scan};
use pmem::{Medium, Recorder};
use std::time::Duration;
use zerocopy::IntoBytes;

const CLUSTER: u64 = 0x1122_3344;

fn rules() -> Rules {
    Rules::new(Duration::from_secs(1), 200).unwrap()
}

fn open(medium: &Medium) -> Result<(Store, StoredState), String> {
    Store::open(medium.clone(), CLUSTER, rules()).map_err(|error| error.to_string())
}

/// The changes of the workload, in order; the first one has number 2, after the start.
fn changes() -> Vec<Change> {
    let join = |number, instance| Change::Join {
        node: NodeId::new(number),
        instance,
        replaces: None,
        medium: 2,
        pool: PoolReport {
            copy: PoolCopy { uid: PoolUid::new(instance), generation: PoolGeneration::new(1) },
            ..PoolReport::default()
        },
        address: Address::new("127.0.0.1:7000").unwrap(),
    };
    let place = |path: &[u8], nodes: &[u32]| Change::SetSubtree {
        path: Path::new(path).unwrap(),
        version: ChangeNumber::new(0),
        chain: nodes.iter().map(|node| Placement { node: NodeId::new(*node), hot: true }).collect(),
        copies_min: 1,
        founder: Some(PoolUid::new(u64::from(nodes[0]) * 11)),
    };
    let mut changes = vec![join(1, 11), join(2, 22), place(b"/", &[1, 2]), place(b"/mail", &[2, 1])];
    // So long that they take several pages.
    let long = [&b"/"[..], &[b'a'; 900]].concat();
    changes.extend((b'a'..b'i').map(|last| place(&[&long, &[last][..]].concat(), &[1])));
    changes
}

/// The view after the start and this number of changes.
fn expected(count: usize) -> View {
    let mut view = View::new(CLUSTER, rules());
    view.apply(&Change::Start).unwrap();
    for change in changes().iter().take(count) {
        view.apply(change).unwrap();
    }
    view
}

/// Starts a manager and makes the changes, two of them in one sync, and eight together, which take two syncs. Marks
/// after each call how many are acknowledged.
fn workload(recorder: &Recorder) {
    let (mut store, kept) = open(&recorder.medium()).unwrap();
    let now = Time::from_ns(1);
    let (mut core, start) = ManagerCore::start(kept.view, kept.history, Expeller::Core, now, 0);
    store.append(&[start], core.view(), core.history()).unwrap();
    recorder.returned(0);
    let changes = changes();
    let batches = [(2, &changes[..2]), (3, &changes[2..3]), (4, &changes[3..4]), (12, &changes[4..])];
    for (acknowledged, batch) in batches {
        let mut records = Vec::new();
        for change in batch {
            records.extend(core.step(now, Event::Propose { change: change.clone(), wall_ns: 9 }).records);
        }
        store.append(&records, core.view(), core.history()).unwrap();
        recorder.returned(acknowledged);
    }
}

fn check((mut store, kept): (Store, StoredState), medium: &Medium, point: &Point) -> Result<(), String> {
    let acknowledged = point.returned.last().copied();
    let least = acknowledged.unwrap_or(0) as usize;
    let found = (least..=changes().len()).any(|count| kept.view == expected(count));
    let nothing_yet = acknowledged.is_none() && kept.view == View::new(CLUSTER, rules());
    if !(found || nothing_yet) {
        return Err(format!("{least} changes were acknowledged, and the log has {:?}", kept.view));
    }
    if kept.history.len() as u64 != kept.view.number.get() {
        return Err(format!("{} changes and {} records", kept.view.number, kept.history.len()));
    }
    // The manager continues, and its later changes are durable too.
    let (core, start) = ManagerCore::start(kept.view, kept.history, Expeller::Core, Time::from_ns(5), 0);
    store.append(&[start], core.view(), core.history()).map_err(|error| error.to_string())?;
    drop(store);
    let (_, again) = open(medium)?;
    if again.view != *core.view() {
        return Err("a change after the recovery is lost".to_owned());
    }
    Ok(())
}

fn limits() -> Limits {
    match std::env::var_os("HEARTH_PROVE") {
        Some(_) => Limits::default(),
        None => Limits {
            complete_max: 32,
            near_max: 32,
            sampled: 8,
            recovery_images: 4,
            recovery_every: 1,
            seed: 1,
        },
    }
}

#[test]
fn no_crash_loses_an_acknowledged_change() {
    for model in [Model::Lines, Model::Pages] {
        let counts =
            enumerate(model, &limits(), workload, open, check).unwrap_or_else(|found| panic!("{found}"));
        println!("{model:?}: {counts}");
        assert!(counts.images > 10 && counts.images + counts.same > 100, "{counts}");
    }
}

/// The planted bugs: an acknowledgement without its sync, and an older log removed before the snapshot of the newer one
/// is synced. (The very first snapshot needs no sync of its own: the sync of the first change covers it.)
#[test]
fn an_omitted_sync_is_found() {
    let recorder = Recorder::new();
    workload(&recorder);
    let syncs = recorder.calls(pmem::recorded::Verb::Sync);
    for call in 1..=syncs {
        let broken = |recorder: &Recorder| {
            recorder.leave_out(pmem::recorded::Verb::Sync, call);
            workload(recorder);
            drop(open(&recorder.medium()).unwrap());
        };
        let found = enumerate(Model::Pages, &limits(), broken, open, check);
        assert!(found.is_err(), "the omission of sync {call} of {syncs} was not found");
    }
}

/// Another log follows a full one; after thousands of changes all of them are still there.
#[test]
fn a_full_log_is_followed_by_another() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let (mut store, kept) = open(&medium).unwrap();
    let now = Time::from_ns(1);
    let (mut core, start) = ManagerCore::start(kept.view, kept.history, Expeller::Core, now, 0);
    store.append(&[start], core.view(), core.history()).unwrap();
    let first = medium.list().unwrap();
    let long = [&b"/"[..], &[b'a'; 1000]].concat();
    let (path, mut version) = (Path::new(&long).unwrap(), ChangeNumber::new(0));
    let step = |core: &mut ManagerCore, change| core.step(now, Event::Propose { change, wall_ns: 0 }).records;
    let records = step(&mut core, changes().remove(0));
    store.append(&records, core.view(), core.history()).unwrap();
    for turn in 0..5000 {
        let chain = vec![Placement { node: NodeId::new(1), hot: true }];
        let founder = (turn == 0).then_some(PoolUid::new(11));
        let place = Change::SetSubtree { path: path.clone(), version, chain, copies_min: 1, founder };
        let records = step(&mut core, place);
        version = records[0].number;
        store.append(&records, core.view(), core.history()).unwrap();
    }
    let last = medium.list().unwrap();
    assert!(last.len() == first.len() && last != first, "{first:?} {last:?}");
    drop(store);
    let (_, kept) = open(&medium).unwrap();
    assert_eq!(&kept.view, core.view());
    assert_eq!(kept.history.back(), core.history().back());
}

/// Commits a bit in each frame in turn. A crash leaves no such hole with so many frames behind it, so the manager takes
/// nothing for the end of the log, removes nothing, and begins no new history. Near the end it is as after a crash.
#[test]
fn a_damaged_record_in_the_middle_is_not_a_torn_end() {
    let recorder = Recorder::new();
    workload(&recorder);
    let whole = recorder.image();
    let medium = Recorder::of_image(whole.clone()).medium();
    let region = medium.open("manager-1").unwrap();
    let salt = Salt::of_log(LogUid::new(1), Incarnation::new(0));
    let frames: Vec<_> =
        scan(&region, 0, salt, RingPosition { position: 0, sequence: Sequence::new(1) }, u64::MAX)
            .map(Result::unwrap)
            .collect();
    // The snapshot, the start, and the changes.
    assert_eq!(frames.len(), changes().len() + 2);
    for (index, frame) in frames.iter().enumerate() {
        let recorder = Recorder::of_image(whole.clone());
        let medium = recorder.medium();
        let region = medium.open("manager-1").unwrap();
        let at = frame.position + frame.bytes.len() as u64 - 1;
        let mut byte = [0];
        region.read(at, &mut byte).unwrap();
        region.write(at, &[byte[0] ^ 4]);
        region.sync().unwrap();
        let before = medium.list().unwrap();
        let opened = open(&medium).map(|(_, kept)| kept.view.number.get());
        // As many records as one sync may cover.
        if index == 0 || index + 4 < frames.len() {
            let why = opened.expect_err("acknowledged changes were lost");
            assert!(why.contains("a record was lost"), "frame {index}: {why}");
            assert_eq!(medium.list().unwrap(), before, "frame {index}");
            assert!(open(&medium).is_err(), "frame {index}: the damage is found again");
        } else {
            assert_eq!(opened, Ok(index as u64 - 1), "frame {index}");
        }
    }
}

#[test]
fn an_invalid_log_file_is_an_error_and_other_names_are_ignored() {
    let opened = |name: &str, bytes: u64| {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        drop(open(&medium).unwrap());
        medium.create(name, bytes).unwrap();
        let before = medium.list().unwrap();
        let why = open(&medium).err();
        assert_eq!(medium.list().unwrap() == before, why.is_some(), "a damaged folder stays unchanged");
        why
    };
    for (name, bytes, told) in [
        ("manager-7", 4096, Some("has not the length of one")),
        ("manager-18446744073709551615", 4 << 20, Some("no number is left")),
        ("manager-007", 4096, None),
        ("manager-x", 4096, None),
    ] {
        let why = opened(name, bytes);
        assert_eq!(
            why.as_ref().map(|why| told.is_some_and(|told| why.contains(told))),
            told.map(|_| true),
            "{name}: {why:?}"
        );
    }
}

/// Once a cluster has begun in a folder, no other cluster begins there, whatever happens to its only log.
#[test]
fn a_cluster_whose_log_is_lost_is_not_begun_anew() {
    type Loss = (&'static str, fn(&Medium));
    let first_page: fn(&Medium) = |medium| medium.open("manager-1").unwrap().write(0, &[0; 4096]);
    let all: fn(&Medium) = |medium| {
        let region = medium.open("manager-1").unwrap();
        region.write(0, &vec![0; usize::try_from(region.bytes()).unwrap()]);
    };
    let version: fn(&Medium) = |medium| medium.open("manager-1").unwrap().write(5, &[2]);
    let file: fn(&Medium) = |medium| medium.remove("manager-1").unwrap();
    let losses: [Loss; 4] = [
        ("a record was lost", first_page),
        ("the log is gone", all),
        ("another version", version),
        ("the log is gone", file),
    ];
    for (told, lose) in losses {
        let recorder = Recorder::new();
        workload(&recorder);
        let recorder = Recorder::of_image(recorder.image());
        let medium = recorder.medium();
        lose(&medium);
        let before = medium.list().unwrap();
        for _ in 0..2 {
            let why = open(&medium).err();
            assert!(why.as_ref().is_some_and(|why| why.contains(told)), "{told}: {why:?}");
        }
        assert_eq!(medium.list().unwrap(), before, "{told}: the remaining files stay unchanged");
        assert!(Store::rules(&medium).is_err(), "{told}");
    }
}

/// A complete log of an unknown version is neither read nor replaced.
#[test]
fn a_log_of_another_version_is_an_error() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    drop(open(&medium).unwrap());
    let start = RingPosition { position: 0, sequence: Sequence::new(1) };
    let salt = Salt::of_log(LogUid::new(2), Incarnation::new(0));
    let mut ring = AppendRing::new(medium.create("manager-2", 4 << 20).unwrap(), 0, salt, start, start);
    let mut head = ClusterFrameHead::new(ClusterFrame::Snapshot, 7, 0, 0);
    head.version = (u32::from(CLUSTER_VERSION) + 1).into();
    ring.append(head.as_bytes().try_into().unwrap(), &[]).unwrap();
    ring.region().sync().unwrap();
    let why = open(&medium).err().expect("it was read");
    assert!(why.contains("another version"), "{why}");
    assert!(medium.list().unwrap().contains(&"manager-1".to_owned()));
}

#[test]
fn a_second_manager_is_refused() {
    let recorder = Recorder::new();
    let _first = open(&recorder.medium()).unwrap();
    assert!(open(&recorder.medium()).is_err());
}
