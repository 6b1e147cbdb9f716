//! Return and first join: the tree of a head replaces the pool's tree, or only the ranges in which the two differ, if the
//! head no longer keeps the logs and ledger entries that this pool lacks, or the pool is of another history.
//!
//! Guarantees: until the last message of an import is processed the pool stays as it was, and it is opened again like
//! that if the import ends early, for whatever reason but one. Then it becomes, in one commit, a copy that has executed the
//! ledger up to the head's pin.
//!
//! The reason is that the pool has no room for its own tree and that of the head together. If the node that leads sends the tree,
//! and a view of the cluster says that this pool is not in sync ([`Standby::set_replaceable`]), the pool gives up its own tree,
//! in one commit. From then on until an import is complete it is an empty pool that no daemon leads with, and each head
//! sends it the whole tree.

use super::contents::{Contents, open_contents};
use super::{Inner, Standby};
use crate::error::Error;
use crate::ledger::{LEDGER_BEGINNING, LEDGER_FILE, place_of};
use area::{Area, AreaError, Import, KeyRange};
use format::mirror::{MirrorMessage, MirrorRange, MirrorRefusal, MirrorRoundEnd, MirrorSpan};
use format::{HEADER_BYTES, NodeId, Sequence};
use ipc::sync::Ordering;
use mirror::ledger::{LEDGER_START, LedgerPosition, ledger_ring_end};
use mirror::{Stepped, refuse, say_changed, say_imported};
use std::time::Duration;
use transport::Connection;
use zerocopy::little_endian::U32;

/// How long a head may take to receive the refusal of its tree, or the positions of the copy.
const ANSWER: Duration = Duration::from_secs(2);

/// A head's tree that is being received.
pub(super) struct Joining {
    import: Import,
    round: u32,
}

fn failed(error: &Error) -> mirror::Error {
    match error {
        Error::Media(error) => mirror::Error::Media(*error),
        Error::Area(AreaError::NoSpace) => mirror::Error::ImportRoom,
        error => mirror::Error::Import(error.to_string()),
    }
}

fn of_area(error: AreaError) -> mirror::Error {
    failed(&Error::Area(error))
}

impl Inner {
    /// Takes one message of an import over a link.
    ///
    /// # Errors
    /// `Broken`, `Message`, `Import`, `ImportRoom`, `PoolRoom`, `TreeKept`, `Media`: the import is over, the pool is what it was, and
    /// so is the link. `TreeGivenUp`: the pool is empty.
    pub(super) fn take_import(
        &self,
        connection: &Connection,
        link: u64,
        came: &[u8],
    ) -> Result<Stepped, mirror::Error> {
        let mut import = self.import.lock();
        if self.receiving.lock().link != link {
            return Err(mirror::Error::Broken("a later head leads"));
        }
        let taken = self.take_part(&mut import, connection, came);
        if taken.is_err() {
            let until = self.host.now().after(ANSWER);
            // The connection may be over, which the head notices by itself.
            let _ = refuse(connection, MirrorRefusal::Import, until);
            import.take();
            let taken = match taken {
                Err(mirror::Error::ImportRoom) => Err(self.make_room(connection.node())),
                taken => taken,
            };
            self.reopen(&mut import);
            return taken;
        }
        taken
    }

    /// The tree of this head had no room beside the own one: gives up that one, if it counts for nothing. Returns what came of
    /// it. There are no contents, and no import is under way; its lock is held.
    fn make_room(&self, head: NodeId) -> mirror::Error {
        let is_replaceable = *self.replaceable_by.lock() == Some(head);
        let given_up = Area::open(&self.medium, self.config.area).and_then(|area| {
            if area.is_given_up() {
                return Ok(mirror::Error::PoolRoom);
            }
            if !is_replaceable {
                return Ok(mirror::Error::ImportRoom);
            }
            area.give_up_tree(&LEDGER_BEGINNING)?;
            Ok(mirror::Error::TreeGivenUp)
        });
        given_up.unwrap_or_else(|error| mirror::Error::TreeKept(error.to_string()))
    }

    fn take_part(
        &self,
        import: &mut Option<Joining>,
        connection: &Connection,
        came: &[u8],
    ) -> Result<Stepped, mirror::Error> {
        let message = MirrorMessage::decode(came)?;
        if let MirrorMessage::Round(round) = &message
            && round.number.get() == 0
        {
            *import = Some(Joining { import: self.begin_import(round.since)?, round: 0 });
        }
        let Some(Joining { import: taking, round: number }) = import.as_mut() else {
            return Err(mirror::Error::Broken("a part of no import"));
        };
        match message {
            MirrorMessage::Round(round) => {
                *number = round.number.get();
                taking.begin_round(round.version).map_err(of_area)?;
                if *number == 0 && round.since > Sequence::new(0) {
                    say_changed(connection, &changed_in(taking, round.since).map_err(of_area)?)?;
                }
            }
            MirrorMessage::Range { range, to_end } => {
                taking.begin_range(range_of(&range, to_end)).map_err(of_area)?;
            }
            MirrorMessage::Items(mut items) => {
                if taking.awaits_blocks() {
                    return Err(mirror::Error::Broken("items before the blocks of those before"));
                }
                items
                    .try_for_each(|(item, value)| taking.put(item.key, value, item.owner.get()))
                    .map_err(of_area)?;
            }
            MirrorMessage::Blocks { blocks, damaged } => {
                blocks.iter().try_for_each(|block| taking.put_block(block, damaged)).map_err(of_area)?;
            }
            MirrorMessage::RoundEnd { whole: false, .. } => {
                taking.sync().map_err(of_area)?;
                say_imported(connection, *number)?;
            }
            MirrorMessage::RoundEnd { end, whole: true } => {
                let Joining { import, .. } = import.take().expect("it was there");
                self.finish_import(import, &end, connection)?;
                return Ok(Stepped::Synced);
            }
            _ => return Err(mirror::Error::Broken("an import is taken in to its end")),
        }
        Ok(Stepped::Taken)
    }

    /// From here on nothing of the pool is executed or received. With an entry of the ledger, the import begins with the
    /// pool's own tree, which has all entries before it in common with that of the head.
    fn begin_import(&self, since: Sequence) -> Result<Import, mirror::Error> {
        if self.failure.lock().is_some() {
            return Err(mirror::Error::Refused(MirrorRefusal::Closed));
        }
        // A tree that is compared goes.
        let compared = self.comparing.lock().take();
        compared.into_iter().for_each(|connection| connection.close());
        self.contents.lock().take();
        self.receiving.lock().receiver.take();
        let area = Area::open(&self.medium, self.config.area).map_err(of_area)?;
        if since == Sequence::new(0) {
            return Import::begin(area).map_err(of_area);
        }
        if area.is_given_up() || area.ledger().sequence.next() < since {
            return Err(mirror::Error::Broken("more in common than this tree has"));
        }
        Import::begin_with_own(area).map_err(of_area)
    }

    fn finish_import(
        &self,
        import: Import,
        end: &MirrorRoundEnd,
        connection: &Connection,
    ) -> Result<(), mirror::Error> {
        let place = LedgerPosition::of_mark(&end.ledger);
        let ledger = self.medium.open(LEDGER_FILE)?;
        let ring = LEDGER_START..ledger_ring_end(&ledger);
        if !ring.contains(&place.position) || !place.position.is_multiple_of(HEADER_BYTES as u64) {
            return Err(mirror::Error::Broken("a place that the ledger does not have"));
        }
        let totals = (end.inodes.get(), end.data_blocks.get());
        drop(import.finish(&place_of(&place), totals).map_err(of_area)?);
        self.install().map_err(|error| failed(&error))?;
        let until = self.host.now().after(ANSWER);
        let mut receiving = self.receiving.lock();
        match receiving.receiver.as_mut() {
            Some(receiver) => receiver.answer(connection, until),
            None => Err(mirror::Error::Refused(MirrorRefusal::Closed)),
        }
    }

    /// Opens the pool's contents, and goes on with them.
    fn install(&self) -> Result<(), Error> {
        let (contents, receiver) = open_contents(&*self.host, &self.medium, &self.config)?;
        let place = contents.copy.ledger.place();
        // Relaxed: only for status reports.
        self.executed.store(place.sequence.get(), Ordering::Relaxed);
        self.life.store(place.life.get(), Ordering::Relaxed);
        self.note_given_up(&contents);
        // Release: before there is anything to execute, no more counts as synced than this pool has.
        self.synced.store(receiver.synced().get(), Ordering::Release);
        self.begin_to_receive(contents, receiver);
        self.wake();
        Ok(())
    }

    fn reopen(&self, import: &mut Option<Joining>) {
        import.take();
        if self.contents.lock().is_some() {
            return;
        }
        if let Err(error) = self.install() {
            self.fail(&error);
        }
    }

    /// Ends an import that came over this link, or any if `None`; the pool stays as it was.
    pub(super) fn give_up_import(&self, link: Option<u64>) {
        let mut import = self.import.lock();
        if link.is_some_and(|link| self.receiving.lock().link != link) || import.is_none() {
            return;
        }
        self.reopen(&mut import);
    }
}

impl Standby {
    /// Allows this node, and no other, to replace the pool's own tree by that of its own where there is no room for both. The caller
    /// has a view of the node's present life in which this node leads and is in sync, and in which the pool of the standby is not
    /// in sync: then the pool may not lead before a head has brought it up, so its tree counts for nothing. `None` if there is no
    /// such view.
    pub fn set_replaceable(&self, by: Option<NodeId>) {
        *self.0.replaceable_by.lock() = by;
    }

    /// Whether the pool gave up its own tree and has not got that of a head since. It cannot lead.
    pub fn has_given_up(&self) -> bool {
        // Relaxed: only for status reports.
        self.0.given_up.load(Ordering::Relaxed) != 0
    }
}

impl Inner {
    /// Notes it for status reports.
    pub(super) fn note_given_up(&self, contents: &Contents) {
        // Relaxed: as above.
        self.given_up.store(contents.area.is_given_up().into(), Ordering::Relaxed);
    }
}

/// The keys that changed in the pool's own tree from an entry of the ledger on.
fn changed_in(import: &Import, since: Sequence) -> Result<Vec<MirrorSpan>, AreaError> {
    let spans = import.changed_from(since)?.into_iter().map(|(first, end)| MirrorSpan {
        first,
        end: end.unwrap_or(first),
        to_end: U32::new(end.is_none().into()),
        reserved: U32::new(0),
    });
    Ok(spans.collect())
}

fn range_of(range: &MirrorRange, to_end: bool) -> KeyRange {
    KeyRange {
        first: range.first,
        end: (!to_end).then_some(range.end),
        blocks_from: range.blocks_from.get(),
        blocks_to: range.blocks_to.get(),
    }
}
