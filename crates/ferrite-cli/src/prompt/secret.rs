//! Detects commands that contain passwords, which must not be stored in the history.

/// Returns whether a command contains, or may contain, a password.
pub(super) fn is_secret(words: &[Vec<u8>]) -> bool {
    let lower: Vec<_> = words.iter().map(|word| word.to_ascii_lowercase()).collect();
    let words: Vec<_> = lower.iter().map(Vec::as_slice).collect();
    let says = |secret: &[&[u8]]| words.iter().any(|word| secret.contains(word));
    match words.as_slice() {
        [b"auth", ..] | [b"acl", b"setuser", ..] => true,
        [b"config", b"set", ..] => says(&[
            b"masterauth",
            b"masteruser",
            b"requirepass",
            b"primaryauth",
            b"primaryuser",
            b"tls-key-file-pass",
            b"tls-client-key-file-pass",
        ]),
        [b"hello", ..] => says(&[b"auth"]),
        [b"migrate", ..] => says(&[b"auth", b"auth2"]),
        [b"sentinel", ..] => says(&[b"auth-pass", b"auth-user", b"sentinel-pass"]),
        _ => false,
    }
}

/// Returns whether a line may contain a password, if its quotes prevent splitting it into words.
pub(super) fn may_be_secret(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    ["auth", "pass", "setuser"].iter().any(|part| line.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_commands_with_passwords() {
        for (line, secret) in [
            ("AUTH p", true),
            ("auth user p", true),
            ("ACL SETUSER me >p", true),
            ("ACL LIST", false),
            ("CONFIG SET maxmemory 1 RequirePass p", true),
            ("CONFIG SET maxmemory 1", false),
            ("CONFIG GET requirepass", false),
            ("HELLO 3 SETNAME a AUTH user p", true),
            ("HELLO 3", false),
            ("MIGRATE host 1 k 0 1 AUTH2 user p", true),
            ("SENTINEL SET mymaster auth-pass p", true),
            ("SENTINEL CONFIG SET sentinel-pass p", true),
            ("SENTINEL MASTERS", false),
            ("GET auth", false),
        ] {
            let words: Vec<_> = line.split(' ').map(|word| word.as_bytes().to_vec()).collect();
            assert_eq!(is_secret(&words), secret, "{line}");
        }
    }

    #[test]
    fn detects_passwords_in_lines_with_unbalanced_quotes() {
        for (line, secret) in [
            ("AUTH \"p", true),
            ("CONFIG SET requirepass \"p", true),
            ("acl SetUser me \">p", true),
            ("SET key \"value", false),
        ] {
            assert_eq!(may_be_secret(line), secret, "{line}");
        }
    }
}
