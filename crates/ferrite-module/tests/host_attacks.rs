//! Attacks that fail at the engine's own port and must fail at the module's port, too. Many of them
//! once succeeded there. Some tests check that honest clients work under the same conditions. The
//! tests need no RDMA, since sessions over TCP take the same path.

mod client;
mod host_attacks {
    mod disconnects;
    mod login;
    mod memory;
    mod renamed;
    mod wait;
}

use client::start;
use ferrite_testkit::Engine;
use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;

const SECRET: &str = "the-secret-value";

/// Runs an attack on each engine.
fn on_each(options: &[&str], attack: impl Fn(&mut Engine)) {
    for program in engines() {
        let mut server = start(&program, options);
        attack(&mut server);
        server.assert_healthy();
    }
}

/// Returns the address of the module's port. `admin` must be allowed to run INFO.
fn address(admin: &mut Client) -> String {
    admin.info("address")
}
