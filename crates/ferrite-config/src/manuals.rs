//! Man pages and completions, made from a command line's own definition.
//!
//! Packages contain the files that this module writes. No copy of them is kept, so they cannot
//! differ from the program.

use std::io;
use std::path::Path;

use clap_complete::Shell;

/// Writes a man page for `command` and one for each of its visible subcommands, and completions for
/// bash, zsh and fish.
///
/// # Errors
/// If a file cannot be written.
pub fn write(mut command: clap::Command, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, &name, directory)?;
    }
    clap_mangen::generate_to(command, directory)
}
