//! The addresses to listen on: those that `rdma-bind` names, otherwise those that the engine itself
//! listens on. There are none if the engine requires TLS and clear text was not allowed.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};

use ferrite_fabric::Rdma;

use crate::options::Options;
use crate::target::Sockets;

/// An address to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) at: SocketAddr,
    /// It is no error if this host does not have the address (a `-` in the engine's `bind`).
    pub(crate) may_be_absent: bool,
    /// The address is from `rdma-bind`, not from the engine's `bind`.
    pub(crate) is_named: bool,
}

impl Address {
    /// Returns the RDMA policy for this address. Loopback addresses never accept RDMA, since it
    /// comes from other hosts.
    pub(crate) fn rdma(&self, policy: Rdma) -> Rdma {
        if self.at.ip().is_loopback() { Rdma::Forbid } else { policy }
    }
}

/// The addresses that the engine's current configuration asks for.
#[derive(Debug)]
pub(crate) struct WantedAddresses {
    sockets: Sockets,
    addresses: Result<Vec<Address>, String>,
}

impl WantedAddresses {
    pub(crate) fn new(sockets: Sockets, addresses: Vec<Address>) -> Self {
        Self { sockets, addresses: Ok(addresses) }
    }

    /// Updates the addresses to the engine's current configuration. Returns them if they have
    /// changed.
    ///
    /// `find` is called only if the configuration has changed, since it resolves host names, which
    /// can take long.
    pub(crate) fn follow(
        &mut self,
        sockets: &Sockets,
        find: impl FnOnce(&Sockets) -> Result<Vec<Address>, String>,
    ) -> Option<&Result<Vec<Address>, String>> {
        if *sockets == self.sockets {
            return None;
        }
        self.sockets.clone_from(sockets);
        let before = std::mem::replace(&mut self.addresses, find(sockets));
        (before != self.addresses).then_some(&self.addresses)
    }
}

/// Returns the addresses to listen on.
///
/// # Errors
/// There are none. The text says why and what to do.
pub(crate) fn addresses(options: &Options, sockets: &Sockets) -> Result<Vec<Address>, String> {
    let is_off = |port: &Option<String>| port.as_deref() == Some("0");
    let has_tls = sockets.tls_port.as_deref().is_some_and(|port| port != "0");
    if is_off(&sockets.port) && has_tls && !options.allow_clear_text() {
        return Err(
            "the engine serves TLS only, but the module's RDMA and TCP are not encrypted and do \
             not ask for a certificate; to allow clients without TLS, load the module with \
             allow-clear-text yes and set unixsocket /PATH in the engine's configuration"
                .into(),
        );
    }
    let port = options.port();
    if let Some(named) = options.bind() {
        let named = named.map(|ip| Address {
            at: SocketAddr::new(ip, port),
            may_be_absent: false,
            is_named: true,
        });
        return Ok(named.collect());
    }
    let (Some(engine_port), Some(bind)) = (&sockets.port, &sockets.bind) else {
        return Err(
            "the engine does not say where it listens (is CONFIG renamed?); load the module with \
             rdma-bind ADDRESS and engine unix:/PATH or engine HOST:PORT"
                .into(),
        );
    };
    if engine_port == "0" && !has_tls || bind.trim().is_empty() {
        return Err(
            "the engine listens on no address; load the module with rdma-bind ADDRESS".into()
        );
    }
    let mut found: Vec<Address> = Vec::new();
    for word in bind.split_whitespace() {
        let (word, may_be_absent) =
            word.strip_prefix('-').map_or((word, false), |word| (word, true));
        for mut at in resolve(word, may_be_absent)? {
            at.set_port(port);
            if !found.iter().any(|address| address.at == at) {
                found.push(Address { at, may_be_absent, is_named: false });
            }
        }
    }
    Ok(found)
}

/// Resolves a word of the engine's `bind` to addresses with port 0. A link-local address names its
/// interface (`fe80::1%eth0`).
fn resolve(word: &str, may_be_absent: bool) -> Result<Vec<SocketAddr>, String> {
    match word {
        "*" => return Ok(vec![(Ipv4Addr::UNSPECIFIED, 0).into()]),
        "::*" => return Ok(vec![(Ipv6Addr::UNSPECIFIED, 0).into()]),
        _ => {}
    }
    match (word, 0).to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        Err(_) if may_be_absent => Ok(Vec::new()),
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
        let found = addresses(
            &options(arguments),
            &Sockets { port, tls_port, bind, ..Sockets::default() },
        )?;
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
    fn resolves_names_only_when_the_configuration_changes() {
        let bound_to = |bind: &str| Sockets { bind: Some(bind.to_owned()), ..Sockets::default() };
        let at = |ip: &str| Address {
            at: SocketAddr::new(ip.parse().expect("an address"), 1),
            may_be_absent: false,
            is_named: false,
        };
        let mut wanted = WantedAddresses::new(bound_to("one"), vec![at("10.0.0.1")]);
        assert!(wanted.follow(&bound_to("one"), |_| panic!("resolved again")).is_none());
        assert!(
            wanted.follow(&bound_to("uno"), |_| Ok(vec![at("10.0.0.1")])).is_none(),
            "another name of the same address"
        );
        assert_eq!(
            wanted.follow(&bound_to("two"), |_| Err("none".into())),
            Some(&Err("none".into()))
        );
        assert!(wanted.follow(&bound_to("two"), |_| panic!("resolved again")).is_none());
    }

    #[test]
    fn rdma_bind_overrides_the_engines_addresses() {
        let named = at("rdma-bind 10.0.0.5,::1", "6379", "0", "127.0.0.1").expect("addresses");
        assert_eq!(named, ["10.0.0.5:6380", "[::1]:6380"]);
        let without_config = addresses(&options("rdma-bind 10.0.0.5"), &Sockets::default());
        assert_eq!(without_config.expect("an address, although CONFIG is renamed").len(), 1);
    }

    #[test]
    fn an_error_without_addresses_has_a_remedy() {
        for (port, tls, bind) in [("0", "0", "*"), ("6379", "0", "")] {
            let why = at("", port, tls, bind).expect_err("no addresses");
            assert!(why.contains("on no address") && why.contains("rdma-bind"), "{why}");
        }
        let why = addresses(&options(""), &Sockets::default()).expect_err("CONFIG is renamed");
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
            at("allow-clear-text yes", "0", "6379", "10.0.0.5").expect("allowed"),
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
