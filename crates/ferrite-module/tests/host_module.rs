//! The module in real engines on a host without RDMA: Debian's Redis, Valkey where the lab has
//! built it, and those that are named.
//!
//! That it loads, says why there is no RDMA, refuses where RDMA is required, and leaves everything
//! else as it was. What it does over RDMA is `lab_module`'s.
#![expect(clippy::print_stderr, reason = "what is left out is said")]

mod scene;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use scene::{PATIENCE, REDIS, Server, Start, engines, free_port, valkey};

/// With a port for RDMA clients of its own.
fn start(program: &Path, more: &[&str], options: &[&str]) -> Server {
    let port = free_port();
    let arguments = [&["rdma-port", &port, "rdma-bind", "127.0.0.1"], more].concat();
    let options = [&["--port", "0"], options].concat();
    Server::start(&Start { program, arguments: &arguments, options: &options })
}

fn refused(program: &Path, arguments: &[&str], options: &[&str]) -> String {
    let options = [&["--port", "0"], options].concat();
    let (status, log) = Server::refused(&Start { program, arguments, options: &options });
    assert!(!status.success(), "{log}");
    assert!(!log.contains("BUG REPORT") && !log.contains("panic"), "{log}");
    log
}

/// A command over TCP at the module's port.
fn over_tcp(server: &Server, words: &[&str]) -> redis::RedisResult<redis::Value> {
    let client = redis::Client::open(format!("redis://{}", server.info("address")))?;
    redis::cmd(words[0]).arg(&words[1..]).query(&mut client.get_connection()?)
}

/// A client over TCP at the module's port, without any help.
fn call(server: &Server) -> TcpStream {
    let socket = TcpStream::connect(server.info("address")).expect("it listens");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    socket
}

/// What somebody hears who is turned away.
fn last_words(mut socket: TcpStream) -> String {
    let mut words = String::new();
    let _ = socket.write_all(b"PING\r\n");
    let _ = socket.read_to_string(&mut words); // the end may come as a reset
    words
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
        server.assert_well();
        assert!(server.shut_down("NOSAVE").success());
    }
}

/// A client may say all that it has to say and end its side: everything is run and answered,
/// whatever the path.
#[test]
fn clients_that_end_their_side_are_answered_to_the_end() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        for command in [
            "*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n",
            "*3\r\n$4\r\nEVAL\r\n$29\r\nreturn redis.call('INCR','n')\r\n$1\r\n0\r\n",
        ] {
            for count in [1, 10, 3000] {
                let () = server.ask(&["SET", "n", "0"]);
                let mut client = call(&server);
                client.write_all(command.repeat(count).as_bytes()).expect("it hears");
                client.shutdown(std::net::Shutdown::Write).expect("an end");
                let mut replies = String::new();
                client.read_to_string(&mut replies).expect("replies and the end");
                assert!(replies.ends_with(&format!(":{count}\r\n")), "{command:?}: {replies:?}");
                assert_eq!(server.ask::<usize>(&["GET", "n"]), count, "{command:?}");
            }
        }
        // More than the sockets hold: the end is seen while replies still wait for the client.
        let () = server.ask(&["SET", "large", &"x".repeat(1 << 20)]);
        let mut client = call(&server);
        client
            .write_all("*2\r\n$3\r\nGET\r\n$5\r\nlarge\r\n".repeat(32).as_bytes())
            .expect("it hears");
        client.shutdown(std::net::Shutdown::Write).expect("an end");
        let mut replies = Vec::new();
        while client.read_to_end(&mut replies).expect("replies and the end") > 0 {}
        assert_eq!(replies.len(), 32 * ((1 << 20) + "$1048576\r\n\r\n".len()));
        server.assert_well();
    }
}

#[test]
fn serves_tcp_as_before_and_at_its_own_port() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let () = server.ask(&["SET", "key", "value"]);
        let got = over_tcp(&server, &["GET", "key"]).expect("GET");
        assert_eq!(got, redis::Value::BulkString(b"value".into()));
        let listed = over_tcp(&server, &["FERRITE", "CLIENTS"]).expect("CLIENTS");
        let redis::Value::BulkString(listed) = listed else { panic!("{listed:?}") };
        let listed = String::from_utf8_lossy(&listed);
        assert!(listed.contains("transport=tcp") && listed.contains(" path="), "{listed}");
        server.until("sessions end", || server.count("sessions") == 0);
        assert_eq!((server.count("begun_tcp"), server.count("engine_failures")), (2, 0));
        assert!(server.count("input_bytes") > 0 && server.count("output_bytes") > 0);
        server.assert_well();
    }
}

#[test]
fn refuses_where_rdma_is_required() {
    for program in engines() {
        let port = free_port();
        let arguments = ["rdma", "require", "rdma-bind", "0.0.0.0", "rdma-port", &port];
        let log = refused(&program, &arguments, &[]);
        assert!(log.contains("ferrite: not loaded: ") && log.contains("to do: "), "{log}");
    }
}

/// A second one is refused, and the first goes on.
#[test]
fn loads_once() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let module = scene::module();
        let again = server.refusal(&["MODULE", "LOAD", module.to_str().expect("UTF-8")]);
        assert!(again.to_lowercase().contains("error loading"), "{again}");
        assert!(server.log().contains("of this name is loaded already"), "{}", server.log());
        assert_eq!(server.ask::<String>(&["PING"]), "PONG");
        assert_eq!(server.info("status"), "tcp-only");
        server.assert_well();
    }
}

#[test]
fn wrong_arguments_are_named() {
    for program in engines() {
        for (arguments, said) in [
            (
                &["rdma-prot", "1"][..],
                "unknown argument \"rdma-prot\"; the arguments are rdma-port",
            ),
            (&["rdma-port"], "argument rdma-port has no value"),
            (&["rdma-port", "70000"], "rdma-port \"70000\": expected a number from 1 to 65535"),
            (&["rdma", "forbid"], "rdma \"forbid\": expected prefer or require"),
            (
                &["rdma-bind", "localhost"],
                "rdma-bind \"localhost\": expected auto (where the engine listens), or IP addresses",
            ),
            (&["rx-size", "8mb"], "rx-size \"8mb\": expected a size from 4096 to 2097152 bytes"),
            (&["engine", "nowhere"], "engine \"nowhere\": expected auto, unix:/PATH or HOST:PORT"),
        ] {
            let log = refused(&program, arguments, &[]);
            assert!(log.contains(&format!("ferrite: not loaded: {said}")), "{arguments:?}: {log}");
        }
    }
}

#[test]
fn config_gets_sets_and_is_read_from_the_file() {
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
        assert_eq!(get("ferrite.rdma-bind"), "127.0.0.1", "and again");
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
            let said = server.refusal(&["CONFIG", "SET", &format!("ferrite.{name}"), value]);
            assert!(said.contains("immutable"), "{said}");
        }
        for (name, value) in [("max-clients", "0"), ("rx-size", "1"), ("busy-poll-us", "-1")] {
            let said = server.refusal(&["CONFIG", "SET", &format!("ferrite.{name}"), value]);
            assert!(said.contains("must be between"), "{said}");
        }
        // The new limit holds.
        let mut first = call(&server);
        first.write_all(b"PING\r\n").expect("it hears");
        server.until("one is taken", || server.count("sessions") == 1);
        assert_eq!(last_words(call(&server)), "-ERR max number of clients reached\r\n");
        server.until("refusal is counted", || server.count("refused") == 1);
        server.assert_well();
    }
}

#[test]
fn commands_answer() {
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
        for (words, said) in [
            (&["FERRITE", "KILL", "1"][..], "no session has the id 1"),
            (&["FERRITE", "KILL", "one"], "invalid session id"),
            (&["FERRITE", "KILL"], "wrong number of arguments"),
            (&["FERRITE", "HELP", "me"], "wrong number of arguments"),
            (&["FERRITE", "NOPE"], "unknown subcommand"),
            (&["FERRITE"], "wrong number of arguments"),
            (&["MODULE", "UNLOAD", "ferrite"], "unload"),
        ] {
            let answer = server.refusal(words);
            assert!(answer.to_lowercase().contains(said), "{words:?}: {answer}");
        }
        // INFO has our sections by name and with `everything`, and not unasked.
        assert!(!server.ask::<String>(&["INFO"]).contains("ferrite_status"));
        assert!(server.ask::<String>(&["INFO", "everything"]).contains("ferrite_status"));
        let rdma: String = server.ask(&["INFO", "ferrite_rdma"]);
        assert!(
            rdma.contains("ferrite_rdma_connections:0") && !rdma.contains("ferrite_status"),
            "{rdma}"
        );
        // By name in every engine; by category where modules have them, which Redis 7.0 does not.
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
        server.assert_well();
    }
}

/// Logs in as a user with these rights, and runs a command.
fn as_limited_user(
    server: &Server,
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

/// Redis 7.0 has no categories for commands of modules: the right to the engine's own command
/// decides.
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
        // A user who is not limited.
        assert!(server.refusal(&["FERRITE", "KILL", "1"]).contains("no session has the id 1"));
        server.assert_well();
    }
}

/// The child of a save has none of our threads, and holds our sockets: sessions end all the same,
/// and at once.
#[test]
fn saves_in_the_background() {
    for program in engines() {
        let mut server = start(&program, &[], &["--rdb-key-save-delay", "20000"]);
        let script = "for i = 1, 100 do redis.call('SET', 'key' .. i, i) end";
        let _: redis::Value = server.ask(&["EVAL", script, "0"]);
        let open = |server: &Server| {
            let mut socket = call(server);
            socket.write_all(b"BLPOP list 0\r\n").expect("it hears");
            server.until("it waits", || {
                server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:1")
            });
            socket
        };
        let waiting = open(&server);
        let _: redis::Value = server.ask(&["BGSAVE"]);
        server.until("it saves", || {
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:1")
        });
        drop(waiting);
        server.until("it waits no longer", || {
            server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:0")
        });
        assert!(
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:1"),
            "the child is there"
        );
        server.until("sessions end", || server.count("sessions") == 0);
        server.until("it has saved", || {
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:0")
        });
        assert!(
            server.ask::<String>(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:ok")
        );
        server.assert_well();
    }
}

#[test]
fn ends_with_the_engine_in_good_order() {
    for program in engines() {
        for how in ["NOSAVE", "TERM"] {
            let mut server = start(&program, &[], &[]);
            let mut client = call(&server);
            client.write_all(b"PING\r\n").expect("it hears");
            let mut pong = [0; 7];
            client.read_exact(&mut pong).expect("it answers");
            let begun = std::time::Instant::now();
            let status = if how == "TERM" {
                server.signal("TERM");
                server.wait()
            } else {
                server.shut_down(how)
            };
            assert!(status.success(), "{how}: {status}, {}", server.log());
            assert!(begun.elapsed().as_secs() < 5, "{how} took {:?}", begun.elapsed());
            let mut rest = Vec::new();
            client.read_to_end(&mut rest).expect("an end, not a failure");
            let log = server.log();
            assert!(!log.contains("not at their end in time") && !log.contains("panic"), "{log}");
        }
    }
}

/// The engine could not save, and did not end: our listener is there again.
#[test]
fn goes_on_with_an_engine_that_does_not_end() {
    for program in engines() {
        let mut server = start(&program, &[], &["--enable-protected-configs", "yes"]);
        let () = server.ask(&["SET", "key", "value"]);
        let blocked = server.directory().join("blocked");
        std::fs::create_dir(&blocked).expect("a directory where the file should be");
        let () = server.ask(&["CONFIG", "SET", "dbfilename", "blocked"]);
        let said = server.refusal(&["SHUTDOWN", "SAVE"]);
        assert!(said.contains("Errors trying to SHUTDOWN"), "{said}");
        server.until("it listens again", || server.info("status") == "tcp-only");
        over_tcp(&server, &["PING"]).expect("PING");
        server.assert_well();
        assert!(server.shut_down("NOSAVE").success());
    }
}

/// Protected mode is the engine's, and changes with it. 127.0.0.1 is always let in, so that is all
/// that can be seen here.
#[test]
fn proxy_connections_follow_the_engines_sockets() {
    for program in engines() {
        let (first, second) = (free_port(), free_port());
        let arguments = ["rdma-port", &free_port(), "rdma-bind", "127.0.0.1"];
        let mut server = Server::start(&Start {
            program: &program,
            arguments: &arguments,
            options: &["--port", &first, "--bind", "127.0.0.1"],
        });
        assert!(server.info("engine").starts_with("unix:/"), "a Unix socket is first");
        drop(server);
        // `unixsocket` comes before these options, and the last one counts.
        let named = format!("127.0.0.1:{first}");
        server = Server::start(&Start {
            program: &program,
            arguments: &[&arguments[..], &["engine", &named]].concat(),
            options: &["--port", &first, "--bind", "127.0.0.1"],
        });
        assert_eq!(server.info("engine"), named);
        over_tcp(&server, &["PING"]).expect("PING");
        let () = server.ask(&["CONFIG", "SET", "port", &second]);
        assert_eq!(server.info("engine"), named, "it was named");
        let said = last_words(call(&server));
        assert_eq!(said, "-ERR Ferrite module: cannot connect to the engine\r\n");
        assert_eq!(server.count("engine_failures"), 1);
        server.assert_well();
    }
}

/// Without a Unix socket it is the engine's TCP port, at an address that it has; when that changes,
/// so does the proxy path.
#[test]
fn without_a_unix_socket_the_port_will_do() {
    for program in engines() {
        let (first, second, own) = (free_port(), free_port(), free_port());
        let mut server = Server::begin(&Start {
            program: &program,
            arguments: &["rdma-port", &own, "rdma-bind", "127.0.0.1"],
            options: &["--unixsocket", "", "--port", &first, "--bind", "127.0.0.1"],
        });
        server.until_logged("accept connections");
        let ask = |words: &[&str]| -> String {
            let client =
                redis::Client::open(format!("redis://127.0.0.1:{own}")).expect("an address");
            let mut connection = client.get_connection().expect("it listens");
            redis::cmd(words[0]).arg(&words[1..]).query(&mut connection).expect("an answer")
        };
        assert!(ask(&["INFO", "ferrite"]).contains(&format!("ferrite_engine:127.0.0.1:{first}\r")));
        assert_eq!(ask(&["CONFIG", "SET", "port", &second]), "OK");
        assert!(
            ask(&["INFO", "ferrite"]).contains(&format!("ferrite_engine:127.0.0.1:{second}\r"))
        );
        server.assert_well();
    }
}

/// An engine that cannot be asked where it listens: it goes on, and says what to do; told by name,
/// it is well.
#[test]
fn an_engine_without_config_is_told_by_name() {
    for program in engines() {
        let socket =
            std::env::temp_dir().join(format!("ferrite-named-{}.sock", std::process::id()));
        let socket = socket.to_str().expect("UTF-8");
        let mute = ["--rename-command", "CONFIG", "", "--unixsocket", socket];
        let mut server = Server::begin(&Start {
            program: &program,
            arguments: &[],
            options: &[&["--port", "0"], &mute[..]].concat(),
        });
        server.until_logged("no RDMA listener: the engine does not say where it listens");
        server.until_logged("engine unix:/PATH");
        server.assert_well();
        drop(server);
        let (port, named) = (free_port(), format!("unix:{socket}"));
        let arguments = ["rdma-port", &port, "rdma-bind", "127.0.0.1", "engine", &named];
        let mut server = Server::begin(&Start {
            program: &program,
            arguments: &arguments,
            options: &[&["--port", "0"], &mute[..]].concat(),
        });
        server.until_logged("accept connections");
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("an address");
        let () = redis::cmd("PING")
            .query(&mut client.get_connection().expect("it listens"))
            .expect("PING");
        server.assert_well();
        drop(server);
        let _ = std::fs::remove_file(socket);
    }
}

/// CONFIG REWRITE keeps the arguments, and writes what was set since: the file starts the same
/// again.
#[test]
fn config_is_rewritten() {
    for program in engines() {
        let port = free_port();
        let arguments = ["rdma-port", &port, "rdma-bind", "127.0.0.1", "max-clients", "7"];
        let mut server = Server::start_by_file(&Start {
            program: &program,
            arguments: &arguments,
            options: &["port 0"],
        });
        let () = server.ask(&["CONFIG", "SET", "ferrite.busy-poll-us", "5"]);
        let () = server.ask(&["CONFIG", "REWRITE"]);
        let file = std::fs::read_to_string(server.directory().join("engine.conf")).expect("a file");
        assert!(
            file.contains("max-clients 7") && file.contains("ferrite.busy-poll-us 5"),
            "{file}"
        );
        assert!(!file.contains("ferrite.max-clients"), "it is an argument: {file}");
        assert!(server.shut_down("NOSAVE").success());
        server.start_again(&program);
        let get = |name: &str| {
            server.ask::<Vec<String>>(&["CONFIG", "GET", name]).pop().unwrap_or_default()
        };
        assert_eq!(
            (get("ferrite.busy-poll-us").as_str(), get("ferrite.max-clients").as_str()),
            ("5", "7")
        );
        assert_eq!(get("ferrite.rdma-port"), port);
        server.assert_well();
    }
}

/// With a port of its own for clients of TCP, as replicas and other nodes are.
fn node(program: &Path, options: &[&str]) -> (Server, String) {
    let (port, own) = (free_port(), free_port());
    let options = [&["--port", &port, "--bind", "127.0.0.1"], options].concat();
    let server = Server::start(&Start {
        program,
        arguments: &["rdma-port", &own, "rdma-bind", "127.0.0.1"],
        options: &options,
    });
    (server, port)
}

/// Our presence forbids nothing: a replica loads beside its old data.
#[test]
fn replicas_load_beside_their_data() {
    for program in engines() {
        let (mut primary, port) = node(&program, &["--repl-diskless-sync-delay", "0"]);
        let (mut replica, _) = node(&program, &["--repl-diskless-load", "swapdb"]);
        let script = "for i = 1, 1000 do redis.call('SET', 'key' .. i, i) end";
        let _: redis::Value = primary.ask(&["EVAL", script, "0"]);
        let () = replica.ask(&["SET", "old", "data"]);
        let () = replica.ask(&["REPLICAOF", "127.0.0.1", &port]);
        replica.until("it has the data", || replica.ask::<i64>(&["DBSIZE"]) == 1000);
        let asked = over_tcp(&primary, &["SET", "key", "by the module's port"]).expect("SET");
        assert_eq!(asked, redis::Value::Okay);
        replica
            .until("it has the write", || replica.ask::<Option<String>>(&["GET", "key"]).is_some());
        let refused =
            over_tcp(&replica, &["SET", "key", "value"]).expect_err("a replica").to_string();
        assert!(
            refused.to_lowercase().contains("readonly") || refused.contains("read only"),
            "{refused}"
        );
        primary.assert_well();
        replica.assert_well();
    }
}

/// Nor slots that move as a whole, where the engine has that (Valkey 9).
#[test]
fn slots_move_as_a_whole() {
    let Some(program) = valkey() else {
        eprintln!("left out: Valkey is not built here (lab/lab setup valkey)");
        return;
    };
    let (bus, other_bus) = (free_port(), free_port());
    let (mut source, _) = node(&program, &["--cluster-enabled", "yes", "--cluster-port", &bus]);
    let (mut target, port) =
        node(&program, &["--cluster-enabled", "yes", "--cluster-port", &other_bus]);
    let () = source.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let () = source.ask(&["CLUSTER", "MEET", "127.0.0.1", &port, &other_bus]);
    let whole = |server: &Server| {
        server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_known_nodes:2")
    };
    let ok =
        |server: &Server| server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok");
    source.until("they know each other", || whole(&source) && whole(&target) && ok(&source));
    let () = source.ask(&["SET", "key", "value"]);
    let id: String = target.ask(&["CLUSTER", "MYID"]);
    target.until("it knows the slots", || ok(&target));
    let () = source.ask(&["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", "0", "16383", "NODE", &id]);
    target.until("it has the slot", || {
        target.try_ask::<String>(&["GET", "key"]).is_ok_and(|value| value == "value")
    });
    let moved = over_tcp(&source, &["GET", "key"]).expect_err("it moved");
    assert_eq!(moved.code(), Some("MOVED"));
    source.assert_well();
    target.assert_well();
}
