//! Logs of a hostile user: frames with the right checksums whose records lie in every way, between honest ones.
//!
//! The oracle does not know how the daemon decides: it compares the whole tree before and after each session, and asks
//! `vfs::access` whether a process of that user could have made each change by calls. Inodes that the user could not
//! even reach are bit for bit as before, and the tree is sound.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, user};
use crate::operations::{encoded, header_of, tree_of};
use crate::rounds::rounds;
use crate::support::{AreaState, Draws, Inode, Op, Step, allocate, at, punch, step};
use format::InodeNumber;
use format::call::{LEASE_READ, LEASE_WRITE};
use format::record::{FileType, SET_ALL};
use pmem::Recorder;
use sharedfs::Daemon;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use vfs::Caller;
use vfs::access::{self, EXECUTE, READ, WRITE};
use vfs::engine::Attributes;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const CAROL: u32 = 1002;
/// A group that Bob belongs to.
const SHARED: u32 = 500;

fn bob() -> Caller {
    Caller { uid: BOB, gid: BOB, groups: vec![SHARED] }
}

/// A tree of several users, of every kind of permission.
struct Stage {
    recorder: Recorder,
    daemon: Arc<Daemon>,
}

impl Stage {
    fn new(draws: &mut Draws) -> Self {
        let (recorder, daemon) = fresh();
        let mut root = Client::attach(&daemon, user(0));
        root.write_lease(ROOT);
        let mut directories = vec![ROOT];
        for index in 0..14 {
            let parent = *draws.of(&directories);
            let owner = *draws.of(&[ALICE, ALICE, BOB, CAROL, 0]);
            let inode = root.new_inode();
            let name = format!("n{index}");
            if index < 6 {
                let mode = *draws.of(&[0o700, 0o755, 0o777, 0o1777, 0o2777, 0o711, 0o733, 0o750, 0o770]);
                assert!(root.create_as(inode, parent, name.as_bytes(), DIRECTORY | mode, owner));
                directories.push(inode);
            } else {
                let modes = [0o600, 0o644, 0o666, 0o640, 0o660, 0o4755, 0o2755, 0o6777, 0o000, 0o622];
                assert!(root.create_as(inode, parent, name.as_bytes(), FILE | draws.of(&modes), owner));
                assert!(root.write(inode, draws.below(5000), name.repeat(20).as_bytes()));
            }
            if draws.chance(30) {
                let group = Op::SetAttr { mask: 4, mode: 0, uid: 0, gid: SHARED, atime_ns: 0, mtime_ns: 0 };
                assert!(append(&mut root, &step(inode.get(), group)));
            }
            let value = Op::SetXattr { name: b"user.kept".to_vec(), value: name.clone().into_bytes() };
            assert!(append(&mut root, &step(inode.get(), value)));
        }
        root.digest(true).unwrap();
        daemon.end(root.session);
        Self { recorder, daemon }
    }

    fn tree(&self) -> AreaState {
        tree_of(&self.recorder.medium(), crate::client::tiny().area).unwrap()
    }
}

fn append(client: &mut Client, step: &Step) -> bool {
    client.time_ns += 1;
    crate::operations::append(client, step, client.time_ns)
}

/// Every name of a tree: directory, name, inode.
fn names(state: &AreaState) -> Vec<(u64, Vec<u8>, u64)> {
    let of = |(number, inode): (&u64, &Inode)| {
        let number = *number;
        let entries = inode.entries.iter().map(move |(name, entry)| (number, name.clone(), entry.0));
        entries.collect::<Vec<_>>()
    };
    state.iter().flat_map(of).collect()
}

/// One session of Bob's.
struct Session<'a> {
    client: Client,
    draws: &'a mut Draws,
    state: &'a AreaState,
    names: Vec<(u64, Vec<u8>, u64)>,
    made: Vec<u64>,
}

impl Session<'_> {
    /// Meets what there is, opens some of it, and reads without right.
    fn look_around(&mut self) {
        for (_, path) in paths(self.state) {
            let _ = self.client.walk(&path);
        }
        for number in self.state.keys() {
            if self.draws.chance(20) {
                let _ = self.client.open(InodeNumber::new(*number), self.draws.below(4) as u8, LEASE_READ);
            }
        }
    }

    fn inode(&mut self) -> u64 {
        if !self.made.is_empty() && self.draws.chance(25) {
            return *self.draws.of(&self.made);
        }
        if self.draws.chance(4) {
            return *self.draws.of(&[0, 1, u64::MAX, u64::MAX - 1, self.client.next_inode, 1 << 40]);
        }
        let numbers: Vec<u64> = self.state.keys().copied().collect();
        *self.draws.of(&numbers)
    }

    fn name(&mut self) -> (u64, Vec<u8>, u64) {
        if self.names.is_empty() || self.draws.chance(10) {
            return (self.inode(), format!("b{}", self.draws.below(6)).into_bytes(), self.inode());
        }
        let index = self.draws.below(self.names.len() as u64) as usize;
        self.names[index].clone()
    }

    fn new_place(&mut self) -> (u64, Vec<u8>) {
        (self.inode(), format!("b{}", self.draws.below(40)).into_bytes())
    }

    /// An operation that some process could ask for, rights apart.
    fn operation(&mut self) -> Step {
        let inode = self.inode();
        let offset = self.draws.below(9000);
        match self.draws.below(12) {
            10 => {
                let inode = if self.draws.chance(90) { self.client.new_inode().get() } else { inode };
                self.made.push(inode);
                step(inode, Op::CreateUnnamed { parent: self.inode(), linkable: self.draws.chance(70) })
            }
            0 => step(inode, Op::Write { offset, bytes: vec![b'B'; 1 + self.draws.below(600) as usize] }),
            1 => step(inode, Op::Truncate { size: offset }),
            2 if self.draws.chance(50) => punch(inode, offset, 1 + self.draws.below(9000)),
            2 => allocate(inode, offset, 1 + self.draws.below(9000), self.draws.chance(50)),
            3 | 4 => self.create(),
            5 => {
                let (parent, name) = self.new_place();
                step(inode, Op::Link { at: at(parent, name) })
            }
            6 => {
                let (parent, name, inode) = self.name();
                let directory = self.state.get(&inode).is_some_and(is_directory);
                let keep_open = self.draws.chance(30);
                step(inode, Op::Unlink { at: at(parent, name), directory, keep_open })
            }
            7 => {
                let (from, old_name, inode) = self.name();
                let exchange = self.draws.chance(30);
                let (to, new_name, replaced) = if exchange || self.draws.chance(40) {
                    self.name()
                } else {
                    let (to, name) = self.new_place();
                    (to, name, 0)
                };
                let (old, new) = (at(from, old_name), at(to, new_name));
                let keep_open = self.draws.chance(30);
                let whiteout = match self.draws.below(10) {
                    0 | 1 => self.client.new_inode().get(),
                    2 => self.inode(),
                    _ => 0,
                };
                step(inode, Op::Rename { old, new, replaced, exchange, keep_open, whiteout })
            }
            8 => {
                let mask = self.draws.below(u64::from(SET_ALL) + 1) as u32;
                let (uid, gid) = (*self.draws.of(&[BOB, ALICE, 0]), *self.draws.of(&[BOB, SHARED, ALICE, 0]));
                let mode = self.draws.below(0o10_000) as u32;
                let now = self.client.time_ns + 1;
                let time = if self.draws.chance(50) { now } else { 7 };
                step(inode, Op::SetAttr { mask, mode, uid, gid, atime_ns: time, mtime_ns: time })
            }
            9 => {
                let names: [&[u8]; 5] = [
                    b"user.kept",
                    b"user.b",
                    b"trusted.b",
                    b"security.capability",
                    b"system.posix_acl_access",
                ];
                let name = self.draws.of(&names).to_vec();
                step(inode, Op::SetXattr { name, value: vec![b'B'; self.draws.below(5000) as usize] })
            }
            _ => step(inode, Op::RemoveXattr { name: b"user.kept".to_vec() }),
        }
    }

    fn create(&mut self) -> Step {
        let (parent, name) = self.new_place();
        let types = [
            FileType::Regular,
            FileType::Regular,
            FileType::Directory,
            FileType::Symlink,
            FileType::Fifo,
            FileType::BlockDevice,
            FileType::CharacterDevice,
        ];
        let file_type = *self.draws.of(&types);
        let target = if file_type == FileType::Symlink { b"../n0".to_vec() } else { Vec::new() };
        let inode = if self.draws.chance(90) { self.client.new_inode().get() } else { self.inode() };
        self.made.push(inode);
        step(inode, Op::Create { at: at(parent, name), file_type, target })
    }

    /// Leases on all that the step names, as far as they can be had.
    fn lease(&mut self, step: &Step) {
        let mut units = vec![step.inode];
        match &step.op {
            Op::Create { at, .. } | Op::Link { at } | Op::Unlink { at, .. } => units.push(at.parent),
            Op::CreateUnnamed { parent, .. } => units.push(*parent),
            Op::Rename { old, new, replaced, .. } => {
                units.extend([old.parent, new.parent, *replaced, u64::MAX]);
            }
            _ => {}
        }
        for unit in units {
            let _ = self.client.lease(&[(InodeNumber::new(unit), LEASE_WRITE)]);
        }
    }

    /// Appends a record: as it should be, or with lies in it. False if the log is sealed.
    fn record(&mut self) -> bool {
        let step = self.operation();
        if self.draws.chance(93) {
            self.lease(&step);
        }
        self.client.time_ns += 1;
        let (kind, flags, mut parts) = encoded(&step);
        let mut header = header_of(&step, kind, flags, self.client.time_ns);
        if self.draws.chance(90) {
            self.own_ids(&step, &mut parts);
        }
        if self.draws.chance(15) {
            let lie = match self.draws.below(3) {
                0 => self.draws.below(5000),
                1 => *self.draws.of(&[0, 1, u64::MAX, i64::MAX as u64, 1 << 32]),
                _ => self.inode(),
            };
            match self.draws.below(9) {
                0 => header.envelope.kind = lie as u8,
                1 => header.envelope.flags = lie as u8,
                2 => header.inode = InodeNumber::new(lie),
                3 => header.parent = InodeNumber::new(lie),
                4 => header.offset.set(lie),
                5 => header.extra.set(lie),
                6 => header.time_ns.set(lie as i64),
                _ => self.lie_in(&mut parts, lie),
            }
        }
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        self.client.append(header, &parts)
    }

    fn lie_in(&mut self, parts: &mut [Vec<u8>], lie: u64) {
        let Some(part) = parts.first_mut().filter(|part| !part.is_empty()) else { return };
        let place = self.draws.below(part.len() as u64) as usize;
        match self.draws.below(3) {
            0 => part[place] = lie as u8,
            1 => part.truncate(place),
            _ => part.iter_mut().skip(place).zip(lie.to_le_bytes()).for_each(|(byte, new)| *byte = new),
        }
    }

    /// Makes a new inode one that Bob could make: with Bob's ids, or those that its directory gives.
    fn own_ids(&mut self, step: &Step, parts: &mut [Vec<u8>]) {
        let (parent, file_type) = match &step.op {
            Op::Create { at, file_type, .. } => (at.parent, *file_type),
            Op::CreateUnnamed { parent, .. } => (*parent, FileType::Regular),
            Op::Rename { old, whiteout: 1.., .. } => (old.parent, FileType::CharacterDevice),
            _ => return,
        };
        let Some(directory) = self.state.get(&parent) else { return };
        let asked = *self.draws.of(&[0o644, 0o600, 0o777, 0o6755]);
        let directory = attributes(parent, directory);
        let (gid, mode) = access::inherit(&bob(), &directory, file_type, (asked, 0));
        if let (Op::Rename { .. }, Some(body)) = (&step.op, parts.get_mut(3)) {
            body[8..12].copy_from_slice(&BOB.to_le_bytes());
            body[12..16].copy_from_slice(&gid.to_le_bytes());
            return;
        }
        let body = &mut parts[0];
        body[..4].copy_from_slice(&(file_type.mode_bits() | mode).to_le_bytes());
        body[4..8].copy_from_slice(&BOB.to_le_bytes());
        body[8..12].copy_from_slice(&gid.to_le_bytes());
    }
}

/// Directories and files with a path to each.
fn paths(state: &AreaState) -> BTreeMap<u64, String> {
    let mut found = BTreeMap::from([(1, String::new())]);
    let mut left = vec![1];
    while let Some(number) = left.pop() {
        for (name, (inode, ..)) in &state[&number].entries {
            let path = format!("{}/{}", found[&number], String::from_utf8_lossy(name));
            if found.insert(*inode, path).is_none() && is_directory(&state[inode]) {
                left.push(*inode);
            }
        }
    }
    found
}

fn is_directory(inode: &Inode) -> bool {
    FileType::of_mode(inode.mode) == Some(FileType::Directory)
}

/// An inode for people to read, without its contents.
fn brief(inode: &Inode) -> String {
    let Inode { mode, uid, gid, links, size, parent, mtime_ns, ctime_ns, .. } = inode;
    let names: Vec<_> = inode.entries.keys().map(|name| String::from_utf8_lossy(name)).collect();
    format!(
        "{mode:o} of {uid}:{gid}, {links} links, {size} bytes, in {parent}, {mtime_ns} {ctime_ns}, {names:?}"
    )
}

fn attributes(number: u64, inode: &Inode) -> Attributes {
    Attributes {
        inode: InodeNumber::new(number),
        file_type: FileType::of_mode(inode.mode).unwrap(),
        mode: inode.mode & 0o7777,
        uid: inode.uid,
        gid: inode.gid,
        links: inode.links,
        size: inode.size,
        blocks: 0,
        rdev: inode.rdev,
        atime_ns: inode.atime_ns,
        mtime_ns: inode.mtime_ns,
        ctime_ns: inode.ctime_ns,
        btime_ns: inode.btime_ns,
        parent: InodeNumber::new(inode.parent),
    }
}

/// The inodes that a user could have changed.
struct Oracle<'a> {
    before: &'a AreaState,
    after: &'a AreaState,
    caller: Caller,
    /// Inodes to which a path leads that the caller may search; the caller may change the mode of their own inodes.
    reached: BTreeSet<u64>,
}

impl<'a> Oracle<'a> {
    fn new(before: &'a AreaState, after: &'a AreaState, caller: Caller) -> Self {
        let mut oracle = Self { before, after, caller, reached: BTreeSet::from([1]) };
        let mut left = vec![1];
        while let Some(number) = left.pop() {
            if !oracle.may(number, EXECUTE) {
                continue;
            }
            for (inode, ..) in before[&number].entries.values() {
                if oracle.reached.insert(*inode) && is_directory(&before[inode]) {
                    left.push(*inode);
                }
            }
        }
        oracle
    }

    fn owns(&self, number: u64) -> bool {
        self.before[&number].uid == self.caller.uid
    }

    /// Whether the bits allow it, or the caller could set them.
    fn may(&self, number: u64, wanted: u32) -> bool {
        self.owns(number) || access::permits(&self.caller, &attributes(number, &self.before[&number]), wanted)
    }

    fn judge(&self) {
        for (number, old) in self.before {
            match self.after.get(number) {
                Some(new) if new == old => {}
                _ if !self.reached.contains(number) => {
                    panic!(
                        "{number} was out of reach: {} is now {:?}",
                        brief(old),
                        self.after.get(number).map(brief)
                    )
                }
                Some(new) => self.judge_change(*number, old, new),
                None => self.judge_loss(*number),
            }
        }
        for (number, new) in self.after {
            if !self.before.contains_key(number) {
                self.judge_new(*number, new);
            }
        }
    }

    fn judge_change(&self, number: u64, old: &Inode, new: &Inode) {
        let (owns, writes) = (self.owns(number), self.may(number, WRITE));
        let allow = |what: &str, same: bool, allowed: bool| {
            assert!(same || allowed, "{what} of {number}: {} became {}", brief(old), brief(new));
        };
        allow("contents", old.contents == new.contents && old.size == new.size, writes || is_directory(old));
        let only_drops = old.mode & !0o6000 == new.mode & !0o6000 && new.mode & !old.mode == 0;
        allow("mode", old.mode == new.mode, owns || (writes && only_drops));
        let foreign = !self.caller.in_group(new.gid);
        allow("set-group-id", new.mode & !old.mode & 0o2000 == 0, !foreign || is_directory(old));
        allow("owner", old.uid == new.uid, false);
        allow("group", old.gid == new.gid, owns && !foreign);
        allow("type", old.mode >> 12 == new.mode >> 12, false);
        allow("device", old.rdev == new.rdev && old.target == new.target, false);
        allow("birth", old.btime_ns == new.btime_ns, false);
        allow("access time", old.atime_ns == new.atime_ns, writes);
        allow("time of change", old.mtime_ns == new.mtime_ns, writes);
        allow("parent", old.parent == new.parent, writes);
        if old.entries != new.entries {
            allow("names", false, self.may(number, WRITE | EXECUTE));
            self.judge_entries(number, old, new);
        }
        let names: BTreeSet<&Vec<u8>> = old.xattrs.keys().chain(new.xattrs.keys()).collect();
        for name in names.into_iter().filter(|name| old.xattrs.get(*name) != new.xattrs.get(*name)) {
            let sticky = is_directory(old) && old.mode & 0o1000 != 0 && !owns;
            allow("attribute", false, name.starts_with(b"user.") && writes && !sticky);
        }
    }

    /// Names that went, or stand for something else, in a directory that Bob may write.
    fn judge_entries(&self, number: u64, old: &Inode, new: &Inode) {
        let sticky = old.mode & 0o1000 != 0 && !self.owns(number);
        for (name, entry) in &old.entries {
            let kept = new.entries.get(name).is_some_and(|now| now.0 == entry.0);
            assert!(kept || !sticky || self.owns(entry.0), "{name:?} went from the sticky {number}");
        }
        for (name, entry) in &new.entries {
            let known = self.reached.contains(&entry.0) || !self.before.contains_key(&entry.0);
            assert!(known, "{name:?} of {number} stands for {}, which was out of reach", entry.0);
        }
    }

    /// An inode that is gone: the names that it had are gone from directories that were judged.
    fn judge_loss(&self, number: u64) {
        let named = names(self.after).iter().any(|(_, _, inode)| *inode == number);
        assert!(!named, "{number} is gone and has a name");
    }

    fn judge_new(&self, number: u64, new: &Inode) {
        let shown = brief(new);
        assert_eq!(new.uid, self.caller.uid, "{number} is new: {shown}");
        let file_type = FileType::of_mode(new.mode).unwrap();
        let device = matches!(file_type, FileType::CharacterDevice | FileType::BlockDevice);
        let whiteout = file_type == FileType::CharacterDevice && new.rdev == 0;
        assert!(!device || whiteout, "a device was made: {shown}");
        let inherited = self.before.values().chain(self.after.values());
        let mut inherited = inherited.filter(|parent| is_directory(parent) && parent.mode & 0o2000 != 0);
        let own_group = self.caller.in_group(new.gid);
        assert!(own_group || inherited.any(|parent| parent.gid == new.gid), "a foreign group: {shown}");
        let gives_group = new.mode & 0o2010 == 0o2010 && !is_directory(new);
        assert!(own_group || !gives_group, "a foreign group's rights: {shown}");
        assert!(new.xattrs.keys().all(|name| name.starts_with(b"user.")), "{shown}");
    }
}

fn round(draws: &mut Draws) {
    let stage = Stage::new(draws);
    let mut before = stage.tree();
    for _ in 0..8 {
        let client = Client::attach_as(&stage.daemon, bob(), 1 + draws.below(3) as u32);
        let names = names(&before);
        let mut session = Session { client, draws: &mut *draws, state: &before, names, made: Vec::new() };
        session.look_around();
        for number in before.keys().copied() {
            let oracle = Oracle::new(&before, &before, bob());
            if session.client.read(InodeNumber::new(number), 0, 100).is_ok() {
                let right = oracle.reached.contains(&number) && oracle.may(number, READ);
                assert!(right, "{number} was read: {}", brief(&before[&number]));
            }
        }
        let records = 1 + session.draws.below(10);
        for _ in 0..records {
            if !session.record() {
                break;
            }
            if session.draws.chance(30) && session.client.digest(true).is_err() {
                break;
            }
        }
        let id = session.client.session;
        stage.daemon.end(id);
        stage.daemon.tidy();
        let after = stage.tree();
        Oracle::new(&before, &after, bob()).judge();
        crate::support::findings(&stage.recorder.medium()).unwrap();
        before = after;
    }
    assert!(Client::attach(&stage.daemon, user(0)).walk("").is_ok(), "the daemon does not go on");
}

#[test]
fn no_log_changes_what_its_user_may_not() {
    rounds("hostile logs", 60, round);
}

/// The oracle can find: a change that Bob could not make is one.
#[test]
fn the_oracle_finds_what_was_not_allowed() {
    let stage = Stage::new(&mut Draws(5));
    let before = stage.tree();
    let oracle_finds = |change: &dyn Fn(&mut Inode) -> bool| {
        let found = before.iter().filter(|(number, inode)| **number != 1 && inode.uid != BOB).any(
            |(number, inode)| {
                let mut changed = inode.clone();
                if !change(&mut changed) {
                    return false;
                }
                let mut after = before.clone();
                after.insert(*number, changed);
                std::panic::catch_unwind(|| Oracle::new(&before, &after, bob()).judge()).is_err()
            },
        );
        assert!(found);
    };
    oracle_finds(&|inode| {
        inode.mode |= 0o4000;
        true
    });
    oracle_finds(&|inode| {
        inode.contents.push(1);
        !is_directory(inode)
    });
    oracle_finds(&|inode| {
        inode.uid = BOB;
        true
    });
    oracle_finds(&|inode| inode.entries.pop_first().is_some());
    oracle_finds(&|inode| inode.xattrs.remove(b"user.kept".as_slice()).is_some());
}
