//! Peers that violate the protocol or send invalid commands. They may lose their own connection,
//! but must not affect anybody else.
//!
//! The module rejects a source address whose clients repeatedly access memory that is not theirs.
//! So the peers of [`violate_protocol`] have source addresses of their own, and another address in
//! each round.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_fabric::mem::{Buf, Purpose};
use ferrite_fabric::{Arrival, ConnectOptions, ErrorKind, Fabric, RawConnection};
use ferrite_proto::resp::encode_command;
use ferrite_proto::{MESSAGE_BYTES, Message, Registration, Role};
use ferrite_session::{Connector, ValkeyConfig, ValkeyStream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::connection::ByteStream;
use crate::world::World;
use ferrite_testkit::Random;

/// The timeout of one attempt. The wire may be bad, and clients may be rejected. Then the attempt
/// is abandoned.
const LIMIT: Duration = Duration::from_secs(5);
/// How many peers there are in a round.
const AT_A_TIME: usize = 6;

/// The source addresses are 10.0.0.64 and up.
const FIRST_ADDRESS: u64 = 64;
const ADDRESSES: u64 = 64;

/// Adds these addresses to the clients' device, and removes them on drop.
pub(crate) struct Addresses(());

impl Addresses {
    pub(crate) fn new() -> Self {
        let added = Self(()); // removes the addresses if adding one of them fails
        assert!((0..ADDRESSES).all(|number| change("replace", number)), "cannot add the addresses");
        added
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        for number in 0..ADDRESSES {
            let _ = change("del", number);
        }
    }
}

fn change(verb: &str, number: u64) -> bool {
    let address = format!("10.0.0.{}/24", FIRST_ADDRESS + number);
    Command::new("ip")
        .args(["addr", verb, &address, "dev", "h2"])
        .status()
        .is_ok_and(|status| status.success())
}

/// Returns the next source address.
fn next_address(world: &World) -> SocketAddr {
    let number = world.hostile_rounds.fetch_add(1, Ordering::Relaxed) % ADDRESSES;
    format!("10.0.0.{}:0", FIRST_ADDRESS + number).parse().expect("an address")
}

fn noise(random: &mut Random, most: u64) -> Vec<u8> {
    (0..random.below(most)).map(|_| random.below(256) as u8).collect()
}

async fn raw(world: &World, engine: usize, local: SocketAddr) -> Option<RawConnection> {
    let options = ConnectOptions::new().local(local);
    let connected =
        timeout(LIMIT, world.fabric.connect_raw(world.rdma[engine], &options)).await.ok()?;
    let is_refused = connected.as_ref().is_err_and(|error| error.kind() == ErrorKind::Refused);
    if is_refused && local != world.local {
        world.rejected.fetch_add(1, Ordering::Relaxed);
    }
    connected.ok()
}

/// Sends random messages, and writes to memory that the peer may and may not access.
pub(crate) async fn violate_protocol(world: &World, random: &mut Random) {
    let (engine, local) = (random.below(2) as usize, next_address(world));
    for _ in 0..AT_A_TIME {
        let Some(raw) = raw(world, engine, local).await else { continue };
        let offered = async {
            loop {
                match raw.arrival().await.ok()? {
                    Arrival::Message(message) => {
                        if let Ok(Message::RegisterXferMemory(window)) = Message::decode(&message) {
                            return Some(window);
                        }
                    }
                    Arrival::Written { .. } => {}
                }
            }
        };
        let Ok(Some(window)) = timeout(LIMIT, offered).await else { continue };
        for _ in 0..1 + random.below(30) {
            violate(&raw, window, random);
        }
        if random.below(2) == 0 {
            // Wait until the server closes the connection, or for 300 ms.
            let _ =
                timeout(Duration::from_millis(300), async { while raw.arrival().await.is_ok() {} })
                    .await;
        }
    }
}

fn violate(raw: &RawConnection, window: Registration, random: &mut Random) {
    let buf = |bytes: &[u8]| -> Option<Buf> {
        let mut buf = raw.pool().take_uncharged(bytes.len().max(1), Purpose::Send).ok()?;
        buf.fill(0);
        buf[..bytes.len()].copy_from_slice(bytes);
        Some(buf.freeze())
    };
    match random.below(6) {
        0 => drop(raw.send_message(&noise(random, MESSAGE_BYTES as u64 * 2))),
        1 => {
            let mut message = vec![0; MESSAGE_BYTES];
            message.iter_mut().for_each(|byte| *byte = random.below(256) as u8);
            message[..2].copy_from_slice(&(random.below(6) as u16).to_be_bytes());
            drop(raw.send_message(&message));
        }
        2 => {
            let [addr, length, rkey] = [(); 3].map(|()| random.below(1 << 31));
            let registration = Registration { addr, length: length as u32, rkey: rkey as u32 };
            drop(raw.send_message(&Message::RegisterXferMemory(registration).encode()));
        }
        kind => {
            let bytes =
                if kind == 3 { b"*1\r\n$4\r\nPING\r\n".to_vec() } else { noise(random, 2000) };
            let Some(buf) = buf(&bytes) else { return };
            let offset =
                if random.below(3) == 0 { random.below(u64::from(window.length) * 2) } else { 0 };
            let key = if random.below(8) == 0 { window.rkey ^ 0x100 } else { window.rkey };
            let announced =
                if random.below(4) == 0 { random.below(1 << 32) } else { bytes.len() as u64 };
            let _ = raw.write(buf, window.addr.wrapping_add(offset), key, announced as u32);
        }
    }
}

/// Sends invalid and almost valid commands, each time over RDMA (as a Ferrite or a Valkey peer) or
/// TCP, chosen at random (see `open`).
pub(crate) async fn send_invalid(world: &World, random: &mut Random) {
    for _ in 0..AT_A_TIME {
        let engine = random.below(2) as usize;
        let way = random.below(4);
        let Some(mut stream) = open(world, engine, way).await else { continue };
        for _ in 0..1 + random.below(8) {
            let bytes = invalid_commands(random);
            let sending = async {
                stream.write_all(&bytes).await?;
                stream.flush().await
            };
            if !matches!(timeout(LIMIT, sending).await, Ok(Ok(()))) {
                break;
            }
            let mut replies = [0; 4096];
            if let Ok(Ok(0) | Err(_)) =
                timeout(Duration::from_millis(20), stream.read(&mut replies)).await
            {
                break;
            }
        }
    }
}

async fn open(world: &World, engine: usize, way: u64) -> Option<Box<dyn ByteStream>> {
    let address = world.rdma[engine];
    Some(match way {
        0 => Box::new(timeout(LIMIT, world.connector.connect(address)).await.ok()?.ok()?),
        1 => {
            let raw = raw(world, engine, world.local).await?;
            Box::new(ValkeyStream::new(raw, Role::Client, &ValkeyConfig::default()).ok()?)
        }
        // The module's port over TCP, which also accepts handshakes of Ferrite peers.
        2 => Box::new(timeout(LIMIT, TcpStream::connect(address)).await.ok()?.ok()?),
        _ => Box::new(timeout(LIMIT, TcpStream::connect(world.tcp[engine])).await.ok()?.ok()?),
    })
}

fn invalid_commands(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    match random.below(5) {
        0 => return noise(random, 3000),
        1 => {
            let count = random.below(1 << 40) as i64 - 1000;
            bytes.extend(format!("*{count}\r\n$3\r\nGET\r\n").bytes());
        }
        2 => bytes.extend(format!("*2\r\n$3\r\nGET\r\n${}\r\n", random.below(1 << 33)).bytes()),
        3 => bytes.extend(b"x".repeat(random.below(100_000) as usize)),
        _ => {}
    }
    let commands: &[&[&str]] = &[
        &["GET", "fuzz"],
        &["SET", "fuzz", "value"],
        &["MULTI"],
        &["EXEC"],
        &["HSET", "fuzz:h", "a"],
        &["SUBSCRIBE", "fuzz"],
        &["HELLO", "3"],
        &["BLPOP", "fuzz:l", "0"],
        &["CLIENT", "REPLY", "OFF"],
        &["CLIENT", "TRACKING", "ON"],
        &["EVAL", "return redis.call('GET', 'fuzz')", "0"],
        &["MONITOR"],
        &["WATCH", "fuzz"],
        &["WAIT", "1", "10"],
        &["SELECT", "99"],
        &["RESET"],
        &["QUIT"],
        &["XREAD", "BLOCK", "0", "STREAMS", "fuzz:x", "$"],
    ];
    for _ in 0..random.below(20) {
        let words = commands[random.below(commands.len() as u64) as usize];
        encode_command(words.iter().map(|word| word.as_bytes()), &mut bytes);
    }
    // Change some bytes.
    for _ in 0..random.below(4) {
        if !bytes.is_empty() {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.below(256) as u8;
        }
    }
    bytes
}

/// Sends commands until the process is killed.
pub(crate) async fn send_until_killed(fabric: Fabric, address: SocketAddr) {
    let local = "10.0.0.2:0".parse().expect("an address");
    let Ok(mut session) = Connector::new(&fabric).local(local).connect(address).await else {
        return;
    };
    let value = "v".repeat(30_000);
    let mut bytes = Vec::new();
    for words in
        [&["SET", "fuzz:killed", &value][..], &["GET", "fuzz:killed"], &["BLPOP", "fuzz:l", "0.01"]]
    {
        encode_command(words.iter().map(|word| word.as_bytes()), &mut bytes);
    }
    let mut replies = vec![0; 64 << 10];
    while session.write_all(&bytes).await.is_ok() && session.flush().await.is_ok() {
        let _ = session.read(&mut replies).await;
    }
}
