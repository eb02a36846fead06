//! Man pages and completions, made from a command line's own definition.
//!
//! Packages contain the files that this module writes. No copy of them is kept, so they cannot
//! differ from the program.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap_complete::Shell;

/// Returns the directory if the arguments of a program are `--write-manuals DIRECTORY`.
///
/// The option is not part of a program's clap definition, because completions would offer it even
/// if it were hidden.
pub fn requested(arguments: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    let arguments: Vec<_> = arguments.skip(1).collect();
    match &arguments[..] {
        [option, directory] if option == "--write-manuals" => Some(directory.into()),
        _ => None,
    }
}

/// Writes a man page for `command` and one for each of its visible subcommands, and completions for
/// bash, zsh and fish.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn write(mut command: clap::Command, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    clap_mangen::generate_to(without_help(command.clone()), directory)?;
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, &name, directory)?;
    }
    Ok(())
}

/// Removes the subcommands `help`, because they would add one more page for each other page.
fn without_help(command: clap::Command) -> clap::Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognises_the_option_alone() {
        let requested = |words: &[&str]| requested(words.iter().map(OsString::from));
        assert_eq!(requested(&["ferrite", "--write-manuals", "x"]), Some("x".into()));
        assert_eq!(requested(&["ferrite", "--write-manuals"]), None);
        assert_eq!(requested(&["ferrite-cli", "SET", "--write-manuals", "x"]), None);
    }
}
