//! `ferrite bench`: how fast it is. One file per thing that is measured.

use clap::{Args, Subcommand};

mod fabric;
mod kv;
mod stream;

/// Measure how fast things are between two hosts
#[derive(Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Fabric(fabric::Options),
    Stream(stream::Options),
    Kv(kv::Options),
}

impl Options {
    pub(crate) fn json(&self) -> bool {
        match &self.what {
            What::Fabric(options) => options.json,
            What::Stream(options) => options.json,
            What::Kv(options) => options.json,
        }
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match &options.what {
        What::Fabric(options) => fabric::run(options),
        What::Stream(options) => stream::run(options),
        What::Kv(options) => kv::run(options),
    }
}
