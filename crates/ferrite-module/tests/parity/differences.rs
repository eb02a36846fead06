//! The replies that cannot be equal between two engines, and the commands that are not generated,
//! each with its reason.

use ferrite_proto::resp::Value;

use super::spec::Spec;

/// How much of two replies must be equal. Errors must always be equal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    /// Every byte.
    Exact,
    /// The elements, in any order.
    Unordered,
    /// Everything, except that whole numbers may differ by this much.
    Near(i64),
    /// The type.
    Type,
    /// Null at the engine's own port, and a name with the client's address through the module.
    SourceName,
}

/// Rules for commands, besides those whose output the engine itself calls nondeterministic (in the
/// tips of COMMAND).
const RULES: &[(&str, Rule, &str)] = &[
    ("acl|genpass", Rule::Type, "random"),
    ("acl|log", Rule::Type, "ages and addresses of clients"),
    (
        "client|getname",
        Rule::SourceName,
        "the module names a client by its address until the client sets a name",
    ),
    ("client|id", Rule::Type, "client ids: the proxy path has its own connections"),
    ("client|trackinginfo", Rule::Unordered, "a set"),
    ("cluster|links", Rule::Type, "times and buffers of links"),
    ("cluster|myshardid", Rule::Type, "random"),
    ("cluster|nodes", Rule::Type, "own ports and times"),
    ("cluster|shards", Rule::Type, "own ports"),
    ("cluster|slots", Rule::Type, "own ports"),
    ("cluster|replicas", Rule::Type, "times"),
    ("cluster|slaves", Rule::Type, "times"),
    ("cluster|info", Rule::Type, "the number of messages sent"),
    (
        "config|get",
        Rule::Type,
        "own ports and directories; the scripts compare some settings by their names",
    ),
    ("expiretime", Rule::Near(3), "set by the clock"),
    ("hello", Rule::Type, "the client id"),
    ("hexpiretime", Rule::Near(3), "set by the clock"),
    ("hpexpiretime", Rule::Near(3000), "set by the clock"),
    ("hpttl", Rule::Near(3000), "set by the clock"),
    ("httl", Rule::Near(3), "set by the clock"),
    ("latency|doctor", Rule::Type, "prose about times"),
    ("latency|graph", Rule::Type, "times"),
    ("latency|histogram", Rule::Type, "times"),
    ("lastsave", Rule::Near(30), "the clock"),
    ("lolwut", Rule::Type, "random"),
    ("memory|doctor", Rule::Type, "sizes of memory"),
    ("memory|malloc-stats", Rule::Type, "sizes of memory"),
    ("memory|stats", Rule::Type, "sizes of memory"),
    ("memory|usage", Rule::Near(4096), "the size of tables depends on the hash seed"),
    ("module|list", Rule::Type, "the port in the module's arguments"),
    ("object|idletime", Rule::Near(3), "the clock"),
    ("pexpiretime", Rule::Near(3000), "set by the clock"),
    ("pttl", Rule::Near(3000), "set by the clock"),
    ("role", Rule::Type, "the port of the primary"),
    ("sort", Rule::Unordered, "the order of BY nosort depends on the hash seed"),
    ("sort_ro", Rule::Unordered, "the order of BY nosort depends on the hash seed"),
    ("time", Rule::Type, "the clock"),
    ("ttl", Rule::Near(3), "set by the clock"),
    ("xinfo|stream", Rule::Type, "FULL has times"),
];

/// Commands that the generator leaves out, each with the reason. They are tested by `scripts.txt`,
/// or by a function of `states.rs` ("a separate state"), or not at all.
const NOT_GENERATED: &[(&str, &str)] = &[
    ("acl|deluser", "could delete the test's own users: in the scripts"),
    ("acl|load", "could delete the test's own users: in the scripts"),
    ("acl|save", "the engine has no such file: in the scripts"),
    ("acl|setuser", "could change the test's own users: in the scripts"),
    ("auth", "changes the connection: in the scripts"),
    ("bgrewriteaof", "a child process that takes an unknown time: in the scripts"),
    ("bgsave", "a child process that takes an unknown time: in the scripts"),
    ("client|kill", "ends connections: in the scripts"),
    ("client|pause", "a separate state"),
    ("client|reply", "suppresses replies: in the scripts"),
    ("client|tracking", "messages without a request: in the scripts"),
    ("config|rewrite", "the engine has no such file: in the scripts"),
    ("config|set", "could change the engine under test: in the scripts"),
    ("debug", "can kill the engine: in the scripts"),
    ("discard", "changes the connection: in the scripts"),
    ("exec", "changes the connection: in the scripts"),
    ("failover", "changes the engine: in the scripts"),
    ("ferrite", "the module's own, about its sessions"),
    ("function|kill", "in the scripts"),
    ("hello", "changes the connection: in the scripts"),
    ("migrate", "connects to other hosts: in the scripts"),
    ("module|load", "in the scripts"),
    ("module|loadex", "in the scripts"),
    ("module|unload", "in the scripts"),
    ("monitor", "messages without a request: in the scripts"),
    ("multi", "changes the connection: in the scripts"),
    ("pfselftest", "takes seconds, no arguments: in the scripts"),
    ("psubscribe", "several replies: in the scripts"),
    ("psync", "makes the client a replica: in the scripts"),
    ("punsubscribe", "several replies: in the scripts"),
    ("quit", "ends the connection: in the scripts"),
    ("replconf", "makes the client a replica: in the scripts"),
    ("replicaof", "changes the engine: in the scripts"),
    ("reset", "changes the connection: in the scripts"),
    ("save", "takes seconds: in the scripts"),
    ("script|debug", "forks a debugging session: in the scripts"),
    ("script|kill", "a separate state"),
    ("shutdown", "ends the engine: in the scripts"),
    ("slaveof", "changes the engine: in the scripts"),
    ("ssubscribe", "several replies: in the scripts"),
    ("subscribe", "several replies: in the scripts"),
    ("sunsubscribe", "several replies: in the scripts"),
    ("sync", "makes the client a replica: in the scripts"),
    ("unsubscribe", "several replies: in the scripts"),
];

/// Subcommands of CLUSTER that are not generated in a cluster, since they would change it for all
/// later cases. Outside of a cluster they are generated.
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

/// Returns why a command is not generated; `None` if it is. A reason for a command also applies to
/// its subcommands.
pub(crate) fn why_not_generated(spec: &Spec) -> Option<&'static str> {
    let reason = |wanted: &str| {
        NOT_GENERATED.iter().find(|(name, _)| *name == wanted).map(|(_, reason)| *reason)
    };
    reason(&spec.name).or_else(|| reason(spec.name.split('|').next()?))
}

pub(crate) fn rule(spec: &Spec) -> Rule {
    match RULES.iter().find(|(name, ..)| *name == spec.name) {
        Some((_, rule, _)) => *rule,
        None if spec.has_tip("nondeterministic_output") => Rule::Type,
        None if spec.has_tip("nondeterministic_output_order") => Rule::Unordered,
        None => Rule::Exact,
    }
}

/// Returns whether two replies are equal as far as the rule requires.
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
        // Negative numbers have special meanings, such as no key or no expiry.
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
