//! SIGHUP: settings that can change while the engine runs.

use ferrite_testkit::process::signal;

use crate::server::harness::{Server, Setup, connect, directory};
use crate::{engines, network, pid};

/// SIGHUP applies the settings that can change, and logs those that cannot. If the file is wrong,
/// no setting changes.
#[test]
fn sighup_applies_settings_that_can_change() {
    for engine in engines() {
        let (directory, network) = (directory(), network());
        let own = format!("engine = \"{engine}\"");
        let setup = Setup { server: &own, network: &network, ..Setup::default() };
        let mut server = Server::start(&directory, &setup);
        let event = server.event("ready");
        let max = || connect(&event).text(&["CONFIG", "GET", "ferrite.max-clients"]);
        assert!(max().contains("10000"), "{}", max());
        let changed = format!(
            "{network}\nrdma_gid_index = 2\n[network.rdma]\nmax_connections = 77\n\
             slice_us = \"1ms\"\n[observability]\nlog_level = \"debug\""
        );
        let own = format!("{own}\nrestart = \"on-failure\"");
        let setup = Setup { server: &own, network: &changed, engine: "maxmemory-samples = 3" };
        directory.file("ferrite.toml", setup.text(directory.path()));
        server.signal("HUP");
        server.until_logged("max-clients is now 77 (was 10000)");
        server.until_logged("restart to apply these changed settings: rdma-gid-index");
        server.until_logged("change them in the engine with CONFIG SET: maxmemory-samples");
        assert!(max().contains("77"), "{}", max());
        let slice = connect(&event).text(&["CONFIG", "GET", "ferrite.slice-us"]);
        assert!(slice.contains("1000"), "{slice}");
        assert!(server.log().contains("restart is now on-failure (was no)"), "{}", server.log());
        directory.file("ferrite.toml", "[network]\nport = \"x\"");
        server.signal("HUP");
        server.until_logged("but no setting was changed: ");
        assert!(max().contains("77"), "{}", max());
        server.signal("TERM");
        assert_eq!(server.event("ended")["code"], 0);
    }
}

/// Settings that SIGHUP has changed stay when the engine is started again.
#[test]
fn settings_of_sighup_survive_a_restart_of_the_engine() {
    let (directory, network) = (directory(), network());
    let own = "restart = \"on-failure\"\nrestart_delay = \"100ms\"";
    let write = |network: &str| {
        let setup = Setup { server: own, network, ..Setup::default() };
        directory.file("ferrite.toml", setup.text(directory.path()));
    };
    let setup = Setup { server: own, network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    write(&format!("{network}\n[network.rdma]\nmax_connections = 77"));
    server.signal("HUP");
    server.until_logged("max-clients is now 77 (was 10000)");
    signal("KILL", pid(&event));
    server.event("restarting");
    let event = server.event("ready");
    let max = connect(&event).text(&["CONFIG", "GET", "ferrite.max-clients"]);
    assert!(max.contains("77"), "{max}");
}

/// The log does not claim that a rejected setting changed, and the next SIGHUP tries again.
#[test]
fn sighup_retries_settings_that_the_engine_rejected() {
    let (directory, network) = (directory(), network());
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let event = server.event("ready");
    let changed = format!("{network}\n[network.rdma]\nmax_connections = 77");
    let setup = Setup { network: &changed, ..Setup::default() };
    directory.file("ferrite.toml", setup.text(directory.path()));
    let mut client = connect(&event);
    client.ok(&["CONFIG", "SET", "requirepass", "secret"]);
    server.signal("HUP");
    server.until_logged("CONFIG SET ferrite.max-clients 77 failed: -NOAUTH");
    server.until_logged("SIGHUP received: no setting was changed");
    assert!(!server.log().contains("max-clients is now"), "{}", server.log());
    client.ok(&["CONFIG", "SET", "requirepass", ""]);
    server.signal("HUP");
    server.until_logged("max-clients is now 77 (was 10000)");
    let max = client.text(&["CONFIG", "GET", "ferrite.max-clients"]);
    assert!(max.contains("77"), "{max}");
}
