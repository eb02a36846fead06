//! Publish and subscribe. With RESP3, published messages arrive between replies, so a subscriber
//! can use an ordinary connection.
//!
//! ```text
//! # SERVER, for example, 10.0.0.1:6380; LOCAL is the local IP address, which selects the device
//! cargo run --example pubsub -- SERVER [LOCAL]
//! ```
#![expect(clippy::print_stdout, reason = "examples print their results")]

use std::time::Duration;

use anyhow::{Context as _, ensure};
use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::redis::{
    ProtocolVersion, PushKind, RedisConnectionInfo, cmd, from_redis_value,
};
use ferrite_examples::{client_by_arguments, patient_config};
use tokio::sync::mpsc;
use tokio::time::timeout;

const CHANNEL: &str = "news";
const MESSAGES: usize = 100;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (pushes, mut pushed) = mpsc::unbounded_channel();
    let config = patient_config().set_push_sender(pushes);
    let info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
    let client = client_by_arguments()?.info(info).config(config).build();

    let mut subscriber = client.connect().await?;
    println!("over {}", subscriber.transport_info().transport);
    cmd("SUBSCRIBE").arg(CHANNEL).exec_async(&mut subscriber).await?;
    let mut publisher = client.connect().await?;
    let publishing = tokio::spawn(async move {
        for number in 0..MESSAGES {
            let receivers: u64 = publisher.publish(CHANNEL, format!("message {number}")).await?;
            ensure!(receivers == 1, "expected one subscriber, found {receivers}");
        }
        // Both connections send their pushes through one sender. If the publisher were dropped
        // here, its disconnection would look like the subscriber's.
        Ok(publisher)
    });

    let mut received = 0;
    while received < MESSAGES {
        let push =
            timeout(Duration::from_secs(30), pushed.recv()).await?.context("no more messages")?;
        match push.kind {
            PushKind::Message => {
                let [_channel, payload] =
                    <[_; 2]>::try_from(push.data).ok().context("expected channel and payload")?;
                let payload: String = from_redis_value(payload)?;
                ensure!(payload == format!("message {received}"), "out of order: {payload}");
                received += 1;
            }
            // The client would reconnect and restore the subscription. But messages may be lost,
            // and this example counts all of them.
            PushKind::Disconnection => anyhow::bail!("lost the connection to the server"),
            _ => {}
        }
    }
    let _publisher = publishing.await??;
    println!("{received} messages on {CHANNEL}, in order");
    Ok(())
}
