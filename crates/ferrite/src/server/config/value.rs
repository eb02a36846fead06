//! Converts single values of `ferrite.toml`. Errors say what the key expects.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use toml::de::DeValue;

use crate::size;

/// The smallest receive window of a client, as in the module.
const WINDOW_MIN: u32 = 4 << 10;
/// A week. A longer time is probably a mistake.
const TIME_MAX: Duration = Duration::from_secs(7 * 86_400);

/// A value of the file.
pub(super) struct Value<'a>(pub(super) &'a DeValue<'a>);

impl Value<'_> {
    pub(super) fn text(&self) -> Result<&str, String> {
        let text = self.0.as_str().ok_or("expected a quoted string")?;
        if text.contains(char::is_control) {
            return Err("must not contain control characters".into());
        }
        Ok(text)
    }

    pub(super) fn path(&self) -> Result<PathBuf, String> {
        match self.text()? {
            "" => Err("must not be empty".into()),
            text => Ok(text.into()),
        }
    }

    pub(super) fn yes_or_no(&self) -> Result<bool, String> {
        self.0.as_bool().ok_or_else(|| "expected true or false".into())
    }

    pub(super) fn number<T: TryFrom<i64>>(&self, min: i64, max: i64) -> Result<T, String> {
        let number = self.integer().filter(|number| (min..=max).contains(number));
        number
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| format!("expected a number from {min} to {max}"))
    }

    fn integer(&self) -> Option<i64> {
        let integer = self.0.as_integer()?;
        i64::from_str_radix(integer.as_str(), integer.radix()).ok()
    }

    /// Returns the choice with this name.
    pub(super) fn one_of<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T, String> {
        let found = self.0.as_str().and_then(|text| choices.iter().find(|(name, _)| *name == text));
        found.map(|(_, choice)| *choice).ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            format!("expected {}", names.join(" or "))
        })
    }

    /// Reads a time such as `"500ms"`, `"10s"`, `"5m"` or `"1h"`.
    pub(super) fn time(&self) -> Result<Duration, String> {
        let error = || "expected a time with its unit, from \"1ms\" to \"168h\"".to_owned();
        let text = self.text().map_err(|_| error())?;
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit_ms = match &text[digits.len()..] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(error()),
        };
        let number: u64 = digits.parse().map_err(|_| error())?;
        let time = number.checked_mul(unit_ms).map(Duration::from_millis);
        time.filter(|time| !time.is_zero() && *time <= TIME_MAX).ok_or_else(error)
    }

    /// Reads the size of a receive window, the memory that a client writes to.
    pub(super) fn window(&self) -> Result<u32, String> {
        let bytes = self.text().ok().and_then(|text| size::parse(text).ok());
        bytes
            .filter(|bytes| *bytes >= WINDOW_MIN)
            .ok_or_else(|| "expected a size with its unit, from \"4K\" to \"2M\"".into())
    }

    /// Reads an IP address with an optional port.
    pub(super) fn address(&self, default_port: u16) -> Result<SocketAddr, String> {
        let error = "expected one IP address of this host, with an optional port: \"192.0.2.1\" or \
                     \"[::]:6380\"";
        let text = self.text()?;
        let raw = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let with_port = || text.parse::<SocketAddr>().ok().filter(|address| address.port() != 0);
        let without = raw.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, default_port));
        without.or_else(with_port).ok_or_else(|| error.into())
    }

    /// Reads words without spaces: one, a list, or several in one string.
    pub(super) fn words(&self) -> Result<Vec<String>, String> {
        let words: Vec<String> = self
            .items()
            .map(|item| item.text().map(str::to_owned))
            .collect::<Result<Vec<_>, _>>()?
            .iter()
            .flat_map(|text| text.split([' ', ',']))
            .filter(|word| !word.is_empty())
            .map(Into::into)
            .collect();
        if words.iter().any(|word| word.contains(['"', '\'', '\\'])) {
            return Err("must not contain quotes or backslashes".into());
        }
        Ok(words)
    }

    /// Formats the value for the engine's configuration: one line for each item of a list.
    pub(super) fn lines(&self) -> Result<Vec<String>, String> {
        self.items().map(|item| item.line()).collect()
    }

    fn line(&self) -> Result<String, String> {
        match self.0 {
            DeValue::String(text) if text.is_empty() => Ok("\"\"".into()),
            DeValue::String(_) => self.text().map(Into::into),
            DeValue::Boolean(yes) => Ok(if *yes { "yes" } else { "no" }.into()),
            DeValue::Integer(_) => {
                self.integer().map(|number| number.to_string()).ok_or("number too large".into())
            }
            DeValue::Float(number) => Ok(number.as_str().into()),
            _ => Err("expected a string, a number, true, false, or a list of these".into()),
        }
    }

    fn items(&self) -> impl Iterator<Item = Value<'_>> {
        let items = self.0.as_array();
        let alone = items.is_none().then_some(Value(self.0));
        items
            .into_iter()
            .flat_map(|items| items.iter().map(|item| Value(item.get_ref())))
            .chain(alone)
    }
}
