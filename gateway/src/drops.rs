//! Recalls of units: the kernel is told to drop its data, pass by pass, while the gateway still serves requests on the
//! unit. Called only by the threads of [`crate::recalls`].

use crate::guard::Guarded;
use crate::nodes::Nodes;
use crate::notices::Notices;
use crate::pages::PageSet;
use crate::units::{Phase, Units};
use format::InodeNumber;
use ipc::Word;
use std::cell::RefCell;
use std::time::Duration;

/// Pause before the notification is repeated for an inode that the kernel has not created yet, or is forgetting.
const PAUSE: Duration = Duration::from_micros(100);
/// Limit of repetitions: about as long as SharedFS waits for an answer.
const TRIES_MAX: u32 = 50_000;
/// How long a pass waits for requests that are being served before it is repeated.
const SERVED: Duration = Duration::from_millis(1);
/// Units whose leases are given back together when too many are held.
const EVICTED_AT_ONCE: usize = 64;

impl Units {
    /// Another session requests the inodes: makes the kernel drop their data, and gives the leases back in one call.
    pub(crate) fn recall(&self, nodes: &Nodes, notices: &Notices, recalled: &[InodeNumber]) {
        // As in `evict`.
        let closed = RefCell::new(Vec::new());
        let give_back = || self.give_back(&closed.take());
        for node in recalled {
            if self.drop_all(nodes, notices, *node, give_back) {
                closed.borrow_mut().push(*node);
            } else {
                give_back();
                self.recall_again(nodes, notices, *node);
            }
        }
        give_back();
    }

    /// The same for one that is not held, or is being dropped by another thread.
    fn recall_again(&self, nodes: &Nodes, notices: &Notices, node: InodeNumber) {
        while !self.drop_all(nodes, notices, node, || ()) {
            // Another thread may be dropping the unit, but the recall may be about a later lease than the one that this
            // thread gives back.
            let is_free = self.wait(|table| {
                let unit = table.units.entry(node).or_default();
                match unit.phase {
                    Phase::Free => {
                        (unit.giving, unit.disturbed) = (unit.giving + 1, true);
                        Some(true)
                    }
                    Phase::Held(_) => Some(false),
                    Phase::Recalled(_) | Phase::Closed => None,
                }
            });
            if is_free {
                // The engine has the lease, and the kernel no data.
                self.leases().give_back(&[node]);
                return self.end_giving(node, false);
            }
        }
        self.give_back(&[node]);
    }

    /// Reduces the number of held units, the oldest first; files that are open for writing stay. Gives several leases
    /// back in one call. Returns the inodes.
    pub(crate) fn evict(&self, nodes: &Nodes, notices: &Notices) -> Vec<InodeNumber> {
        let victims: Vec<InodeNumber> = {
            let mut table = self.table.lock();
            let count = (self.held_max / 8).max(1);
            let mut victims = Vec::new();
            for _ in 0..table.order.len() {
                if victims.len() >= count || table.held <= self.held_max / 8 * 7 + victims.len() {
                    break;
                }
                let Some(node) = table.order.pop_front() else { break };
                let unit = table.units.get(&node).map(|unit| (unit.phase, unit.writers));
                match unit {
                    Some((Phase::Held(_), 0)) if node != InodeNumber::ROOT => victims.push(node),
                    Some((Phase::Held(_), _)) => table.order.push_back(node),
                    _ => {}
                }
            }
            victims
        };
        // Requests wait for a closed unit. So closed units are given back before this thread waits for requests on
        // another unit, because these need serving threads.
        let closed = RefCell::new(Vec::new());
        let give_back = || self.give_back(&closed.take());
        for node in &victims {
            if self.drop_all(nodes, notices, *node, give_back) {
                closed.borrow_mut().push(*node);
            }
            if closed.borrow().len() >= EVICTED_AT_ONCE {
                give_back();
            }
        }
        give_back();
        victims
    }

    /// Handles the loss of all leases: makes the kernel drop all of its data, and returns when that is done.
    pub(crate) fn lose_all(&self, nodes: &Nodes, notices: &Notices, guarded: Option<&Guarded>) {
        let drops = |any| guarded.into_iter().for_each(|guarded| guarded.drops(any));
        let all: Vec<(InodeNumber, u64)> = {
            let table = self.table.lock();
            let held = table.units.iter().filter(|(_, unit)| unit.phase != Phase::Free);
            held.map(|(node, unit)| (*node, unit.hold)).collect()
        };
        for (node, _) in &all {
            drops(true);
            if self.drop_all(nodes, notices, *node, || ()) {
                self.give_back(&[*node]);
            }
        }
        // Other threads may be dropping some of them.
        self.wait(|table| {
            let is_left = |(node, hold): &(InodeNumber, u64)| {
                let unit = table.units.get(node).filter(|unit| unit.hold == *hold);
                unit.is_some_and(|unit| unit.phase != Phase::Free)
            };
            (!all.iter().any(is_left)).then_some(())
        });
        drops(false);
    }

    /// Makes the kernel drop its data of a held unit, pass by pass, until no page arrived during a pass. False if the
    /// unit is not held. Calls `before_wait` before it waits for requests on the unit for longer than a moment.
    fn drop_all(&self, nodes: &Nodes, notices: &Notices, node: InodeNumber, before_wait: impl Fn()) -> bool {
        let names = {
            let mut table = self.table.lock();
            let Some(unit) = table.units.get_mut(&node) else { return false };
            let Phase::Held(mode) = unit.phase else { return false };
            unit.phase = Phase::Recalled(mode);
            if unit.telling > 0 || unit.serving > 0 {
                drop(table);
                before_wait();
                table = self.table.lock();
            }
            table.units.get(&node).and_then(|unit| unit.names)
        };
        // Cacheable answers that are being sent reach the kernel before the notification.
        self.wait(|table| table.units.get(&node).is_none_or(|unit| unit.telling == 0).then_some(()));
        loop {
            let has_pages = self.begin_pass(node);
            if has_pages {
                before_wait();
            }
            self.drop_once(nodes, node, || match has_pages {
                true => notices.drop_pages(node.get(), 0, 0),
                false => notices.drop_attributes(node.get()),
            });
            if self.end_pass(node) {
                break;
            }
            before_wait();
        }
        self.drop_names(notices, names);
        true
    }

    /// Whether the kernel may have pages. Requests may have added some since the recall began.
    fn begin_pass(&self, node: InodeNumber) -> bool {
        let mut table = self.table.lock();
        let Some(unit) = table.units.get_mut(&node) else { return false };
        unit.filled = false;
        unit.read_since_pass = Some(PageSet::default());
        unit.has_pages
    }

    /// Closes the unit if no page arrived during the pass; false otherwise.
    fn end_pass(&self, node: InodeNumber) -> bool {
        loop {
            let (seen, now) = (self.seen(), self.host.now());
            let rest = {
                let mut table = self.table.lock();
                let Some(unit) = table.units.get_mut(&node) else { return true };
                if unit.filled || unit.serving > 0 {
                    break;
                }
                let rest = unit.append_until.filter(|until| now < *until);
                if rest.is_none() {
                    unit.phase = Phase::Closed;
                    return true;
                }
                rest
            };
            self.sleep(seen, rest);
        }
        let seen = self.seen();
        if self.table.lock().units.get(&node).is_some_and(|unit| unit.serving > 0) {
            self.sleep(seen, Some(self.host.now().after(SERVED)));
        }
        false
    }

    /// Invalidates the names of the unit, with all other names, unless that was done since the kernel got them.
    fn drop_names(&self, notices: &Notices, names: Option<u64>) {
        let Some(told) = names else { return };
        let _raising = self.raising.lock();
        {
            let mut table = self.table.lock();
            if told < table.epoch {
                return;
            }
            // Before the notification: a name that is sent in between counts as newer than it is.
            table.epoch += 1;
        }
        // A kernel that has ended the connection has no names.
        let _ = notices.drop_names();
    }

    /// Gives the leases of closed units back.
    fn give_back(&self, closed: &[InodeNumber]) {
        if closed.is_empty() {
            return;
        }
        for node in closed {
            if let Some(unit) = self.table.lock().units.get_mut(node) {
                (unit.giving, unit.disturbed) = (unit.giving + 1, true);
            }
        }
        self.leases().give_back(closed);
        closed.iter().for_each(|node| self.end_giving(*node, true));
    }

    /// The lease has been given back.
    pub(crate) fn end_giving(&self, node: InodeNumber, was_closed: bool) {
        let place = {
            let mut guard = self.table.lock();
            let table = &mut *guard;
            let mut place = None;
            if let Some(unit) = table.units.get_mut(&node) {
                (unit.giving, unit.disturbed) = (unit.giving - 1, true);
                if was_closed {
                    unit.phase = Phase::Free;
                    place = unit.place.take();
                    (unit.has_pages, unit.names) = (unit.serving > 0, None);
                    table.held -= 1;
                }
            }
            table.drop_if_idle(node);
            place
        };
        self.clear(place);
        self.change();
    }

    /// The connection is over, so no request can use it, but mappings of programs still exist. Makes the kernel drop
    /// their pages before the leases are given back.
    pub(crate) fn drop_at_end(&self, notices: &Notices) {
        let held: Vec<InodeNumber> = {
            let table = self.table.lock();
            let held = table.units.iter().filter(|(_, unit)| unit.phase != Phase::Free);
            held.map(|(node, _)| *node).collect()
        };
        // A page that was dirty in the first round is clean in the second one, whether or not its write succeeded.
        for node in held.iter().chain(&held) {
            // If the mount is no longer in use, the kernel has no pages.
            let _ = notices.drop_pages(node.get(), 0, 0);
        }
    }

    /// Sends a notification. If the kernel does not have an inode that it was told of, it is about to create or to
    /// forget the inode; after the end of the connection it does neither.
    fn drop_once(&self, nodes: &Nodes, node: InodeNumber, drop: impl Fn() -> Result<(), i32>) {
        for _ in 0..TRIES_MAX {
            match drop() {
                Err(libc::ENOENT) if nodes.knows(node) && !self.is_over() => {
                    self.host.wait(&Word::new(0), 0, Some(self.host.now().after(PAUSE)));
                }
                _ => return,
            }
        }
    }
}
