//! Calls between two nodes over the messages of one connection. Either side may call and serve.
//!
//! Each call has a number, a deadline, and a place among a bounded number of calls: a third of the smaller of the two
//! windows, so that requests, answers and cancellations of both sides always find room and no side waits for the other
//! in a circle. A call that was given up keeps its place until the other side has answered it, so the bound holds for
//! the work at the other side too. Deadlines travel as a span: clocks of two nodes are not compared.
//!
//! Nobody owns the connection: whoever waits and finds nobody taking takes for all. Locks: `state` only, not across a
//! wait.

use crate::connection::{Connection, Event};
use crate::error::{Ended, Error};
use crate::news::News;
use format::wire::{REMOTE_CANCELLED, RemoteHead, RemoteKind};
use ipc::sync::{Ordering, Word};
use ipc::{Host, Lock, Time, Waited};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Calls over a connection. Clones are the same.
#[derive(Clone)]
pub struct Rpc(Arc<Shared>);

/// Places in the window that one call can need: a request or an answer each way, and a cancellation.
const PLACES: u32 = 3;

struct Shared {
    host: Arc<dyn Host>,
    connection: Connection,
    calls: usize,
    /// 1 while somebody takes for all.
    taking: Word,
    news: Arc<News>,
    state: Lock<State>,
}

#[derive(Default)]
struct State {
    last_id: u64,
    /// Calls of this side that were not answered, or whose answer was not fetched.
    asked: HashMap<u64, Asked>,
    /// Requests of the other side that were not answered: true if it gave up.
    serving: HashMap<u64, bool>,
    requests: VecDeque<Incoming>,
    ended: Option<Ended>,
}

#[derive(Default)]
struct Asked {
    answer: Option<Answer>,
    /// Nobody waits for it any more.
    given_up: bool,
}

struct Incoming {
    id: u64,
    code: u16,
    until: Option<Time>,
    body: Vec<u8>,
}

/// What the other side answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// How it ended: 0 if it was carried out, else what the two sides have agreed on.
    pub code: u16,
    /// The answer.
    pub body: Vec<u8>,
}

/// A call under way. Dropped without [`Pending::wait`], it is given up without a word to the other side.
pub struct Pending {
    rpc: Rpc,
    id: u64,
}

/// A request of the other side. It takes a place until it is answered.
#[must_use = "a request takes a place until it is answered"]
pub struct Request {
    rpc: Rpc,
    id: u64,
    code: u16,
    until: Option<Time>,
    body: Vec<u8>,
}

impl Rpc {
    /// Calls over a connection that carries nothing else.
    pub fn new(host: Arc<dyn Host>, connection: Connection) -> Self {
        let calls = (connection.window() / PLACES).max(1) as usize;
        let state = Lock::new(host.clone(), State::default());
        Self(Arc::new(Shared {
            host,
            connection,
            calls,
            taking: Word::new(0),
            news: News::heard_by(None),
            state,
        }))
    }

    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.0.connection
    }

    /// Calls of one side that may be under way.
    pub fn calls_max(&self) -> usize {
        self.0.calls
    }

    /// Bytes of the longest request or answer that the other side takes.
    pub fn body_bytes_max(&self) -> usize {
        self.0.connection.message_bytes_max() - size_of::<RemoteHead>()
    }

    /// Begins a call, waiting for a place. The other side is told to give up at `until` too.
    ///
    /// # Errors
    /// `TooLarge`, `TimedOut`, `Interrupted`, `Ended`.
    pub fn start(&self, code: u16, body: &[u8], until: Option<Time>) -> Result<Pending, Error> {
        let calls = self.0.calls;
        let id = self.pump(until, |state| {
            (state.asked.len() < calls).then(|| {
                state.last_id += 1;
                state.asked.insert(state.last_id, Asked::default());
                state.last_id
            })
        })?;
        let left = until.map_or(0, |until| milliseconds(until.since(self.0.host.now())));
        let head = RemoteHead::new(RemoteKind::Request, id, code, left);
        if let Err(error) = self.send(&head, body, until) {
            self.0.state.lock().asked.remove(&id);
            self.0.news.tell(&*self.0.host);
            return Err(error);
        }
        Ok(Pending { rpc: self.clone(), id })
    }

    /// Calls, and waits for the answer. When the time is over, the other side is told.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn call(&self, code: u16, body: &[u8], until: Option<Time>) -> Result<Answer, Error> {
        self.start(code, body, until)?.wait(until)
    }

    /// The next request of the other side, waited for.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`, `Ended`.
    pub fn next(&self, until: Option<Time>) -> Result<Request, Error> {
        let Incoming { id, code, until, body } = self.pump(until, |state| state.requests.pop_front())?;
        Ok(Request { rpc: self.clone(), id, code, until, body })
    }

    fn send(&self, head: &RemoteHead, body: &[u8], until: Option<Time>) -> Result<(), Error> {
        let message = [head.as_bytes(), body].concat();
        self.0.connection.send(&message, until).map(|_| ())
    }

    /// Waits until `ready` gives something, taking for all if nobody does.
    fn pump<T>(
        &self,
        until: Option<Time>,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Error> {
        let shared = &*self.0;
        loop {
            let seen = shared.news.seen();
            let Some(_turn) = Turn::new(shared) else {
                if let Some(result) = shared.look(&mut ready) {
                    return result;
                }
                match shared.news.sleep(&*shared.host, seen, until) {
                    Waited::Woken => continue,
                    Waited::TimedOut => return shared.look(&mut ready).unwrap_or(Err(Error::TimedOut)),
                    Waited::Interrupted => return Err(Error::Interrupted),
                }
            };
            // With the turn: what was taken before is seen here, what comes later is taken here.
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
    fn look<T>(&self, ready: &mut impl FnMut(&mut State) -> Option<T>) -> Option<Result<T, Error>> {
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
                state.requests.push_back(Incoming { id, code, until, body: body.to_vec() });
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
            // An unknown one was answered while its cancellation was under way.
            RemoteKind::Cancel => {
                if let Some(given_up) = state.serving.get_mut(&id) {
                    *given_up = true;
                }
            }
        }
        Ok(())
    }
}

/// The turn to take from the connection for all.
struct Turn<'a>(&'a Shared);

impl<'a> Turn<'a> {
    fn new(shared: &'a Shared) -> Option<Self> {
        // Acquire: pairs with the Release of the one before.
        let won = shared.taking.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        won.is_ok().then(|| Self(shared))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next.
        self.0.taking.store(0, Ordering::Release);
        self.0.news.tell(&*self.0.host);
    }
}

impl Pending {
    /// Waits for the answer. When the time is over the call is given up, and the other side is told so.
    ///
    /// # Errors
    /// `TimedOut`, also if it was the other side that found it late; `Interrupted`, `Ended`.
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

    /// Gives the call up, and tells the other side.
    pub fn cancel(self) {
        let wanted = {
            let state = self.rpc.0.state.lock();
            state.asked.get(&self.id).is_some_and(|asked| asked.answer.is_none())
        };
        if wanted {
            let head = RemoteHead::new(RemoteKind::Cancel, self.id, 0, 0);
            // There is room by the count of places; that the connection is over ends the call as well.
            let _ = self.rpc.send(&head, &[], Some(self.rpc.0.host.now()));
        }
    }
}

impl Drop for Pending {
    /// The place is free when the answer has come.
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
    /// Which call.
    pub fn code(&self) -> u16 {
        self.code
    }

    /// What was asked.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// When who asked gives up, on this node's clock; none if never.
    pub fn until(&self) -> Option<Time> {
        self.until
    }

    /// True if nobody waits for the answer any more: it was given up, or its time is over.
    pub fn is_cancelled(&self) -> bool {
        let shared = &self.rpc.0;
        let given_up = shared.state.lock().serving.get(&self.id).copied().unwrap_or(true);
        given_up || self.until.is_some_and(|until| shared.host.now() >= until)
    }

    /// Answers.
    ///
    /// # Errors
    /// `TooLarge`: nothing was sent, and the request still has its place; `TimedOut`, `Interrupted`, `Ended`.
    pub fn respond(&self, code: u16, body: &[u8], until: Option<Time>) -> Result<(), Error> {
        let limit = self.rpc.body_bytes_max();
        if body.len() > limit {
            return Err(Error::TooLarge { bytes: body.len() as u64, limit: limit as u64 });
        }
        // The place is free before the other side can know: its next request may come at once.
        self.rpc.0.state.lock().serving.remove(&self.id);
        self.rpc.send(&RemoteHead::new(RemoteKind::Response, self.id, code, 0), body, until)
    }

    /// Says that it was not carried out, because nobody waits for it.
    ///
    /// # Errors
    /// As [`Self::respond`].
    pub fn give_up(&self, until: Option<Time>) -> Result<(), Error> {
        self.respond(REMOTE_CANCELLED, &[], until)
    }
}

/// A span as it is sent: at least one millisecond, since 0 means no limit.
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
