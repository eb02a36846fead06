//! How the server and its engine stop: on signals, in time, and if one of them is killed.

use std::path::Path;

use ferrite_testkit::TIMEOUT;
use ferrite_testkit::process::{is_alive, signal};
use ferrite_testkit::wait::until_or;
use serde_json::Value;

use crate::server::harness::{Server, Setup, connect, directory};
use crate::{network, pid};

/// Makes saving take longer than any test waits.
const SLOW_SAVE: &str = "rdb-key-save-delay = 1000000";

/// Writes data and sends SIGTERM. With [`SLOW_SAVE`], the engine does not stop by itself.
fn begin_slow_stop(server: &mut Server) {
    let event = server.event("ready");
    let script = "for i = 1, 100 do redis.call('SET', 'key' .. i, i) end return 1";
    assert_eq!(connect(&event).text(&["EVAL", script, "0"]), ":1");
    server.signal("TERM");
}

#[test]
fn second_signal_kills_the_engine() {
    let directory = directory();
    let network = network();
    let mut server = Server::start(
        &directory,
        &Setup { network: &network, engine: SLOW_SAVE, ..Setup::default() },
    );
    begin_slow_stop(&mut server);
    server.until_logged("Saving the final RDB snapshot");
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 137);
    assert_eq!(server.end().0, Some(137));
    let line = "second signal received, killing the engine";
    assert!(server.log().contains(line), "{}", server.log());
}

#[test]
fn kills_an_engine_that_does_not_stop_in_time() {
    let directory = directory();
    let network = network();
    let setup =
        Setup { server: "shutdown_timeout = \"500ms\"", network: &network, engine: SLOW_SAVE };
    let mut server = Server::start(&directory, &setup);
    begin_slow_stop(&mut server);
    assert_eq!(server.end().0, Some(137));
    assert!(server.log().contains("did not stop within 0.5 s, killing it"), "{}", server.log());
}

#[test]
fn engine_saves_and_stops_when_ferrite_is_killed() {
    let directory = directory();
    let network = network();
    let setup = Setup { network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    assert_eq!(connect(&event).text(&["SET", "key", "kept"]), "+OK");
    let engine = u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id");
    assert!(is_alive(engine));
    server.signal("KILL");
    until_or(TIMEOUT, "the engine ends", || !is_alive(engine), || server.log());
    drop(server);
    let mut second = Server::start(&directory, &setup);
    let event = second.event("ready");
    assert_eq!(connect(&event).text(&["GET", "key"]), "kept", "the engine has saved");
}

/// A killed ferrite cannot remove the private directory with the engine's socket.
#[test]
fn start_removes_the_directory_of_a_killed_server() {
    let (directory, network) = (directory(), network());
    let setup = Setup { network: &network, ..Setup::default() };
    let private = |event: &Value| {
        let socket = Path::new(event["unix_socket"].as_str().expect("a path"));
        socket.parent().expect("a directory").to_owned()
    };
    let mut first = Server::start(&directory, &setup);
    let event = first.event("ready");
    let (left_over, engine) = (private(&event), pid(&event));
    first.signal("KILL");
    until_or(TIMEOUT, "the engine ends", || !is_alive(engine), || first.log());
    drop(first);
    assert!(left_over.exists(), "only a start removes it");
    let mut second = Server::start(&directory, &setup);
    let own = private(&second.event("ready"));
    assert!(own.exists() && own != left_over, "{}", own.display());
    assert!(!left_over.exists(), "{} is left", left_over.display());
}

#[test]
fn exits_or_restarts_after_the_engine_was_killed() {
    let directory = directory();
    let network = network();
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let kill = |event: &Value| signal("KILL", pid(event));
    kill(&server.event("ready"));
    assert_eq!(server.end().0, Some(137), "{}", server.log());

    let policy = "restart = \"on-failure\"\nrestart_delay = \"100ms\"\nrestart_limit = 2";
    let setup = Setup { server: policy, network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let mut last_pid = Value::Null;
    for (restart, delay) in [(1, 0.1), (2, 0.2)] {
        let event = server.event("ready");
        assert_ne!(event["pid"], last_pid, "a new engine");
        assert_eq!(connect(&event).text(&["PING"]), "+PONG");
        last_pid = event["pid"].clone();
        kill(&event);
        let event = server.event("restarting");
        assert_eq!(
            (event["restart"].as_u64(), event["delay_seconds"].as_f64()),
            (Some(restart), Some(delay))
        );
        assert_eq!(event["code"], 137);
    }
    kill(&server.event("ready"));
    assert_eq!(server.event("ended")["code"], 137);
    let (code, stdout) = server.end();
    assert_eq!(code, Some(137), "{}", server.log());
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    let why = "the engine was killed by signal 9: the kernel does this if memory runs out";
    assert!(stdout.contains(why), "{stdout}");
    assert!(server.log().contains("giving up after 2 restarts in a row"), "{}", server.log());
}
