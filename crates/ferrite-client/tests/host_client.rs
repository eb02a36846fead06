//! Tests of the client with a real `redis-server` on this host over TCP, with or without RDMA:
//! URLs, host names, several servers, timeouts, TLS, and programs without tokio.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_client::redis::{self, AsyncCommands as _, PushKind};
use ferrite_client::{Client, ClientBuilder, Connection, SessionTransport, rustls};
use ferrite_testkit::{Engine, TIMEOUT, TempDir, free_port, pem};

/// Starts a server with a TCP port, and returns both.
fn start(options: &[&str]) -> (Engine, u16) {
    let port = free_port();
    let listen = ["--bind", "127.0.0.1", "--port", &port.to_string()];
    (Engine::redis(&[&listen[..], options].concat()), port)
}

async fn connect(url: &str) -> Connection {
    let client = Client::open(url).unwrap_or_else(|error| panic!("{url}: {error}"));
    client.connect().await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

async fn client_info(connection: &mut Connection) -> String {
    redis::cmd("CLIENT").arg("INFO").query_async(connection).await.expect("CLIENT INFO")
}

#[tokio::test]
async fn opens_urls_with_login_database_and_host_name() {
    let (_redis, port) = start(&["--user", "me", "on", ">se:cret", "~*", "+@all"]);
    let url = format!("redis://me:se%3acret@localhost:{port}/5?protocol=3&rdma=forbid");
    let mut connection = connect(&url).await;
    let info = client_info(&mut connection).await;
    for part in [" db=5 ", " user=me ", " resp=3"] {
        assert!(info.contains(part), "{part}: {info}");
    }
    let wrong = Client::open(&format!("redis://me:wrong@localhost:{port}?rdma=forbid"));
    let error = wrong.expect("valid URL").connect().await.expect_err("wrong password");
    assert!(!error.is_io_error() && !error.to_string().contains("wrong@"), "{error}");
    let plain = connect(&format!("localhost:{port}")).await; // without a scheme
    assert_eq!(plain.transport_info().transport, SessionTransport::Tcp);
}

/// Servers that cannot be resolved, refuse, or accept and never answer are passed over.
#[tokio::test]
async fn tries_several_servers_in_order() {
    let (_first, first) = start(&[]);
    let (mut second_engine, second) = start(&[]);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    let silent = silent.local_addr().expect("an address");
    let bad = format!("no-such-host.invalid:1,127.0.0.1:1,{silent}");
    let url = format!("redis://{bad},127.0.0.1:{second},127.0.0.1:{first}/1?rdma=forbid");
    let builder = ClientBuilder::open(&url).expect("valid URL");
    let client = builder.connect_timeout(Duration::from_millis(500)).build();
    let mut connection = client.connect().await.expect("connect");
    assert!(client_info(&mut connection).await.contains(&format!(":{second} ")), "in order");
    second_engine.kill();
    let begun = Instant::now();
    while !matches!(client_info_or_error(&mut connection).await, Ok(info) if
        info.contains(&format!(":{first} ")))
    {
        assert!(begun.elapsed() < TIMEOUT, "the next server takes over");
    }
    let nobody = Client::open("redis://no-such-host.invalid,127.0.0.1:1?rdma=forbid");
    let error = nobody.expect("valid URL").connect().await.expect_err("nobody listens");
    let error = error.to_string();
    for part in ["cannot resolve no-such-host.invalid: ", "127.0.0.1:1: ", "refused"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

async fn client_info_or_error(connection: &mut Connection) -> redis::RedisResult<String> {
    redis::cmd("CLIENT").arg("INFO").query_async(connection).await
}

/// redis-rs's own limit for a reply is 500 ms.
#[tokio::test]
async fn waits_long_enough_for_large_values() {
    let (_redis, port) = start(&["--enable-debug-command", "yes"]);
    let mut connection = connect(&format!("redis://127.0.0.1:{port}?rdma=forbid")).await;
    redis::cmd("DEBUG").arg(&["SLEEP", "1.2"]).exec_async(&mut connection).await.expect("1.2 s");
    let value: Vec<u8> = (0..64 << 20_u32).map(|at| (at % 251) as u8).collect();
    let () = connection.set("large", &value).await.expect("SET");
    assert!(connection.get::<_, Vec<u8>>("large").await.expect("GET") == value, "bytes differ");
    let builder = ClientBuilder::open(&format!("redis://127.0.0.1:{port}?rdma=forbid"));
    let builder = builder.expect("valid URL").response_timeout(Some(Duration::from_millis(100)));
    let mut hasty = builder.build().connect().await.expect("connect");
    let slept = redis::cmd("DEBUG").arg(&["SLEEP", "0.5"]).exec_async(&mut hasty).await;
    assert!(slept.expect_err("0.5 s").is_timeout());
}

#[test]
fn returns_an_error_outside_of_tokio() {
    let error = Client::open("redis://127.0.0.1:1").expect_err("no runtime").to_string();
    assert!(error.contains("no tokio runtime") && error.contains("#[tokio::main]"), "{error}");
    let runtime = tokio::runtime::Runtime::new().expect("build the runtime");
    let client = runtime.block_on(async { Client::open("redis://127.0.0.1:1") });
    let client = client.expect("inside the runtime");
    let mut connecting = std::pin::pin!(client.connect());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match connecting.as_mut().poll(&mut context) {
        std::task::Poll::Ready(Err(error)) => {
            assert!(error.to_string().contains("no tokio runtime"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn explains_invalid_urls() {
    for (url, why) in [
        ("http://host", "expected redis://"),
        ("redis://", "no host is given"),
        ("rediss://host?rdma=require", "TLS, which is TCP only"),
        ("redis://me:secret@host?db=1", "unknown parameter \"db\""),
    ] {
        let error = Client::open(url).expect_err(url).to_string();
        assert!(error.contains(why) && !error.contains("secret"), "{url}: {error}");
    }
}

#[tokio::test]
async fn rediss_checks_the_certificate() {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]);
    let certified = certified.expect("create a certificate");
    let files = TempDir::new("client-rediss");
    let cert = files.file("cert", pem("CERTIFICATE", certified.cert.der()));
    let key = files.file("key", pem("PRIVATE KEY", &certified.signing_key.serialize_der()));
    let [cert_path, key] = [&cert, &key].map(|file| file.display().to_string());
    let port = free_port().to_string();
    let listen = ["--bind", "127.0.0.1", "--tls-port", &port, "--tls-auth-clients", "no"];
    let certificate = ["--tls-cert-file", &cert_path, "--tls-key-file", &key];
    let _redis = Engine::redis(&[&listen[..], &certificate[..]].concat());
    let url = format!("rediss://localhost:{port}/2");
    let error = Client::open(&url).expect("valid URL").connect().await;
    let error = error.expect_err("the system does not trust the certificate").to_string();
    assert!(error.contains("as localhost: invalid peer certificate"), "{error}");
    let trusted = ferrite_client::TlsFiles { ca_certificates: Some(cert), ..Default::default() };
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = trusted.client_config(provider).expect("read the certificate");
    let name = "localhost".try_into().expect("valid name");
    let client = ClientBuilder::open(&url).expect("valid URL").tls(config.into(), name).build();
    let mut connection = client.connect().await.expect("connect");
    assert_eq!(connection.transport_info().transport, SessionTransport::Tls);
    assert!(connection.transport_info().fallback.is_none(), "rediss:// asks for no RDMA");
    assert!(client_info(&mut connection).await.contains(" db=2 "));
}

/// The server is away for a while: the subscriber comes back by itself.
#[tokio::test]
async fn restores_subscriptions_after_a_restart() {
    let (mut redis, port) = start(&[]);
    let at = SocketAddr::from(([127, 0, 0, 1], port));
    let (pushes, mut pushed) = tokio::sync::mpsc::unbounded_channel();
    let url = format!("redis://{at}?rdma=forbid");
    let client = ClientBuilder::open(&url).expect("valid URL").push_sender(pushes).build();
    let mut subscriber = client.connect().await.expect("connect");
    redis::cmd("SUBSCRIBE").arg("news").exec_async(&mut subscriber).await.expect("SUBSCRIBE");
    redis.kill();
    while pushed.recv().await.expect("a push").kind != PushKind::Disconnection {}
    redis.restart();
    while pushed.recv().await.expect("a push").kind != PushKind::Subscribe {}
    let mut publisher = connect(&url).await;
    let receivers: i64 = publisher.publish("news", "hello").await.expect("PUBLISH");
    assert_eq!(receivers, 1);
    while pushed.recv().await.expect("a push").kind != PushKind::Message {}
}
