//! A side that answers each write with a write sends no other frames: over tcp the immediates carry the counts.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::wire::WireRegion;
use support::{Bed, Pair, immediate, message, patient, soon, spawn};
use transport::{Bytes, Connection, Rights, Ticket, dram};
use zerocopy::{FromBytes, IntoBytes};

/// Number of answered writes: many windows.
const ROUNDS: u64 = 1000;

const BYTES: u64 = 8;

/// Grants memory of `there` to `here`.
fn offer(there: &Connection, here: &Connection) -> WireRegion {
    let granted = there.grant(&dram(BYTES).unwrap(), 0..BYTES, Rights::Write).unwrap();
    there.send(granted.as_bytes(), Some(soon())).unwrap();
    WireRegion::read_from_bytes(&message(here)).unwrap()
}

fn write(connection: &Connection, to: &WireRegion) -> Ticket {
    connection.write(Bytes::Inline(&[0; BYTES as usize]), to, 0, Some(0), Some(soon())).unwrap()
}

/// Number of operations that a connection has posted, read from a ticket.
fn posted(ticket: Ticket) -> u64 {
    let digits: String = format!("{ticket:?}").chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn an_answer_tells_what_was_taken() {
    let Pair { one, two, here, there } = Pair::new(&Bed::Tcp, &patient());
    let (to_there, to_here) = (offer(&there, &here), offer(&here, &there));
    let answers = spawn("answers", move || {
        let answer = |_| {
            immediate(&there);
            posted(write(&there, &to_here))
        };
        (0..ROUNDS).map(answer).max().unwrap()
    });
    let ask = |_| {
        let ticket = write(&here, &to_there);
        immediate(&here);
        posted(ticket)
    };
    let last = (0..ROUNDS).map(ask).max().unwrap();
    let last_there = answers.join();
    // One more frame told the peer the granted memory. A frame for each half window would be 62 more.
    assert_eq!((last, last_there), (ROUNDS + 1, ROUNDS + 1));
    drop((one, two));
}
