//! The calls of the mount, served by the tree: each method answers what the system call of its name does.

use super::answers::{errno_of, space_of, status_of, stop_of};
use super::mounted::{self, Twin, on_twin, seek_twin, status_of_twin};
use super::paths::{joined, path_of_directory};
use super::{Current, INHERITED, Open, TOKEN_NUMBERS, Tree, handle_of, locks, open_of};
use crate::descriptors;
use crate::limits;
use crate::local::local;
use crate::mount::{
    Change, ChildLocks, Entry, Errno, ExecHandover, Handle, Lock, Mount, MountPath, New, PassedDescriptors,
    Result, Target,
};
use crate::slots;
use crate::{raw, regions};
use format::InodeNumber;
use format::record::FileType;
use std::ffi::CStr;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicPtr, Ordering};
use vfs::engine::{Engine, Target as NodeTarget};
use vfs::vfs::{AccessIds, Owner, RangeKind, TimeToSet};
use vfs::{Base, File, Restriction, Scope};

/// Bytes of directory records read at once.
const RECORDS_BYTES: usize = 16 << 10;

impl Tree {
    /// The handle of a file that was opened by this path and with these flags.
    fn described(&self, file: vfs::File, path: Vec<u8>, flags: i32, slot: slots::FileSlot) -> Handle {
        let inode = file.inode();
        let file = file.shared(Box::new(slot), slot.owner());
        let current = AtomicPtr::new(Box::into_raw(Box::new(Current { era: self.era(), file })));
        let credentials = self.credentials.load(Ordering::Relaxed);
        handle_of(Open { current, path, inode, flags, credentials, slot, twin: Twin::default() })
    }
}

impl Mount for Tree {
    fn open(&self, place: MountPath<'_>, flags: i32, mode: u32, resolve: u64) -> Result<Handle> {
        let base = place.dir.as_ref().map_or(&b""[..], |dir| &open_of(dir).path);
        let path = joined(base, place.path);
        let client = self.client_that_creates()?;
        // The slot comes first: without one, the file is neither opened nor created.
        let state = slots::FileSlot::take()?;
        let restriction = Restriction {
            scope: match resolve & (libc::RESOLVE_BENEATH | libc::RESOLVE_IN_ROOT) {
                0 => Scope::Anywhere,
                libc::RESOLVE_BENEATH => Scope::Beneath,
                _ => Scope::InRoot,
            },
            no_links: resolve & libc::RESOLVE_NO_SYMLINKS != 0,
        };
        let opened = self
            .place(&place)
            .and_then(|place| client.open_within(place, flags, mode, restriction).map_err(stop_of));
        let file = opened.inspect_err(|_| state.give_back())?;
        Ok(self.described(file, path, flags, state))
    }

    fn reopen(&self, file: Handle, flags: i32, mode: u32) -> Result<Handle> {
        let client = self.client_that_creates()?;
        let state = slots::FileSlot::take()?;
        let opened = self.file(&file).and_then(|file| client.reopen(file, flags, mode).map_err(stop_of));
        let opened = opened.inspect_err(|_| state.give_back())?;
        Ok(self.described(opened, open_of(&file).path.clone(), flags, state))
    }

    fn close(&self, file: Handle) {
        // SAFETY: the last use of the handle; it came from `handle_of`.
        let open = unsafe { Box::from_raw(file.0 as *mut Open) };
        let current = open.current.load(Ordering::Acquire);
        // SAFETY: as above. A file of another era belongs to a parent, and its memory is left alone.
        if let Some(current) = unsafe { current.as_ref() }
            && current.era == self.era()
        {
            if let Ok(vfs) = self.client() {
                if local().acts_for_child() {
                    locks::end_childs_locks(vfs, open.inode);
                    vfs.end_description(&current.file);
                } else {
                    vfs.close(&current.file, true);
                }
            }
            // SAFETY: no other reference is left.
            drop(unsafe { Box::from_raw(open.current.load(Ordering::Acquire)) });
        } else if self.attached.load(Ordering::Acquire).is_null() {
            self.report_closed(&open);
        }
        open.twin.end();
        open.slot.give_back();
    }

    fn descriptor_closed(&self, file: Handle) {
        if local().acts_for_child() {
            if let Ok(vfs) = self.client() {
                locks::end_childs_locks(vfs, open_of(&file).inode);
            }
            return;
        }
        if !self.ranges.may_hold() || !self.may_have_locked(open_of(&file)) {
            return;
        }
        // If the file cannot be opened anew, it has no locks.
        if let (Ok(vfs), Ok(file)) = (self.client(), self.file(&file)) {
            vfs.close(file, false);
        }
    }

    fn read(&self, file: Handle, at: Option<u64>, into: &mut [IoSliceMut<'_>]) -> Result<usize> {
        if let Some(done) = self.by_twin(&file, |fd| self.read_twin(&file, fd, at, into)) {
            return done;
        }
        let (vfs, file) = (self.client()?, self.file(&file)?);
        match at {
            None => vfs.read(file, into),
            Some(offset) => vfs.pread(file, offset as i64, into, 0),
        }
        .map_err(errno_of)
    }

    fn write(&self, file: Handle, at: Option<u64>, from: &[IoSlice<'_>], flags: i32) -> Result<usize> {
        if let Some(done) = self.by_twin(&file, |fd| self.write_twin(&file, fd, at, from, flags)) {
            return done;
        }
        let (vfs, file) = (self.client()?, self.file(&file)?);
        match at {
            None => vfs.write_with(file, from, flags),
            Some(offset) => vfs.pwrite(file, offset as i64, from, flags),
        }
        .map_err(errno_of)
    }

    fn copy(&self, from: (Handle, Option<i64>), to: (Handle, Option<i64>), bytes: usize) -> Result<usize> {
        if self.through_mount(&from.0).or_else(|| self.through_mount(&to.0)).is_some() {
            return self.copy_by_pieces(from, to, bytes);
        }
        let (source, target) = ((self.file(&from.0)?, from.1), (self.file(&to.0)?, to.1));
        self.client()?.copy(source, target, bytes).map_err(errno_of)
    }

    fn seek(&self, file: Handle, offset: i64, whence: i32) -> Result<u64> {
        let by_contents = !matches!(whence, libc::SEEK_SET | libc::SEEK_CUR);
        let seek = |fd| seek_twin(&open_of(&file).slot, fd, offset, whence);
        if by_contents && let Some(done) = self.by_twin(&file, seek) {
            return done;
        }
        self.client()?.lseek(self.file(&file)?, offset, whence).map_err(errno_of)
    }

    fn list(&self, file: Handle, sink: &mut dyn FnMut(&Entry<'_>) -> bool) -> Result<()> {
        let (vfs, file) = (self.client()?, self.file(&file)?);
        let mut buffer = vec![0u8; RECORDS_BYTES];
        loop {
            let mut position = vfs.lseek(file, 0, libc::SEEK_CUR).map_err(errno_of)?;
            let bytes = vfs.getdents(file, &mut buffer).map_err(errno_of)?;
            if bytes == 0 {
                return Ok(());
            }
            let mut rest = &buffer[..bytes];
            while !rest.is_empty() {
                let word = |at: usize| u64::from_ne_bytes(rest[at..at + 8].try_into().expect("eight bytes"));
                let length = usize::from(u16::from_ne_bytes([rest[16], rest[17]]));
                let name = rest[19..length].split(|byte| *byte == 0).next().unwrap_or_default();
                if !sink(&Entry { inode: word(0), next: word(8), kind: rest[18], name }) {
                    return vfs.lseek(file, position as i64, libc::SEEK_SET).map(|_| ()).map_err(errno_of);
                }
                position = word(8);
                rest = &rest[length..];
            }
        }
    }

    fn sync(&self, file: Handle, data_only: bool) -> Result<()> {
        let call = if data_only { libc::SYS_fdatasync } else { libc::SYS_fsync };
        let by_twin = self.by_twin(&file, |fd| on_twin(call, fd, &[])).transpose()?.is_some();
        let (vfs, file) = (self.client()?, self.file(&file)?);
        if by_twin {
            return vfs.sync_own_beside(file).map_err(errno_of);
        }
        if data_only { vfs.fdatasync(file) } else { vfs.fsync(file) }.map_err(errno_of)
    }

    fn sync_range(&self, file: Handle, offset: i64, bytes: i64, flags: u32) -> Result<()> {
        let arguments = [offset as u64, bytes as u64, flags.into()];
        self.by_twin(&file, |fd| on_twin(libc::SYS_sync_file_range, fd, &arguments)).transpose()?;
        self.client()?.sync_file_range(self.file(&file)?, offset, bytes, flags).map_err(errno_of)
    }

    fn sync_calls(&self) -> Result<()> {
        self.client()?.sync_process().map_err(errno_of)
    }

    fn sync_all(&self, untold: bool) -> Result<()> {
        let vfs = self.client()?;
        if untold { vfs.sync_untold() } else { vfs.sync() }.map_err(errno_of)
    }

    fn allocate(&self, file: Handle, mode: i32, offset: i64, bytes: i64) -> Result<()> {
        let arguments = [mode as u64, offset as u64, bytes as u64];
        if let Some(done) = self.by_twin(&file, |fd| on_twin(libc::SYS_fallocate, fd, &arguments)) {
            return done.map(|_| ());
        }
        self.client()?.fallocate(self.file(&file)?, mode, offset, bytes).map_err(errno_of)
    }

    fn lock(&self, file: Handle, lock: Lock<'_>) -> Result<()> {
        let (vfs, file) = (self.client()?, self.file(&file)?);
        let operation = match lock {
            Lock::Range(command, range) => {
                let process = match locks::childs_owner() {
                    Some(child) => RangeKind::Other(child),
                    None => RangeKind::Process,
                };
                if process == RangeKind::Process {
                    self.ranges.note(command);
                }
                return locks::range_lock(vfs, file, process, command, range);
            }
            Lock::Whole(operation) => operation,
        };
        locks::whole_lock(vfs, file, operation)
    }

    fn flags(&self, file: Handle) -> i32 {
        self.file(&file).map_or(0, File::flags)
    }

    fn set_flags(&self, file: Handle, flags: i32) -> Result<()> {
        self.client()?.set_flags(self.file(&file)?, flags).map_err(errno_of)
    }

    fn attributes(&self, target: Target<'_>) -> Result<libc::statx> {
        if let Target::Open(file) = target
            && let Some(done) = self.by_twin(&file, status_of_twin)
        {
            return done;
        }
        self.on(target, |vfs, subject| vfs.stat(subject)).map(|attributes| status_of(&attributes))
    }

    fn change(&self, target: Target<'_>, change: Change) -> Result<()> {
        if let (Target::Open(file), Change::Size(size)) = (target, change) {
            if let Some(done) = self.by_twin(&file, |fd| on_twin(libc::SYS_ftruncate, fd, &[size as u64])) {
                return done.map(|_| ());
            }
            return self.client()?.ftruncate(self.file(&file)?, size).map_err(errno_of);
        }
        let given = |id: u32| (id != u32::MAX).then_some(id);
        self.on(target, |vfs, subject| match change {
            Change::Mode(mode) => vfs.chmod(subject, mode),
            Change::Owner(uid, gid) => vfs.chown(subject, Owner { uid: given(uid), gid: given(gid) }),
            Change::Times(times) => {
                let times = times.map(|time| TimeToSet { seconds: time.tv_sec, nanoseconds: time.tv_nsec });
                vfs.utimens(subject, Some(times))
            }
            Change::Size(size) | Change::SizeByPath(size) => vfs.truncate(subject, size),
        })
    }

    fn access(&self, target: Target<'_>, mode: i32, flags: i32) -> Result<()> {
        let ids = if flags & libc::AT_EACCESS != 0 { AccessIds::Effective } else { AccessIds::Real };
        self.on(target, |vfs, subject| vfs.access(subject, mode, ids))
    }

    fn make(&self, place: MountPath<'_>, new: New<'_>) -> Result<()> {
        let (vfs, place) = (self.client_that_creates()?, self.place(&place)?);
        match new {
            New::Directory(mode) => vfs.mkdir(place, mode),
            New::Node(mode, device) => vfs.mknod(place, mode, device),
            New::Link(target) => vfs.symlink(target, place),
        }
        .map_err(stop_of)
    }

    fn is_opened_by_caller(&self, file: Handle) -> Result<bool> {
        // The client comes first: it notices a change of the user.
        let is_root = self.client()?.caller().is_root();
        let same = open_of(&file).credentials == self.credentials.load(Ordering::Relaxed);
        Ok(is_root || (same && local().borrowed().is_none()))
    }

    fn link(&self, from: Target<'_>, to: MountPath<'_>) -> Result<()> {
        let to = self.place(&to)?;
        self.on(from, |vfs, subject| vfs.link(subject, to))
    }

    fn remove(&self, place: MountPath<'_>, directory: bool) -> Result<()> {
        let (vfs, place) = (self.client()?, self.place(&place)?);
        if directory { vfs.rmdir(place) } else { vfs.unlink(place) }.map_err(stop_of)
    }

    fn rename(&self, from: MountPath<'_>, to: MountPath<'_>, flags: u32) -> Result<()> {
        let (from, to) = (self.place(&from)?, self.place(&to)?);
        self.client()?.rename(from, to, flags).map_err(stop_of)
    }

    fn readlink(&self, place: MountPath<'_>) -> Result<Vec<u8>> {
        let place = match &place.dir {
            Some(link) if place.path.is_empty() => vfs::Place { base: Base::At(self.file(link)?), path: b"" },
            _ => self.place(&place)?,
        };
        self.client()?.readlink(place).map_err(stop_of)
    }

    fn space(&self) -> Result<libc::statfs> {
        let space = self.client()?.engine().statfs().map_err(errno_of)?;
        Ok(space_of(&space))
    }

    fn xattr(&self, target: Target<'_>, name: &[u8]) -> Result<Vec<u8>> {
        self.on(target, |vfs, subject| vfs.get_xattr(subject, name))
    }

    fn set_xattr(&self, target: Target<'_>, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.on(target, |vfs, subject| vfs.set_xattr(subject, name, value, flags))
    }

    fn list_xattrs(&self, target: Target<'_>) -> Result<Vec<u8>> {
        self.on(target, |vfs, subject| vfs.list_xattrs(subject))
    }

    fn remove_xattr(&self, target: Target<'_>, name: &[u8]) -> Result<()> {
        self.on(target, |vfs, subject| vfs.remove_xattr(subject, name))
    }

    fn path(&self, file: Handle) -> Result<Vec<u8>> {
        let (vfs, found) = (self.client()?, self.file(&file)?);
        if found.file_type() == FileType::Directory {
            return path_of_directory(vfs, found.inode());
        }
        if vfs.engine().getattr(NodeTarget::Node(found.inode())).map_err(errno_of)?.links == 0 {
            return Err(Errno(libc::ENOENT));
        }
        Ok(open_of(&file).path.clone())
    }

    fn export(&self, file: Handle, passed: &mut PassedDescriptors) -> Result<Vec<u8>> {
        let open = open_of(&file);
        let (number, memfd) = open.slot.pass_on(passed)?;
        let mut token = Vec::with_capacity(TOKEN_NUMBERS + open.path.len());
        token.extend_from_slice(&number.to_le_bytes());
        token.extend_from_slice(&memfd.to_le_bytes());
        token.extend_from_slice(&open.flags.to_le_bytes());
        token.extend_from_slice(&open.inode.get().to_le_bytes());
        token.extend_from_slice(&open.path);
        Ok(token)
    }

    fn import(&self, token: &[u8]) -> Result<Handle> {
        let (numbers, path) = token.split_at_checked(TOKEN_NUMBERS).ok_or(Errno(libc::EINVAL))?;
        let word = |at: usize| i32::from_le_bytes(numbers[at..at + 4].try_into().expect("four bytes"));
        let slot = slots::FileSlot::adopt(word(0) as u32, word(4)).ok_or(Errno(libc::EINVAL))?;
        let inode = u64::from_le_bytes(numbers[12..].try_into().expect("eight bytes"));
        let (current, inode) = (AtomicPtr::default(), InodeNumber::new(inode));
        let (path, flags, twin) = (path.to_vec(), word(8), Twin::default());
        Ok(handle_of(Open { current, path, inode, flags, credentials: INHERITED, slot, twin }))
    }

    fn kernel_file(&self, file: Handle) -> Result<i32> {
        let fd = self.open_twin(&file)?;
        let offset = self.client()?.lseek(self.file(&file)?, 0, libc::SEEK_CUR).unwrap_or(0);
        on_twin(libc::SYS_lseek, fd, &[offset, libc::SEEK_SET as u64]).inspect_err(|_| raw::close(fd))?;
        Ok(fd)
    }

    fn file_to_map(&self, file: Handle) -> Result<i32> {
        self.open_twin(&file)
    }

    fn mapped_file(&self, file: Handle) -> Result<i32> {
        self.twin(&file)
    }

    fn is_mounted(&self) -> bool {
        self.mounted.as_ref().is_some_and(mounted::MountPoint::is_there)
    }

    fn before_root_change(&self) {
        if let Some(place) = &self.mounted {
            place.keep();
        }
    }

    fn kernel_path(&self) -> Option<&CStr> {
        self.mounted.as_ref().map(mounted::MountPoint::root)
    }

    fn log_costs(&self) -> (u64, u64) {
        let counters = self.client().ok().and_then(|vfs| vfs.engine().log_counters());
        counters.map_or((0, 0), |counters| (counters.fences, counters.bytes))
    }

    fn before_exec(&self, staying: &[Handle], closing: &[Handle]) -> ExecHandover {
        self.pass_on(staying, closing)
    }

    fn after_exec(&self, token: &[u8]) {
        self.take_from_previous_program(token);
    }

    fn after_import(&self) {
        self.end_locks_of_closed();
    }

    fn before_fork(&self) {
        self.give_to_child();
    }

    fn after_fork(&self, child: Option<u32>) {
        Self::release_child(child);
    }

    fn child_left(&self, locks: Option<ChildLocks>, has_connected: bool) {
        // Without a client there is nothing.
        let Ok(vfs) = self.client() else { return };
        if has_connected {
            // If that fails now, the next call tries it again.
            let _ = limits::with_room(|_| vfs.engine().go_on_after_child());
        }
        if let Some(locks) = locks {
            vfs.engine().release(locks::owner_of(locks), None);
        }
    }

    fn user_changed(&self) {
        slots::note_user();
        self.note_user();
    }

    fn after_fork_child(&self) {
        slots::note_child();
        regions::note_child();
        self.attaching.store(0, Ordering::Relaxed);
        self.take_as_child();
        // The client, locks and mappings belong to the parent: the child forgets them, and does not end them.
        self.client.store(std::ptr::null_mut(), Ordering::Release);
        self.attached.store(std::ptr::null_mut(), Ordering::Release);
        self.era.fetch_add(1, Ordering::Relaxed);
        self.credentials.fetch_add(1, Ordering::Relaxed);
        descriptors::close_all_of_client();
    }
}
