//! A standby becomes a daemon that leads, and follows again when that has ended.

use super::contents::{Contents, open_contents};
use super::{Standby, Term};
use crate::config::Config;
use crate::daemon::Daemon;
use crate::error::Error;
use crate::take_over::Recovered;
use ipc::sync::Ordering;
use transport::Connection;

impl Standby {
    /// Becomes a daemon that leads. `copies` are connections to the other members that count as copies, made from here: they
    /// are brought to what this pool has before a life begins, and have its first entries before this returns.
    ///
    /// # Errors
    /// `CopyIsAhead`, `NeedsImport`, `Copy`, `TreeGivenUp`, and what [`Daemon::open`] says. The standby goes on as one after
    /// [`Self::start`], if its pool can be read.
    pub fn lead(&self, term: Term, copies: Vec<Connection>) -> Result<(Daemon, Recovered), Error> {
        self.fence(term.version);
        self.end_following();
        // An import that was not complete leaves the pool as it was.
        self.0.give_up_import(None);
        self.0.receiving.lock().receiver.take();
        let contents = self.0.contents.lock().take();
        let pool = self.0.pool.lock().take();
        let (Some(contents), Some(pool)) = (contents, pool) else { return Err(Error::Stopped) };
        let Contents { area, copy, .. } = contents;
        let config = Config { node: term.node, ..self.0.config };
        let host = self.0.host.clone();
        match Daemon::begin(host, &self.0.medium, config, (area, copy), (term, copies)) {
            Ok((core, recovered)) => Ok((Daemon::of(core, pool), recovered)),
            Err(error) => {
                if let Err(error) = self.open_again() {
                    self.0.fail(&error);
                }
                *self.0.pool.lock() = Some(pool);
                Err(error)
            }
        }
    }

    /// Follows again, with the pool of a daemon that this standby became and that has ended ([`Daemon::stop`]). When
    /// this returns, heads are answered; the thread that executes entries is started as at first.
    ///
    /// # Errors
    /// As [`Self::open`]: the pool cannot be read. `Stopped`: the daemon gave its pool up before.
    ///
    /// # Panics
    /// The daemon has not ended.
    pub fn resume(&self, daemon: &Daemon) -> Result<(), Error> {
        assert!(daemon.has_ended(), "a pool has one writer");
        let pool = daemon.take_pool().ok_or(Error::Stopped)?;
        let opened = self.open_again();
        *self.0.pool.lock() = Some(pool);
        opened.inspect_err(|error| self.0.fail(error))
    }

    /// Opens the pool's contents. Nothing executes arriving entries yet.
    fn open_again(&self) -> Result<(), Error> {
        let (contents, receiver) = open_contents(&*self.0.host, &self.0.medium, &self.0.config)?;
        self.0.announce(&receiver);
        self.0.note_given_up(&contents);
        self.0.begin_to_receive(contents, receiver);
        self.0.ending.store(0, Ordering::Release);
        Ok(())
    }
}
