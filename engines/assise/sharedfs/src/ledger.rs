//! The ledger on its medium: read to its end when a daemon begins, then appended to, entry by entry (formats:
//! [`format::ledger`]). Its ring goes on from life to life; each life has a salt of its own.
//!
//! Guarantees: an entry that was appended is read again after a crash, as far as it was synced; an entry that a life
//! left unfinished at its end is never read as an entry of a later one. An entry for which space was reserved is never
//! refused.

use crate::damage::{LedgerEnd, closed_logs, ledger_end};
use crate::error::Error;
use crate::replay::table::{Change, Grant, OpenLog, Table};
use area::LedgerPlace;
use format::checksum::Salt;
use format::envelope::{Envelope, frame_bytes};
use format::hash::{HashKey, RecordsHash};
use format::ledger::{
    Entry, EntryHeader, Event, GrantDetail, GrantMode, Kind, LifeBody, REAP_MAX, Unit, salt_of,
};
use format::superblock::{FileKind, MAGIC, OWNER_DAEMON, POOL_VERSION, Superblock};
use format::{
    BLOCK_BYTES, ChainNumber, HEADER_BYTES, InodeNumber, LeaseVersion, Life, LogUid, PoolUid, Sequence,
};
use mirror::ledger::{LEDGER_START as RING_START, LedgerError, LedgerPosition, ledger_ring_end};
use mirror::logs::bytes_between;
use pmem::ring::{AppendError, AppendRing, RingPosition};
use pmem::{MediaError, Medium, Region};
use std::collections::{BTreeSet, VecDeque};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Name of its file.
pub const LEDGER_FILE: &str = "ledger";

/// Bytes that are cleared at once.
const CLEARED_AT_ONCE: usize = 64 << 10;

/// Lives of the chain, the last ones, whose entries are told from damaged ones.
const LIVES_MAX: u32 = 4096;

/// A change that no commit contains yet, and where the ledger goes on after its entry.
pub(crate) struct Pending {
    pub change: Change,
    pub after: LedgerPlace,
}

/// The ledger with its table.
pub(crate) struct Ledger {
    region: Region,
    /// None until the ledger was read to its end and a life began.
    ring: Option<AppendRing>,
    table: Table,
    pending: VecDeque<Pending>,
    /// The position that the last commit contains.
    contained: LedgerPlace,
    /// The position that the trees of all copies contain, if that is less.
    held: Option<LedgerPlace>,
    /// Where it goes on.
    end: LedgerPlace,
    /// Key of the life there.
    key: [u8; 16],
    synced: Sequence,
}

/// An entry as it was read.
pub(crate) struct ReadEntry {
    frame: Vec<u8>,
    /// Where the ledger goes on after it.
    pub after: LedgerPlace,
}

impl ReadEntry {
    /// The entry.
    ///
    /// # Errors
    /// `File`: a frame with the right checksum was written by a daemon of another make.
    pub fn entry(&self) -> Result<Entry<'_>, Error> {
        Entry::decode(&self.frame).map_err(|error| Error::File(LEDGER_FILE.to_owned(), error))
    }
}

/// The place of a new pool's ledger.
pub(crate) const LEDGER_BEGINNING: LedgerPlace =
    LedgerPlace { sequence: Sequence::new(0), position: RING_START, life: Life::new(0) };

/// A place as copies know it.
pub(crate) fn position_of(place: &LedgerPlace) -> LedgerPosition {
    LedgerPosition { sequence: place.sequence, position: place.position, life: place.life }
}

/// A place that copies told.
pub(crate) fn place_of(position: &LedgerPosition) -> LedgerPlace {
    LedgerPlace { sequence: position.sequence, position: position.position, life: position.life }
}

/// The ring's place behind a place of the ledger.
fn ring_place(place: &LedgerPlace) -> RingPosition {
    RingPosition { position: place.position, sequence: place.sequence.next() }
}

impl Ledger {
    /// Makes the file of a new pool, or of one whose making was interrupted.
    pub fn format(medium: &Medium, pool: PoolUid, file_bytes: u64) -> Result<(), Error> {
        match medium.remove(LEDGER_FILE) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
        let region = medium.create(LEDGER_FILE, file_bytes)?;
        let superblock = Superblock {
            magic: MAGIC,
            version: U16::new(POOL_VERSION),
            kind: U16::new(FileKind::Ledger as u16),
            checksum: U32::new(0),
            pool,
            id: U64::new(0),
            file_bytes: U64::new(file_bytes),
            owner: U32::new(OWNER_DAEMON),
            chain: ChainNumber::ONLY,
            created_ns: U64::new(0),
            geometry: U64::new(0),
        };
        region.write(0, &superblock.encode());
        region.sync()?;
        Ok(())
    }

    /// Length of a pool's ledger.
    pub fn file_bytes(medium: &Medium, pool: PoolUid) -> Result<u64, Error> {
        Ok(Self::open_file(medium, pool)?.bytes())
    }

    /// Leaves nothing of the entries that stand in a pool's ledger.
    pub fn clear(medium: &Medium, pool: PoolUid) -> Result<(), Error> {
        let region = Self::open_file(medium, pool)?;
        let zeros = vec![0; CLEARED_AT_ONCE];
        let mut at = RING_START;
        while at < region.bytes() {
            let bytes = zeros.len().min(usize::try_from(region.bytes() - at).unwrap_or(usize::MAX));
            region.write(at, &zeros[..bytes]);
            at += bytes as u64;
        }
        region.sync()?;
        Ok(())
    }

    fn open_file(medium: &Medium, pool: PoolUid) -> Result<Region, Error> {
        let wrong = |error| Error::File(LEDGER_FILE.to_owned(), error);
        let region = match medium.open(LEDGER_FILE) {
            Ok(region) => region,
            Err(MediaError::NotFound) => return Err(wrong(format::DecodeError::Field("file"))),
            Err(MediaError::Length) => return Err(wrong(format::DecodeError::Field("file_bytes"))),
            Err(error) => return Err(error.into()),
        };
        if region.bytes() <= RING_START {
            return Err(wrong(format::DecodeError::Truncated));
        }
        let mut block = [0; BLOCK_BYTES];
        region.read(0, &mut block)?;
        let superblock = Superblock::decode(&block, FileKind::Ledger).map_err(wrong)?;
        if superblock.pool != pool {
            return Err(wrong(format::DecodeError::Field("pool")));
        }
        if superblock.file_bytes.get() != region.bytes() {
            return Err(wrong(format::DecodeError::Field("file_bytes")));
        }
        Ok(region)
    }

    /// Opens a ledger to be read from where the last commit stands, which holds this table and the key of the life there.
    /// Writes nothing.
    pub fn open(
        medium: &Medium,
        pool: PoolUid,
        (contained, key): (LedgerPlace, [u8; 16]),
        table: Table,
    ) -> Result<Self, Error> {
        let region = Self::open_file(medium, pool)?;
        let end = region.bytes() / HEADER_BYTES as u64 * HEADER_BYTES as u64;
        let position = contained.position;
        if !position.is_multiple_of(HEADER_BYTES as u64) || !(RING_START..end).contains(&position) {
            return Err(Error::File(LEDGER_FILE.to_owned(), format::DecodeError::Field("position")));
        }
        let (pending, synced) = (VecDeque::new(), contained.sequence);
        Ok(Self { region, ring: None, table, pending, contained, held: None, end: contained, key, synced })
    }

    /// Reads the next entry of a ledger that was not read to its end; `None` there. It counts once it is
    /// [noted](Self::note).
    pub fn next_entry(&self) -> Result<Option<ReadEntry>, Error> {
        self.entry_behind(&self.end)
    }

    fn entry_behind(&self, place: &LedgerPlace) -> Result<Option<ReadEntry>, Error> {
        let read = mirror::ledger::next_entry(&self.region, &position_of(place));
        let frame = read.map_err(|error| match error {
            LedgerError::Media(error) => Error::Media(error),
            LedgerError::Entry(error) => Error::File(LEDGER_FILE.to_owned(), error),
        })?;
        Ok(frame.map(|frame| ReadEntry { frame: frame.bytes, after: place_of(&frame.after) }))
    }

    /// Takes what an entry that was read says into the table.
    pub fn note(&mut self, read: &ReadEntry) -> Result<(), Error> {
        let entry = read.entry()?;
        if let Event::Life { body } = entry.event {
            self.key = body.key;
        }
        let change = self.table.apply(&entry);
        self.end = read.after;
        self.pending.push_back(Pending { change, after: read.after });
        Ok(())
    }

    /// How a ledger that was read to its end does end.
    pub fn look_behind_end(&self) -> Result<LedgerEnd, MediaError> {
        let salt = salt_of(self.end.life);
        ledger_end(&self.region, RING_START, salt, ring_place(&self.end), self.earlier_salts())
    }

    /// The logs whose ends it still contains, also in entries before those that were read.
    pub fn closed_logs(&self) -> Result<BTreeSet<LogUid>, MediaError> {
        let lives = std::iter::once(salt_of(self.end.life)).chain(self.earlier_salts());
        closed_logs(&self.region, RING_START, ring_place(&self.end), lives)
    }

    /// The salts of the lives before the one that was read last, the newest first.
    fn earlier_salts(&self) -> impl Iterator<Item = Salt> + Clone {
        let lives = (0..self.end.life.get()).rev().take(LIVES_MAX as usize);
        lives.map(|life| salt_of(Life::new(life)))
    }

    /// Begins a life behind the last entry, and syncs that. From here on entries are appended.
    pub fn begin_life(&mut self, body: LifeBody) -> Result<Sequence, Error> {
        assert!(
            self.ring.is_none() && body.life == self.end.life.next(),
            "a life begins after the one before"
        );
        let region = self.region.clone();
        let (head, tail) = (ring_place(&self.needed_from()), ring_place(&self.end));
        self.ring = Some(AppendRing::new(region, RING_START, salt_of(body.life), head, tail));
        self.end.life = body.life;
        let header =
            header_of(LogUid::default(), InodeNumber::NONE, LeaseVersion::default(), Sequence::default());
        let sequence = self.append(Kind::Life, header, body.as_bytes())?;
        self.sync()?;
        Ok(sequence)
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The life of the chain.
    pub fn life(&self) -> Life {
        self.end.life
    }

    /// Key of the hashes in the entries of that life.
    pub fn hash_key(&self) -> HashKey {
        HashKey::of_life(&self.key)
    }

    /// The life of the last entry, and its key.
    pub fn life_and_key(&self) -> (Life, [u8; 16]) {
        (self.life(), self.key)
    }

    /// Last entry that was read or appended.
    pub fn last(&self) -> Sequence {
        self.end.sequence
    }

    /// Last entry that was synced.
    pub fn synced(&self) -> Sequence {
        self.synced
    }

    /// Its file, to be synced beside what is appended meanwhile.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The file was synced when `up_to` was its last entry.
    pub fn note_synced(&mut self, up_to: Sequence) {
        self.synced = self.synced.max(up_to);
    }

    /// Syncs all that was appended.
    pub fn sync(&mut self) -> Result<(), Error> {
        if self.synced < self.end.sequence {
            self.region.sync()?;
            self.synced = self.end.sequence;
        }
        Ok(())
    }

    /// Where it goes on.
    pub fn place(&self) -> LedgerPlace {
        self.end
    }

    /// The position that the last commit contains.
    pub fn last_commit(&self) -> LedgerPlace {
        self.contained
    }

    /// True when it is time for a commit that contains what is pending: less than half of the ring would be free if no copy
    /// held it back, or there are many changes.
    pub fn wants_commit(&self, pending_max: usize) -> bool {
        let ring = (RING_START, ledger_ring_end(&self.region));
        let (from, to) = (position_of(&self.contained).place(), position_of(&self.end).place());
        bytes_between(ring, from, to) > (ring.1 - ring.0) / 2 || self.pending.len() >= pending_max
    }

    /// Entries behind this place are needed: by the own tree, or by a copy's.
    fn needed_from(&self) -> LedgerPlace {
        self.held.filter(|held| held.sequence < self.contained.sequence).unwrap_or(self.contained)
    }

    /// Whether a copy holds it back behind the own tree.
    pub fn is_held_back(&self) -> bool {
        self.needed_from().sequence < self.contained.sequence
    }

    /// Notes up to where the trees of all copies contain the ledger; `None`: there are no copies. The place may be before
    /// the space that was released, if all entries behind it are still there ([`Self::entries_from`]).
    pub fn hold(&mut self, held: Option<LedgerPlace>) {
        self.held = held;
        let (head, tail) = (ring_place(&self.needed_from()), ring_place(&self.end));
        if let Some(ring) = &mut self.ring {
            if head.sequence < ring.head().sequence {
                let region = self.region.clone();
                *ring = AppendRing::new(region, RING_START, salt_of(self.end.life), head, tail);
            } else {
                ring.release_to(head);
            }
        }
    }

    /// The entries from a place to the end, if all of them are there still.
    ///
    /// # Errors
    /// `Media`, `File`.
    pub fn entries_from(&self, from: &LedgerPlace) -> Result<Option<Vec<ReadEntry>>, Error> {
        let ring = RING_START..ledger_ring_end(&self.region);
        let aligned = from.position.is_multiple_of(HEADER_BYTES as u64);
        if !aligned || !ring.contains(&from.position) || from.sequence > self.end.sequence {
            return Ok(None);
        }
        let (mut at, mut found) = (*from, Vec::new());
        while at.sequence < self.end.sequence {
            let Some(read) = self.entry_behind(&at)? else { return Ok(None) };
            at = read.after;
            found.push(read);
        }
        Ok((at == self.end).then_some(found))
    }

    /// Inodes that one `Reap` may name: the entry takes a small part of the ring.
    pub fn reap_max(&self) -> usize {
        let part = (self.region.bytes() - RING_START) / 16;
        usize::try_from(part).map_or(REAP_MAX, |bytes| (bytes / size_of::<InodeNumber>()).clamp(1, REAP_MAX))
    }

    /// Changes that no commit contains, oldest first.
    pub fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.pending.iter()
    }

    /// Where the ledger goes on after the first `changes` pending ones.
    pub fn place_after(&self, changes: usize) -> LedgerPlace {
        let before = changes.checked_sub(1).and_then(|index| self.pending.get(index));
        before.map_or(self.contained, |pending| pending.after)
    }

    /// A commit contains the first `changes` pending ones.
    pub fn contained(&mut self, changes: usize) {
        self.contained = self.place_after(changes);
        self.pending.drain(..changes);
        let needed = ring_place(&self.needed_from());
        if let Some(ring) = &mut self.ring {
            ring.release_to(needed);
        }
    }

    fn append(&mut self, kind: Kind, header: EntryHeader, payload: &[u8]) -> Result<Sequence, Error> {
        let ring = self.ring.as_mut().expect("a life began before anything is appended");
        let payload_bytes = u32::try_from(payload.len()).expect("groups are counted at the socket");
        let header = EntryHeader { envelope: Envelope::new(kind as u8, 0, payload_bytes), ..header };
        let bytes: [u8; HEADER_BYTES] = zerocopy::transmute!(header);
        let appended = ring.append(bytes, &[payload.into()]).map_err(|error| match error {
            AppendError::Full => Error::LedgerFull,
            AppendError::Fault => unreachable!("the payload lies in this process"),
        })?;
        // Others rely on the entry, synced or not.
        self.region.check()?;
        let tail = ring.tail();
        let mut envelope = header.envelope;
        envelope.sequence = appended.sequence;
        let frame = [EntryHeader { envelope, ..header }.as_bytes(), payload].concat();
        let after = LedgerPlace { sequence: appended.sequence, position: tail.position, life: self.end.life };
        let read = ReadEntry { frame, after };
        // An appended entry has the same effect as one that is read.
        self.note(&read)?;
        Ok(appended.sequence)
    }

    /// A log begins.
    ///
    /// # Errors
    /// `LedgerFull`, as of all appends: commit, then append again.
    pub fn open_log(&mut self, uid: LogUid, log: &OpenLog, pid: u32) -> Result<Sequence, Error> {
        let groups: Vec<U32> = log.caller.groups.iter().map(|group| U32::new(*group)).collect();
        let payload = [log.to_body(pid).as_bytes(), groups.as_bytes()].concat();
        self.append(
            Kind::OpenLog,
            header_of(uid, InodeNumber::NONE, log.version, Sequence::default()),
            &payload,
        )
    }

    /// A log may change a unit.
    pub fn grant(&mut self, uid: LogUid, unit: Unit, grant: Grant) -> Result<Sequence, Error> {
        let header = header_of(uid, unit.inode, grant.version, grant.from);
        self.append(Kind::Grant, EntryHeader { detail: detail_of(unit, grant.rights), ..header }, &[])
    }

    /// A log may no longer change a unit; its records up to `digested` are in the area.
    pub fn end(
        &mut self,
        uid: LogUid,
        unit: Unit,
        version: LeaseVersion,
        digested: Sequence,
    ) -> Result<Sequence, Error> {
        let header = header_of(uid, unit.inode, version, digested);
        self.append(Kind::End, EntryHeader { detail: detail_of(unit, 0), ..header }, &[])
    }

    /// A log ends with record `last`.
    pub fn close_log(&mut self, uid: LogUid, last: Sequence) -> Result<Sequence, Error> {
        self.append(Kind::CloseLog, header_of(uid, InodeNumber::NONE, LeaseVersion::default(), last), &[])
    }

    /// A log's records up to `up_to` are digested, with this hash of those since the last such entry, if there may be
    /// copies that compare it.
    pub fn digest(
        &mut self,
        uid: LogUid,
        up_to: Sequence,
        hash: Option<RecordsHash>,
    ) -> Result<Sequence, Error> {
        let header = header_of(uid, InodeNumber::NONE, LeaseVersion::default(), up_to);
        let detail = hash.map_or([0; 8], RecordsHash::to_bytes);
        self.append(Kind::Digest, EntryHeader { detail, ..header }, &[])
    }

    /// Inodes without a name are removed; at least one, and at most [`Self::reap_max`].
    pub fn reap(&mut self, inodes: &[InodeNumber]) -> Result<Sequence, Error> {
        let header =
            header_of(LogUid::default(), InodeNumber::NONE, LeaseVersion::default(), Sequence::default());
        self.append(Kind::Reap, header, inodes.as_bytes())
    }

    /// Whether so many entries, each of a payload at most so long, are sure to fit now, and those of a batch besides.
    pub fn has_room(&self, entries: u64, payload_bytes: u64) -> bool {
        let frame = frame_bytes(payload_bytes);
        // One of them may have to leave the end of the ring free.
        let bytes = entries * frame + frame + self.batch_bytes();
        self.ring.as_ref().is_some_and(|ring| ring.free_bytes() >= bytes)
    }

    /// Bytes that are kept free for the entries of a batch: the ledger gets room only by the end of a batch.
    fn batch_bytes(&self) -> u64 {
        let reap = frame_bytes((self.reap_max() * size_of::<InodeNumber>()) as u64);
        frame_bytes(0) + 2 * reap
    }

    /// Whether the entries of a batch are sure to fit now.
    pub fn has_room_for_batch(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.free_bytes() >= self.batch_bytes())
    }
}

fn header_of(log: LogUid, inode: InodeNumber, version: LeaseVersion, record: Sequence) -> EntryHeader {
    let envelope = Envelope::new(Kind::Pad as u8, 0, 0);
    EntryHeader { envelope, log, inode, version, record, detail: [0; 8] }
}

fn detail_of(unit: Unit, rights: u32) -> [u8; 8] {
    let (unit, mode) = (unit.kind as u8, GrantMode::Write as u8);
    zerocopy::transmute!(GrantDetail { rights: U32::new(rights), unit, mode, reserved: [0; 2] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::ledger::RIGHT_WRITE;
    use format::{Epoch, NodeId};
    use pmem::Recorder;
    use vfs::Caller;

    const POOL: PoolUid = PoolUid::new(5);

    fn life(ledger: &Ledger) -> LifeBody {
        LifeBody {
            life: ledger.life().next(),
            node: NodeId::new(1),
            epoch: Epoch::new(0),
            reserved: U32::new(0),
            after: ledger.last(),
            key: [7; 16],
        }
    }

    /// The ledger from a place on, read to its end.
    fn read(medium: &Medium, contained: LedgerPlace, table: Table) -> Ledger {
        let mut ledger = Ledger::open(medium, POOL, (contained, [0; 16]), table).unwrap();
        while let Some(read) = ledger.next_entry().unwrap() {
            ledger.note(&read).unwrap();
        }
        ledger
    }

    fn ledger(medium: &Medium, file_bytes: u64) -> Ledger {
        Ledger::format(medium, POOL, file_bytes).unwrap();
        let mut ledger = read(medium, LEDGER_BEGINNING, Table::default());
        ledger.begin_life(life(&ledger)).unwrap();
        ledger
    }

    fn open_log(first: u64) -> OpenLog {
        let caller = Caller { uid: 7, gid: 8, groups: vec![9, 10] };
        OpenLog::new(caller, LeaseVersion::new(first), (InodeNumber::new(first), 10), 1 << 20)
    }

    fn grant(version: u64) -> Grant {
        Grant { version: LeaseVersion::new(version), from: Sequence::new(3), rights: RIGHT_WRITE }
    }

    fn unit(inode: u64) -> Unit {
        Unit::inode(InodeNumber::new(inode))
    }

    #[test]
    fn what_is_read_is_what_was_appended_over_lives() {
        let medium = Recorder::new().medium();
        let mut ledger = ledger(&medium, 1 << 16);
        let (one, two) = (LogUid::new(1), LogUid::new(2));
        ledger.open_log(one, &open_log(100), 1).unwrap();
        ledger.open_log(two, &open_log(200), 2).unwrap();
        ledger.grant(one, unit(5), grant(301)).unwrap();
        ledger.grant(one, unit(6), grant(302)).unwrap();
        ledger.grant(one, Unit::RENAME, grant(303)).unwrap();
        ledger.digest(one, Sequence::new(9), None).unwrap();
        ledger.reap(&[InodeNumber::new(77), InodeNumber::new(78)]).unwrap();
        ledger.end(one, unit(5), LeaseVersion::new(301), Sequence::new(9)).unwrap();
        ledger.end(one, unit(105), LeaseVersion::new(100), Sequence::new(9)).unwrap();
        ledger.close_log(two, Sequence::new(4)).unwrap();
        let mut again = read(&medium, LEDGER_BEGINNING, Table::default());
        assert_eq!((again.table(), again.end), (ledger.table(), ledger.end));
        assert_eq!(again.look_behind_end().unwrap(), LedgerEnd::Whole);
        // The next life goes on behind, and both are read.
        again.begin_life(life(&again)).unwrap();
        again.close_log(one, Sequence::new(9)).unwrap();
        let both = read(&medium, LEDGER_BEGINNING, Table::default());
        assert_eq!((both.table(), both.end), (&Table::default(), again.end));
        assert_eq!((both.life(), both.last()), (Life::new(2), ledger.last().next().next()));
        let changes: Vec<&Change> = both.pending().map(|pending| &pending.change).collect();
        assert!(matches!(changes[0], Change::Life(first, _) if *first == Life::new(1)));
    }

    /// No process waited for the entries behind a lost one, so a mapped file may keep them and not the one before. The next
    /// life begins where that stood, and what stands behind, with the number that comes next, does not come back.
    #[test]
    fn an_entry_behind_a_lost_one_does_not_come_back() {
        let medium = Recorder::new().medium();
        let mut ledger = ledger(&medium, 1 << 16);
        let begun = ledger.end;
        ledger.open_log(LogUid::new(1), &open_log(100), 1).unwrap();
        let lost = ledger.end;
        ledger.grant(LogUid::new(1), unit(5), grant(301)).unwrap();
        ledger.region.write(begun.position, &[0; 64]);
        let mut next = read(&medium, LEDGER_BEGINNING, Table::default());
        assert_eq!((next.end, next.look_behind_end().unwrap()), (begun, LedgerEnd::GoesOn));
        next.begin_life(life(&next)).unwrap();
        // It takes the place of the lost entry exactly.
        assert_eq!((next.end.sequence, next.end.position), (lost.sequence, lost.position));
        let again = read(&medium, LEDGER_BEGINNING, Table::default());
        assert_eq!((again.end, again.look_behind_end().unwrap()), (next.end, LedgerEnd::Whole));
    }

    #[test]
    fn a_commit_makes_room_and_the_rest_is_read_from_it() {
        let medium = Recorder::new().medium();
        let mut ledger = ledger(&medium, 3 * BLOCK_BYTES as u64);
        let (one, mut contained) = (LogUid::new(1), None);
        ledger.open_log(one, &open_log(100), 1).unwrap();
        for version in 200..600 {
            if ledger.wants_commit(20) {
                let changes = ledger.pending().count() / 2;
                let place = ledger.place_after(changes);
                ledger.contained(changes);
                let mut table = Table::default();
                table.open(one, open_log(100));
                contained = Some((place, table));
            }
            ledger.grant(one, unit(version % 7 + 1), grant(version)).unwrap();
        }
        let (place, table) = contained.unwrap();
        let again = read(&medium, place, table);
        let last = again.table().log(one).unwrap().grant(InodeNumber::new(599 % 7 + 1)).unwrap();
        assert_eq!((last.version, again.end), (LeaseVersion::new(599), ledger.end));
        let fits = ledger.has_room(10, 0);
        assert!(fits && !ledger.has_room(1 << 20, 0));
        for version in 700..710 {
            ledger.grant(one, unit(3), grant(version)).unwrap();
        }
        let full = (0..1_000).try_for_each(|_| ledger.grant(one, unit(3), grant(800)).map(|_| ()));
        assert!(matches!(full, Err(Error::LedgerFull)));
    }

    /// Lives that begin wherever the ring stands, also where a pad is needed before the first entry.
    #[test]
    fn lives_go_round_the_ring() {
        let medium = Recorder::new().medium();
        let mut one = ledger(&medium, 2 * BLOCK_BYTES as u64);
        let mut contained = one.end;
        for round in 0..200u64 {
            let place = one.place_after(one.pending().count());
            one.contained(one.pending().count());
            contained = LedgerPlace { ..place };
            one.open_log(LogUid::new(round + 1), &open_log(100), 1).unwrap();
            if round % 3 == 0 {
                one.close_log(LogUid::new(round + 1), Sequence::new(round)).unwrap();
            }
            let mut next = read(&medium, contained, Table::default());
            assert_eq!(next.end, one.end, "round {round}");
            next.begin_life(life(&next)).unwrap();
            one = next;
        }
        assert_eq!((one.life(), contained.life), (Life::new(201), Life::new(200)));
    }
}
