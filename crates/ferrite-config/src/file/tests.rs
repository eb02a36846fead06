//! Tests of correct files, and of wrong files with all their errors.

use std::time::Duration;

use super::*;
use crate::table::*;

/// The configuration blocks of Ferrite's first documentation, without the keys that are refused.
const FIRST_DOCUMENTATION: &str = include_str!("tests/first_documentation.toml");
/// The parameters of brpc's RDMA documentation with the defaults that it states.
const BRPC: &str = include_str!("tests/brpc.toml");

fn problems(text: &str) -> Vec<String> {
    let problems = read(Program::Server, text).expect_err(text);
    problems.iter().map(ToString::to_string).collect()
}

#[test]
fn empty_file_has_the_defaults() {
    for program in Program::ALL {
        assert_eq!(read(program, "").expect("valid").values, Values::new(program));
    }
}

#[test]
fn configuration_of_the_first_documentation_takes_effect() {
    for program in [Program::Server, Program::Gateway] {
        let values = read(program, FIRST_DOCUMENTATION).expect("a valid file").values;
        assert_eq!(values.list(&RDMA_DEVICE), ["mlx5_0"]);
        assert_eq!(values.number::<u8>(&RDMA_DEVICE_PORT), 1);
        assert_eq!(values.number::<i32>(&RDMA_GID_INDEX), 3);
        assert_eq!(values.number::<u32>(&MAX_CLIENTS), 1000);
        assert_eq!(values.time(&CONNECTION_TIMEOUT), Duration::from_secs(5));
        assert_eq!(values.size::<u64>(&MAX_MR_SIZE), 1 << 30);
        assert_eq!(values.size::<u32>(&INLINE_THRESHOLD), 256);
        assert_eq!(values.number::<u32>(&CQ_SIZE), 16_384);
        assert_eq!(values.number::<u32>(&RECV_BUFFER_POOL_SIZE), 10_000);
        assert_eq!(values.number::<u32>(&CONNECTION_RETRIES), 3);
        assert!(values.switch(&ADAPTIVE_POLLING) && values.switch(&HUGE_PAGES));
        for (setting, entry) in values.iter() {
            let short = setting.short_key();
            let is_named =
                !short.is_empty() && FIRST_DOCUMENTATION.contains(&format!("\n{short} ="));
            assert_eq!(entry.origin != Origin::Default, is_named, "{}", setting.key);
        }
    }
}

#[test]
fn parameters_of_brpc_take_effect() {
    let values = read(Program::Gateway, BRPC).expect("a valid file").values;
    assert_eq!(values.size::<u64>(&MEMORY_POOL_INITIAL), 1 << 30);
    assert_eq!(values.size::<u32>(&RECV_BUFFER_SIZE), 8 << 10);
    assert_eq!(values.number::<u32>(&PREPARED_QP_COUNT), 1024);
    assert_eq!(values.number::<u32>(&MEMORY_POOL_BUCKETS), 4);
    assert_eq!(values.number::<i32>(&RDMA_GID_INDEX), -1);
    let given = values.iter().filter(|(_, entry)| entry.origin != Origin::Default).count();
    assert_eq!(given, 15, "16 names, of which two set send-queue-depth");
}

#[test]
fn shows_all_errors_with_lines_and_nearest_keys() {
    let text = "[server]\nrestrat = \"no\"\n[network]\nport = 70000\nrdma_port = 6380\n\
                [network.rdma]\nbusy_poll = 1\nmax_send_sge = 4\ncq_size = \"x\"\n\
                [replication.rdma]\nuse_rdma_write = true\n[engine]\nport = 1";
    assert_eq!(
        problems(text),
        [
            "2: server.restrat: unknown key; the nearest known one is server.restart",
            "4: network.port: expected a number from 0 to 65535",
            "5: network.rdma_port: expected a port of the device, 0 to 254; set the port for \
             clients in rdma_listen",
            "7: network.rdma.busy_poll: unknown key; the nearest known one is \
             network.rdma.busy_poll_us",
            "8: network.rdma.max_send_sge: every request has exactly one buffer; set its size with \
             recv_buffer_size instead",
            "9: network.rdma.cq_size: expected a number from 64 to 4194304",
            "11: replication.rdma.use_rdma_write: replication uses the agent's links, which \
             [network] and [network.rdma] set up (rdma_device, inline_threshold); remove the key",
            "13: engine.port: set port in [network] instead",
        ]
    );
}

#[test]
fn shows_all_syntax_errors() {
    let found =
        problems("[network]\nport = \n[server]\nrestrat = \"no\"\n[cluster]\nenabled = x\n");
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("2: "), "{found:?}");
    assert!(found[1].starts_with("4: server.restrat"), "{found:?}");
    assert!(found[2].starts_with("6: "), "{found:?}");
    assert!(problems("[network\n")[0].starts_with("1: "));
    let twice = problems("[server]\nengine = \"a\"\nengine = \"b\"");
    assert_eq!(twice, ["3: duplicate key engine"]);
}

#[test]
fn syntax_errors_never_show_values() {
    for value in [
        "S3cretPw",
        "S3cret-Pw.x",
        "S3cret Pw",
        "S3cret = Pw",
        "S3cret, Pw = 1",
        "S3cret # Pw",
        "[S3cret",
        "[\"S3cret\", Pw",
        "{S3cret",
        "{S3cret = Pw}",
        "\"S3cret",
        "'S3cret",
        "\"S3cret\\Pw\"",
        "\"S3cret\" Pw",
        "\"\"\"S3cret",
        "0S3cret",
        "+S3cret",
        "0xS3cret",
        "1S3cret",
        "2026-S3cret",
        "2026-13-45S3cret",
        "nan_S3cret",
        "trueS3cret",
    ] {
        let found = problems(&format!("[engine]\nrequirepass = {value}\nport = 1"));
        assert!(found[0].starts_with("2: "), "{value}: {found:?}");
        assert!(
            !found.iter().any(|line| line.contains("cret") || line.contains("Pw")),
            "{found:?}"
        );
    }
    let unquoted = problems("[engine]\nrequirepass = S3cretPw");
    assert_eq!(unquoted, ["2: expected a value: strings need quotes"]);
    // Numbers with and without a zero in front.
    let zero = problems("[engine]\nrequirepass = 0815471");
    assert!(!zero[0].contains("0815471"), "{zero:?}");
}

#[test]
fn unknown_keys_suggest_the_nearest_one() {
    for (text, nearest) in [
        ("[server]\nport = 1", "2: server.port: unknown key; write network.port"),
        ("[netwrok]\nport = 1", "1: netwrok: unknown key; the nearest known one is network"),
        ("[network]\nrdma = \"require\"", "2: network.rdma: unknown key; write server.rdma"),
        ("port = 1", "1: port: unknown key; write network.port"),
        (
            "[network]\nrdma-device = \"a\"",
            "2: network.rdma-device: unknown key; write network.rdma_device",
        ),
        (
            "[network.rdma]\nmax-clients = 5",
            "2: network.rdma.max-clients: unknown key; write network.rdma.max_connections",
        ),
        (
            "[network.rdma]\nrx_sise = 1",
            "2: network.rdma.rx_sise: unknown key; the nearest known one is network.rdma.rx_size",
        ),
        (
            "[network]\nmax_connection = 1",
            "2: network.max_connection: unknown key; the nearest known one is \
             network.rdma.max_connections",
        ),
        (
            "[network]\nfrobnicate = 1",
            "2: network.frobnicate: unknown key; `ferrite config --json` lists all keys",
        ),
    ] {
        assert_eq!(problems(text), [nearest]);
    }
}

#[test]
fn errors_say_what_a_key_expects() {
    for (text, expected) in [
        ("[network]\nport = \"6379\"", "expected a number from 0 to 65535"),
        ("[server]\nrdma = \"maybe\"", "expected \"prefer\" or \"require\" or \"forbid\""),
        ("[network]\nrdma_listen = \"192.0.2.1:0\"", "give each address the same port"),
        ("[network]\nrdma_listen = \"a:1,b:2\"", "give each address the same port"),
        ("[network]\nrdma_listen = \"a:b:c\"", "expected addresses or names"),
        (
            "[network]\nbind = [\"127.0.0.1\", \"localhost:6379\"]",
            "\"localhost:6379\" is not an address",
        ),
        ("[network]\nrdma_enabled = \"yes\"", "expected true or false"),
        ("[network]\nbind = [1]", "expected a quoted string"),
        ("[network]\nrdma_device = \"a\\\"b\"", "must not contain quotes or backslashes"),
        ("[network.rdma]\nrx_size = \"3MB\"", "expected a size from 4kb to 2mb"),
        ("[network.rdma]\nrx_size = 100", "expected a size from 4kb to 2mb"),
        ("[network.rdma]\nrx_size = \"64 kb\"", "no space between them: write 64kb"),
        ("[server]\nshutdown_timeout = \"5 m\"", "no space between them: write 5m"),
        (
            "[network.rdma]\nmemory_pool_max = \"8gb\"",
            "sends and receives may each have 512 regions of 4mb, which is 2gb, but the larger \
             of the two needs 7680mb; raise memory-pool-max-regions to 3840",
        ),
        ("[network.rdma]\npin_memory = false", "rdma_enabled = false"),
        ("[network.rdma]\nrdma_recv_block_type = \"x\"", "expected \"default\" or \"large\""),
        ("[network.rdma]\nsend_queue_depth = 64\nrdma_sq_size = 128", "contradicts 64 in line 2"),
        ("[network.rdma]\nmemory_pool_initial = \"2gb\"", "must not exceed memory-pool-max"),
        ("[server]\nshutdown_timeout = 10", "expected a time with its unit"),
        ("[server]\nshutdown_timeout = \"10\"", "expected a time with its unit"),
        ("[server]\nshutdown_timeout = \"0s\"", "expected a time with its unit"),
        ("[server]\nrestart = \"always\"", "expected \"no\" or \"on-failure\""),
        ("[server]\ndata_dir = \"a\\nb\"", "must not contain control characters"),
        ("[server]\nengine = \"\"", "must not be empty"),
        (
            "[replication]\ntransport = \"infiniband\"",
            "2: replication.transport: expected \"auto\" or \"rdma\" or \"tcp\"",
        ),
        ("[engine]\nDaemonize = true", "must stay in the foreground"),
        ("[engine]\n\"ferrite.rdma\" = 1", "set the module's settings in [network]"),
        ("[engine]\nsave = \"1 1\\nloadmodule /x.so\"", "must not contain control characters"),
        ("[engine]\n\"x\\ny\" = 1", "not a valid name of an engine directive"),
        ("[engine]\nx = {}", "expected a string, a number, true, false, or a list of these"),
        ("[server]\nrdma = \"require\"\n[network]\nrdma_fallback = \"tcp\"", "contradict each"),
        ("[server]\nrdma = \"forbid\"\n[network]\nrdma_enabled = true", "contradict each other"),
    ] {
        let found = problems(text).join("\n");
        assert!(found.contains(expected), "{text}: {found}");
    }
}

#[test]
fn reads_values_of_every_type() {
    let file = read(
        Program::Server,
        r#"
        [server]
        engine = "/opt/valkey-server"
        restart = "on-failure"
        restart_delay = "250ms"
        [network]
        bind = ["127.0.0.1", "-::1"]
        rdma_listen = "[::1]:7000"
        rdma_device = "rxe1,rxe2"
        [network.rdma]
        busy_poll_us = 0x64
        rx_size = "1MB"
        rx_size_max = 1_048_576
        slice_us = "1ms"
        [engine]
        maxmemory = "1gb"
        appendonly = true
        save = ["3600 1", "60 10000"]
        "#,
    )
    .expect("a valid file");
    let values = &file.values;
    assert_eq!(values.text(&ENGINE_PROGRAM), Some("/opt/valkey-server"));
    assert_eq!(values.time(&RESTART_DELAY), Duration::from_millis(250));
    assert_eq!(values.list(&BIND), ["127.0.0.1", "-::1"]);
    assert_eq!(values.list(&RDMA_DEVICE), ["rxe1", "rxe2"]);
    assert_eq!(values.time(&BUSY_POLL_US), Duration::from_micros(100));
    assert_eq!(
        (values.size::<u32>(&RX_SIZE), values.size::<u32>(&RX_SIZE_MAX)),
        (1 << 20, 1 << 20)
    );
    assert_eq!(values.time(&SLICE_US), Duration::from_millis(1));
    let lines = file.directives.iter().map(|(name, rest)| format!("{name} {rest}"));
    let mut lines: Vec<_> = lines.collect();
    lines.sort();
    assert_eq!(lines, ["appendonly yes", "maxmemory 1gb", "save 3600 1", "save 60 10000"]);
}

#[test]
fn a_program_checks_the_keys_of_others_but_does_not_have_them() {
    let text = "[server]\nrestart_limit = 7\n[network.rdma]\ncall_path = false";
    let file = read(Program::Gateway, text).expect("a valid file");
    assert_eq!(file.values, Values::new(Program::Gateway));
    assert!(read(Program::Gateway, "[server]\nrestart_limit = \"x\"").is_err());
}

/// The keys of Ferrite's first documentation for replication and clusters, with its values.
const CLUSTER: &str = "[replication]\ntransport = \"rdma\"\n[cluster]\nenabled = true\n\
                       transport = \"rdma\"\n[cluster.rdma]\ngossip_rdma = true\n\
                       migration_rdma = true\n";
const REPLICATION: &str = "[replication]\ntransport = \"rdma\"\n";
const AGENT: &str = "[agent]\nmode = \"transparent\"\nlisten = \"192.0.2.1\"\n\
                     peers = [\"192.0.2.0/24\"]\nports = [\"6379\", \"16379\"]\n";
const ALIASES: &str = "[agent]\nalias = \"127.1.0.1\"\nports = [\"6379\", \"16379\"]\n\
                       peers = [\"127.1.0.2=192.0.2.2\"]\n";

/// Reads a file as `ferrite server` does, with the flag `--agent` or without.
fn unit(text: &str, with_agent: bool) -> Result<UnitFile, Vec<Problem>> {
    read_unit(text, |values| match with_agent && SERVER_AGENT.has(values.program()) {
        true => values.set_text(&SERVER_AGENT, None, "yes", Origin::Flag),
        false => Ok(()),
    })
}

fn unit_problems(text: &str, with_agent: bool) -> Vec<String> {
    let problems = unit(text, with_agent).expect_err(text);
    problems.iter().map(ToString::to_string).collect()
}

#[test]
fn cluster_of_the_first_documentation_needs_an_agent_and_has_one() {
    assert_eq!(unit("[cluster]\nenabled = true", false).expect("valid").agent, None);
    let read = unit(&format!("{CLUSTER}{AGENT}"), false).expect("a valid file");
    assert_eq!(read.agent.expect("an agent").policy(), Ok(crate::Policy::Require));
    let needs = "\"rdma\" needs an agent with peers: set agent.alias, agent.peers, agent.ports";
    let mut found = unit_problems(CLUSTER, false);
    assert_eq!(
        found,
        [format!("2: replication.transport: {needs}"), format!("5: cluster.transport: {needs}")]
    );
    let transparent = format!("{CLUSTER}[agent]\nmode = \"transparent\"\n");
    found = unit_problems(&transparent, false);
    assert!(found[0].ends_with("set agent.listen, agent.peers, agent.ports"), "{found:?}");
    found = unit_problems("[agent]\nalias = \"127.1.0.1\"", true);
    assert_eq!(found, ["server.agent: needs an agent with peers: set agent.peers, agent.ports"]);
}

#[test]
fn settings_of_the_engine_and_of_its_agent_must_fit_together() {
    for (text, with_agent, expected) in [
        (
            format!("[server]\nagent = false\n{CLUSTER}{AGENT}"),
            false,
            &["4: replication.transport: \"rdma\" needs the agent, but", "7: cluster.transport: "]
                [..],
        ),
        (
            format!("[network]\nport = 7001\n{CLUSTER}{AGENT}"),
            false,
            &[
                "4: replication.transport: \"rdma\" needs the engine's port 7001",
                "7: cluster.transport: \"rdma\" needs the engine's port 7001",
                "7: cluster.transport: \"rdma\" needs the port of the engine's cluster bus, 17001,",
            ],
        ),
        (
            format!("[cluster]\ntransport = \"rdma\"\n{AGENT}[engine]\ncluster-port = 17500"),
            false,
            &["2: cluster.transport: \"rdma\" needs the port of the engine's cluster bus, 17500"],
        ),
        (
            format!(
                "[cluster]\ntransport = \"rdma\"\n{AGENT}[engine]\ntls-port = 6390\n\
                 tls-cluster = true"
            ),
            false,
            &["2: cluster.transport: \"rdma\" needs the port of the engine's cluster bus, 16390"],
        ),
        (
            format!(
                "{REPLICATION}{AGENT}[network]\nport = 0\n[engine]\ntls-port = 9001\n\
                 tls-replication = true"
            ),
            false,
            &["2: replication.transport: \"rdma\" needs the engine's port 9001 in agent.ports"],
        ),
        (
            format!("{REPLICATION}{AGENT}[engine]\nreplicaof = \"192.0.3.1 6379\""),
            false,
            &["2: replication.transport: \"rdma\" needs the primary of replicaof, 192.0.3.1 6379,"],
        ),
        (
            format!("{REPLICATION}{AGENT}[engine]\nreplicaof = \"192.0.2.2 6380\""),
            false,
            &["2: replication.transport: \"rdma\" needs the primary of replicaof, 192.0.2.2 6380,"],
        ),
        (
            ALIASES.to_owned(),
            true,
            &["network.bind: with `mode alias`, the engine must bind the alias of this host alone"],
        ),
        (
            format!("[network]\nbind = [\"0.0.0.0\"]\n{ALIASES}"),
            true,
            &["2: network.bind: with `mode alias`"],
        ),
        (
            format!(
                "[server]\nagent_admin_listen = \"127.0.0.1:1\"\n{AGENT}[observability]\n\
                 admin_listen = \"127.0.0.1:1\""
            ),
            true,
            &["2: server.agent_admin_listen: the module serves"],
        ),
        (
            format!("{REPLICATION}{AGENT}direct = \"allow\""),
            false,
            &["8: agent.direct: `allow` is for connections over TCP"],
        ),
    ] {
        let found = unit_problems(&text, with_agent);
        assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}");
        }
    }
    for valid in [
        format!("[network]\nbind = [\"127.1.0.1\"]\n{ALIASES}"),
        format!("{REPLICATION}{AGENT}[engine]\nreplicaof = \"192.0.2.2 6379\""),
        format!("{REPLICATION}{AGENT}[engine]\nreplicaof = \"host2 6379\""),
    ] {
        assert!(unit(&valid, true).is_ok_and(|read| read.agent.is_some()), "{valid}");
    }
}

#[test]
fn variable_with_two_meanings_is_the_servers() {
    use crate::unit::is_of_server_alone;
    assert!(is_of_server_alone("FERRITE_LISTEN"));
    for variable in ["FERRITE_PEER", "FERRITE_RDMA", "FERRITE_PORT", "FERRITE_DRAIN"] {
        assert!(!is_of_server_alone(variable), "{variable}");
    }
}
