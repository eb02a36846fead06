//! The admin port: metrics for Prometheus, readiness and liveness, over HTTP.
//!
//! ```text
//!   AdminPort     the port, before it is served
//!   AdminServer   a thread of its own, with its own runtime: /metrics, /ready, /live
//!   Program       what a program provides: metrics to write, and whether it is ready
//!   Exposition    writes samples in the text format, with their help and type
//!   program       which program this is, and its version
//!   fabric        the metrics of a fabric: operations, latency, links, memory
//!   agent         the metrics of an agent: links, streams, refusals
//!   gateway       the metrics of a gateway's sessions
//!   ports         the counters of the host's RDMA ports, as the kernel has them
//! ```
//!
//! This is a separate crate, because it opens a port and depends on an HTTP server, which clients
//! do not need. No counter exists only for this crate: a scrape reads the counters that exist
//! anyway. Without a scrape, the crate uses no CPU time.
#![forbid(unsafe_code)]

mod agent;
mod connections;
mod exposition;
mod fabric;
mod gateway;
mod ports;
mod program;
mod server;

pub use agent::agent_metrics;
pub use exposition::Exposition;
pub use fabric::fabric_metrics;
pub use gateway::gateway_metrics;
pub use ports::port_metrics;
pub use program::{listener_metrics, program_metrics};
pub use server::{
    AdminPort, AdminServer, CONTENT_TYPE, Program, Ready, engine_answers, listen_hint,
    server_answers,
};
