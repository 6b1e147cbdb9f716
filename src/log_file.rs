//! The log of a process in the background: its standard error, which `up` opened for appending. A log that has reached its
//! limit is kept as `NAME.old` in place of the one before it, and a new one begins, so that a node whose programs make it say
//! the same for months fills no disk.
//!
//! A keeper and its daemon write to the same file. Each looks before every line whether the file still has its name; if the
//! other one has renamed it, it goes on in the new one. So no line is lost. The report of a panic does not come by `tracing`,
//! and may still be written to the old file.

use rustix::fs::{FlockOperation, Mode, OFlags, fcntl_getfl, flock, fstat};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tracing_subscriber::fmt::MakeWriter;

/// Bytes of a log before a new one begins.
const BYTES_MAX: u64 = 8 << 20;
/// The logs of processes in the background. Another file to which a user has sent standard error is left alone.
const NAMES: [&str; 3] = ["serve.log", "gateway.log", "manager.log"];
/// Ends the name of the former log.
const OLD: &str = ".old";

/// Standard error, and the name of the log that it is.
pub struct LogFile(Option<PathBuf>);

impl LogFile {
    /// The log of this process, if it has one.
    pub fn of_stderr() -> Self {
        let appends = fcntl_getfl(io::stderr()).is_ok_and(|flags| flags.contains(OFlags::APPEND));
        let path = fs::read_link("/proc/self/fd/2").ok().filter(|_| appends);
        Self(path.and_then(|path| log_of(&path)))
    }

    fn look(&self) {
        let Some(path) = &self.0 else { return };
        // Without space or descriptors it goes on in the file that it has.
        if let Ok(Some(log)) = next(path, &io::stderr(), BYTES_MAX) {
            let _ = rustix::stdio::dup2_stderr(log);
        }
    }
}

/// The log that a file is, or was.
fn log_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(OLD).unwrap_or(name);
    NAMES.contains(&name).then(|| path.with_file_name(name))
}

/// The file with which a log goes on, if that is not the present one.
fn next(path: &Path, present: &impl AsFd, limit: u64) -> io::Result<Option<File>> {
    let own = fstat(present)?;
    let is_present = |file: &fs::Metadata| (file.dev(), file.ino()) == (own.st_dev, own.st_ino);
    let named = fs::symlink_metadata(path);
    match &named {
        Ok(named) if is_present(named) && named.len() < limit => return Ok(None),
        Ok(named) if is_present(named) => rename(path, is_present)?,
        Ok(named) if !named.is_file() => return Ok(None),
        Ok(_) => {}
        // A cluster that was removed gets no new log.
        Err(why) if why.kind() == io::ErrorKind::NotFound && !is_kept(path, is_present) => return Ok(None),
        Err(why) if why.kind() == io::ErrorKind::NotFound => {}
        Err(_) => return Ok(None),
    }
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(own.st_mode & Mode::RWXU.bits())
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
        .map(Some)
}

/// Whether the present file is the former log: another process has renamed it, and not yet made the new one.
fn is_kept(path: &Path, is_present: impl Fn(&fs::Metadata) -> bool) -> bool {
    fs::symlink_metadata(former(path)).is_ok_and(|file| is_present(&file))
}

/// Gives the log the name of the former one, if it still has its own.
fn rename(path: &Path, is_present: impl Fn(&fs::Metadata) -> bool) -> io::Result<()> {
    // Another process may do the same: the second one finds that the file has another name. A description of its own, since
    // both processes may have that of the log in common.
    let log = File::open(path)?;
    flock(&log, FlockOperation::LockExclusive)?;
    if is_present(&log.metadata()?) && fs::symlink_metadata(path).is_ok_and(|named| is_present(&named)) {
        fs::rename(path, former(path))?;
    }
    Ok(())
}

/// Where the former log is.
pub fn former(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or(OsStr::new("log")).to_owned();
    name.push(OLD);
    path.with_file_name(name)
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = io::StderrLock<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        let stderr = io::stderr().lock();
        self.look();
        stderr
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn text(path: &Path) -> String {
        let mut text = String::new();
        let read = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
        read.map_or_else(|why| format!("{why}"), |_| text)
    }

    /// As one of two processes that write to a log.
    struct Writer(File);

    impl Writer {
        fn open(path: &Path) -> Self {
            Self(OpenOptions::new().append(true).create(true).mode(0o600).open(path).unwrap())
        }

        fn say(&mut self, path: &Path, line: &str) {
            if let Some(file) = next(path, &self.0, 20).unwrap() {
                self.0 = file;
            }
            writeln!(self.0, "{line}").unwrap();
        }
    }

    #[test]
    fn a_log_at_its_limit_is_kept_and_both_writers_go_on_in_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.log");
        let (mut keeper, mut daemon) = (Writer::open(&path), Writer::open(&path));
        keeper.say(&path, "keeper 1");
        daemon.say(&path, "daemon 1");
        daemon.say(&path, "daemon 2");
        daemon.say(&path, "daemon 3");
        keeper.say(&path, "keeper 2");
        assert_eq!(text(&former(&path)), "keeper 1\ndaemon 1\ndaemon 2\n");
        assert_eq!(text(&path), "daemon 3\nkeeper 2\n");
        for number in 3..9 {
            keeper.say(&path, &format!("keeper {number}"));
        }
        daemon.say(&path, "daemon 4");
        assert_eq!(text(&former(&path)), "keeper 4\nkeeper 5\nkeeper 6\n", "the one before it is gone");
        assert_eq!(text(&path), "keeper 7\nkeeper 8\ndaemon 4\n");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_writer_between_the_rename_and_the_new_log_makes_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.log");
        let mut writer = Writer::open(&path);
        fs::rename(&path, former(&path)).unwrap();
        writer.say(&path, "here");
        assert_eq!((text(&path), text(&former(&path))), ("here\n".to_owned(), String::new()));
    }

    #[test]
    fn a_log_that_was_removed_or_is_no_file_gets_no_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.log");
        let mut writer = Writer::open(&path);
        fs::remove_file(&path).unwrap();
        writer.say(&path, "nobody reads this");
        assert!(!path.exists());
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        writer.say(&path, "nor this");
        assert!(!dir.path().join("elsewhere").exists());
    }

    #[test]
    fn other_files_than_logs_are_left_alone() {
        let of = |path: &str| log_of(Path::new(path)).map(|path| path.display().to_string());
        assert_eq!(of("/d/node-1/serve.log").as_deref(), Some("/d/node-1/serve.log"));
        assert_eq!(of("/d/node-1/gateway.log.old").as_deref(), Some("/d/node-1/gateway.log"));
        assert_eq!((of("/d/notes"), of("/d/node-1/serve.log (deleted)")), (None, None));
    }
}
