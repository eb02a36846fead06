//! A command, its reply on stdout, and the commands that have no end to their replies.

use std::io;

use anyhow::bail;
use ferrite_proto::resp::Value;

use crate::connection::Frame;
use crate::exit::ErrorReply;
use crate::format::{Style, error_of};
use crate::output;
use crate::server::{ConnectError, Server};

/// Who gives the commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Giver {
    /// The command line: one command, and any failure is the end.
    CommandLine,
    /// The terminal, or a file of commands: a failure is told, and the next command may do better.
    Lines,
}

/// How replies to a command come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    /// One.
    Once,
    /// For as long as somebody reads them.
    Stream { is_pubsub: bool },
    /// None, if it goes as wished: the server ends.
    Shutdown,
}

/// Runs a command `repeat` times, for ever if that is negative. An error is one of the
/// connection's, or, where that is the end, a reply that is one (`-e`).
pub(crate) async fn run(
    server: &mut Server,
    words: &[Vec<u8>],
    repeat: i64,
    giver: Giver,
) -> anyhow::Result<()> {
    if !server.is_connected() {
        tell_refusal(server.connect().await)?;
    }
    let course = course(words)?;
    let is_text = is_text(words);
    let mut left = repeat;
    while left != 0 {
        left = if left < 0 { left } else { left - 1 };
        if let Some(refusal) = server.refusal_of_silence(words).await? {
            show(server, words, &refusal, is_text, giver).await?;
        } else {
            let is_replied_to = server.send(words).await?;
            match course {
                Course::Stream { is_pubsub } => return stream(server, is_pubsub).await,
                Course::Shutdown => match once(server, words, is_text, giver).await {
                    Err(error) if is_end(&error) => {
                        server.disconnect();
                        return Ok(());
                    }
                    other => other?,
                },
                Course::Once if is_replied_to => once(server, words, is_text, giver).await?,
                Course::Once => {}
            }
        }
        if let Some(interval) = server.settings.interval.filter(|_| left != 0) {
            tokio::time::sleep(interval).await;
        }
    }
    Ok(())
}

/// A server that does not let us in says so, and goes on to say it to each command.
pub(crate) fn tell_refusal(connected: Result<(), ConnectError>) -> anyhow::Result<()> {
    match connected {
        Ok(()) => Ok(()),
        Err(ConnectError::Refused(text)) => {
            output::tell(text);
            Ok(())
        }
        Err(ConnectError::Unreachable(error)) => Err(error),
    }
}

async fn once(
    server: &mut Server,
    words: &[Vec<u8>],
    is_text: bool,
    giver: Giver,
) -> anyhow::Result<()> {
    loop {
        let mut frame = server.connection()?.frame().await?;
        if !frame.is_push() {
            if is_info_rdma(words) && is_nothing(&frame.value()?) {
                frame = info_rdma(server).await?;
            }
            return show(server, words, &frame, is_text, giver).await;
        }
        if server.settings.shows_pushes {
            output::write(&server.settings.format.push(&frame.value()?))?;
        }
    }
}

/// What an engine without a section `rdma` of its own knows of RDMA: the module's, at whichever
/// port, or nothing.
async fn info_rdma(server: &mut Server) -> anyhow::Result<Frame> {
    let frame = server.ask(&["INFO", "ferrite_rdma"]).await?;
    if is_nothing(&frame.value()?) {
        let transport_info =
            server.transport_info().map_or("", |transport_info| transport_info.words.as_str());
        output::tell(format_args!(
            "The engine knows nothing of RDMA: it has no Ferrite module (loadmodule ferrite.so). This connection: {transport_info}"
        ));
    }
    Ok(frame)
}

fn is_info_rdma(words: &[Vec<u8>]) -> bool {
    matches!(words, [info, rdma] if info.eq_ignore_ascii_case(b"info") && rdma.eq_ignore_ascii_case(b"rdma"))
}

/// An empty text, in either protocol.
fn is_nothing(reply: &Value<'_>) -> bool {
    matches!(reply, Value::Bulk(b"") | Value::Verbatim { text: b"", .. })
}

async fn show(
    server: &mut Server,
    words: &[Vec<u8>],
    frame: &Frame,
    is_text: bool,
    giver: Giver,
) -> anyhow::Result<()> {
    let reply = frame.value()?;
    if let Some(text) = error_of(&reply)
        && server.settings.fails_on_error
        && giver == Giver::CommandLine
    {
        bail!(ErrorReply(String::from_utf8_lossy(text).into_owned()));
    }
    output::write(&server.settings.format.reply(&reply, is_text))?;
    tell_refusal(server.note(words, &reply).await)
}

/// Messages, or what other clients ask for: until the connection ends, or somebody has had enough.
async fn stream(server: &mut Server, is_pubsub: bool) -> anyhow::Result<()> {
    let style = server.settings.format.style;
    if is_pubsub && style != Style::Raw {
        let line = "Reading messages... (press Ctrl-C to quit)";
        // No line of JSON.
        if output::is_json(style) {
            output::tell(line);
        } else {
            output::write(format!("{line}\n").as_bytes())?;
        }
    }
    loop {
        let frame = server.connection()?.frame().await?;
        let reply = frame.value()?;
        output::write(&server.settings.format.reply(&reply, false))?;
        if error_of(&reply).is_some() {
            return Ok(());
        }
    }
}

fn is_end(error: &anyhow::Error) -> bool {
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

fn course(words: &[Vec<u8>]) -> anyhow::Result<Course> {
    let name = words.first().map(|word| word.to_ascii_lowercase()).unwrap_or_default();
    Ok(match name.as_slice() {
        b"monitor" => Course::Stream { is_pubsub: false },
        b"subscribe" | b"psubscribe" | b"ssubscribe" => Course::Stream { is_pubsub: true },
        b"shutdown" => Course::Shutdown,
        b"sync" | b"psync" => bail!(
            "SYNC and PSYNC make the connection that of a replica, which this is not: redis-cli --replica shows what one gets"
        ),
        _ => Course::Once,
    })
}

/// Replies that are text for people, whatever their type.
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
