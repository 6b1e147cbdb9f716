//! Man pages and shell completions, made from the definitions of the commands, for `make install`.

use super::{Arguments, Pages};
use crate::error::{Error, Result};
use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use std::process::ExitCode;

pub(super) fn run(arguments: &Pages) -> Result<ExitCode> {
    let folder = &arguments.folder;
    let command = Arguments::command();
    clap_mangen::generate_to(command.clone(), folder).map_err(Error::at("write", folder))?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command.clone(), "hearth", folder).map_err(Error::at("write", folder))?;
    }
    Ok(ExitCode::SUCCESS)
}
