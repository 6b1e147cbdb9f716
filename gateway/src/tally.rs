//! How many messages of each kind were served: what a program's calls cost in messages is counted, never timed.

use crate::abi::opcode;
use ipc::LongWord;
use ipc::sync::Ordering;

/// More than the largest number of a kind.
const KINDS: usize = 64;

/// Names of the kinds that are served, as the kernel's documents have them.
const NAMES: [(u32, &str); 41] = [
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
    (opcode::STATX, "STATX"),
];

/// Counts by kind.
pub(crate) struct Tally([LongWord; KINDS]);

impl Tally {
    pub(crate) fn new() -> Self {
        Self([const { LongWord::new(0) }; KINDS])
    }

    /// A message of this kind came. One that is not known is not counted.
    pub(crate) fn count(&self, opcode: u32) {
        if let Some(count) = self.0.get(opcode as usize) {
            // Relaxed: each count stands for itself.
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The kinds of which any came, and how many.
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
