//! The name space: creating with and without a name, linking, removing, renaming. Each is one record (Assise §3.2.1), made
//! under write leases on every inode that it changes.

use crate::apply;
use crate::directory::Target;
use crate::need::{Need, RecordCost, Step};
use crate::nodes::{Body, NodeIndex};
use crate::records;
use crate::state::State;
use crate::words::GrantedLease;
use format::call::RENAME_UNIT;
use format::call::{LEASE_READ, LEASE_WRITE};
use format::record::{
    CreateBody, FileType, ROOM_OF_RENAME_WITH_WHITEOUT, ROOM_OF_TREE, RenameBody, WhiteoutBody, room_of_value,
};
use format::{Cookie, InodeNumber, Name, Sequence};
use pmem::Source;
use vfs::access;
use vfs::engine::{Attributes, Created, Handle, New, NewType, NewUnnamed, Removal, RenameMode};
use vfs::{Caller, Error};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Limit of names of one inode, and of directories in one directory.
const LINKS_MAX: u32 = 65_000;

impl State {
    pub(crate) fn create(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        name: Name<'_>,
        new: &New<'_>,
    ) -> Step<Created> {
        self.acts_as(caller)?;
        let directory = self.searched(caller, parent)?;
        if let Some((_, target)) = self.lookup(directory, name, LEASE_WRITE)? {
            if new.exclusive {
                return Err(Error::Exists.into());
            }
            let existing = self.entry_node(directory, name, target.inode)?;
            self.validate()?;
            return Ok(Created::Existing(self.pin(existing)));
        }
        let above = self.attributes(directory);
        access::add_entry(caller, &above)?;
        access::make(caller, &new.kind)?;
        self.hold(directory, LEASE_WRITE)?;
        let is_directory = matches!(new.kind, NewType::Directory);
        if is_directory && above.links >= LINKS_MAX {
            return Err(Error::TooManyLinks.into());
        }
        if let NewType::Regular(Some(_)) = new.kind {
            self.check_files()?;
            self.make_open_place()?;
        }
        let cookie = self.free_cookie(directory, name)?;
        let (inode, lease) = self.draw_inode()?;
        let target: &[u8] = if let NewType::Symlink(target) = new.kind { target } else { &[] };
        let body = create_body(caller, &above, (&new.kind, (new.mode, new.umask)), name.bytes(), target);
        let time_ns = self.time(&[directory]);
        let header = records::create(inode, (parent, cookie), &body, time_ns);
        let payload = [Source::from(body.as_bytes()), Source::from(name.bytes()), Source::from(target)];
        let access = if let NewType::Regular(access) = new.kind { access } else { None };
        let (mut index, mut handle) = (None, None);
        let made = self.append_and(
            header,
            &payload,
            RecordCost::replacing(room_of_value(target.len())),
            |state, _| {
                let entered = state.nodes.enter(inode);
                // The file is open before another process can remove the name.
                handle = access.map(|access| state.add_file(entered, access));
                index = Some(entered);
            },
        )?;
        self.use_inode();
        let (sequence, index) = (made.sequence, index.expect("entered with the record"));
        self.nodes.get_mut(index).item = apply::created(&body, parent, target.len(), time_ns);
        self.entered(index, lease, new.kind.file_type(), sequence);
        if let Body::Symlink(known) = &mut self.nodes.get_mut(index).body {
            *known = Some(target.into());
        }
        self.entry_added(directory, (cookie, name), index, sequence, time_ns);
        Ok(Created::New(self.pin(index), handle))
    }

    pub(crate) fn create_unnamed(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        new: &NewUnnamed,
    ) -> Step<(Attributes, Handle)> {
        self.acts_as(caller)?;
        let directory = self.searched(caller, parent)?;
        let above = self.attributes(directory);
        access::check(caller, &above, access::WRITE)?;
        // The digest judges the record by the directory as it is under this lease.
        self.hold(directory, LEASE_WRITE)?;
        self.check_files()?;
        let (inode, lease) = self.draw_inode()?;
        let body = create_body(caller, &above, (&NewType::Regular(None), (new.mode, new.umask)), &[], &[]);
        let time_ns = self.time(&[directory]);
        let header = records::create_unnamed(inode, parent, new.linkable, time_ns);
        let mut opened = None;
        let payload = [Source::from(body.as_bytes())];
        let made = self.append_and(header, &payload, RecordCost::replacing(ROOM_OF_TREE), |state, _| {
            let index = state.nodes.enter(inode);
            opened = Some((index, state.add_file(index, new.access)));
        })?;
        self.use_inode();
        let (index, handle) = opened.expect("opened with the record");
        let node = self.nodes.get_mut(index);
        node.item = apply::created_unnamed(&body, parent, new.linkable, time_ns);
        (node.nameless, node.orphaned) = (true, true);
        self.entered(index, lease, FileType::Regular, made.sequence);
        Ok((self.pin(index), handle))
    }

    /// Completes the node of an inode that a record has just created; its item is set.
    fn entered(&mut self, index: NodeIndex, lease: GrantedLease, file_type: FileType, sequence: Sequence) {
        let node = self.nodes.get_mut(index);
        node.lease = Some(lease);
        node.created = sequence;
        node.set_body(file_type, true);
        node.bare = true;
        self.mark(index, sequence);
    }

    pub(crate) fn link(
        &mut self,
        caller: &Caller,
        inode: InodeNumber,
        parent: InodeNumber,
        name: Name<'_>,
    ) -> Step<Attributes> {
        self.acts_as(caller)?;
        let index = self.pinned(inode)?;
        let parent_index = self.pinned(parent)?;
        self.hold_all(&[(index, LEASE_READ), (parent_index, LEASE_READ)])?;
        let directory = self.searched(caller, parent)?;
        if self.lookup(directory, name, LEASE_WRITE)?.is_some() {
            return Err(Error::Exists.into());
        }
        let linked = self.attributes(index);
        access::link(caller, &self.attributes(directory), &linked)?;
        if linked.links >= LINKS_MAX {
            return Err(Error::TooManyLinks.into());
        }
        self.hold_all(&[(directory, LEASE_WRITE), (index, LEASE_WRITE)])?;
        let cookie = self.free_cookie(directory, name)?;
        let time_ns = self.time(&[directory, index]);
        let header = records::link(inode, (parent, cookie), name.bytes().len(), time_ns);
        let sequence = self.append(header, &[Source::from(name.bytes())], ROOM_OF_TREE)?.sequence;
        let node = self.nodes.get_mut(index);
        apply::linked(&mut node.item, time_ns);
        node.nameless = false;
        self.mark(index, sequence);
        self.entry_added(directory, (cookie, name), index, sequence, time_ns);
        Ok(self.pin(index))
    }

    pub(crate) fn unlink(
        &mut self,
        caller: &Caller,
        parent: InodeNumber,
        name: Name<'_>,
        removal: Removal,
    ) -> Step<()> {
        self.acts_as(caller)?;
        let directory = self.searched(caller, parent)?;
        let Some((cookie, target)) = self.lookup(directory, name, LEASE_WRITE)? else {
            return Err(Error::NotFound.into());
        };
        let entry = (cookie, name);
        // Only a caller who may change the directory takes leases ahead from other sessions.
        let may_change = access::permits(caller, &self.attributes(directory), access::WRITE);
        let index = match may_change {
            true => self.removed_node(directory, entry, target.inode)?,
            false => self.entry_node(directory, name, target.inode)?,
        };
        let victim = self.attributes(index);
        access::remove_entry(caller, &self.attributes(directory), &victim, removal)?;
        if self.holds_entries(index) {
            return Err(Error::NotEmpty.into());
        }
        self.hold_all(&[(directory, LEASE_WRITE), (index, LEASE_WRITE)])?;
        let is_directory = victim.file_type == FileType::Directory;
        let in_use = self.nodes.get(index).in_use();
        let time_ns = self.time(&[directory, index]);
        let header = records::unlink(
            victim.inode,
            (parent, cookie),
            name.bytes().len(),
            (is_directory, in_use),
            time_ns,
        );
        let sequence = self.append(header, &[Source::from(name.bytes())], 0)?.sequence;
        self.entry_removed(directory, entry, is_directory, sequence, time_ns);
        self.lost_name(index, sequence, time_ns);
        Ok(())
    }

    pub(crate) fn rename(
        &mut self,
        caller: &Caller,
        (from, from_name): (InodeNumber, Name<'_>),
        (to, to_name): (InodeNumber, Name<'_>),
        mode: RenameMode,
    ) -> Step<()> {
        self.acts_as(caller)?;
        let (from_directory, to_directory, may_change) = self.both_searched(caller, from, to)?;
        let source = self.lookup(from_directory, from_name, LEASE_WRITE)?;
        let Some((old_cookie, source)) = source else {
            return Err(Error::NotFound.into());
        };
        let target = self.lookup(to_directory, to_name, LEASE_WRITE)?;
        match (mode, target.is_some()) {
            (RenameMode::NoReplace { .. }, true) => return Err(Error::Exists.into()),
            (RenameMode::Exchange, false) => return Err(Error::NotFound.into()),
            _ => {}
        }
        let moved = self.entry_node(from_directory, from_name, source.inode)?;
        let replaced = match target {
            Some((_, target)) => Some(self.entry_node(to_directory, to_name, target.inode)?),
            None => None,
        };
        let exchange = mode == RenameMode::Exchange;
        let apart = from != to;
        let changes_parent = apart
            && (self.is_directory(moved)
                || (exchange && replaced.is_some_and(|index| self.is_directory(index))));
        // The rename unit prevents other moves of directories until this one is done.
        let tree = changes_parent.then(|| (self.nodes.enter(RENAME_UNIT), LEASE_WRITE));
        if let Some(unit) = tree {
            let all = [unit, (from_directory, LEASE_WRITE), (to_directory, LEASE_WRITE)];
            self.hold_all(if may_change { &all } else { &all[..1] })?;
        }
        if apart && self.is_directory(moved) && self.is_within(to_directory, moved)? {
            return Err(Error::Invalid.into());
        }
        if let Some(replaced) = replaced {
            if apart && self.is_directory(replaced) && self.is_within(from_directory, replaced)? {
                return Err(if exchange { Error::Invalid } else { Error::NotEmpty }.into());
            }
            if replaced == moved {
                self.validate()?;
                return Ok(());
            }
        }
        self.check_rename(caller, (from_directory, moved), (to_directory, replaced), mode)?;
        let mut wanted =
            vec![(from_directory, LEASE_WRITE), (to_directory, LEASE_WRITE), (moved, LEASE_WRITE)];
        wanted.extend(replaced.map(|index| (index, LEASE_WRITE)));
        wanted.extend(tree);
        wanted.sort_unstable();
        wanted.dedup();
        self.hold_all(&wanted)?;
        let new_cookie = match target {
            Some((cookie, _)) => cookie,
            None => self.free_cookie(to_directory, to_name)?,
        };
        let old = (from_directory, (old_cookie, from_name));
        let new = (to_directory, (new_cookie, to_name));
        if !mode.leaves_whiteout() {
            return self.rename_record(old, new, (moved, replaced), exchange, None);
        }
        let (inode, lease) = self.draw_inode()?;
        let kind = (&NewType::CharacterDevice(0), (0, 0));
        let device = create_body(caller, &self.attributes(from_directory), kind, &[], &[]);
        let whiteout = WhiteoutBody { inode, uid: device.uid, gid: device.gid };
        self.rename_record(old, new, (moved, replaced), false, Some((whiteout, &device, lease)))
    }

    /// The directories of a rename, and whether the caller may change both; if so, and if they are two, with write
    /// leases. Both leases are requested together: a session that requested them one after the other could lose the
    /// first one again and again.
    fn both_searched(
        &mut self,
        caller: &Caller,
        from: InodeNumber,
        to: InodeNumber,
    ) -> Step<(NodeIndex, NodeIndex, bool)> {
        let both = [self.pinned(from)?, self.pinned(to)?];
        if from != to {
            self.hold_all(&both.map(|directory| (directory, LEASE_READ)))?;
        }
        let found = (self.searched(caller, from)?, self.searched(caller, to)?);
        let permits = |index: &NodeIndex| access::permits(caller, &self.attributes(*index), access::WRITE);
        // A session does not revoke leases of others for directories that its caller may not change.
        let may_change = both.iter().all(permits);
        if may_change && from != to {
            self.hold_all(&both.map(|directory| (directory, LEASE_WRITE)))?;
        }
        Ok((found.0, found.1, may_change))
    }

    fn check_rename(
        &mut self,
        caller: &Caller,
        (from, moved): (NodeIndex, NodeIndex),
        (to, replaced): (NodeIndex, Option<NodeIndex>),
        mode: RenameMode,
    ) -> Step<()> {
        let target = replaced.map(|index| self.attributes(index));
        let (from_attributes, to_attributes) = (self.attributes(from), self.attributes(to));
        let source = self.attributes(moved);
        access::rename(caller, &from_attributes, &source, &to_attributes, target.as_ref(), mode)?;
        if mode == RenameMode::Exchange {
            return Ok(());
        }
        match replaced {
            Some(index) if self.holds_entries(index) => Err(Error::NotEmpty.into()),
            Some(_) => Ok(()),
            None => {
                let adds_directory = source.file_type == FileType::Directory && from != to;
                let full = to_attributes.links >= LINKS_MAX;
                if adds_directory && full { Err(Error::TooManyLinks.into()) } else { Ok(()) }
            }
        }
    }

    fn rename_record(
        &mut self,
        (from, old): (NodeIndex, (Cookie, Name<'_>)),
        (to, new): (NodeIndex, (Cookie, Name<'_>)),
        (moved, replaced): (NodeIndex, Option<NodeIndex>),
        exchange: bool,
        whiteout: Option<(WhiteoutBody, &CreateBody, GrantedLease)>,
    ) -> Step<()> {
        let mut touched = vec![from, to, moved];
        touched.extend(replaced);
        let time_ns = self.time(&touched);
        let body = RenameBody {
            old_parent: self.nodes.get(from).inode,
            new_parent: self.nodes.get(to).inode,
            old_cookie: U64::new(old.0.get()),
            new_cookie: U64::new(new.0.get()),
            replaced: replaced.map_or(InodeNumber::NONE, |index| self.nodes.get(index).inode),
            old_name_bytes: U16::new(old.1.bytes().len() as u16),
            new_name_bytes: U16::new(new.1.bytes().len() as u16),
            reserved: U32::new(0),
        };
        let replaced_open = !exchange && replaced.is_some_and(|index| self.nodes.get(index).in_use());
        let how = records::RenameFlags { exchange, replaced_open, whiteout: whiteout.is_some() };
        let header = records::rename(self.nodes.get(moved).inode, &body, how, time_ns);
        let device = whiteout.as_ref().map_or(&[] as &[u8], |(body, ..)| body.as_bytes());
        let payload = [body.as_bytes(), old.1.bytes(), new.1.bytes(), device].map(Source::from);
        let room = if whiteout.is_some() { ROOM_OF_RENAME_WITH_WHITEOUT } else { ROOM_OF_TREE };
        let sequence = self.append(header, &payload, room)?.sequence;

        let moves_directory = self.is_directory(moved);
        match replaced {
            Some(replaced) if exchange => {
                let other_directory = self.is_directory(replaced);
                self.set_entry(from, old, replaced, sequence);
                self.set_entry(to, new, moved, sequence);
                let item = &mut self.nodes.get_mut(from).item;
                apply::entry_exchanged(item, moves_directory, other_directory, time_ns);
                let item = &mut self.nodes.get_mut(to).item;
                apply::entry_exchanged(item, other_directory, moves_directory, time_ns);
                apply::moved(&mut self.nodes.get_mut(replaced).item, body.old_parent, time_ns);
                self.mark(replaced, sequence);
                self.mark(from, sequence);
                self.mark(to, sequence);
            }
            _ => {
                if let Some(replaced) = replaced {
                    let was_directory = self.is_directory(replaced);
                    self.entry_removed(to, new, was_directory, sequence, time_ns);
                    self.lost_name(replaced, sequence, time_ns);
                }
                self.entry_removed(from, old, moves_directory, sequence, time_ns);
                if let Some((whiteout, body, lease)) = whiteout {
                    self.use_inode();
                    let index = self.nodes.enter(whiteout.inode);
                    let parent = self.nodes.get(from).inode;
                    self.nodes.get_mut(index).item = apply::created(body, parent, 0, time_ns);
                    self.entered(index, lease, FileType::CharacterDevice, sequence);
                    self.entry_added(from, old, index, sequence, time_ns);
                }
                self.entry_added(to, new, moved, sequence, time_ns);
            }
        }
        apply::moved(&mut self.nodes.get_mut(moved).item, body.new_parent, time_ns);
        self.mark(moved, sequence);
        Ok(())
    }

    fn is_directory(&self, index: NodeIndex) -> bool {
        apply::is_directory(&self.nodes.get(index).item)
    }

    /// Whether a directory has entries; its size is their number.
    fn holds_entries(&self, index: NodeIndex) -> bool {
        self.is_directory(index) && self.nodes.get(index).item.size.get() > 0
    }

    fn set_entry(
        &mut self,
        directory: NodeIndex,
        (cookie, name): (Cookie, Name<'_>),
        index: NodeIndex,
        sequence: Sequence,
    ) {
        let node = self.nodes.get(index);
        let target = Target { inode: node.inode, file_type: apply::file_type(&node.item) };
        self.nodes.get_mut(directory).directory().put(cookie, name, target, sequence);
        self.entries.add(1);
    }

    fn entry_added(
        &mut self,
        directory: NodeIndex,
        entry: (Cookie, Name<'_>),
        index: NodeIndex,
        sequence: Sequence,
        time_ns: i64,
    ) {
        self.set_entry(directory, entry, index, sequence);
        let adds_directory = self.is_directory(index);
        apply::entry_added(&mut self.nodes.get_mut(directory).item, adds_directory, time_ns);
        self.mark(directory, sequence);
    }

    fn entry_removed(
        &mut self,
        directory: NodeIndex,
        (cookie, name): (Cookie, Name<'_>),
        was_directory: bool,
        sequence: Sequence,
        time_ns: i64,
    ) {
        let node = self.nodes.get_mut(directory);
        node.directory().remove(cookie, name, sequence);
        apply::entry_removed(&mut node.item, was_directory, time_ns);
        self.mark(directory, sequence);
    }

    /// Applies a record that removed a name of an inode.
    fn lost_name(&mut self, index: NodeIndex, sequence: Sequence, time_ns: i64) {
        apply::lost_name(&mut self.nodes.get_mut(index).item, time_ns);
        self.mark(index, sequence);
        let node = self.nodes.get_mut(index);
        if node.item.links.get() > 0 {
            return;
        }
        node.nameless = true;
        if node.in_use() {
            node.orphaned = true;
            let inode = node.inode;
            self.outside.note_orphan(inode);
        } else {
            // No operation can reach the inode any more; the node is removed when the record is digested.
            self.drop_lease(index);
        }
    }

    /// Appends known entries from a cookie on to `batch`, at most `count_max`; true if these are the last ones.
    pub(crate) fn list(
        &mut self,
        index: NodeIndex,
        from: Cookie,
        count_max: usize,
        batch: &mut Vec<(Cookie, Box<[u8]>, Target)>,
    ) -> Step<bool> {
        self.hold(index, LEASE_READ)?;
        if self.nodes.get(index).item.links.get() == 0 {
            return Err(Error::NotFound.into());
        }
        let directory = self.nodes.get_mut(index).directory();
        let known = directory.entries(from).take(count_max);
        batch.extend(known.map(|(cookie, name, target)| (cookie, name.into(), target)));
        let unknown_from = directory.unknown_from(from.max(Cookie::START));
        let all = unknown_from.is_none() && batch.len() < count_max;
        if let Some(unknown_from) = unknown_from.filter(|_| batch.is_empty()) {
            return Err(Need::Entries(self.nodes.get(index).inode, unknown_from).into());
        }
        self.validate()?;
        Ok(all)
    }
}

fn create_body(
    caller: &Caller,
    directory: &Attributes,
    (kind, mode): (&NewType<'_>, (u32, u32)),
    name: &[u8],
    target: &[u8],
) -> CreateBody {
    let file_type = kind.file_type();
    let (gid, mode) = access::inherit(caller, directory, file_type, mode);
    let rdev = match kind {
        NewType::CharacterDevice(device) | NewType::BlockDevice(device) => *device,
        _ => 0,
    };
    CreateBody {
        mode: U32::new(file_type.mode_bits() | mode),
        uid: U32::new(caller.uid),
        gid: U32::new(gid),
        name_bytes: U16::new(name.len() as u16),
        target_bytes: U16::new(target.len() as u16),
        rdev: U64::new(rdev),
    }
}
