//! Open references: which sessions have which inodes open, independently of leases. An inode without a name stays until
//! the last session closes it, and a right to write that an open gave outlives a change of mode.
//!
//! There is one reference for a session and an inode, with the union of the rights; the session counts its own
//! descriptors.

use crate::register::open_entry;
use ccnvm::SessionId;
use format::InodeNumber;
use format::register::RegisterEntry;
use std::collections::BTreeMap;

/// All references of the node.
#[derive(Debug, Default)]
pub(crate) struct References {
    by_inode: BTreeMap<(InodeNumber, SessionId), Rights>,
    by_session: BTreeMap<(SessionId, InodeNumber), ()>,
    /// Number of references of each session that has some: each open asks for it.
    counts: BTreeMap<SessionId, usize>,
}

/// The rights that an open gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    pub read: bool,
    pub write: bool,
}

impl Rights {
    /// The bits that the register stores.
    pub fn bits(self) -> u8 {
        u8::from(self.read) | u8::from(self.write) << 1
    }

    /// Reads the bits of the register.
    pub fn of_bits(bits: u8) -> Self {
        Self { read: bits & 1 != 0, write: bits & 2 != 0 }
    }
}

impl References {
    /// Makes a reference, or adds rights to it.
    pub fn open(&mut self, session: SessionId, inode: InodeNumber, rights: Rights) {
        let held = self.by_inode.entry((inode, session)).or_default();
        held.read |= rights.read;
        held.write |= rights.write;
        if self.by_session.insert((session, inode), ()).is_none() {
            *self.counts.entry(session).or_default() += 1;
        }
    }

    /// Ends a reference. True if it was the last one to the inode.
    pub fn close(&mut self, session: SessionId, inode: InodeNumber) -> bool {
        self.by_inode.remove(&(inode, session));
        if self.by_session.remove(&(session, inode)).is_some()
            && let Some(count) = self.counts.get_mut(&session)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&session);
            }
        }
        !self.any(inode)
    }

    /// The rights of a session's reference.
    pub fn rights(&self, session: SessionId, inode: InodeNumber) -> Option<Rights> {
        self.by_inode.get(&(inode, session)).copied()
    }

    /// Whether any session has the inode open.
    pub fn any(&self, inode: InodeNumber) -> bool {
        let (first, last) = ((inode, SessionId(0)), (inode, SessionId(u64::MAX)));
        self.by_inode.range(first..=last).next().is_some()
    }

    /// Number of all references.
    pub fn total(&self) -> usize {
        self.by_inode.len()
    }

    /// Number of references of a session.
    pub fn count(&self, session: SessionId) -> usize {
        self.counts.get(&session).copied().unwrap_or(0)
    }

    /// The inodes that a session refers to.
    pub fn of_session(&self, session: SessionId) -> impl Iterator<Item = InodeNumber> + '_ {
        let (first, last) = ((session, InodeNumber::new(0)), (session, InodeNumber::new(u64::MAX)));
        self.by_session.range(first..=last).map(|((_, inode), ())| *inode)
    }

    /// Moves all references of one session to another.
    pub fn hand_over(&mut self, from: SessionId, to: SessionId) {
        let inodes: Vec<_> = self.of_session(from).collect();
        for inode in inodes {
            let rights = self.rights(from, inode).unwrap_or_default();
            self.open(to, inode, rights);
            self.close(from, inode);
        }
    }

    /// Adds all references, for the register.
    pub fn put_entries(&self, entries: &mut Vec<RegisterEntry>) {
        let all = self.by_inode.iter();
        entries.extend(all.map(|((inode, session), rights)| open_entry(*session, *inode, *rights)));
    }

    /// Ends all references of a session; gives the inodes to which no reference is left.
    pub fn end(&mut self, session: SessionId) -> Vec<InodeNumber> {
        let inodes: Vec<_> = self.of_session(session).collect();
        inodes.into_iter().filter(|inode| self.close(session, *inode)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_has_as_many_as_it_opened_and_did_not_close() {
        let (one, two) = (SessionId(1), SessionId(2));
        let mut references = References::default();
        for inode in (1..=5).map(InodeNumber::new) {
            references.open(one, inode, Rights::default());
            references.open(one, inode, Rights { read: true, write: true });
        }
        references.open(two, InodeNumber::new(1), Rights::default());
        references.close(one, InodeNumber::new(2));
        references.close(one, InodeNumber::new(2));
        assert_eq!((references.count(one), references.count(two)), (4, 1));
        references.hand_over(one, two);
        assert_eq!((references.count(one), references.count(two)), (0, 4));
        references.end(two);
        assert_eq!((references.count(two), references.total()), (0, 0));
    }

    #[test]
    fn the_last_close_is_told() {
        let (mut references, inode) = (References::default(), InodeNumber::new(5));
        let (one, two) = (SessionId(1), SessionId(2));
        references.open(one, inode, Rights { read: true, write: false });
        references.open(one, inode, Rights { read: false, write: true });
        references.open(two, inode, Rights::default());
        references.open(two, InodeNumber::new(6), Rights::default());
        assert_eq!(references.rights(one, inode), Some(Rights { read: true, write: true }));
        assert!(!references.close(one, inode) && references.any(inode));
        assert_eq!(references.count(two), 2);
        assert_eq!(references.end(two), [inode, InodeNumber::new(6)]);
        assert!(!references.any(inode));
    }
}
