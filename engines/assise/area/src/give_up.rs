//! A pool gives up its own tree, to make room for an import that has none beside that tree.
//!
//! One commit replaces the tree by an empty one and names no segment; after it, the files of all segments are removed. The root
//! of that commit is marked ([`Root::imported`](format::root::Root::imported)), so the pool is one of which only an import makes
//! a tree that counts. The caller decides whether the tree may go.
//!
//! Guarantees: a crash leaves the former tree, whole, or the marked empty one. Files of segments that a crash left are removed
//! with the next segment that is made.

use crate::AreaError;
use crate::area::Area;
use crate::import::Import;
use crate::table::LedgerPlace;
use format::InodeNumber;
use format::node::{ItemKind, Key};
use format::root::GIVEN_UP;
use zerocopy::IntoBytes;

impl Area {
    /// Gives up the tree with all data. The root directory without entries remains, and a ledger that begins at
    /// `ledger`; the ledger and the logs beside the tree do not belong to it ([`Area::is_imported`]).
    ///
    /// # Errors
    /// `NoSpace`: the tree has no node left for the empty one. `Poisoned`, `Node`, `Item`, `Missing`, `Medium`.
    pub fn give_up_tree(self, ledger: &LedgerPlace) -> Result<Self, AreaError> {
        let root = self.inode(InodeNumber::ROOT)?.ok_or(AreaError::Missing)?;
        // Entries of directories are names of inodes that go.
        let root = format::node::InodeItem { links: 2.into(), size: 0.into(), ..root };
        let mut empty = Import::begin(self)?;
        let key = Key::new(InodeNumber::ROOT.get(), ItemKind::Inode, 0);
        empty.tree.put(&empty.area.last.store, key, root.as_bytes())?;
        empty.inodes = 1;
        empty.area.space.retire_all();
        empty.commit(ledger, GIVEN_UP)
    }

    /// Whether the pool gave its tree up and no import has replaced it since.
    pub fn is_given_up(&self) -> bool {
        self.last.root.imported.get() == GIVEN_UP
    }
}
