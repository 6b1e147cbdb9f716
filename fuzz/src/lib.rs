//! The body of each fuzz target: one function for each decoder of `format`. The same functions run in
//! `make test` over the committed seeds and fixed random changes of them (`tests/fuzz.rs`).
//!
//! A decoder must give a value or an error for any input. Each value that it accepts must be within its own bounds, and a
//! frame or block with one changed bit must be refused. Where a checksum or a magic number would keep a fuzzer out,
//! the body also makes the input right and goes on.

#![forbid(unsafe_code)]

use format::call::{self, CallKind, Status};
use format::checksum::Salt;
use format::cluster::{CLUSTER_BODY_MAX, ClusterFrameHead, ClusterHead, ClusterKind};
use format::envelope::{self, Envelope, FRAME_VERSION, HEADER_BYTES};
use format::identity::IdentitySlot;
use format::ledger::{Entry, Event, GROUPS_MAX, REAP_MAX};
use format::locks::{LOCK_LIST_BYTES, LOCK_LIST_MAX, LOCK_SLOT_BYTES, LockList, list_offset};
use format::map::MapPage;
use format::message::{
    MESSAGE_BODY_MAX, MESSAGE_DESCRIPTORS_MAX, MessageHeader, RequestHeader, ResponseHeader,
};
use format::mirror::{MIRROR_FLAG, MirrorHead, MirrorMessage};
use format::node::{self, NodeView};
use format::pass::PassName;
use format::record::{self, FILE_BYTES_MAX, Operation, Record, SYMLINK_BYTES_MAX, XATTR_BYTES_MAX};
use format::register::{REGISTER_ENTRY_BYTES, REGISTER_KNOWN_MAX, RegisterEntry};
use format::root::{ROOT_MAGIC, Root};
use format::share::{LivenessNote, NOTE_FILES_MAX, SHARE_FILES_MAX, ShareRequest};
use format::superblock::{FileKind, MAGIC, POOL_VERSION, Superblock};
use format::wire::{
    CONTROL_MESSAGE_MAX, ControlHead, ControlKind, FrameHead, RemoteHead, WIRE_VERSION, WIRE_VERSION_MIN,
    WireChallenge, WireConnectToken, WireHello, WireProof, WireRefusal, WireRequest, WireWelcome, check_body,
    common_version,
};
use format::{BLOCK_BYTES, Block, CommitNumber, Incarnation, LogUid, Name, PoolUid, Sequence};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// A body of a fuzz target.
pub type Body = fn(&[u8]);

/// All targets, by name.
pub const TARGETS: [(&str, Body); 18] = [
    ("call", call),
    ("cluster", cluster),
    ("listener", listener),
    ("envelope", envelope),
    ("identity", identity),
    ("ledger", ledger),
    ("locks", locks),
    ("map", map),
    ("message", message),
    ("mirror", mirror),
    ("node", node),
    ("pass", pass),
    ("record", record),
    ("register", register),
    ("root", root),
    ("share", share),
    ("superblock", superblock),
    ("wire", wire),
];

/// A frame with envelope and checksum made right; `None` if it is too short.
pub fn sealed(salt: Salt, frame: &[u8]) -> Option<Vec<u8>> {
    let mut frame = frame.to_vec();
    let payload_bytes = u32::try_from(frame.len().checked_sub(HEADER_BYTES)?).ok()?;
    let (mut envelope, _) = Envelope::read_from_prefix(&frame).ok()?;
    envelope.version = FRAME_VERSION;
    envelope.payload_bytes = payload_bytes.into();
    frame[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    let (header, payload) = frame.split_first_chunk::<HEADER_BYTES>()?;
    let mut running = envelope::checksum_header(salt, header);
    running.update(payload);
    envelope.checksum = running.finish().into();
    frame[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    Some(frame)
}

/// Changes one bit, chosen by the bytes themselves.
fn flip_one_bit(bytes: &mut [u8]) {
    let choice = bytes.iter().fold(0usize, |sum, b| sum.wrapping_mul(31).wrapping_add(usize::from(*b)));
    let bit = choice % (bytes.len() * 8);
    bytes[bit / 8] ^= 1 << (bit % 8);
}

/// Input: log uid, incarnation, frame.
pub fn envelope(bytes: &[u8]) {
    let Ok((uid, rest)) = LogUid::read_from_prefix(bytes) else { return };
    let Ok((incarnation, frame)) = Incarnation::read_from_prefix(rest) else { return };
    let salt = Salt::of_log(uid, incarnation);
    if let Ok(envelope) = envelope::check_frame(salt, frame) {
        assert!(HEADER_BYTES as u64 + u64::from(envelope.payload_bytes.get()) <= frame.len() as u64);
        assert!(envelope.frame_bytes().is_multiple_of(envelope::FRAME_ALIGN as u64));
    }
    let Some(mut frame) = sealed(salt, frame) else { return };
    envelope::check_frame(salt, &frame).expect("a frame made right is right");
    let other_life = Salt::of_log(uid, Incarnation::new(incarnation.get() ^ 1));
    assert!(envelope::check_frame(other_life, &frame).is_err(), "a frame of another life was accepted");
    flip_one_bit(&mut frame);
    assert!(envelope::check_frame(salt, &frame).is_err(), "a changed frame was accepted");
}

/// Input: the identity of a pool.
pub fn identity(bytes: &[u8]) {
    let _ = IdentitySlot::decode(bytes);
    let Ok((slot, _)) = IdentitySlot::read_from_prefix(bytes) else { return };
    let mut slot = slot.encode();
    if let Ok(found) = IdentitySlot::decode(&slot) {
        assert_eq!(found.encode(), slot, "an identity has one form");
        flip_one_bit(&mut slot);
        assert!(IdentitySlot::decode(&slot).is_err(), "a changed bit went unnoticed");
    }
}

/// Input: a frame, its checksum not looked at.
pub fn record(bytes: &[u8]) {
    let right = sealed(Salt::NONE, bytes);
    for frame in [Some(bytes), right.as_deref()].into_iter().flatten() {
        let Ok(record) = Record::decode(frame) else { continue };
        let name_fits = |name: &Name<'_>| Name::new(name.bytes()).is_ok();
        let fits =
            |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|end| end <= FILE_BYTES_MAX);
        let right = match &record.operation {
            Operation::Pad | Operation::SetAttr { .. } => true,
            Operation::Write { offset, bytes } => fits(*offset, bytes.len() as u64),
            Operation::Truncate { size } => fits(*size, 0),
            Operation::Allocate { offset, bytes, .. } => *bytes > 0 && fits(*offset, *bytes),
            Operation::Create { name, target, .. } => name_fits(name) && target.len() <= SYMLINK_BYTES_MAX,
            Operation::Link { name, .. } | Operation::Unlink { name, .. } => name_fits(name),
            Operation::Rename { old_name, new_name, .. } => name_fits(old_name) && name_fits(new_name),
            Operation::SetXattr { name, value } => !name.is_empty() && value.len() <= XATTR_BYTES_MAX,
            Operation::RemoveXattr { name } => !name.is_empty(),
            Operation::CreateUnnamed { body, .. } => body.name_bytes.get() == 0,
        };
        assert!(right, "accepted beyond its bounds: {record:?}");
        assert!(record::room_blocks(&record.operation) <= FILE_BYTES_MAX / BLOCK_BYTES as u64 + 3);
        let may_keep = matches!(
            record.operation,
            Operation::Unlink { .. } | Operation::Rename { .. } | Operation::CreateUnnamed { .. }
        );
        assert!(may_keep || !record::keeps_open(frame));
    }
}

/// Input: number of the register, place, entry.
pub fn register(bytes: &[u8]) {
    let Ok((number, rest)) = Sequence::read_from_prefix(bytes) else { return };
    let Ok((place, entry)) = Sequence::read_from_prefix(rest) else { return };
    let _ = RegisterEntry::decode(entry, number.get(), place);
    let Ok((entry, _)) = RegisterEntry::read_from_prefix(entry) else { return };
    let entry = entry.seal(number.get(), place);
    assert!(entry.known().count() <= REGISTER_KNOWN_MAX);
    let mut right = entry.as_bytes().to_vec();
    assert_eq!(right.len(), REGISTER_ENTRY_BYTES);
    if let Ok((_, found)) = RegisterEntry::decode(&right, number.get(), place) {
        assert_eq!(found, entry);
    }
    assert!(RegisterEntry::decode(&right, number.get() ^ 1, place).is_err(), "of another register");
    flip_one_bit(&mut right);
    assert!(RegisterEntry::decode(&right, number.get(), place).is_err(), "a changed entry was accepted");
}

/// Input: a message between a head and a copy.
pub fn mirror(bytes: &[u8]) {
    let Ok(message) = MirrorMessage::decode(bytes) else { return };
    let (head, body) = MirrorHead::read_from_prefix(bytes).expect("it was taken apart");
    let count = usize::from(head.count.get());
    match message {
        MirrorMessage::Hello(hello) => assert_eq!(hello.as_bytes(), body),
        MirrorMessage::Open(open) => assert_eq!(open.as_bytes(), body),
        MirrorMessage::Ends { ends, logs, more, .. } => {
            assert_eq!([ends.as_bytes(), logs.as_bytes()].concat(), body);
            assert_eq!((logs.len(), more), (count, head.flags == MIRROR_FLAG));
        }
        MirrorMessage::Data { parts, sync } => {
            let parts: Vec<u8> = parts.flat_map(|(part, data)| [part.as_bytes(), data].concat()).collect();
            assert_eq!((&parts[..], sync), (body, head.flags == MIRROR_FLAG));
        }
        MirrorMessage::Synced(marks) => assert_eq!((marks.as_bytes(), marks.len()), (body, count)),
        MirrorMessage::Executed { ledger, logs } => {
            assert_eq!([ledger.as_bytes(), logs.as_bytes()].concat(), body);
            assert_eq!(logs.len(), count);
        }
        MirrorMessage::Round(round) => assert_eq!(round.as_bytes(), body),
        MirrorMessage::Range { range, to_end } => {
            assert_eq!((range.as_bytes(), to_end), (body, head.flags == MIRROR_FLAG));
            assert!(to_end || range.first < range.end);
        }
        MirrorMessage::Items(items) => {
            let items: Vec<u8> = items.flat_map(|(item, value)| [item.as_bytes(), value].concat()).collect();
            assert_eq!(items, body);
        }
        MirrorMessage::Blocks { blocks, damaged } => {
            assert_eq!((blocks.as_flattened(), blocks.len()), (body, count));
            assert_eq!(damaged, head.flags == MIRROR_FLAG);
        }
        MirrorMessage::RoundEnd { end, whole } => {
            assert_eq!((end.as_bytes(), whole), (body, head.flags == MIRROR_FLAG));
        }
        MirrorMessage::Imported(imported) => assert_eq!(imported.as_bytes(), body),
        MirrorMessage::Compare(hello) => assert_eq!(hello.as_bytes(), body),
        MirrorMessage::Held(mark) | MirrorMessage::CompareAt(mark) => assert_eq!(mark.as_bytes(), body),
        MirrorMessage::Sums { sums, last } => {
            assert_eq!((sums.as_bytes(), sums.len()), (body, count));
            assert_eq!(last, head.flags == MIRROR_FLAG);
        }
        MirrorMessage::CheckRecords { key, logs } => {
            assert_eq!([&key[..], logs.as_bytes()].concat(), body);
            assert_eq!(logs.len(), count);
        }
        MirrorMessage::Checked(marks) => assert_eq!((marks.as_bytes(), marks.len()), (body, count)),
        MirrorMessage::Fetch(part) => assert_eq!(part.as_bytes(), body),
        MirrorMessage::Changed { spans, more } => {
            assert_eq!((spans.as_bytes(), spans.len()), (body, count));
            assert_eq!(more, head.flags == MIRROR_FLAG);
        }
    }
}

/// Input: a slot of a lock table.
pub fn locks(bytes: &[u8]) {
    let Some(found) = LockList::of_slot(bytes).or_else(|| LockList::decode(bytes).ok()) else { return };
    assert!(found.locks.len() <= LOCK_LIST_MAX);
    let (mut slot, mut list) = ([0; LOCK_SLOT_BYTES], [0; LOCK_LIST_BYTES]);
    let length = found.encode(&mut list);
    let at = list_offset(found.sequence);
    slot[at..at + length].copy_from_slice(&list[..length]);
    assert_eq!(LockList::of_slot(&slot), Some(found));
    flip_one_bit(&mut slot[at..at + length]);
    assert_eq!(LockList::of_slot(&slot), None, "a changed list was accepted");
}

/// Input: a request to give open files away, or a note about them.
pub fn share(bytes: &[u8]) {
    if let Ok((request, files)) = ShareRequest::decode(bytes) {
        assert!(files.len() <= SHARE_FILES_MAX);
        assert_eq!([request.as_bytes(), files.as_bytes()].concat(), bytes);
    }
    if let Ok((note, files)) = LivenessNote::decode(bytes) {
        assert!(files.len() <= NOTE_FILES_MAX && files.len() == note.count.get() as usize);
        assert_eq!([note.as_bytes(), files.as_bytes()].concat(), bytes);
    }
}

/// Input: a name.
pub fn pass(bytes: &[u8]) {
    if let Ok(pass) = PassName::decode(bytes) {
        assert_eq!(pass.to_string().as_bytes(), bytes);
    }
}

/// Input: a frame, its checksum not looked at.
pub fn ledger(bytes: &[u8]) {
    let right = sealed(Salt::NONE, bytes);
    for frame in [Some(bytes), right.as_deref()].into_iter().flatten() {
        let Ok(entry) = Entry::decode(frame) else { continue };
        if let Event::OpenLog { body, groups, .. } = &entry.event {
            assert!(groups.len() <= GROUPS_MAX && body.groups.get() as usize == groups.len());
        }
        if let Event::Reap { inodes } = &entry.event {
            assert!((1..=REAP_MAX).contains(&inodes.len()));
        }
    }
}

/// Input: first bytes of a pool file.
pub fn superblock(bytes: &[u8]) {
    const KINDS: [FileKind; 5] =
        [FileKind::Tree, FileKind::Segment, FileKind::Log, FileKind::Ledger, FileKind::Register];
    let accepted = KINDS.iter().filter(|k| Superblock::decode(bytes, **k).is_ok()).count();
    assert!(accepted <= 1, "one file is of two kinds");
    let Ok((mut found, _)) = Superblock::read_from_prefix(bytes) else { return };
    let kind = KINDS[usize::from(found.kind.get()) % KINDS.len()];
    found.magic = MAGIC;
    found.version = POOL_VERSION.into();
    found.kind = (kind as u16).into();
    let mut block = found.encode();
    let decoded = Superblock::decode(&block, kind).expect("a superblock made right is right");
    assert_eq!(decoded.encode(), block);
    flip_one_bit(&mut block[..size_of::<Superblock>()]);
    assert!(Superblock::decode(&block, kind).is_err(), "a changed superblock was accepted");
}

/// Input: pool uid, slot.
pub fn root(bytes: &[u8]) {
    let Ok((pool, slot)) = PoolUid::read_from_prefix(bytes) else { return };
    if let Ok(root) = Root::decode(slot, pool) {
        assert_eq!((root.magic, root.pool), (ROOT_MAGIC, pool));
    }
    let Ok((mut found, _)) = Root::read_from_prefix(slot) else { return };
    found.pool = pool;
    let mut slot = found.encode();
    assert_eq!(Root::decode(&slot, pool).map(Root::encode), Ok(slot));
    assert!(
        Root::decode(&slot, PoolUid::new(pool.get() ^ 1)).is_err(),
        "a root of another pool was accepted"
    );
    flip_one_bit(&mut slot);
    assert!(Root::decode(&slot, pool).is_err(), "a changed root was accepted");
}

/// Input: number of the page, blocks of the map, page; missing bytes of the page are zero.
pub fn map(bytes: &[u8]) {
    let Ok((page, rest)) = U32::read_from_prefix(bytes) else { return };
    let Ok((blocks, rest)) = U32::read_from_prefix(rest) else { return };
    let (page, blocks) = (page.get(), blocks.get());
    if let Ok(found) = MapPage::decode(rest, page, blocks) {
        assert_eq!((found.page.get(), found.blocks.get()), (page, blocks));
    }
    let mut own = MapPage::new(page, blocks);
    let taken = rest.len().min(own.bits.len());
    own.bits[..taken].copy_from_slice(&rest[..taken]);
    own.seal(CommitNumber::new(u64::from(page) + 1));
    assert_eq!(MapPage::decode(own.as_bytes(), page, blocks).as_ref(), Ok(&own));
    assert!(MapPage::decode(own.as_bytes(), page ^ 1, blocks).is_err(), "another page was accepted");
    flip_one_bit(own.as_mut_bytes());
    assert!(MapPage::decode(own.as_bytes(), page, blocks).is_err(), "a changed page was accepted");
}

/// Input: a packet of the socket, or a message of the ring.
pub fn message(bytes: &[u8]) {
    if let Ok((_, descriptors, body)) = MessageHeader::decode(bytes) {
        assert!(descriptors <= MESSAGE_DESCRIPTORS_MAX && body.len() <= MESSAGE_BODY_MAX);
        assert_eq!(body.len() + size_of::<MessageHeader>(), bytes.len());
    }
    if let Ok((head, body)) = RequestHeader::decode(bytes) {
        assert_eq!(u64::from(head.body_bytes.get()), body.len() as u64);
    }
    if let Ok((head, body)) = ResponseHeader::decode(bytes) {
        assert_eq!(u64::from(head.body_bytes.get()), body.len() as u64);
    }
}

/// Input: block number, node; missing bytes of the node are zero.
pub fn node(bytes: &[u8]) {
    let Ok((block, rest)) = Block::read_from_prefix(bytes) else { return };
    let mut page = [0; BLOCK_BYTES];
    let taken = rest.len().min(BLOCK_BYTES);
    page[..taken].copy_from_slice(&rest[..taken]);
    check_node(&page, block);
    let (header, _) = node::NodeHeader::mut_from_prefix(&mut page).expect("a page is larger than a header");
    header.magic = node::NODE_MAGIC.into();
    header.block = block;
    check_node(&page, block);
    assert!(
        NodeView::decode(&page, Block::new(block.get() ^ 1)).is_err(),
        "a node of another block was accepted"
    );
}

fn check_node(page: &[u8; BLOCK_BYTES], block: Block) {
    let Ok(view) = NodeView::decode(page, block) else { return };
    assert!(view.slots().windows(2).all(|pair| pair[0].key < pair[1].key), "keys out of order");
    for slot in view.slots() {
        slot.key.kind().expect("a node with an unknown kind is refused");
        assert!(view.value(slot).len() <= node::VALUE_BYTES_MAX);
    }
}

/// Input: kind of the call, body.
pub fn call(bytes: &[u8]) {
    let Some((raw, body)) = bytes.split_first_chunk::<2>() else { return };
    let raw = u16::from_le_bytes(*raw);
    assert!(Status::from_raw(raw) as u16 == raw || Status::from_raw(raw) == Status::Invalid);
    let Ok(kind) = CallKind::from_raw(raw) else { return };
    assert_eq!(kind as u16, raw);
    let rest_bytes = match kind {
        CallKind::Walk => call::split::<call::WalkRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::Lease => call::split::<call::LeaseRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::Open | CallKind::Pass => call::split::<call::OpenRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::Entries => call::split::<call::EntriesRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::Extents | CallKind::Read => {
            call::split::<call::RangeRequest>(body).map(|(_, rest)| rest.len())
        }
        CallKind::Digest | CallKind::SyncLedger => {
            call::split::<call::DigestRequest>(body).map(|(_, rest)| rest.len())
        }
        CallKind::Refill => call::split::<call::RefillRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::GrowLog => call::split::<call::GrowRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::Lock | CallKind::Unlock | CallKind::TestLock | CallKind::ReleaseLocks => {
            call::split::<call::LockRequest>(body).map(|(_, rest)| rest.len())
        }
        CallKind::RedeemLock | CallKind::CancelLock => {
            call::split::<call::TicketRequest>(body).map(|(_, rest)| rest.len())
        }
        CallKind::Recalls => call::split::<call::RecallsRequest>(body).map(|(_, rest)| rest.len()),
        CallKind::SyncAll | CallKind::Statfs => Ok(body.len()),
        CallKind::Share => ShareRequest::decode(body).map(|_| 0),
        _ => call::split::<call::InodeRequest>(body).map(|(_, rest)| rest.len()),
    };
    assert!(rest_bytes.is_ok_and(|rest| rest <= body.len()) || rest_bytes.is_err());
}

/// Input: a message to a listener, and a connection request.
pub fn listener(bytes: &[u8]) {
    let mut stream = bytes;
    while let Ok(Some((kind, body))) = ControlHead::decode(stream) {
        let whole = size_of::<ControlHead>() + body.len();
        assert!(body.len() == kind.body_bytes() && whole <= CONTROL_MESSAGE_MAX);
        assert!(
            ControlHead::decode(&stream[..whole - 1]) == Ok(None),
            "a message was taken before it was whole"
        );
        let fits = match kind {
            ControlKind::Request => WireRequest::decode(body).map(|request| {
                let common = common_version(request.version_min, request.version_max);
                assert!(common.is_none_or(|version| (WIRE_VERSION_MIN..=WIRE_VERSION).contains(&version)));
                request.as_bytes() == body
            }),
            ControlKind::Hello => check_body::<WireHello>(body).map(|hello| hello.as_bytes() == body),
            ControlKind::Challenge => check_body::<WireChallenge>(body).map(|said| said.as_bytes() == body),
            ControlKind::Proof => check_body::<WireProof>(body).map(|proof| proof.as_bytes() == body),
            ControlKind::Welcome => check_body::<WireWelcome>(body).map(|welcome| welcome.as_bytes() == body),
            ControlKind::Refusal => {
                WireRefusal::decode(body).map(|(said, reason)| said.reason.get() == reason as u16)
            }
        };
        assert!(fits != Ok(false), "a body was read as another");
        stream = &stream[whole..];
    }
    // An incomplete message is short.
    assert!(ControlHead::decode(stream) != Ok(None) || stream.len() < CONTROL_MESSAGE_MAX);
    if let Ok(entry) = WireConnectToken::decode(bytes) {
        assert_eq!(entry.as_bytes(), &bytes[..size_of::<WireConnectToken>()]);
    }
    if let Ok((refusal, reason)) = WireRefusal::decode(bytes) {
        assert_eq!(refusal.reason.get(), reason as u16);
    }
}

/// Input: a frame, or a message of remote calls.
pub fn wire(bytes: &[u8]) {
    if let Ok((_, _, body)) = RemoteHead::decode(bytes) {
        assert_eq!(body.len() + size_of::<RemoteHead>(), bytes.len());
    }
    let Ok((kind, _, body)) = FrameHead::decode(bytes) else { return };
    assert_eq!(body.len() + size_of::<FrameHead>(), bytes.len());
    assert!(body.is_empty() || !kind.is_bare(), "a body where there is none");
}

/// Input: a message to or from the cluster manager, or a frame of its log.
pub fn cluster(bytes: &[u8]) {
    if let Ok(head) = ClusterHead::decode(bytes) {
        assert!(head.body_bytes.get() as usize <= CLUSTER_BODY_MAX);
        let body = &bytes[size_of::<ClusterHead>()..];
        assert!(head.check_body(body).is_err() || body.len() == head.body_bytes.get() as usize);
    }
    if let Ok((_, head, payload)) = ClusterFrameHead::split(bytes) {
        assert_eq!(u64::from(head.envelope.payload_bytes.get()), payload.len() as u64);
    }
    let Some((raw, body)) = bytes.split_first_chunk::<2>() else { return };
    let Ok(kind) = ClusterKind::from_raw(u16::from_le_bytes(*raw)) else { return };
    let mut message = ClusterHead::encode(kind, 7, 9, body);
    let right = |message: &[u8]| {
        ClusterHead::decode(message).and_then(|head| head.check_body(&message[size_of::<ClusterHead>()..]))
    };
    assert_eq!(right(&message), Ok(()), "a message made right is right");
    flip_one_bit(&mut message);
    assert!(right(&message).is_err(), "a changed message was accepted");
}
