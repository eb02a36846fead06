//! TLS on a TCP path, with rustls. Callers pass and get plain bytes, the socket carries records. No
//! call waits.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use super::socket::{receive, send};

pub(crate) struct Tls(Connection);

impl Tls {
    pub(crate) fn client(
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<Self, rustls::Error> {
        ClientConnection::new(config, name).map(|connection| Self(connection.into()))
    }

    pub(crate) fn server(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        ServerConnection::new(config).map(|connection| Self(connection.into()))
    }

    /// Returns the peer's certificate, and those of its chain that it has sent. The handshake has
    /// verified them.
    pub(crate) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        self.0.peer_certificates().map(<[_]>::to_vec).unwrap_or_default()
    }

    /// Returns whether records wait to be written.
    pub(crate) fn wants_write(&self) -> bool {
        self.0.wants_write()
    }

    /// Accepts plain bytes and writes records. Returns `None` if it accepts nothing now.
    pub(crate) fn write(
        &mut self,
        socket: &OwnedFd,
        slices: &[IoSlice<'_>],
    ) -> io::Result<Option<usize>> {
        let blocked = self.push(socket)?;
        let taken = self.0.writer().write_vectored(slices)?;
        let blocked = blocked || self.push(socket)?;
        Ok(if taken == 0 && blocked { None } else { Some(taken) })
    }

    /// Reads plain bytes. Returns `None` if there are none, and 0 at the end of the stream.
    pub(crate) fn read(
        &mut self,
        socket: &OwnedFd,
        slices: &mut [IoSliceMut<'_>],
    ) -> io::Result<Option<usize>> {
        loop {
            match self.0.reader().read_vectored(slices) {
                Ok(len) => return Ok(Some(len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Some(0)),
                Err(error) => return Err(error),
            }
            match self.0.read_tls(&mut Raw(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            let processed = self.0.process_new_packets();
            let _ = self.push(socket); // an alert, or part of the handshake
            processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }

    /// Announces the end of writing.
    pub(crate) fn say_goodbye(&mut self, socket: &OwnedFd) {
        self.0.send_close_notify();
        let _ = self.push(socket);
    }

    /// Writes records. Returns whether the kernel accepts no more.
    fn push(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        while self.0.wants_write() {
            match self.0.write_tls(&mut Raw(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

/// The socket, with the traits that rustls expects.
struct Raw<'a>(&'a OwnedFd);

impl Read for Raw<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        receive(self.0, &mut [IoSliceMut::new(buf)])?
            .ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        send(self.0, slices)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
