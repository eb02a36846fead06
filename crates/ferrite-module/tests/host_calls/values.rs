//! Values of all lengths. For long values, the module opens the key itself instead of calling GET.

use std::time::Duration;

use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;

use crate::client::{Pair, start, words};

/// Values of several megabytes, and lists of many elements, arrive unchanged.
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
        // This command has more arguments than a call can have.
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
/// misses. But the engine does not count these reads as commands.
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
                // Sets a long value first, so that the next GET tries the key path.
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
        (0..20).for_each(|_| drop(pair.native.ask(&["PING"]))); // lets the event loop run
        server.assert_healthy();
    }
}
