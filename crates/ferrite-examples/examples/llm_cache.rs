//! A cache of large values, as a server of language models keeps for prompts it has seen: blobs of
//! 1 to 64 MiB, written, read back and compared.
//!
//! ```text
//! cargo run --release --example llm_cache -- SERVER [LOCAL]      # 10.0.0.1:6380; the local IP address chooses the device
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use std::time::{Duration, Instant};

use anyhow::ensure;
use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::redis::{SetExpiry, SetOptions};
use ferrite_examples::{client_by_arguments, patient_config, pattern};

const MIB: usize = 1 << 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = patient_config(); // 64 MiB may take longer than redis-rs waits by itself
    let mut connection = client_by_arguments()?.config(config).build().connect().await?;
    let transport_info = connection.transport_info();
    println!(
        "over {}, device {}",
        transport_info.transport,
        transport_info.device.as_deref().unwrap_or("none")
    );
    // What nobody asks for any more goes by itself.
    let options = SetOptions::default().with_expiration(SetExpiry::EX(600));
    for mib in [1, 4, 16, 64] {
        let (key, blob) = (format!("llm:prefix:{mib}"), pattern(mib * MIB));
        let begun = Instant::now();
        let () = connection.set_options(&key, &blob, options.clone()).await?;
        let put = begun.elapsed();
        let begun = Instant::now();
        let found: Vec<u8> = connection.get(&key).await?;
        let got = begun.elapsed();
        ensure!(found == blob, "{key}: another blob, of {} bytes", found.len());
        let (put, got) = (rate(mib, put), rate(mib, got));
        println!("{mib:>2} MiB: put at {put:.0} MiB/s, got at {got:.0} MiB/s, the same bytes");
        let () = connection.del(&key).await?;
    }
    Ok(())
}

fn rate(mib: usize, took: Duration) -> f64 {
    mib as f64 / took.as_secs_f64()
}
