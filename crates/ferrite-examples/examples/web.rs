//! A web server with axum that counts page views in the engine. All handlers share one pool.
//!
//! ```text
//! # SERVER, for example, 10.0.0.1:6380; LOCAL is the local IP address, which selects the device
//! cargo run --example web -- SERVER [LOCAL]
//! # PORT is in the address that the example prints
//! curl http://127.0.0.1:PORT/any/page
//! ```
#![expect(clippy::print_stdout, reason = "examples print their results")]

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

#[expect(clippy::needless_pass_by_value, reason = "map_err passes the error by value")]
fn unavailable(error: RedisError) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, format!("cannot count the view: {error}\n"))
}
