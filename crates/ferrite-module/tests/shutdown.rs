//! Engines that shut down or fail over under load must keep all acknowledged writes.

use ferrite_testkit::{Engine, Start, free_port};
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};

/// Adds one to the counter of this key; false if that was not acknowledged.
pub(crate) type Increment = Box<dyn FnMut(&str) -> bool + Send>;

/// How an engine is shut down.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Way {
    /// SIGTERM, with an RDB save.
    Signal,
    /// SHUTDOWN, with an RDB save.
    Command,
    /// SHUTDOWN NOSAVE, with an append-only file.
    NosaveWithAof,
}

const WRITERS: usize = 3;

/// Returns the number of rounds: FERRITE_SHUTDOWNS, or 2.
pub(crate) fn rounds() -> usize {
    std::env::var("FERRITE_SHUTDOWNS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2)
}

fn key(writer: usize) -> String {
    format!("counter{writer}")
}

fn counter(server: &Engine, writer: usize) -> i64 {
    server.ask::<Option<i64>>(&["GET", &key(writer)]).unwrap_or(0)
}

/// Writes to the engine until no writer gets acknowledgements any more. `act` shuts the engine down
/// or fails over meanwhile. Returns how many increments of each writer were acknowledged.
fn write_until_shutdown(
    server: &mut Engine,
    connect: &dyn Fn(&Engine) -> Increment,
    act: impl FnOnce(&mut Engine),
) -> Vec<i64> {
    let acknowledged: Vec<_> = (0..WRITERS).map(|_| AtomicI64::new(0)).collect();
    std::thread::scope(|scope| {
        for (writer, acknowledged) in acknowledged.iter().enumerate() {
            let mut increment = connect(server);
            scope.spawn(move || {
                while increment(&key(writer)) {
                    acknowledged.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let all_write = || acknowledged.iter().all(|count| count.load(Ordering::SeqCst) > 50);
        server.wait_until("writes of all writers", all_write);
        act(server);
    });
    acknowledged.into_iter().map(AtomicI64::into_inner).collect()
}

/// Asserts that no acknowledged write is lost. One more write per writer may have been in flight.
fn assert_kept(server: &Engine, before: &[i64], acknowledged: &[i64], what: &str) {
    for (writer, (before, acknowledged)) in before.iter().zip(acknowledged).enumerate() {
        let kept = counter(server, writer) - before;
        assert!(
            (*acknowledged..=acknowledged + 1).contains(&kept),
            "{what}: {acknowledged} acknowledged, {kept} kept"
        );
    }
}

/// Shuts an engine down under load and restarts it, for [`rounds`] rounds. Checks that it keeps all
/// acknowledged writes.
pub(crate) fn shutdown_keeps_acknowledged_writes(
    program: &Path,
    arguments: &[&str],
    way: Way,
    connect: &dyn Fn(&Engine) -> Increment,
) {
    let durable = match way {
        Way::Signal | Way::Command => "save 3600 1",
        Way::NosaveWithAof => "save \"\"\nappendonly yes\nappendfsync everysec",
    };
    let options = ["port 0", "protected-mode no", durable];
    let mut server =
        Engine::start_from_file(&Start { program, module: Some(arguments), options: &options });
    for round in 0..rounds() {
        let before: Vec<_> = (0..WRITERS).map(|writer| counter(&server, writer)).collect();
        let acknowledged = write_until_shutdown(&mut server, connect, |server| {
            match way {
                Way::Signal => server.signal("TERM"),
                Way::Command => drop(server.try_ask::<redis::Value>(&["SHUTDOWN"])),
                Way::NosaveWithAof => drop(server.try_ask::<redis::Value>(&["SHUTDOWN", "NOSAVE"])),
            }
            server.wait();
        });
        server.restart();
        server.wait_until("the data is loaded", || server.try_ask::<String>(&["PING"]).is_ok());
        let what = format!("{way:?}, round {round} on {}", program.display());
        assert_kept(&server, &before, &acknowledged, &what);
    }
    server.assert_healthy();
}

/// Fails over between two engines under load, for [`rounds`] rounds. Checks that the new primary
/// has all acknowledged writes.
pub(crate) fn failover_keeps_acknowledged_writes(
    program: &Path,
    arguments: [&[&str]; 2],
    connect: &dyn Fn(&Engine) -> Increment,
) {
    let ports = [free_port().to_string(), free_port().to_string()];
    let start = |index: usize| {
        let port = format!("port {}", ports[index]);
        let mut options =
            vec![port.as_str(), "protected-mode no", "save \"\"", "repl-diskless-sync-delay 0"];
        let replicaof = format!("replicaof 127.0.0.1 {}", ports[0]);
        if index == 1 {
            options.push(&replicaof);
        }
        Engine::start_from_file(&Start {
            program,
            module: Some(arguments[index]),
            options: &options,
        })
    };
    let (mut primary, mut replica) = (start(0), start(1));
    for round in 0..rounds() {
        let info = |server: &Engine| server.ask::<String>(&["INFO", "replication"]);
        primary.wait_until("an online replica", || info(&primary).contains("state=online"));
        let before: Vec<_> = (0..WRITERS).map(|writer| counter(&primary, writer)).collect();
        let acknowledged = write_until_shutdown(&mut primary, connect, |primary| {
            let reply: String = primary.ask(&["FAILOVER"]);
            assert_eq!(reply, "OK");
        });
        replica.wait_until("the new primary", || info(&replica).contains("role:master"));
        let what = format!("failover, round {round} on {}", program.display());
        assert_kept(&replica, &before, &acknowledged, &what);
        std::mem::swap(&mut primary, &mut replica);
    }
    primary.assert_healthy();
    replica.assert_healthy();
}

/// Defines the tests. The caller must have `test_shutdown`, which shuts an engine down in a
/// [`Way`], and `test_failover`.
macro_rules! shutdown_tests {
    () => {
        #[test]
        fn sigterm_loses_no_acknowledged_write() {
            test_shutdown(Way::Signal);
        }

        #[test]
        fn shutdown_loses_no_acknowledged_write() {
            test_shutdown(Way::Command);
        }

        #[test]
        fn shutdown_nosave_with_aof_loses_no_acknowledged_write() {
            test_shutdown(Way::NosaveWithAof);
        }

        #[test]
        fn failover_loses_no_acknowledged_write() {
            test_failover();
        }
    };
}
pub(crate) use shutdown_tests;
