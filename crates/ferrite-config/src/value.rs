//! The value of a setting: parsed from text, and formatted as text.

use std::fmt;
use std::time::Duration;

use crate::kind::Kind;
use crate::time::Unit;
use crate::{size, time};

/// The value of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A value of [`Kind::Switch`].
    Switch(bool),
    /// A value of [`Kind::Number`].
    Number(i64),
    /// A value of [`Kind::Size`], in bytes.
    Size(u64),
    /// A value of [`Kind::Time`].
    Time(Duration),
    /// A value of [`Kind::Choice`] or [`Kind::Text`].
    Text(String),
    /// A value of [`Kind::List`].
    List(Vec<String>),
}

impl Value {
    /// Parses and checks a value.
    pub(crate) fn parse(kind: &Kind, text: &str) -> Result<Self, String> {
        let error = || format!("expected {}", kind.expected());
        if text.contains(char::is_control) {
            return Err("must not contain control characters".into());
        }
        let value = match kind {
            Kind::Switch => match text.to_ascii_lowercase().as_str() {
                "yes" | "true" => Self::Switch(true),
                "no" | "false" => Self::Switch(false),
                _ => return Err(error()),
            },
            Kind::Number { .. } => Self::Number(text.parse().map_err(|_| error())?),
            Kind::Size { .. } => {
                Self::Size(size::parse(text).map_err(|_| spaced(kind, text).unwrap_or_else(error))?)
            }
            Kind::Time { bare, .. } => Self::Time(
                time::parse(text, *bare).map_err(|_| spaced(kind, text).unwrap_or_else(error))?,
            ),
            Kind::Choice(choices) => {
                let found = choices.iter().find(|choice| choice.eq_ignore_ascii_case(text));
                Self::Text((*found.ok_or_else(error)?).into())
            }
            Kind::Text(_) => Self::Text(text.into()),
            Kind::List(_) => Self::List(words(text)),
        };
        value.check(kind).map(|()| value)
    }

    /// Checks that the value fits its kind.
    pub(crate) fn check(&self, kind: &Kind) -> Result<(), String> {
        let fits = match (kind, self) {
            (Kind::Switch, Self::Switch(_)) => true,
            (Kind::Number { min, max }, Self::Number(number)) => (min..=max).contains(&number),
            (Kind::Size { min, max }, Self::Size(bytes)) => (min..=max).contains(&bytes),
            (Kind::Time { min, max, .. }, Self::Time(time)) => (min..=max).contains(&time),
            (Kind::Choice(choices), Self::Text(text)) => choices.contains(&text.as_str()),
            (Kind::Text(check), Self::Text(text)) => check(text).is_ok(),
            (Kind::List(check), Self::List(words)) => {
                if words.iter().any(|word| word.contains(['"', '\'', '\\'])) {
                    return Err("must not contain quotes or backslashes".into());
                }
                words.iter().all(|word| check(word).is_ok())
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err(format!("expected {}", kind.expected())) }
    }
}

/// Returns the error for a value that is right without its spaces.
fn spaced(kind: &Kind, text: &str) -> Option<String> {
    let joined: String = text.split_whitespace().collect();
    let is_right = joined != text && Value::parse(kind, &joined).is_ok();
    is_right.then(|| format!("a number and its unit have no space between them: write {joined}"))
}

/// Returns each word once: a device or an address that is named twice is the same one.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for word in text.split([',', ' ']).filter(|word| !word.is_empty()) {
        if !words.iter().any(|known| known == word) {
            words.push(word.to_owned());
        }
    }
    words
}

/// Formats the value as an argument of the module or a flag. The result parses to the same value.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(is_on) => f.write_str(if *is_on { "yes" } else { "no" }),
            Self::Number(number) => number.fmt(f),
            Self::Size(bytes) => f.write_str(&size::format(*bytes)),
            Self::Time(time) => f.write_str(&time::format(*time)),
            Self::Text(text) => f.write_str(text),
            Self::List(words) => f.write_str(&words.join(",")),
        }
    }
}

/// Formats a bound as a whole number of this unit, rounded down. A bound that is less than 1 of the
/// unit gets a smaller unit.
fn bound(unit: Unit, time: Duration) -> String {
    match unit.count(time) {
        0 if !time.is_zero() => time::format(time),
        count => count.to_string(),
    }
}

impl Kind {
    /// Describes the values.
    #[must_use]
    pub fn expected(&self) -> String {
        match self {
            Self::Switch => "yes or no".into(),
            Self::Number { min, max } => format!("a number from {min} to {max}"),
            Self::Size { min, max } => {
                format!("a size from {} to {}", size::format(*min), size::format(*max))
            }
            Self::Time { bare: Some(unit), min, max } => format!(
                "a number of {} from {} to {}, or a time with its unit",
                unit.name(),
                bound(*unit, *min),
                bound(*unit, *max)
            ),
            Self::Time { bare: None, min, max } => {
                format!(
                    "a time with its unit, from {} to {}",
                    time::format(*min),
                    time::format(*max)
                )
            }
            Self::Choice(choices) => choices.join(" or "),
            Self::Text(check) => check("\0").err().unwrap_or("text").into(),
            Self::List(check) => check("\0").err().unwrap_or("words").into(),
        }
    }

    /// Describes the unit or the words, for tables.
    #[must_use]
    pub fn unit(&self) -> String {
        match self {
            Self::Switch => "yes, no".into(),
            Self::Number { .. } => "number".into(),
            Self::Size { .. } => "bytes".into(),
            Self::Time { bare: Some(unit), .. } => unit.name().into(),
            Self::Time { bare: None, .. } => "time".into(),
            Self::Choice(choices) => choices.join(", "),
            Self::Text(_) => "text".into(),
            Self::List(_) => "words".into(),
        }
    }

    /// Describes the range, for tables. Empty if there is none.
    #[must_use]
    pub fn range(&self) -> String {
        match self {
            Self::Number { min, max } => format!("{min} to {max}"),
            Self::Size { min, max } => format!("{} to {}", size::format(*min), size::format(*max)),
            Self::Time { bare: Some(unit), min, max } => {
                format!("{} to {}", bound(*unit, *min), bound(*unit, *max))
            }
            Self::Time { min, max, .. } => {
                format!("{} to {}", time::format(*min), time::format(*max))
            }
            Self::Switch | Self::Choice(_) | Self::Text(_) | Self::List(_) => String::new(),
        }
    }
}
