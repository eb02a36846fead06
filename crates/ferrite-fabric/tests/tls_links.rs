//! The link test suite over TCP with TLS, on this host's own network, without the tests of RDMA
//! itself.
#![cfg(not(miri))] // Miri cannot run the cryptography

#[expect(dead_code, reason = "helpers of tests of RDMA itself")]
mod links;

use std::sync::Arc;

use ferrite_fabric::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use ferrite_fabric::rustls::{ClientConfig, RootCertStore, ServerConfig};
use links::{Fixture, Host, run_suite};

/// Returns configurations that trust one certificate, which is valid for the addresses of both
/// hosts.
fn certified(hosts: &[Host; 2]) -> (Arc<ClientConfig>, Arc<ServerConfig>) {
    let names: Vec<String> = hosts.iter().map(|host| host.ip.to_string()).collect();
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(names).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).expect("root certificate");
    let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(signing_key.serialize_der()));
    let server = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key);
    (Arc::new(client), Arc::new(server.expect("server configuration")))
}

fn run(test: impl FnOnce(&Fixture)) {
    let hosts = [Host::new("lo", "127.0.0.1"), Host::new("lo", "127.0.0.2")];
    test(&Fixture {
        verbs: None,
        tls: Some(certified(&hosts)),
        hosts,
        work_divisor: 2,
        storm_divisor: 2,
    });
}

run_suite!(over any transport: crate::run);
