//! Lock leases: the table of the sessions that decide about the locks on a file. The unit is the set of the file's locks
//! ([`format::ledger::UnitKind::Locks`]).
//!
//! If a session holds the lease of a file, its process decides about the locks. Otherwise the lease manager decides,
//! with one call for each operation. Sessions do not request this lease: the manager offers it together with a lock, if
//! no other session has or wants a lock on the file. When another session asks for a lock, the manager takes the lease
//! back, and offers none for a *quiet time*, which starts again whenever the asking session changes. So sessions that
//! lock a file in turns use calls.
//!
//! The manager reports with [`LockLeases::taken_back`] that it has imported the holder's locks. There is no queue: all
//! waiting sessions wait for the same import, and continue together.

use crate::leases::{Nanoseconds, SessionId};
use format::InodeNumber;
use std::collections::{BTreeMap, BTreeSet};

/// Limits of the table.
#[derive(Clone, Copy, Debug)]
pub struct LockLimits {
    /// Time for which the manager offers no lease after a second session has asked.
    pub quiet_ns: Nanoseconds,
    /// Limit of files in their quiet time. Above it, no lease is offered.
    pub quiet_max: usize,
    /// Limit of leases of one session.
    pub held_max: usize,
}

impl Default for LockLimits {
    fn default() -> Self {
        Self { quiet_ns: 100_000_000, quiet_max: 4096, held_max: format::locks::LOCK_SLOTS }
    }
}

/// The step that comes before a decision about a file's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// None: the manager decides.
    Decide,
    /// Take the lease back from this session, import its locks, and report it; then ask again.
    TakeBack(SessionId),
    /// Another thread takes the lease back: ask again after that.
    Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LockHolder {
    session: SessionId,
    leaving: bool,
}

/// The quiet time of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quiet {
    until: Nanoseconds,
    /// The session that asked last.
    last: SessionId,
}

/// The table of lock leases.
#[derive(Clone, Debug)]
pub struct LockLeases {
    limits: LockLimits,
    holders: BTreeMap<InodeNumber, LockHolder>,
    held: BTreeMap<SessionId, BTreeSet<InodeNumber>>,
    quiet: BTreeMap<InodeNumber, Quiet>,
}

impl LockLeases {
    /// Creates an empty table.
    pub fn new(limits: LockLimits) -> Self {
        Self { limits, holders: BTreeMap::new(), held: BTreeMap::new(), quiet: BTreeMap::new() }
    }

    /// Asks on behalf of a session for a decision of the manager about a file's locks. The holder asks too if it cannot
    /// decide by itself.
    pub fn ask(&mut self, now: Nanoseconds, session: SessionId, unit: InodeNumber) -> Asked {
        if let Some(holder) = self.holders.get_mut(&unit) {
            let before = std::mem::replace(&mut holder.leaving, true);
            return if before { Asked::Wait } else { Asked::TakeBack(holder.session) };
        }
        if let Some(quiet) = self.quiet.get_mut(&unit).filter(|quiet| quiet.last != session) {
            *quiet = Quiet { until: now.saturating_add(self.limits.quiet_ns), last: session };
        }
        Asked::Decide
    }

    /// Reports that the manager has taken a lease back from its holder after [`Asked::TakeBack`], on behalf of session
    /// `asks`, and has imported its locks. No effect if the holder's session has ended meanwhile.
    pub fn taken_back(
        &mut self,
        now: Nanoseconds,
        unit: InodeNumber,
        (holder, asks): (SessionId, SessionId),
    ) {
        if self.holder(unit) == Some(holder) {
            self.holders.remove(&unit);
            self.forget(holder, unit);
            self.keep(now, unit, asks);
        }
    }

    /// Ends a session. The caller must import the locks of the returned files at once, because their leases are free. No quiet
    /// time starts: a program that uses a file after another one has ended does not lock it in turns with that one.
    pub fn end_session(&mut self, session: SessionId) -> Vec<InodeNumber> {
        let units = self.held.remove(&session).unwrap_or_default();
        for unit in &units {
            self.holders.remove(unit);
        }
        units.into_iter().collect()
    }

    /// Starts the quiet time of a file, because a session waits for a lock on it.
    pub fn keep(&mut self, now: Nanoseconds, unit: InodeNumber, last: SessionId) {
        self.make_room(now);
        if self.quiet.len() < self.limits.quiet_max || self.quiet.contains_key(&unit) {
            let until = now.saturating_add(self.limits.quiet_ns);
            self.quiet.insert(unit, Quiet { until, last });
        }
    }

    /// Grants the lease to a session, if a lease may be granted now. The manager knows that no other session has or wants
    /// a lock on the file.
    pub fn offer(&mut self, now: Nanoseconds, session: SessionId, unit: InodeNumber) -> bool {
        self.make_room(now);
        let is_quiet = self.quiet.get(&unit).is_some_and(|quiet| quiet.until > now);
        let held = self.held.get(&session).map_or(0, BTreeSet::len);
        let is_full = self.quiet.len() >= self.limits.quiet_max && !self.quiet.contains_key(&unit);
        if is_quiet || is_full || held >= self.limits.held_max || self.holders.contains_key(&unit) {
            return false;
        }
        self.quiet.remove(&unit);
        self.holders.insert(unit, LockHolder { session, leaving: false });
        self.held.entry(session).or_default().insert(unit);
        true
    }

    /// The holder of the lease on a file's locks, also while the lease is being taken back.
    pub fn holder(&self, unit: InodeNumber) -> Option<SessionId> {
        self.holders.get(&unit).map(|holder| holder.session)
    }

    /// The files whose lock leases a session holds.
    pub fn held(&self, session: SessionId) -> impl Iterator<Item = InodeNumber> {
        self.held.get(&session).into_iter().flatten().copied()
    }

    fn make_room(&mut self, now: Nanoseconds) {
        if self.quiet.len() >= self.limits.quiet_max {
            self.quiet.retain(|_, quiet| quiet.until > now);
        }
    }

    fn forget(&mut self, session: SessionId, unit: InodeNumber) {
        if let Some(units) = self.held.get_mut(&session) {
            units.remove(&unit);
            if units.is_empty() {
                self.held.remove(&session);
            }
        }
    }

    /// Checks the invariants of the table; for the simulator and the tests.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn assert_invariants(&self) {
        let listed: usize = self.held.values().map(BTreeSet::len).sum();
        assert_eq!(listed, self.holders.len(), "leases by session");
        for (unit, holder) in &self.holders {
            assert!(self.held[&holder.session].contains(unit), "{unit:?} is not in its holder's list");
            assert!(!self.quiet.contains_key(unit), "{unit:?} is held and kept");
        }
        assert!(self.held.values().all(|units| (1..=self.limits.held_max).contains(&units.len())));
        assert!(self.quiet.len() <= self.limits.quiet_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const UNIT: InodeNumber = InodeNumber::new(5);
    const ONE: SessionId = SessionId(1);
    const TWO: SessionId = SessionId(2);

    fn table() -> LockLeases {
        LockLeases::new(LockLimits { quiet_ns: 10, quiet_max: 2, held_max: 2 })
    }

    fn take_back(leases: &mut LockLeases, now: u64, unit: InodeNumber, asks: SessionId) {
        let Asked::TakeBack(holder) = leases.ask(now, asks, unit) else { panic!("nobody holds it") };
        assert_eq!(leases.ask(now, asks, unit), Asked::Wait);
        leases.taken_back(now, unit, (holder, asks));
        assert_eq!(leases.ask(now, asks, unit), Asked::Decide);
        leases.assert_invariants();
    }

    #[test]
    fn whoever_takes_turns_goes_by_calls_and_whoever_is_alone_gets_the_lease_again() {
        let mut leases = table();
        assert_eq!(leases.ask(0, ONE, UNIT), Asked::Decide);
        assert!(leases.offer(0, ONE, UNIT));
        take_back(&mut leases, 1, UNIT, TWO);
        assert!(!leases.offer(2, TWO, UNIT));
        assert_eq!(leases.ask(9, ONE, UNIT), Asked::Decide);
        assert_eq!(leases.ask(12, ONE, UNIT), Asked::Decide);
        assert!(!leases.offer(18, ONE, UNIT), "it is quiet since the other one asked");
        assert!(leases.offer(19, ONE, UNIT));
        leases.assert_invariants();
    }

    #[test]
    fn leases_and_files_that_are_kept_are_bounded() {
        let mut leases = table();
        let units = [1, 2, 3].map(InodeNumber::new);
        assert_eq!(units.map(|unit| leases.offer(0, ONE, unit)), [true, true, false]);
        assert_eq!(leases.held(ONE).count(), 2);
        units[..2].iter().for_each(|unit| take_back(&mut leases, 0, *unit, TWO));
        assert!(!leases.offer(9, ONE, units[2]), "so many are kept that one may be missing");
        assert!(leases.offer(10, ONE, units[2]));
        assert_eq!(leases.end_session(ONE), [units[2]]);
        assert_eq!(leases.holder(units[2]), None);
        leases.assert_invariants();
    }

    #[test]
    fn an_end_that_comes_first_takes_the_lease_back_and_nobody_elses_goes_with_it() {
        let mut leases = table();
        assert!(leases.offer(0, ONE, UNIT));
        assert_eq!(leases.ask(0, TWO, UNIT), Asked::TakeBack(ONE));
        assert_eq!(leases.end_session(ONE), [UNIT]);
        assert!(leases.offer(0, TWO, UNIT), "no quiet time starts");
        leases.taken_back(0, UNIT, (ONE, TWO));
        assert_eq!(leases.holder(UNIT), Some(TWO));
    }

    /// A small model: sessions lock and unlock a file, each in its own process if it holds the lease, and die.
    #[derive(Clone, Debug)]
    struct World {
        leases: LockLeases,
        now: u64,
        /// The session that was told that it has the lock.
        told: Option<SessionId>,
        /// The owner of the lock in the manager's table.
        manager: Option<SessionId>,
        /// The holder of the lease, and whether it has locked the file.
        process: Option<(SessionId, bool)>,
        /// Holder and asking session of a lease that is being taken back.
        leaving: Option<(SessionId, SessionId)>,
        dead: Vec<SessionId>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Move {
        Lock(SessionId),
        Unlock(SessionId),
        /// The manager imports the holder's locks.
        Import,
        Die(SessionId),
        Later,
    }

    impl World {
        fn moves(&self) -> Vec<Move> {
            let living = [ONE, TWO, SessionId(3)].into_iter().filter(|who| !self.dead.contains(who));
            let mut moves: Vec<Move> = living
                .flat_map(|who| [Move::Lock(who), Move::Unlock(who), Move::Die(who)])
                .filter(|one| !matches!(one, Move::Die(_)) || self.dead.len() < 2)
                .collect();
            moves.extend(self.leaving.is_some().then_some(Move::Import));
            moves.extend((self.now < 30).then_some(Move::Later));
            moves
        }

        /// True if the process of a session decides: it holds the lease, and its lease word is not marked.
        fn decides(&self, who: SessionId) -> bool {
            self.leaving.is_none() && self.process.is_some_and(|(holder, _)| holder == who)
        }

        /// True if the manager may decide for a session; otherwise a lease is being taken back.
        fn may_decide(&mut self, who: SessionId) -> bool {
            match self.leases.ask(self.now, who, UNIT) {
                Asked::Decide => true,
                Asked::Wait => false,
                Asked::TakeBack(holder) => {
                    self.leaving = Some((holder, who));
                    false
                }
            }
        }

        fn lock(&mut self, who: SessionId) {
            if self.decides(who) {
                self.process = Some((who, true));
            } else if self.may_decide(who) {
                assert_eq!(self.process, None, "a process decides, too");
                if self.manager.is_some_and(|holder| holder != who) {
                    return;
                }
                self.manager = Some(who);
                if self.leases.offer(self.now, who, UNIT) {
                    self.process = Some((who, true));
                    self.manager = None;
                }
            } else {
                return;
            }
            assert!(self.told.is_none_or(|holder| holder == who), "two have the lock");
            self.told = Some(who);
        }

        fn unlock(&mut self, who: SessionId) {
            if self.decides(who) {
                self.process = Some((who, false));
            } else if self.may_decide(who) {
                self.manager = self.manager.filter(|holder| *holder != who);
            } else {
                return;
            }
            self.told = self.told.filter(|holder| *holder != who);
        }

        fn import(&mut self) {
            let (holder, locked) = self.process.take().expect("a lease is held by a process");
            assert_eq!(self.manager, None, "what a process decides the manager knows nothing of");
            self.manager = locked.then_some(holder);
        }

        fn step(&mut self, one: Move) {
            match one {
                Move::Lock(who) => self.lock(who),
                Move::Unlock(who) => self.unlock(who),
                Move::Import => {
                    let (holder, asks) = self.leaving.take().expect("it is on its way");
                    if self.process.is_some_and(|(session, _)| session == holder) {
                        self.import();
                    }
                    self.leases.taken_back(self.now, UNIT, (holder, asks));
                }
                Move::Die(who) => {
                    for _ in self.leases.end_session(who) {
                        self.import();
                    }
                    self.manager = self.manager.filter(|holder| *holder != who);
                    self.told = self.told.filter(|holder| *holder != who);
                    self.dead.push(who);
                }
                Move::Later => self.now += 10,
            }
            self.leases.assert_invariants();
            let known = self.manager.or(self.process.and_then(|(holder, locked)| locked.then_some(holder)));
            assert_eq!(known, self.told, "the lock is known where it is decided");
            assert_eq!(self.leases.holder(UNIT), self.process.map(|(holder, _)| holder));
        }
    }

    #[test]
    fn no_lock_is_lost_and_none_given_twice_in_any_state_of_a_small_world() {
        let first = World {
            leases: table(),
            now: 0,
            told: None,
            manager: None,
            process: None,
            leaving: None,
            dead: Vec::new(),
        };
        let (mut seen, mut agenda) = (HashSet::from([format!("{first:?}")]), vec![first]);
        let mut offered = 0;
        while let Some(world) = agenda.pop() {
            for one in world.moves() {
                let mut next = world.clone();
                next.step(one);
                offered += usize::from(world.process.is_none() && next.process.is_some());
                if seen.insert(format!("{next:?}")) {
                    agenda.push(next);
                }
            }
        }
        println!("{} states", seen.len());
        assert!(seen.len() > 1000 && offered > 100, "{} states, {offered} leases", seen.len());
    }
}
