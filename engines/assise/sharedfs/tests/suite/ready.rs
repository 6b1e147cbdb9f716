//! Logs that are ready before a session begins.

use crate::client::{Client, FILE, ROOT, fresh, open, tiny, user};
use crate::door::eventually;
use format::superblock::{FileKind, OWNER_DAEMON, Superblock};
use pmem::recorded::Verb;
use pmem::{Medium, Recorder};

fn logs(medium: &Medium) -> Vec<String> {
    medium.list().unwrap().into_iter().filter(|name| name.starts_with("log-")).collect()
}

fn owner_of(medium: &Medium, log: &str) -> u32 {
    written_owner_of(medium, log).expect("a superblock")
}

/// None while the log is being made.
fn written_owner_of(medium: &Medium, log: &str) -> Option<u32> {
    let mut block = [0; 64];
    medium.open_read_only(log).unwrap().read(0, &mut block).unwrap();
    Some(Superblock::decode(&block, FileKind::Log).ok()?.owner.get())
}

/// Syncs that a session's beginning waits for.
fn syncs_to_begin(recorder: &Recorder, begin: impl FnOnce() -> Client) -> (Client, u64) {
    let before = recorder.calls(Verb::Sync);
    let client = begin();
    (client, recorder.calls(Verb::Sync) - before)
}

#[test]
fn a_session_on_a_ready_log_waits_for_no_sync() {
    let (recorder, daemon) = fresh();
    let medium = recorder.medium();
    let (_, without) = syncs_to_begin(&recorder, || Client::attach(&daemon, user(5)));
    daemon.make_ready_logs();
    let ready = logs(&medium).pop().unwrap();
    assert_eq!((logs(&medium).len(), owner_of(&medium, &ready)), (1 + tiny().ready_logs, OWNER_DAEMON));
    let (mut client, with) = syncs_to_begin(&recorder, || Client::attach_as(&daemon, user(0), 2));
    assert_eq!((with, with < without), (0, true), "without: {without}");
    assert_eq!(owner_of(&medium, &ready), 0);
    assert_eq!(client.attached.welcome.log.get().to_string(), ready.split('-').nth(1).unwrap());
    client.write_lease(ROOT);
    let (file, _) = client.create(ROOT, b"file", FILE | 0o600);
    assert!(client.write(file, 0, b"on a log that was ready"));
    client.digest(true).unwrap();
    assert_eq!(client.read(file, 0, 100).unwrap(), b"on a log that was ready");
}

#[test]
fn the_background_thread_keeps_logs_ready_and_the_end_takes_them_away() {
    let (recorder, daemon) = fresh();
    let medium = recorder.medium();
    daemon.start().unwrap();
    for pid in 1..4 {
        eventually("a log is ready", || {
            logs(&medium).iter().any(|log| written_owner_of(&medium, log) == Some(OWNER_DAEMON))
        });
        let client = Client::attach_as(&daemon, user(7), pid);
        daemon.end(client.session);
    }
    daemon.stop();
    assert_eq!(logs(&medium), [""; 0]);
}

#[test]
fn what_was_ready_when_the_daemon_died_is_removed_by_the_next_start() {
    let (recorder, daemon) = fresh();
    let medium = recorder.medium();
    daemon.make_ready_logs();
    assert_eq!(logs(&medium).len(), 1);
    drop(daemon);
    let (daemon, recovered) = open(&medium);
    assert_eq!((logs(&medium), recovered.kept), (Vec::new(), None));
    Client::attach(&daemon, user(5));
}
