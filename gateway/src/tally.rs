//! Counts the messages of each kind: the cost of a program's calls is measured by counts, never by time.

use crate::abi::opcode;
use ipc::LongWord;
use ipc::sync::Ordering;

/// An upper bound for the numbers of the kinds.
const KINDS: usize = 64;

/// Names of the supported kinds, as in the kernel's documentation.
const NAMES: [(u32, &str); 42] = [
    (opcode::LOOKUP, "LOOKUP"),
    (opcode::FORGET, "FORGET"),
    (opcode::GETATTR, "GETATTR"),
    (opcode::SETATTR, "SETATTR"),
    (opcode::READLINK, "READLINK"),
    (opcode::SYMLINK, "SYMLINK"),
    (opcode::MKNOD, "MKNOD"),
    (opcode::MKDIR, "MKDIR"),
    (opcode::UNLINK, "UNLINK"),
    (opcode::RMDIR, "RMDIR"),
    (opcode::RENAME, "RENAME"),
    (opcode::LINK, "LINK"),
    (opcode::OPEN, "OPEN"),
    (opcode::READ, "READ"),
    (opcode::WRITE, "WRITE"),
    (opcode::STATFS, "STATFS"),
    (opcode::RELEASE, "RELEASE"),
    (opcode::FSYNC, "FSYNC"),
    (opcode::SETXATTR, "SETXATTR"),
    (opcode::GETXATTR, "GETXATTR"),
    (opcode::LISTXATTR, "LISTXATTR"),
    (opcode::REMOVEXATTR, "REMOVEXATTR"),
    (opcode::FLUSH, "FLUSH"),
    (opcode::INIT, "INIT"),
    (opcode::OPENDIR, "OPENDIR"),
    (opcode::READDIR, "READDIR"),
    (opcode::RELEASEDIR, "RELEASEDIR"),
    (opcode::FSYNCDIR, "FSYNCDIR"),
    (opcode::GETLK, "GETLK"),
    (opcode::SETLK, "SETLK"),
    (opcode::SETLKW, "SETLKW"),
    (opcode::ACCESS, "ACCESS"),
    (opcode::CREATE, "CREATE"),
    (opcode::INTERRUPT, "INTERRUPT"),
    (opcode::DESTROY, "DESTROY"),
    (opcode::BATCH_FORGET, "BATCH_FORGET"),
    (opcode::FALLOCATE, "FALLOCATE"),
    (opcode::RENAME2, "RENAME2"),
    (opcode::LSEEK, "LSEEK"),
    (opcode::COPY_FILE_RANGE, "COPY_FILE_RANGE"),
    (opcode::TMPFILE, "TMPFILE"),
    (opcode::STATX, "STATX"),
];

/// Counts by kind.
pub(crate) struct Tally([LongWord; KINDS]);

impl Tally {
    pub(crate) fn new() -> Self {
        Self([const { LongWord::new(0) }; KINDS])
    }

    /// Counts a message. Unknown kinds are not counted.
    pub(crate) fn count(&self, opcode: u32) {
        if let Some(count) = self.0.get(opcode as usize) {
            // Relaxed: the counts are independent.
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The kinds with at least one message, and their counts.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        let of = |opcode: u32| self.0[opcode as usize].load(Ordering::Relaxed);
        let all = NAMES.iter().map(|(opcode, name)| (*name, of(*opcode)));
        all.filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_counted_by_its_name() {
        let tally = Tally::new();
        for opcode in [opcode::STATX, opcode::LOOKUP, opcode::LOOKUP, 63, 64, u32::MAX] {
            tally.count(opcode);
        }
        assert_eq!(tally.counts(), [("LOOKUP", 2), ("STATX", 1)]);
    }
}
