//! The settings of an agent, made of the table of settings.

use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_config::ports::PortSet;
use ferrite_config::{Policy, Setting, Values, peer, table};
use ferrite_fabric::rustls::crypto::ring;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_session::EngineAddress;
use ferrite_session::agent::{AgentConfig, AgentPeer, AgentTls, PeerAddress, Transparent};

use super::transparent;
use crate::address;
use crate::settings::WrongSettings;

/// What happens if a name has no address that can be used.
const LOOKING_AGAIN: &str = "trying again while the agent runs";

/// The settings, with the addresses parsed.
pub(crate) struct Setup {
    pub(super) values: Values,
    pub(super) config: AgentConfig,
    pub(super) listen: Vec<SocketAddr>,
    /// Whether to print events on stdout.
    pub(super) json: bool,
    /// The engine that must answer, too, for the agent to be ready.
    pub(super) engine: Option<EngineAddress>,
}

impl Setup {
    /// Checks the settings. Reads the certificates, and resolves names.
    pub(crate) fn new(values: Values) -> anyhow::Result<Self> {
        let listen = match values.text(&table::AGENT_LISTEN) {
            Some(text) => address::parse_all::<{ table::AGENT_PORT }>(text)
                .map_err(|why| anyhow::anyhow!("--listen: {why}"))?,
            None => Vec::new(),
        };
        let config = agent_config(&values, &listen)?;
        config.check().map_err(WrongSettings)?;
        check_authentication(&values, &config, &listen)?;
        Ok(Self { values, config, listen, json: false, engine: None })
    }

    /// Returns the setup of an agent that is ready only while this engine answers.
    pub(crate) fn beside(self, engine: EngineAddress) -> Self {
        Self { engine: Some(engine), ..self }
    }

    /// Describes what the agent carries, and how.
    pub(crate) fn describe(&self) -> String {
        let AgentConfig { alias, ports, transparent, direct, .. } = &self.config;
        let mode = self.values.text(&table::AGENT_MODE).unwrap_or_default();
        let rdma = self.values.policy().map_or("prefer", Policy::name);
        let direct = if *direct { "allow" } else { "refuse" };
        let carried = transparent.as_ref().map_or(ports, |transparent| &transparent.redirected);
        let rest = match ports.filter(|port| !carried.contains(port)) {
            none if none.is_empty() => String::new(),
            rest => format!(", not ports {rest}"),
        };
        let peers = self.peers();
        let peers = if peers.is_empty() { "none".into() } else { peers.join(", ") };
        format!(
            "alias {alias}, peers {peers}, ports {carried}{rest} (mode {mode}, RDMA: {rdma}, \
             direct: {direct})"
        )
    }

    /// Returns the other hosts of the group.
    pub(super) fn peers(&self) -> Vec<String> {
        match &self.config.transparent {
            Some(Transparent { networks, .. }) => {
                networks.iter().map(ToString::to_string).collect()
            }
            None => {
                let peers = self.config.peers.iter();
                peers.map(|AgentPeer { alias, address, .. }| format!("{alias}={address}")).collect()
            }
        }
    }
}

fn agent_config(values: &Values, listen: &[SocketAddr]) -> anyhow::Result<AgentConfig> {
    let mut config = match values.text(&table::AGENT_MODE) {
        Some("transparent") => transparent::config(values, listen, ports(values, &table::PORTS))?,
        _ => alias_config(values)?,
    };
    config.deliver = match values.is_given(&table::DELIVER) {
        true => ports(values, &table::DELIVER),
        false => config.ports.clone(),
    };
    // Peers recognise this host by the address that it connects from.
    let local = listen.first().filter(|address| !address.ip().is_unspecified());
    config.local = local.map(|address| SocketAddr::new(address.ip(), 0));
    config.own = listen.to_vec();
    let admin = values.text(&table::ADMIN_LISTEN);
    let admin = admin.and_then(|text| text.parse::<SocketAddr>().ok());
    config.own.extend(admin);
    forget_own_addresses(&mut config);
    config.tls = tls(values)?;
    reconfigure(&mut config, values);
    Ok(config)
}

fn alias_config(values: &Values) -> anyhow::Result<AgentConfig> {
    let Some(alias) = values.text(&table::ALIAS).and_then(peer::alias) else {
        let why = "--alias is missing; give this host a loopback address, such as 127.1.0.1";
        return Err(WrongSettings(why.into()).into());
    };
    let words = values.list(&table::PEERS);
    let peers = words.iter().map(|word| {
        let Some((alias, at)) = peer::split(word) else {
            let why = format!("--peer {word}: with `mode alias`, a peer is ALIAS=HOST:PORT");
            return Err(WrongSettings(why).into());
        };
        let at = address::host_and_port::<{ table::AGENT_PORT }>(at);
        let (host, port) = at.map_err(|why| anyhow::anyhow!("--peer {word}: {why}"))?;
        Ok((alias, (host.to_owned(), port)))
    });
    let (aliases, at): (Vec<_>, Vec<_>) =
        peers.collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    let found = address::resolve_all(at.clone());
    let peers = words.iter().zip(aliases).zip(at.into_iter().zip(found));
    let peers = peers.map(|((word, alias), ((host, port), found))| {
        // A certificate cannot have the name of an address with an interface (`fe80::1%eth0`). Such
        // a peer has only the name that `AgentPeer::new` gives it.
        let Ok(name @ ServerName::DnsName(_)) = ServerName::try_from(host.clone()) else {
            let address = found.map_err(|why| anyhow::anyhow!("--peer {word}: {why}"))?;
            return Ok(AgentPeer::new(alias, address));
        };
        if let Err(why) = &found {
            tracing::warn!("--peer {word}: {why}; {LOOKING_AGAIN}");
        }
        Ok(AgentPeer { alias, address: PeerAddress::Name { host, port, found: found.ok() }, name })
    });
    let mut config = AgentConfig::new(alias);
    config.peers = peers.collect::<anyhow::Result<_>>()?;
    config.ports = ports(values, &table::PORTS);
    Ok(config)
}

/// Forgets addresses of this host that were found for the names of peers.
fn forget_own_addresses(config: &mut AgentConfig) {
    let mut peers = std::mem::take(&mut config.peers);
    for AgentPeer { alias, address, .. } in &mut peers {
        if let PeerAddress::Name { host, found, .. } = address
            && let Some(Err(why)) = found.map(|found| config.check_found(found.ip()))
        {
            tracing::warn!("--peer {alias}={host}: {why}; {LOOKING_AGAIN}");
            *found = None;
        }
    }
    config.peers = peers;
}

/// Reads the certificates and the key, if the settings name them.
fn tls(values: &Values) -> anyhow::Result<Option<AgentTls>> {
    let files = [&table::AGENT_CERTIFICATE, &table::AGENT_KEY, &table::AGENT_CA];
    let [Some(certificate), Some(key), Some(ca)] = files.map(|file| values.text(file)) else {
        return match files.iter().find(|file| values.text(file).is_none()) {
            Some(missing) if files.iter().any(|file| values.text(file).is_some()) => {
                let why = format!(
                    "--{} is missing; TLS between agents needs --tls-cert-file, --tls-key-file \
                     and --tls-ca-cert-file",
                    missing.name
                );
                Err(WrongSettings(why).into())
            }
            _ => Ok(None),
        };
    };
    let provider = Arc::new(ring::default_provider());
    let tls = AgentTls::read(certificate.as_ref(), key.as_ref(), ca.as_ref(), &provider);
    Ok(Some(tls.map_err(|error| WrongSettings(format!("cannot use TLS: {error}")))?))
}

/// Returns the ports that a setting names.
fn ports(values: &Values, setting: &Setting) -> PortSet {
    PortSet::parse(values.list(setting)).unwrap_or_default()
}

/// Applies the settings that can change while the agent runs.
pub(super) fn reconfigure(config: &mut AgentConfig, values: &Values) {
    config.protected_mode = values.switch(&table::AGENT_PROTECTED_MODE);
    config.drain_timeout = values.time(&table::AGENT_DRAIN);
    config.direct = match values.text(&table::DIRECT) {
        Some(given) => given == "allow",
        None => config.transparent.is_some() && values.policy() != Ok(Policy::Require),
    };
}

/// Without TLS, refuses addresses other than loopback, unless the user has accepted the risk.
fn check_authentication(
    values: &Values,
    config: &AgentConfig,
    listen: &[SocketAddr],
) -> Result<(), WrongSettings> {
    if config.tls.is_some() {
        if values.switch(&table::ALLOW_UNAUTHENTICATED_PEERS) {
            let why = "allow-unauthenticated-peers yes contradicts tls-cert-file, with which all \
                       peers are authenticated; remove one of the two settings";
            return Err(WrongSettings(why.into()));
        }
        return Ok(());
    }
    // A name without an address may stand for any.
    let is_outside = |at: &PeerAddress| at.known().is_none_or(|at| !at.ip().is_loopback());
    let listen = listen.iter().copied().map(PeerAddress::from);
    let peers = config.peers.iter().map(|peer| peer.address.clone());
    let Some(address) = listen.chain(peers).find(is_outside) else { return Ok(()) };
    if !values.switch(&table::ALLOW_UNAUTHENTICATED_PEERS) {
        return Err(WrongSettings(format!(
            "{address} is not a loopback address, and there is no TLS: any host that takes the \
             address of a peer can reach the engines' ports. Set tls-cert-file, tls-key-file and \
             tls-ca-cert-file or, if only trusted hosts are in this network, start with \
             --allow-unauthenticated-peers yes"
        )));
    }
    Ok(())
}
