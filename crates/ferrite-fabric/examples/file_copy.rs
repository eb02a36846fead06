//! Copies a file with one-sided writes: the receiver's CPU only moves arrived data to the disk.
//!
//! ```text
//! cargo run --example file_copy -- receive 10.0.0.1:7471 DIRECTORY
//! cargo run --example file_copy -- send 10.0.0.2:0 10.0.0.1:7471 FILE
//! ```
//!
//! The receiver grants a few slots of 1 MiB. The sender writes the next piece of the file into a
//! free slot and announces it with the same request (`rdma_write_imm`: slot and length in 32 bits).
//! When the piece is on the disk, the receiver sends a message that the slot is free again.
#![expect(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;

use ferrite_fabric::wire::{GRANT_BYTES, GrantToken, Rights};
use ferrite_fabric::{ConnectOptions, ErrorKind, Fabric, Link, Region};
use ferrite_verbs::Verbs;

const SLOTS: usize = 4;
const SLOT_BYTES: usize = 1 << 20;
/// The length is stored above the slot number in the 32 bits; a length of 0 ends the file.
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
        _ => Err("usage: file_copy receive ADDRESS DIRECTORY | send ADDRESS PEER FILE".into()),
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

    // Only the file name: a path could lead out of the directory.
    let name = String::from_utf8(link.recv().await?.to_vec())?;
    let name = Path::new(&name).file_name().ok_or("no file name")?;
    let mut file = File::create(directory.join(name))?;

    let slots = (0..SLOTS).map(|_| register_slot(&link)).collect::<Result<Vec<_>, _>>()?;
    let tokens: Vec<u8> = slots.iter().flat_map(|slot| slot.grant(&link).encode()).collect();
    link.send_bytes(0, &tokens).await?;

    let mut piece = vec![0; SLOT_BYTES];
    let mut total = 0;
    loop {
        let Some(notice) = link.recv().await?.notice() else {
            return Err("received a message instead of a piece".into());
        };
        let (slot, len) = (notice as usize % (1 << LEN_SHIFT), (notice >> LEN_SHIFT) as usize);
        if len == 0 {
            break;
        }
        let slot = slots.get(slot).ok_or("unknown slot")?;
        // A copy, because a sender that violates the protocol could still write there.
        if len > SLOT_BYTES || !slot.read(0, &mut piece[..len]) {
            return Err("the piece exceeds the slot, or the grant was revoked".into());
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

fn register_slot(link: &Link) -> Result<Region, Box<dyn Error>> {
    let mut buf = link.fabric().buffer(SLOT_BYTES)?;
    buf.fill(0); // otherwise it contains data of its previous user
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
    let slots =
        tokens.chunks(GRANT_BYTES).map(GrantToken::decode).collect::<Result<Vec<_>, _>>()?;

    let mut free: Vec<u32> = (0..slots.len() as u32).collect();
    loop {
        let slot = match free.pop() {
            Some(slot) => slot,
            None => {
                let done = link.recv().await?.to_vec();
                let done = u32::from_le_bytes(done.as_slice().try_into()?);
                done % (1 << LEN_SHIFT)
            }
        };
        let mut buf = fabric.buffer(SLOT_BYTES)?;
        let len = fill(&mut file, &mut buf)?;
        buf.set_len(len);
        // Not awaited, so that the next piece is read from the disk meanwhile. The link keeps the
        // buffer until the write has finished.
        drop(link.rdma_write_imm(
            &slots[slot as usize],
            0,
            buf,
            (len as u32) << LEN_SHIFT | slot,
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
