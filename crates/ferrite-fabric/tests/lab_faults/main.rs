//! Faults under links on Soft-RoCE. Each ends in success or in a typed error, in time, and leaves
//! nothing behind. Run them with `cargo xtask lab-test faults`. Add `-- --success-output immediate`
//! to see how the errors read.
//!
//! The local side `OWN` is 10.0.0.2 (rxe2 on h2), the peer `PEER` is 10.0.0.1 (rxe1 on h1). Most
//! links are from the local side to the peer. For faults of a process, the peer is a process: the
//! test runs itself again in another role. Every wait has a deadline, stated as a constant with its
//! reason. No test needs a network namespace of its own, so that all tests work on all kernels of
//! the lab.
//!
//! | file | what |
//! |---|---|
//! | `traffic.rs` `pair.rs` | checked messages, reads and writes; two hosts with such traffic |
//! | `process.rs` | peers in processes of their own |
//! | all others | the faults |
//!
//! `ferrite_testkit::lab` has the hosts, the faults of the network and the check for leaks.
#![expect(clippy::print_stdout, reason = "people judge how errors read")]

mod connecting;
mod devices;
mod limits;
mod memory;
mod outages;
mod pair;
mod peers;
mod process;
mod revocation;
mod traffic;
mod wires;
