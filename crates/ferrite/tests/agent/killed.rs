//! Killed agents in transparent mode. The rules of an agent end with it.

use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ferrite_testkit::process::signal;
use ferrite_testkit::{Engine, TIMEOUT, until};

use super::harness::{Group, PASSWORD, operator, sum};
use super::wire;

/// The settings of an engine that replicates. None of them is about addresses.
pub(crate) const AUTH: [&str; 4] = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];

/// Kills the agent of a replica's host in each round. Its connections are reset, and then direct.
/// Returns how long the rules stayed after each kill.
pub(crate) fn connections_are_direct(
    group: &mut Group,
    rounds: usize,
    over_tcp: bool,
) -> Vec<Duration> {
    let primary = group.start_engine(1, 7001, &AUTH);
    let of = [&AUTH[..], &["--replicaof", "10.77.0.1", "7001"]].concat();
    let replica = group.start_engine(2, 7001, &of);
    until(TIMEOUT, "a replica", || field(&replica, "master_link_status") == "up");
    assert!(field(&primary, "slave0").starts_with("ip=10.77.0.2,port=7001,state="));
    group.assert_only_links(over_tcp);
    let number = |name| field(&primary, name).parse::<u32>().expect("a number");
    let syncs = || (number("sync_full"), number("sync_partial_ok"));
    let is_connected = || field(&replica, "master_link_status") == "up";
    assert_eq!(syncs(), (1, 0));
    let mut times = Vec::new();
    for _ in 0..rounds {
        let mut waits = group.connect(2, 1, 7001);
        let (_, resumed) = syncs();
        let begun = Instant::now();
        signal("KILL", group.agent(2).process.0.id());
        until(TIMEOUT, "no rules", || !wire::has_rules(&group.hosts, 2));
        times.push(begun.elapsed());
        assert!(is_reset(&mut waits), "expected a reset, not the end of the stream");
        assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
        // The replica resumes where it was interrupted, over a direct connection.
        let has_resumed = |before: u32| syncs().1 > before && is_connected();
        until(TIMEOUT, "a partial resynchronisation", || has_resumed(resumed));
        let (_, resumed) = syncs();
        let packets = || wire::packets(&group.hosts, 2).0;
        assert!(packets() > 0, "direct connections are counted");
        // A new agent redirects new connections, and leaves the direct one alone.
        group.agents[1] = group.start_agent(2, 2);
        group.wait_for_links();
        let mut client = operator(&primary);
        client.ok(&["SET", "key", "value"]);
        assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1");
        assert_eq!(syncs(), (1, resumed));
        let opened = || sum(&group.scrape(2), "agent_streams_opened_total{", "by=\"local\"");
        assert!(opened() == 0.0);
        assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
        assert!(opened() == 1.0);
        // Ends the direct connection of the replica. The next one goes through the new agent.
        assert_eq!(operator(&replica).ask(&["CLIENT", "KILL", "TYPE", "master"]), ":1");
        until(TIMEOUT, "a partial resynchronisation", || has_resumed(resumed));
        assert!(opened() == 2.0);
    }
    times
}

pub(crate) fn is_reset(socket: &mut TcpStream) -> bool {
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Returns a field of INFO.
pub(crate) fn field(engine: &Engine, name: &str) -> String {
    let info = operator(engine).text(&["INFO"]);
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name} in {info}")).trim().to_owned()
}
