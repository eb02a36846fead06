//! Options of redis-cli that ferrite-cli does not have.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::output;

const OPTIONS: [&str; 28] = [
    "-4",
    "-6",
    "-c",
    "--askpass",
    "--cacert",
    "--cacertdir",
    "--cert",
    "--cluster",
    "--cluster-only-masters",
    "--cluster-yes",
    "--functions-rdb",
    "--hotkeys",
    "--insecure",
    "--intrinsic-latency",
    "--key",
    "--keystats",
    "--latency-dist",
    "--ldb",
    "--ldb-sync-mode",
    "--lru-test",
    "--quoted-pattern",
    "--rdb",
    "--replica",
    "--slave",
    "--sni",
    "--tls",
    "--tls-ciphers",
    "--tls-ciphersuites",
];

/// Prints an error of the command line and exits: with code 2, or 0 after `--help`.
pub(crate) fn exit(error: &clap::Error) -> ! {
    if let Some(option) = unsupported_option(error) {
        output::write_stderr(format!("{option} is not supported by ferrite-cli; use redis-cli"));
        std::process::exit(ferrite_config::exit_code::USAGE.into());
    }
    error.exit()
}

fn unsupported_option(error: &clap::Error) -> Option<&str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let is_known = error.kind() == ErrorKind::UnknownArgument && OPTIONS.contains(&option.as_str());
    is_known.then_some(option)
}
