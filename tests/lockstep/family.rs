//! Calls about children that go on beside their parents, with the open files that both have, and the deaths of processes and
//! daemons.

use super::Generator;
use crate::run::{DAEMON, KILL};

impl Generator {
    /// Begins or ends a child of a process.
    pub(super) fn family(&mut self, process: usize) -> String {
        let has_child = &mut self.parents[process];
        *has_child = !*has_child;
        let choices = if *has_child { ["bear", "bear exec"] } else { ["bury", "killchild"] };
        self.random.of(&choices).to_owned()
    }

    /// Half of the calls of a process with a child are the child's.
    pub(super) fn of_family(&mut self, process: usize, text: String) -> String {
        if self.parents[process] && self.random.one_in(2) { format!("child {text}") } else { text }
    }

    /// The death of a process or of the daemon.
    pub(super) fn kill(&mut self, process: usize) -> String {
        if self.random.one_in(3) {
            return DAEMON.to_owned();
        }
        self.parents[process] = false;
        KILL.to_owned()
    }
}
