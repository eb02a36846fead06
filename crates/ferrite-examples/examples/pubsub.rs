//! Publish and subscribe: RESP3 sends what is published between the answers, so a subscriber is an
//! ordinary connection.
//!
//! ```text
//! cargo run --example pubsub -- SERVER [LOCAL]                   # 10.0.0.1:6380; the local IP address chooses the device
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

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
            let heard_by: u64 = publisher.publish(CHANNEL, format!("message {number}")).await?;
            ensure!(heard_by == 1, "{heard_by} subscribers");
        }
        // whose end would be told as the subscriber's is: they have one sender of pushes
        Ok(publisher)
    });

    let mut received = 0;
    while received < MESSAGES {
        let push =
            timeout(Duration::from_secs(30), pushed.recv()).await?.context("no more pushes")?;
        match push.kind {
            PushKind::Message => {
                let [_channel, payload] =
                    <[_; 2]>::try_from(push.data).ok().context("channel and payload")?;
                let payload: String = from_redis_value(payload)?;
                ensure!(payload == format!("message {received}"), "out of order: {payload}");
                received += 1;
            }
            // A connection that is opened again has no subscriptions: a program that stays
            // subscribes anew.
            PushKind::Disconnection => anyhow::bail!("lost the server"),
            _ => {}
        }
    }
    let _publisher = publishing.await??;
    println!("{received} messages on {CHANNEL}, in order");
    Ok(())
}
