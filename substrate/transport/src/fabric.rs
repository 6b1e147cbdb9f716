//! Connections over libfabric, `FI_EP_MSG`: provider `tcp` everywhere, `verbs` where there is hardware, chosen when
//! the endpoint is made. What differs between them is asked for, never assumed: how remote memory is named, whether an
//! immediate uses up a receive, what may be inline.
//!
//! On a software provider nothing arrives unless somebody is inside libfabric. Whoever waits for a connection polls it;
//! for the rest there is one progress thread a domain, which sleeps until a queue has something. A queue whose user
//! polls is left to its user: the thread looks at it again after [`WATCH`], and has it back when nobody polled since.
//!
//! Locks: `links` and `doors` are held for a look only; `events` while events are read or a listener is given up.

use crate::Endpoint;
use crate::error::{Ended, Error};
use crate::handshake::Identity;
use crate::link::{Door, Judge, Link, Provider, Shape};
use crate::news::News;
use crate::settings::Settings;
use format::Epoch;
use format::wire::{RefusalReason, WireRefusal};
use ipc::sync::{Ordering, Word};
use ipc::{Host, Join, Lock, LongWord, Time};
use pmem::Region;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;
use zerocopy::IntoBytes;

mod link;
mod sys;

use link::{FabricLink, Pending};
use sys::{Domain, Facts, RawEndpoint, RawInfo, RawListener};

/// How long a queue is left to its user after it was last seen to poll.
const WATCH: Duration = Duration::from_millis(1);

/// Peers that have knocked and wait to be let in; beyond, they are refused.
const KNOCKING_MAX: usize = 128;

/// Events taken from the progress thread's set at once.
const EVENTS: usize = 64;

/// Numbers in the set that are no link.
const WAKE: u64 = 0;
const CONNECTIONS: u64 = 1;

/// Which provider, and which address of this node it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fabric {
    /// `tcp`, `verbs`.
    pub provider: String,
    /// An address of this node, as numbers.
    pub ip: String,
}

impl Fabric {
    /// The provider that works everywhere.
    pub fn tcp(ip: &str) -> Self {
        Self { provider: "tcp".to_string(), ip: ip.to_string() }
    }

    /// An endpoint over this provider, with its progress thread. The first one of a process takes some 350 ms: the
    /// library is loaded then.
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
        Endpoint::new(host, Arc::new(Node(running)), identity, epoch, settings)
    }
}

/// What the progress thread and all links of a domain share.
struct Inner {
    host: Arc<dyn Host>,
    domain: Arc<Domain>,
    facts: Facts,
    shape: Shape,
    ip: String,
    /// The set of descriptors that the progress thread sleeps on.
    set: OwnedFd,
    wake: OwnedFd,
    stop: Word,
    ids: LongWord,
    tick: Option<Duration>,
    links: Lock<Links>,
    doors: Lock<HashMap<usize, Arc<FabricDoor>>>,
    events: Lock<()>,
}

#[derive(Default)]
struct Links {
    by_id: HashMap<u64, Weak<FabricLink>>,
    by_name: HashMap<usize, u64>,
}

/// The domain and its thread; ended when the endpoint and all its connections are gone.
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
            // SAFETY: as above.
            wake: unsafe { descriptor("eventfd", libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }?,
            stop: Word::new(0),
            ids: LongWord::new(CONNECTIONS + 1),
            tick: settings.silence.map(|silence| silence / 4),
            links: Lock::new(host.clone(), Links::default()),
            doors: Lock::new(host.clone(), HashMap::new()),
            events: Lock::new(host.clone(), ()),
            ip: fabric.ip.clone(),
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

    /// What this provider copies at once, of what everybody may send inline.
    fn inline_bytes(&self) -> usize {
        crate::memory::INLINE_BYTES_MAX
            .min(usize::try_from(self.inner.facts.inline_bytes).unwrap_or(usize::MAX))
    }

    fn next_id(&self) -> u64 {
        // Relaxed: only different numbers are asked for.
        self.inner.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Has the progress thread see a link's next event. Its half for completions is open and locked.
    fn watch(&self, id: u64, raw: &RawEndpoint) {
        // SAFETY: by the contract above.
        let queue = unsafe { raw.descriptor() };
        self.inner.control(libc::EPOLL_CTL_MOD, queue, libc::EPOLLIN | libc::EPOLLONESHOT, id);
    }

    /// Makes a link known, armed.
    fn know(&self, link: &Arc<FabricLink>) {
        let mut links = self.inner.links.lock();
        links.by_id.insert(link.id, Arc::downgrade(link));
        links.by_name.insert(link.name(), link.id);
        drop(links);
        let queue = link.descriptor();
        self.inner.control(libc::EPOLL_CTL_ADD, queue, libc::EPOLLIN | libc::EPOLLONESHOT, link.id);
    }

    /// Takes a link out of everything; its half for completions is open and locked.
    fn forget(&self, id: u64, name: usize, raw: &RawEndpoint) {
        let mut links = self.inner.links.lock();
        links.by_id.remove(&id);
        if links.by_name.get(&name) == Some(&id) {
            links.by_name.remove(&name);
        }
        drop(links);
        // SAFETY: by the contract above.
        let queue = unsafe { raw.descriptor() };
        // SAFETY: the set is open; a descriptor that is not in it is refused, which harms nobody.
        unsafe {
            libc::epoll_ctl(self.inner.set.as_raw_fd(), libc::EPOLL_CTL_DEL, queue, std::ptr::null_mut())
        };
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.inner.stop.store(1, Ordering::SeqCst);
        self.inner.wake_up();
        // The thread itself may have held the last connection.
        if self.thread_id.load(Ordering::SeqCst) != own_thread()
            && let Some(thread) = self.thread.lock().take()
        {
            // That it panicked was said by the panic.
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

    /// Takes the wake back: one that stayed would be an event for ever, and the thread would never sleep again.
    fn hear_wake(&self) {
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

    /// The progress thread.
    fn progress(&self) {
        let mut watched: Vec<u64> = Vec::new();
        let mut next_tick = self.host.now();
        // SeqCst: pairs with the store before the wake.
        while self.stop.load(Ordering::SeqCst) == 0 {
            self.connection_events();
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
            let left = self.tick.map(|_| next_tick.since(now));
            let left = if watched.is_empty() { left } else { Some(WATCH) };
            let (count, events) = self.sleep(left);
            watched.retain(|id| self.is_still_polled(*id));
            for event in &events[..count] {
                match event.u64 {
                    WAKE => self.hear_wake(),
                    CONNECTIONS => {}
                    id => {
                        if self.link(id).is_some_and(|link| self.serve(&link)) && !watched.contains(&id) {
                            watched.push(id);
                        }
                    }
                }
            }
        }
    }

    /// Waits for the set.
    fn sleep(&self, left: Option<Duration>) -> (usize, [libc::epoll_event; EVENTS]) {
        let mut events = [libc::epoll_event { events: 0, u64: WAKE }; EVENTS];
        let ms = left.map_or(-1, |left| i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1));
        // SAFETY: at most `EVENTS` events are written.
        let count = unsafe { libc::epoll_wait(self.set.as_raw_fd(), events.as_mut_ptr(), EVENTS as i32, ms) };
        (usize::try_from(count).unwrap_or(0), events)
    }

    /// Drives a link whose queue has something. True if its user was seen to poll it since the last look: then it is
    /// left to the user for a while.
    fn serve(&self, link: &FabricLink) -> bool {
        let Some(driver) = link.driver() else { return false };
        // Relaxed, here and below: hints; only this thread writes `seen`.
        let mut expected = link.seen.load(Ordering::Relaxed);
        loop {
            while driver.drive() {
                expected = expected.wrapping_add(1);
            }
            expected = expected.wrapping_add(1);
            let driven = link.driven.load(Ordering::Relaxed);
            link.seen.store(driven, Ordering::Relaxed);
            if driven != expected {
                return true;
            }
            if link.arm() {
                return false;
            }
        }
    }

    /// Looks at a link that was left to its user. If it was not polled since, the thread has it back.
    fn is_still_polled(&self, id: u64) -> bool {
        let Some(link) = self.link(id) else { return false };
        let driven = link.driven.load(Ordering::Relaxed);
        if driven != link.seen.load(Ordering::Relaxed) {
            link.seen.store(driven, Ordering::Relaxed);
            return true;
        }
        !link.arm() && self.serve(&link)
    }

    fn tick(&self, now: Time) {
        let links: Vec<_> = self.links.lock().by_id.values().filter_map(Weak::upgrade).collect();
        for driver in links.iter().filter_map(|link| link.driver()) {
            driver.tick(now);
        }
    }

    fn connection_events(&self) {
        loop {
            let events = self.events.lock();
            let Some(event) = self.domain.event() else { return };
            if event.kind == sys::WANTS_IN {
                self.knock(&event);
                continue;
            }
            drop(events);
            let Some(link) = self.link_named(event.endpoint as usize) else { continue };
            let said = &event.data[..usize::try_from(event.data_bytes).unwrap_or(0).min(event.data.len())];
            link.push(match event.kind {
                sys::CONNECTED => Pending::Up,
                sys::FAILED if event.error == libc::ECONNREFUSED && !said.is_empty() => {
                    Pending::Refused(said.to_vec())
                }
                sys::FAILED | sys::GONE => Pending::Ended(Ended::Lost),
                _ => continue,
            });
            if let Some(driver) = link.driver() {
                // The user may be driving: then it is told, and looks again.
                while driver.drive() {}
            }
            link.news().tell(&*self.host);
        }
    }

    /// Somebody wants in. The lock of events is held.
    fn knock(&self, event: &sys::RawEvent) {
        let said = &event.data[..usize::try_from(event.data_bytes).unwrap_or(0).min(event.data.len())];
        let doors = self.doors.lock();
        let Some(door) = doors.get(&(event.endpoint as usize)) else {
            // SAFETY: the info came with this event.
            return unsafe { self.domain.forget(event.info) };
        };
        if let Err(refusal) = door.admit(said, event.info) {
            // SAFETY: the info came with this event for this listener, which is open while it is in the table.
            unsafe { self.domain.reject(door.raw, event.info, &refusal) };
            return;
        }
        door.news.tell(&*self.host);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let doors = std::mem::take(&mut *self.doors.lock());
        for door in doors.values() {
            door.shut(&self.domain);
            // SAFETY: the progress thread has ended, so no event is handled any more.
            unsafe { self.domain.close_listener(door.raw) };
        }
    }
}

/// A listener. It stays open in the provider until the domain is closed, because sockets that connected and said
/// nothing yet still lead to it there.
struct FabricDoor {
    raw: *mut RawListener,
    address: String,
    judge: Judge,
    news: Arc<News>,
    knocking: Lock<Knocking>,
}

struct Knocking {
    open: bool,
    infos: VecDeque<*mut RawInfo>,
}

// SAFETY: the pointers are handles of a domain that any thread may use; each info is taken out once, under the lock.
unsafe impl Send for FabricDoor {}
// SAFETY: as above.
unsafe impl Sync for FabricDoor {}

impl FabricDoor {
    /// Judges a knock; the refusal if it is one.
    fn admit(&self, said: &[u8], info: *mut RawInfo) -> Result<(), Vec<u8>> {
        (self.judge)(said)?;
        let mut knocking = self.knocking.lock();
        if !knocking.open || knocking.infos.len() >= KNOCKING_MAX {
            return Err(WireRefusal::new(RefusalReason::Full, Epoch::new(0)).as_bytes().to_vec());
        }
        knocking.infos.push_back(info);
        Ok(())
    }

    fn shut(&self, domain: &Domain) {
        let mut knocking = self.knocking.lock();
        knocking.open = false;
        let refusal = WireRefusal::new(RefusalReason::Full, Epoch::new(0));
        for info in knocking.infos.drain(..) {
            // SAFETY: the info came with an event for this listener, and was not used.
            unsafe { domain.reject(self.raw, info, refusal.as_bytes()) };
        }
    }
}

/// A door as its user has it.
struct OpenDoor {
    running: Arc<Running>,
    door: Arc<FabricDoor>,
}

impl Door for OpenDoor {
    fn address(&self) -> String {
        self.door.address.clone()
    }

    fn next(&self) -> Result<Option<Arc<dyn Link>>, Error> {
        let inner = &self.running.inner;
        loop {
            let Some(info) = self.door.knocking.lock().infos.pop_front() else { return Ok(None) };
            let news = News::heard_by(Some(self.door.news.clone()));
            // SAFETY: the info came with an event, and was taken out of the queue just now.
            let raw = unsafe { inner.domain.accepting(info, completions(&inner.shape)) };
            let link = raw.and_then(|raw| FabricLink::new(&self.running, raw, inner.shape, news));
            // One that has gone again meanwhile harms nobody else.
            let Ok(link) = link else { continue };
            self.running.know(&link);
            if link.accept().is_ok() {
                return Ok(Some(link));
            }
        }
    }
}

impl Drop for OpenDoor {
    fn drop(&mut self) {
        self.door.shut(&self.running.inner.domain);
    }
}

/// A node's way into libfabric.
struct Node(Arc<Running>);

impl Provider for Node {
    fn register(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        link::register(&self.0.inner.domain, region)
    }

    /// `at`: a port, or empty for any free one; always at this node's own address.
    fn listen(&self, at: &str, judge: Judge, news: Arc<News>) -> Result<Box<dyn Door>, Error> {
        let inner = &self.0.inner;
        let port = if at.is_empty() { 0 } else { at.parse().map_err(|_| Error::Address(at.to_string()))? };
        let _events = inner.events.lock();
        let (raw, port) = inner.domain.listen(&inner.ip, port)?;
        let ip = inner.ip.parse().map_err(|_| Error::Address(inner.ip.clone()))?;
        let address = SocketAddr::new(ip, port).to_string();
        let knocking = Knocking { open: true, infos: VecDeque::new() };
        let knocking = Lock::new(inner.host.clone(), knocking);
        let door = Arc::new(FabricDoor { raw, address, judge, news, knocking });
        inner.doors.lock().insert(raw as usize, door.clone());
        inner.wake_up();
        Ok(Box::new(OpenDoor { running: self.0.clone(), door }))
    }

    fn connect(&self, to: &str, knock: &[u8], news: Arc<News>) -> Result<Arc<dyn Link>, Error> {
        let inner = &self.0.inner;
        let to: SocketAddr = to.parse().map_err(|_| Error::Address(to.to_string()))?;
        let ip = to.ip().to_string();
        let raw = inner.domain.connecting(&ip, to.port(), completions(&inner.shape))?;
        let link = FabricLink::new(&self.0, raw, inner.shape, news)?;
        self.0.know(&link);
        link.connect(&ip, to.port(), knock)?;
        inner.wake_up();
        Ok(link)
    }
}

/// Completions that can be there at once.
fn completions(shape: &Shape) -> u64 {
    u64::from(shape.depth) + u64::from(shape.receives)
}

/// A descriptor that a call of libc has just made.
///
/// # Safety
/// Nobody else has it.
unsafe fn descriptor(call: &'static str, raw: i32) -> Result<OwnedFd, Error> {
    if raw < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE);
        return Err(Error::Host(ipc::Error::System { call, errno }));
    }
    // SAFETY: by the contract above.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// A number for the calling thread, different from that of every other that lives.
fn own_thread() -> u64 {
    // SAFETY: no arguments, cannot fail.
    u64::from(unsafe { libc::gettid() }.cast_unsigned())
}
