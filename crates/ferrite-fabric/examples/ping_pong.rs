//! Ping-pong over a link: a minimal program.
//!
//! ```text
//! cargo run --example ping_pong -- 10.0.0.1:7471                   # server
//! cargo run --example ping_pong -- 10.0.0.2:0 10.0.0.1:7471 1000   # client: from, to, rounds
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::net::SocketAddr;
use std::time::Instant;

use ferrite_fabric::{ConnectOptions, ErrorKind, Fabric, Link};
use ferrite_verbs::Verbs;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let local: SocketAddr =
        arguments.first().ok_or("usage: ping_pong LOCAL_ADDRESS [PEER [ROUNDS]]")?.parse()?;
    let fabric = Fabric::builder(&Verbs::system()?).build()?;
    match arguments.get(1) {
        None => serve(&fabric, local),
        Some(peer) => {
            let rounds = arguments.get(2).map_or(Ok(1000), |rounds| rounds.parse())?;
            let options = ConnectOptions::new().local(local);
            let link = fabric.block_on(fabric.connect_with(peer.parse()?, &options))?;
            ping(&fabric, &link, rounds)
        }
    }
}

fn serve(fabric: &Fabric, local: SocketAddr) -> Result<(), Box<dyn Error>> {
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

fn ping(fabric: &Fabric, link: &Link, rounds: u32) -> Result<(), Box<dyn Error>> {
    let device = link.device().unwrap_or_else(|| link.transport().to_string());
    println!("connected through {device} to {:?}", link.peer_addr());
    fabric.block_on(async {
        let begun = Instant::now();
        for round in 0..rounds {
            let message = [round.to_le_bytes()[0]; 64];
            link.post_bytes(0, &message)?;
            let answer = link.recv().await?;
            if answer.to_vec() != message {
                return Err("the answer differs from the message".into());
            }
        }
        let each = begun.elapsed() / rounds.max(1) / 2;
        println!("{rounds} rounds, {each:?} one way (Soft-RoCE says nothing about hardware)");
        link.close().await?;
        Ok(())
    })
}
