//! Options of redis-cli and valkey-cli that ferrite-cli does not have, each with its replacement.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::output;

const CLUSTER_MANAGER: &str = "use redis-cli --cluster, which works over TCP at the nodes' ports";
const REPLICA: &str = "use redis-cli over TCP at the engine's port: replication is not carried \
                       over RDMA";
const CIPHERS: &str = "ferrite-cli uses TLS 1.3 and chooses the cipher itself; remove the option";
const HOT_KEYS: &str = "use redis-cli --hotkeys, or OBJECT FREQ on single keys";
const KEY_STATISTICS: &str = "use --bigkeys or --memkeys";

/// The options, each with its replacement.
const OPTIONS: [(&str, &str); 26] = [
    ("-4", "give -h an IPv4 address instead of a name"),
    ("-6", "give -h an IPv6 address instead of a name"),
    ("--askpass", "set the environment variable REDISCLI_AUTH"),
    ("--cluster", CLUSTER_MANAGER),
    ("--cursor", "a scan always starts at the beginning; use the command SCAN"),
    ("--functions-rdb", REPLICA),
    ("--hotkeys", HOT_KEYS),
    ("--hotkeys-count", HOT_KEYS),
    ("--intrinsic-latency", "use redis-cli --intrinsic-latency, which needs no server"),
    ("--keystats", KEY_STATISTICS),
    ("--keystats-samples", KEY_STATISTICS),
    ("--latency-dist", "use --latency-history, or ferrite bench kv for percentiles"),
    ("--ldb", "use redis-cli --ldb --eval over TCP"),
    ("--ldb-sync-mode", "use redis-cli --ldb-sync-mode --eval over TCP"),
    ("--lru-test", "use ferrite bench kv --zipf 0.99"),
    ("--mptcp", "ferrite-cli does not use multipath TCP; remove the option"),
    ("--quoted-pattern", "use --pattern, without quotes"),
    ("--rdb", REPLICA),
    ("--replica", REPLICA),
    ("--slave", REPLICA),
    ("--test_hint", "type the command at the prompt, which shows its hint"),
    ("--test_hint_file", "type the commands at the prompt, which shows their hints"),
    ("--tls-ciphers", CIPHERS),
    ("--tls-ciphersuites", CIPHERS),
    ("--top", KEY_STATISTICS),
    ("--vset-recall", "use redis-cli --vset-recall"),
];

/// Prints an error of the command line and exits with code 2. After `--help`, exits with code 0.
pub(crate) fn exit(error: &clap::Error) -> ! {
    if let Some(line) = explanation(error) {
        output::write_stderr(line);
        std::process::exit(ferrite_config::exit_code::USAGE.into());
    }
    error.exit()
}

/// Returns the explanation for an option that redis-cli or valkey-cli has, but ferrite-cli does
/// not.
fn explanation(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let listed = OPTIONS.iter().find(|(known, _)| known == option);
            let instead = listed.map(|(_, instead)| *instead);
            let is_of_cluster = option.starts_with("--cluster-");
            let instead = instead.or(is_of_cluster.then_some(CLUSTER_MANAGER))?;
            Some(format!("{option} is not supported by ferrite-cli: {instead}"))
        }
        // valkey-cli has an option of this name without a value.
        ErrorKind::ValueValidation | ErrorKind::InvalidValue if option.starts_with("--rdma ") => {
            let explanation = "--rdma needs a policy: prefer, require or forbid; --rdma of \
                               valkey-cli corresponds to --rdma require";
            Some(explanation.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use clap::Parser as _;

    use super::*;
    use crate::options::Options;

    /// Options that redis-cli 7.0 lacks, from `--help` of valkey-cli 9.1 and redis-cli 8.
    const LATER: &str = "-t <timeout> -4 -6 --mptcp --hotkeys-count <n> --count <count> \
        --keystats --keystats-samples <n> --cursor <n> --top <n> --vset-recall <key> \
        --memkeys-samples <n> --cluster-yes --cluster-only-masters --cluster-only-primaries --rdma";

    /// Returns the options of a help text, each with its value.
    fn options_of(help: &str) -> Vec<Vec<&str>> {
        let mut options: Vec<Vec<&str>> = Vec::new();
        for word in help.split_whitespace() {
            match (word.strip_prefix('<'), options.last_mut()) {
                (Some(_), Some(option)) if option.len() == 1 => {
                    let is_yes_or_no = option[0] == "--show-pushes";
                    option.push(if is_yes_or_no { "no" } else { "1" });
                }
                _ => options.push(vec![word]),
            }
        }
        options.retain(|option| option[0].starts_with('-'));
        options
    }

    #[test]
    fn knows_every_option_of_redis_cli_and_valkey_cli() {
        let output = Command::new("redis-cli").arg("--help").output().expect("start redis-cli");
        let help = [output.stdout, output.stderr].concat();
        let help = String::from_utf8(help).expect("UTF-8");
        // Each option begins a line. Its value, if it has one, follows.
        let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
        let words = lines.map(|line| {
            let mut words = line.split_whitespace();
            let [option, value] = [words.next(), words.next()].map(Option::unwrap_or_default);
            format!("{option} {}", if value.starts_with('<') { value } else { "" })
        });
        let words: String = words.collect::<Vec<_>>().join(" ");
        let options = [options_of(&words), options_of(LATER)].concat();
        assert!(options.len() > 60, "{options:?}");
        for option in options {
            let Err(error) = Options::try_parse_from([&["ferrite-cli"][..], &option].concat())
            else {
                continue;
            };
            let explained = explanation(&error);
            let is_known = error.kind() != ErrorKind::UnknownArgument
                && error.kind() != ErrorKind::ValueValidation;
            assert!(is_known || explained.is_some(), "{option:?}: {error}");
        }
    }

    #[test]
    fn says_what_to_use_instead() {
        let explain = |words: &[&str]| {
            let words = [&["ferrite-cli"], words].concat();
            explanation(&Options::try_parse_from(words).err().expect("not supported"))
        };
        for (option, _) in OPTIONS {
            let line = explain(&[option, "1"]).expect(option);
            assert!(line.starts_with(&format!("{option} is not supported by ferrite-cli: ")));
        }
        for words in [&["--rdma"][..], &["--rdma", "PING"]] {
            assert!(explain(words).is_some_and(|line| line.contains("--rdma require")));
        }
        assert!(explain(&["--cluster-replicas", "1"]).is_some());
        assert_eq!(explain(&["--no-such-option"]), None);
        assert_eq!(explain(&["-n", "x"]), None);
    }
}
