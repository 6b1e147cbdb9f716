//! What outlives the process that serves a mount. The kernel keeps pages, attributes and names under leases of that process's
//! session; when it is killed, or stands still, they have to be gone before the leases go to others, and an aborted connection
//! keeps them: a program would go on to read and change what it has mapped. So another process, the *guard*, holds the
//! connection too, with the list of inodes of which the kernel may have something. While it lives it holds a lock
//! on a file, by which SharedFS sees that leases are to be withheld.
//!
//! The serving process sends a pulse. When it ends without having said so, or the pulse stays away, the guard kills it, has the
//! kernel ask everything again that it had taken, answers all of it with EIO, has the kernel drop everything that it
//! has, and closes the connection: each call and each access to a mapped page fails from then on.
//!
//! The guard makes no call on the mount, and asks SharedFS for nothing.

use crate::abi::{self, OutHeader, notice, opcode};
use crate::error::Error;
use crate::notices::{Notices, SendNotice};
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

/// How often the serving process says that it goes on.
const PULSE: Duration = Duration::from_millis(500);
/// So many waits of that length without a pulse are silence. They are counted: a machine that stood still is no silence.
const SILENT_MAX: u32 = 10;
/// How long the kernel may take to drop what one inode has, before the pulse stays away.
const DROPS_MAX: Duration = Duration::from_secs(10);
/// How often the kernel is told to ask again while the process ends.
const AGAIN: Duration = Duration::from_millis(10);
/// The largest request.
const MESSAGE_BYTES_MAX: usize = (1 << 20) + 4096;
/// Descriptors that a guard is given.
const DESCRIPTORS: usize = 4;
/// What the serving process says.
const GOES_ON: u8 = b'p';
const IS_OVER: u8 = b'e';

/// What a mount is guarded with.
pub struct Guarding {
    /// A file that is locked by its open file description for as long as the kernel may have something of the mount.
    pub lock: File,
    /// Starts a process that calls [`guard`] with this descriptor; also when one has died.
    pub start: Box<dyn Fn(OwnedFd) -> std::io::Result<()> + Send>,
}

/// Inodes of which the kernel may have something, where a guard reads them: a file in memory.
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

    /// Notes one, before the kernel is told anything of it; gives where. None if it cannot be noted.
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

    /// The kernel has nothing of it any more.
    pub(crate) fn clear(&self, place: u32) {
        // If it stays, it is dropped once more than it has to be.
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
    pub(crate) kernel_has: Arc<KernelHas>,
    lock: OwnedFd,
    /// Since when the kernel drops what one inode has after all leases were lost.
    dropping: Lock<Option<ipc::Time>>,
    over: Word,
    /// 1 when the guard was told so.
    told: Word,
}

impl Guarded {
    pub(crate) fn new(
        host: Arc<dyn Host>,
        device: &File,
        lock: &File,
        kernel_has: Arc<KernelHas>,
    ) -> Result<Self, Error> {
        let copy = |file: &File| file.try_clone().map(OwnedFd::from);
        let copies = copy(device).and_then(|device| Ok((device, copy(lock)?)));
        let (device, lock) =
            copies.map_err(|error| failed("dup")(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let dropping = Lock::new(host.clone(), None);
        Ok(Self { host, device, kernel_has, lock, dropping, over: Word::new(0), told: Word::new(0) })
    }

    /// Starts a guard, and gives the way to it once it has what it needs.
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
        rustix::net::sendmsg(&ours, &[IoSlice::new(&[GOES_ON])], &mut ancillary, flags)
            .map_err(failed("sendmsg"))?;
        let mut ready = [0];
        match rustix::io::read(&ours, &mut ready) {
            Ok(1) => Ok(ours),
            Ok(_) => Err(failed("start")(Errno::PIPE)),
            Err(errno) => Err(failed("read")(errno)),
        }
    }

    /// Sends the pulse until the mount is over; a guard that died is followed by another one.
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

    /// The kernel drops what it has of one more inode, after all leases were lost; or no more.
    pub(crate) fn drops(&self, any: bool) {
        *self.dropping.lock() = any.then(|| self.host.now());
    }

    /// The kernel has nothing any more, and the engine has everything back.
    pub(crate) fn end(&self) {
        self.over.store(1, Ordering::Release);
        self.host.wake(&self.over, ipc::WAKE_ALL);
        // A guard that is not told drops what is dropped already.
        let until = self.host.now().after(PULSE);
        while self.told.load(Ordering::Acquire) == 0 && self.host.now() < until {
            self.host.wait(&self.told, 0, Some(until));
        }
    }
}

/// What became of a mount that was guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was unmounted, and its gateway ended in order.
    InOrder,
    /// Its gateway died or stood still: everything on it fails from now on, and the kernel has nothing of it.
    Poisoned,
}

/// Guards a mount: the whole life of the process that was started for it.
///
/// # Errors
/// `System`: who started this one is gone, or the machine lacks something; then nothing was guarded.
pub fn guard(host: &Arc<dyn Host>, gateway: &OwnedFd) -> Result<Ended, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(gateway, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        .map_err(failed("recvmsg"))?;
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
    guard.poison(&File::from(kernel_has), process.as_fd())?;
    Ok(Ended::Poisoned)
}

/// Whether a process was killed, and ends as soon as the kernel lets its last thread go. It keeps its descriptors until then.
fn is_ending(process: &OwnedFd) -> bool {
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let about = read(format!("/proc/self/fdinfo/{}", process.as_raw_fd()));
    let Some(pid) = about.lines().find_map(|line| line.strip_prefix("Pid:")) else { return false };
    let stat = read(format!("/proc/{}/stat", pid.trim()));
    // Behind the name of the program, which may have any letter in it.
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

/// Hears the pulse; true if the mount ended in order, false if its gateway ended otherwise or is silent.
fn hear_until_over(gateway: &OwnedFd, process: &OwnedFd) -> bool {
    let mut silent = 0;
    while silent < SILENT_MAX {
        let mut ready = [PollFd::new(gateway, PollFlags::IN)];
        match poll(&mut ready, Some(&span(PULSE))) {
            // A thread of it may wait for an answer that it would have given, and so stands in the way of its end.
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

/// A mount that is being poisoned.
struct Poison {
    host: Arc<dyn Host>,
    device: File,
    /// 1 when nothing is to be answered any more.
    done: Word,
}

impl Poison {
    fn poison(self, kernel_has: &File, process: BorrowedFd<'_>) -> Result<(), Error> {
        let poison = Arc::new(self);
        let theirs = poison.clone();
        let refuse = Box::new(move || theirs.refuse_all());
        let refusing = poison.host.spawn("refuses", refuse).map_err(Error::Host)?;
        // A thread of it may wait for the kernel, which waits for an answer: so all is answered until it is gone.
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
        // A page that was dirty the first time is clean the second time, whatever became of its write.
        for _ in 0..2 {
            let (nodes, _) = nodes.as_chunks::<8>();
            for node in nodes.iter().map(|bytes| u64::from_le_bytes(*bytes)).filter(|node| *node != 0) {
                // The kernel may have forgotten it.
                let _ = notices.drop_pages(node, 0, 0);
            }
        }
        let _ = notices.drop_names();
        poison.done.store(1, Ordering::Release);
        let _ = refusing.join();
        Ok(())
    }

    /// Has the kernel ask again what was taken and not answered.
    fn ask_again(&self) {
        let header =
            OutHeader { bytes: size_of::<OutHeader>() as u32, error: notice::RESEND as i32, unique: 0 };
        // A connection that was aborted has failed all of it.
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
                // Another took it, or the connection is gone.
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
