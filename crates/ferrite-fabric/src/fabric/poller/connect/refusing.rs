//! Decides which peers to refuse, and with which reason. Handshakes by RDMA CM and over TCP share
//! this code, so that a peer gets the same answer on either transport.

use std::net::SocketAddr;

use crate::fabric::Shared;
use crate::fabric::listener::{LinkRequest, ListenerShared};
use crate::log_limit::LogLimit;
use crate::wire::{HelloError, Refusal, RefusalCode, Version};

pub(super) fn refusal(code: RefusalCode, retry_after_ms: u32, text: impl Into<String>) -> Refusal {
    Refusal { version: Version::CURRENT, code, retry_after_ms, text: text.into() }
}

/// Returns the refusal of a peer whose first message is not a hello that this side understands.
pub(super) fn without_hello(error: HelloError) -> Refusal {
    match error {
        HelloError::Version { theirs } => refusal(
            RefusalCode::VERSION,
            0,
            format!("this side speaks version {}, the peer {theirs}", Version::CURRENT),
        ),
        HelloError::ForeignPeer | HelloError::Short { .. } => {
            refusal(RefusalCode::FOREIGN_PEER, 0, "this listener accepts only Ferrite peers")
        }
        error => refusal(RefusalCode::PROTOCOL, 0, error.to_string()),
    }
}

/// Returns the refusal of a new link, if the fabric has too many links, the listener's queue is
/// full or the program does not admit the peer. A listener that is gone counts as full.
pub(super) fn of_new_link(
    shared: &Shared,
    listener: Option<&ListenerShared>,
    request: &LinkRequest<'_>,
) -> Option<Refusal> {
    if too_many_links(shared) {
        return Some(refusal(RefusalCode::LIMIT, 1000, MAX_CONNECTIONS));
    }
    match listener.filter(|listener| !listener.is_full()) {
        None => Some(refusal(RefusalCode::BUSY, 20, "too many links wait to be accepted")),
        Some(listener) => listener.admit(request).err().map(|(code, text)| refusal(code, 0, text)),
    }
}

pub(super) const TCP_FIRST_ONLY: &str = "this side accepts RDMA only for links that begin over \
                                         TCP, with TLS if that is configured";

/// Logs a request by RDMA CM to a listener whose links begin over TCP.
pub(super) fn warn_of_cm_request(peer: Option<SocketAddr>) {
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        let peer = peer.map_or("an unknown address".to_owned(), |peer| peer.to_string());
        tracing::warn!(
            "refused a request by RDMA CM from {peer}: {TCP_FIRST_ONLY}; connect in the mode \
             tcp-first{others}"
        );
    }
}

pub(super) const MAX_CONNECTIONS: &str = "max_connections is reached";

/// Returns whether the number of links has reached `max_connections`.
pub(super) fn too_many_links(shared: &Shared) -> bool {
    let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
    links >= shared.config.max_connections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_reason_of_each_kind_of_hello() {
        let theirs = Version { major: 9, ..Version::CURRENT };
        for (error, code) in [
            (HelloError::Version { theirs }, RefusalCode::VERSION),
            (HelloError::ForeignPeer, RefusalCode::FOREIGN_PEER),
            (HelloError::Short { got: 3 }, RefusalCode::FOREIGN_PEER),
            (HelloError::Value { field: "window", value: 0 }, RefusalCode::PROTOCOL),
        ] {
            let refusal = without_hello(error);
            assert_eq!((refusal.code, refusal.retry_after_ms), (code, 0), "{error}");
            assert!(!refusal.text.is_empty());
        }
    }
}
