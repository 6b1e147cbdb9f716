//! Encoding of records for the log: header and fixed body are in buffers on the caller's stack, names and contents are
//! used in place. Nothing is allocated.

use format::record::{
    ALLOCATE_KEEP_SIZE, ALLOCATE_PUNCH_HOLE, CreateBody, Kind, RENAME_EXCHANGE, RENAME_REPLACED_OPEN,
    RENAME_WHITEOUT, RecordHeader, RenameBody, SetAttrBody, UNLINK_DIRECTORY, UNLINK_OPEN, UNNAMED_LINKABLE,
    WhiteoutBody,
};
use format::{Cookie, Envelope, HEADER_BYTES, InodeNumber};
use zerocopy::little_endian::{I64, U64};

/// The header of a record without sequence and checksum.
pub(crate) type Header = [u8; HEADER_BYTES];

struct Fields {
    kind: Kind,
    flags: u8,
    payload_bytes: usize,
    inode: InodeNumber,
    parent: InodeNumber,
    offset: u64,
    extra: u64,
    time_ns: i64,
}

impl Fields {
    fn new(kind: Kind, inode: InodeNumber, time_ns: i64) -> Self {
        Self {
            kind,
            flags: 0,
            payload_bytes: 0,
            inode,
            parent: InodeNumber::NONE,
            offset: 0,
            extra: 0,
            time_ns,
        }
    }

    fn header(self) -> Header {
        let payload_bytes = u32::try_from(self.payload_bytes).expect("a record is smaller than a log");
        let header = RecordHeader {
            envelope: Envelope::new(self.kind as u8, self.flags, payload_bytes),
            inode: self.inode,
            parent: self.parent,
            offset: U64::new(self.offset),
            extra: U64::new(self.extra),
            time_ns: I64::new(self.time_ns),
        };
        zerocopy::transmute!(header)
    }
}

pub(crate) fn write(inode: InodeNumber, offset: u64, bytes: usize, time_ns: i64) -> Header {
    Fields { offset, payload_bytes: bytes, ..Fields::new(Kind::Write, inode, time_ns) }.header()
}

pub(crate) fn truncate(inode: InodeNumber, size: u64, time_ns: i64) -> Header {
    Fields { offset: size, ..Fields::new(Kind::Truncate, inode, time_ns) }.header()
}

/// Reserves a range, or punches a hole.
pub(crate) fn allocate(
    inode: InodeNumber,
    (offset, bytes): (u64, u64),
    keep_size: bool,
    punch_hole: bool,
    time_ns: i64,
) -> Header {
    let keep = if keep_size { ALLOCATE_KEEP_SIZE } else { 0 };
    let punch = if punch_hole { ALLOCATE_PUNCH_HOLE } else { 0 };
    Fields { offset, extra: bytes, flags: keep | punch, ..Fields::new(Kind::Allocate, inode, time_ns) }
        .header()
}

/// Payload: the body, name, target.
pub(crate) fn create(
    inode: InodeNumber,
    (parent, cookie): (InodeNumber, Cookie),
    body: &CreateBody,
    time_ns: i64,
) -> Header {
    let payload_bytes =
        size_of::<CreateBody>() + usize::from(body.name_bytes.get()) + usize::from(body.target_bytes.get());
    Fields { parent, extra: cookie.get(), payload_bytes, ..Fields::new(Kind::Create, inode, time_ns) }
        .header()
}

/// Payload: the body.
pub(crate) fn create_unnamed(
    inode: InodeNumber,
    parent: InodeNumber,
    linkable: bool,
    time_ns: i64,
) -> Header {
    let (flags, payload_bytes) = (if linkable { UNNAMED_LINKABLE } else { 0 }, size_of::<CreateBody>());
    Fields { parent, flags, payload_bytes, ..Fields::new(Kind::CreateUnnamed, inode, time_ns) }.header()
}

/// Payload: the name.
pub(crate) fn link(
    inode: InodeNumber,
    (parent, cookie): (InodeNumber, Cookie),
    name_bytes: usize,
    time_ns: i64,
) -> Header {
    let fields = Fields::new(Kind::Link, inode, time_ns);
    Fields { parent, extra: cookie.get(), payload_bytes: name_bytes, ..fields }.header()
}

/// Payload: the name.
pub(crate) fn unlink(
    inode: InodeNumber,
    (parent, cookie): (InodeNumber, Cookie),
    name_bytes: usize,
    (directory, open): (bool, bool),
    time_ns: i64,
) -> Header {
    let flags = if directory { UNLINK_DIRECTORY } else { 0 } | if open { UNLINK_OPEN } else { 0 };
    let fields = Fields::new(Kind::Unlink, inode, time_ns);
    Fields { parent, extra: cookie.get(), payload_bytes: name_bytes, flags, ..fields }.header()
}

/// Flags of a rename.
#[derive(Clone, Copy, Default)]
pub(crate) struct RenameFlags {
    pub exchange: bool,
    /// The replaced inode is open.
    pub replaced_open: bool,
    pub whiteout: bool,
}

/// Payload: the body, old name, new name, and with a whiteout its body.
pub(crate) fn rename(inode: InodeNumber, body: &RenameBody, how: RenameFlags, time_ns: i64) -> Header {
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    let flags = flag(how.exchange, RENAME_EXCHANGE)
        | flag(how.replaced_open, RENAME_REPLACED_OPEN)
        | flag(how.whiteout, RENAME_WHITEOUT);
    let names = usize::from(body.old_name_bytes.get()) + usize::from(body.new_name_bytes.get());
    let whiteout_bytes = if how.whiteout { size_of::<WhiteoutBody>() } else { 0 };
    let payload_bytes = size_of::<RenameBody>() + names + whiteout_bytes;
    Fields { payload_bytes, flags, ..Fields::new(Kind::Rename, inode, time_ns) }.header()
}

/// Payload: the body.
pub(crate) fn set_attr(inode: InodeNumber, time_ns: i64) -> Header {
    Fields { payload_bytes: size_of::<SetAttrBody>(), ..Fields::new(Kind::SetAttr, inode, time_ns) }.header()
}

/// Payload: name, value.
pub(crate) fn set_xattr(inode: InodeNumber, name_bytes: usize, value_bytes: usize, time_ns: i64) -> Header {
    let fields = Fields::new(Kind::SetXattr, inode, time_ns);
    Fields { offset: name_bytes as u64, payload_bytes: name_bytes + value_bytes, ..fields }.header()
}

/// Payload: the name.
pub(crate) fn remove_xattr(inode: InodeNumber, name_bytes: usize, time_ns: i64) -> Header {
    Fields { payload_bytes: name_bytes, ..Fields::new(Kind::RemoveXattr, inode, time_ns) }.header()
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::Name;
    use format::record::{Operation, Record};
    use zerocopy::IntoBytes;
    use zerocopy::little_endian::{U16, U32};

    fn decoded<'a>(frame: &'a mut Vec<u8>, header: Header, payload: &[&[u8]]) -> Record<'a> {
        frame.extend_from_slice(&header);
        payload.iter().for_each(|part| frame.extend_from_slice(part));
        Record::decode(frame).unwrap()
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let (inode, parent, cookie) = (InodeNumber::new(7), InodeNumber::new(8), Cookie::START);
        let name = Name::new(b"name").unwrap();
        let mut frames: [Vec<u8>; 13] = Default::default();
        let mut next = frames.iter_mut();
        let mut decode = |header, payload: &[&[u8]]| {
            let record = decoded(next.next().unwrap(), header, payload);
            assert_eq!((record.inode, record.time_ns), (inode, 99));
            record.operation
        };
        assert_eq!(
            decode(write(inode, 5, 3, 99), &[b"ab", b"c"]),
            Operation::Write { offset: 5, bytes: b"abc" }
        );
        assert_eq!(decode(truncate(inode, 5, 99), &[]), Operation::Truncate { size: 5 });
        let punched = Operation::Allocate { offset: 1, bytes: 2, keep_size: true, punch_hole: true };
        assert_eq!(decode(allocate(inode, (1, 2), true, true, 99), &[]), punched);
        let body = CreateBody {
            mode: U32::new(0o120_777),
            uid: U32::new(1),
            gid: U32::new(2),
            name_bytes: U16::new(4),
            target_bytes: U16::new(6),
            rdev: U64::new(0),
        };
        let created = Operation::Create { parent, cookie, name, body, target: b"target" };
        let header = create(inode, (parent, cookie), &body, 99);
        assert_eq!(decode(header, &[body.as_bytes(), b"name", b"target"]), created);
        let body = CreateBody {
            mode: U32::new(0o100_600),
            name_bytes: U16::new(0),
            target_bytes: U16::new(0),
            ..body
        };
        let unnamed = Operation::CreateUnnamed { parent, body, linkable: true };
        assert_eq!(decode(create_unnamed(inode, parent, true, 99), &[body.as_bytes()]), unnamed);
        let header = link(inode, (parent, cookie), 4, 99);
        assert_eq!(decode(header, &[b"name"]), Operation::Link { parent, cookie, name });
        let header = unlink(inode, (parent, cookie), 4, (true, true), 99);
        let unlinked = Operation::Unlink { parent, cookie, name, directory: true };
        assert_eq!(decode(header, &[b"name"]), unlinked);
        let body = RenameBody {
            old_parent: parent,
            new_parent: inode,
            old_cookie: U64::new(1),
            new_cookie: U64::new(2),
            replaced: parent,
            old_name_bytes: U16::new(1),
            new_name_bytes: U16::new(4),
            reserved: U32::new(0),
        };
        let old_name = Name::new(b"o").unwrap();
        let renamed = Operation::Rename { body, old_name, new_name: name, exchange: true, whiteout: None };
        let exchange = RenameFlags { exchange: true, ..RenameFlags::default() };
        let header = rename(inode, &body, exchange, 99);
        assert_eq!(decode(header, &[body.as_bytes(), b"o", b"name"]), renamed);
        let device = WhiteoutBody { inode: parent, uid: U32::new(1), gid: U32::new(2) };
        let whiteout = Some(device);
        let renamed = Operation::Rename { body, old_name, new_name: name, exchange: false, whiteout };
        let header = rename(inode, &body, RenameFlags { whiteout: true, ..RenameFlags::default() }, 99);
        assert_eq!(decode(header, &[body.as_bytes(), b"o", b"name", device.as_bytes()]), renamed);
        let body = SetAttrBody {
            mask: U32::new(1),
            mode: U32::new(0o644),
            uid: U32::new(0),
            gid: U32::new(0),
            atime_ns: I64::new(0),
            mtime_ns: I64::new(0),
        };
        assert_eq!(decode(set_attr(inode, 99), &[body.as_bytes()]), Operation::SetAttr { body });
        let header = set_xattr(inode, 6, 2, 99);
        assert_eq!(
            decode(header, &[b"user.a", b"vv"]),
            Operation::SetXattr { name: b"user.a", value: b"vv" }
        );
        let header = remove_xattr(inode, 6, 99);
        assert_eq!(decode(header, &[b"user.a"]), Operation::RemoveXattr { name: b"user.a" });
        let header = unlink(inode, (parent, cookie), 4, (false, true), 99);
        let mut frame = header.to_vec();
        frame.extend_from_slice(b"name");
        assert!(format::record::keeps_open(&frame));
    }
}
