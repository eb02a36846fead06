//! Every command gives the same reply over RDMA as at the engine's own TCP port, in the lab's guest
//! (`cargo xtask lab-test parity`). Engines are on 10.0.0.1 (rxe1), clients on 10.0.0.2 (rxe2). The
//! cases and states are those of `host_parity`. Without FERRITE_ENGINES, only Debian's Redis and
//! few cases are tested. FERRITE_ENGINES names other engines, or is empty for all that are
//! available.
#![expect(clippy::print_stderr, reason = "reports what was compared")]

mod parity;

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_session::{Connector, Session, SessionTransport};
use ferrite_testkit::TIMEOUT;
use ferrite_testkit::engine::{REDIS, engines};
use ferrite_testkit::resp::Transport;
use parity::{Amount, Pace, Way, states};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

struct OverRdma {
    runtime: Rc<Runtime>,
    session: Session,
}

impl Transport for OverRdma {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.runtime.block_on(async {
            self.session.write_all(bytes).await?;
            self.session.flush().await
        })
    }

    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize> {
        let late = |_| Err(io::ErrorKind::TimedOut.into());
        self.runtime
            .block_on(async { timeout(limit, self.session.read(into)).await.unwrap_or_else(late) })
    }
}

fn each(state: impl Fn(&Way<'_>, &Path)) {
    // Uses one thread, which also drives the fabric while it waits, because switching threads is
    // slow in the guest.
    let runtime = Rc::new(Builder::new_current_thread().enable_all().build().expect("a runtime"));
    let inside = runtime.enter();
    let config = Config { busy_poll_us: 0, ..Config::default() };
    let fabric = Fabric::system()
        .rdma(Rdma::Require)
        .device("rxe2")
        .config(config)
        .build()
        .expect("a fabric");
    let driver = tokio::spawn(fabric.drive());
    let connector = Connector::new(&fabric)
        .rdma(Rdma::Require)
        .local("10.0.0.2:0".parse().expect("an address"));
    drop(fabric);
    let dial = |port: &str| -> Box<dyn Transport> {
        let server = format!("10.0.0.1:{port}").parse().expect("an address");
        let session = runtime.block_on(connector.connect(server)).expect("a session");
        assert_eq!(session.transport(), SessionTransport::FerriteRdma);
        Box::new(OverRdma { runtime: Rc::clone(&runtime), session })
    };
    let arguments = ["rdma-bind", "10.0.0.1", "rdma", "require", "rdma-device", "rxe1"];
    // Only the transport and the default pace differ from `host_parity`, so a few cases of each
    // command are enough by default.
    let (engines, amount) = match std::env::var_os("FERRITE_ENGINES") {
        Some(_) => (engines(), Amount { good: 4, spoiled: 6 }),
        None => (vec![REDIS.into()], Amount { good: 1, spoiled: 1 }),
    };
    let way = Way { arguments: &arguments, dial: &dial, pace: Pace::Pipelined, amount };
    engines.iter().for_each(|program| state(&way, program));
    drop(connector);
    let ended = runtime.block_on(async { timeout(TIMEOUT, driver).await });
    ended.expect("the fabric stops in time").expect("no panic").expect("no fabric error");
    drop(inside);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
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
