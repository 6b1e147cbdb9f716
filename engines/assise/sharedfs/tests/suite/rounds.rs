//! Rounds of hostility by seed: so many in a test of every day, or for a time. `scripts/fuzz` runs them for minutes:
//! HEARTH_FUZZ_SECONDS says how long, HEARTH_FUZZ_SEED where to begin; the seed of a round that failed is printed.

use crate::support::Draws;
use ipc::host::Host;
use ipc::{SystemHost, Word};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

/// A round that takes longer hangs: the tested side does not answer.
const ROUND_MAX: Duration = Duration::from_secs(120);

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// Does rounds: as many as `slice`, or for the time that is asked for.
pub fn rounds(name: &str, slice: u64, mut round: impl FnMut(&mut Draws)) {
    let first = variable("HEARTH_FUZZ_SEED").unwrap_or(1 << 32);
    let seconds = variable("HEARTH_FUZZ_SECONDS");
    let begun = SystemHost.now();
    let goes_on = |done: u64| match seconds {
        Some(seconds) => SystemHost.now().since(begun) < Duration::from_secs(seconds),
        None => done < slice,
    };
    let mut done = 0;
    while goes_on(done) {
        let seed = first + done;
        let watch = Watch::begin(format!("{name}: the round of seed {seed} hangs"));
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| round(&mut Draws(seed))));
        drop(watch);
        if let Err(panic) = result {
            eprintln!("{name}: the round of seed {seed} failed ({done} rounds before)");
            std::panic::resume_unwind(panic);
        }
        done += 1;
    }
    println!("{name}: {done} rounds from seed {first}: passed");
}

/// Ends the process, saying why, if it is not dropped in time.
struct Watch(Arc<Word>);

impl Watch {
    fn begin(what: String) -> Self {
        let over = Arc::new(Word::new(0));
        let (seen, until) = (over.clone(), SystemHost.now().after(ROUND_MAX));
        let watch = move || {
            // Acquire: nothing is published with it.
            while seen.load(ipc::sync::Ordering::Acquire) == 0 {
                if SystemHost.now() >= until {
                    eprintln!("{what}");
                    std::process::abort();
                }
                SystemHost.wait(&seen, 0, Some(until));
            }
        };
        SystemHost.spawn("watch", Box::new(watch)).unwrap();
        Self(over)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.store(1, ipc::sync::Ordering::Release);
        SystemHost.wake(&self.0, ipc::host::WAKE_ALL);
    }
}
