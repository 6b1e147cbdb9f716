//! The output of the program. A reader that has gone (`| head`) is not an error: the program ends like every program
//! that writes into a closed pipe.

use signal_hook::consts::SIGPIPE;
use signal_hook::low_level::emulate_default_handler;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The exit code that a shell reports for a program that SIGPIPE ended.
const ENDED_BY_SIGPIPE: i32 = 128 + SIGPIPE;
/// As of a command that could not do what it was asked.
const FAILED: i32 = 2;

/// Prints a line on standard output; ends the program if it cannot be printed.
pub fn line(line: impl Display) {
    written(writeln!(io::stdout().lock(), "{line}"));
}

/// Says something on standard error, which is missing sometimes.
pub fn aside(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Ends the program if something could not be written to standard output.
pub fn written(result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(why) if why.kind() == ErrorKind::BrokenPipe => {
            let _ = emulate_default_handler(SIGPIPE);
            std::process::exit(ENDED_BY_SIGPIPE);
        }
        Err(why) => {
            aside(format_args!("hearth: cannot write to standard output: {why}"));
            std::process::exit(FAILED);
        }
    }
}

/// A path as a shell takes it for one word, in a command that a person is told to type.
pub fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |letter: char| letter.is_alphanumeric() || "/._-+,:@%=".contains(letter);
    if !path.is_empty() && path.chars().all(is_plain) {
        return path;
    }
    format!("'{}'", path.replace('\'', "'\\''"))
}

/// So many things: `1 lease`, `2 leases`.
pub fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_a_quoted_path_for_the_same_word() {
        for path in ["/tmp/plain-1.0", "/tmp/my cluster", "/tmp/it's", "/tmp/$HOME;`x`\"*", ""] {
            let script = format!("printf %s {}", quoted(Path::new(path)));
            let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&said.stdout), path);
        }
        assert_eq!(quoted(Path::new("/tmp/plain-1.0")), "/tmp/plain-1.0");
    }

    #[test]
    fn one_is_singular() {
        assert_eq!([0, 1, 2].map(|number| count(number, "lease")), ["0 leases", "1 lease", "2 leases"]);
    }
}
