//! Transparent mode of the agent: its settings, and what it does before and after it carries
//! connections.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use ferrite_config::ports::PortSet;
use ferrite_config::{Transports, Values, peer, table};
use ferrite_fabric::LogLimit;
use ferrite_session::agent::{
    Agent, AgentConfig, AgentHandle, AgentPeer, Delivery, LocalListeners, Transparent,
};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use super::host_setup;
use super::redirection::Redirection;
use super::rules::Rules;
use crate::redirection_state::RedirectionState;
use crate::settings::WrongSettings;

/// How long the agent accepts connections after it has removed the rules. A connection that was
/// redirected just before reaches the agent within this time, because it does not leave the host.
const LAST_REDIRECTED: Duration = Duration::from_millis(50);
/// How often to check that connections of other hosts can be delivered.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Returns the settings of transparent mode. There the alias of a host is its own address.
pub(super) fn config(
    values: &Values,
    listen: &[SocketAddr],
    ports: PortSet,
) -> Result<AgentConfig, WrongSettings> {
    let own = match listen.first() {
        Some(SocketAddr::V4(own)) if !own.ip().is_unspecified() && !own.ip().is_loopback() => *own,
        _ => {
            let why = "--listen: `mode transparent` needs the IPv4 address that the other hosts \
                       know this host by, such as 192.0.2.1";
            return Err(WrongSettings(why.into()));
        }
    };
    if values.text(&table::ALIAS).is_some() {
        return Err(WrongSettings("--alias is for `mode alias` only".into()));
    }
    let networks = values.list(&table::PEERS).iter().map(|word| {
        let why = || format!("--peer {word}: with `mode transparent`, a peer is an address");
        peer::network(word).ok_or_else(|| WrongSettings(why()))
    });
    let networks = networks.collect::<Result<Vec<_>, _>>()?;
    if networks.is_empty() {
        let why = "--peer is missing; name the addresses or the network of the other hosts";
        return Err(WrongSettings(why.into()));
    }
    let mut config = AgentConfig::new(*own.ip());
    // All hosts may have the same list, so it may name this host, too.
    let mut others: Vec<Ipv4Addr> = networks.iter().filter_map(peer::Network::address).collect();
    others.retain(|ip| ip != own.ip());
    others.sort_unstable();
    others.dedup();
    let peers = others.into_iter();
    config.peers = peers.map(|alias| AgentPeer::new(alias, (alias, own.port()).into())).collect();
    let redirected = Transports::of(values).carried(&ports);
    config.ports = ports;
    config.transparent = Some(Transparent::new(networks, redirected, own.port()));
    Ok(config)
}

/// Finds the addresses of this host. Peers may be among them, such as an address that moves between
/// hosts: the kernel redirects no connections to them, and they cannot be used for checks.
pub(super) async fn find_own_addresses(config: &mut AgentConfig) -> anyhow::Result<()> {
    let Some(transparent) = &mut config.transparent else { return Ok(()) };
    let own =
        host_setup::own_addresses().await.context("cannot find the addresses of this host")?;
    let is_own = |peer: &&AgentPeer| own.iter().any(|own| own.contains(peer.alias));
    for peer in config.peers.iter().filter(is_own) {
        tracing::info!(
            "{} in `peers` is an address of this host: while it is, there is no link to it, and \
             connections to it are not redirected",
            peer.alias
        );
    }
    transparent.local = own;
    Ok(())
}

/// In transparent mode, prepares the host and redirects connections to the agent.
pub(super) async fn redirect(
    agent: &Agent,
    programs: &mut LocalListeners,
    config: &AgentConfig,
) -> anyhow::Result<Option<Rules>> {
    let (Some(Transparent { networks, redirected, .. }), Some(to)) =
        (&config.transparent, programs.redirect_port())
    else {
        return Ok(None);
    };
    let needed = |why: String| {
        anyhow::anyhow!(
            "{why}; `mode transparent` needs the capabilities CAP_NET_ADMIN and CAP_NET_RAW"
        )
    };
    agent.check_privileges().map_err(needed)?;
    let handle = agent.handle();
    host_setup::prepare(handle.any_peer()).await?;
    match handle.check_delivery().await {
        Delivery::Works => {}
        Delivery::Fails(why) => anyhow::bail!("cannot connect {why}; see ferrite agent --help"),
        Delivery::Unknown(why) => {
            tracing::warn!("cannot check that connections of other hosts are delivered: {why}");
        }
    }
    let (networks, ports) = (networks.clone(), redirected.clone());
    let rules = Rules::set(Redirection { networks, ports, to }).await;
    let rules = rules.context("cannot redirect connections to the agent")?;
    agent.check_redirection(programs).await.map_err(anyhow::Error::msg)?;
    Ok(Some(rules))
}

/// Keeps the rules, if there are any, and the settings of the host, for ever.
pub(super) async fn keep(
    rules: &mut Option<Rules>,
    agent: &AgentHandle,
    state: &RedirectionState,
) -> Infallible {
    match rules {
        Some(rules) => tokio::select! {
            never = rules.keep(state) => never,
            never = keep_host(agent, state) => never,
        },
        None => std::future::pending().await,
    }
}

/// Checks regularly that connections of other hosts can be delivered. If they cannot, somebody may
/// have removed a routing rule or a setting of the kernel, so makes them again.
async fn keep_host(agent: &AgentHandle, state: &RedirectionState) -> Infallible {
    let mut looks = interval_at(Instant::now() + LOOK_INTERVAL, LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        // Addresses may move between hosts. If they cannot be read, the last ones count.
        if let Ok(own) = host_setup::own_addresses().await {
            agent.set_own_addresses(&own);
        }
        let why = match check(agent).await {
            Delivery::Fails(why) => why,
            Delivery::Works => {
                if state.set_delivery(None) {
                    tracing::info!("connections of other hosts are delivered again");
                }
                continue;
            }
            Delivery::Unknown(why) => {
                note_unknown(&why);
                continue;
            }
        };
        if let Err(error) = host_setup::prepare(agent.any_peer()).await {
            // Without descriptors, `ip` cannot run, so the cause is not known.
            let error = error.context(format!("cannot connect {why}"));
            note_failure(state, &format!("{error:#}"));
            continue;
        }
        match check(agent).await {
            Delivery::Works => {
                state.set_delivery(None);
                tracing::warn!(
                    "cannot connect {why}; connections of other hosts were not delivered, and are \
                     delivered again"
                );
            }
            Delivery::Fails(why) => note_failure(state, &format!("cannot connect {why}")),
            Delivery::Unknown(why) => note_unknown(&why),
        }
    }
}

/// Checks the settings of the kernel, and that connections of other hosts can be delivered.
async fn check(agent: &AgentHandle) -> Delivery {
    match host_setup::wrong_setting() {
        Some(name) => Delivery::Fails(format!("to engines from other hosts: {name} is not 1")),
        None => agent.check_delivery().await,
    }
}

fn note_failure(state: &RedirectionState, why: &str) {
    if state.set_delivery(Some(why.to_owned())) {
        tracing::error!("connections of other hosts cannot be delivered: {why}");
    }
}

/// Logs that a check was not possible. The last result stays.
fn note_unknown(why: &str) {
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        tracing::warn!(
            "cannot check that connections of other hosts are delivered: {why}; the host may lack \
             free ports or memory, or the agent descriptors (LimitNOFILE){others}"
        );
    }
}

/// Redirects no further connections.
pub(super) async fn stop(rules: &mut Option<Rules>) {
    if let Some(rules) = rules {
        rules.stop().await;
        sleep(LAST_REDIRECTED).await;
    }
}
