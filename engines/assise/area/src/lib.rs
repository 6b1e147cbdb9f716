//! The shared area of one node: a copy-on-write tree in persistent memory, its allocator and extents (Assise §3.1,
//! §3.2; the version in each pointer stands for the bitmaps of §3.4).
//!
//! One B+tree of 4 KB nodes holds everything: inodes, names, extents, the tables of logs, grants and segments. It
//! lies in the pool's file `tree`; data lies in `segment-N` files, kept by owner. A batch of changes becomes real by
//! one atomic root commit, at which every change of the batch is there or none.
//!
//! Guarantees: after a crash at any point the area is at its last synced commit. Blocks that a commit freed are not
//! written again before [`Area::release`]. Every node and every data block is checked against the checksum in the
//! pointer to it; a mismatch is an error value that says where. A record that contradicts the tree is refused with a
//! value and changes nothing: its writer is not trusted. Which users may write a record, and in which order the records
//! of several logs count, is not decided here.
//!
//! There are no locks but the node cache's. A [`Batch`] has the [`Area`] for itself; readers beside it have a
//! [`Snapshot`] of the last commit.

#![forbid(unsafe_code)]

mod area;
mod attributes;
mod batch;
pub mod check;
mod contents;
mod error;
mod export;
mod extents;
mod facts;
mod gather;
mod give_back;
mod give_up;
mod import;
pub mod inspect;
mod layout;
mod merge;
mod names;
mod node;
mod pin;
mod runs;
mod segment;
mod segment_file;
mod snapshot;
mod space;
mod store;
mod stored;
mod table;
mod tree;
mod view;

pub use area::{Area, Limits, NewPool, Usage};
pub use batch::{Applied, Applying, Batch, Committed};
pub use error::{AreaError, Refused};
pub use export::{KeyRange, KeySpan};
pub use import::Import;
pub use layout::TREE_FILE;
pub use pin::{FREE_PART as PIN_FREE_PART, Pin};
pub use segment_file::segment_file;
pub use snapshot::Snapshot;
pub use space::FreeBlocks;
pub use table::LedgerPlace;
pub use view::{Entry, Extent, Item};
