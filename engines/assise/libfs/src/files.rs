//! Open files and pins of this process, and the state that SharedFS keeps because of them. An open file is listed in
//! the open table, which SharedFS reads when a last name is removed; references that SharedFS keeps otherwise are
//! released by a call.

use crate::need::{Need, Step};
use crate::nodes::NodeIndex;
use crate::releases::GivenBack;
use crate::share::Given;
use crate::state::State;
use format::InodeNumber;
use format::call::LEASE_READ;
use format::session::WORD_OWN_RANGE;
use ipc::sync::{Ordering, fence};
use std::collections::HashMap;
use vfs::engine::{Access, Handle};

/// Positions of the node table that one search for unused nodes visits.
const TRIM_PLACES: usize = 256;

/// An open file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenFile {
    pub node: NodeIndex,
    pub access: Access,
    serial: u32,
    /// Number of the process's user, counted from 0, whose session has the right to this file.
    user: u32,
}

/// The access rights in a list of files, by inode.
#[derive(Default)]
struct Rights(HashMap<InodeNumber, Access>);

impl Rights {
    fn of(list: &[Given]) -> Self {
        let mut rights = Self::default();
        for given in list {
            rights.add(given.inode, given.access);
        }
        rights
    }

    fn include(&self, inode: InodeNumber, access: Access) -> bool {
        let found = self.0.get(&inode);
        found.is_some_and(|found| found.read >= access.read && found.write >= access.write)
    }

    /// Adds a right; true if it is new.
    fn add(&mut self, inode: InodeNumber, access: Access) -> bool {
        let is_new = !self.include(inode, access);
        let found = self.0.entry(inode).or_default();
        (found.read, found.write) = (found.read || access.read, found.write || access.write);
        is_new
    }
}

impl State {
    /// An open file that the session may use. A file that was not passed on when the process changed its user is stale:
    /// a record without the right to the file would end the session.
    #[inline]
    pub fn file(&self, handle: Handle) -> Step<OpenFile> {
        match self.file_of(handle) {
            Some(file) if file.user == self.user => Ok(file),
            Some(_) => Err(vfs::Error::Stale.into()),
            None => Err(vfs::Error::BadDescriptor.into()),
        }
    }

    #[inline]
    fn file_of(&self, handle: Handle) -> Option<OpenFile> {
        let (index, serial) = (handle.get() as u32 as usize, (handle.get() >> 32) as u32);
        self.files.get(index).copied().flatten().filter(|file| file.serial == serial)
    }

    /// Adds open files that are missing in the list: threads have just opened them, and the caller does not know them
    /// yet.
    pub fn add_unlisted(&self, list: &mut Vec<Given>) {
        let mut rights = Rights::of(list);
        for file in self.files.iter().flatten() {
            let (inode, access) = (self.nodes.get(file.node).inode, file.access);
            if rights.add(inode, access) {
                list.push(Given { inode, access, owner: None });
            }
        }
    }

    /// Changes to the next user, who may use the files in the list and no others.
    pub fn go_on_with(&mut self, list: &[Given]) {
        self.user = self.user.wrapping_add(1);
        let rights = Rights::of(list);
        for place in 0..self.files.len() {
            let Some(file) = self.files[place] else { continue };
            let inode = self.nodes.get(file.node).inode;
            if rights.include(inode, file.access) {
                self.files[place] = Some(OpenFile { user: self.user, ..file });
            }
        }
    }

    /// Fails if the process may not open another file.
    pub fn check_files(&self) -> Step<()> {
        let open = self.files.len() - self.files_free.len();
        if open < self.files_max { Ok(()) } else { Err(vfs::Error::TooManyFiles.into()) }
    }

    /// Adds an open file; the caller has called [`Self::check_files`].
    pub fn add_file(&mut self, node: NodeIndex, access: Access) -> Handle {
        let index = self.files_free.pop().unwrap_or_else(|| {
            self.files.push(None);
            u32::try_from(self.files.len() - 1).expect("fewer open files than a number has values")
        });
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        self.files[index as usize] = Some(OpenFile { node, access, serial, user: self.user });
        let was_kept = self.retract_release(self.nodes.get(node).inode).is_some();
        let opened = self.nodes.get_mut(node);
        opened.opens += 1;
        // The close releases what SharedFS keeps for the file that was open before.
        opened.orphaned |= was_kept;
        if self.nodes.get(node).open_place.is_none() {
            self.enter_open_table(node);
        }
        let handle = Handle::new(u64::from(serial) << 32 | u64::from(index));
        self.taken.0 = Some(handle);
        handle
    }

    /// Lists the node in the open table, if there is a free place.
    pub fn enter_open_table(&mut self, index: NodeIndex) {
        let Some(session) = self.session.as_ref() else { return };
        let node = self.nodes.get_mut(index);
        if let Some(place) = self.open_places.pop() {
            session.words.set_open(place, node.inode);
            node.open_place = Some(place);
        }
    }

    /// Makes a place in the open table for a file that is about to be created, because SharedFS would remove a file that
    /// is not listed with its last name. An open file gives up its place: SharedFS keeps it by a reference instead.
    ///
    /// # Errors
    /// `TooManyFiles` by the call: SharedFS keeps no more references for this session.
    pub fn make_open_place(&mut self) -> Step<()> {
        if !self.open_table_full() {
            return Ok(());
        }
        // All places may be taken by releases, which free them soon.
        let Some(file) = self.listed_file() else { return Ok(()) };
        let node = self.nodes.get_mut(file.node);
        if !node.referenced {
            let bits = u8::from(file.access.read) | u8::from(file.access.write) << 1;
            return Err(Need::Open(node.inode, bits, None).into());
        }
        if let Some(place) = node.open_place.take() {
            self.free_open_place(place);
        }
        Ok(())
    }

    /// An open file that is listed in the open table. The search continues where the last one ended: the files before that
    /// have given up their places.
    fn listed_file(&mut self) -> Option<OpenFile> {
        let count = self.files.len();
        for step in 0..count {
            let place = (self.listed_hand + step) % count;
            if let Some(file) =
                self.files[place].filter(|file| self.nodes.get(file.node).open_place.is_some())
            {
                self.listed_hand = place;
                return Some(file);
            }
        }
        None
    }

    /// Whether the open table has no place for another inode.
    pub fn open_table_full(&self) -> bool {
        self.open_places.is_empty()
    }

    /// Closes the file; returns the node for [`Self::drop_if_unused`].
    pub fn remove_file(&mut self, handle: Handle) -> Option<NodeIndex> {
        let file = self.file_of(handle)?;
        let index = handle.get() as u32;
        self.files[index as usize] = None;
        self.files_free.push(index);
        let node = self.nodes.get_mut(file.node);
        node.opens -= 1;
        if node.opens == 0
            && let Some(place) = node.open_place.take()
        {
            if let Some(session) = self.session.as_ref() {
                session.words.set_open(place, InodeNumber::NONE);
            }
            self.open_places.push(place);
            self.note_orphan(file.node);
        }
        Some(file.node)
    }

    /// A session that removes an inode's last name first ends the leases of other sessions; SharedFS then keeps the
    /// inode for the sessions that have it in their open tables. So if this session has no lease, or the inode no name,
    /// SharedFS may keep the inode for this session.
    fn note_orphan(&mut self, index: NodeIndex) {
        // Full fence: a revoker that ends the lease after this check sees the empty place.
        fence(Ordering::SeqCst);
        let held = matches!(self.holds(index, LEASE_READ), Ok(true));
        let node = self.nodes.get_mut(index);
        node.orphaned |= !held || node.item.links.get() == 0;
    }

    /// Called after a pin or an open file was removed. Releases the references that SharedFS keeps for the inode, and
    /// forgets an inode without a name.
    pub fn drop_if_unused(&mut self, index: NodeIndex) {
        let node = self.nodes.get_mut(index);
        if node.in_use() {
            return;
        }
        let (inode, last, is_kept) = (node.inode, node.last, node.referenced || node.orphaned);
        let bytes = node.item.size.get();
        (node.referenced, node.referenced_to_write, node.orphaned) = (false, false, false);
        // A node with undigested records is removed after their digest.
        let is_over = node.nameless && !node.dirty;
        if is_kept {
            self.add_release(inode, last, bytes);
        }
        if is_over {
            self.forget_node(index);
        }
    }

    /// Forgets nodes that are not open and whose records are all digested, down to `count_max` if it finds enough; the
    /// pins of a forgotten node are kept. Returns the leases to be released. Nodes in use may be adjacent, so the
    /// search continues beyond them. If it finds few unused nodes in the whole table, the next search waits until there
    /// are more nodes.
    pub fn trim(&mut self, count_max: usize) -> Vec<GivenBack> {
        let (count, mut places) = (self.nodes.count(), self.nodes.places());
        let mut given_back = Vec::new();
        let found = loop {
            self.trim_places(count_max, &mut given_back);
            let found = count - self.nodes.count();
            places = places.saturating_sub(TRIM_PLACES);
            if places == 0 || found >= TRIM_PLACES / 8 || self.nodes.count() <= count_max {
                break found;
            }
        };
        self.trim_above = if found < TRIM_PLACES / 8 { count + count / 16 } else { 0 };
        self.giving_back.extend(given_back.iter().map(|given| given.inode));
        given_back
    }

    /// Visits the next positions of the table.
    fn trim_places(&mut self, count_max: usize, given_back: &mut Vec<GivenBack>) {
        let (looked_at, next) = self.nodes.round(self.hand, TRIM_PLACES);
        self.hand = next;
        for index in looked_at {
            if self.nodes.count() <= count_max {
                break;
            }
            let node = self.nodes.get(index);
            let is_kept_elsewhere = node.referenced || node.orphaned || node.nameless;
            let is_used = node.opens > 0 || node.dirty || node.held_outside;
            let kept = is_used || is_kept_elsewhere || node.inode == InodeNumber::ROOT;
            if kept || self.releases.iter().any(|release| release.inode == node.inode) {
                continue;
            }
            if node.lease.is_some_and(|held| held.word != WORD_OWN_RANGE) {
                given_back.push(GivenBack { inode: node.inode, lease: true });
            }
            self.nodes.set_aside(index, &mut self.pool);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::need::Stop;
    use ipc::SystemHost;
    use std::sync::Arc;

    const READ: Access = Access { read: true, write: false };
    const WRITE: Access = Access { read: false, write: true };

    #[test]
    fn another_user_goes_on_with_the_files_that_came_along_and_no_others() {
        let mut state = State::new(Arc::new(SystemHost), 16);
        let mut open = |inode: u64, access: Access| {
            let node = state.nodes.enter(InodeNumber::new(inode));
            state.add_file(node, access)
        };
        let listed = open(5, READ);
        let [unlisted, same_inode] = [open(6, WRITE), open(5, WRITE)];
        let mut list = vec![Given { inode: InodeNumber::new(5), access: READ, owner: None }];
        state.add_unlisted(&mut list);
        let given: Vec<_> = list.iter().map(|given| (given.inode.get(), given.access)).collect();
        assert_eq!(given, [(5, READ), (6, WRITE), (5, WRITE)]);
        // The last file is left out, as if there were more than a request can contain.
        state.go_on_with(&list[..2]);
        assert!(state.file(listed).is_ok() && state.file(unlisted).is_ok());
        let refused = |stop: Step<OpenFile>| matches!(stop, Err(Stop::Failed(vfs::Error::Stale)));
        assert!(refused(state.file(same_inode)), "its records would end the session");
        assert!(state.remove_file(same_inode).is_some(), "it is closed all the same");
        assert!(matches!(state.file(same_inode), Err(Stop::Failed(vfs::Error::BadDescriptor))));
        let node = state.nodes.enter(InodeNumber::new(7));
        let later = state.add_file(node, WRITE);
        assert!(state.file(later).is_ok());
    }

    /// A search that began at the first file each time would visit, for each file that is created, all files that SharedFS
    /// keeps by references.
    #[test]
    fn the_search_for_a_listed_file_continues_where_the_last_one_ended() {
        const FILES: u16 = 50;
        let mut state = State::new(Arc::new(SystemHost), FILES.into());
        state.open_places.clear();
        for place in 0..FILES {
            let index = state.nodes.enter(InodeNumber::new(100 + u64::from(place)));
            state.add_file(index, READ);
            state.nodes.get_mut(index).open_place = Some(place);
        }
        for place in 0..FILES {
            assert_eq!(state.listed_hand, usize::from(place.saturating_sub(1)));
            let inode = InodeNumber::new(100 + u64::from(place));
            let need = state.make_open_place();
            assert!(matches!(need, Err(Stop::Need(Need::Open(asked, ..))) if asked == inode));
            let index = state.nodes.find(inode).unwrap();
            state.nodes.get_mut(index).referenced = true;
            assert!(state.make_open_place().is_ok());
            // The created file takes the place.
            assert!(state.open_places.pop().is_some());
        }
        assert!(state.make_open_place().is_ok(), "no file is listed");
        let first = state.nodes.find(InodeNumber::new(100)).unwrap();
        state.nodes.get_mut(first).open_place = Some(0);
        assert!(state.make_open_place().is_ok());
        assert_eq!(state.open_places.len(), 1, "the search continues at the first file");
    }

    /// Nodes in use are adjacent, more than one search visits. The search continues beyond them, so that the number of
    /// nodes stays bounded by the limit and the number of nodes in use.
    #[test]
    fn nodes_are_forgotten_though_many_beside_them_are_in_use() {
        const LIMIT: usize = 32 * TRIM_PLACES;
        let mut state = State::new(Arc::new(SystemHost), 16);
        let mut most = 0;
        for number in 1..100 * TRIM_PLACES as u64 {
            let index = state.nodes.enter(InodeNumber::new(number));
            state.nodes.get_mut(index).held_outside = number <= LIMIT as u64 / 2;
            if state.nodes.count() > state.trim_above.max(LIMIT) {
                state.trim(LIMIT);
            }
            most = most.max(state.nodes.count());
        }
        assert!(most <= LIMIT + LIMIT / 8, "{most} nodes");
        let used =
            (1..=LIMIT as u64 / 2).filter(|number| state.nodes.find(InodeNumber::new(*number)).is_some());
        assert_eq!(used.count(), LIMIT / 2);
        // All nodes are in use: a new node does not cause another search each time.
        state.nodes.indices().for_each(|index| state.nodes.get_mut(index).held_outside = true);
        for number in 0..=LIMIT as u64 / 8 {
            let index = state.nodes.enter(InodeNumber::new(1 << 30 | number));
            state.nodes.get_mut(index).held_outside = true;
        }
        state.trim(LIMIT);
        assert!(state.trim_above > state.nodes.count());
    }
}
