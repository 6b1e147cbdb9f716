//! The server side of a request ring. Usually one thread takes requests; any thread may answer them.

use super::{
    ANSWERED, BULK, MESSAGE_HEAD_BYTES, PHASE, REQUEST_BYTES, RESPONSE_BYTES, Ring, RingLimits, STATE,
    SUBMITTED, TAKEN, WAITING,
};
use crate::error::Error;
use crate::host::{Host, Spin, Time, WAKE_ALL};
use crate::processors::Side;
use crate::shared::Mapping;
use crate::sync::{Ordering, Word, fence};
use format::DecodeError;
use format::message::{RequestHeader, ResponseHeader, STATUS_NO_ROOM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Interval at which a sleeping server scans the ring without being woken: a hostile client can withhold its
/// doorbell.
const RING_LOOK: Duration = Duration::from_millis(500);

/// A request, copied out, with its length checked. The body is not decoded yet, and is hostile.
#[derive(Debug)]
pub struct Taken {
    slot: usize,
    buffer: Option<usize>,
    /// The client's number of the request.
    pub id: u64,
    /// Kind of the operation; unchecked.
    pub kind: u16,
    /// Operands; unchecked.
    pub body: Vec<u8>,
}

/// The server side of a ring.
pub struct RingServer {
    host: Arc<dyn Host>,
    ring: Ring,
    /// Slots that are being served. The shared state says the same, but the client can change that.
    serving: Vec<AtomicBool>,
    /// First slot of the next scan, so that no slot is always last.
    cursor: AtomicUsize,
    /// 1 after [`Self::close`].
    closed: Word,
    spin: Spin,
}

impl RingServer {
    /// Makes a server over memory that its own process created. A wait polls for at most `spin_ns` before it
    /// sleeps.
    ///
    /// # Errors
    /// `Limits`, `Memory`.
    pub fn new(
        host: Arc<dyn Host>,
        memory: Arc<Mapping>,
        limits: RingLimits,
        spin_ns: u32,
    ) -> Result<Self, Error> {
        Ok(Self {
            host,
            ring: Ring::new(memory, limits)?,
            serving: (0..limits.slots).map(|_| AtomicBool::new(false)).collect(),
            cursor: AtomicUsize::new(0),
            closed: Word::new(0),
            spin: Spin::new(spin_ns),
        })
    }

    /// Takes the next request, and waits for one until `until`.
    ///
    /// # Errors
    /// `TimedOut`. `Disconnected` after [`Self::close`]. `Message`: the client violates the protocol, and its
    /// session must be ended.
    pub fn next(&self, until: Option<Time>) -> Result<Taken, Error> {
        let mut slept = None;
        loop {
            let mut found = None;
            let mut look = || {
                found = self.look();
                found.is_some() || self.is_closed()
            };
            if self.ring.processors.enter(self.host.as_ref(), Side::Server) {
                look();
            } else {
                self.spin.poll(self.host.as_ref(), look);
            }
            if self.is_closed() {
                return Err(Error::Disconnected);
            }
            match found {
                Some(found) => {
                    slept.inspect(|begin| self.spin.learn(self.host.now().since(*begin)));
                    return found;
                }
                None => {
                    slept.get_or_insert_with(|| self.host.now());
                    if let Some(found) = self.sleep(until)? {
                        return found;
                    }
                }
            }
        }
    }

    fn is_closed(&self) -> bool {
        // Acquire: pairs with the Release in `close`.
        self.closed.load(Ordering::Acquire) != 0
    }

    /// Scans all slots once.
    fn look(&self) -> Option<Result<Taken, Error>> {
        let count = self.serving.len();
        // Relaxed: a hint for fairness.
        let first = self.cursor.load(std::sync::atomic::Ordering::Relaxed);
        for slot in (first..first + count).map(|slot| slot % count) {
            let state = &self.ring.slots[slot][STATE];
            // Acquire: pairs with the Release of the client's submission.
            let seen = state.load(Ordering::Acquire);
            if seen & PHASE != SUBMITTED || self.serving[slot].swap(true, Ordering::Acquire) {
                continue;
            }
            // Fails if another thread has taken the request since the load above.
            if self.mark_taken(state, seen) {
                self.cursor.store((slot + 1) % count, std::sync::atomic::Ordering::Relaxed);
                return Some(self.copy_out(slot));
            }
            self.serving[slot].store(false, Ordering::Release);
        }
        None
    }

    /// Submitted -> taken, keeping the client's flag. A client that changes the word all the time gets three
    /// attempts now, then the next scan.
    fn mark_taken(&self, state: &Word, mut seen: u32) -> bool {
        for _ in 0..3 {
            if seen & PHASE != SUBMITTED {
                return false;
            }
            let taken = TAKEN | seen & WAITING;
            // Acquire: pairs with the Release of the client's submission.
            match state.compare_exchange(seen, taken, Ordering::Acquire, Ordering::Acquire) {
                // The client may sleep on the old value.
                Ok(_) if seen & WAITING != 0 => {
                    self.host.wake(state, WAKE_ALL);
                    return true;
                }
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    fn copy_out(&self, slot: usize) -> Result<Taken, Error> {
        let ring = &self.ring;
        let words = &ring.slots[slot];
        let bytes = words[REQUEST_BYTES].load(Ordering::Relaxed) as usize;
        let buffer = match words[BULK].load(Ordering::Relaxed) {
            0 => None,
            number if number <= ring.limits.bulk_buffers => Some(number as usize - 1),
            _ => return Err(Error::Message(DecodeError::Field("bulk"))),
        };
        let place = ring
            .place(ring.limits.request_offset(slot), buffer, bytes)
            .ok_or(Error::Message(DecodeError::Field("request_bytes")))?;
        let mut message = vec![0; bytes];
        ring.mapping.copy_out(place, &mut message)?;
        let (header, _) = RequestHeader::decode(&message)?;
        message.drain(..MESSAGE_HEAD_BYTES);
        Ok(Taken { slot, buffer, id: header.id.get(), kind: header.kind.get(), body: message })
    }

    /// Sleeps until the doorbell rings, for a bounded time; returns a request that the last scan found.
    #[allow(clippy::type_complexity, reason = "found, and well formed or not")]
    fn sleep(&self, until: Option<Time>) -> Result<Option<Result<Taken, Error>>, Error> {
        let now = self.host.now();
        if until.is_some_and(|until| now >= until) {
            return Err(Error::TimedOut);
        }
        let sleeping = &self.ring.sleeping[0];
        let doorbell = &self.ring.doorbell[0];
        sleeping.store(1, Ordering::SeqCst);
        // Full fence between setting the flag and the scan. Pairs with the fence in the client's `submit`, which
        // rings and then reads the flag.
        fence(Ordering::SeqCst);
        let rung = doorbell.load(Ordering::SeqCst);
        let found = self.look();
        if found.is_none() && !self.is_closed() {
            self.ring.processors.forget(Side::Server);
            let look = now.after(RING_LOOK);
            self.host.wait(doorbell, rung, Some(until.map_or(look, |until| until.min(look))));
        }
        sleeping.store(0, Ordering::Relaxed);
        Ok(found)
    }

    /// Size of the largest response body that the client provided space for.
    pub fn body_room(&self, taken: &Taken) -> usize {
        let limits = &self.ring.limits;
        let bytes = if taken.buffer.is_some() { limits.bulk_bytes } else { limits.inline_bytes };
        bytes as usize - MESSAGE_HEAD_BYTES
    }

    /// Answers a request. The slot belongs to the client again, even if the caller has given up.
    ///
    /// # Errors
    /// `TooLarge`: the body exceeds the client's space; the client gets a response that says so.
    pub fn respond(&self, taken: Taken, status: u16, body: &[u8]) -> Result<(), Error> {
        let ring = &self.ring;
        let Taken { slot, buffer, id, .. } = taken;
        let inline = ring.limits.response_offset(slot);
        let bytes = MESSAGE_HEAD_BYTES.saturating_add(body.len());
        let (place, status, body, outcome) = match ring.place(inline, buffer, bytes) {
            Some(place) => (place, status, body, Ok(())),
            None => {
                let limit = if buffer.is_some() { ring.limits.bulk_bytes } else { ring.limits.inline_bytes };
                let limit = limit as usize - MESSAGE_HEAD_BYTES;
                (inline, STATUS_NO_ROOM, &[][..], Err(Error::TooLarge { bytes: body.len(), limit }))
            }
        };
        let header = ResponseHeader {
            id: U64::new(id),
            status: U16::new(status),
            reserved: U16::new(0),
            body_bytes: U32::new(u32::try_from(body.len()).expect("the place bounded the length")),
        };
        ring.mapping.copy_in(place, header.as_bytes())?;
        ring.mapping.copy_in(place + MESSAGE_HEAD_BYTES, body)?;
        let words = &ring.slots[slot];
        words[RESPONSE_BYTES].store((MESSAGE_HEAD_BYTES + body.len()) as u32, Ordering::Relaxed);
        // Before the answer, because the client may use the slot again at once. The shared state is still `TAKEN`,
        // so no other thread takes the slot now. Release: pairs with the Acquire in `look`.
        self.serving[slot].store(false, Ordering::Release);
        // AcqRel: Release pairs with the Acquire of the client's load. Either this swap sees the client's flag, or
        // the client sees the answer.
        let before = words[STATE].swap(ANSWERED, Ordering::AcqRel);
        if before & WAITING != 0 {
            self.host.wake(&words[STATE], WAKE_ALL);
        }
        outcome
    }

    /// Closes the ring: threads in [`Self::next`] and callers on the client side get `Disconnected`.
    pub fn close(&self) {
        // Release: pairs with the Acquire in `is_closed` and in the client's `pause`.
        self.closed.store(1, Ordering::Release);
        self.ring.closed[0].store(1, Ordering::Release);
        let doorbell = &self.ring.doorbell[0];
        doorbell.fetch_add(1, Ordering::SeqCst);
        self.host.wake(doorbell, WAKE_ALL);
        for words in &self.ring.slots {
            words[STATE].fetch_or(WAITING, Ordering::AcqRel);
            self.host.wake(&words[STATE], WAKE_ALL);
        }
    }
}
