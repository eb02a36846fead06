//! What the module shows at its admin port.
//!
//! The port has a thread of its own, which calls nothing of the module API but the log. A scrape
//! reads the counters that the module has anyway, and never waits for the engine.

use std::sync::Arc;

use ferrite_fabric::Fabric;
use ferrite_metrics::{
    AdminPort, AdminServer, Exposition, Program, Ready, engine_answers, fabric_metrics,
    gateway_metrics, listener_metrics, port_metrics, program_metrics,
};
use ferrite_session::Gateway;

use crate::api::fork;

/// The listener's fabric and gateway, or why there is no listener.
struct ModuleAdmin(Result<(Fabric, Gateway), String>);

/// Serves the admin port. If that fails, the reason is logged.
pub(crate) fn serve(
    port: AdminPort,
    listener: Result<(Fabric, Gateway), String>,
) -> Option<AdminServer> {
    fork::close_also_in_children(port.descriptor());
    let server = port.serve(Arc::new(ModuleAdmin(listener)));
    match &server {
        Ok(server) => tracing::info!("metrics at http://{}/metrics", server.address()),
        Err(why) => tracing::warn!("{why}"),
    }
    server.ok()
}

impl Program for ModuleAdmin {
    fn metrics(&self, out: &mut Exposition) {
        program_metrics("module", out);
        listener_metrics(self.0.is_ok(), out);
        if let Ok((fabric, gateway)) = &self.0 {
            gateway_metrics(gateway, out);
            fabric_metrics(fabric, out);
        }
        port_metrics(out);
    }

    fn ready(&self) -> Ready {
        let config = self.0.as_ref().map(|(_, gateway)| gateway.config()).map_err(Clone::clone);
        Box::pin(async move {
            let config = config.map_err(|why| format!("no listener: {why}"))?;
            // Asks over the engine's socket, as a client does: an engine that loads its data is not
            // ready.
            engine_answers(&config.engine).await
        })
    }
}
