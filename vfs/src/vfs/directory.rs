//! Reads directories as records of `getdents64`.

use super::Vfs;
use crate::engine::{Engine, Target};
use crate::error::Error;
use crate::file::File;
use format::name::COOKIE_SLOTS;
use format::record::FileType;
use format::{Cookie, InodeNumber};

/// Offset of the name in a record.
const NAME_AT: usize = 19;
/// Directory offset after `.`.
const AFTER_DOT: u64 = 1;
/// Directory offset after `..`.
const AFTER_DOT_DOT: u64 = 2;

/// Records appended to a buffer.
struct Records<'a> {
    into: &'a mut [u8],
    used: usize,
    /// Directory offset after the last record.
    offset: u64,
}

impl Records<'_> {
    /// Appends a record; false if the buffer is full.
    fn put(&mut self, inode: InodeNumber, offset: u64, file_type: FileType, name: &[u8]) -> bool {
        let bytes = (NAME_AT + name.len() + 1).next_multiple_of(8);
        let Some(record) = self.into.get_mut(self.used..self.used + bytes) else { return false };
        record.fill(0);
        record[..8].copy_from_slice(&inode.get().to_ne_bytes());
        record[8..16].copy_from_slice(&offset.to_ne_bytes());
        record[16..18].copy_from_slice(&(bytes as u16).to_ne_bytes());
        record[18] = file_type as u8;
        record[NAME_AT..NAME_AT + name.len()].copy_from_slice(name);
        self.used += bytes;
        self.offset = offset;
        true
    }
}

impl<E: Engine> Vfs<E> {
    /// `getdents64`: fills the buffer with records from the offset on, and moves the offset; returns 0 at the end.
    ///
    /// # Errors
    /// `NotDirectory`; `Invalid` if not even one record fits; those of [`Engine::readdir`].
    pub fn getdents(&self, file: &File, into: &mut [u8]) -> Result<usize, Error> {
        let handle = file.handle()?;
        if file.file_type != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        let directory = self.engine.getattr(Target::Open(handle))?;
        if directory.links == 0 {
            return Err(Error::NotFound);
        }
        file.with_offset(|position| {
            let mut records = Records { into: &mut *into, used: 0, offset: *position };
            let mut fits = true;
            if *position < AFTER_DOT {
                fits = records.put(directory.inode, AFTER_DOT, FileType::Directory, b".");
            }
            if fits && *position < AFTER_DOT_DOT {
                fits = records.put(directory.parent, AFTER_DOT_DOT, FileType::Directory, b"..");
            }
            if fits {
                let after = (*position >= COOKIE_SLOTS).then(|| Cookie::from_raw(*position));
                self.engine.readdir(handle, after, &mut |entry| {
                    fits = records.put(entry.inode, entry.cookie.get(), entry.file_type, entry.name.bytes());
                    fits
                })?;
            }
            if records.used == 0 && !fits {
                return Err(Error::Invalid);
            }
            *position = records.offset;
            Ok(records.used)
        })
    }
}
