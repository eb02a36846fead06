//! What the library says, in the engine's log.

use std::io;

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use crate::api;

/// From now on. A second load finds it done.
pub(crate) fn install() {
    let done = tracing_subscriber::fmt()
        .with_writer(Lines)
        .with_ansi(false)
        .with_max_level(Level::INFO)
        .without_time() // the engine's log has its own, and levels
        .with_level(false)
        .with_target(false)
        .try_init();
    drop(done);
}

struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { level: Level::INFO, text: Vec::new() }
    }

    fn make_writer_for(&'a self, about: &Metadata<'_>) -> Line {
        Line { level: *about.level(), text: Vec::new() }
    }
}

/// Logged when it is whole.
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
