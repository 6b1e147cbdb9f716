//! Questions about lock requests that wait: each answer is kept back until the lock is granted, or until the program's
//! patience ends. A thread that wakes with each grant gives the answers, so that a session can go on with its other
//! calls meanwhile.

use crate::session::Shared;
use crate::state::Core;
use ccnvm::SessionId;
use format::call::{CallKind, Status};
use ipc::host::Time;
use ipc::ring::Taken;
use ipc::sync::Ordering;
use std::sync::Arc;

/// A question that waits.
struct Question {
    session: SessionId,
    shared: Arc<Shared>,
    taken: Taken,
    until: Time,
}

/// All questions that wait.
#[derive(Default)]
pub(crate) struct Questions {
    /// At most as many as the slots of all rings.
    waiting: Vec<Question>,
    /// The thread runs: no question is kept without it.
    is_open: bool,
}

impl Core {
    /// Keeps a question about a lock, if there is a thread that answers it; otherwise gives it back.
    pub fn keep_question(&self, session: SessionId, shared: &Arc<Shared>, taken: Taken) -> Option<Taken> {
        if taken.kind != CallKind::RedeemLock as u16 {
            return Some(taken);
        }
        {
            let mut questions = self.questions.lock();
            if !questions.is_open {
                return Some(taken);
            }
            let until = self.host.now().after(self.lock_patience(&taken.body));
            questions.waiting.push(Question { session, shared: shared.clone(), taken, until });
        }
        self.bell.ring();
        None
    }

    /// Answers questions until the daemon ends.
    pub fn answer_questions(&self) {
        self.questions.lock().is_open = true;
        loop {
            let withheld_until = self.look_at_caches();
            // Acquire: pairs with the Release of the bell; read before the table is looked at.
            let seen = self.bell.rung();
            let ends = self.ending.load(Ordering::Acquire) != 0;
            let waiting = {
                let mut questions = self.questions.lock();
                questions.is_open = !ends;
                std::mem::take(&mut questions.waiting)
            };
            let waiting: Vec<_> =
                waiting.into_iter().filter_map(|question| self.ask(question, ends)).collect();
            if ends {
                return;
            }
            let until = waiting.iter().map(|question| question.until);
            let until = until.chain(withheld_until.filter(|_| !waiting.is_empty())).min();
            self.questions.lock().waiting.extend(waiting);
            self.bell.wait(seen, until);
        }
    }

    /// Answers a question if it is time, or if this is the `last` time; otherwise it waits on.
    fn ask(&self, question: Question, last: bool) -> Option<Question> {
        let Question { session, shared, taken, until } = question;
        let answer: Result<Vec<u8>, Status> = match self.look_at_lock(session, &taken.body) {
            Some(answer) => answer,
            None if last || self.host.now() >= until => Self::still_waiting(&taken.body),
            None => return Some(Question { session, shared, taken, until }),
        };
        let (status, body) = self.answer(answer, shared.ring.body_room(&taken));
        // A session that ended meanwhile gets no answer.
        let _ = shared.ring.respond(taken, status as u16, &body);
        None
    }
}
