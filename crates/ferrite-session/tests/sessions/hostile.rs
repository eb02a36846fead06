//! Clients that break the protocol: each loses its own connection, and nobody else notices.

use std::time::Duration;

use ferrite_fabric::mem::{Buf, Purpose};
use ferrite_fabric::{Arrival, ConnectOptions, Fabric, RawConnection};
use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_session::GatewayConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::gateway::{Served, open};
use super::{Redis, Scene, any_port};

/// A peer that knows the protocol and does not keep it.
pub(crate) struct Hostile {
    pub(crate) raw: RawConnection,
    /// Where the server wants bytes.
    pub(crate) window: Registration,
}

impl Hostile {
    pub(crate) async fn connect(client: &Fabric, server: std::net::SocketAddr) -> Self {
        let options = ConnectOptions::new().local(any_port(1));
        let raw = client.connect_raw(server, &options).await.expect("connected");
        let window = loop {
            let Arrival::Message(said) = raw.arrival().await.expect("a message") else {
                panic!("written to")
            };
            if let Ok(Message::RegisterXferMemory(window)) = Message::decode(&said) {
                break window;
            }
        };
        Self { raw, window }
    }

    pub(crate) fn buf(&self, bytes: &[u8]) -> Buf {
        let mut buf = self.raw.pool().take_uncharged(bytes.len(), Purpose::Send).expect("memory");
        buf.copy_from_slice(bytes);
        buf.freeze()
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8], imm: u32) {
        // It may have lost its connection by now.
        let _ = self.raw.write(self.buf(bytes), self.window.addr + offset, self.window.rkey, imm);
    }

    pub(crate) fn register(&self, addr: u64, length: u32, rkey: u32) {
        let message = Message::RegisterXferMemory(Registration { addr, length, rkey });
        let _ = self.raw.send_message(&message.encode());
    }

    /// Waits until the server has hung up.
    pub(crate) async fn wait_for_the_end(self, what: &str) {
        let over = async { while self.raw.arrival().await.is_ok() {} };
        timeout(Duration::from_secs(20), over)
            .await
            .unwrap_or_else(|_| panic!("{what}: still connected"));
    }
}

pub(crate) type Misdeed = fn(&Hostile);

/// Each way of breaking the rules.
pub(crate) const MISDEEDS: &[(&str, Misdeed)] = &[
    ("a message of 33 bytes", |it| drop(it.raw.send_message(&[0; MESSAGE_BYTES + 1]))),
    ("a message of one byte", |it| drop(it.raw.send_message(&[2]))),
    ("an unknown opcode", |it| drop(it.raw.send_message(&[0xee; MESSAGE_BYTES]))),
    ("more bytes than the window has", |it| it.write(0, b"x", it.window.length + 1)),
    ("all bytes that there could be", |it| it.write(0, b"x", u32::MAX)),
    ("more bytes than it says", |it| it.write(0, b"xxxxxxxx", 1)),
    ("a write beside the window", |it| it.write(u64::from(it.window.length), b"x", 1)),
    ("a write with another key", |it| {
        drop(it.raw.write(it.buf(b"x"), it.window.addr, it.window.rkey ^ 0x100, 1));
    }),
    ("a window of no bytes", |it| it.register(0x1000, 0, 1)),
    ("a window of four gigabytes", |it| it.register(0x1000, u32::MAX, 1)),
    ("a window past the end of memory", |it| it.register(u64::MAX - 5, 1 << 20, 1)),
    ("a window that nobody has", |it| {
        it.register(0x1000, 1 << 20, 0x1234);
        it.write(0, b"PING\r\n", 6); // so that there is something to say
    }),
    ("questions without end", |it| {
        (0..500).for_each(|_| drop(it.raw.send_message(&[0; MESSAGE_BYTES]))); // GetServerFeature
    }),
    ("another window before the first is full", |it| {
        it.register(0x1000, 1 << 20, 0x1234);
        it.register(0x2000, 1 << 20, 0x1234);
        it.write(0, b"PING\r\n", 6);
    }),
];

pub(crate) async fn rules_are_broken(scene: Scene) {
    let redis = Redis::start("hostile", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut bystander = served.call(&scene).await;
    bystander.write_all(b"PING\r\n").await.expect("to write");
    bystander.read_exact(&mut [0; 7]).await.expect("an answer");
    let before = served.holds();
    for (what, misdeed) in MISDEEDS {
        let hostile = Hostile::connect(&served.client, served.at).await;
        misdeed(&hostile);
        if *what == "questions without end" {
            drop(hostile); // it may be answered for as long as it takes the answers
        } else {
            hostile.wait_for_the_end(what).await;
        }
        bystander.write_all(b"PING\r\n").await.expect("to write");
        let mut said = [0; 7];
        bystander.read_exact(&mut said).await.expect("an answer");
        assert_eq!(&said, b"+PONG\r\n", "beside {what}");
    }
    while served.gateway.stats().sessions > 1 || served.holds() != before {
        // or nothing comes of this test in time
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(bystander);
    served.end().await;
}

/// Thousands of tiny writes, byte by byte: slow, and right.
pub(crate) async fn tiny_writes(scene: Scene) {
    let redis = Redis::start("tiny", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let hostile = Hostile::connect(&served.client, served.at).await;
    let mut memory = hostile.raw.pool().take_uncharged(64 << 10, Purpose::Receive).expect("memory");
    memory.fill(0);
    let exposed = hostile.raw.expose(memory).map_err(|(_, error)| error).expect("exposed");
    let remote = exposed.remote();
    hostile.register(remote.addr, 64 << 10, remote.rkey);
    let commands = b"PING\r\n".repeat(2000 / scene.slower.min(10));
    for (at, byte) in commands.iter().enumerate() {
        hostile.write(at as u64, &[*byte], 1);
    }
    let mut told = 0;
    while told < commands.len() as u64 / 6 * 7 {
        match hostile.raw.arrival().await.expect("answers") {
            Arrival::Written { sum, .. } => told += sum,
            Arrival::Message(_) => {} // a keepalive
        }
    }
    let mut said = vec![0; told as usize];
    exposed.read(0, &mut said);
    assert!(said == b"+PONG\r\n".repeat(commands.len() / 6));
    drop((hostile, exposed));
    served.end().await;
}

/// Clients that connect, and never say where their memory is: a refusal cannot reach them, and they
/// are hung up on.
pub(crate) async fn half_open(scene: Scene) {
    let redis = Redis::start("half", &[]).await;
    let served = Served::start(&scene, GatewayConfig { max_clients: 5, ..open(&redis) });
    let mut silent = Vec::new();
    for _ in 0..5 {
        silent.push(Hostile::connect(&served.client, served.at).await);
    }
    while served.gateway.stats().sessions < 5 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Hostile::connect(&served.client, served.at).await.wait_for_the_end("one too many").await;
    drop(silent);
    while served.gateway.stats().sessions > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    served.end().await;
}
