//! Update logs as SharedFS reads them: by `pread` into memory of its own, never through a mapping, because the file
//! belongs to a process that may change or truncate it at any time.
//!
//! Guarantees: whatever lies in the file, and however long it is made, reading gives frames that are whole, in order, and
//! were fetched once, or ends; it neither panics, nor maps or allocates more than the largest log has, nor takes longer
//! than a time in proportion to that.

use format::checksum::Salt;
use format::envelope::{FRAME_ALIGN, check_frame};
use format::superblock::{FileKind, MAGIC, POOL_VERSION, Superblock};
use format::{
    BLOCK_BYTES, ChainNumber, DecodeError, Envelope, HEADER_BYTES, Incarnation, LogUid, PoolUid, Sequence,
};
use ipc::pages::Digested;
use pmem::ring::PAD_KIND;
use pmem::{MediaError, Medium, Region};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use zerocopy::little_endian::{U16, U32, U64};

/// Where a log's ring begins.
pub const RING_START: u64 = BLOCK_BYTES as u64;

/// Bytes fetched at once when frames are small.
const WINDOW_BYTES: u64 = 64 << 10;

/// Bytes fetched at first where few frames are expected.
const FEW_BYTES: u64 = 4 << 10;

/// Name of a log's file.
pub fn log_file(log: LogUid, incarnation: Incarnation) -> String {
    format!("log-{log}-{incarnation}")
}

/// Name of the lock table of a log's session.
pub fn lock_table_file(log: u64) -> String {
    format!("log-{log}-locks")
}

/// Whether a pool file is an update log's, or beside one: of what its owner may cut, and nothing else depends on.
pub fn is_log_file(name: &str) -> bool {
    name.starts_with("log-")
}

fn superblock(
    pool: PoolUid,
    (log, incarnation): (LogUid, Incarnation),
    file_bytes: u64,
    owner: u32,
) -> Superblock {
    Superblock {
        magic: MAGIC,
        version: U16::new(POOL_VERSION),
        kind: U16::new(FileKind::Log as u16),
        checksum: U32::new(0),
        pool,
        id: U64::new(log.get()),
        file_bytes: U64::new(file_bytes),
        owner: U32::new(owner),
        chain: ChainNumber::ONLY,
        created_ns: U64::new(0),
        geometry: U64::new(u64::from(incarnation.get())),
    }
}

/// Bytes of a ring between two of its places, of which `to` is not before `from`.
pub fn bytes_between((ring_start, ring_end): (u64, u64), from: Digested, to: Digested) -> u64 {
    if from.sequence >= to.sequence {
        return 0;
    }
    match to.position.checked_sub(from.position) {
        Some(0) => ring_end - ring_start,
        Some(between) => between,
        None => ring_end - ring_start - (from.position - to.position),
    }
}

/// A log's file with what makes its frames its own.
pub struct LogFile {
    /// Its name in the pool.
    pub name: String,
    region: Region,
    /// A second descriptor, read by position; none for the medium of the tests, which nobody can truncate.
    file: Option<File>,
    salt: Salt,
    end: u64,
}

impl LogFile {
    /// Makes an empty log. Durable when this returns.
    ///
    /// # Errors
    /// What the medium said: `Exists`, `NoSpace`, `Os`.
    pub fn create(
        medium: &Medium,
        pool: PoolUid,
        (log, incarnation): (LogUid, Incarnation),
        file_bytes: u64,
        owner: u32,
    ) -> Result<Self, MediaError> {
        let name = log_file(log, incarnation);
        let region = medium.create(&name, file_bytes)?;
        let salt = Salt::of_log(log, incarnation);
        region.write(0, &superblock(pool, (log, incarnation), file_bytes, owner).encode());
        region.settle()?;
        Self::of_region(name, region, salt)
    }

    /// Says in the superblock of a log that was made for nobody whose it is. That need not be durable: it is for people
    /// who look, the ledger is what a start believes.
    pub fn give(&self, pool: PoolUid, life: (LogUid, Incarnation), owner: u32) {
        self.region.write(0, &superblock(pool, life, self.region.bytes(), owner).encode());
    }

    /// Opens a log that an earlier daemon made; `None` if there is none, or what is there is not it: its owner, who can
    /// give the file any length, made it too short for a record, or longer than `bytes_max`, which no log was made.
    ///
    /// # Errors
    /// What the medium or the machine said, for nothing that the log's owner can bring about.
    pub fn open(
        medium: &Medium,
        (log, incarnation): (LogUid, Incarnation),
        bytes_max: u64,
    ) -> Result<Option<Self>, MediaError> {
        let name = log_file(log, incarnation);
        let region = match medium.open_at_most(&name, bytes_max) {
            Ok(region) if region.bytes() >= RING_START + HEADER_BYTES as u64 => region,
            Ok(_) | Err(MediaError::NotFound | MediaError::Length) => return Ok(None),
            Err(error) => return Err(error),
        };
        Self::of_region(name, region, Salt::of_log(log, incarnation)).map(Some)
    }

    fn of_region(name: String, region: Region, salt: Salt) -> Result<Self, MediaError> {
        let duplicate = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        let file = region.descriptor().map(duplicate).transpose();
        let file = file.map_err(|error| MediaError::Os(error.raw_os_error().unwrap_or(0)))?;
        let end = region.bytes() / FRAME_ALIGN as u64 * FRAME_ALIGN as u64;
        Ok(Self { name, region, file, salt, end })
    }

    /// The file as its LibFS gets it.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of its ring.
    pub fn ring_bytes(&self) -> u64 {
        self.end - RING_START
    }

    /// Makes what was appended survive all that the medium can survive.
    ///
    /// # Errors
    /// What the medium said.
    pub fn settle(&self) -> Result<(), MediaError> {
        self.region.settle()
    }

    /// Reads as much as is there: less than asked if the file is shorter than it was made.
    fn read(&self, offset: u64, target: &mut [u8]) -> Result<usize, MediaError> {
        let Some(file) = &self.file else {
            self.region.read(offset, target)?;
            return Ok(target.len());
        };
        let mut done = 0;
        while done < target.len() {
            match file.read_at(&mut target[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(MediaError::Os(error.raw_os_error().unwrap_or(0))),
            }
        }
        Ok(done)
    }

    /// Whether a whole frame stands somewhere that was appended after the one that should follow `end`. Frames are made
    /// durable one after the other: then the log did not end there, the medium lost what stood there.
    ///
    /// Frames do not overlap, so all together they have no more bytes than the ring, and no more are summed: headers that
    /// claim more stand in what a user wrote, and a find that is missed for them is missed by him alone.
    ///
    /// # Errors
    /// What the medium said.
    pub fn goes_on_behind(&self, end: Digested) -> Result<bool, MediaError> {
        let (mut window, mut left) = (Vec::new(), self.ring_bytes());
        for window_at in (RING_START..self.end).step_by(WINDOW_BYTES as usize) {
            window.resize(WINDOW_BYTES.min(self.end - window_at) as usize, 0);
            let there = self.read(window_at, &mut window)?;
            for (header, index) in window[..there].chunks_exact(FRAME_ALIGN).zip(0..) {
                let envelope = Envelope::decode(header).ok();
                let later = envelope.filter(|envelope| envelope.sequence > end.sequence.next());
                let Some(envelope) = later else { continue };
                let position = window_at + index * FRAME_ALIGN as u64;
                let bytes = envelope.frame_bytes();
                if bytes > left.min(self.end - position) {
                    continue;
                }
                left -= bytes;
                if self.is_whole(position, header, &envelope)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether the frame of a header, which lies within the ring, has the right checksum.
    fn is_whole(&self, position: u64, header: &[u8], envelope: &Envelope) -> Result<bool, MediaError> {
        let payload = usize::try_from(envelope.payload_bytes.get()).expect("a ring fits an address space");
        let mut frame = header.to_vec();
        frame.resize(HEADER_BYTES + payload, 0);
        let there = self.read(position + HEADER_BYTES as u64, &mut frame[HEADER_BYTES..])?;
        Ok(there == payload && check_frame(self.salt, &frame).is_ok())
    }

    /// The salt of its frames.
    pub fn salt(&self) -> Salt {
        self.salt
    }

    /// Where its ring ends.
    pub fn ring_end(&self) -> u64 {
        self.end
    }

    /// Reads frames in order, the first behind `from`.
    pub fn frames(&self, from: Digested) -> Frames<'_> {
        self.frames_by(from, WINDOW_BYTES)
    }

    /// The same where few are expected: little is read at first.
    pub fn few_frames(&self, from: Digested) -> Frames<'_> {
        self.frames_by(from, FEW_BYTES)
    }

    fn frames_by(&self, from: Digested, fetch_bytes: u64) -> Frames<'_> {
        let at_frame = from.position.is_multiple_of(FRAME_ALIGN as u64);
        let inside = at_frame && (RING_START..self.end).contains(&from.position);
        let left = if inside { self.ring_bytes() } else { 0 };
        Frames { log: self, at: from, left, window: Vec::new(), window_at: 0, fetch_bytes }
    }
}

/// A frame, whole and checked, in memory of our own.
#[derive(Debug, PartialEq, Eq)]
pub struct LogFrame<'a> {
    /// Header and payload: what `Record::decode` takes.
    pub bytes: &'a [u8],
    /// The log up to and with this frame.
    pub after: Digested,
}

/// Frames of a log, up to the first that is none.
pub struct Frames<'a> {
    log: &'a LogFile,
    at: Digested,
    /// Bytes of the ring not yet seen: reading goes round once.
    left: u64,
    window: Vec<u8>,
    window_at: u64,
    /// Bytes of the next fetch.
    fetch_bytes: u64,
}

impl Frames<'_> {
    /// The next frame; `None` where the log ends.
    ///
    /// # Errors
    /// What the medium said.
    #[expect(
        clippy::should_implement_trait,
        reason = "a frame borrows the window, which an iterator's items cannot"
    )]
    pub fn next(&mut self) -> Result<Option<LogFrame<'_>>, MediaError> {
        let position = self.at.position;
        let room = self.left.min(self.log.end.saturating_sub(position));
        if room < HEADER_BYTES as u64 || !self.fetch(position, HEADER_BYTES as u64)? {
            return Ok(None);
        }
        let Some(envelope) = self.envelope(position) else { return Ok(None) };
        let sequence = self.at.sequence.next();
        let is_pad = envelope.kind == PAD_KIND;
        let payload_bytes = u64::from(envelope.payload_bytes.get());
        let well_formed = envelope.sequence == sequence && !(is_pad && payload_bytes != 0);
        let bytes = HEADER_BYTES as u64 + payload_bytes;
        if !well_formed || envelope.frame_bytes() > room {
            return Ok(None);
        }
        if !self.fetched(position, bytes) {
            // The header was fetched already: what follows must not fetch it again.
            let header = self.windowed(position, HEADER_BYTES as u64).to_vec();
            let payload = usize::try_from(payload_bytes).expect("a ring fits an address space");
            self.window.resize(HEADER_BYTES + payload, 0);
            self.window_at = position;
            self.window[..HEADER_BYTES].copy_from_slice(&header);
            if self.log.read(position + HEADER_BYTES as u64, &mut self.window[HEADER_BYTES..])? < payload {
                return Ok(None);
            }
        }
        if check_frame(self.log.salt, self.windowed(position, bytes)).is_err() {
            return Ok(None);
        }
        let taken = if is_pad { self.log.end - position } else { envelope.frame_bytes() };
        self.left -= taken.min(self.left);
        let next = position + taken;
        self.at = Digested { sequence, position: if next == self.log.end { RING_START } else { next } };
        Ok(Some(LogFrame { bytes: self.windowed(position, bytes), after: self.at }))
    }

    fn envelope(&self, position: u64) -> Option<Envelope> {
        Envelope::decode(self.windowed(position, HEADER_BYTES as u64)).ok()
    }

    /// True if these bytes are in the window.
    fn fetched(&self, position: u64, bytes: u64) -> bool {
        position >= self.window_at && position + bytes <= self.window_at + self.window.len() as u64
    }

    fn windowed(&self, position: u64, bytes: u64) -> &[u8] {
        let start = usize::try_from(position - self.window_at).expect("a window fits an address space");
        &self.window[start..start + usize::try_from(bytes).expect("a window fits an address space")]
    }

    /// Makes the window hold these bytes; false if the file is too short.
    fn fetch(&mut self, position: u64, bytes: u64) -> Result<bool, MediaError> {
        if self.fetched(position, bytes) {
            return Ok(true);
        }
        let wanted = self.fetch_bytes.min(self.log.end - position);
        self.fetch_bytes = WINDOW_BYTES;
        self.window.resize(usize::try_from(wanted).expect("a window fits an address space"), 0);
        self.window_at = position;
        let there = self.log.read(position, &mut self.window)?;
        self.window.truncate(there);
        Ok(self.fetched(position, bytes))
    }
}

/// The first place of a log.
pub const BEGINNING: Digested = Digested { sequence: Sequence::new(0), position: RING_START };

/// Why a log ended before its commit word said.
pub const TORN: DecodeError = DecodeError::Truncated;

#[cfg(test)]
mod tests {
    use super::*;
    use format::record::{Kind, Record};
    use pmem::Recorder;
    use pmem::ring::{AppendError, AppendRing, RingPosition};

    const LOG: (LogUid, Incarnation) = (LogUid::new(7), Incarnation::new(1));

    fn place(at: Digested) -> RingPosition {
        RingPosition { position: at.position, sequence: at.sequence.next() }
    }

    fn header(bytes: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let envelope = Envelope::new(Kind::Write as u8, 0, bytes as u32);
        header[..24].copy_from_slice(zerocopy::IntoBytes::as_bytes(&envelope));
        header[24] = 1;
        header
    }

    fn log(medium: &Medium, bytes: u64) -> (LogFile, AppendRing) {
        let log = LogFile::create(medium, PoolUid::new(1), LOG, bytes, 0).unwrap();
        let ring = AppendRing::empty(log.region().clone(), RING_START, log.salt, Sequence::new(1));
        (log, ring)
    }

    /// Frames with where the log goes on after each.
    fn read_all(log: &LogFile, from: Digested) -> Vec<(Vec<u8>, Digested)> {
        let (mut frames, mut found) = (log.frames(from), Vec::new());
        while let Some(frame) = frames.next().unwrap() {
            found.push((frame.bytes.to_vec(), frame.after));
        }
        found
    }

    /// What is appended is read, over many rounds of the ring, pads included, small and large.
    fn rounds(medium: &Medium) {
        let (log, mut ring) = log(medium, 5 * BLOCK_BYTES as u64 + 64);
        let (mut at, mut expected) = (BEGINNING, Vec::new());
        for round in 0..400usize {
            let payload = vec![round as u8; round * 37 % 3_000];
            match ring.append(header(payload.len()), &[payload.as_slice().into()]) {
                Ok(_) => expected.push(payload),
                Err(AppendError::Full) => {
                    let frames = read_all(&log, at);
                    let records = frames.iter().map(|(frame, _)| Record::decode(frame).unwrap());
                    let found: Vec<_> = records
                        .filter_map(|record| match record.operation {
                            format::record::Operation::Write { bytes, .. } => Some(bytes.to_vec()),
                            _ => None,
                        })
                        .collect();
                    assert_eq!(found, expected);
                    at = frames.last().unwrap().1;
                    ring.release_to(place(at));
                    expected.clear();
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        assert!(at.sequence > Sequence::new(100));
    }

    #[test]
    fn what_is_appended_is_read() {
        rounds(&Recorder::new().medium());
        let folder = tempfile::tempdir().unwrap();
        rounds(&Medium::file(folder.path()).unwrap());
    }

    #[test]
    fn a_truncated_file_ends_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        let (log, mut ring) = log(&medium, 1 << 20);
        ring.append(header(10), &[[1; 10].as_slice().into()]).unwrap();
        ring.append(header(200_000), &[vec![2; 200_000].as_slice().into()]).unwrap();
        let file = File::options().write(true).open(folder.path().join(&log.name)).unwrap();
        file.set_len(RING_START + 256).unwrap();
        assert_eq!(read_all(&log, BEGINNING).len(), 1);
        file.set_len(RING_START + 80_000).unwrap();
        assert_eq!(read_all(&log, BEGINNING).len(), 1);
        file.set_len(10).unwrap();
        assert_eq!(read_all(&log, BEGINNING), []);
    }

    /// A record behind one that was lost is found. Behind headers that each claim the rest of the ring it is looked for
    /// no longer than it takes to sum the ring once.
    #[test]
    fn the_search_behind_a_lost_frame_sums_the_ring_once() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        let (log, mut ring) = log(&medium, RING_START + (256 << 10));
        for length in [100, 300, 500] {
            ring.append(header(length), &[vec![3; length].as_slice().into()]).unwrap();
        }
        assert!(!log.goes_on_behind(read_all(&log, BEGINNING)[2].1).unwrap());
        log.region().write(RING_START + 20, &[1; 4]);
        assert!(log.goes_on_behind(BEGINNING).unwrap());

        for position in (RING_START..log.end).step_by(FRAME_ALIGN) {
            let payload_bytes = log.end - position - HEADER_BYTES as u64;
            let mut claim = header(payload_bytes as usize);
            claim[16..24].copy_from_slice(&(1u64 << 40).to_le_bytes());
            assert_eq!(Envelope::decode(&claim).unwrap().sequence, Sequence::new(1 << 40));
            log.region().write(position, &claim);
        }
        let before = bytes_read();
        assert!(!log.goes_on_behind(BEGINNING).unwrap());
        let read = bytes_read() - before;
        // The ring once for its headers, and once for what they claim.
        assert!((log.ring_bytes()..3 * log.ring_bytes()).contains(&read), "{read} of {}", log.ring_bytes());
    }

    /// Bytes that this thread has read from files.
    fn bytes_read() -> u64 {
        let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
    }

    #[test]
    fn a_log_longer_than_any_that_was_made_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        drop(log(&medium, 1 << 16));
        let is_there = || LogFile::open(&medium, LOG, 1 << 16).unwrap().is_some();
        assert!(is_there());
        let file = File::options().write(true).open(folder.path().join(log_file(LOG.0, LOG.1))).unwrap();
        for bytes in [0, 100, RING_START, (1 << 16) + 1, 1 << 40] {
            file.set_len(bytes).unwrap();
            assert!(!is_there(), "{bytes}");
        }
        file.set_len(1 << 16).unwrap();
        assert!(is_there());
    }

    #[test]
    fn places_that_are_none_give_nothing() {
        let medium = Recorder::new().medium();
        let (log, mut ring) = log(&medium, 1 << 16);
        ring.append(header(10), &[[1; 10].as_slice().into()]).unwrap();
        for position in [0, 1, RING_START + 1, 1 << 16, u64::MAX] {
            assert_eq!(read_all(&log, Digested { position, ..BEGINNING }), []);
        }
    }

    proptest::proptest! {
        /// Any bytes anywhere in the ring: reading ends, and every frame it gives has the right checksum.
        #[test]
        fn any_bytes_are_survived(
            changes in proptest::collection::vec((0u64..16_320, proptest::collection::vec(0u8.., 1..64)), 1..20)
        ) {
            let medium = Recorder::new().medium();
            let (log, mut ring) = log(&medium, RING_START + 16_384);
            for length in [0, 100, 4_000, 1, 5_000] {
                ring.append(header(length), &[vec![3; length].as_slice().into()]).unwrap();
            }
            for (offset, bytes) in changes {
                log.region().write(RING_START + offset, &bytes);
            }
            for (frame, _) in read_all(&log, BEGINNING) {
                proptest::prop_assert!(check_frame(log.salt, &frame).is_ok());
            }
        }
    }
}
