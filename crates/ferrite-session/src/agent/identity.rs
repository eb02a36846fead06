//! Mutual TLS between agents: what an agent presents, and which peer a certificate belongs to.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;

use ferrite_fabric::rustls::client::{Resumption, verify_server_name};
use ferrite_fabric::rustls::crypto::CryptoProvider;
use ferrite_fabric::rustls::pki_types::{CertificateDer, ServerName};
use ferrite_fabric::rustls::server::{NoServerSessionStorage, ParsedCertificate};
use ferrite_fabric::rustls::{CertificateError, ClientConfig, Error as TlsError, ServerConfig};
use ferrite_fabric::{ConnectMode, ConnectOptions, ListenOptions};

use crate::tls::TlsFiles;

/// The certificate of this agent, its key, and the CA of all agents.
#[derive(Debug, Clone)]
pub struct AgentTls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl AgentTls {
    /// Reads the files, all in PEM: the certificate of this agent with its chain, its private key,
    /// and the certificate of the CA that has issued the certificates of all agents. The caller
    /// chooses the cryptography.
    ///
    /// # Errors
    /// Returns an error that names the file that cannot be read or used.
    pub fn read(
        certificate: &Path,
        key: &Path,
        ca: &Path,
        provider: &Arc<CryptoProvider>,
    ) -> io::Result<Self> {
        let files = TlsFiles {
            ca_certificates: Some(ca.into()),
            client: Some((certificate.into(), key.into())),
            ..TlsFiles::default()
        };
        let mut client = files.client_config(Arc::clone(provider))?;
        let mut server = files.server_config(Arc::clone(provider))?;
        // Without resumption, each link verifies the certificates. This costs little, because there
        // are few links.
        client.resumption = Resumption::disabled();
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    /// Adds TLS to the options of a link to the peer with this name. The link begins over TCP, so
    /// that both sides set up the queue pair within TLS.
    pub fn connect(&self, options: ConnectOptions, name: ServerName<'static>) -> ConnectOptions {
        options.tls(Arc::clone(&self.client), name).mode(ConnectMode::TcpFirst)
    }

    /// Adds TLS to the options of a listener for links of peers.
    pub fn listen(&self, options: ListenOptions) -> ListenOptions {
        options.tls(Arc::clone(&self.server)).rdma_by_tcp_first()
    }
}

/// How many names of a certificate a message has. A certificate may have thousands.
const NAMES_SHOWN: usize = 8;

/// Finds the peer that a certificate belongs to: the peer whose name the certificate has. If the
/// certificate has the names of several peers, the address from which the link comes decides.
///
/// # Errors
/// Returns why the certificate belongs to no peer.
pub(super) fn find<'a, T>(
    certificate: Option<&CertificateDer<'_>>,
    from: Option<IpAddr>,
    peers: impl Iterator<Item = (&'a ServerName<'static>, Option<IpAddr>, T)>,
) -> Result<T, String> {
    let unusable = |error: TlsError| format!("the certificate cannot be used: {error}");
    let certificate = certificate.ok_or("there is no certificate")?;
    let certificate = ParsedCertificate::try_from(certificate).map_err(unusable)?;
    let is_named = |name: &ServerName<'_>| verify_server_name(&certificate, name).is_ok();
    let named: Vec<_> = peers.filter(|(name, ..)| is_named(name)).collect();
    let count = named.len();
    let peer = named.into_iter().find(|(_, ip, _)| count == 1 || (ip.is_some() && *ip == from));
    match peer {
        Some((.., peer)) => Ok(peer),
        None if count > 0 => Err(format!(
            "the certificate has the names of {count} peers, and the link comes from the address \
             of none of them; give each host a certificate of its own"
        )),
        None => {
            let mut names = names_of(&certificate);
            if names.len() > NAMES_SHOWN {
                names.truncate(NAMES_SHOWN);
                names.push("…".into());
            }
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            // The names come last: the refusal that the other agent gets has room for a few only.
            Err(format!(
                "the certificate has the name of no peer (its names: {names}); subjectAltName must \
                 have the address or the name of the host that the setting `peers` has"
            ))
        }
    }
}

/// Returns the names of a certificate, for messages.
fn names_of(certificate: &ParsedCertificate<'_>) -> Vec<String> {
    let no_host = ServerName::from(IpAddr::from(Ipv4Addr::UNSPECIFIED));
    match verify_server_name(certificate, &no_host) {
        Err(TlsError::InvalidCertificate(CertificateError::NotValidForNameContext {
            presented,
            ..
        })) => presented,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(names: &[&str]) -> CertificateDer<'static> {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let issued = rcgen::generate_simple_self_signed(names).expect("a certificate");
        issued.cert.der().clone()
    }

    fn found(certificate: Option<&CertificateDer<'_>>, from: &str) -> Result<usize, String> {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let name = |text: &str| ServerName::try_from(text.to_owned()).expect("a name");
        let peers = [
            ("10.0.0.2", "10.0.0.2"),
            ("c.hosts.example", "10.0.0.3"),
            ("d.hosts.example", "10.0.0.4"),
        ];
        let names = peers.map(|(it, at)| (name(it), ip(at)));
        let peers = names.iter().zip(2..).map(|((name, ip), host)| (name, Some(*ip), host));
        find(certificate, Some(ip(from)), peers)
    }

    #[test]
    fn certificate_belongs_to_the_peer_whose_name_it_has() {
        let [two, three, other] =
            [&["10.0.0.2"][..], &["x.hosts.example", "c.hosts.example"], &["10.0.0.9"]]
                .map(certificate);
        assert_eq!(found(Some(&two), "10.0.0.2"), Ok(2));
        assert_eq!(found(Some(&three), "10.0.0.3"), Ok(3));
        assert_eq!(found(Some(&three), "192.0.2.1"), Ok(3), "the certificate decides");
        assert_eq!(found(Some(&three), "10.0.0.2"), Ok(3), "and not the address");
        // The peer at 10.0.0.3 has a name, so a certificate with its address does not belong to it.
        assert!(found(Some(&certificate(&["10.0.0.3"])), "10.0.0.3").is_err());
        let error = found(Some(&other), "10.0.0.2").expect_err("another host");
        assert!(error.contains("10.0.0.9") && error.contains("name of no peer"), "{error}");
        let many: Vec<_> = (1..=100).map(|number| format!("host{number}.example")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let error = found(Some(&certificate(&many)), "10.0.0.2").expect_err("another host");
        let cause =
            "the certificate has the name of no peer (its names: DnsName(\"host1.example\")";
        assert!(error.starts_with(cause) && !error.contains("host9."), "{error}");
        let error = find::<()>(Some(&other), None, std::iter::empty()).expect_err("no peers");
        assert!(error.contains("10.0.0.9"), "{error}");
        let error = found(None, "10.0.0.2").expect_err("no certificate");
        assert!(error.contains("no certificate"), "{error}");
    }

    #[test]
    fn address_decides_between_the_peers_of_a_shared_certificate() {
        for names in [&["*.hosts.example"][..], &["c.hosts.example", "d.hosts.example"]] {
            let shared = certificate(names);
            assert_eq!(found(Some(&shared), "10.0.0.3"), Ok(3));
            assert_eq!(found(Some(&shared), "10.0.0.4"), Ok(4));
            let error = found(Some(&shared), "10.0.0.2").expect_err("an address of neither peer");
            assert!(error.contains("the names of 2 peers"), "{error}");
        }
    }
}
