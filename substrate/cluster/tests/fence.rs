//! The fence with real processes and real clocks: a member that is killed, stopped, or cut off from the manager (in
//! both directions, or only in one) has stopped serving before it is expelled; both instants are printed. A relay
//! between the member and the manager's socket makes the cut.
//!
//! HEARTH_PROVE=1 runs 200 rounds. The time until the other members' view lacks a dead member is printed, never
//! asserted.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/member.rs"]
mod member;
#[path = "support/process.rs"]
mod process;
#[path = "support/relay.rs"]
mod relay;

use cluster::{Address, Change, Joining, Manager, Membership, Party, Path, Placement, Remote, Rules};
use format::{ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time};
use member::{MemberProcess, pool_of};
use process::ManagerProcess;
use relay::{Direction, Relay};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    Stop,
    CutBoth,
    CutRequests,
    CutAnswers,
}

const FAULTS: [Fault; 5] = [Fault::Kill, Fault::Stop, Fault::CutBoth, Fault::CutRequests, Fault::CutAnswers];

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(30))
}

/// Waits until the condition holds; false if the membership ended first.
fn wait_until(member: &Membership, fits: impl Fn(&Membership) -> bool) -> bool {
    let until = soon();
    loop {
        let seen = member.news().load(Ordering::Acquire);
        if fits(member) || member.party().is_none() {
            return member.party().is_some();
        }
        assert!(SystemHost.now() < until, "the condition never held");
        let slice = SystemHost.now().after(Duration::from_millis(5));
        let _ = SystemHost.wait(member.news(), seen, Some(slice));
    }
}

/// One round; returns how long before the expulsion the member had stopped, and how long after the fault it was
/// expelled. Returns nothing if another member was expelled on a busy machine: then there was nothing to see.
fn round(manager: &ManagerProcess, number: u32, fault: Fault) -> Option<(Duration, Duration)> {
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let remote = Arc::new(Remote::new(host.clone(), &manager.socket()));
    let relay = Relay::start(&manager.socket());
    let (first, second) = (NodeId::new(2 * number + 1), NodeId::new(2 * number + 2));
    let (pool, address) = (pool_of(second), Address::default());
    let joining = Joining { node: second, replaces: None, medium: 2, pool, address };
    let other = Membership::join(host.clone(), remote.clone(), &joining, soon()).unwrap();
    let path = Path::new(format!("/round{number}").as_bytes()).unwrap();
    let mut member = MemberProcess::start(relay.socket(), first, &path);
    if !member.wait_for("joined") {
        return None;
    }
    let chain = [first, second].map(|node| Placement { node, hot: true }).to_vec();
    let version = ChangeNumber::new(0);
    let founder = Some(pool_of(first).copy.uid);
    let place = Change::SetSubtree { path: path.clone(), version, chain, copies_min: 1, founder };
    let Ok(placed) = remote.propose(&place, soon()) else { return None };
    let life = remote.watch(ChangeNumber::new(0), SystemHost.now()).unwrap().members.get(&first)?.life;
    let (version, by) = (placed.number, Party { node: first, life });
    let join = Change::SetSync { path: path.clone(), version, by, node: second, in_sync: true };
    if remote.propose(&join, soon()).is_err() || !member.wait_for("serves") {
        return None;
    }
    let at = SystemHost.now();
    match fault {
        Fault::Kill => member.kill(),
        Fault::Stop => member.signal("STOP"),
        Fault::CutBoth => relay.cut(&[Direction::Requests, Direction::Answers]),
        Fault::CutRequests => relay.cut(&[Direction::Requests]),
        Fault::CutAnswers => relay.cut(&[Direction::Answers]),
    }
    if !wait_until(&other, |other| other.may_serve(&path)) {
        return None;
    }
    let out = SystemHost.now();
    // The change that expelled it. All processes here use the same clock, also the manager for its history.
    let newest = remote.watch(ChangeNumber::new(0), SystemHost.now()).unwrap().number.get();
    let from = ChangeNumber::new(newest.saturating_sub(30).max(1));
    let records = remote.history(from, 256, soon()).unwrap();
    let expelled = |change: &Change| matches!(change, Change::Expel { party, .. } if party.node == first);
    let granted =
        records.iter().rev().find(|record| expelled(&record.change)).expect("it was expelled").wall_ns;
    let granted = Time::from_ns(u64::try_from(granted).unwrap());
    if matches!(fault, Fault::Stop) {
        member.signal("CONT");
    }
    let valid_until = match fault {
        // Its last output: it may have known a later time without having written it.
        Fault::Kill => member.last_valid_until(),
        _ => {
            member.wait_for("ended");
            member.last_valid_until()
        }
    };
    println!(
        "round {number} {fault:?}: valid until {} us, expulsion granted {} us, the other serves {} us",
        valid_until.as_ns() / 1000,
        granted.as_ns() / 1000,
        out.as_ns() / 1000
    );
    assert!(valid_until < granted && valid_until < out, "{fault:?}: two could have served");
    // It may have been too slow by now as well.
    let _ = other.leave(soon());
    relay.stop();
    Some((granted.since(valid_until), out.since(at)))
}

/// Rounds on one cluster with this lease, with the faults in turn.
fn rounds(lease: Duration, count: u32, faults: &[Fault]) {
    let mut manager = ManagerProcess::new(Rules::new(lease, 1000).unwrap());
    drop(manager.serving());
    let (mut least, mut times, mut void) = (Duration::MAX, Vec::new(), 0);
    let mut seen = 0;
    while seen < count {
        let fault = faults[seen as usize % faults.len()];
        let Some((margin, out)) = round(&manager, seen + void, fault) else {
            void += 1;
            assert!(void <= 20, "the machine is too busy for a lease of {lease:?}");
            continue;
        };
        seen += 1;
        least = least.min(margin);
        if matches!(fault, Fault::Kill) {
            times.push(out);
        }
    }
    times.sort();
    let p99 = times[(times.len() * 99).div_ceil(100) - 1];
    println!(
        "lease {lease:?}, {count} rounds and {void} void ones: stopped at least {least:?} before the grant"
    );
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "lease {lease:?}, {} kills: out of the view after median {median:?}, p99 {p99:?}, worst {worst:?}",
        times.len()
    );
    manager.kill();
}

fn proving() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some()
}

#[test]
fn a_fenced_member_has_stopped_before_it_is_expelled() {
    rounds(Duration::from_millis(300), if proving() { 200 } else { 5 }, &FAULTS);
}

#[test]
fn a_dead_member_is_out_after_its_lease() {
    rounds(Duration::from_secs(1), if proving() { 30 } else { 1 }, &[Fault::Kill]);
}

/// The manager's process: this test binary again, started with the environment of a manager.
#[test]
fn manager_process() {
    process::serve_if_requested();
}

/// A member's process, likewise.
#[test]
fn member_process() {
    member::serve_if_requested();
}
