//! Formats replies: byte for byte as redis-cli does, except as JSON.
//!
//! | file | format |
//! |---|---|
//! | `human.rs` | for people at a terminal: with types, quotes and element numbers |
//! | `raw.rs` | for pipes: the bytes of the reply |
//! | `csv.rs` | `--csv` |
//! | `json.rs` | `--json`, `--quoted-json`: always one line of valid JSON, unlike redis-cli |

use ferrite_proto::resp::Value;

mod csv;
mod human;
mod json;
mod quote;
mod raw;

pub(crate) use quote::quote;

/// The style in which replies are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Formatted for people.
    Human,
    /// The bytes of the reply.
    Raw,
    /// Comma-separated values.
    Csv,
    /// JSON. Bytes that are not UTF-8 become U+0080 to U+00FF.
    Json,
    /// JSON whose strings have the same escapes as in the human format, so that no byte is lost.
    QuotedJson,
}

/// A style and its delimiters.
#[derive(Debug, Clone)]
pub(crate) struct Format {
    pub(crate) style: Style,
    /// The delimiter between the elements of a raw reply.
    pub(crate) element_delimiter: Vec<u8>,
    /// The delimiter after a raw reply.
    pub(crate) reply_delimiter: Vec<u8>,
}

impl Format {
    pub(crate) fn new(style: Style) -> Self {
        Self { style, element_delimiter: b"\n".to_vec(), reply_delimiter: b"\n".to_vec() }
    }

    /// Formats a reply. Replies that are `text`, such as INFO's, are quoted only in JSON.
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
                return out; // the lines of this format already end with a newline
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

    /// Formats the error for an invalid line, which was not sent to the server. The error goes to
    /// stdout, as in redis-cli.
    pub(crate) fn usage_error(&self, text: &str) -> Vec<u8> {
        match self.style {
            Style::Json | Style::QuotedJson => self.reply(&Value::Error(text.as_bytes()), false),
            _ => format!("{text}\n").into_bytes(),
        }
    }

    /// Formats a push message.
    pub(crate) fn push(&self, push: &Value<'_>) -> Vec<u8> {
        match (self.style, human::invalidation(push)) {
            (Style::Human, Some(line)) => line,
            _ => self.reply(push, false),
        }
    }
}

/// Returns the value without its attributes.
fn without_attributes<'a, 'b>(value: &'b Value<'a>) -> &'b Value<'a> {
    match value {
        Value::Attributed { value, .. } => value,
        value => value,
    }
}

/// Returns the text of an error reply, or `None` if the reply is not an error.
pub(crate) fn error_of<'a>(reply: &Value<'a>) -> Option<&'a [u8]> {
    match without_attributes(reply) {
        Value::Error(text) | Value::BlobError(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
