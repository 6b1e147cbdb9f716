//! The public operations of a connection. Each waits for its turn and for space in `ConnectionCore`, which holds the
//! rules.

use super::*;

/// Optional messages leave the rest of the peer's window free. A peer that keeps up tells its count when it has taken as many.
const OPTIONAL_PART: u32 = 2;

impl Connection {
    pub(crate) fn new(core: Arc<ConnectionCore>) -> Self {
        Self(core)
    }

    /// The peer's node id, as the handshake has proved it.
    pub fn node(&self) -> NodeId {
        self.agreed().node
    }

    /// True if both refer to the same connection.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The epoch in which the connection was made. It can outlast it: see [`Endpoint::advance`](crate::Endpoint::advance).
    pub fn epoch(&self) -> Epoch {
        self.agreed().epoch
    }

    /// The protocol version in use.
    pub fn version(&self) -> u8 {
        self.agreed().version
    }

    /// Bytes of the longest message in either direction: the smaller limit of the two sides, so both sides return the
    /// same.
    pub fn message_bytes_max(&self) -> usize {
        self.agreed().window.message_bytes.min(self.0.settings.message_bytes) as usize
    }

    /// Number of messages and immediates that may be in progress in either direction: the smaller of the two windows,
    /// so both sides return the same.
    pub fn window(&self) -> u32 {
        self.agreed().window.window.min(self.0.settings.window)
    }

    /// Ends the connection with a given reason.
    pub(crate) fn end(&self, why: Ended) {
        self.0.end(why);
    }

    fn agreed(&self) -> Agreed {
        self.0.peer()
    }

    /// The reason of the end, if the connection has ended.
    pub fn ended(&self) -> Option<Ended> {
        self.0.ended()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `TooLarge`; `Ended`; `TimedOut` and `Interrupted` while waiting for space: then nothing was sent.
    pub fn send(&self, message: &[u8], until: Option<Time>) -> Result<Ticket, Error> {
        let limit = self.message_bytes_max();
        if message.len() > limit {
            return Err(Error::TooLarge { bytes: message.len() as u64, limit: limit as u64 });
        }
        self.0.submit(until, true, |core, state| core.post_frame(state, FrameKind::Message, message))
    }

    /// Sends a message that may be left out, without waiting. It is left out if half of the peer's window is in use, so that it
    /// makes no other message wait. False: it was left out.
    ///
    /// # Errors
    /// `TooLarge`; `Ended`.
    pub fn send_optional(&self, message: &[u8]) -> Result<bool, Error> {
        let under_way = {
            let state = self.0.state.lock();
            state.sent.wrapping_sub(state.taken_there)
        };
        if under_way >= self.agreed().window.window / OPTIONAL_PART {
            return Ok(false);
        }
        match self.send(message, Some(Time::from_ns(0))) {
            Ok(_) => Ok(true),
            Err(Error::TimedOut | Error::Interrupted) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes into memory that the peer has granted, `offset` bytes after its start. With an immediate, the peer is
    /// notified when all bytes are in place; without one, it is not notified.
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

    /// Reads memory that the peer has granted, from `offset` bytes after its start.
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
        let work = Operation::Read { into, range, from };
        self.0.submit(until, false, |core, state| core.post(state, &work, Some(into)))
    }

    fn check_local(&self, local: &Local, range: &Range<u64>) -> Result<(), Error> {
        if local.endpoint() != self.0.endpoint {
            return Err(Error::Foreign);
        }
        check_range(local.region(), range)
    }

    /// Waits until this operation and all earlier ones are complete.
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

    /// Waits for the next message, immediate, or the end of the connection.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`; `Ended` after the end was reported.
    pub fn take(&self, until: Option<Time>) -> Result<Event, Error> {
        self.0.wait_for(until, |core| {
            let mut state = core.state.lock();
            let Some(event) = state.inbox.pop_front() else { return report_end(&mut state) };
            state.taken = state.taken.wrapping_add(1);
            if state.taken.wrapping_sub(state.told) >= (core.settings.window / 2).max(1) {
                state.due.taken = true;
                core.send_due(&mut state);
            }
            Some(Ok(event))
        })
    }

    /// Grants the peer access to a part of `region` until this connection ends. A grant cannot be revoked earlier,
    /// because the fabric may be executing a write that it has already allowed. The caller sends the returned
    /// description to the peer in a message. Over libfabric only the key protects the memory: another peer of this
    /// endpoint that knows the key can use it.
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
                // The end is reported only after the fence, so this call waits for it.
                self.0.fence();
                Err(Error::Ended(why))
            }
        }
    }

    /// The operations and bytes that this side has handed to the provider so far.
    pub fn traffic(&self) -> Traffic {
        self.0.state.lock().traffic
    }

    /// Closes the connection: sends a goodbye, then ends the peer's access. After the return, also on another thread,
    /// no byte of the peer reaches memory of this side through this connection, and all granted memory may be reused.
    pub fn close(&self) {
        self.0.send_goodbye();
        self.0.end(Ended::ClosedHere);
    }
}

fn report_end(state: &mut Guard<'_, ConnectionState>) -> Option<Result<Event, Error>> {
    let why = state.ended?;
    if std::mem::replace(&mut state.end_told, true) {
        return Some(Err(Error::Ended(why)));
    }
    Some(Ok(Event::Ended(why)))
}

/// The description of a part of granted memory.
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
