//! What redis-rs does with a node: it opens a connection, checks it, asks for the slots, and runs
//! lookups and commands without a key of their own.
//!
//! redis-rs does nothing else while it asks for the slots or connects to a node: one task routes
//! the commands to all nodes, and it holds a lock meanwhile. Therefore nothing here makes that task
//! wait for a single node:
//! - a connection is opened in a task of its own, and redis-rs gets it at once,
//! - redis-rs's checks (PING, READONLY) are answered here,
//! - CLUSTER SLOTS goes to further nodes if a node does not answer soon,
//! - commands with a key do not run in redis-rs's task: redis-rs finds the node ([`Lookup`]), and
//!   the caller runs the command there.
//!
//! redis-rs opens connections by the function in [`Connect`], which has no `self` that could hold
//! our state. But redis-rs passes the user name in its settings on to that function. So this user
//! name contains the number of the [`Nodes`], and the real user name is in the client's own
//! settings.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferrite_session::Host;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::Connect;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, IntoConnectionInfo, Pipeline, RedisFuture,
    RedisResult, Value,
};
use tokio::time::sleep;

use super::directory::complete_slots;
use super::lookup::Lookup;
use super::node::{Node, Nodes, Open};
use super::reply::{checked, error_reply, text_of};
use super::route::{begins_with, is_word};
use crate::subscriptions::{Effect, effect, names};

/// How long a node may take to answer CLUSTER SLOTS before another node is asked, too.
const SLOTS_TIMEOUT: Duration = Duration::from_millis(100);

impl Connect for Node {
    fn connect_with_config<'a, T>(info: T, config: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        Box::pin(async move {
            let info = info.into_connection_info()?;
            let nodes = Nodes::of_user(info.redis_settings().username())?;
            let ConnectionAddr::Tcp(name, port) = info.addr() else {
                let other = io::Error::new(io::ErrorKind::Unsupported, "a node without an address");
                return Err(other.into());
            };
            Ok(Node::new(nodes, Host { name: name.clone(), port: Some(*port) }, config))
        })
    }
}

impl Node {
    /// Runs commands as one pipeline.
    async fn run_all(&self, open: Open, commands: &[Cmd]) -> RedisResult<Vec<Value>> {
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command.clone());
        }
        let send = async |mut it: MultiplexedConnection| {
            it.req_packed_commands(&pipeline, 0, commands.len()).await
        };
        Ok(self.run(open, send).await?)
    }

    /// Answers a lookup: with the number of this node, or with an error after which redis-rs asks
    /// for the slots or another node.
    fn answer(&self, lookup: &Lookup) -> RedisResult<Value> {
        self.check()?;
        let is_begun = |number| self.inner.nodes.begins_refresh(number);
        Ok(match lookup {
            // redis-rs asks for the slots after this error, and then repeats the lookup.
            Lookup::Refresh(number) if is_begun(*number) => error_reply("READONLY refresh"),
            Lookup::Redirected(to)
                if to.host.as_ref() != Some(&self.inner.host.name)
                    || Some(to.port) != self.inner.host.port =>
            {
                error_reply(&text_of(to))
            }
            _ => Value::Int(i64::try_from(self.inner.number).unwrap_or(i64::MAX)),
        })
    }

    /// Asks for the slots, and for the endpoints at the same time: this node, and others if it does
    /// not answer soon.
    async fn slots(&self, ask: &Cmd) -> RedisResult<Value> {
        let mut others = self.inner.nodes.all();
        others.retain(|node| !Arc::ptr_eq(&node.inner, &self.inner));
        let first = match others.first() {
            Some(other) if other.is_open() && !self.is_open() => {
                others.push(self.clone());
                others.remove(0)
            }
            _ => self.clone(),
        };
        let mut others = others.into_iter();
        let mut asked = FuturesUnordered::from_iter([first.own_slots(ask.clone())]);
        loop {
            let timeout = async {
                match others.len() {
                    0 => std::future::pending().await,
                    _ => sleep(SLOTS_TIMEOUT).await,
                }
            };
            let answer = tokio::select! {
                answer = asked.next() => answer,
                () = timeout => None,
            };
            match answer {
                Some(Ok(slots)) => return Ok(slots),
                Some(Err(error)) if asked.is_empty() && others.len() == 0 => return Err(error),
                _ => asked.extend(others.next().map(|other| other.own_slots(ask.clone()))),
            }
        }
    }

    /// Asks this node for the slots and the endpoints.
    async fn own_slots(self, ask: Cmd) -> RedisResult<Value> {
        let mut both = Pipeline::with_capacity(2);
        both.add_command(ask).cmd("FERRITE").arg("ENDPOINTS");
        let send = async |mut it: MultiplexedConnection| it.req_packed_commands(&both, 0, 2).await;
        let replies = self.run(self.open().await?, send).await?;
        let Ok([mut slots, endpoints]) = <[Value; 2]>::try_from(replies) else {
            return Err(redis::make_extension_error("ERR".into(), Some("no reply".into())));
        };
        if let Value::ServerError(error) = slots {
            return Err(error.into());
        }
        complete_slots(&mut slots, &self.inner.host);
        let mut directory = self.inner.nodes.shared.directory();
        directory.note_slots(&slots, &self.inner.host);
        directory.note_endpoints(&endpoints, &self.inner.host);
        Ok(slots)
    }
}

/// Returns a command of subscriptions as several with one name each. After a reconnect, redis-rs
/// sends one command with all names of a node. But the server confirms each name, and redis-rs
/// would take the second confirmation for the reply to the next command. Sharded channels of
/// several slots would be an error.
fn names_of_subscriptions(command: &Cmd) -> Vec<Cmd> {
    match effect(command) {
        Some(Effect::Subscribe(_) | Effect::Unsubscribe(_)) => names(command),
        _ => Vec::new(),
    }
}

/// What redis-rs uses: lookups, checks, CLUSTER SLOTS, and commands that have no key of their own.
impl ConnectionLike for Node {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            if begins_with(cmd, &["CLUSTER", "SLOTS"]) {
                return self.slots(cmd).await;
            }
            // The cluster connection sends a PING of the user in lower case.
            if is_word(cmd, "PING") || is_word(cmd, "READONLY") {
                return self.check().map(|()| Value::Okay);
            }
            if is_word(cmd, "ASKING") {
                self.is_asking = true;
                return self.check().map(|()| Value::Okay);
            }
            let subscriptions = names_of_subscriptions(cmd);
            if subscriptions.len() > 1 {
                let open = self.open().await?;
                let replies = self.run_all(open, &subscriptions).await?;
                let error = replies.iter().position(|it| matches!(it, Value::ServerError(_)));
                let last = replies.len().saturating_sub(1);
                let reply = replies.into_iter().nth(error.unwrap_or(last));
                return Ok(checked(reply.unwrap_or(Value::Nil), &self.inner.host));
            }
            let open = self.open().await?;
            let reply = if std::mem::take(&mut self.is_asking) {
                let mut both = Pipeline::with_capacity(2);
                both.cmd("ASKING").add_command(cmd.clone());
                let send =
                    async |mut it: MultiplexedConnection| it.req_packed_commands(&both, 1, 1).await;
                self.run(open, send).await?.pop().unwrap_or(Value::Nil)
            } else {
                self.run(open, async |mut it| it.req_packed_command(cmd).await).await?
            };
            Ok(checked(reply, &self.inner.host))
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            if let Some(lookup) = pipeline.cmd_iter().next().and_then(Lookup::read) {
                return Ok(vec![self.answer(&lookup)?]);
            }
            let open = self.open().await?;
            let send = async |mut it: MultiplexedConnection| {
                it.req_packed_commands(pipeline, offset, count).await
            };
            let replies = self.run(open, send).await?;
            Ok(replies.into_iter().map(|reply| checked(reply, &self.inner.host)).collect())
        })
    }

    fn get_db(&self) -> i64 {
        self.inner.nodes.shared.client().db()
    }
}
