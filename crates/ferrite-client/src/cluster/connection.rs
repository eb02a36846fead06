//! A connection to a cluster: redis-rs's, with pipelines that may have keys of several slots.
//!
//! redis-rs sends a pipeline to one node. If the node redirects one of the commands, redis-rs sends
//! the whole pipeline again, so commands that were served run twice. Here each slot's commands are
//! a pipeline of their own, and only commands that were not served are sent again, one by one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use futures_util::future::try_join_all;
use redis::aio::ConnectionLike;
use redis::cluster_routing::{Route, RoutingInfo};
use redis::{
    Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, RetryMethod, ServerError, Value,
};
use tokio::time::sleep;

use super::directory::NodeTransport;
use super::node::{NO_PROGRESS, Node, Shared, Unserved, original, unserved};
use super::route::slot_of;
use crate::client::current_runtime;

/// The pause before the cluster connection sends a command again that redis-rs has given up.
const PAUSE: Duration = Duration::from_millis(100);

/// A connection to a cluster: a `redis::aio::ConnectionLike` that any number of tasks can use at
/// the same time. It has a connection to each node, over RDMA where the node's module announces an
/// RDMA endpoint. Clones share the connections.
///
/// - Commands go to the node of their keys. Commands with keys of several slots, such as MGET, are
///   split, and the replies are combined. Commands without keys go to a random node, to all
///   primaries or to all nodes, depending on the command.
/// - A pipeline may have keys of several slots. Commands of the same slot keep their order, and the
///   replies have the order of the pipeline. A command without a slot of its own (PING, or MGET of
///   several slots) runs after all commands before it, and before all after it. A transaction
///   (`Pipeline::atomic`) must have one slot.
/// - Redirects (MOVED, ASK) and temporary errors (TRYAGAIN, CLUSTERDOWN) are retried
///   ([`ClusterClientBuilder::retry_for`](super::ClusterClientBuilder::retry_for)).
/// - If a connection breaks before the reply to a command, the command is **sent again**, as
///   redis-rs does in clusters. The server may then run it twice.
#[derive(Clone)]
pub struct ClusterConnection {
    inner: redis::cluster_async::ClusterConnection<Node>,
    shared: Arc<Shared>,
}

/// The commands of a pipeline that belong to one slot, and their places in the pipeline.
#[derive(Default)]
struct Group<'a> {
    places: Vec<usize>,
    commands: Vec<&'a Cmd>,
}

impl ClusterConnection {
    pub(super) fn new(
        inner: redis::cluster_async::ClusterConnection<Node>,
        shared: Arc<Shared>,
    ) -> Self {
        Self { inner, shared }
    }

    /// Returns what was exchanged with each node over each transport since the connection was
    /// opened.
    #[must_use]
    pub fn transports(&self) -> Vec<NodeTransport> {
        self.shared.directory().transports()
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
        let reply = self.inner.route_command(command, routing).await;
        reply.map_err(|error| self.explain(error))
    }

    /// Names the cause of an error that redis-rs must not retry.
    fn explain(&self, error: RedisError) -> RedisError {
        if error.code() != Some(NO_PROGRESS) {
            return error;
        }
        let limit = self.shared.client().response_timeout().unwrap_or_default();
        let message = format!("no byte from the server for {limit:?}");
        io::Error::new(io::ErrorKind::TimedOut, message).into()
    }

    async fn command(&mut self, command: &Cmd) -> RedisResult<Value> {
        let begun = Instant::now();
        loop {
            match self.inner.req_packed_command(command).await {
                Err(error) if self.may_retry(&error, begun) => sleep(PAUSE).await,
                done => return done.map_err(|error| self.explain(error)),
            }
        }
    }

    /// Returns whether to send a command again that redis-rs has given up. `begun` is the time at
    /// which the command was first sent.
    fn may_retry(&self, error: &RedisError, begun: Instant) -> bool {
        let may_pass = match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Io => {
                !matches!(error.retry_method(), RetryMethod::NoRetry)
            }
            ErrorKind::ClusterConnectionNotFound => true,
            _ => false,
        };
        may_pass && begun.elapsed() < self.shared.retry_for
    }

    /// Runs a command, and returns an error of the server as a value.
    async fn reply(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self.command(command).await {
            Err(error) => Ok(Value::ServerError(ServerError::try_from(error)?)),
            done => done,
        }
    }

    async fn pipeline(
        &mut self,
        pipeline: &Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        if pipeline.is_transaction() {
            let replies = self.inner.req_packed_commands(pipeline, offset, count).await;
            return replies.map_err(|error| self.explain(error));
        }
        let mut replies = vec![Value::Nil; pipeline.len()];
        let mut groups: HashMap<Route, Group<'_>> = HashMap::new();
        for (place, command) in pipeline.cmd_iter().enumerate() {
            match slot_of(command) {
                Some(slot) => {
                    let group = groups.entry(slot).or_default();
                    group.places.push(place);
                    group.commands.push(command);
                }
                None => {
                    self.run_groups(std::mem::take(&mut groups), &mut replies).await?;
                    replies[place] = self.reply(command).await?;
                }
            }
        }
        self.run_groups(groups, &mut replies).await?;
        Ok(replies.into_iter().skip(offset).take(count).collect())
    }

    /// Runs groups at the same time.
    async fn run_groups(
        &self,
        groups: HashMap<Route, Group<'_>>,
        replies: &mut [Value],
    ) -> RedisResult<()> {
        let groups = groups.into_values().map(|group| {
            let mut connection = self.clone();
            async move {
                let replies = connection.run_group(&group.commands).await?;
                RedisResult::Ok((group.places, replies))
            }
        });
        for (places, values) in try_join_all(groups).await? {
            for (place, value) in places.into_iter().zip(values) {
                replies[place] = value;
            }
        }
        Ok(())
    }

    /// Runs commands of one slot.
    async fn run_group(&mut self, commands: &[&Cmd]) -> RedisResult<Vec<Value>> {
        if let [command] = commands {
            return Ok(vec![self.reply(command).await?]);
        }
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command((*command).clone());
        }
        let begun = Instant::now();
        let mut replies = loop {
            match self.inner.req_packed_commands(&pipeline, 0, commands.len()).await {
                Err(error) if self.may_retry(&error, begun) => sleep(PAUSE).await,
                done => break done.map_err(|error| self.explain(error))?,
            }
        };
        for index in to_send_again(&replies) {
            replies[index] = self.reply(commands[index]).await?;
        }
        Ok(replies.into_iter().map(original).collect())
    }
}

/// Returns the places of the commands that were not served and can be sent again.
///
/// A node that redirects a command redirects all later commands with that key. If a node could not
/// serve a command for another reason, it may have served a later one with the same key. To send
/// the first again would then change the order, so its error is the reply.
fn to_send_again(replies: &[Value]) -> Vec<usize> {
    let last_served = replies.iter().rposition(|reply| unserved(reply).is_none());
    let can_be_sent = |(place, reply): (usize, &Value)| match unserved(reply)? {
        Unserved::Moved => Some(place),
        Unserved::NotNow => last_served.is_none_or(|served| served < place).then_some(place),
    };
    replies.iter().enumerate().filter_map(can_be_sent).collect()
}

impl ConnectionLike for ClusterConnection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            current_runtime()?; // redis-rs would panic
            self.command(cmd).await
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
            self.pipeline(pipeline, offset, count).await
        })
    }

    fn get_db(&self) -> i64 {
        self.shared.client().db()
    }
}

impl fmt::Debug for ClusterConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterConnection")
            .field("transports", &self.transports())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sends_again_only_what_keeps_the_order() {
        use redis::PushKind::Other;
        let marked = |kind: &str| Value::Push { kind: Other(kind.into()), data: vec![Value::Okay] };
        let (moved, not_now) = (marked("ferrite-moved"), marked("ferrite-not-now"));
        for (replies, expected) in [
            (vec![Value::Okay, Value::Nil], vec![]),
            (vec![moved.clone(), Value::Okay, moved.clone()], vec![0, 2]),
            (vec![not_now.clone(), Value::Okay, not_now.clone()], vec![2]),
            (vec![not_now.clone(), moved], vec![0, 1]),
        ] {
            assert_eq!(to_send_again(&replies), expected, "{replies:?}");
        }
        assert_eq!(original(not_now), Value::Okay);
    }
}
