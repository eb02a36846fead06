//! The differences that are allowed between a client at the engine's own port and one at the
//! module's port, with their reasons. Everything else must be equal.

pub(crate) mod broadcasts;
pub(crate) mod ends;

use std::collections::BTreeMap;

use ferrite_proto::resp::{Limits, Progress, ReplyFramer, Value};

/// Values in a HELLO reply that may differ, by the word before them, with the reason.
const HELLO: &[(&str, &str)] = &[
    ("id", "two engines give their clients different ids"),
    ("rdma-port", "an argument of the module, in the list of modules"),
    ("engine", "an argument of the module, in the list of modules"),
];

/// The word before HELLO's list of modules. The list is in the order of a hash table with a random
/// seed. Valkey 9.1 has a second module of its own.
const MODULES: &[u8] = b"modules";

/// A reply that may be missing on engines with this bug: `addAuthErrReply` of Redis 7.2 and Valkey
/// 7.2 to 9 sends nothing while the client has unwritten replies. Whether it has any depends on how
/// the input was split into reads.
const MAY_BE_MISSING: &[u8] = b"-WRONGPASS ";

/// Fields of a line of CLIENT INFO and CLIENT LIST that may differ, with the reason.
const CLIENT_INFO: &[(&str, &str)] = &[
    ("id", "two engines give their clients different ids"),
    ("addr", "the engine sees the proxy connection, not the client (the book's Limits)"),
    ("laddr", "the engine sees the proxy connection, not the client (the book's Limits)"),
    ("fd", "a descriptor of the process"),
    ("age", "the clock"),
    ("idle", "the clock; in-process commands do not count as input of the proxy connection"),
    ("qbuf", "how much of the input was read at once"),
    ("qbuf-free", "how much of the input was read at once"),
    ("argv-mem", "how much of the input was read at once"),
    ("multi-mem", "sizes of allocations"),
    ("rbs", "grows and shrinks by the clock"),
    ("rbp", "grows and shrinks by the clock"),
    ("obl", "how fast the reader is"),
    ("oll", "how fast the reader is"),
    ("omem", "how fast the reader is"),
    ("tot-mem", "the sum of the memory fields"),
    ("events", "how fast the reader is"),
    ("cmd", "in-process commands are not commands of the proxy connection"),
    ("redir", "the id of another client"),
    ("tot-net-in", "in-process commands do not pass the proxy connection"),
    ("tot-net-out", "in-process commands do not pass the proxy connection"),
    ("tot-cmds", "in-process commands do not pass the proxy connection"),
];

/// The prefix of a proxy connection's name until the client sets one. The module names it after the
/// client's address, so that CLIENT LIST and ACL LOG show where the client is.
const PROXY_NAME: &str = "ferrite:";

/// A flag of a CLIENT INFO line: the proxy connection is a Unix socket.
const UNIX_SOCKET_FLAG: char = 'U';

/// Fields of an entry of ACL LOG that may differ, with the reason.
const ACL_LOG: &[(&str, &str)] = &[
    ("age-seconds", "the clock"),
    ("client-info", "a CLIENT INFO line with addresses and ids"),
    ("entry-id", "numbered by each engine"),
    ("timestamp-created", "the clock"),
    ("timestamp-last-updated", "the clock"),
];

/// An ACL LOG context that only the module's side may have. The first denial of an in-process
/// command is logged twice, once in the context of the module (the book's Limits).
const ACL_LOG_MODULE_CONTEXT: &[u8] = b"module";

/// Replies and pushes whose order is that of a hash table with a random seed. Each entry has the
/// kind, the index of the field that determines the order, and the reason.
const ANY_ORDER: &[(&str, usize, &str)] = &[
    (
        "unsubscribe",
        1,
        "UNSUBSCRIBE without channels leaves all, in the order of the client's table",
    ),
    (
        "punsubscribe",
        1,
        "PUNSUBSCRIBE without patterns leaves all, in the order of the client's table",
    ),
    (
        "sunsubscribe",
        1,
        "SUNSUBSCRIBE without channels leaves all, in the order of the client's table",
    ),
    (
        "pmessage",
        1,
        "a message goes to all patterns that match, in the order of the server's table",
    ),
];

fn is_listed(table: &[(&str, &str)], name: &[u8]) -> bool {
    table.iter().any(|(listed, _)| listed.as_bytes() == name)
}

/// Returns a reply without the parts that may differ. Works on single words, not on nested values,
/// since engines put pushes into arrays and omit elements from the array of EXEC.
pub(crate) fn normalised(reply: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut before: [&[u8]; 3] = [b""; 3];
    let mut rest = reply;
    while let Some((head, payload, after)) = word(rest) {
        // Pushes within another reply, such as that of EXEC, have no defined order either. A push
        // on its own is normalised word by word below.
        if !out.is_empty()
            && let (pushes, after) = leading_pushes(rest)
            && !pushes.is_empty()
        {
            let mut each: Vec<_> = pushes.iter().map(|push| normalised(push)).collect();
            put_in_order(&mut each, &pushes);
            out.extend(each.concat());
            rest = after;
            before = [b""; 3];
            continue;
        }
        rest = after;
        if is_monitor_line(head) {
            continue; // engines put lines of MONITOR into the array of EXEC
        }
        if before[2] == MODULES
            && let Some((list, after)) = in_order(head, rest)
        {
            out.extend_from_slice(&list);
            rest = after;
            before = [b""; 3];
            continue;
        }
        let is_hello = match before[2] {
            b"id" => before[0] == b"proto",
            name => is_listed(HELLO, name),
        };
        // In RESP3, a line of CLIENT INFO has the prefix `txt:`.
        let plain = payload.map(|text| text.strip_prefix(b"txt:").unwrap_or(text));
        match plain {
            Some(text) if text.starts_with(b"id=") => {
                out.extend_from_slice(client_info(text).as_bytes());
            }
            _ if is_hello => out.extend_from_slice(b"(differs)"),
            Some(text) => out.extend_from_slice(&[head, b"\n", text].concat()),
            None => out.extend_from_slice(head),
        }
        out.push(b'\n');
        before = [before[1], before[2], payload.unwrap_or(head)];
    }
    out.extend_from_slice(rest);
    out
}

/// Returns the whole push messages at the beginning, and the bytes after them.
fn leading_pushes(mut rest: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let mut pushes = Vec::new();
    while rest.starts_with(b">")
        && let Ok(Progress { consumed, complete: true }) =
            ReplyFramer::new(Limits::default()).feed(rest)
    {
        let (push, after) = rest.split_at(consumed);
        pushes.push(push);
        rest = after;
    }
    (pushes, rest)
}

/// Returns the elements after the header of an array, normalised and sorted, and the bytes after
/// the array.
fn in_order<'a>(head: &[u8], mut rest: &'a [u8]) -> Option<(Vec<u8>, &'a [u8])> {
    let count =
        head.strip_prefix(b"*").and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    let mut elements = Vec::new();
    for _ in 0..count.unwrap_or(0_usize) {
        let progress =
            ReplyFramer::new(Limits::default()).feed(rest).ok().filter(|it| it.complete)?;
        let (element, after) = rest.split_at(progress.consumed);
        elements.push(normalised(element));
        rest = after;
    }
    elements.sort_unstable();
    count.map(|_| ([head, b"\n"].concat().into_iter().chain(elements.concat()).collect(), rest))
}

/// A line, the string after it if the line is the header of a string, and the remaining bytes.
type Split<'a> = (&'a [u8], Option<&'a [u8]>, &'a [u8]);

/// Splits off the first word.
fn word(bytes: &[u8]) -> Option<Split<'_>> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    let (head, after) = (&bytes[..end], &bytes[end + 2..]);
    if !matches!(head.first(), Some(b'$' | b'=' | b'!')) {
        return Some((head, None, after));
    }
    let len: Option<usize> =
        std::str::from_utf8(&head[1..]).ok().and_then(|digits| digits.parse().ok());
    match len {
        Some(len) if after.len() >= len + 2 => Some((head, Some(&after[..len]), &after[len + 2..])),
        Some(_) => None,
        None => Some((head, None, after)), // the null of RESP2
    }
}

/// Returns whether two normalised replies are equal. Where the engine has no client name, the
/// module may have the name that it set. This also applies within the array of EXEC.
pub(crate) fn is_same(engine: &[u8], module: &[u8]) -> bool {
    let [lines, mut others] = [engine, module].map(|reply| reply.split(|byte| *byte == b'\n'));
    let mut is_next = |line: &[u8]| {
        let Some(other) = others.next() else { return false };
        let is_named = matches!(line, b"$-1" | b"_") && other.starts_with(b"$");
        line == other
            || (is_named
                && others.next().is_some_and(|name| name.starts_with(PROXY_NAME.as_bytes())))
    };
    engine == module || (lines.into_iter().all(&mut is_next) && others.next().is_none())
}

/// Returns whether this reply may be missing on engines with the bug of [`MAY_BE_MISSING`].
pub(crate) fn may_be_missing(reply: &[u8]) -> bool {
    reply.starts_with(MAY_BE_MISSING)
}

fn client_info(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let mut lines: Vec<String> = text
        .lines()
        .map(|line| {
            let fields = line.split(' ').filter(|field| {
                !is_listed(CLIENT_INFO, field.split('=').next().unwrap_or_default().as_bytes())
            });
            let fields = fields.map(|field| match field.strip_prefix("flags=") {
                None if field
                    .strip_prefix("name=")
                    .is_some_and(|name| name.starts_with(PROXY_NAME)) =>
                {
                    "name=".into()
                }
                Some(flags) => {
                    let flags = flags.replace(UNIX_SOCKET_FLAG, "");
                    format!("flags={}", if flags.is_empty() { "N" } else { &flags })
                }
                None => field.into(),
            });
            fields.collect::<Vec<_>>().join(" ")
        })
        .collect();
    lines.sort_unstable();
    lines.join("\n")
}

/// Sorts adjacent replies of the same kind if their order is not defined.
pub(crate) fn put_in_order(replies: &mut [Vec<u8>], originals: &[&[u8]]) {
    let fields: Vec<_> = originals.iter().map(|reply| order_field(reply)).collect();
    let mut from = 0;
    while from < replies.len() {
        let Some((kind, _)) = &fields[from] else {
            from += 1;
            continue;
        };
        let same =
            |field: &Option<(usize, Vec<u8>)>| matches!(field, Some((other, _)) if other == kind);
        let to = from + fields[from..].iter().take_while(|field| same(field)).count();
        let mut names: Vec<_> =
            fields[from..to].iter().flatten().map(|(_, name)| name.clone()).collect();
        let in_place = |reply: &[u8], name: &[u8], other: &[u8]| {
            let at = reply.windows(name.len()).position(|part| part == name).unwrap_or(0);
            [&reply[..at], other, &reply[at + name.len()..]].concat()
        };
        names.sort_unstable();
        for (at, sorted) in (from..to).zip(&names) {
            if let Some((_, name)) = &fields[at] {
                replies[at] = in_place(&replies[at], name, sorted);
            }
        }
        from = to;
    }
}

/// Returns the index of a reply's kind in [`ANY_ORDER`], and the normalised field that determines
/// its order.
fn order_field(reply: &[u8]) -> Option<(usize, Vec<u8>)> {
    let (Value::Push(values) | Value::Array(values)) = Value::parse(reply).ok()? else {
        return None;
    };
    let Value::Bulk(kind) = values.first()? else { return None };
    let place = ANY_ORDER.iter().position(|(name, ..)| name.as_bytes() == *kind)?;
    let Value::Bulk(name) = values.get(ANY_ORDER[place].1)? else { return None };
    Some((place, [format!("${}\n", name.len()).as_bytes(), name, b"\n"].concat()))
}

/// Returns whether this push is about a key that a flooding client increments. How many such pushes
/// there are depends on the clock.
pub(crate) fn is_about_a_flood(push: &[u8]) -> bool {
    let prefix = super::flood::KEYS.as_bytes();
    push.windows(prefix.len()).any(|part| part == prefix)
}

/// Returns whether this is a line of MONITOR. These are not compared: on the module's side, MONITOR
/// also shows the module's own commands and does not show in-process commands (the book's Limits).
pub(crate) fn is_monitor_line(reply: &[u8]) -> bool {
    let Some(line) = reply.strip_prefix(b"+") else { return false };
    let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    digits >= 10
        && line.get(digits) == Some(&b'.')
        && line.get(digits + 7..digits + 9) == Some(b" [")
}

/// Returns whether this is a message that another client's command has caused. Its position among
/// the replies of a client is not defined.
pub(crate) fn is_push(reply: &[u8]) -> bool {
    let kinds: [&[u8]; 4] = [b"message", b"pmessage", b"smessage", b"invalidate"];
    match Value::parse(reply) {
        Ok(Value::Push(values) | Value::Array(values)) => {
            matches!(values.first(), Some(Value::Bulk(kind)) if kinds.contains(kind))
        }
        _ => false,
    }
}

/// Returns the entries of ACL LOG, sorted and without the parts that may differ.
pub(crate) fn acl_log(reply: &[u8], is_module_side: bool) -> Vec<String> {
    let Ok(Value::Array(entries)) = Value::parse(reply) else { return vec![excerpt_of(reply)] };
    // The engine merges equal denials only among the last ten entries. Entries of the module
    // between them can prevent that, so the counts of equal entries are added up here.
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for entry in &entries {
        let pairs: Vec<(&[u8], String)> = match entry {
            Value::Array(fields) => fields.chunks(2).filter_map(pair).collect(),
            _ => Vec::new(),
        };
        let is_context = |(name, value): &(&[u8], String)| {
            *name == b"context" && value.as_bytes() == ACL_LOG_MODULE_CONTEXT
        };
        if is_module_side && pairs.iter().any(is_context) {
            continue;
        }
        let count = pairs.iter().find(|(name, _)| *name == b"count");
        let count: u64 = count.and_then(|(_, value)| value.parse().ok()).unwrap_or(1);
        let shown = pairs.iter().filter(|(name, _)| *name != b"count" && !is_listed(ACL_LOG, name));
        let shown = shown.map(|(name, value)| format!("{}={value}", name.escape_ascii()));
        *counts.entry(shown.collect::<Vec<_>>().join(" ")).or_default() += count;
    }
    counts.into_iter().map(|(entry, count)| format!("count={count} {entry}")).collect()
}

fn pair<'a>(fields: &[Value<'a>]) -> Option<(&'a [u8], String)> {
    let [Value::Bulk(name), value] = fields else { return None };
    let value = match value {
        Value::Bulk(text) | Value::Simple(text) => text.escape_ascii().to_string(),
        Value::Integer(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    Some((name, value))
}

fn excerpt_of(reply: &[u8]) -> String {
    super::session::excerpt(reply, 200)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PSUBSCRIBE of two patterns in a transaction gives EXEC's array one element too many, so that
    /// the next bytes seem to belong to the array.
    #[test]
    fn pushes_within_another_reply_have_no_order() {
        let push = |pattern: &str| {
            format!(
                ">4\r\n$8\r\npmessage\r\n${}\r\n{pattern}\r\n$4\r\nnews\r\n$1\r\nv\r\n",
                pattern.len()
            )
        };
        let reply =
            |patterns: [&str; 2]| format!("*2\r\n:1\r\n{}:2\r\n", patterns.map(push).concat());
        let [one, other] =
            [["*", "n*"], ["n*", "*"]].map(|patterns| normalised(reply(patterns).as_bytes()));
        assert_eq!(one, other);
        assert_ne!(one, normalised(reply(["*", "m*"]).as_bytes()));
    }
}
