//! Files and directories in memory, and the operation for each message.

use crate::abi::*;
use ipc::{Host, SystemHost};
use std::collections::{BTreeMap, HashMap};
use zerocopy::{Immutable, IntoBytes};

/// The same time as in the gateway.
const VALID_SECONDS: u64 = 3600;
/// The handle of every open file: no state is kept for one.
const HANDLE: u64 = 1;
const ROOT: u64 = 1;

#[derive(Default)]
struct Node {
    attr: Attr,
    /// The contents of a file, or the target of a symbolic link.
    bytes: Vec<u8>,
    children: BTreeMap<Vec<u8>, u64>,
    parent: u64,
    lookups: u64,
}

pub(crate) struct Tree {
    nodes: HashMap<u64, Node>,
    next: u64,
}

type CallResult = Result<bool, i32>;

fn wrong(_: vfs::Error) -> i32 {
    libc::EINVAL
}

fn now() -> (i64, u32) {
    let now = SystemHost.wall();
    (now / 1_000_000_000, (now % 1_000_000_000) as u32)
}

fn put<T: IntoBytes + Immutable>(answer: &mut Vec<u8>, value: &T) {
    answer.extend_from_slice(value.as_bytes());
}

impl Node {
    fn touch(&mut self) {
        (self.attr.mtime, self.attr.mtime_ns) = now();
        (self.attr.ctime, self.attr.ctime_ns) = (self.attr.mtime, self.attr.mtime_ns);
    }

    fn resize(&mut self, bytes: usize) {
        self.bytes.resize(bytes, 0);
        self.attr.size = bytes as u64;
        self.attr.blocks = bytes.div_ceil(512) as u64;
    }

    fn is_directory(&self) -> bool {
        self.attr.mode & libc::S_IFMT == libc::S_IFDIR
    }
}

impl Tree {
    pub(crate) fn new() -> Self {
        let mut tree = Self { nodes: HashMap::new(), next: ROOT };
        tree.add(ROOT, libc::S_IFDIR | 0o755, &InHeader::default());
        tree
    }

    fn add(&mut self, parent: u64, mode: u32, header: &InHeader) -> u64 {
        let inode = self.next;
        self.next += 1;
        let links = if mode & libc::S_IFMT == libc::S_IFDIR { 2 } else { 1 };
        let (uid, gid) = (header.uid, header.gid);
        let attr = Attr { inode, mode, links, uid, gid, block_bytes: 4096, ..Attr::default() };
        let mut node = Node { attr, parent, ..Node::default() };
        node.touch();
        (node.attr.atime, node.attr.atime_ns) = (node.attr.mtime, node.attr.mtime_ns);
        self.nodes.insert(inode, node);
        inode
    }

    /// Answers a message; false if the kernel waits for no answer.
    pub(crate) fn answer(&mut self, message: &[u8], answer: &mut Vec<u8>) -> bool {
        let Ok((header, mut body)) = split(message) else { return false };
        put(answer, &OutHeader::default());
        let error = match self.serve(&header, &mut body, answer) {
            Ok(false) => return false,
            Ok(true) => 0,
            Err(errno) => {
                answer.truncate(size_of::<OutHeader>());
                -errno
            }
        };
        let out = OutHeader { bytes: answer.len() as u32, error, unique: header.unique };
        answer[..size_of::<OutHeader>()].copy_from_slice(out.as_bytes());
        true
    }

    fn serve(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        match header.opcode {
            opcode::LOOKUP => self.lookup(header, body, answer),
            opcode::FORGET => {
                let lookups = body.take().map_err(wrong)?;
                self.forget(header.node, lookups);
                Ok(false)
            }
            opcode::BATCH_FORGET => {
                let batch: BatchForgetIn = body.take().map_err(wrong)?;
                for _ in 0..batch.count {
                    let one: ForgetOne = body.take().map_err(wrong)?;
                    self.forget(one.node, one.lookups);
                }
                Ok(false)
            }
            opcode::INTERRUPT => Ok(false),
            opcode::GETATTR => self.attributes(header.node, answer),
            opcode::SETATTR => self.setattr(header, body, answer),
            opcode::READLINK => {
                answer.extend_from_slice(&self.node(header.node)?.bytes);
                Ok(true)
            }
            opcode::MKDIR | opcode::MKNOD | opcode::CREATE | opcode::SYMLINK => {
                self.make(header, body, answer)
            }
            opcode::UNLINK | opcode::RMDIR => self.unlink(header, body),
            opcode::RENAME | opcode::RENAME2 => self.rename(header, body),
            opcode::LINK => self.link(header, body, answer),
            opcode::OPEN | opcode::OPENDIR => self.open(header, body, answer),
            opcode::READ => self.read(header, body, answer),
            opcode::WRITE => self.write(header, body, answer),
            opcode::READDIR => self.readdir(header, body, answer),
            opcode::STATFS => {
                put(answer, &StatfsOut { block_bytes: 4096, name_bytes_max: 255, ..StatfsOut::default() });
                Ok(true)
            }
            opcode::GETXATTR => Err(libc::ENODATA),
            opcode::FLUSH | opcode::FSYNC | opcode::FSYNCDIR | opcode::RELEASE | opcode::RELEASEDIR => {
                Ok(true)
            }
            opcode::SETLK | opcode::SETLKW | opcode::ACCESS | opcode::DESTROY => Ok(true),
            opcode::GETLK => {
                let fields: LockIn = body.take().map_err(wrong)?;
                put(answer, &FileLock { kind: libc::F_UNLCK, ..fields.lock });
                Ok(true)
            }
            _ => Err(libc::ENOSYS),
        }
    }

    fn node(&mut self, number: u64) -> Result<&mut Node, i32> {
        self.nodes.get_mut(&number).ok_or(libc::ESTALE)
    }

    fn child(&mut self, directory: u64, name: &[u8]) -> Result<u64, i32> {
        self.node(directory)?.children.get(name).copied().ok_or(libc::ENOENT)
    }

    fn entry(&mut self, number: u64, answer: &mut Vec<u8>) -> CallResult {
        let node = self.node(number)?;
        node.lookups += 1;
        let (attr, valid) = (node.attr, VALID_SECONDS);
        let entry =
            EntryOut { node: number, attr, attr_valid: valid, entry_valid: valid, ..EntryOut::default() };
        put(answer, &entry);
        Ok(true)
    }

    fn attributes(&mut self, number: u64, answer: &mut Vec<u8>) -> CallResult {
        let attr = self.node(number)?.attr;
        put(answer, &AttrOut { attr, valid: VALID_SECONDS, ..AttrOut::default() });
        Ok(true)
    }

    fn lookup(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let name = body.string().map_err(wrong)?;
        match self.child(header.node, name) {
            Ok(number) => self.entry(number, answer),
            Err(libc::ENOENT) => {
                put(answer, &EntryOut { entry_valid: VALID_SECONDS, ..EntryOut::default() });
                Ok(true)
            }
            Err(errno) => Err(errno),
        }
    }

    fn drop_if_gone(&mut self, number: u64) {
        if self.nodes.get(&number).is_some_and(|node| node.lookups == 0 && node.attr.links == 0) {
            self.nodes.remove(&number);
        }
    }

    fn forget(&mut self, number: u64, lookups: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(lookups);
        }
        self.drop_if_gone(number);
    }

    fn setattr(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let fields: SetattrIn = body.take().map_err(wrong)?;
        let node = self.node(header.node)?;
        let has = |bit: u32| fields.valid & bit != 0;
        if has(fattr::MODE) {
            node.attr.mode = node.attr.mode & libc::S_IFMT | fields.mode & 0o7777;
        }
        if has(fattr::UID) {
            node.attr.uid = fields.uid;
        }
        if has(fattr::GID) {
            node.attr.gid = fields.gid;
        }
        if has(fattr::SIZE) {
            node.resize(fields.size as usize);
            node.touch();
        }
        if has(fattr::MTIME) {
            let given = (fields.mtime, fields.mtime_ns);
            (node.attr.mtime, node.attr.mtime_ns) = if has(fattr::MTIME_NOW) { now() } else { given };
        }
        self.attributes(header.node, answer)
    }

    fn make(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let mode = match header.opcode {
            opcode::MKDIR => libc::S_IFDIR | body.take::<MkdirIn>().map_err(wrong)?.mode & 0o7777,
            opcode::MKNOD => body.take::<MknodIn>().map_err(wrong)?.mode,
            opcode::CREATE => libc::S_IFREG | body.take::<CreateIn>().map_err(wrong)?.mode & 0o7777,
            _ => libc::S_IFLNK | 0o777,
        };
        let name = body.string().map_err(wrong)?.to_vec();
        let is_there = self.child(header.node, &name);
        let number = match is_there {
            Ok(number) if header.opcode == opcode::CREATE => number,
            Ok(_) => return Err(libc::EEXIST),
            Err(_) => self.add(header.node, mode, header),
        };
        if header.opcode == opcode::SYMLINK {
            let target = body.string().map_err(wrong)?.to_vec();
            let node = self.node(number)?;
            (node.attr.size, node.bytes) = (target.len() as u64, target);
        }
        let is_directory = mode & libc::S_IFMT == libc::S_IFDIR;
        let directory = self.node(header.node)?;
        directory.attr.links += u32::from(is_directory);
        directory.children.insert(name, number);
        directory.touch();
        self.entry(number, answer)?;
        if header.opcode == opcode::CREATE {
            put(answer, &OpenOut { handle: HANDLE, flags: OPEN_KEEP_CACHE, unused: 0 });
        }
        Ok(true)
    }

    fn unlinked(&mut self, number: u64) -> Result<(), i32> {
        let node = self.node(number)?;
        node.attr.links = if node.is_directory() { 0 } else { node.attr.links - 1 };
        (node.attr.ctime, node.attr.ctime_ns) = now();
        self.drop_if_gone(number);
        Ok(())
    }

    fn unlink(&mut self, header: &InHeader, body: &mut Body<'_>) -> CallResult {
        let name = body.string().map_err(wrong)?;
        let number = self.child(header.node, name)?;
        let node = self.node(number)?;
        if !node.children.is_empty() {
            return Err(libc::ENOTEMPTY);
        }
        let is_directory = node.is_directory();
        let directory = self.node(header.node)?;
        directory.attr.links -= u32::from(is_directory);
        directory.children.remove(name);
        directory.touch();
        self.unlinked(number)?;
        Ok(true)
    }

    fn rename(&mut self, header: &InHeader, body: &mut Body<'_>) -> CallResult {
        let to = if header.opcode == opcode::RENAME2 {
            body.take::<Rename2In>().map_err(wrong)?.to
        } else {
            body.take().map_err(wrong)?
        };
        let old = body.string().map_err(wrong)?;
        let new = body.string().map_err(wrong)?.to_vec();
        let number = self.child(header.node, old)?;
        if let Ok(replaced) = self.child(to, &new) {
            self.unlinked(replaced)?;
        }
        let from = self.node(header.node)?;
        from.children.remove(old);
        from.touch();
        let to_directory = self.node(to)?;
        to_directory.children.insert(new, number);
        to_directory.touch();
        self.node(number)?.parent = to;
        Ok(true)
    }

    fn link(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let number: u64 = body.take().map_err(wrong)?;
        let name = body.string().map_err(wrong)?.to_vec();
        self.node(number)?.attr.links += 1;
        let directory = self.node(header.node)?;
        directory.children.insert(name, number);
        directory.touch();
        self.entry(number, answer)
    }

    fn open(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let fields: OpenIn = body.take().map_err(wrong)?;
        let node = self.node(header.node)?;
        if header.opcode == opcode::OPEN && fields.flags & libc::O_TRUNC as u32 != 0 {
            node.resize(0);
            node.touch();
        }
        let flags = if header.opcode == opcode::OPEN { OPEN_KEEP_CACHE } else { 0 };
        put(answer, &OpenOut { handle: HANDLE, flags, unused: 0 });
        Ok(true)
    }

    fn read(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let fields: ReadIn = body.take().map_err(wrong)?;
        let bytes = &self.node(header.node)?.bytes;
        let start = bytes.len().min(fields.offset as usize);
        let end = bytes.len().min(start + fields.bytes as usize);
        answer.extend_from_slice(&bytes[start..end]);
        Ok(true)
    }

    fn write(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let fields: WriteIn = body.take().map_err(wrong)?;
        let bytes = body.bytes(fields.bytes).map_err(wrong)?;
        let node = self.node(header.node)?;
        let start = fields.offset as usize;
        if node.bytes.len() < start + bytes.len() {
            node.resize(start + bytes.len());
        }
        node.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        node.touch();
        put(answer, &SizeOut { bytes: fields.bytes, unused: 0 });
        Ok(true)
    }

    /// The offset of an entry is its index in the order of names, which is sufficient while the directory does not
    /// change.
    fn readdir(&mut self, header: &InHeader, body: &mut Body<'_>, answer: &mut Vec<u8>) -> CallResult {
        let fields: ReadIn = body.take().map_err(wrong)?;
        let node = self.node(header.node)?;
        let dots = [(&b"."[..], header.node), (&b".."[..], node.parent)];
        let entries = dots.into_iter().chain(node.children.iter().map(|(name, number)| (&name[..], *number)));
        let room = size_of::<OutHeader>() + fields.bytes as usize;
        for (place, (name, inode)) in entries.enumerate().skip(fields.offset as usize) {
            let bytes = (size_of::<Dirent>() + name.len()).next_multiple_of(8);
            if answer.len() + bytes > room {
                break;
            }
            let end = answer.len() + bytes;
            let (offset, name_bytes) = (place as u64 + 1, name.len() as u32);
            put(answer, &Dirent { inode, offset, name_bytes, file_type: 0 });
            answer.extend_from_slice(name);
            answer.resize(end, 0);
        }
        Ok(true)
    }
}
