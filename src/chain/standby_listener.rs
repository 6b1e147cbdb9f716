//! The socket of programs while their node does not lead. Connections wait as long as this node may lead soon, and are
//! rejected with the name of the leader as soon as another node leads.

use crate::commands::daemon::spawn;
use crate::error::{Error, Result};
use ipc::socket::Listener;
use ipc::sync::Ordering;
use ipc::{Descriptor, Host, Lock, SystemHost, WAKE_ALL, Word};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sharedfs::reject_all_on_standby;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How often the thread checks whether it should go on, while it rejects connections.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// How new connections are treated.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Treatment {
    Wait,
    /// They are rejected with this sentence.
    Rejected(String),
    /// The daemon's own listener accepts them.
    Released,
}

struct Inner {
    treatment: Lock<Treatment>,
    changed: Word,
}

/// The listener of a standby.
pub struct StandbyListener {
    listener: OwnedFd,
    inner: Arc<Inner>,
}

impl StandbyListener {
    /// Opens the listener; connections wait at first.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn open(listener: Listener) -> Result<Self> {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let inner = Arc::new(Inner { treatment: Lock::new(host, Treatment::Wait), changed: Word::new(0) });
        let this = Self { listener: OwnedFd::from(listener.into_descriptor()), inner };
        this.start()?;
        Ok(this)
    }

    fn start(&self) -> Result<()> {
        let (connections, own, inner) = (self.descriptor()?, self.second()?, self.inner.clone());
        spawn("standby-accept", move || inner.keep(&connections, &own))
    }

    /// Makes connections wait: this node may lead soon.
    pub fn hold(&self) {
        self.inner.set(Treatment::Wait);
    }

    /// Rejects connections with this sentence from now on.
    pub fn reject(&self, sentence: &str) {
        self.inner.set(Treatment::Rejected(sentence.to_owned()));
    }

    /// This node leads: gives the socket to the daemon; no connection is rejected here from now on.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn release(&self) -> Result<Listener> {
        self.inner.set(Treatment::Released);
        self.second()
    }

    /// This node does not lead any more, and the daemon that had the socket has ended: connections wait.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn take_back(&self) -> Result<()> {
        self.inner.set(Treatment::Wait);
        self.start()
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        let second = self.listener.try_clone();
        second.map_err(|why| Error::new(format!("cannot take the keeper's socket: {why}")))
    }

    fn second(&self) -> Result<Listener> {
        Ok(Listener::from_descriptor(Descriptor::from(self.descriptor()?)))
    }
}

impl Inner {
    fn set(&self, treatment: Treatment) {
        *self.treatment.lock() = treatment;
        // Release: pairs with the Acquire of the thread, which takes the lock anyway.
        self.changed.fetch_add(1, Ordering::Release);
        SystemHost.wake(&self.changed, WAKE_ALL);
    }

    /// The thread that rejects connections, until this node leads.
    fn keep(&self, connections: &OwnedFd, listener: &Listener) {
        loop {
            // Acquire: pairs with the Release of `set`.
            let seen = self.changed.load(Ordering::Acquire);
            let treatment = self.treatment.lock().clone();
            match treatment {
                Treatment::Released => return,
                Treatment::Wait => {
                    SystemHost.wait(&self.changed, seen, None);
                }
                Treatment::Rejected(_) => {
                    let _ = poll(&mut [PollFd::new(connections, PollFlags::IN)], Some(&LOOK));
                    // Under the lock: once `set` has returned, no connection is rejected with the earlier sentence.
                    if let Treatment::Rejected(sentence) = &*self.treatment.lock() {
                        reject_all_on_standby(listener, sentence);
                    }
                }
            }
        }
    }
}
