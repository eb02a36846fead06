//! A session as data: how the two engines are started, and what the clients do, step by step. It
//! holds no connection and no clock, so that a seed always gives the same session and the minimiser
//! can drop parts of it.

use std::fmt;

/// A word of a command. The number of a client differs between the engines and is filled in when
/// the step is sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Word {
    Bytes(Vec<u8>),
    /// The engine's number of this client.
    Id(usize),
}

/// Bytes to send, apart from the numbers of clients.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Raw(Vec<u8>),
    /// A whole bulk string with the engine's number of this client.
    Id(usize),
}

/// How a flooding client is stopped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Stop {
    KillId,
    KillUser,
    DeleteUser,
    /// In one transaction, so that the name exists again at once.
    RecreateUser,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// A client sends bytes.
    Write {
        parts: Vec<Part>,
        /// Wait until both engines are at rest before the next step.
        settle: bool,
        /// Time that a command of this write may take, such as a blocking pop that times out.
        wait_ms: u64,
        /// The reply is the client's own number.
        tells_id: bool,
    },
    /// The client ends its side of the connection, and goes on to read.
    EndWriting,
    /// The client hangs up, wherever it is in a command, and comes back.
    Reconnect,
    /// The client, as user `flood`, sends increments without a pause while it is stopped.
    Flood { stop: Stop, by_observer: bool },
}

/// What one client does at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    pub(crate) client: usize,
    pub(crate) action: Action,
    /// Steps with the same number are pieces of one write; the minimiser drops them together.
    pub(crate) burst: usize,
}

/// How both engines are started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setup {
    /// Original names and the names that they have instead; an empty one disables the command.
    pub(crate) renames: Vec<(&'static str, &'static str)>,
    /// Lines of the ACL file.
    pub(crate) users: Vec<String>,
    pub(crate) clients: usize,
}

impl Setup {
    /// The name by which clients call this command.
    pub(crate) fn typed<'a>(&'a self, name: &'a str) -> &'a str {
        match self.renames.iter().find(|(original, _)| *original == name) {
            // Disabled: the old name, which the engine does not know any more.
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
    /// The same with other steps, and with rest between steps of different clients: the order of
    /// two clients is defined only if the first has been served before the second speaks.
    pub(crate) fn with_steps(&self, mut steps: Vec<Step>) -> Self {
        for at in 0..steps.len() {
            let client = steps[at].client;
            let goes_on = steps.get(at + 1).is_some_and(|next| {
                let goes_on = matches!(
                    next.action,
                    Action::Write { tells_id: false, .. } | Action::EndWriting
                );
                next.client == client && goes_on
            });
            if let Action::Write { settle, tells_id, .. } = &mut steps[at].action {
                *settle |= !goes_on || *tells_id;
            }
        }
        Self { seed: self.seed, setup: self.setup.clone(), steps }
    }
}

/// Adds a command in the form that clients send.
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

/// Adds raw bytes.
pub(crate) fn push(into: &mut Vec<Part>, bytes: &[u8]) {
    match into.last_mut() {
        Some(Part::Raw(last)) => last.extend_from_slice(bytes),
        _ => into.push(Part::Raw(bytes.to_vec())),
    }
}

/// The beginning and the end of bytes, as text.
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
            Action::EndWriting => f.write_str("ends its side"),
            Action::Reconnect => f.write_str("reconnects"),
            Action::Flood { stop, by_observer } => {
                let by = if *by_observer { "an observer" } else { "client 0" };
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
                    write!(f, ", {wait_ms} ms pass")?;
                }
                if *settle { Ok(()) } else { f.write_str(", goes on at once") }
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
