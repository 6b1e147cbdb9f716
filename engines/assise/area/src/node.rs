//! One node of the tree in memory: a page as it lies on the medium, checked once and then only read, and a node under
//! change, which becomes a page when its batch commits. A leaf of which values are replaced by others of the same length
//! stays a page, which the commit writes to another place ([`RevisedLeaf`]): it is not taken apart and put together again.

use format::node::{Key, NODE_MAGIC, NodeHeader, NodeView, Slot};
use format::root::NodePointer;
use format::{BLOCK_BYTES, Block, DecodeError, Sequence};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of a node for slots and values.
pub(crate) const NODE_ROOM: usize = BLOCK_BYTES - size_of::<NodeHeader>();

/// Children of the fullest inner node.
pub(crate) const CHILDREN_MAX: usize = NODE_ROOM / (size_of::<Slot>() + size_of::<NodePointer>());

/// Levels of the highest tree: with half-filled nodes it is far beyond what a file of 2^32 blocks can hold.
pub(crate) const HEIGHT_MAX: u32 = 12;

/// Below this many bytes a node looks for a sibling to join.
const SPARSE_BYTES: usize = NODE_ROOM / 3;

/// Two siblings become one only up to this, so that the next insert does not split them again.
const JOINED_BYTES: usize = NODE_ROOM * 3 / 4;

/// The smallest key: where the leftmost path begins.
pub(crate) const KEY_MIN: Key = Key::new(0, format::node::ItemKind::Inode, 0);

/// A node that was read from the medium and found sound.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    bytes: Box<[u8; BLOCK_BYTES]>,
    slots: Vec<Slot>,
    level: u8,
    version: Sequence,
}

impl Page {
    /// Checks the bytes of the node that should lie in `block` at `level`.
    pub fn decode(bytes: Box<[u8; BLOCK_BYTES]>, block: Block, level: u8) -> Result<Self, DecodeError> {
        let view = NodeView::decode(&bytes, block)?;
        if view.header().level != level {
            return Err(DecodeError::Field("level"));
        }
        if level > 0 && view.slots().is_empty() {
            return Err(DecodeError::Field("count"));
        }
        let (slots, version) = (view.slots().to_vec(), view.header().version);
        Ok(Self { bytes, slots, level, version })
    }

    /// The ledger's entry that made the commit in which it was written.
    pub fn version(&self) -> Sequence {
        self.version
    }

    /// 0 for a leaf.
    pub fn level(&self) -> u8 {
        self.level
    }

    /// Keys with the places of their values, in order.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The value of the slot with this index.
    pub fn value(&self, index: usize) -> &[u8] {
        let slot = &self.slots[index];
        let start = usize::from(slot.offset.get());
        &self.bytes[start..start + usize::from(slot.bytes.get())]
    }

    /// In an inner node: the pointer of the child with this index.
    pub fn child(&self, index: usize) -> NodePointer {
        NodePointer::read_from_bytes(self.value(index)).expect("a checked inner node holds pointers")
    }

    /// In an inner node: which child holds `key`.
    pub fn child_of(&self, key: &Key) -> usize {
        self.slots.partition_point(|slot| slot.key <= *key).saturating_sub(1)
    }

    /// Bytes of slots and values.
    pub fn filled(&self) -> usize {
        self.slots.iter().map(|slot| size_of::<Slot>() + usize::from(slot.bytes.get())).sum()
    }

    /// The index of a key's slot.
    pub fn find(&self, key: &Key) -> Option<usize> {
        self.slots.binary_search_by(|slot| slot.key.cmp(key)).ok()
    }

    /// How many keys are smaller than `key`, or not larger.
    pub fn below(&self, key: &Key, or_equal: bool) -> usize {
        self.slots.partition_point(|slot| slot.key < *key || or_equal && slot.key == *key)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; BLOCK_BYTES] {
        &self.bytes
    }
}

/// A leaf under change whose items have the keys and lengths that they had: a page of its own, with other values.
#[derive(Debug)]
pub(crate) struct RevisedLeaf(Page);

impl RevisedLeaf {
    /// A leaf of a page, of which values are to be changed.
    pub fn of_page(page: &Page) -> Self {
        Self(page.clone())
    }

    /// The page, whose block and version are still those of the page that it was made of.
    pub fn page(&self) -> &Page {
        &self.0
    }

    /// The value of the slot with this index.
    pub fn value_mut(&mut self, index: usize) -> &mut [u8] {
        let slot = &self.0.slots[index];
        let start = usize::from(slot.offset.get());
        &mut self.0.bytes[start..start + usize::from(slot.bytes.get())]
    }

    /// The page that will lie in `block`.
    pub fn into_page(self, block: Block, version: Sequence) -> Page {
        let mut page = self.0;
        let (header, _) =
            NodeHeader::mut_from_prefix(&mut page.bytes[..]).expect("a page begins with a header");
        (header.block, header.version, page.version) = (block, version, version);
        page
    }
}

/// Where a child is: as it lies on the medium, or changed by the batch and in memory only.
#[derive(Debug)]
pub(crate) enum Child {
    /// On the medium.
    Clean(NodePointer),
    /// Changed: a leaf.
    Leaf(Leaf),
    /// Changed: a leaf with other values.
    Revised(RevisedLeaf),
    /// Changed: an inner node.
    Inner(Inner),
}

/// A leaf under change. Its values stand in memory of the leaf, one behind the other in no order, so that an item costs no
/// allocation of its own.
#[derive(Debug, Default)]
pub(crate) struct Leaf {
    items: Vec<LeafItem>,
    values: Vec<u8>,
    /// Bytes of slots and values, those that no item has any more not counted.
    filled: usize,
}

/// A key and where its value stands.
#[derive(Clone, Copy, Debug)]
struct LeafItem {
    key: Key,
    at: u32,
    bytes: u32,
}

/// An inner node under change.
#[derive(Debug)]
pub(crate) struct Inner {
    /// Levels below it.
    pub level: u8,
    /// Smallest keys and children, in order; never empty.
    pub children: Vec<(Key, Child)>,
}

/// Values of a leaf are put together when so many bytes of them are kept.
const VALUES_MAX: usize = 3 * NODE_ROOM;

impl LeafItem {
    fn range(&self) -> std::ops::Range<usize> {
        self.at as usize..(self.at + self.bytes) as usize
    }

    /// Bytes of its slot and value.
    fn filled(&self) -> usize {
        size_of::<Slot>() + self.bytes as usize
    }
}

impl Leaf {
    /// A leaf of a page, to be changed.
    pub fn of_page(page: &Page) -> Self {
        let slots = page.slots().iter();
        let first = slots.clone().map(|slot| usize::from(slot.offset.get())).min().unwrap_or(BLOCK_BYTES);
        let item = |slot: &Slot| LeafItem {
            key: slot.key,
            at: u32::from(slot.offset.get()) - first as u32,
            bytes: slot.bytes.get().into(),
        };
        let mut items = Vec::with_capacity(slots.len() + 1);
        items.extend(slots.map(item));
        let mut values = Vec::with_capacity(2 * BLOCK_BYTES);
        values.extend_from_slice(&page.bytes[first..]);
        Self { items, values, filled: page.filled() }
    }

    /// Number of items.
    pub fn count(&self) -> usize {
        self.items.len()
    }

    /// Keys and values in order, from the item with this index on.
    pub fn items_from(&self, index: usize) -> impl ExactSizeIterator<Item = (Key, &[u8])> {
        self.items[index..].iter().map(|item| (item.key, &self.values[item.range()]))
    }

    /// The key of the item with this index.
    pub fn key(&self, index: usize) -> Key {
        self.items[index].key
    }

    /// How many keys are smaller than `key`, or not larger.
    pub fn below(&self, key: &Key, or_equal: bool) -> usize {
        self.items.partition_point(|item| item.key < *key || or_equal && item.key == *key)
    }

    fn find(&self, key: &Key) -> Result<usize, usize> {
        self.items.binary_search_by(|item| item.key.cmp(key))
    }

    /// The value of a key.
    pub fn get(&self, key: &Key) -> Option<&[u8]> {
        let index = self.find(key).ok()?;
        Some(&self.values[self.items[index].range()])
    }

    /// The value of a key, to be changed where it stands.
    pub fn get_mut(&mut self, key: &Key) -> Option<&mut [u8]> {
        let index = self.find(key).ok()?;
        Some(&mut self.values[self.items[index].range()])
    }

    /// Sets a key's value. The leaf may be too full afterwards: then [`Leaf::split`] it.
    pub fn put(&mut self, key: Key, value: &[u8]) {
        let found = self.find(&key);
        if let Ok(index) = found
            && self.items[index].bytes as usize == value.len()
        {
            self.values[self.items[index].range()].copy_from_slice(value);
            return;
        }
        if self.values.len() + value.len() > VALUES_MAX {
            self.put_values_together();
        }
        let at = u32_of(self.values.len());
        self.values.extend_from_slice(value);
        let item = LeafItem { key, at, bytes: u32_of(value.len()) };
        self.filled += item.filled();
        match found {
            Ok(index) => {
                self.filled -= self.items[index].filled();
                self.items[index] = item;
            }
            Err(index) => self.items.insert(index, item),
        }
    }

    /// Drops the values that no item has any more.
    fn put_values_together(&mut self) {
        let mut values = Vec::with_capacity(VALUES_MAX);
        for item in &mut self.items {
            let at = u32_of(values.len());
            values.extend_from_slice(&self.values[item.range()]);
            item.at = at;
        }
        self.values = values;
    }

    /// Takes a key out; false if it is not there.
    pub fn remove(&mut self, key: &Key) -> bool {
        let Ok(index) = self.find(key) else { return false };
        self.filled -= self.items.remove(index).filled();
        true
    }

    /// True if it does not fit a node.
    pub fn is_over(&self) -> bool {
        self.filled > NODE_ROOM
    }

    /// Moves the upper part into a leaf of its own. After an insert at the end only the last item moves, so that
    /// items that arrive in order leave full nodes behind.
    pub fn split(&mut self, inserted: &Key) -> Self {
        let at_end = self.items.last().is_some_and(|item| item.key == *inserted);
        let last = self.items.len() - 1;
        let mut cut = last;
        if !at_end {
            let mut below = 0;
            let reaches_half = |item: &LeafItem| {
                below += item.filled();
                below >= self.filled / 2
            };
            cut = self.items.iter().position(reaches_half).map_or(last, |index| last.min(index + 1));
        }
        let mut right = Self::default();
        right.take_in(&self.items.split_off(cut), &self.values);
        self.filled -= right.filled;
        right
    }

    /// Adds items that are larger than all it has, with copies of their values.
    fn take_in(&mut self, items: &[LeafItem], values: &[u8]) {
        for item in items {
            let at = u32_of(self.values.len());
            self.values.extend_from_slice(&values[item.range()]);
            self.items.push(LeafItem { at, ..*item });
            self.filled += item.filled();
        }
    }
}

impl Inner {
    /// An inner node of a page, to be changed.
    pub fn of_page(page: &Page) -> Self {
        let slots = page.slots().iter().enumerate();
        let children = slots.map(|(index, slot)| (slot.key, Child::Clean(page.child(index)))).collect();
        Self { level: page.level(), children }
    }

    /// Which child holds `key`.
    pub fn child_of(&self, key: &Key) -> usize {
        self.children.partition_point(|(first, _)| first <= key).saturating_sub(1)
    }

    /// Moves the upper half into a node of its own; after an insert at the end only the last child.
    pub fn split(&mut self, inserted: usize) -> Self {
        let last = self.children.len() - 1;
        let cut = if inserted == last { last } else { self.children.len() / 2 };
        Self { level: self.level, children: self.children.split_off(cut) }
    }
}

impl Child {
    /// Bytes of slots and values of a node that is under change.
    pub fn filled(&self) -> usize {
        match self {
            Self::Clean(_) => NODE_ROOM,
            Self::Leaf(leaf) => leaf.filled,
            Self::Revised(leaf) => leaf.page().filled(),
            Self::Inner(inner) => inner.children.len() * (size_of::<Slot>() + size_of::<NodePointer>()),
        }
    }

    /// True if it should join a sibling.
    pub fn is_sparse(&self) -> bool {
        self.filled() < SPARSE_BYTES
    }

    /// True if nothing is left in it.
    pub fn is_empty(&self) -> bool {
        self.filled() == 0
    }

    /// True if two nodes with so many bytes may become one.
    pub fn may_join(left: usize, right: usize) -> bool {
        left + right <= JOINED_BYTES
    }

    /// Takes in everything of its right sibling. Both are under change and of one level.
    pub fn join(&mut self, right: Self) {
        match (self, right) {
            (Self::Leaf(left), Self::Leaf(right)) => left.take_in(&right.items, &right.values),
            (Self::Inner(left), Self::Inner(mut right)) => left.children.append(&mut right.children),
            _ => unreachable!("siblings are of one level and both opened"),
        }
    }
}

/// Writes a node as the page that will lie in `block`.
pub(crate) fn encode<'a>(
    level: u8,
    items: impl ExactSizeIterator<Item = (Key, &'a [u8])>,
    block: Block,
    version: Sequence,
) -> Box<[u8; BLOCK_BYTES]> {
    let mut bytes = Box::new([0; BLOCK_BYTES]);
    let count = items.len();
    let mut slot_at = size_of::<NodeHeader>();
    let mut value_at = BLOCK_BYTES;
    for (key, value) in items {
        value_at -= value.len();
        bytes[value_at..value_at + value.len()].copy_from_slice(value);
        let slot = Slot { key, offset: u16_of(value_at), bytes: u16_of(value.len()) };
        bytes[slot_at..slot_at + size_of::<Slot>()].copy_from_slice(slot.as_bytes());
        slot_at += size_of::<Slot>();
    }
    assert!(slot_at <= value_at, "a node is written only when its items fit");
    let header = NodeHeader {
        magic: U16::new(NODE_MAGIC),
        level,
        reserved: 0,
        count: u16_of(count),
        value_bytes: u16_of(BLOCK_BYTES - value_at),
        block,
        reserved2: U32::new(0),
        version,
    };
    bytes[..size_of::<NodeHeader>()].copy_from_slice(header.as_bytes());
    bytes
}

fn u16_of(number: usize) -> U16 {
    U16::new(u16::try_from(number).expect("offsets in a node fit 16 bits"))
}

fn u32_of(number: usize) -> u32 {
    u32::try_from(number).expect("values of a leaf are fewer than a node has bytes, several times")
}
