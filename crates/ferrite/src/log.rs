//! The log of long-running programs: one line on stderr for each event, as text or JSON.
//!
//! ```text
//! 2026-11-18T07:40:00.123456Z  WARN RDMA device mlx5_0: port 1 went down
//! {"time":"2026-11-18T07:40:00.123456Z","level":"WARN","message":"RDMA device mlx5_0: port …"}
//! ```

use std::fmt::{self, Write as _};
use std::io::{IsTerminal as _, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_config::{Values, table};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Registry, reload};

/// The installed log.
struct Log {
    level: reload::Handle<LevelFilter, Registry>,
    is_json: bool,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// Installs the log that the settings ask for.
pub(crate) fn install(values: &Values) {
    let is_json = values.text(&table::LOG) == Some("json");
    let (filter, level) = reload::Layer::new(level(values));
    let layer = tracing_subscriber::fmt::layer().with_writer(|| Lines).with_target(false);
    let base = tracing_subscriber::registry().with(filter);
    let installed = match is_json {
        true => base.with(layer.event_format(JsonLines)).try_init(),
        false => base.with(layer.with_ansi(has_colors())).try_init(),
    };
    // `try_init` fails only if a log is installed already, which then stays in use.
    if installed.is_ok() {
        let _ = LOG.set(Log { level, is_json });
    }
}

/// Returns whether lines may have colors: on a terminal, unless NO_COLOR is set and not empty.
fn has_colors() -> bool {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::stderr().is_terminal() && !is_refused
}

/// Changes the level to that of the settings.
pub(crate) fn set_level(values: &Values) {
    if let Some(log) = LOG.get() {
        let _ = log.level.modify(|current| *current = level(values));
    }
}

/// Returns whether log lines are JSON.
pub(crate) fn is_json() -> bool {
    LOG.get().is_some_and(|log| log.is_json)
}

/// Returns whether there is a log.
pub(crate) fn is_installed() -> bool {
    LOG.get().is_some()
}

fn level(values: &Values) -> LevelFilter {
    let level = values.text(&table::LOG_LEVEL).and_then(|level| level.parse().ok());
    level.unwrap_or(LevelFilter::INFO)
}

/// Returns the time in UTC, in the format of the text log.
fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// Passes a line of another program on to our log. A text log gets `line` unchanged; a JSON log
/// gets an object with the source, the level and the message.
pub(crate) fn pass_on(source: &str, level: &str, message: &str, line: &[u8]) {
    // stderr may be closed.
    let _ = match is_json() {
        false => Lines.write_all(line),
        true => {
            let object = json_line(level, message, [("source".to_owned(), source.into())]);
            Lines.write_all(object.as_bytes())
        }
    };
}

/// Whether the last line of the terminal shows a status.
static IS_STATUS_SHOWN: AtomicBool = AtomicBool::new(false);
/// Moves to the start of the line and erases it.
const ERASE_LINE: &str = "\r\x1b[K";

/// Shows a status in the last line, if stderr is a terminal. The next line of the log replaces it.
pub(crate) fn show_status(text: &str) {
    let mut stderr = std::io::stderr().lock();
    if stderr.is_terminal() {
        IS_STATUS_SHOWN.store(true, Ordering::Relaxed);
        let _ = write!(stderr, "{ERASE_LINE}{text}").and_then(|()| stderr.flush());
    }
}

/// Writes lines to stderr.
struct Lines;

impl std::io::Write for Lines {
    /// Writes a line in one call, so that it does not mix with others.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let mut stderr = std::io::stderr().lock();
        let erase = IS_STATUS_SHOWN.swap(false, Ordering::Relaxed);
        let erase = if erase { ERASE_LINE.as_bytes() } else { b"" };
        stderr.write_all(&[erase, line].concat())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn json_line(
    level: &str,
    message: &str,
    fields: impl IntoIterator<Item = (String, Value)>,
) -> String {
    let mut object = Map::new();
    object.insert("time".into(), now().into());
    object.insert("level".into(), level.into());
    object.insert("message".into(), message.into());
    object.extend(fields);
    format!("{}\n", Value::Object(object))
}

/// Formats each event as an object on a line of its own.
struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        // The agent of `ferrite server` runs in a span. A text line begins with the span's name.
        if let Some(span) = context.lookup_current() {
            fields.others.insert("source".into(), span.name().into());
        }
        let level = event.metadata().level().as_str();
        writer.write_str(&json_line(level, &fields.message, fields.others))
    }
}

/// The fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn set(&mut self, field: &Field, value: impl Into<Value>) {
        self.others.insert(field.name().into(), value.into());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message.clear();
            let _ = write!(self.message, "{value:?}");
        } else {
            self.set(field, format!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_lines_have_a_time_a_level_and_a_message() {
        let line = json_line("WARN", "two\nlines \"quoted\"", [("count".to_owned(), 3.into())]);
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        let object: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(object["level"], "WARN");
        assert_eq!(object["message"], "two\nlines \"quoted\"");
        assert_eq!(object["count"], 3);
        let time = object["time"].as_str().expect("text");
        assert!(time.len() == 27 && time.ends_with('Z') && time.contains('T'), "{time}");
    }
}
