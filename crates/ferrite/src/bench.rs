//! `ferrite bench`: benchmarks, one module for each.

use std::process::ExitCode;

use clap::{Args, Subcommand};

mod fabric;
mod kv;
mod progress;
mod stream;

/// Measure latency and throughput between two hosts
#[derive(Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    Fabric(fabric::Options),
    Stream(stream::Options),
    Kv(Box<kv::Options>),
}

impl Options {
    pub(crate) fn json(&self) -> bool {
        match &self.benchmark {
            Benchmark::Fabric(options) => options.json,
            Benchmark::Stream(options) => options.json,
            Benchmark::Kv(options) => options.json,
        }
    }
}

impl Options {
    /// Returns the message for an error that clap does not find, such as two options that
    /// contradict each other.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        match &self.benchmark {
            Benchmark::Kv(options) => options.contradiction(),
            Benchmark::Fabric(_) | Benchmark::Stream(_) => None,
        }
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    match &options.benchmark {
        Benchmark::Fabric(options) => fabric::run(options),
        Benchmark::Stream(options) => stream::run(options).map(|()| ExitCode::SUCCESS),
        Benchmark::Kv(options) => kv::run(options),
    }
}
