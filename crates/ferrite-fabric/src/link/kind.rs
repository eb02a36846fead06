//! The kinds of requests of a link.

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Kind {
    /// The last request of a link that is down. Its completion proves that all requests before it
    /// are done.
    Last,
    #[default]
    Control,
    Send,
    Write,
    /// A write with immediate data, which notifies the peer.
    Notice,
    Read,
    /// A frame that is sent again although the peer's device had acknowledged it. The statistics
    /// counted it then.
    Again,
    /// Binds a memory window.
    Bind,
}

impl Kind {
    pub(crate) fn is_one_sided(self) -> bool {
        matches!(self, Self::Write | Self::Notice | Self::Read)
    }
}
