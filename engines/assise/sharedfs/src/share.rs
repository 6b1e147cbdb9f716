//! Open files that a process gives to a child, or to its own next program. Until a process claims them they are a
//! detached session with a *liveness socket*: the child has its other end, and may pass it on. Files and the owners of
//! their locks stay in force meanwhile; they end when the last process with the socket has died or has closed them.
//!
//! A process that claims the files shows their number, which is random and known to no other process. If the giver
//! named the process, it is also in the register, so that it finds the files after a restart of the daemon, which ends
//! all liveness sockets.

use crate::detached::DetachedSession;
use crate::error::Error;
use crate::lock_requests::owner_of_file;
use crate::references::Rights;
use crate::register::{open_entry, speak_entry};
use crate::session::MetInode;
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::InodeNumber;
use format::call::Status;
use format::message::{MessageKind, Parcel};
use format::register::RegisterKind;
use format::share::{LivenessNote, NOTE_PROCESS, SHARE_BIT, ShareRequest, ShareResponse, SharedFile};
use ipc::socket::Connection;
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Messages that are read from one liveness socket at once.
const NOTES_AT_ONCE: usize = 64;

impl Core {
    /// [`format::call::CallKind::Share`].
    pub fn share(&self, id: SessionId, request: u64, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (head, files) = ShareRequest::decode(body).map_err(|_| Status::Invalid)?;
        // A LibFS in the same process has no children.
        let peer = self.state.lock().live(id)?.peer.clone().ok_or(Status::Invalid)?;
        self.take_back_given(id, &files, head.own.get() == 1)?;
        let (ours, theirs) = Connection::pair().map_err(|_| Status::Limit)?;
        let number = self.state.lock().give(self, id, &files, head.own.get() == 1, ours)?;
        let parcel = Parcel { request: U64::new(request), what: U64::new(number.0), bytes: U64::new(0) };
        let descriptors = [theirs.descriptor()];
        // If the message does not arrive, the socket closes with the daemon's copy of its end, and the files end with
        // it.
        let sent = peer.connection().send(MessageKind::Parcel, &[parcel.as_bytes()], &descriptors);
        sent.map_err(|_| Status::Limit)?;
        Ok(ShareResponse { number: U64::new(number.0) }.as_bytes().to_vec())
    }
}

impl State {
    /// Gives files of a session away; returns the number by which they are claimed.
    fn give(
        &mut self,
        core: &Core,
        id: SessionId,
        files: &[SharedFile],
        own: bool,
        liveness_socket: Connection,
    ) -> Result<SessionId, Status> {
        let session = self.live(id)?;
        let uid = session.caller.uid;
        let who = if own { session.identity() } else { None };
        let strange = |file: &SharedFile| file.inode != InodeNumber::NONE && !session.knows(file.inode);
        if files.iter().any(strange) {
            return Err(Status::Invalid);
        }
        let gid = session.caller.gid;
        if !self.detached.may_take(uid, core.config.sessions_max) {
            return Err(Status::Limit);
        }
        let owners = files.iter().map(owner_of_file).collect::<Result<Vec<_>, _>>()?;
        let mut given = Vec::new();
        for file in files.iter().filter(|file| file.inode != InodeNumber::NONE) {
            given.push((file.inode, self.rights_to_give(id, file.inode, Rights::of_bits(file.access))?));
        }
        for owner in owners.iter().flatten() {
            self.locks.claim(id, uid, *owner)?;
            self.register.note(speak_entry(id, *owner));
        }
        // From here on nothing fails: everything under the number ends with its detached session, and only then.
        let number = SessionId(core.host.random() | SHARE_BIT);
        owners.iter().flatten().for_each(|owner| self.locks.speak_for(id, number, *owner));
        let mut known = BTreeMap::new();
        for (inode, rights) in given {
            self.references.open(number, inode, rights);
            known.insert(inode, MetInode::default());
        }
        self.detached.add(DetachedSession::given(number, (uid, gid), known, Arc::new(liveness_socket)));
        if let Some(who) = who {
            self.name_successor(number, who.pid, Some(who.started));
        }
        Ok(number)
    }

    /// The rights that a session may give to an inode, of those that it asks for.
    pub fn rights_to_give(&self, id: SessionId, inode: InodeNumber, asked: Rights) -> Result<Rights, Status> {
        let held = if self.is_own(id, inode) {
            // The process that made the inode may use it as it was made.
            Rights { read: true, write: true }
        } else {
            match self.copy.tree.inode(inode).map_err(|_| Status::Media)? {
                Some(item) => self.rights_of_user(id, inode, &item),
                None => self.references.rights(id, inode).unwrap_or_default(),
            }
        };
        Ok(Rights { read: asked.read && held.read, write: asked.write && held.write })
    }

    /// Names the process that will claim the files: from now on the register has them.
    fn name_successor(&mut self, number: SessionId, pid: u32, started: Option<u64>) {
        let Some(started) = started else { return };
        let Some(detached) = self.detached.find(number).filter(|detached| !detached.is_named()) else {
            return;
        };
        detached.name(pid, started);
        let mut entries = Vec::new();
        detached.put_entries(&mut entries);
        for inode in self.references.of_session(number) {
            entries.push(open_entry(
                number,
                inode,
                self.references.rights(number, inode).unwrap_or_default(),
            ));
        }
        self.locks.put_entries_of(number, &mut entries);
        entries.into_iter().for_each(|entry| self.register.note(entry));
    }

    /// A process claims the files: if it was not named before, the register gets the detached session before it is
    /// taken over.
    pub fn name_successor_of(&mut self, number: SessionId, successor: SessionId) {
        let who = self.sessions.get(&successor).and_then(crate::session::Session::identity);
        if let Some(who) = who {
            self.name_successor(number, who.pid, Some(who.started));
        }
    }

    /// Reads pending messages from all liveness sockets. The end of the stream or a malformed message drops the files;
    /// a transient read error is retried on the next poll.
    pub fn hear_liveness_sockets(&mut self, core: &Core) {
        for (number, liveness_socket) in self.detached.liveness_sockets() {
            for _ in 0..NOTES_AT_ONCE {
                let heard = match liveness_socket.receive() {
                    Ok(None) | Err(ipc::Error::System { .. }) => break,
                    Ok(Some(message)) if message.kind == MessageKind::Note => {
                        self.heed(core, number, &message.body)
                    }
                    Ok(Some(_)) => Err(Error::Settings("a note is expected on a liveness socket")),
                    Err(error) => Err(error.into()),
                };
                if heard.is_err() {
                    self.drop_detached_of(number);
                    break;
                }
            }
        }
    }

    fn heed(&mut self, core: &Core, number: SessionId, body: &[u8]) -> Result<(), Error> {
        let (note, files) = LivenessNote::decode(body).map_err(ipc::Error::Message)?;
        if note.kind.get() == NOTE_PROCESS {
            self.name_successor(number, note.process.get(), core.host.started(note.process.get()));
            return Ok(());
        }
        for file in files {
            if let Ok(Some(owner)) = owner_of_file(&file) {
                self.fall_silent(number, owner);
            }
            // The process may have the same file open more than once.
            if file.inode != InodeNumber::NONE && self.refer_no_more(number, file.inode) {
                self.reapable.push_back(file.inode);
                core.announce_work();
            }
        }
        Ok(())
    }

    /// A session does not act for an owner of locks any more. If no other session does, the owner's locks end.
    pub fn fall_silent(&mut self, id: SessionId, owner: vfs::engine::LockOwner) {
        if self.locks.fall_silent(id, owner) {
            let mut entry = speak_entry(id, owner);
            entry.kind = RegisterKind::Silent as u8;
            self.register.note(entry);
        }
    }

    /// The same for a process without locks: a mount makes requests for many processes, each of which ends some time.
    pub fn silence_idle(&mut self, id: SessionId, owner: vfs::engine::LockOwner) {
        if self.locks.is_idle(owner) {
            self.fall_silent(id, owner);
        }
    }
}
