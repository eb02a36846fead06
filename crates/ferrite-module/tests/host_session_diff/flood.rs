//! A client is stopped while it sends without a pause. Once the stopping command has its reply and
//! the engine has served one more request, no further command of the client may run.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_proto::resp::Value;

use super::session::{Stop, excerpt};
use super::side::{LONG, Side, ask, dial};
use ferrite_testkit::resp::{Connection, encode};

/// The prefix of the keys that floods increment.
pub(crate) const KEYS: &str = "flood:";
/// How long a stopped client is watched.
const WATCH_TIME: Duration = Duration::from_millis(40);
/// How long it may take until the client sees the end of its connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of increments after which the client is stopped.
const FULL_FLOW: i64 = 500;

/// The outcome of a flood.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    /// The replies that do not depend on the time: to the login and to the stopping command.
    replies: Vec<String>,
    /// The number of commands that ran after the client was stopped.
    pub(crate) went_on: i64,
    has_ended: bool,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { replies, went_on, has_ended } = self;
        let end = if *has_ended { "closed" } else { "not closed" };
        write!(f, "replies {replies:?}, {went_on} commands after that, connection {end}")
    }
}

pub(crate) fn run(side: &mut Side, key: &str, stop: Stop, by_observer: bool) -> Outcome {
    side.relax();
    side.observe("ACL SETUSER flood reset on >flood ~flood* &* +@all");
    let mut outcome = Outcome { replies: Vec::new(), went_on: 0, has_ended: true };
    let Some(socket) = dial(&side.client_port) else { return outcome };
    let mut flooder = Connection::new(Box::new(socket.try_clone().expect("a socket")));
    let login = ask(&mut flooder, &side.words("AUTH flood flood")).unwrap_or_default();
    let id = ask(&mut flooder, &side.words("CLIENT ID")).unwrap_or_default();
    outcome.replies.push(excerpt(&login, 200));
    let Ok(Value::Integer(id)) = Value::parse(&id) else {
        outcome.replies.push(excerpt(&id, 200));
        return outcome;
    };
    let mut batch = Vec::new();
    encode(&side.words(&format!("INCR {key}")), &mut batch);
    let is_over = AtomicBool::new(false);
    let (is_over, batch) = (&is_over, batch.repeat(200));
    socket.set_read_timeout(None).expect("a socket");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut socket: &TcpStream = &socket;
            while !is_over.load(Ordering::Relaxed) && socket.write_all(&batch).is_ok() {}
        });
        let reader = scope.spawn(|| {
            let mut socket: &TcpStream = &socket;
            let mut piece = [0; 64 << 10];
            while matches!(socket.read(&mut piece), Ok(count) if count > 0) {}
        });
        let started = Instant::now();
        while count(side, key) < FULL_FLOW && started.elapsed() < LONG && !reader.is_finished() {}
        let reply = stop_flood(side, id, stop, by_observer);
        // If the command is disabled, it stops nobody.
        if !reply.starts_with('-') {
            let before = count(side, key);
            std::thread::sleep(WATCH_TIME);
            outcome.went_on = count(side, key) - before;
            let started = Instant::now();
            while !reader.is_finished() && started.elapsed() < CLOSE_TIMEOUT {
                std::thread::sleep(Duration::from_millis(1));
            }
            outcome.has_ended = reader.is_finished();
        }
        outcome.replies.push(reply);
        is_over.store(true, Ordering::Relaxed);
        let _ = socket.shutdown(Shutdown::Both);
    });
    outcome
}

fn count(side: &mut Side, key: &str) -> i64 {
    match Value::parse(&side.observe(&format!("GET {key}"))) {
        Ok(Value::Bulk(digits)) => {
            std::str::from_utf8(digits).ok().and_then(|n| n.parse().ok()).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Stops the client and returns the reply.
fn stop_flood(side: &mut Side, id: i64, stop: Stop, by_observer: bool) -> String {
    let kill_id = format!("CLIENT KILL ID {id}");
    let lines: &[&str] = match stop {
        Stop::KillId => &[&kill_id],
        Stop::KillUser => &["CLIENT KILL USER flood"],
        Stop::DeleteUser => &["ACL DELUSER flood"],
        Stop::RecreateUser => &[
            "MULTI",
            "ACL DELUSER flood",
            "ACL SETUSER flood reset on >other ~flood* +@all",
            "EXEC",
        ],
    };
    let mut reply = Vec::new();
    if by_observer {
        lines.iter().for_each(|line| reply = side.observe(line));
    } else {
        let Some(mut admin) = side.admin() else { return "no connection".into() };
        for line in lines {
            reply = ask(&mut admin, &side.words(line)).unwrap_or_default();
        }
    }
    excerpt(&reply, 200)
}
