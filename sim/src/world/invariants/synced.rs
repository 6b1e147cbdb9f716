//! Every operation that an fsync acknowledged is there at whichever node leads next, and no operation is there that was
//! never done.

use super::History;

/// `found`: how many operations of the program are there.
///
/// # Errors
/// Some are lost, or there are more than were begun.
pub fn check(program: usize, history: &History, found: usize) -> Result<(), String> {
    if found < history.synced {
        let synced = history.synced;
        return Err(format!("program {program} synced {synced} operations, and {found} are there"));
    }
    // The one after the last that returned may have been under way.
    if found > history.done + 1 {
        let done = history.done;
        return Err(format!("program {program} did {done} operations, and {found} are there"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_or_made_up_is_found() {
        let history = History { done: 5, synced: 3, seen: vec![0; 6] };
        assert!((0..3).chain(7..9).all(|found| check(0, &history, found).is_err()));
        assert!((3..7).all(|found| check(0, &history, found).is_ok()));
    }
}
