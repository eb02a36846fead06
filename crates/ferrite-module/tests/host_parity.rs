//! Every command gives the same reply through the module as at the engine's own port, with the
//! exceptions in `parity/differences.rs`. These tests use TCP at the module's port and need no
//! RDMA. The engines are Debian's Redis, Valkey if the lab has built it, and those in
//! FERRITE_ENGINES. `FERRITE_MODULE_ARGS` adds arguments of the module.
#![expect(clippy::print_stderr, reason = "reports what was compared")]

mod parity;

use std::net::TcpStream;
use std::path::Path;

use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Transport;
use parity::{Amount, Pace, Way, states};

fn dial(port: &str) -> Box<dyn Transport> {
    let socket = TcpStream::connect(format!("127.0.0.1:{port}")).expect("a connection");
    socket.set_nodelay(true).expect("TCP_NODELAY");
    Box::new(socket)
}

fn each(state: impl Fn(&Way<'_>, &Path)) {
    let amount = Amount { good: 8, spoiled: 16 };
    let way =
        Way { arguments: &["rdma-bind", "127.0.0.1"], dial: &dial, pace: Pace::OneByOne, amount };
    engines().iter().for_each(|program| state(&way, program));
}

macro_rules! states {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            each(states::$name);
        }
    )*};
}

states! {
    standalone_resp2 pipelined_resp3 hand_written_scripts cluster replica replica_without_primary
    loading busy out_of_memory restricted paused
}
