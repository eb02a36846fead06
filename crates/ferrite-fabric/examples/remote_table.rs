//! A hash table that clients read without the server's CPU: one-sided reads of buckets that the
//! server keeps writing.
//!
//! ```text
//! cargo run --example remote_table -- serve 10.0.0.1:7471
//! cargo run --example remote_table -- ask 10.0.0.2:0 10.0.0.1:7471 apple pear plum
//! ```
//!
//! Each bucket has a checksum over its contents. A client that reads during a change sees a wrong
//! checksum and reads again: no lock, no message, no wait at the server.
//!
//! ```text
//!   0        8          16      17     18             40          64
//!   checksum  version    key len value len  key (22)   value (24)
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{ConnectOptions, ErrorKind, Fabric};
use ferrite_verbs::Verbs;

const BUCKETS: u64 = 1024;
const BUCKET_BYTES: usize = 64;
const KEY_AT: usize = 18;
const VALUE_AT: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fabric = Fabric::builder(&Verbs::system()?).build()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", local] => fabric.block_on(serve(&fabric, local.parse()?)),
        ["ask", local, peer, ref keys @ ..] => {
            fabric.block_on(ask(&fabric, local.parse()?, peer.parse()?, keys))
        }
        _ => Err("usage: remote_table serve ADDRESS | ask ADDRESS PEER KEY…".into()),
    }
}

async fn serve(fabric: &Fabric, local: SocketAddr) -> Result<(), Box<dyn Error>> {
    let mut listener = fabric.listen(local)?;
    println!("listening on {}", listener.local_addr());
    let link = listener.accept().await?;

    let mut buf = fabric.buffer(BUCKETS as usize * BUCKET_BYTES)?;
    buf.fill(0);
    let table = link.register_memory(buf, Rights::READ).map_err(|(_, error)| error)?;
    for (key, value) in [("apple", "red"), ("pear", "green"), ("plum", "blue")] {
        put(&table, 1, key, value);
    }
    link.send_bytes(0, &table.grant(&link).encode()).await?;

    // The server does not notice the client's reads. It keeps changing the table until the client
    // disconnects.
    let mut version = 1;
    loop {
        version += 1;
        put(&table, version, "plum", if version % 2 == 0 { "blue" } else { "yellow" });
        match link.try_recv() {
            Ok(_) => yield_once().await,
            Err(error) if error.kind() == ErrorKind::Closed => break,
            Err(error) => return Err(error.into()),
        }
    }
    let _buf = table.revoke().await?;
    println!("{version} versions written");
    Ok(())
}

fn put(table: &ferrite_fabric::Region, version: u64, key: &str, value: &str) {
    let bucket = encode(version, key.as_bytes(), value.as_bytes());
    let written = table.write(bucket_of(key) as usize * BUCKET_BYTES, &bucket);
    assert!(written, "the table must not be revoked yet");
}

async fn ask(
    fabric: &Fabric,
    local: SocketAddr,
    peer: SocketAddr,
    keys: &[&str],
) -> Result<(), Box<dyn Error>> {
    let link = fabric.connect_with(peer, &ConnectOptions::new().local(local)).await?;
    let grant = GrantToken::decode(&link.recv().await?.to_vec())?;
    for key in keys {
        let mut torn = 0;
        let value = loop {
            let buf = fabric.buffer(BUCKET_BYTES)?;
            let bucket = link.rdma_read(&grant, bucket_of(key) * BUCKET_BYTES as u64, buf)?.await?;
            match decode(&bucket) {
                Some((found, value)) => break (found == key.as_bytes()).then(|| value.to_vec()),
                None => torn += 1,
            }
        };
        let value = value
            .map_or_else(|| "(none)".into(), |value| String::from_utf8_lossy(&value).into_owned());
        println!("{key} = {value} ({torn} torn reads)");
    }
    link.close().await?;
    Ok(())
}

fn bucket_of(key: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish() % BUCKETS
}

fn encode(version: u64, key: &[u8], value: &[u8]) -> [u8; BUCKET_BYTES] {
    let mut bucket = [0; BUCKET_BYTES];
    bucket[8..16].copy_from_slice(&version.to_le_bytes());
    bucket[16] = key.len() as u8;
    bucket[17] = value.len() as u8;
    bucket[KEY_AT..KEY_AT + key.len()].copy_from_slice(key);
    bucket[VALUE_AT..VALUE_AT + value.len()].copy_from_slice(value);
    let checksum = checksum(&bucket[8..]);
    bucket[..8].copy_from_slice(&checksum.to_le_bytes());
    bucket
}

/// Returns key and value, both empty in a bucket that was never written; `None` if the server was
/// just writing it.
fn decode(bucket: &[u8]) -> Option<(&[u8], &[u8])> {
    if bucket.iter().all(|byte| *byte == 0) {
        return Some((&[], &[]));
    }
    let (sum, rest) = bucket.split_first_chunk()?;
    if u64::from_le_bytes(*sum) != checksum(rest) {
        return None;
    }
    let (key, value) = (bucket[16] as usize, bucket[17] as usize);
    Some((bucket.get(KEY_AT..KEY_AT + key)?, bucket.get(VALUE_AT..VALUE_AT + value)?))
}

/// Returns the FNV-1a checksum.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Yields once, so that the fabric can process its link.
async fn yield_once() {
    let mut first = true;
    std::future::poll_fn(|cx| {
        if std::mem::take(&mut first) {
            cx.waker().wake_by_ref();
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(())
    })
    .await;
}
