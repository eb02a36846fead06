//! Starts engines with the module, and connects to its port over TCP.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use ferrite_testkit::{Engine, Start, TIMEOUT, free_port};

/// Starts an engine whose module has its own port on 127.0.0.1.
pub(crate) fn start(program: &Path, more: &[&str], options: &[&str]) -> Engine {
    let port = free_port().to_string();
    let arguments = [&["rdma-port", &port, "rdma-bind", "127.0.0.1"], more].concat();
    let options = [&["--port", "0"], options].concat();
    Engine::start(&Start { program, module: Some(&arguments), options: &options })
}

/// Starts an engine that must refuse to load the module, and returns its log.
pub(crate) fn log_of_failed_load(program: &Path, arguments: &[&str], options: &[&str]) -> String {
    let options = [&["--port", "0"], options].concat();
    let (status, log) =
        Engine::run_until_exit(&Start { program, module: Some(arguments), options: &options });
    assert!(!status.success(), "{log}");
    assert!(!log.contains("BUG REPORT") && !log.contains("panic"), "{log}");
    log
}

/// Runs a command over TCP at the module's port.
pub(crate) fn over_tcp(server: &Engine, words: &[&str]) -> redis::RedisResult<redis::Value> {
    let client = redis::Client::open(format!("redis://{}", server.info("address")))?;
    redis::cmd(words[0]).arg(&words[1..]).query(&mut client.get_connection()?)
}

/// Connects a plain TCP socket to the module's port.
pub(crate) fn connect(server: &Engine) -> TcpStream {
    let socket = TcpStream::connect(server.info("address")).expect("a connection to the module");
    socket.set_read_timeout(Some(TIMEOUT)).expect("a read timeout");
    socket
}

/// Returns everything that a rejected client receives.
pub(crate) fn rejection(mut socket: TcpStream) -> String {
    let mut text = String::new();
    let _ = socket.write_all(b"PING\r\n");
    let _ = socket.read_to_string(&mut text); // the connection may be reset at the end
    text
}
