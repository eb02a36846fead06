//! `--bigkeys` and `--memkeys`: find the largest key of each type, and compute averages.
//!
//! For the keys of each SCAN call, one pipeline requests the types and another requests the sizes.
//! Keys that are deleted before the server returns their type are skipped.

use std::fmt::Write as _;

use anyhow::{Context as _, bail};
use ferrite_proto::resp::{Value, encode_command};

use crate::connection::Frame;
use crate::format::{error_of, quote};
use crate::output;
use crate::progress::{Progress, Unit};
use crate::scan::Cursor;
use crate::server::Server;
use crate::settings::Scan;

/// How the size of a key is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Measure {
    /// The number of elements, or the length of a string in bytes.
    Elements,
    /// The memory of the key in bytes, estimated from this number of its elements. 0 means all
    /// elements, and `None` the server's default.
    Memory(Option<u64>),
}

/// Built-in types: the name, the command that returns the size, and the unit of the size.
const BUILT_IN_TYPES: [(&str, &str, &str); 6] = [
    ("string", "STRLEN", "bytes"),
    ("list", "LLEN", "items"),
    ("set", "SCARD", "members"),
    ("hash", "HLEN", "fields"),
    ("zset", "ZCARD", "members"),
    ("stream", "XLEN", "entries"),
];

/// The statistics of a type.
#[derive(Debug)]
struct TypeStats {
    name: String,
    /// `None` for types of modules.
    size_command: Option<&'static str>,
    unit: &'static str,
    count: u64,
    total: u64,
    biggest: Option<(Vec<u8>, u64)>,
}

/// The statistics of all keys.
struct KeyStats {
    measure: Measure,
    kinds: Vec<TypeStats>,
    keys: u64,
    key_bytes: u64,
}

/// Measures all keys, or as many as possible until the user interrupts.
pub(crate) async fn run(server: &mut Server, scan: &Scan, measure: Measure) -> anyhow::Result<()> {
    let frame = server.request(&["DBSIZE"]).await?;
    let reply = frame.value()?;
    if let Some(text) = error_of(&reply) {
        bail!("DBSIZE returned an error: {}", String::from_utf8_lossy(text));
    }
    let Value::Integer(all) = reply else { bail!("invalid reply to DBSIZE: expected a number") };
    let mut found = KeyStats::new(measure);
    let progress = Progress::new(Unit::Keys, u64::try_from(all).ok().filter(|all| *all > 0));
    let mut cursor = Cursor::new(scan);
    let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
    let mut is_complete = true;
    for step in 1_u64.. {
        let more = tokio::select! {
            more = found.step(server, &mut cursor, all, &progress) => more?,
            _ = &mut interrupted => {
                is_complete = false;
                false
            }
        };
        if !more {
            break;
        }
        if let Some(interval) = server.settings.interval.filter(|_| step.is_multiple_of(100)) {
            tokio::time::sleep(interval).await;
        }
    }
    progress.finish();
    let is_json = output::is_json(server.settings.format.style);
    let text = if is_json {
        server.settings.format.reply(&found.value(), false)
    } else {
        found.summary(is_complete, all)
    };
    output::write(&text)
}

impl KeyStats {
    fn new(measure: Measure) -> Self {
        let kind = |(name, command, unit): (&str, _, _)| TypeStats::new(name, Some(command), unit);
        Self { measure, kinds: BUILT_IN_TYPES.map(kind).into(), keys: 0, key_bytes: 0 }
    }

    /// Measures the keys of one SCAN call. Returns whether there may be more keys.
    async fn step(
        &mut self,
        server: &mut Server,
        cursor: &mut Cursor<'_>,
        all: i64,
        progress: &Progress,
    ) -> anyhow::Result<bool> {
        let (keys, has_more) = cursor.step(server).await?;
        let done = percent(self.keys, all);
        let mut bytes = Vec::new();
        keys.iter().for_each(|key| encode_command([b"TYPE", key.as_slice()], &mut bytes));
        let mut measured = Vec::new();
        for (key, frame) in keys.iter().zip(replies(server, &bytes, keys.len()).await?) {
            let reply = frame.value()?;
            if let Some(text) = error_of(&reply) {
                bail!("TYPE returned an error: {}", String::from_utf8_lossy(text));
            }
            let Value::Simple(name) = reply else {
                bail!("invalid reply to TYPE: expected a simple string");
            };
            if name != b"none" {
                measured.push((key, self.kind(&String::from_utf8_lossy(name))));
            }
        }
        let mut bytes = Vec::new();
        let mut requested = Vec::new();
        for (key, kind) in &measured {
            let is_requested = self.encode_size_request(key, *kind, &mut bytes);
            requested.push(is_requested);
        }
        let mut sizes =
            replies(server, &bytes, requested.iter().filter(|is_requested| **is_requested).count())
                .await?
                .into_iter();
        for ((key, kind), is_requested) in measured.into_iter().zip(requested) {
            let mut size = 0;
            if is_requested {
                let frame =
                    sizes.next().context("the server sent no reply with the size of a key")?;
                match frame.value()? {
                    Value::Integer(number) => size = u64::try_from(number).unwrap_or(0),
                    _ => output::write_stderr(format_args!(
                        "Warning: cannot get the size of {} (its type may have changed)",
                        quoted(key)
                    )),
                }
            }
            self.add(key, kind, size, progress.is_shown().then_some((progress, done)));
        }
        progress.set_done(self.keys);
        Ok(has_more)
    }

    /// Returns the index of a type. Adds the type if it is not in the list yet: modules can define
    /// types.
    fn kind(&mut self, name: &str) -> usize {
        self.kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
            self.kinds.push(TypeStats::new(name, None, "?"));
            self.kinds.len() - 1
        })
    }

    /// Appends the command that requests the size of a key. Returns false if there is no such
    /// command.
    fn encode_size_request(&self, key: &[u8], kind: usize, bytes: &mut Vec<u8>) -> bool {
        match (self.measure, self.kinds[kind].size_command) {
            (Measure::Memory(None), _) => encode_command([b"MEMORY", &b"USAGE"[..], key], bytes),
            (Measure::Memory(Some(samples)), _) => {
                let samples = samples.to_string();
                encode_command(
                    [b"MEMORY", &b"USAGE"[..], key, b"SAMPLES", samples.as_bytes()],
                    bytes,
                );
            }
            (Measure::Elements, Some(command)) => encode_command([command.as_bytes(), key], bytes),
            (Measure::Elements, None) => return false,
        }
        true
    }

    fn add(&mut self, key: &[u8], kind: usize, size: u64, progress: Option<(&Progress, f64)>) {
        self.keys += 1;
        self.key_bytes += key.len() as u64;
        let kind = &mut self.kinds[kind];
        let unit = kind.unit(self.measure);
        kind.count += 1;
        kind.total += size;
        if size > kind.biggest.as_ref().map_or(0, |(_, size)| *size) {
            if let Some((progress, done)) = progress {
                let line = format!(
                    "[{done:05.2}%] Biggest {:<6} found so far '{}' with {size} {unit}",
                    kind.name,
                    quoted(key)
                );
                progress.above(|| output::write_stderr(line));
            }
            kind.biggest = Some((key.to_vec(), size));
        }
    }

    /// Returns the summary for people, in redis-cli's format.
    fn summary(&self, is_complete: bool, all: i64) -> Vec<u8> {
        let mut text = "\n-------- summary -------\n\n".to_owned();
        if !is_complete {
            let _ = write!(text, "[{:05.2}%] ", percent(self.keys, all));
        }
        let _ = writeln!(text, "Sampled {} keys in the keyspace!", self.keys);
        let average = ratio(self.key_bytes, self.keys);
        let _ = writeln!(
            text,
            "Total key length in bytes is {} (avg len {average:.2})\n",
            self.key_bytes
        );
        for kind in &self.kinds {
            if let Some((key, size)) = &kind.biggest {
                let _ = writeln!(
                    text,
                    "Biggest {:>6} found '{}' has {size} {}",
                    kind.name,
                    quoted(key),
                    kind.unit(self.measure)
                );
            }
        }
        text.push('\n');
        for kind in &self.kinds {
            let TypeStats { name, count, total, .. } = kind;
            let share = 100.0 * ratio(*count, self.keys);
            let average = ratio(*total, *count);
            let unit = kind.unit(self.measure);
            let _ = writeln!(
                text,
                "{count} {name}s with {total} {unit} ({share:05.2}% of keys, avg size {average:.2})"
            );
        }
        text.into_bytes()
    }

    /// Returns the summary for scripts.
    fn value(&self) -> Value<'_> {
        let types = self
            .kinds
            .iter()
            .map(|kind| (Value::Bulk(kind.name.as_bytes()), kind.value(self.measure)));
        Value::Map(vec![
            (Value::Bulk(b"keys"), integer(self.keys)),
            (Value::Bulk(b"key_bytes"), integer(self.key_bytes)),
            (Value::Bulk(b"types"), Value::Map(types.collect())),
        ])
    }
}

impl TypeStats {
    fn new(name: &str, size_command: Option<&'static str>, unit: &'static str) -> Self {
        Self { name: name.to_owned(), size_command, unit, count: 0, total: 0, biggest: None }
    }

    fn unit(&self, measure: Measure) -> &'static str {
        match measure {
            Measure::Elements => self.unit,
            Measure::Memory(_) => "bytes",
        }
    }

    fn value(&self, measure: Measure) -> Value<'_> {
        let biggest = self.biggest.as_ref().map_or(Value::Null, |(key, size)| {
            Value::Map(vec![
                (Value::Bulk(b"key"), Value::Bulk(key)),
                (Value::Bulk(b"size"), integer(*size)),
            ])
        });
        Value::Map(vec![
            (Value::Bulk(b"count"), integer(self.count)),
            (Value::Bulk(b"total"), integer(self.total)),
            (Value::Bulk(b"unit"), Value::Bulk(self.unit(measure).as_bytes())),
            (Value::Bulk(b"biggest"), biggest),
        ])
    }
}

fn integer(value: u64) -> Value<'static> {
    Value::Integer(i64::try_from(value).unwrap_or(i64::MAX))
}

async fn replies(server: &mut Server, commands: &[u8], count: usize) -> anyhow::Result<Vec<Frame>> {
    let connection = server.connection()?;
    if count > 0 {
        connection.send_bytes(commands).await?;
    }
    let mut frames = Vec::with_capacity(count);
    while frames.len() < count {
        let frame = connection.frame().await?;
        if !frame.is_push() {
            frames.push(frame);
        }
    }
    Ok(frames)
}

fn quoted(key: &[u8]) -> String {
    let mut text = Vec::new();
    quote(key, &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn percent(part: u64, whole: i64) -> f64 {
    100.0 * ratio(part, u64::try_from(whole).unwrap_or(0))
}
