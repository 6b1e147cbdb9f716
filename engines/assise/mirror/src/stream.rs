//! Builds messages.

use format::mirror::{DataPart, MIRROR_FLAG, MirrorHead, MirrorKind};
use format::{FRAME_ALIGN, Incarnation, LogUid};
use std::collections::VecDeque;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes};

/// Bytes of a message before its parts.
const HEAD_BYTES: usize = size_of::<MirrorHead>();

/// Bytes of a part before its data.
const PART_BYTES: usize = size_of::<DataPart>();

/// Messages whose memory is kept: an fsync seldom sends more.
const SPARE_MAX: usize = 2;

/// A message that consists of a body and a list.
pub fn message(
    kind: MirrorKind,
    more: bool,
    body: &(impl IntoBytes + Immutable + ?Sized),
    list: &[impl IntoBytes + Immutable],
) -> Vec<u8> {
    let count = u16::try_from(list.len()).expect("a list is cut to what a message holds");
    let head =
        MirrorHead { kind: kind as u8, flags: if more { MIRROR_FLAG } else { 0 }, count: U16::new(count) };
    [head.as_bytes(), body.as_bytes(), list.as_bytes()].concat()
}

/// The destination of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The log, or the stream of the ledger.
    pub log: LogUid,
    pub incarnation: Incarnation,
    pub position: u64,
}

/// A queue of `Data` messages, which are filled with parts one after the other.
pub struct DataQueue {
    limit: usize,
    ready: VecDeque<Vec<u8>>,
    building: Vec<u8>,
    /// Memory of messages that were sent: the next ones are built in it.
    spare: Vec<Vec<u8>>,
    parts: u16,
    /// Offset of the head of the last part in the message, and the target of the bytes after it.
    last: Option<(usize, Target)>,
}

impl DataQueue {
    /// Creates a queue for messages of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        assert!(limit >= HEAD_BYTES + PART_BYTES + FRAME_ALIGN, "a message holds a line");
        let (ready, building, spare) = (VecDeque::new(), Vec::new(), Vec::new());
        Self { limit, ready, building, spare, parts: 0, last: None }
    }

    /// Queues a message of another kind, behind everything that was put.
    pub fn push(&mut self, message: Vec<u8>) {
        self.finish(false);
        self.ready.push_back(message);
    }

    /// Appends a frame, padded to whole lines.
    pub fn put(&mut self, mut target: Target, frame: &[u8]) {
        let mut left = frame;
        while !left.is_empty() {
            let room = self.open_part(&target);
            let bytes = left.len().min(room);
            let (part, rest) = left.split_at(bytes);
            left = rest;
            self.building.extend_from_slice(part);
            let filled = bytes.next_multiple_of(FRAME_ALIGN);
            self.building.resize(self.building.len() + filled - bytes, 0);
            target.position += filled as u64;
            self.grow_part(filled, target);
        }
    }

    /// Makes the last part one for the bytes of a target. Returns how many bytes fit, in whole lines.
    fn open_part(&mut self, target: &Target) -> usize {
        let goes_on = self.last.is_some_and(|(_, next)| next == *target);
        let head = if goes_on { 0 } else { PART_BYTES };
        let room = self.limit.saturating_sub(self.building.len().max(HEAD_BYTES) + head);
        if room < FRAME_ALIGN || (!goes_on && self.parts == u16::MAX) {
            self.finish(false);
            return self.open_part(target);
        }
        if self.building.is_empty() {
            self.building.resize(HEAD_BYTES, 0);
        }
        if !goes_on {
            let line = target.position / FRAME_ALIGN as u64;
            let part = DataPart {
                log: target.log,
                incarnation: target.incarnation,
                line: U32::new(u32::try_from(line).expect("a file has fewer lines")),
                bytes: U32::new(0),
            };
            self.last = Some((self.building.len(), *target));
            self.building.extend_from_slice(part.as_bytes());
            self.parts += 1;
        }
        room / FRAME_ALIGN * FRAME_ALIGN
    }

    fn grow_part(&mut self, bytes: usize, next: Target) {
        let Some((at, _)) = self.last else { return };
        let field = &mut self.building[at + PART_BYTES - size_of::<U32>()..at + PART_BYTES];
        let before = u32::from_le_bytes([field[0], field[1], field[2], field[3]]);
        let bytes = before + u32::try_from(bytes).expect("a message is short");
        field.copy_from_slice(&bytes.to_le_bytes());
        self.last = Some((at, next));
    }

    /// Ends the current message. With `sync` the message asks the copy to sync everything and to report it; the
    /// queue gets an empty message if there is no other.
    pub fn finish(&mut self, sync: bool) {
        if self.building.is_empty() && !sync {
            return;
        }
        self.building.resize(self.building.len().max(HEAD_BYTES), 0);
        let flags = if sync { MIRROR_FLAG } else { 0 };
        let head = MirrorHead { kind: MirrorKind::Data as u8, flags, count: U16::new(self.parts) };
        self.building[..HEAD_BYTES].copy_from_slice(head.as_bytes());
        let next = self.spare.pop().unwrap_or_default();
        self.ready.push_back(std::mem::replace(&mut self.building, next));
        (self.parts, self.last) = (0, None);
    }

    /// The next message to be sent.
    pub fn first(&self) -> Option<&[u8]> {
        self.ready.front().map(Vec::as_slice)
    }

    /// The next message was sent.
    pub fn remove_first(&mut self) {
        if let Some(mut sent) = self.ready.pop_front()
            && self.spare.len() < SPARE_MAX
        {
            sent.clear();
            self.spare.push(sent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::mirror::MirrorMessage;

    fn target(position: u64) -> Target {
        Target { log: LogUid::new(7), incarnation: Incarnation::new(1), position }
    }

    /// The contents of the messages by position, and the numbers of messages and parts.
    fn unpack(queue: &mut DataQueue, limit: usize) -> (Vec<(u64, Vec<u8>)>, usize, usize) {
        let (mut found, mut parts_count) = (Vec::<(u64, Vec<u8>)>::new(), 0);
        let mut messages = 0;
        while let Some(bytes) = queue.first() {
            messages += 1;
            assert!(bytes.len() <= limit);
            let Ok(MirrorMessage::Data { parts, .. }) = MirrorMessage::decode(bytes) else {
                panic!("no data")
            };
            for (part, data) in parts {
                parts_count += 1;
                match found.last_mut() {
                    Some((at, before)) if *at + before.len() as u64 == part.position() => {
                        before.extend_from_slice(data);
                    }
                    _ => found.push((part.position(), data.to_vec())),
                }
            }
            queue.remove_first();
        }
        (found, messages, parts_count)
    }

    #[test]
    fn frames_that_follow_each_other_are_one_part() {
        let mut queue = DataQueue::new(1 << 12);
        queue.put(target(4096), &[1; 100]);
        queue.put(target(4224), &[2; 64]);
        queue.put(target(8192), &[3; 64]);
        queue.finish(true);
        let (found, messages, parts) = unpack(&mut queue, 1 << 12);
        assert_eq!((messages, parts), (1, 2));
        assert_eq!(found[0].1, [&[1; 100][..], &[0; 28], &[2; 64]].concat());
        assert_eq!(found[1], (8192, vec![3; 64]));
    }

    #[test]
    fn a_frame_longer_than_a_message_is_sent_in_pieces() {
        for limit in [88, 100, 152, 200, 1000] {
            let mut queue = DataQueue::new(limit);
            let frame: Vec<u8> = (0..1000u32).map(|byte| byte as u8).collect();
            queue.put(target(4096), &frame);
            queue.put(target(5120), &frame[..10]);
            queue.finish(false);
            let (found, messages, _) = unpack(&mut queue, limit);
            assert!(messages > 1);
            let expected = [&frame[..], &[0; 24], &frame[..10], &[0; 54]].concat();
            assert_eq!(found, [(4096, expected)]);
        }
    }

    #[test]
    fn a_message_that_only_asks_is_empty() {
        let mut queue = DataQueue::new(1 << 12);
        queue.finish(false);
        assert_eq!(queue.first(), None);
        queue.finish(true);
        let bytes = queue.first().unwrap();
        let Ok(MirrorMessage::Data { mut parts, sync: true }) = MirrorMessage::decode(bytes) else {
            panic!("no data")
        };
        assert_eq!(parts.next(), None);
    }
}
