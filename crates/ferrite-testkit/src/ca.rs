//! A certificate authority, and certificates that it issues.

use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};

use crate::directory::TempDir;
use crate::pem;

/// A certificate authority.
pub struct Ca(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its private key, both in DER (the key in PKCS #8).
pub struct Issued {
    /// The certificate.
    pub certificate: Vec<u8>,
    /// The private key of the certificate.
    pub key: Vec<u8>,
}

impl Ca {
    /// Creates an authority.
    ///
    /// # Panics
    /// If its certificate cannot be created.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each call creates another authority")]
    pub fn new() -> Self {
        let mut params = params(&[], "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, key()).expect("an authority"))
    }

    /// Returns its own certificate, in DER.
    #[must_use]
    pub fn certificate(&self) -> Vec<u8> {
        self.0.der().to_vec()
    }

    /// Issues a certificate with these addresses and names.
    ///
    /// # Panics
    /// If the certificate cannot be created.
    #[must_use]
    pub fn issue(&self, names: &[&str]) -> Issued {
        self.issue_for(&params(names, "host"))
    }

    /// Issues a certificate that has expired.
    ///
    /// # Panics
    /// If the certificate cannot be created.
    #[must_use]
    pub fn issue_expired(&self, names: &[&str]) -> Issued {
        let mut params = params(names, "host");
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 1, 1);
        self.issue_for(&params)
    }

    /// Issues a certificate that is not valid yet.
    ///
    /// # Panics
    /// If the certificate cannot be created.
    #[must_use]
    pub fn issue_not_valid_yet(&self, names: &[&str]) -> Issued {
        let mut params = params(names, "host");
        params.not_before = date_time_ymd(3000, 1, 1);
        self.issue_for(&params)
    }

    fn issue_for(&self, params: &CertificateParams) -> Issued {
        let key = key();
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        Issued { certificate: certificate.der().to_vec(), key: key.serialize_der() }
    }

    /// Writes a certificate, its key and the certificate of this authority to files in PEM. Returns
    /// their paths in this order.
    #[must_use]
    pub fn files(&self, directory: &TempDir, name: &str, issued: &Issued) -> [PathBuf; 3] {
        [
            directory.file(&format!("{name}.crt"), pem("CERTIFICATE", &issued.certificate)),
            directory.file(&format!("{name}.key"), pem("PRIVATE KEY", &issued.key)),
            directory.file(&format!("{name}-ca.crt"), pem("CERTIFICATE", &self.certificate())),
        ]
    }
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued").finish_non_exhaustive()
    }
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}

fn params(names: &[&str], common_name: &str) -> CertificateParams {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names).expect("valid names");
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}
