//! Compares what two clients have received.

use ferrite_proto::resp::{Limits, Progress, ReplyFramer};

use super::differences::broadcasts::Broadcasts;
use super::differences::{
    is_about_a_flood, is_monitor_line, is_push, is_same, may_be_missing, normalised, put_in_order,
};

/// Splits bytes into complete replies.
pub(crate) fn replies(bytes: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    let mut rest = bytes;
    loop {
        // Uses a new framer for each reply: an incomplete reply is parsed again when more bytes
        // arrive.
        match ReplyFramer::new(Limits { inline_bytes: 1 << 20, ..Limits::default() }).feed(rest) {
            Ok(Progress { consumed, complete: true }) if consumed > 0 => {
                let (reply, after) = rest.split_at(consumed);
                found.push(reply);
                rest = after;
            }
            Ok(_) => return found,
            // These bytes are not a reply. They are shown as they are and never equal to a reply.
            Err(_) => {
                found.push(rest);
                return found;
            }
        }
    }
}

/// The differences that are tolerated. They come from bugs of the engine, or from behaviour that no
/// client can rely on, because it depends on how the input was split into reads.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tolerance {
    /// A failed AUTH may have no reply.
    pub(crate) omits_wrongpass: bool,
    /// How the client may be notified of changed keys.
    pub(crate) broadcasts: Broadcasts,
}

impl Tolerance {
    /// Returns the tolerance for bugs of the engine with this version.
    pub(crate) fn of(version: &str) -> Self {
        Self { omits_wrongpass: !version.contains("v=7.0."), ..Self::default() }
    }
}

/// Removes the complete replies of both if they are equal. Returns false if they differ, or if one
/// client has not received everything yet.
pub(crate) fn take_equal(tolerance: Tolerance, one: &mut Vec<u8>, other: &mut Vec<u8>) -> bool {
    let [whole, other_whole] = [&*one, &*other].map(|bytes| replies(bytes));
    let ends = [&whole, &other_whole].map(|all| all.iter().map(|reply| reply.len()).sum::<usize>());
    let tails = [one.len() - ends[0], other.len() - ends[1]];
    if one != other {
        let Tolerance { omits_wrongpass, broadcasts } = tolerance;
        let is_open =
            |reply: &[u8]| (omits_wrongpass && may_be_missing(reply)) || broadcasts.covers(reply);
        let sure = |replies: &[&[u8]]| {
            split_pushes(
                &replies.iter().filter(|reply| !is_open(reply)).copied().collect::<Vec<_>>(),
            )
        };
        let are_equal = are_same(&split_pushes(&whole), &split_pushes(&other_whole))
            || (are_same(&sure(&whole), &sure(&other_whole))
                && broadcasts.are_same(&whole, &other_whole));
        if !are_equal || (tails[0] == 0) != (tails[1] == 0) {
            return false;
        }
    }
    one.drain(..ends[0]);
    other.drain(..ends[1]);
    true
}

fn are_same(one: &[Vec<Vec<u8>>; 2], other: &[Vec<Vec<u8>>; 2]) -> bool {
    let mut pairs = one.iter().zip(other);
    pairs.all(|(one, other)| {
        one.len() == other.len() && one.iter().zip(other).all(|(l, r)| is_same(l, r))
    })
}

/// Returns the replies and the pushes, each in their order and without the parts that may differ.
fn split_pushes(replies: &[&[u8]]) -> [Vec<Vec<u8>>; 2] {
    let replies = replies.iter().filter(|reply| !is_monitor_line(reply));
    let (mut pushes, answers): (Vec<&[u8]>, Vec<&[u8]>) = replies.partition(|reply| is_push(reply));
    pushes.retain(|push| !is_about_a_flood(push));
    [answers, pushes].map(|all| all_normalised(&all))
}

fn all_normalised(replies: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut all: Vec<_> = replies.iter().map(|reply| normalised(reply)).collect();
    put_in_order(&mut all, replies);
    all
}

/// Describes the first replies that differ, with their position.
pub(crate) fn first_difference(one: &[u8], other: &[u8]) -> String {
    let show = |reply: Option<&&[u8]>| {
        reply.map_or("nothing".into(), |reply| {
            format!("\"{}\"", super::session::excerpt(reply, 300))
        })
    };
    let [left, right] = [one, other].map(|bytes| {
        let ignored =
            |reply: &&[u8]| is_monitor_line(reply) || (is_push(reply) && is_about_a_flood(reply));
        replies(bytes).into_iter().filter(|reply| !ignored(reply)).collect::<Vec<_>>()
    });
    let [plain_left, plain_right] = [&left, &right].map(|all| all_normalised(all));
    let equal =
        plain_left.iter().zip(&plain_right).take_while(|(one, other)| is_same(one, other)).count();
    format!(
        "after {equal} equal replies (engine {}, module {} in all)\n    engine: {}\n    module: {}",
        left.len(),
        right.len(),
        show(left.get(equal)),
        show(right.get(equal)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equal(one: &str, other: &str) -> bool {
        take_equal(
            Tolerance::default(),
            &mut one.as_bytes().to_vec(),
            &mut other.as_bytes().to_vec(),
        )
    }

    #[test]
    fn only_client_ids_may_differ_in_hello() {
        let hello = |id, proto| {
            format!(
                "*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:{proto}\r\n$2\r\nid\r\n:{id}\r\n"
            )
        };
        assert!(equal(&hello(7, 2), &hello(12, 2)));
        assert!(!equal(&hello(7, 2), &hello(7, 3)));
    }

    #[test]
    fn modules_may_be_listed_in_any_order() {
        let module = |name: &str, port: u32| {
            let args = format!("$4\r\nargs\r\n*2\r\n$9\r\nrdma-port\r\n$4\r\n{port}\r\n");
            format!("*4\r\n$4\r\nname\r\n${}\r\n{name}\r\n{args}", name.len())
        };
        let hello = |modules: [String; 2], role: &str| {
            let modules = modules.concat();
            format!("*4\r\n$7\r\nmodules\r\n*2\r\n{modules}$4\r\nrole\r\n$6\r\n{role}\r\n")
        };
        let one = hello([module("lua", 1000), module("ferrite", 1001)], "master");
        assert!(equal(&one, &hello([module("ferrite", 2001), module("lua", 2000)], "master")));
        assert!(!equal(&one, &hello([module("ferrite", 1001), module("other", 1000)], "master")));
        assert!(!equal(&one, &hello([module("ferrite", 1001), module("lua", 1000)], "writer")));
    }

    #[test]
    fn pushes_may_arrive_before_or_after_a_reply_but_only_in_order() {
        let [one, two] =
            ["1", "2"].map(|text| format!(">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n{text}\r\n"));
        assert!(equal(&format!("+OK\r\n{one}{two}"), &format!("{one}+OK\r\n{two}")));
        assert!(!equal(&format!("+OK\r\n{one}{two}"), &format!("+OK\r\n{two}{one}")));
        assert!(!equal("+OK\r\n:1\r\n", ":1\r\n+OK\r\n"));
    }

    #[test]
    fn addresses_may_differ_in_client_info_but_not_the_user() {
        let info = |addr, user| {
            let line = format!("id=3 addr={addr} flags=N user={user} resp=2");
            format!("${}\r\n{line}\r\n", line.len())
        };
        assert!(equal(&info("1.1.1.1:5", "low"), &info("/unix", "low")));
        assert!(!equal(&info("1.1.1.1:5", "low"), &info("1.1.1.1:5", "admin")));
        let verbatim = |addr| {
            let line = format!("txt:id=3 addr={addr} flags=N user=low resp=3");
            format!("={}\r\n{line}\r\n", line.len())
        };
        assert!(equal(&verbatim("1.1.1.1:5"), &verbatim("/unix")));
    }

    #[test]
    fn the_same_channels_may_be_left_in_any_order() {
        let left = |names: [&str; 2]| {
            let one = |(name, rest): (&str, usize)| {
                format!("*3\r\n$11\r\nunsubscribe\r\n${}\r\n{name}\r\n:{rest}\r\n", name.len())
            };
            one((names[0], 1)) + &one((names[1], 0)) + "+OK\r\n"
        };
        assert!(equal(&left(["a", "longer"]), &left(["longer", "a"])));
        assert!(!equal(&left(["a", "longer"]), &left(["longer", "b"])));
    }

    #[test]
    fn monitor_lines_are_not_compared_but_other_statuses_are() {
        let line = "+1700000000.123456 [0 127.0.0.1:5] \"GET\" \"k\"\r\n";
        assert!(equal(&format!("{line}+OK\r\n"), "+OK\r\n"));
        assert!(!equal("+OK\r\n+OK\r\n", "+OK\r\n"));
    }

    #[test]
    fn a_failed_login_may_have_no_reply_on_engines_with_the_bug() {
        let (one, other) = ("+OK\r\n-WRONGPASS no\r\n:1\r\n", "+OK\r\n:1\r\n");
        let tolerance = Tolerance::of("Valkey server v=8.0.1 sha=0");
        assert!(take_equal(tolerance, &mut one.into(), &mut other.into()));
        assert!(!take_equal(tolerance, &mut one.into(), &mut "+OK\r\n+OK\r\n:1\r\n".into()));
        let tolerance = Tolerance::of("Redis server v=7.0.15 sha=0");
        assert!(!take_equal(tolerance, &mut one.into(), &mut other.into()));
    }

    #[test]
    fn broadcasts_have_the_same_keys_in_any_number_of_messages() {
        let invalidate = |keys: &[&str]| {
            let keys: Vec<_> =
                keys.iter().map(|key| format!("${}\r\n{key}\r\n", key.len())).collect();
            format!(">2\r\n$10\r\ninvalidate\r\n*{}\r\n{}", keys.len(), keys.concat())
        };
        let equal = |broadcasts, one: &str, other: &str| {
            let tolerance = Tolerance { broadcasts, ..Tolerance::default() };
            take_equal(tolerance, &mut one.into(), &mut other.into())
        };
        let (once, twice) = (
            invalidate(&["a", "b"]) + ":1\r\n",
            invalidate(&["a"]) + ":1\r\n" + &invalidate(&["b"]),
        );
        assert!(equal(Broadcasts::Gathered, &once, &twice));
        assert!(!equal(Broadcasts::None, &once, &twice));
        assert!(!equal(Broadcasts::Gathered, &once, &(invalidate(&["a"]) + ":1\r\n")));
        assert!(
            !equal(Broadcasts::Gathered, &once, &(invalidate(&["a", "b"]) + ":2\r\n")),
            "another reply differs"
        );
        assert!(equal(Broadcasts::MayBeMissing, &once, ":1\r\n"));
        assert!(!equal(Broadcasts::MayBeMissing, &once, &(invalidate(&["c"]) + ":1\r\n")));
        let flush = ">2\r\n$10\r\ninvalidate\r\n_\r\n";
        assert!(!equal(Broadcasts::MayBeMissing, &format!("{flush}:1\r\n"), ":1\r\n"));
    }

    #[test]
    fn allowed_differences_are_found_next_to_pushes_in_an_array() {
        let reply = |id| {
            let hello = format!("%2\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:{id}\r\n");
            format!("*2\r\n{hello}>3\r\n$11\r\nunsubscribe\r\n$1\r\na\r\n:0\r\n")
        };
        assert!(equal(&reply(10), &reply(9)));
    }

    #[test]
    fn only_the_module_may_name_a_connection() {
        assert!(equal("$-1\r\n", "$13\r\nferrite:1.1:5\r\n"));
        assert!(!equal("$-1\r\n", "$1\r\nx\r\n"));
        assert!(!equal("$13\r\nferrite:1.1:5\r\n", "$-1\r\n"));
        assert!(
            equal("*2\r\n$-1\r\n:1\r\n", "*2\r\n$13\r\nferrite:1.1:5\r\n:1\r\n"),
            "within the array of EXEC"
        );
        assert!(!equal("*2\r\n$-1\r\n:1\r\n", "*2\r\n$13\r\nferrite:1.1:5\r\n:2\r\n"));
        assert!(!equal("*1\r\n$-1\r\n", "*2\r\n$13\r\nferrite:1.1:5\r\n:2\r\n"));
    }

    #[test]
    fn incomplete_replies_are_kept() {
        let (mut one, mut other) = (b"+OK\r\n$5\r\nhe".to_vec(), b"+OK\r\n$5\r\nhel".to_vec());
        assert!(take_equal(Tolerance::default(), &mut one, &mut other));
        assert_eq!((&one[..], &other[..]), (&b"$5\r\nhe"[..], &b"$5\r\nhel"[..]));
    }
}
