//! Chooses the engine's own socket that the proxy path connects to: the Unix socket if the engine
//! has one, otherwise the TCP port at an address that the engine listens on.

use ferrite_session::EngineAddress;

/// The engine's socket settings as `CONFIG GET` returns them. A setting that it does not return is
/// `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sockets {
    pub(crate) unixsocket: Option<String>,
    pub(crate) port: Option<String>,
    pub(crate) tls_port: Option<String>,
    pub(crate) bind: Option<String>,
}

/// Returns the socket to connect to.
///
/// # Errors
/// Returns an error if no such socket was found. The text says why and what to do.
pub(crate) fn target(sockets: &Sockets) -> Result<EngineAddress, String> {
    let Some(port) = &sockets.port else {
        return Err(
            "the engine does not say where it listens (is CONFIG renamed?); load the module with \
             engine unix:/PATH or engine HOST:PORT"
                .into(),
        );
    };
    if let Some(path) = sockets.unixsocket.as_deref().filter(|path| !path.is_empty()) {
        // A relative path is relative to the engine's `dir`, its working directory.
        return std::path::absolute(path).map(EngineAddress::Unix).map_err(|error| {
            format!("cannot find the engine's unixsocket {path:?}: {error}; set an absolute path")
        });
    }
    if port == "0" {
        let tls = sockets.tls_port.as_deref().is_some_and(|port| port != "0");
        let has = if tls { "only a TLS port" } else { "no port at all" };
        return Err(format!(
            "the engine has {has}, and sessions need a socket that does not use TLS; set \
             unixsocket /PATH in its configuration (only this host can reach a Unix socket)"
        ));
    }
    Ok(EngineAddress::Tcp(format!("{}:{port}", host(sockets.bind.as_deref().unwrap_or_default()))))
}

/// Returns an address at which this host can reach an engine with this `bind`.
fn host(bind: &str) -> String {
    // A minus means that the address may be absent.
    let addresses: Vec<_> =
        bind.split_whitespace().map(|address| address.trim_start_matches('-')).collect();
    let has = |wanted: &[&str]| addresses.iter().any(|address| wanted.contains(address));
    if addresses.is_empty() || has(&["*", "0.0.0.0", "127.0.0.1", "localhost"]) {
        return "127.0.0.1".into();
    }
    if has(&["::1", "::*", "::"]) {
        return "[::1]".into();
    }
    match addresses.first() {
        Some(address) if address.contains(':') => format!("[{address}]"),
        Some(address) => (*address).into(),
        None => "127.0.0.1".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockets(unixsocket: &str, port: &str, tls_port: Option<&str>, bind: &str) -> Sockets {
        Sockets {
            unixsocket: Some(unixsocket.into()),
            port: Some(port.into()),
            tls_port: tls_port.map(Into::into),
            bind: Some(bind.into()),
        }
    }

    #[test]
    fn prefers_a_unix_socket() {
        let found = target(&sockets("/run/redis.sock", "6379", None, "*"));
        assert_eq!(found, Ok(EngineAddress::Unix("/run/redis.sock".into())));
        let here = std::env::current_dir().expect("a working directory").join("redis.sock");
        assert_eq!(target(&sockets("redis.sock", "6379", None, "")), Ok(EngineAddress::Unix(here)));
    }

    #[test]
    fn otherwise_uses_the_port_at_a_bind_address() {
        for (bind, host) in [
            ("", "127.0.0.1"),
            ("* -::*", "127.0.0.1"),
            ("127.0.0.1 -::1", "127.0.0.1"),
            ("-::1", "[::1]"),
            ("10.0.0.5 10.0.0.6", "10.0.0.5"),
            ("fe80::1", "[fe80::1]"),
        ] {
            let found = target(&sockets("", "6379", Some("0"), bind));
            assert_eq!(found, Ok(EngineAddress::Tcp(format!("{host}:6379"))), "{bind}");
        }
    }

    #[test]
    fn an_error_without_a_socket_has_a_remedy() {
        let tls = target(&sockets("", "0", Some("6379"), "")).expect_err("TLS only");
        assert!(tls.contains("only a TLS port") && tls.contains("unixsocket"), "{tls}");
        let none = target(&sockets("", "0", Some("0"), "")).expect_err("no port");
        assert!(none.contains("no port at all"), "{none}");
        let silent = target(&Sockets::default()).expect_err("CONFIG is renamed");
        assert!(silent.contains("engine unix:/PATH"), "{silent}");
    }
}
