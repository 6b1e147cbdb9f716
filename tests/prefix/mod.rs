//! A worker's operations, all from one seed, and a naive tree that says what is there after each of them.
//!
//! The worker plays the plan on files; the oracle plays it on [`Tree`], up to where the worker came. A plan has a
//! home, a folder in which it does as it likes, and a few files of its own in the home of the other worker.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Splitmix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The written data: bytes that differ from place to place and from write to write.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    first: u8,
    bytes: usize,
}

impl Data {
    fn bytes(self) -> Vec<u8> {
        (0..self.bytes)
            .map(|at| self.first.wrapping_add((at as u8).wrapping_mul(7)).wrapping_add((at >> 8) as u8))
            .collect()
    }
}

/// One operation, done by one call that changes something.
#[derive(Clone, Debug)]
pub enum Operation {
    Create(String),
    Write(String, u64, Data),
    Append(String, Data),
    Resize(String, u64),
    Empty(String),
    Rename(String, String),
    Link(String, String),
    Unlink(String),
    Mkdir(String),
    Rmdir(String),
    Symlink(String, String),
    /// Opens a file and keeps it open.
    Hold(usize, String),
    /// Writes to a file that is kept open, whatever became of its name.
    HeldWrite(usize, u64, Data),
    HeldResize(usize, u64),
    Sync(String),
    /// Reads a file, which has to hold what the tree says.
    Read(String),
    /// Writes the operation's own number to the plan's file of it.
    Count(u64),
}

#[derive(Clone, Debug)]
enum Node {
    File(Vec<u8>),
    Folder,
    Symlink(String),
}

/// A naive tree: paths and what they name.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    names: BTreeMap<String, usize>,
    nodes: Vec<Node>,
}

/// The listing's line for each path.
pub type Listing = BTreeMap<String, String>;

impl Tree {
    fn add(&mut self, path: &str, node: Node) {
        self.nodes.push(node);
        assert!(self.names.insert(path.to_owned(), self.nodes.len() - 1).is_none(), "{path} is new");
    }

    fn node(&self, path: &str) -> Option<&Node> {
        self.names.get(path).map(|index| &self.nodes[*index])
    }

    fn contents(&mut self, index: usize) -> &mut Vec<u8> {
        match &mut self.nodes[index] {
            Node::File(contents) => contents,
            other => panic!("{other:?} is no file"),
        }
    }

    fn below(&self, path: &str) -> Vec<String> {
        let prefix = format!("{path}/");
        self.names.keys().filter(|name| name.starts_with(&prefix)).cloned().collect()
    }

    fn write(&mut self, index: usize, offset: Option<u64>, data: &[u8]) {
        let contents = self.contents(index);
        let offset = offset.map_or(contents.len(), |offset| offset as usize);
        contents.resize(contents.len().max(offset + data.len()), 0);
        contents[offset..offset + data.len()].copy_from_slice(data);
    }

    fn rename(&mut self, from: &str, to: &str) {
        if self.names.get(from) == self.names.get(to) {
            return;
        }
        for path in self.below(from) {
            let index = self.names.remove(&path).unwrap();
            self.names.insert(format!("{to}{}", &path[from.len()..]), index);
        }
        let index = self.names.remove(from).unwrap();
        self.names.insert(to.to_owned(), index);
    }

    /// The listing that [`list`] has to find.
    pub fn listing(&self) -> Listing {
        let links = |wanted: usize| self.names.values().filter(|index| **index == wanted).count();
        let folders = |path: &str| {
            let inside = |name: &&String| name.rsplit_once('/').is_some_and(|(above, _)| above == path);
            self.names
                .keys()
                .filter(inside)
                .filter(|name| matches!(self.node(name), Some(Node::Folder)))
                .count()
        };
        let line = |path: &String, index: usize| match &self.nodes[index] {
            Node::File(contents) => file_line(links(index), contents),
            Node::Folder => format!("folder, {} links", 2 + folders(path)),
            Node::Symlink(target) => format!("symlink to {target}"),
        };
        self.names.iter().map(|(path, index)| (path.clone(), line(path, *index))).collect()
    }
}

fn file_line(links: usize, contents: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    contents.hash(&mut hasher);
    format!("file, {links} links, {} bytes, {:016x}", contents.len(), hasher.finish())
}

/// All that is below a folder.
pub fn list(root: &Path) -> io::Result<Listing> {
    let mut found = Listing::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let status = fs::symlink_metadata(&path)?;
            let line = if status.is_dir() {
                folders.push(path.clone());
                format!("folder, {} links", status.nlink())
            } else if status.is_symlink() {
                format!("symlink to {}", fs::read_link(&path)?.display())
            } else {
                let contents = fs::read(&path)?;
                assert_eq!(contents.len() as u64, status.len(), "{} is as long as it says", path.display());
                file_line(status.nlink() as usize, &contents)
            };
            let path = path.strip_prefix(root).expect("it is below").to_str().expect("names are ASCII");
            found.insert(path.to_owned(), line);
        }
    }
    Ok(found)
}

/// Names of the two homes.
pub const HOMES: [&str; 2] = ["a", "b"];

/// Which plan a path belongs to.
pub fn owner(path: &str) -> usize {
    let guest = HOMES.iter().position(|home| path.contains(&format!("/from-{home}")));
    guest.unwrap_or_else(|| HOMES.iter().position(|home| path.split('/').next() == Some(home)).unwrap())
}

/// Files that a plan keeps open.
const HELD: usize = 2;
/// Longest file, about.
const OFFSET_MAX: u64 = 40_000;

/// Where one worker is in its operations.
#[derive(Clone)]
pub struct Plan {
    random: Random,
    pub tree: Tree,
    home: &'static str,
    /// The other's home, if there is another.
    guest: Option<&'static str>,
    held: [Option<usize>; HELD],
    number: u64,
}

impl Plan {
    pub fn new(seed: u64, who: usize, pair: bool) -> Self {
        let mut tree = Tree::default();
        tree.add(HOMES[who], Node::Folder);
        let guest = pair.then_some(HOMES[1 - who]);
        let random = Random(seed ^ ((who as u64 + 1) << 56));
        Self { random, tree, home: HOMES[who], guest, held: [None; HELD], number: 0 }
    }

    /// How many operations were given.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The file in which a plan counts.
    pub fn count_file(home: &str) -> String {
        format!("{home}/count")
    }

    /// The next operation; the tree is what it is after it.
    pub fn next(&mut self) -> Operation {
        self.number += 1;
        let operation = if self.number == 1 {
            Operation::Create(Self::count_file(self.home))
        } else {
            let tried = (0..64).find_map(|_| self.candidate());
            tried.unwrap_or(Operation::Count(self.number))
        };
        self.apply(&operation);
        operation
    }

    fn folder(&mut self) -> String {
        let folders = ["", "/d0", "/d1", "/d0/e", "/d1/e"];
        format!("{}{}", self.home, folders[self.random.below(5) as usize])
    }

    /// A path that a file may have.
    fn file_path(&mut self) -> String {
        let name = self.random.below(5);
        match self.guest {
            Some(guest) if self.random.below(4) == 0 => format!("{guest}/from-{}{}", self.home, name % 3),
            _ => format!("{}/f{name}", self.folder()),
        }
    }

    fn file(&mut self) -> Option<String> {
        let path = self.file_path();
        matches!(self.tree.node(&path), Some(Node::File(_))).then_some(path)
    }

    /// A path without anything, in a folder that is there.
    fn free(&mut self, path: String) -> Option<String> {
        let above = path.rsplit_once('/')?.0;
        let is_there = self.guest == Some(above) || matches!(self.tree.node(above), Some(Node::Folder));
        (is_there && self.tree.node(&path).is_none()).then_some(path)
    }

    fn subfolder(&mut self) -> Option<String> {
        let path = self.folder();
        (path != self.home && matches!(self.tree.node(&path), Some(Node::Folder))).then_some(path)
    }

    fn data(&mut self) -> Data {
        let bytes = match self.random.below(20) {
            0 => 100_000 + self.random.below(100_000),
            1..6 => 4096 * (1 + self.random.below(3)),
            6..12 => 1 + self.random.below(9000),
            _ => 1 + self.random.below(200),
        };
        Data { first: self.random.next() as u8, bytes: bytes as usize }
    }

    /// One try at an operation that is possible now.
    fn candidate(&mut self) -> Option<Operation> {
        let slot = self.random.below(HELD as u64) as usize;
        Some(match self.random.below(40) {
            0..5 => {
                let path = self.file_path();
                Operation::Create(self.free(path)?)
            }
            5..12 => Operation::Write(self.file()?, self.random.below(OFFSET_MAX), self.data()),
            12..17 => Operation::Append(self.file()?, self.data()),
            17..20 => Operation::Resize(self.file()?, self.random.below(OFFSET_MAX)),
            20 => Operation::Empty(self.file()?),
            21..24 => {
                let (from, to) = (self.file()?, self.file_path());
                let replaces = matches!(self.tree.node(&to), Some(Node::File(_) | Node::Symlink(_)));
                Operation::Rename(from, if replaces { to } else { self.free(to)? })
            }
            24 => {
                let (from, to) = (self.subfolder()?, self.folder());
                if to.starts_with(&from) || from.starts_with(&to) {
                    return None;
                }
                let empty =
                    matches!(self.tree.node(&to), Some(Node::Folder)) && self.tree.below(&to).is_empty();
                Operation::Rename(from, if empty { to } else { self.free(to)? })
            }
            25..27 => {
                let (from, to) = (self.file()?, self.file_path());
                Operation::Link(from, self.free(to)?)
            }
            27..30 => {
                let path = self.file_path();
                matches!(self.tree.node(&path), Some(Node::File(_) | Node::Symlink(_))).then_some(())?;
                Operation::Unlink(path)
            }
            30..32 => {
                let path = self.folder();
                Operation::Mkdir(self.free(path)?)
            }
            32 => {
                let path = self.subfolder()?;
                self.tree.below(&path).is_empty().then_some(Operation::Rmdir(path))?
            }
            33 => {
                let path = self.file_path();
                Operation::Symlink(format!("target-{}", self.random.below(100)), self.free(path)?)
            }
            34 => Operation::Hold(slot, self.file()?),
            35 => {
                self.held[slot]?;
                Operation::HeldWrite(slot, self.random.below(OFFSET_MAX), self.data())
            }
            36 => {
                self.held[slot]?;
                Operation::HeldResize(slot, self.random.below(OFFSET_MAX))
            }
            37 => Operation::Sync(self.file()?),
            38 => Operation::Read(self.file()?),
            _ => Operation::Count(self.number),
        })
    }

    fn apply(&mut self, operation: &Operation) {
        let tree = &mut self.tree;
        match operation {
            Operation::Create(path) => tree.add(path, Node::File(Vec::new())),
            Operation::Write(path, offset, data) => {
                tree.write(tree.names[path], Some(*offset), &data.bytes())
            }
            Operation::Append(path, data) => tree.write(tree.names[path], None, &data.bytes()),
            Operation::Resize(path, bytes) => tree.contents(tree.names[path]).resize(*bytes as usize, 0),
            Operation::Empty(path) => tree.contents(tree.names[path]).clear(),
            Operation::Rename(from, to) => tree.rename(from, to),
            Operation::Link(from, to) => {
                let index = tree.names[from];
                tree.names.insert(to.clone(), index);
            }
            Operation::Unlink(path) | Operation::Rmdir(path) => {
                tree.names.remove(path);
            }
            Operation::Mkdir(path) => tree.add(path, Node::Folder),
            Operation::Symlink(target, path) => tree.add(path, Node::Symlink(target.clone())),
            Operation::Hold(slot, path) => self.held[*slot] = Some(tree.names[path]),
            Operation::HeldWrite(slot, offset, data) => {
                tree.write(self.held[*slot].unwrap(), Some(*offset), &data.bytes());
            }
            Operation::HeldResize(slot, bytes) => {
                tree.contents(self.held[*slot].unwrap()).resize(*bytes as usize, 0);
            }
            Operation::Sync(_) | Operation::Read(_) => {}
            Operation::Count(number) => {
                let index = tree.names[&Self::count_file(self.home)];
                tree.write(index, Some(0), &number.to_le_bytes());
            }
        }
    }
}

/// A worker, with its open files.
#[derive(Default)]
pub struct Worker {
    held: [Option<File>; HELD],
}

impl Worker {
    /// Does an operation of a plan on the files below a folder.
    pub fn play(&mut self, root: &Path, operation: &Operation, plan: &Plan) -> io::Result<()> {
        let at = |path: &str| root.join(path);
        let open = |path: &str| OpenOptions::new().read(true).write(true).open(at(path));
        let held = |slot: usize| self.held[slot].as_ref().expect("the plan holds it");
        match operation {
            Operation::Create(path) => {
                OpenOptions::new().write(true).create_new(true).open(at(path)).map(drop)
            }
            Operation::Write(path, offset, data) => {
                whole(open(path)?.write_at(&data.bytes(), *offset), *data)
            }
            Operation::Append(path, data) => {
                whole(OpenOptions::new().append(true).open(at(path))?.write(&data.bytes()), *data)
            }
            Operation::Resize(path, bytes) => open(path)?.set_len(*bytes),
            Operation::Empty(path) => OpenOptions::new().write(true).truncate(true).open(at(path)).map(drop),
            Operation::Rename(from, to) => fs::rename(at(from), at(to)),
            Operation::Link(from, to) => fs::hard_link(at(from), at(to)),
            Operation::Unlink(path) => fs::remove_file(at(path)),
            Operation::Mkdir(path) => fs::create_dir(at(path)),
            Operation::Rmdir(path) => fs::remove_dir(at(path)),
            Operation::Symlink(target, path) => std::os::unix::fs::symlink(target, at(path)),
            Operation::Hold(slot, path) => open(path).map(|file| self.held[*slot] = Some(file)),
            Operation::HeldWrite(slot, offset, data) => {
                whole(held(*slot).write_at(&data.bytes(), *offset), *data)
            }
            Operation::HeldResize(slot, bytes) => held(*slot).set_len(*bytes),
            Operation::Sync(path) => open(path)?.sync_all(),
            Operation::Read(path) => {
                let mut contents = Vec::new();
                open(path)?.read_to_end(&mut contents)?;
                let Some(Node::File(wanted)) = plan.tree.node(path) else { panic!("{path} is a file") };
                if contents != *wanted {
                    return Err(io::Error::other(format!("{path} is not what was written")));
                }
                Ok(())
            }
            Operation::Count(number) => whole(
                open(&Plan::count_file(plan.home))?.write_at(&number.to_le_bytes(), 0),
                Data { first: 0, bytes: 8 },
            ),
        }
    }
}

fn whole(written: io::Result<usize>, data: Data) -> io::Result<()> {
    if written? == data.bytes { Ok(()) } else { Err(io::Error::other("less was written than was given")) }
}
