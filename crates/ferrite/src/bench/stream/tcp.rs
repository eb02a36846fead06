//! The two sides over TCP, on tokio: with Ferrite's stream, or with tokio's own for comparison.
//!
//! Both run the same test on the same single-threaded runtime; only the stream differs. Ferrite's
//! stream uses a fabric without RDMA, which a task drives. The benchmark sets `TCP_NODELAY` on
//! tokio's stream; Ferrite's stream sets it by itself.

use std::net::SocketAddr;

use anyhow::Context as _;
use ferrite_fabric::{Config, Fabric, Rdma, Stream, StreamListener};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{self, Runtime};

use super::client::tests;
use super::report::{Report, Row};
use super::{Options, Over, exchange};
use crate::output;

pub(super) fn listen(options: &Options, over: Over, local: SocketAddr) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        let cannot = || format!("cannot listen on {local}");
        if over == Over::Tokio {
            let listener = TcpListener::bind(local).await.with_context(cannot)?;
            eprintln!("ferrite: listening on {}", listener.local_addr()?);
            loop {
                let (mut stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                serve(&mut stream, options, |_| ()).await?;
                if options.once {
                    return Ok(());
                }
            }
        }
        let fabric = fabric(options)?;
        let driver = tokio::spawn(fabric.drive());
        let listener = StreamListener::bind(&fabric, local).with_context(cannot)?;
        eprintln!("ferrite: listening on {}", listener.local_addr());
        loop {
            let (mut stream, _) = listener.accept().await?;
            serve(&mut stream, options, |us| fabric.set_busy_poll_us(us)).await?;
            let _ = stream.link().ended().await; // how the link ends does not matter
            if options.once {
                break;
            }
        }
        drop((listener, fabric));
        Ok(driver.await??)
    })
}

pub(super) fn connect(options: &Options, over: Over, peer: SocketAddr) -> anyhow::Result<()> {
    let no_stream = || {
        format!(
            "cannot connect to {peer} (`ferrite bench stream --over {over} --listen` must run \
             there)"
        )
    };
    let busy_poll_us = options.busy_poll_us.unwrap_or(Config::default().busy_poll_us);
    let results = runtime()?.block_on(async {
        if over == Over::Tokio {
            let mut stream = TcpStream::connect(peer).await.with_context(no_stream)?;
            stream.set_nodelay(true)?;
            return ask(&mut stream, options, busy_poll_us).await;
        }
        let fabric = fabric(options)?;
        fabric.set_busy_poll_us(busy_poll_us);
        let driver = tokio::spawn(fabric.drive());
        let mut stream = Stream::connect(&fabric, peer).await.with_context(no_stream)?;
        let results = ask(&mut stream, options, busy_poll_us).await?;
        stream.link().close().await?;
        drop((stream, fabric));
        driver.await??;
        Ok(results)
    })?;
    Report::new(busy_poll_us, over, None, results).print(options.json)
}

fn runtime() -> anyhow::Result<Runtime> {
    Ok(runtime::Builder::new_current_thread().enable_all().build()?)
}

fn fabric(options: &Options) -> anyhow::Result<Fabric> {
    let default = Config::default();
    let recv_buffer_size = options.recv_buffer_size.unwrap_or(default.recv_buffer_size);
    let config = Config { recv_buffer_size, ..default };
    Ok(Fabric::system().rdma(Rdma::Forbid).config(config).build()?)
}

async fn serve<S>(
    stream: &mut S,
    options: &Options,
    busy_poll_us: impl Fn(u32),
) -> anyhow::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut tests = 0;
    while let Some(test) = exchange::next_test(stream).await? {
        busy_poll_us(test.busy_poll_us);
        exchange::run_server(stream, &test).await?;
        tests += 1;
    }
    if !options.json {
        output::write_line(&format!("served a client, number of tests: {tests}"));
    }
    Ok(())
}

async fn ask<S>(stream: &mut S, options: &Options, busy_poll_us: u32) -> anyhow::Result<Vec<Row>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut results = Vec::new();
    for (measure, test) in tests(options, busy_poll_us) {
        let measured = exchange::run_client(stream, &test).await?;
        results.push(Row::new(measure, test, &measured));
    }
    Ok(results)
}
