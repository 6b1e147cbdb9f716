//! The folder of one program after its calls, by the answers to the calls: names, contents, sizes and
//! blocks. A call may answer ENOSPC only if it needs blocks that its file does not have.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Bytes of the operations into which a write is divided on a full pool (docs/decisions/0050).
const PART: u64 = 16 << 10;
/// The first descriptor that a program opens.
const FIRST_DESCRIPTOR: u64 = 3;

/// A call of a program in its folder.
#[derive(Clone, Debug)]
pub enum Call {
    Open { name: &'static str, truncates: bool },
    Close(u64),
    Write { fd: u64, offset: u64, bytes: u64, letter: char },
    Resize { fd: u64, size: u64 },
    ResizeByName { name: &'static str, size: u64 },
    Allocate { fd: u64, how: Allocation, offset: u64, bytes: u64 },
    Read { fd: u64, offset: u64, bytes: u64 },
    Sync(u64),
    Unlink(&'static str),
    Rename(&'static str, &'static str),
    Link(&'static str, &'static str),
    Mode(&'static str, &'static str),
}

/// The effect of `fallocate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    Extend,
    KeepSize,
    PunchHole,
}

impl fmt::Display for Call {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { name, truncates: false } => write!(to, "open . {name} O_RDWR|O_CREAT 0644"),
            Self::Open { name, truncates: true } => write!(to, "open . {name} O_RDWR|O_CREAT|O_TRUNC 0644"),
            Self::Close(fd) => write!(to, "close {fd}"),
            Self::Write { fd, offset, bytes, letter } => write!(to, "pwrite {fd} {bytes} {letter} {offset}"),
            Self::Resize { fd, size } => write!(to, "ftruncate {fd} {size}"),
            Self::ResizeByName { name, size } => write!(to, "truncate {name} {size}"),
            Self::Allocate { fd, how, offset, bytes } => {
                let mode = match how {
                    Allocation::Extend => "0",
                    Allocation::KeepSize => "FALLOC_FL_KEEP_SIZE",
                    Allocation::PunchHole => "FALLOC_FL_PUNCH_HOLE|FALLOC_FL_KEEP_SIZE",
                };
                write!(to, "fallocate {fd} {mode} {offset} {bytes}")
            }
            Self::Read { fd, offset, bytes } => write!(to, "pread {fd} {bytes} {offset}"),
            Self::Sync(fd) => write!(to, "fsync {fd}"),
            Self::Unlink(name) => write!(to, "unlink . {name} 0"),
            Self::Rename(from, name) => write!(to, "rename . {from} . {name} 0"),
            Self::Link(from, name) => write!(to, "link . {from} . {name} 0"),
            Self::Mode(name, mode) => write!(to, "chmod . {name} {mode}"),
        }
    }
}

/// A file: its bytes, and the blocks that it has, also beyond its end.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct File {
    pub bytes: Vec<u8>,
    pub blocks: BTreeSet<u64>,
}

/// The blocks of a range.
fn blocks_of(offset: u64, bytes: u64) -> std::ops::Range<u64> {
    offset / BLOCK..(offset + bytes).div_ceil(BLOCK)
}

impl File {
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Blocks of a range that the file does not have.
    fn missing(&self, offset: u64, bytes: u64) -> usize {
        blocks_of(offset, bytes).filter(|block| !self.blocks.contains(block)).count()
    }

    fn write(&mut self, offset: u64, bytes: u64, letter: char) {
        if bytes > 0 {
            let end = self.size().max(offset + bytes);
            self.bytes.resize(end as usize, 0);
            self.bytes[offset as usize..(offset + bytes) as usize].fill(letter as u8);
            self.blocks.extend(blocks_of(offset, bytes));
        }
    }

    fn resize(&mut self, size: u64) {
        if size <= self.size() {
            self.blocks.split_off(&size.div_ceil(BLOCK));
        }
        self.bytes.resize(size as usize, 0);
    }

    fn allocate(&mut self, how: Allocation, offset: u64, bytes: u64) {
        let end = offset + bytes;
        if how == Allocation::PunchHole {
            let within = offset.min(self.size()) as usize..end.min(self.size()) as usize;
            self.bytes[within].fill(0);
            // Nothing behind the end of the file has to be kept.
            let end = if end >= self.size() { end.next_multiple_of(BLOCK) } else { end };
            for block in offset.div_ceil(BLOCK)..end / BLOCK {
                self.blocks.remove(&block);
            }
            return;
        }
        self.blocks.extend(blocks_of(offset, bytes));
        if how == Allocation::Extend && end > self.size() {
            self.bytes.resize(end as usize, 0);
        }
    }
}

/// The contents of a folder, as runs of equal bytes in the way of the answer to a read.
pub fn runs(bytes: &[u8]) -> String {
    let mut text = String::new();
    for run in bytes.chunk_by(|one, other| one == other) {
        match run[0] {
            byte if byte > b' ' && byte < 127 => text += &format!(" {}*{}", run.len(), byte as char),
            byte => text += &format!(" {}*\\{byte}", run.len()),
        }
    }
    text
}

/// A folder and the descriptors of the program that works in it.
#[derive(Clone, Default)]
pub struct Folder {
    files: BTreeMap<u64, File>,
    names: BTreeMap<&'static str, u64>,
    descriptors: BTreeMap<u64, u64>,
    created: u64,
}

impl Folder {
    /// The open descriptors.
    pub fn open(&self) -> Vec<u64> {
        self.descriptors.keys().copied().collect()
    }

    /// The file behind a descriptor.
    pub fn behind(&self, fd: u64) -> &File {
        &self.files[&self.descriptors[&fd]]
    }

    fn behind_mut(&mut self, fd: u64) -> &mut File {
        self.files.get_mut(&self.descriptors[&fd]).expect("an open file is there")
    }

    /// The files with their names.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        self.names.iter().map(|(name, number)| (*name, &self.files[number]))
    }

    /// Files without a name end with their last descriptor.
    fn drop_ended(&mut self) {
        let (names, descriptors) = (&self.names, &self.descriptors);
        let is_used = |number: &u64| {
            names.values().any(|named| named == number) || descriptors.values().any(|open| open == number)
        };
        self.files.retain(|number, _| is_used(number));
    }

    /// The program has ended.
    pub fn close_all(&mut self) {
        self.descriptors.clear();
        self.drop_ended();
    }

    /// Blocks that files have after the call and not before it.
    fn growth(&self, call: &Call) -> usize {
        match call {
            Call::Write { fd, offset, bytes, .. } => self.behind(*fd).missing(*offset, *bytes),
            Call::Allocate { how: Allocation::PunchHole, .. } => 0,
            Call::Allocate { fd, offset, bytes, .. } => self.behind(*fd).missing(*offset, *bytes),
            _ => 0,
        }
    }

    /// Applies a call that has this answer.
    ///
    /// # Errors
    /// The answer that it should have.
    pub fn apply(&mut self, call: &Call, answer: &str) -> Result<(), String> {
        if answer == "ENOSPC" && self.growth(call) > 0 {
            return Ok(());
        }
        if let Call::Write { fd, offset, bytes, letter } = call {
            let wrote = answer.parse().unwrap_or(0).min(*bytes);
            let is_short = wrote < *bytes;
            if wrote == 0 || is_short && self.behind(*fd).missing(offset + wrote, bytes - wrote) == 0 {
                return Err(bytes.to_string());
            }
            self.behind_mut(*fd).write(*offset, wrote, *letter);
            return Ok(());
        }
        let expected = self.perform(call);
        if answer == expected { Ok(()) } else { Err(expected) }
    }

    /// Applies a call that needs no space, or for which there is some; its answer.
    fn perform(&mut self, call: &Call) -> String {
        let done = "0".to_owned();
        match call {
            Call::Open { name, truncates } => return self.open_file(name, *truncates).to_string(),
            Call::Close(fd) => drop(self.descriptors.remove(fd)),
            Call::Write { fd, offset, bytes, letter } => {
                self.behind_mut(*fd).write(*offset, *bytes, *letter);
                return bytes.to_string();
            }
            Call::Resize { fd, size } => self.behind_mut(*fd).resize(*size),
            Call::Allocate { fd, how, offset, bytes } => {
                self.behind_mut(*fd).allocate(*how, *offset, *bytes);
            }
            Call::Read { fd, offset, bytes } => {
                let file = &self.behind(*fd).bytes;
                let from = (*offset as usize).min(file.len());
                let read = &file[from..(from + *bytes as usize).min(file.len())];
                return format!("{}{}", read.len(), runs(read));
            }
            Call::Sync(_) => {}
            Call::ResizeByName { name, .. } | Call::Unlink(name) | Call::Mode(name, _)
                if !self.names.contains_key(name) =>
            {
                return "ENOENT".to_owned();
            }
            Call::ResizeByName { name, size } => {
                self.files.get_mut(&self.names[name]).expect("a named file is there").resize(*size);
            }
            Call::Unlink(name) => drop(self.names.remove(name)),
            Call::Mode(..) => {}
            Call::Rename(from, name) | Call::Link(from, name) => {
                let Some(number) = self.names.get(from).copied() else { return "ENOENT".to_owned() };
                if let Call::Link(..) = call {
                    if self.names.contains_key(name) {
                        return "EEXIST".to_owned();
                    }
                } else if self.names.get(name) != Some(&number) {
                    self.names.remove(from);
                }
                self.names.insert(name, number);
            }
        }
        self.drop_ended();
        done
    }

    fn open_file(&mut self, name: &'static str, truncates: bool) -> u64 {
        let number = *self.names.entry(name).or_insert_with(|| {
            self.created += 1;
            self.created
        });
        let file = self.files.entry(number).or_default();
        if truncates {
            file.resize(0);
        }
        let is_free = |fd: &u64| !self.descriptors.contains_key(fd);
        let fd = (FIRST_DESCRIPTOR..).find(is_free).expect("there is no limit");
        self.descriptors.insert(fd, number);
        fd
    }

    /// The folders of which one is there after a call that did not return: it was executed completely, not at all, or, if it
    /// is a sequence of operations, in part.
    pub fn after_an_interrupted(&self, call: &Call) -> Vec<Self> {
        let mut folders = vec![self.clone()];
        if let Call::Write { fd, offset, bytes, letter } = call {
            for wrote in (PART..*bytes).step_by(PART as usize) {
                let mut folder = self.clone();
                folder.behind_mut(*fd).write(*offset, wrote, *letter);
                folders.push(folder);
            }
        }
        let mut folder = self.clone();
        folder.perform(call);
        folders.push(folder);
        folders.iter_mut().for_each(Self::close_all);
        folders
    }
}
