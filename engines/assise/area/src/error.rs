//! The errors of the shared area, as values.

use format::node::Key;
use format::{Block, CommitNumber, DecodeError, InodeNumber, SegmentId};
use std::fmt;

/// Why an operation on the area did not happen.
#[derive(Debug)]
pub enum AreaError {
    /// The medium failed.
    Medium(pmem::MediaError),
    /// The folder holds no pool.
    Missing,
    /// The folder holds a pool already, so that it is not formatted again.
    AlreadyFormatted,
    /// The limits or sizes asked for cannot work; which of them.
    Geometry(&'static str),
    /// The first block of a pool file is none: which file, and why.
    Superblock(String, DecodeError),
    /// Neither root slot holds a root; the defect of each of them.
    Roots(DecodeError, DecodeError),
    /// A page of an allocation map is damaged; which file.
    Map(String),
    /// The allocation map of a segment is whole and not the one of the commit: the file is from another time; which file.
    OtherMap(String),
    /// A node is damaged, or lies where it cannot.
    Node(Block, DecodeError),
    /// An item of the tree has a value that no writer produces.
    Item(Key, &'static str),
    /// A data block is not what was written: its checksum differs.
    Data {
        /// The file.
        inode: InodeNumber,
        /// Where in the file the block begins, in bytes.
        offset: u64,
        /// The segment that holds it.
        segment: SegmentId,
        /// The block of the segment.
        block: Block,
    },
    /// There is no space; a change that must leave the system's reserve alone stops here.
    NoSpace,
    /// The batch holds as much as it may: commit it, release what the commit freed, and begin another one.
    BatchFull,
    /// The gathered changes do not fit: the batch is dropped, and made again with fewer.
    Overfull,
    /// The ledger's entry that a batch executes lies before one that was executed.
    Version,
    /// A commit was released that was not the last one.
    Commit(CommitNumber),
    /// An earlier commit failed half way: only opening the pool again tells what is in it.
    Poisoned,
    /// The record contradicts the tree. Nothing was changed.
    Refused(Refused),
    /// The data of another node's tree is invalid; the reason.
    Import(&'static str),
}

/// How a record contradicts the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// An inode that the record names is not there.
    NoInode(InodeNumber),
    /// The number of a new inode is in use.
    InodeInUse,
    /// The inode should be a directory and is none.
    NotDirectory,
    /// The inode should not be a directory and is one.
    IsDirectory,
    /// The operation is not for this type of inode.
    WrongType,
    /// The directory is removed: no name can be added.
    DirectoryGone,
    /// The name exists.
    NameExists,
    /// The entry is not there, or its name is another one.
    NoEntry,
    /// The entry stands for another inode than the record says.
    EntryNamesOther,
    /// The cookie is not one of the name's hash.
    CookieHash,
    /// Another name stands at the cookie.
    CookieTaken,
    /// The directory has entries.
    NotEmpty,
    /// The directory would come to lie in itself.
    Cycle,
    /// The inode has as many names as it can have.
    TooManyLinks,
    /// Beyond the largest file.
    TooLarge,
    /// The root of the tree is never moved, removed or linked.
    Root,
    /// No such extended attribute.
    NoXattr,
    /// Too many extended attributes with names of one hash.
    XattrSlots,
    /// A field of the operation has a value that no writer produces.
    Field(&'static str),
}

impl From<Refused> for AreaError {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl From<pmem::MediaError> for AreaError {
    fn from(error: pmem::MediaError) -> Self {
        Self::Medium(error)
    }
}

impl fmt::Display for AreaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Medium(error) => write!(f, "medium: {error}"),
            Self::Missing => write!(f, "there is no pool here"),
            Self::AlreadyFormatted => write!(f, "there is a pool here already"),
            Self::Geometry(what) => write!(f, "impossible size: {what}"),
            Self::Superblock(file, error) => write!(f, "file {file}: superblock: {error}"),
            Self::Roots(first, second) => write!(f, "no root: slot 0: {first}, slot 1: {second}"),
            Self::Map(file) => write!(f, "file {file}: allocation map damaged"),
            Self::OtherMap(file) => {
                write!(
                    f,
                    "file {file}: it is older or newer than the tree: another file may have been put in its place"
                )
            }
            Self::Node(block, error) => write!(f, "node in block {block}: {error}"),
            Self::Item(key, what) => write!(
                f,
                "item ({}, {}, {}): impossible value: {what}",
                key.object(),
                key.kind().map_or(0, |kind| kind as u8),
                key.sub()
            ),
            Self::Data { inode, offset, segment, block } => write!(
                f,
                "inode {inode}, offset {offset}: block {block} of segment {segment}: checksum mismatch"
            ),
            Self::NoSpace => write!(f, "no room in the area"),
            Self::BatchFull => write!(f, "the batch is full"),
            Self::Overfull => write!(f, "the batch holds more than there is room for"),
            Self::Version => write!(f, "the entry lies before one that was executed"),
            Self::Commit(commit) => write!(f, "commit {commit} is not the last one"),
            Self::Import(why) => write!(f, "the tree of another node is refused: {why}"),
            Self::Poisoned => write!(f, "an earlier commit failed: open the pool again"),
            Self::Refused(refused) => write!(f, "refused: {refused}"),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::NoInode(inode) => return write!(f, "no inode {inode}"),
            Self::Field(name) => return write!(f, "impossible value in field {name}"),
            Self::InodeInUse => "inode number in use",
            Self::NotDirectory => "not a directory",
            Self::IsDirectory => "is a directory",
            Self::WrongType => "wrong type of inode",
            Self::DirectoryGone => "directory was removed",
            Self::NameExists => "name exists",
            Self::NoEntry => "no such entry",
            Self::EntryNamesOther => "entry names another inode",
            Self::CookieHash => "cookie of another name",
            Self::CookieTaken => "cookie is taken",
            Self::NotEmpty => "directory not empty",
            Self::Cycle => "directory would lie in itself",
            Self::TooManyLinks => "too many links",
            Self::TooLarge => "file too large",
            Self::Root => "the root cannot be moved, removed or linked",
            Self::NoXattr => "no such attribute",
            Self::XattrSlots => "too many attributes with one hash",
        };
        f.write_str(text)
    }
}

impl std::error::Error for AreaError {}
impl std::error::Error for Refused {}
