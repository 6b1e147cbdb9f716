//! Saved progress of a long proof: the counts of each case that passed, in one file for each case, so that a proof
//! that was interrupted continues with the remaining cases.
//!
//! The folder belongs to one version of the sources (`scripts/prove-crash` names it by their hash), so results for
//! other sources are never used. The file of a case appears only after the case has passed, and appears with its
//! complete contents.

use crate::crash::Counts;
use format::checksum::{self, Salt};
use std::fmt::Display;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Environment variable with the folder. Without it nothing is saved.
pub const PROGRESS: &str = "HEARTH_PROGRESS";

/// Runs a case, or returns the counts of an earlier run in which it passed. Prints a line for a case that ran.
///
/// # Errors
/// The error of the case.
///
/// # Panics
/// If the folder cannot be written: without saved progress, an interrupted proof would never finish.
pub fn case<E>(name: &str, run: impl FnOnce() -> Result<Counts, E>) -> Result<Counts, E> {
    let Some(folder) = std::env::var_os(PROGRESS).map(PathBuf::from) else { return run() };
    let file = folder.join(file_name(name));
    if let Some(counts) = std::fs::read_to_string(&file).ok().as_deref().and_then(parse) {
        return Ok(counts);
    }
    let counts = run()?;
    let unfinished = file.with_extension("new");
    let written =
        std::fs::write(&unfinished, text(&counts)).and_then(|()| std::fs::rename(&unfinished, &file));
    written.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    println!("{name}: {counts}");
    Ok(counts)
}

/// Runs independent cases in parallel, one thread for each processor, and sums their counts.
///
/// # Errors
/// The name and the error of a case that failed; no case is started after a failure.
pub fn cases<T: Sync, E: Display>(
    cases: &[T],
    name: impl Fn(&T) -> String + Sync,
    run: impl Fn(&T) -> Result<Counts, E> + Sync,
) -> Result<Counts, String> {
    let (next, result) = (AtomicUsize::new(0), Mutex::new(Ok(Counts::default())));
    let work = || {
        while let Some(item) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let proved = case(&name(item), || run(item));
            let mut result = result.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *result, proved) {
                (Err(_), _) => return,
                (Ok(total), Ok(counts)) => *total += counts,
                (Ok(_), Err(error)) => *result = Err(format!("{}: {error}", name(item))),
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        (0..workers.min(cases.len())).for_each(|_| drop(scope.spawn(work)));
    });
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// A readable file name, different for each case.
fn file_name(case: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let short: String = case.chars().map(plain).take(80).collect();
    format!("{short}-{:08x}", checksum::of(Salt::NONE, case.as_bytes()))
}

fn text(counts: &Counts) -> String {
    let Counts { complete, capped, images, recovery_images, same } = counts;
    format!("{complete} {capped} {images} {recovery_images} {same}\n")
}

fn parse(text: &str) -> Option<Counts> {
    let numbers: Vec<u64> =
        text.strip_suffix('\n')?.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
    let [complete, capped, images, recovery_images, same] = numbers[..] else { return None };
    Some(Counts { complete, capped, images, recovery_images, same })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_they_were_written_and_half_a_file_is_none() {
        let counts = Counts { complete: 1, capped: 20, images: 333, recovery_images: 0, same: 4 };
        let whole = text(&counts);
        assert_eq!(parse(&whole), Some(counts));
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None);
        }
    }

    #[test]
    fn cases_have_files_of_their_own() {
        assert_ne!(file_name("rename: onto"), file_name("rename; onto"));
        assert!(!file_name("a/b").contains('/'));
    }
}
