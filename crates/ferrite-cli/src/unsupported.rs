//! Options of redis-cli that ferrite-cli does not have, and what to use instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::{exit, output};

const CLUSTER: &str = "ferrite-cli does not follow redirects of a cluster; connect to the node \
                       that has the key (-h, -p), or use redis-cli -c over TCP";
const CLUSTER_MANAGER: &str = "use redis-cli --cluster, which works over TCP at the nodes' ports";
const REPLICA: &str = "use redis-cli over TCP at the engine's port: replication is not carried \
                       over RDMA";
const ADDRESS_KIND: &str = "give -h an address of that kind instead of a name";

/// The options, each with what to use instead.
const OPTIONS: [(&str, &str); 22] = [
    ("-4", ADDRESS_KIND),
    ("-6", ADDRESS_KIND),
    ("-c", CLUSTER),
    ("--askpass", "set the environment variable REDISCLI_AUTH"),
    ("--cluster", CLUSTER_MANAGER),
    ("--cluster-only-masters", CLUSTER_MANAGER),
    ("--cluster-yes", CLUSTER_MANAGER),
    ("--functions-rdb", REPLICA),
    ("--hotkeys", "use redis-cli --hotkeys, or OBJECT FREQ on single keys"),
    ("--intrinsic-latency", "use redis-cli --intrinsic-latency, which needs no server"),
    ("--keystats", "use --bigkeys or --memkeys"),
    ("--latency-dist", "use --latency-history, or ferrite bench kv for percentiles"),
    ("--ldb", "use redis-cli --ldb --eval over TCP"),
    ("--ldb-sync-mode", "use redis-cli --ldb-sync-mode --eval over TCP"),
    ("--lru-test", "use ferrite bench kv --zipf 0.99"),
    ("--quoted-pattern", "use --pattern, without quotes"),
    ("--rdb", REPLICA),
    ("--replica", REPLICA),
    ("--slave", REPLICA),
    ("--tls-ciphers", "ferrite-cli uses TLS 1.3 with the ciphers of rustls; leave it out"),
    ("--tls-ciphersuites", "ferrite-cli uses TLS 1.3 with the ciphers of rustls; leave it out"),
    ("--vset-recall", "use redis-cli --vset-recall"),
];

/// Prints an error of the command line and exits: with code 2, or 0 after `--help`.
pub(crate) fn exit(error: &clap::Error) -> ! {
    if let Some((option, instead)) = unsupported_option(error) {
        output::write_stderr(format!("{option} is not supported by ferrite-cli: {instead}"));
        std::process::exit(exit::WRONG_USAGE.into());
    }
    error.exit()
}

fn unsupported_option(error: &clap::Error) -> Option<(&'static str, &'static str)> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    OPTIONS.into_iter().find(|(known, _)| is_unknown && known == option)
}
