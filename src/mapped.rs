//! Programs that map files of a mount whose gateway has failed. Pages that were dirty are lost, and each access to a
//! mapping fails. But a program of the library still has its other files and its locks, and may look at a mapping only
//! much later. Others would then take it for a user of data that no longer exist: a database in SQLite's WAL mode is
//! recovered only when no program has it open. So these programs get the signal of a failed access at once, before the
//! mount counts as gone (`docs/decisions/0041-programs-of-a-dead-mount-end.md`).
//!
//! A program that uses the mount itself has lost its files and locks with the gateway, and is left alone.

use crate::process::processes;
use ipc::{Host, Word};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time after SIGBUS until SIGKILL. The program may block the signal, and the library does so while a call waits for a lease,
/// which is withheld until the mount counts as gone.
const SIGBUS_MAX: Duration = Duration::from_millis(300);
/// Time after SIGKILL until a process counts as one that cannot be ended.
const SIGKILL_MAX: Duration = Duration::from_secs(5);
/// Interval between two looks at all processes, while some of them are ending.
const AGAIN: Duration = Duration::from_millis(5);

/// The programs that map files of a failed mount.
pub struct Programs<'a> {
    /// The mount's device number.
    pub device: (u32, u32),
    /// File name of the library, which each of its programs maps.
    pub library: &'a str,
}

/// The processes that got a signal.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Those that have ended.
    pub ended: BTreeSet<u32>,
    /// Those that could not be ended.
    pub left: BTreeSet<u32>,
}

impl Programs<'_> {
    /// Ends them, also those that they start meanwhile.
    pub fn end(&self, host: &dyn Host) -> Outcome {
        let started = host.now();
        let (harsh, until) = (started.after(SIGBUS_MAX), started.after(SIGBUS_MAX + SIGKILL_MAX));
        let mut ended = BTreeSet::new();
        loop {
            let found = self.find();
            let signal = if host.now() < harsh { Signal::BUS } else { Signal::KILL };
            for (_, process) in &found {
                // One that belongs to another user may not be signalled, and is left.
                let _ = pidfd_send_signal(process, signal);
            }
            let left: BTreeSet<u32> = found.iter().map(|(number, _)| *number).collect();
            ended.extend(&left);
            if left.is_empty() || host.now() >= until {
                return Outcome { ended: &ended - &left, left };
            }
            host.wait(&Word::new(0), 0, Some(host.now().after(AGAIN)));
        }
    }

    fn find(&self) -> Vec<(u32, OwnedFd)> {
        let found = processes().filter_map(|pid| {
            // Opened first: the number may be used again.
            let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
            let number = pid.as_raw_nonzero().get().cast_unsigned();
            (is_running(&process) && self.is_one(number)).then_some((number, process))
        });
        found.collect()
    }

    fn is_one(&self, number: u32) -> bool {
        let process = PathBuf::from(format!("/proc/{number}"));
        let maps = |folder: &Path| fs::read_to_string(folder.join("maps")).unwrap_or_default();
        let first = maps(&process);
        if !first.is_empty() {
            return self.maps_both(&first);
        }
        // The first thread has ended, or this is a process of the kernel.
        let Ok(threads) = fs::read_dir(process.join("task")) else { return false };
        threads.flatten().any(|thread| self.maps_both(&maps(&thread.path())))
    }

    /// Whether a list of mappings has the library and a shared mapping of the mount.
    fn maps_both(&self, list: &str) -> bool {
        let (major, minor) = self.device;
        let device = format!("{major:02x}:{minor:02x}");
        let (mut is_mapped, mut is_library) = (false, false);
        for line in list.lines() {
            // Range, permissions, offset, device, inode; then the path.
            let mut words = line.split_ascii_whitespace();
            let permissions = words.nth(1).unwrap_or_default();
            is_mapped |= permissions.ends_with('s') && words.nth(1) == Some(&device);
            let path = line.trim_end_matches(" (deleted)");
            is_library |= path.rsplit('/').next() == Some(self.library);
        }
        is_mapped && is_library
    }
}

fn is_running(process: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)) == Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAMS: Programs<'_> = Programs { device: (0, 0x3a), library: "libhearth.so" };
    const LIBRARY: &str = "7f10-7f20 r-xp 00000000 fe:00 12      /opt/hearth/libhearth.so";
    const SHARED: &str = "7f30-7f40 rw-s 00001000 00:3a 77      /tree/.hearth-open/77";

    #[test]
    fn a_program_of_the_library_with_a_shared_mapping_of_the_mount_is_one() {
        assert!(PROGRAMS.maps_both(&format!("{SHARED}\n{LIBRARY}\n")));
        assert!(PROGRAMS.maps_both(&format!("{LIBRARY} (deleted)\n{SHARED} (deleted)\n")));
    }

    #[test]
    fn others_are_not() {
        let private = SHARED.replace("rw-s", "rw-p");
        let elsewhere = SHARED.replace("00:3a", "00:3b");
        let other = LIBRARY.replace("libhearth.so", "notlibhearth.so");
        for list in [[LIBRARY, &private], [LIBRARY, &elsewhere], [SHARED, &other], [SHARED, ""]] {
            assert!(!PROGRAMS.maps_both(&list.join("\n")), "{list:?}");
        }
        assert!(!PROGRAMS.maps_both(LIBRARY));
    }
}
