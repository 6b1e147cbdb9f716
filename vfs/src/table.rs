//! Descriptor numbers for those who have no kernel to give them: simulated processes, and tests.

use crate::error::Error;
use crate::file::File;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Descriptors of one process. The lowest free number is given, as POSIX wants.
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

    /// Frees a number. The file, and whether no number stands for it any more, are what [`crate::Vfs::close`]
    /// wants to know; descriptions shared with other tables are theirs to count.
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
