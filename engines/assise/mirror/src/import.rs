//! The tree of a head on its way to a member that lacks what the head's logs and ledger no longer hold.
//!
//! The head sends the tree in rounds, over the connection on which it greeted the member; it sends nothing else there until the
//! last round is answered. The member may still report what it executed before the first round arrived; the head skips these
//! reports. Each send waits until the connection takes the message, so the member sets the pace.

use crate::error::Error;
use crate::greeting::take_answer;
use crate::ledger::LedgerPosition;
use crate::sender::{CopyEnds, Sender, hear_ends};
use crate::stream::message;
use format::BLOCK_BYTES;
use format::Sequence;
use format::mirror::{
    MIRROR_FLAG, MirrorHead, MirrorImported, MirrorItem, MirrorKind, MirrorMessage, MirrorRange, MirrorRound,
    MirrorRoundEnd, MirrorSpan,
};
use format::node::Key;
use ipc::Time;
use transport::Connection;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Limit of the spans of keys that a member names.
const SPANS_MAX: usize = 1 << 18;

/// Whether a message is a part of an import.
pub fn is_of_import(message: &[u8]) -> bool {
    let kinds = MirrorKind::Round as u8..=MirrorKind::RoundEnd as u8;
    message.first().is_some_and(|kind| kinds.contains(kind))
}

/// Items on their way, as many as a message holds.
#[derive(Default)]
struct Packed {
    bytes: Vec<u8>,
    count: u16,
}

/// Sends a tree.
pub struct TreeSender {
    connection: Connection,
    packed: Packed,
    blocks: Packed,
    damaged: bool,
}

impl TreeSender {
    /// Over the connection of a member that was greeted.
    pub fn new(connection: Connection) -> Self {
        Self { connection, packed: Packed::default(), blocks: Packed::default(), damaged: false }
    }

    fn send(&self, message: &[u8], until: Time) -> Result<(), Error> {
        self.connection.send(message, Some(until))?;
        Ok(())
    }

    /// Begins a round. The first one may begin with the tree of the member: `since` is the first entry of the ledger that
    /// the two trees do not have in common.
    ///
    /// # Errors
    /// `Connection`, as of all sends.
    pub fn begin_round(
        &self,
        number: u32,
        version: Sequence,
        since: Option<Sequence>,
        until: Time,
    ) -> Result<(), Error> {
        let (number, since) = (U32::new(number), since.unwrap_or(Sequence::new(0)));
        let round = MirrorRound { version, since, number, reserved: U32::new(0) };
        self.send(&message(MirrorKind::Round, false, &round, &[] as &[u8]), until)
    }

    /// Waits for the keys that changed in the tree of the member.
    ///
    /// # Errors
    /// As [`Self::hear_synced`].
    pub fn hear_changed(&self, until: Time) -> Result<Vec<MirrorSpan>, Error> {
        let mut changed = Vec::new();
        loop {
            let answer = take_answer(&self.connection, until)?;
            match MirrorMessage::decode(&answer)? {
                MirrorMessage::Changed { spans, more } if changed.len() + spans.len() <= SPANS_MAX => {
                    changed.extend_from_slice(spans);
                    if !more {
                        return Ok(changed);
                    }
                }
                MirrorMessage::Ends { refusal, .. } => return Err(Error::Refused(refusal)),
                _ => return Err(Error::Broken("a member says what changed in its tree")),
            }
        }
    }

    /// Begins a range, which may reach to the end of the tree.
    ///
    /// # Errors
    /// `Connection`.
    pub fn begin_range(&self, range: &MirrorRange, to_end: bool, until: Time) -> Result<(), Error> {
        self.send(&message(MirrorKind::Range, to_end, range, &[] as &[u8]), until)
    }

    /// Whether an item does not fit the message in the making.
    pub fn is_full(&self, value: &[u8]) -> bool {
        let bytes = size_of::<MirrorHead>() + self.packed.bytes.len() + size_of::<MirrorItem>() + value.len();
        bytes > self.connection.message_bytes_max() || self.packed.count == u16::MAX
    }

    /// Packs an item.
    ///
    /// # Panics
    /// If the message [is full](Self::is_full).
    pub fn put(&mut self, key: Key, value: &[u8], owner: u32) {
        assert!(!self.is_full(value), "what is full is sent first");
        let bytes = U16::new(u16::try_from(value.len()).expect("a value fits a node"));
        let item = MirrorItem { key, owner: U32::new(owner), bytes, reserved: U16::new(0) };
        self.packed.bytes.extend_from_slice(item.as_bytes());
        self.packed.bytes.extend_from_slice(value);
        self.packed.count += 1;
    }

    /// Sends the items that are packed.
    ///
    /// # Errors
    /// `Connection`.
    pub fn send_items(&mut self, until: Time) -> Result<(), Error> {
        let Packed { bytes, count } = std::mem::take(&mut self.packed);
        if count == 0 {
            return Ok(());
        }
        self.send(&counted(MirrorKind::Items, false, count, &bytes), until)
    }

    /// The next block of the extents that were sent.
    ///
    /// # Errors
    /// `Connection`.
    pub fn put_block(&mut self, bytes: &[u8; BLOCK_BYTES], damaged: bool, until: Time) -> Result<(), Error> {
        let room = self.connection.message_bytes_max() - size_of::<MirrorHead>();
        if damaged != self.damaged || self.blocks.bytes.len() + BLOCK_BYTES > room {
            self.send_blocks(until)?;
            self.damaged = damaged;
        }
        self.blocks.bytes.extend_from_slice(bytes);
        self.blocks.count += 1;
        Ok(())
    }

    /// Sends the blocks that are packed.
    ///
    /// # Errors
    /// `Connection`.
    pub fn send_blocks(&mut self, until: Time) -> Result<(), Error> {
        let Packed { bytes, count } = std::mem::take(&mut self.blocks);
        if count == 0 {
            return Ok(());
        }
        self.send(&counted(MirrorKind::Blocks, self.damaged, count, &bytes), until)
    }

    /// Ends a round; with `whole` the import.
    ///
    /// # Errors
    /// `Connection`.
    pub fn end_round(
        &self,
        ledger: LedgerPosition,
        (inodes, data_blocks): (u64, u64),
        whole: bool,
        until: Time,
    ) -> Result<(), Error> {
        let (inodes, data_blocks) = (U64::new(inodes), U64::new(data_blocks));
        let end = MirrorRoundEnd { ledger: ledger.to_mark(), inodes, data_blocks };
        self.send(&message(MirrorKind::RoundEnd, whole, &end, &[] as &[u8]), until)
    }

    /// Waits until a round is persistent.
    ///
    /// # Errors
    /// `Connection`; `Message`, `Broken`; `Refused`.
    pub fn hear_synced(&self, number: u32, until: Time) -> Result<(), Error> {
        let answer = take_answer(&self.connection, until)?;
        match MirrorMessage::decode(&answer)? {
            MirrorMessage::Imported(imported) if imported.number.get() == number => Ok(()),
            MirrorMessage::Ends { refusal, .. } => Err(Error::Refused(refusal)),
            _ => Err(Error::Broken("a round is answered when it is synced")),
        }
    }

    /// Waits until the member has made the tree its own, and says what it has.
    ///
    /// # Errors
    /// As [`Self::hear_synced`].
    pub fn hear_ends(self, until: Time) -> Result<(Sender, CopyEnds), Error> {
        let ends = hear_ends(&self.connection, until)?;
        Ok((Sender::of(self.connection, ends.end), ends))
    }
}

fn counted(kind: MirrorKind, flag: bool, count: u16, body: &[u8]) -> Vec<u8> {
    let flags = if flag { MIRROR_FLAG } else { 0 };
    let head = MirrorHead { kind: kind as u8, flags, count: U16::new(count) };
    [head.as_bytes(), body].concat()
}

/// Says which keys changed in the own tree.
///
/// # Errors
/// `Connection`; `Broken`: there are more than a head takes.
pub fn say_changed(connection: &Connection, spans: &[MirrorSpan]) -> Result<(), Error> {
    if spans.len() > SPANS_MAX {
        return Err(Error::Broken("a tree of which too much changed"));
    }
    let fit = (connection.message_bytes_max() - size_of::<MirrorHead>()) / size_of::<MirrorSpan>();
    let (mut left, fit) = (spans, fit.min(usize::from(u16::MAX)));
    loop {
        let (part, rest) = left.split_at(left.len().min(fit));
        let said = message(MirrorKind::Changed, !rest.is_empty(), &[] as &[u8], part);
        connection.send(&said, None)?;
        if rest.is_empty() {
            return Ok(());
        }
        left = rest;
    }
}

/// Says that a round is persistent.
///
/// # Errors
/// `Connection`.
pub fn say_imported(connection: &Connection, number: u32) -> Result<(), Error> {
    let imported = MirrorImported { number: U32::new(number), reserved: U32::new(0) };
    connection.send(&message(MirrorKind::Imported, false, &imported, &[] as &[u8]), None)?;
    Ok(())
}
