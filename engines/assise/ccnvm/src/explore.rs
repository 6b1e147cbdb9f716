//! Visits every state of a small model: sessions that request and release leases, lose them, and die, in every order that
//! the table allows. The guarantees are checked by the effects alone, in addition to the invariants of the table.

use crate::leases::{Effect, Event, Leases, Limits, Mode, SessionId, Ticket, Want};
use format::{InodeNumber, LeaseVersion};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Limits of a model.
struct Bounds {
    sessions: u64,
    /// Number of the first sessions whose leases are recalled.
    answering: u64,
    /// Sets of leases that a request may ask for.
    requests: Vec<Vec<Want>>,
    /// Limit of waiting requests of one session.
    waiting_max: usize,
    /// Limit of sessions that die.
    deaths: u64,
    /// Limit of cancelled requests.
    cancels: u64,
    /// True if leases may be withheld from the other sessions.
    withholds: bool,
}

/// A state: the table, and the knowledge of its users.
#[derive(Clone)]
struct World {
    table: Leases,
    answering: u64,
    next_ticket: u64,
    /// Unanswered requests, in the order of their arrival.
    waiting: BTreeMap<Ticket, (SessionId, Vec<Want>)>,
    /// Leases that were granted and have not ended.
    granted: BTreeMap<(InodeNumber, SessionId), Mode>,
    /// Holders that were told to leave, or have begun to.
    leaving: BTreeSet<(SessionId, InodeNumber)>,
    /// Holders that were asked for a lease and continue to use it.
    recalled: BTreeSet<(SessionId, InodeNumber)>,
    dead: BTreeSet<SessionId>,
    cancelled: u64,
    withheld: bool,
}

fn want(unit: u64, mode: Mode) -> Want {
    Want { unit: InodeNumber::new(unit), mode }
}

impl World {
    fn new(answering: u64) -> Self {
        let limits = Limits { hold_min_ns: 0, ..Limits::default() };
        let mut table = Leases::new(limits, LeaseVersion::new(1));
        for session in (1..=answering).map(SessionId) {
            table.step(0, Event::MustAnswer { session });
        }
        Self {
            table,
            answering,
            next_ticket: 1,
            waiting: BTreeMap::new(),
            granted: BTreeMap::new(),
            leaving: BTreeSet::new(),
            recalled: BTreeSet::new(),
            dead: BTreeSet::new(),
            cancelled: 0,
            withheld: false,
        }
    }

    /// Identity of a state. Only the order of versions and ticket numbers matters.
    fn key(&self) -> Vec<u8> {
        let mut key = Vec::new();
        let mut add = |parts: &[u64]| key.extend(parts.iter().map(|part| *part as u8));
        add(&[
            u64::from(self.withheld),
            self.cancelled,
            self.dead.iter().map(|session| 1 << session.0).sum(),
        ]);
        for ((unit, session), mode) in &self.granted {
            add(&[
                1,
                unit.get(),
                session.0,
                *mode as u64,
                u64::from(self.leaving.contains(&(*session, *unit))),
                u64::from(self.recalled.contains(&(*session, *unit))),
            ]);
        }
        for (session, wants) in self.waiting.values() {
            add(&[2, session.0]);
            wants.iter().for_each(|want| add(&[want.unit.get(), want.mode as u64]));
        }
        key
    }

    /// All events that may come next.
    fn events(&self, bounds: &Bounds) -> Vec<Event> {
        let mut events = Vec::new();
        let ticket = Ticket(self.next_ticket);
        for session in (1..=bounds.sessions).map(SessionId).filter(|session| !self.dead.contains(session)) {
            let waiting = self.waiting.values().filter(|(asks, _)| *asks == session).count();
            for wants in &bounds.requests {
                let wants = wants.clone();
                if waiting < bounds.waiting_max {
                    events.push(Event::Request { ticket, session, wants: wants.clone() });
                }
                events.push(Event::AskBack { session, wants: wants.clone() });
                events.push(Event::RequestFree { ticket, session, wants });
            }
            if (self.dead.len() as u64) < bounds.deaths {
                events.push(Event::Ended { session });
            }
        }
        for (unit, session) in self.granted.keys() {
            if self.leaving.contains(&(*session, *unit)) {
                events.push(Event::Revoked { session: *session, unit: *unit });
            } else {
                events.push(Event::Leaving { session: *session, unit: *unit });
            }
        }
        if bounds.withholds {
            events.push(if self.withheld { Event::Resume } else { Event::Withhold });
        }
        if self.cancelled < bounds.cancels {
            events.extend(self.waiting.keys().map(|ticket| Event::Cancelled { ticket: *ticket }));
        }
        events
    }

    /// Executes one event, and checks its effects.
    fn step(&mut self, event: Event) {
        match &event {
            Event::Request { ticket, session, wants } => {
                self.waiting.insert(*ticket, (*session, wants.clone()));
                self.next_ticket += 1;
            }
            Event::RequestFree { .. } => self.next_ticket += 1,
            Event::AskBack { .. } => {}
            Event::Leaving { session, unit } => {
                self.recalled.remove(&(*session, *unit));
                self.leaving.insert((*session, *unit));
            }
            Event::Revoked { session, unit } => drop(self.leaving.remove(&(*session, *unit))),
            Event::Cancelled { ticket } => {
                self.waiting.remove(ticket);
                self.cancelled += 1;
            }
            Event::Ended { session } => {
                self.dead.insert(*session);
                self.leaving.retain(|(holder, _)| holder != session);
                self.recalled.retain(|(holder, _)| holder != session);
                self.waiting.retain(|_, (asks, _)| asks != session);
            }
            Event::Withhold => self.withheld = true,
            Event::Resume => self.withheld = false,
            Event::Created { .. } | Event::Released { .. } | Event::MustAnswer { .. } | Event::Tick => {
                unreachable!("not asked for here")
            }
        }
        let free = matches!(event, Event::RequestFree { .. });
        let asks = matches!(event, Event::AskBack { .. });
        let ticks = matches!(event, Event::Withhold | Event::Resume);
        let mut effects = self.table.step(0, event);
        if ticks {
            effects.extend(self.table.step(0, Event::Tick));
        }
        for effect in effects {
            assert!(!asks || !matches!(effect, Effect::Grant { .. }), "a grant without a request");
            self.judge(effect, free);
        }
        self.table.assert_invariants();
    }

    fn judge(&mut self, effect: Effect, free: bool) {
        match effect {
            Effect::Grant { ticket, session, grants } => {
                assert!(!self.dead.contains(&session), "a dead session is granted something");
                assert!(self.may_get(session) || grants.is_empty(), "what is withheld is granted");
                if !free {
                    self.judge_order(ticket, session, &grants);
                }
                for (want, _) in grants {
                    let taken = free && self.waiting.values().any(|(_, wants)| has(wants, want.unit));
                    assert!(!taken, "what is free overtakes who waits");
                    self.grant(session, want);
                }
            }
            Effect::Recall { session, unit, .. } => {
                assert!(self.granted.contains_key(&(unit, session)), "what is not held is asked for");
                assert!(!self.leaving.contains(&(session, unit)), "who leaves is asked to leave");
                assert!(self.recalled.insert((session, unit)), "it is asked for twice");
            }
            Effect::Revoke { session, unit, .. } => {
                assert!(session.0 > self.answering, "it is taken from a session that must answer");
                assert!(self.granted.contains_key(&(unit, session)), "what is not held is taken back");
                assert!(self.leaving.insert((session, unit)), "it is asked back twice");
            }
            Effect::End { session, unit, .. } => {
                assert!(self.granted.remove(&(unit, session)).is_some(), "what is not held ends");
            }
            Effect::Refuse { .. } | Effect::WakeAt(_) => unreachable!("limits and times are out of the way"),
        }
    }

    /// Checks that a request is granted as a whole, once, and after all earlier ones for one of its units.
    fn judge_order(&mut self, ticket: Ticket, session: SessionId, grants: &[(Want, LeaseVersion)]) {
        let (asks, wants) = self.waiting.remove(&ticket).expect("what waits is granted, once");
        let granted: Vec<Want> = grants.iter().map(|(want, _)| *want).collect();
        assert_eq!((session, &granted), (asks, &wants), "it is granted whole");
        let earlier = self.waiting.range(..ticket).filter(|(_, (asks, _))| self.may_get(*asks));
        let earlier = earlier.map(|(_, (_, earlier))| earlier);
        let overtaken = earlier.filter(|earlier| wants.iter().any(|want| has(earlier, want.unit))).count();
        assert_eq!(overtaken, 0, "who came first is served first");
    }

    fn may_get(&self, session: SessionId) -> bool {
        !self.withheld || session.0 <= self.answering
    }

    fn grant(&mut self, session: SessionId, Want { unit, mode }: Want) {
        assert!(!self.leaving.contains(&(session, unit)), "a new lease overtakes the end of the old one");
        let others = self.granted.range((unit, SessionId(0))..=(unit, SessionId(u64::MAX)));
        for ((_, other), held) in others.filter(|((_, other), _)| *other != session) {
            assert!(mode == Mode::Read && *held == Mode::Read, "{other:?} holds {unit:?}, too");
        }
        let before = self.granted.insert((unit, session), mode);
        if before > Some(mode) {
            self.granted.insert((unit, session), Mode::Write);
        }
        if before.is_some_and(|before| before < mode) {
            // The lease has a new version, for which no holder was asked yet.
            self.recalled.remove(&(session, unit));
        }
    }

    /// Checks that every request is answered once all holders that were told to leave have left.
    fn judge_end(&self) {
        let mut world = self.clone();
        if world.withheld {
            let waits = |world: &Self| world.waiting.values().any(|(asks, _)| world.may_get(*asks));
            world.leave_all();
            assert!(!waits(&world), "a session that must answer waits for what is withheld from others");
            world.step(Event::Resume);
        }
        world.leave_all();
        assert!(world.waiting.is_empty(), "these wait for ever: {:?}", world.waiting);
    }

    /// Makes all holders leave that were told to.
    fn leave_all(&mut self) {
        let world = self;
        loop {
            if let Some((session, unit)) = world.leaving.first().copied() {
                world.step(Event::Revoked { session, unit });
            } else if let Some((session, unit)) = world.recalled.first().copied() {
                world.step(Event::Leaving { session, unit });
            } else {
                break;
            }
        }
    }
}

fn has(wants: &[Want], unit: InodeNumber) -> bool {
    wants.iter().any(|want| want.unit == unit)
}

/// Visits every state, and returns their number.
fn explore(bounds: &Bounds) -> usize {
    let begin = World::new(bounds.answering);
    let (mut seen, mut agenda) = (HashSet::from([begin.key()]), vec![begin]);
    while let Some(world) = agenda.pop() {
        world.judge_end();
        for event in world.events(bounds) {
            let mut next = world.clone();
            next.step(event);
            if seen.insert(next.key()) {
                agenda.push(next);
            }
        }
    }
    seen.len()
}

/// Requests to read and write either unit, and both.
fn all_requests() -> Vec<Vec<Want>> {
    use Mode::{Read, Write};
    let pairs = [(Read, Read), (Read, Write), (Write, Read), (Write, Write)];
    let both = pairs.map(|(first, second)| vec![want(1, first), want(2, second)]);
    let one = [1, 2].into_iter().flat_map(|unit| [Read, Write].map(|mode| vec![want(unit, mode)]));
    one.chain(both).collect()
}

/// True if all states of the large models are visited (`HEARTH_WORLDS=all`), which takes minutes.
fn all() -> bool {
    std::env::var("HEARTH_WORLDS").is_ok_and(|worlds| worlds == "all")
}

#[test]
fn two_sessions_with_every_request() {
    let (waiting_max, cancels) = if all() { (2, 1) } else { (1, 1) };
    for answering in 0..=2 {
        let bounds = Bounds {
            sessions: 2,
            answering,
            requests: all_requests(),
            waiting_max,
            deaths: 1,
            cancels,
            withholds: false,
        };
        println!("{} states", explore(&bounds));
    }
}

#[test]
fn three_sessions_with_some_requests() {
    use Mode::{Read, Write};
    let singles = [want(1, Read), want(1, Write), want(2, Write)].map(|want| vec![want]);
    let requests: Vec<_> = singles.into_iter().chain([vec![want(1, Write), want(2, Read)]]).collect();
    let (deaths, cancels) = if all() { (1, 1) } else { (1, 0) };
    for answering in 0..=1 {
        let requests = requests.clone();
        let bounds = Bounds {
            sessions: 3,
            answering,
            requests,
            waiting_max: 1,
            deaths,
            cancels,
            withholds: answering > 0,
        };
        println!("{} states", explore(&bounds));
    }
}
