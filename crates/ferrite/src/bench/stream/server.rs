//! The server over RDMA: waits for clients, and plays its part of what each of them asks for.

use std::net::SocketAddr;

use anyhow::Context as _;
use ferrite_fabric::{Engine, Stream, StreamListener};
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::fabric::name;
use super::{Options, engine, play};

/// A client that was served.
#[derive(Debug, Serialize)]
struct Served {
    peer: SocketAddr,
    device: String,
    tests: usize,
}

pub(super) fn run(options: &Options, listen: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    let engine = engine(&verbs, Some(listen.ip()), options)?;
    let listener =
        StreamListener::bind(&engine, listen).with_context(|| format!("cannot listen on {listen}"))?;
    // On stderr, so that stdout carries results only.
    eprintln!("ferrite: listening on {}", listener.local_addr());
    loop {
        engine.set_busy_poll_us(0);
        let (stream, peer) = engine.block_on(listener.accept())?;
        match serve(&engine, stream, peer).with_context(|| format!("serving {}", name(Some(peer)))) {
            Ok(served) if options.json => println!("{}", serde_json::to_string(&served)?),
            Ok(Served { peer, device, tests }) => println!("served {peer} on {device}: tests {tests}"),
            Err(error) if options.once => return Err(error),
            // One bad client must not end a server.
            Err(error) => eprintln!("ferrite: {error:#}"),
        }
        if options.once {
            return Ok(());
        }
    }
}

fn serve(engine: &Engine, mut stream: Stream, peer: SocketAddr) -> anyhow::Result<Served> {
    let mut served = Served { peer, device: stream.link().device().unwrap_or_default(), tests: 0 };
    while let Some(test) = engine.block_on(play::next_test(&mut stream))? {
        engine.set_busy_poll_us(test.busy_poll_us);
        engine.block_on(play::answer(&mut stream, &test))?;
        served.tests += 1;
    }
    let _ = engine.block_on(stream.link().ended()); // how it left is its own affair
    Ok(served)
}
