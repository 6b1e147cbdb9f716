//! The data that the kernel caches of each inode, and the leases for it. A *unit* is an inode with its pages, its
//! attributes and, for a directory, its names (`docs/mount.md` has the protocol and its schedules).
//!
//! Guarantees: the kernel gets a cacheable answer only if the unit's lease was held from before the engine was asked
//! until the answer was sent. While the unit is recalled, requests on it are still served, but with answers that are
//! not cached; pages, which the kernel caches in any case, are dropped again. A lease is given back only after the
//! kernel was told to drop all data and no page arrived since. If a file is open for writing, its unit is held for
//! writing, or not held.
//!
//! Lock order: the table's lock, then that of the nodes; neither is held during a call of the engine or the kernel. A
//! request waits for a lease only in [`Units::hold`] and [`Units::enter_pages`], while it holds no other unit.

use crate::guard::KernelHas;
use crate::nodes::Nodes;
use crate::pages::{PAGE_BYTES, PageRange, PageSet};
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Time, Waited, Word};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use vfs::{CacheLeases, Engine, LeaseMode};

/// How long the kernel may cache a cacheable answer.
pub(crate) const VALID_SECONDS: u64 = 3600;

/// How long a recall waits for the second part of an append that the kernel may have split.
const REST_OF_APPEND_MS: u32 = 20;

/// Number of units without a lease that `order` may contain.
const ORDER_SPARE: usize = 1024;

/// The state of a unit's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No lease is held, and the kernel has no valid data.
    Free,
    /// A lease is held.
    Held(LeaseMode),
    /// The lease is held, and the kernel is being told to drop all data.
    Recalled(LeaseMode),
    /// The kernel has no data, and the lease is being given back.
    Closed,
}

#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) phase: Phase,
    /// Number of the hold; grows each time a lease is held after none was.
    pub(crate) hold: u64,
    /// A thread is getting a lease.
    pub(crate) getting: bool,
    /// Number of threads that are giving back a lease that the engine had or has.
    pub(crate) giving: u32,
    /// A lease was given back since a thread began to get one.
    pub(crate) disturbed: bool,
    /// Open files that may write.
    pub(crate) writers: u32,
    /// Requests in progress that put pages into the kernel.
    pub(crate) serving: u32,
    /// Cacheable answers that are being sent.
    pub(crate) telling: u32,
    /// A page arrived since the pass began.
    pub(crate) filled: bool,
    /// The kernel may have pages.
    pub(crate) has_pages: bool,
    /// The pages that were read since the last pass began; none if a write that began since then was served.
    pub(crate) read_since_pass: Option<PageSet>,
    /// The time until which the second part of an append may arrive.
    pub(crate) append_until: Option<Time>,
    /// The epoch of the last name that the kernel got.
    pub(crate) names: Option<u64>,
    /// The position in the guard's list.
    pub(crate) place: Option<u32>,
}

impl Default for Unit {
    fn default() -> Self {
        Self {
            phase: Phase::Free,
            hold: 0,
            getting: false,
            giving: 0,
            disturbed: false,
            writers: 0,
            serving: 0,
            telling: 0,
            filled: false,
            has_pages: false,
            read_since_pass: None,
            append_until: None,
            names: None,
            place: None,
        }
    }
}

impl Unit {
    fn is_idle(&self) -> bool {
        let quiet = !self.getting && self.giving == 0 && self.serving == 0 && self.telling == 0;
        self.phase == Phase::Free && self.writers == 0 && quiet
    }
}

#[derive(Default)]
pub(crate) struct Table {
    pub(crate) units: BTreeMap<InodeNumber, Unit>,
    /// Held units, the oldest first.
    pub(crate) order: VecDeque<InodeNumber>,
    pub(crate) held: usize,
    next_hold: u64,
    /// Number of times that all names were invalidated.
    pub(crate) epoch: u64,
    /// Number of pages that were written back without a lease.
    strays: u64,
}

impl Table {
    /// Keeps only held units in `order`, each once.
    fn tidy_order(&mut self) {
        let (mut order, mut seen) = (std::mem::take(&mut self.order), BTreeSet::new());
        let held = |node: &InodeNumber| {
            self.units.get(node).is_some_and(|unit| unit.phase != Phase::Free) && seen.insert(*node)
        };
        order.retain(held);
        self.order = order;
    }

    pub(crate) fn drop_if_idle(&mut self, node: InodeNumber) {
        if self.units.get(&node).is_some_and(Unit::is_idle) {
            self.units.remove(&node);
        }
    }
}

/// All units of a mount.
pub(crate) struct Units {
    pub(crate) host: Arc<dyn Host>,
    engine: Arc<dyn Engine>,
    pub(crate) table: Lock<Table>,
    /// Grows when a condition that threads wait for may have changed.
    changed: Word,
    /// Number of threads that wait for a change.
    pub(crate) waiting: Word,
    /// 1 while units must be dropped because too many are held; 2 at the end.
    crowded: Word,
    /// 1 after the end of the connection: the kernel creates no more inodes.
    over: Word,
    /// Held while names are invalidated.
    pub(crate) raising: Lock<()>,
    /// The list for the mount's guard, if there is one.
    pub(crate) kernel_has: Option<Arc<KernelHas>>,
    pub(crate) held_max: usize,
    /// See [`Self::append_ends`].
    pub(crate) rest_of_append_ms: Word,
}

/// Proves that a unit's lease was held, and names the hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    node: InodeNumber,
    hold: u64,
}

/// The effect of a request on a unit until its answer was sent.
pub(crate) struct Stay {
    units: Arc<Units>,
    node: InodeNumber,
    pages: bool,
}

impl Drop for Stay {
    fn drop(&mut self) {
        {
            let mut table = self.units.table.lock();
            let Some(unit) = table.units.get_mut(&self.node) else { return };
            if self.pages {
                unit.serving -= 1;
                unit.filled = true;
            } else {
                unit.telling -= 1;
            }
            table.drop_if_idle(self.node);
        }
        self.units.change();
    }
}

impl Units {
    pub(crate) fn new(
        host: Arc<dyn Host>,
        engine: Arc<dyn Engine>,
        kernel_has: Option<Arc<KernelHas>>,
    ) -> Self {
        let held_max = engine.cache_leases().map_or(0, CacheLeases::held_max);
        Self {
            table: Lock::new(host.clone(), Table::default()),
            raising: Lock::new(host.clone(), ()),
            changed: Word::new(0),
            waiting: Word::new(0),
            crowded: Word::new(0),
            over: Word::new(0),
            rest_of_append_ms: Word::new(REST_OF_APPEND_MS),
            held_max,
            kernel_has,
            host,
            engine,
        }
    }

    pub(crate) fn leases(&self) -> &dyn CacheLeases {
        self.engine.cache_leases().expect("units are for an engine that has leases to give")
    }

    pub(crate) fn change(&self) {
        // SeqCst: pairs with `sleep`. A waiting thread that is not seen here sees that the word has changed. The word
        // changes with each request, so a system call is made only if a thread has to be woken.
        self.changed.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.host.wake(&self.changed, ipc::WAKE_ALL);
        }
    }

    /// The number of changes, for [`Self::sleep`]. Read before the table is checked.
    pub(crate) fn seen(&self) -> u32 {
        // Acquire: pairs with the addition in `change`.
        self.changed.load(Ordering::Acquire)
    }

    /// Sleeps until something changes.
    pub(crate) fn sleep(&self, seen: u32, until: Option<ipc::Time>) {
        // SeqCst: pairs with `change`.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.host.wait(&self.changed, seen, until);
        self.waiting.fetch_add(u32::MAX, Ordering::Relaxed);
    }

    /// Repeats a check under the lock until it has a result.
    pub(crate) fn wait<T>(&self, mut look: impl FnMut(&mut Table) -> Option<T>) -> T {
        loop {
            let seen = self.seen();
            if let Some(found) = look(&mut self.table.lock()) {
                return found;
            }
            self.sleep(seen, None);
        }
    }

    /// Makes sure that the unit's lease is held; returns the hold for [`Self::tell`]. None while the unit is recalled;
    /// the answer is not cacheable then. Waits for the lease.
    ///
    /// # Errors
    /// Those of the engine.
    pub(crate) fn hold(&self, node: InodeNumber, mode: LeaseMode) -> Result<Option<Stamp>, vfs::Error> {
        loop {
            enum Found {
                Is(Option<Stamp>),
                Get(LeaseMode),
            }
            let found = {
                let mut table = self.table.lock();
                let unit = table.units.entry(node).or_default();
                let wanted = if unit.writers > 0 { LeaseMode::Write } else { mode };
                match unit.phase {
                    Phase::Held(held) if held >= wanted => Found::Is(Some(Stamp { node, hold: unit.hold })),
                    Phase::Recalled(_) | Phase::Closed => Found::Is(None),
                    Phase::Held(_) | Phase::Free if unit.getting => Found::Is(None),
                    Phase::Held(_) | Phase::Free => {
                        unit.getting = true;
                        Found::Get(wanted)
                    }
                }
            };
            match found {
                Found::Is(stamp) => return Ok(stamp),
                Found::Get(mode) => self.get(node, mode, || self.leases().hold(node, mode))?,
            }
        }
    }

    /// The same without waiting, only if the engine already has a lease.
    pub(crate) fn hold_at_once(&self, node: InodeNumber) -> Option<Stamp> {
        let mode = {
            let mut table = self.table.lock();
            let unit = table.units.entry(node).or_default();
            let wanted = if unit.writers > 0 { LeaseMode::Write } else { LeaseMode::Read };
            match unit.phase {
                Phase::Held(_) => return Some(Stamp { node, hold: unit.hold }),
                Phase::Free if !unit.getting && unit.giving == 0 => {}
                _ => return None,
            }
            unit.getting = true;
            wanted
        };
        let at_once =
            || if self.leases().hold_at_once(node, mode) { Ok(()) } else { Err(vfs::Error::WouldBlock) };
        self.get(node, mode, at_once).ok()?;
        let table = self.table.lock();
        let unit = table.units.get(&node)?;
        matches!(unit.phase, Phase::Held(_)).then_some(Stamp { node, hold: unit.hold })
    }

    /// Gets a lease for a unit for which this thread has set `getting`. If the engine gave a lease back meanwhile that
    /// it had before the unit was held, the attempt is repeated.
    fn get(
        &self,
        node: InodeNumber,
        mode: LeaseMode,
        hold: impl Fn() -> Result<(), vfs::Error>,
    ) -> Result<(), vfs::Error> {
        loop {
            let is_free = self.wait(|table| {
                let unit = table.units.get_mut(&node)?;
                unit.disturbed = false;
                (unit.giving == 0).then_some(unit.phase == Phase::Free)
            });
            let held = hold();
            let place = if is_free && held.is_ok() { self.note(node) } else { None };
            let mut guard = self.table.lock();
            let table = &mut *guard;
            let unit = table.units.get_mut(&node).expect("a unit stays while somebody gets its lease");
            let is_good = held.is_ok() && !unit.disturbed && unit.giving == 0;
            if held.is_ok() && !is_good {
                drop(guard);
                self.clear(place);
                continue;
            }
            unit.getting = false;
            // A recall that began meanwhile continues, under the lease that is held now.
            let begins = is_good && unit.phase == Phase::Free;
            if is_good && matches!(unit.phase, Phase::Free | Phase::Held(_)) {
                unit.phase = Phase::Held(mode);
            }
            if begins {
                table.next_hold += 1;
                unit.hold = table.next_hold;
                unit.place = place;
                table.held += 1;
                table.order.push_back(node);
                if table.order.len() > 2 * table.held + ORDER_SPARE {
                    table.tidy_order();
                }
            }
            let is_crowded = table.held > self.held_max;
            table.drop_if_idle(node);
            drop(guard);
            if !begins {
                self.clear(place);
            }
            self.change();
            if begins && is_crowded {
                // Does not overwrite the value that ends the thread.
                let _ = self.crowded.compare_exchange(0, 1, Ordering::Release, Ordering::Relaxed);
                self.host.wake(&self.crowded, ipc::WAKE_ALL);
            }
            return held;
        }
    }

    fn note(&self, node: InodeNumber) -> Option<u32> {
        self.kernel_has.as_ref().and_then(|noted| noted.note(node))
    }

    /// Removes an entry from the guard's list.
    pub(crate) fn clear(&self, place: Option<u32>) {
        if let (Some(noted), Some(place)) = (&self.kernel_has, place) {
            noted.clear(place);
        }
    }

    /// Called before pages are read into the kernel, as [`Self::enter_pages`].
    ///
    /// # Errors
    /// Those of the engine.
    pub(crate) fn enter_read(
        self: &Arc<Self>,
        node: InodeNumber,
        range: PageRange,
    ) -> Result<Stay, vfs::Error> {
        let stay = self.enter_pages(node, LeaseMode::Read)?;
        if let Some(unit) = self.table.lock().units.get_mut(&node)
            && let Some(read) = &mut unit.read_since_pass
        {
            read.add(range);
        }
        Ok(stay)
    }

    /// A program of the mount truncates a file: the kernel drops the pages after its new end.
    pub(crate) fn cut(&self, node: InodeNumber, end: u64) {
        if let Some(unit) = self.table.lock().units.get_mut(&node)
            && let Some(read) = &mut unit.read_since_pass
        {
            read.cut(end);
        }
    }

    /// Called after a write of bytes that the kernel already has in its pages. Returns the pages that may have been
    /// dropped meanwhile, and read again with the old contents. The kernel makes one write to an inode at a time, so
    /// only the first write after a pass can have begun before it.
    pub(crate) fn read_before_write(&self, node: InodeNumber) -> Option<PageSet> {
        let mut table = self.table.lock();
        let unit = table.units.get_mut(&node)?;
        let is_passing = matches!(unit.phase, Phase::Recalled(_));
        if is_passing { unit.read_since_pass.clone() } else { unit.read_since_pass.take() }
    }

    /// Called before a request puts pages into the kernel: the lease is held from now on until the answer was sent.
    /// Waits for the lease; while the unit is recalled, the present lease is sufficient.
    ///
    /// # Errors
    /// Those of the engine.
    pub(crate) fn enter_pages(
        self: &Arc<Self>,
        node: InodeNumber,
        mode: LeaseMode,
    ) -> Result<Stay, vfs::Error> {
        loop {
            let get = self.wait(|table| {
                let unit = table.units.entry(node).or_default();
                let wanted = if unit.writers > 0 { LeaseMode::Write } else { mode };
                match unit.phase {
                    Phase::Held(held) | Phase::Recalled(held) if held >= wanted => {
                        (unit.serving, unit.has_pages) = (unit.serving + 1, true);
                        if mode == LeaseMode::Write {
                            unit.append_until = None;
                        }
                        Some(None)
                    }
                    Phase::Held(_) | Phase::Free if !unit.getting => {
                        unit.getting = true;
                        Some(Some(wanted))
                    }
                    _ => None,
                }
            });
            match get {
                None => return Ok(Stay { units: self.clone(), node, pages: true }),
                Some(mode) => self.get(node, mode, || self.leases().hold(node, mode))?,
            }
        }
    }

    /// Called after a write at the end of the file, which the kernel expects at `kernel_end`. The kernel sends an
    /// append that crosses the end of a page which it does not have in two messages, and nothing may be appended
    /// between them. So a recall waits for the second one, but not for long, because there may be none.
    pub(crate) fn append_ends(&self, node: InodeNumber, kernel_end: u64) {
        if kernel_end.is_multiple_of(PAGE_BYTES)
            && let Some(unit) = self.table.lock().units.get_mut(&node)
        {
            let patience = Duration::from_millis(self.rest_of_append_ms.load(Ordering::Relaxed).into());
            unit.append_until = Some(self.host.now().after(patience));
        }
    }

    /// Called when a page of a mapping is written back, for which the unit must be held for writing.
    pub(crate) fn note_write_back(&self, node: InodeNumber) {
        let mut table = self.table.lock();
        let held = table.units.get(&node).map(|unit| unit.phase);
        if !matches!(held, Some(Phase::Held(LeaseMode::Write) | Phase::Recalled(LeaseMode::Write))) {
            table.strays += 1;
        }
    }

    /// Number of pages that were written back without a lease; it should be 0 unless a session was lost.
    pub(crate) fn strays(&self) -> u64 {
        self.table.lock().strays
    }

    /// Whether the kernel may cache attributes that were read under this hold; if so, the unit is held until the answer
    /// was sent.
    pub(crate) fn tell_attributes(self: &Arc<Self>, stamp: Option<Stamp>) -> Option<Stay> {
        self.tell(stamp, false)
    }

    /// The same for a name in a directory.
    pub(crate) fn tell_name(self: &Arc<Self>, stamp: Option<Stamp>) -> Option<Stay> {
        self.tell(stamp, true)
    }

    fn tell(self: &Arc<Self>, stamp: Option<Stamp>, name: bool) -> Option<Stay> {
        let Stamp { node, hold } = stamp?;
        let mut table = self.table.lock();
        let epoch = table.epoch;
        let unit = table.units.get_mut(&node)?;
        if unit.hold != hold || !matches!(unit.phase, Phase::Held(_)) {
            return None;
        }
        unit.telling += 1;
        if name {
            unit.names = Some(epoch);
        }
        Some(Stay { units: self.clone(), node, pages: false })
    }

    /// Called before a file is opened for writing: from now on its unit is held for writing, or not held.
    ///
    /// # Errors
    /// Those of the engine; then the file is not open.
    pub(crate) fn open_writer(&self, node: InodeNumber) -> Result<(), vfs::Error> {
        self.table.lock().units.entry(node).or_default().writers += 1;
        loop {
            self.hold(node, LeaseMode::Write).inspect_err(|_| self.close_writer(node))?;
            // The unit may still be held for reading, or a thread that began before there was a writer may be getting a
            // read lease.
            let is_held_for_reading = self.wait(|table| match table.units.get(&node) {
                Some(unit) if unit.getting => None,
                Some(Unit { phase: Phase::Recalled(LeaseMode::Read), .. }) => None,
                unit => Some(unit.is_some_and(|unit| unit.phase == Phase::Held(LeaseMode::Read))),
            });
            // If it is not held, the request for the next page gets the lease.
            if !is_held_for_reading {
                return Ok(());
            }
        }
    }

    /// Called after a writer was closed.
    pub(crate) fn close_writer(&self, node: InodeNumber) {
        let mut table = self.table.lock();
        if let Some(unit) = table.units.get_mut(&node) {
            unit.writers = unit.writers.saturating_sub(1);
        }
        table.drop_if_idle(node);
    }

    /// Number of open files that may write.
    pub(crate) fn writers(&self, node: InodeNumber) -> u32 {
        self.table.lock().units.get(&node).map_or(0, |unit| unit.writers)
    }

    /// The kernel has forgotten a node, and has no data of it unless it has looked the node up again.
    pub(crate) fn forget(&self, nodes: &Nodes, node: InodeNumber) {
        {
            let mut table = self.table.lock();
            let Some(unit) = table.units.get_mut(&node) else { return };
            let Phase::Held(_) = unit.phase else { return };
            if unit.telling > 0 || unit.serving > 0 || unit.writers > 0 || unit.getting || nodes.knows(node) {
                return;
            }
            // A thread that needs the lease again gets it after it was given back.
            unit.phase = Phase::Closed;
            (unit.giving, unit.disturbed) = (unit.giving + 1, true);
        }
        self.leases().leave(node);
        self.end_giving(node, true);
    }

    /// Whether the unit's lease is held, and no other session wants it.
    pub(crate) fn is_held(&self, node: InodeNumber) -> bool {
        let table = self.table.lock();
        table.units.get(&node).is_some_and(|unit| matches!(unit.phase, Phase::Held(_)))
    }

    /// Whether the kernel may have pages of a unit; a recall then has to wait for requests.
    pub(crate) fn has_pages(&self, node: InodeNumber) -> bool {
        self.table.lock().units.get(&node).is_some_and(|unit| unit.has_pages)
    }

    /// Waits until too many units are held; false at the end.
    pub(crate) fn wait_crowded(&self) -> bool {
        loop {
            // Acquire: pairs with the Release in `get` and `end`.
            match self.crowded.load(Ordering::Acquire) {
                0 => {}
                1 => {
                    let _ = self.crowded.compare_exchange(1, 0, Ordering::Acquire, Ordering::Relaxed);
                    return true;
                }
                _ => return false,
            }
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.host.wait(&self.crowded, 0, None);
        }
    }

    /// Notes the end of the connection.
    pub(crate) fn end_connection(&self) {
        self.over.store(1, Ordering::Release);
    }

    /// Whether the connection has ended.
    pub(crate) fn is_over(&self) -> bool {
        // Acquire: pairs with the Release in `end_connection`.
        self.over.load(Ordering::Acquire) != 0
    }

    /// Ends the thread in [`Self::wait_crowded`].
    pub(crate) fn end(&self) {
        self.crowded.store(2, Ordering::Release);
        self.host.wake(&self.crowded, ipc::WAKE_ALL);
    }
}
