//! Turns a value of TOML into the text that [`Setting::parse`] reads. A value of the wrong type is
//! an error that says what the file should have.

use toml::de::DeValue;

use crate::kind::Kind;
use crate::setting::{Alias, AliasForm, Setting};

/// Returns the text of a value that has the right type.
pub(super) fn of(
    kind: &Kind,
    alias: Option<&Alias>,
    value: &DeValue<'_>,
) -> Result<String, String> {
    let wrong = || in_file(kind, alias);
    match (kind, alias.map(|alias| alias.form), value) {
        (_, Some(AliasForm::Words(_)), value) => string(value).ok_or_else(wrong),
        (_, Some(AliasForm::Mebibytes), value) => integer(value).ok_or_else(wrong),
        (Kind::Switch, _, DeValue::Boolean(is_on)) => Ok(if *is_on { "yes" } else { "no" }.into()),
        (Kind::Number { .. }, _, value) => integer(value).ok_or_else(wrong),
        (Kind::Size { .. } | Kind::Time { bare: Some(_), .. }, _, DeValue::Integer(_)) => {
            integer(value).ok_or_else(wrong)
        }
        (Kind::Size { .. } | Kind::Time { .. }, _, value) => string(value).ok_or_else(wrong),
        (Kind::Choice(_), _, value) => string(value).ok_or_else(wrong),
        (Kind::Text(_), _, value) => match string(value) {
            Some(text) if text.is_empty() => Err("must not be empty".into()),
            Some(text) => Ok(text),
            None => Err("expected a quoted string".into()),
        },
        (Kind::List(_), _, DeValue::Array(items)) => {
            let words = items.iter().map(|item| string(item.get_ref()));
            let words: Option<Vec<_>> = words.collect();
            words.map(|words| words.join(",")).ok_or_else(|| "expected a quoted string".into())
        }
        (Kind::List(_), _, value) => string(value).ok_or_else(|| "expected a quoted string".into()),
        (Kind::Switch, ..) => Err(wrong()),
    }
}

/// Returns the error for a text that does not parse, in the file's syntax where that differs.
pub(super) fn expected(
    kind: &Kind,
    alias: Option<&Alias>,
    why: String,
    setting: &Setting,
) -> String {
    // The likeliest mistake is to give the port for clients.
    if std::ptr::eq(setting, &raw const crate::table::RDMA_DEVICE_PORT) {
        return "expected a port of the device, 0 to 254; set the port for clients in rdma_listen"
            .into();
    }
    if !why.starts_with("expected") {
        return why;
    }
    match kind {
        // The setting has only one valid value, and the user wants another. The error explains why
        // there is no other.
        Kind::Choice([_]) => {
            let reason = setting.meaning.split(';').next().unwrap_or_default();
            format!("{}: {}", in_file(kind, alias), lower_first(reason))
        }
        _ => in_file(kind, alias),
    }
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

/// Describes the values in the file's syntax.
fn in_file(kind: &Kind, alias: Option<&Alias>) -> String {
    let quoted = |words: &[&str]| {
        let words: Vec<_> = words.iter().map(|word| format!("\"{word}\"")).collect();
        format!("expected {}", words.join(" or "))
    };
    match (alias.map(|alias| alias.form), kind) {
        (Some(AliasForm::Words(words)), _) => {
            quoted(&words.iter().map(|(word, _)| *word).collect::<Vec<_>>())
        }
        (Some(AliasForm::Mebibytes), _) => "expected a number of mebibytes".into(),
        (_, Kind::Switch) => "expected true or false".into(),
        (_, Kind::Choice(choices)) => quoted(choices),
        (_, kind) => format!("expected {}", kind.expected()),
    }
}

fn string(value: &DeValue<'_>) -> Option<String> {
    value.as_str().map(Into::into)
}

pub(super) fn integer(value: &DeValue<'_>) -> Option<String> {
    let integer = value.as_integer()?;
    Some(i64::from_str_radix(integer.as_str(), integer.radix()).ok()?.to_string())
}
