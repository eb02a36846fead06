//! Parses addresses given on the command line and in files, and resolves names.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_config::address::{split, words};

/// How long [`resolve_all`] waits. A server of names that does not answer takes 5 s or longer.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);
/// How many names [`resolve_all`] looks for at once.
const RESOLVERS: usize = 32;

/// Parses an IP address or a host name, with an optional port. An IPv6 address may name its
/// interface (`fe80::1%eth0`). Resolves names, which may take long.
///
/// Pass `DEFAULT_PORT` 0 for a local address, where any port will do.
pub(crate) fn parse<const DEFAULT_PORT: u16>(text: &str) -> Result<SocketAddr, String> {
    let (host, port) = host_and_port::<DEFAULT_PORT>(text)?;
    resolve(host, port)
}

/// Parses an IP address or a host name, with an optional port.
pub(crate) fn host_and_port<const DEFAULT_PORT: u16>(text: &str) -> Result<(&str, u16), String> {
    let Some((host, port)) = split(text) else {
        let port = text.rsplit_once(':').map(|(_, port)| port);
        return Err(match port.filter(|port| !port.is_empty() && port.parse::<u16>().is_err()) {
            Some(port) if text.matches(':').count() == 1 => {
                format!("{port:?} is not a port number (0 to 65535)")
            }
            _ => "expected ADDRESS or ADDRESS:PORT ([ADDRESS]:PORT for IPv6)".to_owned(),
        });
    };
    Ok((host, port.unwrap_or(DEFAULT_PORT)))
}

/// Returns the address that a name stands for, which may take long.
pub(crate) fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let found = (host, port).to_socket_addrs().map_err(|error| format!("{host}: {error}"))?;
    // Prefer IPv4 if the name has IPv4 and IPv6 addresses: most RoCE networks use IPv4.
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found.first().copied().ok_or_else(|| format!("the name {host} has no IP address"))
}

/// Returns the addresses that names stand for, as [`resolve`] does. Looks for all of them at once,
/// and waits for at most 2 s.
pub(crate) fn resolve_all(names: Vec<(String, u16)>) -> Vec<Result<SocketAddr, String>> {
    resolve_all_by(names, resolve, RESOLVE_TIMEOUT)
}

fn resolve_all_by(
    names: Vec<(String, u16)>,
    resolve: impl Fn(&str, u16) -> Result<SocketAddr, String> + Copy + Send + 'static,
    limit: Duration,
) -> Vec<Result<SocketAddr, String>> {
    let deadline = Instant::now() + limit;
    let unanswered = |host: &str| format!("{host}: no answer within {limit:?}");
    let begin = |(host, port): &(String, u16)| match host.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketAddr::new(ip, *port)),
        Err(_) => Err(unanswered(host)),
    };
    let mut found: Vec<_> = names.iter().map(begin).collect();
    let mut names: Vec<_> = names.into_iter().enumerate().collect();
    names.retain(|(at, _)| found[*at].is_err());
    let (answers, received) = channel();
    let threads = names.len().min(RESOLVERS);
    let names = Arc::new(Mutex::new(names.into_iter()));
    let next = move || names.lock().unwrap_or_else(PoisonError::into_inner).next();
    for _ in 0..threads {
        let (next, answers) = (next.clone(), answers.clone());
        // These threads may still wait when this function has returned. They end after that.
        let work = move || {
            while let Some((at, (host, port))) = next() {
                if answers.send((at, resolve(&host, port))).is_err() {
                    break;
                }
            }
        };
        // If a thread cannot be started, the others do its work.
        let _ = std::thread::Builder::new().name("resolve".into()).spawn(work);
    }
    drop((next, answers)); // the end of all threads then ends the loop
    while let Ok((at, answer)) =
        received.recv_timeout(deadline.saturating_duration_since(Instant::now()))
    {
        found[at] = answer;
    }
    found
}

/// Parses a comma-separated list of addresses.
pub(crate) fn parse_all<const DEFAULT_PORT: u16>(text: &str) -> Result<Vec<SocketAddr>, String> {
    words(text).map(parse::<DEFAULT_PORT>).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        parse::<7471>(text).map_or_else(|error| error, |addr| addr.to_string())
    }

    #[test]
    fn parses_addresses_with_and_without_a_port() {
        assert_eq!(parsed("10.0.0.1"), "10.0.0.1:7471");
        assert_eq!(parsed("10.0.0.1:99"), "10.0.0.1:99");
        assert_eq!(parsed("2001:db8::1"), "[2001:db8::1]:7471");
        assert_eq!(parsed("[2001:db8::1]"), "[2001:db8::1]:7471");
        assert_eq!(parsed("[2001:db8::1]:99"), "[2001:db8::1]:99");
        // The loopback interface has index 1 everywhere.
        assert_eq!(parsed("fe80::1%lo"), "[fe80::1%1]:7471");
        assert_eq!(parsed("[fe80::1%lo]:99"), "[fe80::1%1]:99");
        assert_eq!(parsed("localhost:99"), "127.0.0.1:99");
        assert_eq!(parse::<0>("10.0.0.2").map(|addr| addr.port()), Ok(0));
        let all = parse_all::<1>("10.0.0.1, [::1]:2").expect("addresses");
        assert_eq!(all, ["10.0.0.1:1", "[::1]:2"].map(|text| text.parse().expect("an address")));
    }

    #[test]
    fn names_without_an_answer_delay_neither_others_nor_the_result() {
        let names = ["10.0.0.1", "never", "known", "unknown"];
        let names = names.map(|name| (name.to_owned(), 7470)).into();
        let lookup = |host: &str, port| match host {
            "never" => loop {
                std::thread::park();
            },
            "unknown" => Err("unknown: no such name".to_owned()),
            _ => resolve("10.0.0.2", port),
        };
        let begun = Instant::now();
        let found = resolve_all_by(names, lookup, Duration::from_millis(500));
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        let [first, never, second, unknown] = found.try_into().expect("four answers");
        assert_eq!(first, Ok("10.0.0.1:7470".parse().expect("an address")));
        assert_eq!(never, Err("never: no answer within 500ms".into()));
        assert_eq!(second, Ok("10.0.0.2:7470".parse().expect("an address")));
        assert_eq!(unknown, Err("unknown: no such name".into()));
        assert_eq!(resolve_all(Vec::new()), []);
    }

    #[test]
    fn explains_invalid_addresses() {
        assert_eq!(parsed("10.0.0.1:http"), "\"http\" is not a port number (0 to 65535)");
        assert_eq!(parsed("10.0.0.1:70000"), "\"70000\" is not a port number (0 to 65535)");
        for bad in ["", ":7471", "[10.0.0.1", "a:b:1"] {
            assert!(parsed(bad).starts_with("expected ADDRESS"), "{bad}: {}", parsed(bad));
        }
        assert!(parsed("fe80::1%no-such-interface").starts_with("fe80::1%no-such-interface: "));
    }
}
