//! What the program prints. A reader that has gone (`| head`) is no error of anybody's: the program ends as every other
//! that writes into a closed pipe does.

use signal_hook::consts::SIGPIPE;
use signal_hook::low_level::emulate_default_handler;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// What a shell says of a program that SIGPIPE ended.
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
