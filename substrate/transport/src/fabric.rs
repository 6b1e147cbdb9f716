//! Connections over libfabric, `FI_EP_MSG`: provider `tcp` everywhere, `verbs` where there is hardware, chosen when
//! the endpoint is made. What differs between them is asked for, never assumed: how remote memory is named, whether an
//! immediate uses up a receive, what may be inline.
//!
//! On a software provider nothing arrives unless somebody is inside libfabric. Whoever waits for a connection polls it;
//! for the rest there is one progress thread a domain, which sleeps until a queue has something. A queue whose user
//! polls is left to its user: the thread looks at it again after [`WATCH`], ever more seldom up to [`WATCH_MAX`], and has
//! it back when nobody polled since.
//!
//! The provider listens for one authenticated peer at a time only: [`door`].
//!
//! Locks: `events` while events are read or a listener is closed; then `invitations`, `links` and `talks`, each for a
//! look only.

use crate::Endpoint;
use crate::error::{Ended, Error};
use crate::handshake::Identity;
use crate::link::{Approach, Door, Link, Provider, Shape, Talk};
use crate::news::News;
use crate::settings::Settings;
use format::Epoch;
use ipc::sync::{Ordering, Word};
use ipc::{Host, Join, Lock, LongWord, Time};
use pmem::Region;
use std::any::Any;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

mod door;
mod link;
mod sockets;
mod sys;

use door::{Coming, Inviting, OpenDoor, TcpTalk};
use link::{FabricLink, Pending};
use sys::{Domain, Facts};

/// How long a queue is left to its user after it was seen to poll, and twice as long each time that it is seen again: a
/// look costs a user that polls tens of microseconds where processors are few.
const WATCH: Duration = Duration::from_millis(1);
const WATCH_MAX: Duration = Duration::from_millis(8);

/// How often in a row the progress thread finds something before it leaves a queue alone for as long.
const TURNS_MAX: u32 = 8;

/// How often it looks at a queue, where bytes move and nothing is done yet, before it looks at the others.
const ROUNDS_MAX: u32 = 16;

/// What is to be done with a link that was looked at.
enum Look {
    /// It is armed: an event says when.
    Armed,
    /// It is left to its user for a while.
    Left,
    /// Others first, then again.
    Again,
}

/// Links that are not armed.
type Watched = Vec<Watch>;

/// When a link is looked at, after so long.
struct Watch {
    link: u64,
    at: Time,
    span: Duration,
}

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
    ip: IpAddr,
    /// Its listeners have sockets of this process, which can be guarded: not so those of verbs.
    has_sockets: bool,
    /// The set of descriptors that the progress thread sleeps on.
    set: OwnedFd,
    wake: OwnedFd,
    stop: Word,
    ids: LongWord,
    tick: Option<Duration>,
    links: Lock<Links>,
    /// Who is told when a socket of a door has something.
    talks: Lock<HashMap<u64, Arc<News>>>,
    /// By the name of their listener.
    invitations: Lock<HashMap<usize, Arc<Inviting>>>,
    /// Invitations that are over, whose listener is not closed.
    over: Word,
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
            talks: Lock::new(host.clone(), HashMap::new()),
            invitations: Lock::new(host.clone(), HashMap::new()),
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

    /// What this provider copies at once, of what everybody may send inline.
    fn inline_bytes(&self) -> usize {
        crate::memory::INLINE_BYTES_MAX
            .min(usize::try_from(self.inner.facts.inline_bytes).unwrap_or(usize::MAX))
    }

    fn next_id(&self) -> u64 {
        // Relaxed: only different numbers are asked for.
        self.inner.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Has the progress thread tell of a socket of a door.
    fn hear(&self, socket: i32, news: &Arc<News>) -> u64 {
        let id = self.next_id();
        self.inner.talks.lock().insert(id, news.clone());
        self.inner.control(libc::EPOLL_CTL_ADD, socket, libc::EPOLLONESHOT, id);
        id
    }

    /// Ends that; the socket is about to be closed.
    fn hear_no_more(&self, id: u64) {
        let news = self.inner.talks.lock().remove(&id);
        drop(news);
    }

    /// Makes a link known.
    fn know(&self, link: &Arc<FabricLink>) {
        let mut links = self.inner.links.lock();
        links.by_id.insert(link.id, Arc::downgrade(link));
        links.by_name.insert(link.name(), link.id);
    }

    /// Takes a link out of the tables.
    fn forget(&self, id: u64, name: usize) {
        let mut links = self.inner.links.lock();
        links.by_id.remove(&id);
        if links.by_name.get(&name) == Some(&id) {
            links.by_name.remove(&name);
        }
    }

    /// Has the progress thread see a link's next event, by these of its descriptors; `set` are those that it had.
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
            // The bits of poll and of epoll are the same.
            self.inner.control(operation, now.fd, i32::from(now.events) | libc::EPOLLONESHOT, id);
        }
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
        let mut watched = Watched::new();
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
                    WAKE => self.hear_wake(),
                    CONNECTIONS => {}
                    id => match self.link(id) {
                        Some(link) => self.attend(&link, &mut watched),
                        None => self.tell(id),
                    },
                }
            }
        }
    }

    /// Tells of a socket of a door, if it is one.
    fn tell(&self, id: u64) {
        let news = self.talks.lock().get(&id).cloned();
        if let Some(news) = news {
            news.tell(&*self.host);
        }
    }

    /// Waits for the set.
    fn sleep(&self, left: Option<Duration>) -> (usize, [libc::epoll_event; EVENTS]) {
        let mut events = [libc::epoll_event { events: 0, u64: WAKE }; EVENTS];
        let ms = left.map_or(-1, |left| i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
        // SAFETY: at most `EVENTS` events are written.
        let count = unsafe { libc::epoll_wait(self.set.as_raw_fd(), events.as_mut_ptr(), EVENTS as i32, ms) };
        (usize::try_from(count).unwrap_or(0), events)
    }

    /// Drives a link whose queue has something.
    fn attend(&self, link: &FabricLink, watched: &mut Watched) {
        watched.retain(|watch| watch.link != link.id);
        self.keep(link.id, &self.serve(link), WATCH, watched);
    }

    fn keep(&self, link: u64, look: &Look, span: Duration, watched: &mut Watched) {
        let now = self.host.now();
        match look {
            Look::Armed => {}
            Look::Left => watched.push(Watch { link, at: now.after(span), span }),
            Look::Again => watched.push(Watch { link, at: now, span }),
        }
    }

    /// Looks at those whose time has come. Who was not polled by its user since is the thread's again.
    fn look_at_watched(&self, watched: &mut Watched) {
        let now = self.host.now();
        let due: Vec<Watch> = watched.extract_if(.., |watch| watch.at <= now).collect();
        for Watch { link, span, .. } in due {
            let Some(link) = self.link(link) else { continue };
            let driven = link.driven.load(Ordering::Relaxed);
            let is_polled = driven != link.seen.load(Ordering::Relaxed);
            if is_polled {
                link.seen.store(driven, Ordering::Relaxed);
            }
            let (look, span) = match is_polled {
                true => (Look::Left, (span * 2).min(WATCH_MAX)),
                false => (self.serve(&link), WATCH),
            };
            self.keep(link.id, &look, span, watched);
        }
    }

    /// Drives a link. If its user was seen to poll it since the last look, it is left to the user for a while.
    fn serve(&self, link: &FabricLink) -> Look {
        // It is not given to its user yet: it is looked at again.
        let Some(driver) = link.driver() else { return Look::Left };
        // Relaxed, here and below: hints; only this thread writes `seen`.
        let mut expected = link.seen.load(Ordering::Relaxed);
        let mut turns = 0;
        for _ in 0..ROUNDS_MAX {
            while driver.drive() {
                expected = expected.wrapping_add(1);
                turns += 1;
                // Its user posts as fast as this thread looks: each would only stop the other.
                if turns == TURNS_MAX {
                    link.seen.store(link.driven.load(Ordering::Relaxed), Ordering::Relaxed);
                    return Look::Left;
                }
            }
            expected = expected.wrapping_add(1);
            let driven = link.driven.load(Ordering::Relaxed);
            link.seen.store(driven, Ordering::Relaxed);
            if driven != expected {
                return Look::Left;
            }
            if link.arm() {
                return Look::Armed;
            }
        }
        Look::Again
    }

    fn tick(&self, now: Time) {
        let links: Vec<_> = self.links.lock().by_id.values().filter_map(Weak::upgrade).collect();
        for driver in links.iter().filter_map(|link| link.driver()) {
            driver.tick(now);
        }
    }

    fn connection_events(&self, watched: &mut Watched) {
        loop {
            let events = self.events.lock();
            let Some(event) = self.domain.event() else {
                return self.close_invitations();
            };
            if event.kind == sys::WANTS_IN {
                self.comes(&event);
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
            // The user may be driving: then it is told, and looks again.
            self.attend(&link, watched);
            link.news().tell(&*self.host);
        }
    }

    /// A connection comes. The lock of events is held.
    fn comes(&self, event: &sys::RawEvent) {
        let said = &event.data[..usize::try_from(event.data_bytes).unwrap_or(0).min(event.data.len())];
        let invitation = self.invitations.lock().get(&(event.endpoint as usize)).cloned();
        match invitation {
            Some(invitation) => invitation.comes(&self.domain, &*self.host, said, event.info),
            // SAFETY: the info came with this event.
            None => unsafe { self.domain.forget(event.info) },
        }
    }

    /// Closes the listeners of invitations that are over. No event is left, and the lock of events is held.
    fn close_invitations(&self) {
        // Acquire: pairs with the Release where an invitation ends.
        if self.over.load(Ordering::Acquire) == 0 {
            return;
        }
        let over: Vec<_> = {
            let mut invitations = self.invitations.lock();
            invitations.extract_if(|_, invitation| invitation.may_close()).collect()
        };
        for (_, invitation) in &over {
            self.over.fetch_add(u32::MAX, Ordering::AcqRel);
            // SAFETY: it is in no table any more, no event of it is left, and nothing in the provider leads to it.
            unsafe { self.domain.close_listener(invitation.raw) };
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let invitations = std::mem::take(&mut *self.invitations.lock());
        for invitation in invitations.values() {
            // SAFETY: the progress thread has ended, so no event is handled any more.
            unsafe { self.domain.close_listener(invitation.raw) };
        }
    }
}

/// A node's way into libfabric.
struct Node(Arc<Running>);

impl Provider for Node {
    fn register(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        link::register(&self.0.inner.domain, region)
    }

    /// `at`: a port, or empty for any free one; always at this node's own address.
    fn listen(&self, at: &str, news: Arc<News>) -> Result<Box<dyn Door>, Error> {
        let port = if at.is_empty() { 0 } else { at.parse().map_err(|_| Error::Address(at.to_string()))? };
        Ok(Box::new(OpenDoor::new(&self.0, port, news)?))
    }

    fn talk(&self, to: &str, news: Arc<News>) -> Result<Arc<dyn Talk>, Error> {
        let socket = sockets::connect(self.0.inner.ip, address(to)?)?;
        Ok(Arc::new(TcpTalk::new(&self.0, socket, news)))
    }

    fn approach(&self, to: &str) -> Result<Box<dyn Approach>, Error> {
        Ok(Box::new(Coming::new(&self.0, address(to)?.ip())?))
    }
}

fn address(to: &str) -> Result<SocketAddr, Error> {
    to.parse().map_err(|_| Error::Address(to.to_string()))
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
