//! What the user of a connection calls: each waits for its turn and its room in `Core`, which knows the rules.

use super::*;

impl Connection {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self(core)
    }

    /// The node at the other end, as the handshake proved it.
    pub fn node(&self) -> NodeId {
        self.agreed().node
    }

    /// Whether the two are the same connection.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The epoch for which the connection holds.
    pub fn epoch(&self) -> Epoch {
        self.agreed().epoch
    }

    /// The version of the protocol that is spoken.
    pub fn version(&self) -> u8 {
        self.agreed().version
    }

    /// Bytes of the longest message in either direction: the smaller of what the two sides take, so both say the same.
    pub fn message_bytes_max(&self) -> usize {
        self.agreed().window.message_bytes.min(self.0.settings.message_bytes) as usize
    }

    /// Messages and immediates that may be under way in either direction: the smaller of the two windows, so both
    /// sides say the same.
    pub fn window(&self) -> u32 {
        self.agreed().window.window.min(self.0.settings.window)
    }

    /// Ends it with a reason of one's own.
    pub(crate) fn end(&self, why: Ended) {
        self.0.end(why);
    }

    fn agreed(&self) -> Agreed {
        self.0.peer()
    }

    /// Why the connection is over, if it is.
    pub fn ended(&self) -> Option<Ended> {
        self.0.ended()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `TooLarge`; `Ended`; `TimedOut` and `Interrupted` while waiting for room: then nothing was sent.
    pub fn send(&self, message: &[u8], until: Option<Time>) -> Result<Ticket, Error> {
        let limit = self.message_bytes_max();
        if message.len() > limit {
            return Err(Error::TooLarge { bytes: message.len() as u64, limit: limit as u64 });
        }
        self.0.submit(until, true, |core, state| core.post_frame(state, FrameKind::Message, message))
    }

    /// Writes into memory that the peer granted, `offset` bytes after its start. With an immediate, the peer is told
    /// when all of it is in place; without, it is not told.
    ///
    /// # Errors
    /// `Range`, `TooLarge` (inline), `Foreign`; as [`Self::send`].
    pub fn write(
        &self,
        from: Bytes<'_>,
        to: &WireRegion,
        offset: u64,
        immediate: Option<u32>,
        until: Option<Time>,
    ) -> Result<Ticket, Error> {
        match &from {
            Bytes::Inline(bytes) if bytes.len() > INLINE_BYTES_MAX => {
                return Err(Error::TooLarge { bytes: bytes.len() as u64, limit: INLINE_BYTES_MAX as u64 });
            }
            Bytes::Inline(_) => {}
            Bytes::Registered(local, range) => self.check_local(local, range)?,
        }
        let to = part(to, offset, from.count())?;
        self.0.submit(until, immediate.is_some(), |core, state| core.post_write(state, &from, to, immediate))
    }

    /// Reads memory that the peer granted, from `offset` bytes after its start.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn read(
        &self,
        into: &Local,
        range: Range<u64>,
        from: &WireRegion,
        offset: u64,
        until: Option<Time>,
    ) -> Result<Ticket, Error> {
        self.check_local(into, &range)?;
        let from = part(from, offset, range.end - range.start)?;
        let work = Work::Read { into, range, from };
        self.0.submit(until, false, |core, state| core.post(state, &work, Some(into)))
    }

    fn check_local(&self, local: &Local, range: &Range<u64>) -> Result<(), Error> {
        if local.endpoint() != self.0.endpoint {
            return Err(Error::Foreign);
        }
        check_range(local.region(), range)
    }

    /// Waits until this operation and all before it are done.
    ///
    /// # Errors
    /// `Ended`, `TimedOut`, `Interrupted`.
    pub fn wait(&self, ticket: Ticket, until: Option<Time>) -> Result<(), Error> {
        self.0.wait_for(until, |core| {
            let state = core.state.lock();
            if state.done >= ticket.0 {
                return Some(Ok(()));
            }
            state.ended.map(|why| Err(Error::Ended(why)))
        })
    }

    /// The next message, immediate, or the end, waited for.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`; `Ended` after the end was reported.
    pub fn take(&self, until: Option<Time>) -> Result<Event, Error> {
        self.0.wait_for(until, |core| {
            let mut state = core.state.lock();
            let Some(event) = state.inbox.pop_front() else { return report_end(&mut state) };
            state.taken = state.taken.wrapping_add(1);
            if state.taken.wrapping_sub(state.told) >= (core.settings.window / 2).max(1) {
                state.owes.taken = true;
                core.pay(&mut state);
            }
            Some(Ok(event))
        })
    }

    /// Lets the peer at a part of `region` until this connection ends: there is no other way to take the right back,
    /// because a fabric may be in the middle of a write that it allowed. What it answers is told to the peer in a
    /// message. Over libfabric its key is all that protects it: another peer of this endpoint that knows it may use it.
    ///
    /// # Errors
    /// `Range`, `Memory`, `Ended`, `Provider`.
    pub fn grant(&self, region: &Region, range: Range<u64>, rights: Rights) -> Result<WireRegion, Error> {
        check_range(region, &range)?;
        let (granted, handle) = self.0.link.grant(region, range, rights)?;
        let mut state = self.0.state.lock();
        match state.ending {
            None => {
                state.grants.push(handle);
                Ok(granted)
            }
            Some(why) => {
                drop(state);
                drop(handle);
                // Nobody hears of the end before.
                self.0.fence();
                Err(Error::Ended(why))
            }
        }
    }

    /// Closes: says goodbye, then ends the peer's rights. When this returns, on whichever thread, no byte of the peer
    /// reaches memory of this side through this connection any more, and everything granted on it may be used for
    /// something else.
    pub fn close(&self) {
        self.0.say_goodbye();
        self.0.end(Ended::ClosedHere);
    }
}

fn report_end(state: &mut Guard<'_, State>) -> Option<Result<Event, Error>> {
    let why = state.ended?;
    if std::mem::replace(&mut state.end_told, true) {
        return Some(Err(Error::Ended(why)));
    }
    Some(Ok(Event::Ended(why)))
}

/// A part of granted memory.
fn part(region: &WireRegion, offset: u64, bytes: u64) -> Result<WireRegion, Error> {
    let end = offset.checked_add(bytes).ok_or(Error::Range)?;
    let base = region.base.get().checked_add(offset).ok_or(Error::Range)?;
    if end > region.bytes.get() {
        return Err(Error::Range);
    }
    Ok(WireRegion { key: region.key, base: U64::new(base), bytes: U64::new(bytes) })
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connection({}, {})", self.node(), self.epoch())
    }
}
