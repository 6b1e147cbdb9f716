//! How a session begins: the former session of its process ends, numbers are drawn, a log is made or a ready one is
//! taken, and both are written into the ledger and the table of sessions.
//!
//! Several sessions begin at once, each on its own thread, and take the state's lock for each of these steps. Drawn
//! numbers count against the limits from then on, so that the limits also hold for sessions that begin together. The
//! state of a detached session passes to its successor in the same step that puts the successor into the table, so no
//! other session gets it. The same step checks whether the daemon ends, because the daemon reads its list of sessions
//! to end only later.

use crate::commits::Entries;
use crate::daemon::Attached;
use crate::error::Error;
use crate::fair::may_take;
use crate::register::attach_entry;
use crate::replay::table::OpenLog;
use crate::session::{Beginning, Session, Shared, session_of};
use crate::session_end::TerminationReason;
use crate::state::Core;
use area::AreaError;
use ccnvm::SessionId;
use format::ledger::OpenLogBody;
use format::session::Welcome;
use format::{Incarnation, InodeNumber, LeaseVersion, LogUid, Sequence};
use mirror::logs::LogFile;
use std::sync::Arc;
use vfs::Caller;
use zerocopy::little_endian::{U32, U64};

/// Numbers that are given out once: the log's uid, with its file if it was ready, the version of the session's own
/// range, and the range's start.
struct DrawnNumbers {
    log: LogUid,
    file: Option<Arc<LogFile>>,
    version: LeaseVersion,
    first_inode: InodeNumber,
}

impl Core {
    /// Begins a session, the former one ended.
    pub fn attach(&self, caller: Caller, pid: u32, former: u64) -> Result<Attached, Error> {
        self.end_former(&caller, pid, former);
        self.begin(caller, pid, former)
    }

    /// Begins a session. The process's former one has ended.
    pub fn begin(&self, caller: Caller, pid: u32, former: u64) -> Result<Attached, Error> {
        let drawn = self.draw_numbers(caller.uid)?;
        let log = drawn.log;
        let begun = self.begin_as(drawn, caller, pid, former);
        if begun.is_err() {
            self.state.lock().coming.remove(&log);
        }
        begun
    }

    fn begin_as(
        &self,
        drawn: DrawnNumbers,
        caller: Caller,
        pid: u32,
        former: u64,
    ) -> Result<Attached, Error> {
        let DrawnNumbers { log, file, version, first_inode } = drawn;
        let life = (log, Incarnation::new(1));
        let file = match file {
            Some(file) => {
                file.give(self.pool, life, caller.uid);
                file
            }
            None => Arc::new(self.make_needed_log(life, caller.uid)?),
        };
        let beginning = Beginning {
            log,
            caller,
            version,
            opened: Sequence::default(),
            first_inode,
            inodes: self.config.own_range,
            pid,
            started: self.host.started(pid),
        };
        self.hold_for_session();
        let registered = Shared::new(&self.host, &self.config).and_then(|shared| {
            let shared = Arc::new(shared);
            Ok((self.register(beginning, &file, &shared, former)?, shared))
        });
        if registered.is_err() {
            // The first error is the one that matters; a file that stays is removed by the next start.
            let _ = self.medium.remove(&file.name);
        }
        let ((welcome, caller), shared) = registered?;
        // There may be a ready log less.
        self.announce_work();
        if !self.goes_on() {
            return Err(Error::Stopped);
        }
        Ok(Attached {
            welcome,
            caller,
            log: file.region().clone(),
            session: shared.session_words.mapping.clone(),
            leases: shared.lease_words.mapping.clone(),
            ring: shared.ring_memory.mapping.clone(),
            ring_limits: self.config.ring,
            generations: self.generations.mapping().clone(),
        })
    }

    /// Ends the session from which a process goes on, and later ones of the process of which it never received the
    /// welcome, so that their state is inherited. May wait for their digests.
    pub fn end_former(&self, caller: &Caller, pid: u32, former: u64) {
        let started = self.host.started(pid);
        let over = |(id, session): (&SessionId, &Session)| {
            let over =
                session.is_of(caller, pid, started) && (id.0 == former || session.resume_unacknowledged);
            over.then_some(*id)
        };
        let over: Vec<SessionId> = self.state.lock().sessions.iter().filter_map(over).collect();
        for id in over {
            self.terminate(id, TerminationReason::HandedOver);
        }
    }

    /// A process has said that it goes on from session `former`: however that session ends from here on, its state is
    /// kept.
    pub fn expect_successor(&self, caller: &Caller, pid: u32, former: u64) {
        let started = self.host.started(pid);
        let mut state = self.state.lock();
        let session = state.sessions.get_mut(&SessionId(former));
        if let Some(session) = session.filter(|session| session.is_of(caller, pid, started)) {
            session.resume_unacknowledged = true;
        }
    }

    /// Writes a new log into the ledger and the session into the table. If that fails, nothing of them is left.
    fn register(
        &self,
        mut beginning: Beginning,
        file: &Arc<LogFile>,
        shared: &Arc<Shared>,
        former: u64,
    ) -> Result<(Welcome, Caller), Error> {
        let groups = size_of_val(&beginning.caller.groups[..]);
        let payload_bytes = size_of::<OpenLogBody>() + groups;
        let mut guard = self.state_with_room(|_| Entries { count: 1, payload_bytes });
        let state = &mut *guard;
        if state.is_stopped() || state.closing {
            return Err(Error::Stopped);
        }
        if !state.may_begin(&self.config, &beginning.caller.groups) {
            return Err(AreaError::NoSpace.into());
        }
        let Beginning { log, version, first_inode, inodes, pid, .. } = beginning;
        let caller = beginning.caller.clone();
        let open = OpenLog::new(caller.clone(), version, (first_inode, inodes), file.region().bytes());
        beginning.opened = state.copy.ledger.open_log(log, &open, pid)?;
        state.copy.begin_log(log, Some(file.clone()));
        let (id, opened) = (session_of(log), beginning.opened);
        let syncs_file = u32::from(file.region().class() == pmem::Class::File);
        let session = Session::new(beginning, shared.clone(), &self.config);
        shared.daemon.publish_synced(state.copy.ledger.synced());
        shared.daemon.publish_replication(self.copies.are_asked(), Default::default());
        if let Some(who) = session.identity() {
            state.register.note(attach_entry(id, &who, (first_inode, inodes)));
        }
        state.coming.remove(&log);
        state.sessions.insert(id, session);
        state.ranges.insert(first_inode, id);
        let recovered = state.inherit(self, id, former);
        state.room.begin(id, caller.uid);
        let room = state.room.promise(id, self.config.room_blocks, &state.copy.free);
        let welcome = Welcome {
            session: U64::new(id.0),
            pool: self.pool,
            log,
            log_bytes: U64::new(self.config.log_bytes),
            log_bytes_max: U64::new(self.config.log_bytes_max),
            version,
            ledger: U64::new(opened.get()),
            first_inode,
            inodes: U64::new(inodes),
            room_blocks: U64::new(room),
            incarnation: Incarnation::new(1),
            lease_words: U32::new(self.config.lease_words),
            syncs_file: U32::new(syncs_file),
            uid: U32::new(caller.uid),
            gid: U32::new(caller.gid),
            goes_on: U32::new(recovered.is_some().into()),
            fences: U32::new(self.fences.into()),
            recovered: recovered.unwrap_or_default(),
        };
        Ok((welcome, caller))
    }

    /// Draws numbers for a new log of a user, and takes its file if one is ready. From here on the session counts
    /// against the limits.
    fn draw_numbers(&self, uid: u32) -> Result<DrawnNumbers, Error> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.is_stopped() || state.closing {
            return Err(Error::Stopped);
        }
        let users = state.sessions.values().map(|session| session.caller.uid);
        let mine = users.chain(state.coming.values().copied()).filter(|other| *other == uid).count();
        let all = state.sessions.len() + state.coming.len();
        if !may_take(uid, mine, all, self.config.sessions_max) {
            return Err(Error::Sessions);
        }
        let first_inode = state.numbers.next_inode;
        state.numbers.next_inode = InodeNumber::new(first_inode.get() + self.config.own_range);
        let (log, file) = match state.ready.pop_front() {
            Some(ready) => (ready.log, Some(ready.file)),
            None => (state.numbers.take_log(), None),
        };
        state.coming.insert(log, uid);
        Ok(DrawnNumbers { log, file, version: state.leases.take_version(), first_inode })
    }
}
