//! Passwords in lines of the engine's configuration: which lines have one, and how they are shown.
//!
//! Our own output shows lines with `--check`. The engine quotes a line that it refuses, and what it
//! says is passed on to the log, which more people read than the configuration.

/// What stands for a secret.
const HIDDEN: &str = "…";
/// Parts of names whose values are secrets. Names that are not known, of modules and of later
/// engines, are hidden rather than shown.
const PARTS: [&str; 5] = ["pass", "auth", "secret", "token", "credential"];
/// Names that have such a part, and no secret.
const HARMLESS: [&str; 2] = ["tls-auth-clients", "tls-auth-clients-user"];
/// Others: the new name of a command is a secret to those who may not run it.
const OTHERS: [&str; 3] = ["user", "rename-command", "sentinel"];
/// How an engine begins a line that quotes its configuration.
const QUOTE: &str = ">>> '";

/// A line of the engine's configuration, without its secret.
pub(super) fn shown(name: &str, rest: &str) -> String {
    if is_secret(name) { format!("{name} {HIDDEN}") } else { format!("{name} {rest}") }
}

/// A line that the engine has said, without the secret of the configuration that it quotes.
pub(super) fn passed_on(line: &[u8]) -> Option<String> {
    let quoted = line.strip_prefix(QUOTE.as_bytes())?;
    let end = quoted.iter().position(u8::is_ascii_whitespace).unwrap_or(quoted.len());
    let name = String::from_utf8_lossy(&quoted[..end]);
    let name = name.trim_matches(['"', '\'']);
    is_secret(name).then(|| format!("{QUOTE}{name} {HIDDEN}'\n"))
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let name = name.as_str();
    OTHERS.contains(&name)
        || PARTS.iter().any(|part| name.contains(part)) && !HARMLESS.contains(&name)
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
        ] {
            assert_eq!(shown(name, "on >secret"), format!("{name} …"));
            let said = format!(">>> '{name} \"secret\" x'\n");
            assert_eq!(passed_on(said.as_bytes()), Some(format!(">>> '{name} …'\n")));
        }
    }

    #[test]
    fn shows_the_rest() {
        for name in ["maxmemory", "tls-auth-clients", "save", "masteruser", "loadmodule"] {
            assert_eq!(shown(name, "value"), format!("{name} value"));
            assert_eq!(passed_on(format!(">>> '{name} value'\n").as_bytes()), None);
        }
        assert_eq!(passed_on(b"Reading the configuration file, at line 9\n"), None);
    }
}
