//! What cannot be equal between two engines, whatever carries the commands, and what is not
//! generated. Each with its reason.

use ferrite_proto::resp::Value;

use super::spec::Spec;

/// How much of a reply must be equal. Errors must be so in any case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    /// Every byte.
    Exact,
    /// The elements, in any order.
    Unordered,
    /// Whole numbers up to this difference, and everything else.
    Near(i64),
    /// The type.
    Type,
    /// No name at the one, and at the other the name that tells where the client is.
    SourceName,
}

/// Beside those whose output the engine itself calls nondeterministic (the tips of COMMAND).
const RULES: &[(&str, Rule, &str)] = &[
    ("acl|genpass", Rule::Type, "random"),
    ("acl|log", Rule::Type, "ages and addresses of clients"),
    (
        "client|getname",
        Rule::SourceName,
        "a session's client is named by its address until it names itself",
    ),
    ("client|id", Rule::Type, "numbers of connections: the proxy path has connections of its own"),
    ("client|trackinginfo", Rule::Unordered, "a set"),
    ("cluster|links", Rule::Type, "times and buffers of links"),
    ("cluster|myshardid", Rule::Type, "random"),
    ("cluster|nodes", Rule::Type, "own ports and times"),
    ("cluster|shards", Rule::Type, "own ports"),
    ("cluster|slots", Rule::Type, "own ports"),
    ("cluster|replicas", Rule::Type, "times"),
    ("cluster|slaves", Rule::Type, "times"),
    ("cluster|info", Rule::Type, "messages sent"),
    ("config|get", Rule::Type, "own ports and directories; by name in the scripts"),
    ("expiretime", Rule::Near(3), "set by the clock"),
    ("hello", Rule::Type, "the number of the connection"),
    ("hexpiretime", Rule::Near(3), "set by the clock"),
    ("hpexpiretime", Rule::Near(3000), "set by the clock"),
    ("hpttl", Rule::Near(3000), "set by the clock"),
    ("httl", Rule::Near(3), "set by the clock"),
    ("latency|doctor", Rule::Type, "prose about times"),
    ("latency|graph", Rule::Type, "times"),
    ("latency|histogram", Rule::Type, "times"),
    ("lastsave", Rule::Near(30), "the clock"),
    ("lolwut", Rule::Type, "random"),
    ("memory|doctor", Rule::Type, "figures of memory"),
    ("memory|malloc-stats", Rule::Type, "figures of memory"),
    ("memory|stats", Rule::Type, "figures of memory"),
    ("memory|usage", Rule::Near(4096), "tables grow as the hash seed has it"),
    ("module|list", Rule::Type, "the port as an argument of the module"),
    ("object|idletime", Rule::Near(3), "the clock"),
    ("pexpiretime", Rule::Near(3000), "set by the clock"),
    ("pttl", Rule::Near(3000), "set by the clock"),
    ("role", Rule::Type, "the port of the primary"),
    ("sort", Rule::Unordered, "BY nosort has the order of the hash seed"),
    ("sort_ro", Rule::Unordered, "BY nosort has the order of the hash seed"),
    ("time", Rule::Type, "the clock"),
    ("ttl", Rule::Near(3), "set by the clock"),
    ("xinfo|stream", Rule::Type, "FULL has times"),
];

/// Not generated but written by hand, or left out.
const NOT_GENERATED: &[(&str, &str)] = &[
    ("acl|deluser", "could take away the test's own users: in the scripts"),
    ("acl|load", "could take away the test's own users: in the scripts"),
    ("acl|save", "no file: in the scripts"),
    ("acl|setuser", "could take away the test's own users: in the scripts"),
    ("auth", "changes the connection: in the scripts"),
    ("bgrewriteaof", "a child that ends when it ends: in the scripts"),
    ("bgsave", "a child that ends when it ends: in the scripts"),
    ("client|kill", "ends connections: in the scripts"),
    ("client|pause", "a state of its own"),
    ("client|reply", "answers that do not come: in the scripts"),
    ("client|tracking", "answers unasked: in the scripts"),
    ("config|rewrite", "no file: in the scripts"),
    ("config|set", "could change the engine under test: in the scripts"),
    ("debug", "can kill the engine: in the scripts"),
    ("discard", "changes the connection: in the scripts"),
    ("exec", "changes the connection: in the scripts"),
    ("failover", "changes the engine: in the scripts"),
    ("ferrite", "ours, and about the sessions themselves"),
    ("function|kill", "in the scripts"),
    ("hello", "changes the connection: in the scripts"),
    ("migrate", "connects to other hosts: in the scripts"),
    ("module|load", "in the scripts"),
    ("module|loadex", "in the scripts"),
    ("module|unload", "in the scripts"),
    ("monitor", "answers unasked: in the scripts"),
    ("multi", "changes the connection: in the scripts"),
    ("pfselftest", "seconds of work, no arguments: in the scripts"),
    ("psubscribe", "several answers: in the scripts"),
    ("psync", "makes the connection a replica's: in the scripts"),
    ("punsubscribe", "several answers: in the scripts"),
    ("quit", "ends the connection: in the scripts"),
    ("replconf", "makes the connection a replica's: in the scripts"),
    ("replicaof", "changes the engine: in the scripts"),
    ("reset", "changes the connection: in the scripts"),
    ("save", "seconds of work: in the scripts"),
    ("script|debug", "forks a session of its own: in the scripts"),
    ("script|kill", "a state of its own"),
    ("shutdown", "ends the engine: in the scripts"),
    ("slaveof", "changes the engine: in the scripts"),
    ("ssubscribe", "several answers: in the scripts"),
    ("subscribe", "several answers: in the scripts"),
    ("sunsubscribe", "several answers: in the scripts"),
    ("sync", "makes the connection a replica's: in the scripts"),
    ("unsubscribe", "several answers: in the scripts"),
];

/// In a cluster these change it, and with it all that comes after; outside of one they are
/// generated like others.
const CHANGE_THE_CLUSTER: &[&str] = &[
    "addslots",
    "addslotsrange",
    "bumpepoch",
    "cancelslotmigrations",
    "delslots",
    "delslotsrange",
    "failover",
    "flushslots",
    "flushslot",
    "forget",
    "meet",
    "migrateslots",
    "replicate",
    "reset",
    "saveconfig",
    "set-config-epoch",
    "setslot",
    "syncslots",
];

pub(crate) fn is_generated(spec: &Spec, in_cluster: bool) -> bool {
    let changes =
        spec.name.strip_prefix("cluster|").is_some_and(|name| CHANGE_THE_CLUSTER.contains(&name));
    !(in_cluster && changes) && why_not_generated(spec).is_none()
}

/// The reason, if it is not generated; that of a command is that of its subcommands.
pub(crate) fn why_not_generated(spec: &Spec) -> Option<&'static str> {
    let of = |wanted: &str| {
        NOT_GENERATED.iter().find(|(name, _)| *name == wanted).map(|(_, reason)| *reason)
    };
    of(&spec.name).or_else(|| of(spec.name.split('|').next()?))
}

pub(crate) fn rule(spec: &Spec) -> Rule {
    match RULES.iter().find(|(name, ..)| *name == spec.name) {
        Some((_, rule, _)) => *rule,
        None if spec.has_tip("nondeterministic_output") => Rule::Type,
        None if spec.has_tip("nondeterministic_output_order") => Rule::Unordered,
        None => Rule::Exact,
    }
}

pub(crate) fn same(rule: Rule, one: &[u8], other: &[u8]) -> bool {
    if one == other {
        return true;
    }
    let is_error = one.first() == Some(&b'-') || other.first() == Some(&b'-');
    let (Ok(left), Ok(right)) = (Value::parse(one), Value::parse(other)) else { return false };
    match rule {
        Rule::Exact => false,
        _ if is_error => false,
        Rule::Unordered => sorted(&left) == sorted(&right),
        Rule::Near(difference) => near(&left, &right, difference),
        Rule::Type => {
            one.first() == other.first() && (left == Value::Null) == (right == Value::Null)
        }
        Rule::SourceName => {
            left == Value::Null
                && matches!(right, Value::Bulk(name) if name.starts_with(b"ferrite:"))
        }
    }
}

fn sorted(value: &Value<'_>) -> Vec<u8> {
    let mut parts: Vec<Vec<u8>> = match value {
        Value::Array(values) | Value::Set(values) | Value::Push(values) => {
            values.iter().map(sorted).collect()
        }
        Value::Map(pairs) => {
            pairs.iter().map(|(key, value)| [sorted(key), sorted(value)].concat()).collect()
        }
        other => {
            let mut bytes = Vec::new();
            other.encode(&mut bytes);
            return bytes;
        }
    };
    parts.sort_unstable();
    parts.insert(0, format!("{} of ", parts.len()).into_bytes());
    parts.concat()
}

fn near(one: &Value<'_>, other: &Value<'_>, difference: i64) -> bool {
    match (one, other) {
        // Negative ones are answers of their own: no key, no end.
        (Value::Integer(one), Value::Integer(other)) => {
            one == other
                || (*one >= 0 && *other >= 0 && one.abs_diff(*other) <= difference.unsigned_abs())
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len()
                && one.iter().zip(other).all(|(one, other)| near(one, other, difference))
        }
        (one, other) => one == other,
    }
}
