//! Encodes and decodes views, changes and records as the bytes of `format::cluster`. Decoding is total: any bytes give
//! a value that the rules could have made, or an error.

use crate::change::{Change, Done, Party, PoolReport, Record, Refusal};
use crate::rules::Rules;
use crate::view::{Address, Member, Path, Placement, PoolCopy, Replica, Subtree, View};
use format::cluster::{
    ADDRESS_BYTES, CLUSTER_VERSION, ChangeBody, ChangeKind, DoneReply, HISTORY_COUNT_MAX, MEMBERS_MAX,
    MemberBody, RecordHead, RefusalReply, ReplicaBody, SUBTREES_MAX, SubtreeHead, ViewHead,
};
use format::{BeatVersion, ChangeNumber, DecodeError, Epoch, NodeId, PoolUid};
use std::collections::BTreeMap;
use std::time::Duration;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Takes a structure from the front of `rest`.
fn take<T: FromBytes + KnownLayout + Immutable>(rest: &mut &[u8]) -> Result<T, DecodeError> {
    let (value, after) = T::read_from_prefix(rest).map_err(|_| DecodeError::Truncated)?;
    *rest = after;
    Ok(value)
}

fn take_bytes<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8], DecodeError> {
    let (bytes, after) = rest.split_at_checked(count).ok_or(DecodeError::Truncated)?;
    *rest = after;
    Ok(bytes)
}

fn take_path(rest: &mut &[u8], bytes: U16) -> Result<Path, DecodeError> {
    Path::new(take_bytes(rest, usize::from(bytes.get()))?).ok_or(DecodeError::Field("path"))
}

fn path_bytes(path: &Path) -> U16 {
    U16::new(u16::try_from(path.as_bytes().len()).expect("a path has at most 1,023 bytes"))
}

fn encode_address(address: &Address) -> [u8; ADDRESS_BYTES] {
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..address.as_str().len()].copy_from_slice(address.as_str().as_bytes());
    bytes
}

fn decode_address(bytes: &[u8; ADDRESS_BYTES]) -> Result<Address, DecodeError> {
    let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(ADDRESS_BYTES);
    let (text, filling) = bytes.split_at(length);
    let text = std::str::from_utf8(text).ok().filter(|_| filling.iter().all(|byte| *byte == 0));
    text.and_then(Address::new).ok_or(DecodeError::Field("address"))
}

fn flag(raw: u32, name: &'static str) -> Result<bool, DecodeError> {
    match raw {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Field(name)),
    }
}

fn replica_body(replica: &Replica) -> ReplicaBody {
    ReplicaBody {
        node: replica.node,
        hot: replica.hot.into(),
        in_sync: replica.in_sync.into(),
        reserved: U16::new(0),
        pool: replica.pool.uid,
        generation: replica.pool.generation,
    }
}

fn take_replicas(rest: &mut &[u8], count: u8) -> Result<Vec<Replica>, DecodeError> {
    let body = |rest: &mut &[u8]| {
        let body: ReplicaBody = take(rest)?;
        let (hot, in_sync) = (flag(body.hot.into(), "hot")?, flag(body.in_sync.into(), "in_sync")?);
        let pool = PoolCopy { uid: body.pool, generation: body.generation };
        Ok(Replica { node: body.node, hot, in_sync, pool })
    };
    (0..count).map(|_| body(rest)).collect()
}

/// Encodes a view.
pub fn encode_view(view: &View) -> Vec<u8> {
    let count = |length: usize| U32::new(u32::try_from(length).expect("views have bounds"));
    let head = ViewHead {
        cluster: U64::new(view.cluster),
        number: view.number,
        lease_ns: U64::new(u64::try_from(view.rules.lease().as_nanos()).expect("a lease is at most an hour")),
        drift_ppm: U32::new(view.rules.drift_ppm()),
        epoch: view.epoch,
        members: count(view.members.len()),
        subtrees: count(view.subtrees.len()),
        set_back: view.set_back.unwrap_or_default(),
    };
    let mut bytes = head.as_bytes().to_vec();
    for (node, member) in &view.members {
        let body = MemberBody {
            node: *node,
            life: member.life,
            instance: U64::new(member.instance),
            medium: U32::new(member.medium.into()),
            refused: U32::new(member.refused.into()),
            pool: member.pool.uid,
            generation: member.pool.generation,
            address: encode_address(&member.address),
        };
        bytes.extend_from_slice(body.as_bytes());
    }
    for (path, subtree) in &view.subtrees {
        let head = SubtreeHead {
            version: subtree.version,
            manager: subtree.manager.unwrap_or(NodeId::NONE),
            copies_min: subtree.copies_min,
            chain: u8::try_from(subtree.chain.len()).expect("a chain has at most 16 replicas"),
            path_bytes: path_bytes(path),
        };
        bytes.extend_from_slice(head.as_bytes());
        for replica in &subtree.chain {
            bytes.extend_from_slice(replica_body(replica).as_bytes());
        }
        bytes.extend_from_slice(path.as_bytes());
    }
    bytes
}

/// Decodes a view.
///
/// # Errors
/// `Truncated`, `Field`: also if the rules could not have made the view.
pub fn decode_view(bytes: &[u8]) -> Result<View, DecodeError> {
    let rest = &mut &bytes[..];
    let head: ViewHead = take(rest)?;
    let (members, subtrees) = (head.members.get() as usize, head.subtrees.get() as usize);
    if members > MEMBERS_MAX || subtrees > SUBTREES_MAX {
        return Err(DecodeError::Field("members"));
    }
    let rules = Rules::new(Duration::from_nanos(head.lease_ns.get()), head.drift_ppm.get());
    let rules = rules.ok_or(DecodeError::Field("lease_ns"))?;
    let mut view = View { number: head.number, epoch: head.epoch, ..View::new(head.cluster.get(), rules) };
    view.set_back = (head.set_back != ChangeNumber::default()).then_some(head.set_back);
    for _ in 0..members {
        let (node, member) = take_member(rest)?;
        after_last(&view.members, &node)?;
        view.members.insert(node, member);
    }
    for _ in 0..subtrees {
        let (path, subtree) = take_subtree(rest)?;
        after_last(&view.subtrees, &path)?;
        view.subtrees.insert(path, subtree);
    }
    if !rest.is_empty() {
        return Err(DecodeError::Field("subtrees"));
    }
    match view.fault() {
        None => Ok(view),
        Some(fault) => Err(DecodeError::Field(fault)),
    }
}

fn after_last<K: Ord, V>(map: &BTreeMap<K, V>, key: &K) -> Result<(), DecodeError> {
    match map.last_key_value() {
        Some((last, _)) if last >= key => Err(DecodeError::Field("order")),
        _ => Ok(()),
    }
}

fn take_member(rest: &mut &[u8]) -> Result<(NodeId, Member), DecodeError> {
    let body: MemberBody = take(rest)?;
    let member = Member {
        life: body.life,
        instance: body.instance.get(),
        medium: u8::try_from(body.medium.get()).map_err(|_| DecodeError::Field("medium"))?,
        pool: PoolCopy { uid: body.pool, generation: body.generation },
        refused: flag(body.refused.get(), "refused")?,
        address: decode_address(&body.address)?,
    };
    Ok((body.node, member))
}

fn take_subtree(rest: &mut &[u8]) -> Result<(Path, Subtree), DecodeError> {
    let head: SubtreeHead = take(rest)?;
    let chain = take_replicas(rest, head.chain)?;
    let path = take_path(rest, head.path_bytes)?;
    let manager = (head.manager != NodeId::NONE).then_some(head.manager);
    Ok((path, Subtree { version: head.version, chain, copies_min: head.copies_min, manager }))
}

/// Encodes a change.
pub fn encode_change(change: &Change) -> Vec<u8> {
    let mut body = ChangeBody::new_zeroed();
    let mut chain: &[Placement] = &[];
    let by = |body: &mut ChangeBody, party: &Party| (body.by, body.life) = (party.node, party.life);
    let kind = match change {
        Change::Start => ChangeKind::Start,
        Change::Join { node, instance, replaces, medium, pool, address } => {
            (body.node, body.instance, body.medium) = (*node, U64::new(*instance), *medium);
            (body.epoch, body.address) = (replaces.unwrap_or_default(), encode_address(address));
            (body.pool, body.generation) = (pool.copy.uid, pool.copy.generation);
            (body.pool_cluster, body.newest) = (U64::new(pool.cluster.unwrap_or(0)), pool.newest);
            body.former = pool.former;
            ChangeKind::Join
        }
        Change::Leave { party } => {
            by(&mut body, party);
            ChangeKind::Leave
        }
        Change::Expel { party, beat, epoch } => {
            by(&mut body, party);
            (body.beat, body.epoch) = (*beat, *epoch);
            ChangeKind::Expel
        }
        Change::Complain { by: party, about, epoch, .. } => {
            by(&mut body, party);
            (body.node, body.epoch) = (*about, *epoch);
            ChangeKind::Complain
        }
        Change::SetSubtree { version, chain: placed, copies_min, founder, .. } => {
            (body.version, body.copies_min) = (*version, *copies_min);
            body.pool = founder.unwrap_or_default();
            chain = placed;
            ChangeKind::SetSubtree
        }
        Change::RemoveSubtree { version, by: party, .. } => {
            body.version = *version;
            party.iter().for_each(|party| by(&mut body, party));
            ChangeKind::RemoveSubtree
        }
        Change::SetSync { version, by: party, node, in_sync, .. } => {
            by(&mut body, party);
            (body.version, body.node, body.in_sync) = (*version, *node, (*in_sync).into());
            ChangeKind::SetSync
        }
        Change::SetManager { version, by: party, to, .. } => {
            by(&mut body, party);
            (body.version, body.node) = (*version, *to);
            ChangeKind::SetManager
        }
    };
    body.kind = U16::new(kind as u16);
    body.chain = u8::try_from(chain.len()).unwrap_or(u8::MAX);
    body.path_bytes = change.path().map_or(U16::new(0), path_bytes);
    let mut bytes = body.as_bytes().to_vec();
    for place in &chain[..usize::from(body.chain)] {
        let replica = Replica { node: place.node, hot: place.hot, in_sync: false, pool: PoolCopy::default() };
        bytes.extend_from_slice(replica_body(&replica).as_bytes());
    }
    bytes.extend_from_slice(change.path().map_or(&[], Path::as_bytes));
    bytes
}

/// Decodes a change.
///
/// # Errors
/// `Truncated`, `Kind`, `Field`: also if a field is set that the kind does not use.
pub fn decode_change(bytes: &[u8]) -> Result<Change, DecodeError> {
    let rest = &mut &bytes[..];
    let body: ChangeBody = take(rest)?;
    let chain: Vec<Placement> = take_replicas(rest, body.chain)?
        .iter()
        .map(|replica| Placement { node: replica.node, hot: replica.hot })
        .collect();
    let party = Party { node: body.by, life: body.life };
    let path = |rest: &mut &[u8]| take_path(rest, body.path_bytes);
    let change = match ChangeKind::from_raw(body.kind.get())? {
        ChangeKind::Start => Change::Start,
        ChangeKind::Join => Change::Join {
            node: body.node,
            instance: body.instance.get(),
            replaces: (body.epoch != Epoch::default()).then_some(body.epoch),
            medium: body.medium,
            pool: PoolReport {
                cluster: (body.pool_cluster.get() != 0).then_some(body.pool_cluster.get()),
                copy: PoolCopy { uid: body.pool, generation: body.generation },
                former: body.former,
                newest: body.newest,
            },
            address: decode_address(&body.address)?,
        },
        ChangeKind::Leave => Change::Leave { party },
        ChangeKind::Expel => Change::Expel { party, beat: body.beat, epoch: body.epoch },
        ChangeKind::Complain => {
            Change::Complain { by: party, about: body.node, path: path(rest)?, epoch: body.epoch }
        }
        ChangeKind::SetSubtree => {
            let (version, copies_min) = (body.version, body.copies_min);
            let founder = (body.pool != PoolUid::NONE).then_some(body.pool);
            Change::SetSubtree { path: path(rest)?, version, chain, copies_min, founder }
        }
        ChangeKind::RemoveSubtree => {
            let by = (party.node != NodeId::NONE).then_some(party);
            Change::RemoveSubtree { path: path(rest)?, version: body.version, by }
        }
        ChangeKind::SetSync => {
            let (version, node, in_sync) = (body.version, body.node, flag(body.in_sync.into(), "in_sync")?);
            Change::SetSync { path: path(rest)?, version, by: party, node, in_sync }
        }
        ChangeKind::SetManager => {
            Change::SetManager { path: path(rest)?, version: body.version, by: party, to: body.node }
        }
    };
    // Each change has only one encoding: fields that its kind does not use are zero, and nothing follows.
    if encode_change(&change) == bytes { Ok(change) } else { Err(DecodeError::Field("reserved")) }
}

/// Encodes a record.
pub fn encode_record(record: &Record) -> Vec<u8> {
    let change = encode_change(&record.change);
    let head = RecordHead {
        number: record.number,
        wall_ns: I64::new(record.wall_ns),
        epoch: record.epoch,
        change_bytes: U32::new(u32::try_from(change.len()).expect("changes have bounds")),
        refused: record.refused.unwrap_or(NodeId::NONE),
        version: U32::new(CLUSTER_VERSION.into()),
    };
    [head.as_bytes(), &change].concat()
}

/// Takes a record from the front of `rest`.
///
/// # Errors
/// `Truncated`, `Version`, `Kind`, `Field`.
pub fn take_record(rest: &mut &[u8]) -> Result<Record, DecodeError> {
    let head: RecordHead = take(rest)?;
    head.check()?;
    let change = decode_change(take_bytes(rest, head.change_bytes.get() as usize)?)?;
    let refused = (head.refused != NodeId::NONE).then_some(head.refused);
    Ok(Record { number: head.number, wall_ns: head.wall_ns.get(), epoch: head.epoch, change, refused })
}

/// Decodes a sequence of records that fills the bytes.
///
/// # Errors
/// As [`take_record`]; `Field` if there are more than a history may have.
pub fn decode_records(bytes: &[u8]) -> Result<Vec<Record>, DecodeError> {
    let rest = &mut &bytes[..];
    let mut records = Vec::new();
    while !rest.is_empty() {
        if records.len() == HISTORY_COUNT_MAX as usize {
            return Err(DecodeError::Field("count"));
        }
        records.push(take_record(rest)?);
    }
    Ok(records)
}

/// The answer to a change that was made.
pub fn encode_done(done: Done) -> DoneReply {
    DoneReply { number: done.number, epoch: done.epoch, reserved: U32::new(0) }
}

/// The field names of [`Refusal::Field`] that have a number in messages.
const FIELDS: [&str; 7] = ["node", "about", "chain", "copies_min", "pool", "founder", "change"];

/// Encodes a refusal. A field without a number becomes `change`.
pub fn encode_refusal(refusal: Refusal) -> RefusalReply {
    let node = |node: NodeId| u64::from(node.get());
    let (reason, detail) = match refusal {
        Refusal::NotMember => (1, 0),
        Refusal::HeartbeatRefused => (2, 0),
        Refusal::AlreadyMember(life) => (3, u64::from(life.get())),
        Refusal::StaleEpoch(epoch) => (4, u64::from(epoch.get())),
        Refusal::StaleVersion(version) => (5, version.get()),
        Refusal::StaleBeat(beat) => (6, beat.get()),
        Refusal::TooEarly => (7, 0),
        Refusal::NotManager => (8, 0),
        Refusal::StillManager(who) => (9, node(who)),
        Refusal::NotReplica(who) => (10, node(who)),
        Refusal::LastCopy => (11, 0),
        Refusal::Field(name) => {
            let index = FIELDS.iter().position(|field| *field == name).unwrap_or(FIELDS.len() - 1);
            (12, index as u64)
        }
        Refusal::Full => (13, 0),
        Refusal::Internal => (14, 0),
        Refusal::ForeignPool(cluster) => (15, cluster),
        Refusal::SetBack(number) => (16, number.get()),
    };
    RefusalReply { reason: U32::new(reason), reserved: U32::new(0), detail: U64::new(detail) }
}

/// Decodes a refusal.
///
/// # Errors
/// `Kind`, `Field`.
pub fn decode_refusal(reply: &RefusalReply) -> Result<Refusal, DecodeError> {
    let detail = reply.detail.get();
    let small = u32::try_from(detail).map_err(|_| DecodeError::Field("detail"));
    Ok(match reply.reason.get() {
        1 => Refusal::NotMember,
        2 => Refusal::HeartbeatRefused,
        3 => Refusal::AlreadyMember(Epoch::new(small?)),
        4 => Refusal::StaleEpoch(Epoch::new(small?)),
        5 => Refusal::StaleVersion(ChangeNumber::new(detail)),
        6 => Refusal::StaleBeat(BeatVersion::new(detail)),
        7 => Refusal::TooEarly,
        8 => Refusal::NotManager,
        9 => Refusal::StillManager(NodeId::new(small?)),
        10 => Refusal::NotReplica(NodeId::new(small?)),
        11 => Refusal::LastCopy,
        12 => Refusal::Field(FIELDS.get(small? as usize).ok_or(DecodeError::Field("detail"))?),
        13 => Refusal::Full,
        14 => Refusal::Internal,
        15 => Refusal::ForeignPool(detail),
        16 => Refusal::SetBack(ChangeNumber::new(detail)),
        _ => return Err(DecodeError::Kind),
    })
}
