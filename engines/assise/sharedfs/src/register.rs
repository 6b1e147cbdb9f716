//! The register: the daemon's memory of its programs, for the next daemon. It is a journal in a file of the pool,
//! written by plain stores, so that it survives a crash of the daemon, but not of the machine. Formats:
//! [`format::register`].
//!
//! Guarantees: the next daemon finds every entry that was noted before a call was answered, in order; a death at any
//! point leaves one register that is whole, the old or the new one; without a register, or with a damaged one, programs
//! lose their open files and locks, and nothing else.

use crate::detached::{DetachedSession, DetachedSessions};
use crate::error::Error;
use crate::lock_leases::LockTable;
use crate::locks::Locks;
use crate::references::{References, Rights};
use crate::session::{MetInode, Session};
use crate::state::State;
use ccnvm::SessionId;
use format::call::{OWNER_DESCRIPTION, OWNER_PROCESS};
use format::register::{REGISTER_ENTRY_BYTES, REGISTER_KNOWN_MAX, RegisterEntry, RegisterKind};
use format::superblock::{FileKind, MAGIC, OWNER_DAEMON, POOL_VERSION, Superblock};
use format::{BLOCK_BYTES, ChainNumber, InodeNumber, PoolUid, Sequence};
use ipc::host::Host;
use pmem::{Medium, Region};
use std::collections::BTreeMap;
use vfs::engine::LockOwner;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Where entries begin.
const START: u64 = BLOCK_BYTES as u64;
/// Entries of the smallest register.
const ENTRIES_MIN: u64 = 16 << 10;
/// Bytes of the smallest register.
pub(crate) const REGISTER_BYTES_MIN: u64 = START + ENTRIES_MIN * REGISTER_ENTRY_BYTES as u64;
/// A register is written anew when it has so many times more entries than are needed.
const SPARSE: u64 = 4;
/// Logs for which a session remembers how far they were recovered: those of the sessions before it; the oldest are
/// forgotten.
const RECOVERED_MAX: usize = 64;

const FILE_PREFIX: &str = "register-";

fn file_name(number: u64) -> String {
    format!("{FILE_PREFIX}{number}")
}

fn number_of(name: &str) -> Option<u64> {
    name.strip_prefix(FILE_PREFIX)?.parse().ok()
}

/// The journal.
pub(crate) struct Register {
    medium: Medium,
    pool: PoolUid,
    boot: u64,
    number: u64,
    /// None once no file could be created: then nothing is remembered any more.
    region: Option<Region>,
    entries: u64,
    entries_max: u64,
    /// Number of entries that it began with: so many were needed then.
    needed: u64,
}

/// The sessions that the former daemon remembered.
#[derive(Default)]
pub(crate) struct Remembered {
    pub detached: BTreeMap<SessionId, DetachedSession>,
    pub references: References,
    /// Lock leases that sessions held, with the slots of their lock tables.
    pub lock_leases: BTreeMap<SessionId, BTreeMap<InodeNumber, u64>>,
}

impl Register {
    /// Reads the register of the former daemon; locks go into `locks`. Nothing is written yet.
    ///
    /// # Errors
    /// `Media`: the folder cannot be read.
    pub fn load(
        host: &dyn Host,
        medium: &Medium,
        pool: PoolUid,
        locks: &mut Locks,
    ) -> Result<(Self, Remembered), Error> {
        let mut numbers: Vec<u64> = medium.list()?.iter().filter_map(|name| number_of(name)).collect();
        numbers.sort_unstable();
        let register = Self {
            medium: medium.clone(),
            pool,
            boot: host.boot(),
            number: numbers.last().copied().unwrap_or(0),
            region: None,
            entries: 0,
            entries_max: 0,
            needed: 0,
        };
        let mut remembered = Remembered::default();
        // The newest whole one: a register that was being written when its daemon died has no superblock.
        for number in numbers.into_iter().rev() {
            if let Some(region) = register.open(number) {
                remembered.replay(&region, number, locks)?;
                break;
            }
        }
        remembered.drop_dead(host, locks);
        remembered.import_locks(medium, locks);
        Ok((register, remembered))
    }

    /// A register of this pool and this run of the machine.
    fn open(&self, number: u64) -> Option<Region> {
        let region = self.medium.open(&file_name(number)).ok().filter(|region| region.bytes() >= START)?;
        let mut block = [0; BLOCK_BYTES];
        region.read(0, &mut block).ok()?;
        let superblock = Superblock::decode(&block, FileKind::Register).ok()?;
        let ours = superblock.pool == self.pool
            && superblock.id.get() == number
            && superblock.geometry.get() == self.boot;
        ours.then_some(region)
    }

    /// Begins a new register with these entries, and removes those before.
    ///
    /// # Errors
    /// `Media`: an old one cannot be removed.
    pub fn rewrite(&mut self, entries: &[RegisterEntry]) -> Result<(), Error> {
        // A medium that ends with the process is never opened by another daemon.
        if !self.medium.class().survives_process() {
            return Ok(());
        }
        let needed = entries.len() as u64;
        let entries_max = (2 * needed).max(ENTRIES_MIN);
        let number = self.number + 1;
        let bytes = START + entries_max * REGISTER_ENTRY_BYTES as u64;
        // If there is no space for it, the old one is removed too, so that programs are told nothing false.
        let medium = &self.medium;
        self.region = medium.with_held(bytes, || medium.create(&file_name(number), bytes)).ok();
        (self.number, self.entries, self.entries_max, self.needed) = (number, 0, entries_max, needed);
        if let Some(region) = self.region.clone() {
            for entry in entries {
                self.put(&region, *entry);
            }
            let superblock = Superblock {
                magic: MAGIC,
                version: U16::new(POOL_VERSION),
                kind: U16::new(FileKind::Register as u16),
                checksum: U32::new(0),
                pool: self.pool,
                id: U64::new(number),
                file_bytes: U64::new(bytes),
                owner: U32::new(OWNER_DAEMON),
                chain: ChainNumber::ONLY,
                created_ns: U64::new(0),
                geometry: U64::new(self.boot),
            };
            region.store(0, &superblock.encode());
        }
        let old = |name: &String| number_of(name).is_some_and(|other| other != number);
        for name in self.medium.list()?.iter().filter(|name| old(name)) {
            self.medium.remove(name)?;
        }
        Ok(())
    }

    fn put(&mut self, region: &Region, entry: RegisterEntry) {
        let at = START + self.entries * REGISTER_ENTRY_BYTES as u64;
        self.entries += 1;
        let entry = entry.seal(self.number, Sequence::new(self.entries));
        region.store(at, entry.as_bytes());
    }

    /// Adds an entry.
    pub fn note(&mut self, entry: RegisterEntry) {
        if self.entries == self.entries_max {
            self.grow();
        }
        if let Some(region) = self.region.clone() {
            self.put(&region, entry);
        }
    }

    /// The same entries in a larger file.
    fn grow(&mut self) {
        let Some(region) = self.region.take() else { return };
        let mut entries = Vec::new();
        for place in 0..self.entries {
            match read_entry(&region, self.number, place) {
                Some((_, entry)) => entries.push(entry),
                None => break,
            }
        }
        // The folder cannot be read or written: from here on nothing is remembered.
        let needed = self.needed;
        if entries.len() as u64 != self.entries || self.rewrite(&entries).is_err() {
            self.region = None;
        }
        // The copied entries include those that are no longer needed.
        self.needed = needed;
    }

    /// Whether it has many more entries than `needed`, and than it began with.
    pub fn is_sparse(&self, needed: u64) -> bool {
        self.region.is_some() && self.entries > SPARSE * needed.max(self.needed).max(ENTRIES_MIN / SPARSE)
    }
}

fn read_entry(region: &Region, register: u64, place: u64) -> Option<(RegisterKind, RegisterEntry)> {
    let at = START + place * REGISTER_ENTRY_BYTES as u64;
    let mut bytes = [0; REGISTER_ENTRY_BYTES];
    if at + REGISTER_ENTRY_BYTES as u64 > region.bytes() {
        return None;
    }
    region.read(at, &mut bytes).ok()?;
    RegisterEntry::decode(&bytes, register, Sequence::new(place + 1)).ok()
}

impl Remembered {
    /// Applies all entries up to the first invalid one.
    fn replay(&mut self, region: &Region, register: u64, locks: &mut Locks) -> Result<(), Error> {
        let mut place = 0;
        while let Some((kind, entry)) = read_entry(region, register, place) {
            self.take(kind, &entry, locks);
            place += 1;
        }
        Ok(())
    }

    fn take(&mut self, kind: RegisterKind, entry: &RegisterEntry, locks: &mut Locks) {
        let id = SessionId(entry.session.get());
        if kind == RegisterKind::Attach {
            self.detached.entry(id).or_insert_with(|| DetachedSession::of_entry(id, entry));
            return;
        }
        let Some(detached) = self.detached.get_mut(&id) else { return };
        match kind {
            RegisterKind::Attach => {}
            RegisterKind::Range => detached.ranges.push((entry.inode, entry.first.get())),
            RegisterKind::Recovered => {
                note_recovered(&mut detached.recovered, entry.last.get(), Sequence::new(entry.first.get()));
            }
            RegisterKind::Known => {
                for (inode, bits) in entry.known() {
                    detached.known.entry(inode).or_default().add(bits);
                }
            }
            RegisterKind::Open => self.references.open(id, entry.inode, Rights::of_bits(entry.detail)),
            RegisterKind::Close => drop(self.references.close(id, entry.inode)),
            RegisterKind::Lock
            | RegisterKind::Unlock
            | RegisterKind::Release
            | RegisterKind::Speak
            | RegisterKind::Silent => {
                locks.replay(id, detached.uid, kind, entry);
            }
            RegisterKind::LockLease => {
                locks.take_out(entry.inode);
                self.lock_leases.entry(id).or_default().insert(entry.inode, entry.first.get());
            }
            RegisterKind::LockLeaseEnd => {
                if let Some(leases) = self.lock_leases.get_mut(&id) {
                    leases.remove(&entry.inode);
                }
            }
            RegisterKind::Inherit => {
                let from = SessionId(entry.first.get());
                let Some(left) = self.detached.remove(&from) else { return };
                if let Some(detached) = self.detached.get_mut(&id) {
                    detached.take_over(left);
                }
                self.references.hand_over(from, id);
                locks.hand_over(from, id);
            }
            RegisterKind::End => self.end(id, locks),
        }
    }

    fn end(&mut self, id: SessionId, locks: &mut Locks) {
        self.detached.remove(&id);
        self.lock_leases.remove(&id);
        // Inodes without a name are looked for in the area.
        self.references.end(id);
        locks.end(id);
    }

    /// Forgets sessions whose processes are gone.
    fn drop_dead(&mut self, host: &dyn Host, locks: &mut Locks) {
        let dead: Vec<SessionId> = self
            .detached
            .values()
            .filter(|detached| !detached.lives(host))
            .map(|detached| detached.session)
            .collect();
        for id in dead {
            self.end(id, locks);
        }
    }

    /// Locks that programs decided about by themselves: their lock tables say which there are.
    fn import_locks(&mut self, medium: &Medium, locks: &mut Locks) {
        for (id, leases) in std::mem::take(&mut self.lock_leases) {
            let Some(uid) = self.detached.get(&id).map(|detached| detached.uid) else { continue };
            let table = LockTable::open(medium, id);
            for (inode, slot) in leases {
                // The daemon may have died while it was noting them.
                locks.take_out(inode);
                let list = table.as_ref().and_then(|table| table.list(slot, inode));
                for (lock, owner) in list.into_iter().flatten() {
                    locks.import(id, uid, inode, (lock, owner));
                }
            }
        }
    }

    /// Notes that a log was digested to its end. A daemon that died before it closed the log may have noted an earlier
    /// record, behind which a whole frame was found: the later one counts.
    pub fn note_recovered(&mut self, log: u64, last: Sequence) {
        if let Some(detached) = self.detached.get_mut(&SessionId(log)) {
            detached.recovered.retain(|(noted, _)| *noted != log);
            note_recovered(&mut detached.recovered, log, last);
        }
    }

    /// Whether a process that may come back can have the inode open.
    pub fn may_be_open(&self, inode: InodeNumber) -> bool {
        self.references.any(inode) || self.detached.values().any(|detached| detached.knows(inode))
    }

    /// All of it as entries.
    pub fn entries(&self, locks: &Locks) -> Vec<RegisterEntry> {
        let mut entries = Vec::new();
        for detached in self.detached.values() {
            detached.put_entries(&mut entries);
        }
        self.references.put_entries(&mut entries);
        locks.put_entries(&mut entries);
        entries
    }

    /// The data that is kept once the daemon serves.
    pub fn into_detached(self) -> (DetachedSessions, References) {
        (DetachedSessions::of(self.detached.into_values()), self.references)
    }
}

/// Notes how far a log was recovered; the first entry for a log counts.
pub(crate) fn note_recovered(recovered: &mut Vec<(u64, Sequence)>, log: u64, last: Sequence) {
    if recovered.iter().all(|(other, _)| *other != log) {
        if recovered.len() == RECOVERED_MAX {
            recovered.remove(0);
        }
        recovered.push((log, last));
    }
}

/// The process and the user of a session.
pub(crate) struct Identity {
    pub pid: u32,
    pub started: u64,
    pub uid: u32,
    pub gid: u32,
}

/// The entry of a session that begins.
pub(crate) fn attach_entry(id: SessionId, who: &Identity, range: (InodeNumber, u64)) -> RegisterEntry {
    RegisterEntry {
        inode: range.0,
        first: U64::new(range.1),
        last: U64::new(who.started),
        owner: U64::new(u64::from(who.gid) << 32 | u64::from(who.uid)),
        pid: U32::new(who.pid),
        ..RegisterEntry::new(RegisterKind::Attach, id.0)
    }
}

/// A reference that was made, or has other rights now.
pub(crate) fn open_entry(id: SessionId, inode: InodeNumber, rights: Rights) -> RegisterEntry {
    RegisterEntry { inode, detail: rights.bits(), ..RegisterEntry::new(RegisterKind::Open, id.0) }
}

/// A session may act for an owner of locks, possibly with others.
pub(crate) fn speak_entry(id: SessionId, owner: LockOwner) -> RegisterEntry {
    let (detail, pid) = match owner {
        LockOwner::Process { pid, .. } => (OWNER_PROCESS, pid),
        LockOwner::Description(_) => (OWNER_DESCRIPTION, 0),
    };
    let (LockOwner::Process { id: number, .. } | LockOwner::Description(number)) = owner;
    let (owner, pid) = (U64::new(number), U32::new(pid));
    RegisterEntry { detail, owner, pid, ..RegisterEntry::new(RegisterKind::Speak, id.0) }
}

/// Adds the entries of a session beside its first one.
pub(crate) fn put_possessions(
    id: SessionId,
    ranges: &[(InodeNumber, u64)],
    recovered: &[(u64, Sequence)],
    known: &BTreeMap<InodeNumber, MetInode>,
    entries: &mut Vec<RegisterEntry>,
) {
    for (inode, count) in ranges {
        let first = U64::new(*count);
        entries.push(RegisterEntry { inode: *inode, first, ..RegisterEntry::new(RegisterKind::Range, id.0) });
    }
    for (log, last) in recovered {
        entries.push(recovered_entry(id, *log, *last));
    }
    let known: Vec<(InodeNumber, u8)> = known.iter().map(|(inode, known)| (*inode, known.bits())).collect();
    entries.extend(known.chunks(REGISTER_KNOWN_MAX).map(|some| RegisterEntry::of_known(id.0, some)));
}

/// How far a log was recovered.
pub(crate) fn recovered_entry(id: SessionId, log: u64, last: Sequence) -> RegisterEntry {
    let (first, last) = (U64::new(last.get()), U64::new(log));
    RegisterEntry { first, last, ..RegisterEntry::new(RegisterKind::Recovered, id.0) }
}

impl State {
    /// Writes the register anew if most of it is history.
    pub fn tend_register(&mut self) -> Result<(), Error> {
        let known: usize = self.sessions.values().map(|session| session.known.len()).sum();
        if !self.register.is_sparse(known as u64) {
            return Ok(());
        }
        let mut entries = Vec::new();
        for (id, session) in &self.sessions {
            put_session(*id, session, &mut entries);
        }
        for detached in self.detached.all() {
            detached.put_entries(&mut entries);
        }
        self.references.put_entries(&mut entries);
        self.locks.put_entries(&mut entries);
        self.put_lock_leases(&mut entries);
        self.register.rewrite(&entries)
    }

    /// Notes that a session refers to an inode, or refers to it with more rights than before.
    pub fn refer_to(&mut self, id: SessionId, inode: InodeNumber, rights: Rights) {
        let before = self.references.rights(id, inode);
        self.references.open(id, inode, rights);
        let now = self.references.rights(id, inode);
        if before != now {
            self.register.note(open_entry(id, inode, now.unwrap_or_default()));
        }
    }

    /// Ends that reference. True if no reference to the inode is left.
    pub fn refer_no_more(&mut self, id: SessionId, inode: InodeNumber) -> bool {
        self.register.note(RegisterEntry { inode, ..RegisterEntry::new(RegisterKind::Close, id.0) });
        self.references.close(id, inode)
    }
}

fn put_session(id: SessionId, session: &Session, entries: &mut Vec<RegisterEntry>) {
    // A process that cannot be told from another one does not come back.
    let Some(who) = session.identity() else { return };
    entries.push(attach_entry(id, &who, (session.first_inode, session.inodes)));
    put_possessions(id, &session.former_ranges, &session.recovered, &session.known, entries);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;
    use std::os::unix::fs::FileExt;

    const POOL: PoolUid = PoolUid::new(7);
    const ENTRIES: u64 = 12;

    fn empty(medium: &Medium) -> Register {
        Register::load(&SystemHost, medium, POOL, &mut no_locks()).unwrap().0
    }

    fn no_locks() -> Locks {
        Locks::new(crate::locks::Bell::new(std::sync::Arc::new(SystemHost)), 8)
    }

    fn attach(number: u64) -> RegisterEntry {
        let process = std::process::id();
        let who = Identity { pid: process, started: SystemHost.started(process).unwrap(), uid: 1, gid: 2 };
        attach_entry(SessionId(number), &who, (InodeNumber::new(number << 8), 16))
    }

    /// The sessions that a daemon finds.
    fn found(medium: &Medium) -> Vec<u64> {
        let (_, remembered) = Register::load(&SystemHost, medium, POOL, &mut no_locks()).unwrap();
        remembered.detached.keys().map(|id| id.0).collect()
    }

    fn first(count: u64) -> Vec<u64> {
        (1..=count).collect()
    }

    #[test]
    fn what_was_digested_of_a_log_counts_and_not_what_was_noted_before() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::memory(folder.path()).unwrap();
        let mut register = empty(&medium);
        register.rewrite(&[]).unwrap();
        let id = SessionId(3);
        [attach(3), recovered_entry(id, 3, Sequence::new(10))]
            .into_iter()
            .for_each(|entry| register.note(entry));
        let (_, mut remembered) = Register::load(&SystemHost, &medium, POOL, &mut no_locks()).unwrap();
        remembered.note_recovered(3, Sequence::new(11));
        assert_eq!(remembered.detached[&id].recovered, [(3, Sequence::new(11))]);
    }

    #[test]
    fn a_death_between_two_stores_of_an_entry_leaves_the_entries_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::memory(folder.path()).unwrap();
        let mut register = empty(&medium);
        register.rewrite(&[]).unwrap();
        for number in 1..=ENTRIES {
            register.note(attach(number));
        }
        assert_eq!(found(&medium), first(ENTRIES));
        let path = folder.path().join(file_name(register.number));
        let whole = std::fs::read(&path).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        for number in (1..=ENTRIES).rev() {
            let at = (START as usize) + (number as usize - 1) * REGISTER_ENTRY_BYTES;
            // Whichever of its words were stored: the first ones, or all but one.
            for word in 0..REGISTER_ENTRY_BYTES / 8 {
                let mut some = [0; REGISTER_ENTRY_BYTES];
                some[..8 * word].copy_from_slice(&whole[at..at + 8 * word]);
                file.write_all_at(&some, at as u64).unwrap();
                assert_eq!(found(&medium), first(number - 1), "{word} words of entry {number}");
                let mut most = whole[at..at + REGISTER_ENTRY_BYTES].to_vec();
                most[8 * word..8 * word + 8].fill(0);
                if most != whole[at..at + REGISTER_ENTRY_BYTES] {
                    file.write_all_at(&most, at as u64).unwrap();
                    assert_eq!(found(&medium), first(number - 1), "all but word {word} of entry {number}");
                }
            }
            file.write_all_at(&[0; REGISTER_ENTRY_BYTES], at as u64).unwrap();
        }
    }

    #[test]
    fn a_death_while_it_is_written_anew_leaves_the_old_one_or_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::memory(folder.path()).unwrap();
        let mut register = empty(&medium);
        register.rewrite(&[attach(1), attach(2)]).unwrap();
        let old = folder.path().join(file_name(register.number));
        let old_bytes = std::fs::read(&old).unwrap();
        register.rewrite(&[attach(3), attach(4), attach(5)]).unwrap();
        let new = folder.path().join(file_name(register.number));
        let new_bytes = std::fs::read(&new).unwrap();
        assert_eq!(found(&medium), [3, 4, 5]);
        std::fs::write(&old, old_bytes).unwrap();
        // Its superblock comes last.
        for words in 0..BLOCK_BYTES / 8 {
            let mut cut = new_bytes.clone();
            cut[8 * words..BLOCK_BYTES].fill(0);
            let whole = cut == new_bytes;
            std::fs::write(&new, cut).unwrap();
            let wanted: &[u64] = if whole { &[3, 4, 5] } else { &[1, 2] };
            assert_eq!(found(&medium), wanted, "{words} words of the superblock");
        }
        // Some of the entries: without a superblock they do not count.
        std::fs::write(&new, &new_bytes[..START as usize / 2]).unwrap();
        assert_eq!(found(&medium), [1, 2]);
        std::fs::write(&new, &new_bytes).unwrap();
        assert_eq!(found(&medium), [3, 4, 5], "the old one was not removed yet");
        std::fs::remove_file(&old).unwrap();
        assert_eq!(found(&medium), [3, 4, 5]);
    }

    #[test]
    fn one_that_is_full_of_what_counts_is_not_written_anew_again_and_again() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::memory(folder.path()).unwrap();
        let mut register = empty(&medium);
        let entries: Vec<_> = (1..=2 * ENTRIES_MIN).map(attach).collect();
        register.rewrite(&entries).unwrap();
        assert!(!register.is_sparse(1), "nothing of it is history");
        for _ in 0..SPARSE * entries.len() as u64 {
            register.note(attach(1));
        }
        assert!(register.is_sparse(1));
    }
}
