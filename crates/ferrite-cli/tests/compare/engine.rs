//! The engine to which redis-cli and ferrite-cli connect.

use ferrite_testkit::Engine;

/// Starts a `redis-server` that logs no slow commands, so that its replies do not depend on time.
pub(crate) fn start(options: &[&str]) -> Engine {
    let own = ["--enable-debug-command", "yes", "--slowlog-log-slower-than", "-1"];
    Engine::redis(&[&own, options].concat())
}

/// Removes all keys, functions, scripts and statistics.
pub(crate) fn empty(redis: &Engine) {
    let mut client = redis.client();
    for words in
        [&["FLUSHALL"][..], &["FUNCTION", "FLUSH"], &["SCRIPT", "FLUSH"], &["CONFIG", "RESETSTAT"]]
    {
        client.ok(words);
    }
}
