//! Notifies systemd (sd_notify(3)): sends one datagram per change to the socket in NOTIFY_SOCKET.
//! Does nothing if that variable is not set.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The connection to systemd.
pub(super) struct Notify(Option<(UnixDatagram, SocketAddr)>);

impl Notify {
    /// Reads NOTIFY_SOCKET: a path, or an abstract name that starts with `@`.
    pub(super) fn from_environment() -> Self {
        let name = std::env::var_os("NOTIFY_SOCKET");
        let address = name.as_ref().and_then(|name| match name.as_bytes() {
            [] => None,
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
            _ => SocketAddr::from_pathname(name).ok(),
        });
        Self(address.and_then(|address| Some((UnixDatagram::unbound().ok()?, address))))
    }

    /// Sends a message. Failures are ignored: the service works without notifications.
    fn send(&self, message: &str) {
        if let Some((socket, address)) = &self.0 {
            let _ = socket.send_to_addr(message.as_bytes(), address);
        }
    }

    pub(super) fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// Sets the text that `systemctl status` shows.
    pub(super) fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// Asks for more time before the service is ready: systemd extends TimeoutStartSec.
    pub(super) fn extend_startup(&self, status: &str, time: std::time::Duration) {
        self.send(&format!(
            "EXTEND_TIMEOUT_USEC={}\nSTATUS={}",
            time.as_micros(),
            one_line(status)
        ));
    }

    pub(super) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=stopping the engine");
    }
}

fn one_line(text: &str) -> String {
    text.replace(['\r', '\n'], " ")
}
