//! The client's side of a request ring. Any number of threads call at once.

use super::{
    ANSWERED, BULK, FREE, MESSAGE_HEAD_BYTES, PHASE, REQUEST_BYTES, RESPONSE_BYTES, Ring, RingLimits, STATE,
    SUBMITTED, WAITING,
};
use crate::claims::Claims;
use crate::error::Error;
use crate::host::{Host, Spin, Time, WAKE_ALL};
use crate::shared::Mapping;
use crate::sync::{LongWord, Ordering, Word, fence};
use format::DecodeError;
use format::message::{RequestHeader, ResponseHeader, STATUS_NO_ROOM};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Whether the other side still lives: the socket in the real world, the process in the simulator.
pub trait Link: Send + Sync {
    /// False once the other side has gone for good; true while it may only be slow or stopped.
    fn is_up(&self) -> bool;
}

impl<L: Link + ?Sized> Link for Arc<L> {
    fn is_up(&self) -> bool {
        (**self).is_up()
    }
}

/// A waiting client looks this often whether its server still lives.
const LINK_LOOK: Duration = Duration::from_millis(50);

/// What the mark of an abandoned slot has for its buffer.
const BUFFER_BITS: u32 = 16;
const BUFFER_MASK: usize = (1 << BUFFER_BITS) - 1;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Chosen by the caller; comes back with the answer.
    pub id: u64,
    /// What is asked for.
    pub kind: u16,
    /// Its operands.
    pub body: &'a [u8],
    /// Largest body of a response.
    pub response_bytes_max: usize,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// How it went.
    pub status: u16,
    /// The results.
    pub body: Vec<u8>,
}

/// The client's side of a ring.
pub struct RingClient {
    host: Arc<dyn Host>,
    link: Box<dyn Link>,
    ring: Ring,
    slots: Claims,
    buffers: Claims,
    /// A slot whose caller has gone before the answer: its buffer, 1 for none, else its number + 2, below bit 16, and
    /// how many had left before, which no other time shares; 0 if none has. Whoever finds the answer there frees both.
    abandoned: Vec<LongWord>,
    /// Counts callers that left.
    left: LongWord,
    /// Counts what was given back; callers wait for it when everything is taken.
    freed: Word,
    /// Number of callers that do.
    starved: Word,
    spin: Spin,
}

impl RingClient {
    /// A client over the memory that SharedFS sent. Polls for `spin_ns` at most before it sleeps.
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

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// `Disconnected`: the server has gone, and whether it carried out the request is not known. `TimedOut`: it may
    /// still be carried out. `TooLarge`: request or response; `Message`: an answer that is none.
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
            // The server may still write there: whoever finds the answer gives the slot back. Release: pairs with
            // the load in `sweep`. Relaxed: only has to be another number each time.
            let left = self.left.fetch_add(1, Ordering::Relaxed);
            let mark = left << BUFFER_BITS | buffer.map_or(1, |buffer| buffer as u64 + 2);
            self.abandoned[slot].store(mark, Ordering::Release);
            return Err(error);
        }
        let response = self.take(slot, buffer, call.id);
        self.free(slot, buffer);
        response
    }

    /// A buffer if the request or its response may need one.
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

    /// A free number, waited for if there is none. A buffer is claimed before a slot, never after.
    fn claim(&self, claims: &Claims, until: Option<Time>) -> Result<usize, Error> {
        loop {
            self.sweep();
            if let Some(number) = claims.claim() {
                return Ok(number);
            }
            self.starved.fetch_add(1, Ordering::SeqCst);
            // Full fence: say that somebody waits, then look once more. Pairs with the fence in `give_back`.
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

    /// Frees slots whose callers did not wait for the answer that has come by now.
    fn sweep(&self) {
        for (slot, mark) in self.abandoned.iter().enumerate() {
            // Acquire: pairs with the Release of the caller who left, so the state is looked at after it left.
            let found = mark.load(Ordering::Acquire);
            if found == 0 || self.state(slot) & PHASE != ANSWERED {
                continue;
            }
            // Relaxed: one thread alone takes the mark, and not that of a later call, whose answer nobody saw.
            if mark.compare_exchange(found, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                self.free(slot, (found as usize & BUFFER_MASK).checked_sub(2));
            }
        }
    }

    fn state(&self, slot: usize) -> u32 {
        // Acquire: pairs with the Release of the server's answer.
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
        // Release: pairs with the Acquire of the server's look at the state.
        words[STATE].store(SUBMITTED, Ordering::Release);
        let doorbell = &ring.doorbell[0];
        doorbell.fetch_add(1, Ordering::SeqCst);
        // Full fence: ring, then look whether anybody sleeps. Pairs with the fence in the server's `sleep`, which
        // says that it sleeps, then looks at the doorbell.
        fence(Ordering::SeqCst);
        if ring.sleeping[0].load(Ordering::SeqCst) != 0 {
            self.host.wake(doorbell, 1);
        }
        Ok(())
    }

    /// Waits for the answer.
    fn wait(&self, slot: usize, until: Option<Time>) -> Result<(), Error> {
        let answered = || self.state(slot) & PHASE == ANSWERED;
        if self.spin.poll(self.host.as_ref(), answered) {
            return Ok(());
        }
        let word = &self.ring.slots[slot][STATE];
        loop {
            // AcqRel: Acquire as in `state`; the server's swap sees the flag or we see its answer.
            let before = word.fetch_or(WAITING, Ordering::AcqRel);
            if before & PHASE == ANSWERED {
                return Ok(());
            }
            let paused = self.pause(word, before | WAITING, until);
            if answered() {
                return Ok(());
            }
            paused?;
        }
    }

    /// Sleeps while `word` is `expected`, a bounded time; an error if there is nothing to wait for any more.
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
        // However it ends, a signal included: the caller looks again.
        let _ = self.host.wait(word, expected, Some(until.map_or(look, |until| until.min(look))));
        Ok(())
    }

    /// Copies the answer out.
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
        // Relaxed: the next to use the slot gets it through `slots`, which orders it.
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
        // Full fence: give back, then look whether anybody waits. Pairs with the fence in `claim`.
        fence(Ordering::SeqCst);
        if self.starved.load(Ordering::SeqCst) != 0 {
            self.host.wake(&self.freed, WAKE_ALL);
        }
    }
}
