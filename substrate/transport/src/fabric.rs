//! Connections over libfabric, `FI_EP_MSG`: provider `tcp` everywhere, `verbs` where there is hardware, chosen when
//! the endpoint is created. The differences between them are queried: how remote memory is named, whether an
//! immediate uses up a receive, how many bytes may be inline.
//!
//! A software provider makes progress only inside calls of libfabric. A thread that waits for a connection polls it.
//! For all other connections there is one progress thread for each domain, which sleeps until a queue has an event. A
//! queue for which a thread waits is left to that thread, which polls, then sleeps until the descriptors of the queue have an
//! event: a progress thread between them would cost each message a second wake-up. The progress thread checks the queue again
//! after [`Settings::look_again`], then after twice the time, up to `LOOKS_MAX` times it (`SLEEPER_LOOKS_MAX` while its user
//! sleeps), and takes the queue back once no thread waits for it.
//!
//! The provider listens only for one authenticated peer at a time: `control`.
//!
//! Locks: `events` while events are read or a listener is closed; then `peer_listeners`, `links` and
//! `control_sockets`, each for one access.

use crate::Endpoint;
use crate::error::{Ended, Error};
use crate::handshake::Identity;
use crate::link::{ControlChannel, ControlListener, Link, LinkShape, PendingConnect, Provider};
use crate::settings::Settings;
use format::Epoch;
use ipc::sync::{Ordering, Word};
use ipc::{EventCounter, Host, Join, Lock, LongWord, Time};
use pmem::Region;
use std::any::Any;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

mod control;
mod link;
mod sockets;
mod sys;

use control::{FabricPendingConnect, PeerListener, TcpChannel, TcpControlListener};
use link::{FabricLink, LinkEvent};
use sys::{Domain, Facts};

/// See the module.
const LOOKS_MAX: u32 = 8;
const SLEEPER_LOOKS_MAX: u32 = 64;

/// Number of successful checks in a row after which the progress thread leaves a queue alone for as long.
const TURNS_MAX: u32 = 8;

/// Number of checks of a queue that makes progress without completions, before the thread serves other queues.
const ROUNDS_MAX: u32 = 16;

/// The next step for a link that was driven.
enum DriveResult {
    /// The link is armed: the set of descriptors reports its next event.
    Armed,
    /// The link is left to its user for a while.
    Left,
    /// The link is driven again, after others.
    Again,
}

/// Links that are not armed.
type WatchList = Vec<Watch>;

/// The time of the next check of a link, and the span before it.
struct Watch {
    link: u64,
    at: Time,
    span: Duration,
}

/// Number of events read from the progress thread's set in one call.
const EVENTS: usize = 64;

/// Event numbers in the set that belong to no link.
const WAKE: u64 = 0;
const CONNECTIONS: u64 = 1;

/// A provider, and the address of this node that it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fabric {
    /// Name of the provider: `tcp` or `verbs`.
    pub provider: String,
    /// Numeric IP address of this node.
    pub ip: String,
}

impl Fabric {
    /// The provider that works on every machine.
    pub fn tcp(ip: &str) -> Self {
        Self { provider: "tcp".to_string(), ip: ip.to_string() }
    }

    /// Loads the library and opens the provider once, which takes 100 to 350 ms: an endpoint is created within a few
    /// milliseconds afterwards.
    ///
    /// # Errors
    /// `NoProvider`, `Provider`.
    pub fn prepare(&self) -> Result<(), Error> {
        Domain::open(&self.provider, &self.ip, 1, 1).map(drop)
    }

    /// Tries whether the kernel installs filters for this process, without which no peer is accepted over `tcp`.
    ///
    /// # Errors
    /// `Host`.
    pub fn try_filter() -> Result<(), Error> {
        sockets::try_filter()
    }

    /// Creates an endpoint over this provider, with its progress thread. The first call in a process takes about 350
    /// ms, because it loads the library, unless [`Self::prepare`] did.
    ///
    /// # Errors
    /// `NoProvider`, `Provider`, `Address`, `Host`; `Unavailable`: impossible limits.
    pub fn endpoint(
        &self,
        host: Arc<dyn Host>,
        identity: Identity,
        epoch: Epoch,
        settings: Settings,
    ) -> Result<Endpoint, Error> {
        settings.check()?;
        let running = Running::start(host.clone(), self, &settings)?;
        Endpoint::new(host, Arc::new(FabricProvider(running)), identity, epoch, settings)
    }
}

/// State that the progress thread and all links of a domain share.
struct Inner {
    host: Arc<dyn Host>,
    domain: Arc<Domain>,
    facts: Facts,
    shape: LinkShape,
    ip: IpAddr,
    /// True if listeners have sockets of this process, which can be filtered; false for verbs.
    has_sockets: bool,
    /// The set of descriptors on which the progress thread sleeps.
    set: OwnedFd,
    wake: OwnedFd,
    stop: Word,
    ids: LongWord,
    tick: Option<Duration>,
    /// See [`Settings::look_again`].
    look_again: Duration,
    links: Lock<Links>,
    /// Counters to notify, by the id of the control socket.
    control_sockets: Lock<HashMap<u64, Arc<EventCounter>>>,
    /// By the address of the raw listener.
    peer_listeners: Lock<HashMap<usize, Arc<PeerListener>>>,
    /// Number of peer listeners that are finished and not closed.
    over: Word,
    events: Lock<()>,
}

#[derive(Default)]
struct Links {
    by_id: HashMap<u64, Weak<FabricLink>>,
    by_name: HashMap<usize, u64>,
}

/// The domain and its thread; they end with the endpoint and all its connections.
pub(crate) struct Running {
    inner: Arc<Inner>,
    thread: Lock<Option<Box<dyn Join>>>,
    thread_id: Arc<LongWord>,
}

impl Running {
    fn start(host: Arc<dyn Host>, fabric: &Fabric, settings: &Settings) -> Result<Arc<Self>, Error> {
        let shape = settings.shape();
        let (sends, receives) = (u64::from(shape.depth), u64::from(shape.receives));
        let domain = Arc::new(Domain::open(&fabric.provider, &fabric.ip, sends, receives)?);
        let facts = domain.facts();
        if facts.immediate_bytes < 4 {
            return Err(Error::NoProvider(format!("{} carries no immediates", fabric.provider)));
        }
        let inner = Arc::new(Inner {
            // SAFETY: a new descriptor.
            set: unsafe { descriptor("epoll_create1", libc::epoll_create1(libc::EPOLL_CLOEXEC)) }?,
            wake: event_descriptor()?,
            stop: Word::new(0),
            ids: LongWord::new(CONNECTIONS + 1),
            tick: settings.silence.map(|silence| silence / 4),
            look_again: settings.look_again,
            links: Lock::new(host.clone(), Links::default()),
            control_sockets: Lock::new(host.clone(), HashMap::new()),
            peer_listeners: Lock::new(host.clone(), HashMap::new()),
            over: Word::new(0),
            events: Lock::new(host.clone(), ()),
            ip: fabric.ip.parse().map_err(|_| Error::Address(fabric.ip.clone()))?,
            has_sockets: fabric.provider != "verbs",
            host,
            domain,
            facts,
            shape,
        });
        inner.control(libc::EPOLL_CTL_ADD, inner.wake.as_raw_fd(), libc::EPOLLIN, WAKE);
        inner.control(libc::EPOLL_CTL_ADD, inner.domain.descriptor(), libc::EPOLLIN, CONNECTIONS);
        let thread_id = Arc::new(LongWord::new(0));
        let (theirs, id) = (inner.clone(), thread_id.clone());
        let body = move || {
            id.store(own_thread(), Ordering::SeqCst);
            theirs.progress();
        };
        let thread = inner.host.spawn("transport", Box::new(body))?;
        let thread = Lock::new(inner.host.clone(), Some(thread));
        Ok(Arc::new(Self { inner, thread, thread_id }))
    }

    fn host(&self) -> &Arc<dyn Host> {
        &self.inner.host
    }

    fn domain(&self) -> &Arc<Domain> {
        &self.inner.domain
    }

    fn facts(&self) -> &Facts {
        &self.inner.facts
    }

    /// Number of inline bytes that this provider copies, at most [`crate::INLINE_BYTES_MAX`].
    fn inline_bytes(&self) -> usize {
        crate::memory::INLINE_BYTES_MAX
            .min(usize::try_from(self.inner.facts.inline_bytes).unwrap_or(usize::MAX))
    }

    fn next_id(&self) -> u64 {
        // Relaxed: the numbers only have to differ.
        self.inner.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes the progress thread notify a counter about events of a control socket.
    fn watch_socket(&self, socket: i32, counter: &Arc<EventCounter>) -> u64 {
        let id = self.next_id();
        self.inner.control_sockets.lock().insert(id, counter.clone());
        self.inner.control(libc::EPOLL_CTL_ADD, socket, libc::EPOLLONESHOT, id);
        id
    }

    /// Ends the notifications; the caller closes the socket next.
    fn unwatch_socket(&self, id: u64) {
        let counter = self.inner.control_sockets.lock().remove(&id);
        drop(counter);
    }

    /// Adds a link to the tables.
    fn add_link(&self, link: &Arc<FabricLink>) {
        let mut links = self.inner.links.lock();
        links.by_id.insert(link.id, Arc::downgrade(link));
        links.by_name.insert(link.name(), link.id);
    }

    /// Removes a link from the tables.
    fn remove_link(&self, id: u64, name: usize) {
        let mut links = self.inner.links.lock();
        links.by_id.remove(&id);
        if links.by_name.get(&name) == Some(&id) {
            links.by_name.remove(&name);
        }
    }

    /// Makes the progress thread report the next event of a link. `descriptors` are those of its queue now, `set`
    /// those that the progress thread's set already contains.
    fn watch(&self, id: u64, descriptors: &[libc::pollfd], set: &mut Vec<i32>) {
        set.retain(|old| {
            let stays = descriptors.iter().any(|now| now.fd == *old);
            if !stays {
                self.inner.control(libc::EPOLL_CTL_DEL, *old, 0, 0);
            }
            stays
        });
        for now in descriptors {
            let known = set.contains(&now.fd);
            let operation = if known { libc::EPOLL_CTL_MOD } else { libc::EPOLL_CTL_ADD };
            if !known {
                set.push(now.fd);
            }
            // poll and epoll use the same bits.
            self.inner.control(operation, now.fd, i32::from(now.events) | libc::EPOLLONESHOT, id);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.inner.stop.store(1, Ordering::SeqCst);
        self.inner.wake_up();
        // The progress thread itself may have dropped the last connection.
        if self.thread_id.load(Ordering::SeqCst) != own_thread()
            && let Some(thread) = self.thread.lock().take()
        {
            // A panic of the thread has printed its own message.
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn control(&self, operation: i32, of: i32, events: i32, number: u64) {
        let mut event = libc::epoll_event { events: events.cast_unsigned(), u64: number };
        // SAFETY: the set is open; the event is ours. `of` is open, or the call is refused.
        unsafe { libc::epoll_ctl(self.set.as_raw_fd(), operation, of, &raw mut event) };
    }

    fn wake_up(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes of ours are read. A counter that is full wakes too.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Clears the wake-up. Otherwise it would be reported for ever, and the thread would never sleep again.
    fn clear_wake(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight bytes of ours are written. With nothing to read the call ends at once.
        unsafe { libc::read(self.wake.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    fn link(&self, id: u64) -> Option<Arc<FabricLink>> {
        self.links.lock().by_id.get(&id).and_then(Weak::upgrade)
    }

    fn link_named(&self, name: usize) -> Option<Arc<FabricLink>> {
        let links = self.links.lock();
        links.by_id.get(links.by_name.get(&name)?).and_then(Weak::upgrade)
    }

    /// Runs the progress thread.
    fn progress(&self) {
        let mut watched = WatchList::new();
        let mut next_tick = self.host.now();
        // SeqCst: pairs with the store before the wake.
        while self.stop.load(Ordering::SeqCst) == 0 {
            self.connection_events(&mut watched);
            let now = self.host.now();
            if let Some(tick) = self.tick
                && now >= next_tick
            {
                next_tick = now.after(tick);
                self.tick(now);
            }
            if !self.domain.may_sleep() {
                continue;
            }
            let next = watched.iter().map(|watch| watch.at).chain(self.tick.map(|_| next_tick)).min();
            let (count, events) = self.sleep(next.map(|next| next.since(now)));
            self.look_at_watched(&mut watched);
            for event in &events[..count] {
                let number = event.u64;
                match number {
                    WAKE => self.clear_wake(),
                    CONNECTIONS => {}
                    id => match self.link(id) {
                        Some(link) => self.attend(&link, &mut watched),
                        None => self.tell(id),
                    },
                }
            }
        }
    }

    /// Notifies the counter of a control socket, if the id is one.
    fn tell(&self, id: u64) {
        let counter = self.control_sockets.lock().get(&id).cloned();
        if let Some(counter) = counter {
            counter.notify(&*self.host);
        }
    }

    /// Waits for events of the set.
    fn sleep(&self, left: Option<Duration>) -> (usize, [libc::epoll_event; EVENTS]) {
        let mut events = [libc::epoll_event { events: 0, u64: WAKE }; EVENTS];
        let ms = left.map_or(-1, |left| i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
        // SAFETY: at most `EVENTS` events are written.
        let count = unsafe { libc::epoll_wait(self.set.as_raw_fd(), events.as_mut_ptr(), EVENTS as i32, ms) };
        (usize::try_from(count).unwrap_or(0), events)
    }

    /// Drives a link that has an event, or wakes the threads that wait for it: they drive it themselves.
    fn attend(&self, link: &FabricLink, watched: &mut WatchList) {
        watched.retain(|watch| watch.link != link.id);
        let result = match link.is_waited_for() {
            true => {
                // Relaxed: a hint.
                link.seen.store(link.driven.load(Ordering::Relaxed), Ordering::Relaxed);
                link.notify(&*self.host);
                DriveResult::Left
            }
            false => self.serve(link),
        };
        self.keep(link.id, &result, self.look_again, watched);
    }

    fn keep(&self, link: u64, look: &DriveResult, span: Duration, watched: &mut WatchList) {
        let now = self.host.now();
        match look {
            DriveResult::Armed => {}
            DriveResult::Left => watched.push(Watch { link, at: now.after(span), span }),
            DriveResult::Again => watched.push(Watch { link, at: now, span }),
        }
    }

    /// Checks the watched links that are due. The thread takes back a link that its user has not polled since.
    fn look_at_watched(&self, watched: &mut WatchList) {
        let now = self.host.now();
        let due: Vec<Watch> = watched.extract_if(.., |watch| watch.at <= now).collect();
        for Watch { link, span, .. } in due {
            let Some(link) = self.link(link) else { continue };
            let driven = link.driven.load(Ordering::Relaxed);
            let is_polled = driven != link.seen.load(Ordering::Relaxed);
            if is_polled {
                link.seen.store(driven, Ordering::Relaxed);
            }
            let is_waited_for = link.is_waited_for();
            if is_waited_for && !is_polled {
                // Its user sleeps, and the next event wakes it. Bytes that another thread posted may have to be sent.
                link.driver().inspect(|driver| _ = driver.drive());
                link.seen.store(link.driven.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            let looks_max = if is_waited_for { SLEEPER_LOOKS_MAX } else { LOOKS_MAX };
            let (look, span) = match is_polled || is_waited_for {
                true => (DriveResult::Left, (span * 2).min(self.look_again * looks_max)),
                false => (self.serve(&link), self.look_again),
            };
            self.keep(link.id, &look, span, watched);
        }
    }

    /// Drives a link. If its user polls it at the same time, the link is left to the user for a while.
    fn serve(&self, link: &FabricLink) -> DriveResult {
        // A connection without a driver has not been handed to its user yet, so it is checked again later.
        let Some(driver) = link.driver() else { return DriveResult::Left };
        // Relaxed, here and below: hints only. Only this thread writes `seen`.
        let mut expected = link.driven.load(Ordering::Relaxed);
        let mut turns = 0;
        for _ in 0..ROUNDS_MAX {
            while driver.drive() {
                expected = expected.wrapping_add(1);
                turns += 1;
                // The user posts as fast as this thread drives: each would only delay the other.
                if turns == TURNS_MAX {
                    link.seen.store(link.driven.load(Ordering::Relaxed), Ordering::Relaxed);
                    return DriveResult::Left;
                }
            }
            expected = expected.wrapping_add(1);
            let driven = link.driven.load(Ordering::Relaxed);
            link.seen.store(driven, Ordering::Relaxed);
            if driven != expected {
                return DriveResult::Left;
            }
            if link.arm() {
                return DriveResult::Armed;
            }
        }
        DriveResult::Again
    }

    fn tick(&self, now: Time) {
        let links: Vec<_> = self.links.lock().by_id.values().filter_map(Weak::upgrade).collect();
        for driver in links.iter().filter_map(|link| link.driver()) {
            driver.tick(now);
        }
    }

    fn connection_events(&self, watched: &mut WatchList) {
        loop {
            let events = self.events.lock();
            let Some(event) = self.domain.event() else {
                return self.close_peer_listeners();
            };
            if event.kind == sys::WANTS_IN {
                self.comes(&event);
                continue;
            }
            drop(events);
            let Some(link) = self.link_named(event.endpoint as usize) else { continue };
            let said = &event.data[..usize::try_from(event.data_bytes).unwrap_or(0).min(event.data.len())];
            link.push(match event.kind {
                sys::CONNECTED => LinkEvent::Up,
                sys::FAILED if event.error == libc::ECONNREFUSED && !said.is_empty() => {
                    LinkEvent::Refused(said.to_vec())
                }
                sys::FAILED | sys::GONE => LinkEvent::Ended(Ended::Lost),
                _ => continue,
            });
            // If the user is driving, the notification makes it drive again.
            self.attend(&link, watched);
            link.notify(&*self.host);
        }
    }

    /// Handles a connection request. The caller holds the lock of events.
    fn comes(&self, event: &sys::RawEvent) {
        let said = &event.data[..usize::try_from(event.data_bytes).unwrap_or(0).min(event.data.len())];
        let listener = self.peer_listeners.lock().get(&(event.endpoint as usize)).cloned();
        match listener {
            Some(listener) => listener.comes(&self.domain, &*self.host, said, event.info),
            // SAFETY: the info came with this event.
            None => unsafe { self.domain.forget(event.info) },
        }
    }

    /// Closes the peer listeners that are finished. The queue of events is empty, and the caller holds its lock.
    fn close_peer_listeners(&self) {
        // Acquire: pairs with the Release of a listener that finishes.
        if self.over.load(Ordering::Acquire) == 0 {
            return;
        }
        let over: Vec<_> = {
            let mut peer_listeners = self.peer_listeners.lock();
            peer_listeners.extract_if(|_, listener| listener.may_close()).collect()
        };
        for (_, listener) in &over {
            self.over.fetch_add(u32::MAX, Ordering::AcqRel);
            // SAFETY: it is in no table any more, no event of it is left, and nothing in the provider leads to it.
            unsafe { self.domain.close_listener(listener.raw) };
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let peer_listeners = std::mem::take(&mut *self.peer_listeners.lock());
        for listener in peer_listeners.values() {
            // SAFETY: the progress thread has ended, so no event is handled any more.
            unsafe { self.domain.close_listener(listener.raw) };
        }
    }
}

/// A node as a provider of libfabric connections.
struct FabricProvider(Arc<Running>);

impl Provider for FabricProvider {
    fn register(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        link::register(&self.0.inner.domain, region)
    }

    /// `at`: a port, or empty for any free one; the address is always that of this node.
    fn listen(&self, at: &str, counter: Arc<EventCounter>) -> Result<Box<dyn ControlListener>, Error> {
        let port = if at.is_empty() { 0 } else { at.parse().map_err(|_| Error::Address(at.to_string()))? };
        Ok(Box::new(TcpControlListener::new(&self.0, port, counter)?))
    }

    fn open_channel(&self, to: &str, counter: Arc<EventCounter>) -> Result<Arc<dyn ControlChannel>, Error> {
        let socket = sockets::connect(self.0.inner.ip, address(to)?)?;
        Ok(Arc::new(TcpChannel::new(&self.0, socket, counter)))
    }

    fn prepare_connect(&self, to: &str) -> Result<Box<dyn PendingConnect>, Error> {
        Ok(Box::new(FabricPendingConnect::new(&self.0, address(to)?.ip())?))
    }
}

fn address(to: &str) -> Result<SocketAddr, Error> {
    to.parse().map_err(|_| Error::Address(to.to_string()))
}

/// Limit of completions in a queue.
fn completions(shape: &LinkShape) -> u64 {
    u64::from(shape.depth) + u64::from(shape.receives)
}

/// Takes ownership of a descriptor that a call of libc has just created.
///
/// # Safety
/// The descriptor has no other owner.
unsafe fn descriptor(call: &'static str, raw: i32) -> Result<OwnedFd, Error> {
    if raw < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE);
        return Err(Error::Host(ipc::Error::System { call, errno }));
    }
    // SAFETY: by the contract above.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// A descriptor that becomes readable by a write, until it is read.
fn event_descriptor() -> Result<OwnedFd, Error> {
    // SAFETY: a new descriptor.
    unsafe { descriptor("eventfd", libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }
}

/// A number that identifies the calling thread among all live threads.
fn own_thread() -> u64 {
    // SAFETY: no arguments, cannot fail.
    u64::from(unsafe { libc::gettid() }.cast_unsigned())
}
