//! The module's settings in real engines: arguments of `loadmodule`, lines of the engine's
//! configuration, and CONFIG.

mod module {
    pub(crate) mod harness;
}

use std::io::Write as _;

use ferrite_testkit::engine::{REDIS, engines};
use ferrite_testkit::{Engine, Start, free_port};
use module::harness::{connect, log_of_failed_load, rejection, start};

/// Lines of the engine's configuration set the settings one by one. The module checks them
/// together.
#[test]
fn settings_in_the_engines_configuration_must_fit_together() {
    for program in engines() {
        let log = log_of_failed_load(&program, &[], &["--ferrite.pin-memory", "no"]);
        assert!(log.contains("not loaded: pin-memory: memory that a device accesses"), "{log}");
    }
}

#[test]
fn errors_name_the_wrong_argument() {
    for program in engines() {
        for (arguments, error) in [
            (&["rdma-prot", "1"][..], "unknown argument \"rdma-prot\"; the nearest is rdma-port"),
            (&["rdma-port"], "argument rdma-port has no value"),
            (&["rdma-port", "70000"], "rdma-port \"70000\": expected a number from 1 to 65535"),
            (&["rdma", "maybe"], "rdma \"maybe\": expected prefer or require or forbid"),
            (
                &["rdma-bind", "localhost:1"],
                "rdma-bind \"localhost:1\": expected auto (where the engine listens), or addresses",
            ),
            (&["rx-size", "8mb"], "rx-size \"8mb\": expected a size from 4kb to 2mb"),
            (&["engine", "nowhere"], "engine \"nowhere\": expected unix:/PATH or HOST:PORT"),
        ] {
            let log = log_of_failed_load(&program, arguments, &[]);
            assert!(log.contains(&format!("ferrite: not loaded: {error}")), "{arguments:?}: {log}");
        }
    }
}

#[test]
fn config_works_for_the_modules_settings() {
    for program in engines() {
        let mut server = start(
            &program,
            &["max-clients", "7"],
            &["--ferrite.rx-size", "128kb", "--ferrite.busy-poll-us", "3"],
        );
        let get = |name: &str| {
            server.ask::<Vec<String>>(&["CONFIG", "GET", name]).pop().unwrap_or_default()
        };
        assert_eq!(get("ferrite.max-clients"), "7");
        assert_eq!(get("ferrite.rx-size"), "131072");
        assert_eq!(get("ferrite.rx-size-max"), "2097152");
        assert_eq!(get("ferrite.busy-poll-us"), "3");
        assert_eq!(
            (get("ferrite.rdma").as_str(), get("ferrite.engine").as_str()),
            ("prefer", "auto")
        );
        assert_eq!(get("ferrite.rdma-bind"), "127.0.0.1");
        assert_eq!(get("ferrite.rdma-bind"), "127.0.0.1", "a second CONFIG GET returns the same");
        for (name, value) in [
            ("max-clients", "1"),
            ("rx-size", "65536"),
            ("rx-size-max", "1048576"),
            ("busy-poll-us", "0"),
        ] {
            let () = server.ask(&["CONFIG", "SET", &format!("ferrite.{name}"), value]);
            assert_eq!(get(&format!("ferrite.{name}")), value);
        }
        for (name, value) in [
            ("rdma-port", "1"),
            ("rdma-bind", "::"),
            ("rdma", "require"),
            ("engine", "auto"),
            ("rdma-device", "x"),
        ] {
            let error = server.refusal(&["CONFIG", "SET", &format!("ferrite.{name}"), value]);
            assert!(error.contains("immutable"), "{error}");
        }
        for (name, value) in [("max-clients", "0"), ("rx-size", "1"), ("busy-poll-us", "-1")] {
            let error = server.refusal(&["CONFIG", "SET", &format!("ferrite.{name}"), value]);
            assert!(error.contains("must be between"), "{error}");
        }
        // The new limit of clients applies.
        let mut first = connect(&server);
        first.write_all(b"PING\r\n").expect("the connection is open");
        server.wait_until("a session", || server.count("sessions") == 1);
        assert_eq!(rejection(connect(&server)), "-ERR max number of clients reached\r\n");
        server.wait_until("the rejection is counted", || server.count("refused") == 1);
        server.assert_healthy();
    }
}

/// CONFIG REWRITE keeps the arguments and writes the settings that were changed. An engine that
/// starts from this file has the same settings.
#[test]
fn config_rewrite_keeps_the_modules_settings() {
    for program in engines() {
        let port = free_port().to_string();
        let arguments = ["rdma-port", &port, "rdma-bind", "127.0.0.1", "max-clients", "7"];
        let mut server = Engine::start_from_file(&Start {
            program: &program,
            module: Some(&arguments),
            options: &["port 0"],
        });
        let () = server.ask(&["CONFIG", "SET", "ferrite.busy-poll-us", "5"]);
        let () = server.ask(&["CONFIG", "REWRITE"]);
        let file = std::fs::read_to_string(server.directory().join("engine.conf")).expect("a file");
        assert!(
            file.contains("max-clients 7") && file.contains("ferrite.busy-poll-us 5"),
            "{file}"
        );
        assert!(!file.contains("ferrite.max-clients"), "this is an argument already: {file}");
        assert!(server.shut_down("NOSAVE").success());
        server.restart();
        let get = |name: &str| {
            server.ask::<Vec<String>>(&["CONFIG", "GET", name]).pop().unwrap_or_default()
        };
        assert_eq!(
            (get("ferrite.busy-poll-us").as_str(), get("ferrite.max-clients").as_str()),
            ("5", "7")
        );
        assert_eq!(get("ferrite.rdma-port"), port);
        server.assert_healthy();
    }
}

/// CONFIG has exactly the settings of the table. The test also checks some of their defaults.
#[test]
fn config_has_the_settings_of_the_table() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let found: std::collections::BTreeMap<String, String> =
            server.ask(&["CONFIG", "GET", "ferrite.*"]);
        let table = ferrite_config::Program::Module.settings().filter(|setting| setting.in_config);
        let mut names: Vec<_> = table.map(|setting| format!("ferrite.{}", setting.name)).collect();
        names.sort();
        assert_eq!(found.keys().collect::<Vec<_>>(), names.iter().collect::<Vec<_>>());
        for (name, value) in [
            ("rx-size", "65536"),
            ("slice-us", "500"),
            ("connection-timeout-ms", "5000"),
            ("adaptive-polling", "yes"),
            ("rdma-gid-index", "-1"),
            ("memory-pool-max", "1073741824"),
        ] {
            assert_eq!(found[&format!("ferrite.{name}")], value, "{name}");
        }
        server.assert_healthy();
    }
}

/// The module accepts most settings of other RDMA software as arguments, with the names and default
/// values that they have there. For some that it refuses, the log says what to set instead.
#[test]
fn accepts_the_names_of_other_software() {
    let arguments = ferrite_config::table::FOREIGN.iter().filter_map(|foreign| {
        let name = foreign.name.rsplit('.').next().expect("a name");
        let value = foreign.default.split(' ').next().expect("a value");
        // Those of replication and clusters are for `ferrite server` and its agent.
        let is_of_server =
            ["replication.", "cluster."].iter().any(|section| foreign.name.starts_with(section));
        let is_argument =
            ferrite_config::table::refused(name).is_none() && !is_of_server && value != "empty";
        // Two programs document this setting, with different defaults.
        let is_second = name == "rdma_gid_index" && value == "-1";
        (is_argument && !is_second && name != "rdma_recv_block_type").then_some([name, value])
    });
    let arguments: Vec<_> = arguments.flatten().collect();
    let mut server = start(REDIS.as_ref(), &arguments, &[]);
    let get =
        |name: &str| server.ask::<Vec<String>>(&["CONFIG", "GET", name]).pop().unwrap_or_default();
    assert_eq!(get("ferrite.rdma-device-port"), "1");
    assert_eq!(get("ferrite.rdma-gid-index"), "3");
    assert_eq!(get("ferrite.max-clients"), "1000");
    assert_eq!(get("ferrite.recv-buffer-size"), "4096");
    assert_eq!(get("ferrite.recv-buffer-pool-size"), "10000");
    assert_eq!(get("ferrite.memory-pool-initial"), "1073741824");
    assert_eq!(get("ferrite.prepared-qp-count"), "1024");
    assert_eq!(get("ferrite.huge-pages"), "yes");
    assert_eq!(get("ferrite.busy-poll-us"), "100");
    server.assert_healthy();
    for name in ["max_send_sge", "max_recv_sge", "rdma_max_sge"] {
        let log = log_of_failed_load(REDIS.as_ref(), &[name, "4"], &[]);
        assert!(log.contains("set its size with recv_buffer_size instead"), "{log}");
    }
}
