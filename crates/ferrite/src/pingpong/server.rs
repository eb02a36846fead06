//! The server: waits for a client, runs the rounds that the client asks for, and prints the result.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use ferrite_verbs::{ConnectParams, ConnectionRequest, Verbs, cm};
use serde::Serialize;

use super::client::params;
use super::watch::Watch;
use super::wire::{Memory, Request};
use super::{Mode, Op, Options, endpoint, rounds};
use crate::choice::name;
use crate::output;

/// A client that was served.
#[derive(Debug, Serialize)]
struct Served {
    peer: Option<SocketAddr>,
    device: String,
    op: Op,
    mode: Mode,
    size_bytes: u32,
    rounds: u64,
}

pub(super) fn run(options: &Options, listen: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    verbs.devices()?;
    let listener = cm::Listener::bind(&verbs, listen, 8)
        .with_context(|| format!("cannot listen on {listen}"))?;
    let at = listener.id().local_addr().unwrap_or(listen);
    // On stderr, so that stdout has results only.
    eprintln!("ferrite: listening on {at}");
    loop {
        let Some(connection) = listener.next_request(Duration::from_secs(3600))? else { continue };
        let outcome = serve(&verbs, options, &connection);
        match outcome {
            Ok(served) => print(&served, options.json),
            // With --forever, a failed client does not stop the server.
            Err(error) if options.forever => eprintln!("ferrite: {error:#}"),
            Err(error) => return Err(error),
        }
        if !options.forever {
            return Ok(());
        }
    }
}

fn serve(
    verbs: &Verbs,
    options: &Options,
    connection: &ConnectionRequest,
) -> anyhow::Result<Served> {
    let id = &connection.id;
    let peer = id.peer_addr();
    let name = peer.map_or("a client".to_owned(), |peer| peer.to_string());
    let request =
        Request::decode(&connection.private_data).with_context(|| format!("rejected {name}"))?;
    let (device, _) = id.device().context("RDMA CM named no device")?;
    let context = verbs.device(&device)?.open()?;
    let Request { op, mode, size, inline, .. } = request;
    let (qp, mut endpoint) = endpoint::open(&context, id, op, mode, size, inline)?;
    rounds::prepare(request.op, &mut endpoint);
    // The same timeout as on the client. A kernel that rejects it here uses the client's value.
    let _ = id.set_ack_timeout(14);

    let memory: Memory =
        if request.op == Op::Read { endpoint.outgoing() } else { endpoint.incoming() };
    let params = ConnectParams { private_data: &memory.encode(), ..params() };
    cm::accept(connection, &qp, endpoint::access(), &params, options.timeout)
        .with_context(|| format!("the handshake with {name} failed"))?;
    let total = if request.op == Op::Read { 0 } else { request.rounds };
    let watch = Watch::new(total, options.timeout, false);
    watch
        .over(id, &qp, || {
            rounds::server(request.op, request.rounds, (&qp, &mut endpoint), request.memory, &watch)
        })
        .with_context(|| format!("serving {name}"))?;
    Ok(Served {
        peer,
        device,
        op: request.op,
        mode: request.mode,
        size_bytes: request.size,
        rounds: request.rounds,
    })
}

fn print(served: &Served, json: bool) {
    if json {
        output::print_event(served);
        return;
    }
    let peer = served.peer.map_or("a client".to_owned(), |peer| peer.to_string());
    output::write_line(&format!(
        "served {peer} on {}: {} of {} bytes, {} mode, {} rounds, every message checked",
        served.device,
        name(&served.op),
        served.size_bytes,
        name(&served.mode),
        served.rounds
    ));
}
