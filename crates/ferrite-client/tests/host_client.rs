//! Tests of the client over TCP with a real `redis-server` on this host, which needs no RDMA. They
//! cover URLs, host names, several servers, timeouts, TLS, and programs without tokio.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ferrite_client::redis::{self, AsyncCommands as _, PushKind};
use ferrite_client::{Client, ClientBuilder, Connection, SessionTransport, rustls};
use ferrite_testkit::{Engine, TIMEOUT, TempDir, free_port, pem};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Starts a server with a TCP port. Returns the server and the port.
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

/// The client skips servers that cannot be resolved, that refuse, or that accept and never answer.
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

/// redis-rs's own limit for a reply, 500 ms, would be too short.
#[tokio::test]
async fn waits_long_enough_for_large_values() {
    let (_redis, port) = start(&["--enable-debug-command", "yes"]);
    let mut connection = connect(&format!("redis://127.0.0.1:{port}?rdma=forbid")).await;
    redis::cmd("DEBUG").arg(&["SLEEP", "1.2"]).exec_async(&mut connection).await.expect("DEBUG");
    let value: Vec<u8> = (0..64 << 20_u32).map(|at| (at % 251) as u8).collect();
    let () = connection.set("large", &value).await.expect("SET");
    assert!(connection.get::<_, Vec<u8>>("large").await.expect("GET") == value, "bytes differ");
    let builder = ClientBuilder::open(&format!("redis://127.0.0.1:{port}?rdma=forbid"));
    let builder = builder.expect("valid URL").response_timeout(Some(Duration::from_millis(100)));
    let mut hasty = builder.build().connect().await.expect("connect");
    let slept = redis::cmd("DEBUG").arg(&["SLEEP", "0.5"]).exec_async(&mut hasty).await;
    assert!(slept.expect_err("a reply later than the timeout").is_timeout());
}

#[test]
fn returns_an_error_outside_of_tokio() {
    let explains = |error: redis::RedisError| {
        assert_eq!(error.kind(), redis::ErrorKind::InvalidClientConfig);
        let error = error.to_string();
        assert!(error.contains("no tokio runtime") && error.contains("#[tokio::main]"), "{error}");
    };
    let (_redis, port) = start(&[]);
    let url = format!("redis://127.0.0.1:{port}?rdma=forbid");
    explains(Client::open(&url).expect_err("no runtime"));
    explains(ClientBuilder::open(&url).expect_err("no runtime"));
    let runtime = tokio::runtime::Runtime::new().expect("build the runtime");
    let client = runtime.block_on(async { Client::open(&url) }).expect("inside the runtime");
    explains(poll_once(client.connect()).expect_err("no runtime"));
    let mut pool = client.pool(1);
    explains(poll_once(pool.get::<_, Option<String>>("a")).expect_err("no runtime"));
    explains(poll_once(pool.dedicated()).expect_err("no runtime"));
    // These connections were opened inside a runtime.
    let mut connection = runtime.block_on(client.connect()).expect("connect");
    explains(poll_once(connection.get::<_, Option<String>>("a")).expect_err("no runtime"));
    let mut pipeline = redis::pipe();
    let pipeline = pipeline.get("a").query_async::<Vec<Option<String>>>(&mut connection);
    explains(poll_once(pipeline).expect_err("no runtime"));
    let value = runtime.block_on(connection.get::<_, Option<String>>("a"));
    assert_eq!(value.expect("inside the runtime, it still works"), None);
    drop((connection, pool)); // dropping them outside of the runtime works, too
}

/// Runs a future that must be ready at once.
fn poll_once<F: Future>(future: F) -> F::Output {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).as_mut().poll(&mut context) {
        std::task::Poll::Ready(output) => output,
        std::task::Poll::Pending => panic!("the future waits"),
    }
}

#[tokio::test]
async fn explains_invalid_urls() {
    for (url, why) in [
        ("http://host", "expected redis://"),
        ("redis://", "no host is given"),
        ("", "no host is given"),
        ("host:0", "expected a port from 1 to 65535"),
        ("rediss://host?rdma=require", "rediss:// means TLS over TCP"),
        ("redis://me:secret@host?db=1", "unknown parameter \"db\""),
        ("redis://me:sec/ret@host", "write / as %2F"),
        ("me:secret", "expected a port"),
    ] {
        let error = Client::open(url).expect_err(url);
        let shown = format!("{error} {error:?}");
        assert!(error.to_string().contains(why), "{url}: {error}");
        assert!(!shown.contains("secret") && !shown.contains("ret@"), "{url}: {shown}");
    }
}

#[tokio::test]
async fn never_shows_the_password() {
    let (_redis, port) = start(&["--user", "me", "on", ">secret", "~*", "+@all"]);
    let right = format!("redis://me:secret@127.0.0.1:{port}?rdma=forbid");
    let wrong = format!("redis://me:other-secret@127.0.0.1:{port}?rdma=forbid");
    let nobody = "redis://me:secret@127.0.0.1:1,no-such-host.invalid?rdma=forbid";
    let mut shown = String::new();
    for url in [&wrong, nobody] {
        let client = Client::open(url).expect("valid URL");
        let error = client.connect().await.expect_err(url);
        shown += &format!("{error} {error:?} {:?}", error.detail());
    }
    let builder = ClientBuilder::open(&right).expect("valid URL");
    shown += &format!("{builder:?}");
    let client = builder.build();
    let connection = client.connect().await.expect("connect");
    let pool = client.pool(1);
    let dedicated = pool.dedicated().await.expect("a dedicated connection");
    shown += &format!("{client:?} {connection:?} {pool:?} {dedicated:?}");
    shown += &format!("{:#?}", connection.transport_info());
    assert!(!shown.contains("secret"), "{shown}");
}

/// The URLs have a user without a password, an address in brackets, and a scope.
#[tokio::test]
async fn opens_odd_urls() {
    let port = free_port();
    // The test also runs on hosts without IPv6.
    let listen = ["--bind", "127.0.0.1", "-::1", "--port", &port.to_string()];
    let user = ["--user", "guest", "on", "nopass", "~*", "+@all"];
    let _redis = Engine::redis(&[&listen[..], &user].concat());
    let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    for (url, user) in [
        (format!("redis://guest:@127.0.0.1:{port}"), "guest"),
        (format!("redis://:@127.0.0.1:{port}"), "default"),
        (format!("VALKEY://127.0.0.1:{port}/?"), "default"),
        (format!("redis://@[::1]:{port}"), "default"),
        (format!("redis://[::1%251]:{port}"), "default"),
        (format!("valkey://gue%73t:any@[::1%1]:{port}/"), "guest"),
    ] {
        if has_ipv6 || !url.contains('[') {
            let info = client_info(&mut connect(&url).await).await;
            assert!(info.contains(&format!(" user={user} ")), "{url}: {info}");
        }
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
    assert!(error.contains("for the name localhost failed: invalid peer certificate"), "{error}");
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

/// The server is down for a while. The subscriber reconnects by itself.
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

/// After a reconnect, each command gets its own reply.
#[tokio::test]
async fn restores_many_subscriptions_and_keeps_replies_in_order() {
    let (_redis, port) = start(&[]);
    let url = format!("redis://127.0.0.1:{port}?rdma=forbid&protocol=3");
    let mut subscriber = connect(&url).await;
    let names: Vec<_> = (0..5_000).map(|n| format!("channel-{n}")).collect();
    redis::cmd("SUBSCRIBE").arg(&names).exec_async(&mut subscriber).await.expect("SUBSCRIBE");
    let mut other = connect(&url).await;
    for round in 0..2 {
        for n in 0..200 {
            let echo: String = redis::cmd("ECHO")
                .arg(n)
                .query_async(&mut subscriber)
                .await
                .unwrap_or_else(|error| panic!("round {round}, ECHO {n}: {error}"));
            assert_eq!(echo, n.to_string());
        }
        if round == 0 {
            let kill = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "pubsub"]).clone();
            kill.exec_async(&mut other).await.expect("CLIENT KILL");
            let begun = Instant::now();
            while subscriber.reconnects() == 0 {
                assert!(begun.elapsed() < TIMEOUT, "the connection is opened again");
                tokio::task::yield_now().await;
            }
        }
    }
    redis::cmd("UNSUBSCRIBE").exec_async(&mut subscriber).await.expect("UNSUBSCRIBE");
    assert_eq!(other.publish::<_, _, i64>("channel-7", "hello").await.expect("PUBLISH"), 0);
}

/// The server may revoke the permission for a channel. Other subscriptions and commands continue.
#[tokio::test]
async fn fails_only_the_subscription_that_the_server_refuses() {
    let (_redis, port) = start(&["--user", "me", "on", ">pw", "~*", "+@all", "&a", "&b"]);
    let (pushes, mut pushed) = tokio::sync::mpsc::unbounded_channel();
    let url = format!("redis://me:pw@127.0.0.1:{port}?rdma=forbid");
    let client = ClientBuilder::open(&url).expect("valid URL").push_sender(pushes).build();
    let mut subscriber = client.connect().await.expect("connect");
    for channel in ["a", "b"] {
        redis::cmd("SUBSCRIBE").arg(channel).exec_async(&mut subscriber).await.expect(channel);
    }
    let refused = redis::cmd("SUBSCRIBE").arg("c").exec_async(&mut subscriber).await;
    let refused = refused.expect_err("not allowed").to_string();
    assert!(refused.contains("no permissions"), "{refused}");
    let mut admin = connect(&format!("redis://127.0.0.1:{port}?rdma=forbid")).await;
    // Redis closes the connections of subscribers that have lost a permission.
    let change = redis::cmd("ACL").arg(&["SETUSER", "me", "resetchannels", "&a"]).clone();
    change.exec_async(&mut admin).await.expect("ACL SETUSER");
    while pushed.recv().await.expect("a push").kind != PushKind::Disconnection {}
    let () = subscriber.set("key", 1).await.expect("other commands work");
    assert_eq!(admin.publish::<_, _, i64>("a", "hello").await.expect("PUBLISH"), 1);
    let ended = tokio::time::timeout(TIMEOUT, async {
        loop {
            let push = pushed.recv().await.expect("a push");
            if push.kind == PushKind::Unsubscribe {
                return push.data;
            }
        }
    });
    let ended = format!("{:?}", ended.await.expect("the end of the subscription is reported"));
    assert!(ended.contains("'b'") || ended.contains("\"b\""), "{ended}");
    assert!(ended.contains("no permissions"), "{ended}");
}

/// All commands that wait for the same connection attempt fail with it. No command starts an
/// attempt of its own.
#[tokio::test]
async fn waiting_commands_fail_together() {
    let (mut redis, port) = start(&[]);
    let url = format!("redis://127.0.0.1:{port}?rdma=forbid");
    let builder = ClientBuilder::open(&url).expect("valid URL");
    let client = builder.reconnect(2, Duration::from_millis(1)).build();
    let mut connection = client.connect().await.expect("connect");
    redis.kill();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await.expect("listen");
    let accepted = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = std::sync::Arc::clone(&accepted);
    let refusing = tokio::spawn(async move {
        loop {
            drop(listener.accept().await);
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    });
    while connection.get::<_, Option<i64>>("a").await.is_ok() {}
    let _ = connection.get::<_, Option<i64>>("a").await.expect_err("nobody answers");
    let before = accepted.load(std::sync::atomic::Ordering::Relaxed);
    let mut commands = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let mut connection = connection.clone();
        commands.spawn(async move { connection.get::<_, Option<i64>>("a").await });
    }
    for result in commands.join_all().await {
        result.expect_err("nobody answers");
    }
    let tried = accepted.load(std::sync::atomic::Ordering::Relaxed) - before;
    assert_eq!(tried, 2, "attempts for 20 commands");
    refusing.abort();
}

/// In RESP2, a message of a subscription would be taken for the reply to another command.
#[tokio::test]
async fn rejects_subscriptions_in_resp2() {
    let (_redis, port) = start(&[]);
    let mut connection = connect(&format!("redis://127.0.0.1:{port}?rdma=forbid")).await;
    for name in ["SUBSCRIBE", "psubscribe"] {
        let subscribed = redis::cmd(name).arg("a").exec_async(&mut connection).await;
        let error = subscribed.expect_err("RESP2").to_string();
        assert!(error.contains("RESP3") && error.contains("push_sender"), "{error}");
        let piped = redis::pipe().cmd(name).arg("a").exec_async(&mut connection).await;
        piped.expect_err("RESP2");
    }
    let () = connection.set("a", 1).await.expect("the connection works");
}

/// Starts a server that answers GET slowly, one byte at a time, and CLIENT SETINFO at once. It
/// answers no other command.
async fn slow_server(bytes: usize, pause: Duration) -> SocketAddr {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("listen");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut peer, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = Vec::new();
                while peer.read_buf(&mut request).await.is_ok_and(|read| read > 0) {
                    let text = String::from_utf8_lossy(&request).into_owned();
                    if !text.ends_with("\r\n") {
                        continue;
                    }
                    request.clear();
                    for _ in text.matches("SETINFO") {
                        peer.write_all(b"+OK\r\n").await.expect("answer");
                    }
                    if text.contains("GET") {
                        let reply = format!("${bytes}\r\n{}\r\n", "x".repeat(bytes));
                        for byte in reply.bytes() {
                            tokio::time::sleep(pause).await;
                            peer.write_all(&[byte]).await.expect("answer");
                        }
                    }
                }
            });
        }
    });
    address
}

/// The limit applies to a wait without progress. A slow reply that keeps arriving has no limit.
#[tokio::test]
async fn limits_the_time_without_progress() {
    let limit = Duration::from_secs(3);
    let address = slow_server(3, Duration::from_millis(500)).await;
    let open = |address: SocketAddr| {
        let builder = ClientBuilder::open(&format!("redis://{address}?rdma=forbid"));
        builder.expect("valid URL").response_timeout(Some(limit)).build()
    };
    let mut connection = open(address).connect().await.expect("connect");
    let begun = Instant::now();
    assert_eq!(connection.get::<_, String>("a").await.expect("a slow reply"), "xxx");
    assert!(begun.elapsed() > limit, "the reply took longer than the limit");
    // The server does not answer this at all. The next command uses a new connection.
    let error = redis::cmd("PING").exec_async(&mut connection).await.expect_err("no answer");
    assert!(error.is_timeout() && error.to_string().contains("3s"), "{error}");
    assert_eq!(connection.reconnects(), 0);
    let answered = redis::cmd("CLIENT").arg(&["SETINFO", "lib-name", "a"]).clone();
    answered.exec_async(&mut connection).await.expect("a new connection");
    assert_eq!(connection.reconnects(), 1);
}

/// Answers as an engine, and closes the connection after it has confirmed a subscription.
async fn close_after_subscribe(mut stream: TcpStream) -> std::io::Result<()> {
    let mut input = vec![0; 4096];
    loop {
        let count = stream.read(&mut input).await?;
        let commands = String::from_utf8_lossy(&input[..count]).to_uppercase();
        for command in commands.split_inclusive('*').filter(|command| command.contains('$')) {
            if command.contains("SUBSCRIBE") {
                let reply = b">3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n";
                return stream.write_all(reply).await;
            }
            let is_hello = command.contains("HELLO");
            let reply = if is_hello { "%1\r\n$5\r\nproto\r\n:3\r\n" } else { "+OK\r\n" };
            stream.write_all(reply.as_bytes()).await?;
        }
        if count == 0 {
            return Ok(());
        }
    }
}

/// Without pauses, the client would open thousands of connections in this time.
#[tokio::test]
async fn pauses_before_it_restores_subscriptions_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("an address");
    let opened = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&opened);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(close_after_subscribe(stream));
        }
    });
    let mut subscriber = connect(&format!("redis://{at}?rdma=forbid&protocol=3")).await;
    redis::cmd("SUBSCRIBE").arg("news").exec_async(&mut subscriber).await.expect("SUBSCRIBE");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let opened = opened.load(Ordering::Relaxed);
    assert!((2..20).contains(&opened), "{opened} connections");
}
