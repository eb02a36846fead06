//! Checks at start that the engine or the server answers, so that an operator learns of a wrong
//! address before the first client does.

use std::time::Duration;

use ferrite_metrics::engine_answers;
use ferrite_session::EngineAddress;
use tokio::time::{sleep, timeout};

/// The pause before the next attempt, and how long an engine may take to answer.
const INTERVAL: Duration = Duration::from_secs(1);

/// Returns when the engine answers. Until then, asks again and again, and warns whenever the cause
/// of the failure changes.
pub(crate) async fn wait_for_engine(engine: EngineAddress) {
    let name = format!("the engine at {engine}");
    let ask = || {
        let engine = engine.clone();
        async move { engine_answers(&engine).await }
    };
    wait_for(name, INTERVAL, ask).await;
}

/// Works like [`wait_for_engine`], but calls `ask` to get an answer. Each answer may take up to
/// `limit`.
pub(crate) async fn wait_for<F>(name: String, limit: Duration, ask: impl Fn() -> F)
where
    F: Future<Output = Result<(), String>>,
{
    let mut warned = None;
    loop {
        let late = || format!("{name} did not answer within {limit:?}");
        match timeout(limit, ask()).await.unwrap_or_else(|_| Err(late())) {
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
        tracing::info!("{name} answers now");
    }
}
