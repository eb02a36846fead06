//! The rules that redirect connections to the agent.
//!
//! The kernel removes the rules when their owner ends (`flags owner`), so that a dead agent does
//! not cut off its host. The owner is a child process, `nft -i`, which ends at the end of its
//! input. A second child, [`RELAY`], passes the agent's commands on to it. If the agent ends for
//! any reason, the relay's input ends, then the relay and `nft` end, and the rules are removed.
//!
//! While a new agent takes over from an old one that drains, both have rules. So each process has a
//! table of its own.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{sleep, timeout};

use super::host_setup::find_program;
use super::other_agents;
use super::redirection::{Redirection, TIMEOUT, redirect_port};
use crate::redirection_state::RedirectionState;

/// Passes its input on, and ends 50 ms after its input. When the agent is killed, the kernel resets
/// the redirected connections. It translates the addresses of these resets only while the rules
/// exist. Without a pause, a program would ignore a late reset and wait for ever.
const RELAY: &str = "cat; exec sleep 0.05";
/// The pause before the rules are set again, after their owner has ended.
const PAUSE: Duration = Duration::from_secs(1);

/// The rules, and the process that owns them.
#[derive(Debug)]
pub(super) struct Rules {
    redirection: Redirection,
    owner: Owner,
}

/// The process that owns the rules: `nft -i`.
#[derive(Debug)]
struct Owner {
    child: Child,
    /// The input of the relay.
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    errors: ChildStderr,
}

impl Rules {
    /// Sets the rules.
    ///
    /// # Errors
    /// Fails if nft cannot set them, or another agent already redirects the same connections.
    pub(super) async fn set(redirection: Redirection) -> anyhow::Result<Self> {
        let owner = Owner::start_as_only_one(&redirection).await?;
        Ok(Self { redirection, owner })
    }

    /// Sets the rules again whenever they are lost, for ever.
    pub(super) async fn keep(&mut self, state: &RedirectionState) -> std::convert::Infallible {
        loop {
            let ended = self.owner.child.wait().await;
            let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
            state.set_rules(Some(format!("nft has ended ({status})")));
            tracing::error!(
                "nft has ended ({status}): new connections are not redirected and use TCP directly"
            );
            loop {
                sleep(PAUSE).await;
                // Another agent may have started meanwhile.
                match Owner::start_as_only_one(&self.redirection).await {
                    Ok(owner) => break self.owner = owner,
                    Err(error) => {
                        if state.set_rules(Some(format!("cannot set the rules: {error:#}"))) {
                            tracing::error!("cannot set the redirecting rules: {error:#}");
                        }
                    }
                }
            }
            state.set_rules(None);
            tracing::info!("connections are redirected again");
        }
    }

    /// Redirects no further connections. Connections that were redirected before stay open: the
    /// chain stays, and one rule makes the kernel track connections, so it translates their
    /// addresses.
    pub(super) async fn stop(&mut self) {
        let chain = format!("ip {} out", Redirection::table());
        let flush = format!("flush chain {chain}; add rule {chain} ct state new return");
        if let Err(error) = self.owner.run(&flush).await {
            tracing::warn!("cannot remove the redirecting rules: {error:#}");
        }
    }
}

impl Owner {
    /// Sets the rules, unless another agent redirects the same connections.
    async fn start_as_only_one(redirection: &Redirection) -> anyhow::Result<Self> {
        other_agents::check(redirection).await?;
        let owner = Self::start(redirection).await?;
        // If this fails, `owner` is dropped, and the kernel removes the rules.
        other_agents::check_order(redirection).await?;
        Ok(owner)
    }

    async fn start(redirection: &Redirection) -> anyhow::Result<Self> {
        let nft = find_program("nft").context("cannot find nft, of the package nftables")?;
        let mut relay = Command::new("/bin/sh")
            .args(["-c", RELAY])
            .process_group(0) // signals of the terminal are for the agent
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run /bin/sh")?;
        let (Some(input), Some(commands)) = (relay.stdin.take(), relay.stdout.take()) else {
            bail!("the relay of nft has no pipes");
        };
        let commands: Stdio = commands.try_into().context("cannot pass a pipe on to nft")?;
        let mut child = Command::new(&nft)
            .arg("-i")
            // At its end, nft writes the commands into `.nft.history` in this directory.
            .env("HOME", "/dev/null")
            .process_group(0)
            .kill_on_drop(true)
            .stdin(commands)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", nft.display()))?;
        let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
            bail!("nft has no pipes");
        };
        let output = BufReader::new(output).lines();
        let mut owner = Self { child, input, output, errors };
        let listed = owner.run(&redirection.commands()).await?;
        if !listed.iter().any(|line| redirect_port(line) == Some(redirection.to)) {
            bail!("nft has not set the rules; the chain has: {}", listed.join(" "));
        }
        Ok(owner)
    }

    /// Runs commands. Returns the lines of the chain afterwards.
    async fn run(&mut self, commands: &str) -> anyhow::Result<Vec<String>> {
        let list = format!("list chain ip {} out", Redirection::table());
        let Self { input, output, errors, .. } = self;
        let answer = async {
            input.write_all(format!("{commands}\n{list}\n").as_bytes()).await?;
            let mut lines = Vec::new();
            let mut error = vec![0; 4096];
            loop {
                tokio::select! {
                    line = output.next_line() => match line? {
                        Some(line) if line == "}" => return Ok(lines),
                        Some(line) => lines.push(line),
                        None => {
                            // What nft has written last names the cause.
                            let mut rest = Vec::new();
                            errors.read_to_end(&mut rest).await?;
                            bail!("nft has ended: {}", one_line(&rest));
                        }
                    },
                    count = errors.read(&mut error) => match count? {
                        0 => bail!("nft has ended"),
                        count => bail!("nft: {}", one_line(&error[..count])),
                    },
                }
            }
        };
        timeout(TIMEOUT, answer).await.unwrap_or_else(|_| bail!("no answer of nft in {TIMEOUT:?}"))
    }
}

/// Returns the line of an error that names the cause.
fn one_line(error: &[u8]) -> String {
    let text = String::from_utf8_lossy(error);
    let mut lines = text.lines().map(str::trim).filter(|line| !matches!(*line, "" | "Error:"));
    lines.next().unwrap_or_default().to_owned()
}
