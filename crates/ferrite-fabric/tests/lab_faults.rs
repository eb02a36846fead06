//! Faults under links on real devices: each ends in success or in a typed error, in time, and
//! leaves nothing behind. Run them with `cargo xtask lab-test faults`; `-- --success-output
//! immediate` shows how the errors read.
//!
//! The link is from 10.0.0.2 (rxe2 on h2), the local side `OWN`, to 10.0.0.1 (rxe1 on h1), the peer
//! `PEER`. For faults of a process, the peer is a process: the test runs itself again in another
//! role. Every wait has a deadline, stated as a constant with its reason. All tests work on all
//! kernels of the lab: none needs a network namespace of its own.
//!
//! | file | what |
//! |---|---|
//! | `harness.rs` | fabrics, deadlines, and checks for leaks |
//! | `traffic.rs` `pair.rs` | checked messages, reads and writes; two hosts with such traffic |
//! | `process.rs` | peers in processes of their own |
//! | `net.rs` | breaking and restoring the guest's network |
//! | all others | the faults |
#![expect(clippy::print_stdout, reason = "people judge how errors read")]

#[path = "lab_faults/connecting.rs"]
mod connecting;
#[path = "lab_faults/devices.rs"]
mod devices;
#[path = "lab_faults/harness.rs"]
mod harness;
#[path = "lab_faults/limits.rs"]
mod limits;
#[path = "lab_faults/memory.rs"]
mod memory;
#[path = "lab_faults/net.rs"]
mod net;
#[path = "lab_faults/outages.rs"]
mod outages;
#[path = "lab_faults/pair.rs"]
mod pair;
#[path = "lab_faults/peers.rs"]
mod peers;
#[path = "lab_faults/process.rs"]
mod process;
#[path = "lab_faults/revocation.rs"]
mod revocation;
#[path = "lab_faults/traffic.rs"]
mod traffic;
#[path = "lab_faults/wires.rs"]
mod wires;
