//! The ledger: the log that only SharedFS writes, for who was entitled to what and in which order (Assise §3.3,
//! "SharedFS logs and replicates each lease transfer").
//!
//! Guarantees: an entry is behind a fence when `append` returns; the table in memory is what replaying the entries
//! gives. What a flip contains is released: the entries before it are not needed any more. Settled lazily, by who
//! needs it.

use crate::damage::{LedgerEnd, ledger_end};
use crate::error::Error;
use crate::table::{Change, Grant, OpenLog, Table};
use format::checksum::Salt;
use format::envelope::Envelope;
use format::ledger::{Entry, EntryHeader, Event, GrantBody, Kind, OpenLogBody};
use format::superblock::{FileKind, MAGIC, OWNER_DAEMON, POOL_VERSION, Superblock};
use format::{BLOCK_BYTES, HEADER_BYTES, Incarnation, InodeNumber, LeaseVersion, LogUid, PoolUid, Sequence};
use pmem::ring::{AppendError, AppendRing, Place, scan};
use pmem::{MediaError, Medium, Region};
use std::collections::VecDeque;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Name of its file.
pub const LEDGER_FILE: &str = "ledger";

/// Uid that salts its checksums: no update log has it.
const LEDGER_UID: LogUid = LogUid::new(u64::MAX);

/// Where its ring begins.
const RING_START: u64 = BLOCK_BYTES as u64;

/// Lives of the ledger, the last ones, whose entries are told from damaged ones.
const LIVES_MAX: usize = 4096;

/// A change that no flip contains yet, and where the ledger goes on after its entry.
pub(crate) struct Pending {
    pub change: Change,
    pub after: Place,
}

/// The ledger with its table.
pub(crate) struct Ledger {
    ring: AppendRing,
    incarnation: Incarnation,
    table: Table,
    pending: VecDeque<Pending>,
    /// Last entry that was appended.
    last: Sequence,
    settled: Sequence,
}

/// Where the ledger stands in the tree's last flip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor {
    /// The next entry's place; position 0 for a ledger that was never written.
    pub next: Place,
    pub incarnation: Incarnation,
}

/// What replaying a ledger found.
#[derive(Debug)]
pub(crate) struct Replayed {
    /// The place behind the last entry.
    pub next: Place,
    /// What stands there.
    pub end: LedgerEnd,
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
            reserved: U32::new(0),
            created_ns: U64::new(0),
            geometry: U64::new(0),
        };
        region.write(0, &superblock.encode());
        region.settle()?;
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

    /// Replays what stands after the last flip into `table`, and says how it ends. Writes nothing.
    pub fn replay(
        medium: &Medium,
        pool: PoolUid,
        anchor: Anchor,
        table: &mut Table,
        mut seen: impl FnMut(&Entry<'_>, LeaseVersion),
    ) -> Result<Replayed, Error> {
        let region = Self::open_file(medium, pool)?;
        let from = Place { position: anchor.next.position.max(RING_START), sequence: anchor.next.sequence };
        let salt = Salt::of_log(LEDGER_UID, anchor.incarnation);
        let end = region.bytes() / HEADER_BYTES as u64 * HEADER_BYTES as u64;
        if !from.position.is_multiple_of(HEADER_BYTES as u64) || from.position >= end {
            return Err(Error::File(LEDGER_FILE.to_owned(), format::DecodeError::Field("position")));
        }
        let mut frames = scan(&region, RING_START, salt, from, region.bytes());
        for frame in &mut frames {
            let frame = frame?;
            // A frame with the right checksum was written by a daemon of this pool.
            let entry =
                Entry::decode(&frame.bytes).map_err(|error| Error::File(LEDGER_FILE.to_owned(), error))?;
            let (header, _) =
                format::call::split::<EntryHeader>(&frame.bytes).expect("a decoded entry has a header");
            seen(&entry, header.version);
            table.apply(&entry, header.version);
        }
        let next = frames.place();
        let lives = (0..anchor.incarnation.get()).rev().take(LIVES_MAX);
        let earlier = lives.map(|life| Salt::of_log(LEDGER_UID, Incarnation::new(life)));
        Ok(Replayed { next, end: ledger_end(&region, RING_START, salt, next, earlier)? })
    }

    /// Begins a new life of the ledger: empty, after all that was replayed. The caller has made a flip that says so
    /// and contains everything before.
    pub fn begin(medium: &Medium, pool: PoolUid, anchor: Anchor) -> Result<Self, Error> {
        let region = Self::open_file(medium, pool)?;
        let salt = Salt::of_log(LEDGER_UID, anchor.incarnation);
        let last = Sequence::new(anchor.next.sequence.get().saturating_sub(1));
        let ring = AppendRing::new(region, RING_START, salt, anchor.next, anchor.next);
        let incarnation = anchor.incarnation;
        Ok(Self { ring, incarnation, table: Table::default(), pending: VecDeque::new(), last, settled: last })
    }

    /// The anchor of a ledger that begins anew after `last`.
    pub fn anchor_after(last: Sequence, incarnation: Incarnation) -> Anchor {
        Anchor { next: Place { position: RING_START, sequence: last.next() }, incarnation }
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    pub fn table_mut(&mut self) -> &mut Table {
        &mut self.table
    }

    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Last entry that was appended.
    pub fn last(&self) -> Sequence {
        self.last
    }

    /// Last entry that was settled.
    pub fn settled(&self) -> Sequence {
        self.settled
    }

    /// Settles all that was appended.
    pub fn settle(&mut self) -> Result<(), Error> {
        if self.settled < self.last {
            self.ring.region().settle()?;
            self.settled = self.last;
        }
        Ok(())
    }

    /// True when it is time for a flip that contains what is pending: more than half full, or many changes.
    pub fn wants_flip(&self, pending_max: usize) -> bool {
        self.ring.live_bytes() > self.ring.bytes() / 2 || self.pending.len() >= pending_max
    }

    /// Changes that no flip contains, oldest first.
    pub fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.pending.iter()
    }

    /// Where the ledger goes on after the first `changes` pending ones.
    pub fn place_after(&self, changes: usize) -> Place {
        let before = changes.checked_sub(1).and_then(|index| self.pending.get(index));
        before.map_or(self.ring.head(), |pending| pending.after)
    }

    /// A flip contains the first `changes` pending ones.
    pub fn contained(&mut self, changes: usize) {
        let place = self.place_after(changes);
        self.pending.drain(..changes);
        self.ring.release_to(place);
    }

    fn append(
        &mut self,
        kind: Kind,
        header: EntryHeader,
        payload: &[u8],
        change: impl FnOnce(&mut Table) -> Change,
    ) -> Result<Sequence, Error> {
        let payload_bytes = u32::try_from(payload.len()).expect("groups are counted at the socket");
        let header = EntryHeader { envelope: Envelope::new(kind as u8, 0, payload_bytes), ..header };
        let bytes: [u8; HEADER_BYTES] = zerocopy::transmute!(header);
        let appended = self.ring.append(bytes, &[payload.into()]).map_err(|error| match error {
            AppendError::Full => Error::LedgerFull,
            AppendError::Fault => unreachable!("the payload lies in this process"),
        })?;
        // Others rely on the entry, settled or not.
        self.ring.region().check()?;
        self.last = appended.sequence;
        let change = change(&mut self.table);
        self.pending.push_back(Pending { change, after: self.ring.tail() });
        Ok(appended.sequence)
    }

    /// A log begins.
    ///
    /// # Errors
    /// `LedgerFull`, as of all appends: flip, then append again.
    pub fn open_log(&mut self, uid: LogUid, log: OpenLog, pid: u32) -> Result<Sequence, Error> {
        let groups: Vec<U32> = log.caller.groups.iter().map(|group| U32::new(*group)).collect();
        let body = OpenLogBody {
            uid: U32::new(log.caller.uid),
            gid: U32::new(log.caller.gid),
            groups: U32::new(u32::try_from(groups.len()).expect("groups are counted at the socket")),
            pid: U32::new(pid),
            first_inode: log.first_inode,
            inodes: U64::new(log.inodes),
        };
        let payload = [body.as_bytes(), groups.as_bytes()].concat();
        let header = header_of(uid, InodeNumber::NONE, log.version, Sequence::default());
        self.append(Kind::OpenLog, header, &payload, |table| table.open(uid, log))
    }

    /// A log may change an inode.
    pub fn grant(&mut self, uid: LogUid, inode: InodeNumber, grant: Grant) -> Result<Sequence, Error> {
        let body = GrantBody {
            from: grant.from,
            follow: grant.follow,
            rights: U32::new(grant.rights),
            reserved: U32::new(0),
        };
        let header = header_of(uid, inode, grant.version, Sequence::default());
        self.append(Kind::Grant, header, body.as_bytes(), |table| table.grant(uid, inode, grant))
    }

    /// A log may no longer change an inode; of it, records up to `cut` count.
    pub fn end(
        &mut self,
        uid: LogUid,
        inode: InodeNumber,
        version: LeaseVersion,
        cut: Sequence,
    ) -> Result<Sequence, Error> {
        let header = header_of(uid, inode, version, cut);
        self.append(Kind::End, header, &[], |table| table.end(uid, inode, version))
    }

    /// A log ends with record `cut`.
    pub fn close_log(&mut self, uid: LogUid, cut: Sequence) -> Result<Sequence, Error> {
        let header = header_of(uid, InodeNumber::NONE, LeaseVersion::default(), cut);
        self.append(Kind::CloseLog, header, &[], |table| table.close(uid))
    }
}

fn header_of(log: LogUid, inode: InodeNumber, version: LeaseVersion, cut: Sequence) -> EntryHeader {
    let envelope = Envelope::new(Kind::Pad as u8, 0, 0);
    EntryHeader { envelope, log, inode, version, cut, reserved: U64::new(0) }
}

/// True if the entry names a version: where the counter of versions has to go on after a restart.
pub(crate) fn names_version(event: &Event<'_>) -> bool {
    matches!(event, Event::OpenLog { .. } | Event::Grant { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::RIGHT_WRITE;
    use format::Stamp;
    use pmem::Recorder;
    use vfs::Caller;

    const POOL: PoolUid = PoolUid::new(5);

    fn ledger(medium: &Medium, file_bytes: u64) -> Ledger {
        Ledger::format(medium, POOL, file_bytes).unwrap();
        let anchor = Ledger::anchor_after(Sequence::new(0), Incarnation::new(1));
        Ledger::begin(medium, POOL, anchor).unwrap()
    }

    fn open_log(first: u64) -> OpenLog {
        let caller = Caller { uid: 7, gid: 8, groups: vec![9, 10] };
        OpenLog::new(caller, LeaseVersion::new(first), InodeNumber::new(first), 10)
    }

    fn grant(version: u64) -> Grant {
        let version = LeaseVersion::new(version);
        Grant { version, from: Sequence::new(3), follow: Stamp::default(), rights: RIGHT_WRITE }
    }

    #[test]
    fn replay_gives_the_table_that_was() {
        let medium = Recorder::new().medium();
        let mut ledger = ledger(&medium, 1 << 16);
        let (one, two, inode) = (LogUid::new(1), LogUid::new(2), InodeNumber::new);
        ledger.open_log(one, open_log(100), 1).unwrap();
        ledger.open_log(two, open_log(200), 2).unwrap();
        ledger.grant(one, inode(5), grant(301)).unwrap();
        ledger.grant(one, inode(6), grant(302)).unwrap();
        ledger.end(one, inode(5), LeaseVersion::new(301), Sequence::new(9)).unwrap();
        ledger.end(one, inode(105), LeaseVersion::new(100), Sequence::new(9)).unwrap();
        ledger.close_log(two, Sequence::new(4)).unwrap();
        let mut table = Table::default();
        let anchor = Ledger::anchor_after(Sequence::new(0), Incarnation::new(1));
        let replayed = Ledger::replay(&medium, POOL, anchor, &mut table, |_, _| {}).unwrap();
        assert_eq!(&table, ledger.table());
        assert_eq!((replayed.next.sequence, replayed.end), (ledger.last().next(), LedgerEnd::Whole));
        // Another life does not see what this one wrote.
        let other = Ledger::anchor_after(Sequence::new(0), Incarnation::new(2));
        let mut empty = Table::default();
        Ledger::replay(&medium, POOL, other, &mut empty, |_, _| {}).unwrap();
        assert_eq!(empty, Table::default());
    }

    #[test]
    fn a_flip_makes_room_and_the_rest_is_replayed_from_it() {
        let medium = Recorder::new().medium();
        let mut ledger = ledger(&medium, 3 * BLOCK_BYTES as u64);
        let (one, mut anchor) = (LogUid::new(1), None);
        ledger.open_log(one, open_log(100), 1).unwrap();
        for version in 200..600 {
            if ledger.wants_flip(20) {
                let changes = ledger.pending().count() / 2;
                let next = ledger.place_after(changes);
                ledger.contained(changes);
                let mut table = Table::default();
                table.open(one, open_log(100));
                anchor = Some((Anchor { next, incarnation: Incarnation::new(1) }, table));
            }
            ledger.grant(one, InodeNumber::new(version % 7 + 1), grant(version)).unwrap();
        }
        let (anchor, mut table) = anchor.unwrap();
        Ledger::replay(&medium, POOL, anchor, &mut table, |_, _| {}).unwrap();
        let last = table.log(one).unwrap().grant(InodeNumber::new(599 % 7 + 1)).unwrap();
        assert_eq!(last.version, LeaseVersion::new(599));
        assert!(matches!(
            (0..1_000).try_for_each(|_| ledger.grant(one, InodeNumber::new(3), grant(700)).map(|_| ())),
            Err(Error::LedgerFull)
        ));
    }
}
