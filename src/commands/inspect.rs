//! `hearth inspect`: shows a pool's tree, an item a line.

use super::{PoolFolder, check};
use crate::error::{Error, Result};
use crate::say;
use area::{Area, Limits};
use std::io::Write;
use std::process::ExitCode;

pub(super) fn run(arguments: &PoolFolder) -> Result<ExitCode> {
    let medium = check::open(&arguments.pool)?;
    let _lock = check::lock(&medium, &arguments.pool)?;
    let area = Area::open(&medium, Limits::default()).map_err(Error::at("open", &arguments.pool))?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut print = |text: &str| say::written(writeln!(out, "{}", line(arguments, text)));
    print(&area::inspect::headline(&area));
    area::inspect::items(&area, &mut |item| print(&item)).map_err(Error::at("read", &arguments.pool))?;
    say::written(out.flush());
    Ok(ExitCode::SUCCESS)
}

/// For machines: one JSON string a line.
fn line(arguments: &PoolFolder, text: &str) -> String {
    if arguments.json { serde_json::Value::from(text).to_string() } else { text.to_owned() }
}
