//! Replies as text: byte for byte what redis-cli prints, but for what `--json` must not be (below).
//!
//! | file | for |
//! |---|---|
//! | `human.rs` | people at a terminal: types, quotes and numbers of elements |
//! | `raw.rs` | pipes: the bytes themselves |
//! | `csv.rs` | `--csv` |
//! | `json.rs` | `--json`, `--quoted-json`: always one line of valid JSON, also for errors and where redis-cli prints none |

use ferrite_proto::resp::Value;

mod csv;
mod human;
mod json;
mod quote;
mod raw;

pub(crate) use quote::quote;

/// How replies are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// For people.
    Human,
    /// The bytes.
    Raw,
    /// Comma-separated.
    Csv,
    /// JSON; bytes that are no text become U+0080 to U+00FF.
    Json,
    /// JSON whose strings are quoted as people see them: no byte is lost.
    QuotedJson,
}

/// A style and its separators.
#[derive(Debug, Clone)]
pub(crate) struct Format {
    pub(crate) style: Style,
    /// Between the elements of a raw reply.
    pub(crate) element_delimiter: Vec<u8>,
    /// After a raw reply.
    pub(crate) reply_delimiter: Vec<u8>,
}

impl Format {
    pub(crate) fn new(style: Style) -> Self {
        Self { style, element_delimiter: b"\n".to_vec(), reply_delimiter: b"\n".to_vec() }
    }

    /// One reply. Replies that are `text`, such as that of INFO, are not quoted.
    pub(crate) fn reply(&self, reply: &Value<'_>, text: bool) -> Vec<u8> {
        let mut out = Vec::new();
        match self.style {
            Style::Json => json::write(reply, json::Strings::Text, &mut out),
            Style::QuotedJson => json::write(reply, json::Strings::Quoted, &mut out),
            _ if text => {
                raw::write(reply, &self.element_delimiter, &mut out);
                return out;
            }
            Style::Human => {
                human::write(reply, &mut out);
                return out; // which ends its lines itself
            }
            Style::Raw => {
                raw::write(reply, &self.element_delimiter, &mut out);
                out.extend_from_slice(&self.reply_delimiter);
                return out;
            }
            Style::Csv => csv::write(reply, &mut out),
        }
        out.push(b'\n');
        out
    }

    /// What is wrong with a line that no server saw: on stdout, as redis-cli does it.
    pub(crate) fn complaint(&self, text: &str) -> Vec<u8> {
        match self.style {
            Style::Json | Style::QuotedJson => self.reply(&Value::Error(text.as_bytes()), false),
            _ => format!("{text}\n").into_bytes(),
        }
    }

    /// What the server said unasked.
    pub(crate) fn push(&self, push: &Value<'_>) -> Vec<u8> {
        match (self.style, human::invalidation(push)) {
            (Style::Human, Some(line)) => line,
            _ => self.reply(push, false),
        }
    }
}

/// The value itself: what is said about it aside.
fn raw<'a, 'b>(value: &'b Value<'a>) -> &'b Value<'a> {
    match value {
        Value::Attributed { value, .. } => value,
        value => value,
    }
}

/// Whether a reply is an error.
pub(crate) fn error_of<'a>(reply: &Value<'a>) -> Option<&'a [u8]> {
    match raw(reply) {
        Value::Error(text) | Value::BlobError(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
