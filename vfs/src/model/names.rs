//! The name space of the model engine: directories and the operations on them.

use super::{Body, Contents, Inode, Open, TreeState};
use crate::access::{self, Caller};
use crate::engine::{
    Attributes, Created, Entry, Handle, New, NewType, NewUnnamed, Removal, RenameMode, Result, Step,
};
use crate::error::Error;
use format::record::FileType;
use format::{Cookie, InodeNumber, Name};
use std::collections::BTreeMap;

/// Entries of a directory in the order of their cookies.
#[derive(Clone, Debug, Default)]
pub(super) struct Entries(BTreeMap<Cookie, (Vec<u8>, InodeNumber)>);

impl Entries {
    fn find(&self, name: Name<'_>) -> Option<(Cookie, InodeNumber)> {
        let start = Cookie::of_name(name);
        let alike = self.0.range(start..).take_while(|(cookie, _)| cookie.same_hash(start));
        let mut named = alike.filter(|(_, (bytes, _))| bytes == name.bytes());
        named.next().map(|(cookie, (_, inode))| (*cookie, *inode))
    }

    fn insert(&mut self, name: Name<'_>, inode: InodeNumber) -> Result<()> {
        let mut cookie = Cookie::of_name(name);
        while self.0.contains_key(&cookie) {
            cookie = cookie.next_slot().ok_or(Error::NoSpace)?;
        }
        self.0.insert(cookie, (name.bytes().to_vec(), inode));
        Ok(())
    }

    fn remove(&mut self, name: Name<'_>) {
        let (cookie, _) = self.find(name).expect("the entry was found under the same lock");
        self.0.remove(&cookie);
    }

    fn replace(&mut self, name: Name<'_>, inode: InodeNumber) {
        let (cookie, _) = self.find(name).expect("the entry was found under the same lock");
        self.0.insert(cookie, (name.bytes().to_vec(), inode));
    }
}

impl TreeState {
    pub(super) fn walk(
        &mut self,
        caller: &Caller,
        start: InodeNumber,
        steps: &[Step<'_>],
        found: &mut Vec<Attributes>,
    ) -> Result<()> {
        let mut here = self.pinned(start)?.attributes;
        if steps.is_empty() {
            found.push(self.pin(start));
        }
        for step in steps {
            access::search(caller, &here)?;
            let next = match step {
                Step::Parent if here.inode == InodeNumber::ROOT => return Ok(()),
                // The parent of a removed directory may be gone as well.
                Step::Parent if !self.inodes.contains_key(&here.parent) => return Err(Error::NotFound),
                Step::Parent => here.parent,
                Step::Child(name) => self.entry(here.inode, *name).ok_or(Error::NotFound)?,
            };
            here = self.pin(next);
            found.push(here);
            if here.file_type == FileType::Symlink {
                return Ok(());
            }
        }
        Ok(())
    }

    pub(super) fn create(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        name: Name<'_>,
        new: &New<'_>,
        now: i64,
    ) -> Result<Created> {
        let directory = self.pinned(parent)?.attributes;
        access::search(caller, &directory)?;
        match self.entry(parent, name) {
            Some(_) if new.exclusive => return Err(Error::Exists),
            Some(existing) => return Ok(Created::Existing(self.pin(existing))),
            None => access::add_entry(caller, &directory)?,
        }
        access::make(caller, &new.kind)?;
        let is_directory = matches!(new.kind, NewType::Directory);
        if self.inodes.len() as u64 >= self.limits.inodes {
            return Err(Error::NoSpace);
        }
        if is_directory && directory.links >= self.limits.links {
            return Err(Error::TooManyLinks);
        }
        let (number, above) = (self.inode_last.next(), if is_directory { parent } else { InodeNumber::NONE });
        let inode = new_inode(number, caller, &directory, (&new.kind, (new.mode, new.umask)), above, now);
        self.entries(parent).insert(name, number)?;
        self.inode_last = number;
        self.inodes.insert(number, inode);
        self.touch(parent, now);
        if is_directory {
            self.inode(parent).attributes.links += 1;
        }
        let handle = match new.kind {
            NewType::Regular(Some(access)) => Some(self.open(number, access)?),
            _ => None,
        };
        Ok(Created::New(self.pin(number), handle))
    }

    pub(super) fn create_unnamed(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        new: &NewUnnamed,
        now: i64,
    ) -> Result<(Attributes, Handle)> {
        let directory = self.pinned(parent)?.attributes;
        access::search(caller, &directory)?;
        access::check(caller, &directory, access::WRITE)?;
        if self.inodes.len() as u64 >= self.limits.inodes {
            return Err(Error::NoSpace);
        }
        let above = if new.linkable { parent } else { InodeNumber::NONE };
        let number = self.inode_last.next();
        let kind = NewType::Regular(None);
        let mut inode = new_inode(number, caller, &directory, (&kind, (new.mode, new.umask)), above, now);
        inode.attributes.links = 0;
        self.inode_last = number;
        self.inodes.insert(number, inode);
        let opened = self.open(number, new.access);
        if opened.is_err() {
            self.inodes.remove(&number);
        }
        let handle = opened?;
        Ok((self.pin(number), handle))
    }

    pub(super) fn link(
        &mut self,
        caller: &Caller,
        node: InodeNumber,
        parent: InodeNumber,
        name: Name<'_>,
        now: i64,
    ) -> Result<Attributes> {
        let inode = self.pinned(node)?.attributes;
        let directory = self.pinned(parent)?.attributes;
        access::search(caller, &directory)?;
        if self.entry(parent, name).is_some() {
            return Err(Error::Exists);
        }
        access::link(caller, &directory, &inode)?;
        if inode.links >= self.limits.links {
            return Err(Error::TooManyLinks);
        }
        self.entries(parent).insert(name, node)?;
        self.touch(parent, now);
        let attributes = &mut self.inode(node).attributes;
        attributes.links += 1;
        attributes.parent = InodeNumber::NONE;
        attributes.ctime_ns = now;
        Ok(self.pin(node))
    }

    pub(super) fn unlink(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        name: Name<'_>,
        removal: Removal,
        now: i64,
    ) -> Result<()> {
        let directory = self.pinned(parent)?.attributes;
        access::search(caller, &directory)?;
        let number = self.entry(parent, name).ok_or(Error::NotFound)?;
        let victim = self.attributes(number);
        access::remove_entry(caller, &directory, &victim, removal)?;
        if self.holds_entries(number) {
            return Err(Error::NotEmpty);
        }
        self.entries(parent).remove(name);
        self.touch(parent, now);
        self.lose_name(parent, number, now);
        Ok(())
    }

    pub(super) fn rename(
        &mut self,
        caller: &Caller,
        (from, from_name): (InodeNumber, Name<'_>),
        (to, to_name): (InodeNumber, Name<'_>),
        mode: RenameMode,
        now: i64,
    ) -> Result<()> {
        let (from_directory, to_directory) = (self.pinned(from)?.attributes, self.pinned(to)?.attributes);
        access::search(caller, &from_directory)?;
        access::search(caller, &to_directory)?;
        let source_number = self.entry(from, from_name).ok_or(Error::NotFound)?;
        let source = self.attributes(source_number);
        let target = self.entry(to, to_name).map(|number| self.attributes(number));
        match (mode, target.is_some()) {
            (RenameMode::NoReplace { .. }, true) => return Err(Error::Exists),
            (RenameMode::Exchange, false) => return Err(Error::NotFound),
            _ => {}
        }
        if self.is_within(to, source.inode) {
            return Err(Error::Invalid);
        }
        if target.is_some_and(|target| self.is_within(from, target.inode)) {
            let exchange = mode == RenameMode::Exchange;
            return Err(if exchange { Error::Invalid } else { Error::NotEmpty });
        }
        if target.is_some_and(|target| target.inode == source.inode) {
            return Ok(());
        }
        access::rename(caller, &from_directory, &source, &to_directory, target.as_ref(), mode)?;
        if mode == RenameMode::Exchange {
            let target = target.expect("an exchange without a target was refused above");
            self.entries(from).replace(from_name, target.inode);
            self.moved(&target, to, from, now);
        } else {
            self.replace_target(target, source.file_type, from, to, to_name, now)?;
            self.entries(from).remove(from_name);
            if mode.leaves_whiteout() {
                self.leave_whiteout(caller, from, from_name, now)?;
            }
        }
        match self.entry(to, to_name) {
            Some(_) => self.entries(to).replace(to_name, source.inode),
            None => self.entries(to).insert(to_name, source.inode)?,
        }
        self.moved(&source, from, to, now);
        self.touch(from, now);
        self.touch(to, now);
        Ok(())
    }

    /// Creates a device under the old name of a rename.
    fn leave_whiteout(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        name: Name<'_>,
        now: i64,
    ) -> Result<()> {
        let (number, kind) = (self.inode_last.next(), NewType::CharacterDevice(0));
        let directory = self.attributes(parent);
        let inode = new_inode(number, caller, &directory, (&kind, (0, 0)), InodeNumber::NONE, now);
        self.entries(parent).insert(name, number)?;
        self.inode_last = number;
        self.inodes.insert(number, inode);
        Ok(())
    }

    /// Removes the target of the new name, or checks that there is space for the name.
    fn replace_target(
        &mut self,
        target: Option<Attributes>,
        source_type: FileType,
        from: InodeNumber,
        to: InodeNumber,
        to_name: Name<'_>,
        now: i64,
    ) -> Result<()> {
        let Some(target) = target else {
            let adds_directory = source_type == FileType::Directory && from != to;
            let full = self.attributes(to).links >= self.limits.links;
            return if adds_directory && full { Err(Error::TooManyLinks) } else { Ok(()) };
        };
        if self.holds_entries(target.inode) {
            return Err(Error::NotEmpty);
        }
        self.entries(to).remove(to_name);
        self.lose_name(to, target.inode, now);
        Ok(())
    }

    pub(super) fn readdir(
        &mut self,
        handle: Handle,
        after: Option<Cookie>,
        sink: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<()> {
        let Open { inode: number, access } = self.opened(handle)?;
        if !access.read {
            return Err(Error::BadDescriptor);
        }
        let inode = &self.inodes[&number];
        let Body::Directory(entries) = &inode.body else { return Err(Error::NotDirectory) };
        if inode.attributes.links == 0 {
            return Err(Error::NotFound);
        }
        let from = after.map_or(Cookie::START, |cookie| Cookie::from_raw(cookie.get() + 1));
        for (cookie, (bytes, inode)) in entries.0.range(from..) {
            let name = Name::new(bytes).expect("only names are stored");
            let file_type = self.attributes(*inode).file_type;
            if !sink(Entry { name, inode: *inode, file_type, cookie: *cookie }) {
                break;
            }
        }
        Ok(())
    }

    fn entries(&mut self, directory: InodeNumber) -> &mut Entries {
        match &mut self.inode(directory).body {
            Body::Directory(entries) => entries,
            _ => unreachable!("it was searched as a directory under the same lock"),
        }
    }

    fn entry(&mut self, directory: InodeNumber, name: Name<'_>) -> Option<InodeNumber> {
        self.entries(directory).find(name).map(|(_, inode)| inode)
    }

    fn holds_entries(&self, number: InodeNumber) -> bool {
        matches!(&self.inodes[&number].body, Body::Directory(entries) if !entries.0.is_empty())
    }

    /// True if `directory` is `above` or lies below it.
    fn is_within(&self, mut directory: InodeNumber, above: InodeNumber) -> bool {
        while directory != above {
            if directory == InodeNumber::ROOT {
                return false;
            }
            match self.inodes.get(&directory) {
                Some(inode) => directory = inode.attributes.parent,
                None => return false,
            }
        }
        true
    }

    /// The contents of a directory changed.
    fn touch(&mut self, directory: InodeNumber, now: i64) {
        let attributes = &mut self.inode(directory).attributes;
        attributes.mtime_ns = now;
        attributes.ctime_ns = now;
    }

    /// A name of an inode in a directory was removed.
    fn lose_name(&mut self, directory: InodeNumber, number: InodeNumber, now: i64) {
        let attributes = &mut self.inode(number).attributes;
        attributes.ctime_ns = now;
        if attributes.file_type == FileType::Directory {
            attributes.links = 0;
            self.inode(directory).attributes.links -= 1;
        } else {
            attributes.links -= 1;
        }
        self.drop_if_unused(number);
    }

    /// An inode's name went from one directory to another.
    fn moved(&mut self, what: &Attributes, from: InodeNumber, to: InodeNumber, now: i64) {
        self.inode(what.inode).attributes.ctime_ns = now;
        if what.file_type == FileType::Directory && from != to {
            self.inode(what.inode).attributes.parent = to;
            self.inode(from).attributes.links -= 1;
            self.inode(to).attributes.links += 1;
        }
    }
}

fn new_inode(
    number: InodeNumber,
    caller: &Caller,
    directory: &Attributes,
    (kind, mode): (&NewType<'_>, (u32, u32)),
    parent: InodeNumber,
    now: i64,
) -> Inode {
    let file_type = kind.file_type();
    let (gid, mode) = access::inherit(caller, directory, file_type, mode);
    let (body, size, rdev) = match *kind {
        NewType::Regular(_) => (Body::File(Contents::default()), 0, 0),
        NewType::Directory => (Body::Directory(Entries::default()), 0, 0),
        NewType::Symlink(target) => (Body::Symlink(target.to_vec()), target.len() as u64, 0),
        NewType::Fifo | NewType::Socket => (Body::Special, 0, 0),
        NewType::CharacterDevice(device) | NewType::BlockDevice(device) => (Body::Special, 0, device),
    };
    let attributes = Attributes {
        inode: number,
        file_type,
        mode,
        uid: caller.uid,
        gid,
        links: if file_type == FileType::Directory { 2 } else { 1 },
        size,
        blocks: 0,
        rdev,
        atime_ns: now,
        mtime_ns: now,
        ctime_ns: now,
        btime_ns: now,
        parent,
    };
    Inode { attributes, body, xattrs: BTreeMap::new(), pins: 0, opens: 0 }
}
