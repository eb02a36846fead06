//! Asks the engine at start whether it answers, so that an operator learns of a wrong address
//! before the first client does.

use std::time::Duration;

use ferrite_metrics::engine_answers;
use ferrite_session::EngineAddress;
use tokio::time::{sleep, timeout};

/// How long the engine may take to answer, and the pause before the next attempt.
const INTERVAL: Duration = Duration::from_secs(1);

/// Returns when the engine answers. Until then, tries again and again, and warns whenever the
/// reason of the failure changes.
pub(crate) async fn wait_for_engine(engine: &EngineAddress) {
    let mut warned = None;
    loop {
        let late = || format!("the engine at {engine} did not answer within {INTERVAL:?}");
        let answer = timeout(INTERVAL, engine_answers(engine)).await;
        match answer.unwrap_or_else(|_| Err(late())) {
            Ok(()) => break,
            Err(why) if warned.as_ref() == Some(&why) => {}
            Err(why) => {
                tracing::warn!("{why}; trying again every {INTERVAL:?}");
                warned = Some(why);
            }
        }
        sleep(INTERVAL).await;
    }
    if warned.is_some() {
        tracing::info!("the engine at {engine} answers now");
    }
}
