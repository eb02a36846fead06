//! Hides passwords in lines of the engine's configuration.
//!
//! `--check` prints these lines. An engine quotes a line that it rejects, and ferrite passes the
//! quote on to the log. More people can read the log than the configuration.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The text that replaces a secret.
const HIDDEN: &str = "…";
/// Parts of names whose values are secrets. A directive that ferrite does not know, of a module or
/// of a later engine, is hidden if its name contains one of these parts.
const SECRET_PARTS: [&str; 5] = ["pass", "auth", "secret", "token", "credential"];
/// Names that contain one of [`SECRET_PARTS`] but have no secret value.
const HARMLESS: [&str; 2] = ["tls-auth-clients", "tls-auth-clients-user"];
/// Other names with secret values. The new name of a renamed command is a secret too.
const SECRET_NAMES: [&str; 3] = ["user", "rename-command", "sentinel"];
/// Names whose values are hidden even if the name is mistyped: a rejected line may have a mistyped
/// name and a real password. These names are long, so a few typing errors do not turn them into
/// another known name.
const MISTYPED: [&str; 4] = ["requirepass", "masterauth", "primaryauth", "tls-key-file-pass"];
/// The largest number of typing errors in a mistyped name: letters that are wrong, missing or
/// additional. Two swapped letters are two errors.
const SLIPS_MAX: usize = 2;
/// The start of a line in which an engine quotes its configuration.
const QUOTE: &str = ">>> '";

/// Formats a line of the engine's configuration without its secret.
pub(super) fn redact(name: &str, rest: &str) -> String {
    if is_secret(name) { format!("{name} {HIDDEN}") } else { format!("{name} {rest}") }
}

/// Returns a line of the engine's log without the secret that it quotes, or `None` if it quotes
/// none.
pub(super) fn redact_quoted(line: &[u8]) -> Option<String> {
    let quoted = line.strip_prefix(QUOTE.as_bytes())?;
    let end = quoted.iter().position(u8::is_ascii_whitespace).unwrap_or(quoted.len());
    let name = String::from_utf8_lossy(&quoted[..end]);
    let name = name.trim_matches(['"', '\'']);
    is_secret(name).then(|| format!("{QUOTE}{name} {HIDDEN}'\n"))
}

/// Warns of a configuration file with secrets that all users of the host can read.
pub(super) fn warn_if_readable(file: &Path, directives: &[(String, String)]) {
    let is_open = file.metadata().is_ok_and(|about| about.permissions().mode() & 0o004 != 0);
    let name = directives.iter().map(|(name, _)| name).find(|name| is_secret(name));
    if let Some(name) = name.filter(|_| is_open) {
        tracing::warn!(
            "{}: all users of this host can read the value of {name}; allow only ferrite's user to \
             read the file, or use an aclfile in the data directory instead",
            file.display()
        );
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let name = name.as_str();
    SECRET_NAMES.contains(&name)
        || SECRET_PARTS.iter().any(|part| name.contains(part)) && !HARMLESS.contains(&name)
        || MISTYPED.iter().any(|known| slips(known, name) <= SLIPS_MAX)
}

/// Returns the edit distance of two names.
fn slips(known: &str, name: &str) -> usize {
    let mut row: Vec<usize> = (0..=name.len()).collect();
    for (i, x) in known.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in name.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[name.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hides_every_password() {
        for name in [
            "requirepass",
            "RequirePass",
            "masterauth",
            "primaryauth",
            "tls-key-file-pass",
            "tls-client-key-file-pass",
            "user",
            "rename-command",
            "some-module.password",
            "other.auth-token",
            "requirepas",
            "requirepsas",
            "masterauht",
        ] {
            assert_eq!(redact(name, "on >secret"), format!("{name} …"));
            let line = format!(">>> '{name} \"secret\" x'\n");
            assert_eq!(redact_quoted(line.as_bytes()), Some(format!(">>> '{name} …'\n")));
        }
    }

    #[test]
    fn shows_values_without_secrets() {
        for name in ["maxmemory", "tls-auth-clients", "save", "masteruser", "loadmodule"] {
            assert_eq!(redact(name, "value"), format!("{name} value"));
            assert_eq!(redact_quoted(format!(">>> '{name} value'\n").as_bytes()), None);
        }
        assert_eq!(redact_quoted(b"Reading the configuration file, at line 9\n"), None);
    }
}
