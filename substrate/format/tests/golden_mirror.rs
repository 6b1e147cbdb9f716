//! Golden tests of the messages between a head and its copies. See `golden.rs`.

use format::mirror::*;
use format::node::{ItemKind, Key};
use format::{ChainNumber, Incarnation, InodeNumber, Life, LogUid, Sequence};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Compares a structure with its bytes, written in hexadecimal with blanks between fields.
fn golden(value: impl IntoBytes + zerocopy::Immutable, expected: &str) {
    let found: String = value.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, expected.replace([' ', '\n'], ""));
}

fn ledger_mark() -> LedgerMark {
    LedgerMark {
        sequence: Sequence::new(0x1716_1514_1312_1110),
        position: U64::new(0x2726_2524_2322_2120),
        life: Life::new(0x3332_3130),
        reserved: U32::new(0x4342_4140),
    }
}

const LEDGER_MARK: &str = "1011121314151617 2021222324252627 30313233 40414243";

#[test]
fn mirror_structures() {
    golden(MirrorHead { kind: 0x10, flags: 0x20, count: U16::new(0x3130) }, "10 20 3031");
    golden(
        MirrorHello {
            version: U64::new(0x1716_1514_1312_1110),
            ledger_bytes: U64::new(0x2726_2524_2322_2120),
            chain: ChainNumber::new(0x3332_3130),
            rules: U32::new(0x4342_4140),
        },
        "1011121314151617 2021222324252627 30313233 40414243",
    );
    golden(ledger_mark(), LEDGER_MARK);
    golden(
        LogMark {
            log: LogUid::new(0x1716_1514_1312_1110),
            sequence: Sequence::new(0x2726_2524_2322_2120),
            position: U64::new(0x3736_3534_3332_3130),
            incarnation: Incarnation::new(0x4342_4140),
            reserved: U32::new(0x5352_5150),
        },
        "1011121314151617 2021222324252627 3031323334353637 40414243 50515253",
    );
    golden(
        LogEnds {
            log: LogUid::new(0x1716_1514_1312_1110),
            end: Sequence::new(0x2726_2524_2322_2120),
            end_position: U64::new(0x3736_3534_3332_3130),
            executed: Sequence::new(0x4746_4544_4342_4140),
            executed_position: U64::new(0x5756_5554_5352_5150),
            incarnation: Incarnation::new(0x6362_6160),
            reserved: U32::new(0x7372_7170),
        },
        "1011121314151617 2021222324252627 3031323334353637 4041424344454647 5051525354555657 60616263 70717273",
    );
    golden(
        MirrorEnds {
            end: ledger_mark(),
            contained: ledger_mark(),
            key: [0x50; 16],
            refusal: U32::new(0x6362_6160),
            reserved: U32::new(0x7372_7170),
        },
        &format!("{LEDGER_MARK} {LEDGER_MARK} {} 60616263 70717273", "50".repeat(16)),
    );
    golden(
        MirrorOpen {
            log: LogUid::new(0x1716_1514_1312_1110),
            before: Sequence::new(0x2726_2524_2322_2120),
            file_bytes: U64::new(0x3736_3534_3332_3130),
            incarnation: Incarnation::new(0x4342_4140),
            owner: U32::new(0x5352_5150),
        },
        "1011121314151617 2021222324252627 3031323334353637 40414243 50515253",
    );
    golden(
        DataPart {
            log: LogUid::new(0x1716_1514_1312_1110),
            incarnation: Incarnation::new(0x2322_2120),
            line: U32::new(0x3332_3130),
            bytes: U32::new(0x4342_4140),
        },
        "1011121314151617 20212223 30313233 40414243",
    );
    golden(
        SyncedMark {
            log: LogUid::new(0x1716_1514_1312_1110),
            sequence: Sequence::new(0x2726_2524_2322_2120),
        },
        "1011121314151617 2021222324252627",
    );
}

#[test]
fn import_structures() {
    let key = Key::new(0x1716_1514_1312_1110, ItemKind::Extent, 0x2726_2524_2322_2120);
    let key_bytes = "1011121314151617 2021222324252627 05 000000";
    golden(
        MirrorRound {
            version: Sequence::new(0x1716_1514_1312_1110),
            since: Sequence::new(0x2726_2524_2322_2120),
            number: U32::new(0x3332_3130),
            reserved: U32::new(0x4342_4140),
        },
        "1011121314151617 2021222324252627 30313233 40414243",
    );
    golden(
        MirrorSpan { first: key, end: key, to_end: U32::new(0x3332_3130), reserved: U32::new(0x4342_4140) },
        &format!("{key_bytes} {key_bytes} 30313233 40414243"),
    );
    golden(
        MirrorRange {
            first: key,
            end: key,
            blocks_from: U64::new(0x3736_3534_3332_3130),
            blocks_to: U64::new(0x4746_4544_4342_4140),
        },
        &format!("{key_bytes} {key_bytes} 3031323334353637 4041424344454647"),
    );
    golden(
        MirrorItem { key, owner: U32::new(0x3332_3130), bytes: U16::new(0x4140), reserved: U16::new(0x5150) },
        &format!("{key_bytes} 30313233 4041 5051"),
    );
    golden(
        MirrorRoundEnd {
            ledger: ledger_mark(),
            inodes: U64::new(0x5756_5554_5352_5150),
            data_blocks: U64::new(0x6766_6564_6362_6160),
        },
        &format!("{LEDGER_MARK} 5051525354555657 6061626364656667"),
    );
    golden(
        MirrorImported { number: U32::new(0x1312_1110), reserved: U32::new(0x2322_2120) },
        "10111213 20212223",
    );
}

#[test]
fn records_of_a_log() {
    golden(
        RecordsOfLog {
            log: LogUid::new(0x1716_1514_1312_1110),
            from: Sequence::new(0x2726_2524_2322_2120),
            from_position: U64::new(0x3736_3534_3332_3130),
            end: Sequence::new(0x4746_4544_4342_4140),
            hash: [0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57],
            incarnation: Incarnation::new(0x6362_6160),
            reserved: U32::new(0x7372_7170),
        },
        "1011121314151617 2021222324252627 3031323334353637 4041424344454647 5051525354555657 60616263 70717273",
    );
}

#[test]
fn comparison_structures() {
    golden(
        MirrorSum {
            inode: InodeNumber::new(0x1716_1514_1312_1110),
            attributes: U64::new(0x2726_2524_2322_2120),
            contents: U64::new(0x3736_3534_3332_3130),
            xattrs: U64::new(0x4746_4544_4342_4140),
            flags: U32::new(0x5352_5150),
            reserved: U32::new(0x6362_6160),
        },
        "1011121314151617 2021222324252627 3031323334353637 4041424344454647 50515253 60616263",
    );
}
