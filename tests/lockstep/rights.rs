//! Calls about users and rights: modes, owners, sticky and set-group-id directories, and processes that become other
//! users, with supplementary groups.

use super::{Generator, MODES};
use crate::run::PROCESSES;

/// Modes in sequences about rights.
const RIGHTS: [&str; 17] = [
    "0644", "0600", "0666", "0660", "0640", "0606", "0066", "0444", "0222", "0770", "0777", "04777", "02664",
    "0000", "02775", "02710", "06777",
];
/// Modes of directories in these.
const DIRECTORY_RIGHTS: [&str; 14] = [
    "0777", "0777", "0775", "0755", "0770", "0750", "0700", "0733", "01777", "01777", "02777", "02775",
    "03777", "0711",
];
/// User, group and supplementary groups of a process in these.
const USERS: [&str; 7] = [
    "0 0 -",
    "1000 1000 2000",
    "1000 1000 -",
    "1000 2000 1001",
    "1001 1001 2000",
    "1001 1001 2000,1000",
    "1001 1001 -",
];

impl Generator {
    /// The first user and mask of each process.
    pub(super) fn first_users(&mut self) -> Vec<(usize, String)> {
        let mut calls = Vec::new();
        for process in 0..PROCESSES {
            calls.push((process, self.user()));
            calls.push((
                process,
                format!("umask {}", self.random.of(&["0", "0", "022", "002", "027", "077"])),
            ));
        }
        calls
    }

    /// Another user. docs/decisions/0013-offsets-and-users.md: a program that cannot return to a user that its parent can
    /// return to shares no offset with it, so processes with children change for good.
    fn user(&mut self) -> String {
        let user = if self.kinds.rights {
            self.random.of(&USERS)
        } else {
            self.random.of(&["0 0 -", "1000 1000 -"])
        };
        let for_good = if self.kinds.children || self.kinds.families { " good" } else { "" };
        format!("user {user}{for_good}")
    }

    pub(super) fn mode(&mut self) -> &'static str {
        if self.kinds.rights {
            self.random.of(&RIGHTS)
        } else if self.kinds.permissions || self.kinds.users {
            self.random.of(&MODES)
        } else {
            self.random.of(&["0644", "0666", "0777"])
        }
    }

    /// The mode of a new directory.
    pub(super) fn directory_mode(&mut self) -> &'static str {
        let modes = ["0777", "0777", "0755", "0700", "01777"];
        if self.kinds.rights { self.random.of(&DIRECTORY_RIGHTS) } else { self.random.of(&modes) }
    }

    pub(super) fn permissions(&mut self, _: usize) -> String {
        let (at, fd) = (self.at(), self.fd());
        let numbers: &[&str] =
            if self.kinds.rights { &["0", "1000", "1001", "2000", "-1"] } else { &["0", "1000", "-1"] };
        let (uid, gid) = (self.random.of(numbers), self.random.of(numbers));
        let modes = ["0644", "0600", "0777", "0755", "0700", "04755", "02755", "01777", "0000", "02644"];
        let mode = match self.random.below(3) {
            0 if self.kinds.rights => self.random.of(&DIRECTORY_RIGHTS),
            1 if self.kinds.rights => self.random.of(&RIGHTS),
            _ => self.random.of(&modes),
        };
        match self.random.below(9) {
            0 | 1 => format!("chmod {at} {mode}"),
            2 => format!("fchmod {fd} {mode}"),
            3 => format!("chown {at} {uid} {gid} {}", self.random.of(&["0", "AT_SYMLINK_NOFOLLOW"])),
            4 => format!("fchown {fd} {uid} {gid}"),
            // An exec of a process with two users comes without the library, as LD_PRELOAD is not for it.
            // docs/semantics.md, "A process changes its user": processes of different users do not share offsets.
            5 | 6 if self.kinds.families => self.access(&at),
            5 if self.kinds.users && !self.kinds.children => {
                let users = ["0", "1000", "1000 2000", "1001"];
                format!("effective {}", self.random.of(&users[..if self.kinds.rights { 4 } else { 2 }]))
            }
            5 | 6 if self.kinds.users => self.user(),
            7 if self.kinds.rights => match self.random.below(3) {
                0 => format!("touch {at} {}", self.random.of(&["0", "AT_SYMLINK_NOFOLLOW"])),
                1 => format!("ftouch {fd}"),
                _ => format!("umask {}", self.random.of(&["0", "022", "002", "027", "077"])),
            },
            _ => self.access(&at),
        }
    }

    pub(super) fn access(&mut self, at: &str) -> String {
        let mode = self.random.of(&["R_OK", "W_OK", "X_OK", "F_OK"]);
        let flags = self.random.of(&["0", "AT_EACCESS"]);
        format!("access {at} {mode} {flags}")
    }
}
