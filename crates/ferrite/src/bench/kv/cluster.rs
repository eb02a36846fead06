//! Finds the primaries of a cluster for `--cluster`.

use std::net::SocketAddr;

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::Rdma;
use ferrite_proto::cluster::{SlotMap, rdma_endpoints, slot_of};
use ferrite_proto::resp::Value;

use super::Options;
use super::connection::LoadConnection;
use super::dial::Dialer;
use super::key_space::KeySpace;
use super::primaries::{Primaries, Primary};

impl Primaries {
    /// Asks the server for the slots and the endpoints. The server may be any node of the cluster.
    pub(super) async fn find(
        options: &Options,
        rdma: Rdma,
        keys: &KeySpace,
    ) -> anyhow::Result<Self> {
        let dialer = Dialer::new(options, rdma)?;
        let (stream, _) = dialer.connect().await.context("cannot connect")?;
        let mut connection = LoadConnection::new(options, stream, 0);
        connection.authenticate().await?;
        let asked =
            options.server.context("--cluster needs the address of a node")?.ip().to_string();
        let slots = connection.ask(&["CLUSTER", "SLOTS"]).await?;
        let slots = Value::parse(&slots).context("the reply to CLUSTER SLOTS")?;
        let Some(map) = SlotMap::parse(&slots, &asked) else {
            let why = match slots {
                Value::Error(text) => String::from_utf8_lossy(text).into_owned(),
                other => format!("{other:?}"),
            };
            bail!("--cluster: the server is no node of a cluster: {why}");
        };
        let listed = connection.ask(&["FERRITE", "ENDPOINTS"]).await?;
        let listed = Value::parse(&listed).context("the reply to FERRITE ENDPOINTS")?;
        let mut primaries = Vec::new();
        for node in map.primaries() {
            let engine = resolve(&node.host, node.port)
                .await
                .with_context(|| format!("node {}", node.id))?;
            let hosts = match rdma {
                Rdma::Forbid => Vec::new(),
                _ => rdma_endpoints(&listed, &node.id, &asked),
            };
            let mut endpoints = Vec::with_capacity(hosts.len());
            for (host, port) in hosts {
                endpoints.push(resolve(&host, port).await?);
            }
            ensure!(
                !endpoints.is_empty() || rdma != Rdma::Require,
                "RDMA is required (--rdma), but node {} at {engine} announces no RDMA endpoint: \
                 its module is not loaded, has no RDMA, or has not announced itself yet",
                node.id
            );
            primaries.push(Primary { node: node.clone(), engine, endpoints });
        }
        let places = map.primary_places();
        let mut has_key = vec![false; primaries.len()];
        let of_key = (0..options.keys).map(|key| {
            let slot = slot_of(keys.name(key).as_bytes());
            let place = places[usize::from(slot)];
            let place = place.with_context(|| format!("no node serves slot {slot}"))?;
            has_key[place] = true;
            Ok(u16::try_from(place)?)
        });
        let of_key = of_key.collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(without) = has_key.iter().position(|has_key| !has_key) {
            let Primary { node, .. } = &primaries[without];
            bail!("none of the {} keys belongs to node {}; use more --keys", options.keys, node.id);
        }
        ensure!(
            options.connections as usize >= primaries.len(),
            "the cluster has {} primaries; use at least as many --connections",
            primaries.len()
        );
        Ok(Self { primaries, of_key })
    }
}

async fn resolve(host: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let found = tokio::net::lookup_host((host, port)).await;
    let mut found = found.with_context(|| format!("cannot resolve {host}"))?;
    found.next().with_context(|| format!("{host} has no address"))
}
