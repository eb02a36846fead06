//! The URL of a server, which `ferrite-client` and `ferrite-cli` take.
//!
//! ```text
//!   redis://[[USER:]PASSWORD@]HOST[:PORT][,HOST[:PORT]]...[/DATABASE][?NAME=VALUE[&...]]
//! ```
//!
//! | scheme | transport |
//! |---|---|
//! | `redis`, `valkey` | RDMA where available, else TCP; the caller or `?rdma=` changes that |
//! | `redis+rdma`, `valkey+rdma` | the same, and `?rdma=forbid` is an error |
//! | `rediss`, `valkeys` | TCP with TLS; RDMA only with `?rdma=prefer`, if the caller allows it |

use std::fmt;
use std::str::FromStr;

use ferrite_fabric::Rdma;

/// The port of a server for which the URL gives no port.
const DEFAULT_PORT: u16 = 6379;

/// The parts of a URL.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerUrl {
    /// The user to log in as.
    pub user: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// The hosts, in the order in which they are tried. Empty if the URL names none.
    pub hosts: Vec<Host>,
    /// The number of the database.
    pub database: Option<u32>,
    /// Whether the scheme asks for TLS.
    pub is_tls: bool,
    /// Whether RDMA may, must or must not be used, if the URL says so.
    pub rdma: Option<Rdma>,
    /// The version of RESP: 2 or 3.
    pub protocol: Option<u8>,
}

/// A host name or address, and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    /// The host name or address. An IPv6 address is without brackets, and may have a scope.
    pub name: String,
    /// The port, if it is given.
    pub port: Option<u16>,
}

impl Host {
    /// Returns the port, or the port of Redis if none is given.
    #[must_use]
    pub fn port_or_default(&self) -> u16 {
        self.port.unwrap_or(DEFAULT_PORT)
    }

    /// Returns the name that the certificate of the host must be valid for: the host name, or the
    /// address without its scope.
    #[must_use]
    pub fn certificate_name(&self) -> &str {
        match self.name.split_once('%') {
            Some((address, _)) if address.contains(':') => address,
            _ => &self.name,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, port: _ } = self;
        let port = self.port_or_default();
        if name.contains(':') { write!(f, "[{name}]:{port}") } else { write!(f, "{name}:{port}") }
    }
}

/// Why a text is not the URL of a server. The message never contains the password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UrlError(String);

impl FromStr for ServerUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        parse(text).map_err(UrlError)
    }
}

const EXPECTED: &str = "expected redis://[[USER:]PASSWORD@]HOST[:PORT][,HOST[:PORT]]...\
                        [/DATABASE][?rdma=prefer|require|forbid], or rediss:// for TLS";

fn parse(text: &str) -> Result<ServerUrl, String> {
    let (scheme, rest) = text.split_once("://").ok_or(EXPECTED)?;
    let mut url = ServerUrl::default();
    match scheme.to_ascii_lowercase().as_str() {
        "redis" | "valkey" => {}
        "redis+rdma" | "valkey+rdma" => url.rdma = Some(Rdma::Prefer),
        "rediss" | "valkeys" => (url.is_tls, url.rdma) = (true, Some(Rdma::Forbid)),
        "unix" | "redis+unix" | "valkey+unix" => {
            return Err("a URL cannot name a Unix socket; ferrite-cli has -s PATH".into());
        }
        // Any other text may be a part of a password, so the error does not show it.
        scheme if scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'+') => {
            return Err(format!("unknown scheme {scheme}://; {EXPECTED}"));
        }
        _ => return Err(EXPECTED.into()),
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, behind) = rest.split_at(end);
    // The rest could be a part of the password, and messages below would show it.
    if behind.contains('@') {
        return Err(
            "the URL has an @ after its first /, ? or #; in the user and the password write / as \
             %2F, ? as %3F and # as %23, and elsewhere write @ as %40"
                .into(),
        );
    }
    let behind = behind.split_once('#').map_or(behind, |(behind, _)| behind);
    let (path, query) = behind.split_once('?').unwrap_or((behind, ""));
    let path = path.strip_prefix('/').unwrap_or(path);
    let (credentials, hosts) = match authority.rsplit_once('@') {
        Some((credentials, hosts)) => (Some(credentials), hosts),
        None => (None, authority),
    };
    if let Some(credentials) = credentials {
        let (user, password) = match credentials.split_once(':') {
            Some((user, password)) => (Some(user), password),
            None => (None, credentials),
        };
        // The common form redis://:password@host means no user.
        url.user = user.filter(|user| !user.is_empty()).map(percent_decode).transpose()?;
        // A user may have an empty password (nopass). Without a user, an empty password means no
        // login.
        let has_password = !password.is_empty() || url.user.is_some();
        url.password = has_password.then(|| percent_decode(password)).transpose()?;
    }
    if !hosts.is_empty() {
        url.hosts = hosts.split(',').map(parse_host).collect::<Result<_, _>>()?;
    }
    if !path.is_empty() {
        let number = path.parse().map_err(|_| format!("{path:?} is not a database number"))?;
        url.database = Some(number);
    }
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        url.set_parameter(scheme, name, &percent_decode(value)?)?;
    }
    Ok(url)
}

fn parse_host(text: &str) -> Result<Host, String> {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (text, None),
    };
    let port = match port {
        Some(port) => {
            // The text may be a password, if the host after it was forgotten, so the error does not
            // show it.
            let number = port.parse().ok().filter(|number| *number != 0);
            Some(number.ok_or("expected a port from 1 to 65535 after the last : of a host")?)
        }
        None => None,
    };
    let is_bracketed = name.starts_with('[') && name.ends_with(']');
    if !is_bracketed && name.contains(':') {
        return Err("an IPv6 address must be in brackets, such as [::1]:6379".into());
    }
    let name = if is_bracketed { &name[1..name.len() - 1] } else { name };
    if name.is_empty() {
        return Err("a host is missing before a port, or before or after a comma".into());
    }
    // In an IPv6 address, % stands only before the scope. RFC 6874 writes %25, but most people
    // write %.
    let name = if is_bracketed { name.replacen("%25", "%", 1) } else { percent_decode(name)? };
    if name.contains(|char: char| char.is_control() || char.is_whitespace()) {
        return Err("a host must not have spaces or control characters".into());
    }
    Ok(Host { name, port })
}

impl ServerUrl {
    fn set_parameter(&mut self, scheme: &str, name: &str, value: &str) -> Result<(), String> {
        match (name, value) {
            ("rdma", value) => {
                let rdma = value.parse().map_err(|error| format!("rdma: {error}"))?;
                let is_rdma_scheme = scheme.to_ascii_lowercase().ends_with("+rdma");
                if is_rdma_scheme && rdma == Rdma::Forbid {
                    return Err(format!("{scheme}:// and rdma=forbid contradict each other"));
                }
                if self.is_tls && rdma == Rdma::Require {
                    return Err(format!(
                        "{scheme}:// means TLS over TCP, but rdma=require means RDMA, which is not \
                         encrypted; use redis+rdma:// or remove rdma=require"
                    ));
                }
                self.rdma = Some(rdma);
            }
            ("protocol", "2" | "resp2") => self.protocol = Some(2),
            ("protocol", "3" | "resp3") => self.protocol = Some(3),
            ("protocol", _) => return Err(format!("protocol={value}: expected 2 or 3")),
            _ => return Err(format!("unknown parameter {name:?}: expected rdma or protocol")),
        }
        Ok(())
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
        let digits = behind.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let value = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(value.ok_or("expected two hexadecimal digits after %; % itself is %25")?);
        rest = behind.get(2..).unwrap_or_default();
    }
    String::from_utf8(bytes).map_err(|_| "a part of the URL is not UTF-8".into())
}

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user, password, hosts, database, is_tls, rdma, protocol } = self;
        f.debug_struct("ServerUrl")
            .field("user", user)
            .field("password", &password.as_ref().map(|_| "(hidden)"))
            .field("hosts", hosts)
            .field("database", database)
            .field("is_tls", is_tls)
            .field("rdma", rdma)
            .field("protocol", protocol)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> ServerUrl {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn hosts(text: &str) -> Vec<String> {
        parsed(text).hosts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn parses_all_parts() {
        let all = parsed("redis+rdma://me:se%3acret@host.example:7000/2?rdma=require&protocol=3");
        assert_eq!((all.user.as_deref(), all.password.as_deref()), (Some("me"), Some("se:cret")));
        assert_eq!(all.hosts, [Host { name: "host.example".into(), port: Some(7000) }]);
        assert_eq!((all.database, all.protocol), (Some(2), Some(3)));
        assert_eq!((all.is_tls, all.rdma), (false, Some(Rdma::Require)));
        assert!(!format!("{all:?}").contains("cret"), "{all:?}");
        assert_eq!(parsed("redis://"), ServerUrl::default());
        let secret = parsed("valkey://secret@[2001:db8::1]:99");
        assert_eq!((secret.user, secret.password.as_deref()), (None, Some("secret")));
        assert_eq!(parsed("redis://:secret@host/").password.as_deref(), Some("secret"));
    }

    #[test]
    fn parses_odd_logins() {
        for (text, user, password) in [
            ("redis://user:@host", Some("user"), Some("")),
            ("redis://:@host", None, None),
            ("redis://@host", None, None),
            ("redis://a:b:c@host", Some("a"), Some("b:c")),
            ("redis://a:b@c@host", Some("a"), Some("b@c")),
            ("redis://us%40er:%2F%3f%23%25@host", Some("us@er"), Some("/?#%")),
            ("redis://%3A:%20@host", Some(":"), Some(" ")),
            ("redis://user:p%C3%A4ss@host", Some("user"), Some("p\u{e4}ss")),
        ] {
            let url = parsed(text);
            assert_eq!((url.user.as_deref(), url.password.as_deref()), (user, password), "{text}");
            assert_eq!(url.hosts, [Host { name: "host".into(), port: None }], "{text}");
        }
    }

    /// Includes passwords with a character that ends the login in a URL, and passwords without a
    /// host after them.
    #[test]
    fn errors_never_show_the_password() {
        for text in [
            "redis://user:secret/x@host",
            "redis://user:secret?x@host",
            "redis://user:secret#x@host",
            "redis://user:x/secret@host",
            "redis://user:x?secret@host",
            "redis://user:x?secret=1@host",
            "redis://:secret",
            "redis://user:secret",
            "redis://user:se:secret",
            "redis://user:secret%@host",
            "redis://user:secret%ff@host",
            "redis://user:secret@host:port",
            "redis://user:secret@host/db",
            "redis://user:secret@host?db=1",
            "http://user:secret@host",
            "user:secret@host",
        ] {
            let error = text.parse::<ServerUrl>().expect_err(text);
            assert!(!format!("{error} {error:?}").contains("secret"), "{text}: {error}");
        }
    }

    #[test]
    fn parses_hosts_in_order() {
        assert_eq!(hosts("redis://a,b:7000,[::1]/1"), ["a:6379", "b:7000", "[::1]:6379"]);
        for scoped in ["redis://[fe80::1%25eth0]:7000", "redis://[fe80::1%eth0]:7000"] {
            assert_eq!(hosts(scoped), ["[fe80::1%eth0]:7000"]);
            assert_eq!(parsed(scoped).hosts[0].certificate_name(), "fe80::1");
        }
        assert_eq!(parsed("redis://a%25b").hosts[0].certificate_name(), "a%b");
        assert_eq!(hosts("redis://:secret@10.0.0.1:1,10.0.0.2:2"), ["10.0.0.1:1", "10.0.0.2:2"]);
    }

    #[test]
    fn schemes_set_the_transport() {
        let transport = |text: &str| (parsed(text).is_tls, parsed(text).rdma);
        assert_eq!(transport("redis://host"), (false, None));
        assert_eq!(transport("redis://host?rdma=forbid"), (false, Some(Rdma::Forbid)));
        assert_eq!(transport("valkey+rdma://host"), (false, Some(Rdma::Prefer)));
        assert_eq!(transport("REDISS://host"), (true, Some(Rdma::Forbid)));
        assert_eq!(transport("rediss://host?rdma=prefer"), (true, Some(Rdma::Prefer)));
    }

    #[test]
    fn explains_what_is_wrong() {
        for (text, why) in [
            ("reds://host", "unknown scheme reds://; expected redis://"),
            ("me:secret@host://", "expected redis://"),
            ("host", "expected redis://"),
            ("unix:///tmp/socket", "a URL cannot name a Unix socket"),
            ("redis://host:port", "expected a port from 1 to 65535"),
            ("redis://host:", "expected a port"),
            ("redis://host:0", "expected a port"),
            ("redis://host:65536", "expected a port"),
            ("redis://[::1]:0", "expected a port"),
            ("redis://a b", "a host must not have spaces"),
            ("redis://a%0ab", "a host must not have spaces"),
            ("redis://host/1/2", "\"1/2\" is not a database number"),
            ("redis://host/-1", "\"-1\" is not a database number"),
            ("redis://%+1@host", "expected two hexadecimal digits"),
            ("redis://pa/ss@host", "the URL has an @ after its first /, ? or #; in the user"),
            ("redis://a,,b", "a host is missing"),
            ("redis://::1", "an IPv6 address must be in brackets"),
            ("redis://host/db", "\"db\" is not a database number"),
            ("redis://%4@host", "expected two hexadecimal digits"),
            ("redis://host?rdma=maybe", "rdma: invalid value maybe: expected prefer"),
            ("redis://host?db=1", "unknown parameter \"db\": expected rdma or protocol"),
            ("redis://host?protocol=4", "protocol=4: expected 2 or 3"),
            ("rediss://host?rdma=require", "rediss:// means TLS over TCP, but"),
            ("redis+rdma://host?rdma=forbid", "redis+rdma:// and rdma=forbid contradict"),
        ] {
            let error = text.parse::<ServerUrl>().expect_err(text).to_string();
            assert!(error.starts_with(why), "{text}: {error}");
        }
    }
}
