//! One line for each item of the tree, for people.

use crate::AreaError;
use crate::area::Area;
use crate::stored::{Contents, StoredExtent, adjacent};
use crate::view::{decode_entry, split_xattr};
use format::node::{GrantItem, InodeItem, ItemKind, Key, LifeItem, LogItem, SegmentItem};
use format::superblock::OWNER_DAEMON;
use zerocopy::FromBytes;

/// Items that are read at once.
const ITEMS_AT_ONCE: usize = 256;

/// The pool and its progress, in one line.
pub fn headline(area: &Area) -> String {
    let root = &area.last.root;
    // Not of the capacity, which is a setting of the daemon and nothing that the pool says.
    let (segments, blocks) = area.segment_totals();
    format!(
        "pool {} commit {} life {} ledger {} height {} nodes {} inodes {} data blocks {} of {blocks} in {segments} segment{}",
        root.pool,
        root.commit,
        root.life,
        root.ledger_sequence,
        root.height,
        root.nodes,
        root.inodes,
        root.data_blocks,
        if segments == 1 { "" } else { "s" }
    )
}

/// Shows every item of the tree in the order of its keys, one line each.
///
/// # Errors
/// `Node`, `Medium`. A value that cannot be read is shown as such.
pub fn items(area: &Area, show: &mut dyn FnMut(String)) -> Result<(), AreaError> {
    let mut last: Option<Key> = None;
    loop {
        // The first item of a later step is the last one of the step before.
        let skipped = usize::from(last.is_some());
        let found = area.range(last.as_ref(), ITEMS_AT_ONCE + skipped)?;
        for (key, value) in found.iter().skip(skipped) {
            show(line(key, value));
        }
        if found.len() < ITEMS_AT_ONCE + skipped {
            return Ok(());
        }
        last = found.last().map(|(key, _)| *key);
    }
}

/// One item as a line.
pub fn line(key: &Key, value: &[u8]) -> String {
    let (object, sub) = (key.object(), key.sub());
    let Ok(kind) = key.kind() else { return format!("{object} unknown kind, {sub}") };
    let text = match kind {
        ItemKind::Inode => InodeItem::read_from_bytes(value).ok().map(|item| inode_line(object, &item)),
        ItemKind::Symlink => Some(format!("inode {object} target {}", String::from_utf8_lossy(value))),
        ItemKind::Xattr => split_xattr(key, value).ok().map(|(item, name, piece)| {
            let name = String::from_utf8_lossy(name);
            format!("inode {object} xattr {sub:016x} {name:?} {} of {} bytes", piece.len(), item.value_bytes)
        }),
        ItemKind::Entry => decode_entry(key, value).ok().map(|entry| {
            let name = String::from_utf8_lossy(&entry.name);
            format!("directory {object} entry {sub:016x} {name:?} -> {} ({:?})", entry.inode, entry.file_type)
        }),
        ItemKind::Extent => StoredExtent::decode(key, value).ok().map(|stored| {
            let blocks = format!("inode {object} block {sub}: {}", stored.blocks);
            match stored.contents {
                Contents::Unwritten(segment, block) => {
                    format!("{blocks} in segment {segment} at {block} unwritten")
                }
                Contents::Written(segment, block, _) => format!("{blocks} in segment {segment} at {block}"),
                Contents::Listed(list) => format!("{blocks} in a list, {} apart", adjacent(list).count()),
            }
        }),
        ItemKind::Orphan => Some(format!("inode {sub} has no name")),
        ItemKind::Log if object == 0 => LogItem::read_from_bytes(value).ok().map(|item| {
            let (digested, position, incarnation) = (item.digested, item.position, item.incarnation);
            format!("log {sub} user {} digested {digested} next at {position} file {incarnation}", item.uid)
        }),
        ItemKind::Log => Some(format!("log {object} {} groups from {sub}", value.len() / 4)),
        ItemKind::Grant => grant_line(object, &format!("inode {sub}"), value),
        ItemKind::RenameGrant => grant_line(object, "renames", value),
        ItemKind::LocksGrant => grant_line(object, &format!("locks of inode {sub}"), value),
        ItemKind::SubtreeGrant => grant_line(object, &format!("subtree of inode {sub}"), value),
        ItemKind::Life => LifeItem::read_from_bytes(value).ok().map(|item| {
            format!("life {sub} of node {} epoch {} from entry {}", item.node, item.epoch, item.first)
        }),
        ItemKind::Segment => SegmentItem::read_from_bytes(value).ok().map(|item| {
            let owner = match item.owner.get() {
                OWNER_DAEMON => "the daemon".to_owned(),
                uid => format!("user {uid}"),
            };
            format!("segment {sub} of {owner}: {} of {} blocks", item.used, item.blocks)
        }),
    };
    text.unwrap_or_else(|| format!("{object} {kind:?} {sub}: unreadable, {} bytes", value.len()))
}

fn grant_line(log: u64, unit: &str, value: &[u8]) -> Option<String> {
    let item = GrantItem::read_from_bytes(value).ok()?;
    let (version, from, rights) = (item.version, item.from, item.rights);
    Some(format!("log {log} {unit} version {version} from {from} rights {rights:x}"))
}

fn inode_line(inode: u64, item: &InodeItem) -> String {
    let stamp = item.stamp;
    format!(
        "inode {inode} mode {:o} user {} group {} links {} size {} blocks {} changed {} stamp {}.{}.{} parent {}",
        item.mode.get(),
        item.uid,
        item.gid,
        item.links,
        item.size,
        item.blocks,
        item.ctime_ns,
        stamp.version,
        stamp.log,
        stamp.sequence,
        item.parent
    )
}
