//! Recognises images that need no second check. Recovery and check behave the same on two images that agree in all
//! bytes that were read, so an accepted image stands for all such images.
//!
//! [`JudgedImages`] is a prefix tree: each node asks for the contents of one page, in the order in which the pages
//! were read, and the contents select the next node. `JudgedChoices` answers the same question for the images of
//! one moment without building them: it knows the units that were read.

use crate::LINE_BYTES;
use crate::choices::Choices;
use crate::footprint::{Mask, ReadPage};
use crate::image::{Image, PAGE_BYTES, Page};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Names and lengths of all files, which a program can list.
type Folder = Vec<(Arc<str>, u64)>;

/// Approximate limit of memory for accepted images. Above it, all of them are forgotten, which costs only time.
const BYTES_MAX: usize = 1 << 29;

/// Memory of a node: its place in a list that grows by doubling, its branch, and a map with one page.
const NODE_BYTES: usize = 2 * size_of::<Node>() + size_of::<Branch>() + 320;

/// The images that were accepted.
#[derive(Default)]
pub struct JudgedImages {
    /// Approximate memory use.
    bytes: usize,
    /// Addresses of the pages that the tree holds; many nodes may share a page.
    kept: HashSet<usize>,
    /// All masks, each stored once.
    masks: HashSet<Arc<Mask>>,
    /// Root nodes, by the number of returned calls and the names and lengths of the files.
    roots: HashMap<(usize, Folder), usize>,
    nodes: Vec<Node>,
}

#[derive(Default)]
struct Node {
    /// The pages that runs read next; more than one if runs read in different orders.
    next: Vec<Branch>,
    /// All that was read on the path to this node, if a run ended here.
    end: Option<Arc<Vec<ReadPage>>>,
}

struct Branch {
    part: ReadPage,
    found: HashMap<u64, Vec<(Arc<Page>, usize)>>,
    /// The page that matched last; most images share it.
    last: Option<(Arc<Page>, usize)>,
}

impl JudgedImages {
    /// Finds an accepted image that agrees with this one in all bytes that were read; returns the bytes that were
    /// read.
    pub(crate) fn find(&mut self, returned: usize, image: &Image) -> Option<Arc<Vec<ReadPage>>> {
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

    /// Records an accepted image and the bytes of it that were read.
    pub(crate) fn add(&mut self, returned: usize, image: &Image, parts: &[ReadPage]) {
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
            let same = |look: &Branch| {
                (look.part.file, look.part.page, &look.part.mask) == (part.file, part.page, &part.mask)
            };
            let next = &mut self.nodes[node].next;
            let look = next.iter().position(same).unwrap_or_else(|| {
                let mask = self.masks.get(&part.mask).unwrap_or(&part.mask).clone();
                if self.masks.insert(mask.clone()) {
                    self.bytes += 2 * size_of::<Mask>();
                }
                next.reserve_exact(1);
                next.push(Branch { part: ReadPage { mask, ..*part }, found: HashMap::new(), last: None });
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

impl Branch {
    /// The node after this page contents, if it is known. Adds to `bytes` if the call keeps the page.
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

/// The eight mask bits from `bit` on, widened to a mask of eight bytes.
fn spread(bits: u64, bit: usize) -> u64 {
    let eight = (bits >> bit & 0xff).wrapping_mul(0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    // Turns the single bit in each byte, whatever its position, into a full byte.
    let ones = (eight.wrapping_add(0x7f7f_7f7f_7f7f_7f7f) | eight) >> 7 & 0x0101_0101_0101_0101;
    ones.wrapping_mul(0xff)
}

/// Hash of the bytes of a page that are in the mask.
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

/// True if two versions of a unit agree in all bytes of the mask.
fn look_equal(one: &[u8], other: &[u8], mask: &[u64]) -> bool {
    let lines = one.chunks(LINE_BYTES).zip(other.chunks(LINE_BYTES)).zip(mask);
    lines.filter(|(_, bits)| **bits != 0).all(|((one, other), bits)| {
        let differs = |index: usize| one[index] != other[index] && bits >> index & 1 == 1;
        one == other || !(0..one.len()).any(differs)
    })
}

/// Limit of groups that are searched; a longer search costs more than building the image and asking [`JudgedImages`].
const GROUPS_MAX: usize = 12;

/// The accepted images of one moment, as version numbers of the units that were read.
pub(crate) struct JudgedChoices {
    /// True if the moment has so many images that this index pays.
    many: bool,
    groups: Vec<Group>,
    versions: Vec<u16>,
}

struct Group {
    /// Units whose versions differ in the bytes that were read; for each version, the number of the first version
    /// that looks the same.
    units: Vec<(usize, Vec<u16>)>,
    seen: HashSet<Vec<u16>>,
}

impl Group {
    fn look(&self, chosen: &[usize], versions: &mut Vec<u16>) {
        versions.clear();
        versions.extend(self.units.iter().map(|(unit, classes)| classes[chosen[*unit]]));
    }
}

impl JudgedChoices {
    pub fn new(many: bool) -> Self {
        Self { many, groups: Vec::new(), versions: Vec::new() }
    }

    /// True if an accepted image agrees with this one in all bytes that were read.
    pub fn knows(&mut self, chosen: &[usize]) -> bool {
        let versions = &mut self.versions;
        let found = self.groups.iter().position(|group| {
            group.look(chosen, versions);
            group.seen.contains(versions.as_slice())
        });
        // Moves a group that matched to the front, because the next image probably matches it too.
        if let Some(at) = found.filter(|at| *at > 0) {
            self.groups.swap(at, at - 1);
        }
        found.is_some()
    }

    /// Records an accepted image.
    pub fn add(&mut self, choices: &Choices<'_>, chosen: &[usize], image: &Image, parts: &[ReadPage]) {
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

fn units(choices: &Choices<'_>, names: &[&Arc<str>], parts: &[ReadPage]) -> Vec<(usize, Vec<u16>)> {
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
        region.sync().unwrap();
        recorder.image()
    }

    fn first_word() -> Vec<ReadPage> {
        let mut mask: Mask = [0; PAGE_BYTES / LINE_BYTES];
        mask[0] = 0xff;
        vec![ReadPage { file: 0, page: 0, mask: Arc::new(mask) }]
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut seen = JudgedImages::default();
        let parts = first_word();
        let mut forgotten = 0;
        for word in 0..1000 {
            let image = image(word);
            assert!(seen.find(0, &image).is_none());
            seen.add(0, &image, &parts);
            assert!(seen.find(0, &image).is_some());
            assert_eq!(seen.kept.len(), seen.nodes.len() - 1);
            // Simulates the memory of many more images.
            seen.bytes += BYTES_MAX / 100;
            forgotten += u64::from(seen.nodes.len() == 2);
        }
        assert!(seen.bytes < BYTES_MAX + BYTES_MAX / 50);
        assert!(forgotten >= 9, "{forgotten}");
    }
}
