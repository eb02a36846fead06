//! Where commands come from, which decides what a failure means. This is a module of its own,
//! because `issue` (runs commands) and `cluster` (follows redirects) both use it.

/// Where commands come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandSource {
    /// The command line. It has one command, and any failure ends the program.
    CommandLine,
    /// The terminal or stdin. A failure is reported, and the next command runs.
    Lines,
}
