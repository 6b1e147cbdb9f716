//! Crashes at every fence, sync, creation and removal of: the making of a pool, attaching, grants, digests,
//! hand-overs, a log that grows, the end of a session, and recovery itself.
//!
//! The oracle: all operations are in one folder that is handed from session to session, so the recovered names must be
//! a prefix of their order, whichever logs they were in. On persistent memory (lines) the prefix contains every
//! operation that returned, on a mapped file (pages) every operation that was synced. A slice of the images is made
//! unless HEARTH_PROVE=1 asks for all within the driver's limits.

use crate::client::{Client, DIRECTORY, FILE, ROOT, new_pool, tiny, user};
use crate::still::StillHost;
use format::InodeNumber;
use format::call::{CallKind, DigestRequest};
use format::record::UNLINK_DIRECTORY;
use pmem::crash::{Counts, Limits, Model, Point, Violation, enumerate};
use pmem::progress;
use pmem::recorded::Verb;
use pmem::{Medium, Recorder};
use sharedfs::{Config, Daemon, Error, Recovered};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Marks of the recorder from here on say that operations up to the number less this were synced.
pub const SYNCED: u64 = 1_000;

pub fn limits() -> Limits {
    if std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1") {
        return Limits { recovery_every: 16, seed: 11, ..Limits::default() };
    }
    Limits { complete_max: 8, near_max: 4, sampled: 3, recovery_images: 0, recovery_every: 1, seed: 11 }
}

/// Fewer images, each with its recovery crashed too.
pub fn limits_of_recovery() -> Limits {
    if std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1") {
        return Limits {
            complete_max: 64,
            near_max: 16,
            sampled: 16,
            recovery_images: 8,
            recovery_every: 1,
            seed: 12,
        };
    }
    Limits { complete_max: 2, near_max: 0, sampled: 1, recovery_images: 2, recovery_every: 1, seed: 12 }
}

/// Operations of one run: each makes a name in the folder and writes its number into it and into a file that all
/// share.
pub struct Run {
    pub recorders: Vec<Recorder>,
    pub folder: InodeNumber,
    pub shared: InodeNumber,
    pub done: u64,
}

impl Run {
    pub fn operate(&mut self, client: &mut Client) {
        let number = self.done + 1;
        let both = [(self.folder, 2), (self.shared, 2)];
        let held = client.lease(&both).unwrap();
        let inode = client.new_inode();
        let done = client.under(&held, |client| {
            client.write(self.shared, 0, &number.to_le_bytes())
                && client.create_as(inode, self.folder, format!("{number:03}").as_bytes(), FILE | 0o644, 0)
                && client.write(inode, 0, &vec![number as u8; 700])
        });
        assert!(done);
        self.done = number;
        self.recorders.iter().for_each(|recorder| recorder.returned(number));
    }

    /// Syncs as fsync does: the log's file, then the ledger up to the newest grant.
    fn sync(&self, client: &Client) {
        client.attached.log.sync().unwrap();
        let newest = client.lease(&[(self.folder, 1), (self.shared, 1)]).unwrap();
        let up_to = newest.iter().map(|reply| reply.ledger).max().unwrap();
        let request = DigestRequest { up_to, wait: 0.into(), reserved: 0.into() };
        client.call(CallKind::SyncLedger, &[request.as_bytes()]).unwrap();
        self.mark_synced();
    }

    pub fn mark_synced(&self) {
        self.recorders.iter().for_each(|recorder| recorder.returned(SYNCED + self.done));
    }
}

fn start(medium: &Medium) -> Arc<Daemon> {
    Arc::new(Daemon::open(StillHost::first(), medium, tiny()).unwrap().0)
}

/// Two sessions, the second on a log that was ready, a folder that goes to and fro, a session that ends, one that grows
/// its log.
fn workload(recorder: &Recorder) {
    let medium = recorder.medium();
    new_pool(&medium);
    let daemon = start(&medium);
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (shared, _) = one.create(folder, b"shared", FILE | 0o644);
    let mut run = Run { recorders: vec![recorder.clone()], folder, shared, done: 0 };
    run.operate(&mut one);
    run.sync(&one);
    run.operate(&mut one);
    daemon.make_ready_logs();
    let mut two = Client::attach(&daemon, user(0));
    two.walk("folder/shared").unwrap();
    run.operate(&mut two);
    run.operate(&mut two);
    run.sync(&two);
    run.operate(&mut one);
    one.digest(true).unwrap();
    run.operate(&mut one);
    grow(&mut one);
    run.operate(&mut one);
    run.sync(&one);
    run.operate(&mut two);
    daemon.end(one.session);
    run.operate(&mut two);
}

pub fn grow(client: &mut Client) {
    client.grow_log(128 << 10);
}

/// The numbers of the operations whose names are in the folder.
fn numbers(client: &Client) -> Result<Vec<u64>, String> {
    let Ok(folder) = client.walk("folder") else { return Ok(Vec::new()) };
    let mut names: Vec<_> = client.entries(folder.inode).map_err(|status| format!("{status:?}"))?;
    names.retain(|(name, _)| name != b"shared");
    names.sort();
    let mut numbers = Vec::new();
    for (name, inode) in names {
        let number: u64 = String::from_utf8_lossy(&name).parse().map_err(|_| "a foreign name")?;
        client.walk(&format!("folder/{number:03}")).map_err(|status| format!("{status:?}"))?;
        let contents = client.read(inode, 0, 1000).map_err(|status| format!("{status:?}"))?;
        // The write is the record behind the name: only the last may lack it.
        if contents == vec![number as u8; 700] {
            numbers.push(number);
        } else if !contents.is_empty() {
            return Err(format!("{number} holds {} other bytes", contents.len()));
        }
    }
    Ok(numbers)
}

pub type Opened = Option<(Arc<Daemon>, Recovered)>;

pub fn recover(medium: &Medium) -> Result<Opened, String> {
    recover_by(medium, tiny())
}

/// A recovery by a daemon with these settings.
pub fn recover_by(medium: &Medium, config: Config) -> Result<Opened, String> {
    match Daemon::open(StillHost::again(), medium, config) {
        Ok((daemon, recovered)) => Ok(Some((Arc::new(daemon), recovered))),
        Err(Error::Area(area::AreaError::Missing)) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn check(opened: Opened, medium: &Medium, point: &Point) -> Result<(), String> {
    judge(opened, medium, point, true)
}

/// `on_own`: operations that returned are in this pool, synced or not, as far as its medium keeps it.
pub fn judge(opened: Opened, medium: &Medium, point: &Point, on_own: bool) -> Result<(), String> {
    let promised = match point.model {
        Model::Lines if on_own => point.returned.iter().map(|mark| mark % SYNCED).max().unwrap_or(0),
        Model::Lines | Model::Pages => {
            point.returned.iter().filter_map(|mark| mark.checked_sub(SYNCED)).max().unwrap_or(0)
        }
    };
    let begun = point.returned.iter().map(|mark| mark % SYNCED).max().unwrap_or(0) + 1;
    let Some((daemon, recovered)) = opened else {
        return if point.returned.is_empty() { Ok(()) } else { Err("the pool is lost".to_owned()) };
    };
    // The pages of the medium may keep data that relied on a ledger entry, and not the entry, if it was not synced.
    if !recovered.incomplete.is_empty() || (point.model == Model::Lines && recovered.kept.is_some()) {
        let (kept, incomplete) = (&recovered.kept, &recovered.incomplete);
        return Err(format!("a crash was taken for damage: {kept:?}, {incomplete:?}"));
    }
    let found = check_pool(&daemon, medium)?;
    if found < promised || found > begun {
        return Err(format!("{found} of {promised} to {begun}"));
    }
    Ok(())
}

/// Looks at a pool that is served: how many operations it holds.
pub fn check_pool(daemon: &Arc<Daemon>, medium: &Medium) -> Result<u64, String> {
    let mut client = Client::attach(daemon, user(0));
    let found = numbers(&client)?;
    let prefix: Vec<u64> = (1..=found.len() as u64).collect();
    if found != prefix {
        return Err(format!("no prefix: {found:?}"));
    }
    if let Ok(shared) = client.walk("folder/shared") {
        let last = client.read(shared.inode, 0, 8).map_err(|status| format!("{status:?}"))?;
        let last = u64::from_le_bytes(last.try_into().unwrap_or([0; 8]));
        // Its write stands before the name's.
        if last < found.len() as u64 || last > found.len() as u64 + 1 {
            return Err(format!("the shared file says {last} beside {}", found.len()));
        }
    }
    client.write_lease(ROOT);
    let (after, made) = client.create(ROOT, b"after", FILE | 0o600);
    if !made || !client.write(after, 0, b"goes on") || client.digest(true).is_err() {
        return Err("what was recovered cannot be used".to_owned());
    }
    if !daemon.terminations().is_empty() {
        return Err(format!("{:?}", daemon.terminations()));
    }
    let report = area::check::check(medium).map_err(|error| error.to_string())?;
    if report.is_clean() { Ok(found.len() as u64) } else { Err(format!("{:?}", report.findings)) }
}

/// Proves a history on both models of the medium; gives what was counted, and prints it.
pub fn prove_on_both(
    name: impl Fn(Model) -> String,
    prove: impl Fn(Model) -> Result<Counts, Box<Violation>>,
) -> Counts {
    let mut total = Counts::default();
    for model in [Model::Lines, Model::Pages] {
        let proved = progress::case(&name(model), || prove(model));
        total += proved.unwrap_or_else(|violation| panic!("{violation}"));
    }
    println!(
        "crash: {} moments complete, {} capped, {} images, {} of recovery: passed",
        total.complete, total.capped, total.images, total.recovery_images
    );
    total
}

fn prove(limits: &Limits) -> Counts {
    prove_on_both(
        |model| format!("sharedfs, sessions, {model:?}, {limits:?}"),
        |model| enumerate(model, limits, workload, recover, check),
    )
}

#[test]
fn every_crash_leaves_a_prefix_with_all_that_was_promised() {
    assert!(prove(&limits()).images > 500);
}

#[test]
fn a_crash_of_recovery_is_recovered() {
    assert!(prove(&limits_of_recovery()).recovery_images > 500);
}

/// A sync or fence that is left out where it matters is found by the same oracle: the proof can fail.
#[test]
fn a_left_out_sync_is_noticed() {
    let mut noticed = 0;
    let syncs = {
        let recorder = Recorder::new();
        workload(&recorder);
        recorder.calls(Verb::Sync)
    };
    for call in (0..syncs).step_by(3) {
        let lying = |recorder: &Recorder| {
            recorder.leave_out(Verb::Sync, call);
            workload(recorder);
        };
        let few = Limits {
            complete_max: 4,
            near_max: 2,
            sampled: 2,
            recovery_images: 0,
            recovery_every: 1,
            seed: 13,
        };
        noticed += u64::from(enumerate(Model::Pages, &few, lying, recover, check).is_err());
    }
    assert!(noticed > 0, "none of {syncs} syncs matters");
}

#[test]
fn a_folder_that_was_emptied_and_removed_stays_removed() {
    let removal = |recorder: &Recorder| {
        let medium = recorder.medium();
        new_pool(&medium);
        let daemon = start(&medium);
        let mut one = Client::attach(&daemon, user(0));
        one.write_lease(ROOT);
        let (folder, _) = one.create(ROOT, b"gone", DIRECTORY | 0o755);
        let (file, _) = one.create(folder, b"file", FILE | 0o644);
        assert!(one.write(file, 0, &[1; 9_000]));
        one.digest(true).unwrap();
        assert!(one.unlink(folder, b"file", file, 0) && one.unlink(ROOT, b"gone", folder, UNLINK_DIRECTORY));
        recorder.returned(1);
    };
    let judge = |opened: Opened, medium: &Medium, point: &Point| {
        let Some((daemon, _)) = opened else { return Ok(()) };
        let inodes = daemon.usage().inodes;
        if !point.returned.is_empty() && inodes != 1 {
            return Err(format!("{inodes} inodes"));
        }
        let report = area::check::check(medium).map_err(|error| error.to_string())?;
        if report.is_clean() && report.orphans == 0 { Ok(()) } else { Err(format!("{report:?}")) }
    };
    let result = enumerate(Model::Lines, &limits(), removal, recover, judge);
    result.unwrap_or_else(|violation| panic!("{violation}"));
}

/// A log whose lease ended writes on, and then everything dies: no recovery, crashed or not, counts that record, also
/// not one that finds the grant in the tree and its end nowhere any more.
#[test]
fn a_late_record_is_refused_by_every_recovery() {
    let late = |recorder: &Recorder| {
        let medium = recorder.medium();
        new_pool(&medium);
        let daemon = start(&medium);
        let mut one = Client::attach_as(&daemon, user(0), 1);
        let mut two = Client::attach_as(&daemon, user(0), 2);
        two.write_lease(ROOT);
        let (file, _) = two.create(ROOT, b"file", FILE | 0o644);
        one.walk("file").unwrap();
        one.write_lease(file);
        assert!(one.write(file, 0, b"one"));
        // So that a commit contains the grant.
        one.digest(true).unwrap();
        one.write_lease(ROOT);
        one.digest(true).unwrap();
        // It sees what the first one wrote; its stamps do not lie over it.
        two.write_lease(file);
        assert_eq!(two.read(file, 0, 9).unwrap(), b"one");
        recorder.returned(1);
        assert!(one.write(file, 0, b"late"));
    };
    let judge = |opened: Opened, medium: &Medium, point: &Point| {
        let Some((daemon, _)) = opened else { return Ok(()) };
        let client = Client::attach_as(&daemon, user(0), 3);
        let found = client.walk("file").ok().map(|file| client.read(file.inode, 0, 9).unwrap());
        let found = found.unwrap_or_default();
        let right = if point.returned.is_empty() { &[&b""[..], b"one"][..] } else { &[&b"one"[..]] };
        if !right.contains(&found.as_slice()) {
            return Err(format!("the file holds {found:?}"));
        }
        let report = area::check::check(medium).map_err(|error| error.to_string())?;
        if report.is_clean() { Ok(()) } else { Err(format!("{report:?}")) }
    };
    let few =
        Limits { complete_max: 2, near_max: 0, sampled: 0, recovery_images: 4, recovery_every: 1, seed: 14 };
    let result = enumerate(Model::Lines, &few, late, recover, judge);
    let counts = result.unwrap_or_else(|violation| panic!("{violation}"));
    assert!(counts.recovery_images > 100);
}
