//! The suite of links over TCP with TLS, on this host's own network.
#![cfg(not(miri))] // which has no cryptography

#[expect(dead_code, reason = "what is about RDMA alone")]
mod links;

use std::sync::Arc;

use ferrite_fabric::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use ferrite_fabric::rustls::{ClientConfig, RootCertStore, ServerConfig};
use links::{Fixture, Host, run_suite};

/// Two hosts that trust one certificate, which is for both of their addresses.
fn certified(hosts: &[Host; 2]) -> (Arc<ClientConfig>, Arc<ServerConfig>) {
    let names: Vec<String> = hosts.iter().map(|host| host.ip.to_string()).collect();
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(names).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).expect("a root");
    let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(signing_key.serialize_der()));
    let server = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key);
    (Arc::new(client), Arc::new(server.expect("a server")))
}

fn run(test: impl FnOnce(&Fixture)) {
    let hosts = [Host::new("lo", "127.0.0.1"), Host::new("lo", "127.0.0.2")];
    test(&Fixture { verbs: None, tls: Some(certified(&hosts)), hosts, slower: 2, storm_part: 2 });
}

run_suite!(over any transport: crate::run);
