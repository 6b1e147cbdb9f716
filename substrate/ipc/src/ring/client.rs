//! The client side of a request ring. Any number of threads call concurrently.

use super::{
    ANSWERED, BULK, FREE, MESSAGE_HEAD_BYTES, PHASE, REQUEST_BYTES, RESPONSE_BYTES, Ring, RingLimits, STATE,
    SUBMITTED, WAITING,
};
use crate::claims::Claims;
use crate::error::Error;
use crate::host::{Host, Spin, Time, WAKE_ALL};
use crate::processors::Side;
use crate::shared::Mapping;
use crate::sync::{LongWord, Ordering, Word, fence};
use format::DecodeError;
use format::message::{RequestHeader, ResponseHeader, STATUS_NO_ROOM};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Liveness of the other side: the socket on a real machine, the process in the simulator.
pub trait Link: Send + Sync {
    /// False once the other side has gone for good; true while it may only be slow or stopped.
    fn is_up(&self) -> bool;
}

impl<L: Link + ?Sized> Link for Arc<L> {
    fn is_up(&self) -> bool {
        (**self).is_up()
    }
}

/// Interval at which a waiting client checks whether its server is alive.
const LINK_LOOK: Duration = Duration::from_millis(50);

/// Width of the buffer field in the mark of an abandoned slot.
const BUFFER_BITS: u32 = 16;
const BUFFER_MASK: usize = (1 << BUFFER_BITS) - 1;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Chosen by the caller; the response carries the same number.
    pub id: u64,
    /// Kind of the operation.
    pub kind: u16,
    /// Operands.
    pub body: &'a [u8],
    /// Size of the largest response body that the caller accepts.
    pub response_bytes_max: usize,
}

/// The response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Result code.
    pub status: u16,
    /// Results.
    pub body: Vec<u8>,
}

/// The client side of a ring.
pub struct RingClient {
    host: Arc<dyn Host>,
    link: Box<dyn Link>,
    ring: Ring,
    slots: Claims,
    buffers: Claims,
    /// Per slot: 0, or a mark if the caller gave up before the response came. Below bit 16 the mark holds the
    /// buffer of the call (1 for none, else its number + 2), above it a number that no other mark has. The thread
    /// that finds the response of an abandoned slot frees the slot and the buffer.
    abandoned: Vec<LongWord>,
    /// Counts callers that gave up.
    left: LongWord,
    /// Counts returned slots and buffers; callers wait on it when all are taken.
    freed: Word,
    /// Number of callers that wait on `freed`.
    starved: Word,
    spin: Spin,
}

impl RingClient {
    /// Makes a client over the memory that SharedFS sent. A wait polls for at most `spin_ns` before it sleeps.
    ///
    /// # Errors
    /// `Limits`, `Memory`.
    pub fn new(
        host: Arc<dyn Host>,
        link: Box<dyn Link>,
        memory: Arc<Mapping>,
        limits: RingLimits,
        spin_ns: u32,
    ) -> Result<Self, Error> {
        let ring = Ring::new(memory, limits)?;
        Ok(Self {
            slots: Claims::new(limits.slots as usize),
            buffers: Claims::new(limits.bulk_buffers as usize),
            abandoned: (0..limits.slots).map(|_| LongWord::new(0)).collect(),
            left: LongWord::new(0),
            freed: Word::new(0),
            starved: Word::new(0),
            spin: Spin::new(spin_ns),
            host,
            link,
            ring,
        })
    }

    /// Sends a request and waits for its response.
    ///
    /// # Errors
    /// `Disconnected`: the server has gone, and the request may or may not have been executed. `TimedOut`: the
    /// server may still execute it. `TooLarge`: request or response; `Message`: the response is malformed.
    pub fn call(&self, call: &Call<'_>, until: Option<Time>) -> Result<Response, Error> {
        let buffer = self.claim_buffer(call, until)?;
        let slot = match self.claim(&self.slots, until) {
            Ok(slot) => slot,
            Err(error) => {
                self.give_back(None, buffer);
                return Err(error);
            }
        };
        let done = self.submit(slot, buffer, call).and_then(|()| self.wait(slot, until));
        if let Err(error) = done {
            // The server may still write there: the thread that finds the response frees the slot. Release: pairs
            // with the load in `sweep`. Relaxed: the number only has to be unique.
            let left = self.left.fetch_add(1, Ordering::Relaxed);
            let mark = left << BUFFER_BITS | buffer.map_or(1, |buffer| buffer as u64 + 2);
            self.abandoned[slot].store(mark, Ordering::Release);
            return Err(error);
        }
        let response = self.take(slot, buffer, call.id);
        self.free(slot, buffer);
        response
    }

    /// Claims a buffer if the request or its response may need one.
    fn claim_buffer(&self, call: &Call<'_>, until: Option<Time>) -> Result<Option<usize>, Error> {
        let limits = &self.ring.limits;
        let bytes = call.body.len().max(call.response_bytes_max).saturating_add(MESSAGE_HEAD_BYTES);
        if bytes <= limits.inline_bytes as usize {
            return Ok(None);
        }
        let limit = if limits.bulk_buffers == 0 { limits.inline_bytes } else { limits.bulk_bytes } as usize;
        if bytes > limit {
            let limit = limit - MESSAGE_HEAD_BYTES;
            return Err(Error::TooLarge { bytes: bytes - MESSAGE_HEAD_BYTES, limit });
        }
        self.claim(&self.buffers, until).map(Some)
    }

    /// Claims a free number, and waits for one if all are taken. A buffer is claimed before a slot, never after.
    fn claim(&self, claims: &Claims, until: Option<Time>) -> Result<usize, Error> {
        loop {
            self.sweep();
            if let Some(number) = claims.claim() {
                return Ok(number);
            }
            self.starved.fetch_add(1, Ordering::SeqCst);
            // Full fence between announcing the wait and the last check. Pairs with the fence in `give_back`.
            fence(Ordering::SeqCst);
            let seen = self.freed.load(Ordering::SeqCst);
            self.sweep();
            let claimed = claims.claim();
            let paused = match claimed {
                Some(_) => Ok(()),
                None => self.pause(&self.freed, seen, until),
            };
            self.starved.fetch_add(u32::MAX, Ordering::Relaxed);
            if let Some(number) = claimed {
                return Ok(number);
            }
            paused?;
        }
    }

    /// Frees abandoned slots whose response has arrived.
    fn sweep(&self) {
        for (slot, mark) in self.abandoned.iter().enumerate() {
            // Acquire: pairs with the Release of the caller that gave up, so its slot's state is read after that.
            let found = mark.load(Ordering::Acquire);
            if found == 0 || self.state(slot) & PHASE != ANSWERED {
                continue;
            }
            // Relaxed: exactly one thread removes the mark. The number in it excludes the mark of a later call,
            // whose response this thread has not seen.
            if mark.compare_exchange(found, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                self.free(slot, (found as usize & BUFFER_MASK).checked_sub(2));
            }
        }
    }

    fn state(&self, slot: usize) -> u32 {
        // Acquire: pairs with the Release of the server's response.
        self.ring.slots[slot][STATE].load(Ordering::Acquire)
    }

    fn submit(&self, slot: usize, buffer: Option<usize>, call: &Call<'_>) -> Result<(), Error> {
        let ring = &self.ring;
        let body_bytes = u32::try_from(call.body.len()).expect("the claim bounded the length");
        let header = RequestHeader {
            id: U64::new(call.id),
            kind: U16::new(call.kind),
            reserved: U16::new(0),
            body_bytes: U32::new(body_bytes),
        };
        let bytes = MESSAGE_HEAD_BYTES + call.body.len();
        let place =
            ring.place(ring.limits.request_offset(slot), buffer, bytes).expect("the claim bounded it");
        ring.mapping.copy_in(place, header.as_bytes())?;
        ring.mapping.copy_in(place + MESSAGE_HEAD_BYTES, call.body)?;
        let words = &ring.slots[slot];
        words[REQUEST_BYTES].store(bytes as u32, Ordering::Relaxed);
        words[BULK].store(buffer.map_or(0, |buffer| buffer as u32 + 1), Ordering::Relaxed);
        // Release: pairs with the Acquire of the server's load of the state.
        words[STATE].store(SUBMITTED, Ordering::Release);
        let doorbell = &ring.doorbell[0];
        doorbell.fetch_add(1, Ordering::SeqCst);
        // Full fence between ringing and reading the server's flag. Pairs with the fence in the server's `sleep`,
        // which sets the flag and then reads the doorbell.
        fence(Ordering::SeqCst);
        if ring.sleeping[0].load(Ordering::SeqCst) != 0 {
            self.host.wake(doorbell, 1);
        }
        Ok(())
    }

    /// Waits for the response.
    fn wait(&self, slot: usize, until: Option<Time>) -> Result<(), Error> {
        let answered = || self.state(slot) & PHASE == ANSWERED;
        let shares = self.ring.processors.enter(self.host.as_ref(), Side::Client);
        if !shares && self.spin.poll(self.host.as_ref(), answered) {
            return Ok(());
        }
        let word = &self.ring.slots[slot][STATE];
        let begin = self.host.now();
        loop {
            // AcqRel: Acquire as in `state`. Either the server's swap sees the flag, or this thread sees the
            // response.
            let before = word.fetch_or(WAITING, Ordering::AcqRel);
            if before & PHASE == ANSWERED {
                return Ok(());
            }
            let paused = self.pause(word, before | WAITING, until);
            if answered() {
                self.spin.learn(self.host.now().since(begin));
                return Ok(());
            }
            paused?;
        }
    }

    /// Sleeps for a bounded time while `word` holds `expected`; fails if the wait is pointless or over.
    fn pause(&self, word: &Word, expected: u32, until: Option<Time>) -> Result<(), Error> {
        // Acquire: pairs with the Release in the server's `close`.
        if self.ring.closed[0].load(Ordering::Acquire) != 0 || !self.link.is_up() {
            return Err(Error::Disconnected);
        }
        let now = self.host.now();
        if until.is_some_and(|until| now >= until) {
            return Err(Error::TimedOut);
        }
        let look = now.after(LINK_LOOK);
        // The caller tests its condition again, however the wait ended.
        let _ = self.host.wait(word, expected, Some(until.map_or(look, |until| until.min(look))));
        Ok(())
    }

    /// Copies the response out.
    fn take(&self, slot: usize, buffer: Option<usize>, id: u64) -> Result<Response, Error> {
        let ring = &self.ring;
        let bytes = ring.slots[slot][RESPONSE_BYTES].load(Ordering::Relaxed) as usize;
        let place = ring
            .place(ring.limits.response_offset(slot), buffer, bytes)
            .ok_or(Error::Message(DecodeError::Field("response_bytes")))?;
        let mut message = vec![0; bytes];
        ring.mapping.copy_out(place, &mut message)?;
        let (header, body) = ResponseHeader::decode(&message)?;
        if header.id.get() != id {
            return Err(Error::Message(DecodeError::Field("id")));
        }
        if header.status.get() == STATUS_NO_ROOM {
            let limit = ring.limits.bulk_bytes.max(ring.limits.inline_bytes) as usize - MESSAGE_HEAD_BYTES;
            return Err(Error::TooLarge { bytes: limit + 1, limit });
        }
        Ok(Response { status: header.status.get(), body: body.to_vec() })
    }

    fn free(&self, slot: usize, buffer: Option<usize>) {
        // Relaxed: the next user gets the slot through `slots`, which orders the accesses.
        self.ring.slots[slot][STATE].store(FREE, Ordering::Relaxed);
        self.give_back(Some(slot), buffer);
    }

    fn give_back(&self, slot: Option<usize>, buffer: Option<usize>) {
        if let Some(slot) = slot {
            self.slots.release(slot);
        }
        if let Some(buffer) = buffer {
            self.buffers.release(buffer);
        }
        self.freed.fetch_add(1, Ordering::SeqCst);
        // Full fence between returning and reading the count of waiters. Pairs with the fence in `claim`.
        fence(Ordering::SeqCst);
        if self.starved.load(Ordering::SeqCst) != 0 {
            self.host.wake(&self.freed, WAKE_ALL);
        }
    }
}
