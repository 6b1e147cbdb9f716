//! The guard of a mount, which outlives the process that serves the mount. The kernel caches pages, attributes and
//! names under leases of the serving process's session. If that process is killed or stops responding, the cached data
//! must be dropped before other sessions get the leases. An aborted connection does not drop it: a program would
//! continue to read and change its mappings. So another process, the *guard*, holds the connection too, with the list
//! of inodes of which the kernel may have data. While the guard lives it holds a lock on a file, by which SharedFS sees
//! that leases must be withheld.
//!
//! The serving process sends heartbeats. If it ends without a report, or the heartbeats stop, the guard kills it, makes
//! the kernel send all unanswered requests again, answers them with EIO, makes the kernel drop all cached data, and
//! closes the connection. From then on each call and each access to a mapped page fails. Before that, the guard's owner
//! can end the programs that would continue without their mappings.
//!
//! The guard makes no call on the mount and none to SharedFS.

use crate::abi::{self, OutHeader, opcode};
use crate::device::Device;
use crate::error::Error;
use crate::notices::{Notices, SendNotice, notice};
use crate::reply::Reply;
use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Word};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

/// Interval of the serving process's heartbeats.
const PULSE: Duration = Duration::from_millis(500);
/// Number of such intervals without a heartbeat after which the gateway counts as silent. Intervals are counted, so
/// that a suspended machine does not count as silence.
const SILENT_MAX: u32 = 10;
/// How long the kernel may take to drop the data of one inode before the heartbeats stop.
const DROPS_MAX: Duration = Duration::from_secs(10);
/// Interval at which the kernel is told to send requests again while the process ends.
const AGAIN: Duration = Duration::from_millis(10);
/// The largest request.
const MESSAGE_BYTES_MAX: usize = (1 << 20) + 4096;
/// Number of descriptors that a guard gets.
const DESCRIPTORS: usize = 4;
/// Messages of the serving process.
const GOES_ON: u8 = b'p';
const IS_OVER: u8 = b'e';

/// The resources for guarding a mount.
pub struct Guarding {
    /// A file that is locked by its open file description for as long as the kernel may have data of the mount.
    pub lock: File,
    /// Starts a process that calls [`guard`] with this descriptor; called again when one has died.
    pub start: Box<dyn Fn(OwnedFd) -> std::io::Result<()> + Send>,
}

/// The inodes of which the kernel may have data, in a memory file that a guard reads.
pub(crate) struct KernelHas {
    file: File,
    places: Lock<Places>,
}

#[derive(Default)]
struct Places {
    free: Vec<u32>,
    count: u32,
}

impl KernelHas {
    pub(crate) fn new(host: Arc<dyn Host>) -> Result<Self, Error> {
        let file = memfd_create("hearth-guard", MemfdFlags::CLOEXEC).map_err(failed("memfd_create"))?;
        Ok(Self { file: file.into(), places: Lock::new(host, Places::default()) })
    }

    /// Adds an inode before the kernel gets any data of it; returns its position. None if the write fails.
    pub(crate) fn note(&self, node: InodeNumber) -> Option<u32> {
        let place = {
            let mut places = self.places.lock();
            places.free.pop().unwrap_or_else(|| {
                places.count += 1;
                places.count - 1
            })
        };
        let written = self.file.write_all_at(&node.get().to_le_bytes(), u64::from(place) * 8);
        if written.is_err() {
            self.places.lock().free.push(place);
        }
        written.is_ok().then_some(place)
    }

    /// Removes an inode of which the kernel has no data any more.
    pub(crate) fn clear(&self, place: u32) {
        // If the write fails, the guard drops the inode once more than necessary.
        let _ = self.file.write_all_at(&[0; 8], u64::from(place) * 8);
        self.places.lock().free.push(place);
    }
}

fn failed(call: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::System { call, path: "the guard of a mount".into(), errno: errno.raw_os_error() }
}

/// The serving process's side of a guard.
pub(crate) struct Guarded {
    host: Arc<dyn Host>,
    device: OwnedFd,
    /// The mount's device number; none if the kernel did not say it.
    number: Option<(u32, u32)>,
    pub(crate) kernel_has: Arc<KernelHas>,
    lock: OwnedFd,
    /// The time at which the kernel began to drop the data of the present inode, after all leases were lost.
    dropping: Lock<Option<ipc::Time>>,
    over: Word,
    /// 1 when the guard has got the final message.
    told: Word,
}

impl Guarded {
    pub(crate) fn new(
        host: Arc<dyn Host>,
        device: &Device,
        lock: &File,
        kernel_has: Arc<KernelHas>,
    ) -> Result<Self, Error> {
        let copy = |file: &File| file.try_clone().map(OwnedFd::from);
        let number = device.number;
        let copies = copy(&device.file).and_then(|device| Ok((device, copy(lock)?)));
        let (device, lock) =
            copies.map_err(|error| failed("dup")(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let dropping = Lock::new(host.clone(), None);
        Ok(Self { host, device, number, kernel_has, lock, dropping, over: Word::new(0), told: Word::new(0) })
    }

    /// Starts a guard; returns the socket to it when it has received its descriptors.
    pub(crate) fn start(&self, start: impl Fn(OwnedFd) -> std::io::Result<()>) -> Result<OwnedFd, Error> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(failed("socketpair"))?;
        start(theirs)
            .map_err(|error| failed("start")(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(failed("pidfd_open"))?;
        let descriptors =
            [self.device.as_fd(), self.kernel_has.file.as_fd(), self.lock.as_fd(), this.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let flags = SendFlags::NOSIGNAL;
        // Zero if it is not known: no mount has this number.
        let (major, minor) = self.number.unwrap_or_default();
        let [major, minor] = [major, minor].map(u32::to_le_bytes);
        let about = [IoSlice::new(&major), IoSlice::new(&minor)];
        rustix::net::sendmsg(&ours, &about, &mut ancillary, flags).map_err(failed("sendmsg"))?;
        let mut ready = [0];
        match rustix::io::read(&ours, &mut ready) {
            Ok(1) => Ok(ours),
            Ok(_) => Err(failed("start")(Errno::PIPE)),
            Err(errno) => Err(failed("read")(errno)),
        }
    }

    /// Sends heartbeats until the mount is over; starts another guard when one has died.
    pub(crate) fn pulse(&self, mut guard: OwnedFd, start: impl Fn(OwnedFd) -> std::io::Result<()>) {
        let says = |guard: &OwnedFd, what| rustix::net::send(guard, &[what], SendFlags::NOSIGNAL).is_ok();
        while self.over.load(Ordering::Acquire) == 0 {
            let is_stuck = self.dropping.lock().is_some_and(|since| self.host.now().since(since) > DROPS_MAX);
            if !is_stuck
                && !says(&guard, GOES_ON)
                && let Ok(next) = self.start(&start)
            {
                guard = next;
            }
            self.host.wait(&self.over, 0, Some(self.host.now().after(PULSE)));
        }
        says(&guard, IS_OVER);
        self.told.store(1, Ordering::Release);
        self.host.wake(&self.told, ipc::WAKE_ALL);
    }

    /// Notes that the kernel begins to drop the data of another inode after all leases were lost, or that it has
    /// dropped all.
    pub(crate) fn drops(&self, any: bool) {
        *self.dropping.lock() = any.then(|| self.host.now());
    }

    /// Called when the kernel has no data and the engine has all resources back.
    pub(crate) fn end(&self) {
        self.over.store(1, Ordering::Release);
        self.host.wake(&self.over, ipc::WAKE_ALL);
        // A guard without the final message only drops data that is already dropped.
        let until = self.host.now().after(PULSE);
        while self.told.load(Ordering::Acquire) == 0 && self.host.now() < until {
            self.host.wait(&self.told, 0, Some(until));
        }
    }
}

/// The end of a guarded mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was unmounted, and its gateway ended in order.
    InOrder,
    /// Its gateway died or stopped responding: all calls on it fail from now on, and the kernel has no data of it.
    Poisoned,
}

/// Guards a mount; this is the whole task of the process that was started for it. If the gateway fails, `at_end` is called
/// with the mount's device number, when the kernel has no data of it and before the mount counts as gone.
///
/// # Errors
/// `System`: the process that started this one is gone, or a system call failed; then the mount was not guarded.
pub fn guard(
    host: &Arc<dyn Host>,
    gateway: &OwnedFd,
    at_end: impl FnOnce((u32, u32)),
) -> Result<Ended, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let (mut major, mut minor) = ([0; 4], [0; 4]);
    let mut about = [IoSliceMut::new(&mut major), IoSliceMut::new(&mut minor)];
    rustix::net::recvmsg(gateway, &mut about, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        .map_err(failed("recvmsg"))?;
    let number = (u32::from_le_bytes(major), u32::from_le_bytes(minor));
    let mut given = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            given.extend(descriptors);
        }
    }
    let given: [OwnedFd; DESCRIPTORS] = given.try_into().map_err(|_| failed("recvmsg")(Errno::PROTO))?;
    let [device, kernel_has, _lock, process] = given;
    rustix::net::send(gateway, &[GOES_ON], SendFlags::NOSIGNAL).map_err(failed("send"))?;
    if hear_until_over(gateway, &process) {
        return Ok(Ended::InOrder);
    }
    let guard = Poison { host: host.clone(), device: device.into(), done: Word::new(0) };
    guard.poison(&File::from(kernel_has), process.as_fd(), || at_end(number))?;
    Ok(Ended::Poisoned)
}

/// Whether a process was killed and ends as soon as the kernel releases its last thread. It keeps its descriptors until
/// then.
fn is_ending(process: &OwnedFd) -> bool {
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let about = read(format!("/proc/self/fdinfo/{}", process.as_raw_fd()));
    let Some(pid) = about.lines().find_map(|line| line.strip_prefix("Pid:")) else { return false };
    let stat = read(format!("/proc/{}/stat", pid.trim()));
    // The fields after the name of the program, which may contain any character.
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

/// Receives heartbeats; true if the mount ended in order, false if its gateway ended otherwise or is silent.
fn hear_until_over(gateway: &OwnedFd, process: &OwnedFd) -> bool {
    let mut silent = 0;
    while silent < SILENT_MAX {
        let mut ready = [PollFd::new(gateway, PollFlags::IN)];
        match poll(&mut ready, Some(&span(PULSE))) {
            // One of its threads may wait for an answer that the process itself would have sent, which prevents its
            // end.
            Ok(0) if is_ending(process) => return false,
            Ok(0) => silent += 1,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => {
                let mut said = [0];
                match rustix::io::read(gateway, &mut said) {
                    Ok(1) if said[0] == IS_OVER => return true,
                    Ok(1) => silent = 0,
                    Err(Errno::INTR) => {}
                    Ok(_) | Err(_) => return false,
                }
            }
        }
    }
    false
}

fn span(time: Duration) -> Timespec {
    Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() }
}

/// A mount whose gateway has failed.
struct Poison {
    host: Arc<dyn Host>,
    device: File,
    /// 1 when no more requests have to be answered.
    done: Word,
}

impl Poison {
    fn poison(self, kernel_has: &File, process: BorrowedFd<'_>, at_end: impl FnOnce()) -> Result<(), Error> {
        let poison = Arc::new(self);
        let theirs = poison.clone();
        let refuse = Box::new(move || theirs.refuse_all());
        let refusing = poison.host.spawn("refuses", refuse).map_err(Error::Host)?;
        // A thread of the process may wait for the kernel, which waits for an answer. So requests are answered until it
        // is gone.
        let _ = pidfd_send_signal(process, Signal::KILL);
        while poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&span(AGAIN))) == Ok(0) {
            poison.ask_again();
        }
        poison.ask_again();
        let mut nodes = Vec::new();
        let mut reader = kernel_has;
        let _ = std::io::Seek::rewind(&mut reader);
        reader
            .read_to_end(&mut nodes)
            .map_err(|error| failed("read")(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        let device = poison.clone();
        let send: SendNotice = Box::new(move |notice: &[u8]| {
            let sent = (&device.device).write(notice);
            sent.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
        });
        let notices = Notices::new(send);
        // A page that was dirty in the first round is clean in the second one, whether or not its write succeeded.
        for _ in 0..2 {
            let (nodes, _) = nodes.as_chunks::<8>();
            for node in nodes.iter().map(|bytes| u64::from_le_bytes(*bytes)).filter(|node| *node != 0) {
                // The kernel may have forgotten the inode.
                let _ = notices.drop_pages(node, 0, 0);
            }
        }
        let _ = notices.drop_names();
        // Meanwhile requests are answered, which a program that ends may send.
        at_end();
        poison.done.store(1, Ordering::Release);
        let _ = refusing.join();
        Ok(())
    }

    /// Makes the kernel send the requests again that were taken and not answered.
    fn ask_again(&self) {
        let header =
            OutHeader { bytes: size_of::<OutHeader>() as u32, error: notice::RESEND as i32, unique: 0 };
        // If the connection was aborted, all requests have failed.
        let _ = (&self.device).write(zerocopy::IntoBytes::as_bytes(&header));
    }

    fn refuse_all(&self) {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let mut reply = Reply::new(0);
        while self.done.load(Ordering::Acquire) == 0 {
            let mut ready = [PollFd::new(&self.device, PollFlags::IN)];
            if !poll(&mut ready, Some(&span(AGAIN))).is_ok_and(|ready| ready > 0) {
                continue;
            }
            let Ok(bytes) = (&self.device).read(&mut message) else {
                // Another thread took the message, or the connection is gone.
                let _ = self.host.wait(&self.done, 0, Some(self.host.now().after(Duration::from_millis(1))));
                continue;
            };
            let Ok((header, _)) = abi::split(&message[..bytes]) else { continue };
            if !matches!(header.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT) {
                let _ = (&self.device).write(reply.finish(header.unique, Err(libc::EIO)));
            }
        }
    }
}
