//! Memory for a message and its answer, which may each be as long as the largest read or write. A thread has some while it has
//! the turn to take a message, and until that is served: so there are no more than messages being served, and one. Those that were
//! used last are used next, and few are kept, so that a rush of long messages leaves little behind.

use crate::reply::Reply;
use ipc::{Host, Lock};
use std::sync::Arc;

/// Buffers that are kept while no thread has them.
const SPARE_MAX: usize = 6;

/// Room for one message and one answer.
pub(crate) struct Buffers {
    pub(crate) message: Vec<u8>,
    pub(crate) reply: Reply,
}

/// Those that no thread has.
pub(crate) struct Pool {
    spare: Lock<Vec<Buffers>>,
    message_bytes: usize,
    reply_bytes: usize,
}

impl Pool {
    /// Of buffers for messages and for answers of so many bytes.
    pub(crate) fn new(host: Arc<dyn Host>, message_bytes: usize, reply_bytes: usize) -> Self {
        Self { spare: Lock::new(host, Vec::with_capacity(SPARE_MAX)), message_bytes, reply_bytes }
    }

    pub(crate) fn take(&self) -> Buffers {
        let spare = self.spare.lock().pop();
        let (message_bytes, reply_bytes) = (self.message_bytes, self.reply_bytes);
        spare.unwrap_or_else(|| Buffers { message: vec![0; message_bytes], reply: Reply::new(reply_bytes) })
    }

    pub(crate) fn give_back(&self, buffers: Buffers) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_MAX {
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
        taken.iter_mut().enumerate().for_each(|(number, buffers)| buffers.message[0] = number as u8);
        taken.into_iter().for_each(|buffers| pool.give_back(buffers));
        let again: Vec<u8> = (0..7).map(|_| pool.take().message[0]).collect();
        assert_eq!(again, [5, 4, 3, 2, 1, 0, 0], "six were kept, and one is new");
    }
}
