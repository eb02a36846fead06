//! Stdout, which may be a pipe that nobody reads any more.

use std::io::{self, Write as _};

use crate::format::Style;

/// Whoever read stdout has gone: nothing more can be said there, and nothing needs to be.
#[derive(Debug)]
pub(crate) struct NobodyReads;

impl std::fmt::Display for NobodyReads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads the output")
    }
}

impl std::error::Error for NobodyReads {}

/// Writes now: who reads may wait for it.
pub(crate) fn write(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => NobodyReads.into(),
        _ => anyhow::Error::from(error).context("writing to stdout"),
    })
}

pub(crate) fn is_json(style: Style) -> bool {
    matches!(style, Style::Json | Style::QuotedJson)
}
