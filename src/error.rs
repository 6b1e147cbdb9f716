//! The errors of a command, as a sentence for the person who typed it.

use std::path::Path;

/// A sentence; the causes are part of it.
#[derive(Debug)]
pub struct Error(String);

/// The result of a command.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A sentence without a full stop.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }

    /// `cannot WHAT PATH: why`, for `map_err`.
    pub fn at<E: std::fmt::Display>(what: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.display().to_string();
        move |why| Self(format!("cannot {what} {path}: {why}"))
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}
