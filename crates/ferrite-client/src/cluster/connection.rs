//! A connection to a cluster: redis-rs's, with pipelines that may have keys of several slots.
//!
//! redis-rs would run the commands in the task that routes those to all nodes. It sends a pipeline
//! to one node, and if the node redirects one of the commands, it sends the whole pipeline again,
//! so commands that were served run twice. Here redis-rs finds the node, and runs only commands
//! without a key of their own.

use std::sync::Arc;
use std::{fmt, io};

use redis::aio::ConnectionLike;
use redis::cluster_routing::{Route, RoutingInfo, Slot, SlotAddr};
use redis::{
    Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, ServerError, ServerErrorKind,
    Value,
};
use tokio::time::sleep;

use super::directory::NodeTransport;
use super::node::{NO_PROGRESS, Node, Nodes};
use super::operation::Operation;
use super::pending::{Pending, Target};
use super::reply::{error_reply, error_text};
use super::route::{begins_with, is_word, slot_of};
use crate::client::current_runtime;
use crate::subscriptions::{Effect, effect, names};

/// The pause before the cluster connection sends a command again that redis-rs has given up.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// A connection to a cluster: a `redis::aio::ConnectionLike` that any number of tasks can use at
/// the same time. It has a connection to each node, over RDMA where the node's module announces an
/// RDMA endpoint. Clones share the connections.
///
/// - Commands go to the node of their keys. Commands with keys of several slots, such as MGET, are
///   split, and the replies are combined. Commands without keys go to a random node, to all
///   primaries or to all nodes, depending on the command.
/// - A pipeline may have keys of several slots. Commands of the same node keep their order, and the
///   replies have the order of the pipeline. If a node redirects some of them, those keep their
///   order per slot. A command without a slot of its own (PING, or MGET of several slots) runs
///   after all commands before it, and before all after it.
/// - A transaction is one pipeline (`Pipeline::atomic`), and its keys must have one slot. If a node
///   redirects it, the whole transaction is sent to the other node.
/// - Redirects (MOVED, ASK) and temporary errors (TRYAGAIN, CLUSTERDOWN) are retried
///   ([`ClusterClientBuilder::retry_for`](super::ClusterClientBuilder::retry_for)).
/// - If a connection breaks before the reply to a command, the command is **sent again**, as
///   redis-rs does in clusters. The server may then run it twice. A transaction that was sent is
///   not sent again, but fails.
#[derive(Clone)]
pub struct ClusterConnection {
    inner: redis::cluster_async::ClusterConnection<Node>,
    nodes: Arc<Nodes>,
}

/// A part of a pipeline. The parts run one after the other.
enum Part<'a> {
    /// Commands with a slot each.
    Slots(Vec<Pending<'a>>),
    /// A command without a slot of its own, and its place.
    Alone(usize, &'a Cmd),
    /// A transaction from MULTI to EXEC or DISCARD, and the place of MULTI.
    Transaction(usize, Vec<&'a Cmd>),
}

impl ClusterConnection {
    pub(super) fn new(
        inner: redis::cluster_async::ClusterConnection<Node>,
        nodes: Arc<Nodes>,
    ) -> Self {
        Self { inner, nodes }
    }

    /// Returns what was exchanged with each node over each transport since the connection was
    /// opened.
    #[must_use]
    pub fn transports(&self) -> Vec<NodeTransport> {
        self.nodes.shared.directory().transports()
    }

    /// Sends a command to the nodes that `routing` names, instead of those of its keys. SCAN needs
    /// this, because it lists the keys of one node.
    ///
    /// # Errors
    /// Returns an error in the same cases as other commands.
    pub async fn route_command(
        &mut self,
        command: Cmd,
        routing: RoutingInfo,
    ) -> RedisResult<Value> {
        current_runtime()?;
        let reply = match routing {
            RoutingInfo::SingleNode(routing) => {
                self.operation().run_routed(&routing, &command).await
            }
            routing => self.inner.route_command(command, routing).await,
        };
        reply.map_err(|error| self.explain(error))
    }

    fn operation(&self) -> Operation<'_> {
        Operation::new(&self.inner, &self.nodes)
    }

    /// Names the cause of an error that must not be retried.
    fn explain(&self, error: RedisError) -> RedisError {
        if error.code() != Some(NO_PROGRESS) {
            return error;
        }
        let limit = self.nodes.shared.client().response_timeout().unwrap_or_default();
        let message = format!("no byte from the server for {limit:?}");
        io::Error::new(io::ErrorKind::TimedOut, message).into()
    }

    async fn command(&self, operation: &Operation<'_>, command: &Cmd) -> RedisResult<Value> {
        if TRANSACTION.iter().any(|word| begins_with(command, &[word])) {
            return Err(needs_pipeline());
        }
        if effect(command).is_some_and(|effect| effect != Effect::Reset) {
            return self.subscribe(operation, command).await;
        }
        let Some(route) = slot_of(command) else {
            return self.run_in_redis_rs(operation, command).await;
        };
        let pending = Pending { place: 0, route, command, target: Target::Known };
        let mut replies = operation.run_slot(vec![pending]).await?;
        Ok(replies.pop().map_or(Value::Nil, |(_, reply)| reply))
    }

    /// Runs a command that redis-rs sends to several nodes, or to any node.
    async fn run_in_redis_rs(
        &self,
        operation: &Operation<'_>,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let mut inner = self.inner.clone();
        // redis-rs checks its connections with PING in capital letters, which reaches no server.
        let ping = is_word(command, "PING").then(|| redis::cmd("ping"));
        let command = ping.as_ref().unwrap_or(command);
        loop {
            match inner.req_packed_command(command).await {
                Err(error) if operation.may_retry(&error) => sleep(PAUSE).await,
                done => return done,
            }
        }
    }

    /// Runs SUBSCRIBE and similar commands, for one name at a time: the server confirms each name,
    /// and names of sharded channels may belong to several nodes. redis-rs runs them and subscribes
    /// again after a reconnect.
    async fn subscribe(&self, operation: &Operation<'_>, command: &Cmd) -> RedisResult<Value> {
        if !self.nodes.shared.client().is_resp3() {
            let text = "subscriptions need RESP3: use ClientBuilder::push_sender, or ?protocol=3";
            return Err(RedisError::from((ErrorKind::InvalidClientConfig, text)));
        }
        let commands = names(command);
        if commands.is_empty() {
            let text = "name the channels: a cluster connection does not know those of all nodes";
            return Err(RedisError::from((ErrorKind::Client, text)));
        }
        let mut last = Value::Nil;
        for command in commands {
            last = self.run_in_redis_rs(operation, &command).await?;
            if matches!(last, Value::ServerError(_)) {
                break;
            }
        }
        Ok(last)
    }

    async fn pipeline(
        &self,
        pipeline: &Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        let operation = self.operation();
        if pipeline.is_transaction() {
            let [multi, exec] = ["MULTI", "EXEC"].map(redis::cmd);
            let commands: Vec<_> = [&multi].into_iter().chain(pipeline.cmd_iter()).collect();
            let commands = [commands, vec![&exec]].concat();
            let route = route_of(&commands)?;
            let mut replies = operation.run_transaction(route, &commands).await?;
            if let Some(Value::ServerError(error)) = replies.last() {
                return Err(aborted(error, &replies));
            }
            return Ok(replies.drain(..).skip(offset).take(count).collect());
        }
        let mut replies = vec![Value::Nil; pipeline.len()];
        for part in parts(pipeline.cmd_iter().collect())? {
            match part {
                Part::Slots(pending) => {
                    for (place, reply) in operation.run_slots(pending).await? {
                        replies[place] = reply;
                    }
                }
                Part::Alone(place, command) => {
                    replies[place] = match self.command(&operation, command).await {
                        Err(error) => Value::ServerError(ServerError::try_from(error)?),
                        Ok(reply) => reply,
                    };
                }
                Part::Transaction(place, commands) => {
                    let all = operation.run_transaction(route_of(&commands)?, &commands).await?;
                    replies.splice(place..place + all.len(), all);
                }
            }
        }
        Ok(replies.into_iter().skip(offset).take(count).collect())
    }
}

/// The commands that begin and end a transaction.
const TRANSACTION: [&str; 3] = ["MULTI", "EXEC", "DISCARD"];

fn needs_pipeline() -> RedisError {
    let text = "a transaction in a cluster must be one pipeline: use pipe().atomic()";
    RedisError::from((ErrorKind::Client, text))
}

/// Divides a pipeline into parts.
///
/// # Errors
/// Returns an error if a transaction has no end or no beginning. Nothing was sent then.
fn parts(commands: Vec<&Cmd>) -> RedisResult<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    let mut commands = commands.into_iter().enumerate();
    while let Some((place, command)) = commands.next() {
        if begins_with(command, &["MULTI"]) {
            let mut all = vec![command];
            let is_end =
                |command: &Cmd| TRANSACTION[1..].iter().any(|end| begins_with(command, &[end]));
            while !is_end(all[all.len() - 1]) {
                all.push(commands.next().ok_or_else(needs_pipeline)?.1);
            }
            route_of(&all)?;
            parts.push(Part::Transaction(place, all));
            continue;
        }
        if TRANSACTION.iter().any(|word| begins_with(command, &[word])) {
            return Err(needs_pipeline());
        }
        match slot_of(command).filter(|_| effect(command).is_none()) {
            Some(route) => {
                let pending = Pending { place, route, command, target: Target::Known };
                match parts.last_mut() {
                    Some(Part::Slots(last)) => last.push(pending),
                    _ => parts.push(Part::Slots(vec![pending])),
                }
            }
            None => parts.push(Part::Alone(place, command)),
        }
    }
    Ok(parts)
}

/// Returns the slot of a transaction. One without keys belongs to any slot.
fn route_of(commands: &[&Cmd]) -> RedisResult<Route> {
    let mut routes = commands.iter().filter_map(|command| slot_of(command));
    let first = routes.next();
    if routes.any(|route| Some(route) != first) {
        let kind = ErrorKind::Server(ServerErrorKind::CrossSlot);
        return Err(RedisError::from((kind, "the keys of a transaction belong to several slots")));
    }
    let any = Slot::for_key("");
    Ok(first.unwrap_or(Route::with_slot(any, SlotAddr::Master)))
}

/// Returns the error of a transaction that the server has not executed, with the causes.
fn aborted(error: &ServerError, replies: &[Value]) -> RedisError {
    if error.kind() != Some(ServerErrorKind::ExecAbort) {
        return error.clone().into();
    }
    let causes = replies[..replies.len() - 1].iter().enumerate().filter_map(|(place, reply)| {
        let Value::ServerError(error) = reply else { return None };
        Some(match place {
            0 => format!("MULTI: {}", error_text(error)),
            _ => format!("command {}: {}", place - 1, error_text(error)),
        })
    });
    let causes: Vec<_> = causes.collect();
    let text = format!("EXECABORT the transaction was not executed: {}", causes.join("; "));
    match error_reply(&text) {
        Value::ServerError(error) => error.into(),
        _ => error.clone().into(),
    }
}

impl ConnectionLike for ClusterConnection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            current_runtime()?; // redis-rs would panic
            let reply = self.command(&self.operation(), cmd).await;
            reply.map_err(|error| self.explain(error))
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            current_runtime()?;
            let replies = self.pipeline(pipeline, offset, count).await;
            replies.map_err(|error| self.explain(error))
        })
    }

    fn get_db(&self) -> i64 {
        self.nodes.shared.client().db()
    }
}

impl fmt::Debug for ClusterConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterConnection")
            .field("transports", &self.transports())
            .finish_non_exhaustive()
    }
}
