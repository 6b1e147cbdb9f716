//! Locks and their owners in the form of messages and register entries.

use ccnvm::SessionId;
use format::InodeNumber;
use format::call::{
    FAMILY_RANGES, FAMILY_WHOLE, LOCK_EXCLUSIVE, LOCK_SHARED, LockRequest, LockResponse, OWNER_DESCRIPTION,
    OWNER_PROCESS, Status,
};
use format::register::{RegisterEntry, RegisterKind};
use format::share::SharedFile;
use vfs::engine::{Lock, LockFamily, LockKind, LockOwner};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// The owner of the locks of an open file that is given away, if it has one.
pub(crate) fn owner_of_file(file: &SharedFile) -> Result<Option<LockOwner>, Status> {
    match file.owner_kind {
        0 => Ok(None),
        OWNER_PROCESS => Ok(Some(LockOwner::Process { id: file.owner.get(), pid: file.pid.get() })),
        OWNER_DESCRIPTION => Ok(Some(LockOwner::Description(file.owner.get()))),
        _ => Err(Status::Invalid),
    }
}

pub(crate) fn key_of(owner: LockOwner) -> (u8, u64) {
    match owner {
        LockOwner::Process { id, .. } => (OWNER_PROCESS, id),
        LockOwner::Description(id) => (OWNER_DESCRIPTION, id),
    }
}

/// Decodes the lock of a request.
pub(crate) fn request(inode: InodeNumber, lock: Lock, owner: LockOwner) -> LockRequest {
    let (owner_kind, number) = key_of(owner);
    LockRequest {
        inode,
        owner: U64::new(number),
        pid: U32::new(if let LockOwner::Process { pid, .. } = owner { pid } else { 0 }),
        owner_kind,
        family: if lock.family == LockFamily::Ranges { FAMILY_RANGES } else { FAMILY_WHOLE },
        kind: if lock.kind == LockKind::Shared { LOCK_SHARED } else { LOCK_EXCLUSIVE },
        flags: 0,
        first: U64::new(lock.first),
        last: U64::new(lock.last),
    }
}

/// The register entry of a request.
pub(crate) fn entry_of(kind: RegisterKind, id: SessionId, request: &LockRequest) -> RegisterEntry {
    RegisterEntry {
        detail: request.owner_kind,
        family: request.family,
        lock: request.kind,
        inode: request.inode,
        first: request.first,
        last: request.last,
        owner: request.owner,
        pid: request.pid,
        ..RegisterEntry::new(kind, id.0)
    }
}

pub(crate) fn request_of(entry: &RegisterEntry) -> LockRequest {
    LockRequest {
        inode: entry.inode,
        owner: entry.owner,
        pid: entry.pid,
        owner_kind: entry.detail,
        family: entry.family,
        kind: entry.lock,
        flags: 0,
        first: entry.first,
        last: entry.last,
    }
}

pub(crate) fn owner_of(request: &LockRequest) -> Result<LockOwner, Status> {
    match request.owner_kind {
        OWNER_PROCESS => Ok(LockOwner::Process { id: request.owner.get(), pid: request.pid.get() }),
        OWNER_DESCRIPTION => Ok(LockOwner::Description(request.owner.get())),
        _ => Err(Status::Invalid),
    }
}

pub(crate) fn family_of(request: &LockRequest) -> Result<LockFamily, Status> {
    match request.family {
        FAMILY_RANGES => Ok(LockFamily::Ranges),
        FAMILY_WHOLE => Ok(LockFamily::Whole),
        _ => Err(Status::Invalid),
    }
}

pub(crate) fn lock_of(request: &LockRequest) -> Result<Lock, Status> {
    let kind = match request.kind {
        LOCK_SHARED => LockKind::Shared,
        LOCK_EXCLUSIVE => LockKind::Exclusive,
        _ => return Err(Status::Invalid),
    };
    let (first, last) = range_of(request)?;
    Ok(Lock { family: family_of(request)?, kind, first, last })
}

pub(crate) fn range_of(request: &LockRequest) -> Result<(u64, u64), Status> {
    let (first, last) = (request.first.get(), request.last.get());
    if first <= last { Ok((first, last)) } else { Err(Status::Invalid) }
}

pub(crate) fn status_of(error: vfs::Error) -> Status {
    match error {
        vfs::Error::WouldBlock => Status::WouldBlock,
        vfs::Error::Deadlock => Status::Deadlock,
        vfs::Error::NoLocks => Status::Limit,
        _ => Status::Invalid,
    }
}

pub(crate) fn response(ticket: u64) -> Vec<u8> {
    LockResponse { ticket: U64::new(ticket), slot: U32::new(0), expected: U32::new(0) }.as_bytes().to_vec()
}
