//! Reads update logs on behalf of SharedFS: each byte is copied once into its own memory, because the owner of the file may
//! change or truncate it at any time. In memory, a part of the file that was read before is copied from a mapping
//! ([`Region::map_for_reading`]), everything else by `pread`: for each page `pread` looks up memory that is in no cache.
//!
//! Guarantees for any contents and length of the file: reading returns complete frames in order, each fetched once,
//! or ends. It never panics, never maps or allocates more than the size of the largest log, allocates no space in a file from
//! which none was taken away, and takes time proportional to that size at most.

use crate::hashes::RecordHashes;
use format::checksum::Salt;
use format::envelope::{FRAME_ALIGN, check_and_sum, check_frame};
use format::hash::{HashKey, RecordsHash};
use format::superblock::{FileKind, MAGIC, POOL_VERSION, Superblock};
use format::{
    BLOCK_BYTES, ChainNumber, DecodeError, Envelope, HEADER_BYTES, Incarnation, LogUid, PoolUid, Sequence,
};
use ipc::LongWord;
use ipc::pages::Digested;
use ipc::sync::Ordering;
use pmem::ring::PAD_KIND;
use pmem::{MediaError, Medium, ReadMapping, Region, Sink};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Start of the ring in a log's file.
pub const RING_START: u64 = BLOCK_BYTES as u64;

/// No log's file is longer, whatever the settings are: they may have been others when the file was made.
pub const LOG_BYTES_MAX: u64 = 64 << 20;

/// Bytes of a log's file that have space at first, where the daemon's settings do not say.
pub const FIRST_SPACE: u64 = 1 << 20;

/// Bytes of a fetch.
const WINDOW_BYTES: u64 = 64 << 10;

/// Fewer bytes are read by `pread` while there is no mapping: a long digest fetches more at a time, and makes one.
const MAPPED_BYTES_MIN: u64 = WINDOW_BYTES / 2;

/// Bytes of the first fetch if few frames are expected: a header, and the rest of a short frame. Memory behind the last frame is
/// in no cache, and reading it takes longer than the frame.
const FEW_BYTES: u64 = 256;
/// Factor by which the next fetch is longer.
const GROWTH: u64 = 4;

/// Name of a log's file.
pub fn log_file(log: LogUid, incarnation: Incarnation) -> String {
    format!("log-{log}-{incarnation}")
}

/// Name of the lock table of a log's session.
pub fn lock_table_file(log: u64) -> String {
    format!("log-{log}-locks")
}

/// True for the files of update logs and the files beside them: their owner may truncate them, and no other file
/// depends on them.
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

/// Number of bytes in a ring between two positions; `to` is not before `from`.
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

/// The size of a new log's file.
#[derive(Clone, Copy, Debug)]
pub struct LogSize {
    /// Its length.
    pub file_bytes: u64,
    /// Bytes that have space at first.
    pub space: u64,
}

/// The file of an update log, with the salt of its frames.
pub struct LogFile {
    /// Name of the file in the pool.
    pub name: String,
    region: Region,
    /// A second descriptor for reading by position. `None` on the test medium, whose files cannot be truncated.
    file: Option<File>,
    long: LongReading,
    salt: Salt,
    end: u64,
    /// Set where all readings of a record have to give the same bytes.
    hashes: OnceLock<RecordHashes>,
}

/// A log that is read again, in long pieces.
struct LongReading {
    /// The bytes from the start of the ring up to here were read as parts of frames, so they have space: reading other parts
    /// of the mapping would allocate it. An owner who takes space away gets it back. The file is not asked where it has
    /// space, because its owner can hold the lock that this takes.
    read_to: LongWord,
    /// The file, once a part is read again; `None` if it cannot be mapped.
    mapping: OnceLock<Option<ReadMapping>>,
}

impl LongReading {
    fn new() -> Self {
        Self { read_to: LongWord::new(RING_START), mapping: OnceLock::new() }
    }

    /// A frame was read.
    fn note(&self, position: u64, bytes: u64) {
        // Relaxed, here and below: nothing else depends on the value, and an earlier one is right, too.
        let (read_to, end) = (self.read_to.load(Ordering::Relaxed), position + bytes);
        if position <= read_to && end > read_to {
            self.read_to.store(end, Ordering::Relaxed);
        }
    }

    /// Copies bytes from the mapping; false if they have to be read in another way, which overwrites an unknown part of
    /// `target`.
    fn read(&self, region: &Region, offset: u64, target: &mut [u8]) -> bool {
        let count = target.len();
        let end = offset + count as u64;
        if end > self.read_to.load(Ordering::Relaxed) {
            return false;
        }
        let mapping = match (count as u64) < MAPPED_BYTES_MIN {
            true => self.mapping.get(),
            false => Some(self.mapping.get_or_init(|| region.map_for_reading())),
        };
        let mapping = mapping.and_then(Option::as_ref).filter(|mapping| end <= mapping.bytes());
        mapping.is_some_and(|mapping| mapping.copy_to(offset, &mut Sink::from(target), count).is_ok())
    }
}

impl LogFile {
    /// Creates an empty log; [`Region::reserve`] gets more space. The log is durable when this returns.
    ///
    /// # Errors
    /// The error of the medium: `Exists`, `NoSpace`, `Os`.
    pub fn create(
        medium: &Medium,
        pool: PoolUid,
        (log, incarnation): (LogUid, Incarnation),
        LogSize { file_bytes, space }: LogSize,
        owner: u32,
    ) -> Result<Self, MediaError> {
        let name = log_file(log, incarnation);
        let region = medium.create_in_steps(&name, file_bytes, space.min(file_bytes))?;
        let salt = Salt::of_log(log, incarnation);
        region.write(0, &superblock(pool, (log, incarnation), file_bytes, owner).encode());
        region.sync()?;
        Self::of_region(name, region, salt)
    }

    /// Writes the owner into the superblock of a log that was created without one. This need not be durable: it is
    /// information for an operator, and a start relies on the ledger.
    pub fn give(&self, pool: PoolUid, life: (LogUid, Incarnation), owner: u32) {
        self.region.write(0, &superblock(pool, life, self.region.bytes(), owner).encode());
    }

    /// Opens a log of an earlier daemon that was made with this length: of a longer file only that part is used. Returns
    /// `None` if there is none, or if the file is shorter than a record. The owner can give the file any length.
    ///
    /// # Errors
    /// The error of the medium or of the machine. The owner of the log cannot cause one.
    pub fn open(
        medium: &Medium,
        (log, incarnation): (LogUid, Incarnation),
        file_bytes: u64,
    ) -> Result<Option<Self>, MediaError> {
        let name = log_file(log, incarnation);
        let region = match medium.open_at_most(&name, file_bytes) {
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
        let (long, hashes) = (LongReading::new(), OnceLock::new());
        Ok(Self { name, region, file, long, salt, end, hashes })
    }

    /// The length that the log was made with, if the file says so and that it is of this log. The checksum does not count: a
    /// crash may leave one half of a superblock with an owner ([`Self::give`]), and the other half without.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn made_with(&self, (log, incarnation): (LogUid, Incarnation)) -> Result<Option<u64>, MediaError> {
        let mut bytes = [0; size_of::<Superblock>()];
        if self.read(0, &mut bytes)? < bytes.len() {
            return Ok(None);
        }
        let found = Superblock::read_from_bytes(&bytes).expect("the bytes of one");
        let named = (found.id.get(), found.geometry.get());
        let is_own = found.magic == MAGIC
            && found.kind.get() == FileKind::Log as u16
            && named == (log.get(), u64::from(incarnation.get()));
        Ok(is_own.then(|| found.file_bytes.get()))
    }

    /// True if the file is the one that the log was made with, of this length. Otherwise its owner or the medium made
    /// something else of it, and records may be gone.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn is_as_made(&self, life: (LogUid, Incarnation), file_bytes: u64) -> Result<bool, MediaError> {
        Ok(self.region.bytes() == file_bytes && self.made_with(life)? == Some(file_bytes))
    }

    /// The region that LibFS maps.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of its ring.
    pub fn ring_bytes(&self) -> u64 {
        self.end - RING_START
    }

    /// Syncs the log.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn sync(&self) -> Result<(), MediaError> {
        self.region.sync()
    }

    /// Writes bytes of a copy's file in their place in the ring. They are durable after [`Self::sync`]. A file that its owner
    /// has truncated since it was opened is extended.
    ///
    /// # Errors
    /// `Length`: the place is not in the ring. The error of the medium.
    pub fn put(&self, position: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let end = position.checked_add(bytes.len() as u64).ok_or(MediaError::Length)?;
        if position < RING_START || end > self.end {
            return Err(MediaError::Length);
        }
        match &self.file {
            Some(file) => file
                .write_all_at(bytes, position)
                .map_err(|error| MediaError::Os(error.raw_os_error().unwrap_or(0)))?,
            None => self.region.write(position, bytes),
        }
        Ok(())
    }

    /// Reads the bytes that exist: fewer than requested if the file was truncated.
    fn read(&self, offset: u64, target: &mut [u8]) -> Result<usize, MediaError> {
        let Some(file) = &self.file else {
            self.region.read(offset, target)?;
            return Ok(target.len());
        };
        if self.long.read(&self.region, offset, target) {
            return Ok(target.len());
        }
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

    /// True if the ring contains a complete frame with a higher sequence than the one that should follow `end`.
    /// Frames are made durable in order, so in that case the log did not end there: the medium has lost a frame.
    ///
    /// Frames do not overlap, so all of them together have at most the bytes of the ring, and no more bytes are
    /// checksummed. Headers that claim more are forged by the owner of the log; a lost frame missed for that reason
    /// affects only the owner.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn goes_on_behind(&self, end: Digested) -> Result<bool, MediaError> {
        let (mut window, mut left) = (Vec::new(), self.ring_bytes());
        let mut next = RING_START;
        while next < self.end {
            // Most of the file may have no space.
            let written = self.region.next_written(next).max(next);
            let window_at = next + (written - next) / WINDOW_BYTES * WINDOW_BYTES;
            if window_at >= self.end {
                break;
            }
            next = window_at + WINDOW_BYTES;
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

    /// True if the frame of a header, which lies within the ring, has the right checksum.
    fn is_whole(&self, position: u64, header: &[u8], envelope: &Envelope) -> Result<bool, MediaError> {
        let payload = usize::try_from(envelope.payload_bytes.get()).expect("a ring fits an address space");
        let mut frame = header.to_vec();
        frame.resize(HEADER_BYTES + payload, 0);
        let there = self.read(position + HEADER_BYTES as u64, &mut frame[HEADER_BYTES..])?;
        Ok(there == payload && check_frame(self.salt, &frame).is_ok())
    }

    /// From now on a record that was read before and has changed since ends the log, as an incomplete one does, and each
    /// record is read with its hash. A second call has no effect.
    pub fn keep_hashes(&self, key: HashKey) {
        self.hashes.get_or_init(|| RecordHashes::new(key, self.ring_bytes()));
    }

    /// True if a record was found to have changed since it was read before.
    pub fn has_changed(&self) -> bool {
        self.hashes.get().is_some_and(RecordHashes::found_change)
    }

    /// The salt of its frames.
    pub fn salt(&self) -> Salt {
        self.salt
    }

    /// End of the ring in the file.
    pub fn ring_end(&self) -> u64 {
        self.end
    }

    /// Reads frames in order, starting behind `from`.
    pub fn frames(&self, from: Digested) -> Frames<'_> {
        self.frames_by(from, WINDOW_BYTES, Vec::new())
    }

    /// [`Self::frames`] for few expected frames: the first fetches are short. `window` is the memory of an earlier reading.
    pub fn few_frames(&self, from: Digested, window: Vec<u8>) -> Frames<'_> {
        self.frames_by(from, FEW_BYTES, window)
    }

    fn frames_by(&self, from: Digested, fetch_bytes: u64, window: Vec<u8>) -> Frames<'_> {
        let at_frame = from.position.is_multiple_of(FRAME_ALIGN as u64);
        let inside = at_frame && (RING_START..self.end).contains(&from.position);
        let left = if inside { self.ring_bytes() } else { 0 };
        Frames { log: self, at: from, left, window, fetched: 0, window_at: 0, fetch_bytes, key: None }
    }
}

/// A complete and checked frame in this process's own memory.
#[derive(Debug, PartialEq, Eq)]
pub struct LogFrame<'a> {
    /// Header and payload, in the form that `Record::decode` expects.
    pub bytes: &'a [u8],
    /// The unsalted checksum of a payload that has the size of one block.
    pub block_sum: Option<u32>,
    /// Its hash, if the reader or the log asked for hashes.
    pub hash: Option<RecordsHash>,
    /// The log position after this frame.
    pub after: Digested,
}

/// The frames of a log, up to the first invalid one.
pub struct Frames<'a> {
    log: &'a LogFile,
    at: Digested,
    /// Bytes of the ring that were not read yet; each byte is read once.
    left: u64,
    /// Memory for what was fetched: the first `fetched` bytes are those of the log from `window_at` on.
    window: Vec<u8>,
    fetched: usize,
    window_at: u64,
    /// Bytes of the next fetch.
    fetch_bytes: u64,
    /// Key of the hashes of frames, other than those of the log.
    key: Option<HashKey>,
}

impl Frames<'_> {
    /// Each frame comes with its hash under this key.
    pub fn hashed_by(self, key: HashKey) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Reads the next frame; `None` at the end of the log.
    ///
    /// # Errors
    /// The error of the medium.
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
        if !self.fetch(position, bytes)? {
            return Ok(None);
        }
        let Ok((_, block_sum)) = check_and_sum(self.log.salt, self.windowed(position, bytes)) else {
            return Ok(None);
        };
        let taken = if is_pad { self.log.end - position } else { envelope.frame_bytes() };
        let frame = self.windowed(position, bytes);
        let mut hash = self.key.map(|key| key.of_record(frame));
        if let Some(hashes) = self.log.hashes.get() {
            let Some(found) = hashes.compare(sequence, frame, taken) else { return Ok(None) };
            hash = hash.or(Some(found));
        }
        self.left -= taken.min(self.left);
        self.log.long.note(position, envelope.frame_bytes());
        let next = position + taken;
        self.at = Digested { sequence, position: if next == self.log.end { RING_START } else { next } };
        Ok(Some(LogFrame { bytes: self.windowed(position, bytes), block_sum, hash, after: self.at }))
    }

    /// The memory of the window, for a later reading.
    pub fn into_window(self) -> Vec<u8> {
        self.window
    }

    fn envelope(&self, position: u64) -> Option<Envelope> {
        Envelope::decode(self.windowed(position, HEADER_BYTES as u64)).ok()
    }

    /// True if these bytes are in the window.
    fn has(&self, position: u64, bytes: u64) -> bool {
        position >= self.window_at && position + bytes <= self.window_at + self.fetched as u64
    }

    fn windowed(&self, position: u64, bytes: u64) -> &[u8] {
        let start = usize::try_from(position - self.window_at).expect("a window fits an address space");
        &self.window[start..start + usize::try_from(bytes).expect("a window fits an address space")]
    }

    /// Loads these bytes into the window; false if the file is too short. Bytes that are in the window stay: a header that was
    /// checked is not read again, since a second reading could give other bytes.
    fn fetch(&mut self, position: u64, bytes: u64) -> Result<bool, MediaError> {
        if self.has(position, bytes) {
            return Ok(true);
        }
        let size = |bytes: u64| usize::try_from(bytes).expect("a window fits an address space");
        let skipped = position.checked_sub(self.window_at).map_or(self.fetched, size).min(self.fetched);
        self.window.copy_within(skipped..self.fetched, 0);
        (self.fetched, self.window_at) = (self.fetched - skipped, position);
        let wanted = size(self.fetch_bytes.max(bytes).min(self.log.end - position));
        self.fetch_bytes = (self.fetch_bytes * GROWTH).min(WINDOW_BYTES);
        if self.window.len() < wanted {
            self.window.resize(wanted, 0);
        }
        let there = &mut self.window[self.fetched..wanted];
        self.fetched += self.log.read(position + self.fetched as u64, there)?;
        Ok(self.has(position, bytes))
    }
}

/// The first position of a log.
pub const BEGINNING: Digested = Digested { sequence: Sequence::new(0), position: RING_START };

/// The error of a log that ends before its commit word.
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
        let log =
            LogFile::create(medium, PoolUid::new(1), LOG, LogSize { file_bytes: bytes, space: bytes }, 0)
                .unwrap();
        let ring = AppendRing::empty(log.region().clone(), RING_START, log.salt, Sequence::new(1));
        (log, ring)
    }

    /// Frames with the log position after each.
    fn read_all(log: &LogFile, from: Digested) -> Vec<(Vec<u8>, Digested)> {
        let (mut frames, mut found) = (log.frames(from), Vec::new());
        while let Some(frame) = frames.next().unwrap() {
            found.push((frame.bytes.to_vec(), frame.after));
        }
        found
    }

    /// Appended frames are read back over many laps of the ring: pads, small and large frames.
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

    /// Finds a record behind a lost one. With headers that each claim the rest of the ring, the search checksums no
    /// more bytes than the ring has.
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
        // Reads the ring once for the headers, and once for the bytes that they claim.
        assert!((log.ring_bytes()..3 * log.ring_bytes()).contains(&read), "{read} of {}", log.ring_bytes());
    }

    /// Most of a log's file was never written to.
    #[test]
    fn the_search_behind_the_end_reads_what_was_written() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let medium = Medium::memory(folder.path()).unwrap();
        let log = LogFile::create(
            &medium,
            PoolUid::new(1),
            LOG,
            LogSize { file_bytes: 64 << 20, space: 1 << 20 },
            0,
        )
        .unwrap();
        let mut ring = AppendRing::empty(log.region().clone(), RING_START, log.salt, Sequence::new(1));
        for length in [300_000, 400_000] {
            ring.append(header(length), &[vec![3; length].as_slice().into()]).unwrap();
        }
        let before = bytes_read();
        assert!(log.goes_on_behind(BEGINNING).unwrap());
        assert!(!log.goes_on_behind(read_all(&log, BEGINNING)[1].1).unwrap());
        let read = bytes_read() - before;
        assert!(read < 8 << 20, "{read}");
    }

    /// The bytes behind a frame are not read with it: they are in no cache.
    #[test]
    fn reading_one_frame_reads_little_more() {
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        let (log, mut ring) = log(&medium, 1 << 20);
        let mut at = BEGINNING;
        for length in [1, 128, 4096, 64 << 10] {
            ring.append(header(length), &[vec![4; length].as_slice().into()]).unwrap();
            let before = bytes_read();
            let mut frames = log.few_frames(at, Vec::new());
            at = frames.next().unwrap().unwrap().after;
            let read = bytes_read() - before;
            let frame_bytes = HEADER_BYTES + length;
            // The count of the thread's bytes is a file of about a hundred bytes itself.
            assert!(read < 512 + frame_bytes as u64, "{read} for a frame of {frame_bytes}");
        }
    }

    /// Number of bytes that this thread has read from files.
    fn bytes_read() -> u64 {
        let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
    }

    /// A guarded medium in memory, and a log there of which half has space.
    fn log_in_memory() -> (tempfile::TempDir, Medium, LogFile, AppendRing) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let medium = Medium::memory(folder.path()).unwrap().guarded().unwrap();
        let size = LogSize { file_bytes: 1 << 20, space: 512 << 10 };
        let log = LogFile::create(&medium, PoolUid::new(1), LOG, size, 0).unwrap();
        let ring = AppendRing::empty(log.region().clone(), RING_START, log.salt, Sequence::new(1));
        (folder, medium, log, ring)
    }

    /// Reads a log twice, the second time from a mapping.
    fn read_until_mapped(log: &LogFile) {
        read_all(log, BEGINNING);
        read_all(log, BEGINNING);
        assert_eq!(log.long.mapping.get().unwrap().is_some(), cfg!(target_arch = "x86_64"));
    }

    #[test]
    fn a_log_in_memory_that_was_read_once_through_is_not_read_by_calls() {
        let (_folder, _medium, log, mut ring) = log_in_memory();
        let lengths = [4096, 1, 70_000, 128, 4096, 30_000, 4095];
        for length in lengths.repeat(4) {
            ring.append(header(length), &[vec![length as u8; length].as_slice().into()]).unwrap();
        }
        let frames = read_all(&log, BEGINNING);
        assert_eq!(frames.len(), 4 * lengths.len());
        read_until_mapped(&log);
        let before = bytes_read();
        assert_eq!(read_all(&log, BEGINNING), frames);
        let read = bytes_read() - before;
        // The last window reaches behind what was written.
        assert!(read < 2 * WINDOW_BYTES || cfg!(not(target_arch = "x86_64")), "{read} bytes by calls");
    }

    #[test]
    fn reading_a_log_allocates_no_space() {
        let (folder, _medium, log, mut ring) = log_in_memory();
        let name = folder.path().join(&log.name);
        let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&name).unwrap());
        let before = blocks();
        while ring.tail().position < 500 << 10 {
            ring.append(header(4096), &[[5; 4096].as_slice().into()]).unwrap();
        }
        read_until_mapped(&log);
        read_all(&log, BEGINNING);
        assert_eq!(blocks(), before);
    }

    #[test]
    fn a_log_that_its_owner_truncates_while_it_is_mapped_ends_there() {
        let (folder, medium, log, mut ring) = log_in_memory();
        while ring.tail().position < 500 << 10 {
            ring.append(header(4096), &[[5; 4096].as_slice().into()]).unwrap();
        }
        let frames = read_all(&log, BEGINNING);
        read_until_mapped(&log);
        let file = File::options().write(true).open(folder.path().join(&log.name)).unwrap();
        for (bytes, grown) in [(300 << 10, false), (100_001, true), (RING_START + 10, false), (0, true)] {
            file.set_len(bytes).unwrap();
            if grown {
                file.set_len(1 << 20).unwrap();
            }
            let there = read_all(&log, BEGINNING);
            let whole = |(_, end): &&(Vec<u8>, Digested)| end.position <= bytes;
            assert_eq!(there, frames.iter().take_while(whole).cloned().collect::<Vec<_>>(), "{bytes}");
        }
        assert_eq!(medium.lost(|_| true), None, "no file of the medium is lost by reading a log");
        log.sync().unwrap();
    }

    #[test]
    fn a_file_of_another_length_gives_the_records_that_are_there() {
        const BYTES: u64 = 1 << 16;
        let folder = tempfile::tempdir().unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        let (made, mut ring) = log(&medium, BYTES);
        ring.append(header(10), &[[1; 10].as_slice().into()]).unwrap();
        ring.append(header(8192), &[[2; 8192].as_slice().into()]).unwrap();
        let frames = read_all(&made, BEGINNING);
        let name = folder.path().join(&made.name);
        let file = File::options().write(true).open(name).unwrap();
        let there = |count: usize, as_made: bool| {
            let found = LogFile::open(&medium, LOG, BYTES).unwrap().unwrap();
            assert_eq!(read_all(&found, BEGINNING), frames[..count], "{:?}", file.metadata());
            assert_eq!(found.is_as_made(LOG, BYTES).unwrap(), as_made);
            assert!(found.ring_end() <= BYTES);
        };
        there(2, true);
        for bytes in [BYTES + 1, 1 << 40] {
            file.set_len(bytes).unwrap();
            there(2, true);
        }
        file.set_len(BYTES - 4096).unwrap();
        there(2, false);
        file.set_len(RING_START + 4096).unwrap();
        there(1, false);
        for bytes in [RING_START, 100, 0] {
            file.set_len(bytes).unwrap();
            assert!(LogFile::open(&medium, LOG, BYTES).unwrap().is_none());
        }
        file.set_len(BYTES).unwrap();
        there(0, false);
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
        /// With any bytes in the ring, reading ends, and every returned frame has the right checksum.
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
