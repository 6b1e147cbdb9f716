//! The socket of programs while their node does not lead. Nobody is let in: who comes waits for as long as this node may lead
//! soon, and is told who leads as soon as another one does.

use crate::commands::daemon::spawn;
use crate::error::{Error, Result};
use ipc::socket::Listener;
use ipc::sync::Ordering;
use ipc::{Descriptor, Host, Lock, SystemHost, WAKE_ALL, Word};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sharedfs::reject_all_on_standby;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How often it is looked whether this goes on, where all are turned away.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What becomes of those who knock.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Treatment {
    Wait,
    /// They are told this.
    TurnedAway(String),
    /// Somebody else looks after them.
    LetIn,
}

struct Inner {
    treatment: Lock<Treatment>,
    changed: Word,
}

/// The door of a standby.
pub struct StandbyDoor {
    listener: OwnedFd,
    inner: Arc<Inner>,
}

impl StandbyDoor {
    /// Those who knock wait at first.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn open(listener: Listener) -> Result<Self> {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let inner = Arc::new(Inner { treatment: Lock::new(host, Treatment::Wait), changed: Word::new(0) });
        let door = Self { listener: OwnedFd::from(listener.into_descriptor()), inner };
        door.start()?;
        Ok(door)
    }

    fn start(&self) -> Result<()> {
        let (knocks, own, inner) = (self.descriptor()?, self.second()?, self.inner.clone());
        spawn("standby-door", move || inner.keep(&knocks, &own))
    }

    /// Who knocks waits: this node may lead soon.
    pub fn hold(&self) {
        self.inner.set(Treatment::Wait);
    }

    /// Who knocks is told this.
    pub fn turn_away(&self, sentence: &str) {
        self.inner.set(Treatment::TurnedAway(sentence.to_owned()));
    }

    /// This node leads: the socket, at which nobody is turned away from now on.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn let_in(&self) -> Result<Listener> {
        self.inner.set(Treatment::LetIn);
        self.second()
    }

    /// This node leads no more, and the daemon that had the socket has ended: who knocks waits.
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

    /// The thread that turns away, until this node leads.
    fn keep(&self, knocks: &OwnedFd, listener: &Listener) {
        loop {
            // Acquire: pairs with the Release of `set`.
            let seen = self.changed.load(Ordering::Acquire);
            let treatment = self.treatment.lock().clone();
            match treatment {
                Treatment::LetIn => return,
                Treatment::Wait => {
                    SystemHost.wait(&self.changed, seen, None);
                }
                Treatment::TurnedAway(_) => {
                    let _ = poll(&mut [PollFd::new(knocks, PollFlags::IN)], Some(&LOOK));
                    // Under the lock: when `set` has returned nobody is turned away by what was before.
                    if let Treatment::TurnedAway(sentence) = &*self.treatment.lock() {
                        reject_all_on_standby(listener, sentence);
                    }
                }
            }
        }
    }
}
