//! HTTP/1 and HTTP/2 over RDMA: unmodified hyper on both ends.
//!
//! ```text
//! lab/lab run -n 2 -- target/debug/examples/http 10.0.0.1 10.0.0.2
//! ```
#![expect(clippy::print_stdout, reason = "examples print their results")]

use std::convert::Infallible;
use std::net::SocketAddr;

use anyhow::ensure;
use bytes::Bytes;
use ferrite_examples::{Connector, Hosts, pattern, run};
use ferrite_fabric::StreamListener;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};

const BODY: usize = 4 << 20;

#[derive(Debug, Clone, Copy)]
enum Version {
    One,
    Two,
}

fn main() -> anyhow::Result<()> {
    run(async |hosts: &Hosts| {
        for version in [Version::One, Version::Two] {
            let listener = hosts.listen()?;
            let server = listener.local_addr();
            let serving = tokio::spawn(serve(listener, version));
            send_requests(&hosts.connector(), server, version).await?;
            println!("HTTP, {version:?}: 11 requests, two bodies of 4 MiB");
            serving.abort();
        }
        Ok(2 * BODY as u64)
    })
}

/// Accepts streams, and serves HTTP on each.
async fn serve(listener: StreamListener, version: Version) -> std::io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let io = TokioIo::new(stream);
        tokio::spawn(async move {
            match version {
                Version::One => {
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(io, service_fn(answer))
                        .await
                }
                Version::Two => {
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    builder.serve_connection(io, service_fn(answer)).await
                }
            }
        });
    }
}

/// Answers with a greeting, or with the body of the request.
async fn answer(
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, hyper::Error>>, Infallible> {
    Ok(Response::new(match request.uri().path() {
        "/echo" => request.into_body().boxed(), // sent back piece by piece, as it arrives
        path => {
            Full::new(Bytes::from(format!("hello {path}"))).map_err(|never| match never {}).boxed()
        }
    }))
}

type RequestBody = Full<Bytes>;

/// hyper's handle for requests, for HTTP/1 or HTTP/2.
enum Sender {
    One(hyper::client::conn::http1::SendRequest<RequestBody>),
    Two(hyper::client::conn::http2::SendRequest<RequestBody>),
}

async fn send_requests(
    connector: &Connector,
    server: SocketAddr,
    version: Version,
) -> anyhow::Result<()> {
    let io = TokioIo::new(connector.connect(server).await?);
    let mut sender = match version {
        Version::One => {
            let (sender, connection) = hyper::client::conn::http1::handshake(io).await?;
            tokio::spawn(connection);
            Sender::One(sender)
        }
        Version::Two => {
            let (sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await?;
            tokio::spawn(connection);
            Sender::Two(sender)
        }
    };
    for name in 0..10 {
        let greeting = send(&mut sender, server, &format!("/{name}"), Bytes::new()).await?;
        ensure!(greeting == format!("hello /{name}"), "unexpected answer: {greeting:?}");
    }
    let body = Bytes::from(pattern(BODY));
    let echo = send(&mut sender, server, "/echo", body.clone()).await?;
    ensure!(echo == body, "the echo of {} bytes differs from the body", echo.len());
    Ok(())
}

async fn send(
    sender: &mut Sender,
    server: SocketAddr,
    path: &str,
    body: Bytes,
) -> anyhow::Result<Bytes> {
    let request = Request::builder().method("POST").header("host", server.to_string());
    let response = match sender {
        Sender::One(sender) => {
            sender.ready().await?;
            sender.send_request(request.uri(path).body(Full::new(body))?).await?
        }
        Sender::Two(sender) => {
            sender.ready().await?;
            let uri = format!("http://{server}{path}");
            sender.send_request(request.uri(uri).body(Full::new(body))?).await?
        }
    };
    ensure!(response.status().is_success(), "the server answered {}", response.status());
    let expected = response.body().size_hint().exact();
    let bytes = response.into_body().collect().await?.to_bytes();
    ensure!(
        expected.is_none_or(|expected| expected == bytes.len() as u64),
        "the body is shorter or longer than announced"
    );
    Ok(bytes)
}
