//! Golden tests: the expected bytes of a view, a change and a record, with fields of different values. A change of
//! these texts is a change of the format, and needs a new version of the messages and of the log.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use cluster::codec::{encode_change, encode_record, encode_view};
use cluster::{
    Address, Change, Member, Party, Path, Placement, PoolCopy, PoolReport, Record, Replica, Rules, Subtree,
    View,
};
use format::{BeatVersion, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use std::time::Duration;

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn golden(bytes: &[u8], expected: &str) {
    assert_eq!(hexadecimal(bytes), expected.replace([' ', '\n'], ""));
}

#[test]
fn a_view() {
    let rules = Rules::new(Duration::from_nanos(0x1122_3344), 0x1234).unwrap();
    let mut view = View::new(0x1716_1514_1312_1110, rules);
    (view.number, view.epoch) = (ChangeNumber::new(0x27), Epoch::new(0x37));
    let address = Address::new("ab").unwrap();
    view.set_back = Some(ChangeNumber::new(0x28));
    let pool = PoolCopy { uid: PoolUid::new(0x5756), generation: PoolGeneration::new(0x6766) };
    let member = Member { life: Epoch::new(0x36), instance: 0x4746, medium: 5, pool, refused: true, address };
    view.members.insert(NodeId::new(0x3130), member);
    let replica = Replica { node: NodeId::new(0x3130), hot: true, in_sync: true, pool };
    let none = PoolCopy::default();
    let other = Replica { node: NodeId::new(0x3140), hot: false, in_sync: false, pool: none };
    let (version, manager) = (ChangeNumber::new(0x26), Some(NodeId::new(0x3130)));
    let subtree = Subtree { version, chain: vec![replica, other], copies_min: 2, manager };
    view.subtrees.insert(Path::new(b"/m").unwrap(), subtree);
    let head = "1011121314151617 2700000000000000 4433221100000000 34120000 37000000 01000000 01000000 2800000000000000";
    let member = "30310000 36000000 4647000000000000 05000000 01000000 5657000000000000 6667000000000000 6162"
        .to_owned() + &"00".repeat(62);
    let subtree = "2600000000000000 30310000 02 02 0200 30310000 01 01 0000 5657000000000000 6667000000000000 \
                   40310000 00 00 0000 0000000000000000 0000000000000000 2f6d";
    golden(&encode_view(&view), &[head, &member, subtree].concat());
}

#[test]
fn a_record_of_a_change() {
    let party = Party { node: NodeId::new(0x11), life: Epoch::new(0x12) };
    let change = Change::Expel { party, beat: BeatVersion::new(0x0102_0304), epoch: Epoch::new(0x13) };
    let expel = "0400 0000 00 00 00 00 11000000 12000000 00000000 13000000 0000000000000000 0403020100000000 \
                 0000000000000000 0000000000000000 0000000000000000 0000000000000000 0000000000000000 \
                 0000000000000000"
        .to_owned() + &"00".repeat(64);
    golden(&encode_change(&change), &expel);
    let (number, epoch) = (ChangeNumber::new(0x21), Epoch::new(0x22));
    let record =
        Record { number, wall_ns: 0x0807_0605_0403_0201, epoch, change, refused: Some(NodeId::new(0x11)) };
    golden(
        &encode_record(&record),
        &("2100000000000000 0102030405060708 22000000 98000000 11000000 03000000".to_owned() + &expel),
    );
}

#[test]
fn a_join_with_the_state_of_its_pool() {
    let copy = PoolCopy { uid: PoolUid::new(0x5756), generation: PoolGeneration::new(0x6766) };
    let pool = PoolReport {
        cluster: Some(0x7776),
        copy,
        former: PoolGeneration::new(0x9796),
        newest: ChangeNumber::new(0x8786),
    };
    let (node, replaces) = (NodeId::new(0x11), Some(Epoch::new(0x12)));
    let address = Address::new("ab").unwrap();
    let join = Change::Join { node, instance: 0x4746, replaces, medium: 5, pool, address };
    let head = "0200 0000 00 00 00 05 00000000 00000000 11000000 12000000 0000000000000000 0000000000000000 \
                4647000000000000 5657000000000000 6667000000000000 7677000000000000 9697000000000000 8687000000000000 6162";
    golden(&encode_change(&join), &(head.to_owned() + &"00".repeat(62)));
}

#[test]
fn a_change_that_founds_a_subtree() {
    let (path, version) = (Path::new(b"/m").unwrap(), ChangeNumber::new(0));
    let chain = vec![Placement { node: NodeId::new(0x31), hot: true }];
    let founder = Some(PoolUid::new(0x5756));
    let place = Change::SetSubtree { path, version, chain, copies_min: 1, founder };
    let head = "0600 0200 01 01 00 00 00000000 00000000 00000000 00000000 0000000000000000 0000000000000000 \
                0000000000000000 5657000000000000 0000000000000000 0000000000000000 0000000000000000 0000000000000000";
    let rest = "31000000 01 00 0000 0000000000000000 0000000000000000 2f6d";
    golden(&encode_change(&place), &(head.to_owned() + &"00".repeat(64) + rest));
}
