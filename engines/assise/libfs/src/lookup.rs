//! Looking names up in what is cached, and walking.

use crate::apply;
use crate::directory::{Found, Target};
use crate::need::{Need, Step, Stop, Walk};
use crate::nodes::NodeIndex;
use crate::state::{Session, State};
use format::call::{LEASE_READ, LEASE_WRITE};
use format::record::FileType;
use format::{Cookie, InodeNumber, Name};
use vfs::access;
use vfs::engine::Step as WalkStep;
use vfs::{Caller, Error};

impl State {
    /// An entry of a directory on which a lease is held in `mode`.
    pub(crate) fn lookup(
        &mut self,
        directory: NodeIndex,
        name: Name<'_>,
        mode: u8,
    ) -> Step<Option<(Cookie, Target)>> {
        match self.nodes.get_mut(directory).directory().find(name) {
            Found::Entry(cookie, target) => Ok(Some((cookie, target))),
            Found::Absent => Ok(None),
            Found::Unknown => Err(self.unknown(directory, name, mode).into()),
        }
    }

    /// What to get for a name that is about to be changed and of which nothing is known: with a write lease, soon all
    /// entries of the directory, so that a program that makes, renames and removes files in it needs no call for each.
    #[cold]
    fn unknown(&mut self, directory: NodeIndex, name: Name<'_>, mode: u8) -> Need {
        let node = self.nodes.get(directory);
        let (inode, changes) = (node.inode, mode == LEASE_WRITE && node.lease.is_some_and(|held| held.write));
        match changes.then(|| self.read_whole(directory, true)).flatten() {
            Some(from) => Need::Entries(inode, from),
            None => Need::Walk(Walk::new(inode, vec![name.bytes().to_vec()], mode)),
        }
    }

    /// Where to go on reading all entries of a directory, if that is worth it now, for the sake of a name that is not known.
    fn read_whole(&mut self, directory: NodeIndex, changes: bool) -> Option<Cookie> {
        let lists = self.session.as_ref().is_some_and(|session| {
            access::permits(&session.credential, &self.attributes(directory), access::READ)
        });
        let node = self.nodes.get_mut(directory);
        let entries = node.item.size.get();
        lists.then(|| node.directory().read_whole(entries, changes)).flatten()
    }

    /// The node that an entry stands for, with a lease for reading at least. A listing tells numbers, and a number
    /// alone gives no right to a lease: the way to it leads by its name.
    pub(crate) fn entry_node(
        &mut self,
        directory: NodeIndex,
        name: Name<'_>,
        inode: InodeNumber,
    ) -> Step<NodeIndex> {
        let index = self.nodes.enter(inode);
        if !self.holds(index, LEASE_READ)? {
            return Err(Need::Walk(self.walk_to(directory, name, LEASE_WRITE)).into());
        }
        self.hold(index, LEASE_READ)?;
        Ok(index)
    }

    fn walk_to(&self, directory: NodeIndex, name: Name<'_>, parent_mode: u8) -> Walk {
        Walk::new(self.nodes.get(directory).inode, vec![name.bytes().to_vec()], parent_mode)
    }

    /// [`Self::entry_node`] of an entry that is about to be removed. A program that removes one name of a directory often
    /// removes the next ones: the leases for that come along, those that are free.
    pub(crate) fn removed_node(
        &mut self,
        directory: NodeIndex,
        (cookie, name): (Cookie, Name<'_>),
        inode: InodeNumber,
    ) -> Step<NodeIndex> {
        let index = self.nodes.enter(inode);
        if !self.holds(index, LEASE_WRITE)? {
            let ahead = self.ahead_of(directory, cookie);
            if ahead > 0 {
                let walk = self.walk_to(directory, name, LEASE_WRITE);
                return Err(Need::Walk(walk.ahead(ahead, LEASE_WRITE)).into());
            }
        }
        self.entry_node(directory, name, inode)
    }

    /// For how many entries after this one of a directory leases are asked for as well.
    fn ahead_of(&mut self, directory: NodeIndex, cookie: Cookie) -> u16 {
        let node = self.nodes.get_mut(directory);
        let entries = node.item.size.get();
        node.directory().ahead(cookie, entries)
    }

    /// Whether an attempt may append in this user's name: a session's records are its user's, and a process may have become
    /// another user since it was asked. Root's session is a gateway's, too, and acts for everybody.
    #[inline]
    pub fn acts_as(&self, caller: &Caller) -> Step<()> {
        match &self.session {
            Some(Session { credential, .. })
                if credential.uid != 0 && (credential.uid, credential.gid) != (caller.uid, caller.gid) =>
            {
                Err(vfs::Error::Restart.into())
            }
            _ => Ok(()),
        }
    }

    /// A directory that the caller may search, by a pinned number, with a lease for reading at least.
    pub(crate) fn searched(&mut self, caller: &Caller, inode: InodeNumber) -> Step<NodeIndex> {
        let index = self.pinned(inode)?;
        self.hold(index, LEASE_READ)?;
        access::search(caller, &self.attributes(index))?;
        Ok(index)
    }

    /// Takes steps; pins nothing yet. Gives what was met, and the error that ended the walk before its end.
    pub(crate) fn walk(
        &mut self,
        caller: &Caller,
        start: InodeNumber,
        steps: &[WalkStep<'_>],
    ) -> Step<(Vec<NodeIndex>, Option<Error>)> {
        let mut here = self.pinned(start)?;
        self.hold(here, LEASE_READ)?;
        let mut met = Vec::with_capacity(steps.len());
        let mut ended = None;
        if steps.is_empty() {
            met.push(here);
        }
        for (taken, step) in steps.iter().enumerate() {
            if let Err(error) = access::search(caller, &self.attributes(here)) {
                ended = Some(error);
                break;
            }
            let mut cookie = None;
            let next = match step {
                WalkStep::Parent if self.nodes.get(here).inode == InodeNumber::ROOT => break,
                // The directory above a removed one may be gone as well.
                WalkStep::Parent if self.nodes.get(here).item.links.get() == 0 => {
                    ended = Some(Error::NotFound);
                    break;
                }
                WalkStep::Parent => Some(self.nodes.get(here).item.parent),
                WalkStep::Child(name) => match self.nodes.get_mut(here).directory().find(*name) {
                    Found::Entry(found, target) => {
                        cookie = Some(found);
                        Some(target.inode)
                    }
                    Found::Absent => None,
                    Found::Unknown => return Err(self.walk_need(here, &steps[taken..], None)),
                },
            };
            let Some(next) = next else {
                ended = Some(Error::NotFound);
                break;
            };
            let next = self.nodes.enter(next);
            if !self.holds(next, LEASE_READ)? {
                return Err(self.walk_need(here, &steps[taken..], cookie));
            }
            self.hold(next, LEASE_READ)?;
            met.push(next);
            here = next;
            if apply::file_type(&self.nodes.get(here).item) == FileType::Symlink {
                break;
            }
        }
        self.validate()?;
        Ok((met, ended))
    }

    /// The rest of a walk; `cookie` is that of its first name, if it is known. If it is not, and is the last name, a program
    /// that looks up many names of the directory gets all of its entries, and from then on leases on many with one walk.
    #[cold]
    fn walk_need(&mut self, here: NodeIndex, steps: &[WalkStep<'_>], cookie: Option<Cookie>) -> Stop {
        if let (None, [WalkStep::Child(_)]) = (cookie, steps)
            && let Some(from) = self.read_whole(here, false)
        {
            return Need::Entries(self.nodes.get(here).inode, from).into();
        }
        let ahead = match cookie {
            Some(cookie) if steps.len() == 1 => self.ahead_of(here, cookie),
            _ => 0,
        };
        let names = steps.iter().map(|step| match step {
            WalkStep::Child(name) => name.bytes().to_vec(),
            WalkStep::Parent => Vec::new(),
        });
        let start = self.nodes.get(here).inode;
        Need::Walk(Walk::new(start, names.collect(), LEASE_READ).ahead(ahead, LEASE_READ)).into()
    }

    /// Whether a directory is another, or lies below it. While the rename unit is held, or for as long as the
    /// leases taken here are, this does not change.
    pub(crate) fn is_within(&mut self, directory: NodeIndex, above: NodeIndex) -> Step<bool> {
        let mut here = directory;
        // A path is not longer than the tree has directories; what is deeper than this is broken.
        for _ in 0..DEPTH_MAX {
            if here == above {
                return Ok(true);
            }
            let inode = self.nodes.get(here).inode;
            if inode == InodeNumber::ROOT {
                return Ok(false);
            }
            self.hold(here, LEASE_READ)?;
            if self.nodes.get(here).item.links.get() == 0 {
                return Ok(false);
            }
            let parent = self.nodes.enter(self.nodes.get(here).item.parent);
            if !self.holds(parent, LEASE_READ)? {
                let names = vec![Vec::new()];
                return Err(Need::Walk(Walk::new(inode, names, LEASE_READ)).into());
            }
            here = parent;
        }
        Err(Error::Loop.into())
    }

    /// A cookie for a new name in a directory.
    pub(crate) fn free_cookie(&mut self, directory: NodeIndex, name: Name<'_>) -> Step<Cookie> {
        match self.nodes.get_mut(directory).directory().free_cookie(name) {
            Some(Ok(cookie)) => Ok(cookie),
            Some(Err(_)) => Err(Error::NoSpace.into()),
            None => {
                let inode = self.nodes.get(directory).inode;
                Err(Need::SameHash(inode, Cookie::of_name(name)).into())
            }
        }
    }
}

/// Directories above one another.
const DEPTH_MAX: usize = 1 << 16;
