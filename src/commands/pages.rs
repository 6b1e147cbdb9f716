//! Man pages and shell completions, made from the definitions of the commands, for `make install`.

use super::{Arguments, Pages};
use crate::error::{Error, Result};
use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};
use std::process::ExitCode;

pub(super) fn run(arguments: &Pages) -> Result<ExitCode> {
    let folder = &arguments.folder;
    let command = Arguments::command();
    let mut completed = without_hidden(&command).version(env!("CARGO_PKG_VERSION")).propagate_version(true);
    clap_mangen::generate_to(command, folder).map_err(Error::at("write", folder))?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut completed, "hearth", folder).map_err(Error::at("write", folder))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A command with the parts that a completion shows: completions offer hidden commands too.
fn without_hidden(command: &Command) -> Command {
    let shown = command.get_subcommands().filter(|one| !one.is_hide_set());
    // This process ends soon, and names in definitions are static.
    Command::new(&*command.get_name().to_owned().leak())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments().cloned())
        .subcommands(shown.map(without_hidden))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_offer_no_hidden_command() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut without_hidden(&Arguments::command()), "hearth", &mut text);
            let text = String::from_utf8(text).expect("text");
            for hidden in Arguments::command().get_subcommands().filter(|one| one.is_hide_set()) {
                let about = hidden.get_about().expect("each command says what it does").to_string();
                let word = format!("hearth,{}", hidden.get_name());
                assert!(!text.contains(&about) && !text.contains(&word), "{shell}: {}", hidden.get_name());
            }
            assert!(text.contains("umount"), "{shell}");
        }
    }
}
