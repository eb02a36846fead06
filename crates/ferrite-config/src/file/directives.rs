//! The section `[engine]`: lines of the engine's own configuration.

use toml::de::DeValue;

use super::toml_text::integer;

/// Directives that `[engine]` may not have, and what to do instead.
const RESERVED: [(&str, &str); 11] = [
    ("bind", "set bind in [network] instead"),
    ("port", "set port in [network] instead"),
    ("unixsocket", "set unix_socket in [server] instead"),
    ("dir", "set data_dir in [server] instead"),
    ("include", "set engine_config in [server] instead"),
    ("cluster-enabled", "set enabled in [cluster] instead"),
    ("daemonize", "remove it: ferrite supervises the engine, which must stay in the foreground"),
    ("supervised", "remove it: ferrite supervises the engine and notifies systemd"),
    ("logfile", "remove it: ferrite passes the engine's log on to stderr"),
    ("pidfile", "remove it: `ferrite server --json` prints the engine's process id"),
    ("ferrite", "set the module's settings in [network] and [network.rdma] instead"),
];

/// Returns the rest of the directive's line, after its name. A list gives several lines.
pub(super) fn lines(name: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let plain = name.to_ascii_lowercase();
    let first = plain.split('.').next().unwrap_or_default();
    if let Some((_, remedy)) = RESERVED.iter().find(|(taken, _)| first == *taken) {
        return Err((*remedy).into());
    }
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        return Err("not a valid name of an engine directive".into());
    }
    match value {
        DeValue::Array(items) => items.iter().map(|item| line(item.get_ref())).collect(),
        value => Ok(vec![line(value)?]),
    }
}

fn line(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) if text.is_empty() => Ok("\"\"".into()),
        DeValue::String(text) if text.contains(char::is_control) => {
            Err("must not contain control characters".into())
        }
        DeValue::String(text) => Ok(text.as_ref().into()),
        DeValue::Boolean(yes) => Ok(if *yes { "yes" } else { "no" }.into()),
        DeValue::Integer(_) => integer(value).ok_or_else(|| "number too large".into()),
        DeValue::Float(number) => Ok(number.as_str().into()),
        _ => Err("expected a string, a number, true, false, or a list of these".into()),
    }
}
