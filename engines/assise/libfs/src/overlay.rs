//! The log index of one file: the ranges that are newer than the shared area, and their positions in the log (Assise
//! §3.2, "LibFS caches ... in process-local memory").
//!
//! The index maps ranges of bytes to pieces that never overlap. A piece refers to bytes of a record, or to zeros after
//! a truncation or a hole. It has the sequence of the record, so that digested pieces can be dropped.
//!
//! The pieces are in chunks of two sizes from a [`Pool`], which all files of a session share. In steady state, when as
//! many pieces are dropped as added, nothing is allocated. Most files have one or two pieces and use a small chunk.

use format::{BLOCK_BYTES, Sequence};
use std::cell::Cell;

/// The source of the bytes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The log file, from this offset on.
    Log(u64),
    /// Zeros.
    Zero,
}

/// Bytes from `start` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub start: u64,
    pub end: u64,
    pub origin: Origin,
    /// The record of the piece.
    pub sequence: Sequence,
}

impl Piece {
    /// The part from `from` on.
    fn from(mut self, from: u64) -> Self {
        if let Origin::Log(position) = &mut self.origin {
            *position += from - self.start;
        }
        self.start = from;
        self
    }

    /// The part before `to`.
    fn to(mut self, to: u64) -> Self {
        self.end = to;
        self
    }
}

/// Pieces in a chunk, and in a small one.
const CHUNK: usize = 32;
const SMALL: usize = 2;

/// Limit of unused chunks of one size that are kept.
const SPARE_MAX: usize = 512;

const EMPTY: Piece = Piece { start: 0, end: 0, origin: Origin::Zero, sequence: Sequence::new(0) };

#[derive(Debug)]
struct Chunk<const PIECES: usize> {
    count: usize,
    pieces: [Piece; PIECES],
}

/// All chunks of one size.
#[derive(Debug, Default)]
struct Chunks<const PIECES: usize> {
    chunks: Vec<Chunk<PIECES>>,
    free: Vec<u32>,
}

impl<const PIECES: usize> Chunks<PIECES> {
    fn take(&mut self) -> u32 {
        if let Some(index) = self.free.pop() {
            self.chunks[index as usize].count = 0;
            return index;
        }
        let index =
            u32::try_from(self.chunks.len()).expect("a log has fewer records than a number has values");
        self.chunks.push(Chunk { count: 0, pieces: [EMPTY; PIECES] });
        // So that returning chunks never allocates.
        self.free.reserve(self.chunks.len());
        index
    }

    fn give_back(&mut self, index: u32) {
        self.free.push(index);
        if self.free.len() == self.chunks.len() && self.chunks.len() > SPARE_MAX {
            *self = Self { chunks: Vec::new(), free: Vec::new() };
        }
    }
}

/// Marks the number of a small chunk.
const IS_SMALL: u32 = 1 << 31;

/// Chunks of all files of a session.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    large: Chunks<CHUNK>,
    small: Chunks<SMALL>,
}

impl Pool {
    fn take_small(&mut self) -> u32 {
        self.small.take() | IS_SMALL
    }

    fn take_large(&mut self) -> u32 {
        self.large.take()
    }

    fn give_back(&mut self, index: u32) {
        if index & IS_SMALL == 0 {
            self.large.give_back(index);
        } else {
            self.small.give_back(index & !IS_SMALL);
        }
    }

    /// The positions of a chunk, and the number of those in use.
    #[inline]
    fn chunk(&mut self, index: u32) -> (&mut [Piece], &mut usize) {
        if index & IS_SMALL == 0 {
            let chunk = &mut self.large.chunks[index as usize];
            (&mut chunk.pieces, &mut chunk.count)
        } else {
            let chunk = &mut self.small.chunks[(index & !IS_SMALL) as usize];
            (&mut chunk.pieces, &mut chunk.count)
        }
    }

    #[inline]
    fn pieces(&self, index: u32) -> &[Piece] {
        if index & IS_SMALL == 0 {
            let chunk = &self.large.chunks[index as usize];
            &chunk.pieces[..chunk.count]
        } else {
            let chunk = &self.small.chunks[(index & !IS_SMALL) as usize];
            &chunk.pieces[..chunk.count]
        }
    }
}

/// The pieces of one file, in order. Every chunk in the list has at least one piece.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    /// Start of the first piece of each chunk, and the chunk.
    chunks: Vec<(u64, u32)>,
    /// Number of blocks that bytes of the log touch, if it was counted since pieces were last replaced.
    counted: Cell<Option<u64>>,
    /// Blocks of digested log bytes and of reserved ranges, since the area last reported the number of blocks of the
    /// file.
    taken: u64,
}

/// A position in an overlay: index of the chunk, index of the piece in it.
#[derive(Clone, Copy)]
struct At {
    chunk: usize,
    piece: usize,
}

/// Counts the blocks that ordered pieces touch with bytes of the log, each block once.
#[derive(Default)]
struct BlockCount {
    blocks: u64,
    /// All blocks before this one are counted.
    end: u64,
}

impl BlockCount {
    fn add(&mut self, piece: &Piece) {
        if matches!(piece.origin, Origin::Log(_)) {
            let end = piece.end.div_ceil(BLOCK_BYTES as u64);
            self.blocks += end - (piece.start / BLOCK_BYTES as u64).max(self.end).min(end);
            self.end = end;
        }
    }
}

impl Overlay {
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Number of blocks that the file may have in addition to those that the area reported; holes do not count. Some
    /// blocks may be counted twice.
    pub fn blocks_beside_area(&self, pool: &Pool) -> u64 {
        let counted = self.counted.get().unwrap_or_else(|| {
            let mut count = BlockCount::default();
            let pieces = self.chunks.iter().flat_map(|(_, index)| pool.pieces(*index));
            pieces.for_each(|piece| count.add(piece));
            count.blocks
        });
        self.counted.set(Some(counted));
        counted + self.taken
    }

    /// Number of blocks of a file of which the area has no data; none if some may be counted twice.
    pub fn blocks_of_new_file(&self, pool: &Pool) -> Option<u64> {
        (self.taken == 0).then(|| self.blocks_beside_area(pool))
    }

    /// Counts a reserved range.
    pub fn note_reserved(&mut self, start: u64, end: u64) {
        self.taken += end.div_ceil(BLOCK_BYTES as u64) - start / BLOCK_BYTES as u64;
    }

    /// Called when the area has reported the number of blocks.
    pub fn note_area_known(&mut self) {
        self.taken = 0;
    }

    /// Updates the count for a piece that is added at the end.
    fn count_last(&self, last: &Piece, piece: &Piece) {
        let Some(counted) = self.counted.get() else { return };
        let mut count = BlockCount { blocks: counted, end: last.end.div_ceil(BLOCK_BYTES as u64) };
        // Only a new count shows whether zeros share their last block with the bytes before them.
        let apart = last.end <= piece.start / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let known = apart || matches!(last.origin, Origin::Log(_));
        count.add(piece);
        self.counted.set(known.then_some(count.blocks));
    }

    /// The first piece that ends after `offset`.
    pub fn first_after(&self, pool: &Pool, offset: u64) -> Option<Piece> {
        let at = self.seek(pool, offset);
        self.get(pool, at)
    }

    /// The origin of newer bytes in the block that begins at an offset: of those of the log, if there are some; zeros if all
    /// the block may have been cut or cleared.
    pub fn in_block(&self, pool: &Pool, block_at: u64) -> Option<Origin> {
        let (mut at, end) = (block_at, block_at + BLOCK_BYTES as u64);
        let mut cleared = None;
        while let Some(piece) = self.first_after(pool, at).filter(|piece| piece.start < end) {
            match piece.origin {
                Origin::Log(_) => return Some(piece.origin),
                // A range that was cut may have ended within the block, with the file.
                Origin::Zero if piece.start <= block_at => cleared = Some(Origin::Zero),
                Origin::Zero => {}
            }
            at = piece.end;
        }
        cleared
    }

    /// Replaces the range `start..end`.
    #[inline]
    pub fn insert(&mut self, pool: &mut Pool, piece: Piece) {
        if piece.start >= piece.end {
            return;
        }
        let Some((end, at)) = self.end(pool) else {
            self.counted.set(None);
            return self.put(pool, At { chunk: 0, piece: 0 }, piece);
        };
        if end > piece.start {
            self.counted.set(None);
            return self.insert_within(pool, piece);
        }
        let (places, count) = pool.chunk(self.chunks[at.chunk].1);
        let last = places[at.piece - 1];
        // The piece is added at the end of the file, and the chunk has a free position: the case of a growing file.
        let has_room = at.piece < places.len();
        if has_room {
            (places[at.piece], *count) = (piece, at.piece + 1);
        }
        self.count_last(&last, &piece);
        if !has_room {
            self.put(pool, at, piece);
        }
    }

    /// Inserts a piece that begins before the end of the last one.
    fn insert_within(&mut self, pool: &mut Pool, piece: Piece) {
        let mut at = self.seek(pool, piece.start);
        if let Some(found) = self.get(pool, at).filter(|found| found.start < piece.start) {
            // Its front part stays, and so does the part beyond the new piece.
            self.set(pool, at, found.to(piece.start));
            if found.end > piece.end {
                self.put(pool, At { piece: at.piece + 1, ..at }, found.from(piece.end));
            }
            at = self.seek(pool, piece.start);
        }
        // The new piece takes the position of the first piece that it covers. Often it is the only one, if the same
        // bytes are written again.
        let mut placed = false;
        loop {
            at = self.normal(pool, at);
            match self.get(pool, at) {
                Some(found) if found.end <= piece.end && placed => self.remove(pool, at),
                Some(found) if found.end <= piece.end => {
                    self.set(pool, at, piece);
                    (placed, at.piece) = (true, at.piece + 1);
                }
                Some(found) if found.start < piece.end => {
                    self.set(pool, at, found.from(piece.end));
                    break;
                }
                _ => break,
            }
        }
        if !placed {
            self.put(pool, at, piece);
        }
    }

    /// Drops the pieces of records up to `digested`; true if any were dropped.
    pub fn purge(&mut self, pool: &mut Pool, digested: Sequence) -> bool {
        let mut dropped = false;
        let mut count = BlockCount::default();
        self.chunks.retain_mut(|(first, index)| {
            let (places, used) = pool.chunk(*index);
            let mut kept = 0;
            for piece in 0..*used {
                if places[piece].sequence > digested {
                    places[kept] = places[piece];
                    kept += 1;
                } else {
                    count.add(&places[piece]);
                }
            }
            dropped |= kept < *used;
            *used = kept;
            if kept == 0 {
                pool.give_back(*index);
                return false;
            }
            *first = places[0].start;
            true
        });
        if dropped {
            self.counted.set(None);
            self.taken += count.blocks;
        }
        dropped
    }

    /// Drops all pieces.
    pub fn clear(&mut self, pool: &mut Pool) {
        (self.counted, self.taken) = (Cell::new(None), 0);
        for (_, index) in self.chunks.drain(..) {
            pool.give_back(index);
        }
    }

    /// The end of the last piece, and the position after it; none without pieces.
    #[inline]
    fn end(&self, pool: &Pool) -> Option<(u64, At)> {
        let (_, index) = self.chunks.last()?;
        let pieces = pool.pieces(*index);
        Some((pieces.last()?.end, At { chunk: self.chunks.len() - 1, piece: pieces.len() }))
    }

    /// The position of the first piece that ends after `offset`.
    fn seek(&self, pool: &Pool, offset: u64) -> At {
        let after = self.chunks.partition_point(|(start, _)| *start <= offset);
        let Some(chunk) = after.checked_sub(1) else { return At { chunk: 0, piece: 0 } };
        let pieces = pool.pieces(self.chunks[chunk].1);
        self.normal(pool, At { chunk, piece: pieces.partition_point(|piece| piece.end <= offset) })
    }

    /// Converts a position after the last piece of a chunk to the start of the next one.
    fn normal(&self, pool: &Pool, at: At) -> At {
        match self.chunks.get(at.chunk) {
            Some((_, index)) if at.piece >= pool.pieces(*index).len() => At { chunk: at.chunk + 1, piece: 0 },
            _ => at,
        }
    }

    fn get(&self, pool: &Pool, at: At) -> Option<Piece> {
        let (_, index) = self.chunks.get(at.chunk)?;
        pool.pieces(*index).get(at.piece).copied()
    }

    fn set(&mut self, pool: &mut Pool, at: At, piece: Piece) {
        let (first, index) = &mut self.chunks[at.chunk];
        pool.chunk(*index).0[at.piece] = piece;
        if at.piece == 0 {
            *first = piece.start;
        }
    }

    fn remove(&mut self, pool: &mut Pool, at: At) {
        let (first, index) = &mut self.chunks[at.chunk];
        let (places, count) = pool.chunk(*index);
        places.copy_within(at.piece + 1..*count, at.piece);
        *count -= 1;
        if *count == 0 {
            let index = *index;
            self.chunks.remove(at.chunk);
            pool.give_back(index);
        } else if at.piece == 0 {
            *first = places[0].start;
        }
    }

    /// Inserts a piece at a position.
    fn put(&mut self, pool: &mut Pool, at: At, piece: Piece) {
        // The position after the last piece of the previous chunk is equivalent, and often that chunk has free
        // positions.
        let at = match at {
            At { piece: 0, chunk } if chunk > 0 => {
                At { chunk: chunk - 1, piece: pool.pieces(self.chunks[chunk - 1].1).len() }
            }
            at => at,
        };
        if self.chunks.is_empty() {
            let index = pool.take_small();
            self.chunks.push((piece.start, index));
        }
        let at = self.make_room(pool, at);
        let (first, index) = &mut self.chunks[at.chunk];
        let (places, count) = pool.chunk(*index);
        places.copy_within(at.piece..*count, at.piece + 1);
        places[at.piece] = piece;
        *count += 1;
        if at.piece == 0 {
            *first = piece.start;
        }
    }

    /// Splits the chunk of a position if it is full; the position may change. A small chunk becomes a large one.
    fn make_room(&mut self, pool: &mut Pool, at: At) -> At {
        let index = self.chunks[at.chunk].1;
        let (places, count) = pool.chunk(index);
        if *count < places.len() {
            return at;
        }
        if index & IS_SMALL != 0 {
            let small: [Piece; SMALL] = places.try_into().expect("a small chunk has so many places");
            let large = pool.take_large();
            let (places, count) = pool.chunk(large);
            places[..SMALL].copy_from_slice(&small);
            *count = SMALL;
            pool.give_back(index);
            self.chunks[at.chunk].1 = large;
            return at;
        }
        let new = pool.take_large();
        // At the end of a chunk the file probably grows, so the old chunk stays full.
        let kept = if at.piece == CHUNK { CHUNK } else { CHUNK / 2 };
        let moved = CHUNK - kept;
        let chunks = &mut pool.large.chunks;
        for piece in 0..moved {
            chunks[new as usize].pieces[piece] = chunks[index as usize].pieces[kept + piece];
        }
        chunks[new as usize].count = moved;
        chunks[index as usize].count = kept;
        self.chunks.insert(at.chunk + 1, (chunks[new as usize].pieces[0].start, new));
        if at.piece < kept || (at.piece == kept && moved > 0) {
            at
        } else {
            At { chunk: at.chunk + 1, piece: at.piece - kept }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A reference model with an entry for each byte: origin and sequence.
    type Naive = Vec<Option<(Origin, u64)>>;

    #[derive(Clone, Debug)]
    enum Step {
        Insert { start: u64, bytes: u64, zero: bool },
        Purge { behind: u64 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let insert = (0..900u64, 1..60u64, any::<bool>()).prop_map(|(start, bytes, zero)| Step::Insert {
            start,
            bytes,
            zero,
        });
        let purge = (0..300u64).prop_map(|behind| Step::Purge { behind });
        prop::collection::vec(prop_oneof![20 => insert, 1 => purge], 1..400)
    }

    fn seen(overlay: &Overlay, pool: &Pool) -> Naive {
        let mut seen: Naive = vec![None; 1000];
        let (mut offset, mut last) = (0, 0);
        while let Some(piece) = overlay.first_after(pool, offset) {
            assert!(piece.start < piece.end && piece.start >= last, "in order and apart");
            for at in piece.start..piece.end {
                let origin = match piece.origin {
                    Origin::Log(position) => Origin::Log(position + at - piece.start),
                    Origin::Zero => Origin::Zero,
                };
                seen[at as usize] = Some((origin, piece.sequence.get()));
            }
            (offset, last) = (piece.end, piece.end);
        }
        seen
    }

    fn check_chunks(overlay: &Overlay, pool: &Pool) {
        for (first, index) in &overlay.chunks {
            let pieces = pool.pieces(*index);
            assert_eq!(
                pieces.first().map(|piece| piece.start),
                Some(*first),
                "a chunk is known by its first"
            );
        }
        let (free, all) = (
            pool.large.free.len() + pool.small.free.len(),
            pool.large.chunks.len() + pool.small.chunks.len(),
        );
        assert_eq!(overlay.chunks.len() + free, all, "no chunk is lost");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        #[test]
        fn behaves_like_an_array_of_bytes(steps in steps()) {
            let (mut pool, mut overlay) = (Pool::default(), Overlay::default());
            let mut naive: Naive = vec![None; 1000];
            for (number, step) in steps.into_iter().enumerate() {
                let sequence = number as u64 + 1;
                match step {
                    Step::Insert { start, bytes, zero } => {
                        let origin = if zero { Origin::Zero } else { Origin::Log(sequence * 1000) };
                        let end = start + bytes;
                        let piece = Piece { start, end, origin, sequence: Sequence::new(sequence) };
                        overlay.insert(&mut pool, piece);
                        for at in start..end {
                            let here = match origin {
                                Origin::Log(position) => Origin::Log(position + at - start),
                                Origin::Zero => Origin::Zero,
                            };
                            naive[at as usize] = Some((here, sequence));
                        }
                    }
                    Step::Purge { behind } => {
                        let digested = sequence.saturating_sub(behind);
                        overlay.purge(&mut pool, Sequence::new(digested));
                        naive.iter_mut().for_each(|byte| *byte = byte.filter(|(_, made)| *made > digested));
                    }
                }
                check_chunks(&overlay, &pool);
                prop_assert_eq!(seen(&overlay, &pool), naive.clone());
            }
            overlay.clear(&mut pool);
            check_chunks(&overlay, &pool);
        }

        /// Asked only at some steps; between them the count is kept up to date, or dropped.
        #[test]
        fn blocks_are_those_with_bytes_of_the_log(steps in steps(), asked in prop::collection::vec(any::<bool>(), 400)) {
            const UNIT: u64 = 512;
            let (mut pool, mut overlay) = (Pool::default(), Overlay::default());
            let mut naive = vec![false; 1000];
            for (number, step) in steps.into_iter().enumerate() {
                // Every other piece is added at the end, as in a growing file.
                let Step::Insert { start, bytes, zero } = step else { continue };
                let last = naive.iter().rposition(|log| *log).map_or(0, |last| last as u64 + 1);
                let start = if number % 2 == 0 && last < 900 { last } else { start };
                let origin = if zero { Origin::Zero } else { Origin::Log(0) };
                let sequence = Sequence::new(number as u64 + 1);
                let piece = Piece { start: start * UNIT, end: (start + bytes) * UNIT, origin, sequence };
                overlay.insert(&mut pool, piece);
                naive[start as usize..(start + bytes) as usize].fill(!zero);
                if asked[number] {
                    let per_block = BLOCK_BYTES / UNIT as usize;
                    let blocks = naive.chunks(per_block).filter(|block| block.contains(&true)).count() as u64;
                    prop_assert_eq!(overlay.blocks_beside_area(&pool), blocks);
                }
            }
        }
    }

    #[test]
    fn many_files_with_a_piece_each_take_little_and_leave_nothing() {
        let (mut pool, mut files) = (Pool::default(), Vec::new());
        for number in 0..3 * SPARE_MAX as u64 {
            let mut overlay = Overlay::default();
            for start in [0, 5000] {
                let sequence = Sequence::new(number + 1);
                overlay.insert(&mut pool, Piece { start, end: start + 100, origin: Origin::Zero, sequence });
            }
            files.push(overlay);
        }
        assert_eq!((pool.small.chunks.len(), pool.large.chunks.len()), (files.len(), 0));
        for overlay in &mut files {
            overlay.purge(&mut pool, Sequence::new(u64::MAX - 1));
        }
        assert_eq!((pool.small.chunks.len(), pool.small.free.len()), (0, 0));
    }

    #[test]
    fn a_file_that_grows_fills_its_chunks() {
        let (mut pool, mut overlay) = (Pool::default(), Overlay::default());
        for number in 0..10 * CHUNK as u64 {
            let (start, sequence) = (number * 128, Sequence::new(number + 1));
            let piece = Piece { start, end: start + 128, origin: Origin::Log(number * 192), sequence };
            overlay.insert(&mut pool, piece);
        }
        assert_eq!(overlay.chunks.len(), 10);
    }
}
