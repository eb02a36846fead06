//! Failures of TLS handshakes: their cause and how to fix it, for errors and the log.

use std::io;

use rustls::{AlertDescription, CertificateError, Error as TlsError, InvalidMessage};

use crate::error::Error;
use crate::log_limit::LogLimit;

/// Logs the failed TLS handshake of a peer that has connected to this side.
pub(super) fn warn(error: &Error) {
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        tracing::warn!("refused a connection: {error}{others}");
    }
}

/// Returns whether bytes are an alert of TLS instead of a hello.
pub(super) fn is_alert(heard: &[u8]) -> bool {
    heard.starts_with(&[21, 3]) // the type of the record, and the major version
}

/// Describes a failure of TLS, with its fix if that is known. `None` if TLS has not failed.
pub(super) fn describe(error: &io::Error) -> Option<String> {
    let failure = error.get_ref()?.downcast_ref::<TlsError>()?;
    let fix = match failure {
        TlsError::NoCertificatesPresented => {
            "the peer presents no certificate; give it one that this side's CA has issued"
        }
        TlsError::InvalidCertificate(why) => match certificate_fix(why) {
            Some(fix) => fix,
            None => return Some(failure.to_string()),
        },
        TlsError::AlertReceived(
            AlertDescription::CertificateRequired | AlertDescription::NoCertificate,
        ) => "the peer requires a certificate, and this side presents none; configure one",
        // A CA that replaces another CA often has the same name, but another key.
        TlsError::AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
            "the peer does not know the CA of this side's certificate; both sides need \
             certificates of the same CA"
        }
        TlsError::AlertReceived(AlertDescription::CertificateExpired) => {
            // TLS has one alert for both.
            "the certificate of this side has expired, or is not valid yet; renew it, or compare \
             the clocks of both hosts"
        }
        TlsError::AlertReceived(
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied,
        ) => "the peer rejects the certificate of this side; its log says why",
        TlsError::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the peer does not use TLS; configure it there, too"
        }
        _ => return Some(failure.to_string()),
    };
    Some(format!("{failure}: {fix}"))
}

fn certificate_fix(error: &CertificateError) -> Option<&'static str> {
    Some(match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the CA of this side has not issued the peer's certificate; both sides need \
             certificates of the same CA"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "another host answers, or the certificate lacks the address or name that this side \
             connects to (subjectAltName)"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the peer's certificate has expired; renew it"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the peer's certificate is not valid yet; compare the clocks of both hosts"
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the peer's certificate is not for this use; its extendedKeyUsage must have serverAuth \
             and clientAuth"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(error: TlsError) -> String {
        describe(&io::Error::new(io::ErrorKind::InvalidData, error)).expect("a failure of TLS")
    }

    fn alert(alert: AlertDescription) -> TlsError {
        TlsError::AlertReceived(alert)
    }

    #[test]
    fn failure_of_tls_names_its_cause_and_its_fix() {
        for (error, expected) in [
            (TlsError::NoCertificatesPresented, "presents no certificate; give it one"),
            (CertificateError::UnknownIssuer.into(), "certificates of the same CA"),
            (CertificateError::NotValidForName.into(), "subjectAltName"),
            (CertificateError::Expired.into(), "renew it"),
            (CertificateError::NotValidYet.into(), "the clocks"),
            (CertificateError::InvalidPurpose.into(), "serverAuth and clientAuth"),
            (CertificateError::Revoked.into(), "Revoked"),
            (alert(AlertDescription::CertificateRequired), "this side presents none"),
            (alert(AlertDescription::UnknownCA), "certificates of the same CA"),
            (alert(AlertDescription::DecryptError), "certificates of the same CA"),
            (alert(AlertDescription::CertificateExpired), "expired, or is not valid yet"),
            (alert(AlertDescription::DecodeError), "DecodeError"),
            (InvalidMessage::InvalidContentType.into(), "does not use TLS"),
        ] {
            let text = text(error);
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert_eq!(describe(&io::ErrorKind::ConnectionReset.into()), None);
        assert!(is_alert(&[21, 3, 3, 0, 2]) && !is_alert(b"FERRITE") && !is_alert(&[]));
    }
}
