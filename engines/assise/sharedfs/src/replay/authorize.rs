//! Whether a record of an update log counts: whether the log has a right to change the inode, and whether its user has
//! the permission (Assise §3.2.3: "SharedFS checks permissions and metadata integrity upon eviction").
//!
//! Pure: the record, the log's entry in the ledger's table, and the attributes in the area as the records before it
//! left them. The same input gives the same decision on every replica and after every restart. Whether the record
//! fits the tree (names, cookies, emptiness, cycles) is the area's to decide.

use super::table::OpenLog;
use area::AreaError;
use format::node::InodeItem;
use format::record::{
    CreateBody, FileType, Operation, Record, RenameBody, SET_ATIME, SET_GID, SET_MODE, SET_MTIME, SET_UID,
    SetAttrBody, WhiteoutBody,
};
use format::{InodeNumber, LeaseVersion, Sequence};
use vfs::access;
use vfs::engine::{Attributes, Changes, NewType, Removal, RenameMode, SetTime};

/// Why a record does not count. An honest LibFS never sees one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The log holds no write lease on this inode at this record.
    NotHeld(InodeNumber),
    /// The log does not hold what a rename that gives a directory another parent needs.
    RenameNotHeld,
    /// The inode is not there.
    Missing(InodeNumber),
    /// A number that is not the log's own to give to a new inode.
    NotOwnNumber(InodeNumber),
    /// The log's user may not do it.
    Denied(vfs::Error),
    /// Owner, group or mode of a new inode are not what its user would get.
    Inheritance,
}

/// Work of the digest beside applying the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Nothing.
    AsIs,
    /// The inode's permission bits become these.
    WithMode(u32),
}

/// A decision, or a failure to read what it depends on.
pub type Decision = Result<Result<Allowed, Refusal>, AreaError>;

/// Attributes of an inode of the area, as [`vfs::access`] wants them. The area holds only types that exist.
pub fn attributes(inode: InodeNumber, item: &InodeItem) -> Attributes {
    let mode = item.mode.get();
    Attributes {
        inode,
        file_type: FileType::of_mode(mode).unwrap_or(FileType::Regular),
        mode: mode & 0o7777,
        uid: item.uid.get(),
        gid: item.gid.get(),
        links: item.links.get(),
        size: item.size.get(),
        blocks: item.blocks.get().saturating_mul(format::BLOCK_BYTES as u64 / 512),
        rdev: item.rdev.get(),
        atime_ns: item.atime_ns.get(),
        mtime_ns: item.mtime_ns.get(),
        ctime_ns: item.ctime_ns.get(),
        btime_ns: item.btime_ns.get(),
        parent: item.parent,
    }
}

/// The version under which the log changes an inode at this record: the stamp that it leaves.
pub fn version_of(log: &OpenLog, inode: InodeNumber, sequence: Sequence) -> LeaseVersion {
    log.entitlement(inode, sequence).unwrap_or_default()
}

/// One decision in the making.
struct Judge<'a> {
    log: &'a OpenLog,
    sequence: Sequence,
    look: &'a mut dyn FnMut(InodeNumber) -> Result<Option<InodeItem>, AreaError>,
}

/// A refusal, or a failure of the area, on the way out.
enum Stop {
    Refused(Refusal),
    Failed(AreaError),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<vfs::Error> for Stop {
    fn from(error: vfs::Error) -> Self {
        Self::Refused(Refusal::Denied(error))
    }
}

/// Decides about one record. `look` gives an inode as the records before it left it.
///
/// # Errors
/// The error of `look`.
pub fn decide(
    log: &OpenLog,
    record: &Record<'_>,
    look: &mut dyn FnMut(InodeNumber) -> Result<Option<InodeItem>, AreaError>,
) -> Decision {
    let mut judge = Judge { log, sequence: record.sequence, look };
    match judge.decide(record.inode, record) {
        Ok(allowed) => Ok(Ok(allowed)),
        Err(Stop::Refused(refusal)) => Ok(Err(refusal)),
        Err(Stop::Failed(error)) => Err(error),
    }
}

impl Judge<'_> {
    fn decide(&mut self, inode: InodeNumber, record: &Record<'_>) -> Result<Allowed, Stop> {
        match record.operation {
            Operation::Pad => Ok(Allowed::AsIs),
            Operation::Write { .. } | Operation::Truncate { .. } | Operation::Allocate { .. } => {
                self.contents(inode)
            }
            Operation::Create { parent, ref body, .. } => self.create(inode, parent, body),
            Operation::Link { parent, .. } => {
                let (directory, found) = (self.held(parent)?, self.held(inode)?);
                access::link(&self.log.caller, &directory, &found)?;
                Ok(Allowed::AsIs)
            }
            Operation::Unlink { parent, directory, .. } => {
                let (from, victim) = (self.held(parent)?, self.held(inode)?);
                let removal = if directory { Removal::Directory } else { Removal::File };
                access::remove_entry(&self.log.caller, &from, &victim, removal)?;
                Ok(Allowed::AsIs)
            }
            Operation::CreateUnnamed { parent, ref body, .. } => self.create_unnamed(inode, parent, body),
            Operation::Rename { ref body, exchange, ref whiteout, .. } => {
                self.rename(inode, body, exchange, whiteout.as_ref())
            }
            Operation::SetAttr { ref body } => self.set_attributes(inode, body, record.time_ns),
            Operation::SetXattr { name, .. } | Operation::RemoveXattr { name } => {
                let found = self.held(inode)?;
                access::write_xattr(&self.log.caller, &found, name)?;
                Ok(Allowed::AsIs)
            }
        }
    }

    /// An inode that the log has a right to change.
    fn held(&mut self, inode: InodeNumber) -> Result<Attributes, Stop> {
        if self.log.entitlement(inode, self.sequence).is_none() {
            return Err(Refusal::NotHeld(inode).into());
        }
        let item = (self.look)(inode).map_err(Stop::Failed)?;
        Ok(attributes(inode, &item.ok_or(Refusal::Missing(inode))?))
    }

    /// Contents may be written with the right of an open for writing, by the owner, or by the mode. The owner may because
    /// it could change the mode; set-id bits are cleared as the kernel does.
    fn contents(&mut self, inode: InodeNumber) -> Result<Allowed, Stop> {
        let found = self.held(inode)?;
        let caller = &self.log.caller;
        if !self.log.may_write_contents(inode) && !caller.owns(&found) {
            access::check(caller, &found, access::WRITE)?;
        }
        let mode = access::after_write(caller, &found);
        Ok(if mode == found.mode { Allowed::AsIs } else { Allowed::WithMode(mode) })
    }

    fn create(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        body: &CreateBody,
    ) -> Result<Allowed, Stop> {
        let directory = self.held(parent)?;
        let caller = &self.log.caller;
        access::add_entry(caller, &directory)?;
        let mode = body.mode.get();
        let file_type = FileType::of_mode(mode).ok_or(Refusal::Inheritance)?;
        let kind = match file_type {
            FileType::CharacterDevice => NewType::CharacterDevice(body.rdev.get()),
            FileType::BlockDevice => NewType::BlockDevice(body.rdev.get()),
            _ => NewType::Regular(None),
        };
        access::make(caller, &kind)?;
        self.inherits(inode, &directory, (body.uid.get(), body.gid.get(), mode))?;
        Ok(Allowed::AsIs)
    }

    fn create_unnamed(
        &mut self,
        inode: InodeNumber,
        parent: InodeNumber,
        body: &CreateBody,
    ) -> Result<Allowed, Stop> {
        let directory = self.held(parent)?;
        access::check(&self.log.caller, &directory, access::WRITE | access::EXECUTE)?;
        self.inherits(inode, &directory, (body.uid.get(), body.gid.get(), body.mode.get()))?;
        Ok(Allowed::AsIs)
    }

    /// Checks that a new inode has a number of the log, and the owner, group and mode that its user and directory give.
    /// Root may give the new inode to anybody, as it could by chown: the gateway creates for others.
    fn inherits(
        &self,
        inode: InodeNumber,
        directory: &Attributes,
        (uid, gid, mode): (u32, u32, u32),
    ) -> Result<(), Refusal> {
        if !self.log.is_own(inode) {
            return Err(Refusal::NotOwnNumber(inode));
        }
        let caller = &self.log.caller;
        let file_type = FileType::of_mode(mode).ok_or(Refusal::Inheritance)?;
        // The record has the mode that the client computed, so a umask has been applied.
        let expected = access::inherit(caller, directory, file_type, (mode & 0o7777, 0));
        let as_expected = uid == caller.uid && (gid, mode & 0o7777) == expected;
        if as_expected || caller.is_root() { Ok(()) } else { Err(Refusal::Inheritance) }
    }

    fn rename(
        &mut self,
        inode: InodeNumber,
        body: &RenameBody,
        exchange: bool,
        whiteout: Option<&WhiteoutBody>,
    ) -> Result<Allowed, Stop> {
        let (from, source) = (self.held(body.old_parent)?, self.held(inode)?);
        let to = self.held(body.new_parent)?;
        let target = if body.replaced == InodeNumber::NONE { None } else { Some(self.held(body.replaced)?) };
        let is_directory = |node: &Attributes| node.file_type == FileType::Directory;
        let moves_directory = from.inode != to.inode
            && (is_directory(&source) || exchange && target.as_ref().is_some_and(is_directory));
        if moves_directory && !self.log.may_move_directories(self.sequence) {
            return Err(Refusal::RenameNotHeld.into());
        }
        let replace = RenameMode::Replace { whiteout: whiteout.is_some() };
        let mode = if exchange { RenameMode::Exchange } else { replace };
        access::rename(&self.log.caller, &from, &source, &to, target.as_ref(), mode)?;
        if let Some(whiteout) = whiteout {
            let mode = FileType::CharacterDevice.mode_bits();
            self.inherits(whiteout.inode, &from, (whiteout.uid.get(), whiteout.gid.get(), mode))?;
        }
        Ok(Allowed::AsIs)
    }

    fn set_attributes(
        &mut self,
        inode: InodeNumber,
        body: &SetAttrBody,
        time_ns: i64,
    ) -> Result<Allowed, Stop> {
        let found = self.held(inode)?;
        let mode = access::change(&self.log.caller, &found, &changes_of(body, time_ns), false)?;
        let asked = if body.mask.get() & SET_MODE != 0 { body.mode.get() } else { found.mode };
        Ok(if mode == asked { Allowed::AsIs } else { Allowed::WithMode(mode) })
    }
}

/// The changes that a record asks for. A record has numbers where a program said "now": that is taken for what it
/// was if both times are the record's own.
fn changes_of(body: &SetAttrBody, time_ns: i64) -> Changes {
    let mask = body.mask.get();
    let given = |bit: u32, value: u32| (mask & bit != 0).then_some(value);
    let now = mask & (SET_ATIME | SET_MTIME) == SET_ATIME | SET_MTIME
        && (body.atime_ns.get(), body.mtime_ns.get()) == (time_ns, time_ns);
    let time = |bit: u32, value: i64| {
        (mask & bit != 0).then_some(if now { SetTime::Now } else { SetTime::To(value) })
    };
    Changes {
        mode: given(SET_MODE, body.mode.get()),
        chown: mask & (SET_UID | SET_GID) != 0,
        uid: given(SET_UID, body.uid.get()),
        gid: given(SET_GID, body.gid.get()),
        size: None,
        atime: time(SET_ATIME, body.atime_ns.get()),
        mtime: time(SET_MTIME, body.mtime_ns.get()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::table::{Grant, Table};
    use format::ledger::{RIGHT_CONTENTS, RIGHT_WRITE, Unit};
    use format::{Cookie, LogUid, Name};
    use std::collections::BTreeMap;
    use vfs::Caller;
    use zerocopy::little_endian::U32;

    const LOG: LogUid = LogUid::new(3);
    const ALICE: u32 = 1000;
    const BOB: u32 = 1001;

    /// A change of permission bits and nothing else.
    fn mode_body(mode: u32) -> SetAttrBody {
        SetAttrBody {
            mask: U32::new(SET_MODE),
            mode: U32::new(mode),
            uid: U32::new(0),
            gid: U32::new(0),
            atime_ns: 0.into(),
            mtime_ns: 0.into(),
        }
    }

    /// A table with one log, and inodes: number -> mode (type included), owner.
    struct Case {
        table: Table,
        inodes: BTreeMap<u64, InodeItem>,
    }

    impl Case {
        fn new(uid: u32) -> Self {
            let caller = Caller { uid, gid: uid, groups: Vec::new() };
            let mut table = Table::default();
            let range = (InodeNumber::new(1_000), 10);
            table.open(LOG, OpenLog::new(caller, LeaseVersion::new(4), range, 1 << 20));
            Self { table, inodes: BTreeMap::new() }
        }

        fn inode(mut self, inode: u64, mode: u32, uid: u32) -> Self {
            let (mode, links) = (U32::new(mode), U32::new(1));
            let (uid, gid) = (U32::new(uid), U32::new(uid));
            self.inodes.insert(inode, InodeItem { mode, links, uid, gid, ..InodeItem::default() });
            self
        }

        fn granted(self, inode: u64, rights: u32) -> Self {
            self.granted_unit(Unit::inode(InodeNumber::new(inode)), rights)
        }

        fn granted_unit(mut self, unit: Unit, rights: u32) -> Self {
            let (version, from) = (LeaseVersion::new(9), Sequence::new(0));
            self.table.grant(LOG, unit, Grant { version, from, rights });
            self
        }

        fn decide(&self, inode: u64, operation: Operation<'_>) -> Result<Allowed, Refusal> {
            let (sequence, inode) = (Sequence::new(1), InodeNumber::new(inode));
            let record = Record { sequence, inode, time_ns: 77, operation };
            let look = &mut |inode: InodeNumber| Ok(self.inodes.get(&inode.get()).copied());
            decide(self.table.log(LOG).unwrap(), &record, look).unwrap()
        }
    }

    const WRITE: Operation<'_> = Operation::Write { offset: 0, bytes: b"x" };
    const DENIED: Result<Allowed, Refusal> = Err(Refusal::Denied(vfs::Error::Denied));

    fn name() -> Name<'static> {
        Name::new(b"n").unwrap()
    }

    fn create(parent: u64, mode: u32, uid: u32) -> Operation<'static> {
        let body = CreateBody {
            mode: U32::new(mode),
            uid: U32::new(uid),
            gid: U32::new(uid),
            name_bytes: 1.into(),
            target_bytes: 0.into(),
            rdev: 0.into(),
        };
        let cookie = Cookie::of_name(name());
        Operation::Create { parent: InodeNumber::new(parent), cookie, name: name(), body, target: b"" }
    }

    #[test]
    fn without_a_lease_nothing_counts() {
        let case = Case::new(0).inode(5, 0o100_666, 0);
        assert_eq!(case.decide(5, WRITE), Err(Refusal::NotHeld(InodeNumber::new(5))));
        let case = case.granted(5, RIGHT_WRITE);
        assert_eq!(case.decide(5, WRITE), Ok(Allowed::AsIs));
    }

    #[test]
    fn a_lease_is_no_permission() {
        let case = Case::new(BOB).inode(5, 0o100_644, ALICE).granted(5, RIGHT_WRITE);
        assert_eq!(case.decide(5, WRITE), DENIED);
        assert_eq!(case.decide(5, Operation::Truncate { size: 0 }), DENIED);
        let opened = case.granted(5, RIGHT_WRITE | RIGHT_CONTENTS);
        assert_eq!(opened.decide(5, WRITE), Ok(Allowed::AsIs));
        let chmod = Operation::SetAttr { body: mode_body(0o777) };
        assert_eq!(opened.decide(5, chmod), Err(Refusal::Denied(vfs::Error::NotPermitted)));
    }

    #[test]
    fn a_write_clears_set_id_bits() {
        let case = Case::new(BOB).inode(5, 0o104_777, ALICE).granted(5, RIGHT_WRITE);
        assert_eq!(case.decide(5, WRITE), Ok(Allowed::WithMode(0o777)));
    }

    #[test]
    fn a_new_inode_has_an_own_number_and_its_users_ids() {
        let case = Case::new(BOB).inode(5, 0o040_777, ALICE).granted(5, RIGHT_WRITE);
        assert_eq!(case.decide(1_001, create(5, 0o100_600, BOB)), Ok(Allowed::AsIs));
        let foreign = case.decide(2_000, create(5, 0o100_600, BOB));
        assert_eq!(foreign, Err(Refusal::NotOwnNumber(InodeNumber::new(2_000))));
        assert_eq!(case.decide(1_001, create(5, 0o100_600, ALICE)), Err(Refusal::Inheritance));
        assert_eq!(case.decide(1_001, create(5, 0o020_600, BOB)), Ok(Allowed::AsIs), "a whiteout");
        let device = case.decide(1_001, create(5, 0o060_600, BOB));
        assert_eq!(device, Err(Refusal::Denied(vfs::Error::NotPermitted)));
        let closed = Case::new(BOB).inode(5, 0o040_755, ALICE).granted(5, RIGHT_WRITE);
        assert_eq!(closed.decide(1_001, create(5, 0o100_600, BOB)), DENIED);
    }

    #[test]
    fn in_a_sticky_directory_only_owners_remove() {
        let case = Case::new(BOB).inode(5, 0o041_777, 0).inode(6, 0o100_666, ALICE);
        let case = case.granted(5, RIGHT_WRITE).granted(6, RIGHT_WRITE);
        let cookie = Cookie::of_name(name());
        let unlink =
            Operation::Unlink { parent: InodeNumber::new(5), cookie, name: name(), directory: false };
        assert_eq!(case.decide(6, unlink), Err(Refusal::Denied(vfs::Error::NotPermitted)));
    }

    #[test]
    fn a_directory_changes_its_parent_only_under_the_rename_lease() {
        let case = Case::new(0).inode(5, 0o040_755, 0).inode(6, 0o040_755, 0).inode(7, 0o040_755, 0);
        let case = case.granted(5, RIGHT_WRITE).granted(6, RIGHT_WRITE).granted(7, RIGHT_WRITE);
        let body = RenameBody {
            old_parent: InodeNumber::new(5),
            new_parent: InodeNumber::new(6),
            old_cookie: 0.into(),
            new_cookie: 0.into(),
            replaced: InodeNumber::NONE,
            old_name_bytes: 1.into(),
            new_name_bytes: 1.into(),
            reserved: 0.into(),
        };
        let rename =
            Operation::Rename { body, old_name: name(), new_name: name(), exchange: false, whiteout: None };
        assert_eq!(case.decide(7, rename), Err(Refusal::RenameNotHeld));
        let case = case.granted_unit(Unit::RENAME, RIGHT_WRITE);
        assert_eq!(case.decide(7, rename), Ok(Allowed::AsIs));
    }

    #[test]
    fn a_file_without_a_name_needs_what_one_with_a_name_does() {
        let group = Case::new(BOB).inode(5, 0o042_777, ALICE).inode(6, 0o040_755, ALICE);
        let case = group.granted(5, RIGHT_WRITE).granted(6, RIGHT_WRITE);
        let unnamed = |parent: u64, mode: u32, (uid, gid): (u32, u32)| {
            let Operation::Create { body, .. } = create(parent, mode, uid) else { unreachable!("a create") };
            let body = CreateBody { gid: U32::new(gid), ..body };
            Operation::CreateUnnamed { parent: InodeNumber::new(parent), body, linkable: true }
        };
        assert_eq!(case.decide(1_001, unnamed(5, 0o100_600, (BOB, ALICE))), Ok(Allowed::AsIs));
        let not_inherited = Err(Refusal::Inheritance);
        assert_eq!(case.decide(1_001, unnamed(5, 0o100_600, (BOB, BOB))), not_inherited);
        assert_eq!(case.decide(1_001, unnamed(5, 0o100_600, (ALICE, ALICE))), not_inherited);
        assert_eq!(case.decide(1_001, unnamed(5, 0o102_770, (BOB, ALICE))), not_inherited, "a foreign group");
        assert_eq!(case.decide(1_001, unnamed(6, 0o100_600, (BOB, BOB))), DENIED);
        let foreign = Err(Refusal::NotOwnNumber(InodeNumber::new(2_000)));
        assert_eq!(case.decide(2_000, unnamed(5, 0o100_600, (BOB, ALICE))), foreign);
        let not_held = Err(Refusal::NotHeld(InodeNumber::new(7)));
        assert_eq!(case.decide(1_001, unnamed(7, 0o100_600, (BOB, BOB))), not_held);
    }

    #[test]
    fn a_whiteout_has_an_own_number_and_its_users_ids() {
        let case = Case::new(BOB).inode(5, 0o040_777, ALICE).inode(6, 0o100_644, BOB);
        let case = case.granted(5, RIGHT_WRITE).granted(6, RIGHT_WRITE);
        let rename = |inode: u64, uid: u32, gid: u32| {
            let parent = InodeNumber::new(5);
            let body = RenameBody {
                old_parent: parent,
                new_parent: parent,
                old_cookie: 0.into(),
                new_cookie: 0.into(),
                replaced: InodeNumber::NONE,
                old_name_bytes: 1.into(),
                new_name_bytes: 1.into(),
                reserved: 0.into(),
            };
            let ids = (U32::new(uid), U32::new(gid));
            let whiteout = Some(WhiteoutBody { inode: InodeNumber::new(inode), uid: ids.0, gid: ids.1 });
            Operation::Rename { body, old_name: name(), new_name: name(), exchange: false, whiteout }
        };
        assert_eq!(case.decide(6, rename(1_001, BOB, BOB)), Ok(Allowed::AsIs));
        assert_eq!(case.decide(6, rename(1_001, ALICE, BOB)), Err(Refusal::Inheritance));
        assert_eq!(case.decide(6, rename(1_001, BOB, ALICE)), Err(Refusal::Inheritance));
        let foreign = Err(Refusal::NotOwnNumber(InodeNumber::new(2_000)));
        assert_eq!(case.decide(6, rename(2_000, BOB, BOB)), foreign);
    }

    #[test]
    fn times_to_now_need_no_ownership_but_other_times_do() {
        let case = Case::new(BOB).inode(5, 0o100_666, ALICE).granted(5, RIGHT_WRITE);
        let times = |atime: i64| SetAttrBody {
            mask: U32::new(SET_ATIME | SET_MTIME),
            atime_ns: atime.into(),
            mtime_ns: 77.into(),
            ..mode_body(0)
        };
        assert_eq!(case.decide(5, Operation::SetAttr { body: times(77) }), Ok(Allowed::AsIs));
        let other = case.decide(5, Operation::SetAttr { body: times(1) });
        assert_eq!(other, Err(Refusal::Denied(vfs::Error::NotPermitted)));
    }
}
