//! Writes the `tracing` events of the module, and of the crates that it uses, to the engine's log.

use std::io;

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use crate::api;

/// Installs the subscriber. A second load finds it installed and changes nothing.
pub(crate) fn install() {
    let result = tracing_subscriber::fmt()
        .with_writer(Lines)
        .with_ansi(false)
        .with_max_level(Level::INFO)
        .without_time() // the engine's log adds its own time and level
        .with_level(false)
        .with_target(false)
        .try_init();
    drop(result);
}

struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { level: Level::INFO, text: Vec::new() }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line {
        Line { level: *metadata.level(), text: Vec::new() }
    }
}

/// A line that is written to the log when it is dropped.
struct Line {
    level: Level,
    text: Vec<u8>,
}

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let level = if self.level <= Level::WARN { c"warning" } else { c"notice" };
        api::log(level, &String::from_utf8_lossy(&self.text));
    }
}
