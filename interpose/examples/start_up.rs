//! The cost of the library for a program that does nothing: `start_up LIBRARY [ROUNDS]` runs `/bin/true` without the
//! library, with it but without a mount, and with it over a mirror, in turns, and prints the lowest and the median time
//! of each.

use std::process::{Command, Stdio};
use std::time::Instant;

#[allow(clippy::disallowed_methods, reason = "a measurement for people")]
fn milliseconds(settings: &[(&str, &str)]) -> f64 {
    let mut command = Command::new("/bin/true");
    command.envs(settings.iter().copied()).stdin(Stdio::null());
    let start = Instant::now();
    let status = command.status().expect("/bin/true runs");
    assert!(status.success(), "{status}");
    start.elapsed().as_secs_f64() * 1000.0
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let library = arguments.next().expect("start_up LIBRARY [ROUNDS]");
    let rounds: usize = arguments.next().map_or(300, |rounds| rounds.parse().expect("a number"));
    let preload = ("LD_PRELOAD", library.as_str());
    let serving = [preload, ("HEARTH_AT", "/tmp/hearth-start"), ("HEARTH_MIRROR_ROOT", "/tmp")];
    let kinds: [(&str, &[(&str, &str)]); 3] =
        [("without", &[]), ("preloaded, nothing to serve", &[preload]), ("serving", &serving)];
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..rounds {
        for ((_, settings), times) in kinds.iter().zip(&mut times) {
            times.push(milliseconds(settings));
        }
    }
    for ((name, _), times) in kinds.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        println!("{name:28} lowest {:.2} ms, middle {:.2} ms", times[0], times[times.len() / 2]);
    }
}
