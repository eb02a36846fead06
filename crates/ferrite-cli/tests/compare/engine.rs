//! The engine that redis-cli and ferrite-cli both talk to.

use ferrite_testkit::Engine;

/// Starts a `redis-server` whose replies do not depend on time: it logs no slow commands.
pub(crate) fn start(options: &[&str]) -> Engine {
    let own = ["--enable-debug-command", "yes", "--slowlog-log-slower-than", "-1"];
    Engine::redis(&[&own, options].concat())
}

/// Resets the server to its initial state.
pub(crate) fn empty(redis: &Engine) {
    let mut client = redis.client();
    for words in
        [&["FLUSHALL"][..], &["FUNCTION", "FLUSH"], &["SCRIPT", "FLUSH"], &["CONFIG", "RESETSTAT"]]
    {
        client.ok(words);
    }
}
