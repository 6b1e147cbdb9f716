//! Changes on their way down the tree: nodes are brought into memory, changed, split, joined and dropped there.

use super::OF_THIS_COMMIT;
use crate::AreaError;
use crate::node::{CHILDREN_MAX, Child, Inner, Leaf, Page, RevisedLeaf};
use crate::store::NodeStore;
use format::Block;
use format::node::{Key, VALUE_BYTES_MAX};
use std::iter::Peekable;

impl Child {
    /// Notes that it covers more keys from now on, behind those that it covered. A node under change gets the commit's
    /// version anyway, but its last child reaches further, too.
    fn reach_further(&mut self) {
        match self {
            Self::Clean(pointer) => pointer.version = OF_THIS_COMMIT,
            Self::Leaf(_) | Self::Revised(_) => {}
            Self::Inner(inner) => {
                let (_, last) = inner.children.last_mut().expect("an inner node has children");
                last.reach_further();
            }
        }
    }
}

/// A change on its way down the tree.
pub(super) struct Edit<'a> {
    pub store: &'a NodeStore,
    pub freed: &'a mut Vec<Block>,
    pub changed: &'a mut u32,
}

impl Edit<'_> {
    /// Brings a node into memory to be changed.
    fn open(&mut self, child: &mut Child, level: u8) -> Result<(), AreaError> {
        if let Child::Revised(leaf) = child {
            *child = Child::Leaf(Leaf::of_page(leaf.page()));
        }
        self.open_as(child, level, |page| Child::Leaf(Leaf::of_page(page)))
    }

    /// Brings a node into memory to be changed; of a leaf only values, by others of the same length.
    fn open_in_place(&mut self, child: &mut Child, level: u8) -> Result<(), AreaError> {
        self.open_as(child, level, |page| Child::Revised(RevisedLeaf::of_page(page)))
    }

    fn open_as(
        &mut self,
        child: &mut Child,
        level: u8,
        leaf_of: impl FnOnce(&Page) -> Child,
    ) -> Result<(), AreaError> {
        let Child::Clean(pointer) = child else { return Ok(()) };
        let page = self.store.load(pointer, level)?;
        let reaches_further = pointer.version == OF_THIS_COMMIT;
        self.freed.push(pointer.block);
        *self.changed += 1;
        *child = match level {
            0 => leaf_of(&page),
            _ => Child::Inner(Inner::of_page(&page)),
        };
        if reaches_further {
            child.reach_further();
        }
        Ok(())
    }

    /// Puts an item into a leaf where it stands, if there is one of this key and length; false if nothing was done.
    fn replace(&mut self, child: &mut Child, key: &Key, value: &[u8]) -> Result<bool, AreaError> {
        let place = |page: &Page| page.find(key).filter(|index| page.value(*index).len() == value.len());
        let found = match child {
            Child::Clean(pointer) => place(&*self.store.load(pointer, 0)?),
            Child::Revised(leaf) => place(leaf.page()),
            Child::Leaf(_) | Child::Inner(_) => None,
        };
        let Some(index) = found else { return Ok(false) };
        self.open_in_place(child, 0)?;
        if let Child::Revised(leaf) = child {
            leaf.value_mut(index).copy_from_slice(value);
        }
        Ok(true)
    }

    /// Puts items below `child`, as long as they are smaller than `end` and nothing is split off; gives what was, with its
    /// smallest key.
    pub fn put<'v>(
        &mut self,
        child: &mut Child,
        level: u8,
        items: &mut Peekable<impl Iterator<Item = (Key, &'v [u8])>>,
        end: Option<Key>,
    ) -> Result<Option<(Key, Child)>, AreaError> {
        let within = |(key, _): &(Key, &[u8])| end.is_none_or(|end| *key < end);
        if level == 0 {
            while let Some((key, value)) = items.peek().filter(|item| within(item))
                && self.replace(child, key, value)?
            {
                items.next();
            }
            if items.peek().is_none_or(|item| !within(item)) {
                return Ok(None);
            }
        }
        self.open(child, level)?;
        match child {
            Child::Clean(_) | Child::Revised(_) => unreachable!("it was opened"),
            Child::Leaf(leaf) => {
                while let Some((key, value)) = items.next_if(within) {
                    assert!(value.len() <= VALUE_BYTES_MAX, "a value fits a node four times");
                    leaf.put(key, value);
                    if leaf.is_over() {
                        *self.changed += 1;
                        let right = leaf.split(&key);
                        return Ok(Some((right.key(0), Child::Leaf(right))));
                    }
                }
            }
            Child::Inner(inner) => {
                while let Some((key, _)) = items.peek().filter(|item| within(item)) {
                    let index = inner.child_of(key);
                    let child_end = inner.children.get(index + 1).map(|(first, _)| *first).or(end);
                    let split = self.put(&mut inner.children[index].1, level - 1, items, child_end)?;
                    let Some(split) = split else { continue };
                    inner.children.insert(index + 1, split);
                    if inner.children.len() > CHILDREN_MAX {
                        *self.changed += 1;
                        let right = inner.split(index + 1);
                        return Ok(Some((right.children[0].0, Child::Inner(right))));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Shows the values of keys below `child`, as long as they are smaller than the second of the pair.
    pub fn change<T>(
        &mut self,
        child: &mut Child,
        level: u8,
        (keys, end): (&mut Peekable<impl Iterator<Item = (Key, T)>>, Option<Key>),
        change: &mut impl FnMut(T, &mut [u8]),
    ) -> Result<(), AreaError> {
        self.open_in_place(child, level)?;
        let within = |(key, _): &(Key, T)| end.is_none_or(|end| *key < end);
        match child {
            Child::Clean(_) => unreachable!("it was opened"),
            Child::Leaf(leaf) => {
                while let Some((key, with)) = keys.next_if(within) {
                    change(with, leaf.get_mut(&key).expect("the item was looked up before"));
                }
            }
            Child::Revised(leaf) => {
                while let Some((key, with)) = keys.next_if(within) {
                    let index = leaf.page().find(&key).expect("the item was looked up before");
                    change(with, leaf.value_mut(index));
                }
            }
            Child::Inner(inner) => {
                while let Some((key, _)) = keys.peek().filter(|item| within(item)) {
                    let index = inner.child_of(key);
                    let child_end = inner.children.get(index + 1).map(|(first, _)| *first).or(end);
                    self.change(&mut inner.children[index].1, level - 1, (keys, child_end), change)?;
                }
            }
        }
        Ok(())
    }

    /// Takes an item that is there out from below `child`.
    pub fn remove(&mut self, child: &mut Child, level: u8, key: &Key) -> Result<(), AreaError> {
        self.open(child, level)?;
        match child {
            Child::Clean(_) | Child::Revised(_) => unreachable!("it was opened"),
            Child::Leaf(leaf) => {
                let removed = leaf.remove(key);
                assert!(removed, "the item was looked up before");
            }
            Child::Inner(inner) => {
                let index = inner.child_of(key);
                self.remove(&mut inner.children[index].1, level - 1, key)?;
                self.tidy(inner, index)?;
            }
        }
        Ok(())
    }

    /// Lets a child begin with a smaller key than before: the separators on its leftmost path say so, too.
    fn begin_at(
        &mut self,
        (separator, child): &mut (Key, Child),
        level: u8,
        first: Key,
    ) -> Result<(), AreaError> {
        *separator = first;
        self.open(child, level)?;
        match child {
            Child::Inner(inner) => self.begin_at(&mut inner.children[0], level - 1, first),
            Child::Leaf(_) | Child::Revised(_) | Child::Clean(_) => Ok(()),
        }
    }

    /// After a removal below the child with this index: drops it if it is empty, joins it to a sibling if both
    /// have little in them.
    fn tidy(&mut self, inner: &mut Inner, index: usize) -> Result<(), AreaError> {
        let child = &inner.children[index].1;
        if child.is_empty() {
            let (first, _) = inner.children.remove(index);
            *self.changed -= 1;
            // A neighbour covers its keys from now on.
            return match (index.checked_sub(1), inner.children.first_mut()) {
                (Some(left), _) => {
                    inner.children[left].1.reach_further();
                    Ok(())
                }
                (None, Some(next)) => self.begin_at(next, inner.level - 1, first),
                (None, None) => Ok(()),
            };
        }
        if !child.is_sparse() || inner.children.len() == 1 {
            return Ok(());
        }
        let left = if index + 1 < inner.children.len() { index } else { index - 1 };
        let sibling = if left == index { index + 1 } else { left };
        let sibling_filled = match &inner.children[sibling].1 {
            Child::Clean(pointer) => self.store.load(pointer, inner.level - 1)?.filled(),
            changed => changed.filled(),
        };
        if !Child::may_join(child.filled(), sibling_filled) {
            return Ok(());
        }
        self.open(&mut inner.children[sibling].1, inner.level - 1)?;
        let (_, right) = inner.children.remove(left + 1);
        inner.children[left].1.join(right);
        *self.changed -= 1;
        Ok(())
    }
}
