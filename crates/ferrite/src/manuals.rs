//! `ferrite manuals`: writes man pages and completions, for packages. Hidden from the help.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

/// Write man pages, and completions for bash, zsh and fish
#[derive(Args)]
pub(crate) struct Options {
    /// Directory for the files
    directory: PathBuf,
}

pub(crate) fn run(options: &Options, command: clap::Command) -> anyhow::Result<()> {
    let directory = &options.directory;
    ferrite_config::manuals::write(command, directory)
        .with_context(|| format!("cannot write into {}", directory.display()))
}
