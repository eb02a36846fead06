//! Where clients come in: at the addresses that were named, else at those that the engine itself
//! listens on, and nowhere if the engine serves nobody without TLS.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};

use ferrite_fabric::Rdma;

use crate::options::Options;
use crate::target::Sockets;

/// An address to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) at: SocketAddr,
    /// The host may be without it.
    pub(crate) may_be_absent: bool,
    /// By whom loads the module, and not by the engine's `bind`.
    pub(crate) is_named: bool,
}

impl Address {
    /// A loopback address is for this host alone, and RDMA comes from others.
    pub(crate) fn rdma(&self, policy: Rdma) -> Rdma {
        if self.at.ip().is_loopback() { Rdma::Forbid } else { policy }
    }
}

/// Where to listen by what the engine said when it was last asked.
#[derive(Debug)]
pub(crate) struct Wanted {
    said: Sockets,
    addresses: Result<Vec<Address>, String>,
}

impl Wanted {
    pub(crate) fn new(said: Sockets, addresses: Vec<Address>) -> Self {
        Self { said, addresses: Ok(addresses) }
    }

    /// The engine says this now: the addresses, if they are others than before. They are looked for
    /// only if it says something else: names in them are looked up, for as long as the system
    /// takes.
    pub(crate) fn follow(
        &mut self,
        says: &Sockets,
        find: impl FnOnce(&Sockets) -> Result<Vec<Address>, String>,
    ) -> Option<&Result<Vec<Address>, String>> {
        if *says == self.said {
            return None;
        }
        self.said.clone_from(says);
        let before = std::mem::replace(&mut self.addresses, find(says));
        (before != self.addresses).then_some(&self.addresses)
    }
}

/// The addresses, or why there are none and what to do.
pub(crate) fn addresses(options: &Options, sockets: &Sockets) -> Result<Vec<Address>, String> {
    let is_off = |port: &Option<String>| port.as_deref() == Some("0");
    let has_tls = sockets.tls_port.as_deref().is_some_and(|port| port != "0");
    if is_off(&sockets.port) && has_tls && !options.allow_clear_text() {
        return Err(
            "the engine serves TLS alone, and neither RDMA nor this module's TCP is encrypted or asks for a certificate; to allow \
             clients without TLS, load the module with allow-clear-text yes and set unixsocket /PATH in the engine's configuration"
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
            "the engine does not say where it listens (is CONFIG renamed?): load the module with rdma-bind ADDRESS and engine unix:/PATH or engine HOST:PORT"
                .into(),
        );
    };
    if engine_port == "0" && !has_tls || bind.trim().is_empty() {
        return Err(
            "the engine listens at no address, so the module does not either: load the module with rdma-bind ADDRESS"
                .into(),
        );
    }
    let mut found: Vec<Address> = Vec::new();
    for word in bind.split_whitespace() {
        let (word, may_be_absent) =
            word.strip_prefix('-').map_or((word, false), |word| (word, true));
        for mut at in places(word, may_be_absent)? {
            at.set_port(port);
            if !found.iter().any(|address| address.at == at) {
                found.push(Address { at, may_be_absent, is_named: false });
            }
        }
    }
    Ok(found)
}

/// What a word of the engine's `bind` means, without a port. A link-local address names its
/// interface (`fe80::1%eth0`).
fn places(word: &str, may_be_absent: bool) -> Result<Vec<SocketAddr>, String> {
    match word {
        "*" => return Ok(vec![(Ipv4Addr::UNSPECIFIED, 0).into()]),
        "::*" => return Ok(vec![(Ipv6Addr::UNSPECIFIED, 0).into()]),
        _ => {}
    }
    match (word, 0).to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        Err(_) if may_be_absent => Ok(Vec::new()),
        Err(error) => Err(format!(
            "the engine's bind address {word:?}: {error}; load the module with rdma-bind ADDRESS"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &str) -> Options {
        let words: Vec<_> = words.split_whitespace().map(|word| word.replace('+', " ")).collect();
        Options::from_arguments(&words).expect("right")
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
    fn follows_the_engine() {
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
    fn names_are_looked_up_when_the_engine_says_something_else() {
        let says = |bind: &str| Sockets { bind: Some(bind.to_owned()), ..Sockets::default() };
        let at = |ip: &str| Address {
            at: SocketAddr::new(ip.parse().expect("an address"), 1),
            may_be_absent: false,
            is_named: false,
        };
        let mut wanted = Wanted::new(says("one"), vec![at("10.0.0.1")]);
        assert!(wanted.follow(&says("one"), |_| panic!("looked up again")).is_none());
        assert!(
            wanted.follow(&says("uno"), |_| Ok(vec![at("10.0.0.1")])).is_none(),
            "another name of it"
        );
        assert_eq!(wanted.follow(&says("two"), |_| Err("none".into())), Some(&Err("none".into())));
        assert!(wanted.follow(&says("two"), |_| panic!("looked up again")).is_none());
    }

    #[test]
    fn goes_where_it_is_told() {
        let told = at("rdma-bind 10.0.0.5,::1", "6379", "0", "127.0.0.1").expect("addresses");
        assert_eq!(told, ["10.0.0.5:6380", "[::1]:6380"]);
        let mute = addresses(&options("rdma-bind 10.0.0.5"), &Sockets::default());
        assert_eq!(mute.expect("CONFIG is renamed").len(), 1);
    }

    #[test]
    fn nowhere_is_told_with_a_remedy() {
        for (port, tls, bind) in [("0", "0", "*"), ("6379", "0", "")] {
            let why = at("", port, tls, bind).expect_err("nowhere");
            assert!(why.contains("at no address") && why.contains("rdma-bind"), "{why}");
        }
        let why = addresses(&options(""), &Sockets::default()).expect_err("CONFIG is renamed");
        assert!(
            why.contains("does not say where it listens") && why.contains("rdma-bind"),
            "{why}"
        );
    }

    #[test]
    fn refuses_clear_text_beside_tls_alone() {
        for arguments in ["", "rdma-bind 10.0.0.5", "rdma require"] {
            let why = at(arguments, "0", "6379", "*").expect_err("TLS alone");
            assert!(why.contains("TLS alone") && why.contains("allow-clear-text yes"), "{why}");
        }
        assert_eq!(
            at("allow-clear-text yes", "0", "6379", "10.0.0.5").expect("allowed"),
            ["10.0.0.5:6380"]
        );
        at("", "6379", "6390", "*").expect("it has a port without TLS of its own");
    }

    #[test]
    fn loopback_takes_no_rdma() {
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
