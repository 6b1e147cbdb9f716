//! On a machine whose cores are all busy no member is expelled: members with a lease of one second run beside threads
//! that never rest.
//!
//! HEARTH_PROVE=1 runs ten minutes.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/process.rs"]
mod process;

use cluster::{Address, Change, Joining, Manager, Membership, PoolReport, Remote, Rules};
use format::{ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Word};
use process::ManagerProcess;
use std::sync::Arc;
use std::time::Duration;

const MEMBERS: u32 = 3;

#[test]
fn no_member_is_expelled_on_a_busy_machine() {
    let span = Duration::from_secs(if std::env::var_os("HEARTH_PROVE").is_some() { 600 } else { 4 });
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let manager = ManagerProcess::new(Rules::new(Duration::from_secs(1), 1000).unwrap());
    let judge = manager.serving();
    let soon = || SystemHost.now().after(Duration::from_secs(20));
    let stop = Arc::new(Word::new(0));
    let cores = std::thread::available_parallelism().unwrap().get();
    let busy: Vec<_> = (0..cores)
        .map(|_| {
            let stop = stop.clone();
            let body = move || {
                let mut number = 1u64;
                while stop.load(Ordering::Relaxed) == 0 {
                    (0..10_000).for_each(|_| {
                        number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005))
                    });
                }
            };
            SystemHost.spawn("busy", Box::new(body)).unwrap()
        })
        .collect();
    let members: Vec<_> = (1..=MEMBERS)
        .map(|number| {
            let manager = Arc::new(Remote::new(host.clone(), &manager.socket()));
            let node = NodeId::new(number);
            let (pool, address) = (PoolReport::default(), Address::default());
            let joining = Joining { node, replaces: None, medium: 2, pool, address };
            Membership::join(host.clone(), manager, &joining, soon()).unwrap()
        })
        .collect();
    let never = Word::new(0);
    let (end, mut least) = (SystemHost.now().after(span), Duration::MAX);
    while SystemHost.now() < end {
        let _ = SystemHost.wait(&never, 0, Some(SystemHost.now().after(Duration::from_millis(50))));
        for until in members.iter().filter_map(|member| member.valid_until()) {
            least = least.min(until.since(SystemHost.now()));
        }
    }
    let records = judge.history(ChangeNumber::new(1), 256, soon()).unwrap();
    let expelled = records.iter().filter(|record| matches!(record.change, Change::Expel { .. })).count();
    stop.store(1, Ordering::Release);
    members.iter().for_each(|member| member.stop());
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    println!(
        "{span:?} with {cores} busy threads: {expelled} expelled, shortest time left to a member {least:?}"
    );
    assert_eq!(expelled, 0, "{records:?}");
}

/// The manager's process: this test binary again, started with the environment of a manager.
#[test]
fn manager_process() {
    process::serve_if_requested();
}
