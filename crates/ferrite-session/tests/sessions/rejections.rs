//! Tests that rejected clients can read the reason over RDMA, as they can over TCP.

use std::time::Duration;

use ferrite_fabric::ListenOptions;
use ferrite_proto::Role;
use ferrite_session::{
    Connector, EngineAddress, GatewayConfig, Session, SessionTransport, ValkeyConfig, ValkeyStream,
};
use ferrite_testkit::Engine;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::gateway::{TestServer, read_until_end, unprotected};
use super::{Harness, any_port};

/// Opens a session of Ferrite's own protocol over RDMA.
async fn ferrite_session(server: &TestServer) -> Session {
    let connector = Connector::new(&server.client).local(any_port(1));
    let session = connector.connect(server.address).await.expect("connect");
    assert_eq!(session.transport(), SessionTransport::FerriteRdma);
    session
}

/// Returns what rejected clients read. A client of each of the two protocols connects, and both
/// must read the same.
async fn rejection(server: &TestServer, harness: &Harness) -> String {
    let valkey = read_until_end(server.connect(harness).await).await;
    assert_eq!(read_until_end(ferrite_session(server).await).await, valkey);
    valkey
}

/// A client that writes after its rejection can still read the reason, as it can over TCP.
pub(crate) async fn late_writers_read_why_they_were_rejected(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server =
        TestServer::start(&harness, GatewayConfig { protected_mode: true, ..unprotected(&redis) });
    assert!(write_late(ferrite_session(&server).await).await.starts_with("-DENIED"));

    let connector = Connector::new(&server.client).local(any_port(1));
    let options = ListenOptions::new().foreign_peers_only();
    let valkey = harness.fabric(0).listen_with(any_port(0), &options).expect("listen");
    let at = valkey.local_addr();
    let rejecting = tokio::spawn(async move {
        let foreign_peers = valkey.foreign_peers();
        let request = foreign_peers.next().await.expect("a connection request");
        let raw = foreign_peers.accept(request).await.expect("accept");
        let stream = ValkeyStream::new(raw, Role::Server, &ValkeyConfig::default());
        let mut client = stream.expect("register a window");
        client.write_all(b"-DENIED by a test\r\n").await.expect("write");
        client.shutdown().await.expect("shut down");
    });
    let session = connector.connect(at).await.expect("connect");
    assert_eq!(session.transport(), SessionTransport::ValkeyRdma);
    assert_eq!(write_late(session).await, "-DENIED by a test\r\n");
    rejecting.await.expect("the server has rejected the client");
    server.end().await;
}

/// The engine rejects a value of more than 512 MB by its header, while the client still writes it.
/// The reason arrives over RDMA as it does over TCP.
pub(crate) async fn writers_of_too_large_values_read_why_they_were_rejected(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let expected = "-ERR Protocol error: invalid bulk length\r\n";
    assert_eq!(write_too_much(ferrite_session(&server).await).await, expected);
    assert_eq!(write_too_much(server.connect(&harness).await).await, expected);
    server.end().await;
}

/// Begins to write a value of more than 512 MB, and returns what the client then reads.
async fn write_too_much(stream: impl AsyncRead + AsyncWrite + Unpin) -> String {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let writing = async {
        let header = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870913\r\n";
        writer.write_all(header).await?;
        for _ in 0..64 {
            writer.write_all(&[b'x'; 64 << 10]).await?; // fails once the server has closed
        }
        Ok::<_, std::io::Error>(())
    };
    let mut received = Vec::new();
    let (_, read) = tokio::join!(writing, reader.read_to_end(&mut received));
    read.expect("the end of the stream");
    String::from_utf8(received).expect("text")
}

/// Writes when the server has probably closed, and returns what the client then reads.
async fn write_late(mut session: Session) -> String {
    tokio::time::sleep(Duration::from_millis(300)).await;
    session.write_all(b"*1\r\n$4\r\nPING\r\n").await.expect("the first write succeeds");
    let mut received = Vec::new();
    session.read_to_end(&mut received).await.expect("the end of the stream");
    session.write_all(b"more").await.expect_err("the server has closed");
    String::from_utf8(received).expect("text")
}

/// The gateway rejects clients beyond `max_clients`, and in protected mode if the engine requires
/// no password. The clients receive the reason.
pub(crate) async fn tells_rejected_clients_why(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server =
        TestServer::start(&harness, GatewayConfig { protected_mode: true, ..unprotected(&redis) });
    let error = rejection(&server, &harness).await;
    assert!(error.starts_with("-DENIED") && error.ends_with("\r\n"), "{error}");
    server.end().await;

    let with_password = Engine::redis(&["--requirepass", "secret"]);
    let server = TestServer::start(
        &harness,
        GatewayConfig { protected_mode: true, ..unprotected(&with_password) },
    );
    let mut stream = server.connect(&harness).await;
    stream.write_all(b"GET a\r\nAUTH secret\r\nPING\r\n").await.expect("write");
    let expected = b"-NOAUTH Authentication required.\r\n+OK\r\n+PONG\r\n";
    let mut reply = vec![0; expected.len()];
    stream.read_exact(&mut reply).await.expect("read the reply");
    assert_eq!(reply, expected);
    drop(stream);
    server.end().await;

    let server =
        TestServer::start(&harness, GatewayConfig { max_clients: 1, ..unprotected(&redis) });
    let mut first = server.connect(&harness).await;
    first.write_all(b"PING\r\n").await.expect("write");
    first.read_exact(&mut [0; 7]).await.expect("read the reply");
    assert_eq!(rejection(&server, &harness).await, "-ERR max number of clients reached\r\n");
    assert_eq!(server.gateway.stats().refused, 2);
    drop(first);
    server.end().await;
}

/// No engine runs behind the gateway. In protected mode, the gateway asks the engine whether it
/// needs a password.
pub(crate) async fn reports_a_missing_engine(harness: Harness) {
    for protected_mode in [false, true] {
        let engine = EngineAddress::Unix("/nonexistent/engine.sock".into());
        let config = GatewayConfig { protected_mode, ..GatewayConfig::new(engine) };
        let server = TestServer::start(&harness, config);
        let error = rejection(&server, &harness).await;
        assert_eq!(error, "-ERR Ferrite gateway: cannot connect to the engine\r\n");
        assert_eq!(server.gateway.stats().engine_failures, 2);
        server.end().await;
    }
}

/// In protected mode the gateway asks the engine whether it needs a password. If the engine replies
/// with another error, the client gets that error, without the advice to turn protected mode off.
pub(crate) async fn passes_the_engines_rejection_on(harness: Harness) {
    let protected = |redis: &Engine| GatewayConfig { protected_mode: true, ..unprotected(redis) };
    let full = Engine::redis(&["--requirepass", "secret", "--maxclients", "2"]);
    let server = TestServer::start(&harness, protected(&full));
    let mut clients = Vec::new();
    loop {
        let mut client = UnixStream::connect(full.socket()).await.expect("connect");
        let mut reply = [0; 5];
        let _ = client.write_all(b"PING\r\n").await; // a full engine has closed it
        client.read_exact(&mut reply).await.expect("read the reply");
        if &reply == b"-ERR " {
            break;
        }
        clients.push(client);
    }
    assert_eq!(rejection(&server, &harness).await, "-ERR max number of clients reached\r\n");
    assert_eq!(server.gateway.stats().engine_failures, 2);
    server.end().await;

    let renamed = ["--rename-command", "PING", "", "--requirepass", "secret"];
    let redis = Engine::redis(&renamed);
    let server = TestServer::start(&harness, protected(&redis));
    let mut stream = server.connect(&harness).await;
    stream.write_all(b"AUTH secret\r\n").await.expect("write");
    let mut reply = [0; 5];
    stream.read_exact(&mut reply).await.expect("read the reply");
    assert_eq!(&reply, b"+OK\r\n");
    drop(stream);
    server.end().await;

    let redis = Engine::redis(&renamed[..3]);
    let server = TestServer::start(&harness, protected(&redis));
    let error = rejection(&server, &harness).await;
    assert!(error.starts_with("-DENIED"), "{error}");
    server.end().await;
}
