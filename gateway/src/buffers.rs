//! Memory for messages and answers, each of which may be as long as the largest read or write. A thread has a buffer
//! while it has the turn to take a message, and until that message is served, so there is at most one more buffer than
//! messages being served. The buffers used last are reused first. Few are kept, and still fewer that were long, so that
//! a burst of long messages leaves little memory in use.

use crate::reply::Reply;
use ipc::{Host, Lock};
use std::sync::Arc;

/// Limit of unused buffers that are kept.
const SPARE_MAX: usize = 6;
/// Limit of those among them that had a long message or answer.
const LONG_MAX: usize = 2;
/// A message with more bytes is long.
const LONG_BYTES: usize = 64 << 10;

/// Space for one message and one answer.
pub(crate) struct Buffers {
    pub(crate) message: Vec<u8>,
    pub(crate) reply: Reply,
    /// A message in this buffer was long.
    pub(crate) was_long: bool,
}

impl Buffers {
    /// Notes the length of the message.
    pub(crate) fn note(&mut self) {
        self.was_long |= self.message.len() > LONG_BYTES;
    }

    fn is_long(&self) -> bool {
        self.was_long || self.reply.is_long()
    }
}

/// The unused buffers.
pub(crate) struct Pool {
    spare: Lock<Vec<Buffers>>,
    message_bytes: usize,
    reply_bytes: usize,
}

impl Pool {
    /// A pool of buffers for messages and answers of these lengths.
    pub(crate) fn new(host: Arc<dyn Host>, message_bytes: usize, reply_bytes: usize) -> Self {
        Self { spare: Lock::new(host, Vec::with_capacity(SPARE_MAX)), message_bytes, reply_bytes }
    }

    pub(crate) fn take(&self) -> Buffers {
        let spare = self.spare.lock().pop();
        let (message_bytes, reply_bytes) = (self.message_bytes, self.reply_bytes);
        spare.unwrap_or_else(|| Buffers {
            message: Vec::with_capacity(message_bytes),
            reply: Reply::new(reply_bytes),
            was_long: false,
        })
    }

    pub(crate) fn give_back(&self, buffers: Buffers) {
        let mut spare = self.spare.lock();
        let is_one_too_many = || spare.iter().filter(|buffers| buffers.is_long()).count() >= LONG_MAX;
        if spare.len() < SPARE_MAX && !(buffers.is_long() && is_one_too_many()) {
            spare.push(buffers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    #[test]
    fn few_buffers_are_kept_and_the_last_is_used_first() {
        let pool = Pool::new(Arc::new(SystemHost), 10, 20);
        let mut taken: Vec<_> = (0..9).map(|_| pool.take()).collect();
        taken.iter_mut().enumerate().for_each(|(number, buffers)| buffers.message.push(number as u8));
        taken.into_iter().for_each(|buffers| pool.give_back(buffers));
        let again: Vec<_> = (0..7).map(|_| pool.take().message.first().copied()).collect();
        assert_eq!(again, [Some(5), Some(4), Some(3), Some(2), Some(1), Some(0), None], "one is new");
    }

    #[test]
    fn few_that_were_long_are_kept() {
        let pool = Pool::new(Arc::new(SystemHost), LONG_BYTES + 1, 1 << 20);
        let mut taken: Vec<_> = (0..6).map(|_| pool.take()).collect();
        taken[0].message.resize(LONG_BYTES + 1, 0);
        taken[1].reply.put_bytes(&[0; LONG_BYTES]);
        taken[2].reply.spare(1 << 20).fill(1);
        taken[3].message.resize(LONG_BYTES, 0);
        taken[4].reply.put_bytes(b"short");
        for mut buffers in taken {
            buffers.note();
            buffers.reply.clear();
            buffers.message.clear();
            pool.give_back(buffers);
        }
        let spare = pool.spare.lock();
        let long: Vec<bool> = spare.iter().map(Buffers::is_long).collect();
        assert_eq!(long, [true, true, false, false, false]);
        assert!(spare.iter().all(|buffers| buffers.message.capacity() > LONG_BYTES), "a message may be long");
    }
}
