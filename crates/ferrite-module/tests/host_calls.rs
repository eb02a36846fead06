//! Commands that the module calls in-process give the same replies as on a connection. Most tests
//! compare every reply with that of the engine's own socket. `host_calls_guards` tests when
//! commands must not be called.

mod client;
mod host_calls {
    mod random;
    mod values;
}

use std::time::Duration;

use client::{Pair, calls, of_module, start, words};
use ferrite_testkit::engine::engines;

/// KEYS gets a pattern that matches only one key, because engines list several keys in any order.
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
