//! A mount and the threads that serve it: each takes a message from the kernel, serves it, and sends the answer. They
//! end with the mount; the last one gives the kernel's resources back to the engine.

use crate::abi::{self, opcode};
use crate::buffers::{Buffers, Pool};
use crate::device::Device;
use crate::error::Error;
use crate::gateway::{self, Gateway};
use crate::guard::{Guarded, Guarding, KernelHas};
use crate::handshake::{self, Agreed};
use crate::notices::SendNotice;
use crate::options::Options;
use crate::reply::Reply;
use crate::turn::{self, sharing};
use format::InodeNumber;
use format::record::XATTR_BYTES_MAX;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use vfs::Engine;

/// Limit of the header and the fixed fields of a message.
const HEADER_BYTES_MAX: usize = 4096;
/// A longer read or write is not brief.
const BRIEF_BYTES_MAX: usize = 64 << 10;
/// Messages in a row that were taken while another one waited, after which threads serve concurrently. A few in a row
/// are common: the kernel does not wait for the answers to some messages, and sends the next request of the same
/// program. Handing the turn over takes longer than serving them.
const BACKLOG: u32 = 4;

/// A mount that is being served. Dropping this does not end it: it ends when it is unmounted, or with the process.
pub struct Mounted {
    shared: Arc<Shared>,
}

struct Shared {
    gateway: Arc<Gateway>,
    device: Arc<Device>,
    host: Arc<dyn Host>,
    buffers: Pool,
    /// Serving threads, plus one while they are being started.
    threads: Word,
    /// Not zero after the end of the mount.
    over: Word,
    failure: Lock<Option<Error>>,
    maps_shared: bool,
    threads_max: usize,
    /// Threads that take a message or wait for the turn.
    idle: Word,
    /// Messages in a row that were taken while another one waited.
    backlog: Word,
}

/// Mounts the engine's tree at a folder and serves it in its own threads.
///
/// The engine serves all users, and decides about each request for the [`vfs::Caller`] in the request, so it must be
/// allowed to act for them (`docs/decisions/0005-one-engine-for-a-mount.md`).
///
/// # Errors
/// All of [`Error`].
pub fn serve(
    engine: Arc<dyn Engine>,
    host: Arc<dyn Host>,
    mountpoint: &Path,
    options: &Options,
) -> Result<Mounted, Error> {
    serve_guarded(engine, host, mountpoint, options, None)
}

/// The same with a guard: if the kernel caches data, another process makes sure that it is dropped before the engine's
/// leases go to others, however this process ends.
///
/// # Errors
/// All of [`Error`].
pub fn serve_guarded(
    engine: Arc<dyn Engine>,
    host: Arc<dyn Host>,
    mountpoint: &Path,
    options: &Options,
    guarding: Option<Guarding>,
) -> Result<Mounted, Error> {
    let host = sharing(host);
    if options.kernel_checks
        && let Some(leases) = engine.cache_leases()
    {
        // An engine that may not hold leases reports that at the first hold, and then the kernel caches nothing.
        let _ = leases.begin();
    }
    let root = engine.root().map_err(|error| Error::Root(Some(error)))?;
    let give_back = || engine.forget(&[root.inode]);
    if root.inode != InodeNumber::ROOT {
        give_back();
        return Err(Error::Root(None));
    }
    let root_mode = root.file_type.mode_bits() | root.mode;
    let device = Device::mount(mountpoint, root_mode, options).inspect_err(|_| give_back())?;
    // All users who may search a directory can use its cached names, so the kernel has to check permissions.
    let may_cache = engine.cache_leases().is_some() && options.kernel_checks;
    let agreed = shake_hands(&device.file, options.message_bytes_max, may_cache).inspect_err(|_| {
        // Only the first error is reported.
        let _ = device.unmount(|| ());
        give_back();
    })?;
    let guarding = guarding.filter(|_| agreed.caches);
    let guarded = guarding.map(|guarding| begin_guarding(&host, &device, guarding));
    let guarded = guarded.transpose().inspect_err(|_| {
        let _ = device.unmount(|| ());
        give_back();
    })?;
    let device = Arc::new(device);
    let (later, unasked) = (device.clone(), device.clone());
    let send: gateway::Send = Box::new(move |answer: &[u8]| send(&later.file, answer));
    let notify: SendNotice = Box::new(move |notice: &[u8]| {
        let sent = (&unasked.file).write(notice);
        sent.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    });
    let ways = (send, notify);
    let gateway = Gateway::new(engine, host.clone(), options, ways, &agreed, guarded);
    let gateway = Arc::new(gateway);
    gateway.nodes.tell(&*gateway.engine, root.inode);
    let bytes_max = options.message_bytes_max as usize;
    let reply_bytes = bytes_max.max(XATTR_BYTES_MAX) + HEADER_BYTES_MAX;
    let shared = Arc::new(Shared {
        gateway,
        device,
        buffers: Pool::new(host.clone(), bytes_max + HEADER_BYTES_MAX, reply_bytes),
        threads: Word::new(1),
        over: Word::new(0),
        failure: Lock::new(host.clone(), None),
        host,
        threads_max: options.threads_max.max(options.threads),
        idle: Word::new(0),
        maps_shared: agreed.maps_shared,
        backlog: Word::new(0),
    });
    let recalls = shared.gateway.start_recalls().map_err(Error::Host);
    let started =
        recalls.and_then(|()| (0..options.threads.max(1)).try_for_each(|index| start(&shared, index)));
    if started.is_err() {
        // Only the first error is reported; threads that did start end with the mount.
        let _ = shared.device.unmount(|| ());
    }
    shared.leave();
    started.map(|()| Mounted { shared })
}

/// Starts a guard, and the thread that sends heartbeats to it.
fn begin_guarding(host: &Arc<dyn Host>, device: &Device, guarding: Guarding) -> Result<Arc<Guarded>, Error> {
    let kernel_has = Arc::new(KernelHas::new(host.clone())?);
    let guarded = Arc::new(Guarded::new(host.clone(), device, &guarding.lock, kernel_has)?);
    let guard = guarded.start(&*guarding.start)?;
    let theirs = guarded.clone();
    let pulse = Box::new(move || theirs.pulse(guard, &*guarding.start));
    host.spawn("pulse", pulse).map_err(Error::Host)?;
    Ok(guarded)
}

fn start(shared: &Arc<Shared>, index: usize) -> Result<(), Error> {
    // Relaxed: the thread that starts this one is counted too, so this one is not the last.
    shared.threads.fetch_add(1, Ordering::Relaxed);
    let theirs = shared.clone();
    let body = Box::new(move || {
        if let Err(error) = theirs.work() {
            theirs.failure.lock().get_or_insert(error);
        }
        theirs.leave();
    });
    let spawned = shared.host.spawn(&format!("gateway-{index}"), body);
    spawned.map(|_| ()).map_err(|error| {
        shared.leave();
        Error::Host(error)
    })
}

/// Whether a message is served quickly, or only by waits that release the turn ([`crate::turn`]): it syncs nothing, and
/// copies little.
fn is_brief(message: &[u8]) -> bool {
    let Ok((header, mut body)) = abi::split(message) else { return true };
    match header.opcode {
        opcode::COPY_FILE_RANGE | opcode::FALLOCATE | opcode::LSEEK => false,
        opcode::READ => body.take::<abi::ReadIn>().is_ok_and(|read| read.bytes as usize <= BRIEF_BYTES_MAX),
        _ => message.len() <= BRIEF_BYTES_MAX,
    }
}

/// Takes a message; none if the mount has ended.
fn receive(device: &File, message: &mut Vec<u8>) -> Result<Option<usize>, Error> {
    receive_by(|message| rustix::io::read(device, spare_capacity(message)), message)
}

/// The same with a function that appends a message to the buffer, which has space for it. The rest of the space is
/// never touched, so it takes no memory.
fn receive_by(
    read: impl Fn(&mut Vec<u8>) -> rustix::io::Result<usize>,
    message: &mut Vec<u8>,
) -> Result<Option<usize>, Error> {
    message.clear();
    loop {
        match read(message) {
            Ok(bytes) => return Ok(Some(bytes)),
            // ENOENT: the calling thread ended before the message was taken.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            // ECONNABORTED: the mount ended while the message was being taken (`fuse_dev_do_read` in the kernel).
            Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
            Err(errno) => return Err(device_error("read", Some(errno.raw_os_error()))),
        }
    }
}

/// Sends an answer. ENOENT and ENODEV mean that no thread waits for it any more. EINVAL means that the kernel does not
/// accept it as an answer to its request; then the request fails with an error, so that its thread does not wait
/// forever.
fn send(mut device: &File, answer: &[u8]) {
    let refused = |error: std::io::Error| error.raw_os_error() == Some(libc::EINVAL);
    if device.write(answer).is_err_and(refused) {
        let unique = answer[8..16].try_into().map(u64::from_ne_bytes).expect("eight bytes are eight bytes");
        let error = Err(vfs::errno::number(vfs::Error::Io));
        // No other answer is possible.
        let _ = device.write(Reply::new(0).finish(unique, error));
    }
}

fn device_error(call: &'static str, errno: Option<i32>) -> Error {
    Error::System { call, path: "/dev/fuse".into(), errno: errno.unwrap_or(libc::EIO) }
}

/// Negotiates with the kernel.
fn shake_hands(device: &File, message_bytes_max: u32, may_cache: bool) -> Result<Agreed, Error> {
    let mut message = Vec::with_capacity(message_bytes_max as usize + HEADER_BYTES_MAX);
    let Some(bytes) = receive(device, &mut message)? else {
        return Err(device_error("read", Some(libc::ENODEV)));
    };
    let (answer, agreed) = handshake::agree(&message[..bytes], message_bytes_max, may_cache)?;
    send(device, &answer);
    agreed
}

impl Shared {
    fn work(self: &Arc<Self>) -> Result<(), Error> {
        let take = |message: &mut Vec<u8>| receive(&self.device.file, message);
        let _at_end = turn::AtEnd;
        let mut kept = None;
        loop {
            // Relaxed, here and below: a hint.
            self.idle.fetch_add(1, Ordering::Relaxed);
            if let Some(buffers) = kept.take_if(|_| !turn::is_held()) {
                self.buffers.give_back(buffers);
            }
            self.gateway.arrivals.wait_for_turn();
            let buffers = kept.get_or_insert_with(|| self.buffers.take());
            let next = self.gateway.arrivals.next(&mut buffers.message, take);
            let others = self.idle.fetch_add(u32::MAX, Ordering::Relaxed) - 1;
            let Some((bytes, _closing)) = next? else { return Ok(()) };
            buffers.note();
            let Buffers { message, reply, .. } = buffers;
            let arrival = self.gateway.writes.arrives(&message[..bytes]);
            if others == 0 {
                self.start_another();
            }
            if !is_brief(&message[..bytes]) || self.is_behind() {
                turn::give_away();
            }
            arrival.wait();
            if let Some(answer) = self.gateway.answer(&message[..bytes], reply) {
                send(&self.device.file, answer);
            }
            reply.sent();
        }
    }

    /// All threads are busy, and may all come to wait for leases, which other sessions release only after one of their
    /// own requests was served. So there is always one more thread, up to a limit.
    fn start_another(self: &Arc<Self>) {
        let count = self.threads.load(Ordering::Relaxed) as usize;
        if count < self.threads_max && self.over.load(Ordering::Relaxed) == 0 {
            // If it fails, the existing threads continue.
            let _ = start(self, count);
        }
    }

    /// Whether messages are waiting, and have been for several messages in a row.
    fn is_behind(&self) -> bool {
        // Relaxed: a hint.
        if !self.has_more() {
            self.backlog.store(0, Ordering::Relaxed);
            return false;
        }
        self.backlog.fetch_add(1, Ordering::Relaxed) >= BACKLOG
    }

    /// Whether the kernel has a message, or the end of the mount, now.
    fn has_more(&self) -> bool {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut ready = [PollFd::new(&self.device.file, PollFlags::IN)];
        poll(&mut ready, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Called at the end of a thread.
    fn leave(&self) {
        // AcqRel: the last thread sees the effects of the others.
        if self.threads.fetch_add(u32::MAX, Ordering::AcqRel) == 1 {
            self.gateway.end();
            self.gateway.guarded.iter().for_each(|guarded| guarded.end());
            // Release: pairs with the load in `wait`.
            self.over.store(1, Ordering::Release);
            self.host.wake(&self.over, ipc::WAKE_ALL);
        }
    }
}

impl Mounted {
    /// Whether a file can be mapped shared for writing (kernel 6.6).
    pub fn maps_shared(&self) -> bool {
        self.shared.maps_shared
    }

    /// Number of pages that the kernel wrote back without a lease; it should be 0 unless a session was lost.
    pub fn stray_write_backs(&self) -> u64 {
        self.shared.gateway.units.strays()
    }

    /// Number of changes of a file's size that were answered although the kernel may not have taken over an older answer to
    /// CREATE: a mapping of the file may have lost what lay behind the older size.
    pub fn overdue_sizes(&self) -> u64 {
        self.shared.gateway.size_holds.overdue()
    }

    /// Number of messages of each kind, with the kernel's names.
    pub fn messages(&self) -> Vec<(&'static str, u64)> {
        self.shared.gateway.tally.counts()
    }

    /// The number of inodes that the kernel knows, and the largest number so far. Each takes memory in this process.
    pub fn inodes(&self) -> (usize, usize) {
        self.shared.gateway.nodes.counts()
    }

    /// Whether the kernel caches pages, attributes and names.
    pub fn caches(&self) -> bool {
        self.shared.gateway.caches
    }

    /// Unmounts. If programs use the mount, their mapped pages are written back, and then the mount is removed by
    /// force. A second call, or a mount that is already gone, is no error. [`Self::wait`] returns when it is over.
    ///
    /// # Errors
    /// `System`, `Helper`, `HelperMissing`.
    pub fn unmount(&self) -> Result<(), Error> {
        self.shared.device.unmount(|| self.shared.gateway.give_up_pages())
    }

    /// Waits until the mount has ended, for any reason, and the engine has all resources of the kernel back.
    ///
    /// # Errors
    /// The error that ended the mount.
    pub fn wait(&self) -> Result<(), Error> {
        // Acquire: pairs with the store in `leave`.
        while self.shared.over.load(Ordering::Acquire) == 0 {
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.shared.host.wait(&self.shared.over, 0, None);
        }
        self.shared.failure.lock().clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_taken_whatever_came_before_it_and_a_mount_that_ends_is_no_failure() {
        // Reads fail with these errors, one after the other; then there are five bytes.
        let take = |errnos: &[i32]| {
            let (left, mut message) = (std::cell::RefCell::new(errnos.to_vec()), b"before".to_vec());
            let read = |message: &mut Vec<u8>| {
                if !left.borrow().is_empty() {
                    return Err(Errno::from_raw_os_error(left.borrow_mut().remove(0)));
                }
                message.extend_from_slice(b"asked");
                Ok(5)
            };
            let taken = receive_by(read, &mut message);
            assert_eq!(message, if taken == Ok(Some(5)) { &b"asked"[..] } else { b"" });
            taken
        };
        assert_eq!(take(&[libc::EINTR, libc::ENOENT, libc::EAGAIN]), Ok(Some(5)));
        assert_eq!(take(&[libc::ENOENT, libc::ENODEV]), Ok(None));
        assert_eq!(take(&[libc::EINTR, libc::ECONNABORTED]), Ok(None));
        assert_eq!(take(&[libc::EPERM]), Err(device_error("read", Some(libc::EPERM))));
    }
}
