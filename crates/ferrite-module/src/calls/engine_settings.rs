//! Reads the engine's settings that calls depend on, and the engine's limits for clients.

use std::time::Duration;

use ferrite_session::ClientLimits;

use crate::api::Context;

/// Reads the engine's limits for the memory that clients use. Unknown output limits are replaced by
/// the strict defaults of pub/sub clients, and an unknown query limit by 1 MiB. Other unknown
/// limits do not apply.
pub(super) fn client_limits(context: Context<'_>) -> ClientLimits {
    const UNKNOWN: ClientLimits = ClientLimits {
        hard_bytes: 32 << 20,
        soft_bytes: 8 << 20,
        soft_time: Duration::from_secs(60),
        query_bytes: 1 << 20,
        silent_time: Duration::ZERO,
        all_clients_bytes: 0,
    };
    let output =
        context.config(c"client-output-buffer-limit").and_then(|text| output_limits(&text));
    let maxmemory = context.config(c"maxmemory").and_then(|text| text.parse().ok()).unwrap_or(0);
    let all =
        context.config(c"maxmemory-clients").map_or(0, |text| memory_or_percent(&text, maxmemory));
    let query = context.config(c"client-query-buffer-limit").and_then(|text| text.parse().ok());
    let query_bytes = query.unwrap_or(UNKNOWN.query_bytes);
    let silent = context.config(c"timeout").and_then(|text| text.parse().ok()).unwrap_or(0);
    let silent_time = Duration::from_secs(silent);
    ClientLimits { all_clients_bytes: all, query_bytes, silent_time, ..output.unwrap_or(UNKNOWN) }
}

/// Parses `normal HARD SOFT SECONDS slave … pubsub …`, as CONFIG GET returns it.
fn output_limits(text: &str) -> Option<ClientLimits> {
    let mut words = text.split_ascii_whitespace().skip_while(|word| *word != "normal").skip(1);
    let mut number = || words.next()?.parse::<u64>().ok();
    let (hard, soft, seconds) = (number()?, number()?, number()?);
    Some(ClientLimits {
        hard_bytes: usize::try_from(hard).ok()?,
        soft_bytes: usize::try_from(soft).ok()?,
        soft_time: Duration::from_secs(seconds),
        ..ClientLimits::default()
    })
}

/// Parses a number of bytes, or a percentage of `maxmemory`.
fn memory_or_percent(text: &str, maxmemory: usize) -> usize {
    match text.strip_suffix('%') {
        Some(percent) => percent.parse().map_or(0, |percent: usize| maxmemory / 100 * percent),
        None => text.parse().unwrap_or(0),
    }
}

pub(super) fn has_idle_timeout(context: Context<'_>) -> bool {
    context.config(c"timeout").is_some_and(|seconds| seconds != "0")
}

/// Returns whether `appendfsync` is `always`. Returns true if the engine does not say.
pub(super) fn syncs_always(context: Context<'_>) -> bool {
    context.config(c"appendfsync").is_none_or(|when| when == "always")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_engines_limits() {
        let read =
            output_limits("normal 1048576 524288 10 slave 268435456 67108864 60 pubsub 1 2 3");
        let expected = ClientLimits {
            hard_bytes: 1 << 20,
            soft_bytes: 512 << 10,
            soft_time: Duration::from_secs(10),
            ..ClientLimits::default()
        };
        assert_eq!(read, Some(expected));
        assert_eq!(output_limits("slave 1 2 3"), None);
        assert_eq!(memory_or_percent("1000", 0), 1000);
        assert_eq!(memory_or_percent("10%", 5000), 500);
        assert_eq!(memory_or_percent("0", 5000), 0);
    }
}
