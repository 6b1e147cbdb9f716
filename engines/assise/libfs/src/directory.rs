//! The cached entries of one directory: entries and absent names by cookie, with the session's own changes.
//!
//! The cached entries come from the area (walks, batches of entries) and from the session's own records. An entry that
//! an own record changed keeps that record's sequence; information from the area replaces it only if the area contains
//! the record. In one range of cookies all entries are known, so that a name that is not there does not exist. A
//! directory that the session created is known completely from the start, and a directory in which the session changes
//! many entries is read completely.

use format::call::AHEAD_MAX;
use format::name::COOKIE_SLOTS;
use format::record::FileType;
use format::{Cookie, InodeNumber, Name, Sequence};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Limit of absent names that are cached, in addition to those that own records removed; and of hashes of which all
/// entries are known.
const ABSENT_MAX: usize = 4096;

/// A directory with more entries is never read completely for the sake of single names.
const WHOLE_MAX: u64 = 1 << 16;

/// After this number of names of a directory that a program has looked up one by one, it is expected to look up many.
const LOOKUPS_FIRST: u64 = 2;

/// In a directory with more entries, a program that has listed all of them may still need only few.
const AHEAD_WHOLE_MAX: u64 = 1 << 12;

/// To request leases ahead, at most so many entries and removals are looked at: a program may have removed hundreds of
/// thousands of names that are not digested yet.
const LOOKED_AT_MAX: usize = 4 * AHEAD_MAX;

/// Factor by which the number of leases requested ahead grows each time; also the first number.
const AHEAD_GROWTH: u16 = 8;

/// Approximate number of entries in the answer to one call.
const ENTRIES_A_CALL: u64 = 512;

/// An entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub inode: InodeNumber,
    pub file_type: FileType,
}

#[derive(Clone, Debug)]
struct EntryPlace {
    name: Box<[u8]>,
    /// None: the entry was removed.
    target: Option<Target>,
    /// The own record that made this change; 0 if it comes from the area.
    sequence: Sequence,
}

/// The result of a lookup in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The name exists.
    Entry(Cookie, Target),
    /// The name does not exist.
    Absent,
    /// The cache does not know; SharedFS has to be asked.
    Unknown,
}

/// The orders of entries in which a program is expected to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The order of the directory.
    Directory,
    /// Also any other, if the program has read all of a directory that is not large.
    Any,
}

/// One directory's entries.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    places: BTreeMap<Cookie, EntryPlace>,
    /// The places of the changes by own records, oldest first, until the area contains these: a digest of a few records does
    /// not look at all entries.
    own: VecDeque<(Sequence, Cookie)>,
    /// All entries are known whose cookies are at or after the first and before the second.
    known: (u64, u64),
    /// Lookups of names that were not cached, under the present lease.
    misses: u64,
    /// The number of entries for which leases were last requested ahead, and the first and last of these entries.
    ahead: u16,
    ahead_places: (Cookie, Cookie),
    /// Names known to be absent, one for each hash, by the first cookie of the hash.
    absent: BTreeMap<Cookie, Box<[u8]>>,
    /// The first cookies of hashes of which all entries are known.
    hashes: BTreeSet<Cookie>,
}

/// A value greater than every cookie.
const END: u64 = u64::MAX;

impl Directory {
    /// A directory of which no entry is known.
    pub fn unknown() -> Self {
        Self {
            places: BTreeMap::new(),
            own: VecDeque::new(),
            known: (Cookie::START.get(), Cookie::START.get()),
            misses: 0,
            ahead: 0,
            ahead_places: (Cookie::START, Cookie::START),
            absent: BTreeMap::new(),
            hashes: BTreeSet::new(),
        }
    }

    /// A directory that is known to be empty.
    pub fn empty() -> Self {
        Self { known: (Cookie::START.get(), END), ..Self::unknown() }
    }

    /// The first cookie, from a cookie on, from which entries may be unknown; none if all are known to the end.
    pub fn unknown_from(&self, from: Cookie) -> Option<Cookie> {
        let (first, end) = self.known;
        match from.get() {
            from if from < first || from >= end => Some(Cookie::from_raw(from)),
            _ if end == END => None,
            _ => Some(Cookie::from_raw(end)),
        }
    }

    /// Called for a name that is not cached, in a directory of so many entries. Returns the cookie from which to
    /// continue reading all entries, if this takes fewer calls than asking name by name: when as many names were looked
    /// up one by one as the whole directory takes calls. A program that changes one name usually changes more; a
    /// program that only looks names up first has to look up a few.
    pub fn read_whole(&mut self, entries: u64, changes: bool) -> Option<Cookie> {
        self.misses += 1;
        let asked = if changes { self.misses } else { self.misses.saturating_sub(LOOKUPS_FIRST) };
        let pays = entries <= WHOLE_MAX && asked > 0 && asked.saturating_mul(ENTRIES_A_CALL) >= entries;
        if pays { self.unknown_from(Cookie::START) } else { None }
    }

    /// Called if the lease on the inode of an entry is missing, in a directory of so many entries. Returns the number
    /// of following entries whose leases are requested in the same call. The number grows each time, as long as the
    /// program uses them in the expected order. Returns 0 if the entry is the same as last time.
    pub fn ahead(&mut self, at: Cookie, entries: u64, order: Order) -> u16 {
        let (first, end) = self.known;
        let (from, to) = self.ahead_places;
        if at == from {
            return 0;
        }
        let listed = (first..end).contains(&at.get());
        let is_near = || {
            self.places.range(to.min(at)..at).take(LOOKED_AT_MAX).count() < LOOKED_AT_MAX
                && self.standing(to.min(at)).take_while(|cookie| *cookie < at).count() < AHEAD_MAX
        };
        let follows = at > from && is_near();
        let all = first == Cookie::START.get() && (end == END || self.places.len() as u64 >= entries);
        let read = all && entries <= AHEAD_WHOLE_MAX && order == Order::Any;
        self.ahead = match listed && (follows || read) {
            true => (self.ahead * AHEAD_GROWTH).clamp(AHEAD_GROWTH, AHEAD_MAX as u16),
            false => 0,
        };
        let end = self.standing(at).nth(usize::from(self.ahead) + 1);
        let goes_on = || self.places.range(at..).nth(LOOKED_AT_MAX).is_some();
        let end = end.unwrap_or_else(|| if goes_on() { at } else { Cookie::from_raw(END) });
        self.ahead_places = (at, end);
        self.ahead
    }

    /// The cookies of existing entries, from a cookie on, among the next [`LOOKED_AT_MAX`] entries and removals.
    fn standing(&self, from: Cookie) -> impl Iterator<Item = Cookie> {
        self.places
            .range(from..)
            .take(LOOKED_AT_MAX)
            .filter(|(_, place)| place.target.is_some())
            .map(|(cookie, _)| *cookie)
    }

    /// Number of cached entries and removals.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Drops all entries that the area contains.
    pub fn forget_digested(&mut self) {
        let (mut places, own) = (std::mem::take(&mut self.places), std::mem::take(&mut self.own));
        places.retain(|_, place| place.sequence > Sequence::new(0));
        *self = Self { places, own, ..Self::unknown() };
    }

    /// Looks a name up.
    pub fn find(&self, name: Name<'_>) -> Found {
        let first = Cookie::of_name(name);
        let alike = self.places.range(first..).take_while(|(cookie, _)| cookie.same_hash(first));
        for (cookie, place) in alike.filter(|(_, place)| *place.name == *name.bytes()) {
            if let Some(target) = place.target {
                return Found::Entry(*cookie, target);
            }
        }
        let removed = self
            .places
            .range(first..)
            .take_while(|(cookie, _)| cookie.same_hash(first))
            .any(|(_, place)| place.target.is_none() && *place.name == *name.bytes());
        let denied = self.absent.get(&first).is_some_and(|absent| **absent == *name.bytes());
        if removed || denied || self.knows_hash(first) { Found::Absent } else { Found::Unknown }
    }

    /// Whether all entries whose cookies have this hash are known.
    fn knows_hash(&self, first: Cookie) -> bool {
        let (from, end) = self.known;
        (from <= first.get() && end > last_of_hash(first)) || self.hashes.contains(&first)
    }

    /// A cookie for a name that does not exist; none if it is not known which are free.
    pub fn free_cookie(&self, name: Name<'_>) -> Option<Result<Cookie, Full>> {
        let first = Cookie::of_name(name);
        if !self.knows_hash(first) {
            return None;
        }
        let mut cookie = first;
        while self.places.get(&cookie).is_some_and(|place| place.target.is_some()) {
            match cookie.next_slot() {
                Some(next) => cookie = next,
                None => return Some(Err(Full)),
            }
        }
        Some(Ok(cookie))
    }

    /// Applies an own record that added an entry here, or changed the inode to which it refers.
    pub fn put(&mut self, cookie: Cookie, name: Name<'_>, target: Target, sequence: Sequence) {
        self.change(cookie, EntryPlace { name: name.bytes().into(), target: Some(target), sequence });
    }

    /// Applies an own record that removed the entry here.
    pub fn remove(&mut self, cookie: Cookie, name: Name<'_>, sequence: Sequence) {
        self.change(cookie, EntryPlace { name: name.bytes().into(), target: None, sequence });
    }

    fn change(&mut self, cookie: Cookie, place: EntryPlace) {
        self.own.push_back((place.sequence, cookie));
        self.places.insert(cookie, place);
    }

    /// Stores an entry of the area, which contains own records up to `digested`.
    pub fn learn(&mut self, cookie: Cookie, name: Name<'_>, target: Target, digested: Sequence) {
        let newer = self.places.get(&cookie).is_some_and(|place| place.sequence > digested);
        if !newer {
            let place =
                EntryPlace { name: name.bytes().into(), target: Some(target), sequence: Sequence::new(0) };
            self.places.insert(cookie, place);
        }
    }

    /// Stores that the area has no entry of this name, and the number of entries with its hash.
    pub fn learn_absent(&mut self, name: Name<'_>, same_hash: u32) {
        if self.absent.len() >= ABSENT_MAX {
            self.absent.clear();
        }
        let first = Cookie::of_name(name);
        self.absent.insert(first, name.bytes().into());
        if same_hash == 0 {
            self.learn_hash(first);
        }
    }

    /// Notes that all entries of the area from `from` to before `to` are cached (`to` none: to the end). Only one range
    /// is kept: one that does not touch it replaces it.
    pub fn learn_range(&mut self, from: Cookie, to: Option<Cookie>) {
        let (from, to) = (from.get(), to.map_or(END, Cookie::get));
        let (first, end) = self.known;
        self.known = match from {
            from if first <= from && from <= end => (first, end.max(to)),
            _ => (from, to),
        };
    }

    /// Notes that all entries of the area with the hash of this first cookie are cached.
    pub fn learn_hash(&mut self, first: Cookie) {
        if self.hashes.len() >= ABSENT_MAX {
            self.hashes.clear();
        }
        self.hashes.insert(first);
    }

    /// Own records up to `digested` are in the area now: their changes are treated like other entries of the area. Each
    /// takes a step; false if there are not enough for all.
    pub fn purge(&mut self, digested: Sequence, steps: &mut usize) -> bool {
        while let Some((sequence, cookie)) = self.own.front().copied()
            && sequence <= digested
        {
            if *steps == 0 {
                return false;
            }
            *steps -= 1;
            self.own.pop_front();
            match self.places.get_mut(&cookie) {
                Some(place) if place.sequence > digested => {}
                Some(place) if place.target.is_some() => place.sequence = Sequence::new(0),
                Some(_) => drop(self.places.remove(&cookie)),
                None => {}
            }
        }
        true
    }

    /// The entries from a cookie on, as far as all of them are known: cookie, name, target.
    pub fn entries(&self, from: Cookie) -> impl Iterator<Item = (Cookie, &[u8], Target)> {
        let (first, end) = self.known;
        let end = if from.get() < first { 0 } else { end };
        let known = self.places.range(from..).take_while(move |(cookie, _)| cookie.get() < end);
        known.filter_map(|(cookie, place)| place.target.map(|target| (*cookie, &*place.name, target)))
    }
}

/// The last cookie with the hash of this first cookie.
fn last_of_hash(first: Cookie) -> u64 {
    first.get() + (COOKIE_SLOTS - 1)
}

/// All slots of a hash are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn name(number: u8) -> Vec<u8> {
        format!("n{number}").into_bytes()
    }

    fn target(inode: u64) -> Target {
        Target { inode: InodeNumber::new(inode), file_type: FileType::Regular }
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// An own record creates or removes the name.
        Toggle(u8),
        /// The area digests all own records but the last so many.
        Digest(u64),
        Walk(u8),
        Batch {
            from: u8,
            count: usize,
        },
        SameHash(u8),
        /// Entries of the area are dropped.
        Drop,
        Forget,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..24u8).prop_map(Step::Toggle),
            2 => (0..8u64).prop_map(Step::Digest),
            4 => (0..24u8).prop_map(Step::Walk),
            2 => (0..24u8, 1..6usize).prop_map(|(from, count)| Step::Batch { from, count }),
            1 => (0..24u8).prop_map(Step::SameHash),
            1 => Just(Step::Drop),
            1 => Just(Step::Forget),
        ];
        prop::collection::vec(step, 1..200)
    }

    type Tree = BTreeMap<Cookie, (Vec<u8>, u64)>;

    fn lookup(tree: &Tree, name: Name<'_>) -> Option<(Cookie, u64)> {
        let mut named = tree.iter().filter(|(_, (bytes, _))| bytes == name.bytes());
        named.next().map(|(cookie, (_, inode))| (*cookie, *inode))
    }

    fn apply(tree: &mut Tree, record: &(u8, Option<u64>, Cookie)) {
        match record.1 {
            Some(inode) => tree.insert(record.2, (name(record.0), inode)),
            None => tree.remove(&record.2),
        };
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        #[test]
        fn what_is_known_is_true(steps in steps()) {
            let (mut area, mut truth) = (Tree::new(), Tree::new());
            let mut records: Vec<(u8, Option<u64>, Cookie)> = Vec::new();
            let mut digested = 0usize;
            let mut cache = Directory::unknown();
            for step in steps {
                match step {
                    Step::Toggle(number) => {
                        let bytes = name(number);
                        let name = Name::new(&bytes).unwrap();
                        let sequence = Sequence::new(records.len() as u64 + 1);
                        match cache.find(name) {
                            Found::Entry(cookie, _) => {
                                records.push((number, None, cookie));
                                cache.remove(cookie, name, sequence);
                            }
                            Found::Absent => {
                                let Some(cookie) = cache.free_cookie(name) else { continue };
                                let inode = 100 + sequence.get();
                                records.push((number, Some(inode), cookie.unwrap()));
                                cache.put(cookie.unwrap(), name, target(inode), sequence);
                            }
                            Found::Unknown => continue,
                        }
                        apply(&mut truth, records.last().unwrap());
                    }
                    Step::Digest(behind) => {
                        let to = records.len().saturating_sub(behind as usize).max(digested);
                        records[digested..to].iter().for_each(|record| apply(&mut area, record));
                        digested = to;
                        while !cache.purge(Sequence::new(digested as u64), &mut 2) {}
                    }
                    Step::Walk(number) => {
                        let bytes = name(number);
                        let name = Name::new(&bytes).unwrap();
                        // The engine also asks only for names that are not cached.
                        if cache.find(name) != Found::Unknown {
                            continue;
                        }
                        let digested = Sequence::new(digested as u64);
                        match lookup(&area, name) {
                            Some((cookie, inode)) => cache.learn(cookie, name, target(inode), digested),
                            None => cache.learn_absent(name, 0),
                        }
                    }
                    Step::Batch { from, count } => {
                        let bytes = name(from);
                        let on = cache.unknown_from(Cookie::START).filter(|_| from < 8);
                        let from = on.unwrap_or(Cookie::of_name(Name::new(&bytes).unwrap()));
                        let batch: Vec<_> = area.range(from..).take(count).collect();
                        let end = area.range(from..).count() <= count;
                        for (cookie, (bytes, inode)) in &batch {
                            let name = Name::new(bytes).unwrap();
                            cache.learn(**cookie, name, target(*inode), Sequence::new(digested as u64));
                        }
                        let to = batch.last().map_or(from, |(cookie, _)| Cookie::from_raw(cookie.get() + 1));
                        cache.learn_range(from, (!end).then_some(to));
                    }
                    Step::SameHash(number) => {
                        let bytes = name(number);
                        let first = Cookie::of_name(Name::new(&bytes).unwrap());
                        for (cookie, (bytes, inode)) in area.range(first..) {
                            if !cookie.same_hash(first) {
                                break;
                            }
                            let name = Name::new(bytes).unwrap();
                            cache.learn(*cookie, name, target(*inode), Sequence::new(digested as u64));
                        }
                        cache.learn_hash(first);
                    }
                    Step::Drop => cache.forget_digested(),
                    Step::Forget => {
                        records[digested..].iter().for_each(|record| apply(&mut area, record));
                        digested = records.len();
                        cache = Directory::unknown();
                    }
                }
                for number in 0..24u8 {
                    let bytes = name(number);
                    let name = Name::new(&bytes).unwrap();
                    match (cache.find(name), lookup(&truth, name)) {
                        (Found::Unknown, _) | (Found::Absent, None) => {}
                        (Found::Entry(cookie, found), Some(expected)) => {
                            prop_assert_eq!((cookie, found.inode.get()), expected);
                        }
                        (found, expected) => prop_assert!(false, "{found:?} where {expected:?} is"),
                    }
                }
                for from in truth.keys().copied().chain([Cookie::START]) {
                    let end = cache.unknown_from(from).map_or(END, Cookie::get);
                    let listed: Vec<_> = cache.entries(from).map(|(cookie, _, _)| cookie.get()).collect();
                    let expected: Vec<_> =
                        truth.range(from..).map(|entry| entry.0.get()).filter(|cookie| *cookie < end).collect();
                    prop_assert_eq!(listed, expected);
                }
            }
        }
    }

    #[test]
    fn names_with_one_hash_are_told_apart() {
        let mut cache = Directory::empty();
        let wanted = Name::new(b"wanted").unwrap();
        let first = Cookie::of_name(wanted);
        // Gives these two names the hash of the wanted name.
        for (slot, other) in [&b"other"[..], b"third"].into_iter().enumerate() {
            let cookie = Cookie::from_raw(first.get() + slot as u64);
            cache.put(cookie, Name::new(other).unwrap(), target(slot as u64 + 2), Sequence::new(1));
        }
        assert_eq!(cache.find(wanted), Found::Absent);
        assert_eq!(cache.free_cookie(wanted), Some(Ok(Cookie::from_raw(first.get() + 2))));
        cache.remove(first, Name::new(b"other").unwrap(), Sequence::new(2));
        assert_eq!(cache.free_cookie(wanted), Some(Ok(first)), "a slot given up is used again");
    }

    #[test]
    fn a_name_that_was_removed_can_come_back() {
        let mut cache = Directory::unknown();
        let wanted = Name::new(b"wanted").unwrap();
        let cookie = Cookie::of_name(wanted);
        cache.learn(cookie, wanted, target(5), Sequence::new(0));
        cache.remove(cookie, wanted, Sequence::new(1));
        assert_eq!((cache.find(wanted), cache.free_cookie(wanted)), (Found::Absent, None));
        // The area still has the entry; all other entries with its hash are known from now on.
        cache.learn(cookie, wanted, target(5), Sequence::new(0));
        cache.learn_hash(cookie);
        assert_eq!((cache.find(wanted), cache.free_cookie(wanted)), (Found::Absent, Some(Ok(cookie))));
    }

    #[test]
    fn entries_with_the_hash_of_an_absent_name_are_read_first() {
        let mut cache = Directory::unknown();
        let wanted = Name::new(b"wanted").unwrap();
        cache.learn_absent(wanted, 1);
        assert_eq!(cache.find(wanted), Found::Absent);
        assert_eq!(cache.free_cookie(wanted), None);
        cache.learn_hash(Cookie::of_name(wanted));
        assert_eq!(cache.free_cookie(wanted), Some(Ok(Cookie::of_name(wanted))));
    }

    #[test]
    fn behind_many_removals_no_leases_are_requested_ahead() {
        let many = LOOKED_AT_MAX as u64 + 10;
        let cookie = |index: u64| Cookie::from_raw(Cookie::START.get() + 16 * (index + 1));
        for (removed, expected) in [(100, AHEAD_GROWTH), (many, 0)] {
            let mut cache = Directory::empty();
            for index in 0..=removed + 2 * many {
                let name = index.to_string();
                cache.put(
                    cookie(index),
                    Name::new(name.as_bytes()).unwrap(),
                    target(index + 2),
                    Sequence::new(1),
                );
            }
            assert_eq!(cache.ahead(cookie(0), u64::MAX, Order::Directory), AHEAD_GROWTH);
            for index in 0..removed {
                let name = index.to_string();
                cache.remove(cookie(index), Name::new(name.as_bytes()).unwrap(), Sequence::new(2));
            }
            cache.ahead = 0;
            assert_eq!(cache.ahead(cookie(removed), u64::MAX, Order::Directory), expected, "{removed}");
        }
    }

    #[test]
    fn a_directory_is_read_whole_when_that_is_less_work() {
        let mut small = Directory::unknown();
        assert_eq!(small.read_whole(ENTRIES_A_CALL, true), Some(Cookie::START));
        let mut larger = Directory::unknown();
        assert_eq!(larger.read_whole(3 * ENTRIES_A_CALL, true), None);
        assert_eq!(larger.read_whole(3 * ENTRIES_A_CALL, true), None);
        assert_eq!(larger.read_whole(3 * ENTRIES_A_CALL, true), Some(Cookie::START));
        larger.learn_range(Cookie::START, Some(Cookie::from_raw(1 << 20)));
        assert_eq!(
            larger.read_whole(3 * ENTRIES_A_CALL, true),
            Some(Cookie::from_raw(1 << 20)),
            "on from there"
        );
        let mut looked_up = Directory::unknown();
        let read: Vec<_> = (0..3).map(|_| looked_up.read_whole(ENTRIES_A_CALL, false)).collect();
        assert_eq!(read, [None, None, Some(Cookie::START)], "a few names are looked up by themselves");
        let mut huge = Directory::unknown();
        assert!((0..2 * WHOLE_MAX / ENTRIES_A_CALL).all(|_| huge.read_whole(WHOLE_MAX + 1, true).is_none()));
    }
}
