//! `--scan`: lists all keys. This module also has the cursor for the other modes that scan.

use anyhow::{Context as _, bail, ensure};
use ferrite_proto::resp::Value;

use crate::format::{Style, error_of};
use crate::output;
use crate::server::Server;
use crate::settings::Scan;

/// The position of a scan.
pub(crate) struct Cursor<'a> {
    scan: &'a Scan,
    at: Vec<u8>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(scan: &'a Scan) -> Self {
        Self { scan, at: b"0".to_vec() }
    }

    /// Returns the next keys, possibly none, and whether there may be more keys.
    pub(crate) async fn step(
        &mut self,
        server: &mut Server,
    ) -> anyhow::Result<(Vec<Vec<u8>>, bool)> {
        let mut words = vec![b"SCAN".to_vec(), self.at.clone()];
        if let Some(pattern) = &self.scan.pattern {
            words.extend([b"MATCH".to_vec(), pattern.clone()]);
        }
        if let Some(count) = self.scan.count {
            words.extend([b"COUNT".to_vec(), count.to_string().into_bytes()]);
        }
        let frame = server.request(&words).await?;
        let reply = frame.value()?;
        if let Some(text) = error_of(&reply) {
            bail!("SCAN error: {}", String::from_utf8_lossy(text));
        }
        let Value::Array(parts) = &reply else {
            bail!("invalid reply to SCAN: expected an array");
        };
        let [Value::Bulk(at), Value::Array(keys)] = parts.as_slice() else {
            bail!("invalid reply to SCAN: expected a cursor and keys");
        };
        let keys = keys.iter().map(|key| match key {
            Value::Bulk(key) => Some(key.to_vec()),
            _ => None,
        });
        let keys = keys.collect::<Option<Vec<_>>>();
        let keys = keys.context("invalid reply to SCAN: expected keys as strings")?;
        ensure!(!at.is_empty(), "invalid reply to SCAN: empty cursor");
        self.at = at.to_vec();
        Ok((keys, self.at != b"0"))
    }
}

/// Prints all keys.
pub(crate) async fn run(server: &mut Server, scan: &Scan) -> anyhow::Result<()> {
    let mut format = server.settings.format.clone();
    // As in redis-cli, CSV does not quote keys here.
    if format.style == Style::Csv {
        format.style = Style::Raw;
    }
    let mut cursor = Cursor::new(scan);
    loop {
        let (keys, has_more) = cursor.step(server).await?;
        let lines: Vec<_> = keys.iter().map(|key| format.reply(&Value::Bulk(key), false)).collect();
        output::write(&lines.concat())?;
        if !has_more {
            return Ok(());
        }
        if let Some(interval) = server.settings.interval {
            tokio::time::sleep(interval).await;
        }
    }
}
