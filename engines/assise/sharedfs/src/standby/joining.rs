//! Return and first join: the tree of a head replaces the pool's tree, or only the ranges in which the two differ, if the
//! head no longer keeps the logs and ledger entries that this pool lacks, or the pool is of another history.
//!
//! Guarantees: until the last message of an import is processed the pool stays as it was, and it is opened again like
//! that if the import ends early, for whatever reason. Then it becomes, in one commit, a copy that has executed the
//! ledger up to the head's pin.

use super::Inner;
use super::contents::open_contents;
use crate::error::Error;
use crate::ledger::{LEDGER_FILE, place_of};
use area::{Area, AreaError, Import, KeyRange};
use format::mirror::{MirrorMessage, MirrorRange, MirrorRefusal, MirrorRoundEnd, MirrorSpan};
use format::{HEADER_BYTES, Sequence};
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
    /// `Broken`, `Message`, `Import`, `Media`: the import is over, the pool is what it was, and so is the link.
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
            self.reopen(&mut import);
        }
        taken
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
        self.contents.lock().take();
        self.receiving.lock().receiver.take();
        let area = Area::open(&self.medium, self.config.area).map_err(of_area)?;
        if since == Sequence::new(0) {
            return Import::begin(area).map_err(of_area);
        }
        if area.ledger().sequence.next() < since {
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
        // Release: before there is anything to execute, no more counts as synced than this pool has.
        self.synced.store(receiver.synced().get(), Ordering::Release);
        *self.contents.lock() = Some(contents);
        self.receiving.lock().receiver = Some(receiver);
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
