//! Runs commands on the nodes that serve their slots.
//!
//! One [`Operation`] is a command or a pipeline of the user. All its attempts share one deadline:
//! lookups, connects, redirects and retries. A command that was sent to a server waits for its
//! reply as long as the connection makes progress.
//!
//! The order of commands of a slot is kept: commands that a node has redirected are sent on
//! together, in their order, and before later ones.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Duration;

use futures_util::future::join_all;
use redis::cluster_routing::{Route, SingleNodeRoutingInfo};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, RetryMethod, ServerErrorKind, Value};
use tokio::time::{Instant, sleep, timeout_at};

use super::lookup::Lookup;
use super::node::{Asking, Node, Nodes, Refresh};
use super::pending::{Pending, Replies, Target, sort_out};
use super::reply::{Unserved, unserved};

/// The shortest and the longest pause before another attempt.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];
/// The number of redirects in a row without a pause. A healthy cluster needs at most two.
const REDIRECTS_MAX: u32 = 3;

type Inner = redis::cluster_async::ClusterConnection<Node>;

/// A command or a pipeline of the user.
pub(super) struct Operation<'a> {
    inner: &'a Inner,
    nodes: &'a Nodes,
    deadline: Instant,
}

/// The pauses between attempts.
#[derive(Default)]
struct Pauses {
    redirects: u32,
    last: Option<Duration>,
}

impl Pauses {
    /// Waits before another attempt, unless a redirect says where to go.
    async fn wait(&mut self, target: &Target) {
        if matches!(target, Target::Redirected(_)) && self.redirects < REDIRECTS_MAX {
            self.redirects += 1;
            return;
        }
        let [shortest, longest] = PAUSES;
        let pause = self.last.map_or(shortest, |last| (last * 2).min(longest));
        self.last = Some(pause);
        sleep(pause).await;
    }
}

impl<'a> Operation<'a> {
    pub(super) fn new(inner: &'a Inner, nodes: &'a Nodes) -> Self {
        Self { inner, nodes, deadline: Instant::now() + nodes.shared.retry_for }
    }

    /// Returns whether another attempt may succeed.
    pub(super) fn may_retry(&self, error: &RedisError) -> bool {
        let may_pass = match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Io => {
                !matches!(error.retry_method(), RetryMethod::NoRetry)
            }
            ErrorKind::ClusterConnectionNotFound => true,
            _ => false,
        };
        may_pass && !self.is_over()
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Finds the node for commands. `commands` says whether a replica may serve them.
    async fn find(
        &self,
        routing: &SingleNodeRoutingInfo,
        target: &Target,
        commands: &[&Cmd],
    ) -> RedisResult<Node> {
        let route = match routing {
            SingleNodeRoutingInfo::SpecificNode(route) => Some(*route),
            _ => None,
        };
        // redis-rs decides anew for each command which replica serves it.
        let noted = route.filter(|_| !self.nodes.shared.reads_replicas);
        // Ends with this function, or when the caller gives up.
        let refresh = match target {
            Target::Refreshed => self.nodes.refresh(),
            _ => None,
        };
        let lookup = match target {
            Target::Redirected(redirect) => Lookup::Redirected(redirect.clone()),
            _ => refresh.as_ref().map_or(Lookup::Known, Refresh::lookup),
        };
        match noted {
            Some(route) if lookup == Lookup::Known => {
                if let Some(node) = self.nodes.node_of(route) {
                    return Ok(node);
                }
            }
            Some(route) => self.nodes.forget_node(route),
            None => {}
        }
        let mut ask = redis::pipe();
        ask.add_command(lookup.command());
        let mut inner = self.inner.clone();
        let found = async {
            if route.is_some() && self.nodes.shared.reads_replicas {
                for command in commands {
                    ask.add_command((*command).clone());
                }
                return redis::aio::ConnectionLike::req_packed_commands(&mut inner, &ask, 0, 1)
                    .await;
            }
            inner.route_pipeline(ask, 0, 1, routing.clone()).await
        };
        let found = timeout_at(self.deadline, found).await.map_err(|_| self.late())??;
        let number = match found[..] {
            [Value::Int(number)] => u64::try_from(number).ok(),
            _ => None,
        };
        let node = number.and_then(|number| self.nodes.node(number));
        let gone = || RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        let node = node.ok_or_else(gone)?;
        let is_ask = matches!(target, Target::Redirected(redirect) if redirect.is_ask);
        if let Some(route) = noted.filter(|_| !is_ask) {
            self.nodes.note_node(route, &node);
        }
        Ok(node)
    }

    fn late(&self) -> RedisError {
        let text = format!("no node was found within {:?}", self.nodes.shared.retry_for);
        io::Error::new(io::ErrorKind::TimedOut, text).into()
    }

    /// Runs one command on the node that `routing` names, and follows its redirects.
    pub(super) async fn run_routed(
        &self,
        routing: &SingleNodeRoutingInfo,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let (mut target, mut pauses, mut last) = (Target::Known, Pauses::default(), None);
        loop {
            match self.attempt(routing, &target, &[command]).await {
                Ok(mut replies) => {
                    let Some((reply, why)) = replies.pop() else { return Ok(Value::Nil) };
                    match why {
                        Some(why) if !self.is_over() => target = why.target(),
                        _ => return Ok(reply),
                    }
                }
                Err(error) if self.may_retry(&error) => {
                    (target, last) = (Target::Refreshed, Some(error));
                }
                Err(error) => return Err(cause(error, last)),
            }
            pauses.wait(&target).await;
        }
    }

    /// Runs commands of one slot, in their order.
    pub(super) async fn run_slot(&self, mut pending: Vec<Pending<'_>>) -> RedisResult<Replies> {
        let (mut done, mut pauses, mut last) = (Vec::new(), Pauses::default(), None);
        while let Some(first) = pending.first() {
            let target = first.target.clone();
            let count = pending.iter().take_while(|it| it.target == target).count();
            let rest = pending.split_off(count);
            let commands: Vec<_> = pending.iter().map(|it| it.command).collect();
            let routing = SingleNodeRoutingInfo::SpecificNode(pending[0].route);
            match self.attempt(&routing, &target, &commands).await {
                Ok(replies) => {
                    let (served, again) = sort_out(pending, replies, self.is_over());
                    done.extend(served);
                    pending = again;
                    if pending.is_empty() {
                        pauses = Pauses::default();
                    }
                }
                Err(error) if self.may_retry(&error) => {
                    pending.iter_mut().for_each(|it| it.target = Target::Refreshed);
                    last = Some(error);
                }
                Err(error) => return Err(cause(error, last)),
            }
            if let Some(next) = pending.first() {
                pauses.wait(&next.target).await;
            }
            pending.extend(rest);
        }
        Ok(done)
    }

    /// Sends commands to one node, and returns each reply with the reason if it was not served.
    async fn attempt(
        &self,
        routing: &SingleNodeRoutingInfo,
        target: &Target,
        commands: &[&Cmd],
    ) -> RedisResult<Vec<(Value, Option<Unserved>)>> {
        let node = self.find(routing, target, commands).await?;
        let asking = match target {
            Target::Redirected(redirect) if redirect.is_ask => Asking::BeforeEach,
            _ => Asking::Nowhere,
        };
        let replies = node.serve(commands, asking, self.deadline).await?;
        Ok(with_reasons(replies, &node))
    }

    /// Runs commands of any slots. Those of the same node are one pipeline, in their order.
    pub(super) async fn run_slots(&self, pending: Vec<Pending<'_>>) -> RedisResult<Replies> {
        let mut by_route: Vec<(Route, Vec<&Cmd>)> = Vec::new();
        let mut known: HashMap<Route, usize> = HashMap::new();
        for it in &pending {
            let index = *known.entry(it.route).or_insert_with(|| {
                by_route.push((it.route, Vec::new()));
                by_route.len() - 1
            });
            by_route[index].1.push(it.command);
        }
        if by_route.len() <= 1 {
            return self.run_slot(pending).await;
        }
        let nodes = by_route.iter().map(async |(route, commands)| {
            let routing = SingleNodeRoutingInfo::SpecificNode(*route);
            (*route, self.find(&routing, &Target::Known, commands).await)
        });
        let nodes: HashMap<Route, RedisResult<Node>> = join_all(nodes).await.into_iter().collect();
        let mut by_node: BTreeMap<u64, (Node, Vec<Pending<'_>>)> = BTreeMap::new();
        let (mut again, mut failure) = (Vec::new(), None);
        for it in pending {
            match &nodes[&it.route] {
                Ok(node) => {
                    let new = || (node.clone(), Vec::new());
                    by_node.entry(node.number()).or_insert_with(new).1.push(it);
                }
                Err(error) if self.may_retry(error) => {
                    again.push(Pending { target: Target::Refreshed, ..it });
                }
                Err(error) => failure = Some(error.clone()),
            }
        }
        let served = by_node.into_values().map(async |(node, sent)| {
            let commands: Vec<_> = sent.iter().map(|it| it.command).collect();
            let replies = node.serve(&commands, Asking::Nowhere, self.deadline).await;
            (sent, replies.map(|replies| with_reasons(replies, &node)))
        });
        let mut done = Vec::new();
        for (sent, replies) in join_all(served).await {
            match replies {
                Ok(replies) => {
                    let (served, unserved) = sort_out(sent, replies, self.is_over());
                    done.extend(served);
                    again.extend(unserved);
                }
                Err(why) if self.may_retry(&why.error) => {
                    let refreshed = |it| Pending { target: Target::Refreshed, ..it };
                    again.extend(sent.into_iter().map(refreshed));
                }
                Err(why) => failure = Some(why.error),
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let mut by_route: HashMap<Route, Vec<Pending<'_>>> = HashMap::new();
        for it in again {
            by_route.entry(it.route).or_default().push(it);
        }
        for replies in join_all(by_route.into_values().map(|it| self.run_slot(it))).await {
            done.extend(replies?);
        }
        Ok(done)
    }

    /// Runs a transaction: `commands` begins with MULTI and ends with EXEC or DISCARD. If a node
    /// redirects a part of it, the engine has run nothing, and the whole transaction is sent on.
    /// Returns all replies.
    pub(super) async fn run_transaction(
        &self,
        route: Route,
        commands: &[&Cmd],
    ) -> RedisResult<Vec<Value>> {
        let routing = SingleNodeRoutingInfo::SpecificNode(route);
        let (mut target, mut pauses, mut last) = (Target::Known, Pauses::default(), None);
        loop {
            let asking = match &target {
                Target::Redirected(redirect) if redirect.is_ask => Asking::Once,
                _ => Asking::Nowhere,
            };
            let attempt = async {
                let node = self.find(&routing, &target, commands).await;
                let node = node.map_err(|error| (error, false))?;
                let replies = node.serve(commands, asking, self.deadline).await;
                let replies = replies.map_err(|why| (why.error, why.was_sent))?;
                let why = not_executed(&replies, &node);
                Ok((replies, why))
            };
            match attempt.await {
                Ok((_, Some(why))) if !self.is_over() => target = why.target(),
                Ok((replies, _)) => return Ok(replies),
                // The server may have executed it.
                Err((error, true)) if error.is_io_error() || error.is_connection_dropped() => {
                    return Err(unknown_outcome(&error));
                }
                Err((error, false)) if self.may_retry(&error) => {
                    (target, last) = (Target::Refreshed, Some(error));
                }
                Err((error, _)) => return Err(cause(error, last)),
            }
            pauses.wait(&target).await;
        }
    }
}

fn with_reasons(replies: Vec<Value>, node: &Node) -> Vec<(Value, Option<Unserved>)> {
    let reason = |reply| {
        let why = unserved(&reply, node.host());
        (reply, why)
    };
    replies.into_iter().map(reason).collect()
}

/// Returns why a transaction was not executed, if another attempt may succeed. `replies` are those
/// of MULTI, of the commands, and of EXEC.
fn not_executed(replies: &[Value], node: &Node) -> Option<Unserved> {
    let (exec, queued) = replies.split_last()?;
    let Value::ServerError(error) = exec else { return None };
    match error.kind() {
        Some(ServerErrorKind::ExecAbort) => {
            queued.iter().find_map(|reply| unserved(reply, node.host()))
        }
        _ => unserved(exec, node.host()),
    }
}

fn unknown_outcome(error: &RedisError) -> RedisError {
    let text = format!(
        "the connection broke during a transaction, which the server may have executed: {error}"
    );
    io::Error::new(io::ErrorKind::ConnectionAborted, text).into()
}

/// Returns the error of the last attempt, or that of the one before it if the last has only run out
/// of time.
fn cause(error: RedisError, earlier: Option<RedisError>) -> RedisError {
    if error.is_timeout() { earlier.unwrap_or(error) } else { error }
}
