//! The copy-on-write B+tree: reading it, and changing it in memory until a commit writes the changed nodes to
//! fresh blocks.
//!
//! A path is read and copied once for all the changes that a batch makes below it, so that n items in order cost as
//! many node reads and writes as they touch nodes. Nothing on the medium is ever changed in place.
//!
//! The separator of an inner node's child is the smallest key that may stand in it; the leftmost path begins with
//! [`KEY_MIN`]. Levels fall by one at each step, whatever a page says, so that no damage can make a walk endless.

mod edit;

use self::edit::Edit;
use crate::AreaError;
use crate::node::{Child, HEIGHT_MAX, Inner, KEY_MIN, Leaf, NODE_ROOM, Page, encode};
use crate::store::NodeStore;
use format::node::Key;
use format::root::NodePointer;
use format::{Block, Sequence};
use std::iter::Peekable;
use std::ops::ControlFlow;
use zerocopy::IntoBytes;

/// Version of a pointer to a clean node that took over the range of a neighbour in this batch: the commit puts its own
/// in its place. So a search for changes does not pass by the range that became empty.
const OF_THIS_COMMIT: Sequence = Sequence::new(u64::MAX);

/// A tree: committed if its root is clean, else under change.
#[derive(Debug)]
pub(crate) struct Tree {
    root: Child,
    height: u32,
    /// Blocks of nodes that are not part of the tree any more.
    freed: Vec<Block>,
    /// Nodes under change: the blocks that a commit will take.
    changed: u32,
}

/// The effects of a commit on a tree.
pub(crate) struct Written {
    /// The root node.
    pub root: NodePointer,
    /// Levels.
    pub height: u32,
    /// Blocks written.
    pub nodes: u32,
    /// Blocks of nodes that the new tree does not hold.
    pub freed: Vec<Block>,
}

impl Tree {
    /// The tree that was committed with this root.
    pub fn committed(root: NodePointer, height: u32) -> Self {
        assert!((1..=HEIGHT_MAX).contains(&height), "the height was checked when the root was read");
        Self { root: Child::Clean(root), height, freed: Vec::new(), changed: 0 }
    }

    /// A tree without items, for a pool that is being made.
    pub fn empty() -> Self {
        Self { root: Child::Leaf(Leaf::default()), height: 1, freed: Vec::new(), changed: 1 }
    }

    /// Nodes that a commit would write.
    pub fn changed(&self) -> u32 {
        self.changed
    }

    /// Levels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Whether it is still what was committed with this root.
    pub fn is_committed_as(&self, root: &NodePointer) -> bool {
        matches!(&self.root, Child::Clean(pointer) if pointer == root)
    }

    /// Its root, if it is committed, and its height.
    pub fn committed_root(&self) -> Option<(NodePointer, u32)> {
        match &self.root {
            Child::Clean(pointer) => Some((*pointer, self.height)),
            Child::Leaf(_) | Child::Revised(_) | Child::Inner(_) => None,
        }
    }

    fn root_level(&self) -> u8 {
        u8::try_from(self.height - 1).expect("a tree is at most HEIGHT_MAX high")
    }

    /// Gives the value of `key` to `take`.
    pub fn get<T>(
        &self,
        store: &NodeStore,
        key: &Key,
        take: impl FnOnce(&[u8]) -> T,
    ) -> Result<Option<T>, AreaError> {
        let mut child = &self.root;
        let mut level = self.root_level();
        loop {
            match child {
                Child::Clean(pointer) => return get_clean(store, *pointer, level, key, take),
                Child::Leaf(leaf) => return Ok(leaf.get(key).map(take)),
                Child::Revised(leaf) => {
                    let page = leaf.page();
                    return Ok(page.find(key).map(|index| take(page.value(index))));
                }
                Child::Inner(inner) => child = &inner.children[inner.child_of(key)].1,
            }
            level -= 1;
        }
    }

    /// Shows the items from `from` to `to`, both included, in order, until `visit` breaks.
    pub fn scan(
        &self,
        store: &NodeStore,
        from: &Key,
        to: &Key,
        visit: &mut dyn FnMut(&Key, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), AreaError> {
        let mut last: Option<Key> = None;
        let mut disordered = None;
        let mut ordered = |key: &Key, value: &[u8]| {
            // Nodes are sound one by one; that they also follow each other is only seen here.
            if key < from || last.is_some_and(|last| last >= *key) {
                disordered = Some(*key);
                return ControlFlow::Break(());
            }
            last = Some(*key);
            visit(key, value)
        };
        let _done = scan_child(store, &self.root, self.root_level(), (from, to), &mut ordered)?;
        disordered.map_or(Ok(()), |key| Err(AreaError::Item(key, "order")))
    }

    /// The largest key that is not larger than `key` and not smaller than `lowest`.
    pub fn floor(&self, store: &NodeStore, lowest: &Key, key: &Key) -> Result<Option<Key>, AreaError> {
        let found = floor_child(store, &self.root, self.root_level(), key)?;
        Ok(found.filter(|found| found >= lowest))
    }

    /// Sets a key's value.
    pub fn put(&mut self, store: &NodeStore, key: Key, value: &[u8]) -> Result<(), AreaError> {
        self.put_in_order(store, &mut std::iter::once((key, value)).peekable())
    }

    /// Sets the values of keys that come in order: each node is looked for and opened once.
    pub fn put_in_order<'v>(
        &mut self,
        store: &NodeStore,
        items: &mut Peekable<impl Iterator<Item = (Key, &'v [u8])>>,
    ) -> Result<(), AreaError> {
        while items.peek().is_some() {
            let level = self.root_level();
            let mut edit = Edit { store, freed: &mut self.freed, changed: &mut self.changed };
            let Some((first, sibling)) = edit.put(&mut self.root, level, items, None)? else { continue };
            let old = std::mem::replace(&mut self.root, Child::Leaf(Leaf::default()));
            let children = vec![(KEY_MIN, old), (first, sibling)];
            self.root = Child::Inner(Inner { level: level + 1, children });
            self.height += 1;
            self.changed += 1;
            assert!(self.height <= HEIGHT_MAX, "no file has blocks enough for so high a tree");
        }
        Ok(())
    }

    /// Shows the values of keys that come in order and are there, to be changed where they stand.
    pub fn change_in_order<T>(
        &mut self,
        store: &NodeStore,
        keys: &mut Peekable<impl Iterator<Item = (Key, T)>>,
        change: &mut impl FnMut(T, &mut [u8]),
    ) -> Result<(), AreaError> {
        let level = self.root_level();
        let mut edit = Edit { store, freed: &mut self.freed, changed: &mut self.changed };
        edit.change(&mut self.root, level, (keys, None), change)
    }

    /// Takes a key out; false if it is not there.
    pub fn remove(&mut self, store: &NodeStore, key: &Key) -> Result<bool, AreaError> {
        if self.get(store, key, |_| ())?.is_none() {
            return Ok(false);
        }
        let level = self.root_level();
        let mut edit = Edit { store, freed: &mut self.freed, changed: &mut self.changed };
        edit.remove(&mut self.root, level, key)?;
        while let Child::Inner(inner) = &mut self.root {
            match inner.children.len() {
                0 => {
                    self.root = Child::Leaf(Leaf::default());
                    self.height = 1;
                }
                1 => {
                    let (_, only) = inner.children.pop().expect("it has one child");
                    self.root = only;
                    self.height -= 1;
                    self.changed -= 1;
                }
                _ => break,
            }
        }
        Ok(true)
    }

    /// Writes every changed node to a block of its own that `allocate` gives, lower nodes first. Nothing is
    /// synced here.
    pub fn write(
        self,
        store: &NodeStore,
        version: Sequence,
        allocate: &mut dyn FnMut() -> Result<Block, AreaError>,
    ) -> Result<Written, AreaError> {
        let height = self.height;
        let mut nodes = 0;
        let root = write_child(store, self.root, version, allocate, &mut nodes)?;
        assert_eq!(nodes, self.changed, "each changed node was counted once");
        Ok(Written { root, height, nodes, freed: self.freed })
    }
}

fn get_clean<T>(
    store: &NodeStore,
    mut pointer: NodePointer,
    mut level: u8,
    key: &Key,
    take: impl FnOnce(&[u8]) -> T,
) -> Result<Option<T>, AreaError> {
    loop {
        let page = store.load(&pointer, level)?;
        if level == 0 {
            return Ok(page.find(key).map(|index| take(page.value(index))));
        }
        pointer = page.child(page.child_of(key));
        level -= 1;
    }
}

type Bounds<'a> = (&'a Key, &'a Key);
type Visit<'a> = dyn FnMut(&Key, &[u8]) -> ControlFlow<()> + 'a;

fn scan_child(
    store: &NodeStore,
    child: &Child,
    level: u8,
    bounds: Bounds<'_>,
    visit: &mut Visit<'_>,
) -> Result<ControlFlow<()>, AreaError> {
    let (from, to) = bounds;
    match child {
        Child::Clean(pointer) => return scan_clean(store, pointer, level, bounds, visit),
        Child::Leaf(leaf) => {
            for (key, value) in leaf.items_from(leaf.below(from, false)) {
                if key > *to || visit(&key, value).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
        Child::Revised(leaf) => return Ok(scan_page(leaf.page(), bounds, visit)),
        Child::Inner(inner) => {
            for (first, child) in &inner.children[inner.child_of(from)..] {
                if first > to || scan_child(store, child, level - 1, bounds, visit)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn scan_clean(
    store: &NodeStore,
    pointer: &NodePointer,
    level: u8,
    bounds: Bounds<'_>,
    visit: &mut Visit<'_>,
) -> Result<ControlFlow<()>, AreaError> {
    let (from, to) = bounds;
    let page = store.load(pointer, level)?;
    if level == 0 {
        return Ok(scan_page(&page, bounds, visit));
    }
    for (index, slot) in page.slots().iter().enumerate().skip(page.child_of(from)) {
        if slot.key > *to || scan_clean(store, &page.child(index), level - 1, bounds, visit)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The same of a leaf.
fn scan_page(page: &Page, (from, to): Bounds<'_>, visit: &mut Visit<'_>) -> ControlFlow<()> {
    for (index, slot) in page.slots().iter().enumerate().skip(page.below(from, false)) {
        if slot.key > *to || visit(&slot.key, page.value(index)).is_break() {
            return ControlFlow::Break(());
        }
    }
    ControlFlow::Continue(())
}

/// The largest key of a subtree that is not larger than `key`. Only on the path to `key` can a child fail to have
/// one, so that at most two children of a node are looked into, of which the second is not empty.
fn floor_child(store: &NodeStore, child: &Child, level: u8, key: &Key) -> Result<Option<Key>, AreaError> {
    match child {
        Child::Clean(pointer) => {
            let page = store.load(pointer, level)?;
            if level == 0 {
                return Ok(floor_in(&page, key));
            }
            for index in (0..=page.child_of(key)).rev() {
                let child = Child::Clean(page.child(index));
                if let Some(found) = floor_child(store, &child, level - 1, key)? {
                    return Ok(Some(found));
                }
            }
        }
        Child::Leaf(leaf) => {
            return Ok(leaf.below(key, true).checked_sub(1).map(|index| leaf.key(index)));
        }
        Child::Revised(leaf) => return Ok(floor_in(leaf.page(), key)),
        Child::Inner(inner) => {
            for (_, child) in inner.children[..=inner.child_of(key)].iter().rev() {
                if let Some(found) = floor_child(store, child, level - 1, key)? {
                    return Ok(Some(found));
                }
            }
        }
    }
    Ok(None)
}

/// The largest key of a leaf that is not larger than `key`.
fn floor_in(page: &Page, key: &Key) -> Option<Key> {
    page.below(key, true).checked_sub(1).map(|index| page.slots()[index].key)
}

fn write_child(
    store: &NodeStore,
    child: Child,
    version: Sequence,
    allocate: &mut dyn FnMut() -> Result<Block, AreaError>,
    nodes: &mut u32,
) -> Result<NodePointer, AreaError> {
    let (level, items) = match child {
        Child::Clean(pointer) if pointer.version == OF_THIS_COMMIT => {
            return Ok(NodePointer { version, ..pointer });
        }
        Child::Clean(pointer) => return Ok(pointer),
        Child::Leaf(leaf) => {
            assert!(leaf.count() == 0 || !leaf.is_over(), "a leaf that is too full was split");
            let block = allocate()?;
            *nodes += 1;
            return Ok(store.write(encode(0, leaf.items_from(0), block, version), block, 0));
        }
        Child::Revised(leaf) => {
            let block = allocate()?;
            *nodes += 1;
            return Ok(store.write_page(leaf.into_page(block, version), block));
        }
        Child::Inner(inner) => {
            let mut pointers = Vec::with_capacity(inner.children.len());
            for (first, child) in inner.children {
                pointers.push((first, write_child(store, child, version, allocate, nodes)?));
            }
            (inner.level, pointers)
        }
    };
    debug_assert!(items.len() * 40 <= NODE_ROOM);
    let block = allocate()?;
    let items = items.iter().map(|(first, pointer)| (*first, pointer.as_bytes()));
    *nodes += 1;
    Ok(store.write(encode(level, items, block, version), block, level))
}

/// Checks a page against the keys that its parent says may stand in it.
pub(crate) fn keys_within(page: &Page, first: &Key, end: Option<&Key>) -> bool {
    let slots = page.slots();
    let low = match (page.level(), slots.first()) {
        (_, None) => true,
        (0, Some(slot)) => slot.key >= *first,
        (_, Some(slot)) => slot.key == *first,
    };
    let high = slots.last().zip(end).is_none_or(|(slot, end)| slot.key < *end);
    low && high
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::changed_keys;
    use format::node::ItemKind;
    use pmem::recorded::Recorder;
    use std::collections::{BTreeMap, BTreeSet};

    const NODES: u32 = 4000;

    fn key(number: u64) -> Key {
        Key::new(number / 100, ItemKind::Entry, number % 100)
    }

    /// Checks the shape of a committed tree; gives its blocks.
    fn walk(store: &NodeStore, pointer: &NodePointer, level: u8, first: Key, end: Option<Key>) -> Vec<Block> {
        let page = store.load(pointer, level).unwrap();
        assert!(keys_within(&page, &first, end.as_ref()), "keys of block {} out of bounds", pointer.block);
        let mut blocks = vec![pointer.block];
        for (index, slot) in page.slots().iter().enumerate().filter(|_| level > 0) {
            let next = page.slots().get(index + 1).map(|next| next.key).or(end);
            blocks.extend(walk(store, &page.child(index), level - 1, slot.key, next));
        }
        blocks
    }

    /// Random changes of `keys` keys with values of up to `value_bytes`, half of the time growing, else shrinking.
    fn compare(seed: u64, keys: u64, value_bytes: u64) -> u32 {
        let region = Recorder::new().medium().create("tree", u64::from(NODES) * 4096).unwrap();
        let store = NodeStore::new(region, 0..NODES, 7);
        let mut random = seed;
        let mut draw = |end: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % end
        };
        let (mut tree, mut model) = (Tree::empty(), BTreeMap::new());
        let mut free: BTreeSet<u32> = (0..NODES).collect();
        let mut height_max = 0;
        for round in 0..60 {
            for _ in 0..keys / 4 {
                let number = draw(keys);
                if draw(10) < if round / 10 % 2 == 0 { 8 } else { 1 } {
                    let value = vec![number as u8; draw(value_bytes + 1) as usize];
                    tree.put(&store, key(number), &value).unwrap();
                    model.insert(number, value);
                } else {
                    let removed = tree.remove(&store, &key(number)).unwrap();
                    assert_eq!(removed, model.remove(&number).is_some());
                }
                if draw(20) == 0 {
                    // Many at once, in order, far apart and near.
                    let mut numbers: Vec<u64> = (0..draw(40)).map(|_| draw(keys)).collect();
                    numbers.extend(
                        numbers.first().copied().into_iter().flat_map(|n| n..(n + draw(40)).min(keys)),
                    );
                    numbers.sort_unstable();
                    numbers.dedup();
                    let values: Vec<(u64, Vec<u8>)> = numbers
                        .iter()
                        .map(|n| (*n, vec![*n as u8; draw(value_bytes + 1) as usize]))
                        .collect();
                    let items = values.iter().map(|(number, value)| (key(*number), &value[..]));
                    tree.put_in_order(&store, &mut items.peekable()).unwrap();
                    model.extend(values);
                }
                if draw(4) == 0 {
                    // Values of the same length, put or changed where they stand.
                    let (from, byte) = (draw(keys), draw(256) as u8);
                    let numbers: Vec<u64> = model.range(from..).map(|(number, _)| *number).take(3).collect();
                    if byte.is_multiple_of(2) {
                        let values: Vec<_> =
                            numbers.iter().map(|n| (*n, vec![byte; model[n].len()])).collect();
                        let items = values.iter().map(|(number, value)| (key(*number), &value[..]));
                        tree.put_in_order(&store, &mut items.peekable()).unwrap();
                    } else {
                        let mut changes = numbers.iter().map(|number| (key(*number), byte)).peekable();
                        let mut change = |byte, value: &mut [u8]| value.fill(byte);
                        tree.change_in_order(&store, &mut changes, &mut change).unwrap();
                    }
                    for number in numbers {
                        model.get_mut(&number).unwrap().fill(byte);
                    }
                }
                let asked = draw(keys);
                let floor = model.range(..=asked).next_back().map(|(number, _)| key(*number));
                assert_eq!(tree.floor(&store, &KEY_MIN, &key(asked)).unwrap(), floor);
                let value = tree.get(&store, &key(asked), <[u8]>::to_vec).unwrap();
                assert_eq!(value.as_ref(), model.get(&asked));
            }
            height_max = height_max.max(tree.height());
            if draw(3) == 0 {
                let old = std::mem::replace(&mut tree, Tree::empty());
                let written = old
                    .write(&store, Sequence::new(1), &mut || {
                        Ok(Block::new(free.pop_first().expect("enough nodes")))
                    })
                    .unwrap();
                free.extend(written.freed.iter().map(|block| block.get()));
                let level = (written.height - 1) as u8;
                let blocks = walk(&store, &written.root, level, KEY_MIN, None);
                assert_eq!(blocks.len() + free.len(), NODES as usize, "a node leaked or is used twice");
                tree = Tree::committed(written.root, written.height);
            }
            let (from, to) = (draw(keys), draw(keys));
            let mut found = Vec::new();
            let mut visit = |key: &Key, value: &[u8]| {
                found.push((*key, value.to_vec()));
                ControlFlow::Continue(())
            };
            tree.scan(&store, &key(from), &key(to), &mut visit).unwrap();
            let range = if from <= to { model.range(from..=to).collect() } else { Vec::new() };
            let expected: Vec<_> =
                range.into_iter().map(|(number, value)| (key(*number), value.clone())).collect();
            assert!(found == expected, "seed {seed}, round {round}: {} of {}", found.len(), expected.len());
        }
        height_max
    }

    #[test]
    fn agrees_with_a_sorted_map() {
        let (mut high, seeds) = (0, 8);
        for seed in 0..seeds {
            compare(seed, 300, 960);
            compare(seed, 40, 960);
            high = high.max(compare(seed, 3000, 100)).max(compare(seed, 1500, 960));
        }
        assert!(high >= 3, "height {high}");
    }

    /// Ranges of keys below a pointer that changed after version `since`.
    fn changed_since(
        store: &NodeStore,
        root: (&NodePointer, u8),
        since: Sequence,
        ranges: &mut Vec<(Key, Option<Key>)>,
    ) {
        changed_keys(store, root, (KEY_MIN, None), (since.next(), false), ranges).unwrap();
    }

    /// Whatever was put and removed: a tree of an earlier version differs from the present one only in ranges that the
    /// present one says have changed. So a copy that fetches these ranges has the present tree.
    #[test]
    fn versions_say_which_ranges_changed() {
        let (mut inherited, mut skipped) = (0, 0);
        for seed in 0..12u64 {
            let region = Recorder::new().medium().create("tree", u64::from(NODES) * 4096).unwrap();
            let store = NodeStore::new(region, 0..NODES, 64);
            let mut random = seed;
            let mut draw = |end: u64| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % end
            };
            let mut tree = Tree::empty();
            let mut free: BTreeSet<u32> = (0..NODES).collect();
            let mut models = vec![BTreeMap::<u64, u8>::new()];
            let keys = [400, 3600][seed as usize % 2];
            for version in 1..=40u64 {
                let mut model = models.last().unwrap().clone();
                // Whole runs of keys, so that leaves, and inner nodes, become empty; towards the end all of it goes.
                let puts = if version < 20 { 3 } else { 1 };
                for step in 0..12 {
                    // Between the runs single keys.
                    let length = if step % 3 == 0 { draw(keys / 4) } else { 1 };
                    let (from, put) = (draw(keys), draw(4) < puts);
                    for number in from..(from + length).min(keys) {
                        if put {
                            // Some take the place of others of their length.
                            let other = if step % 2 == 0 { 0 } else { draw(361) as usize };
                            let value = vec![version as u8; 600 + other];
                            tree.put(&store, key(number), &value).unwrap();
                            model.insert(number, version as u8);
                        } else {
                            assert_eq!(
                                tree.remove(&store, &key(number)).unwrap(),
                                model.remove(&number).is_some()
                            );
                        }
                    }
                }
                let mut allocate = || Ok(Block::new(free.pop_first().expect("enough nodes")));
                let written = tree.write(&store, Sequence::new(version), &mut allocate).unwrap();
                free.extend(written.freed.iter().map(|block| block.get()));
                models.push(model);
                let present = models.last().unwrap();
                let root = (&written.root, (written.height - 1) as u8);
                for since in [version - 1, version.saturating_sub(1 + draw(8))] {
                    let mut ranges = Vec::new();
                    let since = Sequence::new(since);
                    changed_since(&store, root, since, &mut ranges);
                    let within = |number: &u64| {
                        let key = key(*number);
                        ranges.iter().any(|(first, end)| *first <= key && end.is_none_or(|end| key < end))
                    };
                    let earlier = &models[since.get() as usize];
                    for number in earlier.keys().chain(present.keys()) {
                        let same = earlier.get(number) == present.get(number);
                        assert!(same || within(number), "seed {seed}: {number} from {since} to {version}");
                        skipped += u32::from(!within(number));
                    }
                }
                let mut walk = vec![(written.root, root.1)];
                while let Some((pointer, level)) = walk.pop() {
                    let page = store.load(&pointer, level).unwrap();
                    inherited += u32::from(page.version() < pointer.version);
                    let children = if level > 0 { page.slots().len() } else { 0 };
                    walk.extend((0..children).map(|index| (page.child(index), level - 1)));
                }
                tree = Tree::committed(written.root, written.height);
            }
        }
        assert!(
            inherited > 20 && skipped > 1000,
            "{inherited} ranges taken over, {skipped} keys not in a range"
        );
    }

    /// An inner node whose left neighbours are gone takes keys that are smaller than all it had: short scans find them.
    #[test]
    fn small_keys_are_found_after_everything_below_their_neighbours_went() {
        let region = Recorder::new().medium().create("tree", u64::from(NODES) * 4096).unwrap();
        let store = NodeStore::new(region, 0..NODES, 64);
        let mut tree = Tree::empty();
        for number in 0..3000 {
            tree.put(&store, key(number), &[1; 960]).unwrap();
        }
        assert!(tree.height() >= 3, "height {}", tree.height());
        let mut free: BTreeSet<u32> = (0..NODES).collect();
        let mut commit = |tree: Tree| {
            let written = tree.write(&store, Sequence::new(1), &mut || {
                Ok(Block::new(free.pop_first().expect("enough nodes")))
            });
            let written = written.unwrap();
            walk(&store, &written.root, (written.height - 1) as u8, KEY_MIN, None);
            Tree::committed(written.root, written.height)
        };
        let mut tree = commit(tree);
        for number in 0..1500 {
            assert!(tree.remove(&store, &key(number)).unwrap());
        }
        tree = commit(tree);
        for number in [7, 700, 1400] {
            tree.put(&store, key(number), b"new").unwrap();
            tree = commit(tree);
            let mut found = Vec::new();
            let mut visit = |key: &Key, _: &[u8]| {
                found.push(*key);
                ControlFlow::Continue(())
            };
            tree.scan(&store, &key(number), &key(number + 1), &mut visit).unwrap();
            assert_eq!(found, [key(number)]);
        }
    }

    /// The left neighbour of an inner node that became empty was itself changed by the batch, elsewhere: its last child,
    /// which was not, takes the range over.
    #[test]
    fn the_last_child_of_a_changed_neighbour_takes_the_range_over() {
        let region = Recorder::new().medium().create("tree", u64::from(NODES) * 4096).unwrap();
        let store = NodeStore::new(region, 0..NODES, 64);
        let (mut tree, mut free) = (Tree::empty(), (0..NODES).collect::<BTreeSet<u32>>());
        for number in 0..3000 {
            tree.put(&store, key(number), &[1; 960]).unwrap();
        }
        let mut allocate = || Ok(Block::new(free.pop_first().expect("enough nodes")));
        let written = tree.write(&store, Sequence::new(1), &mut allocate).unwrap();
        assert_eq!(written.height, 3);
        let root = store.load(&written.root, 2).unwrap();
        let number_of = |index: usize| {
            let first = root.slots()[index].key;
            (0..3000).find(|number| key(*number) >= first).unwrap()
        };
        let second = number_of(1)..number_of(2);
        let mut tree = Tree::committed(written.root, written.height);
        tree.put(&store, key(0), &[2]).unwrap();
        for number in second.clone() {
            tree.remove(&store, &key(number)).unwrap();
        }
        let written = tree.write(&store, Sequence::new(2), &mut allocate).unwrap();
        let (mut ranges, root) = (Vec::new(), (&written.root, (written.height - 1) as u8));
        changed_since(&store, root, Sequence::new(1), &mut ranges);
        for number in second {
            let found = ranges
                .iter()
                .any(|(first, end)| *first <= key(number) && end.is_none_or(|end| key(number) < end));
            assert!(found, "{number} was removed, and is in no range");
        }
    }
}
