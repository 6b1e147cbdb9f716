//! The embedded manager is killed repeatedly while members and operators change the cluster: acknowledged changes are
//! durable, numbers and epochs only grow, and a member keeps its membership without help.
//!
//! HEARTH_PROVE=1 kills 500 times by the socket, and 100 times by `transport`.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/process.rs"]
mod process;

use cluster::{
    Address, Change, Done, Error, Joining, Manager, Membership, Party, PoolReport, Refusal, Remote, Rules,
};
use format::{ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Lock, SystemHost, Word};
use process::ManagerProcess;
use std::sync::Arc;
use std::time::Duration;

const WORKERS: u32 = 3;

fn pause(duration: Duration) {
    let word = Word::new(0);
    let _ = SystemHost.wait(&word, 0, Some(SystemHost.now().after(duration)));
}

/// Joins and leaves until it is stopped, and stores everything that was acknowledged.
fn work(manager: &Remote, node: NodeId, stop: &Word, acknowledged: &Lock<Vec<(Done, Change)>>) {
    let mut life = None;
    while stop.load(Ordering::Acquire) == 0 {
        let change = match life {
            None => {
                let instance = SystemHost.random();
                let (pool, address) = (PoolReport::default(), Address::default());
                Change::Join { node, instance, replaces: None, medium: 2, pool, address }
            }
            Some(life) => Change::Leave { party: Party { node, life } },
        };
        match manager.propose(&change, SystemHost.now().after(Duration::from_secs(20))) {
            Ok(done) => {
                life = if life.is_none() { Some(done.epoch) } else { None };
                acknowledged.lock().push((done, change));
            }
            // The outcome is unknown: the next answer shows it.
            Err(Error::Unknown) => {}
            Err(Error::Refused(Refusal::AlreadyMember(found))) => life = Some(found),
            Err(Error::Refused(Refusal::NotMember)) => life = None,
            Err(error) => panic!("{error}"),
        }
    }
}

fn proving() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some()
}

#[test]
fn a_killed_manager_loses_nothing() {
    kill(ManagerProcess::new(rules()), if proving() { 500 } else { 12 });
}

/// The same over the network, where a start takes longer because it loads libfabric.
#[test]
fn a_killed_manager_loses_nothing_over_transport() {
    kill(ManagerProcess::listening(rules()), if proving() { 100 } else { 3 });
}

fn rules() -> Rules {
    Rules::new(Duration::from_secs(10), 1000).unwrap()
}

fn kill(mut manager: ManagerProcess, rounds: usize) {
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let client = || manager.client();
    let (pool, address) = (PoolReport::default(), Address::default());
    let joining = Joining { node: NodeId::new(100), replaces: None, medium: 2, pool, address };
    let soon = || SystemHost.now().after(Duration::from_secs(20));
    let judge = manager.serving();
    let member = Membership::join(host.clone(), Arc::new(client()), &joining, soon()).unwrap();
    let party = member.party().unwrap();
    let stop = Arc::new(Word::new(0));
    let acknowledged = Arc::new(Lock::new(host.clone(), Vec::new()));
    let workers: Vec<_> = (1..=WORKERS)
        .map(|number| {
            let (remote, stop, acknowledged) = (client(), stop.clone(), acknowledged.clone());
            let body = move || work(&remote, NodeId::new(number), &stop, &acknowledged);
            SystemHost.spawn("worker", Box::new(body)).unwrap()
        })
        .collect();
    let (mut checked, mut last) = (0, (ChangeNumber::new(0), format::Epoch::new(0)));
    for _ in 0..rounds {
        // Changes to find again, however long the processes need to recover.
        let until = soon();
        while acknowledged.lock().is_empty() && SystemHost.now() < until {
            pause(Duration::from_millis(1));
        }
        pause(Duration::from_micros(SystemHost.random() % 40_000));
        manager.kill();
        let before: Vec<_> = std::mem::take(&mut *acknowledged.lock());
        manager.start();
        let view = judge.watch(ChangeNumber::new(0), soon()).unwrap();
        assert!((view.number, view.epoch) >= last, "{:?} after {last:?}", (view.number, view.epoch));
        last = (view.number, view.epoch);
        // The newest ones first: on a fast medium more changes are acknowledged than the history keeps.
        for (done, change) in before.iter().rev() {
            assert!(done.number <= view.number && done.epoch <= view.epoch, "{done:?} of {change:?} is lost");
            let records = judge.history(done.number, 1, soon()).unwrap();
            let oldest = || judge.history(ChangeNumber::new(1), 1, soon()).unwrap()[0].number;
            if records[0].number > done.number && oldest() > done.number {
                break;
            }
            checked += 1;
            assert_eq!(&records[0].change, change, "{done:?}");
            assert_eq!((records[0].number, records[0].epoch), (done.number, done.epoch));
        }
    }
    stop.store(1, Ordering::Release);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    let until = member.valid_until().unwrap();
    while member.valid_until().unwrap() <= until {
        pause(Duration::from_millis(5));
        assert_eq!(member.party(), Some(party), "the member lost its life though the manager only restarted");
        if SystemHost.now() > until {
            panic!("the member does not reach the manager any more");
        }
    }
    member.stop();
    println!(
        "{rounds} kills, {checked} acknowledged changes found again, at number {} epoch {}",
        last.0, last.1
    );
    assert!(checked >= rounds, "nothing was acknowledged between two kills");
}

/// The manager's process: this test binary again, started with the environment of a manager.
#[test]
fn manager_process() {
    process::serve_if_requested();
}
