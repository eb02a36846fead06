//! The metrics of the program itself: its name and version, and whether it accepts clients.

use crate::exposition::Exposition;

/// Writes the program's name and version.
pub fn program_metrics(name: &str, out: &mut Exposition) {
    let labels = vec![("program", name), ("version", env!("CARGO_PKG_VERSION"))];
    out.gauges("build_info", "The program and its version; always 1", &[(labels, 1)]);
}

/// Writes whether the program accepts clients.
pub fn listener_metrics(is_up: bool, out: &mut Exposition) {
    out.gauge("listener_up", "Whether the program accepts clients", is_up.into());
}
