//! Runs a command and prints its replies. Some commands, such as MONITOR, have endless replies.

use std::io;

use anyhow::bail;
use ferrite_proto::cluster::Redirect;
use ferrite_proto::resp::Value;

use crate::cluster;
use crate::command_source::CommandSource;
use crate::connection::Frame;
use crate::exit::ErrorReply;
use crate::format::{Style, error_of};
use crate::output;
use crate::server::{ConnectError, Server};

/// The replies that a command has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplyMode {
    /// One reply.
    Once,
    /// Replies until the connection ends, or until a reply is an error.
    Stream { is_pubsub: bool },
    /// No reply on success, because the server exits.
    Shutdown,
}

/// Runs a command `repeat` times, or forever if `repeat` is negative.
///
/// # Errors
/// Returns an error if the connection fails, the command is not supported or stdout cannot be
/// written. With `-e` on the command line, also if a reply is an error.
pub(crate) async fn run(
    server: &mut Server,
    words: &[Vec<u8>],
    repeat: i64,
    source: CommandSource,
) -> anyhow::Result<()> {
    if !server.is_connected() {
        report_refusal(server.connect().await)?;
    }
    let reply_mode = reply_mode(words)?;
    let is_text = is_text(words);
    let mut left = repeat;
    while left != 0 {
        left = if left < 0 { left } else { left - 1 };
        if let Some(refusal) = server.check_client_reply(words).await? {
            print_reply(server, words, &refusal, is_text, source).await?;
        } else {
            let mut redirects = 0;
            // Repeats until the command has reached the node that has its keys.
            loop {
                let is_replied_to = server.send(words).await?;
                let redirect = match reply_mode {
                    ReplyMode::Stream { is_pubsub } => {
                        // The line for people is printed once.
                        match print_stream(server, is_pubsub && redirects == 0).await? {
                            None => return Ok(()),
                            redirect => redirect,
                        }
                    }
                    ReplyMode::Shutdown => {
                        match receive_reply(server, words, is_text, source).await {
                            Err(error) if is_disconnect(&error) => {
                                server.disconnect();
                                return Ok(());
                            }
                            other => other?,
                        }
                    }
                    ReplyMode::Once if is_replied_to => {
                        receive_reply(server, words, is_text, source).await?
                    }
                    ReplyMode::Once => None,
                };
                let Some(redirect) = redirect else { break };
                cluster::count(&mut redirects)?;
                cluster::follow(server, &redirect, source).await?;
            }
        }
        if let Some(interval) = server.settings.interval.filter(|_| left != 0) {
            tokio::time::sleep(interval).await;
        }
    }
    Ok(())
}

/// Reports a rejected AUTH, SELECT or HELLO, but does not fail: the connection stays open, and the
/// server answers the following commands, if need be with errors.
pub(crate) fn report_refusal(connected: Result<(), ConnectError>) -> anyhow::Result<()> {
    match connected {
        Ok(()) => Ok(()),
        Err(ConnectError::Refused(text)) => {
            output::write_stderr(text);
            Ok(())
        }
        Err(ConnectError::Unreachable(error)) => Err(error),
    }
}

/// Receives and prints the reply to a command. If the reply is a redirect that must be followed,
/// returns it instead of printing it.
async fn receive_reply(
    server: &mut Server,
    words: &[Vec<u8>],
    is_text: bool,
    source: CommandSource,
) -> anyhow::Result<Option<Redirect>> {
    loop {
        let mut frame = server.connection()?.frame().await?;
        if !frame.is_push() {
            if let Some(redirect) = cluster::redirect_of(server, &frame.value()?) {
                return Ok(Some(redirect));
            }
            if is_info_rdma(words) && is_empty_text(&frame.value()?) {
                frame = info_rdma(server).await?;
            }
            print_reply(server, words, &frame, is_text, source).await?;
            return Ok(None);
        }
        if server.settings.shows_pushes {
            output::write(&server.settings.format.push(&frame.value()?))?;
        }
    }
}

/// Returns the module's section of INFO, for an engine that has no section `rdma` of its own. If
/// the module is not loaded, the section is empty, and this function prints a note.
async fn info_rdma(server: &mut Server) -> anyhow::Result<Frame> {
    let frame = server.request(&["INFO", "ferrite_rdma"]).await?;
    if is_empty_text(&frame.value()?) {
        let transport_info = server
            .transport_info()
            .map_or_else(String::new, |transport_info| transport_info.description);
        output::write_stderr(format_args!(
            "INFO has no section rdma, because the engine has not loaded the Ferrite module \
             (loadmodule ferrite.so); this connection runs {transport_info}"
        ));
    }
    Ok(frame)
}

fn is_info_rdma(words: &[Vec<u8>]) -> bool {
    matches!(words, [info, rdma] if info.eq_ignore_ascii_case(b"info") && rdma.eq_ignore_ascii_case(b"rdma"))
}

/// Returns whether a reply is an empty string, in either protocol.
fn is_empty_text(reply: &Value<'_>) -> bool {
    matches!(reply, Value::Bulk(b"") | Value::Verbatim { text: b"", .. })
}

async fn print_reply(
    server: &mut Server,
    words: &[Vec<u8>],
    frame: &Frame,
    is_text: bool,
    source: CommandSource,
) -> anyhow::Result<()> {
    let reply = frame.value()?;
    if let Some(text) = error_of(&reply)
        && server.settings.fails_on_error
        && source == CommandSource::CommandLine
    {
        bail!(ErrorReply(String::from_utf8_lossy(text).into_owned()));
    }
    output::write(&server.settings.format.reply(&reply, is_text))?;
    report_refusal(server.track_state(words, &reply).await)
}

/// Prints messages, or the commands of other clients (MONITOR). Stops when the connection ends or
/// when a reply is an error. At the prompt, Ctrl-C cancels it. Returns the redirect that must be
/// followed if the first reply is one (SSUBSCRIBE).
async fn print_stream(server: &mut Server, announces: bool) -> anyhow::Result<Option<Redirect>> {
    let style = server.settings.format.style;
    if announces && style != Style::Raw {
        let line = "Reading messages... (press Ctrl-C to quit)";
        // With JSON, this line goes to stderr, because it is not JSON.
        if output::is_json(style) {
            output::write_stderr(line);
        } else {
            output::write(format!("{line}\n").as_bytes())?;
        }
    }
    let mut is_first = true;
    loop {
        let frame = server.connection()?.frame().await?;
        let reply = frame.value()?;
        if is_first && let Some(redirect) = cluster::redirect_of(server, &reply) {
            return Ok(Some(redirect));
        }
        is_first = false;
        output::write(&server.settings.format.reply(&reply, false))?;
        if error_of(&reply).is_some() {
            return Ok(None);
        }
    }
}

fn is_disconnect(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(
        kind,
        Some(
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
        )
    )
}

fn reply_mode(words: &[Vec<u8>]) -> anyhow::Result<ReplyMode> {
    let name = words.first().map(|word| word.to_ascii_lowercase()).unwrap_or_default();
    Ok(match name.as_slice() {
        b"monitor" => ReplyMode::Stream { is_pubsub: false },
        b"subscribe" | b"psubscribe" | b"ssubscribe" => ReplyMode::Stream { is_pubsub: true },
        b"shutdown" => ReplyMode::Shutdown,
        b"sync" | b"psync" => bail!(
            "SYNC and PSYNC are not supported, since ferrite-cli cannot act as a replica; use \
             redis-cli --replica"
        ),
        _ => ReplyMode::Once,
    })
}

/// Returns whether the reply to a command is text for people, which is printed without quotes.
fn is_text(words: &[Vec<u8>]) -> bool {
    let lower: Vec<_> = words.iter().take(2).map(|word| word.to_ascii_lowercase()).collect();
    let word = |at: usize| lower.get(at).map(Vec::as_slice).unwrap_or_default();
    let count = words.len();
    match (word(0), word(1)) {
        (b"info" | b"lolwut", _) => true,
        (b"debug", b"htstats" | b"htstats-key" | b"client-eviction") => true,
        (b"memory", b"malloc-stats" | b"doctor") => true,
        (b"cluster", b"nodes" | b"info") => count == 2,
        (b"client", b"list" | b"info") => true,
        (b"latency", b"graph") => count == 3,
        (b"latency", b"doctor") => count == 2,
        (b"proxy", b"info") => true,
        _ => false,
    }
}
