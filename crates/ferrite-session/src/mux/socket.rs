//! What the multiplexer needs of a local connection.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// A local connection of a stream.
///
/// Unix sockets do not implement this: they have no reset, so a program would take a broken path
/// for the end of the stream.
pub trait MuxSocket: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Closes the connection so that the program sees a failure, and not the end of the stream.
    fn reset(self);
}

impl MuxSocket for TcpStream {
    fn reset(self) {
        // With a linger time of zero, closing sends RST. If the option cannot be set, the socket
        // has failed already.
        let _ = self.set_zero_linger();
    }
}
