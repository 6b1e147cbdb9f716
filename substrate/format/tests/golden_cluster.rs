//! Golden tests of the cluster manager's log and messages, and of the identity of a pool. See `golden.rs`.

use format::cluster::*;
use format::identity::IdentitySlot;
use zerocopy::IntoBytes;

/// A structure whose bytes count up.
fn of_counting<T: zerocopy::FromBytes>() -> T {
    let bytes: Vec<u8> = (0..size_of::<T>()).map(|index| index as u8).collect();
    T::read_from_bytes(&bytes).expect("as many bytes as it has")
}

/// The fields of such a structure, in the order in which its bytes stand.
fn in_order(fields: &[&[u8]]) {
    let counting: Vec<u8> = (0..fields.concat().len()).map(|index| index as u8).collect();
    assert_eq!(fields.concat(), counting);
}

#[test]
fn messages_and_records_of_the_cluster() {
    let ClusterHead { magic, checksum, version, kind, body_bytes, id, cluster } = of_counting();
    in_order(&[
        magic.as_bytes(),
        checksum.as_bytes(),
        version.as_bytes(),
        kind.as_bytes(),
        body_bytes.as_bytes(),
        id.as_bytes(),
        cluster.as_bytes(),
    ]);
    let WatchRequest { after, wait_ms, reserved } = of_counting();
    in_order(&[after.as_bytes(), wait_ms.as_bytes(), reserved.as_bytes()]);
    let HeartbeatRequest { node, life } = of_counting();
    in_order(&[node.as_bytes(), life.as_bytes()]);
    let HeartbeatReply { version } = of_counting();
    in_order(&[version.as_bytes()]);
    let HistoryRequest { from, count, reserved } = of_counting();
    in_order(&[from.as_bytes(), count.as_bytes(), reserved.as_bytes()]);
    let DoneReply { number, epoch, reserved } = of_counting();
    in_order(&[number.as_bytes(), epoch.as_bytes(), reserved.as_bytes()]);
    let RefusalReply { reason, reserved, detail } = of_counting();
    in_order(&[reason.as_bytes(), reserved.as_bytes(), detail.as_bytes()]);
    let ViewHead { cluster, number, lease_ns, drift_ppm, epoch, members, subtrees, set_back } = of_counting();
    in_order(&[
        cluster.as_bytes(),
        number.as_bytes(),
        lease_ns.as_bytes(),
        drift_ppm.as_bytes(),
        epoch.as_bytes(),
        members.as_bytes(),
        subtrees.as_bytes(),
        set_back.as_bytes(),
    ]);
    let MemberBody { node, life, instance, medium, refused, pool, generation, address } = of_counting();
    in_order(&[
        node.as_bytes(),
        life.as_bytes(),
        instance.as_bytes(),
        medium.as_bytes(),
        refused.as_bytes(),
        pool.as_bytes(),
        generation.as_bytes(),
        address.as_bytes(),
    ]);
    let SubtreeHead { version, manager, copies_min, chain, path_bytes } = of_counting();
    in_order(&[
        version.as_bytes(),
        manager.as_bytes(),
        copies_min.as_bytes(),
        chain.as_bytes(),
        path_bytes.as_bytes(),
    ]);
    let ReplicaBody { node, hot, in_sync, reserved, pool, generation } = of_counting();
    in_order(&[
        node.as_bytes(),
        hot.as_bytes(),
        in_sync.as_bytes(),
        reserved.as_bytes(),
        pool.as_bytes(),
        generation.as_bytes(),
    ]);
    let ChangeBody {
        kind,
        path_bytes,
        chain,
        copies_min,
        in_sync,
        medium,
        by,
        life,
        node,
        epoch,
        version,
        beat,
        instance,
        pool,
        generation,
        pool_cluster,
        former,
        newest,
        address,
    } = of_counting();
    in_order(&[
        kind.as_bytes(),
        path_bytes.as_bytes(),
        chain.as_bytes(),
        copies_min.as_bytes(),
        in_sync.as_bytes(),
        medium.as_bytes(),
        by.as_bytes(),
        life.as_bytes(),
        node.as_bytes(),
        epoch.as_bytes(),
        version.as_bytes(),
        beat.as_bytes(),
        instance.as_bytes(),
        pool.as_bytes(),
        generation.as_bytes(),
        pool_cluster.as_bytes(),
        former.as_bytes(),
        newest.as_bytes(),
        address.as_bytes(),
    ]);
    let RecordHead { number, wall_ns, epoch, change_bytes, refused, version } = of_counting();
    in_order(&[
        number.as_bytes(),
        wall_ns.as_bytes(),
        epoch.as_bytes(),
        change_bytes.as_bytes(),
        refused.as_bytes(),
        version.as_bytes(),
    ]);
    let ClusterFrameHead { envelope, cluster, records, version, reserved } = of_counting();
    in_order(&[
        envelope.as_bytes(),
        cluster.as_bytes(),
        records.as_bytes(),
        version.as_bytes(),
        reserved.as_bytes(),
    ]);
}

#[test]
fn the_slot_of_an_identity() {
    let IdentitySlot {
        magic,
        checksum,
        version,
        number,
        pool,
        cluster,
        newest,
        joined,
        asked,
        node,
        chain,
        life,
        reserved,
    } = of_counting();
    in_order(&[
        magic.as_bytes(),
        checksum.as_bytes(),
        version.as_bytes(),
        number.as_bytes(),
        pool.as_bytes(),
        cluster.as_bytes(),
        newest.as_bytes(),
        joined.as_bytes(),
        asked.as_bytes(),
        node.as_bytes(),
        chain.as_bytes(),
        life.as_bytes(),
        reserved.as_bytes(),
    ]);
}
