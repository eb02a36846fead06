//! redis-rs over RDMA to a real `redis-server`, which supports only sockets. A small relay copies
//! bytes between RDMA streams and the server's socket.
//!
//! ```text
//! lab/lab run -n 2 -- target/debug/examples/redis 10.0.0.1 10.0.0.2
//! ```
#![expect(clippy::print_stdout, reason = "examples print their results")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use ferrite_examples::{Hosts, pattern, run};
use ferrite_fabric::StreamListener;
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, AsyncConnectionConfig, RedisConnectionInfo};
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;

const VALUE: usize = 1 << 20;

fn main() -> anyhow::Result<()> {
    run(async |hosts: &Hosts| {
        let redis = Redis::start().await?;
        let listener = hosts.listen()?;
        let server = listener.local_addr();
        let relaying = tokio::spawn(relay(listener, redis.socket.clone()));
        let stream = hosts.connector().connect(server).await?;
        // redis-rs waits only for half a second by default, which is too short in an emulated
        // guest.
        let config =
            AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
        let info = RedisConnectionInfo::default();
        let (connection, driver) =
            MultiplexedConnection::new_with_config(&info, stream, config).await?;
        tokio::spawn(driver);
        run_commands(connection).await?;
        relaying.abort();
        Ok(VALUE as u64)
    })
}

/// Copies bytes between streams and the server's socket.
async fn relay(listener: StreamListener, socket: PathBuf) -> std::io::Result<()> {
    loop {
        let (mut stream, _) = listener.accept().await?;
        let mut server = UnixStream::connect(&socket).await?;
        tokio::spawn(async move { copy_bidirectional(&mut stream, &mut server).await });
    }
}

async fn run_commands(mut connection: MultiplexedConnection) -> anyhow::Result<()> {
    let pong: String = redis::cmd("PING").query_async(&mut connection).await?;
    ensure!(pong == "PONG", "unexpected reply: {pong}");

    let value = pattern(VALUE);
    let () = connection.set("large", &value).await?;
    let read: Vec<u8> = connection.get("large").await?;
    ensure!(read == value, "read {} bytes that differ from the value", read.len());

    // Clones share the connection, and can use it at the same time.
    let adding = (0..100).map(|_| {
        let mut connection = connection.clone();
        tokio::spawn(async move { connection.incr::<_, _, i64>("counter", 1).await })
    });
    for adding in adding.collect::<Vec<_>>() {
        adding.await??;
    }
    let counter: i64 = connection.get("counter").await?;
    ensure!(counter == 100, "expected 100 increments, found {counter}");

    let mut pipeline = redis::pipe();
    (0..1000).for_each(|number| {
        pipeline.set(format!("key {number}"), number).ignore();
    });
    pipeline.cmd("DBSIZE");
    let (keys,): (u64,) = pipeline.query_async(&mut connection).await?;
    ensure!(keys == 1002, "expected 1002 keys, found {keys}");
    println!("redis: a value of 1 MiB set and read, 100 commands at once, a pipeline of 1,001");
    Ok(())
}

/// A server on a Unix socket, without a TCP port and without persistence. It is killed on drop.
struct Redis {
    process: Child,
    socket: PathBuf,
}

impl Redis {
    async fn start() -> anyhow::Result<Self> {
        let socket =
            std::env::temp_dir().join(format!("ferrite-redis-{}.sock", std::process::id()));
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start redis-server (apt-get install redis-server)")?;
        let redis = Self { process, socket };
        for _ in 0..500 {
            if UnixStream::connect(&redis.socket).await.is_ok() {
                return Ok(redis);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::bail!("redis-server did not listen within 10 s")
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
