//! What systemd is told (sd_notify(3)): one datagram per change, to the socket that it names.
//! Without one, nothing.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The way to systemd.
pub(super) struct Notify(Option<(UnixDatagram, SocketAddr)>);

impl Notify {
    /// By NOTIFY_SOCKET: a path, or with `@` a name without a file.
    pub(super) fn from_environment() -> Self {
        let name = std::env::var_os("NOTIFY_SOCKET");
        let address = name.as_ref().and_then(|name| match name.as_bytes() {
            [] => None,
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
            _ => SocketAddr::from_pathname(name).ok(),
        });
        Self(address.and_then(|address| Some((UnixDatagram::unbound().ok()?, address))))
    }

    /// Told or not: a service that cannot tell goes on.
    fn tell(&self, words: &str) {
        if let Some((socket, address)) = &self.0 {
            let _ = socket.send_to_addr(words.as_bytes(), address);
        }
    }

    pub(super) fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// What `systemctl status` shows.
    pub(super) fn status(&self, status: &str) {
        self.tell(&format!("STATUS={}", one_line(status)));
    }

    /// Still at work before it is ready: TimeoutStartSec begins anew.
    pub(super) fn more_time(&self, status: &str, time: std::time::Duration) {
        self.tell(&format!(
            "EXTEND_TIMEOUT_USEC={}\nSTATUS={}",
            time.as_micros(),
            one_line(status)
        ));
    }

    pub(super) fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=ending the engine");
    }
}

fn one_line(text: &str) -> String {
    text.replace(['\r', '\n'], " ")
}
