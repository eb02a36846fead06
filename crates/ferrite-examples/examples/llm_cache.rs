//! A cache of large values, like the one that a language model server keeps for prompts that it has
//! seen. Writes blobs of 1 to 64 MiB, reads them back, compares and deletes them.
//!
//! ```text
//! # SERVER, for example, 10.0.0.1:6380; LOCAL is the local IP address, which selects the device
//! cargo run --release --example llm_cache -- SERVER [LOCAL]
//! ```
#![expect(clippy::print_stdout, reason = "examples print their results")]

use std::time::{Duration, Instant};

use anyhow::ensure;
use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::redis::{SetExpiry, SetOptions};
use ferrite_examples::{client_by_arguments, patient_config, pattern};

const MIB: usize = 1 << 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = patient_config(); // 64 MiB may take longer than redis-rs waits by default
    let mut connection = client_by_arguments()?.config(config).build().connect().await?;
    let transport_info = connection.transport_info();
    println!(
        "over {}, device {}",
        transport_info.transport,
        transport_info.device.as_deref().unwrap_or("none")
    );
    // A blob expires ten minutes after it was set.
    let options = SetOptions::default().with_expiration(SetExpiry::EX(600));
    for mib in [1, 4, 16, 64] {
        let (key, blob) = (format!("llm:prefix:{mib}"), pattern(mib * MIB));
        let begun = Instant::now();
        let () = connection.set_options(&key, &blob, options.clone()).await?;
        let put = begun.elapsed();
        let begun = Instant::now();
        let found: Vec<u8> = connection.get(&key).await?;
        let got = begun.elapsed();
        ensure!(found == blob, "{key}: read {} bytes that differ from the blob", found.len());
        let (put, got) = (rate(mib, put), rate(mib, got));
        println!("{mib:>2} MiB: set at {put:.0} MiB/s, get at {got:.0} MiB/s, verified");
        let () = connection.del(&key).await?;
    }
    Ok(())
}

fn rate(mib: usize, took: Duration) -> f64 {
    mib as f64 / took.as_secs_f64()
}
