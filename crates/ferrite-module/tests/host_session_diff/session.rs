//! A session as data: how the two engines are started, and what the clients do, step by step. It
//! has no connection and no clock. So a seed always gives the same session, and a failing session
//! can be shortened.

use std::fmt;

/// A word of a command. Client ids differ between the engines and are filled in when the step is
/// sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Word {
    Bytes(Vec<u8>),
    /// The engine's id of this client.
    Id(usize),
}

/// A part of the bytes to send.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Raw(Vec<u8>),
    /// A whole bulk string with the engine's id of this client.
    Id(usize),
}

/// How a flooding client is stopped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Stop {
    KillId,
    KillUser,
    DeleteUser,
    /// Deletes and creates the user in one transaction, so that the name exists again at once.
    RecreateUser,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// A client sends bytes.
    Write {
        parts: Vec<Part>,
        /// Wait until both engines are idle before the next step.
        settle: bool,
        /// The time that a command of this write may take, such as a blocking pop that times out.
        wait_ms: u64,
        /// The reply is the client's own id.
        returns_id: bool,
    },
    /// The client shuts down its side of the connection and continues to read.
    EndWriting,
    /// The client disconnects, possibly in the middle of a command, and reconnects.
    Reconnect,
    /// The client, as the user `flood`, sends increments without a pause until it is stopped.
    Flood { stop: Stop, by_observer: bool },
}

/// One action of one client.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    pub(crate) client: usize,
    pub(crate) action: Action,
    /// Steps with the same number belong together, such as the pieces of one write. When a session
    /// is shortened, they are dropped together.
    pub(crate) burst: usize,
}

/// How both engines are started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setup {
    /// Original and new names of renamed commands. An empty new name disables the command.
    pub(crate) renames: Vec<(&'static str, &'static str)>,
    /// Lines of the ACL file.
    pub(crate) users: Vec<String>,
    pub(crate) clients: usize,
}

impl Setup {
    /// Returns the name that clients send for this command.
    pub(crate) fn typed<'a>(&'a self, name: &'a str) -> &'a str {
        match self.renames.iter().find(|(original, _)| *original == name) {
            // Clients send a disabled command by its original name, which the engine does not know
            // any more.
            Some((_, "")) | None => name,
            Some((_, typed)) => typed,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub(crate) seed: u64,
    pub(crate) setup: Setup,
    pub(crate) steps: Vec<Step>,
}

impl Session {
    /// Returns the same session with other steps. Between steps of different clients, the session
    /// waits until the engines are idle. The order of two clients is defined only if the first has
    /// been served before the second sends.
    pub(crate) fn with_steps(&self, mut steps: Vec<Step>) -> Self {
        for at in 0..steps.len() {
            let client = steps[at].client;
            let continues = steps.get(at + 1).is_some_and(|next| {
                let is_more = matches!(
                    next.action,
                    Action::Write { returns_id: false, .. } | Action::EndWriting
                );
                next.client == client && is_more
            });
            if let Action::Write { settle, returns_id, .. } = &mut steps[at].action {
                *settle |= !continues || *returns_id;
            }
        }
        Self { seed: self.seed, setup: self.setup.clone(), steps }
    }
}

/// Appends a command as clients send it.
pub(crate) fn encode(words: &[Word], into: &mut Vec<Part>) {
    push(into, format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        match word {
            Word::Id(client) => into.push(Part::Id(*client)),
            Word::Bytes(bytes) => {
                push(into, format!("${}\r\n", bytes.len()).as_bytes());
                push(into, bytes);
                push(into, b"\r\n");
            }
        }
    }
}

/// Appends raw bytes.
pub(crate) fn push(into: &mut Vec<Part>, bytes: &[u8]) {
    match into.last_mut() {
        Some(Part::Raw(last)) => last.extend_from_slice(bytes),
        _ => into.push(Part::Raw(bytes.to_vec())),
    }
}

/// Returns the beginning and the end of bytes as text.
pub(crate) fn excerpt(bytes: &[u8], most: usize) -> String {
    if bytes.len() <= most {
        return bytes.escape_ascii().to_string();
    }
    let (head, tail) = (&bytes[..most * 2 / 3], &bytes[bytes.len() - most / 3..]);
    let left_out = bytes.len() - head.len() - tail.len();
    format!("{} …{left_out} bytes… {}", head.escape_ascii(), tail.escape_ascii())
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {} ", self.client)?;
        match &self.action {
            Action::EndWriting => f.write_str("shuts down its side"),
            Action::Reconnect => f.write_str("reconnects"),
            Action::Flood { stop, by_observer } => {
                let by = if *by_observer { "an observer" } else { "a client of the same port" };
                write!(f, "floods as user flood until {by} stops it: {stop:?}")
            }
            Action::Write { parts, settle, wait_ms, .. } => {
                f.write_str("sends \"")?;
                for part in parts {
                    match part {
                        Part::Raw(bytes) => f.write_str(&excerpt(bytes, 400))?,
                        Part::Id(client) => write!(f, "$…\\r\\n<id of client {client}>\\r\\n")?,
                    }
                }
                f.write_str("\"")?;
                if *wait_ms > 0 {
                    write!(f, ", waits {wait_ms} ms")?;
                }
                if *settle { Ok(()) } else { f.write_str(", continues at once") }
            }
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} clients", self.clients)?;
        for (name, typed) in &self.renames {
            write!(f, "; rename-command {name} {typed:?}")?;
        }
        for user in &self.users {
            write!(f, "\n  {user}")?;
        }
        Ok(())
    }
}
