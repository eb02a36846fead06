//! Commands with random arguments: the replies are equal, and no command crashes the engine.

use std::time::Duration;

use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;

use crate::client::{Pair, calls, commands, start, words};

/// Random commands of the engine with random arguments give equal replies. In the end both
/// databases have the same keys with the same types and encodings.
#[test]
fn random_commands_give_equal_replies() {
    const KEYS: [&str; 8] = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"];
    const ARGS: [&str; 48] = [
        "1",
        "2",
        "10",
        "-3",
        "1.5",
        "abc",
        "",
        "a",
        "b",
        "c",
        "*",
        "1-1",
        "5-0",
        "MAXLEN",
        "~",
        "LIMIT",
        "COUNT",
        "NX",
        "XX",
        "GT",
        "WITHSCORES",
        "LEFT",
        "RIGHT",
        "BEFORE",
        "[a",
        "(1",
        "-",
        "+",
        "-inf",
        "+inf",
        "BYSCORE",
        "REV",
        "KEEPTTL",
        "GET",
        "u8",
        "#0",
        "INCRBY",
        "m",
        "km",
        "ASC",
        "MATCH",
        "REPLACE",
        "STORE",
        "MKSTREAM",
        "AND",
        "NOT",
        "WEIGHTS",
        "a long one, which \
        is more than forty-four bytes and so encoded otherwise",
    ];
    // These commands are left out: their replies depend on time, chance or the engine's state, or
    // they change the connection or the whole engine. Those of the last line set a time to live of
    // a few milliseconds or seconds, so a key could expire between the two requests of a pair.
    const EXCLUDED: &str = " SPOP SRANDMEMBER HRANDFIELD ZRANDMEMBER RANDOMKEY TIME CLUSTERSCAN INFO ROLE LASTSAVE LOLWUT DUMP XINFO \
        MEMORY CLIENT CONFIG ACL DEBUG MODULE FERRITE FUNCTION SCRIPT SLOWLOG LATENCY COMMANDLOG COMMAND CLUSTER PUBSUB AUTH HELLO SELECT \
        SWAPDB FLUSHALL MOVE SHUTDOWN SAVE BGSAVE BGREWRITEAOF FAILOVER REPLICAOF SLAVEOF REPLCONF SYNC PSYNC MIGRATE RESET QUIT MONITOR \
        SUBSCRIBE PSUBSCRIBE SSUBSCRIBE UNSUBSCRIBE PUNSUBSCRIBE SUNSUBSCRIBE MULTI EXEC DISCARD WATCH WAIT WAITAOF PFSELFTEST PFDEBUG \
        BLPOP BRPOP BLMOVE BRPOPLPUSH BZPOPMIN BZPOPMAX BLMPOP BZMPOP XREAD XREADGROUP EVAL EVALSHA EVAL_RO EVALSHA_RO FCALL FCALL_RO SCAN \
        READONLY READWRITE ASKING RESTORE-ASKING XADD XAUTOCLAIM XCLAIM OBJECT EXPIRETIME PEXPIRETIME PTTL TTL KEYS \
        EXPIRE PEXPIRE SETEX PSETEX GETEX RESTORE HEXPIRE HPEXPIRE HSETEX HGETEX ";
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::in_two_databases(&server);
        let mut names = commands(&mut pair.native);
        names.retain(|name| !EXCLUDED.contains(&format!(" {} ", name[0])));
        let mut state = 7u64; // of a linear congruential generator
        let mut pick = |count: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).expect("31 bits") % count
        };
        let called = calls(&server, || {
            for _ in 0..4000 {
                let mut command = names[pick(names.len())].clone();
                command.push(KEYS[pick(KEYS.len())].into());
                for _ in 0..pick(5) {
                    let is_key = pick(3) == 0;
                    command.push(
                        if is_key { KEYS[pick(KEYS.len())] } else { ARGS[pick(ARGS.len())] }.into(),
                    );
                }
                // Sets and hashes return their elements in any order.
                let sorted = |reply: Vec<u8>| {
                    let mut lines: Vec<_> =
                        reply.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
                    lines.sort();
                    lines
                };
                let (called, native) = (pair.module.raw(&command), pair.native.raw(&command));
                if called != native {
                    assert_eq!(
                        sorted(called.clone()),
                        sorted(native.clone()),
                        "{command:?}: {called:?} {native:?}"
                    );
                }
            }
        });
        assert!(called > 1000, "only {called} were called");
        for key in KEYS {
            pair.same(&["TYPE", key]);
            pair.same(&["OBJECT", "ENCODING", key]);
        }
        server.assert_healthy();
    }
}

/// Sends almost every command of the engine with too few, too many and some fitting arguments.
#[test]
fn no_command_crashes_the_engine() {
    const EXCLUDED: &str = " SHUTDOWN DEBUG FAILOVER MIGRATE MONITOR QUIT REPLICAOF SLAVEOF ";
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        let mut names = commands(&mut server.client());
        names.retain(|name| {
            !EXCLUDED.contains(&format!(" {} ", name[0])) && name != &["CLIENT", "PAUSE"]
        });
        assert!(names.len() > 300, "{}", names.len());
        let address = server.info("address");
        let mut client = Client::to_tcp(&address);
        for name in &names {
            for more in ["", " key", " key 1", " key 0 1", " key value 1 2", " 1 key 0-0 + - 5"] {
                let line = format!("{}{more}", name.join(" "));
                client.send(&[words(&line)]);
                // After a command that changes the connection, or that blocks, the next command is
                // sent on a new connection.
                let changes_connection =
                    ["SUBSCRIBE", "SYNC", "REPLY", "TRACKING", "RESET", "MULTI", "WATCH", "KILL"];
                let is_changed = changes_connection.iter().any(|word| line.contains(word));
                if is_changed {
                    std::thread::sleep(Duration::from_millis(20));
                }
                if is_changed
                    || !matches!(client.next_within(Duration::from_millis(200)), Ok(Some(_)))
                {
                    client = Client::to_tcp(&address);
                }
            }
        }
        let mut after = Pair::new(&server);
        assert_eq!(after.same(&["PING"]), "+PONG");
        // The exact number depends on which replies the test did not wait for.
        let called = server.count("commands_called");
        assert!(called > 100, "{called}");
        server.assert_healthy();
    }
}
