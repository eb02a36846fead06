//! A real `redis-server` for a test.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A server of our own, without a port and without files; killed at the end.
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
            .expect("redis-server starts: apt-get install redis-server");
        let redis = Self { process, socket };
        let begun = Instant::now();
        while UnixStream::connect(&redis.socket).is_err() {
            assert!(begun.elapsed() < PATIENCE, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        redis
    }

    /// As if it had just been started.
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
            assert!(status.expect("redis-cli starts").success());
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
