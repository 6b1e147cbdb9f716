//! Two sessions that hand files and directories to each other, by call and by force.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, new_pool, tiny, user};
use format::InodeNumber;
use format::call::{LEASE_READ, LEASE_WRITE, Status};
use ipc::host::Host;
use ipc::words::FenceBy;
use ipc::{SystemHost, Word};
use sharedfs::{Config, Daemon};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn what_one_wrote_the_other_reads_and_the_first_has_lost() {
    let (_recorder, daemon) = fresh();
    let (mut one, mut two) = (Client::attach(&daemon, user(0)), Client::attach(&daemon, user(0)));
    let root = one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(one.write(file, 0, b"first"));
    let own = one.read_lease(file);
    // The other one's walk takes the root, then the file, away.
    let found = two.walk("file").unwrap();
    assert_eq!((found.inode, found.item.size.get()), (file, 5));
    assert!(!one.still_holds(&root) && !one.still_holds(&own));
    assert_eq!(two.read(file, 0, 9).unwrap(), b"first");
    assert_eq!(one.view.ended(0), Some(file));
    // And back: the reader loses the lease to the writer.
    let mine = one.write_lease(file);
    assert!(!two.still_holds(&found));
    assert!(one.under(&[mine], |one| one.write(file, 0, b"again")));
    assert_eq!(two.read(file, 0, 9), Err(Status::Invalid), "without a lease nothing is read");
    let found = two.write_lease(file);
    assert!(!one.under(&[mine], |_| unreachable!("the lease is gone")));
    assert_eq!(two.read(file, 0, 9).unwrap(), b"again");
    assert!(two.under(&[found], |two| two.write(file, 5, b"!")));
    assert!(one.walk("file").unwrap().item.stamp.log == two.attached.welcome.log);
    assert!(daemon.terminations().is_empty());
}

#[test]
fn readers_share() {
    let (_recorder, daemon) = fresh();
    let (one, two) = (Client::attach(&daemon, user(1)), Client::attach(&daemon, user(2)));
    let (first, second) = (one.read_lease(ROOT), two.read_lease(ROOT));
    assert!(one.still_holds(&first) && two.still_holds(&second));
    one.close(ROOT, 1);
    assert!(!one.still_holds(&first) && two.still_holds(&second));
}

#[test]
fn who_stays_inside_loses_everything_but_what_was_committed() {
    let (_recorder, daemon) = fresh();
    let (mut one, two) = (Client::attach(&daemon, user(0)), Client::attach(&daemon, user(0)));
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let stuck = one.pages.inside().enter(Some(3), FenceBy::Operation);
    let (entries, done) = {
        two.read_lease(ROOT);
        (two.entries(ROOT).unwrap(), one.set_mode(folder, 0o700))
    };
    assert_eq!(entries, [(b"folder".to_vec(), folder)]);
    assert!(!done, "the log was sealed at what was committed");
    assert_eq!(two.walk("folder").unwrap().item.mode.get(), DIRECTORY | 0o755);
    assert_eq!(daemon.terminations().len(), 1);
    assert_eq!(one.lease(&[(ROOT, LEASE_READ)]).map(|_| ()), Err(Status::Sealed));
    one.pages.inside().leave(stuck);
    assert_eq!(daemon.sessions(), [two.session]);
}

#[test]
fn what_another_has_open_is_kept_when_its_name_goes() {
    let (_recorder, daemon) = fresh();
    let (mut one, two) = (Client::attach(&daemon, user(0)), Client::attach(&daemon, user(0)));
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(one.write(file, 0, b"kept"));
    two.walk("file").unwrap();
    // As a LibFS does it: a note in shared memory, no call.
    two.pages.open()[5].store(file.get(), ipc::sync::Ordering::Release);
    one.lease(&[(ROOT, LEASE_WRITE), (file, LEASE_WRITE)]).unwrap();
    assert!(one.unlink(ROOT, b"file", file, 0));
    assert_eq!(two.walk("file").unwrap_err(), Status::NotFound);
    assert_eq!(two.read_lease(file).item.links.get(), 0);
    assert_eq!(two.read(file, 0, 9).unwrap(), b"kept");
    daemon.tidy();
    assert_eq!(two.read(file, 0, 9).unwrap(), b"kept");
    daemon.end(two.session);
    daemon.tidy();
    assert_eq!(daemon.usage().inodes, 1);
}

/// A client that creates names in one folder as long as it holds it, and takes it again when not.
fn create_many(client: &mut Client, folder: InodeNumber, prefix: &str, count: u32) {
    let mut held = client.write_lease(folder);
    let mut index = 0;
    while index < count {
        let name = format!("{prefix}{index}");
        let inode = client.new_inode();
        let uid = client.attached.caller.uid;
        if client.under(&[held], |client| client.create_as(inode, folder, name.as_bytes(), FILE | 0o644, uid))
        {
            index += 1;
        } else {
            client.release();
            held = client.write_lease(folder);
        }
    }
}

/// As [`fresh`], with a daemon whose grace period is long: a process that is preempted for a while is not terminated.
fn patient() -> (pmem::Recorder, Arc<Daemon>) {
    let recorder = pmem::Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { grace: Duration::from_secs(60), ..tiny() };
    let daemon = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap().0;
    (recorder, Arc::new(daemon))
}

#[test]
fn two_processes_create_in_one_folder() {
    const EACH: u32 = 300;
    let (recorder, daemon) = patient();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let mut two = Client::attach(&daemon, user(0));
    two.walk("folder").unwrap();
    let finished = Arc::new(Word::new(0));
    let theirs = finished.clone();
    let thread = SystemHost
        .spawn(
            "other",
            Box::new(move || {
                create_many(&mut two, folder, "b", EACH);
                theirs.store(1, ipc::sync::Ordering::Release);
            }),
        )
        .unwrap();
    create_many(&mut one, folder, "a", EACH);
    let until = SystemHost.now().after(Duration::from_secs(20));
    while finished.load(ipc::sync::Ordering::Acquire) == 0 && SystemHost.now() < until {
        SystemHost.wait(&finished, 0, Some(SystemHost.now().after(Duration::from_millis(5))));
    }
    thread.join().unwrap();
    let three = Client::attach(&daemon, user(0));
    assert_eq!(three.walk("folder").unwrap().item.size.get(), u64::from(2 * EACH));
    assert!(daemon.terminations().is_empty(), "{:?}", daemon.terminations());
    let report = area::check::check(&recorder.medium()).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn several_leases_are_taken_at_once_by_both_in_any_order() {
    let (_recorder, daemon) = patient();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (left, _) = one.create(ROOT, b"left", DIRECTORY | 0o755);
    let (right, _) = one.create(ROOT, b"right", DIRECTORY | 0o755);
    let (file, _) = one.create(left, b"file", FILE | 0o644);
    let two = Client::attach(&daemon, user(0));
    two.walk("right").unwrap();
    two.walk("left/file").unwrap();
    let thread =
        SystemHost.spawn("mover", Box::new(move || move_to_and_fro(two, left, right, file))).unwrap();
    move_to_and_fro(one, right, left, file);
    thread.join().unwrap();
    assert!(daemon.terminations().is_empty(), "{:?}", daemon.terminations());
    let three = Client::attach(&daemon, user(0));
    let sizes = ["left", "right"].map(|name| three.walk(name).unwrap().item.size.get());
    assert_eq!(sizes[0] + sizes[1], 1);
}

/// Moves the file between the folders, from wherever it stands.
fn move_to_and_fro(mut client: Client, one: InodeNumber, other: InodeNumber, file: InodeNumber) {
    let mut moved = 0;
    while moved < 20 {
        let held = client.lease(&[(one, LEASE_WRITE), (file, LEASE_WRITE), (other, LEASE_WRITE)]).unwrap();
        let here = client.entries(one);
        let here = match here {
            Ok(entries) => !entries.is_empty(),
            Err(_) => continue,
        };
        let (from, to) = if here { (one, other) } else { (other, one) };
        let none = InodeNumber::NONE;
        // All three are held, so the values that were read are current, except for changes of this client itself.
        if client.under(&held, |client| client.rename(file, (from, b"file"), (to, b"file"), none)) {
            moved += 1;
            client.digest(true).unwrap();
            client.release();
        }
    }
}
