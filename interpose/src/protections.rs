//! The settings `fs.protected_*` of the machine, which the library applies to the tree as the kernel does to its own
//! files. They are read when a call may depend on them for the first time, and kept: a process notices no later change.

use crate::{limits, raw};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};
use vfs::Protections;

/// The settings, one in each byte.
static KNOWN: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = u32::MAX;

/// The value of a setting that cannot be read, as in a root without /proc: the value that distributions set.
const USUAL: u8 = 1;

/// The settings of the machine.
pub fn protections() -> Protections {
    let mut known = KNOWN.load(Ordering::Relaxed);
    if known == UNKNOWN {
        let settings = [
            c"/proc/sys/fs/protected_hardlinks",
            c"/proc/sys/fs/protected_symlinks",
            c"/proc/sys/fs/protected_fifos",
            c"/proc/sys/fs/protected_regular",
        ];
        known = u32::from_le_bytes(settings.map(|path| read(path).unwrap_or(USUAL)));
        KNOWN.store(known, Ordering::Relaxed);
    }
    let [hardlinks, symlinks, fifos, regular] = known.to_le_bytes();
    Protections { hardlinks, symlinks, fifos, regular }
}

/// A setting: one digit.
fn read(path: &CStr) -> Option<u8> {
    let fd = limits::with_room(|_| raw::open_at(libc::AT_FDCWD, path, libc::O_RDONLY | libc::O_CLOEXEC, 0))
        .ok()?;
    let mut digit = [0];
    let got = raw::read_at(fd, &mut digit, 0);
    raw::close(fd);
    (got == Ok(1) && digit[0].is_ascii_digit()).then(|| digit[0] - b'0')
}
