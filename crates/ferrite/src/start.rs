//! What the programs that run until a signal do at their start.

use std::path::Path;

use ferrite_config::Values;

use crate::log;
use crate::reload::Reload;
use crate::settings::{Flags, HasSettings, warn_of_unknown_variables};
use crate::signals::Signals;

/// Returns the settings, and installs the log that they ask for.
pub(crate) fn values<P: HasSettings>(
    flags: &Flags<P>,
    file: Option<&Path>,
) -> anyhow::Result<Values> {
    let values = flags.values(file)?;
    log::install(&values);
    warn_of_unknown_variables();
    Ok(values)
}

/// Runs a program on this thread alone. One thread is enough, because sessions only copy bytes, and
/// it avoids wake-ups between threads.
pub(crate) fn block_on<T>(program: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(program);
    // Does not wait for a thread that looks for the address of a name, which may take long.
    runtime.shutdown_background();
    ended
}

/// Handles the signals of a program from now on. Call this before the program reports that it runs:
/// without a handler, a SIGHUP would end the program.
pub(crate) fn handle_signals<'a, P: HasSettings>(
    values: &Values,
    flags: &'a Flags<P>,
    file: Option<&'a Path>,
) -> std::io::Result<(Signals, Reload<impl Fn() -> anyhow::Result<Values> + use<'a, P>>)> {
    Ok((Signals::new()?, Reload::new(values, move || flags.values(file))?))
}
