//! The command FERRITE in real engines: replies, permissions, and the end of sessions.

mod module {
    pub(crate) mod harness;
}

use std::path::Path;

use ferrite_testkit::Engine;
use ferrite_testkit::engine::{REDIS, engines};
use ferrite_testkit::resp::Client;
use module::harness::start;

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
        // ACL rules by name work in every engine. Rules by category do not work in Redis 7.0.
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
        // A user with all rights may run the command.
        assert!(server.refusal(&["FERRITE", "KILL", "1"]).contains("no session has the id 1"));
        server.assert_healthy();
    }
}

/// A client that ends its own session gets the reply first, as with CLIENT KILL.
#[test]
fn clients_can_kill_their_own_sessions() {
    for program in engines() {
        for call_path in ["yes", "no"] {
            let mut server = start(&program, &["call-path", call_path], &[]);
            for _ in 0..5 {
                let mut client = Client::to_tcp(server.info("address"));
                let id = client.first_session();
                assert_eq!(client.text(&["FERRITE", "KILL", &id]), "+OK");
                assert_eq!(client.next_reply(), None, "the connection is closed");
                server.wait_until("no session", || server.count("sessions") == 0);
            }
            server.assert_healthy();
        }
    }
}

/// Makes the client block, and returns the id of its session.
fn block(server: &Engine, client: &mut Client) -> String {
    assert!(client.try_send(&[vec!["BLPOP", "list", "0"]]));
    server.wait_until("a blocked client", || {
        server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:1")
    });
    server.client().first_session()
}

/// FERRITE KILL also ends a session that waits for the engine.
#[test]
fn kills_a_session_whose_command_blocks() {
    for program in engines() {
        for call_path in ["yes", "no"] {
            let mut server = start(&program, &["call-path", call_path], &[]);
            let mut client = Client::to_tcp(server.info("address"));
            let () = server.ask(&["FERRITE", "KILL", &block(&server, &mut client)]);
            assert_eq!(client.next_reply(), None, "the connection is closed");
            server.wait_until("no blocked client", || {
                server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:0")
            });
            server.assert_healthy();
        }
    }
}

/// A killed session runs no further command, as with CLIENT KILL, even if its client waits for no
/// reply and never stops sending.
#[test]
fn killed_sessions_run_no_further_command() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let mut client = Client::to_tcp(server.info("address"));
        assert!(client.try_send(&[vec!["CLIENT", "REPLY", "OFF"], vec!["SET", "count", "0"]]));
        let writer = std::thread::spawn(move || while client.try_send(&[vec!["INCR", "count"]]) {});
        let count = || server.ask::<Option<u64>>(&["GET", "count"]).unwrap_or(0);
        server.wait_until("writes", || count() > 100);
        let id = server.client().first_session();
        // Uses a transaction, so that no other command runs between KILL and GET.
        let mut kill = redis::pipe();
        kill.atomic().cmd("FERRITE").arg("KILL").arg(id).cmd("GET").arg("count");
        let mut admin = server.connection().expect("a connection");
        let ((), at_kill): ((), u64) = kill.query(&mut admin).expect("kill the session");
        writer.join().expect("the writer does not panic");
        server.wait_until("no session", || server.count("sessions") == 0);
        assert_eq!(count(), at_kill, "on {}", program.display());
        server.assert_healthy();
    }
}

/// A killed session whose command blocks takes no element that arrives after the kill, as with
/// CLIENT KILL. The kill may run in a transaction.
#[test]
fn killed_sessions_take_no_element_that_they_waited_for() {
    for program in engines() {
        let mut server = start(&program, &[], &["--appendonly", "yes"]);
        let mut client = Client::to_tcp(server.info("address"));
        let id = block(&server, &mut client);
        let mut kill = redis::pipe();
        kill.atomic().cmd("LPUSH").arg(&["before", "1"]);
        kill.cmd("FERRITE").arg("KILL").arg(id).cmd("LPUSH").arg(&["list", "element"]);
        let mut admin = server.connection().expect("a connection");
        let _: (u64, String, u64) = kill.query(&mut admin).expect("kill the session");
        assert_eq!(client.next_reply(), None, "the connection is closed");
        for how in ["in memory", "in the AOF"] {
            let left: Vec<String> = server.ask(&["LRANGE", "list", "0", "-1"]);
            assert_eq!(left, ["element"], "{how}, {}", program.display());
            assert_eq!(server.ask::<u64>(&["LLEN", "before"]), 1, "{how}, {}", program.display());
            server.restart();
            server.wait_until("loaded data", || server.try_ask::<u64>(&["DBSIZE"]).is_ok());
        }
        server.assert_healthy();
    }
}

/// The engine revokes the login of a client that closes itself. In a transaction, the later
/// commands would then have the rights of the user `default`. So FERRITE KILL fails there if it
/// names the client's own session.
#[test]
fn a_transaction_that_kills_its_own_session_gets_no_other_rights() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let rules = ["on", ">pw", "~*", "+@all", "-flushall"];
        let () = server.ask(&[&["ACL", "SETUSER", "limited"][..], &rules].concat());
        let () = server.ask(&["SET", "key", "value"]);
        let mut client = Client::to_tcp(server.info("address"));
        client.ok(&["AUTH", "limited", "pw"]);
        let id = client.first_session();
        client.ok(&["MULTI"]);
        client.send(&[
            vec!["FERRITE", "KILL", &id],
            vec!["EVAL", "return redis.pcall('FLUSHALL')", "0"],
            vec!["EVAL", "return redis.call('SET', 'key', 'later')", "0"],
            vec!["EXEC"],
        ]);
        let replies = client.replies(4);
        let reply = String::from_utf8_lossy(&replies[3]);
        assert!(reply.starts_with("*3\r\n-ERR a transaction cannot end its own"), "{reply}");
        assert!(reply.ends_with("+OK\r\n"), "the other commands run: {reply}");
        assert_eq!(server.ask::<String>(&["GET", "key"]), "later", "on {}", program.display());
        assert_eq!(client.text(&["FERRITE", "KILL", &id]), "+OK");
        assert_eq!(client.next_reply(), None, "the connection is closed");
        server.assert_healthy();
    }
}

/// An engine closes a client that kills itself once the reply is sent. Without a reply, the engine
/// never closes it. The module must still end the session.
#[test]
fn clients_without_replies_can_kill_their_own_sessions() {
    for program in engines() {
        for mode in ["OFF", "SKIP"] {
            let mut server = start(&program, &[], &[]);
            let mut client = Client::to_tcp(server.info("address"));
            let id = client.first_session();
            client.send(&[
                vec!["CLIENT", "REPLY", mode],
                vec!["FERRITE", "KILL", &id],
                vec!["SET", "key", "value"],
            ]);
            assert_eq!(client.next_reply(), None, "the connection is closed");
            server.wait_until("no session", || server.count("sessions") == 0);
            assert_eq!(server.ask::<u64>(&["EXISTS", "key"]), 0, "on {}", program.display());
            server.assert_healthy();
        }
    }
}
