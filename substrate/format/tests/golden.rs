//! Golden tests: the expected bytes of every structure that lies on a medium or crosses the network. The bytes of each
//! field begin with the number of the field (`10 11 12 ..` is the first one, `20 21 ..` the second), so an expected text
//! shows order, width and byte order of the fields. A change of these texts is a change of the format, and needs a new
//! version of the format that contains the structure.

use format::envelope::Envelope;
use format::ledger::{EntryHeader, GrantDetail, LifeBody, OpenLogBody};
use format::map::MapPage;
use format::node::*;
use format::record::{CreateBody, RecordHeader, RenameBody, SetAttrBody, WhiteoutBody};
use format::root::{NodePointer, Root};
use format::superblock::Superblock;
use format::wire::*;
use format::*;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

/// Compares a structure with its bytes, written in hexadecimal with blanks between fields.
fn golden(value: impl IntoBytes + zerocopy::Immutable, expected: &str) {
    let found: String = value.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, expected.replace([' ', '\n'], ""));
}

fn stamp() -> Stamp {
    Stamp {
        version: LeaseVersion::new(0x1716_1514_1312_1110),
        log: LogUid::new(0x2726_2524_2322_2120),
        sequence: Sequence::new(0x3736_3534_3332_3130),
    }
}

fn envelope() -> Envelope {
    Envelope {
        checksum: U32::new(0x1312_1110),
        kind: 0x20,
        version: 0x30,
        flags: 0x40,
        reserved: 0x50,
        payload_bytes: U32::new(0x6362_6160),
        reserved2: U32::new(0x7372_7170),
        sequence: Sequence::new(0x8786_8584_8382_8180),
    }
}

fn node_pointer() -> NodePointer {
    NodePointer {
        block: Block::new(0x1312_1110),
        checksum: U32::new(0x2322_2120),
        version: Sequence::new(0x3736_3534_3332_3130),
    }
}

fn inode_item() -> InodeItem {
    InodeItem {
        mode: U32::new(0x1312_1110),
        uid: U32::new(0x2322_2120),
        gid: U32::new(0x3332_3130),
        links: U32::new(0x4342_4140),
        size: U64::new(0x5756_5554_5352_5150),
        blocks: U64::new(0x6766_6564_6362_6160),
        atime_ns: I64::new(0x7776_7574_7372_7170),
        mtime_ns: I64::from_bytes(0x8786_8584_8382_8180_u64.to_le_bytes()),
        ctime_ns: I64::from_bytes(0x9796_9594_9392_9190_u64.to_le_bytes()),
        btime_ns: I64::from_bytes(0xa7a6_a5a4_a3a2_a1a0_u64.to_le_bytes()),
        rdev: U64::new(0xb7b6_b5b4_b3b2_b1b0),
        stamp: stamp(),
        parent: InodeNumber::new(0xd7d6_d5d4_d3d2_d1d0),
    }
}

fn key() -> Key {
    Key::new(0x1716_1514_1312_1110, ItemKind::Xattr, 0x2726_2524_2322_2120)
}

#[test]
fn ids_structures() {
    golden(stamp(), "1011121314151617 2021222324252627 3031323334353637");
}

#[test]
fn envelope_structures() {
    golden(envelope(), "10111213 20 30 40 50 60616263 70717273 8081828384858687");
}

#[test]
fn superblock_structures() {
    golden(
        Superblock {
            magic: [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17],
            version: U16::new(0x2120),
            kind: U16::new(0x3130),
            checksum: U32::new(0x4342_4140),
            pool: PoolUid::new(0x5756_5554_5352_5150),
            id: U64::new(0x6766_6564_6362_6160),
            file_bytes: U64::new(0x7776_7574_7372_7170),
            owner: U32::new(0x8382_8180),
            chain: ChainNumber::new(0x9392_9190),
            created_ns: U64::new(0xa7a6_a5a4_a3a2_a1a0),
            geometry: U64::new(0xb7b6_b5b4_b3b2_b1b0),
        },
        "1011121314151617 2021 3031 40414243 5051525354555657 6061626364656667 7071727374757677 80818283 \
         90919293 a0a1a2a3a4a5a6a7 b0b1b2b3b4b5b6b7",
    );
}

#[test]
fn root_structures() {
    golden(node_pointer(), "10111213 20212223 3031323334353637");
    golden(
        Root {
            magic: [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17],
            pool: PoolUid::new(0x2726_2524_2322_2120),
            checksum: U32::new(0x3332_3130),
            height: U32::new(0x4342_4140),
            commit: CommitNumber::new(0x5756_5554_5352_5150),
            node: node_pointer(),
            ledger_sequence: Sequence::new(0x7776_7574_7372_7170),
            ledger_position: U64::new(0x8786_8584_8382_8180),
            inodes: U64::new(0x9796_9594_9392_9190),
            data_blocks: U64::new(0xa7a6_a5a4_a3a2_a1a0),
            nodes: U64::new(0xb7b6_b5b4_b3b2_b1b0),
            life: Life::new(0xc3c2_c1c0),
            next_segment: SegmentId::new(0xd3d2_d1d0),
            imported: U32::new(0xf3f2_f1f0),
            reserved: [0xe0; 28],
        },
        "1011121314151617 2021222324252627 30313233 40414243 5051525354555657 10111213 20212223 \
         3031323334353637 7071727374757677 8081828384858687 9091929394959697 a0a1a2a3a4a5a6a7 \
         b0b1b2b3b4b5b6b7 c0c1c2c3 d0d1d2d3 f0f1f2f3 e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0",
    );
}

#[test]
fn record_structures() {
    golden(
        RecordHeader {
            envelope: envelope(),
            inode: InodeNumber::new(0x2726_2524_2322_2120),
            parent: InodeNumber::new(0x3736_3534_3332_3130),
            offset: U64::new(0x4746_4544_4342_4140),
            extra: U64::new(0x5756_5554_5352_5150),
            time_ns: I64::new(0x6766_6564_6362_6160),
        },
        "10111213 20 30 40 50 60616263 70717273 8081828384858687 2021222324252627 3031323334353637 \
         4041424344454647 5051525354555657 6061626364656667",
    );
    golden(
        CreateBody {
            mode: U32::new(0x1312_1110),
            uid: U32::new(0x2322_2120),
            gid: U32::new(0x3332_3130),
            name_bytes: U16::new(0x4140),
            target_bytes: U16::new(0x5150),
            rdev: U64::new(0x6766_6564_6362_6160),
        },
        "10111213 20212223 30313233 4041 5051 6061626364656667",
    );
    golden(
        RenameBody {
            old_parent: InodeNumber::new(0x1716_1514_1312_1110),
            new_parent: InodeNumber::new(0x2726_2524_2322_2120),
            old_cookie: U64::new(0x3736_3534_3332_3130),
            new_cookie: U64::new(0x4746_4544_4342_4140),
            replaced: InodeNumber::new(0x5756_5554_5352_5150),
            old_name_bytes: U16::new(0x6160),
            new_name_bytes: U16::new(0x7170),
            reserved: U32::new(0x8382_8180),
        },
        "1011121314151617 2021222324252627 3031323334353637 4041424344454647 5051525354555657 6061 7071 \
         80818283",
    );
    golden(
        WhiteoutBody {
            inode: InodeNumber::new(0x1716_1514_1312_1110),
            uid: U32::new(0x2322_2120),
            gid: U32::new(0x3332_3130),
        },
        "1011121314151617 20212223 30313233",
    );
    golden(
        SetAttrBody {
            mask: U32::new(0x1312_1110),
            mode: U32::new(0x2322_2120),
            uid: U32::new(0x3332_3130),
            gid: U32::new(0x4342_4140),
            atime_ns: I64::new(0x5756_5554_5352_5150),
            mtime_ns: I64::new(0x6766_6564_6362_6160),
        },
        "10111213 20212223 30313233 40414243 5051525354555657 6061626364656667",
    );
}

#[test]
fn ledger_structures() {
    golden(
        EntryHeader {
            envelope: envelope(),
            log: LogUid::new(0x2726_2524_2322_2120),
            inode: InodeNumber::new(0x3736_3534_3332_3130),
            version: LeaseVersion::new(0x4746_4544_4342_4140),
            record: Sequence::new(0x5756_5554_5352_5150),
            detail: [0x60, 0x61, 0x62, 0x63, 0x64, 0x65, 0x66, 0x67],
        },
        "10111213 20 30 40 50 60616263 70717273 8081828384858687 2021222324252627 3031323334353637 \
         4041424344454647 5051525354555657 6061626364656667",
    );
    golden(
        OpenLogBody {
            uid: U32::new(0x1312_1110),
            gid: U32::new(0x2322_2120),
            groups: U32::new(0x3332_3130),
            pid: U32::new(0x4342_4140),
            first_inode: InodeNumber::new(0x5756_5554_5352_5150),
            inodes: U64::new(0x6766_6564_6362_6160),
            file_bytes: U64::new(0x7776_7574_7372_7170),
            incarnation: Incarnation::new(0x8382_8180),
            node: NodeId::new(0x9392_9190),
            kind: U32::new(0xa3a2_a1a0),
            reserved: U32::new(0xb3b2_b1b0),
        },
        "10111213 20212223 30313233 40414243 5051525354555657 6061626364656667 7071727374757677 \
         80818283 90919293 a0a1a2a3 b0b1b2b3",
    );
    golden(
        GrantDetail { rights: U32::new(0x1312_1110), unit: 0x20, mode: 0x30, reserved: [0x40, 0x41] },
        "10111213 20 30 4041",
    );
    golden(
        LifeBody {
            life: Life::new(0x1312_1110),
            node: NodeId::new(0x2322_2120),
            epoch: Epoch::new(0x3332_3130),
            reserved: U32::new(0x4342_4140),
            after: Sequence::new(0x5756_5554_5352_5150),
            key: [0x60; 16],
        },
        "10111213 20212223 30313233 40414243 5051525354555657 60606060606060606060606060606060",
    );
}

#[test]
fn node_structures() {
    golden(key(), "1011121314151617 2021222324252627 03 000000");
    golden(
        NodeHeader {
            magic: U16::new(0x1110),
            level: 0x20,
            reserved: 0x30,
            count: U16::new(0x4140),
            value_bytes: U16::new(0x5150),
            block: Block::new(0x6362_6160),
            reserved2: U32::new(0x7372_7170),
            version: Sequence::new(0x8786_8584_8382_8180),
        },
        "1011 20 30 4041 5051 60616263 70717273 8081828384858687",
    );
    golden(
        Slot { key: key(), offset: U16::new(0x2120), bytes: U16::new(0x3130) },
        "1011121314151617 2021222324252627 03 000000 2021 3031",
    );
    golden(
        inode_item(),
        "10111213 20212223 30313233 40414243 5051525354555657 6061626364656667 7071727374757677 \
         8081828384858687 9091929394959697 a0a1a2a3a4a5a6a7 b0b1b2b3b4b5b6b7 1011121314151617 \
         2021222324252627 3031323334353637 d0d1d2d3d4d5d6d7",
    );
    golden(
        EntryItem {
            inode: InodeNumber::new(0x1716_1514_1312_1110),
            file_type: 0x20,
            name_bytes: 0x30,
            reserved: [0x40, 0x41, 0x42, 0x43, 0x44, 0x45],
        },
        "1011121314151617 20 30 404142434445",
    );
    golden(
        ExtentItem {
            segment: SegmentId::new(0x1312_1110),
            block: Block::new(0x2322_2120),
            blocks: U32::new(0x3332_3130),
            flags: U32::new(0x4342_4140),
        },
        "10111213 20212223 30313233 40414243",
    );
    golden(
        ListedBlock {
            segment: SegmentId::new(0x1312_1110),
            block: Block::new(0x2322_2120),
            checksum: U32::new(0x3332_3130),
        },
        "10111213 20212223 30313233",
    );
    golden(
        XattrItem {
            value_bytes: U32::new(0x1312_1110),
            name_bytes: U16::new(0x2120),
            piece_bytes: U16::new(0x3130),
        },
        "10111213 2021 3031",
    );
    golden(
        LogItem {
            digested: Sequence::new(0x1716_1514_1312_1110),
            position: U64::new(0x2726_2524_2322_2120),
            incarnation: Incarnation::new(0x3332_3130),
            uid: U32::new(0x4342_4140),
            gid: U32::new(0x5352_5150),
            groups: U32::new(0x6362_6160),
            first_inode: InodeNumber::new(0x7776_7574_7372_7170),
            inodes: U64::new(0x8786_8584_8382_8180),
            version: LeaseVersion::new(0x9796_9594_9392_9190),
            file_bytes: U64::new(0xa7a6_a5a4_a3a2_a1a0),
            node: NodeId::new(0xb3b2_b1b0),
            kind: U32::new(0xc3c2_c1c0),
        },
        "1011121314151617 2021222324252627 30313233 40414243 50515253 60616263 7071727374757677 \
         8081828384858687 9091929394959697 a0a1a2a3a4a5a6a7 b0b1b2b3 c0c1c2c3",
    );
    golden(
        GrantItem {
            version: LeaseVersion::new(0x1716_1514_1312_1110),
            from: Sequence::new(0x2726_2524_2322_2120),
            rights: U32::new(0x3332_3130),
            mode: 0x40,
            reserved: [0x50, 0x51, 0x52],
        },
        "1011121314151617 2021222324252627 30313233 40 505152",
    );
    golden(
        LifeItem {
            first: Sequence::new(0x1716_1514_1312_1110),
            node: NodeId::new(0x2322_2120),
            epoch: Epoch::new(0x3332_3130),
            key: [0x40; 16],
        },
        "1011121314151617 20212223 30313233 40404040404040404040404040404040",
    );
    golden(
        SegmentItem {
            owner: U32::new(0x1312_1110),
            used: U32::new(0x2322_2120),
            blocks: U32::new(0x3332_3130),
            reserved: U32::new(0x4342_4140),
        },
        "10111213 20212223 30313233 40414243",
    );
}

#[test]
fn a_map_page() {
    let mut page = MapPage::new(0x2322_2120, 0x3332_3130);
    page.bits[0] = 0x40;
    page.seal(CommitNumber::new(0x1716_1514_1312_1110));
    let (head, bits) = page.as_bytes().split_at(32);
    let checksum = format!("{:08x}", page.checksum.get().swap_bytes());
    let head: String = head.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(head, format!("484d415000000000{checksum}01000000101112131415161720212223") + "30313233");
    assert!(bits[0] == 0x40 && bits[1..].iter().all(|b| *b == 0));
}

/// Numbers of kinds and bits that are stored on media. The compiler does not notice when they change.
#[test]
fn kinds_keep_their_numbers() {
    use format::{ledger, record, superblock};
    let records = [
        record::Kind::Pad as u8,
        record::Kind::Write as u8,
        record::Kind::Truncate as u8,
        record::Kind::Allocate as u8,
        record::Kind::Create as u8,
        record::Kind::Link as u8,
        record::Kind::Unlink as u8,
        record::Kind::Rename as u8,
        record::Kind::SetAttr as u8,
        record::Kind::SetXattr as u8,
        record::Kind::RemoveXattr as u8,
        record::Kind::CreateUnnamed as u8,
    ];
    assert_eq!(records, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    for number in 0..=255u8 {
        assert_eq!(
            record::Kind::from_raw(number).map(|k| k as u8).ok(),
            (1..=12).contains(&number).then_some(number)
        );
        assert_eq!(
            ledger::Kind::from_raw(number).map(|k| k as u8).ok(),
            (1..=8).contains(&number).then_some(number)
        );
        assert_eq!(
            ItemKind::from_raw(number).map(|k| k as u8).ok(),
            (1..=13).contains(&number).then_some(number)
        );
        assert_eq!(
            ledger::UnitKind::from_raw(number).map(|k| k as u8).ok(),
            (1..=4).contains(&number).then_some(number)
        );
        assert_eq!(
            ledger::GrantMode::from_raw(number).map(|m| m as u8).ok(),
            (1..=2).contains(&number).then_some(number)
        );
    }
    let files = [superblock::FileKind::Tree, superblock::FileKind::Segment, superblock::FileKind::Log];
    assert_eq!(files.map(|kind| kind as u16), [1, 2, 3]);
    assert_eq!([superblock::FileKind::Ledger as u16, superblock::FileKind::Register as u16], [4, 5]);
    let bits = [record::SET_MODE, record::SET_UID, record::SET_GID, record::SET_ATIME, record::SET_MTIME];
    assert_eq!(bits, [1, 2, 4, 8, 16]);
}

/// Cookies fix the order of names in a directory, so another hash is another format.
#[test]
fn cookies_of_names() {
    let cookie = |name: &[u8]| Cookie::of_name(Name::new(name).expect("a name")).get();
    assert_eq!(cookie(b"a"), 4_708_740_795_213_348_864);
    assert_eq!(cookie(b"inbox"), 9_118_191_694_521_040_896);
    assert_eq!(cookie(&[b'x'; 255]), 8_180_742_475_407_228_928);
}

/// Checksums of complete structures: another polynomial or another range of bytes is another format.
#[test]
fn checksums_of_whole_structures() {
    let magic = superblock::MAGIC;
    let (version, kind) = (superblock::POOL_VERSION.into(), (superblock::FileKind::Log as u16).into());
    let superblock = Superblock { magic, version, kind, ..Superblock::new_zeroed() }.encode();
    let root = Root { pool: PoolUid::new(7), commit: CommitNumber::new(3), ..Root::default() }.encode();
    golden(<[u8; 4]>::try_from(&superblock[12..16]).expect("four bytes"), "d52db8bf");
    golden(<[u8; 4]>::try_from(&root[16..20]).expect("four bytes"), "93d57499");
}

/// A field whose bytes count up from `first`.
fn counting<const N: usize>(first: u8) -> [u8; N] {
    std::array::from_fn(|index| first.wrapping_add(index as u8))
}

/// The bytes of such a field, in hexadecimal.
fn counted(first: u8, bytes: u8) -> String {
    (0..bytes).map(|index| format!("{:02x}", first.wrapping_add(index))).collect()
}

#[test]
fn wire_structures() {
    let request = WireRequest {
        magic: counting(0x10),
        version_min: 0x20,
        version_max: 0x30,
        cluster: counting(0x40),
        nonce: counting(0x50),
        proof: counting(0x60),
    };
    let fields = [counted(0x40, 16), counted(0x50, 16), counted(0x60, 16)];
    golden(request, &format!("10111213 20 30 {}", fields.concat()));
    let refusal = WireRefusal {
        magic: counting(0x10),
        version_min: 0x20,
        version_max: 0x30,
        reason: U16::new(0x4140),
        epoch: Epoch::new(0x5352_5150),
    };
    golden(refusal, "10111213 20 30 4041 50515253");
    golden(
        FrameHead { kind: U16::new(0x1110), reserved: U16::new(0x2120), taken: U32::new(0x3332_3130) },
        "1011 2021 30313233",
    );
    let hello = WireHello {
        version_min: 0x10,
        version_max: 0x20,
        reserved: U16::new(0x3130),
        epoch: Epoch::new(0x4342_4140),
        from: NodeId::new(0x5352_5150),
        to: NodeId::new(0x6362_6160),
        cluster: counting(0x70),
        nonce: counting(0x80),
        message_bytes: U32::new(0xa3a2_a1a0),
        window: U32::new(0xb3b2_b1b0),
    };
    let fields = [counted(0x70, 16), counted(0x80, 32)].concat();
    golden(hello, &format!("10 20 3031 40414243 50515253 60616263 {fields} a0a1a2a3 b0b1b2b3"));
    let challenge = WireChallenge {
        version: 0x10,
        reserved: 0x20,
        reserved2: U16::new(0x3130),
        epoch: Epoch::new(0x4342_4140),
        from: NodeId::new(0x5352_5150),
        message_bytes: U32::new(0x6362_6160),
        window: U32::new(0x7372_7170),
        nonce: counting(0x80),
        proof: counting(0xa0),
    };
    let fields = [counted(0x80, 32), counted(0xa0, 32)].concat();
    golden(challenge, &format!("10 20 3031 40414243 50515253 60616263 70717273 {fields}"));
    let region = WireRegion {
        key: U64::new(0x1716_1514_1312_1110),
        base: U64::new(0x2726_2524_2322_2120),
        bytes: U64::new(0x3736_3534_3332_3130),
    };
    golden(region, "1011121314151617 2021222324252627 3031323334353637");
    let (port, reserved) = (U16::new(0x1110), U16::new(0x2120));
    let fields = format!("1011 2021 {}", counted(0x30, 32));
    golden(WireProof { port, reserved, proof: counting(0x30) }, &fields);
    golden(WireWelcome { port, reserved, proof: counting(0x30) }, &fields);
    let magic = counting(0x10);
    golden(WireConnectToken { magic, proof: counting(0x20) }, &format!("10111213 {}", counted(0x20, 32)));
    golden(ControlHead { magic, kind: U16::new(0x2120), bytes: U16::new(0x3130) }, "10111213 2021 3031");
    golden(
        RemoteHead {
            id: U64::new(0x1716_1514_1312_1110),
            kind: U16::new(0x2120),
            code: U16::new(0x3130),
            within_ms: U32::new(0x4342_4140),
        },
        "1011121314151617 2021 3031 40414243",
    );
}

/// Every structure of the sources has expected bytes in one of the four golden tests. Messages between processes on one
/// machine are exempt, because both sides have the same version of the program.
#[test]
fn no_structure_is_forgotten() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let goldens = [
        include_str!("golden.rs"),
        include_str!("golden_cluster.rs"),
        include_str!("golden_mirror.rs"),
        include_str!("golden_register.rs"),
    ];
    let mut structures = 0;
    for entry in std::fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("the sources are there").path();
        if ["call.rs", "message.rs", "session.rs", "share.rs"].iter().any(|messages| path.ends_with(messages))
        {
            continue;
        }
        let text = std::fs::read_to_string(path).expect("a source is text");
        for definition in text.split("#[repr(C)]\npub struct ").skip(1) {
            let name = definition.split(' ').next().expect("a structure has a name");
            let uses = [format!("{name} {{"), format!("{name}::new(")];
            assert!(
                uses.iter().any(|u| goldens.iter().any(|golden| golden.contains(u.as_str()))),
                "{name} has no golden bytes"
            );
            structures += 1;
        }
    }
    assert!(structures > 20, "only {structures} structures were found");
}
