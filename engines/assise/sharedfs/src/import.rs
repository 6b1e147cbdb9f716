//! The head sends its tree to a member that lacks what the logs and the ledger no longer hold, or is of another history
//! (Assise §3.4, node recovery; return and first join in `docs/replication.md`).
//!
//! The tree of a commit is pinned and sent: the whole tree, or to a member whose tree is of this history what changed since, here
//! or there. Then, of a later commit, the ranges that changed meanwhile are sent, and so on, until that is little. While the
//! last round is sent the member counts as a copy already, as one that has executed the ledger up to the pin: so the ledger
//! and the logs keep what it will lack, and nothing is acknowledged, digested or seen that it will not have. When it has made
//! the tree its own it is brought up as every copy is.
//!
//! Writers are slowed meanwhile as far as it needs ([`crate::pace`]).
//!
//! Guarantees: no lock is held while something is sent. Calls wait for a joining member at most during the last round.
//! If a pin is lost because space became short, the import ends, and the member stays as it was.

use crate::copies::Copy;
use crate::error::Error;
use crate::ledger::position_of;
use crate::level::{begin_copy, keys_of_lives};
use crate::pace::{self, TreeRoom};
use crate::pinned::Pinned;
use crate::state::{Core, State};
use area::{KeyRange, Snapshot};
use format::mirror::{LogEnds, MirrorRange};
use format::node::{ItemKind, Key};
use format::{BLOCK_BYTES, NodeId, Sequence};
use ipc::host::Time;
use mirror::{CopyEnds, TreeSender};
use std::sync::Arc;
use std::time::Duration;
use transport::Connection;
use zerocopy::little_endian::{U32, U64};

/// How long a member may take to take one message, or to sync a round.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a member that counts may take for the last round: fsyncs wait for it.
const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// Rounds before the last one. Each leaves half of what the one before it left, if the member takes what it is sent.
const ROUNDS_MAX: u32 = 16;

/// Items that are read at once.
const ITEMS_AT_ONCE: usize = 256;

/// Blocks of data behind one message of items.
const BLOCKS_AT_ONCE: usize = 256;

/// How far the tree is on its way to a member that joins, for status reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeSent {
    /// The member.
    pub node: NodeId,
    /// About how many bytes were sent.
    pub sent_bytes: u64,
    /// About how many bytes there are to send, as far as that is known: each round counts what it sends itself.
    pub bytes: u64,
}

/// One tree on its way to one member.
struct Exporter<'a> {
    core: &'a Core,
    node: NodeId,
    sender: TreeSender,
    patience: Duration,
    /// Items that were sent since the last full block was counted.
    items: u64,
}

impl Exporter<'_> {
    fn until(&self) -> Time {
        self.core.host.now().after(self.patience)
    }

    fn of_copy(&self, error: mirror::Error) -> Error {
        Error::Copy(self.node, error)
    }

    /// Data that was read of a commit is valid only if the commit was kept until now.
    fn kept<T>(&self, pinned: &Pinned, read: Result<T, area::AreaError>) -> Result<T, Error> {
        self.core.kept(self.node, pinned, read)
    }

    fn begin_round(&self, pinned: &Pinned, number: u32, since: Option<Sequence>) -> Result<(), Error> {
        let begun = self.sender.begin_round(number, pinned.snapshot.version(), since, self.until());
        begun.map_err(|error| self.of_copy(error))
    }

    /// Sends ranges of a commit.
    fn send(&mut self, pinned: &Pinned, ranges: &[KeyRange]) -> Result<(), Error> {
        ranges.iter().try_for_each(|range| self.send_range(pinned, range))
    }

    /// The ranges that changed from an entry of the ledger on, here or at the member.
    fn changed_here_or_there(&self, pinned: &Pinned, since: Sequence) -> Result<Vec<KeyRange>, Error> {
        let there = self.sender.hear_changed(self.until()).map_err(|error| self.of_copy(error))?;
        let there = there.iter().map(|span| (span.first, (span.to_end.get() == 0).then_some(span.end)));
        let changed = pinned.snapshot.changed_here_or_there(since, there.collect());
        Ok(self.kept(pinned, changed)?.0)
    }

    /// The amount of data in ranges that is to be sent, in blocks.
    fn total(&self, pinned: &Pinned, ranges: &[KeyRange]) -> Result<u64, Error> {
        let (mut items, mut blocks) = (0, 0);
        for range in ranges {
            let mut after: Option<Key> = None;
            loop {
                let found = pinned.snapshot.items_of(range, after.as_ref(), ITEMS_AT_ONCE);
                let found = self.kept(pinned, found)?;
                let Some((last, _)) = found.last() else { break };
                after = Some(*last);
                items += found.len() as u64;
                for (key, value) in found.iter().filter(|(key, _)| key.kind() == Ok(ItemKind::Extent)) {
                    let (extents, _) = pinned.snapshot.extents_of(key, value)?;
                    blocks += extents.iter().map(|extent| u64::from(extent.blocks)).sum::<u64>();
                }
            }
        }
        Ok(pace::total(items, blocks))
    }

    fn send_range(&mut self, pinned: &Pinned, range: &KeyRange) -> Result<(), Error> {
        let head = MirrorRange {
            first: range.first,
            end: range.end.unwrap_or(range.first),
            blocks_from: U64::new(range.blocks_from),
            blocks_to: U64::new(range.blocks_to),
        };
        let begun = self.sender.begin_range(&head, range.end.is_none(), self.until());
        begun.map_err(|error| self.of_copy(error))?;
        let mut after: Option<Key> = None;
        loop {
            let items = pinned.snapshot.items_of(range, after.as_ref(), ITEMS_AT_ONCE);
            let items = self.kept(pinned, items)?;
            let Some((last, _)) = items.last() else { return Ok(()) };
            after = Some(*last);
            self.send_items(pinned, &items)?;
            self.note_sent(items.len() as u64, 0);
        }
    }

    fn send_items(&mut self, pinned: &Pinned, items: &[area::Item]) -> Result<(), Error> {
        let (mut extents, mut blocks) = (Vec::new(), 0);
        for (key, value) in items {
            let mut owner = 0;
            match key.kind() {
                // Each node decides by itself where blocks lie.
                Ok(ItemKind::Segment) => continue,
                Ok(ItemKind::Extent) => {
                    let found;
                    (found, owner) = pinned.snapshot.extents_of(key, value)?;
                    if self.sender.is_full(value) || blocks >= BLOCKS_AT_ONCE {
                        self.flush(pinned, &mut extents)?;
                        blocks = 0;
                    }
                    for extent in found.into_iter().filter(|extent| extent.checksums.is_some()) {
                        blocks += extent.blocks as usize;
                        extents.push(extent);
                    }
                }
                _ if self.sender.is_full(value) => {
                    self.flush(pinned, &mut extents)?;
                    blocks = 0;
                }
                _ => {}
            }
            self.sender.put(*key, value, owner);
        }
        self.flush(pinned, &mut extents)
    }

    /// Sends the items that are packed, and the blocks of their extents.
    fn flush(&mut self, pinned: &Pinned, extents: &mut Vec<area::Extent>) -> Result<(), Error> {
        let until = self.until();
        self.sender.send_items(until).map_err(|error| self.of_copy(error))?;
        let mut sent = 0;
        for extent in extents.drain(..) {
            for block in extent.first..extent.end() {
                let read = pinned.snapshot.block_as_is(&extent, block);
                let (bytes, is_whole) = self.kept(pinned, read)?;
                let until = self.until();
                self.sender.put_block(&bytes, !is_whole, until).map_err(|error| self.of_copy(error))?;
                sent += 1;
            }
        }
        let until = self.until();
        self.sender.send_blocks(until).map_err(|error| self.of_copy(error))?;
        self.note_sent(0, sent);
        Ok(())
    }

    /// So much is to be sent in a round, in blocks.
    fn note_total(&self, total: u64) {
        let bytes = total * BLOCK_BYTES as u64;
        *self.core.tree_sent.lock() = Some(TreeSent { node: self.node, sent_bytes: 0, bytes });
    }

    fn note_sent(&mut self, items: u64, blocks: u64) {
        let sent = self.core.pace.note_sent(items, blocks, &mut self.items);
        if let Some(told) = self.core.tree_sent.lock().as_mut() {
            told.sent_bytes += sent * BLOCK_BYTES as u64;
        }
    }

    fn end_round(&mut self, pinned: &Pinned, whole: bool) -> Result<(), Error> {
        let (ledger, totals) = (position_of(&pinned.snapshot.ledger()), pinned.snapshot.totals());
        let ended = self.sender.end_round(ledger, totals, whole, self.until());
        ended.map_err(|error| self.of_copy(error))
    }
}

impl Core {
    /// Makes the tree of this node that of a member, over a connection on which it was greeted. If an entry is given, the
    /// tree of the member differs only by what changed from it on. The member counts as a copy when this returns, and is not
    /// brought up yet.
    ///
    /// # Errors
    /// `Copy`, `NeedsImport`, `NoRoomToSend`, `Stopped`; `Area`: the member does not count.
    pub fn import(&self, connection: &Connection, since: Option<Sequence>) -> Result<Arc<Copy>, Error> {
        let mut needs_whole = self.importing.lock();
        let node = connection.node();
        // The attempt before failed: the member's tree may be damaged, or differ by more.
        let since = since.filter(|_| !needs_whole.remove(&node));
        let imported = self.import_since(connection, since);
        *self.tree_sent.lock() = None;
        if imported.is_err() && since.is_some() {
            needs_whole.insert(node);
        }
        imported
    }

    fn import_since(&self, connection: &Connection, since: Option<Sequence>) -> Result<Arc<Copy>, Error> {
        let node = connection.node();
        let sender = TreeSender::new(connection.clone());
        let mut exporter = Exporter { core: self, node, sender, patience: PATIENCE, items: 0 };
        let sent = self.send_rounds(&mut exporter, since);
        self.end_round();
        let mut sent = sent?;
        exporter.patience = LAST_PATIENCE;
        let (pinned, ends) = self.count_from_now(node)?;
        let joined = self.send_last(exporter, &pinned, &ends, &mut sent);
        drop(pinned);
        self.release_pinned()?;
        joined.inspect_err(|_| self.remove_copy(node))
    }

    /// Sends the tree, or what changed from an entry on, and what changes meanwhile, until that is little; the number of the next
    /// round, and the version from which on something may have changed since.
    fn send_rounds(
        &self,
        exporter: &mut Exporter<'_>,
        since: Option<Sequence>,
    ) -> Result<(u32, Sequence), Error> {
        let (mut number, mut from, mut taken) = (0, None, None);
        let least =
            TreeRoom { blocks: self.config.join_blocks / 2, nodes: self.config.join_leaves as u64 / 2 };
        loop {
            let (pinned, usage) = {
                let mut area = self.area_for_other();
                (Pinned::of(&mut area), area.usage())
            };
            let ranges = match from {
                None => {
                    exporter.begin_round(&pinned, number, since)?;
                    match since {
                        Some(since) => exporter.changed_here_or_there(&pinned, since)?,
                        None => vec![pinned.snapshot.whole()],
                    }
                }
                Some(from) => {
                    let changed = pinned.snapshot.changed_from(from);
                    let (ranges, leaves) = exporter.kept(&pinned, changed)?;
                    let blocks = taken.map_or(0, |taken: TreeRoom| taken.blocks);
                    let is_little = leaves <= self.config.join_leaves && blocks <= self.config.join_blocks;
                    if is_little || number >= ROUNDS_MAX {
                        return Ok((number, from));
                    }
                    exporter.begin_round(&pinned, number, None)?;
                    ranges
                }
            };
            let total = exporter.total(&pinned, &ranges)?;
            self.pace.begin(&usage, taken, least, total);
            exporter.note_total(total);
            exporter.send(&pinned, &ranges)?;
            exporter.end_round(&pinned, false)?;
            let synced = exporter.sender.hear_synced(number, exporter.until());
            synced.map_err(|error| exporter.of_copy(error))?;
            // A later commit may have the version of this one.
            (from, taken) = (Some(pinned.snapshot.version()), Some(self.end_round()));
            number += 1;
            drop(pinned);
            self.release_pinned()?;
        }
    }

    /// Ends a round; returns the space that digests took meanwhile.
    fn end_round(&self) -> TreeRoom {
        let usage = self.state.lock().copy.free.usage;
        self.pace.end(&usage)
    }

    /// Pins a commit, and counts a member as a copy that has executed what this commit contains, and has nothing beyond.
    fn count_from_now(&self, node: NodeId) -> Result<(Pinned, CopyEnds), Error> {
        let mut area = self.area_for_other();
        let mut guard = self.contain_all(&mut area)?;
        let state = &mut *guard;
        let pinned = Pinned::of(&mut area);
        let place = position_of(&pinned.snapshot.ledger());
        let logs = logs_of(&pinned.snapshot)?;
        let key = keys_of_lives(&area, &state.copy)?.get(&place.life).copied().unwrap_or_default();
        let ends = CopyEnds { end: place, contained: place, key, logs };
        let copy = Copy::to_come(self.host.clone(), node, &ends);
        ends.logs.iter().for_each(|log| copy.resume_log(log));
        self.count(state, copy);
        Ok((pinned, ends))
    }

    fn send_last(
        &self,
        mut exporter: Exporter<'_>,
        pinned: &Pinned,
        ends: &CopyEnds,
        (number, from): &mut (u32, Sequence),
    ) -> Result<Arc<Copy>, Error> {
        let changed = pinned.snapshot.changed_from(*from);
        let (ranges, _) = exporter.kept(pinned, changed)?;
        exporter.begin_round(pinned, *number, None)?;
        exporter.send(pinned, &ranges)?;
        exporter.end_round(pinned, true)?;
        let (until, node) = (exporter.until(), exporter.node);
        let heard = exporter.sender.hear_ends(until).map_err(|error| Error::Copy(node, error))?;
        if (heard.1.end, heard.1.contained) != (ends.end, ends.contained) {
            return Err(Error::Copy(
                node,
                mirror::Error::Broken("a tree that differs from the one that was sent"),
            ));
        }
        let lives = {
            let area = self.area.lock();
            let state = self.state.lock();
            keys_of_lives(&area, &state.copy)?
        };
        let mut state = self.state.lock();
        let counted = self.copies.of(node).ok_or(Error::NeedsImport(node))?;
        let copy = begin_copy(&self.host, &mut state.copy, &lives, heard)?;
        counted.reconnect(&copy);
        state.copy.ledger.hold(self.copies.contained());
        Ok(counted)
    }

    /// A member counts as a copy from now on; [`Core::send_digested`] is what it gets first.
    pub fn count(&self, state: &mut State, copy: Arc<Copy>) {
        let digested = state.copy.logs.iter().map(|(log, copy)| (*log, copy.digested.sequence));
        copy.set_lacking(digested.collect());
        let key = state.copy.ledger.hash_key();
        state.copy.keep_hashes(key);
        self.copies.add(copy);
        for session in state.sessions.values() {
            session.shared.daemon.publish_replication(true, Default::default());
        }
        state.copy.ledger.hold(self.copies.contained());
    }
}

/// The logs of a tree's table, each as a copy has it whose file is empty.
fn logs_of(snapshot: &Snapshot) -> Result<Vec<LogEnds>, Error> {
    let mut found = Vec::new();
    for (log, item) in snapshot.logs()? {
        let ends = LogEnds {
            log,
            end: item.digested,
            end_position: item.position,
            executed: item.digested,
            executed_position: item.position,
            incarnation: item.incarnation,
            reserved: U32::new(0),
        };
        found.push(ends);
    }
    Ok(found)
}
