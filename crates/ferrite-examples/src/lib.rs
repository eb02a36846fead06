//! What the examples share: two hosts in one process, and what their links carried; a client of the
//! server in the arguments.
//!
//! Each example of streams is client and server at once, so that one command shows it: a fabric for
//! each end, on the device that has the end's address. All bytes between the two go through the
//! devices.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "examples talk to people")]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use ferrite_client::redis::AsyncConnectionConfig;
use ferrite_client::{Client, ClientBuilder, client_config};
use ferrite_fabric::{ConnectOptions, Fabric, Stream, StreamListener};
use ferrite_verbs::Verbs;

/// A host that serves and one that asks.
#[derive(Debug)]
pub struct Hosts {
    server: Fabric,
    server_ip: IpAddr,
    client: Fabric,
    client_ip: IpAddr,
}

/// Runs an example under tokio. Its arguments are the server's address and the client's. It returns
/// how many bytes must have gone each way, which is held against what the links counted.
///
/// # Errors
/// Those of the example, and of a host without RDMA.
pub fn run(example: impl AsyncFnOnce(&Hosts) -> anyhow::Result<u64>) -> anyhow::Result<()> {
    let mut addresses = std::env::args().skip(1).map(|text| text.parse::<IpAddr>());
    let mut next = || {
        addresses
            .next()
            .context("say the server's IP address and the client's")?
            .context("an IP address")
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
            "the links carried {least} bytes of {payload}: the rest went another way"
        );
        Ok(())
    })
}

impl Hosts {
    /// Listens on the server, on a port that the system picks.
    ///
    /// # Errors
    /// If the address is on no device.
    pub fn listen(&self) -> io::Result<StreamListener> {
        StreamListener::bind(&self.server, SocketAddr::new(self.server_ip, 0))
    }

    /// A way to connect from the client, for those who connect later.
    #[must_use]
    pub fn connector(&self) -> Connector {
        Connector { fabric: self.client.clone(), local: SocketAddr::new(self.client_ip, 0) }
    }

    /// Waits until all links are gone: only then everything that was sent is counted.
    async fn settle(&self) -> anyhow::Result<()> {
        for _ in 0..1000 {
            if self.client.stats().links + self.server.stats().links == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("links that nobody has do not end")
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
    /// A stream to the server.
    ///
    /// # Errors
    /// Those of [`Stream::connect`].
    pub async fn connect(&self, peer: SocketAddr) -> io::Result<Stream> {
        Stream::connect_with(&self.fabric, peer, &ConnectOptions::new().local(self.local)).await
    }
}

/// A client of the server that the first argument names, from the IP address in the second if there
/// is one. The calling tokio runtime drives its fabric.
///
/// # Errors
/// Arguments that are none; a fabric that cannot be made.
pub fn client_by_arguments() -> anyhow::Result<ClientBuilder> {
    let mut arguments = std::env::args().skip(1);
    let server = arguments.next().context("say the server's address: 10.0.0.1:6380")?;
    let fabric = Fabric::system().config(client_config()).build()?;
    tokio::spawn(fabric.drive());
    let builder =
        Client::builder(&fabric, server.parse().context("the server's IP address and port")?);
    let Some(local) = arguments.next() else { return Ok(builder) };
    Ok(builder.local(SocketAddr::new(local.parse().context("the local IP address")?, 0)))
}

/// redis-rs's settings, with 60 s for an answer instead of half a second: an emulated guest is
/// slow.
#[must_use]
pub fn patient_config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)))
}

/// Bytes of which no two neighbours are alike.
#[must_use]
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect()
}
