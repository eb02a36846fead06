//! The module in real engines on a host without RDMA: Debian's Redis, Valkey if the lab has built
//! it, and those in FERRITE_ENGINES.
//!
//! It loads, says why there is no RDMA, refuses to load if RDMA is required, and leaves everything
//! else as it was. `lab_module` tests it over RDMA.
#![expect(clippy::print_stderr, reason = "tells which tests are left out")]

use ferrite_testkit::engine::{REDIS, engines, module, valkey};
use ferrite_testkit::{Engine, Start, TIMEOUT, TempDir, free_port};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

/// Starts an engine whose module has its own port on 127.0.0.1.
fn start(program: &Path, more: &[&str], options: &[&str]) -> Engine {
    let port = free_port().to_string();
    let arguments = [&["rdma-port", &port, "rdma-bind", "127.0.0.1"], more].concat();
    let options = [&["--port", "0"], options].concat();
    Engine::start(&Start { program, module: Some(&arguments), options: &options })
}

/// Starts an engine that must refuse to load the module, and returns its log.
fn log_of_failed_load(program: &Path, arguments: &[&str], options: &[&str]) -> String {
    let options = [&["--port", "0"], options].concat();
    let (status, log) =
        Engine::run_until_exit(&Start { program, module: Some(arguments), options: &options });
    assert!(!status.success(), "{log}");
    assert!(!log.contains("BUG REPORT") && !log.contains("panic"), "{log}");
    log
}

/// Runs a command over TCP at the module's port.
fn over_tcp(server: &Engine, words: &[&str]) -> redis::RedisResult<redis::Value> {
    let client = redis::Client::open(format!("redis://{}", server.info("address")))?;
    redis::cmd(words[0]).arg(&words[1..]).query(&mut client.get_connection()?)
}

/// Connects a plain TCP socket to the module's port.
fn connect(server: &Engine) -> TcpStream {
    let socket = TcpStream::connect(server.info("address")).expect("a connection to the module");
    socket.set_read_timeout(Some(TIMEOUT)).expect("a read timeout");
    socket
}

/// Returns everything that a rejected client receives.
fn rejection(mut socket: TcpStream) -> String {
    let mut text = String::new();
    let _ = socket.write_all(b"PING\r\n");
    let _ = socket.read_to_string(&mut text); // the connection may be reset at the end
    text
}

#[test]
fn loads_and_says_why_there_is_no_rdma() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let log = server.log();
        assert!(log.contains("loopback addresses take no RDMA; to do: "), "{log}");
        assert_eq!(server.info("status"), "tcp-only");
        assert!(server.info("reason").contains("to do: "));
        assert_eq!(server.info("devices"), "");
        assert!(server.info("engine").starts_with("unix:/"));
        let doctor: String = server.ask(&["FERRITE", "DOCTOR"]);
        assert!(doctor.contains("[warn]") && doctor.contains("to do: "), "{doctor}");
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
                client.write_all(command.repeat(count).as_bytes()).expect("to send");
                client.shutdown(std::net::Shutdown::Write).expect("to shut down");
                let mut replies = String::new();
                client.read_to_string(&mut replies).expect("replies and the end");
                assert!(replies.ends_with(&format!(":{count}\r\n")), "{command:?}: {replies:?}");
                assert_eq!(server.ask::<usize>(&["GET", "n"]), count, "{command:?}");
            }
        }
        // The replies are larger than the socket buffers: the module sees the end while replies
        // still wait for the client.
        let () = server.ask(&["SET", "large", &"x".repeat(1 << 20)]);
        let mut client = connect(&server);
        client
            .write_all("*2\r\n$3\r\nGET\r\n$5\r\nlarge\r\n".repeat(32).as_bytes())
            .expect("to send");
        client.shutdown(std::net::Shutdown::Write).expect("to shut down");
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
        let redis::Value::BulkString(listed) = listed else { panic!("{listed:?}") };
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

/// Retries would keep the clients of a running engine waiting for days.
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

/// Lines of the engine's configuration set the settings one by one.
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
        assert_eq!(get("ferrite.rdma-bind"), "127.0.0.1", "the second time");
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
        first.write_all(b"PING\r\n").expect("to send");
        server.wait_until("a session", || server.count("sessions") == 1);
        assert_eq!(rejection(connect(&server)), "-ERR max number of clients reached\r\n");
        server.wait_until("the rejection is counted", || server.count("refused") == 1);
        server.assert_healthy();
    }
}

#[test]
fn ferrite_commands_reply() {
    for program in engines() {
        let mut server = start(&program, &[], &["--enable-debug-command", "no"]);
        let help: Vec<String> = server.ask(&["FERRITE", "HELP"]);
        assert!(help.iter().any(|line| line.starts_with("KILL")), "{help:?}");
        assert_eq!(server.ask::<String>(&["FERRITE", "CLIENTS"]), "");
        let stats: std::collections::BTreeMap<String, String> = server.ask(&["ferrite", "stats"]);
        assert_eq!(stats["sessions"], "0");
        assert!(
            stats.contains_key("rdma_connections")
                && stats.contains_key("rdma_fallbacks_no_device"),
            "{stats:?}"
        );
        for (words, error) in [
            (&["FERRITE", "KILL", "1"][..], "no session has the id 1"),
            (&["FERRITE", "KILL", "one"], "invalid session id"),
            (&["FERRITE", "KILL"], "wrong number of arguments"),
            (&["FERRITE", "HELP", "me"], "wrong number of arguments"),
            (&["FERRITE", "NOPE"], "unknown subcommand"),
            (&["FERRITE"], "wrong number of arguments"),
            (&["MODULE", "UNLOAD", "ferrite"], "unload"),
        ] {
            let reply = server.refusal(words);
            assert!(reply.to_lowercase().contains(error), "{words:?}: {reply}");
        }
        // INFO has the module's sections only by name and with `everything`.
        assert!(!server.ask::<String>(&["INFO"]).contains("ferrite_status"));
        assert!(server.ask::<String>(&["INFO", "everything"]).contains("ferrite_status"));
        let rdma: String = server.ask(&["INFO", "ferrite_rdma"]);
        assert!(
            rdma.contains("ferrite_rdma_connections:0") && !rdma.contains("ferrite_status"),
            "{rdma}"
        );
        // ACL rules by name work in every engine; those by category not in Redis 7.0.
        let has_categories = program != Path::new(REDIS);
        for (rule, may) in
            [("-ferrite|stats", false), ("-@admin", !has_categories), ("-@scripting", true)]
        {
            let () = server.ask(&["ACL", "SETUSER", "some", "reset", "on", ">pw", "+@all", rule]);
            let mut connection = server.connection().expect("a connection");
            let () = redis::cmd("AUTH").arg(&["some", "pw"]).query(&mut connection).expect("AUTH");
            let () = redis::cmd("FERRITE")
                .arg("HELP")
                .query::<redis::Value>(&mut connection)
                .map(drop)
                .expect("HELP");
            let answer = redis::cmd("FERRITE").arg("STATS").query::<redis::Value>(&mut connection);
            assert_eq!(answer.is_ok(), may, "{rule}: {answer:?}");
        }
        server.assert_healthy();
    }
}

/// Logs in as a user with these rights and runs a command.
fn as_limited_user(
    server: &Engine,
    rules: &[&str],
    words: &[&str],
) -> redis::RedisResult<redis::Value> {
    let mut user = vec!["ACL", "SETUSER", "limited", "reset", "on", ">pw", "+@all"];
    user.extend(rules);
    let () = server.ask(&user);
    let mut connection = server.connection().expect("a connection");
    let () = redis::cmd("AUTH").arg(&["limited", "pw"]).query(&mut connection).expect("AUTH");
    redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)
}

/// Redis 7.0 has no ACL categories for commands of modules, so the right to the corresponding
/// command of the engine decides.
#[test]
fn admin_commands_need_the_right_to_the_engines_own() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        for (rules, words, may) in [
            (&["-@admin", "-@dangerous"][..], &["FERRITE", "KILL", "1"][..], false),
            (&["-client|kill"], &["FERRITE", "KILL", "1"], false),
            (&["-client"], &["FERRITE", "KILL", "1"], false),
            (&["-@all", "+ferrite"], &["FERRITE", "KILL", "1"], false),
            (&["-@all", "+ferrite", "+client|kill"], &["FERRITE", "KILL", "1"], true),
            (&["-client|list"], &["FERRITE", "KILL", "1"], true),
            (&["-@admin", "-@dangerous"], &["FERRITE", "CLIENTS"], false),
            (&["-client|list"], &["FERRITE", "CLIENTS"], false),
            (&["-client|kill"], &["FERRITE", "CLIENTS"], true),
            (&["-@admin", "-@dangerous"], &["FERRITE", "STATS"], false),
            (&["-info"], &["FERRITE", "DOCTOR"], false),
            (&["-@all", "+ferrite", "+info"], &["FERRITE", "DOCTOR"], true),
            (&["-@admin", "-@dangerous"], &["FERRITE", "HELP"], true),
            (&["-@admin", "-@dangerous"], &["FERRITE", "MARK"], true),
        ] {
            let answer = as_limited_user(&server, rules, words);
            let is_denied = answer.as_ref().is_err_and(|error| error.code() == Some("NOPERM"));
            assert_eq!(is_denied, !may, "{rules:?} {words:?} on {}: {answer:?}", program.display());
        }
        // A user with all rights.
        assert!(server.refusal(&["FERRITE", "KILL", "1"]).contains("no session has the id 1"));
        server.assert_healthy();
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
            socket.write_all(b"BLPOP list 0\r\n").expect("to send");
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
            client.write_all(b"PING\r\n").expect("to send");
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
            assert!(!log.contains("did not stop in time") && !log.contains("panic"), "{log}");
        }
    }
}

/// The engine cannot save and aborts its shutdown: the listener starts again.
#[test]
fn listens_again_after_an_aborted_shutdown() {
    for program in engines() {
        let mut server = start(&program, &[], &["--enable-protected-configs", "yes"]);
        let () = server.ask(&["SET", "key", "value"]);
        let blocked = server.directory().join("blocked");
        std::fs::create_dir(&blocked).expect("a directory where the file should be");
        let () = server.ask(&["CONFIG", "SET", "dbfilename", "blocked"]);
        let error = server.refusal(&["SHUTDOWN", "SAVE"]);
        assert!(error.contains("Errors trying to SHUTDOWN"), "{error}");
        server.wait_until("a new listener", || server.info("status") == "tcp-only");
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

/// Starts an engine that also has a TCP port for replicas and other cluster nodes. Returns that
/// port too.
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

/// The module does not prevent a replica from serving its old data while it loads the new.
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
        let error =
            over_tcp(&replica, &["SET", "key", "value"]).expect_err("a replica").to_string();
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

/// CONFIG has exactly the settings of the table, each with its default.
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

/// The names of other RDMA software are arguments, with the values that they have there.
#[test]
fn accepts_the_names_of_other_software() {
    let arguments = ferrite_config::table::FOREIGN.iter().filter_map(|foreign| {
        let name = foreign.name.rsplit('.').next().expect("a name");
        let value = foreign.default.split(' ').next().expect("a value");
        let is_argument = ferrite_config::table::refused(name).is_none() && value != "empty";
        // Both documentations have it, with other values.
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
