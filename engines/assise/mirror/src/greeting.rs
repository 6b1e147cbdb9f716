//! The first messages of a connection: the terms of a head, and how a copy judges them.

use crate::error::Error;
use format::ChainNumber;
use format::mirror::{MirrorHello, MirrorKind, MirrorRefusal, RULES};
use ipc::Time;
use transport::{Connection, Event};
use zerocopy::little_endian::{U32, U64};

/// The terms of a head that leads with this version of the subtree, and has a ledger of so many bytes.
pub fn terms(version: u64, ledger_bytes: u64) -> MirrorHello {
    MirrorHello {
        version: U64::new(version),
        ledger_bytes: U64::new(ledger_bytes),
        chain: ChainNumber::ONLY,
        rules: U32::new(RULES),
    }
}

/// The answer of a copy that knows this version of the subtree, and has a ledger of so many bytes.
pub fn judge_terms(hello: &MirrorHello, version: u64, ledger_bytes: u64) -> MirrorRefusal {
    if hello.version.get() < version {
        MirrorRefusal::Version
    } else if hello.chain != ChainNumber::ONLY {
        MirrorRefusal::Chain
    } else if hello.rules.get() != RULES {
        MirrorRefusal::Rules
    } else if hello.ledger_bytes.get() != ledger_bytes {
        MirrorRefusal::Ledger
    } else {
        MirrorRefusal::None
    }
}

/// Waits for the next message.
///
/// # Errors
/// `Connection`; `Broken`: heads and copies send no immediates.
pub fn take_message(connection: &Connection, until: Time) -> Result<Vec<u8>, Error> {
    match connection.take(Some(until))? {
        Event::Message(message) => Ok(message),
        Event::Immediate(_) => Err(Error::Broken("an immediate")),
        Event::Ended(why) => Err(transport::Error::Ended(why).into()),
    }
}

/// Waits for an answer of a copy. Reports of how far it has executed may come before the answer, which tells of a later state.
///
/// # Errors
/// As [`take_message`].
pub(crate) fn take_answer(connection: &Connection, until: Time) -> Result<Vec<u8>, Error> {
    loop {
        let came = take_message(connection, until)?;
        if came.first() != Some(&(MirrorKind::Executed as u8)) {
            return Ok(came);
        }
    }
}
