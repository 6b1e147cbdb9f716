//! The copies that count: every fsync waits for them, and no data that one of them lacks is digested or overwritten
//! (`docs/replication.md`, C2, C5 and C8).

use crate::copies::Copy;
use area::LedgerPlace;
use format::{Incarnation, LogUid, NodeId, Sequence};
use ipc::Digested;
use ipc::host::Host;
use ipc::lock::Lock;
use ipc::sync::{LongWord, Ordering, Word};
use std::sync::Arc;

/// All copies that count.
pub(crate) struct Copies {
    list: Lock<Vec<Arc<Copy>>>,
    /// Their number.
    count: Word,
    /// 1 while there are fewer than required.
    short: Word,
    /// The version of the subtree in whose view this node leads.
    version: LongWord,
}

impl Copies {
    /// The copies.
    pub fn new(host: &Arc<dyn Host>, copies: Vec<Arc<Copy>>, version: u64) -> Self {
        let count = Word::new(u32::try_from(copies.len()).expect("a chain is short"));
        let (short, version) = (Word::new(0), LongWord::new(version));
        Self { list: Lock::new(host.clone(), copies), count, short, version }
    }

    /// The version of the subtree in whose view this node leads.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The node also leads in a later view.
    pub fn set_version(&self, version: u64) {
        // Release: pairs with the Acquire above.
        self.version.store(version, Ordering::Release);
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        // Acquire: pairs with the Release of `add`.
        self.count.load(Ordering::Acquire) != 0
    }

    /// Whether an fsync has to ask for copies.
    pub fn are_asked(&self) -> bool {
        self.any() || self.is_short()
    }

    /// Whether there are fewer than required.
    pub fn is_short(&self) -> bool {
        // Acquire: pairs with the Release of `set_short`, which comes before that of `remove`.
        self.short.load(Ordering::Acquire) != 0
    }

    /// Notes whether there are fewer than required; false if that was noted already.
    pub fn set_short(&self, short: bool) -> bool {
        let (new, old) = (u32::from(short), u32::from(!short));
        // Release: pairs with the Acquire of `is_short`.
        self.short.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// All copies.
    pub fn all(&self) -> Vec<Arc<Copy>> {
        if self.any() { self.list.lock().clone() } else { Vec::new() }
    }

    /// The copy on a node.
    pub fn of(&self, node: NodeId) -> Option<Arc<Copy>> {
        self.list.lock().iter().find(|copy| copy.node == node).cloned()
    }

    /// Adds a copy; it counts from now on.
    pub fn add(&self, copy: Arc<Copy>) {
        self.list.lock().push(copy);
        // Release: pairs with the Acquire of `any`.
        self.count.fetch_add(1, Ordering::Release);
    }

    /// Removes a copy; calls that wait for it go on.
    pub fn remove(&self, node: NodeId) -> bool {
        let removed = {
            let mut list = self.list.lock();
            let at = list.iter().position(|copy| copy.node == node);
            at.map(|at| list.remove(at))
        };
        let Some(copy) = removed else { return false };
        self.count.fetch_add(u32::MAX, Ordering::Release);
        copy.remove();
        true
    }

    /// The last record of a log that every copy has with the ledger up to an entry; `None` without copies.
    pub fn watermark(&self, log: LogUid, entry: Sequence) -> Option<Sequence> {
        let all = self.all();
        all.iter().map(|copy| copy.synced(log, entry).unwrap_or_default()).min()
    }

    /// How far every copy's tree, and the own one, contains a log's file.
    pub fn reusable(
        &self,
        log: LogUid,
        incarnation: Incarnation,
        before: Digested,
        own: Digested,
    ) -> Digested {
        let all = self.all();
        let theirs = all.iter().map(|copy| copy.executed(log, incarnation).unwrap_or(before));
        theirs.chain([own]).min_by_key(|digested| digested.sequence).unwrap_or(own)
    }

    /// The last entry of the ledger that every copy's tree contains; `None` without copies.
    pub fn contained(&self) -> Option<LedgerPlace> {
        self.all().iter().map(|copy| copy.contained()).min_by_key(|place| place.sequence)
    }
}
