//! The module in real engines on a host without RDMA: Debian's Redis, Valkey if the lab has built
//! it, and those in FERRITE_ENGINES.
//!
//! It loads, says why there is no RDMA, refuses to load if RDMA is required, and leaves everything
//! else as it was. `lab_module` tests it over RDMA.
#![expect(clippy::print_stderr, reason = "tells which tests are left out")]

mod module {
    pub(crate) mod harness;
}

use std::io::{Read as _, Write as _};
use std::path::Path;

use ferrite_testkit::engine::{engines, module, valkey};
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, Start, TempDir, free_port};
use module::harness::{connect, log_of_failed_load, over_tcp, rejection, start};

#[test]
fn loads_and_says_why_there_is_no_rdma() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let log = server.log();
        assert!(log.contains("the module accepts no RDMA on loopback addresses; to do: "), "{log}");
        assert_eq!(server.info("status"), "tcp-only");
        assert!(server.info("reason").contains("to do: "));
        assert_eq!(server.info("devices"), "");
        assert!(server.info("engine").starts_with("unix:/"));
        let doctor: String = server.ask(&["FERRITE", "DOCTOR"]);
        assert!(doctor.contains("[warn]") && doctor.contains("to do: "), "{doctor}");
        assert!(!doctor.contains("RDMA devices in use"), "no device is in use: {doctor}");
        let modules: String = format!("{:?}", server.ask::<redis::Value>(&["MODULE", "LIST"]));
        assert!(modules.contains("ferrite"), "{modules}");
        server.assert_healthy();
        assert!(server.shut_down("NOSAVE").success());
    }
}

/// A client may send all its commands and then shut down its side of the connection. All commands
/// run and get replies, on the call path and on the proxy path.
#[test]
fn half_closed_clients_get_all_replies() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        for command in [
            "*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n",
            "*3\r\n$4\r\nEVAL\r\n$29\r\nreturn redis.call('INCR','n')\r\n$1\r\n0\r\n",
        ] {
            for count in [1, 10, 3000] {
                let () = server.ask(&["SET", "n", "0"]);
                let mut client = connect(&server);
                client.write_all(command.repeat(count).as_bytes()).expect("the connection is open");
                client.shutdown(std::net::Shutdown::Write).expect("the connection is open");
                let mut replies = String::new();
                client.read_to_string(&mut replies).expect("replies and the end");
                assert!(replies.ends_with(&format!(":{count}\r\n")), "{command:?}: {replies:?}");
                assert_eq!(server.ask::<usize>(&["GET", "n"]), count, "{command:?}");
            }
        }
        // The replies are larger than the socket buffers, so that the module sees the end while
        // replies still wait for the client.
        let () = server.ask(&["SET", "large", &"x".repeat(1 << 20)]);
        let mut client = connect(&server);
        client
            .write_all("*2\r\n$3\r\nGET\r\n$5\r\nlarge\r\n".repeat(32).as_bytes())
            .expect("the connection is open");
        client.shutdown(std::net::Shutdown::Write).expect("the connection is open");
        let mut replies = Vec::new();
        while client.read_to_end(&mut replies).expect("replies and the end") > 0 {}
        assert_eq!(replies.len(), 32 * ((1 << 20) + "$1048576\r\n\r\n".len()));
        server.assert_healthy();
    }
}

#[test]
fn serves_tcp_at_the_engines_socket_and_at_its_own_port() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let () = server.ask(&["SET", "key", "value"]);
        let got = over_tcp(&server, &["GET", "key"]).expect("GET");
        assert_eq!(got, redis::Value::BulkString(b"value".into()));
        let listed = over_tcp(&server, &["FERRITE", "CLIENTS"]).expect("CLIENTS");
        let redis::Value::BulkString(listed) = listed else {
            panic!("the reply is not a string: {listed:?}")
        };
        let listed = String::from_utf8_lossy(&listed);
        assert!(listed.contains("transport=tcp") && listed.contains(" path="), "{listed}");
        server.wait_until("the end of all sessions", || server.count("sessions") == 0);
        assert_eq!((server.count("begun_tcp"), server.count("engine_failures")), (2, 0));
        assert!(server.count("input_bytes") > 0 && server.count("output_bytes") > 0);
        server.assert_healthy();
    }
}

#[test]
fn refuses_to_load_if_rdma_is_required() {
    for program in engines() {
        let port = free_port().to_string();
        let arguments = ["rdma", "require", "rdma-bind", "0.0.0.0", "rdma-port", &port];
        let log = log_of_failed_load(&program, &arguments, &[]);
        assert!(log.contains("ferrite: not loaded: ") && log.contains("to do: "), "{log}");
    }
}

/// A second load fails, and the first module keeps working.
#[test]
fn loads_once() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let module = module();
        let again = server.refusal(&["MODULE", "LOAD", module.to_str().expect("UTF-8")]);
        assert!(again.to_lowercase().contains("error loading"), "{again}");
        assert!(server.log().contains("is already loaded"), "{}", server.log());
        assert_eq!(server.ask::<String>(&["PING"]), "PONG");
        assert_eq!(server.info("status"), "tcp-only");
        server.assert_healthy();
    }
}

/// When the module is loaded into a running engine, it ignores `connection-retries`. The retries
/// would keep the engine's clients waiting.
#[test]
fn does_not_retry_in_a_running_engine() {
    for program in engines() {
        let server = Engine::start(&Start { program: &program, ..Start::redis(&[]) });
        let (module, port) = (module(), free_port().to_string());
        let load = ["MODULE", "LOAD", module.to_str().expect("UTF-8"), "rdma-port", &port];
        let () = server
            .ask(&[&load[..], &["rdma-bind", "127.0.0.1", "connection-retries", "1000"]].concat());
        assert_eq!(server.info("status"), "tcp-only");
    }
}

/// The child process of BGSAVE has copies of the sockets but none of the module's threads. Sessions
/// still end at once when their clients close.
#[test]
fn sessions_end_during_a_background_save() {
    for program in engines() {
        let mut server = start(&program, &[], &["--rdb-key-save-delay", "20000"]);
        let script = "for i = 1, 100 do redis.call('SET', 'key' .. i, i) end";
        let _: redis::Value = server.ask(&["EVAL", script, "0"]);
        let open = |server: &Engine| {
            let mut socket = connect(server);
            socket.write_all(b"BLPOP list 0\r\n").expect("the connection is open");
            server.wait_until("a blocked client", || {
                server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:1")
            });
            socket
        };
        let waiting = open(&server);
        let _: redis::Value = server.ask(&["BGSAVE"]);
        server.wait_until("a save in progress", || {
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:1")
        });
        drop(waiting);
        server.wait_until("no blocked client", || {
            server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:0")
        });
        assert!(
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:1"),
            "the save ended too early"
        );
        server.wait_until("the end of all sessions", || server.count("sessions") == 0);
        server.wait_until("the end of the save", || {
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:0")
        });
        assert!(
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:ok")
        );
        server.assert_healthy();
    }
}

#[test]
fn closes_sessions_when_the_engine_shuts_down() {
    for program in engines() {
        for how in ["NOSAVE", "TERM"] {
            let mut server = start(&program, &[], &[]);
            let mut client = connect(&server);
            client.write_all(b"PING\r\n").expect("the connection is open");
            let mut pong = [0; 7];
            client.read_exact(&mut pong).expect("a reply");
            let started = std::time::Instant::now();
            let status = if how == "TERM" {
                server.signal("TERM");
                server.wait()
            } else {
                server.shut_down(how)
            };
            assert!(status.success(), "{how}: {status}, {}", server.log());
            assert!(started.elapsed().as_secs() < 5, "{how} took {:?}", started.elapsed());
            let mut rest = Vec::new();
            client.read_to_end(&mut rest).expect("an orderly close");
            let log = server.log();
            assert!(!log.contains("did not stop within") && !log.contains("panic"), "{log}");
        }
    }
}

/// The engine cannot save and aborts its shutdown. Sessions continue.
#[test]
fn an_aborted_shutdown_ends_no_session() {
    for program in engines() {
        let mut server = start(&program, &[], &["--enable-protected-configs", "yes"]);
        let () = server.ask(&["SET", "key", "value"]);
        let mut client = Client::to_tcp(server.info("address"));
        assert_eq!(client.text(&["PING"]), "+PONG");
        let blocked = server.directory().join("blocked");
        std::fs::create_dir(&blocked).expect("a directory where the file should be");
        let () = server.ask(&["CONFIG", "SET", "dbfilename", "blocked"]);
        let error = server.refusal(&["SHUTDOWN", "SAVE"]);
        assert!(error.contains("Errors trying to SHUTDOWN"), "{error}");
        assert_eq!(client.text(&["GET", "key"]), "value");
        over_tcp(&server, &["PING"]).expect("PING");
        server.assert_healthy();
        assert!(server.shut_down("NOSAVE").success());
    }
}

/// The proxy path prefers the engine's Unix socket. A socket that the argument `engine` names is
/// used even if the engine no longer listens there.
#[test]
fn proxy_connections_use_the_engines_socket() {
    for program in engines() {
        let (first, second) = (free_port().to_string(), free_port().to_string());
        let arguments = ["rdma-port", &free_port().to_string(), "rdma-bind", "127.0.0.1"];
        let mut server = Engine::start(&Start {
            program: &program,
            module: Some(&arguments),
            options: &["--port", &first, "--bind", "127.0.0.1"],
        });
        assert!(server.info("engine").starts_with("unix:/"), "the Unix socket is preferred");
        drop(server);
        let named = format!("127.0.0.1:{first}");
        server = Engine::start(&Start {
            program: &program,
            module: Some(&[&arguments[..], &["engine", &named]].concat()),
            options: &["--port", &first, "--bind", "127.0.0.1"],
        });
        assert_eq!(server.info("engine"), named);
        over_tcp(&server, &["PING"]).expect("PING");
        let () = server.ask(&["CONFIG", "SET", "port", &second]);
        assert_eq!(server.info("engine"), named, "a named socket does not change");
        let reply = rejection(connect(&server));
        assert_eq!(reply, "-ERR Ferrite module: cannot connect to the engine\r\n");
        assert_eq!(server.count("engine_failures"), 1);
        server.assert_healthy();
    }
}

/// Without a Unix socket, the proxy path uses the engine's TCP port and follows its changes.
#[test]
fn proxy_connections_follow_the_engines_tcp_port() {
    for program in engines() {
        let (first, second, own) =
            (free_port().to_string(), free_port().to_string(), free_port().to_string());
        let mut server = Engine::spawn(&Start {
            program: &program,
            module: Some(&["rdma-port", &own, "rdma-bind", "127.0.0.1"]),
            options: &["--unixsocket", "", "--port", &first, "--bind", "127.0.0.1"],
        });
        server.wait_for_log("accept connections");
        let ask = |words: &[&str]| -> String {
            let client =
                redis::Client::open(format!("redis://127.0.0.1:{own}")).expect("an address");
            let mut connection = client.get_connection().expect("a connection");
            redis::cmd(words[0]).arg(&words[1..]).query(&mut connection).expect("a reply")
        };
        assert!(ask(&["INFO", "ferrite"]).contains(&format!("ferrite_engine:127.0.0.1:{first}\r")));
        assert_eq!(ask(&["CONFIG", "SET", "port", &second]), "OK");
        assert!(
            ask(&["INFO", "ferrite"]).contains(&format!("ferrite_engine:127.0.0.1:{second}\r"))
        );
        server.assert_healthy();
    }
}

/// If CONFIG is disabled, the module does not know where the engine listens. The engine then runs
/// without a listener and logs what to do. With named addresses the module works.
#[test]
fn works_without_config_if_addresses_are_named() {
    for program in engines() {
        let directory = TempDir::new("named");
        let socket = directory.join("socket");
        let socket = socket.to_str().expect("UTF-8");
        let no_config = ["--rename-command", "CONFIG", "", "--unixsocket", socket];
        let mut server = Engine::spawn(&Start {
            program: &program,
            module: Some(&[]),
            options: &[&["--port", "0"], &no_config[..]].concat(),
        });
        server.wait_for_log("no RDMA listener: the engine does not say where it listens");
        server.wait_for_log("engine unix:/PATH");
        server.assert_healthy();
        drop(server);
        let (port, named) = (free_port().to_string(), format!("unix:{socket}"));
        let arguments = ["rdma-port", &port, "rdma-bind", "127.0.0.1", "engine", &named];
        let mut server = Engine::spawn(&Start {
            program: &program,
            module: Some(&arguments),
            options: &[&["--port", "0"], &no_config[..]].concat(),
        });
        server.wait_for_log("accept connections");
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("an address");
        let () = redis::cmd("PING")
            .query(&mut client.get_connection().expect("a connection"))
            .expect("PING");
        server.assert_healthy();
        drop(server);
        let _ = std::fs::remove_file(socket);
    }
}

/// Starts an engine that also has a TCP port for replicas and other cluster nodes. Also returns
/// that port.
fn node(program: &Path, options: &[&str]) -> (Engine, String) {
    let (port, own) = (free_port().to_string(), free_port().to_string());
    let options = [&["--port", &port, "--bind", "127.0.0.1"], options].concat();
    let server = Engine::start(&Start {
        program,
        module: Some(&["rdma-port", &own, "rdma-bind", "127.0.0.1"]),
        options: &options,
    });
    (server, port)
}

/// The module does not prevent a replica from loading with `repl-diskless-load swapdb`, which keeps
/// the old data available meanwhile.
#[test]
fn replicas_load_asynchronously() {
    for program in engines() {
        let (mut primary, port) = node(&program, &["--repl-diskless-sync-delay", "0"]);
        let (mut replica, _) = node(&program, &["--repl-diskless-load", "swapdb"]);
        let script = "for i = 1, 1000 do redis.call('SET', 'key' .. i, i) end";
        let _: redis::Value = primary.ask(&["EVAL", script, "0"]);
        let () = replica.ask(&["SET", "old", "data"]);
        let () = replica.ask(&["REPLICAOF", "127.0.0.1", &port]);
        replica.wait_until("the data", || replica.ask::<i64>(&["DBSIZE"]) == 1000);
        let reply = over_tcp(&primary, &["SET", "key", "by the module's port"]).expect("SET");
        assert_eq!(reply, redis::Value::Okay);
        replica.wait_until("the replicated write", || {
            replica.ask::<Option<String>>(&["GET", "key"]).is_some()
        });
        let error = over_tcp(&replica, &["SET", "key", "value"])
            .expect_err("a replica refuses writes")
            .to_string();
        assert!(
            error.to_lowercase().contains("readonly") || error.contains("read only"),
            "{error}"
        );
        primary.assert_healthy();
        replica.assert_healthy();
    }
}

/// The module does not prevent atomic slot migration (Valkey 9).
#[test]
fn slots_migrate_atomically() {
    let Some(program) = valkey() else {
        eprintln!("skipped: Valkey is not built (run lab/lab setup valkey)");
        return;
    };
    let (bus, other_bus) = (free_port().to_string(), free_port().to_string());
    let (mut source, _) = node(&program, &["--cluster-enabled", "yes", "--cluster-port", &bus]);
    let (mut target, port) =
        node(&program, &["--cluster-enabled", "yes", "--cluster-port", &other_bus]);
    let () = source.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let () = source.ask(&["CLUSTER", "MEET", "127.0.0.1", &port, &other_bus]);
    let knows_both = |server: &Engine| {
        server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_known_nodes:2")
    };
    let ok =
        |server: &Engine| server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok");
    source.wait_until("a cluster of two nodes", || {
        knows_both(&source) && knows_both(&target) && ok(&source)
    });
    let () = source.ask(&["SET", "key", "value"]);
    let id: String = target.ask(&["CLUSTER", "MYID"]);
    target.wait_until("the cluster state ok", || ok(&target));
    let () = source.ask(&["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", "0", "16383", "NODE", &id]);
    target.wait_until("the migrated slot", || {
        target.try_ask::<String>(&["GET", "key"]).is_ok_and(|value| value == "value")
    });
    let moved = over_tcp(&source, &["GET", "key"]).expect_err("a redirect");
    assert_eq!(moved.code(), Some("MOVED"));
    source.assert_healthy();
    target.assert_healthy();
}
