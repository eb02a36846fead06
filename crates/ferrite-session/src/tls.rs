//! TLS over TCP: reads certificates and keys in PEM.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_fabric::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use ferrite_fabric::rustls::crypto::{
    CryptoProvider, verify_tls12_signature, verify_tls13_signature,
};
use ferrite_fabric::rustls::pki_types::pem::{self, PemObject as _};
use ferrite_fabric::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use ferrite_fabric::rustls::server::WebPkiClientVerifier;
use ferrite_fabric::rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, ServerConfig,
    SignatureScheme,
};

/// Where distributions keep the certificates of the authorities that they trust.
const SYSTEM_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt", // Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",   // Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",             // SUSE
    "/etc/ssl/cert.pem",                  // Alpine
];

/// The files of a program that uses TLS, all in PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// A file with the authorities to trust, instead of the system's.
    pub ca_certificates: Option<PathBuf>,
    /// A directory of files with authorities to trust, instead of the system's. They are trusted in
    /// addition to those of [`TlsFiles::ca_certificates`].
    pub ca_directory: Option<PathBuf>,
    /// The certificate of this side with its chain, and its private key.
    pub client: Option<(PathBuf, PathBuf)>,
    /// Whether to accept any certificate of the server. If so, anybody on the path can read and
    /// change everything.
    pub is_insecure: bool,
}

impl TlsFiles {
    /// Reads the files. The caller chooses the cryptography.
    ///
    /// # Errors
    /// Returns an error that names the file that cannot be read or used. Also returns an error if
    /// no authorities are given and this host has no list of trusted ones.
    pub fn client_config(&self, provider: Arc<CryptoProvider>) -> io::Result<ClientConfig> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let builder = if self.is_insecure {
            let verifier = Arc::new(AcceptAnyCertificate(provider));
            builder.dangerous().with_custom_certificate_verifier(verifier)
        } else {
            builder.with_root_certificates(self.roots()?)
        };
        let Some(files) = &self.client else {
            return Ok(builder.with_no_client_auth());
        };
        let (chain, key) = read_own(files)?;
        builder.with_client_auth_cert(chain, key).map_err(|error| unusable(files, error))
    }

    /// Reads the files of a side that accepts connections. Its peers must present a certificate
    /// that one of [`TlsFiles::ca_certificates`] has issued. The caller chooses the cryptography.
    ///
    /// # Errors
    /// Returns an error that names the file that cannot be read or used, or that is missing.
    pub fn server_config(&self, provider: Arc<CryptoProvider>) -> io::Result<ServerConfig> {
        let (Some(files), Some(_)) = (&self.client, &self.ca_certificates) else {
            let what = "a certificate, its private key and the certificate of a CA are needed";
            return Err(invalid(what));
        };
        let roots = Arc::new(self.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let verifier = verifier.build().map_err(|error| invalid(error.to_string()))?;
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_client_cert_verifier(verifier);
        let (chain, key) = read_own(files)?;
        builder.with_single_cert(chain, key).map_err(|error| unusable(files, error))
    }

    fn roots(&self) -> io::Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        if let Some(file) = &self.ca_certificates {
            for certificate in read_certificates(file)? {
                let added = roots.add(certificate);
                added.map_err(|error| {
                    invalid(format!("cannot use the CA certificate {}: {error}", file.display()))
                })?;
            }
        }
        if let Some(directory) = &self.ca_directory {
            add_directory(&mut roots, directory)?;
        }
        if self.ca_certificates.is_none() && self.ca_directory.is_none() {
            let file = system_bundle().ok_or_else(|| {
                invalid(
                    "this host has no list of trusted certificate authorities; name a CA \
                     certificate (--cacert, SSL_CERT_FILE, TlsFiles)",
                )
            })?;
            // A bundle may contain certificates that rustls does not accept.
            roots.add_parsable_certificates(read_certificates(&file)?);
        }
        Ok(roots)
    }
}

/// Returns the authorities that the system trusts: `SSL_CERT_FILE`, or the distribution's file.
fn system_bundle() -> Option<PathBuf> {
    if let Some(file) = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()) {
        return Some(file.into());
    }
    SYSTEM_BUNDLES.iter().map(PathBuf::from).find(|file| file.exists())
}

fn add_directory(roots: &mut RootCertStore, directory: &Path) -> io::Result<()> {
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("CA directory {}: {error}", directory.display()))
    };
    let mut count = 0;
    for entry in std::fs::read_dir(directory).map_err(named)? {
        // A directory may contain other files, too.
        if let Ok(certificates) = read_certificates(&entry.map_err(named)?.path()) {
            count += roots.add_parsable_certificates(certificates).0;
        }
    }
    if count == 0 {
        return Err(invalid(format!(
            "CA directory {}: none of its files has a usable certificate in PEM",
            directory.display()
        )));
    }
    Ok(())
}

/// Reads the certificate of this side with its chain, and its private key.
fn read_own(
    (chain, key): &(PathBuf, PathBuf),
) -> io::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let named = |error| describe_pem("private key", key, error);
    Ok((read_certificates(chain)?, PrivateKeyDer::from_pem_file(key).map_err(named)?))
}

fn unusable((chain, key): &(PathBuf, PathBuf), error: TlsError) -> io::Error {
    let (chain, key) = (chain.display(), key.display());
    let why = explain(&io::Error::other(error));
    invalid(format!("cannot use the certificate {chain} with the key {key}: {why}"))
}

fn read_certificates(file: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let named = |error| describe_pem("certificate", file, error);
    let read = CertificateDer::pem_file_iter(file).map_err(named)?;
    let certificates = read.collect::<Result<Vec<_>, _>>().map_err(named)?;
    if certificates.is_empty() {
        return Err(named(pem::Error::NoItemsFound));
    }
    Ok(certificates)
}

fn describe_pem(what: &str, file: &Path, error: pem::Error) -> io::Error {
    let (kind, cause) = match error {
        pem::Error::Io(error) => (error.kind(), error.to_string()),
        pem::Error::NoItemsFound => (io::ErrorKind::InvalidData, format!("no {what} in PEM")),
        other => (io::ErrorKind::InvalidData, other.to_string()),
    };
    io::Error::new(kind, format!("cannot read the {what} {}: {cause}", file.display()))
}

/// Describes a failure of TLS. Adds a fix for three frequent errors.
pub(crate) fn explain(error: &io::Error) -> String {
    let text = error.to_string();
    // Matches the text, because rustls has no variant for the first of these errors.
    if text.contains("UnsupportedCertVersion") {
        "the certificate is X.509 version 1, and version 3 is needed; sign it with an extension \
         (openssl x509 -req -extfile FILE ...)"
            .into()
    } else if text.contains("UnknownIssuer") {
        format!(
            "{text}; name the certificate of the authority that issued it (--cacert, \
             SSL_CERT_FILE, TlsFiles)"
        )
    } else if text.contains("InvalidContentType") {
        format!("{text}; is it a TLS port?")
    } else {
        text
    }
}

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message.into())
}

/// Accepts any certificate, but checks that the server has the certificate's private key.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use ferrite_testkit::TempDir;
    use rustls::crypto::ring;

    use super::*;

    /// A certificate that was made by `openssl x509 -req` without extensions.
    const VERSION_1: &str = "\
-----BEGIN CERTIFICATE-----
MIIBFjCBvQIUCqCxj7oX1uge5VS8+fsCGCD7uB8wCgYIKoZIzj0EAwIwDTELMAkG
A1UEAwwCdjEwIBcNMjYxMTE4MDgwODAyWhgPMjEyNjEwMjUwODA4MDJaMA0xCzAJ
BgNVBAMMAnYxMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEezTwI5gfE4cglLIB
LcLJSfQdVPcV8kXEyFl4VmkaKCSYHiFEq2Uz2KaRffWACQqzSK7JBPHd2bNz67xC
LcxB8DAKBggqhkjOPQQDAgNIADBFAiB7HMiadaphOSzFYJYnd//+OVF31GBfGxtC
N0YxHP1G2gIhAIhVF35xW3WSYzZ5vRtmaM/E1gSB1+fjFuFHhHQWLCG7
-----END CERTIFICATE-----
";
    const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgwIeymfkks9Ok38Fm
hvZT7Jxsf4H2YwIeZXPfRxYto/ihRANCAAR7NPAjmB8ThyCUsgEtwslJ9B1U9xXy
RcTIWXhWaRooJJgeIUSrZTPYppF99YAJCrNIrskE8d3Zs3PrvEItzEHw
-----END PRIVATE KEY-----
";

    #[test]
    fn explains_files_that_cannot_be_used() {
        let files = TempDir::new("tls-files");
        let [certificate, key, other] = [("v1.crt", VERSION_1), ("v1.key", KEY), ("other", "text")]
            .map(|(name, text)| files.file(name, text));
        let error = |files: TlsFiles| {
            let config = files.client_config(Arc::new(ring::default_provider()));
            config.expect_err("files that cannot be used").to_string()
        };
        let client = |client| TlsFiles { is_insecure: true, client, ..TlsFiles::default() };
        for (files, why) in [
            (client(Some((certificate.clone(), key.clone()))), "is X.509 version 1"),
            (client(Some((key, certificate.clone()))), "no certificate in PEM"),
            (client(Some((certificate, other.clone()))), "no private key in PEM"),
            (
                TlsFiles { ca_certificates: Some(other), ..TlsFiles::default() },
                "other: no certificate in PEM",
            ),
            (
                TlsFiles { ca_directory: Some("/nonexistent".into()), ..TlsFiles::default() },
                "CA directory /nonexistent: No such file",
            ),
        ] {
            let error = error(files);
            assert!(error.contains(why), "{why}: {error}");
        }
    }
}
