//! The addresses to listen on: those that `rdma-bind` names, otherwise those that the engine itself
//! listens on. There are none if the engine serves TLS only and clear text was not allowed, or if
//! neither `rdma-bind` nor the engine gives an address.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};

use ferrite_fabric::Rdma;

use crate::options::Options;
use crate::target::Sockets;

/// An address to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) at: SocketAddr,
    /// Whether this host may lack the address without an error (a `-` in the engine's `bind`).
    pub(crate) may_be_absent: bool,
    /// Whether the address is from `rdma-bind`, and not from the engine's `bind`.
    pub(crate) is_named: bool,
}

impl Address {
    /// Returns the RDMA policy for this address. Loopback addresses never accept RDMA, since RDMA
    /// clients are on other hosts.
    pub(crate) fn rdma(&self, policy: Rdma) -> Rdma {
        if self.at.ip().is_loopback() { Rdma::Forbid } else { policy }
    }
}

/// A word of `rdma-bind` or of the engine's `bind`: an address, or a name that is not resolved yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    word: String,
    may_be_absent: bool,
    is_named: bool,
}

/// The hosts that the engine's current configuration asks for.
#[derive(Debug)]
pub(crate) struct WantedHosts(Result<Vec<Host>, String>);

impl WantedHosts {
    pub(crate) fn new(hosts: Vec<Host>) -> Self {
        Self(Ok(hosts))
    }

    /// Updates the hosts to the engine's current configuration. Returns them if they have changed.
    ///
    /// Names are compared, not resolved, because resolving may take long and the engine would wait.
    pub(crate) fn follow(
        &mut self,
        now: Result<Vec<Host>, String>,
    ) -> Option<&Result<Vec<Host>, String>> {
        let before = std::mem::replace(&mut self.0, now);
        (before != self.0).then_some(&self.0)
    }
}

/// Returns the hosts to listen on. Resolves nothing.
///
/// # Errors
/// Returns an error if there are no hosts to listen on. The text says why and what to do.
pub(crate) fn hosts(options: &Options, sockets: &Sockets) -> Result<Vec<Host>, String> {
    let is_off = |port: &Option<String>| port.as_deref() == Some("0");
    let has_tls = sockets.tls_port.as_deref().is_some_and(|port| port != "0");
    if is_off(&sockets.port) && has_tls && !options.allow_clear_text() {
        return Err(
            "the engine serves TLS only, but the module's RDMA and TCP are not encrypted, and \
             clients need no certificate; to allow clients without TLS, load the module with \
             allow-clear-text yes and set unixsocket /PATH in the engine's configuration"
                .into(),
        );
    }
    if let Some(named) = options.bind() {
        let named =
            named.map(|word| Host { word: word.into(), may_be_absent: false, is_named: true });
        return Ok(named.collect());
    }
    let (Some(engine_port), Some(bind)) = (&sockets.port, &sockets.bind) else {
        return Err(
            "the engine does not say where it listens (is CONFIG renamed?); load the module with \
             rdma-bind ADDRESS, and with engine unix:/PATH or engine HOST:PORT"
                .into(),
        );
    };
    if engine_port == "0" && !has_tls || bind.trim().is_empty() {
        return Err(
            "the engine listens on no address; load the module with rdma-bind ADDRESS".into()
        );
    }
    let host = |word: &str| match word.strip_prefix('-') {
        Some(word) => Host { word: word.into(), may_be_absent: true, is_named: false },
        None => Host { word: word.into(), may_be_absent: false, is_named: false },
    };
    Ok(bind.split_whitespace().map(host).collect())
}

/// Resolves hosts to addresses with this port, each address once. May take long.
///
/// # Errors
/// Returns an error if a name has no address, unless this host may lack it. The text has the name.
pub(crate) fn resolve(hosts: &[Host], port: u16) -> Result<Vec<Address>, String> {
    let mut found: Vec<Address> = Vec::new();
    for Host { word, may_be_absent, is_named } in hosts {
        let (may_be_absent, is_named) = (*may_be_absent, *is_named);
        for mut at in look_up(word, may_be_absent, is_named)? {
            at.set_port(port);
            if !found.iter().any(|address| address.at == at) {
                found.push(Address { at, may_be_absent, is_named });
            }
        }
    }
    Ok(found)
}

/// Returns the addresses of a word, with port 0. A link-local address names its interface
/// (`fe80::1%eth0`).
fn look_up(word: &str, may_be_absent: bool, is_named: bool) -> Result<Vec<SocketAddr>, String> {
    match word {
        "*" => return Ok(vec![(Ipv4Addr::UNSPECIFIED, 0).into()]),
        "::*" => return Ok(vec![(Ipv6Addr::UNSPECIFIED, 0).into()]),
        _ => {}
    }
    match (word, 0).to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        Err(_) if may_be_absent => Ok(Vec::new()),
        Err(error) if is_named => Err(format!("rdma-bind: cannot resolve {word:?}: {error}")),
        Err(error) => Err(format!(
            "cannot resolve the engine's bind address {word:?}: {error}; load the module with \
             rdma-bind ADDRESS"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &str) -> Options {
        let words: Vec<_> = words.split_whitespace().map(|word| word.replace('+', " ")).collect();
        Options::from_arguments(&words).expect("valid arguments")
    }

    fn at(arguments: &str, port: &str, tls_port: &str, bind: &str) -> Result<Vec<String>, String> {
        let [port, tls_port, bind] = [port, tls_port, bind].map(|text| Some(text.to_owned()));
        let options = options(arguments);
        let sockets = Sockets { port, tls_port, bind, ..Sockets::default() };
        let found = resolve(&hosts(&options, &sockets)?, options.port())?;
        let show = |Address { at, may_be_absent, .. }: Address| {
            format!("{}{at}", if may_be_absent { "-" } else { "" })
        };
        Ok(found.into_iter().map(show).collect())
    }

    #[test]
    fn uses_the_engines_bind_addresses_by_default() {
        for (bind, expected) in [
            ("* -::*", &["0.0.0.0:6380", "-[::]:6380"][..]),
            ("127.0.0.1 -::1", &["127.0.0.1:6380", "-[::1]:6380"]),
            ("10.0.0.5 10.0.0.6 10.0.0.5", &["10.0.0.5:6380", "10.0.0.6:6380"]),
            ("-no-such-host.invalid 10.0.0.5", &["10.0.0.5:6380"]),
            ("fe80::1%lo ::1 fe80::1%lo", &["[fe80::1%1]:6380", "[::1]:6380"]),
        ] {
            assert_eq!(at("", "6379", "0", bind).expect("addresses"), expected, "{bind}");
        }
        assert_eq!(at("rdma-port 7", "6379", "6390", "*").expect("addresses"), ["0.0.0.0:7"]);
    }

    #[test]
    fn reports_changes_of_the_engines_addresses_without_resolving_them() {
        let bound_to = |bind: &str| {
            let (port, bind) = (Some("6379".to_owned()), Some(bind.to_owned()));
            let sockets = Sockets { port, bind, ..Sockets::default() };
            hosts(&options(""), &sockets)
        };
        let mut wanted = WantedHosts::new(bound_to("one.invalid").expect("a host"));
        assert!(wanted.follow(bound_to("one.invalid")).is_none());
        assert!(wanted.follow(bound_to("two.invalid")).is_some_and(Result::is_ok));
        assert!(wanted.follow(bound_to("two.invalid")).is_none());
        assert!(wanted.follow(bound_to("")).is_some_and(Result::is_err));
        assert!(wanted.follow(bound_to("")).is_none());
    }

    #[test]
    fn rdma_bind_overrides_the_engines_addresses() {
        let named = at("rdma-bind 10.0.0.5,::1", "6379", "0", "127.0.0.1").expect("addresses");
        assert_eq!(named, ["10.0.0.5:6380", "[::1]:6380"]);
        let named = at("rdma-bind [::1]+fe80::1%lo,[fe80::1%lo],localhost", "6379", "0", "*");
        let named = named.expect("addresses");
        assert_eq!(&named[..2], ["[::1]:6380", "[fe80::1%1]:6380"]);
        assert!(named.contains(&"127.0.0.1:6380".to_owned()), "localhost: {named:?}");
        let why = at("rdma-bind no-such-host.invalid", "6379", "0", "*").expect_err("no address");
        assert!(why.starts_with("rdma-bind: cannot resolve \"no-such-host.invalid\""), "{why}");
        let without_config = hosts(&options("rdma-bind 10.0.0.5"), &Sockets::default());
        assert_eq!(without_config.expect("an address, although CONFIG is renamed").len(), 1);
    }

    #[test]
    fn an_error_without_addresses_has_a_remedy() {
        for (port, tls, bind) in [("0", "0", "*"), ("6379", "0", "")] {
            let why = at("", port, tls, bind).expect_err("no addresses");
            assert!(why.contains("on no address") && why.contains("rdma-bind"), "{why}");
        }
        let why = hosts(&options(""), &Sockets::default()).expect_err("CONFIG is renamed");
        assert!(
            why.contains("does not say where it listens") && why.contains("rdma-bind"),
            "{why}"
        );
    }

    #[test]
    fn refuses_clear_text_if_the_engine_serves_tls_only() {
        for arguments in ["", "rdma-bind 10.0.0.5", "rdma require"] {
            let why = at(arguments, "0", "6379", "*").expect_err("TLS only");
            assert!(why.contains("TLS only") && why.contains("allow-clear-text yes"), "{why}");
        }
        assert_eq!(
            at("allow-clear-text yes", "0", "6379", "10.0.0.5").expect("clear text is allowed"),
            ["10.0.0.5:6380"]
        );
        at("", "6379", "6390", "*").expect("the engine also has a port without TLS");
    }

    #[test]
    fn loopback_addresses_never_accept_rdma() {
        let address = |ip: &str| Address {
            at: SocketAddr::new(ip.parse().expect("an address"), 1),
            may_be_absent: false,
            is_named: true,
        };
        assert_eq!(address("127.0.0.1").rdma(Rdma::Prefer), Rdma::Forbid);
        assert_eq!(address("::1").rdma(Rdma::Require), Rdma::Forbid);
        assert_eq!(address("10.0.0.1").rdma(Rdma::Require), Rdma::Require);
    }
}
