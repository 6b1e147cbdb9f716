//! When all nodes are level their trees are equal, item by item but for where blocks lie, and every pool is sound.

use crate::world::config;
use area::Area;
use format::node::{InodeItem, ItemKind, Key};
use format::{InodeNumber, NodeId};
use pmem::{Image, Recorder};
use std::collections::BTreeMap;
use zerocopy::FromBytes;

/// The parts of a tree that can be compared.
#[derive(PartialEq, Eq)]
struct Tree {
    items: BTreeMap<Key, Vec<u8>>,
    contents: BTreeMap<u64, Vec<u8>>,
}

/// Largest file that is compared to its end.
const BYTES_MAX: u64 = 1 << 20;

impl Tree {
    /// Each copy's own are the places of blocks, and the table of logs and grants, which may be older than the ledger.
    fn of(node: NodeId, image: &Image) -> Result<Self, String> {
        let why = |error: area::AreaError| format!("the pool of node {node}: {error}");
        let medium = Recorder::of_image(image.clone()).medium();
        let report = area::check::check(&medium).map_err(why)?;
        if !report.is_clean() {
            return Err(format!("the pool of node {node} is not clean: {report:?}"));
        }
        let area = Area::open(&medium, config(node).area).map_err(why)?;
        let (mut items, mut contents) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in area.range(None, usize::MAX).map_err(why)? {
            match key.kind() {
                Ok(ItemKind::Inode) => {
                    let item = InodeItem::read_from_bytes(&value).map_err(|_| "no inode".to_owned())?;
                    let mut bytes = vec![0; item.size.get().min(BYTES_MAX) as usize];
                    let there = area.read(InodeNumber::new(key.object()), 0, &mut bytes).map_err(why)?;
                    bytes.truncate(there);
                    contents.insert(key.object(), bytes);
                }
                Ok(ItemKind::Symlink | ItemKind::Xattr | ItemKind::Entry | ItemKind::Orphan) => {}
                _ => continue,
            }
            items.insert(key, value.to_vec());
        }
        Ok(Self { items, contents })
    }

    fn first_difference(&self, other: &Self) -> String {
        let keys = self.items.keys().chain(other.items.keys());
        let differing = keys.filter(|key| self.items.get(*key) != other.items.get(*key)).min();
        match differing {
            None => "contents differ".to_owned(),
            Some(key) => {
                let line = |tree: &Self| match tree.items.get(key) {
                    Some(value) => area::inspect::line(key, value),
                    None => "nothing".to_owned(),
                };
                format!("{} and {}", line(self), line(other))
            }
        }
    }
}

/// # Errors
/// How two of the trees differ, or what is wrong with a pool.
pub fn check(images: &[(NodeId, Image)]) -> Result<(), String> {
    let trees = images.iter().map(|(node, image)| Ok((*node, Tree::of(*node, image)?)));
    let trees = trees.collect::<Result<Vec<_>, String>>()?;
    for pair in trees.windows(2) {
        let [(one, first), (other, second)] = pair else { continue };
        if first != second {
            return Err(format!(
                "the trees of nodes {one} and {other} differ: {}",
                first.first_difference(second)
            ));
        }
    }
    Ok(())
}
