//! The prompt: line editing, history, completion and hints.

use std::cell::Cell;
use std::io::IsTerminal as _;
use std::path::PathBuf;

use anyhow::Context as _;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{CompletionType, Config, Editor};
use tokio::runtime::Runtime;

use crate::docs::Docs;
use crate::issue;
use crate::lines::{self, Line};
use crate::server::Server;
use crate::{exit, output};

mod assistant;
mod secret;

use assistant::Assistant;

/// The largest number of lines in the history.
const HISTORY_LINES: usize = 1000;

/// Reads and runs commands until the user leaves.
pub(crate) fn run(runtime: &Runtime, server: &mut Server) -> anyhow::Result<()> {
    let mut prompt = Prompt::new()?;
    server.reports_transport = true; // the prompt itself reports it
    prompt.connect(runtime, server);
    loop {
        prompt.load_docs(runtime, server);
        let line = match prompt.editor.readline(&server.prompt()) {
            Ok(line) => line,
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        };
        let parsed = Line::parse(line.as_bytes());
        prompt.remember(&line, &parsed);
        match parsed {
            Line::Empty => {}
            Line::Exit => return Ok(()),
            Line::Clear => prompt.editor.clear_screen().context("cannot clear the screen")?,
            Line::Invalid(why) => output::write(&server.settings.format.usage_error(why))?,
            Line::PromptCommand(words) => prompt.run_prompt_command(&words, server)?,
            Line::Help(words) => {
                let colors = std::io::stdout().is_terminal();
                let help =
                    prompt.editor.helper().map(|assistant| assistant.docs.help(&words, colors));
                output::write_own(help.unwrap_or_default().as_bytes())?;
            }
            Line::Connect(host, port) => {
                server.switch_to(host, port);
                prompt.connect(runtime, server);
            }
            Line::Command(repeat, words) => {
                let interrupted = runtime.block_on(async {
                    tokio::select! {
                        done = lines::command(server, &words, repeat) => done.map(|()| false),
                        _ = tokio::signal::ctrl_c() => Ok(true),
                    }
                })?;
                if interrupted {
                    // The reply may still come, so the old connection must not be used any more.
                    output::write(b"\n")?;
                    prompt.connect(runtime, server);
                } else {
                    prompt.report_transport(server); // the command may have reconnected
                }
            }
        }
    }
}

struct Prompt {
    editor: Editor<Assistant, FileHistory>,
    history: Option<PathBuf>,
    /// The transport that was reported last.
    reported: String,
}

impl Prompt {
    fn new() -> anyhow::Result<Self> {
        let config = Config::builder()
            .completion_type(CompletionType::Circular)
            .auto_add_history(false) // commands with passwords are left out
            .max_history_size(HISTORY_LINES)
            .context("cannot configure the history")?
            .build();
        let mut editor = Editor::with_config(config).context("cannot use the terminal")?;
        editor.set_helper(Some(Assistant { docs: Docs::default(), shows_hints: Cell::new(true) }));
        let history = history_file();
        if let Some(file) = &history {
            let _ = editor.load_history(file); // fails the first time: the file does not exist
        }
        Ok(Self { editor, history, reported: String::new() })
    }

    fn connect(&mut self, runtime: &Runtime, server: &mut Server) {
        if let Err(error) =
            runtime.block_on(async { issue::report_refusal(server.connect().await) })
        {
            output::write_stderr(exit::line(&error)); // each command tries to connect again
        }
        self.report_transport(server);
    }

    /// Reports the transport of the connection if it differs from the one reported last.
    fn report_transport(&mut self, server: &Server) {
        if let Some(transport_info) = server.transport_info()
            && transport_info.description != self.reported
        {
            output::write_stderr(&transport_info.description);
            self.reported = transport_info.description;
        }
    }

    /// Loads the list of commands, once. Tries again later if the server requires a login first.
    fn load_docs(&mut self, runtime: &Runtime, server: &mut Server) {
        if let Some(assistant) = self.editor.helper_mut()
            && assistant.docs.is_empty()
            && server.is_connected()
            && !server.is_in_transaction()
        {
            assistant.docs = runtime.block_on(Docs::fetch(server));
        }
    }

    /// Adds a line to the history, unless it is empty or may contain a password.
    fn remember(&mut self, line: &str, parsed: &Line) {
        let is_kept = match parsed {
            Line::Empty => false,
            Line::Command(_, words) => !secret::is_secret(words),
            Line::Invalid(_) => !secret::may_be_secret(line),
            _ => true,
        };
        if is_kept
            && self.editor.add_history_entry(line).is_ok_and(|is_new| is_new)
            && let Some(file) = &self.history
        {
            let _ = self.editor.append_history(file); // the prompt works without a history file
        }
    }

    /// Runs a command of the prompt itself, such as `:transport`.
    fn run_prompt_command(&self, words: &[Vec<u8>], server: &Server) -> anyhow::Result<()> {
        let lower: Vec<_> =
            words.iter().map(|word| String::from_utf8_lossy(word).to_lowercase()).collect();
        let words: Vec<_> = lower.iter().map(String::as_str).collect();
        let set_hints = |shows| {
            if let Some(assistant) = self.editor.helper() {
                assistant.shows_hints.set(shows);
            }
        };
        match words.as_slice() {
            [":set", "hints"] => set_hints(true),
            [":set", "nohints"] => set_hints(false),
            [":transport"] => {
                let words = server.transport_info().map_or_else(
                    || "not connected".into(),
                    |transport_info| transport_info.description,
                );
                output::write(format!("{words}\n").as_bytes())?;
            }
            _ => {
                let name = words.join(" ");
                let line = format!(
                    "{name}: unknown command; use :transport, :set hints or :set nohints\n"
                );
                output::write(line.as_bytes())?;
            }
        }
        Ok(())
    }
}

/// Returns the history file: `FERRITECLI_HISTFILE`, or a file in the home directory. Returns `None`
/// if the variable is `/dev/null` or empty, or if it is not set and there is no home directory.
fn history_file() -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").filter(|home| !home.is_empty());
    let file = match std::env::var_os("FERRITECLI_HISTFILE") {
        Some(file) => PathBuf::from(file),
        None => PathBuf::from(home()?).join(".ferritecli_history"),
    };
    (file.as_os_str() != "/dev/null" && !file.as_os_str().is_empty()).then_some(file)
}
