//! Golden tests of the register and of the lock tables of sessions. See `golden.rs`.

use format::locks::{HeldLock, LockListHead};
use format::register::RegisterEntry;
use format::{InodeNumber, Sequence};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Compares a structure with its bytes, written in hexadecimal with blanks between fields.
fn golden(value: impl IntoBytes + zerocopy::Immutable, expected: &str) {
    let found: String = value.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, expected.replace([' ', '\n'], ""));
}

#[test]
fn register_structures() {
    golden(
        RegisterEntry {
            checksum: U32::new(0x1312_1110),
            kind: 0x20,
            detail: 0x30,
            family: 0x40,
            lock: 0x50,
            session: U64::new(0x6766_6564_6362_6160),
            inode: InodeNumber::new(0x7776_7574_7372_7170),
            first: U64::new(0x8786_8584_8382_8180),
            last: U64::new(0x9796_9594_9392_9190),
            owner: U64::new(0xa7a6_a5a4_a3a2_a1a0),
            pid: U32::new(0xb3b2_b1b0),
            reserved: U32::new(0xc3c2_c1c0),
            sequence: Sequence::new(0xd7d6_d5d4_d3d2_d1d0),
        },
        "10111213 20 30 40 50 6061626364656667 7071727374757677 8081828384858687 9091929394959697 \
         a0a1a2a3a4a5a6a7 b0b1b2b3 c0c1c2c3 d0d1d2d3d4d5d6d7",
    );
}

#[test]
fn lock_table_structures() {
    golden(
        LockListHead {
            checksum: U32::new(0x1312_1110),
            count: U32::new(0x2322_2120),
            inode: InodeNumber::new(0x3736_3534_3332_3130),
            sequence: Sequence::new(0x4746_4544_4342_4140),
            reserved: U64::new(0x5756_5554_5352_5150),
        },
        "10111213 20212223 3031323334353637 4041424344454647 5051525354555657",
    );
    golden(
        HeldLock {
            owner: U64::new(0x1716_1514_1312_1110),
            first: U64::new(0x2726_2524_2322_2120),
            last: U64::new(0x3736_3534_3332_3130),
            pid: U32::new(0x4342_4140),
            owner_kind: 0x50,
            family: 0x60,
            kind: 0x70,
            reserved: 0x80,
        },
        "1011121314151617 2021222324252627 3031323334353637 40414243 50 60 70 80",
    );
}
