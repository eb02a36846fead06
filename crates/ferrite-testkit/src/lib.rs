//! Code that the tests of several crates share. Other crates use it only as a dev-dependency, so no
//! product contains it.
//!
//! | module | contents | feature |
//! |---|---|---|
//! | `cluster` | a cluster node that redirects; whole clusters | `redis` for whole clusters |
//! | `engine` | starts Redis and Valkey, with and without the module | `redis` for typed replies |
//! | `resp` | a client that returns replies byte for byte | |
//! | `wait` | waits for a condition, a future or a thread, with a deadline | `tokio` for async |
//! | `numbered` | commands whose replies show whether one was lost, repeated or reordered | `tokio` |
//! | `random` | random numbers that a seed repeats | |
//! | `directory`, `port`, `pem` | temporary directories, free ports, certificates as files | |
//! | `ca` | a certificate authority, and certificates that it issues | `certificates` |
//! | `netns` | hosts in network namespaces, each with its own loopback | |
//! | `process` | signals, and tests that run themselves again as another process | |
//! | `terminal` | a program on a pseudo-terminal | |
//! | `corpus` | runs the fuzz targets' checks over their corpora | |
//! | `lab` | the lab's hosts, faults on the wire, checks for leaks | `verbs`; `fabric` for hosts |
//! | `handshake` | handshake messages of a peer that a test simulates | `fabric` |
//!
//! Features limit what a small crate's tests must build: the tests of `ferrite-proto` start an
//! engine without building the fabric.

#[cfg(feature = "certificates")]
pub mod ca;
pub mod cluster;
pub mod corpus;
pub mod directory;
pub mod engine;
#[cfg(feature = "fabric")]
pub mod handshake;
#[cfg(feature = "verbs")]
pub mod lab;
pub mod netns;
#[cfg(feature = "tokio")]
pub mod numbered;
pub mod pem;
pub mod port;
pub mod process;
pub mod random;
pub mod resp;
pub mod terminal;
pub mod trend;
pub mod wait;

#[cfg(feature = "certificates")]
pub use ca::Ca;
pub use directory::TempDir;
pub use engine::{Engine, Start};
pub use pem::pem;
pub use port::free_port;
pub use random::Random;
pub use terminal::{Screen, Terminal};
pub use wait::{TIMEOUT, join, until, within};
