//! Lookups of names in the cached entries, and walks.

use crate::apply;
use crate::directory::{Found, Order, Target};
use crate::need::{Need, Step, Stop, Walk};
use crate::nodes::NodeIndex;
use crate::state::{Session, State};
use format::call::{LEASE_READ, LEASE_WRITE};
use format::record::FileType;
use format::{Cookie, InodeNumber, Name, Sequence};
use vfs::access;
use vfs::engine::Step as WalkStep;
use vfs::{Caller, Error};

impl State {
    /// Looks up an entry of a directory on which a lease is held in `mode`.
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

    /// The need for a name that is not cached. If the directory is about to be changed under a write lease, all of its
    /// entries are soon read, so that a program which creates, renames and removes files in it needs no call for each.
    #[cold]
    fn unknown(&mut self, directory: NodeIndex, name: Name<'_>, mode: u8) -> Need {
        let node = self.nodes.get(directory);
        let (inode, changes) = (node.inode, mode == LEASE_WRITE && node.lease.is_some_and(|held| held.write));
        match changes.then(|| self.read_whole(directory, true)).flatten() {
            Some(from) => Need::Entries(inode, from),
            None => Need::Walk(Walk::new(inode, vec![name.bytes().to_vec()], mode)),
        }
    }

    /// Where to continue reading all entries of a directory, if this pays off for a name that is not cached.
    fn read_whole(&mut self, directory: NodeIndex, changes: bool) -> Option<Cookie> {
        let lists = self.session.as_ref().is_some_and(|session| {
            access::permits(&session.credential, &self.attributes(directory), access::READ)
        });
        let node = self.nodes.get_mut(directory);
        let entries = node.item.size.get();
        lists.then(|| node.directory().read_whole(entries, changes)).flatten()
    }

    /// The node of an entry, with at least a read lease. A listing shows inode numbers, but a number alone gives no
    /// right to a lease; the lease is requested by a walk to the name.
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

    /// [`Self::entry_node`] for an entry that is about to be removed. A program that removes one name of a directory
    /// often removes the next ones, so free leases on these are requested in the same call. The lease on the entry itself
    /// is requested for writing, so that its holder is asked only once.
    pub(crate) fn removed_node(
        &mut self,
        directory: NodeIndex,
        (cookie, name): (Cookie, Name<'_>),
        inode: InodeNumber,
    ) -> Step<NodeIndex> {
        let index = self.nodes.enter(inode);
        if !self.holds(index, LEASE_WRITE)? {
            let ahead = self.ahead_of(directory, cookie, Order::Any);
            if ahead > 0 || !self.holds(index, LEASE_READ)? {
                let walk = self.walk_to(directory, name, LEASE_WRITE).for_removal();
                return Err(Need::Walk(walk.ahead(ahead, LEASE_WRITE)).into());
            }
        }
        self.entry_node(directory, name, inode)
    }

    /// The need for the lease on a node that an attempt has found.
    #[cold]
    pub(crate) fn lacks(&mut self, index: NodeIndex, mode: u8) -> Stop {
        match self.walk_for_more(index, mode) {
            Some(walk) => Need::Walk(walk).into(),
            None => Need::Leases(vec![(self.nodes.get(index).inode, mode)]).into(),
        }
    }

    /// A walk for the lease on a node that has been found before, if a program that needs it may need those on the next
    /// entries of a directory too: it changes files that it has not changed before, or continues in the order of the
    /// directory. The next ones are requested only if another session holds this one. Else programs that share the work
    /// in a directory would take from each other what none of them has used.
    fn walk_for_more(&mut self, index: NodeIndex, mode: u8) -> Option<Walk> {
        let node = self.nodes.get(index);
        let (inode, (directory, cookie)) = (node.inode, node.place?);
        let order = match mode == LEASE_WRITE && node.last == Sequence::new(0) {
            true => Order::Any,
            false => Order::Directory,
        };
        let directory = self.nodes.find(directory)?;
        if !self.holds(directory, LEASE_READ).ok()? {
            return None;
        }
        let (found, name, target) = self.nodes.get_mut(directory).directory().entries(cookie).next()?;
        if (found, target.inode) != (cookie, inode) {
            return None;
        }
        let names = vec![name.to_vec()];
        let ahead = self.ahead_of(directory, cookie, order);
        let walk = Walk::new(self.nodes.get(directory).inode, names, LEASE_READ);
        (ahead > 0).then(|| Walk { last_mode: mode, ahead_if_taken: true, ..walk }.ahead(ahead, mode))
    }

    /// The number of entries after this one for which leases are requested in the same call.
    fn ahead_of(&mut self, directory: NodeIndex, cookie: Cookie, order: Order) -> u16 {
        let node = self.nodes.get_mut(directory);
        let entries = node.item.size.get();
        node.directory().ahead(cookie, entries, order)
    }

    /// Fails if an attempt may not append records in this user's name. A session's records belong to its user, and the
    /// process may have changed its user since the call began. Root's session may be a gateway's, and acts for every
    /// user.
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

    /// A directory, by a pinned number, that the caller may search, with at least a read lease.
    pub(crate) fn searched(&mut self, caller: &Caller, inode: InodeNumber) -> Step<NodeIndex> {
        let index = self.pinned(inode)?;
        self.hold(index, LEASE_READ)?;
        access::search(caller, &self.attributes(index))?;
        Ok(index)
    }

    /// Walks the steps without pinning. Returns the nodes on the path, and the error that ended the walk early.
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
            let directory = self.nodes.get(here).inode;
            let next = match step {
                WalkStep::Parent if self.nodes.get(here).inode == InodeNumber::ROOT => break,
                // The parent of a removed directory may be removed as well.
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
            if let Some(cookie) = cookie {
                self.nodes.get_mut(next).place = Some((directory, cookie));
            }
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

    /// The need for the rest of a walk; `cookie` is that of its first name, if it is cached. If it is not, and is the
    /// last name, a program that looks up many names of the directory gets all of its entries, and then leases on many
    /// of them with one walk.
    #[cold]
    fn walk_need(&mut self, here: NodeIndex, steps: &[WalkStep<'_>], cookie: Option<Cookie>) -> Stop {
        if let (None, [WalkStep::Child(_)]) = (cookie, steps)
            && let Some(from) = self.read_whole(here, false)
        {
            return Need::Entries(self.nodes.get(here).inode, from).into();
        }
        let ahead = match cookie {
            Some(cookie) if steps.len() == 1 => self.ahead_of(here, cookie, Order::Any),
            _ => 0,
        };
        let names = steps.iter().map(|step| match step {
            WalkStep::Child(name) => name.bytes().to_vec(),
            WalkStep::Parent => Vec::new(),
        });
        let start = self.nodes.get(here).inode;
        Need::Walk(Walk::new(start, names.collect(), LEASE_READ).ahead(ahead, LEASE_READ)).into()
    }

    /// Whether a directory is `above`, or below it. The answer stays valid while the rename unit, or the leases taken
    /// here, are held.
    pub(crate) fn is_within(&mut self, directory: NodeIndex, above: NodeIndex) -> Step<bool> {
        let mut here = directory;
        // No valid path has more directories than this.
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

    /// A free cookie for a new name in a directory.
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

/// Limit of directories on a path.
const DEPTH_MAX: usize = 1 << 16;
