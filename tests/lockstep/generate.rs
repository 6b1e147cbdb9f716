//! Random sequences of calls. A sequence depends on its seed alone. Each one uses some of the kinds of calls, a few names
//! and low numbers of descriptors, so that the calls meet the same files.
//!
//! Calls whose answers may differ by the documents are left out; each place says by which section.

#[path = "family.rs"]
mod family;
#[path = "random.rs"]
mod random;
#[path = "rights.rs"]
mod rights;

use super::run::{Call, PROCESSES};
use random::Random;

/// The process at the mount; the others use the library.
pub const MOUNTED: usize = PROCESSES - 1;

/// Calls of a sequence, at most.
const CALLS_MAX: u64 = 160;
const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
const OFFSETS: [u64; 12] = [0, 0, 1, 10, 100, 4095, 4096, 4097, 8192, 10000, 12287, 65536];
const LENGTHS: [u64; 9] = [0, 1, 5, 10, 100, 4095, 4096, 5000, 9000];
const MODES: [&str; 9] = ["0644", "0600", "0666", "0755", "0777", "0700", "0444", "0111", "0000"];
const ACCESS: [&str; 4] = ["O_RDONLY", "O_WRONLY", "O_RDWR", "O_RDWR"];
const ATTRIBUTES: [&str; 4] = ["user.one", "user.two", "trusted.three", "user."];
/// Bytes of a file in sequences with shared maps.
const MAPPED_BYTES: u64 = 12288;

/// Kinds of calls that a sequence contains beside those that every one does.
#[derive(Clone, Copy, Debug)]
struct Kinds {
    fifos: bool,
    path_only: bool,
    unnamed: bool,
    users: bool,
    locks: bool,
    maps: bool,
    xattrs: bool,
    times: bool,
    removals: bool,
    directories: bool,
    odd_paths: bool,
    children: bool,
    append: bool,
    permissions: bool,
    owners: bool,
    /// Processes of several users, with supplementary groups.
    rights: bool,
    /// Children that go on beside their parents.
    families: bool,
    /// Processes and daemons that are killed.
    kills: bool,
}

impl Kinds {
    fn of(random: &mut Random) -> Self {
        let mut kinds = Self {
            fifos: random.one_in(4),
            path_only: random.one_in(3),
            unnamed: random.one_in(3),
            users: random.one_in(3),
            locks: random.one_in(3),
            maps: random.one_in(4),
            xattrs: random.one_in(3),
            times: random.one_in(3),
            removals: !random.one_in(4),
            directories: !random.one_in(3),
            odd_paths: random.one_in(3),
            children: random.one_in(2),
            append: random.one_in(2),
            permissions: random.one_in(3),
            owners: random.one_in(2),
            rights: random.one_in(3),
            families: random.one_in(3),
            kills: random.one_in(6),
        };
        if kinds.rights {
            (kinds.users, kinds.permissions) = (true, true);
        }
        // To be removed when it is mended: an open FIFO and a descriptor with O_PATH do not keep their inode.
        if kinds.fifos || kinds.path_only {
            kinds.removals = false;
        }
        if kinds.kills {
            // docs/semantics.md, "What does not hold yet": for a moment after a restart, the kernel continues with its caches.
            kinds.maps = false;
        }
        if kinds.maps {
            // Each process has to be able to give the files their sizes.
            kinds.rights = false;
            // tmpfs leaves the times alone when a map is stored to; docs/semantics.md, "Shared maps", says nothing of times.
            kinds.times = false;
            // docs/semantics.md, "What does not hold yet": a private map may be a copy, which has no end of a file.
            kinds.unnamed = false;
        }
        kinds
    }
}

/// The sequence of a seed.
pub fn sequence(seed: u64) -> Vec<Call> {
    let mut random = Random::new(seed);
    let kinds = Kinds::of(&mut random);
    let names = 2 + random.below(NAMES.len() as u64 - 1) as usize;
    let count = 20 + random.below(CALLS_MAX - 20);
    let mut generator = Generator { random, kinds, names, parents: [false; PROCESSES] };
    let mut calls = generator.beginning();
    for _ in 0..count {
        let process = generator.random.below(PROCESSES as u64) as usize;
        let text = generator.call(process);
        calls.push(Call { process, text });
    }
    calls.extend((0..PROCESSES).map(|process| Call { process, text: "tree . FOLDER".to_owned() }));
    calls
}

/// Makes a call of one kind, for a process.
type MakeCall = fn(&mut Generator, usize) -> String;

struct Generator {
    random: Random,
    kinds: Kinds,
    /// Of `NAMES`, so many are used.
    names: usize,
    /// Processes that have a child which goes on.
    parents: [bool; PROCESSES],
}

impl Generator {
    /// Files to begin with: in sequences with maps, each has its final size.
    fn beginning(&mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        let mut call = |process: usize, text: String| calls.push(Call { process, text });
        if self.kinds.rights {
            self.first_users().into_iter().for_each(|(process, text)| call(process, text));
        }
        for name in &NAMES[..if self.kinds.maps { self.names } else { 1 }] {
            let process = self.random.below(PROCESSES as u64) as usize;
            call(process, format!("open . {name} O_RDWR|O_CREAT 0666"));
            if self.kinds.maps {
                call(process, format!("write 3 {MAPPED_BYTES} {name}"));
            }
            call(process, "close 3".to_owned());
        }
        calls
    }

    fn call(&mut self, process: usize) -> String {
        let kinds = self.kinds;
        if kinds.families && self.random.one_in(10) {
            return self.family(process);
        }
        if kinds.kills && self.random.one_in(25) {
            return self.kill(process);
        }
        let all: [(u64, MakeCall); 16] = [
            (16, Self::opens),
            (8, Self::descriptors),
            (9, Self::reads),
            (9, Self::writes),
            (if kinds.maps { 0 } else { 6 }, Self::sizes),
            (if kinds.removals { 14 } else { 0 }, Self::removals),
            (8, Self::names),
            (if kinds.directories { 7 } else { 0 }, Self::directories),
            (
                if kinds.rights {
                    16
                } else if kinds.permissions || kinds.users {
                    6
                } else {
                    0
                },
                Self::permissions,
            ),
            (10, Self::looks),
            (if kinds.times { 6 } else { 0 }, Self::times),
            (if kinds.locks { 12 } else { 0 }, Self::locks),
            (if kinds.xattrs { 10 } else { 0 }, Self::xattrs),
            (if kinds.maps { 14 } else { 0 }, Self::maps),
            (4, Self::process),
            (4, Self::copies),
        ];
        let total: u64 = all.iter().map(|(weight, _)| weight).sum();
        let at = self.random.below(total);
        let mut sum = 0;
        let chosen = all.iter().find(|(weight, _)| {
            sum += weight;
            at < sum
        });
        let (_, make) = chosen.expect("the number is below the sum of the weights");
        let text = make(self, process);
        let text = self.of_family(process, text);
        let is_alone = text.starts_with("child ")
            || text.starts_with("exec")
            || text.starts_with("map ")
            || text.starts_with("unmap ");
        if kinds.children && !is_alone && self.random.one_in(12) {
            // A map is not there after an exec.
            let by = if text.starts_with("load") || text.starts_with("store") || text.starts_with("msync") {
                "fork"
            } else {
                self.random.of(&["fork", "spawn"])
            };
            return format!("{by} {text}");
        }
        text
    }

    /// A descriptor of a file or directory, mostly one of the first that a process opens.
    fn fd(&mut self) -> u64 {
        3 + self.random.of(&[0, 0, 0, 1, 1, 1, 2, 2, 3, 4])
    }

    fn base(&mut self) -> String {
        // To be removed when it is mended: walks from the descriptor of a FIFO.
        let by_descriptor = self.random.one_in(6) && !self.kinds.fifos;
        if by_descriptor { self.fd().to_string() } else { ".".to_owned() }
    }

    fn name(&mut self) -> &'static str {
        NAMES[self.random.below(self.names as u64) as usize]
    }

    fn path(&mut self) -> String {
        let depth = if self.kinds.directories { self.random.of(&[1, 1, 1, 2, 2, 3]) } else { 1 };
        let mut parts: Vec<String> = (0..depth).map(|_| self.name().to_owned()).collect();
        if self.random.one_in(8) {
            parts.insert(0, "FOLDER".to_owned());
        }
        if self.kinds.odd_paths && self.random.one_in(4) {
            let at = self.random.below(parts.len() as u64 + 1).max(1) as usize;
            let part = self.random.of(&["..", ".", "", "", "@255", "@256", "@4000"]);
            parts.insert(at.min(parts.len()), part.to_owned());
        } else if self.kinds.odd_paths && self.random.one_in(10) {
            return self.random.of(&[".", "..", "\"\"", "FOLDER", "../a", "./", "@255"]).to_owned();
        }
        parts.join("/")
    }

    /// A descriptor for a path, and a path.
    fn at(&mut self) -> String {
        format!("{} {}", self.base(), self.path())
    }

    /// Offset and length of a part of a file; in sequences with maps within the first size of each file.
    fn range(&mut self) -> (u64, u64) {
        let (offset, length) = (self.random.of(&OFFSETS), self.random.of(&LENGTHS));
        // docs/semantics.md, "What does not hold yet": maps end where a file ended before it became longer.
        if self.kinds.maps {
            let offset = offset.min(MAPPED_BYTES);
            return (offset, length.min(MAPPED_BYTES - offset));
        }
        (offset, length)
    }

    fn letter(&mut self) -> char {
        char::from(b'a' + self.random.below(26) as u8)
    }

    fn opens(&mut self, _: usize) -> String {
        let at = self.at();
        let mut flags = self.random.of(&ACCESS).to_owned();
        let mut add = |flag: &str| {
            flags.push('|');
            flags.push_str(flag);
        };
        if self.kinds.fifos {
            add("O_NONBLOCK");
        }
        if self.kinds.unnamed && self.random.one_in(4) {
            add("O_TMPFILE");
            if self.random.one_in(4) {
                add("O_EXCL");
            }
            return format!("open . . {flags} {}", self.mode());
        }
        if self.random.one_in(2) && !self.kinds.maps {
            add("O_CREAT");
            if self.random.one_in(3) {
                add("O_EXCL");
            }
        }
        if self.random.one_in(6) && !self.kinds.maps {
            add("O_TRUNC");
        }
        if self.kinds.append && self.random.one_in(3) && !self.kinds.maps {
            add("O_APPEND");
        }
        let path_only = self.kinds.path_only && self.random.one_in(3);
        let choices: [(bool, u64, &str); 5] = [
            (self.kinds.rights, 10, "O_NOATIME"),
            (path_only, 1, "O_PATH"),
            (true, 8, "O_DIRECTORY"),
            (true, 8, "O_NOFOLLOW"),
            (self.kinds.children, 6, "O_CLOEXEC"),
        ];
        for (is_used, bound, flag) in choices {
            if is_used && self.random.one_in(bound) {
                add(flag);
            }
        }
        if self.kinds.directories && self.random.one_in(4) {
            let directory = if path_only { "O_PATH" } else { "O_RDONLY" };
            let more = if self.kinds.fifos { "|O_NONBLOCK" } else { "" };
            return format!("open {at} {directory}{more} 0");
        }
        // Walks that leave the tree, also by an absolute path, are ENOSYS (tests/answers.rs, `WITHOUT_LINKS`).
        // To be removed when it is mended: walks of this kind to a FIFO.
        if self.kinds.odd_paths && self.random.one_in(6) && !at.contains("FOLDER") && !self.kinds.fifos {
            let resolve = self.random.of(&["RESOLVE_BENEATH", "RESOLVE_IN_ROOT", "RESOLVE_NO_SYMLINKS", "0"]);
            let access = self.random.of(&["O_RDONLY", "O_RDWR"]);
            return format!("open2 {at} {access}|O_NONBLOCK {resolve}");
        }
        format!("open {at} {flags} {}", self.mode())
    }

    fn descriptors(&mut self, _: usize) -> String {
        let (fd, other) = (self.fd(), self.fd());
        let nonblocking = if self.kinds.fifos { "O_NONBLOCK" } else { "0" };
        match self.random.below(14) {
            0..=5 => format!("close {fd}"),
            6 => format!("dup {fd}"),
            7 => format!("dup2 {fd} {other}"),
            8 => format!("dup3 {fd} {other} {}", self.random.of(&["0", "O_CLOEXEC"])),
            9 => format!("dupfd {fd} {other}"),
            10 => format!("getfl {fd}"),
            11 => {
                let append = if self.kinds.append && !self.kinds.maps { "|O_APPEND" } else { "" };
                format!("setfl {fd} {nonblocking}{append}")
            }
            12 => format!("setfd {fd} {}", self.random.below(2)),
            _ => format!("reopen {fd} {}|{nonblocking}", self.random.of(&ACCESS)),
        }
    }

    fn reads(&mut self, _: usize) -> String {
        let fd = self.fd();
        let (offset, length) = self.range();
        let whence = ["SEEK_SET", "SEEK_SET", "SEEK_CUR", "SEEK_END", "SEEK_DATA", "SEEK_HOLE"];
        match self.random.below(8) {
            0..=2 => format!("read {fd} {length}"),
            3 | 4 => format!("pread {fd} 20000 {offset}"),
            5 => format!("readv {fd} {length} 100"),
            // A position that a write would make the file longer at is left to sequences without maps.
            6 if self.kinds.maps => format!("lseek {fd} 0 SEEK_SET"),
            6 => format!("lseek {fd} {offset} {}", self.random.of(&whence)),
            _ => format!("preadv {fd} {length} 4096 {offset}"),
        }
    }

    fn writes(&mut self, _: usize) -> String {
        let (fd, letter) = (self.fd(), self.letter());
        let (offset, length) = self.range();
        // With maps only writes at an offset: a position may be such that the file becomes longer.
        match self.random.below(if self.kinds.maps { 3 } else { 8 }) {
            0..=2 => format!("pwrite {fd} {length} {letter} {offset}"),
            3 => format!("pwritev {fd} {length} 10 {letter} {offset}"),
            4 => format!("writev {fd} {length} 10 {letter}"),
            _ => format!("write {fd} {length} {letter}"),
        }
    }

    fn sizes(&mut self, _: usize) -> String {
        let fd = self.fd();
        let (offset, length) = self.range();
        // tmpfs has no FALLOC_FL_ZERO_RANGE, FALLOC_FL_COLLAPSE_RANGE and FALLOC_FL_INSERT_RANGE.
        let modes =
            ["0", "FALLOC_FL_KEEP_SIZE", "FALLOC_FL_PUNCH_HOLE|FALLOC_FL_KEEP_SIZE", "FALLOC_FL_PUNCH_HOLE"];
        match self.random.below(6) {
            // To be removed when it is mended: a truncate by path to the size that the file has leaves its times alone.
            0 if !self.kinds.times => format!("truncate {} {offset}", self.path()),
            1 | 2 => format!("ftruncate {fd} {offset}"),
            3 => format!("fsync {fd}"),
            4 => format!("fdatasync {fd}"),
            _ => format!("fallocate {fd} {} {offset} {length}", self.random.of(&modes)),
        }
    }

    fn removals(&mut self, _: usize) -> String {
        let (at, to) = (self.at(), self.at());
        match self.random.below(9) {
            0..=2 => format!("unlink {at} 0"),
            3 => format!("unlink {at} AT_REMOVEDIR"),
            4..=6 => format!("rename {at} {to} 0"),
            7 => format!("rename {at} {to} RENAME_EXCHANGE"),
            _ => format!("rename {at} {to} {}", self.random.of(&["RENAME_NOREPLACE", "RENAME_WHITEOUT"])),
        }
    }

    fn names(&mut self, _: usize) -> String {
        let (at, to) = (self.at(), self.at());
        match self.random.below(10) {
            0..=2 => format!("link {at} {to} {}", self.random.of(&["0", "0", "AT_SYMLINK_FOLLOW"])),
            3 | 4 => format!("symlink {} {at}", self.target()),
            5 => format!("readlink {at}"),
            // To be removed when it is mended: an open FIFO gets no further name, by neither of these calls.
            6 if !self.kinds.fifos => format!("linkfd {} {at}", self.fd()),
            // The kernel compares the credentials of the opener with those of the caller by identity: not in sequences in which
            // a process becomes the user again that it is.
            7 if !self.kinds.fifos && !self.kinds.rights => {
                format!("link {} \"\" {to} AT_EMPTY_PATH", self.fd())
            }
            8 if self.kinds.fifos => format!("mknod {at} S_IFIFO {}", self.mode()),
            // A private map of an empty file: the same section as for files without a name.
            9 if self.kinds.maps => format!("mknod {at} S_IFSOCK {}", self.mode()),
            _ => format!("mknod {at} {} {}", self.random.of(&["S_IFREG", "S_IFSOCK"]), self.mode()),
        }
    }

    /// The target of a symbolic link.
    fn target(&mut self) -> String {
        let path = self.path();
        if path == "\"\"" { "a".to_owned() } else { path }
    }

    fn directories(&mut self, process: usize) -> String {
        match self.random.below(8) {
            0..=3 => {
                format!("mkdir {} {}", self.at(), self.directory_mode())
            }
            4 => format!("chdir {}", self.path()),
            5 => format!("fchdir {}", self.fd()),
            6 => "chdir FOLDER".to_owned(),
            // docs/semantics.md, "Files that programs at the mount and under `hearth run` change in turns": ENOENT for a moment.
            _ if process == MOUNTED => format!("list {}", self.at()),
            // To be removed when it is mended: a process that may not search its working directory gets no path of it.
            _ if self.kinds.users => format!("list {}", self.at()),
            _ => "getcwd".to_owned(),
        }
    }

    fn looks(&mut self, _: usize) -> String {
        let (at, fd) = (self.at(), self.fd());
        match self.random.below(12) {
            0 | 1 => format!("stat {at} {}", self.random.of(&["0", "AT_SYMLINK_NOFOLLOW"])),
            2 | 3 => format!("fstat {fd}"),
            4 => format!("statx {at} AT_SYMLINK_NOFOLLOW"),
            5 | 6 => format!("list {at}"),
            7 => format!("listfd {fd}"),
            8 => self.access(&at),
            9 => format!("stat {fd} \"\" AT_EMPTY_PATH"),
            _ => "tree . FOLDER".to_owned(),
        }
    }

    fn times(&mut self, _: usize) -> String {
        let (at, fd, time) = (self.at(), self.fd(), 1000 + self.random.below(5));
        // Not the time of access. docs/semantics.md, "Times": reading does not change it.
        match self.random.below(5) {
            0 => format!("utimens {at} {time} {}", self.random.of(&["0", "AT_SYMLINK_NOFOLLOW"])),
            1 => format!("futimens {fd} {time}"),
            _ => format!("mtime {at} AT_SYMLINK_NOFOLLOW"),
        }
    }

    fn locks(&mut self, process: usize) -> String {
        let (fd, kind) = (self.fd(), self.random.of(&["F_RDLCK", "F_WRLCK", "F_WRLCK", "F_UNLCK"]));
        let (start, length) = (self.random.below(4) * 10, self.random.below(4) * 10);
        match self.random.below(8) {
            0 | 1 => format!(
                "flock {fd} {}|LOCK_NB",
                self.random.of(&["LOCK_SH", "LOCK_EX", "LOCK_EX", "LOCK_UN"])
            ),
            2..=4 => format!("lock {fd} F_SETLK {kind} {start} {length}"),
            // FUSE has no way to say that an open file description owns a lock, neither for the kernel nor for the gateway.
            5 if !self.kinds.owners || process != MOUNTED => {
                format!("lock {fd} F_OFD_SETLK {kind} {start} {length}")
            }
            asked => {
                let call = if asked == 6 { "F_GETLK" } else { "F_OFD_GETLK" };
                let owner = if self.kinds.owners && process != MOUNTED { " owner" } else { "" };
                format!("lock {fd} {call} F_WRLCK {start} {length}{owner}")
            }
        }
    }

    fn xattrs(&mut self, _: usize) -> String {
        let (path, fd, letter) = (self.path(), self.fd(), self.letter());
        let (name, bytes) = (self.random.of(&ATTRIBUTES), self.random.of(&[0, 1, 10, 300]));
        let flags = self.random.of(&["0", "0", "XATTR_CREATE", "XATTR_REPLACE"]);
        match self.random.below(10) {
            0 => format!("setxattr {path} {name} {bytes} {letter} {flags}"),
            1 => format!("lsetxattr {path} {name} {bytes} {letter} {flags}"),
            2 => format!("fsetxattr {fd} {name} {bytes} {letter} {flags}"),
            3 => format!("getxattr {path} {name} {bytes}"),
            4 => format!("lgetxattr {path} {name} 300"),
            5 => format!("fgetxattr {fd} {name} 300"),
            6 => format!("listxattr {path}"),
            7 => format!("flistxattr {fd}"),
            8 => format!("removexattr {path} {name}"),
            _ => format!("fremovexattr {fd} {name}"),
        }
    }

    fn maps(&mut self, _: usize) -> String {
        let (map, fd) = (self.random.below(2), self.fd());
        let at = self.random.of(&[0, 10, 4090, 4096, 8000]);
        match self.random.below(12) {
            0..=2 => {
                format!("map {map} {fd} {} 12288 0", self.random.of(&["PROT_READ", "PROT_READ|PROT_WRITE"]))
            }
            3 => format!("unmap {map}"),
            4..=6 => format!("load {map} {at} 100"),
            7..=9 => format!("store {map} {at} {} {}", self.random.of(&[1, 100, 4000]), self.letter()),
            10 => format!("msync {map}"),
            // Made and ended at once. docs/semantics.md, "What does not hold yet": a private map may be a copy.
            _ => format!("private {fd} {} 4096 0", self.random.of(&["PROT_READ", "PROT_READ|PROT_WRITE"])),
        }
    }

    fn process(&mut self, _: usize) -> String {
        match self.random.below(3) {
            0 if self.kinds.children => "exec".to_owned(),
            1 => format!("umask {}", self.random.of(&["022", "0", "077"])),
            _ => "tree . FOLDER".to_owned(),
        }
    }

    fn copies(&mut self, _: usize) -> String {
        let (fd, other) = (self.fd(), self.fd());
        let (from, length) = self.range();
        // With maps a copy to a position could make the file longer.
        if self.kinds.maps {
            return format!("copy {fd} {from} {other} {from} {length}");
        }
        let to = self.random.of(&OFFSETS);
        // To be removed when it is mended: no bytes of a directory are an error.
        let length = length.max(1);
        match self.random.below(4) {
            0 => format!("copy {fd} -1 {other} -1 {length}"),
            1 => format!("copy {fd} {from} {other} {to} {length}"),
            2 => format!("sendfile {fd} {other} -1 {length}"),
            _ => format!("sendfile {fd} {other} {from} {length}"),
        }
    }
}
