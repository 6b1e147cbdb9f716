//! Descriptor table for front ends without a kernel that assigns numbers: simulated processes, and tests.

use crate::error::Error;
use crate::file::File;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Descriptors of one process. A new file gets the lowest free number, as POSIX demands.
#[derive(Clone, Default)]
pub struct Table {
    files: BTreeMap<u32, Arc<File>>,
}

impl Table {
    /// Gives a file the lowest free number that is at least `from`.
    pub fn insert(&mut self, file: Arc<File>, from: u32) -> u32 {
        let mut number = from;
        for taken in self.files.range(from..).map(|(taken, _)| *taken) {
            if taken != number {
                break;
            }
            number += 1;
        }
        self.files.insert(number, file);
        number
    }

    /// The file with this number.
    ///
    /// # Errors
    /// `BadDescriptor`.
    pub fn get(&self, number: u32) -> Result<&Arc<File>, Error> {
        self.files.get(&number).ok_or(Error::BadDescriptor)
    }

    /// Frees a number. Returns the file, and whether that was its last number in this table; [`crate::Vfs::close`]
    /// needs both. The caller counts descriptions that it shares with other tables.
    ///
    /// # Errors
    /// `BadDescriptor`.
    pub fn remove(&mut self, number: u32) -> Result<(Arc<File>, bool), Error> {
        let file = self.files.remove(&number).ok_or(Error::BadDescriptor)?;
        let last = !self.files.values().any(|other| Arc::ptr_eq(other, &file));
        Ok((file, last))
    }

    /// All numbers in use.
    pub fn numbers(&self) -> Vec<u32> {
        self.files.keys().copied().collect()
    }
}
