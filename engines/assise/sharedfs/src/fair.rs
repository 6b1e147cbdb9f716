//! Fair shares of the node's bounded resources: one user may have half of what the other users leave, so that some is
//! left for the next user. Root may have all.

use std::collections::BTreeMap;

/// Whether a user with `mine` of the `all` units in use may take one more, of at most `max`.
pub(crate) fn may_take(uid: u32, mine: usize, all: usize, max: usize) -> bool {
    let left = max.saturating_sub(all);
    left > 0 && (uid == 0 || mine < left)
}

/// The first unit of the user who has the most, given the users of all units.
pub(crate) fn first_of_most(uids: impl Iterator<Item = u32> + Clone) -> Option<usize> {
    let mut of_user = BTreeMap::new();
    for uid in uids.clone() {
        *of_user.entry(uid).or_insert(0) += 1;
    }
    let most = of_user.values().max().copied()?;
    uids.into_iter().position(|uid| of_user[&uid] == most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many units a user gets.
    fn fill(uid: u32, all: &mut usize, max: usize) -> usize {
        let mut mine = 0;
        while may_take(uid, mine, *all, max) {
            (mine, *all) = (mine + 1, *all + 1);
        }
        mine
    }

    #[test]
    fn who_takes_all_he_can_leaves_some_for_the_next_ones() {
        let mut all = 0;
        let each = [1, 2, 3, 0].map(|uid| fill(uid, &mut all, 64));
        assert_eq!(each, [32, 16, 8, 8]);
        assert_eq!(fill(1, &mut 0, 1), 1);
        assert!(!may_take(4, 0, all, 64) && !may_take(0, 0, all, 64));
    }

    #[test]
    fn the_first_of_who_has_most() {
        assert_eq!(first_of_most([].into_iter()), None);
        assert_eq!(first_of_most([7, 8, 8].into_iter()), Some(1));
        assert_eq!(first_of_most([7, 8].into_iter()), Some(0));
    }
}
