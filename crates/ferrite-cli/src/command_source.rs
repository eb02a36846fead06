//! Where commands come from, which decides what a failure means. Separate, because what runs
//! commands and what follows redirects both need it.

/// Where commands come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandSource {
    /// The command line. It has one command, and any failure ends the program.
    CommandLine,
    /// The terminal or stdin. A failure is reported, and the next command runs.
    Lines,
}
