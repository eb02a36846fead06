//! Tests of clients that violate the protocol, or use it badly. A client that violates it loses its
//! own connection, without an effect on other clients.

use std::time::Duration;

use ferrite_fabric::mem::{Buf, Purpose};
use ferrite_fabric::{Arrival, ConnectOptions, Fabric, RawConnection};
use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_session::GatewayConfig;
use ferrite_testkit::Engine;
use ferrite_testkit::wait::until_async;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::gateway::{TestServer, unprotected};
use super::{Harness, any_port};

/// A client that can violate the protocol.
pub(crate) struct HostileClient {
    pub(crate) raw: RawConnection,
    /// The server's window for this client.
    pub(crate) window: Registration,
}

impl HostileClient {
    pub(crate) async fn connect(client: &Fabric, server: std::net::SocketAddr) -> Self {
        let options = ConnectOptions::new().local(any_port(1));
        let raw = client.connect_raw(server, &options).await.expect("connect");
        let window = loop {
            let Arrival::Message(message) = raw.arrival().await.expect("receive a message") else {
                panic!("the server wrote to a client that has announced no window")
            };
            if let Ok(Message::RegisterXferMemory(window)) = Message::decode(&message) {
                break window;
            }
        };
        Self { raw, window }
    }

    pub(crate) fn buf(&self, bytes: &[u8]) -> Buf {
        let buf = self.raw.pool().take_uncharged(bytes.len(), Purpose::Send);
        let mut buf = buf.expect("take memory from the pool");
        buf.copy_from_slice(bytes);
        buf.freeze()
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8], imm: u32) {
        // An error is ignored: the server may have disconnected this client already.
        let _ = self.raw.write(self.buf(bytes), self.window.addr + offset, self.window.rkey, imm);
    }

    pub(crate) fn register(&self, addr: u64, length: u32, rkey: u32) {
        let message = Message::RegisterXferMemory(Registration { addr, length, rkey });
        let _ = self.raw.send_message(&message.encode());
    }

    /// Waits until the server has disconnected this client.
    pub(crate) async fn wait_for_disconnect(self, what: &str) {
        let disconnected = async { while self.raw.arrival().await.is_ok() {} };
        timeout(Duration::from_secs(20), disconnected)
            .await
            .unwrap_or_else(|_| panic!("{what}: still connected"));
    }
}

pub(crate) type Violation = fn(&HostileClient);

/// The name of the violation after which the server need not disconnect the client.
pub(crate) const FEATURE_FLOOD: &str = "endless feature requests";

/// The violations of the protocol that the tests commit, each with its name.
pub(crate) const VIOLATIONS: &[(&str, Violation)] = &[
    ("a message of 33 bytes", |it| drop(it.raw.send_message(&[0; MESSAGE_BYTES + 1]))),
    ("a message of one byte", |it| drop(it.raw.send_message(&[2]))),
    ("an unknown opcode", |it| drop(it.raw.send_message(&[0xee; MESSAGE_BYTES]))),
    ("an announced length beyond the window", |it| it.write(0, b"x", it.window.length + 1)),
    ("the largest announced length", |it| it.write(0, b"x", u32::MAX)),
    ("more bytes than announced", |it| it.write(0, b"xxxxxxxx", 1)),
    ("a write outside the window", |it| it.write(u64::from(it.window.length), b"x", 1)),
    ("a write with a wrong key", |it| {
        drop(it.raw.write(it.buf(b"x"), it.window.addr, it.window.rkey ^ 0x100, 1));
    }),
    ("an empty window", |it| it.register(0x1000, 0, 1)),
    ("a window of four gigabytes", |it| it.register(0x1000, u32::MAX, 1)),
    ("a window past the end of memory", |it| it.register(u64::MAX - 5, 1 << 20, 1)),
    ("a window that does not exist", |it| {
        it.register(0x1000, 1 << 20, 0x1234);
        it.write(0, b"PING\r\n", 6); // makes the server write its reply to the window
    }),
    (FEATURE_FLOOD, |it| {
        (0..500).for_each(|_| drop(it.raw.send_message(&[0; MESSAGE_BYTES]))); // GetServerFeature
    }),
    ("another window before the first is full", |it| {
        it.register(0x1000, 1 << 20, 0x1234);
        it.register(0x2000, 1 << 20, 0x1234);
        it.write(0, b"PING\r\n", 6);
    }),
];

pub(crate) async fn disconnects_clients_that_violate_the_protocol(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut bystander = server.connect(&harness).await;
    bystander.write_all(b"PING\r\n").await.expect("write");
    bystander.read_exact(&mut [0; 7]).await.expect("read the reply");
    let before = server.holds();
    for (what, violate) in VIOLATIONS {
        let hostile = HostileClient::connect(&server.client, server.address).await;
        violate(&hostile);
        if *what == FEATURE_FLOOD {
            drop(hostile); // the server may answer for as long as the client takes the answers
        } else {
            hostile.wait_for_disconnect(what).await;
        }
        bystander.write_all(b"PING\r\n").await.expect("write");
        let mut reply = [0; 7];
        bystander.read_exact(&mut reply).await.expect("read the reply");
        assert_eq!(&reply, b"+PONG\r\n", "bystander after {what}");
    }
    until_async("only the bystander is left", async || {
        server.gateway.stats().sessions <= 1 && server.holds() == before
    })
    .await;
    drop(bystander);
    server.end().await;
}

/// Thousands of writes of one byte each are slow, but they are processed correctly.
pub(crate) async fn accepts_tiny_writes(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let hostile = HostileClient::connect(&server.client, server.address).await;
    let memory = hostile.raw.pool().take_uncharged(64 << 10, Purpose::Receive);
    let mut memory = memory.expect("take memory from the pool");
    memory.fill(0);
    let exposed = hostile.raw.expose(memory).map_err(|(_, error)| error).expect("expose memory");
    let remote = exposed.remote();
    hostile.register(remote.addr, 64 << 10, remote.rkey);
    let commands = b"PING\r\n".repeat(2000 / harness.slowdown.min(10));
    for (at, byte) in commands.iter().enumerate() {
        hostile.write(at as u64, &[*byte], 1);
    }
    let mut received = 0;
    while received < commands.len() as u64 / 6 * 7 {
        match hostile.raw.arrival().await.expect("receive replies") {
            Arrival::Written { sum, .. } => received += sum,
            Arrival::Message(_) => {} // a keepalive
        }
    }
    let mut replies = vec![0; received as usize];
    exposed.read(0, &mut replies);
    assert!(replies == b"+PONG\r\n".repeat(commands.len() / 6));
    drop((hostile, exposed));
    server.end().await;
}

/// Clients that connect but never announce a window cannot receive an error. Beyond `max_clients`
/// the server disconnects them.
pub(crate) async fn disconnects_clients_without_a_window(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server =
        TestServer::start(&harness, GatewayConfig { max_clients: 5, ..unprotected(&redis) });
    let mut silent = Vec::new();
    for _ in 0..5 {
        silent.push(HostileClient::connect(&server.client, server.address).await);
    }
    until_async("five sessions", async || server.gateway.stats().sessions >= 5).await;
    let rejected = HostileClient::connect(&server.client, server.address).await;
    rejected.wait_for_disconnect("a client beyond max_clients").await;
    drop(silent);
    until_async("the end of all sessions", async || server.gateway.stats().sessions == 0).await;
    server.end().await;
}
