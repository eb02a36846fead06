//! Code that the examples share: two hosts in one process with statistics of their links, and a
//! client for the server in the arguments.
//!
//! Each example of streams runs client and server in one process, so that a single command starts
//! both. Each side has its own fabric, and uses the device with the side's address. All bytes
//! between the two sides go through the devices.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "examples print their results")]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use ferrite_client::redis::AsyncConnectionConfig;
use ferrite_client::{Client, ClientBuilder, client_config};
use ferrite_fabric::{ConnectOptions, Fabric, Stream, StreamListener};
use ferrite_verbs::Verbs;

/// The fabrics and addresses of a server and a client.
#[derive(Debug)]
pub struct Hosts {
    server: Fabric,
    server_ip: IpAddr,
    client: Fabric,
    client_ip: IpAddr,
}

/// Runs an example on a tokio runtime. The program's arguments are the addresses of the server and
/// the client. The example returns how many bytes it has sent in each direction. This function
/// checks that the links have carried at least that many.
///
/// # Errors
/// Returns the example's error. Returns an error of its own if:
/// - an argument is missing or is not an IP address,
/// - the host has no rdma-core, or a fabric cannot be built,
/// - the links do not end within 10 s after the example, or have carried too few bytes over RDMA.
pub fn run(example: impl AsyncFnOnce(&Hosts) -> anyhow::Result<u64>) -> anyhow::Result<()> {
    let mut addresses = std::env::args().skip(1).map(|text| text.parse::<IpAddr>());
    let mut next = || {
        addresses
            .next()
            .context("usage: EXAMPLE SERVER_IP CLIENT_IP")?
            .context("expected an IP address")
    };
    let (server_ip, client_ip) = (next()?, next()?);
    let verbs = Verbs::system()?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let fabric = || {
            let fabric = Fabric::builder(&verbs).build()?;
            tokio::spawn(fabric.drive());
            anyhow::Ok(fabric)
        };
        let hosts = Hosts { server: fabric()?, server_ip, client: fabric()?, client_ip };
        let payload = example(&hosts).await?;
        hosts.settle().await?;
        hosts.print();
        let totals = hosts.client.stats().totals;
        let least = totals.send_bytes.min(totals.recv_bytes);
        ensure!(
            least >= payload,
            "the links carried {least} of {payload} bytes; the rest did not go over RDMA"
        );
        Ok(())
    })
}

impl Hosts {
    /// Listens on the server, on a port that the system chooses.
    ///
    /// # Errors
    /// Returns the errors of [`StreamListener::bind`].
    pub fn listen(&self) -> io::Result<StreamListener> {
        StreamListener::bind(&self.server, SocketAddr::new(self.server_ip, 0))
    }

    /// Returns a connector that connects from the client.
    #[must_use]
    pub fn connector(&self) -> Connector {
        Connector { fabric: self.client.clone(), local: SocketAddr::new(self.client_ip, 0) }
    }

    /// Waits until all links have ended. All bytes are counted only then.
    async fn settle(&self) -> anyhow::Result<()> {
        for _ in 0..1000 {
            if self.client.stats().links + self.server.stats().links == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("links did not end within 10 s")
    }

    fn print(&self) {
        for (name, fabric) in [("client", &self.client), ("server", &self.server)] {
            let totals = fabric.stats().totals;
            println!(
                "RDMA, {name}: {} bytes in {} sends, {} bytes received",
                totals.send_bytes, totals.send_ops, totals.recv_bytes
            );
        }
    }
}

/// Connects from the client.
#[derive(Debug, Clone)]
pub struct Connector {
    fabric: Fabric,
    local: SocketAddr,
}

impl Connector {
    /// Opens a stream to the server.
    ///
    /// # Errors
    /// Returns the errors of [`Stream::connect`].
    pub async fn connect(&self, peer: SocketAddr) -> io::Result<Stream> {
        Stream::connect_with(&self.fabric, peer, &ConnectOptions::new().local(self.local)).await
    }
}

/// Returns a builder for a client of the server in the program's first argument. The second
/// argument, if there is one, is the local IP address. The calling tokio runtime drives the fabric.
///
/// # Errors
/// Returns an error if the arguments are invalid, or if the fabric cannot be built.
pub fn client_by_arguments() -> anyhow::Result<ClientBuilder> {
    let mut arguments = std::env::args().skip(1);
    let server = arguments.next().context("usage: EXAMPLE SERVER_IP:PORT [LOCAL_IP]")?;
    let fabric = Fabric::system().config(client_config()).build()?;
    tokio::spawn(fabric.drive());
    let builder =
        Client::builder(&fabric, server.parse().context("SERVER: expected IP address and port")?);
    let Some(local) = arguments.next() else { return Ok(builder) };
    Ok(builder.local(SocketAddr::new(local.parse().context("LOCAL: expected an IP address")?, 0)))
}

/// Returns redis-rs's settings with a response timeout of 60 s instead of half a second, because an
/// emulated guest is slow.
#[must_use]
pub fn patient_config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)))
}

/// Returns a pattern of bytes in which neighbours always differ.
#[must_use]
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect()
}
