//! The fabric in a plain epoll loop: no runtime, no threads, no futures.
//!
//! ```text
//! cargo run --example epoll_loop -- 10.0.0.1:7471     # echo server; a line on stdin ends it
//! ```
//!
//! The rules: watch the fabric's descriptor. When it is readable, call `progress()`, and then take
//! what has arrived with `try_recv`. Call `progress()` once more after giving the fabric work and
//! before waiting. A database would drive it like this next to its own sockets.
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::net::SocketAddr;

use ferrite_fabric::{ErrorKind, Fabric, Link};
use ferrite_verbs::Verbs;
use rustix::event::epoll;

const FABRIC: u64 = 1;
const STDIN: u64 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let local: SocketAddr =
        std::env::args().nth(1).ok_or("usage: epoll_loop LOCAL_ADDRESS")?.parse()?;
    let fabric = Fabric::builder(&Verbs::system()?).build()?;
    let mut listener = fabric.listen(local)?;
    println!("listening on {}", listener.local_addr());

    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&set, &fabric, epoll::EventData::new_u64(FABRIC), epoll::EventFlags::IN)?;
    epoll::add(&set, std::io::stdin(), epoll::EventData::new_u64(STDIN), epoll::EventFlags::IN)?;

    let mut links: Vec<Link> = Vec::new();
    let mut echoed = 0_u64;
    loop {
        // Repeat until the fabric has no work left and has prepared its descriptor for waiting.
        loop {
            while let Some(link) = listener.try_accept()? {
                println!("{:?} connected", link.peer_addr());
                links.push(link);
            }
            links.retain(|link| match echo(link) {
                Ok(count) => {
                    echoed += count;
                    true
                }
                Err(error) => {
                    println!("{:?} disconnected: {error}", link.peer_addr());
                    false
                }
            });
            if fabric.progress() == 0 {
                break;
            }
        }
        let mut events = Vec::with_capacity(8);
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), None)?;
        if events.iter().any(|event| event.data.u64() == STDIN) {
            println!("{echoed} messages echoed");
            return Ok(());
        }
    }
}

/// Sends back all messages that have arrived; returns their number.
fn echo(link: &Link) -> Result<u64, ferrite_fabric::Error> {
    let mut count = 0;
    while let Some(message) = link.try_recv()? {
        match link.post_bytes(message.channel(), &message.to_vec()) {
            Ok(()) => count += 1,
            // The peer sends but does not receive. A database would keep the answer; this example
            // drops it.
            Err(error) if error.kind() == ErrorKind::Full => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}
