//! exec: the library is also preloaded into the next program, which takes over the descriptors that are ours.
//!
//! The library writes a record of the placeholders and their descriptions into a memfd, and puts the number of the
//! memfd into the environment. The library in the next program reads the record and removes both. It also restores
//! `LD_PRELOAD` and the settings (`HEARTH_*`) of this process if the program has removed them from the environment
//! (also `env -i`): without them the next program would find placeholders where it expects files. A setuid program
//! ignores them, as the dynamic linker does.
//!
//! A program file in the mount is copied into a memfd and executed from there; a script is executed by its interpreter.
//! A program that cannot be preloaded (statically linked) gets real descriptors, if the node's tree is also mounted in
//! the kernel; otherwise it keeps the placeholders, and gets EBADF.
//!
//! The system call itself runs outside: a signal either runs its handler before it, or stays pending for the next
//! program. If such a handler changes descriptors at the last moment, the record does not contain the change.

use crate::calls::data::mount;
use crate::descriptors::{self, DescriptionRef};
use crate::dispatch::{Answer, Call, Refusal};
use crate::limits;
use crate::local::local;
use crate::memory;
use crate::mount::{Errno, Handle, MountPath, PassedDescriptors, Target};
use crate::paths::{self, ResolvedPath};
use crate::raw;
use crate::signals;
use crate::table::{self, PathArgument};
use record::ExecRecord;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicPtr, Ordering};

mod record;

const STRINGS_MAX: usize = 1 << 20;
const STRING_BYTES_MAX: usize = 128 << 10;
const INTERPRETERS_MAX: usize = 4;
const INHERIT: &[u8] = b"HEARTH_INHERIT=";
const PRELOAD: &[u8] = b"LD_PRELOAD=";
const MEMFD: &CStr = c"hearth-inherit";

/// The part of the environment that the next program needs: the settings as `NAME=value`, and the path of the library.
struct KeptSettings {
    settings: Vec<CString>,
    library: Vec<u8>,
}

static KEPT_SETTINGS: AtomicPtr<KeptSettings> = AtomicPtr::new(std::ptr::null_mut());

/// Memory of an exec, which has to live until the program is replaced.
#[derive(Default, Debug)]
pub struct Image {
    path: CString,
    dir: i32,
    flags: u64,
    strings: Vec<CString>,
    arguments: Vec<u64>,
    environment: Vec<u64>,
    record: Option<i32>,
    program: Option<i32>,
    /// A descriptor that the mount passes on.
    handover: Option<i32>,
    /// Descriptors that the files need in the next program.
    passed: PassedDescriptors,
}

/// Serves `execve` and `execveat`.
///
/// # Errors
/// Those of the kernel. After a success the call does not return.
pub fn exec(dir: i32, path: u64, arguments: u64, environment: u64, flags: u64) -> Answer {
    let kept = kept_settings().ok_or(Refusal::Pass)?;
    let mut image = Image { dir, flags, ..Image::default() };
    image.arguments = pointers(arguments)?;
    let named = Call { number: 322, arguments: [raw::number(dir), path, 0, 0, 0, 0] };
    image.find(&named, flags)?;
    image.environment = pointers(environment)?;
    image.set_environment(kept)?;
    let real = match limits::with_room(|_| image.hand_over()) {
        Ok(real) => real,
        Err(errno) => {
            image.left_over().for_each(raw::close);
            return Err(errno.into());
        }
    };
    signals::before_exec();
    let errno = image.go();
    signals::after_failed_exec();
    real.into_iter().for_each(descriptors::replace);
    Err(errno.into())
}

/// The path in the mount to which a program's path leads, if the kernel does not find it.
fn path_into_mount(call: &Call, argument: PathArgument) -> Option<CString> {
    let [dir, path, ..] = call.arguments;
    // SAFETY: the kernel checks the path, and reports an error if it cannot be read.
    let found = unsafe { raw::try_call(libc::SYS_faccessat, &[dir, path, libc::F_OK as u64]) };
    if !matches!(found, Err(Errno(libc::ENOENT | libc::ENOTDIR))) {
        return None;
    }
    paths::path_into_mount(crate::start::site()?, call, argument)
}

/// The pointers of a NULL-terminated array.
fn pointers(address: u64) -> Result<Vec<u64>, Errno> {
    let mut pointers = Vec::new();
    if address == 0 {
        return Ok(pointers);
    }
    loop {
        match memory::read_value::<u64>(address + 8 * pointers.len() as u64)? {
            0 => return Ok(pointers),
            pointer => pointers.push(pointer),
        }
        if pointers.len() > STRINGS_MAX {
            return Err(Errno(libc::E2BIG));
        }
    }
}

fn string_at(pointer: u64) -> Result<Vec<u8>, Errno> {
    memory::read_string(pointer, STRING_BYTES_MAX)
        .map_err(|errno| if errno.0 == libc::ENAMETOOLONG { Errno(libc::E2BIG) } else { errno })
}

fn c_string(bytes: &[u8]) -> Result<CString, Errno> {
    CString::new(bytes).map_err(|_| Errno(libc::EINVAL))
}

impl Image {
    /// Keeps a string as long as the image lives; returns its address.
    fn own(&mut self, bytes: &[u8]) -> Result<u64, Errno> {
        self.strings.push(c_string(bytes)?);
        Ok(self.strings.last().map_or(0, |string| string.as_ptr() as u64))
    }

    /// Finds the program: the kernel's file of that name, or one in the mount.
    fn find(&mut self, call: &Call, flags: u64) -> Result<(), Refusal> {
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW as u64 == 0;
        let empty = flags & libc::AT_EMPTY_PATH as u64 != 0;
        let mut argument = PathArgument { follow, empty, ..table::at(0, 1) };
        let mut call = *call;
        for _ in 0..INTERPRETERS_MAX {
            let file = match if paths::concern(&call, argument) {
                paths::resolve(&call, argument)?
            } else {
                ResolvedPath::Kernel
            } {
                ResolvedPath::Kernel => {
                    if let Some(path) = path_into_mount(&call, argument) {
                        let path = self.own(path.as_bytes())?;
                        call.arguments = [raw::number(libc::AT_FDCWD), path, 0, 0, 0, 0];
                        argument.empty = false;
                        continue;
                    }
                    self.path = c_string(&string_at(call.arguments[1])?)?;
                    return Ok(());
                }
                ResolvedPath::Open(held) => paths::path_of(&held)?,
                ResolvedPath::Mount(..) => match absolute_name(&call, argument) {
                    Err(Refusal::OtherPaths(redirected)) => {
                        // A link in the mount leads to a program outside of it.
                        self.dir = libc::AT_FDCWD;
                        self.path = redirected.into_iter().next().map(|(_, path)| path).unwrap_or_default();
                        return Ok(());
                    }
                    other => other?,
                },
            };
            let Some(interpreter) = self.load(&file)? else { return Ok(()) };
            let path = self.own(&interpreter)?;
            self.dir = libc::AT_FDCWD;
            self.flags = 0;
            argument = table::at(0, 1);
            call.arguments = [raw::number(libc::AT_FDCWD), path, 0, 0, 0, 0];
        }
        Err(Errno(libc::ELOOP).into())
    }

    /// Prepares a program file of the mount for execution. For a script, changes the arguments and returns the
    /// interpreter.
    fn load(&mut self, file: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        let site = crate::start::site().ok_or(Errno(libc::EIO))?;
        let rest = file.strip_prefix(site.prefix.as_slice()).ok_or(Errno(libc::ENOENT))?;
        let place = MountPath { dir: None, path: rest.strip_prefix(b"/").unwrap_or(rest) };
        mount().access(Target::Named(place, true), libc::X_OK, libc::AT_EACCESS)?;
        let held = DescriptionRef::new(mount().open(place, libc::O_RDONLY | libc::O_CLOEXEC, 0, 0)?)?;
        let status = mount().attributes(Target::Open(held.handle()))?;
        if u32::from(status.stx_mode) & libc::S_IFMT != libc::S_IFREG {
            return Err(Errno(libc::EACCES));
        }
        let mut head = [0; 256];
        let bytes = mount().read(held.handle(), Some(0), &mut [IoSliceMut::new(&mut head)])?;
        if let Some(line) = head[..bytes].strip_prefix(b"#!") {
            return self.script(line, file).map(Some);
        }
        self.program = Some(copy_to_memfd(held.handle())?);
        self.dir = self.program.unwrap_or(-1);
        self.path = CString::default();
        self.flags = libc::AT_EMPTY_PATH as u64;
        Ok(None)
    }

    /// The interpreter of a script, from its first line after `#!`.
    fn script(&mut self, line: &[u8], file: &[u8]) -> Result<Vec<u8>, Errno> {
        let end = line.iter().position(|byte| *byte == b'\n').ok_or(Errno(libc::ENOEXEC))?;
        let line = line[..end].trim_ascii();
        let cut = line.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(line.len());
        let (interpreter, argument) = (line[..cut].to_vec(), line[cut..].trim_ascii().to_vec());
        if interpreter.is_empty() {
            return Err(Errno(libc::ENOEXEC));
        }
        let mut arguments = vec![self.own(&interpreter)?];
        if !argument.is_empty() {
            arguments.push(self.own(&argument)?);
        }
        arguments.push(self.own(file)?);
        arguments.extend(self.arguments.iter().skip(1));
        self.arguments = arguments;
        Ok(interpreter)
    }

    /// Completes the program's environment with everything that the next program needs.
    fn set_environment(&mut self, kept: &KeptSettings) -> Result<(), Errno> {
        let mut environment = Vec::with_capacity(self.environment.len() + kept.settings.len() + 3);
        let mut names = Vec::new();
        let mut preloaded = false;
        for pointer in std::mem::take(&mut self.environment) {
            let mut head = [0; 16];
            let known = memory::read_bytes(pointer, &mut head).is_err()
                || head.starts_with(b"HEARTH_")
                || head.starts_with(PRELOAD);
            if !known {
                environment.push(pointer);
                continue;
            }
            let text = string_at(pointer)?;
            if text.starts_with(INHERIT) {
                continue;
            }
            if let Some(list) = text.strip_prefix(PRELOAD) {
                preloaded = true;
                if !list.split(|byte| matches!(byte, b':' | b' ')).any(|one| one == kept.library) {
                    environment.push(self.own(&[PRELOAD, &kept.library, b":", list].concat())?);
                    continue;
                }
            }
            environment.push(pointer);
            names.push(text.split(|byte| *byte == b'=').next().unwrap_or_default().to_vec());
        }
        for setting in &kept.settings {
            let bytes = setting.as_bytes();
            let name = bytes.split(|byte| *byte == b'=').next().unwrap_or_default();
            if !names.iter().any(|known| known == name) {
                environment.push(setting.as_ptr() as u64);
            }
        }
        if !preloaded && !kept.library.is_empty() {
            environment.push(self.own(&[PRELOAD, &kept.library].concat())?);
        }
        self.environment = environment;
        Ok(())
    }

    /// Writes the record of the descriptors that stay open. For a program that cannot be preloaded, makes them real
    /// descriptors instead, and returns their numbers.
    fn hand_over(&mut self) -> Result<Vec<i32>, Errno> {
        let stays = |fd: &i32| {
            raw::fcntl(*fd, libc::F_GETFD, 0).is_ok_and(|flags| flags & libc::FD_CLOEXEC as u64 == 0)
        };
        let (mut inherited, mut closing) = (Vec::new(), Vec::new());
        for fd in descriptors::ours() {
            let held = descriptors::get(fd)?;
            if stays(&fd) { inherited.push((fd, held)) } else { closing.push(held) }
        }
        let preloaded = !self.cannot_be_preloaded();
        let numbers = inherited.len();
        if let Some(held) = paths::cwd() {
            inherited.push((descriptors::CWD, held));
        }
        if inherited.is_empty() {
            return Ok(Vec::new());
        }
        let handover = self.pass_on(&inherited, &closing)?;
        if !preloaded {
            return Ok(inherited[..numbers].iter().filter_map(|(fd, held)| make_real(*fd, held)).collect());
        }
        // All numbers of one description share its token.
        let mut files: Vec<(&DescriptionRef, Vec<i32>)> = Vec::new();
        let mut indices = BTreeMap::new();
        for (fd, held) in &inherited {
            let index = *indices.entry(held.handle().0).or_insert(files.len());
            if index == files.len() {
                files.push((held, Vec::new()));
            }
            files[index].1.push(*fd);
        }
        let mut exported = Vec::with_capacity(files.len());
        for (held, numbers) in files {
            exported.push((numbers, mount().export(held.handle(), &mut self.passed)?));
        }
        let passed = self.passed.numbers().collect();
        let record = ExecRecord { handover, passed, files: exported }.encode(raw::process());
        let fd = memfd(MEMFD, 0)?;
        let high = descriptors::move_up(fd, false);
        raw::close(fd);
        let fd = high?;
        self.record = Some(fd);
        let mut written = 0;
        while written < record.len() {
            written += raw::write(fd, &record[written..])?;
        }
        let variable = self.own(&[INHERIT, fd.to_string().as_bytes()].concat())?;
        self.environment.push(variable);
        Ok(Vec::new())
    }

    /// Hands over the state that the mount keeps beside its files. If the exec cannot succeed, hands over nothing.
    fn pass_on(
        &mut self,
        inherited: &[(i32, DescriptionRef)],
        closing: &[DescriptionRef],
    ) -> Result<Vec<u8>, Errno> {
        if self.program.is_none() {
            const AT_EACCESS: u64 = libc::AT_EACCESS as u64;
            let follow = self.flags & libc::AT_SYMLINK_NOFOLLOW as u64;
            let empty = self.flags & libc::AT_EMPTY_PATH as u64;
            let arguments = [
                raw::number(self.dir),
                self.path.as_ptr() as u64,
                libc::X_OK as u64,
                AT_EACCESS | follow | empty,
            ];
            // SAFETY: the path lives across the call.
            let may = unsafe { raw::try_call(libc::SYS_faccessat2, &arguments) };
            // Kernels before 5.8 and some sandboxes do not have this call; in that case only the exec itself shows the
            // error.
            if let Err(Errno(errno @ (libc::ENOENT | libc::ENOTDIR | libc::EACCES | libc::ELOOP))) = may {
                return Err(Errno(errno));
            }
        }
        let mut staying: Vec<Handle> = inherited.iter().map(|(_, held)| held.handle()).collect();
        staying.sort_unstable_by_key(|handle| handle.0);
        staying.dedup();
        let mut closing: Vec<Handle> = closing.iter().map(DescriptionRef::handle).collect();
        closing.sort_unstable_by_key(|handle| handle.0);
        closing.dedup();
        let handover = mount().before_exec(&staying, &closing);
        self.handover = handover.descriptor;
        Ok(handover.token)
    }

    /// True for an ELF program without an interpreter, and for a program that runs as another user: in both, the
    /// dynamic linker preloads no library, so they would find placeholders.
    fn cannot_be_preloaded(&self) -> bool {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let opened = match self.program {
            Some(program) => raw::fcntl(program, libc::F_DUPFD_CLOEXEC, 3).map(|fd| fd as i32),
            None => raw::open_at(self.dir, &self.path, flags, 0),
        };
        let Ok(fd) = opened else { return false };
        let mut bytes = [0; 4096];
        let got = raw::read_at(fd, &mut bytes, 0).unwrap_or(0);
        let changes = crate::identity::is_changed_by(fd);
        raw::close(fd);
        changes || is_static(&bytes[..got])
    }

    /// Descriptors to be closed if the exec fails.
    fn left_over(&self) -> impl Iterator<Item = i32> + use<> {
        let passed: Vec<i32> = self.passed.numbers().collect();
        [self.record, self.program, self.handover].into_iter().flatten().chain(passed)
    }

    /// Executes the program; returns only an error.
    fn go(mut self) -> Errno {
        self.arguments.push(0);
        self.environment.push(0);
        let arguments = [
            raw::number(self.dir),
            self.path.as_ptr() as u64,
            self.arguments.as_ptr() as u64,
            self.environment.as_ptr() as u64,
            self.flags,
        ];
        let left_over = self.left_over();
        let local = local();
        if let Some(overlay) = local.borrowed() {
            // This memory belongs to the parent, which frees it when it continues.
            // SAFETY: only this child uses the overlay until then.
            unsafe { (*overlay).exec = Some(self) };
        }
        let result = local.outside(|| {
            // The next program inherits the mask and the pending signals, so a signal that has arrived is delivered in
            // this one.
            signals::deliver(local);
            // SAFETY: arrays and strings live in `self`, or in the overlay, across the call; the kernel checks the
            // program's own pointers in them.
            unsafe { raw::try_call(libc::SYS_execveat, &arguments) }
        });
        let errno = result.err().unwrap_or(Errno(libc::EIO));
        left_over.for_each(raw::close);
        errno
    }
}

/// True if the bytes are the start of an ELF program without an interpreter.
fn is_static(bytes: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let half = |at: usize| bytes.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let (Some(size), Some(count)) = (half(54), half(56)) else { return false };
    let start = bytes.get(32..40).map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
    let Ok(start) = usize::try_from(start) else { return false };
    let kind = |index: usize| {
        let at = start.checked_add(index * usize::from(size))?;
        bytes.get(at..at.checked_add(4)?).map(|b| u32::from_le_bytes(b.try_into().unwrap_or_default()))
    };
    !(0..usize::from(count)).any(|index| kind(index) == Some(PT_INTERP))
}

/// Replaces a placeholder by a descriptor of the file in the kernel; the number, if that was possible.
fn make_real(fd: i32, held: &DescriptionRef) -> Option<i32> {
    let real = mount().kernel_file(held.handle()).ok()?;
    // SAFETY: takes no memory; the number is one of ours.
    let done = unsafe { raw::try_call(libc::SYS_dup3, &[raw::number(real), raw::number(fd), 0]) };
    raw::close(real);
    done.ok().map(|_| fd)
}

fn memfd(name: &CStr, flags: u64) -> Result<i32, Errno> {
    // SAFETY: the name lives across the call.
    Ok(unsafe { raw::try_call(libc::SYS_memfd_create, &[name.as_ptr() as u64, flags]) }? as i32)
}

/// Copies a program's file into a memfd, which the kernel can execute.
fn copy_to_memfd(file: Handle) -> Result<i32, Errno> {
    let fd = limits::with_room(|_| memfd(c"hearth-program", libc::MFD_CLOEXEC as u64))?;
    let mut buffer = vec![0; 256 << 10];
    let mut offset = 0;
    loop {
        let bytes = mount().read(file, Some(offset), &mut [IoSliceMut::new(&mut buffer)]);
        let bytes = bytes.inspect_err(|_| raw::close(fd))?;
        if bytes == 0 {
            return Ok(fd);
        }
        let mut written = 0;
        while written < bytes {
            written += raw::write(fd, &buffer[written..bytes]).inspect_err(|_| raw::close(fd))?;
        }
        offset += bytes as u64;
    }
}

/// The absolute path, without links, of the file in the mount that a call names.
fn absolute_name(call: &Call, argument: PathArgument) -> Result<Vec<u8>, Refusal> {
    let found = std::cell::RefCell::new(Vec::new());
    paths::serve(call, argument, |target| {
        let crate::mount::Target::Named(place, _) = target else { return Err(Errno(libc::EACCES)) };
        let handle = mount().open(place, libc::O_PATH | libc::O_CLOEXEC, 0, 0)?;
        let held = DescriptionRef::new(handle).inspect_err(|_| mount().close(handle))?;
        found.replace(paths::path_of(&held)?);
        Ok(0)
    })?;
    Ok(found.into_inner())
}

fn kept_settings() -> Option<&'static KeptSettings> {
    // SAFETY: set once, to a leaked box; Acquire pairs with the Release of `inherit`.
    unsafe { KEPT_SETTINGS.load(Ordering::Acquire).as_ref() }
}

unsafe extern "C" {
    static mut environ: *mut *const libc::c_char;
}

/// In a constructor: stores everything that the next program will need, and takes over the descriptors of the previous
/// one.
pub fn inherit() {
    let mut settings = Vec::new();
    let mut handed = None;
    let mut keep = 0;
    // SAFETY: the process has one thread, and the array ends in NULL. An entry is removed by moving the later ones.
    unsafe {
        let mut at = 0;
        while !environ.is_null() && !(*environ.add(at)).is_null() {
            let entry = *environ.add(at);
            let text = CStr::from_ptr(entry);
            at += 1;
            if let Some(number) = text.to_bytes().strip_prefix(INHERIT) {
                handed = std::str::from_utf8(number).ok().and_then(|number| number.parse::<i32>().ok());
                continue;
            }
            if text.to_bytes().starts_with(b"HEARTH_") {
                settings.push(text.to_owned());
            }
            *environ.add(keep) = entry;
            keep += 1;
        }
        if !environ.is_null() {
            *environ.add(keep) = std::ptr::null();
        }
    }
    let kept = Box::into_raw(Box::new(KeptSettings { settings, library: own_path() }));
    KEPT_SETTINGS.store(kept, Ordering::Release);
    if let Some(fd) = handed {
        take_over(fd);
    }
}

/// The path of this library, as the dynamic linker knows it.
fn own_path() -> Vec<u8> {
    // SAFETY: dladdr fills the structure; the name it points to lives as long as the library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(inherit as *const libc::c_void, &raw mut info) == 0 || info.dli_fname.is_null() {
            return Vec::new();
        }
        CStr::from_ptr(info.dli_fname).to_bytes().to_vec()
    }
}

/// Reads the record, if the descriptor is a record for this process.
fn take_over(fd: i32) {
    let mut name = [0u8; 64];
    let Ok(link) = CString::new(format!("/proc/self/fd/{fd}")) else { return };
    let arguments =
        [raw::number(libc::AT_FDCWD), link.as_ptr() as u64, name.as_mut_ptr() as u64, name.len() as u64];
    // SAFETY: path and buffer are the library's own.
    let bytes = unsafe { raw::try_call(libc::SYS_readlinkat, &arguments) }.unwrap_or(0) as usize;
    if !name[..bytes].strip_prefix(b"/memfd:").is_some_and(|name| name.starts_with(MEMFD.to_bytes())) {
        return;
    }
    let mut record = Vec::new();
    loop {
        let start = record.len();
        record.resize(start + 4096, 0);
        let got = raw::read_at(fd, &mut record[start..], start as u64).unwrap_or(0);
        record.truncate(start + got);
        if got == 0 || record.len() > record::BYTES_MAX {
            break;
        }
    }
    raw::close(fd);
    let Some(record) = ExecRecord::decode(&record, raw::process()) else { return };
    mount().after_exec(&record.handover);
    for (numbers, token) in record.files {
        let Ok(held) = mount().import(&token).and_then(DescriptionRef::new) else { continue };
        for fd in numbers {
            let _ = descriptors::put(fd, held.clone());
        }
    }
    record.passed.into_iter().for_each(raw::close);
    mount().after_import();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_programs_are_recognized() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert!(!is_static(&own));
        let mut patched = own.clone();
        let (start, size) = (own[32] as usize, own[54] as usize);
        for index in 0..own[56] as usize {
            let at = start + index * size;
            if patched[at..at + 4] == [3, 0, 0, 0] {
                patched[at] = 6;
            }
        }
        assert!(is_static(&patched));
        assert!(!is_static(b"#!/bin/sh\n"));
    }
}
