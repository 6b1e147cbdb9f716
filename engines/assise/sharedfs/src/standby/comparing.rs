//! A head compares its tree with that of this copy, while both go on.
//!
//! Guarantees: the checksums that are sent are those of the tree as of the entry that the head chose, and of no other.
//! An import, taking the lead, or a later comparison ends a comparison.

use super::contents::Contents;
use super::{GREETING, Inner, LOOK};
use crate::ledger::position_of;
use crate::pinned::Pinned;
use crate::sums::Sums;
use area::AreaError;
use format::Sequence;
use format::mirror::{MirrorHello, MirrorMessage, MirrorRefusal};
use ipc::Time;
use ipc::sync::Ordering;
use mirror::ledger::LedgerPosition;
use mirror::{judge_terms, refuse, say_held, say_sums, sums_max, take_message};
use std::time::Duration;
use transport::Connection;

/// Longest time for which the copy executes nothing: while it waits for the entry at which the trees are compared, and
/// until it has this entry.
const HOLD: Duration = Duration::from_secs(5);

/// How long the head may take to receive one message of checksums, while it reads a large file itself. A head that has
/// died ends the connection.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Where the copy stops executing the ledger for a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    /// Where execution stopped.
    from: LedgerPosition,
    /// The last entry that is executed.
    pub at: Sequence,
    /// The latest time at which execution goes on.
    pub until: Time,
}

fn of_area(error: &AreaError) -> mirror::Error {
    match error {
        AreaError::Medium(error) => mirror::Error::Media(*error),
        error => mirror::Error::Tree(error.to_string()),
    }
}

fn refused() -> mirror::Error {
    mirror::Error::Refused(MirrorRefusal::Compare)
}

impl Contents {
    /// How far the ledger may be executed, given how much of it is synced.
    pub(super) fn executable(&mut self, synced: Sequence, now: Time) -> Sequence {
        self.hold.take_if(|hold| now >= hold.until);
        self.hold.map_or(synced, |hold| hold.at.min(synced))
    }
}

impl Inner {
    /// Serves a comparison to its end, over a connection whose first message asked for it.
    ///
    /// # Errors
    /// `Refused`, `Connection`, `Message`, `Broken`, `Media`, `Tree`: it ended before.
    pub(super) fn compare(&self, connection: &Connection, asked: &[u8]) -> Result<(), mirror::Error> {
        let former = self.comparing.lock().replace(connection.clone());
        if let Some(former) = former {
            former.close();
        }
        let served = self.serve_comparison(connection, asked);
        if let Err(error) = &served {
            let refusal = match error {
                mirror::Error::Refused(refusal) => *refusal,
                _ => MirrorRefusal::Compare,
            };
            // The connection may be over, which the head notices by itself.
            let _ = refuse(connection, refusal, self.host.now().after(GREETING));
        }
        served
    }

    fn serve_comparison(&self, connection: &Connection, asked: &[u8]) -> Result<(), mirror::Error> {
        let MirrorMessage::Compare(hello) = MirrorMessage::decode(asked)? else {
            return Err(mirror::Error::Broken("a head asks for a comparison first"));
        };
        let hold = self.hold(&hello)?;
        let pinned = self.pin_when_told(connection, hold);
        if pinned.is_err() {
            self.release(hold);
        }
        self.send_sums(connection, &pinned?)
    }

    /// Tells the head at which entry execution stopped, and keeps the tree as of the entry that the head chooses.
    fn pin_when_told(&self, connection: &Connection, hold: Hold) -> Result<Pinned, mirror::Error> {
        say_held(connection, &hold.from.to_mark(), hold.until)?;
        let came = take_message(connection, hold.until)?;
        let MirrorMessage::CompareAt(mark) = MirrorMessage::decode(&came)? else {
            return Err(mirror::Error::Broken("a head says where the trees are compared"));
        };
        self.pin_at(&LedgerPosition::of_mark(&mark), hold)
    }

    /// Stops executing the ledger.
    fn hold(&self, hello: &MirrorHello) -> Result<Hold, mirror::Error> {
        let now = self.host.now();
        let known = self.head.lock().version;
        let mut guard = self.contents.lock();
        let contents = guard.as_mut().ok_or(mirror::Error::Refused(MirrorRefusal::Closed))?;
        if contents.area.is_given_up() {
            return Err(refused());
        }
        let refusal = judge_terms(hello, known, contents.copy.ledger.region().bytes());
        if refusal != MirrorRefusal::None {
            return Err(mirror::Error::Refused(refusal));
        }
        let from = position_of(&contents.copy.ledger.place());
        let hold = Hold { from, at: from.sequence, until: now.after(HOLD) };
        contents.hold = Some(hold);
        Ok(hold)
    }

    /// Executes the ledger again, unless a later comparison has stopped execution.
    fn release(&self, hold: Hold) {
        let is_own = |now: &mut Hold| (now.from, now.until) == (hold.from, hold.until);
        let released = self.contents.lock().as_mut().and_then(|contents| contents.hold.take_if(is_own));
        if released.is_some() {
            self.wake();
        }
    }

    /// Executes the ledger up to an entry, keeps the tree as of it, and goes on.
    fn pin_at(&self, place: &LedgerPosition, hold: Hold) -> Result<Pinned, mirror::Error> {
        let wanted = Hold { at: place.sequence, ..hold };
        let mut held = hold;
        loop {
            // Acquire: pairs with the Release of `wake`.
            let seen = self.arrived.load(Ordering::Acquire);
            {
                let mut guard = self.contents.lock();
                let contents = guard.as_mut().ok_or_else(refused)?;
                if contents.hold != Some(held) || held.at > wanted.at {
                    return Err(refused());
                }
                contents.hold = Some(wanted);
                held = wanted;
                let at = position_of(&contents.copy.ledger.place());
                if at.sequence == place.sequence && contents.copy.ledger.pending().next().is_none() {
                    contents.hold = None;
                    let pinned = Pinned::of(&mut contents.area);
                    drop(guard);
                    self.wake();
                    return if at == *place { Ok(pinned) } else { Err(refused()) };
                }
            }
            let executed = self.execute_some(true).inspect_err(|error| self.fail(error));
            if !executed.map_err(|error| mirror::Error::Tree(error.to_string()))? {
                self.host.wait(&self.arrived, seen, Some(self.host.now().after(LOOK)));
            }
        }
    }

    fn send_sums(&self, connection: &Connection, pinned: &Pinned) -> Result<(), mirror::Error> {
        let sums_max = sums_max(connection);
        let (mut sums, mut walk) = (Sums::of(&pinned.snapshot), Vec::with_capacity(sums_max));
        loop {
            let next = sums.next_sum();
            if !pinned.pin.is_held() {
                return Err(refused());
            }
            let next = next.map_err(|error| of_area(&error))?;
            let last = next.is_none();
            walk.extend(next);
            if last || walk.len() == sums_max {
                say_sums(connection, &walk, last, self.host.now().after(PATIENCE))?;
                walk.clear();
            }
            if last {
                return Ok(());
            }
        }
    }
}
