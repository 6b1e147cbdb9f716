//! Inherited files: open files that this process shares with a child or with its next program, and those that it
//! inherited itself. They are shared by number, with the rights that the former process had, independent of later
//! changes of names and modes (`format::share`).

use crate::calls::error_of;
use crate::engine::LibFs;
use crate::error::Error;
use crate::need::{Need, Token};
use format::InodeNumber;
use format::call::{
    CallKind, LEASE_READ, OWNER_DESCRIPTION, OWNER_PROCESS, OpenRequest, PassResponse, Status,
};
use format::message::MessageKind;
use format::pass::{Opening, PassName};
use format::share::{
    LivenessNote, NOTE_CLOSED, NOTE_FILES_MAX, NOTE_PROCESS, SHARE_FILES_MAX, ShareRequest, ShareResponse,
    SharedFile,
};
use ipc::socket::Connection;
use ipc::{Descriptor, Link};
use vfs::engine::{Access, Attributes, Handle, LockOwner};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// An open file description that is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// The open inode; none if only an owner of locks is shared.
    pub inode: InodeNumber,
    /// The access rights of the description.
    pub access: Access,
    /// The owner of its locks.
    pub owner: Option<LockOwner>,
}

impl Given {
    fn encoded(&self) -> SharedFile {
        let (owner_kind, owner, pid) = match self.owner {
            None => (0, 0, 0),
            Some(LockOwner::Process { id, pid }) => (OWNER_PROCESS, id, pid),
            Some(LockOwner::Description(id)) => (OWNER_DESCRIPTION, id, 0),
        };
        SharedFile {
            inode: self.inode,
            owner: U64::new(owner),
            pid: U32::new(pid),
            owner_kind,
            access: u8::from(self.access.read) | u8::from(self.access.write) << 1,
            reserved: [0; 2],
        }
    }
}

/// The liveness socket of shared files: SharedFS keeps them while it is open.
#[derive(Debug)]
pub struct LivenessSocket {
    /// The number of the detached session. A process that names it as its former session when it attaches inherits the
    /// files.
    pub number: u64,
    connection: Connection,
}

impl LivenessSocket {
    /// Takes a liveness socket that arrived as a descriptor.
    pub fn from_descriptor(number: u64, descriptor: Descriptor) -> Self {
        Self { number, connection: Connection::from_descriptor(descriptor) }
    }

    /// Returns its descriptor.
    pub fn into_descriptor(self) -> Descriptor {
        self.connection.into_descriptor()
    }

    /// False once the daemon that shares the files has ended.
    pub fn is_up(&self) -> bool {
        self.connection.is_up()
    }

    /// Reports which process was created. If the daemon is gone this is no error: the shared files ended with it.
    pub fn name(&self, process: u32) {
        self.note(NOTE_PROCESS, process, &[]);
    }

    /// Reports which files were closed by the process that inherited them. An inode is [`InodeNumber::NONE`] if another
    /// file of it is still open there.
    pub fn closed(&self, files: &[Given]) {
        let files: Vec<SharedFile> = files.iter().map(Given::encoded).collect();
        files.chunks(NOTE_FILES_MAX).for_each(|some| self.note(NOTE_CLOSED, 0, some));
    }

    fn note(&self, kind: u32, process: u32, files: &[SharedFile]) {
        let note = LivenessNote {
            kind: U32::new(kind),
            process: U32::new(process),
            count: U32::new(files.len() as u32),
            reserved: U32::new(0),
        };
        let _ = self.connection.send(MessageKind::Note, &[note.as_bytes(), files.as_bytes()], &[]);
    }
}

impl LibFs {
    /// Shares open files, with the process's next program if `own`. Files beyond the limit of a request are left out.
    ///
    /// # Errors
    /// `TooManyFiles`; `Io`.
    pub fn share(&self, files: &[Given], own: bool) -> vfs::engine::Result<LivenessSocket> {
        let files = &files[..files.len().min(SHARE_FILES_MAX)];
        let head = ShareRequest { count: U32::new(files.len() as u32), own: U32::new(own.into()) };
        let encoded: Vec<SharedFile> = files.iter().map(Given::encoded).collect();
        // A process that goes on in its next program is the only one with its own locks.
        let stays_here = |file: &&Given| !own || matches!(file.owner, Some(LockOwner::Description(_)));
        files.iter().filter(stays_here).for_each(|file| self.shares(file));
        for _ in 0..self.limits.attempts {
            let line = self.line()?;
            let mut response = Vec::new();
            match self.call(&line, CallKind::Share, &[head.as_bytes(), encoded.as_bytes()], &mut response)? {
                Status::Ok => {}
                Status::Sealed => continue,
                refused => return Err(error_of(refused)),
            }
            let (given, _) = format::call::split::<ShareResponse>(&response).map_err(|_| vfs::Error::Io)?;
            match line.link.lifeline(given.number.get()) {
                Ok(descriptor) => return Ok(LivenessSocket::from_descriptor(given.number.get(), descriptor)),
                // Only the other of the two processes has this connection: a child between vfork and exec, or its parent.
                Err(_) if !line.link.is_up() => self.end_of(&line)?,
                Err(Error::Disconnected) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(vfs::Error::Io)
    }

    /// Changes the process's user: LibFS continues in a session of the new user with its open files. `listed` returns
    /// the files that the caller knows; files that other threads open meanwhile are added.
    ///
    /// Returns false if the daemon does not know the files any more: then the session has none of them, and each has to
    /// be opened again.
    ///
    /// # Errors
    /// `Io`: the daemon is gone, or does not accept the session.
    pub fn become_user(&self, mut listed: impl FnMut() -> Vec<Given>) -> vfs::engine::Result<bool> {
        for _ in 0..self.limits.attempts {
            let mut files = listed();
            let opened = {
                let state = self.state();
                state.add_unlisted(&mut files);
                state.serial
            };
            files.truncate(SHARE_FILES_MAX);
            // Held until the next session has inherited the files.
            let shared = self.share(&files, true);
            let mut state = self.state();
            if shared.is_ok() && state.serial != opened {
                continue;
            }
            let number = shared.as_ref().map_or(0, |shared| shared.number);
            if number == 0 {
                files.clear();
            }
            state.leave_for(number);
            state.go_on_with(&files);
            drop(state);
            self.attach()?;
            let mut state = self.state();
            for inode in files.iter().map(|file| file.inode) {
                if let Some(index) = state.nodes.find(inode) {
                    // The session inherited the references too, so closing the last file releases them.
                    state.nodes.get_mut(index).referenced = true;
                }
            }
            return Ok(number != 0);
        }
        Err(vfs::Error::Io)
    }

    /// Called when a child between vfork and exec, which had begun the session in this process's memory, has left it: the
    /// process goes on with a session of its own, which inherits the state of that one.
    ///
    /// # Errors
    /// Those of an attachment.
    pub fn go_on_after_child(&self) -> vfs::engine::Result<()> {
        let mut state = self.state();
        if state.session.as_ref().is_some_and(|session| !session.link.is_up()) {
            state.end_session();
        }
        drop(state);
        self.attach()
    }

    /// Notes that other processes share the description, or that the owner is older than this program: SharedFS gets
    /// its end in this process even if it has no locks.
    pub fn speaks_for(&self, file: &Given) {
        if let Some(owner) = file.owner {
            let mut state = self.state();
            state.locks.note_told(owner, file.inode);
            if matches!(owner, LockOwner::Description(_)) {
                state.locks.note_shared(owner);
            }
        }
    }

    /// The same for an owner that this process shares from now on.
    fn shares(&self, file: &Given) {
        self.speaks_for(file);
        if let Some(owner) = file.owner {
            self.state().locks.note_shared(owner);
        }
    }

    /// Requests a token for a file that this process has open, for the mount of the node: [`vfs::Engine::open_passed`]
    /// takes it.
    ///
    /// # Errors
    /// `Denied`: the process does not have the file open with this access; `Io`.
    pub fn pass(&self, inode: InodeNumber, access: Access) -> vfs::engine::Result<PassName> {
        let bits = u8::from(access.read) | u8::from(access.write) << 1;
        let request = OpenRequest { inode, access: bits, mode: 0, reserved: [0; 6] };
        for _ in 0..self.limits.attempts {
            let line = self.line()?;
            let mut response = Vec::new();
            match self.call(&line, CallKind::Pass, &[request.as_bytes()], &mut response)? {
                Status::Ok => {}
                Status::Sealed => continue,
                refused => return Err(error_of(refused)),
            }
            let (given, _) = format::call::split::<PassResponse>(&response).map_err(|_| vfs::Error::Io)?;
            let opening = match (access.read, access.write) {
                (true, true) => Opening::Both,
                (false, true) => Opening::Write,
                _ => Opening::Read,
            };
            return Ok(PassName { inode, token: given.token, opening });
        }
        Err(vfs::Error::Io)
    }

    /// Opens an inherited file. The inode is pinned, as by a walk.
    ///
    /// # Errors
    /// `Denied`, `Stale`: the process did not inherit the file, or not with this access; `TooManyFiles`.
    pub fn adopt(&self, inode: InodeNumber, access: Access) -> vfs::engine::Result<(Handle, Attributes)> {
        self.adopt_by(inode, access, None)
    }

    /// Opens an inherited file, or a file by a token, which is used only once.
    pub(crate) fn adopt_by(
        &self,
        inode: InodeNumber,
        access: Access,
        token: Option<Token>,
    ) -> vfs::engine::Result<(Handle, Attributes)> {
        let bits = u8::from(access.read) | u8::from(access.write) << 1;
        let mut asked = false;
        self.run(|state| {
            state.check_files()?;
            if state.is_given_back(inode) {
                return Err(Need::GivenBack(inode).into());
            }
            let index = state.nodes.find(inode).filter(|index| state.nodes.get(*index).referenced);
            let Some(index) = index.filter(|_| asked) else {
                let token = token.filter(|_| !asked);
                asked = true;
                return Err(Need::Open(inode, bits, token).into());
            };
            if !state.holds(index, LEASE_READ)? {
                return Err(Need::Open(inode, bits, None).into());
            }
            state.hold(index, LEASE_READ)?;
            let attributes = state.pin(index);
            let handle = state.add_file(index, access);
            if let Err(stop) = state.validate() {
                let taken = std::mem::take(&mut state.taken);
                state.undo(taken);
                return Err(stop);
            }
            Ok((handle, attributes))
        })
    }
}
