//! The language of the cases: one call a line, `name arguments [= result]`. Lines that begin with `#` are comments.
//!
//! Flags are joined by `|`, modes are octal, `@N/path` begins in the directory open in slot N, `x*5000` is 5,000
//! times `x`, `-` keeps an owner, and a path `LONG` stands for a name of 255 bytes, `LONGER` for one of 256.

use super::{Call, Path};
use libc::c_int;

/// A line of a case.
pub struct Line {
    /// Text of the line.
    pub text: String,
    /// The call.
    pub call: Call,
    /// The expected result; `None`: any but a failure.
    pub expected: Option<String>,
}

/// Parses a case.
///
/// # Errors
/// A malformed line.
pub fn parse(text: &str) -> Result<Vec<Line>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(line).collect()
}

fn line(text: &str) -> Result<Line, String> {
    let (call, expected) = match text.split_once(" = ") {
        Some((call, expected)) => (call, Some(expected.to_string())),
        None => (text, None),
    };
    let mut words = Words(call.split_whitespace());
    let call = words.call().ok_or_else(|| format!("not a line of a case: {text}"))?;
    Ok(Line { text: text.to_string(), call, expected })
}

struct Words<'a>(std::str::SplitWhitespace<'a>);

impl Words<'_> {
    fn word(&mut self) -> Option<&str> {
        self.0.next()
    }

    fn number<T: std::str::FromStr>(&mut self) -> Option<T> {
        self.word()?.parse().ok()
    }

    fn octal(&mut self) -> Option<u32> {
        u32::from_str_radix(self.word()?, 8).ok()
    }

    fn path(&mut self) -> Option<Path> {
        let word = self.word()?;
        let (base, path) = match word.strip_prefix('@') {
            Some(rest) => {
                let (slot, path) = rest.split_once('/')?;
                (Some(slot.parse().ok()?), path)
            }
            None => (None, word),
        };
        let path = path.replace("LONGER", &"n".repeat(256)).replace("LONG", &"n".repeat(255));
        Some(Path { base, path: if path == "EMPTY" { String::new() } else { path } })
    }

    fn data(&mut self) -> Option<Vec<u8>> {
        let word = self.word()?;
        Some(match word.split_once('*') {
            Some((piece, times)) => piece.repeat(times.parse().ok()?).into_bytes(),
            None => word.as_bytes().to_vec(),
        })
    }

    fn id(&mut self) -> Option<Option<u32>> {
        match self.word()? {
            "-" => Some(None),
            word => word.parse().ok().map(Some),
        }
    }

    fn flags(&mut self) -> Option<c_int> {
        self.word()?.split('|').map(flag).try_fold(0, |all, flag| Some(all | flag?))
    }

    fn time(&mut self) -> Option<(i64, i64)> {
        match self.word()? {
            "now" => Some((0, libc::UTIME_NOW)),
            "omit" => Some((0, libc::UTIME_OMIT)),
            word => {
                let (seconds, nanoseconds) = word.split_once('.')?;
                Some((seconds.parse().ok()?, nanoseconds.parse().ok()?))
            }
        }
    }

    fn call(&mut self) -> Option<Call> {
        let name = self.word()?.to_string();
        let call = match name.as_str() {
            "user" => self.user()?,
            "umask" => Call::Umask(self.octal()?),
            "open" => {
                let (slot, path, flags) = (self.number()?, self.path()?, self.flags()?);
                Call::Open { slot, path, flags, mode: self.octal().unwrap_or(0) }
            }
            "dup" => Call::Dup { from: self.number()?, to: self.number()? },
            "close" => Call::Close(self.number()?),
            "fsync" => Call::Fsync(self.number()?),
            "fstat" => Call::Fstat(self.number()?),
            "fchmod" => Call::Fchmod { slot: self.number()?, mode: self.octal()? },
            "flock" => Call::Flock { slot: self.number()?, kind: self.number()? },
            "lock" => Call::OfdLock {
                slot: self.number()?,
                kind: self.number()?,
                start: self.number()?,
                bytes: self.number()?,
            },
            _ => self.contents(&name).or_else(|| self.names(&name)).or_else(|| self.attributes(&name))?,
        };
        self.0.next().is_none().then_some(call)
    }

    fn user(&mut self) -> Option<Call> {
        let mut ids = self.word()?.split('/').map(str::parse);
        let uid = ids.next()?.ok()?;
        let gid = ids.next().unwrap_or(Ok(uid)).ok()?;
        Some(Call::User { uid, gid, groups: ids.collect::<Result<_, _>>().ok()? })
    }

    fn contents(&mut self, name: &str) -> Option<Call> {
        Some(match name {
            "read" => Call::Read { slot: self.number()?, bytes: self.number()? },
            "pread" => Call::Pread { slot: self.number()?, offset: self.number()?, bytes: self.number()? },
            "write" => {
                let slot = self.number()?;
                Call::Write { slot, pieces: std::iter::from_fn(|| self.data()).collect() }
            }
            "pwrite" => Call::Pwrite { slot: self.number()?, offset: self.number()?, data: self.data()? },
            "lseek" => Call::Lseek { slot: self.number()?, by: self.number()?, whence: self.flags()? },
            "truncate" => Call::Truncate { path: self.path()?, size: self.number()? },
            "ftruncate" => Call::Ftruncate { slot: self.number()?, size: self.number()? },
            "fallocate" => {
                let (slot, mode) = (self.number()?, self.flags()?);
                Call::Fallocate { slot, mode, offset: self.number()?, bytes: self.number()? }
            }
            _ => return None,
        })
    }

    fn names(&mut self, name: &str) -> Option<Call> {
        Some(match name {
            "mkdir" => Call::Mkdir { path: self.path()?, mode: self.octal()? },
            "mknod" => {
                Call::Mknod { path: self.path()?, mode: self.octal()?, device: self.number().unwrap_or(0) }
            }
            "create" => Call::Mknod { path: self.path()?, mode: libc::S_IFREG | self.octal()?, device: 0 },
            "rmdir" => Call::Rmdir(self.path()?),
            "unlink" => Call::Unlink(self.path()?),
            "rename" => Call::Rename { from: self.path()?, to: self.path()?, flags: 0 },
            "rename2" => {
                let flags = self.flags()? as u32;
                Call::Rename { from: self.path()?, to: self.path()?, flags }
            }
            "link" => Call::Link { from: self.path()?, to: self.path()?, follow: false },
            "linkfollow" => Call::Link { from: self.path()?, to: self.path()?, follow: true },
            "linkfile" => Call::LinkFile { slot: self.number()?, to: self.path()? },
            "symlink" => Call::Symlink { target: self.path()?.path, path: self.path()? },
            "readlink" => Call::Readlink(self.path()?),
            "list" => Call::List(self.path()?),
            _ => return None,
        })
    }

    fn attributes(&mut self, name: &str) -> Option<Call> {
        Some(match name {
            "stat" => Call::Stat { path: self.path()?, follow: true },
            "lstat" => Call::Stat { path: self.path()?, follow: false },
            "chmod" => Call::Chmod { path: self.path()?, mode: self.octal()? },
            "chown" => Call::Chown { path: self.path()?, uid: self.id()?, gid: self.id()?, follow: true },
            "lchown" => Call::Chown { path: self.path()?, uid: self.id()?, gid: self.id()?, follow: false },
            "utimens" => {
                Call::Utimens { path: self.path()?, atime: self.time()?, mtime: self.time()?, follow: true }
            }
            "access" => Call::Access { path: self.path()?, wanted: self.number()? },
            "setxattr" => {
                let (path, name) = (self.path()?, self.word()?.to_string());
                let value = self.data()?;
                Call::SetXattr { path, name, value, flags: self.number().unwrap_or(0) }
            }
            "getxattr" => Call::GetXattr { path: self.path()?, name: self.word()?.to_string() },
            "removexattr" => Call::RemoveXattr { path: self.path()?, name: self.word()?.to_string() },
            "listxattr" => Call::ListXattrs(self.path()?),
            _ => return None,
        })
    }
}

/// The number of a flag.
fn flag(name: &str) -> Option<c_int> {
    Some(match name {
        "O_RDONLY" => libc::O_RDONLY,
        "O_WRONLY" => libc::O_WRONLY,
        "O_RDWR" => libc::O_RDWR,
        "O_CREAT" => libc::O_CREAT,
        "O_EXCL" => libc::O_EXCL,
        "O_TRUNC" => libc::O_TRUNC,
        "O_APPEND" => libc::O_APPEND,
        "O_DIRECTORY" => libc::O_DIRECTORY,
        "O_NOFOLLOW" => libc::O_NOFOLLOW,
        "O_PATH" => libc::O_PATH,
        "O_NOATIME" => libc::O_NOATIME,
        "O_TMPFILE" => libc::O_TMPFILE,
        "O_SYNC" => libc::O_SYNC,
        "SEEK_SET" => libc::SEEK_SET,
        "SEEK_CUR" => libc::SEEK_CUR,
        "SEEK_END" => libc::SEEK_END,
        "SEEK_DATA" => libc::SEEK_DATA,
        "SEEK_HOLE" => libc::SEEK_HOLE,
        "EXTEND" => 0,
        "KEEP_SIZE" => libc::FALLOC_FL_KEEP_SIZE,
        "PUNCH_HOLE" => libc::FALLOC_FL_PUNCH_HOLE,
        "NOREPLACE" => libc::RENAME_NOREPLACE as c_int,
        "WHITEOUT" => libc::RENAME_WHITEOUT as c_int,
        "EXCHANGE" => libc::RENAME_EXCHANGE as c_int,
        _ => return None,
    })
}
