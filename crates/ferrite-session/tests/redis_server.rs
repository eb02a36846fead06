//! Starts a real `redis-server` for a test.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A server on a Unix socket, without a TCP port and without persistence. It is killed on drop.
pub(crate) struct Redis {
    process: Child,
    pub(crate) socket: PathBuf,
}

impl Redis {
    pub(crate) async fn start(name: &str, more: &[&str]) -> Self {
        let socket =
            std::env::temp_dir().join(format!("ferrite-{name}-{}.sock", std::process::id()));
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .args(more)
            .stdout(Stdio::null())
            .spawn()
            .expect("start redis-server (apt-get install redis-server)");
        let redis = Self { process, socket };
        let begun = Instant::now();
        while UnixStream::connect(&redis.socket).await.is_err() {
            assert!(
                begun.elapsed() < START_TIMEOUT,
                "redis-server did not listen within {START_TIMEOUT:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        redis
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
