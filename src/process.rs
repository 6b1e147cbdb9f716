//! The daemon's process as others see it: its pid file, and waiting for its end.

use crate::error::{Error, Result};
use ipc::{Host, SystemHost};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pid: Pid,
    /// When it started, in clock ticks since boot: field 22 of its `stat`.
    started: u64,
}

impl Process {
    /// This process.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn this() -> Result<Self> {
        let pid = rustix::process::getpid();
        let started = started(pid).ok_or_else(|| Error::new("cannot read /proc/self/stat"))?;
        Ok(Self { pid, started })
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// The same, for calls of the kernel.
    pub fn raw(&self) -> Pid {
        self.pid
    }

    /// Writes the pid file, in one step.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&self, file: &Path) -> Result<()> {
        let unfinished = PathBuf::from(format!("{}.new", file.display()));
        let mut made = fs::File::create(&unfinished).map_err(Error::at("write", &unfinished))?;
        // A copy of the file, in a copy of the cluster's folder, has another number and says nothing.
        let inode = made.metadata().map_err(Error::at("write", &unfinished))?.ino();
        writeln!(made, "{} {} {inode}", self.pid(), self.started).map_err(Error::at("write", &unfinished))?;
        fs::rename(&unfinished, file).map_err(Error::at("write", file))
    }

    /// The process of a pid file, if it is alive.
    pub fn load(file: &Path) -> Option<Self> {
        let text = fs::read_to_string(file).ok()?;
        let mut parts = text.split_ascii_whitespace();
        let (pid, since) = (parts.next()?, parts.next()?);
        let saved = Self { pid: Pid::from_raw(pid.parse().ok()?)?, started: since.parse().ok()? };
        // Files of before do not say it.
        if let Some(inode) = parts.next() {
            let own = inode.parse() == Ok(fs::metadata(file).ok()?.ino());
            return (own && started(saved.pid)? == saved.started).then_some(saved);
        }
        (started(saved.pid)? == saved.started).then_some(saved)
    }

    /// Removes its pid file and the files that exist only while the process does. If the folder was removed and made anew, the
    /// pid file names another process by now, and all of them are that one's.
    pub fn remove_files(&self, pid_file: &Path, others: &[&Path]) {
        if Self::load(pid_file).as_ref() != Some(self) {
            return;
        }
        for file in others.iter().chain([&pid_file]) {
            let _ = fs::remove_file(file);
        }
    }

    /// Whether it stands still because it was sent SIGSTOP, or is traced.
    pub fn is_stopped(&self) -> bool {
        self.is_in(['T', 't'])
    }

    /// Whether it was killed, and ends as soon as the kernel lets its last thread go.
    pub fn is_ending(&self) -> bool {
        self.is_in(['Z', 'X'])
    }

    /// Whether it sees the same mounts as this process, as far as this user may know.
    pub fn has_mounts_of_this(&self) -> bool {
        let mounts = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
        mounts(&self.pid().to_string()).is_some_and(|theirs| Some(theirs) == mounts("self"))
    }

    fn is_in(&self, states: [char; 2]) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // Behind the name of the program, which may have any letter in it.
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(states))
    }

    /// Waits until it is gone, for so long.
    pub fn wait_until_gone(&self, limit: Duration) {
        if let (Some(pidfd), Ok(timeout)) = (self.descriptor(), limit.try_into()) {
            // The caller checks again whether it is still there.
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
        }
    }

    /// A descriptor by which its end is waited for; none if it has ended.
    pub fn descriptor(&self) -> Option<OwnedFd> {
        let pidfd = pidfd_open(self.pid, PidfdFlags::empty()).ok()?;
        // Held before the check of its start: from here on the number stands for this process only.
        (started(self.pid) == Some(self.started)).then_some(pidfd)
    }

    /// Sends a signal and waits for the process to end.
    ///
    /// # Errors
    /// It may not be signalled, or lives on after `limit`.
    pub fn end(&self, signal: Signal, limit: Duration) -> Result<()> {
        self.end_with_notice(signal, (limit, limit), || (), || false)
    }

    /// The same; `tell` is called if the process lives on after `soon`. From [`HOPELESS`] later on the wait ends as soon as
    /// `is_hopeless`.
    ///
    /// # Errors
    /// As of [`Self::end`].
    pub fn end_with_notice(
        &self,
        signal: Signal,
        (soon, limit): (Duration, Duration),
        tell: impl FnOnce(),
        is_hopeless: impl Fn() -> bool,
    ) -> Result<()> {
        let pid = self.pid();
        let gone = |why: rustix::io::Errno| match why {
            rustix::io::Errno::SRCH => Ok(()),
            why => Err(Error::new(format!("cannot end process {pid}: {why}"))),
        };
        let Some(pidfd) = self.descriptor() else { return Ok(()) };
        if let Err(why) = kill_process(self.pid, signal) {
            return gone(why);
        }
        let ends_within = |limit: Duration| {
            let timeout = limit.try_into().map_err(|_| Error::new("the time limit is out of range"))?;
            let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
            ready
                .map(|count| count > 0)
                .map_err(|why| Error::new(format!("cannot wait for process {pid}: {why}")))
        };
        let soon = if is_hopeless() { soon.min(HOPELESS) } else { soon };
        if ends_within(soon.min(limit))? {
            return Ok(());
        }
        tell();
        let mut waited = soon;
        while waited < limit && !(waited >= soon + HOPELESS && is_hopeless()) {
            let step = HOPELESS.min(limit - waited);
            if ends_within(step)? {
                return Ok(());
            }
            waited += step;
        }
        Err(Error::new(format!("process {pid} did not end within {} s", waited.as_secs())))
    }
}

/// How long a process that cannot end is waited for before that is told and again after it, and how often it is looked at.
const HOPELESS: Duration = Duration::from_millis(1500);

/// With this variable libinfinipath, to which libfabric is linked, handles no signals. Without it that library handles them
/// while libfabric looks for devices, by `exit`, which waits for a lock of the very thread that it interrupts: a process
/// that gets SIGTERM meanwhile would hang.
const NO_HANDLERS: (&str, &str) = ("IPATH_NO_BACKTRACE", "1");

/// A command that runs the program of this process, the same version of it also after another one was installed in its place.
pub fn this_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("hearth").env(NO_HANDLERS.0, NO_HANDLERS.1);
    command
}

/// Every process of which this user may know that it has `variable=value` in its environment.
pub fn with_environment(variable: &str, value: &Path) -> Vec<Process> {
    processes()
        .filter(|pid| variable_of(*pid, variable).is_some_and(|set| set == value.as_os_str().as_bytes()))
        .filter_map(|pid| Some(Process { pid, started: started(pid)? }))
        .collect()
}

/// The value of a variable in the environment with which a process began, as far as this user may know. A program may have
/// overwritten it since.
pub fn variable_of(pid: Pid, variable: &str) -> Option<Vec<u8>> {
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()?;
    let mut parts = environment.split(|byte| *byte == 0);
    let value = |part: &[u8]| part.strip_prefix(variable.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
    parts.find_map(value)
}

/// The subcommand that a process of this program runs; none if the process runs another program.
pub fn subcommand(pid: Pid) -> Option<String> {
    let own = format!("/proc/{}", pid.as_raw_nonzero());
    let program = fs::read_link(format!("{own}/exe")).ok()?;
    // Another version may have been installed in its place.
    let name = program.file_name()?.to_str()?.trim_end_matches(" (deleted)").to_owned();
    let arguments = fs::read(format!("{own}/cmdline")).ok()?;
    let first = arguments.split(|byte| *byte == 0).nth(1)?;
    (name == "hearth").then(|| String::from_utf8_lossy(first).into_owned())
}

/// Every process that descends from one of these, and is no more than that: these are not among them.
pub fn descendants(of: &[Pid]) -> Vec<Process> {
    descendants_without(of, |_| false)
}

/// The same without those that are left out, and without their descendants.
pub fn descendants_without(of: &[Pid], is_left_out: impl Fn(Pid) -> bool) -> Vec<Process> {
    let mut others: Vec<(Pid, Pid)> = processes()
        .filter_map(|pid| Some((pid, parent(pid)?)))
        .filter(|(pid, _)| !of.contains(pid))
        .collect();
    let (mut found, mut looked_at) = (of.to_vec(), 0);
    while looked_at < found.len() {
        let children = others.extract_if(.., |(_, parent)| *parent == found[looked_at]);
        let children: Vec<Pid> = children.map(|(pid, _)| pid).filter(|pid| !is_left_out(*pid)).collect();
        found.extend(children);
        looked_at += 1;
    }
    let found = &found[of.len()..];
    found.iter().filter_map(|pid| Some(Process { pid: *pid, started: started(*pid)? })).collect()
}

/// Whether a process descends from one whose first thread has this name.
pub fn descends_from(pid: u32, name: &str) -> bool {
    let mut next = i32::try_from(pid).ok().and_then(Pid::from_raw);
    while let Some(pid) = next.and_then(parent) {
        let comm = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
        if comm.is_ok_and(|comm| comm.trim_end() == name) {
            return true;
        }
        next = Some(pid);
    }
    false
}

/// The parent of a process; none of the first process, and of one that is gone.
fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // Behind the name of the program, which may have any letter in it, and the state.
    let field = stat.rsplit(')').next()?.split_ascii_whitespace().nth(1)?;
    field.parse().ok().and_then(Pid::from_raw)
}

/// Every process of which this user may know that it maps a file whose path begins so, and that is there still.
pub fn with_mapping(path: &Path) -> Vec<Process> {
    let path = path.display().to_string();
    processes()
        .filter(|pid| {
            fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))
                .is_ok_and(|maps| maps.lines().any(|line| names(line, &path)))
        })
        .filter_map(|pid| Some(Process { pid, started: started(pid)? }))
        .collect()
}

/// A file that a process maps, and whose path begins so.
pub fn mapped_below(pid: Pid, path: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero())).ok()?;
    let line = maps.lines().find(|line| names(line, path))?;
    Some(PathBuf::from(&line[line.find('/')?..]))
}

/// Every process of which this user may know that it holds the lock (`flock`) of a file.
pub fn with_lock(path: &Path) -> Vec<Process> {
    processes()
        .filter(|pid| {
            let own = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
            let open = fs::read_dir(own.join("fd")).into_iter().flatten().flatten();
            let mut of_file =
                open.filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == path));
            of_file.any(|entry| {
                let facts = fs::read_to_string(own.join("fdinfo").join(entry.file_name()));
                facts
                    .unwrap_or_default()
                    .lines()
                    .any(|line| line.starts_with("lock:") && line.contains("FLOCK"))
            })
        })
        .filter_map(|pid| Some(Process { pid, started: started(pid)? }))
        .collect()
}

/// Every process of which this user may know that it stands in a folder, runs a program below it, or has a file open or
/// mapped there; with the program's name.
pub fn using(folder: &Path) -> Vec<(Pid, String)> {
    let below = |link: PathBuf| fs::read_link(link).is_ok_and(|target| target.starts_with(folder));
    let path = folder.display().to_string();
    processes()
        .filter(|pid| {
            let own = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
            let open = fs::read_dir(own.join("fd")).into_iter().flatten().flatten();
            ["cwd", "root", "exe"].into_iter().any(|link| below(own.join(link)))
                || open.map(|entry| entry.path()).any(below)
                || fs::read_to_string(own.join("maps"))
                    .is_ok_and(|maps| maps.lines().any(|line| names(line, &path)))
        })
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
            (pid, name.unwrap_or_default().trim().to_owned())
        })
        .collect()
}

/// Whether a line of a `maps` file is about a file whose path begins so, and that is there still.
fn names(line: &str, path: &str) -> bool {
    line.find('/').is_some_and(|at| line[at..].starts_with(path)) && !line.ends_with(" (deleted)")
}

/// All processes.
pub fn processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
}

/// Start of a process; none if it is gone or only waits to be reaped.
fn started(pid: Pid) -> Option<u64> {
    SystemHost.started(pid.as_raw_nonzero().get().cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_names_one_process_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let this = Process::this().unwrap();
        this.save(&file).unwrap();
        assert_eq!(Process::load(&file), Some(this));
        let copy = dir.path().join("copy");
        fs::copy(&file, &copy).unwrap();
        assert_eq!(Process::load(&copy), None);
        fs::write(&file, format!("{} {}\n", this.pid(), this.started)).unwrap();
        assert_eq!(Process::load(&file), Some(this), "as files of before are");
        fs::write(&file, format!("{} {}\n", this.pid(), this.started + 1)).unwrap();
        assert_eq!(Process::load(&file), None);
    }

    #[test]
    fn a_process_removes_its_own_files_and_not_those_of_its_successor() {
        let dir = tempfile::tempdir().unwrap();
        let (file, socket) = (dir.path().join("pid"), dir.path().join("socket"));
        let this = Process::this().unwrap();
        let other = std::os::unix::process::parent_id().cast_signed();
        let other = Pid::from_raw(other).unwrap();
        let other = Process { pid: other, started: started(other).unwrap() };
        for (named, stay) in [(other, true), (this, false)] {
            named.save(&file).unwrap();
            fs::write(&socket, "").unwrap();
            this.remove_files(&file, &[&socket]);
            assert_eq!([file.exists(), socket.exists()], [stay; 2]);
        }
        this.remove_files(&file, &[&socket]);
    }

    #[test]
    fn a_lock_is_found_with_the_process_that_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().canonicalize().unwrap().join("file");
        let open = fs::File::create(&file).unwrap();
        assert!(with_lock(&file).is_empty(), "it is open, and not locked");
        open.lock().unwrap();
        let other = fs::File::open(&file).unwrap();
        assert_eq!(with_lock(&file), [Process::this().unwrap()]);
        drop(open);
        assert!(with_lock(&file).is_empty());
        drop(other);
    }

    #[test]
    fn descendants_are_found_with_those_of_other_sessions() {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "setsid sh -c 'sleep 100; true' & echo; wait"])
            .stdout(std::process::Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let pid = Pid::from_child(&shell);
        let until = SystemHost.now().after(Duration::from_secs(20));
        while descendants(&[pid]).len() < 2 {
            assert!(SystemHost.now() < until, "the shell in the shell, and the program that it runs");
            SystemHost.wait(&ipc::Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(5))));
        }
        let found = descendants(&[pid]);
        let this = fs::read_to_string("/proc/self/comm").unwrap();
        assert!(found.iter().all(|one| descends_from(one.pid().cast_unsigned(), this.trim_end())));
        assert!(!descends_from(found[0].pid().cast_unsigned(), "no program"));
        assert!(descendants(&[rustix::process::getpid()]).iter().any(|one| one.pid == found[0].pid));
        for process in found {
            process.end(Signal::KILL, Duration::from_secs(10)).unwrap();
        }
        shell.wait().unwrap();
        assert!(descendants(&[pid]).is_empty());
    }

    #[test]
    fn a_mapped_file_is_found_with_its_process() {
        let this = std::env::current_exe().unwrap();
        assert!(with_mapping(&this).contains(&Process::this().unwrap()));
        assert!(with_mapping(Path::new("/no/such/folder")).is_empty());
    }

    #[test]
    fn a_process_that_is_ended_is_gone_and_ending_it_again_is_no_error() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        let process = Process { pid, started: started(pid).unwrap() };
        assert!(!process.is_ending());
        process.end(Signal::KILL, Duration::from_secs(10)).unwrap();
        assert!(started(pid).is_none() && process.is_ending());
        process.wait_until_gone(Duration::from_secs(10));
        child.wait().unwrap();
        process.end(Signal::KILL, Duration::from_secs(10)).unwrap();
    }
}
