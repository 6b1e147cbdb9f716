//! Conformance suite for engines: calls as plain data, actors that execute them, and a table of cases.
//!
//! The same calls run against an engine (through [`crate::Vfs`]) and, in this crate's tests, against the kernel's
//! tmpfs: so the kernel confirms the expected results of the table.

mod cases;
mod player;
mod script;

pub use cases::CASES;
pub use player::Player;
pub use script::{Line, parse};

use crate::Engine;
use crate::errno;
use libc::c_int;
use std::sync::Arc;

/// Path argument of a call: relative to the root of the tree, or to an open directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// Slot of the open directory, if any.
    pub base: Option<usize>,
    /// The path.
    pub path: String,
}

/// A call of one process. Slots are its descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants and their fields are the system calls' own")]
pub enum Call {
    /// The process changes to this user, group and supplementary groups.
    User {
        uid: u32,
        gid: u32,
        groups: Vec<u32>,
    },
    Umask(u32),
    Open {
        slot: usize,
        path: Path,
        flags: c_int,
        mode: u32,
    },
    Dup {
        from: usize,
        to: usize,
    },
    Close(usize),
    Read {
        slot: usize,
        bytes: usize,
    },
    Pread {
        slot: usize,
        offset: u64,
        bytes: usize,
    },
    /// One call writes all pieces.
    Write {
        slot: usize,
        pieces: Vec<Vec<u8>>,
    },
    Pwrite {
        slot: usize,
        offset: u64,
        data: Vec<u8>,
    },
    Lseek {
        slot: usize,
        by: i64,
        whence: c_int,
    },
    Truncate {
        path: Path,
        size: i64,
    },
    Ftruncate {
        slot: usize,
        size: i64,
    },
    Fallocate {
        slot: usize,
        mode: c_int,
        offset: u64,
        bytes: u64,
    },
    Fsync(usize),
    Stat {
        path: Path,
        follow: bool,
    },
    Fstat(usize),
    Mkdir {
        path: Path,
        mode: u32,
    },
    Mknod {
        path: Path,
        mode: u32,
        device: u64,
    },
    Rmdir(Path),
    Unlink(Path),
    Rename {
        from: Path,
        to: Path,
        flags: u32,
    },
    Link {
        from: Path,
        to: Path,
        follow: bool,
    },
    /// Gives an open file a name, as `linkat` does by `/proc/self/fd`.
    LinkFile {
        slot: usize,
        to: Path,
    },
    Symlink {
        target: String,
        path: Path,
    },
    Readlink(Path),
    Chmod {
        path: Path,
        mode: u32,
    },
    Fchmod {
        slot: usize,
        mode: u32,
    },
    Chown {
        path: Path,
        uid: Option<u32>,
        gid: Option<u32>,
        follow: bool,
    },
    /// Seconds, or the `UTIME_*` number in the nanoseconds.
    Utimens {
        path: Path,
        atime: (i64, i64),
        mtime: (i64, i64),
        follow: bool,
    },
    Access {
        path: Path,
        wanted: c_int,
    },
    /// Opens a directory and reads all its entries.
    List(Path),
    SetXattr {
        path: Path,
        name: String,
        value: Vec<u8>,
        flags: c_int,
    },
    GetXattr {
        path: Path,
        name: String,
    },
    RemoveXattr {
        path: Path,
        name: String,
    },
    ListXattrs(Path),
    /// Without waiting: 1 shared, 2 exclusive, 0 unlocks.
    Flock {
        slot: usize,
        kind: u8,
    },
    /// A lock of the description on a range, without waiting; kinds as above.
    OfdLock {
        slot: usize,
        kind: u8,
        start: i64,
        bytes: i64,
    },
}

/// Result of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The call succeeded without a result.
    Done,
    /// A count or an offset.
    Number(u64),
    /// Bytes, a link's target.
    Bytes(Vec<u8>),
    /// Names, sorted; with types in directories.
    Names(Vec<String>),
    /// Attributes.
    Stat(StatSummary),
    /// The number of an error.
    Failed(c_int),
    /// The path left the tree, or the kernel would have to open the file.
    Elsewhere,
}

/// Attributes as far as all file systems agree on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of stat")]
pub struct StatSummary {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    /// 0 for a directory.
    pub size: u64,
    pub rdev: u64,
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Done => write!(f, "ok"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Bytes(bytes) => {
                let text = bytes.escape_ascii().to_string();
                if text.len() > 200 {
                    write!(f, "\"{}...\" {}", &text[..200], bytes.len())
                } else {
                    write!(f, "\"{text}\"")
                }
            }
            Self::Names(names) => write!(f, "[{}]", names.join(" ")),
            Self::Stat(seen) => {
                let StatSummary { mode, uid, gid, links, size, .. } = seen;
                write!(f, "{mode:o} {uid} {gid} {links} {size}")
            }
            Self::Failed(number) => match errno::name(*number) {
                Some(name) => write!(f, "{name}"),
                None => write!(f, "errno {number}"),
            },
            Self::Elsewhere => write!(f, "elsewhere"),
        }
    }
}

/// An executor of calls in a tree, as one process.
pub trait Actor {
    /// Makes a call.
    fn call(&mut self, call: &Call) -> Answer;
}

/// Plays one case. A line without an expectation must succeed.
///
/// # Errors
/// The line with another result than expected, and that result.
pub fn play(actor: &mut dyn Actor, text: &str) -> Result<(), String> {
    for Line { text, call, expected } in parse(text)? {
        let answer = actor.call(&call);
        let right = match &expected {
            Some(expected) => *expected == answer.to_string(),
            None => !matches!(answer, Answer::Failed(_) | Answer::Elsewhere),
        };
        if !right {
            return Err(format!("`{text}` answered {answer}"));
        }
    }
    Ok(())
}

/// Plays all cases, each against an engine of its own whose root belongs to root with mode 755. Returns the name of
/// each failed case and the reason.
pub fn run<E: Engine>(factory: &mut dyn FnMut() -> Arc<E>) -> Vec<(&'static str, String)> {
    let mut failures = Vec::new();
    for (name, text) in CASES {
        let result = match Player::new(factory()) {
            Ok(mut player) => play(&mut player, text).map(|()| player.end()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = result {
            failures.push((*name, why));
        }
    }
    failures
}
