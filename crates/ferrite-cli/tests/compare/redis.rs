//! Starts a real `redis-server` for a test.
#![allow(dead_code, reason = "each test binary uses only a part")]

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A server on a Unix socket, without a TCP port and without persistence. It is killed on drop.
pub(crate) struct Redis {
    process: Child,
    pub(crate) socket: PathBuf,
}

impl Redis {
    pub(crate) fn start(name: &str) -> Self {
        Self::start_with(name, &[])
    }

    pub(crate) fn start_with(name: &str, more: &[&str]) -> Self {
        let socket =
            std::env::temp_dir().join(format!("ferrite-cli-{name}-{}.sock", std::process::id()));
        let process = Command::new("redis-server")
            .args([
                "--port",
                "0",
                "--save",
                "",
                "--appendonly",
                "no",
                "--enable-debug-command",
                "yes",
                "--slowlog-log-slower-than",
                "-1",
                "--unixsocket",
            ])
            .arg(&socket)
            .args(more)
            .stdout(Stdio::null())
            .spawn()
            .expect("start redis-server (apt-get install redis-server)");
        let redis = Self { process, socket };
        let begun = Instant::now();
        while UnixStream::connect(&redis.socket).is_err() {
            assert!(
                begun.elapsed() < START_TIMEOUT,
                "redis-server did not listen within {START_TIMEOUT:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        redis
    }

    /// Resets the server to its initial state.
    pub(crate) fn empty(&self) {
        for words in [
            &["FLUSHALL"][..],
            &["FUNCTION", "FLUSH"],
            &["SCRIPT", "FLUSH"],
            &["CONFIG", "RESETSTAT"],
        ] {
            let status = Command::new("redis-cli")
                .arg("-s")
                .arg(&self.socket)
                .args(words)
                .stdout(Stdio::null())
                .status();
            assert!(status.expect("start redis-cli").success());
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
