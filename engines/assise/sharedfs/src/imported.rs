//! The files beside a tree that an import brought: the ledger, empty but for its position, and an empty file for each
//! live log, at the position up to which the tree contains it. So the pool equals that of a copy which has just
//! executed everything that it has.
//!
//! Guarantees: no byte that stood in the ledger or in a log before the import is ever read after it. The process can be
//! interrupted anywhere: the next daemon that opens the pool repeats it.

use crate::error::Error;
use crate::ledger::Ledger;
use area::Area;
use mirror::logs::{FIRST_SPACE, LOG_BYTES_MAX, LogFile, LogSize, RING_START, is_log_file};
use pmem::{MediaError, Medium};

/// Makes ledger and logs anew if an import made the last commit.
///
/// # Errors
/// `Area`, `Media`, `File`.
pub(crate) fn make_files_anew(medium: &Medium, area: &mut Area) -> Result<(), Error> {
    if !area.is_imported() {
        return Ok(());
    }
    for name in medium.list()?.iter().filter(|name| is_log_file(name)) {
        match medium.remove(name) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ledger::clear(medium, area.pool())?;
    for (log, item) in area.logs()? {
        let bytes = item.file_bytes.get();
        // A log with an impossible size has no file; the head is told so.
        if (RING_START + format::HEADER_BYTES as u64..=LOG_BYTES_MAX).contains(&bytes) {
            let size = LogSize { file_bytes: bytes, space: FIRST_SPACE };
            let (life, owner) = ((log, item.incarnation), item.uid.get());
            medium.with_held(FIRST_SPACE, || LogFile::create(medium, area.pool(), life, size, owner))?;
        }
    }
    // A tree that was given up is none before an import has replaced it.
    if area.is_given_up() { Ok(()) } else { Ok(area.end_import()?) }
}
