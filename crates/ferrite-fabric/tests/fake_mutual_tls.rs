//! Listeners with mutual TLS whose links begin over TCP, on the fake provider and this host's TCP:
//! each queue pair belongs to an authenticated peer.
#![cfg(not(miri))] // Miri cannot run the cryptography

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use ferrite_fabric::rustls::server::WebPkiClientVerifier;
use ferrite_fabric::rustls::{ClientConfig, RootCertStore, ServerConfig};
use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, Error, ErrorKind, Fabric, Link, ListenOptions, Listener,
    Rdma, Transport,
};
use ferrite_testkit::ca::{Ca, Issued};
use ferrite_testkit::wait::until;
use ferrite_verbs::fake::{DeviceSpec, World};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
const OURS: &str = "127.0.0.1";
const THEIRS: &str = "127.0.0.2";

fn at(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), 0)
}

fn roots(ca: &Ca) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(ca.certificate())).expect("root certificate");
    roots
}

fn own(issued: &Issued) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let key = PrivateKeyDer::try_from(issued.key.clone()).expect("a key");
    (vec![CertificateDer::from(issued.certificate.clone())], key)
}

/// Returns a client that trusts an authority and, if there is one, presents a certificate.
fn client(ca: &Ca, issued: Option<&Issued>) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder().with_root_certificates(roots(ca));
    Arc::new(match issued.map(own) {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).expect("its own key"),
        None => builder.with_no_client_auth(),
    })
}

fn server(ca: &Ca, issued: &Issued) -> Arc<ServerConfig> {
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots(ca))).build().expect("a verifier");
    let (chain, key) = own(issued);
    let builder = ServerConfig::builder().with_client_cert_verifier(verifier);
    Arc::new(builder.with_single_cert(chain, key).expect("its own key"))
}

/// Two fabrics on devices of their own. The second listens.
struct Pair {
    _world: World,
    fabrics: [Fabric; 2],
    listener: Listener,
    ca: Ca,
}

impl Pair {
    fn new(rdma: Rdma) -> Self {
        let (world, ca) = (World::new(), Ca::new());
        for (device, ip) in [("fake1", OURS), ("fake2", THEIRS)] {
            world.add_device(DeviceSpec::new(device, at(ip).ip()));
        }
        let verbs = world.verbs();
        let fabrics = ["fake1", "fake2"].map(|device| {
            let builder = Fabric::builder(&verbs).device(device).config(Config::default());
            let fabric = builder.rdma(rdma).build().expect("a fabric");
            fabric.spawn_thread().expect("a thread");
            fabric
        });
        let options = ListenOptions::new().tls(server(&ca, &ca.issue(&[THEIRS])));
        let listener = fabrics[1].listen_with(at(THEIRS), &options.rdma_by_tcp_first());
        Self { _world: world, fabrics, listener: listener.expect("listen"), ca }
    }

    fn options(tls: Option<Arc<ClientConfig>>, name: &str) -> ConnectOptions {
        let options = ConnectOptions::new().local(at(OURS)).mode(ConnectMode::TcpFirst);
        let name = || ServerName::try_from(name.to_owned()).expect("a name");
        match tls {
            Some(tls) => options.tls(tls, name()),
            None => options,
        }
    }

    fn connect(&self, options: &ConnectOptions) -> Result<Link, Error> {
        let connecting = self.fabrics[0].connect_with(self.listener.local_addr(), options);
        self.fabrics[0].block_on(connecting)
    }

    fn accept(&mut self) -> Link {
        self.fabrics[1].block_on(self.listener.accept()).expect("a link")
    }

    #[track_caller]
    fn assert_fails(&self, options: &ConnectOptions, kind: ErrorKind, expected: &str) {
        let error = self.connect(options).expect_err(expected);
        assert!(error.kind() == kind && error.to_string().contains(expected), "{error:?}");
    }
}

#[test]
fn authenticated_link_upgrades_to_rdma_and_knows_its_peer() {
    for rdma in [Rdma::Prefer, Rdma::Require] {
        let mut pair = Pair::new(rdma);
        let ours = pair.ca.issue(&[OURS, "host1.example"]);
        let tls = client(&pair.ca, Some(&ours));
        let link = pair.connect(&Pair::options(Some(tls), THEIRS)).expect("a link");
        let other = pair.accept();
        assert_eq!(link.transport(), Transport::Rdma);
        until(TEST_TIMEOUT, "the other end", || other.transport() == Transport::Rdma);
        assert_eq!(&*other.peer_certificates()[0], &ours.certificate[..]);
        assert_eq!(link.peer_certificates().len(), 1);
        link.post_bytes(0, b"authenticated").expect("room in the queue");
        let message = pair.fabrics[1].block_on(other.recv()).expect("a message");
        assert_eq!(message.to_vec(), b"authenticated");
    }
}

/// A request by RDMA CM would bypass TLS.
#[test]
fn requests_by_rdma_cm_are_refused_and_counted() {
    for rdma in [Rdma::Prefer, Rdma::Require] {
        let mut pair = Pair::new(rdma);
        let tls = client(&pair.ca, Some(&pair.ca.issue(&[OURS])));
        let options = Pair::options(Some(tls), THEIRS).mode(ConnectMode::Cm).rdma(Rdma::Require);
        pair.assert_fails(&options, ErrorKind::Refused, "only for links that begin over TCP");
        assert_eq!(pair.fabrics[1].stats().cm_requests_refused, 1);
        assert_eq!(pair.fabrics[1].stats().links, 0);
        assert!(pair.listener.try_accept().expect("it listens").is_none());
    }
}

#[test]
fn wrong_and_missing_certificates_are_refused_explained_and_counted() {
    let mut pair = Pair::new(Rdma::Prefer);
    let other_ca = Ca::new();
    let ca = &pair.ca;
    let [no_certificate, other_ca, expired, too_early, unknown_server, other_host] = [
        (client(ca, None), THEIRS),
        (client(ca, Some(&other_ca.issue(&[OURS]))), THEIRS),
        (client(ca, Some(&ca.issue_expired(&[OURS]))), THEIRS),
        (client(ca, Some(&ca.issue_not_valid_yet(&[OURS]))), THEIRS),
        (client(&other_ca, Some(&ca.issue(&[OURS]))), THEIRS),
        (client(ca, Some(&ca.issue(&[OURS]))), "127.0.0.3"),
    ]
    .map(|(tls, name)| Pair::options(Some(tls), name));
    let mut failures = 0;
    for (options, expected) in [
        (no_certificate, "requires a certificate, and this side presents none"),
        (other_ca, "certificates of the same CA"),
        (expired, "has expired, or is not valid yet; renew it"),
        (too_early, "is not valid yet; renew it, or compare the clocks"),
        (unknown_server, "certificates of the same CA"),
        (other_host, "subjectAltName"),
    ] {
        pair.assert_fails(&options, ErrorKind::Protocol, expected);
        failures += 1;
        until(TEST_TIMEOUT, "a failure that is counted", || {
            pair.fabrics[1].stats().tls_failures == failures
        });
    }
    let without_tls = Pair::options(None, THEIRS);
    pair.assert_fails(&without_tls, ErrorKind::Protocol, "requires TLS");
    failures += 1;
    until(TEST_TIMEOUT, "a failure that is counted", || {
        pair.fabrics[1].stats().tls_failures == failures
    });
    assert!(pair.listener.try_accept().expect("it listens").is_none());
    // The listener still accepts a peer with the right certificate.
    let tls = client(&pair.ca, Some(&pair.ca.issue(&[OURS])));
    pair.connect(&Pair::options(Some(tls), THEIRS)).expect("a link");
    let link = pair.accept();
    assert_eq!(pair.fabrics[1].stats().tls_failures, failures);
    drop(link);
}

/// A program that does not speak TLS gets no answer, or only a TLS alert.
#[test]
fn other_protocol_than_tls_ends_at_once() {
    let mut pair = Pair::new(Rdma::Forbid);
    let mut socket = TcpStream::connect(pair.listener.local_addr()).expect("connect");
    socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    socket.write_all(b"PING\r\n").expect("sent");
    let mut heard = Vec::new();
    let _ = socket.read_to_end(&mut heard); // the end, or a reset
    assert!(heard.is_empty() || heard[0] == 21, "{heard:?}");
    until(TEST_TIMEOUT, "a failure", || pair.fabrics[1].stats().tls_failures == 1);
    assert!(pair.listener.try_accept().expect("it listens").is_none());
}
