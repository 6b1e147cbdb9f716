//! The operations of a program that are there are a prefix of its operations, closed under their dependencies: if an
//! operation is there whose program had seen operations of another one before, those are there, too.

use super::History;
use std::collections::BTreeSet;

/// How long the prefix is that these operations of a program are.
///
/// # Errors
/// They are none.
pub fn length(program: usize, there: &BTreeSet<usize>) -> Result<usize, String> {
    let last = there.last().copied().unwrap_or(0);
    match (1..=last).find(|number| !there.contains(number)) {
        Some(lost) => Err(format!("program {program}: operation {last} is there without {lost}")),
        None => Ok(last),
    }
}

/// `found`: how many operations are there of each program.
///
/// # Errors
/// One is there without what its program had seen.
pub fn check(histories: &[History; 2], found: [usize; 2]) -> Result<(), String> {
    for (program, history) in histories.iter().enumerate() {
        let other = 1 - program;
        let needed = history.seen[..found[program].min(history.seen.len())].iter().max();
        if needed.is_some_and(|needed| *needed > found[other]) {
            return Err(format!(
                "{} operations of program {program} are there, which had seen {needed:?} of the other, and {} of that",
                found[program], found[other]
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_and_lost_dependencies_are_found() {
        assert_eq!(length(0, &BTreeSet::from([1, 2, 3])), Ok(3));
        assert!(length(0, &BTreeSet::from([1, 3])).is_err());
        let one = History { done: 3, synced: 0, seen: vec![0, 0, 2] };
        let two = History { done: 2, synced: 0, seen: vec![0, 0] };
        let histories = [one, two];
        assert!(check(&histories, [2, 0]).is_ok() && check(&histories, [3, 2]).is_ok());
        assert!(check(&histories, [3, 1]).is_err());
    }
}
