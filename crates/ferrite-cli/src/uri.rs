//! Parses server URIs: `redis://[[USER:]PASSWORD@]HOST[:PORT][/DATABASE]`.

use std::str::FromStr;

/// The parts of a URI. Those that it does not have are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Uri {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) port: Option<u16>,
    pub(crate) database: Option<u32>,
}

impl FromStr for Uri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let scheme =
            text.split_once("://").map(|(scheme, rest)| (scheme.to_ascii_lowercase(), rest));
        let rest = match &scheme {
            Some((scheme, rest)) if scheme == "redis" || scheme == "valkey" => *rest,
            Some((scheme, _)) if scheme == "rediss" || scheme == "valkeys" => {
                return Err(
                    "TLS is not supported; use redis:// through a tunnel, or redis-cli --tls"
                        .into(),
                );
            }
            _ => return Err("expected redis://[[USER:]PASSWORD@]HOST[:PORT][/DATABASE]".into()),
        };
        let mut uri = Self::default();
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, host_port) = match authority.rsplit_once('@') {
            Some((credentials, host_port)) => (Some(credentials), host_port),
            None => (None, authority),
        };
        if let Some(credentials) = credentials {
            let (user, password) = match credentials.split_once(':') {
                Some((user, password)) => (Some(user), password),
                None => (None, credentials),
            };
            // The common form redis://:password@host means no user.
            uri.user = user.filter(|user| !user.is_empty()).map(percent_decode).transpose()?;
            uri.password = Some(percent_decode(password)?);
        }
        let (host, port) = match host_port.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, Some(port)),
            _ => (host_port, None),
        };
        uri.port = port
            .map(|port| port.parse().map_err(|_| format!("{port:?} is not a port")))
            .transpose()?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        uri.host = Some(host).filter(|host| !host.is_empty()).map(str::to_owned);
        if !path.is_empty() {
            uri.database =
                Some(path.parse().map_err(|_| format!("{path:?} is not a database number"))?);
        }
        Ok(uri)
    }
}

/// Decodes `%20` and the like.
fn percent_decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((byte, behind)) = rest.split_first() {
        rest = behind;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = behind.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let value = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(value.ok_or("expected two hexadecimal digits after %")?);
        rest = behind.get(2..).unwrap_or_default();
    }
    String::from_utf8(bytes).map_err(|_| "the user or the password is not UTF-8".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Uri {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn parses_all_parts() {
        let all = parsed("redis://me:se%3acret@host.example:7000/2");
        assert_eq!((all.user.as_deref(), all.password.as_deref()), (Some("me"), Some("se:cret")));
        assert_eq!(
            (all.host.as_deref(), all.port, all.database),
            (Some("host.example"), Some(7000), Some(2))
        );
        assert_eq!(parsed("redis://"), Uri::default());
        let secret = parsed("valkey://secret@[2001:db8::1]:99");
        assert_eq!((secret.user, secret.password.as_deref()), (None, Some("secret")));
        assert_eq!((secret.host.as_deref(), secret.port), (Some("2001:db8::1"), Some(99)));
        assert_eq!(parsed("redis://:secret@host/").password.as_deref(), Some("secret"));
        assert_eq!(parsed("redis://[::1]").host.as_deref(), Some("::1"));
    }

    #[test]
    fn explains_what_is_wrong() {
        for (text, why) in [
            ("http://host", "expected redis://"),
            ("host", "expected redis://"),
            ("rediss://host", "TLS is not supported"),
            ("redis://host:port", "\"port\" is not a port"),
            ("redis://host/db", "\"db\" is not a database number"),
            ("redis://%4@host", "expected two hexadecimal digits"),
        ] {
            let error = text.parse::<Uri>().expect_err(text);
            assert!(error.starts_with(why), "{text}: {error}");
        }
    }
}
