//! Compares the tree of a head with that of a copy, over a connection of its own.
//!
//! The head asks the copy to execute no further entry of the ledger, and hears which was the last; then it says the entry as of
//! which the trees are compared. The copy executes the ledger up to this entry, keeps its tree as of it, goes on, and sends
//! checksums of its inodes. It sends as fast as the connection takes them.

use crate::error::Error;
use crate::greeting::{take_message, terms};
use crate::ledger::LedgerPosition;
use crate::stream::message;
use format::Sequence;
use format::mirror::{LedgerMark, MirrorHead, MirrorKind, MirrorMessage, MirrorSum};
use ipc::Time;
use transport::Connection;

/// The head's side.
pub struct Comparison {
    connection: Connection,
    is_over: bool,
}

impl Comparison {
    /// Asks a copy to stop at the entry of the ledger that it has executed; gives this entry.
    ///
    /// # Errors
    /// `Refused`, `Connection`, `Message`, `Broken`.
    pub fn ask(
        connection: Connection,
        (version, ledger_bytes): (u64, u64),
        until: Time,
    ) -> Result<(Self, Sequence), Error> {
        let hello = terms(version, ledger_bytes);
        connection.send(&message(MirrorKind::Compare, false, &hello, &[] as &[u8]), Some(until))?;
        let asked = Self { connection, is_over: false };
        match MirrorMessage::decode(&take_message(&asked.connection, until)?)? {
            MirrorMessage::Held(mark) => Ok((asked, mark.sequence)),
            other => Err(refusal_in(&other)),
        }
    }

    /// Says as of which entry the trees are compared.
    ///
    /// # Errors
    /// `Connection`.
    pub fn compare_at(&self, place: &LedgerPosition, until: Time) -> Result<(), Error> {
        let mark = place.to_mark();
        self.connection.send(&message(MirrorKind::CompareAt, false, &mark, &[] as &[u8]), Some(until))?;
        Ok(())
    }

    /// The next checksums; `None` after the last ones. They come in the order of the inodes.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn next_sums(&mut self, until: Time) -> Result<Option<Vec<MirrorSum>>, Error> {
        if self.is_over {
            return Ok(None);
        }
        match MirrorMessage::decode(&take_message(&self.connection, until)?)? {
            MirrorMessage::Sums { sums, last } => {
                self.is_over = last;
                Ok(Some(sums.to_vec()))
            }
            other => Err(refusal_in(&other)),
        }
    }
}

impl Drop for Comparison {
    fn drop(&mut self) {
        self.connection.close();
    }
}

fn refusal_in(message: &MirrorMessage<'_>) -> Error {
    match message {
        MirrorMessage::Ends { refusal, .. } => Error::Refused(*refusal),
        _ => Error::Broken("a comparison is answered with checksums"),
    }
}

/// Whether a first message asks for a comparison.
pub fn is_compare(message: &[u8]) -> bool {
    message.first() == Some(&(MirrorKind::Compare as u8))
}

/// Says at which entry a copy stopped.
///
/// # Errors
/// `Connection`.
pub fn say_held(connection: &Connection, mark: &LedgerMark, until: Time) -> Result<(), Error> {
    connection.send(&message(MirrorKind::Held, false, mark, &[] as &[u8]), Some(until))?;
    Ok(())
}

/// Most checksums in one message.
pub fn sums_max(connection: &Connection) -> usize {
    let room = connection.message_bytes_max() - size_of::<MirrorHead>();
    (room / size_of::<MirrorSum>()).min(u16::MAX.into())
}

/// Sends checksums, at most [`sums_max`].
///
/// # Errors
/// `Connection`.
pub fn say_sums(connection: &Connection, sums: &[MirrorSum], last: bool, until: Time) -> Result<(), Error> {
    connection.send(&message(MirrorKind::Sums, last, &[] as &[u8], sums), Some(until))?;
    Ok(())
}
