//! References that SharedFS keeps for inodes which this process no longer uses, and how they end.
//!
//! An inode without a name is removed with its last reference, and a record that comes later would cut the log. So a
//! reference is released after the last record of its inode is digested: by a call, with a later close of the process, or by
//! SharedFS, which finds the inode in the open table of a process that makes no call
//! ([`format::session::OPEN_RELEASED`]). A close makes the call only for many references, or for files that are large
//! together: a program that removes small files one after the other, as SQLite does with its journals, makes one call for
//! many of them.

use crate::calls::{Line, error_of, take};
use crate::engine::LibFs;
use crate::need::Token;
use crate::state::State;
use format::call::{CallKind, InodeRequest, LEASE_READ, LEASE_WRITE, OpenRequest, RELEASE_UNITS_MAX, Status};
use format::{InodeNumber, Sequence};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Bit of an `OpenRequest`'s access: the file is written.
const ACCESS_WRITE: u8 = 2;
/// Number of references that are released at once.
const MANY: usize = 64;
/// Bytes of files whose references are released at once, however few they are: their blocks may be needed.
const LARGE: u64 = 1 << 20;

/// An inode that is released: the reference to it, or the lease on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenBack {
    pub inode: InodeNumber,
    pub lease: bool,
}

/// A reference to release after a record, the last one of its inode, is digested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingRelease {
    pub inode: InodeNumber,
    pub after: Sequence,
    /// The size of the file.
    pub bytes: u64,
    /// Its position in the open table; none if the table was full.
    pub place: Option<u16>,
}

impl State {
    /// Notes that the reference to an inode, a file of so many bytes, is to be released.
    pub fn add_release(&mut self, inode: InodeNumber, after: Sequence, bytes: u64) {
        self.releases.push(PendingRelease { inode, after, bytes, place: None });
        self.list_releases();
    }

    /// Lists the newest releases in the open table, as far as it has room, back to the last one that is listed.
    pub fn list_releases(&mut self) {
        let Some(session) = self.session.as_ref() else { return };
        for release in self.releases.iter_mut().rev().take_while(|release| release.place.is_none()) {
            let Some(place) = self.open_places.pop() else { break };
            session.words.set_released(place, release.inode);
            release.place = Some(place);
        }
    }

    /// The process uses the inode again: its reference is not released, neither by a call nor by SharedFS, until the caller
    /// adds the release again, or a close does. Gives the release that was pending.
    pub fn retract_release(&mut self, inode: InodeNumber) -> Option<PendingRelease> {
        let mut retracted = None;
        while let Some(index) = self.releases.iter().position(|release| release.inode == inode) {
            let release = self.releases.remove(index);
            if let Some(place) = release.place {
                self.free_open_place(place);
            }
            let after =
                retracted.map_or(release.after, |other: PendingRelease| other.after.max(release.after));
            retracted = Some(PendingRelease { after, ..release });
        }
        retracted
    }

    /// Frees a position of the open table.
    pub fn free_open_place(&mut self, place: u16) {
        if let Some(session) = self.session.as_ref() {
            session.words.set_open(place, InodeNumber::NONE);
        }
        self.open_places.push(place);
    }

    /// The references that a close releases now; true if SharedFS cannot learn of all others from the open table.
    pub fn ready_releases(&mut self) -> (Vec<GivenBack>, bool) {
        if self.releases.is_empty() {
            return (Vec::new(), false);
        }
        let ready = if self.are_worth_a_call() { self.take_give_back() } else { Vec::new() };
        let unlisted = self.releases.last().is_some_and(|release| release.place.is_none());
        (ready, unlisted && self.open_table_full())
    }

    /// Whether the references that can be released now are many, or those of large files, or not in the open table.
    fn are_worth_a_call(&self) -> bool {
        let Some(session) = self.session.as_ref() else { return false };
        let (digested, _) = session.words.digested();
        let (mut count, mut bytes) = (0, 0u64);
        self.releases.iter().filter(|release| release.after <= digested).any(|release| {
            (count, bytes) = (count + 1, bytes.saturating_add(release.bytes));
            count >= MANY || bytes >= LARGE || release.place.is_none()
        })
    }

    /// The references that can be released now.
    pub fn take_give_back(&mut self) -> Vec<GivenBack> {
        let Some(session) = self.session.as_ref() else { return Vec::new() };
        let (digested, _) = session.words.digested();
        let mut ended = Vec::new();
        self.releases.retain(|release| {
            let now = release.after <= digested;
            if now {
                ended.push(*release);
            }
            !now
        });
        for place in ended.iter().filter_map(|release| release.place) {
            self.free_open_place(place);
        }
        let ready = ended.iter().map(|release| GivenBack { inode: release.inode, lease: false });
        // A file that was opened again meanwhile keeps its reference.
        let is_unused = |given: &GivenBack| {
            self.nodes.find(given.inode).is_none_or(|index| !self.nodes.get(index).referenced)
        };
        let ready: Vec<GivenBack> = ready.filter(is_unused).collect();
        self.giving_back.extend(ready.iter().map(|given| given.inode));
        ready
    }

    /// Releases that no session has heard of are repeated in the next one.
    pub fn repeat_releases(&mut self, untold: &[GivenBack]) {
        for given in untold {
            self.add_release(given.inode, Sequence::new(0), 0);
        }
    }

    /// The session ended: the next one begins with all records digested, and with an empty open table.
    pub fn reset_releases(&mut self) {
        for release in &mut self.releases {
            (release.after, release.place) = (Sequence::new(0), None);
        }
    }

    /// Whether the inode's reference or lease is being released.
    pub fn is_given_back(&self, inode: InodeNumber) -> bool {
        self.giving_back.contains(&inode)
    }

    /// Removes inodes from the list of those that are being released.
    pub fn end_give_back(&mut self, given_back: &[GivenBack]) {
        self.giving_back.retain(|inode| !given_back.iter().any(|given| given.inode == *inode));
    }
}

impl LibFs {
    /// Requests a reference, and with it the lease on the inode.
    pub(crate) fn open_call(
        &self,
        inode: InodeNumber,
        access: u8,
        token: Option<Token>,
    ) -> vfs::engine::Result<()> {
        let line = self.line()?;
        let retracted = self.state().retract_release(inode);
        let result = self.open_call_on(&line, inode, access, token);
        if let Some(release) = retracted {
            let mut state = self.state();
            let index = state.nodes.find(inode);
            match index.map(|index| state.nodes.get_mut(index)) {
                Some(node) if node.referenced => {}
                // Another thread has opened it meanwhile: its close releases what is kept.
                Some(node) if node.in_use() => node.orphaned = true,
                _ => {
                    let after = if state.era == line.era { release.after } else { Sequence::new(0) };
                    state.add_release(inode, after, release.bytes);
                }
            }
        }
        result
    }

    fn open_call_on(
        &self,
        line: &Line,
        inode: InodeNumber,
        access: u8,
        token: Option<Token>,
    ) -> vfs::engine::Result<()> {
        // A mount that opens a file for writing, which a program passes to it, holds it for writing from then on.
        let is_passed_to_write = token.is_some() && access & ACCESS_WRITE != 0;
        let mode = if is_passed_to_write { LEASE_WRITE } else { LEASE_READ };
        let request = OpenRequest { inode, access, mode, reserved: [0; 6] };
        let mut response = Vec::new();
        let token = token.as_ref().map_or(&[][..], |token| token);
        match self.call(line, CallKind::Open, &[request.as_bytes(), token], &mut response)? {
            Status::Ok => self.learn(line, |state| {
                let index = state.learn_node(&take(&mut response.as_slice())?)?;
                let node = state.nodes.get_mut(index);
                node.referenced = true;
                node.referenced_to_write |= access & ACCESS_WRITE != 0;
                Ok(())
            }),
            Status::Sealed => Ok(()),
            refused => Err(error_of(refused)),
        }
    }

    /// Releases the references, and the leases if so marked, that SharedFS keeps for inodes which this process no
    /// longer uses.
    pub(crate) fn close_calls(&self, given_back: &[GivenBack]) {
        if given_back.is_empty() {
            return;
        }
        let leases: Vec<InodeNumber> =
            given_back.iter().filter(|given| given.lease).map(|given| given.inode).collect();
        for leases in leases.chunks(RELEASE_UNITS_MAX) {
            // An error is harmless: leases also end with their session.
            let _ = self.release_call(leases);
        }
        let references: Vec<GivenBack> = given_back.iter().filter(|given| !given.lease).copied().collect();
        let told =
            references.chunks(RELEASE_UNITS_MAX).take_while(|some| self.close_call(some)).flatten().count();
        {
            let mut state = self.state();
            state.end_give_back(given_back);
            // The references pass to the next session, which releases them.
            state.repeat_releases(&references[told..]);
        }
        self.turn();
    }

    /// Releases at most [`RELEASE_UNITS_MAX`] references. If the session ends meanwhile, its references pass to the next
    /// session, and the call is repeated there. False if no session got the call.
    fn close_call(&self, given_back: &[GivenBack]) -> bool {
        let request = |given: &GivenBack| InodeRequest { inode: given.inode, flags: U64::new(0) };
        let requests: Vec<InodeRequest> = given_back.iter().map(request).collect();
        for _ in 0..self.limits.attempts {
            let Ok(line) = self.line() else { return false };
            match self.call(&line, CallKind::Close, &[requests.as_bytes()], &mut Vec::new()) {
                Ok(Status::Sealed) => {}
                called => return called.is_ok(),
            }
        }
        false
    }
}
