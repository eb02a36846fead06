//! The server over RDMA: waits for clients and does its part of their tests.

use std::net::SocketAddr;

use anyhow::Context as _;
use ferrite_fabric::{Fabric, Stream, StreamListener};
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::fabric::name;
use super::{Options, exchange, fabric};
use crate::output;

/// A client that was served.
#[derive(Debug, Serialize)]
struct Served {
    peer: SocketAddr,
    device: String,
    tests: usize,
}

pub(super) fn run(options: &Options, listen: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    let fabric = fabric(&verbs, Some(listen.ip()), options)?;
    let listener = StreamListener::bind(&fabric, listen)
        .with_context(|| format!("cannot listen on {listen}"))?;
    // On stderr, so that stdout has results only.
    eprintln!("ferrite: listening on {}", listener.local_addr());
    loop {
        fabric.set_busy_poll_us(0);
        let (stream, peer) = fabric.block_on(listener.accept())?;
        match serve(&fabric, stream, peer).with_context(|| format!("serving {}", name(Some(peer))))
        {
            Ok(served) if options.json => output::print_event(&served),
            Ok(Served { peer, device, tests }) => {
                output::write_line(&format!("served {peer} on {device}, number of tests: {tests}"));
            }
            Err(error) if options.once => return Err(error),
            // A failed client does not stop the server.
            Err(error) => eprintln!("ferrite: {error:#}"),
        }
        if options.once {
            return Ok(());
        }
    }
}

fn serve(fabric: &Fabric, mut stream: Stream, peer: SocketAddr) -> anyhow::Result<Served> {
    let mut served = Served { peer, device: stream.link().device().unwrap_or_default(), tests: 0 };
    while let Some(test) = fabric.block_on(exchange::next_test(&mut stream))? {
        fabric.set_busy_poll_us(test.busy_poll_us);
        fabric.block_on(exchange::run_server(&mut stream, &test))?;
        served.tests += 1;
    }
    let _ = fabric.block_on(stream.link().ended()); // how the link ends does not matter
    Ok(served)
}
