//! Images that need no second judgement: of all that was read of an image when it was judged, not a byte is another in
//! a later one, so that recovery and judge would do the same again.
//!
//! [`Seen`] is a tree of the pages that were read, in their order, by what they held; [`Alike`] knows of the images
//! of one moment, without making them, which units were looked at.

use crate::LINE_BYTES;
use crate::choices::Choices;
use crate::footprint::{Mask, Part};
use crate::image::{Image, PAGE_BYTES, Page};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Files and their lengths: whoever reads may ask for them.
type Folder = Vec<(Arc<str>, u64)>;

/// Bytes that what was judged may take, about: with more all of it is forgotten, which costs time and no truth.
const BYTES_MAX: usize = 1 << 29;

/// A node in a list that grows by doubling, the look that leads on, and a map of one page with what the allocator adds.
const NODE_BYTES: usize = 2 * size_of::<Node>() + size_of::<Look>() + 320;

/// What was judged to be good.
#[derive(Default)]
pub struct Seen {
    /// About what it takes.
    bytes: usize,
    /// Where the pages are that it holds, many of them more than once.
    kept: HashSet<usize>,
    /// Each mask once.
    masks: HashSet<Arc<Mask>>,
    /// By what had returned and by the files there are.
    roots: HashMap<(usize, Folder), usize>,
    nodes: Vec<Node>,
}

#[derive(Default)]
struct Node {
    /// What was looked at next; more than one if what was judged later was read in another order.
    next: Vec<Look>,
    /// All that was read on the way here, if a judgement ended here.
    end: Option<Arc<Vec<Part>>>,
}

struct Look {
    part: Part,
    found: HashMap<u64, Vec<(Arc<Page>, usize)>>,
    /// The page that was found last: mostly the same again.
    last: Option<(Arc<Page>, usize)>,
}

impl Seen {
    /// What was read of an image that was judged to be good and is the same in this one, if there is any.
    pub(crate) fn find(&mut self, returned: usize, image: &Image) -> Option<Arc<Vec<Part>>> {
        let root = *self.roots.get(&(returned, folder(image)))?;
        let files = image.files();
        let mut ways = vec![root];
        while let Some(node) = ways.pop() {
            if let Some(end) = &self.nodes[node].end {
                return Some(end.clone());
            }
            for look in &mut self.nodes[node].next {
                let page = files[look.part.file].shared_page(look.part.page);
                ways.extend(look.follow(page, &mut self.bytes));
            }
        }
        None
    }

    /// Notes that an image was good, and what was read of it.
    pub(crate) fn add(&mut self, returned: usize, image: &Image, parts: &[Part]) {
        if self.bytes > BYTES_MAX {
            *self = Self::default();
        }
        let files = image.files();
        let nodes = &mut self.nodes;
        let mut new = || {
            nodes.push(Node::default());
            nodes.len() - 1
        };
        let mut node = *self.roots.entry((returned, folder(image))).or_insert_with(&mut new);
        let mut shared = Vec::with_capacity(parts.len());
        for part in parts.iter() {
            let page = files[part.file].shared_page(part.page).clone();
            let same = |look: &Look| {
                (look.part.file, look.part.page, &look.part.mask) == (part.file, part.page, &part.mask)
            };
            let next = &mut self.nodes[node].next;
            let look = next.iter().position(same).unwrap_or_else(|| {
                let mask = self.masks.get(&part.mask).unwrap_or(&part.mask).clone();
                if self.masks.insert(mask.clone()) {
                    self.bytes += 2 * size_of::<Mask>();
                }
                next.reserve_exact(1);
                next.push(Look { part: Part { mask, ..*part }, found: HashMap::new(), last: None });
                next.len() - 1
            });
            shared.push(self.nodes[node].next[look].part.clone());
            if let Some(known) = self.nodes[node].next[look].follow(&page, &mut self.bytes) {
                node = known;
                continue;
            }
            let new = self.nodes.len();
            self.nodes.push(Node::default());
            let first = self.kept.insert(Arc::as_ptr(&page).addr());
            self.bytes += NODE_BYTES + if first { PAGE_BYTES } else { 0 };
            let look = &mut self.nodes[node].next[look];
            look.found.entry(hash(&page, &look.part.mask)).or_default().push((page, new));
            node = new;
        }
        self.bytes += size_of_val(&shared[..]);
        self.nodes[node].end = Some(Arc::new(shared));
    }
}

impl Look {
    /// The node behind a page, if it is known; a page that is held for the next time is added to the bytes.
    fn follow(&mut self, page: &Arc<Page>, bytes: &mut usize) -> Option<usize> {
        if let Some((last, node)) = &self.last
            && Arc::ptr_eq(last, page)
        {
            return Some(*node);
        }
        let found = self.found.get(&hash(page, &self.part.mask))?;
        let equal = |(known, _): &&(Arc<Page>, usize)| look_equal(&known[..], &page[..], &self.part.mask[..]);
        let node = found.iter().find(equal)?.1;
        if self.last.replace((page.clone(), node)).is_none() {
            *bytes += PAGE_BYTES;
        }
        Some(node)
    }
}

fn folder(image: &Image) -> Folder {
    image.names().map(|name| (name.clone(), image.bytes(name).expect("a name of the image"))).collect()
}

/// The eight bytes of a mask's bits from `bit` on, as a mask of bytes.
fn spread(bits: u64, bit: usize) -> u64 {
    let eight = (bits >> bit & 0xff).wrapping_mul(0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    // A bit in each byte, wherever it stands, becomes the whole byte.
    let ones = (eight.wrapping_add(0x7f7f_7f7f_7f7f_7f7f) | eight) >> 7 & 0x0101_0101_0101_0101;
    ones.wrapping_mul(0xff)
}

/// Of what is under the mask.
fn hash(page: &Page, mask: &Mask) -> u64 {
    let mut hashes = [0x9e37_79b9_7f4a_7c15_u64; 4];
    for (line, bits) in page.chunks_exact(LINE_BYTES).zip(mask).filter(|(_, bits)| **bits != 0) {
        for (index, word) in line.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            let word = if *bits == u64::MAX { word } else { word & spread(*bits, 8 * index) };
            let hash = &mut hashes[index % 4];
            *hash = (*hash ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(32);
        }
    }
    hashes
        .into_iter()
        .fold(0, |all: u64, hash| (all ^ hash).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(32))
}

/// The same of two versions of a unit.
fn look_equal(one: &[u8], other: &[u8], mask: &[u64]) -> bool {
    let lines = one.chunks(LINE_BYTES).zip(other.chunks(LINE_BYTES)).zip(mask);
    lines.filter(|(_, bits)| **bits != 0).all(|((one, other), bits)| {
        let differs = |index: usize| one[index] != other[index] && bits >> index & 1 == 1;
        one == other || !(0..one.len()).any(differs)
    })
}

/// To ask more groups than this costs more than to make the image and ask [`Seen`].
const GROUPS_MAX: usize = 12;

/// The images of one moment that were judged, by the units of which something was read.
pub(crate) struct Alike {
    /// So many images of the moment are asked for that it is worth the while.
    many: bool,
    groups: Vec<Group>,
    versions: Vec<u16>,
}

struct Group {
    /// Units whose versions differ in what was read, and which of the versions look the same.
    units: Vec<(usize, Vec<u16>)>,
    seen: HashSet<Vec<u16>>,
}

impl Group {
    fn look(&self, chosen: &[usize], versions: &mut Vec<u16>) {
        versions.clear();
        versions.extend(self.units.iter().map(|(unit, classes)| classes[chosen[*unit]]));
    }
}

impl Alike {
    pub fn new(many: bool) -> Self {
        Self { many, groups: Vec::new(), versions: Vec::new() }
    }

    /// True if a good image had all that was read of it as this one.
    pub fn knows(&mut self, chosen: &[usize]) -> bool {
        let versions = &mut self.versions;
        let found = self.groups.iter().position(|group| {
            group.look(chosen, versions);
            group.seen.contains(versions.as_slice())
        });
        // What was found is asked first the next time.
        if let Some(at) = found.filter(|at| *at > 0) {
            self.groups.swap(at, at - 1);
        }
        found.is_some()
    }

    /// Notes a good image.
    pub fn add(&mut self, choices: &Choices<'_>, chosen: &[usize], image: &Image, parts: &[Part]) {
        if !self.many {
            return;
        }
        let names: Vec<&Arc<str>> = image.names().collect();
        let units = units(choices, &names, parts);
        let at = self.groups.iter().position(|group| group.units == units).unwrap_or_else(|| {
            self.groups.truncate(GROUPS_MAX - 1);
            self.groups.push(Group { units, seen: HashSet::new() });
            self.groups.len() - 1
        });
        let mut versions = Vec::new();
        self.groups[at].look(chosen, &mut versions);
        self.groups[at].seen.insert(versions);
    }
}

fn units(choices: &Choices<'_>, names: &[&Arc<str>], parts: &[Part]) -> Vec<(usize, Vec<u16>)> {
    let read: HashMap<(&str, u64), &Mask> =
        parts.iter().map(|part| ((&**names[part.file], part.page), &*part.mask)).collect();
    let mut units = Vec::new();
    for (unit, choice) in choices.moment.choices.iter().enumerate() {
        let page = choice.offset / PAGE_BYTES as u64;
        let Some(mask) = read.get(&(&*choice.name, page)) else { continue };
        let line = (choice.offset % PAGE_BYTES as u64) as usize / LINE_BYTES;
        let mask = &mask[line..];
        if mask.iter().zip(0..choice.versions[0].len().div_ceil(LINE_BYTES)).all(|(bits, _)| *bits == 0) {
            continue;
        }
        let mut looks: Vec<&[u8]> = Vec::new();
        let classes = choice.versions.iter().map(|version| {
            let known = looks.iter().position(|known| look_equal(known, version, mask));
            known.unwrap_or_else(|| {
                looks.push(version);
                looks.len() - 1
            }) as u16
        });
        let classes: Vec<u16> = classes.collect();
        if looks.len() > 1 {
            units.push((unit, classes));
        }
    }
    if choices.moment.entry.is_some() {
        units.push((choices.moment.choices.len(), vec![0, 1]));
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Medium;
    use crate::recorded::Recorder;

    fn image(word: u64) -> Image {
        let recorder = Recorder::new();
        let medium: Medium = recorder.medium();
        let region = medium.create("file", PAGE_BYTES as u64).unwrap();
        region.write(0, &word.to_le_bytes());
        region.settle().unwrap();
        recorder.image()
    }

    fn first_word() -> Vec<Part> {
        let mut mask: Mask = [0; PAGE_BYTES / LINE_BYTES];
        mask[0] = 0xff;
        vec![Part { file: 0, page: 0, mask: Arc::new(mask) }]
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut seen = Seen::default();
        let parts = first_word();
        let mut forgotten = 0;
        for word in 0..1000 {
            let image = image(word);
            assert!(seen.find(0, &image).is_none());
            seen.add(0, &image, &parts);
            assert!(seen.find(0, &image).is_some());
            assert_eq!(seen.kept.len(), seen.nodes.len() - 1);
            // Stands for many more of them.
            seen.bytes += BYTES_MAX / 100;
            forgotten += u64::from(seen.nodes.len() == 2);
        }
        assert!(seen.bytes < BYTES_MAX + BYTES_MAX / 50);
        assert!(forgotten >= 9, "{forgotten}");
    }
}
