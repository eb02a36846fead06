//! `--pipe`: sends stdin to the server as fast as possible, and counts the replies.
//!
//! The commands are not parsed, so the number of replies is unknown. Therefore the last command is
//! an ECHO of a unique text. Its reply is the last one.

use std::cell::Cell;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ferrite_proto::resp::{Value, encode_command};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::connection::Replies;
use crate::format::error_of;
use crate::output;
use crate::progress::{Progress, Unit};
use crate::server::Server;

const READ_BYTES: usize = 64 << 10;
/// Number of replies between two updates of the progress bar.
const REPLIES_PER_UPDATE: u64 = 1000;

/// The numbers of replies.
#[derive(Debug, Default)]
struct Count {
    errors: u64,
    replies: u64,
}

/// Sends stdin and prints the numbers of replies.
///
/// # Errors
/// Returns [`ErrorReplies`] if a reply was an error, or if the replies did not come in time.
pub(crate) async fn run(
    server: &mut Server,
    reply_timeout: Option<Duration>,
) -> anyhow::Result<()> {
    let (mut replies, mut writer) = server.take_connection()?.split();
    let is_json = output::is_json(server.settings.format.style);
    #[expect(
        clippy::disallowed_types,
        reason = "the text must differ from other replies, but is not secret"
    )]
    let mark =
        format!("{:020x}", std::collections::hash_map::RandomState::new().build_hasher().finish());
    let is_all_sent = Cell::new(false);
    let progress = Progress::new(Unit::Bytes, stdin_bytes());
    let sending = async {
        let mut stdin = tokio::io::stdin();
        let mut bytes = vec![0; READ_BYTES];
        loop {
            let count = stdin.read(&mut bytes).await.context("Error reading from stdin")?;
            if count == 0 {
                break;
            }
            let sent = writer.write_all(bytes.get(..count).unwrap_or_default()).await;
            sent.context("Error writing to the server")?;
            progress.add_done(count as u64);
        }
        // The line end completes an unfinished last line. The server ignores empty lines.
        let mut last = b"\r\n".to_vec();
        encode_command(["ECHO", &mark], &mut last);
        is_all_sent.set(true);
        writer.write_all(&last).await.context("Error writing to the server")?;
        writer.flush().await.context("Error writing to the server")?;
        progress.above(|| {
            print_progress(is_json, "All data transferred. Waiting for the last reply...\n")
        })
    };
    let counting =
        count(&mut replies, mark.as_bytes(), &is_all_sent, reply_timeout, is_json, &progress);
    let ((), count) = tokio::try_join!(sending, counting)?;
    progress.finish();
    let Count { errors, replies } = count;
    let line = match is_json {
        true => format!("{{\"errors\":{errors},\"replies\":{replies}}}\n"),
        false => format!("errors: {errors}, replies: {replies}\n"),
    };
    output::write(line.as_bytes())?;
    if errors > 0 {
        bail!(ErrorReplies);
    }
    Ok(())
}

/// Some replies were errors, or did not come in time. This has been printed already.
#[derive(Debug)]
pub(crate) struct ErrorReplies;

impl std::fmt::Display for ErrorReplies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("some replies were errors")
    }
}

impl std::error::Error for ErrorReplies {}

async fn count(
    replies: &mut Replies,
    mark: &[u8],
    is_all_sent: &Cell<bool>,
    reply_timeout: Option<Duration>,
    is_json: bool,
    progress: &Progress,
) -> anyhow::Result<Count> {
    let mut count = Count::default();
    loop {
        let frame = match timeout(reply_timeout.unwrap_or(Duration::MAX), replies.frame()).await {
            Ok(frame) => frame.context("Error reading replies from server")?,
            // The time limit applies only after the end of stdin.
            Err(_) if !is_all_sent.get() => continue,
            Err(_) => {
                let seconds = reply_timeout.unwrap_or_default().as_secs();
                progress.above(|| {
                    output::write_stderr(format_args!(
                        "No replies for {seconds} seconds: exiting."
                    ));
                });
                count.errors += 1;
                return Ok(count);
            }
        };
        if frame.is_push() {
            continue;
        }
        let reply = frame.value().map_err(io::Error::other)?;
        if is_all_sent.get() && reply == Value::Bulk(mark) {
            progress.above(|| print_progress(is_json, "Last reply received from server.\n"))?;
            return Ok(count);
        }
        count.replies += 1;
        if progress.is_shown() && count.replies.is_multiple_of(REPLIES_PER_UPDATE) {
            progress.set_note(format!(", {} replies, {} errors", count.replies, count.errors));
        }
        if let Some(text) = error_of(&reply) {
            progress.above(|| output::write_stderr(String::from_utf8_lossy(text)));
            count.errors += 1;
        }
    }
}

/// Returns the size of stdin if it is a file.
fn stdin_bytes() -> Option<u64> {
    let stdin = std::fs::metadata("/dev/stdin").ok()?;
    stdin.is_file().then_some(stdin.len())
}

/// Prints a progress message on stdout, as redis-cli does. With JSON output, prints it on stderr,
/// because it is not JSON.
fn print_progress(is_json: bool, line: &str) -> anyhow::Result<()> {
    if is_json {
        output::write_stderr(line.trim_end());
        return Ok(());
    }
    output::write(line.as_bytes())
}
