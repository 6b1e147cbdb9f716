//! Remote calls between two nodes, over the messages of one connection. Either side may call and serve.
//!
//! Each call has a number, a deadline, and one of a bounded number of slots: a third of the smaller of the two
//! windows. So the window always has space for requests, answers and cancellations of both sides, and no cycle of
//! waits can arise. An abandoned call keeps its slot until the other side has answered it, so the bound also holds
//! for the work at the other side. Deadlines are sent as a span, because the clocks of two nodes are not compared.
//!
//! No thread owns the connection: a waiting thread receives for all others if no other thread does. Locks: `state`
//! only, not across a wait.

use crate::connection::{Connection, Event};
use crate::error::{Ended, Error};
use format::wire::{REMOTE_CANCELLED, RemoteHead, RemoteKind};
use ipc::sync::{Ordering, Word};
use ipc::{EventCounter, Host, Lock, Time, Waited};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Calls over a connection. Clones refer to the same calls.
#[derive(Clone)]
pub struct Rpc(Arc<Shared>);

/// Number of window slots that one call can need: a request or an answer in each direction, and a cancellation.
const PLACES: u32 = 3;

struct Shared {
    host: Arc<dyn Host>,
    connection: Connection,
    calls: usize,
    /// 1 while a thread receives for all.
    taking: Word,
    counter: Arc<EventCounter>,
    state: Lock<CallTable>,
}

#[derive(Default)]
struct CallTable {
    last_id: u64,
    /// Calls of this side that were not answered, or whose answer was not fetched.
    asked: HashMap<u64, OutgoingCall>,
    /// Requests of the other side that were not answered: true if the call was cancelled.
    serving: HashMap<u64, bool>,
    requests: VecDeque<IncomingCall>,
    ended: Option<Ended>,
}

#[derive(Default)]
struct OutgoingCall {
    answer: Option<Answer>,
    /// True after the caller has abandoned it.
    given_up: bool,
}

struct IncomingCall {
    id: u64,
    code: u16,
    until: Option<Time>,
    body: Vec<u8>,
}

/// The answer of the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 0 if the call was executed; otherwise a code of the protocol above.
    pub code: u16,
    /// The body of the answer.
    pub body: Vec<u8>,
}

/// A call in progress. Dropping it without [`Pending::wait`] abandons the call without a message to the other side.
pub struct Pending {
    rpc: Rpc,
    id: u64,
}

/// A request of the other side. It occupies a slot until it is answered.
#[must_use = "a request takes a place until it is answered"]
pub struct Request {
    rpc: Rpc,
    id: u64,
    code: u16,
    until: Option<Time>,
    body: Vec<u8>,
}

impl Rpc {
    /// Creates calls over a connection, which must carry nothing else.
    pub fn new(host: Arc<dyn Host>, connection: Connection) -> Self {
        let calls = (connection.window() / PLACES).max(1) as usize;
        let state = Lock::new(host.clone(), CallTable::default());
        Self(Arc::new(Shared {
            host,
            connection,
            calls,
            taking: Word::new(0),
            counter: EventCounter::new(None),
            state,
        }))
    }

    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.0.connection
    }

    /// Limit of calls of one side in progress.
    pub fn calls_max(&self) -> usize {
        self.0.calls
    }

    /// Bytes of the longest request or answer that the other side accepts.
    pub fn body_bytes_max(&self) -> usize {
        self.0.connection.message_bytes_max() - size_of::<RemoteHead>()
    }

    /// Starts a call, waiting for a slot. The other side is told to give up at `until` as well.
    ///
    /// # Errors
    /// `TooLarge`, `TimedOut`, `Interrupted`, `Ended`.
    pub fn start(&self, code: u16, body: &[u8], until: Option<Time>) -> Result<Pending, Error> {
        let calls = self.0.calls;
        let id = self.pump(until, |state| {
            (state.asked.len() < calls).then(|| {
                state.last_id += 1;
                state.asked.insert(state.last_id, OutgoingCall::default());
                state.last_id
            })
        })?;
        let left = until.map_or(0, |until| milliseconds(until.since(self.0.host.now())));
        let head = RemoteHead::new(RemoteKind::Request, id, code, left);
        if let Err(error) = self.send(&head, body, until) {
            self.0.state.lock().asked.remove(&id);
            self.0.counter.notify(&*self.0.host);
            return Err(error);
        }
        Ok(Pending { rpc: self.clone(), id })
    }

    /// Calls, and waits for the answer. At the deadline the call is cancelled at the other side.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn call(&self, code: u16, body: &[u8], until: Option<Time>) -> Result<Answer, Error> {
        self.start(code, body, until)?.wait(until)
    }

    /// Waits for the next request of the other side.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`, `Ended`.
    pub fn next(&self, until: Option<Time>) -> Result<Request, Error> {
        let IncomingCall { id, code, until, body } = self.pump(until, |state| state.requests.pop_front())?;
        Ok(Request { rpc: self.clone(), id, code, until, body })
    }

    fn send(&self, head: &RemoteHead, body: &[u8], until: Option<Time>) -> Result<(), Error> {
        let message = [head.as_bytes(), body].concat();
        self.0.connection.send(&message, until).map(|_| ())
    }

    /// Waits until `ready` returns a result; receives for all threads if no other thread does.
    fn pump<T>(
        &self,
        until: Option<Time>,
        mut ready: impl FnMut(&mut CallTable) -> Option<T>,
    ) -> Result<T, Error> {
        let shared = &*self.0;
        loop {
            let seen = shared.counter.value();
            let Some(_turn) = ReceiverTurn::new(shared) else {
                if let Some(result) = shared.look(&mut ready) {
                    return result;
                }
                match shared.counter.wait(&*shared.host, seen, until) {
                    Waited::Woken => continue,
                    Waited::TimedOut => return shared.look(&mut ready).unwrap_or(Err(Error::TimedOut)),
                    Waited::Interrupted => return Err(Error::Interrupted),
                }
            };
            // With the turn, no message can arrive between this check and the receive.
            if let Some(result) = shared.look(&mut ready) {
                return result;
            }
            match shared.connection.take(until) {
                Ok(event) => shared.dispatch(event),
                Err(Error::Ended(why)) => shared.state.lock().ended = Some(why),
                Err(Error::TimedOut) => return shared.look(&mut ready).unwrap_or(Err(Error::TimedOut)),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Shared {
    fn look<T>(&self, ready: &mut impl FnMut(&mut CallTable) -> Option<T>) -> Option<Result<T, Error>> {
        let mut state = self.state.lock();
        ready(&mut state).map(Ok).or_else(|| state.ended.map(|why| Err(Error::Ended(why))))
    }

    fn dispatch(&self, event: Event) {
        let broke = match event {
            Event::Message(message) => self.message(&message).err(),
            Event::Immediate(_) => Some("an immediate among calls"),
            Event::Ended(why) => {
                self.state.lock().ended = Some(why);
                None
            }
        };
        if let Some(what) = broke {
            self.connection.end(Ended::Broke(what));
        }
    }

    fn message(&self, message: &[u8]) -> Result<(), &'static str> {
        let (head, kind, body) = RemoteHead::decode(message).map_err(|_| "a call that is none")?;
        let id = head.id.get();
        let mut state = self.state.lock();
        match kind {
            RemoteKind::Request => {
                if state.serving.len() >= self.calls || state.serving.insert(id, false).is_some() {
                    return Err("more calls than it may");
                }
                let within = u64::from(head.within_ms.get());
                let until = (within > 0).then(|| self.host.now().after(Duration::from_millis(within)));
                let code = head.code.get();
                state.requests.push_back(IncomingCall { id, code, until, body: body.to_vec() });
            }
            RemoteKind::Response => match state.asked.get_mut(&id) {
                Some(asked) if asked.given_up => {
                    state.asked.remove(&id);
                }
                Some(asked) if asked.answer.is_none() => {
                    asked.answer = Some(Answer { code: head.code.get(), body: body.to_vec() });
                }
                _ => return Err("an answer to nothing"),
            },
            // Unknown if the answer and the cancellation have crossed.
            RemoteKind::Cancel => {
                if let Some(given_up) = state.serving.get_mut(&id) {
                    *given_up = true;
                }
            }
        }
        Ok(())
    }
}

/// The turn to receive from the connection for all threads.
struct ReceiverTurn<'a>(&'a Shared);

impl<'a> ReceiverTurn<'a> {
    fn new(shared: &'a Shared) -> Option<Self> {
        // Acquire: pairs with the Release of the previous turn.
        let won = shared.taking.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        won.is_ok().then(|| Self(shared))
    }
}

impl Drop for ReceiverTurn<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next turn.
        self.0.taking.store(0, Ordering::Release);
        self.0.counter.notify(&*self.0.host);
    }
}

impl Pending {
    /// Waits for the answer. At the deadline the call is cancelled at the other side.
    ///
    /// # Errors
    /// `TimedOut`, also if the other side found the call too late; `Interrupted`, `Ended`.
    pub fn wait(self, until: Option<Time>) -> Result<Answer, Error> {
        let id = self.id;
        let answer = self.rpc.pump(until, |state| {
            state.asked.get(&id)?.answer.as_ref()?;
            state.asked.remove(&id)?.answer
        });
        match answer {
            Ok(answer) if answer.code == REMOTE_CANCELLED => Err(Error::TimedOut),
            Ok(answer) => Ok(answer),
            Err(error) => {
                self.cancel();
                Err(error)
            }
        }
    }

    /// Cancels the call, and tells the other side.
    pub fn cancel(self) {
        let wanted = {
            let state = self.rpc.0.state.lock();
            state.asked.get(&self.id).is_some_and(|asked| asked.answer.is_none())
        };
        if wanted {
            let head = RemoteHead::new(RemoteKind::Cancel, self.id, 0, 0);
            // The slots reserve space for the cancellation. If the connection has ended, so has the call.
            let _ = self.rpc.send(&head, &[], Some(self.rpc.0.host.now()));
        }
    }
}

impl Drop for Pending {
    /// Abandons the call. Its slot is free when the answer has come.
    fn drop(&mut self) {
        let mut state = self.rpc.0.state.lock();
        let answered = state.asked.get(&self.id).is_some_and(|asked| asked.answer.is_some());
        if answered {
            state.asked.remove(&self.id);
        } else if let Some(asked) = state.asked.get_mut(&self.id) {
            asked.given_up = true;
        }
    }
}

impl Request {
    /// Number of the called operation.
    pub fn code(&self) -> u16 {
        self.code
    }

    /// Body of the request.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The deadline of the caller, on this node's clock; `None` without a deadline.
    pub fn until(&self) -> Option<Time> {
        self.until
    }

    /// True if the caller no longer waits: it has cancelled the call, or the deadline is over.
    pub fn is_cancelled(&self) -> bool {
        let shared = &self.rpc.0;
        let given_up = shared.state.lock().serving.get(&self.id).copied().unwrap_or(true);
        given_up || self.until.is_some_and(|until| shared.host.now() >= until)
    }

    /// Sends the answer.
    ///
    /// # Errors
    /// `TooLarge`: nothing was sent, and the request keeps its slot; `TimedOut`, `Interrupted`, `Ended`.
    pub fn respond(&self, code: u16, body: &[u8], until: Option<Time>) -> Result<(), Error> {
        let limit = self.rpc.body_bytes_max();
        if body.len() > limit {
            return Err(Error::TooLarge { bytes: body.len() as u64, limit: limit as u64 });
        }
        // Frees the slot before the other side can see the answer, because its next request may come at once.
        self.rpc.0.state.lock().serving.remove(&self.id);
        self.rpc.send(&RemoteHead::new(RemoteKind::Response, self.id, code, 0), body, until)
    }

    /// Answers that the call was not executed, because the caller no longer waits.
    ///
    /// # Errors
    /// As [`Self::respond`].
    pub fn give_up(&self, until: Option<Time>) -> Result<(), Error> {
        self.respond(REMOTE_CANCELLED, &[], until)
    }
}

/// A span as it is sent: at least one millisecond, because 0 means no limit.
fn milliseconds(span: Duration) -> u32 {
    u32::try_from(span.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl std::fmt::Debug for Rpc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rpc({:?})", self.0.connection)
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending({})", self.id)
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Request({}, {}, {} bytes)", self.id, self.code, self.body.len())
    }
}
