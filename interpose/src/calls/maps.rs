//! Mappings of files. Shared mappings use the node's mount, as the library cannot see stores to memory. Without the
//! mount, the library can only map a copy of the file's current contents.

use super::data::mount;
use crate::dispatch::{Answer, Call, Refusal};
use crate::mount::{Errno, Handle, Target};
use crate::{raw, regions, tell};
use std::io::IoSliceMut;

const PAGE: u64 = 4096;
/// More than the address space of a program.
const BYTES_MAX: u64 = 1 << 56;
/// Flags that `MAP_SHARED_VALIDATE` accepts: the flags that are older than it.
const VALID_FLAGS: i32 = libc::MAP_TYPE
    | libc::MAP_FIXED
    | libc::MAP_ANONYMOUS
    | libc::MAP_GROWSDOWN
    | libc::MAP_DENYWRITE
    | libc::MAP_EXECUTABLE
    | libc::MAP_LOCKED
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_NONBLOCK
    | libc::MAP_STACK
    | libc::MAP_HUGETLB
    | libc::MAP_FIXED_NOREPLACE
    | MAP_UNINITIALIZED
    | MAP_32BIT
    | MAP_HUGE_MASK;
/// Bits that `mmap` ignores and `mprotect` refuses for such memory.
const IGNORED_PROTECTIONS: u64 = (libc::PROT_GROWSDOWN | libc::PROT_GROWSUP) as u64;
const MAP_UNINITIALIZED: i32 = 0x400_0000;
const MAP_32BIT: i32 = 0x40;
#[allow(clippy::cast_possible_wrap, reason = "bits")]
const MAP_HUGE_MASK: i32 = (0x3f_u32 << 26) as i32;

/// A checked request for a mapping, and the file's inode.
struct Request {
    shared: bool,
    /// A mapping of this file may write to it, now or after a change of protection.
    may_change: bool,
    inode: u64,
}

/// Checks whether Linux would serve the request, in the order of its checks.
fn check(call: &Call, file: Handle) -> Result<Request, Errno> {
    let [_, length, protection, flags, _, offset] = call.arguments;
    let flags = flags as u32 as i32;
    let access = mount().flags(file) & libc::O_ACCMODE;
    if length == 0 {
        return Err(Errno(libc::EINVAL));
    }
    let length = length.checked_next_multiple_of(PAGE).ok_or(Errno(libc::ENOMEM))?;
    if offset.checked_add(length).is_none() {
        return Err(Errno(libc::EOVERFLOW));
    }
    if length > BYTES_MAX {
        return Err(Errno(libc::ENOMEM));
    }
    let status = mount().attributes(Target::Open(file))?;
    let is_regular = u32::from(status.stx_mode) & libc::S_IFMT == libc::S_IFREG;
    if is_regular && offset > i64::MAX.cast_unsigned().saturating_sub(length) {
        return Err(Errno(libc::EOVERFLOW));
    }
    let shared = match flags & libc::MAP_TYPE {
        libc::MAP_SHARED => true,
        libc::MAP_SHARED_VALIDATE if flags & !VALID_FLAGS != 0 => return Err(Errno(libc::EOPNOTSUPP)),
        libc::MAP_SHARED_VALIDATE => true,
        libc::MAP_PRIVATE => false,
        _ => return Err(Errno(libc::EINVAL)),
    };
    let writes = protection as i32 & libc::PROT_WRITE != 0;
    if access == libc::O_WRONLY || shared && writes && access == libc::O_RDONLY {
        return Err(Errno(libc::EACCES));
    }
    if !is_regular {
        return Err(Errno(libc::ENODEV));
    }
    if flags & libc::MAP_GROWSDOWN != 0 {
        return Err(Errno(libc::EINVAL));
    }
    Ok(Request { shared, may_change: access != libc::O_RDONLY, inode: status.stx_ino })
}

/// `mmap`: a shared mapping uses the node's mount; from then on the process uses the file there ([`regions`]). A
/// private mapping is a copy of the file's current contents. Without a mount, so is a shared mapping of a file that is
/// open for reading only; any other shared mapping is refused then, as by a file system that cannot map.
pub fn mmap(call: &Call) -> Answer {
    let flags = call.arguments[3] as u32 as i32;
    if flags & libc::MAP_ANONYMOUS != 0 {
        return Err(Refusal::Pass);
    }
    if !call.arguments[5].is_multiple_of(PAGE) {
        return Err(Errno(libc::EINVAL).into());
    }
    let file = call.open_file(4)?;
    if flags & libc::MAP_FIXED != 0 && call.arguments[0] == 0 {
        // The library cannot fill memory at the null address.
        return Err(Errno(libc::EPERM).into());
    }
    if flags & libc::MAP_HUGETLB != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    let request = check(call, file.handle())?;
    if !request.shared {
        return copy(call, file.handle());
    }
    // Opened again for each mapping, so that the kernel has no size and no page of the file from before changes of the
    // library.
    match mount().file_to_map(file.handle()) {
        Ok(fd) => {
            let shared = share(call, fd, request.inode);
            raw::close(fd);
            shared
        }
        Err(Errno::UNMOUNTED) if !request.may_change => copy(call, file.handle()),
        Err(Errno::UNMOUNTED) => {
            tell::needs_mount("a file that is open for writing cannot be mapped shared");
            Err(Errno(libc::ENODEV).into())
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Maps a descriptor of the file on the mount.
fn share(call: &Call, fd: i32, inode: u64) -> Answer {
    let [address, length, protection, flags, _, offset] = call.arguments;
    let arguments = [address, length, protection, flags, raw::number(fd), offset];
    // SAFETY: the program's own mapping request, with the kernel's descriptor of the same file.
    let mapped = unsafe { raw::try_call(libc::SYS_mmap, &arguments) };
    if mapped == Err(Errno(libc::ENODEV)) {
        tell::refused("this kernel cannot map files of a mount shared: it needs Linux 6.6");
    }
    let start = mapped?;
    regions::add(start, length, inode);
    if protection & libc::PROT_EXEC as u64 != 0 {
        // The file's code is not patched.
        crate::fork::note_unseen();
    }
    Ok(start)
}

/// `msync`, while a file of the tree is mapped: as after `fsync`, all earlier calls of the process are durable.
pub fn msync(call: &Call) -> Answer {
    let [start, length, flags, ..] = call.arguments;
    // SAFETY: the program's own call.
    let done = unsafe { raw::try_call(libc::SYS_msync, &[start, length, flags]) }?;
    if flags as i32 & libc::MS_SYNC != 0 && regions::overlaps(start, length) {
        mount().sync_calls()?;
    }
    Ok(done)
}

/// `munmap`, while a file of the tree is mapped.
pub fn munmap(call: &Call) -> Answer {
    let [start, length, ..] = call.arguments;
    // SAFETY: the program's own call.
    let done = unsafe { raw::try_call(libc::SYS_munmap, &[start, length]) }?;
    regions::remove(start, length);
    Ok(done)
}

/// `mremap`, while a file of the tree is mapped.
pub fn mremap(call: &Call) -> Answer {
    let [from, from_length, to_length, flags, ..] = call.arguments;
    // SAFETY: the program's own call.
    let to = raw::outcome(unsafe { raw::call(call.number as u64, &call.arguments) })?;
    let stays = from_length == 0 || flags & libc::MREMAP_DONTUNMAP as u64 != 0;
    regions::moved((from, from_length), (to, to_length), stays);
    Ok(to)
}

/// Fills anonymous memory with the file's current contents.
fn copy(call: &Call, file: Handle) -> Answer {
    let [address, length, protection, flags, _, offset] = call.arguments;
    let flags = flags as u32 as i32;
    let writable = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let kept = flags & !(libc::MAP_TYPE | libc::MAP_POPULATE | libc::MAP_SYNC);
    let flags = (kept | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    // SAFETY: the program's own mapping request, for anonymous memory instead of the file.
    let start = unsafe { raw::try_call(libc::SYS_mmap, &[address, length, writable, flags, u64::MAX, 0]) }?;
    let filled = fill(file, start, length, offset).and_then(|()| {
        // SAFETY: the mapping was made just now; the program asked for this protection.
        unsafe { raw::try_call(libc::SYS_mprotect, &[start, length, protection & !IGNORED_PROTECTIONS]) }
    });
    if let Err(errno) = filled {
        // SAFETY: the mapping was made just now, and no other code knows it.
        let _ = unsafe { raw::try_call(libc::SYS_munmap, &[start, length]) };
        return Err(errno.into());
    }
    if regions::any() {
        regions::remove(start, length);
    }
    #[cfg(target_arch = "x86_64")]
    if protection & libc::PROT_EXEC as u64 != 0
        && crate::patch::calls_come_with(start, length, protection, true)
    {
        crate::fork::note_unseen();
    }
    Ok(start)
}

/// Reads a file into fresh memory until it ends.
fn fill(file: Handle, start: u64, length: u64, offset: u64) -> Result<(), Errno> {
    let length = usize::try_from(length).map_err(|_| Errno(libc::ENOMEM))?;
    // SAFETY: mapped readable and writable just now, for at least this length, and not yet known to other code.
    let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, length) };
    let mut done = 0;
    while done < length {
        let mut slices = [IoSliceMut::new(&mut memory[done..])];
        match mount().read(file, Some(offset + done as u64), &mut slices)? {
            0 => break,
            bytes => done += bytes,
        }
    }
    Ok(())
}
