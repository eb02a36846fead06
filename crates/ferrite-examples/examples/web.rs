//! A web server, by axum, that counts the views of its pages in the engine: every handler has a
//! clone of one pool.
//!
//! ```text
//! cargo run --example web -- SERVER [LOCAL]                      # 10.0.0.1:6380; the local IP address chooses the device
//! curl http://127.0.0.1:PORT/any/page                            # at the address that it prints
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use ferrite_client::Pool;
use ferrite_client::redis::{AsyncCommands as _, RedisError};
use ferrite_examples::{client_by_arguments, patient_config};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = client_by_arguments()?.config(patient_config()).build().pool(4);
    let pages = Router::new().route("/{*page}", get(page)).with_state(pool);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}/", listener.local_addr()?);
    axum::serve(listener, pages).await?;
    Ok(())
}

async fn page(
    Path(page): Path<String>,
    State(mut pool): State<Pool>,
) -> Result<String, (StatusCode, String)> {
    let views: u64 = pool.incr(format!("views:{page}"), 1).await.map_err(unavailable)?;
    let transport_info =
        pool.transports().first().map(|transport_info| transport_info.transport.to_string());
    Ok(format!("{page}: {views} views, counted over {}\n", transport_info.unwrap_or_default()))
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err hands it over")]
fn unavailable(error: RedisError) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, format!("the counter is not to be had: {error}\n"))
}
