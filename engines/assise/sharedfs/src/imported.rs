//! The files beside a tree that an import brought: the ledger, empty but for its place, and an empty file for each log that
//! lives, at the place up to which the tree contains it. So the pool is that of a copy which has just executed all that it has.
//!
//! Guarantees: nothing that stood in the ledger or in a log before the import is ever read after it. All of this can be
//! interrupted anywhere, and is done again by whoever opens the pool next.

use crate::config::Config;
use crate::error::Error;
use crate::ledger::Ledger;
use area::Area;
use mirror::logs::{LogFile, RING_START, is_log_file};
use pmem::{MediaError, Medium};

/// Makes ledger and logs anew if an import made the last commit.
///
/// # Errors
/// `Area`, `Media`, `File`.
pub(crate) fn make_files_anew(medium: &Medium, area: &mut Area, config: &Config) -> Result<(), Error> {
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
    let log_bytes_max = config.log_bytes_max.max(config.log_bytes);
    for (log, item) in area.logs()? {
        let bytes = item.file_bytes.get();
        // A log that is none here has no file, which the head is told.
        if (RING_START + format::HEADER_BYTES as u64..=log_bytes_max).contains(&bytes) {
            LogFile::create(medium, area.pool(), (log, item.incarnation), bytes, item.uid.get())?;
        }
    }
    Ok(area.end_import()?)
}
