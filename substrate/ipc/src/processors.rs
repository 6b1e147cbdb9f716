//! The processors on which the two sides of a ring wait.
//!
//! A waiting thread polls, because the other side's answer is there sooner than a sleeping thread wakes. If both sides wait on
//! the same processor, polling only keeps the other side from it: Linux (6.18) gives two threads that yield to each other
//! the same processor time, so each wait would last as long as the other side's work. Such a thread sleeps at once, and the
//! other side wakes it without an interrupt of another processor.
//!
//! Guarantee: hints only. A wrong one costs a wake-up, or the polling that it should have saved.

use crate::host::Host;
use crate::shared::Words;
use crate::sync::{Ordering, Word};

/// A side, and the index of its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Waits for answers.
    Client = 0,
    /// Waits for requests.
    Server = 1,
}

impl Side {
    const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// Words with the number of a processor plus one, or 0 if it is not known.
#[derive(Debug)]
pub struct Processors(Words<Word>);

impl Processors {
    /// Words in shared memory that [`Self`] needs, zero at first.
    pub const WORDS: usize = 2;

    /// Uses [`Self::WORDS`] words.
    pub const fn new(words: Words<Word>) -> Self {
        Self(words)
    }

    /// A side begins to wait. Returns whether the other side has this thread's processor.
    pub fn enter(&self, host: &dyn Host, side: Side) -> bool {
        let own = host.processor().map_or(0, |number| number.wrapping_add(1));
        // Relaxed: hints that order nothing. Stored only when it changes: both words are on one cache line.
        let word = &self.0[side as usize];
        if word.load(Ordering::Relaxed) != own {
            word.store(own, Ordering::Relaxed);
        }
        own != 0 && self.0[side.other() as usize].load(Ordering::Relaxed) == own
    }

    /// A side sleeps: when it is woken it may have another processor.
    pub fn forget(&self, side: Side) {
        self.0[side as usize].store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Join, Time, Waited};
    use crate::shared::{Access, Mapping, PAGE_BYTES, create};

    /// A host that says on which processor it is.
    struct At(Option<u32>);

    impl Host for At {
        fn now(&self) -> Time {
            Time::from_ns(0)
        }

        fn wall(&self) -> i64 {
            0
        }

        fn random(&self) -> u64 {
            0
        }

        fn spawn(&self, _: &str, _: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, crate::Error> {
            unreachable!("nothing here starts a thread")
        }

        fn wait(&self, _: &Word, _: u32, _: Option<Time>) -> Waited {
            Waited::Woken
        }

        fn wake(&self, _: &Word, _: u32) {}

        fn processor(&self) -> Option<u32> {
            self.0
        }
    }

    #[test]
    fn only_a_side_that_is_known_to_wait_on_the_same_processor_counts() {
        let memory = create(c"processors", PAGE_BYTES).unwrap();
        let mapping = std::sync::Arc::new(Mapping::new(&memory, PAGE_BYTES, Access::Write).unwrap());
        let processors = Processors::new(mapping.words(0, Processors::WORDS).unwrap());
        let client = |at| processors.enter(&At(at), Side::Client);
        let server = |at| processors.enter(&At(at), Side::Server);
        assert!(!client(Some(0)), "the server was nowhere yet");
        assert!(server(Some(0)));
        assert!(client(Some(0)));
        assert!(!server(Some(1)));
        assert!(!client(Some(0)));
        assert!(client(Some(1)));
        processors.forget(Side::Server);
        assert!(!client(Some(1)), "the server sleeps");
        assert!(!server(None), "not known");
        assert!(!client(None));
    }
}
