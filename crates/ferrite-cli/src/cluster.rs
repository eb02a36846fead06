//! Follows the redirects of a cluster (`-c`), to the RDMA endpoint of a node if it has one.
//!
//! A redirect names the port of the other node's engine. The node that sent it also knows the
//! endpoints of the modules: CLUSTER SLOTS has the id of the other node, FERRITE ENDPOINTS has the
//! endpoint of that id.

use std::net::IpAddr;

use anyhow::{bail, ensure};
use ferrite_fabric::Rdma;
use ferrite_proto::cluster::{Redirect, SlotMap, rdma_endpoints};
use ferrite_proto::resp::Value;
use ferrite_session::Host;

use crate::command_source::CommandSource;
use crate::exit::ErrorReply;
use crate::format::error_of;
use crate::output;
use crate::server::Server;

/// Maximum number of redirects of one command. A healthy cluster needs at most two.
pub(crate) const REDIRECTS_MAX: u32 = 16;

/// Returns where a reply redirects the command to, if redirects are followed. A redirect inside a
/// transaction is an error like any other: the other node knows nothing of the transaction.
pub(crate) fn redirect_of(server: &Server, reply: &Value<'_>) -> Option<Redirect> {
    if !server.settings.follows_redirects || server.is_in_transaction() {
        return None;
    }
    Redirect::parse(error_of(reply)?)
}

/// Connects to the node that a redirect names. The node is the server from then on.
pub(crate) async fn follow(
    server: &mut Server,
    redirect: &Redirect,
    source: CommandSource,
) -> anyhow::Result<()> {
    let asked = server.peer().map_or_else(|| "127.0.0.1".to_owned(), |host| host.name.clone());
    let host = redirect.host.clone().unwrap_or_else(|| asked.clone());
    let node = Host { name: host, port: Some(redirect.port) };
    if source == CommandSource::Lines {
        let line = format!("-> Redirected to slot [{}] located at {node}", redirect.slot);
        // With JSON, this line goes to stderr, because it is not JSON.
        if output::is_json(server.settings.format.style) {
            output::write_stderr(&line);
        } else {
            output::write(format!("{line}\n").as_bytes())?;
        }
    }
    let endpoints = match server.settings.rdma {
        Rdma::Forbid => Vec::new(),
        _ => endpoints(server, &node, &asked).await?,
    };
    if endpoints.is_empty() && server.settings.rdma == Rdma::Require {
        bail!(
            "RDMA is required (--rdma), but node {node} announces no RDMA endpoint: its module is \
             not loaded, has no RDMA, or has not announced itself yet"
        );
    }
    let settings = &server.settings;
    let reports = settings.verbose || settings.is_rdma_explicit || settings.password.is_some();
    let is_local = node.name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if endpoints.is_empty() && settings.rdma == Rdma::Prefer && reports && !is_local {
        output::write_stderr(format_args!(
            "warning: node {node} announces no RDMA endpoint; using TCP without encryption"
        ));
    }
    server.switch_to_node(node, endpoints);
    server.connect().await?;
    if redirect.is_ask {
        let reply = server.request(&["ASKING"]).await?;
        if let Some(text) = error_of(&reply.value()?) {
            bail!(ErrorReply(String::from_utf8_lossy(text).into_owned()));
        }
    }
    Ok(())
}

/// Asks the server for the RDMA endpoints of another node. `asked` is the server's host.
async fn endpoints(server: &mut Server, node: &Host, asked: &str) -> anyhow::Result<Vec<Host>> {
    let slots = server.request(&["CLUSTER", "SLOTS"]).await?;
    let map = SlotMap::parse(&slots.value()?, asked).unwrap_or_default();
    let Some(id) = map.node_at(&node.name, node.port_or_default()).map(|node| node.id.clone())
    else {
        return Ok(Vec::new());
    };
    let reply = server.request(&["FERRITE", "ENDPOINTS"]).await?;
    let endpoints = rdma_endpoints(&reply.value()?, &id, asked).into_iter();
    Ok(endpoints.map(|(name, port)| Host { name, port: Some(port) }).collect())
}

/// Counts redirects of one command.
///
/// # Errors
/// Returns an error if there are too many.
pub(crate) fn count(redirects: &mut u32) -> anyhow::Result<()> {
    *redirects += 1;
    ensure!(
        *redirects <= REDIRECTS_MAX,
        "redirected {REDIRECTS_MAX} times; is a slot being moved?"
    );
    Ok(())
}
