//! Commands without a reply, and what becomes of them when a node replies.

use std::collections::HashMap;

use ferrite_proto::cluster::Redirect;
use redis::cluster_routing::Route;
use redis::{Cmd, Value};

use super::reply::Unserved;

/// Replies and their places in the pipeline.
pub(super) type Replies = Vec<(usize, Value)>;

/// Which node commands are sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// The node that serves the slot, as far as is known.
    Known,
    /// The same, after the nodes were asked for the slots.
    Refreshed,
    /// The node that a redirect names.
    Redirected(Redirect),
}

/// A command of a pipeline without a reply.
#[derive(Debug, Clone)]
pub(super) struct Pending<'a> {
    pub(super) place: usize,
    pub(super) route: Route,
    pub(super) command: &'a Cmd,
    pub(super) target: Target,
}

/// Sorts commands by the replies of a node. Returns the replies of commands that are done, and the
/// commands that must be sent again. If `is_over`, there is no time for that, and all are done.
///
/// A node that redirects a command redirects all later commands with that key. If a node could
/// not serve a command for another reason, it may have served a later one with the same key. To
/// send the first again would then change the order, so its error is the reply.
pub(super) fn sort_out(
    sent: Vec<Pending<'_>>,
    replies: Vec<(Value, Option<Unserved>)>,
    is_over: bool,
) -> (Replies, Vec<Pending<'_>>) {
    let served = sent.iter().zip(&replies).enumerate();
    let served = served.filter(|(_, (_, (_, why)))| why.is_none());
    let last_served: HashMap<Route, usize> =
        served.map(|(index, (pending, _))| (pending.route, index)).collect();
    let (mut done, mut again) = (Vec::new(), Vec::new());
    for (index, (pending, (reply, why))) in sent.into_iter().zip(replies).enumerate() {
        let is_overtaken = last_served.get(&pending.route).is_some_and(|last| *last > index);
        match why {
            Some(why) if !is_over && (why.is_redirect() || !is_overtaken) => {
                again.push(Pending { target: why.target(), ..pending });
            }
            _ => done.push((pending.place, reply)),
        }
    }
    (done, again)
}

impl Unserved {
    fn is_redirect(&self) -> bool {
        matches!(self, Self::Redirected(_))
    }

    /// Returns which node may serve the command.
    pub(super) fn target(self) -> Target {
        match self {
            Self::Redirected(redirect) => Target::Redirected(redirect),
            Self::TryAgain => Target::Known,
            Self::NotNow => Target::Refreshed,
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_session::Host;
    use redis::cluster_routing::SlotAddr;

    use super::super::reply::{error_reply, unserved};
    use super::*;

    const ASK: &str = "ASK 12 10.0.0.1:7";
    const DOWN: &str = "CLUSTERDOWN Hash slot not served";
    const LOADING: &str = "LOADING the dataset";
    const MOVED: &str = "MOVED 12 10.0.0.1:7";
    const TRYAGAIN: &str = "TRYAGAIN Multiple keys";
    const WRONG: &str = "WRONGTYPE Operation";

    /// Returns the places of the commands that are done, and the places and targets of those that
    /// are sent again. Each command is a key and the error reply to it, or none if it was served.
    fn sorted(
        commands: &[(&str, Option<&str>)],
        is_over: bool,
    ) -> (Vec<usize>, Vec<(usize, Target)>) {
        let command = redis::cmd("GET");
        let sent = commands.iter().enumerate().map(|(place, (key, _))| {
            let route = Route::with_key(key, SlotAddr::Master);
            Pending { place, route, command: &command, target: Target::Known }
        });
        let asked = Host { name: "10.0.0.9".into(), port: Some(7) };
        let replies: Vec<_> = commands
            .iter()
            .map(|(_, error)| {
                let reply = error.map_or(Value::Okay, error_reply);
                let why = unserved(&reply, &asked);
                (reply, why)
            })
            .collect();
        let (done, again) = sort_out(sent.collect(), replies.clone(), is_over);
        for (place, reply) in &done {
            assert_eq!(*reply, replies[*place].0, "the reply to command {place}");
        }
        let places = done.into_iter().map(|(place, _)| place).collect();
        (places, again.into_iter().map(|it| (it.place, it.target)).collect())
    }

    #[test]
    fn sends_commands_again_in_the_order_of_their_slot() {
        let to = |is_ask| {
            let host = Some("10.0.0.1".into());
            Target::Redirected(Redirect { is_ask, slot: 12, host, port: 7 })
        };
        let refreshed = || Target::Refreshed;
        for (commands, done, again) in [
            // A redirect holds for later commands with the key, so nothing overtakes it.
            (vec![("a", Some(MOVED))], vec![], vec![(0, to(false))]),
            (vec![("a", Some(ASK)), ("a", None)], vec![1], vec![(0, to(true))]),
            // The error of a command is its reply if a later one of the slot was served.
            (vec![("a", Some(LOADING)), ("a", None)], vec![0, 1], vec![]),
            (vec![("a", Some(DOWN)), ("b", None), ("a", None)], vec![0, 1, 2], vec![]),
            (vec![("a", Some(TRYAGAIN)), ("{a}b", None)], vec![0, 1], vec![]),
            // An error that another attempt does not change counts as served.
            (vec![("a", Some(LOADING)), ("a", Some(WRONG))], vec![0, 1], vec![]),
            // Commands of other slots, and earlier ones, do not matter.
            (vec![("a", Some(LOADING)), ("b", None)], vec![1], vec![(0, refreshed())]),
            (vec![("a", None), ("a", Some(DOWN))], vec![0], vec![(1, refreshed())]),
            (
                vec![("a", None), ("a", Some(TRYAGAIN)), ("a", Some(LOADING)), ("b", None)],
                vec![0, 3],
                vec![(1, Target::Known), (2, refreshed())],
            ),
        ] {
            assert_eq!(sorted(&commands, false), (done, again), "{commands:?}");
            let all = (0..commands.len()).collect();
            assert_eq!(sorted(&commands, true), (all, vec![]), "no time is left: {commands:?}");
        }
    }
}
