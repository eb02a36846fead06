//! The metrics and the readiness that the gateway, the relay and the agent show at their admin
//! ports.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_config::{Values, table};
use ferrite_fabric::Fabric;
use ferrite_metrics::{
    AdminPort, AdminServer, Exposition, Program, Ready, agent_metrics, engine_answers,
    fabric_metrics, gateway_metrics, listener_metrics, port_metrics, program_metrics,
    server_answers,
};
use ferrite_session::agent::AgentHandle;
use ferrite_session::{Connector, EngineAddress, Gateway, Moved};

use crate::redirection_state::RedirectionState;

/// Opens the admin port if the settings have one.
pub(crate) fn start<P: Program>(
    values: &Values,
    program: impl FnOnce() -> Arc<P>,
) -> anyhow::Result<Option<AdminServer>> {
    let address = values.text(&table::ADMIN_LISTEN).filter(|text| *text != "off");
    let Some(address) = address.map(str::parse).transpose()? else { return Ok(None) };
    let server = AdminPort::bind(address).and_then(|port| port.serve(program()));
    server.map(Some).map_err(anyhow::Error::msg)
}

/// Logs the address of the metrics, if there is an admin port.
pub(crate) fn report(address: Option<SocketAddr>) {
    if let Some(address) = address {
        tracing::info!("metrics at http://{address}/metrics");
    }
}

/// Serves the gateway's admin port. The gateway is ready while the engine answers.
pub(crate) struct GatewayAdmin {
    pub(crate) fabric: Fabric,
    pub(crate) gateway: Gateway,
}

impl Program for GatewayAdmin {
    fn metrics(&self, out: &mut Exposition) {
        program_metrics("gateway", out);
        listener_metrics(true, out);
        gateway_metrics(&self.gateway, out);
        fabric_metrics(&self.fabric, out);
        port_metrics(out);
    }

    fn ready(&self) -> Ready {
        let config = self.gateway.config();
        Box::pin(async move { engine_answers(&config.engine).await })
    }
}

/// Counters of the relay's work.
#[derive(Default)]
pub(crate) struct RelayCounters {
    pub(crate) rdma: AtomicU64,
    pub(crate) tcp: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) moved: Moved,
}

/// Serves the relay's admin port. The relay is ready while the server answers over a new session,
/// which the relay opens in the same way as for a client.
pub(crate) struct RelayAdmin {
    pub(crate) fabric: Fabric,
    pub(crate) connector: Connector,
    pub(crate) to: SocketAddr,
    pub(crate) counters: Arc<RelayCounters>,
}

impl Program for RelayAdmin {
    fn metrics(&self, out: &mut Exposition) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let RelayCounters { rdma, tcp, failed, moved } = &*self.counters;
        program_metrics("relay", out);
        listener_metrics(true, out);
        let opened = [("rdma", count(rdma)), ("tcp", count(tcp))];
        let opened = opened.map(|(transport, count)| (vec![("transport", transport)], count));
        out.counters("relay_sessions_opened", "Sessions to the server, by transport", &opened);
        let help = "Clients that got no session because the relay could not connect to the server";
        out.counter("relay_connect_failures", help, count(failed));
        let (to_server, to_client) = moved.both();
        let bytes = [("to_server", to_server), ("to_client", to_client)];
        let bytes = bytes.map(|(direction, count)| (vec![("direction", direction)], count));
        out.counters("relay_bytes", "Bytes of commands and replies", &bytes);
        fabric_metrics(&self.fabric, out);
        port_metrics(out);
    }

    fn ready(&self) -> Ready {
        let (connector, to) = (self.connector.clone(), self.to);
        Box::pin(async move { relay_server_answers(&connector, to).await })
    }
}

/// Serves the agent's admin port. The agent is ready while it has a link to each peer and, in
/// transparent mode, connections are redirected to it. The agent of `ferrite server` is ready only
/// while the engine answers, too.
pub(crate) struct AgentAdmin {
    pub(crate) fabric: Fabric,
    pub(crate) agent: AgentHandle,
    pub(crate) engine: Option<EngineAddress>,
    pub(crate) redirection: Arc<RedirectionState>,
}

impl Program for AgentAdmin {
    fn metrics(&self, out: &mut Exposition) {
        program_metrics("agent", out);
        listener_metrics(true, out);
        agent_metrics(&self.agent, out);
        fabric_metrics(&self.fabric, out);
        port_metrics(out);
    }

    fn ready(&self) -> Ready {
        let (agent, engine) = (self.agent.clone(), self.engine.clone());
        let redirection = self.redirection.check();
        Box::pin(async move {
            if let Some(engine) = &engine {
                engine_answers(engine).await?;
            }
            redirection?;
            agent.check_links().await
        })
    }
}

/// Checks whether the relay's server answers over a new session.
pub(crate) async fn relay_server_answers(
    connector: &Connector,
    to: SocketAddr,
) -> Result<(), String> {
    let name = format!("the server at {to}");
    match connector.connect(to).await {
        Ok(session) => server_answers(&name, session).await,
        Err(error) => Err(format!("{name} does not answer: {error}")),
    }
}
