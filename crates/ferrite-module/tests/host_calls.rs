//! Called commands give the same replies as on a connection: every reply is compared with that of
//! the engine's own socket. `host_calls_guards` tests when commands must not be called.

mod client;

use std::time::Duration;

use client::{Pair, calls, commands, of_module, start, words};
use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;

/// The pattern of KEYS matches only one key, since the order of several keys can differ.
#[test]
fn data_commands_give_equal_replies() {
    const LINES: &str = "SET s 1|GET s|INCRBY s 41|APPEND s x|INCR s|STRLEN s|GETRANGE s 0 1|SETEX t 100 v|GETEX t PERSIST|TTL t\
        |MSET a 1 b 2|MGET a b c s|GETDEL a|SETNX b 3|SET b 4 XX GET|GETSET b 5|LCS b s|SETRANGE s 5 y|SETBIT bits 7 1|BITCOUNT bits\
        |BITFIELD bits GET u4 0|BITOP NOT bits2 bits|LPUSH l 1 2 3|RPUSH l a|LRANGE l 0 -1|LPOP l 2|LINSERT l BEFORE a z|LLEN l|LMOVE l l2 LEFT RIGHT\
        |LPOS l a|LSET l 0 q|LSET l 9 q|LREM l 0 q|SADD set a b c|SISMEMBER set a|SMISMEMBER set a z|SCARD set|SREM set a|SINTERCARD 1 set\
        |HSET h f 1 g 2|HGET h f|HMGET h f g x|HINCRBY h f 5|HINCRBYFLOAT h f 0.5|HGETALL h|HDEL h f|HLEN h|HSTRLEN h g\
        |ZADD z 1 a 2 b 3 c|ZSCORE z b|ZRANGE z 0 -1 WITHSCORES|ZRANGEBYSCORE z (1 +inf LIMIT 0 1|ZINCRBY z 1.5 a|ZPOPMIN z|ZRANK z c|ZMSCORE z a b c\
        |ZUNIONSTORE z2 1 z WEIGHTS 2|GEOADD geo 13.36 38.11 p|GEOPOS geo p|GEOSEARCH geo FROMMEMBER p BYRADIUS 1 km ASC WITHCOORD|PFADD hll a b c|PFCOUNT hll\
        |XADD x 1-1 f v|XADD x 1-1 f v|XADD x 2-* f v|XRANGE x - + COUNT 1|XLEN x|XGROUP CREATE x g 0|XINFO GROUPS x|XACK x g 1-1|XTRIM x MAXLEN 1\
        |TYPE z|EXISTS a b s|DEL a b|RENAME s s2|RENAME none s|OBJECT ENCODING l|OBJECT REFCOUNT s2|OBJECT HELP|EXPIRE s2 100|PERSIST s2|DBSIZE|UNLINK s2|TOUCH l\
        |PING|PING hello|ECHO hello|GET|GET a b|INCR l|LPUSH s2 x|LPUSH t x|HGET l f|EXPIRE t x|SET t v EX 0|ZADD z nan a|SETRANGE t -1 x|PUBLISH ch m\
        |NOSUCH a|OBJECT NOSUCH a|OBJECT|EVAL return{1,redis.call('get','b')} 0|KEYS hl*|SORT l2|FLUSHDB|DBSIZE";
    for program in engines() {
        let server = start(&program, &[]);
        for protocol in ["2", "3"] {
            let mut pair = Pair::in_two_databases(&server);
            // The replies differ in the client id.
            pair.module.raw(&["HELLO", protocol]);
            pair.native.raw(&["HELLO", protocol]);
            let called = calls(&server, || {
                for line in LINES.split('|') {
                    pair.same(&words(line));
                }
            });
            assert!(called > 90, "only {called} of {} were called", LINES.split('|').count());
        }
    }
}

/// Many client libraries send a whole pipeline before they read the first reply. Here neither the
/// commands nor the replies fit into the socket buffers.
#[test]
fn a_client_may_send_a_whole_pipeline_before_it_reads() {
    const COUNT: usize = 2500;
    for program in engines() {
        let server = start(&program, &[]);
        let mut client = of_module(&server);
        let value = "v".repeat(10_000);
        let pair = [vec!["SET", "k", &value], vec!["GET", "k"]];
        let called = calls(&server, || {
            client.send(&vec![pair; COUNT].concat());
            let expected = [b"$10000\r\n", value.as_bytes(), b"\r\n"].concat();
            for _ in 0..COUNT {
                assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]));
                assert!(client.next_reply().is_some_and(|reply| reply == expected));
            }
        });
        assert_eq!(called, 2 * COUNT as u64);
    }
}

/// `INFO rdma` returns the module's section: in a pipeline, in a transaction, and only to users
/// with the right to INFO.
#[test]
fn info_rdma_returns_the_modules_section() {
    for program in engines() {
        let server = start(&program, &[]);
        let mut client = of_module(&server);
        let is_ours =
            |reply: &[u8]| reply.windows(26).any(|piece| piece == b"ferrite_rdma_connections:0");
        client.send(&["SET k v", "info RDMA", "INCR n", "INFO rdma clients", "PING"].map(words));
        assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]));
        let info = client.next_reply().expect("a reply");
        assert!(is_ours(&info), "{}", info.escape_ascii());
        assert_eq!(client.next_reply().as_deref(), Some(&b":1\r\n"[..]));
        assert!(!is_ours(&client.next_reply().expect("a reply")), "this INFO is the engine's own");
        assert_eq!(client.next_reply().as_deref(), Some(&b"+PONG\r\n"[..]));
        client.send(&["MULTI", "INFO rdma", "EXEC"].map(words));
        let replies = [(); 3].map(|()| client.next_reply().expect("a reply"));
        assert_eq!(replies[1], b"+QUEUED\r\n");
        assert!(is_ours(&replies[2]), "{}", replies[2].escape_ascii());
        server.ask::<String>(&["ACL", "SETUSER", "bob", "on", "nopass", "+@all", "-info", "~*"]);
        client.send(&["AUTH bob x", "INFO rdma"].map(words));
        assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]));
        assert!(client.next_reply().expect("a reply").starts_with(b"-NOPERM"));
    }
}

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
    // Not tested here: their replies depend on time, chance or the engine's state, or they change
    // the connection or the whole engine.
    const EXCLUDED: &str = " SPOP SRANDMEMBER HRANDFIELD ZRANDMEMBER RANDOMKEY TIME CLUSTERSCAN INFO ROLE LASTSAVE LOLWUT DUMP XINFO \
        MEMORY CLIENT CONFIG ACL DEBUG MODULE FERRITE FUNCTION SCRIPT SLOWLOG LATENCY COMMANDLOG COMMAND CLUSTER PUBSUB AUTH HELLO SELECT \
        SWAPDB FLUSHALL MOVE SHUTDOWN SAVE BGSAVE BGREWRITEAOF FAILOVER REPLICAOF SLAVEOF REPLCONF SYNC PSYNC MIGRATE RESET QUIT MONITOR \
        SUBSCRIBE PSUBSCRIBE SSUBSCRIBE UNSUBSCRIBE PUNSUBSCRIBE SUNSUBSCRIBE MULTI EXEC DISCARD WATCH WAIT WAITAOF PFSELFTEST PFDEBUG \
        BLPOP BRPOP BLMOVE BRPOPLPUSH BZPOPMIN BZPOPMAX BLMPOP BZMPOP XREAD XREADGROUP EVAL EVALSHA EVAL_RO EVALSHA_RO FCALL FCALL_RO SCAN \
        READONLY READWRITE ASKING RESTORE-ASKING XADD XAUTOCLAIM XCLAIM OBJECT EXPIRETIME PEXPIRETIME PTTL TTL KEYS ";
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

/// Some commands crash an engine or give wrong replies if they are called without a client. They go
/// over the proxy connection.
#[test]
fn commands_that_need_a_client_are_proxied() {
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        let mut pair = Pair::new(&server);
        let called = calls(&server, || {
            for line in [
                "WAIT 0 10",
                "BLPOP none 0.01",
                "BZPOPMIN none 0.01",
                "XREAD BLOCK 10 STREAMS none 0-0",
                "CLIENT SETNAME me", // the module had set a name with the client's address
                "CLIENT GETNAME",
                "MULTI",
                "SET m 1",
                "GET m",
                "EXEC",
                "WATCH m",
                "MULTI",
                "DISCARD",
                "UNWATCH",
                "EXEC",
                "REPLCONF x",
                "DEBUG NOSUCH",
                "ACL WHOAMI",
                "CONFIG GET maxmemory",
                "FCALL none 0",
                "EVAL return{redis.call('time')[1]~=nil} 0",
                "SELECT 3",
                "SELECT 99",
                "RESET",
            ] {
                pair.same(&words(line));
            }
        });
        assert_eq!(called, 0);
        // These commands take over the connection.
        for line in ["SYNC", "PSYNC ? -1", "MONITOR", "SUBSCRIBE ch", "CLIENT TRACKING ON BCAST"] {
            let mut client = of_module(&server);
            client.send(&[words(line)]);
            client.next_within(Duration::from_secs(1)).ok();
        }
        server.assert_healthy();
    }
}

/// Clients that are blocked, watch keys, track keys or subscribe are notified of called commands.
#[test]
fn called_writes_notify_other_clients() {
    for program in engines() {
        let mut server =
            start(&program, &["--appendonly", "yes", "--notify-keyspace-events", "KA"]);
        let mut caller = of_module(&server);
        let [mut blocked, mut watching, mut tracking, mut subscribed] =
            [(); 4].map(|()| server.client());
        caller.ok(&["SET", "key", "1"]);
        blocked.send(&[vec!["BLPOP", "list", "10"]]);
        watching.ok(&["WATCH", "key"]);
        watching.ok(&["MULTI"]);
        watching.ask(&["GET", "key"]);
        tracking.raw(&["HELLO", "3"]);
        tracking.ok(&["CLIENT", "TRACKING", "ON"]);
        tracking.raw(&["GET", "key"]);
        subscribed.raw(&["SUBSCRIBE", "ch", "__keyspace@0__:key"]);
        subscribed.next_reply();
        server.wait_until("a blocked client", || {
            caller.ask(&["INFO", "clients"]).contains("blocked_clients:1")
        });
        caller.send(&[
            vec!["LPUSH", "list", "x"],
            vec!["SET", "key", "2"],
            vec!["PUBLISH", "ch", "m"],
        ]);
        assert_eq!(caller.replies(3), [b":1\r\n".to_vec(), b"+OK\r\n".into(), b":1\r\n".into()]);
        assert_eq!(blocked.next_reply().expect("an element"), b"*2\r\n$4\r\nlist\r\n$1\r\nx\r\n");
        assert_eq!(watching.ask(&["EXEC"]), "*-1");
        assert_eq!(
            tracking.next_reply().expect("an invalidation"),
            b">2\r\n$10\r\ninvalidate\r\n*1\r\n$3\r\nkey\r\n"
        );
        let messages = [subscribed.next_reply(), subscribed.next_reply()]
            .map(|reply| String::from_utf8_lossy(&reply.expect("a message")).into_owned());
        assert!(
            messages[0].contains("\r\nset\r\n") && messages[1].contains("\r\nm\r\n"),
            "{messages:?}"
        );
        server.assert_healthy();
    }
}

/// Sends every command of the engine with too few, too many and some fitting arguments.
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

#[test]
fn scripts_and_functions_mix_with_calls() {
    const LIBRARY: &str = "#!lua name=lib\nredis.register_function('bump', function(keys) return redis.call('incr', keys[1]) end)";
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::in_two_databases(&server);
        assert_eq!(pair.module.ask(&["FUNCTION", "LOAD", LIBRARY]), "$3\r\nlib");
        let sha =
            pair.module.ask(&["SCRIPT", "LOAD", "return redis.call('append',KEYS[1],ARGV[1])"]);
        let sha = sha.lines().nth(1).expect("a hash").to_string();
        pair.same(&["SET", "key", "41"]);
        for _ in 0..3 {
            pair.same(&["FCALL", "bump", "1", "key"]);
            pair.same(&["GET", "key"]);
            pair.same(&["EVALSHA", &sha, "1", "text", "more"]);
            pair.same(&["GET", "text"]);
            pair.same(&["EVAL", "return redis.error_reply('mine')", "0"]);
            pair.same(&["INCR", "key"]);
        }
        assert_eq!(pair.same(&["GET", "key"]), "$2\r\n47");
        server.assert_healthy();
    }
}

#[test]
fn pipelines_keep_their_order() {
    let mut pipeline: Vec<Vec<String>> = Vec::new();
    for number in 0..400 {
        let key = format!("key{}", number % 7);
        let line = match number % 10 {
            0 => "MULTI".into(),
            1 | 4 => format!("SET {key} {number}"),
            2 => "EXEC".into(),
            3 => format!("COPY {key} copy{number}"),
            5 => format!("EVAL return{{redis.call('get','{key}'),{number}}} 0"),
            6 => format!("BLPOP none{key} 0.001"),
            7 => format!("RPUSH list {number}"),
            8 => "LRANGE list 0 -1".into(),
            _ => format!("NOSUCH {number}"),
        };
        pipeline.push(line.split(' ').map(Into::into).collect());
    }
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::in_two_databases(&server);
        pair.module.send(&pipeline);
        pair.native.send(&pipeline);
        assert_eq!(pair.module.replies(pipeline.len()), pair.native.replies(pipeline.len()));
        server.assert_healthy();
    }
}

#[test]
fn calls_use_the_selected_database() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let (mut caller, mut native) = (of_module(&server), server.client());
        let called = calls(&server, || {
            for line in [
                "SET key zero",
                "SET moved zero",
                "COPY key copied DB 2",
                "MOVE moved 3",
                "SET key again",
            ] {
                assert!(!caller.ask(&words(line)).starts_with('-'), "{line}");
            }
            caller.ok(&["SELECT", "3"]);
            assert_eq!(caller.ask(&["GET", "moved"]), "$4\r\nzero");
            caller.ok(&["SET", "key", "three"]);
        });
        assert_eq!(called, 7);
        for (db, key, value) in [
            ("0", "key", "$5\r\nagain"),
            ("0", "moved", "$-1"),
            ("2", "copied", "$4\r\nzero"),
            ("3", "key", "$5\r\nthree"),
        ] {
            native.ok(&["SELECT", db]);
            assert_eq!(native.ask(&["GET", key]), value, "{key} in {db}");
        }
        native.ok(&["SWAPDB", "0", "3"]);
        assert_eq!(caller.ask(&["GET", "key"]), "$5\r\nagain");
        server.assert_healthy();
    }
}

#[test]
fn a_scan_finds_all_keys() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut caller = of_module(&server);
        caller.send(
            &(0..500)
                .map(|number| vec!["SET".into(), format!("key{number}"), "v".into()])
                .collect::<Vec<_>>(),
        );
        caller.replies(500);
        let mut found = std::collections::BTreeSet::new();
        let mut cursor = "0".to_string();
        loop {
            let reply = caller.ask(&["SCAN", &cursor, "COUNT", "50"]);
            let lines: Vec<_> = reply.lines().collect();
            cursor = lines[2].into();
            found.extend(
                lines.iter().filter(|line| line.starts_with("key")).map(ToString::to_string),
            );
            if cursor == "0" {
                break;
            }
        }
        assert_eq!(found.len(), 500);
        server.assert_healthy();
    }
}

/// Commands and replies that are larger than a window.
#[test]
fn large_values_arrive_whole() {
    let large = "0123456789abcdef".repeat(1 << 18); // 4 MiB
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        pair.module.ok(&["SET", "large", &large]);
        assert_eq!(pair.same(&["STRLEN", "large"]), format!(":{}", large.len()));
        assert!(pair.same(&["GET", "large"]).ends_with(&large));
        let many: Vec<_> = ["RPUSH", "many"]
            .into_iter()
            .map(String::from)
            .chain((0..30).map(|n| format!("{n}{}", &large[..9000])))
            .collect();
        assert_eq!(pair.module.ask(&many), ":30");
        pair.same(&["LRANGE", "many", "0", "-1"]);
        // More arguments than a call can have.
        let more: Vec<_> = ["RPUSH", "more"]
            .into_iter()
            .map(String::from)
            .chain((0..5000).map(|n| n.to_string()))
            .collect();
        assert_eq!(pair.module.ask(&more), ":5000");
        pair.same(&["LRANGE", "more", "0", "-1"]);
        server.assert_healthy();
    }
}

/// Returns a number in a section of INFO; 0 if it is missing.
fn statistic(client: &mut Client, section: &str, name: &str) -> u64 {
    let all = client.ask(&["INFO", section]);
    let value = all.lines().find_map(|line| line.strip_prefix(name));
    value.map_or(0, |value| value.split(',').next().unwrap_or_default().parse().expect("a number"))
}

/// The key path returns the same values as GET, and the engine counts the same keyspace hits and
/// misses. It is only not counted as a command.
#[test]
fn long_values_take_the_key_path() {
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        let mut pair = Pair::new(&server);
        pair.native.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
        pair.native.ok(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"]);
        for protocol in ["2", "3"] {
            for client in [&mut pair.module, &mut pair.native] {
                client.raw(&["HELLO", protocol]);
            }
            pair.native.ok(&["CONFIG", "RESETSTAT"]);
            for length in [300, 1024, 100_000] {
                let value = "v".repeat(length);
                pair.module.ok(&["SET", "key", &value]);
                for _ in 0..20 {
                    assert_eq!(pair.module.ask(&["GET", "key"]), format!("${length}\r\n{value}"));
                }
            }
            let mut count = |section, name| statistic(&mut pair.native, section, name);
            assert_eq!(
                count("commandstats", "cmdstat_get:calls="),
                1,
                "only the first GET is a call"
            );
            assert_eq!(
                (count("stats", "keyspace_hits:"), count("stats", "keyspace_misses:")),
                (60, 0)
            );
            let touched = pair.native.ask(&["OBJECT", "FREQ", "key"]);
            assert!(
                touched.trim_start_matches(':').parse::<u64>().expect("a number") > 5,
                "{touched}"
            );
            // The key gets a value of another kind.
            pair.module.ok(&["SET", "key", "short"]);
            pair.same(&["GET", "key"]);
            pair.same(&["OBJECT", "ENCODING", "key"]);
            for change in
                ["SET key 12345", "DEL key", "RPUSH key element", "DEL key", "SET key last PX 1"]
            {
                // A long value first, so that the next GET tries the key path.
                let long = "v".repeat(1000);
                pair.native.ask(&["DEL", "key"]);
                pair.native.ok(&["SET", "key", &long]);
                pair.same(&["GET", "key"]);
                pair.native.ask(&["DEL", "key"]);
                pair.native.ask(&words(change));
                std::thread::sleep(Duration::from_millis(5));
                let (encoding, answer) = (
                    pair.native.ask(&["OBJECT", "ENCODING", "key"]),
                    pair.module.ask(&["GET", "key"]),
                );
                assert_eq!(answer, pair.native.ask(&["GET", "key"]), "{change}");
                if !change.ends_with("PX 1") {
                    assert_eq!(
                        encoding,
                        pair.native.ask(&["OBJECT", "ENCODING", "key"]),
                        "{change}"
                    );
                }
                pair.native.ask(&["DEL", "key"]);
            }
        }
        // A user without the right to the key gets an error.
        let long = "v".repeat(1000);
        pair.native.ok(&["SET", "key", &long]);
        pair.module.ask(&["GET", "key"]);
        pair.native.ok(&words("ACL SETUSER bob on nopass ~b* +get +auth"));
        let mut bob = Pair::new(&server);
        bob.same(&["AUTH", "bob", "any"]);
        assert!(bob.same(&["GET", "key"]).starts_with("-NOPERM"));
        (0..20).for_each(|_| drop(pair.native.ask(&["PING"]))); // iterations of the event loop
        server.assert_healthy();
    }
}
