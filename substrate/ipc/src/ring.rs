//! Request ring: remote calls of a LibFS to its SharedFS through shared memory.
//!
//! A ring is an array of slots. A client thread fills a slot, submits it, rings the doorbell, and polls for the
//! response for a bounded time before it sleeps. A server thread waits for requests in the same way. A side that has
//! the other one's processor sleeps at once ([`crate::processors`]). Each side wakes the other only if the other's
//! flag says that it sleeps. Requests are independent: any thread answers them, in any order.
//!
//! Guarantees. The server treats every byte as hostile: it copies a message out once and then checks the copy, and
//! it keeps in its own memory which slots it is serving and where each message lies. A client that dies in any
//! state, or never takes its responses, blocks no other client. A client waits as long as its server may come back,
//! and gets `Disconnected` once the server has gone for good.
//!
//! States of a slot: free -> submitted (client) -> taken (server) -> answered (server) -> free (client). A client
//! that sleeps adds the flag `WAITING`.

mod client;
mod server;

pub use client::{Call, Link, Response, RingClient};
pub use server::{RingServer, Taken};

use crate::error::Error;
use crate::processors::Processors;
use crate::shared::{Mapping, PAGE_BYTES, Words};
use crate::sync::Word;
use format::message::{RequestHeader, RingShape};
use std::sync::Arc;
use zerocopy::little_endian::U32;

/// Dimensions of a ring. SharedFS chooses them and sends them with its Welcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    /// Number of concurrent requests, at most 4,096.
    pub slots: u32,
    /// Bytes in a slot for each of request and response, heads included; a multiple of 64, at most 64 KB.
    pub inline_bytes: u32,
    /// Number of buffers for messages that do not fit a slot, at most 4,096.
    pub bulk_buffers: u32,
    /// Bytes of such a buffer; a multiple of 4,096, at most 16 MB, more than `inline_bytes`.
    pub bulk_bytes: u32,
}

impl RingLimits {
    /// The default for a session: about 1.2 MB.
    pub const DEFAULT: Self = Self { slots: 32, inline_bytes: 2048, bulk_buffers: 4, bulk_bytes: 256 * 1024 };

    /// Bytes of shared memory that the ring needs.
    ///
    /// # Errors
    /// `Limits`: a dimension is out of its range.
    pub fn bytes(&self) -> Result<usize, Error> {
        let inline = self.inline_bytes as usize;
        let bulk = self.bulk_bytes as usize;
        let (slots, buffers) = (self.slots as usize, self.bulk_buffers as usize);
        if slots == 0 || slots > 4096 || buffers > 4096 {
            return Err(Error::Limits("slots or buffers of a ring"));
        }
        if inline < 64 || !inline.is_multiple_of(64) || inline > 64 << 10 {
            return Err(Error::Limits("bytes of a ring's slot"));
        }
        if !bulk.is_multiple_of(PAGE_BYTES) || bulk > 16 << 20 || (buffers > 0 && bulk <= inline) {
            return Err(Error::Limits("bytes of a ring's buffer"));
        }
        Ok(self.bulk_offset(0) + buffers * bulk)
    }

    fn slot_bytes(&self) -> usize {
        SLOT_HEAD_BYTES + 2 * self.inline_bytes as usize
    }

    fn slot_offset(&self, slot: usize) -> usize {
        HEAD_BYTES + slot * self.slot_bytes()
    }

    fn request_offset(&self, slot: usize) -> usize {
        self.slot_offset(slot) + SLOT_HEAD_BYTES
    }

    fn response_offset(&self, slot: usize) -> usize {
        self.request_offset(slot) + self.inline_bytes as usize
    }

    fn bulk_offset(&self, buffer: usize) -> usize {
        self.slot_offset(self.slots as usize).next_multiple_of(PAGE_BYTES) + buffer * self.bulk_bytes as usize
    }
}

impl From<RingLimits> for RingShape {
    fn from(limits: RingLimits) -> Self {
        Self {
            slots: U32::new(limits.slots),
            inline_bytes: U32::new(limits.inline_bytes),
            bulk_buffers: U32::new(limits.bulk_buffers),
            bulk_bytes: U32::new(limits.bulk_bytes),
        }
    }
}

impl From<RingShape> for RingLimits {
    fn from(shape: RingShape) -> Self {
        Self {
            slots: shape.slots.get(),
            inline_bytes: shape.inline_bytes.get(),
            bulk_buffers: shape.bulk_buffers.get(),
            bulk_bytes: shape.bulk_bytes.get(),
        }
    }
}

/// Bytes before the first slot: doorbell, sleeping flag, closed flag and processors, each on a cache line of its own.
const HEAD_BYTES: usize = 256;
/// Bytes before the messages of a slot.
const SLOT_HEAD_BYTES: usize = 64;
const LINE: usize = 64;

const FREE: u32 = 0;
const SUBMITTED: u32 = 1;
const TAKEN: u32 = 2;
const ANSWERED: u32 = 3;
/// The client sleeps until the state changes.
const WAITING: u32 = 4;
const PHASE: u32 = 3;

/// Index of each word in a slot's head.
const STATE: usize = 0;
const REQUEST_BYTES: usize = 1;
const RESPONSE_BYTES: usize = 2;
/// Index of the bulk buffer that belongs to the request, plus one; 0 if the request has none.
const BULK: usize = 3;
const SLOT_WORDS: usize = 4;

/// The shared memory of a ring, as both sides use it.
#[derive(Debug)]
struct Ring {
    mapping: Arc<Mapping>,
    limits: RingLimits,
    /// Counts submissions; a sleeping server waits on it.
    doorbell: Words<Word>,
    /// 1 while a server thread sleeps or is about to sleep.
    sleeping: Words<Word>,
    /// 1 once the server has closed the ring.
    closed: Words<Word>,
    processors: Processors,
    slots: Vec<Words<Word>>,
}

impl Ring {
    fn new(mapping: Arc<Mapping>, limits: RingLimits) -> Result<Self, Error> {
        if limits.bytes()? > mapping.bytes() {
            return Err(Error::Memory("smaller than the ring"));
        }
        let slots =
            (0..limits.slots as usize).map(|slot| mapping.words(limits.slot_offset(slot), SLOT_WORDS));
        Ok(Self {
            doorbell: mapping.words(0, 1)?,
            sleeping: mapping.words(LINE, 1)?,
            closed: mapping.words(2 * LINE, 1)?,
            processors: Processors::new(mapping.words(3 * LINE, Processors::WORDS)?),
            slots: slots.collect::<Result<_, _>>()?,
            mapping,
            limits,
        })
    }

    /// Offset of a message of `bytes` bytes: in the slot, or in its buffer. `None` if the message fits neither.
    fn place(&self, inline_offset: usize, bulk: Option<usize>, bytes: usize) -> Option<usize> {
        if bytes <= self.limits.inline_bytes as usize {
            return Some(inline_offset);
        }
        let buffer = bulk.filter(|_| bytes <= self.limits.bulk_bytes as usize)?;
        Some(self.limits.bulk_offset(buffer))
    }
}

/// Bytes of the header of a request or of a response.
const MESSAGE_HEAD_BYTES: usize = size_of::<RequestHeader>();
const _: () = assert!(MESSAGE_HEAD_BYTES == size_of::<format::message::ResponseHeader>());
