//! The module's admin port, which shows metrics and readiness.
//!
//! The port has a thread of its own. It calls only the log function of the module API. A scrape
//! reads counters that the module keeps anyway, and never waits for the engine.

use std::sync::Arc;

use ferrite_fabric::Fabric;
use ferrite_metrics::{
    AdminPort, AdminServer, Exposition, Program, Ready, engine_answers, fabric_metrics,
    gateway_metrics, listener_metrics, port_metrics, program_metrics,
};
use ferrite_session::Gateway;

use crate::api::fork;
use crate::transport::ThreadState;

/// The listener's objects whose state the admin port shows.
pub(crate) struct ShownListener {
    pub(crate) fabric: Fabric,
    pub(crate) gateway: Gateway,
    pub(crate) state: ThreadState,
}

/// The listener, or why there is none.
struct ModuleAdmin(Result<ShownListener, String>);

/// Serves the admin port. If that fails, the reason is logged.
pub(crate) fn serve(
    port: AdminPort,
    listener: Result<ShownListener, String>,
) -> Option<AdminServer> {
    fork::close_also_in_children(port.descriptor());
    let server = port.serve(Arc::new(ModuleAdmin(listener)));
    match &server {
        Ok(server) => tracing::info!("metrics at http://{}/metrics", server.address()),
        Err(why) => tracing::warn!("{why}"),
    }
    server.ok()
}

impl ModuleAdmin {
    /// Returns the listener, or why the module accepts no clients.
    fn listener(&self) -> Result<&ShownListener, &str> {
        let listener = self.0.as_ref().map_err(String::as_str)?;
        listener.state.why_ended().map_or(Ok(listener), Err)
    }
}

impl Program for ModuleAdmin {
    fn metrics(&self, out: &mut Exposition) {
        program_metrics("module", out);
        listener_metrics(self.listener().is_ok(), out);
        if let Ok(ShownListener { fabric, gateway, .. }) = &self.0 {
            gateway_metrics(gateway, out);
            fabric_metrics(fabric, out);
        }
        port_metrics(out);
    }

    fn ready(&self) -> Ready {
        let config = self.listener().map(|listener| listener.gateway.config());
        let config = config.map_err(|why| format!("no listener: {why}"));
        Box::pin(async move {
            // Asks over the engine's socket, as a client does: an engine that loads its data is not
            // ready.
            engine_answers(&config?.engine).await
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::listen::Address;
    use crate::options::Options;
    use crate::transport::Transport;

    fn metrics(admin: &ModuleAdmin) -> String {
        let mut out = Exposition::default();
        admin.metrics(&mut out);
        out.into_text()
    }

    #[test]
    fn shows_that_the_transport_thread_has_panicked() {
        let options = Options::from_arguments(&[]).expect("the defaults");
        let at = "127.0.0.1:0".parse().expect("an address");
        let addresses = vec![Address { at, may_be_absent: false, is_named: true }];
        let engine = "unix:/nonexistent/engine.sock".parse().expect("an address");
        let started = Transport::start(&options, (engine, Vec::new(), addresses), false, None);
        let (transport, (fabric, _)) = started.expect("a listener");
        let at = transport.listener.addresses[0].0;
        let (gateway, state) = (transport.gateway.clone(), transport.state.clone());
        let admin = ModuleAdmin(Ok(ShownListener { fabric, gateway, state }));
        assert!(metrics(&admin).contains("\nferrite_listener_up 1\n"));
        std::net::TcpStream::connect(at).expect("it listens");

        transport.panic();
        let until = Instant::now() + Duration::from_secs(60);
        while admin.listener().is_ok() {
            assert!(Instant::now() < until, "the thread does not panic");
            std::thread::yield_now();
        }
        assert!(metrics(&admin).contains("\nferrite_listener_up 0\n"));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let why = runtime.block_on(admin.ready()).expect_err("not ready");
        assert_eq!(why, "no listener: a bug: the transport thread panicked: on purpose");
        drop(admin);
        assert!(transport.stop(), "the shutdown finds a thread that has ended");
        std::net::TcpStream::connect(at).expect_err("nothing listens");
    }
}
