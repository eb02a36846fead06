//! The TLS settings of `rediss://` URLs.

use std::sync::Arc;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::crypto::CryptoProvider;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_session::TlsFiles;
use redis::{ErrorKind, RedisError, RedisResult};

/// Returns TLS settings with the authorities that the system trusts.
pub(crate) fn system_config() -> RedisResult<Arc<ClientConfig>> {
    Ok(Arc::new(TlsFiles::default().client_config(provider()?)?))
}

/// Returns the cryptography that the program has installed, or ring if this crate's feature `ring`
/// is enabled.
fn provider() -> RedisResult<Arc<CryptoProvider>> {
    if let Some(installed) = CryptoProvider::get_default() {
        return Ok(Arc::clone(installed));
    }
    #[cfg(feature = "ring")]
    return Ok(Arc::new(ferrite_fabric::rustls::crypto::ring::default_provider()));
    #[cfg(not(feature = "ring"))]
    Err(RedisError::from((
        ErrorKind::InvalidClientConfig,
        "rediss:// needs a cryptography provider: install a rustls CryptoProvider, or enable \
         ferrite-client's feature ring",
    )))
}

/// Returns the name that the certificate of a host must be valid for.
pub(crate) fn server_name(host: &str) -> RedisResult<ServerName<'static>> {
    ServerName::try_from(host.to_owned()).map_err(|_| {
        let message = "TLS needs a valid host name or IP address";
        RedisError::from((ErrorKind::InvalidClientConfig, message, host.to_owned()))
    })
}
