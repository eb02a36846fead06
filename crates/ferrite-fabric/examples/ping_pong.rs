//! Ping-pong over a link: the smallest program that does something with one.
//!
//! ```text
//! cargo run --example ping_pong -- 10.0.0.1:7471                      # waits for a peer and answers
//! cargo run --example ping_pong -- 10.0.0.2:0 10.0.0.1:7471 1000      # from this address, to that one, so often
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::net::SocketAddr;
use std::time::Instant;

use ferrite_fabric::{ConnectOptions, ErrorKind, Fabric, Link};
use ferrite_verbs::Verbs;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let local: SocketAddr = arguments.first().ok_or("say a local address")?.parse()?;
    let fabric = Fabric::builder(&Verbs::system()?).build()?;
    match arguments.get(1) {
        None => answer(&fabric, local),
        Some(peer) => {
            let rounds = arguments.get(2).map_or(Ok(1000), |rounds| rounds.parse())?;
            let options = ConnectOptions::new().local(local);
            let link = fabric.block_on(fabric.connect_with(peer.parse()?, &options))?;
            ask(&fabric, &link, rounds)
        }
    }
}

fn answer(fabric: &Fabric, local: SocketAddr) -> Result<(), Box<dyn Error>> {
    let mut listener = fabric.listen(local)?;
    println!("listening on {}", listener.local_addr());
    fabric.block_on(async {
        let link = listener.accept().await?;
        loop {
            match link.recv().await {
                Ok(message) => link.post_bytes(0, &message.to_vec())?,
                Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    })
}

fn ask(fabric: &Fabric, link: &Link, rounds: u32) -> Result<(), Box<dyn Error>> {
    let way = link.device().unwrap_or_else(|| link.transport().to_string());
    println!("connected through {way} to {:?}", link.peer_addr());
    fabric.block_on(async {
        let begun = Instant::now();
        for round in 0..rounds {
            let ping = [round.to_le_bytes()[0]; 64];
            link.post_bytes(0, &ping)?;
            let pong = link.recv().await?;
            if pong.to_vec() != ping {
                return Err("another answer than the question".into());
            }
        }
        let each = begun.elapsed() / rounds.max(1) / 2;
        println!("{rounds} rounds, {each:?} for half of one (of Soft-RoCE this says nothing about hardware)");
        link.close().await?;
        Ok(())
    })
}
