//! The test itself, over any stream. In each round, the client sends a number of writes, then the
//! server sends as many back.
//!
//! ```text
//!   client                                        server
//!   {"size_bytes": …, …} and a newline    ──►
//!                                         ◄──     a newline
//!   rounds × (transfers × write           ──►     read
//!             transfers × read            ◄──     write)
//!   … the next test, or the end of the stream
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::SIZE_MAX;
use crate::latency::{Recorder, RoundTrips};

/// A test, as the client requests it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Test {
    pub(super) size_bytes: u32,
    pub(super) rounds: u64,
    pub(super) transfers: u64,
    pub(super) busy_poll_us: u32,
}

/// The client's measurement.
pub(super) struct Measured {
    pub(super) time: Duration,
    pub(super) rounds: RoundTrips,
}

/// The longest request, in bytes.
const LINE_MAX: usize = 1024;

pub(super) async fn run_client<S>(stream: &mut S, test: &Test) -> anyhow::Result<Measured>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut line = serde_json::to_vec(test)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let answer = stream.read_u8().await.context("the server disconnected")?;
    ensure!(
        answer == b'\n',
        "the server does not use the protocol of ferrite bench; run `ferrite bench stream --listen` \
         there, with a free port"
    );
    let mut buf = vec![0x5a; test.size_bytes as usize];
    let mut recorder = Recorder::new(1)?;
    let started = Instant::now();
    for _ in 0..test.rounds {
        for _ in 0..test.transfers {
            stream.write_all(&buf).await?;
        }
        recorder.posted();
        for _ in 0..test.transfers {
            stream.read_exact(&mut buf).await?;
        }
    }
    Ok(Measured { time: started.elapsed(), rounds: recorder.finish() })
}

/// Receives the next test from the client. Returns `None` at the end of the stream.
pub(super) async fn next_test<S>(stream: &mut S) -> anyhow::Result<Option<Test>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        match stream.read(&mut byte).await? {
            0 if line.is_empty() => return Ok(None),
            0 => anyhow::bail!("the client disconnected in the middle of a request"),
            _ if byte[0] == b'\n' => break,
            _ => line.push(byte[0]),
        }
        ensure!(line.len() <= LINE_MAX, "the client does not use the protocol of ferrite bench");
    }
    let test: Test = serde_json::from_slice(&line)
        .context("the client does not use the protocol of ferrite bench")?;
    let size = test.size_bytes;
    ensure!(
        (1..=SIZE_MAX).contains(&size),
        "writes of {size} bytes requested, expected 1 to {SIZE_MAX}"
    );
    Ok(Some(test))
}

pub(super) async fn run_server<S>(stream: &mut S, test: &Test) -> anyhow::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut buf = vec![0xa5; test.size_bytes as usize];
    stream.write_all(b"\n").await?;
    for _ in 0..test.rounds {
        for _ in 0..test.transfers {
            stream.read_exact(&mut buf).await?;
        }
        for _ in 0..test.transfers {
            stream.write_all(&buf).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Polls a future to its end. The future must not wait for other threads, or for I/O of the
    /// system.
    fn run<F: Future>(future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..1_000_000 {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
        }
        panic!("the future is not ready after a million polls");
    }

    #[test]
    fn both_sides_run_the_same_test() {
        let (mut client_end, mut server_end) = tokio::io::duplex(64);
        let test = Test { size_bytes: 100, rounds: 7, transfers: 3, busy_poll_us: 0 };
        let client = async move {
            let measured = run_client(&mut client_end, &test).await?;
            anyhow::Ok(measured.rounds.ticks.len())
        };
        let server = async move {
            let received = next_test(&mut server_end).await?.context("a test")?;
            run_server(&mut server_end, &received).await?;
            ensure!(next_test(&mut server_end).await?.is_none(), "expected no second test");
            anyhow::Ok(received)
        };
        let (measured, received) = run(async { futures_util::join!(client, server) });
        let (measured, received) = (measured.expect("a measurement"), received.expect("a test"));
        assert_eq!((measured, received), (6, test));
    }

    #[test]
    fn rejects_invalid_requests() {
        for wrong in
            ["hello\n", "{}\n", r#"{"size_bytes":0,"rounds":1,"transfers":1,"busy_poll_us":0}"#]
        {
            let (mut client_end, mut server_end) = tokio::io::duplex(4096);
            let result = run(async {
                client_end.write_all(wrong.as_bytes()).await?;
                client_end.write_all(b"\n").await?;
                next_test(&mut server_end).await
            });
            assert!(result.is_err(), "{wrong}");
        }
    }
}
