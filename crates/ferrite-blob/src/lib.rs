//! The blob agent: keeps image layers and model weights on a node, each verified by its digest.
//!
//! ```text
//!   Store      a directory of blobs: begins and resumes downloads, opens, pins and evicts blobs
//!   Partial    a download: chunks in any order, then a commit, which checks the digest
//!   Blob       a whole blob whose digest was right
//!   Digest     the name of a blob: an algorithm and a hash
//! ```
//!
//! So far, this crate is the store only. It does no network I/O, and its calls block. It is a
//! separate crate, because it writes to disks what it got from the network.
#![forbid(unsafe_code)]

mod digest;
mod error;
mod store;

pub use digest::{Algorithm, Digest, Hasher};
pub use error::{Error, ErrorKind};
pub use store::{
    Blob, CHUNK_BYTES, Options, Partial, Put, Recovered, Start, Store, Usage, chunk_checksum,
};
