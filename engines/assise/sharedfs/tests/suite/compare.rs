//! A head compares its tree with that of its copy.

use crate::client::{Client, FILE, ROOT, user};
use crate::pair::{COPY, Pair, config, sync};
use crate::pair_threads::{Nodes, begin_program, overwrite, spawn, wait_for};
use crate::still::drive_by;
use format::ChainNumber;
use format::mirror::{MirrorHead, MirrorHello, MirrorKind, RULES};
use ipc::{Host, SystemHost};
use pmem::Recorder;
use sharedfs::{Compared, Error, Unequal};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use transport::Event;
use zerocopy::IntoBytes;

/// Takes the connection of one comparison, beside the one that is followed.
fn compare(nodes: &Nodes) -> Result<Compared, Error> {
    let (standby, listener) = (nodes.follower.standby.clone(), nodes.follower.listener.clone());
    let serve = spawn(move || {
        let connection = listener.accept(Some(SystemHost.now().after(crate::pair_threads::LIMIT))).unwrap();
        standby.follow(&connection)
    });
    let told = AtomicU64::new(0);
    let compared = nodes.daemon.compare(nodes.connect(), &mut |done, total| {
        assert!(done <= total && told.swap(done, Ordering::Relaxed) <= done);
    });
    let served = serve.end();
    assert_eq!(served.is_ok(), compared.is_ok(), "{served:?}");
    if let Ok(compared) = &compared {
        assert_eq!(told.load(Ordering::Relaxed), compared.inodes, "all of them were told");
    }
    compared
}

/// A pattern of which each block is another.
fn pattern(blocks: u64) -> Vec<u8> {
    (0..blocks).flat_map(|block| [block as u8 + 1; 4096]).collect()
}

#[test]
fn two_copies_are_equal_while_programs_write() {
    // The copy is behind: the entry as of which they are compared is one that it does not have yet.
    let nodes = Nodes::slowed(config, Duration::from_millis(5));
    let ending = Arc::new(AtomicBool::new(false));
    let programs: Vec<_> = (1..=2).map(|pid| begin_program(&nodes.daemon, pid)).collect();
    let begin = |(client, file)| {
        let ending = ending.clone();
        spawn(move || overwrite(client, file, &ending))
    };
    let programs: Vec<_> = programs.into_iter().map(begin).collect();
    let mut last = format::Sequence::default();
    for _ in 0..40 {
        wait_for("programs write", || nodes.follower.standby.state().executed > last);
        let compared = compare(&nodes).unwrap();
        assert_eq!((compared.unequal, &compared.differences[..]), (0, &[][..]));
        assert!(compared.inodes >= 3 && compared.entry > last);
        last = compared.entry;
    }
    ending.store(true, Ordering::Release);
    let (copies, failure) = (|| nodes.daemon.copies(), || nodes.follower.standby.failure());
    for program in programs {
        let rounds = program.try_end();
        assert!(rounds.is_some_and(|rounds| rounds > 0), "a program hangs: {:?}, {:?}", copies(), failure());
    }
    assert!(copies()[0].level && failure().is_none());
}

#[test]
fn a_block_that_is_damaged_at_the_copy_is_told_with_its_path() {
    let nodes = Nodes::new(config);
    let mut client = Client::attach_as(&nodes.daemon, user(0), 1);
    client.write_lease(ROOT);
    let (directory, _) = client.create(ROOT, b"folder", 0o040_755);
    client.write_lease(directory);
    let (file, _) = client.create(directory, b"file", FILE | 0o644);
    assert!(client.write(file, 0, &pattern(8)));
    sync(&client, &[(file, 1)]).unwrap();
    // A file is compared at once, though it is in no tree before.
    for number in 0..20 {
        let name = format!("more-{number}");
        client.write_lease(directory);
        client.create(directory, name.as_bytes(), FILE | 0o644);
        let compared = compare(&nodes).unwrap();
        assert_eq!((compared.inodes, compared.unequal), (4 + number, 0));
    }
    let folder = nodes.folder.path().join(format!("n{COPY}"));
    let is_segment =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("seg"));
    let mut damaged = 0;
    for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_segment) {
        let bytes = std::fs::read(&path).unwrap();
        let found = bytes.chunks(4096).position(|block| block == [3; 4096]);
        if let Some(block) = found {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &[77], block as u64 * 4096 + 9).unwrap();
            damaged += 1;
        }
    }
    assert_eq!(damaged, 1, "the block is found in {folder:?}");
    let compared = compare(&nodes).unwrap();
    let [difference] = &compared.differences[..] else { panic!("{compared:?}") };
    assert_eq!((difference.inode, difference.path.clone()), (file, Some(PathBuf::from("folder/file"))));
    assert_eq!(difference.unequal, [Unequal::Contents, Unequal::DamagedAtCopy]);
    assert_eq!(compared.unequal, 1);
}

/// A copy that was asked to stop, and hears nothing more, executes the ledger again after a while, and a copy that is compared
/// already ends that for the later comparison.
#[test]
fn a_head_that_asks_and_goes_away_holds_up_nothing() {
    let nodes = Nodes::new(config);
    let (standby, listener) = (nodes.follower.standby.clone(), nodes.follower.listener.clone());
    let serve = spawn(move || {
        let connection = listener.accept(Some(SystemHost.now().after(crate::pair_threads::LIMIT))).unwrap();
        standby.follow(&connection)
    });
    let ledger = nodes.folder.path().join(format!("n{COPY}/ledger"));
    let terms = (1, std::fs::metadata(ledger).unwrap().len());
    let until = SystemHost.now().after(Duration::from_secs(5));
    let (asked, held) = mirror::Comparison::ask(nodes.connect(), terms, until).unwrap();
    let (mut client, file) = begin_program(&nodes.daemon, 1);
    assert!(client.write(file, 0, &pattern(4)));
    sync(&client, &[(file, 1)]).unwrap();
    assert_eq!(nodes.follower.standby.state().executed, held);
    // The other one is asked meanwhile, which ends the first.
    assert_eq!(compare(&nodes).unwrap().unequal, 0);
    assert!(serve.end().is_err());
    drop(asked);
    assert!(nodes.follower.standby.state().executed > held);
}

/// A head that asks for a comparison and dies, when the copy has synced entries that it has not executed.
#[test]
fn a_copy_whose_head_is_gone_executes_again() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let client = pair.attach();
    client.write_lease(ROOT);
    pair.quiesce();
    pair.follows.borrow_mut().paused = u32::MAX;
    let other = pair.attach();
    sync(&other, &[(ROOT, 1)]).unwrap();
    let standby = pair.follows.borrow().standby.clone();
    let [asks, accepted] = pair.connect_beside();
    let head = MirrorHead { kind: MirrorKind::Compare as u8, flags: 0, count: 0.into() };
    let hello = MirrorHello {
        version: 1.into(),
        ledger_bytes: recorders[1].medium().open("ledger").unwrap().bytes().into(),
        chain: ChainNumber::ONLY,
        rules: RULES.into(),
    };
    asks.send(&[head.as_bytes(), hello.as_bytes()].concat(), None).unwrap();
    // The head dies when the copy waits for it.
    let mut head = Some(asks.clone());
    drive_by(Box::new(move || {
        head.take().is_some_and(|head| {
            head.close();
            true
        })
    }));
    let ended = standby.follow(&accepted).unwrap_err();
    assert!(matches!(ended, Error::Copy(_, mirror::Error::Connection(_))), "{ended}");
    assert!(matches!(asks.take(None), Ok(Event::Message(held)) if held[0] == MirrorKind::Held as u8));
    let before = standby.state();
    assert!(before.ledger > before.executed);
    while standby.execute().unwrap() {}
    assert_eq!(standby.state().executed, before.ledger);
}
