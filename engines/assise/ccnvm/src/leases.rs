//! The lease table of one lease manager: the holders of each unit, and the requests that wait for it.

use format::{InodeNumber, LeaseVersion};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A point on the caller's clock, or a length of time.
pub type Nanoseconds = u64;

/// A session of a LibFS, until its log is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Identifies a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// The right of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// The holder may read the unit, and no session changes it.
    Read,
    /// The holder may read and change the unit, and no other session reads or changes it.
    Write,
}

impl Mode {
    fn excludes(self, other: Self) -> bool {
        self == Self::Write || other == Self::Write
    }
}

/// One unit of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Want {
    /// The unit: an inode.
    pub unit: InodeNumber,
    /// The right.
    pub mode: Mode,
}

/// Limits of the table.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Minimum hold: the time after a grant in which the lease is not revoked, enough for one operation.
    pub hold_min_ns: Nanoseconds,
    /// Limit of units in one request.
    pub units_max: usize,
    /// Limit of leases of one session.
    pub leases_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { hold_min_ns: 200_000, units_max: format::call::LEASE_UNITS_MAX, leases_max: 1 << 16 }
    }
}

/// An input of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "a session, a unit, a ticket, a version: the types say it")]
pub enum Event {
    /// A session requests leases, all of them at once. The ticket is new.
    Request { ticket: Ticket, session: SessionId, wants: Vec<Want> },
    /// A session requests those of these leases that are free. No lease is revoked for it, and it overtakes no waiting
    /// request. It is answered at once by a grant, which may be empty.
    RequestFree { ticket: Ticket, session: SessionId, wants: Vec<Want> },
    /// A session is about to need these leases. Those that others hold and that no request waits for are revoked or recalled
    /// now, so that they are free when the session requests them. Nothing is granted.
    AskBack { session: SessionId, wants: Vec<Want> },
    /// A session has created this inode from its preallocated range, and has held it for writing since, under the
    /// version of its log's opening. The event comes before the first request of another session for the unit.
    Created { session: SessionId, unit: InodeNumber, version: LeaseVersion },
    /// An [`Effect::Revoke`] is complete: the holder has left the lease, and its records are digested.
    Revoked { session: SessionId, unit: InodeNumber },
    /// A session has released a lease on its own; its records are digested.
    Released { session: SessionId, unit: InodeNumber },
    /// A session begins to release a lease on its own: it no longer holds the lease, and can get it again only after
    /// the following `Released`.
    Leaving { session: SessionId, unit: InodeNumber },
    /// The session no longer waits for the request.
    Cancelled { ticket: Ticket },
    /// A session has caches outside of its process (the kernel's, for a mount), which it must drop before it leaves a
    /// lease. From now on its leases are requested by [`Effect::Recall`], which `Leaving` and `Released` answer. If leases are withheld, a `Tick` has to follow.
    MustAnswer { session: SessionId },
    /// The outside caches of a session that must answer may still exist, although the session has ended. From now on only
    /// sessions that must answer get leases, and they do not wait behind others. A `Tick` has to follow.
    Withhold,
    /// These caches are gone. A `Tick` has to follow.
    Resume,
    /// A session has ended: its log is sealed and digested.
    Ended { session: SessionId },
    /// The time of an [`Effect::WakeAt`] has come.
    Tick,
}

/// An action that the caller has to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "a session, a unit, a ticket, a version: the types say it")]
pub enum Effect {
    /// The request is granted, with a version for each of its units, or for each unit that was free, in the order of
    /// their inode numbers.
    Grant { ticket: Ticket, session: SessionId, grants: Vec<(Want, LeaseVersion)> },
    /// Make the holder leave this lease, digest the records written under it, then report `Revoked`.
    Revoke { session: SessionId, unit: InodeNumber, version: LeaseVersion },
    /// Ask the holder for this lease. The holder continues to use it until it leaves on its own. Once for each version.
    Recall { session: SessionId, unit: InodeNumber, version: LeaseVersion },
    /// The lease has ended.
    End { session: SessionId, unit: InodeNumber, version: LeaseVersion },
    /// The request exceeds a limit.
    Refuse { ticket: Ticket },
    /// Send `Tick` at this time.
    WakeAt(Nanoseconds),
}

#[derive(Clone, Debug)]
struct Holder {
    session: SessionId,
    mode: Mode,
    version: LeaseVersion,
    granted_at: Nanoseconds,
    revoking: bool,
    /// The holder was asked for the lease, and keeps it until it leaves.
    recalled: bool,
}

#[derive(Clone, Debug, Default)]
struct Unit {
    holders: Vec<Holder>,
    waiting: VecDeque<Ticket>,
}

#[derive(Clone, Debug)]
struct Request {
    session: SessionId,
    wants: Vec<Want>,
}

/// The lease table.
#[derive(Clone, Debug)]
pub struct Leases {
    limits: Limits,
    next_version: LeaseVersion,
    units: BTreeMap<InodeNumber, Unit>,
    requests: BTreeMap<Ticket, Request>,
    held: BTreeMap<SessionId, BTreeSet<InodeNumber>>,
    /// Units with waiting requests.
    waited_for: BTreeSet<InodeNumber>,
    /// Waiting requests, by session.
    waiting: BTreeMap<SessionId, BTreeSet<Ticket>>,
    /// Sessions whose leases are recalled, not revoked.
    answering: BTreeSet<SessionId>,
    /// True if only sessions in `answering` get leases.
    withheld: bool,
}

impl Leases {
    /// Creates an empty table, whose first grant gets `next_version`.
    pub fn new(limits: Limits, next_version: LeaseVersion) -> Self {
        Self {
            limits,
            next_version,
            units: BTreeMap::new(),
            requests: BTreeMap::new(),
            held: BTreeMap::new(),
            waited_for: BTreeSet::new(),
            waiting: BTreeMap::new(),
            answering: BTreeSet::new(),
            withheld: false,
        }
    }

    /// True if only sessions that must answer get leases.
    pub fn are_withheld(&self) -> bool {
        self.withheld
    }

    /// The version of the next grant. The caller keeps it in the area's root, so that it never decreases.
    pub fn next_version(&self) -> LeaseVersion {
        self.next_version
    }

    /// The lease that a session holds on a unit, if it is not being revoked.
    pub fn held(&self, session: SessionId, unit: InodeNumber) -> Option<(Mode, LeaseVersion)> {
        let holder = self.units.get(&unit)?.holders.iter().find(|holder| holder.session == session)?;
        (!holder.revoking).then_some((holder.mode, holder.version))
    }

    /// Number of leases that a session holds.
    pub fn count(&self, session: SessionId) -> usize {
        self.held.get(&session).map_or(0, BTreeSet::len)
    }

    /// Number of leases in waiting requests: an event grants at most these and the leases that it requests itself.
    pub fn wants_waiting(&self) -> usize {
        self.requests.values().map(|request| request.wants.len()).sum()
    }

    /// Processes an event, and returns the actions that follow from it.
    pub fn step(&mut self, now: Nanoseconds, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Request { ticket, session, wants } => {
                self.request(ticket, session, wants, now, &mut effects)
            }
            Event::RequestFree { ticket, session, wants } => {
                let grants = self.grant_free(session, wants, now);
                effects.push(Effect::Grant { ticket, session, grants });
            }
            Event::AskBack { session, wants } => self.ask_back_ahead(session, &wants, now, &mut effects),
            Event::Created { session, unit, version } => self.created(session, unit, version),
            Event::Revoked { session, unit } | Event::Released { session, unit } => {
                self.end_holder(session, unit, &mut effects);
                self.sync_units([unit], now, &mut effects);
            }
            Event::Leaving { session, unit } => self.mark_leaving(session, unit),
            Event::Cancelled { ticket } => {
                let touched = self.forget_request(ticket);
                self.sync_units(touched, now, &mut effects);
            }
            Event::MustAnswer { session } => drop(self.answering.insert(session)),
            Event::Withhold => self.withheld = true,
            Event::Resume => self.withheld = false,
            Event::Ended { session } => self.end_session(session, now, &mut effects),
            Event::Tick => self.sync_all(now, &mut effects),
        }
        effects
    }

    fn sync_all(&mut self, now: Nanoseconds, effects: &mut Vec<Effect>) {
        let waited_for: Vec<_> = self.waited_for.iter().copied().collect();
        self.sync_units(waited_for, now, effects);
    }

    /// True if the session may get leases now.
    fn may_get(&self, session: SessionId) -> bool {
        !self.withheld || self.answering.contains(&session)
    }

    /// The first request in the queue of a unit that may be granted now.
    fn first_at(&self, unit: InodeNumber) -> Option<Ticket> {
        let mut waiting = self.units.get(&unit)?.waiting.iter();
        waiting.find(|ticket| self.requests.get(ticket).is_some_and(|it| self.may_get(it.session))).copied()
    }

    fn request(
        &mut self,
        ticket: Ticket,
        session: SessionId,
        mut wants: Vec<Want>,
        now: Nanoseconds,
        effects: &mut Vec<Effect>,
    ) {
        // Keeps one want for each unit, the stronger one, in inode order. Requests that overlap are queued in the same
        // order at each common unit, so there is no cycle of waits.
        wants.sort_by_key(|want| (want.unit, std::cmp::Reverse(want.mode)));
        wants.dedup_by_key(|want| want.unit);
        let held = self.held.get(&session);
        let new = wants.iter().filter(|want| held.is_none_or(|held| !held.contains(&want.unit))).count();
        let too_many =
            wants.len() > self.limits.units_max || self.count(session) + new > self.limits.leases_max;
        if wants.is_empty() || too_many {
            effects.push(Effect::Refuse { ticket });
            return;
        }
        for want in &wants {
            self.units.entry(want.unit).or_default().waiting.push_back(ticket);
            self.waited_for.insert(want.unit);
        }
        self.waiting.entry(session).or_default().insert(ticket);
        let units: Vec<_> = wants.iter().map(|want| want.unit).collect();
        let previous = self.requests.insert(ticket, Request { session, wants });
        assert!(previous.is_none(), "a ticket is used once");
        self.sync_units(units, now, effects);
    }

    fn grant_free(
        &mut self,
        session: SessionId,
        mut wants: Vec<Want>,
        now: Nanoseconds,
    ) -> Vec<(Want, LeaseVersion)> {
        wants.sort_by_key(|want| (want.unit, std::cmp::Reverse(want.mode)));
        wants.dedup_by_key(|want| want.unit);
        let mut grants = Vec::with_capacity(wants.len());
        for want in wants {
            let empty = Unit::default();
            let unit = self.units.get(&want.unit).unwrap_or(&empty);
            let own = unit.holders.iter().find(|holder| holder.session == session);
            let lacks = own.is_none_or(|own| own.mode < want.mode);
            let excluded =
                unit.holders.iter().any(|holder| self.stands_in_the_way(holder, session, want.mode));
            let room = own.is_some() || self.count(session) < self.limits.leases_max;
            if self.may_get(session) && lacks && room && !excluded && unit.waiting.is_empty() {
                grants.push((want, self.grant_one(session, want, now)));
            }
        }
        grants
    }

    fn created(&mut self, session: SessionId, unit: InodeNumber, version: LeaseVersion) {
        let holders = &mut self.units.entry(unit).or_default().holders;
        assert!(holders.is_empty(), "a unit that anybody holds was made known before");
        assert!(version < self.next_version, "a log is opened with a version that was given");
        holders.push(Holder {
            session,
            mode: Mode::Write,
            version,
            granted_at: 0,
            revoking: false,
            recalled: false,
        });
        self.held.entry(session).or_default().insert(unit);
    }

    /// Takes a version for an event that is not the grant of a unit: the opening of a log.
    pub fn take_version(&mut self) -> LeaseVersion {
        let version = self.next_version;
        self.next_version = version.next();
        version
    }

    fn mark_leaving(&mut self, session: SessionId, key: InodeNumber) {
        let Some(unit) = self.units.get_mut(&key) else { return };
        if let Some(holder) = unit.holders.iter_mut().find(|holder| holder.session == session) {
            holder.revoking = true;
        }
    }

    fn end_holder(&mut self, session: SessionId, key: InodeNumber, effects: &mut Vec<Effect>) {
        let Some(unit) = self.units.get_mut(&key) else { return };
        let Some(index) = unit.holders.iter().position(|holder| holder.session == session) else { return };
        let holder = unit.holders.remove(index);
        if let Some(held) = self.held.get_mut(&session) {
            held.remove(&key);
        }
        effects.push(Effect::End { session, unit: key, version: holder.version });
    }

    fn end_session(&mut self, session: SessionId, now: Nanoseconds, effects: &mut Vec<Effect>) {
        self.answering.remove(&session);
        let mut touched: BTreeSet<InodeNumber> = self.held.remove(&session).unwrap_or_default();
        for unit in touched.clone() {
            self.end_holder(session, unit, effects);
        }
        for ticket in self.waiting.get(&session).cloned().unwrap_or_default() {
            touched.extend(self.forget_request(ticket));
        }
        self.sync_units(touched, now, effects);
    }

    fn forget_request(&mut self, ticket: Ticket) -> Vec<InodeNumber> {
        let Some(request) = self.requests.remove(&ticket) else { return Vec::new() };
        let units: Vec<_> = request.wants.iter().map(|want| want.unit).collect();
        for key in &units {
            if let Some(unit) = self.units.get_mut(key) {
                unit.waiting.retain(|other| *other != ticket);
                if unit.waiting.is_empty() {
                    self.waited_for.remove(key);
                }
            }
        }
        if let Some(tickets) = self.waiting.get_mut(&request.session) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.waiting.remove(&request.session);
            }
        }
        units
    }

    /// Advances the requests that wait for these units. Grants a request that is first at all its units without a
    /// conflict, and revokes the leases that conflict with first requests.
    fn sync_units(
        &mut self,
        units: impl IntoIterator<Item = InodeNumber>,
        now: Nanoseconds,
        effects: &mut Vec<Effect>,
    ) {
        let mut agenda: VecDeque<InodeNumber> = units.into_iter().collect();
        while let Some(key) = agenda.pop_front() {
            while let Some(ticket) = self.first_at(key) {
                if !self.try_grant(ticket, now, effects) {
                    self.ask_back(ticket, now, effects);
                    break;
                }
                agenda.extend(self.forget_request(ticket));
            }
            if self.units.get(&key).is_some_and(|unit| unit.holders.is_empty() && unit.waiting.is_empty()) {
                self.units.remove(&key);
            }
        }
    }

    fn try_grant(&mut self, ticket: Ticket, now: Nanoseconds, effects: &mut Vec<Effect>) -> bool {
        let Some(request) = self.requests.get(&ticket).cloned() else { return false };
        let first_everywhere = request.wants.iter().all(|want| self.first_at(want.unit) == Some(ticket));
        let excluded = request.wants.iter().any(|want| {
            self.units[&want.unit]
                .holders
                .iter()
                .any(|holder| self.stands_in_the_way(holder, request.session, want.mode))
        });
        if !first_everywhere || excluded {
            return false;
        }
        let grants =
            request.wants.iter().map(|want| (*want, self.grant_one(request.session, *want, now))).collect();
        effects.push(Effect::Grant { ticket, session: request.session, grants });
        true
    }

    /// The session's own lease does not conflict, unless it is ending: then the request waits, so that a new lease never
    /// overtakes the end of the old one.
    fn stands_in_the_way(&self, holder: &Holder, session: SessionId, mode: Mode) -> bool {
        if holder.session == session { holder.revoking } else { holder.mode.excludes(mode) }
    }

    fn grant_one(&mut self, session: SessionId, want: Want, now: Nanoseconds) -> LeaseVersion {
        let holders = &mut self.units.entry(want.unit).or_default().holders;
        let own = holders.iter().position(|holder| holder.session == session);
        if let Some(held) = own.map(|index| &mut holders[index]).filter(|held| held.mode >= want.mode) {
            // The minimum hold starts again, because the operation needs this lease together with the new ones.
            held.granted_at = now;
            return held.version;
        }
        let version = self.take_version();
        let granted =
            Holder { session, mode: want.mode, version, granted_at: now, revoking: false, recalled: false };
        let holders = &mut self.units.entry(want.unit).or_default().holders;
        match own {
            Some(index) => holders[index] = granted,
            None => holders.push(granted),
        }
        self.held.entry(session).or_default().insert(want.unit);
        version
    }

    /// Revokes, for a request that is first at some units, every conflicting lease at these units.
    fn ask_back(&mut self, ticket: Ticket, now: Nanoseconds, effects: &mut Vec<Effect>) {
        let Some(request) = self.requests.get(&ticket).cloned() else { return };
        let mut wake_at: Option<Nanoseconds> = None;
        for want in &request.wants {
            if self.first_at(want.unit) != Some(ticket) {
                continue;
            }
            let due = self.ask_holders(request.session, *want, now, effects);
            wake_at = [wake_at, due].into_iter().flatten().min();
        }
        if let Some(at) = wake_at {
            effects.push(Effect::WakeAt(at));
        }
    }

    /// Revokes leases that a session is about to need, where no request does. Leases within their minimum hold stay.
    fn ask_back_ahead(
        &mut self,
        session: SessionId,
        wants: &[Want],
        now: Nanoseconds,
        effects: &mut Vec<Effect>,
    ) {
        if !self.may_get(session) {
            return;
        }
        for want in wants {
            if self.units.get(&want.unit).is_some_and(|unit| unit.waiting.is_empty()) {
                self.ask_holders(session, *want, now, effects);
            }
        }
    }

    /// Revokes or recalls every lease on a unit that conflicts with what a session wants. Returns when the first minimum hold
    /// of such a lease ends, if one is still held by that.
    fn ask_holders(
        &mut self,
        session: SessionId,
        want: Want,
        now: Nanoseconds,
        effects: &mut Vec<Effect>,
    ) -> Option<Nanoseconds> {
        let mut first_due = None;
        for holder in &mut self.units.get_mut(&want.unit)?.holders {
            let is_asked = holder.revoking || holder.recalled;
            if holder.session == session || is_asked || !holder.mode.excludes(want.mode) {
                continue;
            }
            let due = holder.granted_at.saturating_add(self.limits.hold_min_ns);
            if now < due {
                first_due = Some(first_due.map_or(due, |other: Nanoseconds| other.min(due)));
                continue;
            }
            let (session, unit, version) = (holder.session, want.unit, holder.version);
            if self.answering.contains(&session) {
                holder.recalled = true;
                effects.push(Effect::Recall { session, unit, version });
            } else {
                holder.revoking = true;
                effects.push(Effect::Revoke { session, unit, version });
            }
        }
        first_due
    }

    /// Checks the invariants of the table; for the simulator and the tests.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn assert_invariants(&self) {
        for (key, unit) in &self.units {
            let writers = unit.holders.iter().filter(|holder| holder.mode == Mode::Write).count();
            assert!(writers == 0 || unit.holders.len() == 1, "{key:?} has a writer and another holder");
            for holder in &unit.holders {
                assert!(holder.version < self.next_version, "{key:?}: a version from the future");
                assert!(self.held[&holder.session].contains(key), "{key:?} is not in its holder's list");
            }
            assert!(!unit.holders.is_empty() || !unit.waiting.is_empty(), "{key:?} is kept for nobody");
            for ticket in &unit.waiting {
                let request = self.requests.get(ticket).expect("a unit is waited for by a request");
                assert!(
                    self.waiting[&request.session].contains(ticket),
                    "{ticket:?} is not in its session's list"
                );
            }
            let listed = self.waited_for.contains(key);
            assert_eq!(listed, !unit.waiting.is_empty(), "{key:?} in the list of those waited for");
        }
        let waiting: usize = self.waiting.values().map(BTreeSet::len).sum();
        assert_eq!(waiting, self.requests.len(), "requests by session");
        let known = |key: &InodeNumber| self.units.contains_key(key);
        assert!(self.waited_for.iter().all(known), "a unit that is gone is waited for");
        for (session, units) in &self.held {
            for key in units {
                let holders = &self.units[key].holders;
                assert!(
                    holders.iter().any(|holder| holder.session == *session),
                    "{key:?} has no such holder"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: LeaseVersion = LeaseVersion::new(1);

    fn table() -> Leases {
        Leases::new(Limits { hold_min_ns: 10, ..Limits::default() }, FIRST)
    }

    fn want(unit: u64, mode: Mode) -> Want {
        Want { unit: InodeNumber::new(unit), mode }
    }

    fn ask(leases: &mut Leases, now: u64, ticket: u64, session: u64, wants: &[Want]) -> Vec<Effect> {
        let event =
            Event::Request { ticket: Ticket(ticket), session: SessionId(session), wants: wants.to_vec() };
        let effects = leases.step(now, event);
        leases.assert_invariants();
        effects
    }

    fn revoked(leases: &mut Leases, now: u64, session: u64, unit: u64) -> Vec<Effect> {
        let event = Event::Revoked { session: SessionId(session), unit: InodeNumber::new(unit) };
        let effects = leases.step(now, event);
        leases.assert_invariants();
        effects
    }

    fn granted(effects: &[Effect]) -> Vec<u64> {
        effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Grant { ticket, .. } => Some(ticket.0),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn readers_share_and_a_writer_waits_for_them() {
        let mut leases = table();
        assert_eq!(granted(&ask(&mut leases, 0, 1, 1, &[want(5, Mode::Read)])), [1]);
        assert_eq!(granted(&ask(&mut leases, 0, 2, 2, &[want(5, Mode::Read)])), [2]);
        let effects = ask(&mut leases, 100, 3, 3, &[want(5, Mode::Write)]);
        let revokes = effects.iter().filter(|effect| matches!(effect, Effect::Revoke { .. })).count();
        assert_eq!((granted(&effects).len(), revokes), (0, 2));
        assert!(granted(&revoked(&mut leases, 101, 1, 5)).is_empty());
        assert_eq!(granted(&revoked(&mut leases, 102, 2, 5)), [3]);
    }

    #[test]
    fn a_reader_behind_a_waiting_writer_does_not_overtake_it() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Read)]);
        ask(&mut leases, 100, 2, 2, &[want(5, Mode::Write)]);
        assert!(granted(&ask(&mut leases, 101, 3, 3, &[want(5, Mode::Read)])).is_empty());
        assert_eq!(granted(&revoked(&mut leases, 102, 1, 5)), [2]);
    }

    #[test]
    fn a_lease_is_held_for_a_while_before_it_is_asked_back() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Write)]);
        assert_eq!(ask(&mut leases, 3, 2, 2, &[want(5, Mode::Write)]), [Effect::WakeAt(10)]);
        assert!(matches!(leases.step(10, Event::Tick)[..], [Effect::Revoke { session: SessionId(1), .. }]));
    }

    #[test]
    fn an_own_lease_is_raised_in_place_with_a_new_version() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Read)]);
        assert_eq!(granted(&ask(&mut leases, 0, 2, 1, &[want(5, Mode::Write)])), [2]);
        assert_eq!(leases.held(SessionId(1), InodeNumber::new(5)), Some((Mode::Write, LeaseVersion::new(2))));
        assert_eq!(granted(&ask(&mut leases, 0, 3, 1, &[want(5, Mode::Read)])), [3]);
        assert_eq!(leases.held(SessionId(1), InodeNumber::new(5)).map(|held| held.0), Some(Mode::Write));
    }

    #[test]
    fn two_readers_that_both_want_to_write_do_not_block_each_other() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Read)]);
        ask(&mut leases, 0, 2, 2, &[want(5, Mode::Read)]);
        let effects = ask(&mut leases, 100, 3, 1, &[want(5, Mode::Write)]);
        assert!(matches!(effects[..], [Effect::Revoke { session: SessionId(2), .. }]));
        assert!(ask(&mut leases, 100, 4, 2, &[want(5, Mode::Write)]).is_empty());
        assert_eq!(granted(&revoked(&mut leases, 101, 2, 5)), [3]);
        let later = leases.step(200, Event::Tick);
        assert!(matches!(later[..], [Effect::Revoke { session: SessionId(1), .. }]), "{later:?}");
        assert_eq!(granted(&revoked(&mut leases, 201, 1, 5)), [4]);
    }

    #[test]
    fn two_that_hold_what_the_other_lacks_get_both_one_after_the_other() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Write)]);
        ask(&mut leases, 0, 2, 2, &[want(6, Mode::Write)]);
        let both = [want(5, Mode::Write), want(6, Mode::Write)];
        let effects = ask(&mut leases, 100, 3, 1, &both);
        assert!(matches!(effects[..], [Effect::Revoke { session: SessionId(2), .. }]), "{effects:?}");
        assert!(ask(&mut leases, 100, 4, 2, &both).is_empty(), "nothing is taken from who is first");
        assert_eq!(granted(&revoked(&mut leases, 101, 2, 6)), [3]);
        // Both have a new minimum hold, also the one that was held before.
        let effects = leases.step(105, Event::Tick);
        assert!(effects.iter().all(|effect| *effect == Effect::WakeAt(111)), "{effects:?}");
        let effects = leases.step(111, Event::Tick);
        assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::Revoke { .. })).count(), 2);
        assert!(granted(&revoked(&mut leases, 112, 1, 5)).is_empty());
        assert_eq!(granted(&revoked(&mut leases, 113, 1, 6)), [4]);
    }

    #[test]
    fn what_is_held_counts_once() {
        let limits = Limits { hold_min_ns: 0, leases_max: 2, ..Limits::default() };
        let mut leases = Leases::new(limits, FIRST);
        let both = [want(5, Mode::Write), want(6, Mode::Write)];
        assert_eq!(granted(&ask(&mut leases, 0, 1, 1, &both)), [1]);
        assert_eq!(granted(&ask(&mut leases, 0, 2, 1, &both)), [2]);
        assert_eq!(ask(&mut leases, 0, 3, 1, &[want(7, Mode::Read)]), [Effect::Refuse { ticket: Ticket(3) }]);
    }

    #[test]
    fn a_dead_session_blocks_nobody() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Write), want(6, Mode::Write)]);
        ask(&mut leases, 0, 2, 1, &[want(7, Mode::Write)]);
        ask(&mut leases, 100, 3, 2, &[want(5, Mode::Write), want(6, Mode::Read), want(7, Mode::Read)]);
        assert_eq!(granted(&leases.step(101, Event::Ended { session: SessionId(1) })), [3]);
        leases.assert_invariants();
    }

    #[test]
    fn a_lease_on_its_way_out_is_not_given_again_before_it_is_out() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Write)]);
        let (session, unit) = (SessionId(1), InodeNumber::new(5));
        assert!(leases.step(100, Event::Leaving { session, unit }).is_empty());
        assert_eq!(leases.held(session, unit), None);
        assert!(ask(&mut leases, 100, 2, 1, &[want(5, Mode::Read)]).is_empty());
        assert_eq!(granted(&leases.step(101, Event::Released { session, unit })), [2]);
    }

    fn ask_free(leases: &mut Leases, ticket: u64, session: u64, wants: &[Want]) -> Vec<u64> {
        let event =
            Event::RequestFree { ticket: Ticket(ticket), session: SessionId(session), wants: wants.to_vec() };
        match &leases.step(1000, event)[..] {
            [Effect::Grant { grants, .. }] => grants.iter().map(|(want, _)| want.unit.get()).collect(),
            other => panic!("answered at once: {other:?}"),
        }
    }

    #[test]
    fn what_is_asked_for_if_it_is_free_takes_nothing_from_others() {
        let mut leases = table();
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Read), want(6, Mode::Write)]);
        // A session waits for the seventh unit, which a third session reads.
        ask(&mut leases, 0, 2, 3, &[want(7, Mode::Read)]);
        ask(&mut leases, 0, 3, 4, &[want(7, Mode::Write)]);
        let read: Vec<_> = (5..9).map(|unit| want(unit, Mode::Read)).collect();
        assert_eq!(ask_free(&mut leases, 4, 2, &read), [5, 8]);
        assert_eq!(ask_free(&mut leases, 5, 2, &read), [0; 0], "held already");
        let write: Vec<_> = (5..9).map(|unit| want(unit, Mode::Write)).collect();
        assert_eq!(ask_free(&mut leases, 6, 2, &write), [8], "another one reads the fifth");
        leases.assert_invariants();
    }

    #[test]
    fn leases_that_will_be_needed_are_asked_back_without_a_request() {
        let mut leases = table();
        let (one, two) = (SessionId(1), SessionId(2));
        leases.step(0, Event::MustAnswer { session: two });
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Write), want(6, Mode::Read)]);
        ask(&mut leases, 0, 2, 2, &[want(7, Mode::Write)]);
        ask(&mut leases, 95, 3, 1, &[want(8, Mode::Write)]);
        let wants: Vec<_> = (4..9).map(|unit| want(unit, Mode::Read)).collect();
        let back = Event::AskBack { session: SessionId(3), wants };
        let effects = leases.step(100, back.clone());
        let asked = |effects: &[Effect]| -> Vec<(SessionId, u64, bool)> {
            let asked = effects.iter().map(|effect| match effect {
                Effect::Revoke { session, unit, .. } => (*session, unit.get(), false),
                Effect::Recall { session, unit, .. } => (*session, unit.get(), true),
                other => panic!("nothing else follows: {other:?}"),
            });
            asked.collect()
        };
        // The sixth is shared, and the eighth is within its minimum hold.
        assert_eq!(asked(&effects), [(one, 5, false), (two, 7, true)]);
        assert_eq!(leases.step(101, back.clone()), [], "each is asked for once");
        assert_eq!(revoked(&mut leases, 101, 1, 5).len(), 1);
        assert_eq!(ask_free(&mut leases, 4, 3, &[want(5, Mode::Read)]), [5]);
        // A request asks for what it waits for.
        ask(&mut leases, 102, 5, 4, &[want(8, Mode::Write)]);
        assert_eq!(leases.step(200, back.clone()), []);
        leases.step(200, Event::Withhold);
        ask(&mut leases, 200, 6, 2, &[want(9, Mode::Write)]);
        let withheld = Event::AskBack { session: SessionId(3), wants: vec![want(9, Mode::Read)] };
        assert_eq!(leases.step(300, withheld), []);
        leases.assert_invariants();
    }

    #[test]
    fn no_more_is_given_than_a_session_may_hold() {
        let mut leases = Leases::new(Limits { leases_max: 3, ..Limits::default() }, FIRST);
        let wants: Vec<_> = (1..9).map(|unit| want(unit, Mode::Read)).collect();
        assert_eq!(ask_free(&mut leases, 1, 1, &wants), [1, 2, 3]);
        let write: Vec<_> = (1..9).map(|unit| want(unit, Mode::Write)).collect();
        assert_eq!(ask_free(&mut leases, 2, 1, &write), [1, 2, 3], "those that it has may be raised");
    }

    #[test]
    fn an_inode_of_an_own_range_is_asked_back_like_any_other() {
        let mut leases = table();
        let version = leases.take_version();
        let unit = InodeNumber::new(9);
        leases.step(0, Event::Created { session: SessionId(1), unit, version });
        let effects = ask(&mut leases, 50, 1, 2, &[want(9, Mode::Read)]);
        assert!(matches!(effects[..], [Effect::Revoke { session: SessionId(1), .. }]));
        assert_eq!(granted(&revoked(&mut leases, 51, 1, 9)), [1]);
    }

    #[test]
    fn a_session_that_must_answer_is_asked_once_and_holds_its_lease_until_it_leaves() {
        let mut leases = table();
        let (session, unit) = (SessionId(1), InodeNumber::new(5));
        leases.step(0, Event::MustAnswer { session });
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Write)]);
        let effects = ask(&mut leases, 100, 2, 2, &[want(5, Mode::Write)]);
        assert!(matches!(effects[..], [Effect::Recall { session: SessionId(1), .. }]), "{effects:?}");
        assert_eq!(leases.held(session, unit).map(|held| held.0), Some(Mode::Write));
        assert_eq!(ask(&mut leases, 101, 3, 3, &[want(5, Mode::Read)]), [], "it was asked already");
        assert_eq!(leases.step(200, Event::Tick), []);
        assert_eq!(leases.step(300, Event::Leaving { session, unit }), []);
        assert_eq!(leases.held(session, unit), None);
        assert_eq!(granted(&revoked(&mut leases, 301, 1, 5)), [2]);
    }

    #[test]
    fn what_was_raised_meanwhile_is_asked_for_again() {
        let mut leases = table();
        leases.step(0, Event::MustAnswer { session: SessionId(1) });
        ask(&mut leases, 0, 1, 1, &[want(5, Mode::Read)]);
        ask(&mut leases, 0, 2, 2, &[want(5, Mode::Read)]);
        // The first session waits for the second, and a third for both.
        ask(&mut leases, 100, 3, 1, &[want(5, Mode::Write)]);
        assert_eq!(ask(&mut leases, 100, 4, 3, &[want(5, Mode::Write)]), []);
        assert_eq!(granted(&revoked(&mut leases, 101, 2, 5)), [3]);
        let effects = leases.step(200, Event::Tick);
        assert!(matches!(effects[..], [Effect::Recall { session: SessionId(1), .. }]), "{effects:?}");
    }

    proptest::proptest! {
        /// With any requests, revocations in any order, and dying sessions: every request of a living session is
        /// finally granted, and two conflicting leases never exist at the same time.
        #[test]
        fn everything_is_granted_in_the_end(
            steps in proptest::collection::vec((0u64..5, 0u64..6, 1usize..4, 0u64..64, 0u8..12), 1..120)
        ) {
            let mut leases = table();
            leases.step(0, Event::MustAnswer { session: SessionId(0) });
            let mut now = 0;
            let mut to_revoke: Vec<(SessionId, InodeNumber)> = Vec::new();
            let mut open: BTreeMap<Ticket, SessionId> = BTreeMap::new();
            let absorb = |effects: Vec<Effect>, to_revoke: &mut Vec<_>, open: &mut BTreeMap<_, _>| {
                for effect in effects {
                    match effect {
                        Effect::Revoke { session, unit, .. } | Effect::Recall { session, unit, .. } => {
                            to_revoke.push((session, unit));
                        }
                        Effect::Grant { ticket, .. } | Effect::Refuse { ticket } => { open.remove(&ticket); }
                        Effect::End { .. } | Effect::WakeAt(_) => {}
                    }
                }
            };
            for (number, (session, unit, units, bits, action)) in steps.into_iter().enumerate() {
                now += bits;
                let event = match action {
                    0 => Event::Ended { session: SessionId(session) },
                    1..=4 if !to_revoke.is_empty() => {
                        let (session, unit) = to_revoke.remove(bits as usize % to_revoke.len());
                        Event::Revoked { session, unit }
                    }
                    _ => {
                        let (ticket, session) = (Ticket(number as u64), SessionId(session));
                        open.insert(ticket, session);
                        let mode = |bit: u64| if bits >> bit & 1 == 0 { Mode::Read } else { Mode::Write };
                        let wants = (0..units as u64).map(|i| want((unit + i * 2) % 6, mode(i))).collect();
                        if action == 6 {
                            open.remove(&ticket);
                            Event::AskBack { session, wants }
                        } else if action == 5 {
                            Event::RequestFree { ticket, session, wants }
                        } else {
                            Event::Request { ticket, session, wants }
                        }
                    }
                };
                if let Event::Ended { session } = event {
                    open.retain(|_, owner| *owner != session);
                    to_revoke.retain(|(owner, _)| *owner != session);
                }
                absorb(leases.step(now, event), &mut to_revoke, &mut open);
                leases.assert_invariants();
            }
            for _ in 0..10_000 {
                now += 100;
                absorb(leases.step(now, Event::Tick), &mut to_revoke, &mut open);
                let Some((session, unit)) = to_revoke.pop() else { break };
                absorb(leases.step(now, Event::Revoked { session, unit }), &mut to_revoke, &mut open);
                leases.assert_invariants();
            }
            proptest::prop_assert!(open.is_empty(), "left waiting: {:?}", open);
        }
    }
}
