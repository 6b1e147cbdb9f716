//! A process that is nobody's friend: calls, records, shared words and log files as no LibFS makes them. Whatever it
//! does, the daemon goes on, the tree stays sound, and nothing that its user may not touch has changed.

use crate::client::{Client, DIRECTORY, FILE, ROOM, ROOT, cookie, fresh, new_pool, open, user};
use format::call::{CallKind, EntriesRequest, GrowRequest, LEASE_READ, LEASE_WRITE, Status};
use format::record::{Kind, UNLINK_OPEN};
use format::{InodeNumber, Sequence};
use ipc::sync::Ordering;
use pmem::{Medium, Recorder};
use proptest::prelude::*;
use sharedfs::Daemon;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use zerocopy::IntoBytes;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;

/// A tree of Alice's: `/public` (all users may list it), `/public/file` (0644), `/public/private` (0700) with `secret`
/// (0666) in it; and `/common`, where all users may make names.
struct Stage {
    recorder: Recorder,
    daemon: Arc<Daemon>,
    file: InodeNumber,
    private: InodeNumber,
    secret: InodeNumber,
    common: InodeNumber,
}

const SECRET: &[u8] = b"nobody else's";

fn stage() -> Stage {
    let (recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let made = |client: &mut Client, parent, name: &[u8], mode, uid| {
        let inode = client.new_inode();
        assert!(client.create_as(inode, parent, name, mode, uid));
        inode
    };
    let public = made(&mut root, ROOT, b"public", DIRECTORY | 0o755, ALICE);
    let file = made(&mut root, public, b"file", FILE | 0o644, ALICE);
    let private = made(&mut root, public, b"private", DIRECTORY | 0o700, ALICE);
    let secret = made(&mut root, private, b"secret", FILE | 0o666, ALICE);
    let common = made(&mut root, ROOT, b"common", DIRECTORY | 0o777, 0);
    assert!(root.write(file, 0, b"public") && root.write(secret, 0, SECRET));
    daemon.end(root.session);
    Stage { recorder, daemon, file, private, secret, common }
}

impl Stage {
    /// Conditions that must hold whatever Bob did.
    fn check(&self) {
        let alice = Client::attach(&self.daemon, user(ALICE));
        let file = alice.walk("public/file").unwrap();
        assert_eq!((file.inode, file.item.uid.get(), file.item.mode.get()), (self.file, ALICE, FILE | 0o644));
        assert_eq!(alice.read(self.file, 0, 100).unwrap(), b"public");
        let secret = alice.walk("public/private/secret").unwrap();
        assert_eq!((secret.inode, secret.item.links.get()), (self.secret, 1));
        assert_eq!(alice.read(self.secret, 0, 100).unwrap(), SECRET);
        let private = alice.walk("public/private").unwrap();
        assert_eq!((private.inode, private.item.mode.get()), (self.private, DIRECTORY | 0o700));
        self.daemon.end(alice.session);
        let report = area::check::check(&self.recorder.medium()).unwrap();
        assert!(report.is_clean(), "{report:?}");
    }

    fn bob(&self) -> Client {
        Client::attach(&self.daemon, user(BOB))
    }

    /// Checks that Bob's record is refused: the session ends, and nothing has changed.
    fn refused(&self, act: impl FnOnce(&mut Client)) {
        let mut bob = self.bob();
        bob.walk("public/file").unwrap();
        bob.walk("common").unwrap();
        act(&mut bob);
        assert_eq!(bob.digest(true), Err(Status::Sealed));
        assert_eq!(self.daemon.terminations().last().unwrap().session, bob.session);
        self.check();
    }
}

#[test]
fn records_without_right_end_their_session() {
    let stage = stage();
    let (file, secret, private, common) = (stage.file, stage.secret, stage.private, stage.common);
    stage.refused(|bob| {
        bob.write(file, 0, b"no lease");
    });
    stage.refused(|bob| {
        bob.write_lease(file);
        bob.write(file, 0, b"a lease is no permission");
    });
    stage.refused(|bob| {
        bob.write_lease(file);
        bob.set_mode(file, 0o777);
    });
    stage.refused(|bob| {
        bob.write(secret, 0, b"by number alone");
    });
    stage.refused(|bob| {
        bob.create(private, b"new", FILE | 0o644);
    });
    stage.refused(|bob| {
        bob.write_lease(common);
        bob.create_as(secret, common, b"mine", FILE | 0o644, BOB);
    });
    stage.refused(|bob| {
        bob.write_lease(common);
        let inode = bob.new_inode();
        bob.create_as(inode, common, b"for alice", FILE | 0o4755, ALICE);
    });
    stage.refused(|bob| {
        bob.write_lease(common);
        bob.rename(secret, (private, b"secret"), (common, b"taken"), InodeNumber::NONE);
    });
    stage.refused(|bob| {
        bob.write_lease(common);
        let inode = bob.new_inode();
        let mut header = bob.header(Kind::Create, inode);
        header.parent = common;
        header.extra.set(cookie(b"another name"));
        let body = [0u8; 24];
        bob.append(header, &[&body, b"name"]);
    });
}

#[test]
fn a_log_beyond_the_largest_size_is_refused() {
    let stage = stage();
    let bob = stage.bob();
    for bytes in [(256 << 10) + 1, 1 << 63, u64::MAX - 4095, u64::MAX] {
        let request = GrowRequest { bytes: bytes.into() };
        assert_eq!(bob.call(CallKind::GrowLog, &[request.as_bytes()]), Err(Status::Invalid), "{bytes}");
    }
    stage.check();
}

#[test]
fn a_number_that_was_not_walked_to_opens_nothing() {
    let stage = stage();
    let bob = stage.bob();
    assert_eq!(bob.lease(&[(stage.secret, LEASE_READ)]).map(|_| ()), Err(Status::Invalid));
    assert_eq!(bob.open(stage.secret, 1, LEASE_READ).map(|_| ()), Err(Status::Invalid));
    assert_eq!(bob.read(stage.secret, 0, 100), Err(Status::Invalid));
    assert_eq!(bob.entries(stage.private).map(|_| ()), Err(Status::Invalid));
    assert_eq!(bob.walk_from(stage.private, &[b"secret"], (1, 1)).map(|_| ()), Err(Status::Invalid));
    // Walking up to it is allowed, into it is not.
    assert_eq!(bob.walk("public/private").unwrap().inode, stage.private);
    assert_eq!(bob.walk("public/private/secret").unwrap_err(), Status::Access);
    assert_eq!(bob.entries(stage.private).map(|_| ()), Err(Status::Access));
    assert_eq!(bob.open(stage.file_of(&bob), 2, LEASE_WRITE).map(|_| ()), Err(Status::Access));
    stage.check();
}

impl Stage {
    fn file_of(&self, client: &Client) -> InodeNumber {
        client.walk("public/file").unwrap().inode
    }
}

#[test]
fn who_may_add_names_but_not_list_them_sees_only_those_of_a_hash_that_it_knows() {
    let (_recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let drop_box = root.new_inode();
    assert!(root.create_as(drop_box, ROOT, b"box", DIRECTORY | 0o733, 0));
    for name in [&b"one"[..], b"two", b"three"] {
        root.create(drop_box, name, FILE | 0o644);
    }
    let bob = Client::attach(&daemon, user(BOB));
    bob.walk("box").unwrap();
    assert_eq!(bob.entries(drop_box), Err(Status::Access), "an empty answer would say that nothing is there");
    let from = cookie(b"two").into();
    let request = EntriesRequest { inode: drop_box, from, same_hash: 1.into(), reserved: 0.into() };
    let seen = bob.call(CallKind::Entries, &[request.as_bytes()]).unwrap();
    assert!(seen.ends_with(b"two"));
    assert!(!String::from_utf8_lossy(&seen).contains("one"));
}

#[test]
fn unlinking_what_is_anothers_gives_no_right_to_write_it() {
    let (_recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let (common, file) = (root.new_inode(), root.new_inode());
    assert!(root.create_as(common, ROOT, b"common", DIRECTORY | 0o777, 0));
    assert!(root.create_as(file, common, b"file", FILE | 0o644, ALICE) && root.write(file, 0, b"alice's"));
    let alice = Client::attach(&daemon, user(ALICE));
    alice.walk("common/file").unwrap();
    alice.open(file, 3, LEASE_READ).unwrap();
    let mut bob = Client::attach(&daemon, user(BOB));
    bob.walk("common/file").unwrap();
    // The name is in a folder where Bob may remove it; the file belongs to another user.
    bob.lease(&[(common, LEASE_WRITE), (file, LEASE_WRITE)]).unwrap();
    assert!(bob.unlink(common, b"file", file, UNLINK_OPEN));
    bob.digest(true).unwrap();
    assert!(bob.write(file, 0, b"bob's"));
    assert_eq!(bob.digest(true), Err(Status::Sealed));
    alice.read_lease(file);
    assert_eq!(alice.read(file, 0, 100).unwrap(), b"alice's");
}

#[test]
fn commit_words_that_lie_end_their_session_at_what_was_there() {
    for lie in [5, 1 << 40, (1 << 63) - 1, 1 << 63, u64::MAX] {
        let stage = stage();
        let mut bob = stage.bob();
        bob.walk("common").unwrap();
        bob.write_lease(stage.common);
        let (_, made) = bob.create(stage.common, b"counts", FILE | 0o644);
        assert!(made);
        bob.pages.commit().begin(Sequence::new(lie));
        assert_eq!(bob.digest(true), Err(Status::Sealed));
        stage.check();
        let alice = Client::attach(&stage.daemon, user(ALICE));
        assert_eq!(alice.walk("common/counts").unwrap().item.uid.get(), BOB);
    }
}

#[test]
fn a_word_that_is_set_back_loses_only_its_owners_records() {
    let stage = stage();
    let mut bob = stage.bob();
    bob.walk("common").unwrap();
    bob.write_lease(stage.common);
    bob.create(stage.common, b"one", FILE | 0o644);
    bob.create(stage.common, b"two", FILE | 0o644);
    bob.digest(true).unwrap();
    bob.pages.commit().begin(Sequence::new(0));
    // Taken away, although its holder says that nothing was written.
    let alice = Client::attach(&stage.daemon, user(ALICE));
    assert!(alice.walk("common/two").is_ok());
    stage.daemon.end(bob.session);
    stage.check();
}

#[test]
fn a_truncated_log_ends_its_session_at_what_is_left() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    new_pool(&medium);
    let daemon = open(&medium).0;
    let mut bob = Client::attach(&daemon, user(0));
    bob.write_lease(ROOT);
    let (_, made) = bob.create(ROOT, b"kept", FILE | 0o644);
    assert!(made && bob.create(ROOT, b"cut", FILE | 0o644).1);
    let name = sharedfs::log_file(bob.attached.welcome.log, bob.attached.welcome.incarnation);
    let file = std::fs::File::options().write(true).open(folder.path().join(name)).unwrap();
    file.set_len(sharedfs::RING_START + 128).unwrap();
    assert_eq!(bob.digest(true), Err(Status::Sealed));
    let other = Client::attach(&daemon, user(0));
    assert!(other.walk("kept").is_ok());
    assert_eq!(other.walk("cut").unwrap_err(), Status::NotFound);
}

/// The kernel ends a program that stores to a file without space: a log has space for what its program may use.
#[test]
fn a_log_has_space_for_what_was_granted() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap();
    new_pool(&medium);
    let daemon = open(&medium).0;
    let mut bob = Client::attach(&daemon, user(0));
    let name = sharedfs::log_file(bob.attached.welcome.log, bob.attached.welcome.incarnation);
    let space = || MetadataExt::blocks(&std::fs::metadata(folder.path().join(&name)).unwrap()) * 512;
    let welcome = bob.attached.welcome;
    assert_eq!(space(), welcome.log_bytes.get());
    bob.grow_log(128 << 10);
    assert_eq!(space(), 128 << 10);
    // Less than there is changes nothing.
    let request = GrowRequest { bytes: 4096.into() };
    assert!(bob.call(CallKind::GrowLog, &[request.as_bytes()]).is_ok());
    bob.grow_log(welcome.log_bytes_max.get());
    assert_eq!(space(), welcome.log_bytes_max.get());
}

#[test]
fn a_table_of_open_inodes_full_of_foreign_numbers_keeps_nothing() {
    let stage = stage();
    let bob = stage.bob();
    for (index, word) in bob.pages.open().iter().enumerate() {
        word.store(if index % 2 == 0 { stage.secret.get() } else { index as u64 }, Ordering::Release);
    }
    let mut alice = Client::attach(&stage.daemon, user(ALICE));
    alice.walk("public/private/secret").unwrap();
    alice.lease(&[(stage.private, LEASE_WRITE), (stage.secret, LEASE_WRITE)]).unwrap();
    assert!(alice.unlink(stage.private, b"secret", stage.secret, 0));
    let before = stage.daemon.usage().inodes;
    alice.digest(true).unwrap();
    stage.daemon.tidy();
    assert_eq!(stage.daemon.usage().inodes, before - 1);
}

#[test]
fn more_room_than_was_promised_is_taken_from_nobody() {
    let stage = stage();
    let mut bob = stage.bob();
    bob.walk("common").unwrap();
    bob.write_lease(stage.common);
    let (file, _) = bob.create(stage.common, b"huge", FILE | 0o644);
    // Far beyond what there is.
    let mut header = bob.header(Kind::Allocate, file);
    header.extra.set(i64::MAX as u64);
    bob.append(header, &[]);
    assert_eq!(bob.digest(true), Err(Status::Sealed));
    stage.check();
    let mut carol = Client::attach(&stage.daemon, user(1002));
    carol.walk("common").unwrap();
    carol.write_lease(stage.common);
    let (file, _) = carol.create(stage.common, b"mine", FILE | 0o644);
    assert!(carol.write(file, 0, &[1; 40_000]));
    carol.digest(true).unwrap();
}

/// A record of Bob's, and what a mutation makes of it.
#[derive(Clone, Debug)]
struct Mutation {
    kind: u8,
    inode: u64,
    parent: u64,
    offset: u64,
    extra: u64,
    flags: u8,
    payload: Vec<u8>,
    leases: Vec<(u64, bool)>,
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..8, 4 => 1002u64..1010, 2 => 2002u64..2010, 1 => any::<u64>()]
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let body = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        proptest::collection::vec(prop_oneof![Just(0u8), Just(1), Just(b'a')], 24..90),
    ];
    let fields = (2u8..12, number(), number(), prop_oneof![0u64..9000, any::<u64>()], any::<u64>(), 0u8..8);
    (fields, body, proptest::collection::vec((number(), any::<bool>()), 0..4)).prop_map(
        |((kind, inode, parent, offset, extra, flags), payload, leases)| Mutation {
            kind,
            inode,
            parent,
            offset,
            extra,
            flags,
            payload,
            leases,
        },
    )
}

/// Cases of each property: a slice, or what HEARTH_PROVE=1 asks for.
fn cases(few: u32) -> ProptestConfig {
    let proving = std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1");
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if proving { few * 50 } else { few })
    }
}

proptest! {
    #![proptest_config(cases(96))]

    /// Any records with right checksums, under any leases that can be had.
    #[test]
    fn any_records_are_survived(mutations in proptest::collection::vec(mutation(), 1..12)) {
        let stage = stage();
        let mut bob = stage.bob();
        bob.walk("public/private").unwrap();
        bob.walk("public/file").unwrap();
        bob.walk("common").unwrap();
        for mutation in mutations {
            for (inode, write) in &mutation.leases {
                let _ = bob.lease(&[(InodeNumber::new(*inode), if *write { LEASE_WRITE } else { LEASE_READ })]);
            }
            let mut header = bob.header(Kind::Write, InodeNumber::new(mutation.inode));
            header.envelope.kind = mutation.kind;
            header.envelope.flags = mutation.flags;
            header.parent = InodeNumber::new(mutation.parent);
            header.offset.set(mutation.offset);
            header.extra.set(mutation.extra);
            if !bob.append(header, &[&mutation.payload]) {
                break;
            }
        }
        let _ = bob.digest(true);
        stage.daemon.end(bob.session);
        stage.check();
    }

    /// Any bytes as a call of any kind.
    #[test]
    fn any_calls_are_survived(
        calls in proptest::collection::vec((0u16..26, proptest::collection::vec(any::<u8>(), 0..80), 0usize..3000), 1..40),
        numbers in proptest::collection::vec(number(), 1..8),
    ) {
        let stage = stage();
        let bob = stage.bob();
        bob.walk("public/private").unwrap();
        for (kind, mut body, room) in calls {
            // Half of them name inodes that are there.
            if let (Some(number), Some(start)) = (numbers.get(usize::from(kind) % 8), body.get_mut(..8)) {
                start.copy_from_slice(&number.to_le_bytes());
            }
            let (_, answer) = stage.daemon.call(bob.session, kind, &body, room);
            prop_assert!(answer.len() <= room);
            let text = String::from_utf8_lossy(&answer).into_owned();
            prop_assert!(!text.contains(std::str::from_utf8(SECRET).unwrap()));
        }
        prop_assert!(stage.daemon.call(bob.session, CallKind::Statfs as u16, &[], ROOM).0 != Status::Media);
        stage.check();
    }

    /// Any bytes in its shared words and its log, at any time.
    #[test]
    fn any_shared_memory_is_survived(
        words in proptest::collection::vec((0usize..600, any::<u64>()), 1..20),
        log in proptest::collection::vec((0u64..8000, proptest::collection::vec(any::<u8>(), 1..64)), 0..8),
    ) {
        let stage = stage();
        let mut bob = stage.bob();
        bob.walk("common").unwrap();
        bob.write_lease(stage.common);
        for index in 0..10u8 {
            let (file, _) = bob.create(stage.common, &[b'a' + index], FILE | 0o644);
            bob.write(file, 0, &[index; 300]);
        }
        for (offset, bytes) in log {
            bob.attached.log.write(sharedfs::RING_START + offset, &bytes);
        }
        for (index, value) in words {
            bob.attached.session.copy_in(index * 8, &value.to_le_bytes()).unwrap();
        }
        let alice = Client::attach(&stage.daemon, user(ALICE));
        let _ = alice.walk("common/a");
        stage.daemon.end(bob.session);
        stage.check();
    }
}
