//! gRPC over RDMA: tonic on both ends, with a connector for Ferrite's streams.
//!
//! The service code that `protoc` would generate is written by hand, so that the build does not
//! need `protoc`.
//!
//! ```text
//! lab/lab run -n 2 -- target/debug/examples/grpc 10.0.0.1 10.0.0.2
//! ```
#![expect(clippy::print_stdout, reason = "examples print their results")]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::ensure;
use ferrite_examples::{Connector, Hosts, run};
use ferrite_fabric::Stream;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{StreamingService, UnaryService};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

const SHOUT: &str = "/ferrite.Echo/Shout";
const CHAT: &str = "/ferrite.Echo/Chat";
const LARGE: usize = 1 << 20;

/// `message Text { string text = 1; }`
#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

impl Text {
    fn shouted(&self) -> Self {
        Self { text: self.text.to_uppercase() }
    }
}

fn main() -> anyhow::Result<()> {
    run(async |hosts: &Hosts| {
        let listener = hosts.listen()?;
        let server = listener.local_addr();
        let incoming = stream::unfold(listener, async |listener| {
            let accepted = listener.accept().await.map(|(stream, _)| ServerStream(stream));
            Some((accepted, listener))
        });
        let serving = tokio::spawn(Server::builder().serve_with_incoming(Echo, incoming.boxed()));
        let connector = ServerConnector { connector: hosts.connector(), server };
        let channel = Endpoint::from_shared(format!("http://{server}"))?
            .connect_with_connector(connector)
            .await?;
        call_methods(channel).await?;
        serving.abort();
        Ok(LARGE as u64)
    })
}

async fn call_methods(channel: Channel) -> anyhow::Result<()> {
    let mut grpc = tonic::client::Grpc::new(channel);
    for text in ["hello".to_owned(), "x".repeat(LARGE)] {
        grpc.ready().await?;
        let (path, codec) = (PathAndQuery::from_static(SHOUT), ProstCodec::<Text, Text>::default());
        let reply = grpc.unary(Request::new(Text { text: text.clone() }), path, codec).await?;
        ensure!(reply.into_inner().text == text.to_uppercase(), "unexpected reply");
    }
    println!("unary: 2 calls, one of 1 MiB");

    grpc.ready().await?;
    let messages = stream::iter(0..1000).map(|number| Text { text: format!("line {number}") });
    let (path, codec) = (PathAndQuery::from_static(CHAT), ProstCodec::<Text, Text>::default());
    let mut replies = grpc.streaming(Request::new(messages), path, codec).await?.into_inner();
    let mut count = 0;
    while let Some(reply) = replies.message().await? {
        ensure!(reply.text == format!("LINE {count}"), "unexpected reply: {reply:?}");
        count += 1;
    }
    ensure!(count == 1000, "expected 1000 replies, received {count}");
    println!("streaming: {count} messages in each direction");
    Ok(())
}

// ---- the service --------------------------------------------------------------------------

/// The service, in place of generated code.
#[derive(Clone)]
struct Echo;

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(ProstCodec::<Text, Text>::default());
            Ok(match request.uri().path() {
                SHOUT => grpc.unary(Shout, request).await,
                CHAT => grpc.streaming(Chat, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

struct Shout;

impl UnaryService<Text> for Shout {
    type Response = Text;
    type Future = Ready<Result<Response<Text>, Status>>;

    fn call(&mut self, request: Request<Text>) -> Self::Future {
        ready(Ok(Response::new(request.get_ref().shouted())))
    }
}

struct Chat;

impl StreamingService<Text> for Chat {
    type Response = Text;
    type ResponseStream = BoxStream<'static, Result<Text, Status>>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<Text>>) -> Self::Future {
        let replies = request.into_inner().map(|message| message.map(|text| text.shouted()));
        ready(Ok(Response::new(replies.boxed())))
    }
}

// ---- tonic's transport over ours ----------------------------------------------------------

/// Opens the connections that tonic asks for.
#[derive(Clone)]
struct ServerConnector {
    connector: Connector,
    server: SocketAddr,
}

impl Service<Uri> for ServerConnector {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Stream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { connector, server } = self.clone();
        Box::pin(async move { Ok(TokioIo::new(connector.connect(server).await?)) })
    }
}

/// A stream that tells tonic the peer's address.
struct ServerStream(Stream);

impl Connected for ServerStream {
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Option<SocketAddr> {
        self.0.peer_addr().ok()
    }
}

impl AsyncRead for ServerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, out)
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
