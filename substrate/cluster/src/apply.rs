//! The effect of a change on the view, and the reasons for a refusal: pure, the same for every backend (Assise §3.1,
//! §3.4).
//!
//! A change is made completely if its conditions hold; otherwise nothing changes. [`crate::core`] checks heartbeats and
//! time; this module only checks member and epoch of an expulsion. After every change, [`View::fault`] finds nothing,
//! which is asserted.
//!
//! Only the lease manager of a subtree may serve it. So this module guarantees that the role leaves a member only by
//! that member's own change, or together with its membership.
//!
//! A copy is a pool, not a node: (node, pool, generation). A node that comes back with an empty, foreign or older pool
//! is a member without a copy. One pool founds a subtree; every other pool becomes a copy by a change of the lease
//! manager.

use crate::change::PoolReport;
use crate::change::{Change, Done, Party, Refusal};
use crate::view::{Member, Path, Placement, PoolCopy, Replica, Subtree, View};
use format::cluster::{CHAIN_MAX, MEMBERS_MAX, SUBTREES_MAX};
use format::{ChangeNumber, Epoch, NodeId, PoolUid};
use std::collections::BTreeMap;

impl View {
    /// Makes a change. A join that the same process has made before gives the same answer again and changes nothing:
    /// the view's number stays.
    ///
    /// # Errors
    /// The reason of the refusal; nothing was changed.
    pub fn apply(&mut self, change: &Change) -> Result<Done, Refusal> {
        if let Some(done) = self.joined_before(change) {
            return Ok(done);
        }
        let number = self.number.next();
        match change {
            Change::Start => {}
            Change::Join { .. } => self.join(change, number)?,
            Change::Leave { party } => {
                self.check_member(*party)?;
                self.remove(party.node, number);
            }
            Change::Expel { party, epoch, .. } => {
                self.check_epoch(*epoch)?;
                self.check_member(*party)?;
                self.remove(party.node, number);
            }
            Change::Complain { by, about, path, epoch } => {
                let refused = self.judge(*by, *about, path, *epoch)?;
                self.members.get_mut(&refused).expect("who is judged is a member").refused = true;
            }
            Change::SetSubtree { path, version, chain, copies_min, founder } => {
                self.set_subtree(path, *version, (chain, *copies_min, *founder), number)?;
            }
            Change::RemoveSubtree { path, version, by } => self.remove_subtree(path, *version, *by)?,
            Change::SetSync { path, version, by, node, in_sync } => {
                self.set_sync(path, *version, *by, (*node, *in_sync), number)?;
            }
            Change::SetManager { path, version, by, to } => {
                self.set_manager(path, *version, *by, *to, number)?;
            }
        }
        self.number = number;
        if change.begins_epoch() {
            self.epoch = self.epoch.next();
        }
        assert_eq!(self.fault(), None, "after {change:?}");
        Ok(Done { number, epoch: self.epoch })
    }

    /// The member whose heartbeats this change, which is not made yet, refuses or has refused: [`Record::refused`].
    ///
    /// [`Record::refused`]: crate::change::Record::refused
    pub fn refused_by(&self, change: &Change) -> Option<NodeId> {
        match change {
            Change::Complain { by, about, path, epoch } => self.judge(*by, *about, path, *epoch).ok(),
            Change::Expel { party, .. } => {
                self.members.get(&party.node).filter(|member| member.refused).map(|_| party.node)
            }
            _ => None,
        }
    }

    /// The answer to a join that was made before.
    fn joined_before(&self, change: &Change) -> Option<Done> {
        let Change::Join { node, instance, .. } = change else { return None };
        let member = self.members.get(node).filter(|member| member.instance == *instance)?;
        Some(Done { number: self.number, epoch: member.life })
    }

    fn join(&mut self, change: &Change, number: ChangeNumber) -> Result<(), Refusal> {
        let Change::Join { node, instance, replaces, medium, pool, address } = change else {
            unreachable!("the caller passes a join")
        };
        self.check_pool(pool)?;
        if [NodeId::NONE, NodeId::MANAGER, NodeId::OPERATOR].contains(node) {
            return Err(Refusal::Field("node"));
        }
        match self.members.get(node) {
            Some(member) if Some(member.life) != *replaces => {
                return Err(Refusal::AlreadyMember(member.life));
            }
            Some(_) => {}
            None if self.members.len() == MEMBERS_MAX => return Err(Refusal::Full),
            None => {}
        }
        let life = self.epoch.next();
        if pool.newest > self.number {
            self.set_back = self.set_back.max(Some(pool.newest));
        }
        let (instance, medium, address) = (*instance, *medium, address.clone());
        let member = Member { life, instance, medium, pool: pool.copy, refused: false, address };
        self.members.insert(*node, member);
        for subtree in self.subtrees.values_mut() {
            let Some(replica) = subtree.chain.iter_mut().find(|replica| replica.node == *node) else {
                continue;
            };
            if replica.in_sync && pool.continues(&replica.pool) {
                replica.pool = pool.copy;
            }
            // A change that the former life sent on the condition of the version is refused from now on.
            subtree.version = number;
        }
        self.count_copies(*node, number);
        Ok(())
    }

    /// Checks that a pool may be in this cluster.
    fn check_pool(&self, pool: &PoolReport) -> Result<(), Refusal> {
        match pool.cluster {
            Some(other) if other != self.cluster => Err(Refusal::ForeignPool(other)),
            _ if pool.copy.uid == PoolUid::NONE && *pool != PoolReport::default() => {
                Err(Refusal::Field("pool"))
            }
            _ => Ok(()),
        }
    }

    /// Removes a member and its roles. If no living member has another copy, it stays the subtree's copy.
    fn remove(&mut self, node: NodeId, number: ChangeNumber) {
        self.members.remove(&node).expect("who is removed was found to be a member");
        self.count_copies(node, number);
    }

    /// Updates all subtrees after a node has left or joined. It keeps its copy if it has the same pool; a copy that is
    /// not available any more counts only if it is the last one; a subtree without a lease manager gets one.
    fn count_copies(&mut self, node: NodeId, number: ChangeNumber) {
        let members = &self.members;
        for subtree in self.subtrees.values_mut() {
            let Some(index) = subtree.index_of(node) else { continue };
            let lives = subtree.chain[index].lives(members);
            let others = subtree.living(members).any(|other| other.node != node);
            if subtree.chain[index].in_sync && !lives && others {
                subtree.chain[index].set_copy(None);
                subtree.version = number;
            }
            if subtree.manager == Some(node) && !lives {
                subtree.manager = None;
                subtree.version = number;
            }
            if self.set_back.is_none() {
                appoint(members, subtree);
            }
        }
        self.spare_last_copies();
    }

    /// Accepts the heartbeats of a refused member again if no other member has a copy now.
    fn spare_last_copies(&mut self) {
        for subtree in self.subtrees.values() {
            let living: Vec<NodeId> = subtree.living(&self.members).map(|replica| replica.node).collect();
            if living.iter().all(|node| self.members[node].refused)
                && let Some(member) = living.first().and_then(|node| self.members.get_mut(node))
            {
                member.refused = false;
            }
        }
    }

    /// The member of the two whose heartbeats are refused from now on.
    fn judge(&self, by: Party, about: NodeId, path: &Path, epoch: Epoch) -> Result<NodeId, Refusal> {
        self.check_epoch(epoch)?;
        self.check_member(by)?;
        let subtree = self.subtrees.get(path).ok_or(Refusal::StaleVersion(ChangeNumber::new(0)))?;
        let other = self.members.get(&about).ok_or(Refusal::NotMember)?;
        if other.refused || self.members[&by.node].refused {
            return Err(Refusal::HeartbeatRefused);
        }
        let place = |node| subtree.index_of(node).ok_or(Refusal::NotReplica(node));
        let (own, others) = (place(by.node)?, place(about)?);
        if own == others {
            return Err(Refusal::Field("about"));
        }
        let mut order = if own > others { [by.node, about] } else { [about, by.node] };
        // A replica that is slow never costs the lease manager its role.
        order.sort_by_key(|node| subtree.manager == Some(*node));
        order.into_iter().find(|node| self.can_spare(*node)).ok_or(Refusal::LastCopy)
    }

    /// True if every subtree of which this member has a copy has another living copy.
    fn can_spare(&self, node: NodeId) -> bool {
        let concerned =
            |subtree: &&Subtree| subtree.replica(node).is_some_and(|replica| replica.lives(&self.members));
        self.subtrees.values().filter(concerned).all(|subtree| self.has_copy_without(&subtree.chain, node))
    }

    /// True if another member than `without`, whose heartbeats are accepted, is in sync.
    fn has_copy_without(&self, chain: &[Replica], without: NodeId) -> bool {
        let lives = |replica: &Replica| replica.lives(&self.members) && self.is_heard(replica.node);
        chain.iter().any(|replica| replica.node != without && lives(replica))
    }

    /// True if the node is a member whose heartbeats are not refused.
    fn is_heard(&self, node: NodeId) -> bool {
        self.members.get(&node).is_some_and(|member| !member.refused)
    }

    fn set_subtree(
        &mut self,
        path: &Path,
        version: ChangeNumber,
        (chain, copies_min, founder): (&[Placement], u8, Option<PoolUid>),
        number: ChangeNumber,
    ) -> Result<(), Refusal> {
        self.check_not_set_back()?;
        let before = self.check_version(path, version)?;
        check_chain(chain)?;
        if copies_min == 0 || usize::from(copies_min) > chain.len() {
            return Err(Refusal::Field("copies_min"));
        }
        if before.is_none() && self.subtrees.len() == SUBTREES_MAX {
            return Err(Refusal::Full);
        }
        let chain = self.place(before, chain, founder)?;
        let manager = before.and_then(|subtree| subtree.manager);
        if let Some(node) = manager.filter(|node| !chain.iter().any(|replica| replica.node == *node)) {
            return Err(Refusal::StillManager(node));
        }
        let keeps = match before {
            // No living member has a copy, so all nodes with a copy must stay.
            Some(subtree) if manager.is_none() => {
                subtree.in_sync().all(|node| chain.iter().any(|replica| replica.node == node))
            }
            _ => self.has_copy_without(&chain, NodeId::NONE),
        };
        if !keeps {
            return Err(Refusal::LastCopy);
        }
        let mut subtree = Subtree { version: number, chain, copies_min, manager };
        appoint(&self.members, &mut subtree);
        self.subtrees.insert(path.clone(), subtree);
        Ok(())
    }

    /// The replicas of a chain, each with its copy. With a founder only that one has a copy; in an existing subtree it
    /// is the pool that is recorded as the last copy, in whatever generation, and there is no lease manager.
    fn place(
        &self,
        before: Option<&Subtree>,
        chain: &[Placement],
        founder: Option<PoolUid>,
    ) -> Result<Vec<Replica>, Refusal> {
        let pool_of = |node| self.members.get(&node).map(|member| member.pool);
        let was_copy = |node, uid| {
            let replica = before.map(|subtree| subtree.replica(node));
            replica
                .is_none_or(|found| found.is_some_and(|replica| replica.in_sync && replica.pool.uid == uid))
        };
        let is_founder = |place: &&Placement| {
            pool_of(place.node).is_some_and(|pool| {
                pool.uid != PoolUid::NONE && Some(pool.uid) == founder && was_copy(place.node, pool.uid)
            })
        };
        let founding = chain.iter().find(is_founder).map(|place| place.node);
        if founding.is_some() != founder.is_some() || (before.is_none() && founder.is_none()) {
            return Err(Refusal::Field("founder"));
        }
        if let Some(node) = before.filter(|_| founder.is_some()).and_then(|subtree| subtree.manager) {
            return Err(Refusal::StillManager(node));
        }
        let copy = |node| match before.filter(|_| founder.is_none()) {
            Some(subtree) => {
                subtree.replica(node).filter(|replica| replica.in_sync).map(|replica| replica.pool)
            }
            None => pool_of(node).filter(|_| founding == Some(node)),
        };
        let replica = |place: &Placement| {
            let mut replica =
                Replica { node: place.node, hot: place.hot, in_sync: false, pool: PoolCopy::default() };
            replica.set_copy(copy(place.node));
            replica
        };
        Ok(chain.iter().map(replica).collect())
    }

    fn remove_subtree(
        &mut self,
        path: &Path,
        version: ChangeNumber,
        by: Option<Party>,
    ) -> Result<(), Refusal> {
        let subtree =
            self.check_version(path, version)?.ok_or(Refusal::StaleVersion(ChangeNumber::new(0)))?;
        match (subtree.manager, by) {
            (Some(_), Some(party)) => self.check_manager(subtree, party)?,
            (Some(node), None) => return Err(Refusal::StillManager(node)),
            // The node with its copy is gone, so the copy may still be needed.
            (None, _) => return Err(Refusal::LastCopy),
        }
        self.subtrees.remove(path);
        Ok(())
    }

    fn set_sync(
        &mut self,
        path: &Path,
        version: ChangeNumber,
        by: Party,
        (node, in_sync): (NodeId, bool),
        number: ChangeNumber,
    ) -> Result<(), Refusal> {
        let subtree =
            self.check_version(path, version)?.ok_or(Refusal::StaleVersion(ChangeNumber::new(0)))?;
        if in_sync || by.node != node {
            self.check_manager(subtree, by)?;
        } else {
            self.check_member(by)?;
        }
        let index = subtree.index_of(node).ok_or(Refusal::NotReplica(node))?;
        let pool = self.members.get(&node).map(|member| member.pool);
        let pool = pool.filter(|pool| in_sync && pool.uid != PoolUid::NONE);
        if subtree.chain[index].in_sync == in_sync || (in_sync && !(self.is_heard(node) && pool.is_some())) {
            return Err(Refusal::NotReplica(node));
        }
        if !in_sync && !self.has_copy_without(&subtree.chain, node) {
            return Err(Refusal::LastCopy);
        }
        let members = &self.members;
        let subtree = self.subtrees.get_mut(path).expect("its version was just checked");
        subtree.version = number;
        subtree.chain[index].set_copy(pool);
        if !in_sync && subtree.manager == Some(node) {
            subtree.manager = None;
            if self.set_back.is_none() {
                appoint(members, subtree);
            }
        }
        Ok(())
    }

    fn set_manager(
        &mut self,
        path: &Path,
        version: ChangeNumber,
        by: Party,
        to: NodeId,
        number: ChangeNumber,
    ) -> Result<(), Refusal> {
        let subtree =
            self.check_version(path, version)?.ok_or(Refusal::StaleVersion(ChangeNumber::new(0)))?;
        self.check_manager(subtree, by)?;
        let fits = subtree.replica(to).is_some_and(|replica| replica.lives(&self.members));
        if to != by.node && !(fits && self.is_heard(to)) {
            return Err(Refusal::NotReplica(to));
        }
        let subtree = self.subtrees.get_mut(path).expect("its version was just checked");
        subtree.version = number;
        subtree.manager = Some(to);
        Ok(())
    }

    fn check_not_set_back(&self) -> Result<(), Refusal> {
        self.set_back.map_or(Ok(()), |number| Err(Refusal::SetBack(number)))
    }

    fn check_epoch(&self, epoch: Epoch) -> Result<(), Refusal> {
        if epoch == self.epoch { Ok(()) } else { Err(Refusal::StaleEpoch(self.epoch)) }
    }

    fn check_member(&self, party: Party) -> Result<(), Refusal> {
        if self.is_member(party) { Ok(()) } else { Err(Refusal::NotMember) }
    }

    fn check_manager(&self, subtree: &Subtree, by: Party) -> Result<(), Refusal> {
        self.check_member(by)?;
        if subtree.manager == Some(by.node) { Ok(()) } else { Err(Refusal::NotManager) }
    }

    fn check_version(&self, path: &Path, version: ChangeNumber) -> Result<Option<&Subtree>, Refusal> {
        let found = self.subtrees.get(path);
        let present = found.map_or(ChangeNumber::new(0), |subtree| subtree.version);
        if present == version { Ok(found) } else { Err(Refusal::StaleVersion(present)) }
    }
}

fn check_chain(chain: &[Placement]) -> Result<(), Refusal> {
    let twice =
        |(index, place): (usize, &Placement)| chain[..index].iter().any(|earlier| earlier.node == place.node);
    let wrong = chain.is_empty()
        || chain.len() > CHAIN_MAX
        || chain.iter().any(|place| place.node == NodeId::NONE)
        || chain.iter().enumerate().any(twice);
    if wrong { Err(Refusal::Field("chain")) } else { Ok(()) }
}

impl Replica {
    /// Makes this pool the copy, or none.
    fn set_copy(&mut self, pool: Option<PoolCopy>) {
        (self.in_sync, self.pool) = (pool.is_some(), pool.unwrap_or_default());
    }
}

/// Gives a subtree without a lease manager its head: the first living copy in the chain's order. A member whose
/// heartbeats are accepted comes before a refused one, and a hot replica before a warm one, which becomes hot.
fn appoint(members: &BTreeMap<NodeId, Member>, subtree: &mut Subtree) {
    if subtree.manager.is_some() {
        return;
    }
    let living = subtree.chain.iter_mut().filter(|replica| replica.lives(members));
    if let Some(head) = living.min_by_key(|replica| (members[&replica.node].refused, !replica.hot)) {
        head.hot = true;
        subtree.manager = Some(head.node);
    }
}
