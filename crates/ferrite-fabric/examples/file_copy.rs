//! Copies a file by one-sided writes: the receiver's CPU only moves what has arrived to the disk.
//!
//! ```text
//! cargo run --example file_copy -- receive 10.0.0.1:7471 DIRECTORY
//! cargo run --example file_copy -- send 10.0.0.2:0 10.0.0.1:7471 FILE
//! ```
//!
//! The receiver grants a few places of 1 MiB. The sender writes the next piece of the file into a
//! free place and says so with the same request (`rdma_write_imm`: place and length in 32 bits).
//! When the piece is on the disk, the receiver says in a message that the place is free again.
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;

use ferrite_fabric::wire::{GRANT_BYTES, GrantToken, Rights};
use ferrite_fabric::{ConnectOptions, ErrorKind, Fabric, Link, Region};
use ferrite_verbs::Verbs;

const PLACES: usize = 4;
const PLACE_BYTES: usize = 1 << 20;
/// Above the place's number in the 32 bits; a length of 0 ends the file.
const LEN_SHIFT: u32 = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fabric = Fabric::builder(&Verbs::system()?).build()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["receive", local, directory] => {
            fabric.block_on(receive(&fabric, local.parse()?, directory.as_ref()))
        }
        ["send", local, peer, file] => {
            fabric.block_on(send(&fabric, local.parse()?, peer.parse()?, file.as_ref()))
        }
        _ => Err("receive ADDRESS DIRECTORY, or send ADDRESS PEER FILE".into()),
    }
}

async fn receive(
    fabric: &Fabric,
    local: SocketAddr,
    directory: &Path,
) -> Result<(), Box<dyn Error>> {
    let mut listener = fabric.listen(local)?;
    println!("listening on {}", listener.local_addr());
    let link = listener.accept().await?;

    // The name must be a name, not a way out of the directory.
    let name = String::from_utf8(link.recv().await?.to_vec())?;
    let name = Path::new(&name).file_name().ok_or("no file name")?;
    let mut file = File::create(directory.join(name))?;

    let places = (0..PLACES).map(|_| place(&link)).collect::<Result<Vec<_>, _>>()?;
    let tokens: Vec<u8> = places.iter().flat_map(|place| place.grant(&link).encode()).collect();
    link.send_bytes(0, &tokens).await?;

    let mut piece = vec![0; PLACE_BYTES];
    let mut total = 0;
    loop {
        let Some(notice) = link.recv().await?.notice() else {
            return Err("a message instead of a piece".into());
        };
        let (place, len) = (notice as usize % (1 << LEN_SHIFT), (notice >> LEN_SHIFT) as usize);
        if len == 0 {
            break;
        }
        let place = places.get(place).ok_or("no such place")?;
        // A copy: the sender could still write there, if it broke the rules.
        if len > PLACE_BYTES || !place.read(0, &mut piece[..len]) {
            return Err("not what was granted".into());
        }
        file.write_all(&piece[..len])?;
        total += len;
        link.send_bytes(0, &notice.to_le_bytes()).await?;
    }
    file.sync_all()?;
    println!("{total} bytes in {}", name.display());
    link.close().await?;
    Ok(())
}

fn place(link: &Link) -> Result<Region, Box<dyn Error>> {
    let mut buf = link.fabric().buffer(PLACE_BYTES)?;
    buf.fill(0); // what its last user left there is not for the peer
    link.register_memory(buf, Rights::WRITE).map_err(|(_, error)| error.into())
}

async fn send(
    fabric: &Fabric,
    local: SocketAddr,
    peer: SocketAddr,
    path: &Path,
) -> Result<(), Box<dyn Error>> {
    let mut file = File::open(path)?;
    let link = fabric.connect_with(peer, &ConnectOptions::new().local(local)).await?;
    let name = path.file_name().and_then(|name| name.to_str()).ok_or("no file name")?;
    link.send_bytes(0, name.as_bytes()).await?;
    let tokens = link.recv().await?.to_vec();
    let places =
        tokens.chunks(GRANT_BYTES).map(GrantToken::decode).collect::<Result<Vec<_>, _>>()?;

    let mut free: Vec<u32> = (0..places.len() as u32).collect();
    loop {
        let place = match free.pop() {
            Some(place) => place,
            None => {
                let done = link.recv().await?.to_vec();
                let done = u32::from_le_bytes(done.as_slice().try_into()?);
                done % (1 << LEN_SHIFT)
            }
        };
        let mut buf = fabric.buffer(PLACE_BYTES)?;
        let len = fill(&mut file, &mut buf)?;
        buf.set_len(len);
        // Not awaited: the next piece is read from the disk meanwhile. The link keeps the buffer
        // until it has arrived.
        drop(link.rdma_write_imm(
            &places[place as usize],
            0,
            buf,
            (len as u32) << LEN_SHIFT | place,
        )?);
        if len == 0 {
            break;
        }
    }
    match link.ended().await {
        Err(error) if error.kind() != ErrorKind::Closed => Err(error.into()),
        _ => Ok(()),
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buf: &mut [u8]) -> std::io::Result<usize> {
    let mut len = 0;
    while len < buf.len() {
        match file.read(&mut buf[len..])? {
            0 => break,
            more => len += more,
        }
    }
    Ok(len)
}
