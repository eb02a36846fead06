//! Correct files, wrong files, and the shipped example.

use super::*;

const EXAMPLE: &str = include_str!("../../../../../packaging/ferrite.toml");

fn parse_error(text: &str) -> String {
    Config::parse(text).expect_err(text)
}

#[test]
fn empty_file_has_the_defaults() {
    assert_eq!(Config::parse("").expect("an empty file"), Config::default());
    assert_eq!(Config::default().rdma(), Rdma::Prefer);
}

/// The shipped file sets nothing but defaults. The keys in its comments are valid, and it shows
/// every key that has an effect.
#[test]
fn shipped_example_is_valid_and_complete() {
    assert_eq!(Config::parse(EXAMPLE).expect("the example"), Config::default());
    let shown: Vec<_> =
        EXAMPLE.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)).collect();
    let is_key = |line: &str| line.split_once(" = ").is_some_and(|(name, _)| !name.contains(' '));
    let shown = shown.into_iter().filter(|line| line.starts_with('[') || is_key(line));
    let shown = shown.collect::<Vec<_>>().join("\n");
    let config = Config::parse(&shown).unwrap_or_else(|why| panic!("{why} of\n{shown}"));
    assert_eq!(config.without_effect, [""; 0]);
    for key in keys::KEYS.iter().filter(|key| matches!(key.use_, Use::Set(_))) {
        let (start, section) = (format!("{} = ", key.name), format!("[{}]\n", key.section));
        let found = shown.split_once(&section).is_some_and(|(_, rest)| {
            rest.lines()
                .take_while(|line| !line.starts_with('['))
                .any(|line| line.starts_with(&start))
        });
        assert!(found, "packaging/ferrite.toml does not show {}.{}", key.section, key.name);
    }
}

/// The tuning file of the first documentation still works. Keys without effect are reported.
#[test]
fn accepts_tuning_keys_without_effect() {
    let config = Config::parse(
        r#"
        [network]
        rdma_enabled = true
        rdma_device = "mlx5_0"        # RDMA device name
        rdma_port = 1                  # Device port
        rdma_gid_index = 3            # GID index for RoCE
        rdma_fallback = "tcp"
        [network.rdma]
        max_connections = 1000
        connection_timeout_ms = 5000
        max_mr_size = "1GB"
        inline_threshold = 256
        send_queue_depth = 128
        busy_poll_us = 100
        slice_us = 200
        call_path = true
        "#,
    )
    .expect("a valid file");
    assert_eq!(
        (config.rdma(), config.rdma_devices.as_slice()),
        (Rdma::Prefer, &["mlx5_0".to_owned()][..])
    );
    assert_eq!((config.max_connections, config.busy_poll_us), (Some(1000), Some(100)));
    assert_eq!((config.slice_us, config.call_path), (Some(200), Some(true)));
    let warnings = config.without_effect.join("\n");
    for name in
        ["rdma_port", "rdma_gid_index", "connection_timeout_ms", "max_mr_size", "inline_threshold"]
    {
        assert!(warnings.contains(name), "{warnings}");
    }
    assert!(warnings.contains("5: network.rdma_port: has no effect: "), "{warnings}");
    assert!(warnings.contains("6: network.rdma_gid_index: has no effect: "), "{warnings}");
}

#[test]
fn names_unknown_keys_with_line_and_nearest_known_key() {
    for (text, expected) in [
        (
            "[server]\n\nrestrat = \"no\"",
            "3: server.restrat: unknown key; the nearest known one is server.restart",
        ),
        (
            "[network.rdma]\nbusy_poll = 1",
            "2: network.rdma.busy_poll: unknown key; \
             the nearest known one is network.rdma.busy_poll_us",
        ),
        (
            "[server]\nport = 1",
            "2: server.port: unknown key; the nearest known one is network.port",
        ),
        ("[netwrok]\nport = 1", "1: netwrok: unknown key; the nearest known one is network"),
        (
            "[network]\nrdma = \"require\"",
            "2: network.rdma: unknown key; the nearest known one is server.rdma",
        ),
        ("port = 1", "1: port: unknown key; the nearest known one is network.port"),
        (
            "[network]\nrdma.busy_pol_us = 1",
            "2: network.rdma.busy_pol_us: unknown key; \
             the nearest known one is network.rdma.busy_poll_us",
        ),
    ] {
        assert_eq!(parse_error(text), expected);
    }
}

#[test]
fn errors_say_what_a_key_expects() {
    for (text, expected) in [
        ("[network]\nport = 70000", "2: network.port: expected a number from 0 to 65535"),
        ("[network]\nport = \"6379\"", "expected a number from 0 to 65535"),
        ("[network]\nrdma_port = 6380", "set the port for clients in rdma_listen"),
        ("[server]\nrdma = \"maybe\"", "expected \"prefer\" or \"require\" or \"forbid\""),
        ("[network]\nrdma_listen = \"localhost\"", "expected one IP address of this host"),
        ("[network]\nrdma_listen = \"192.0.2.1:0\"", "expected one IP address of this host"),
        ("[network]\nrdma_enabled = \"yes\"", "expected true or false"),
        ("[network]\nbind = [1]", "expected a quoted string"),
        ("[network.rdma]\nrx_size = \"3M\"", "from \"4K\" to \"2M\""),
        ("[server]\nshutdown_timeout = 10", "expected a time with its unit"),
        ("[server]\nshutdown_timeout = \"10\"", "expected a time with its unit"),
        ("[server]\nshutdown_timeout = \"0s\"", "expected a time with its unit"),
        ("[server]\nrestart = \"always\"", "expected \"no\" or \"on-failure\""),
        ("[server]\ndata_dir = \"a\\nb\"", "must not contain control characters"),
        ("[server]\nengine = \"\"", "must not be empty"),
        (
            "[replication]\ntransport = \"rdma\"",
            "replication uses TCP only: set \"tcp\" or remove the key",
        ),
        ("[engine]\nport = 1", "2: engine.port: set port in [network] instead"),
        ("[engine]\nDaemonize = true", "must stay in the foreground"),
        ("[engine]\n\"ferrite.rdma\" = 1", "set the module's settings in [network]"),
        ("[engine]\nsave = \"1 1\\nloadmodule /x.so\"", "must not contain control characters"),
        ("[engine]\n\"x\\ny\" = 1", "not a valid name of an engine directive"),
        ("[engine]\nx = {}", "expected a string, a number, true, false, or a list of these"),
        (
            "[server]\nrdma = \"require\"\n[network]\nrdma_fallback = \"tcp\"",
            "contradict each other",
        ),
        ("[server]\nrdma = \"forbid\"\n[network]\nrdma_enabled = true", "contradict each other"),
        ("[network\n", "1: "),
        ("[server]\nengine = \"a\"\nengine = \"b\"", "3: "),
    ] {
        let error = parse_error(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn reads_values_of_every_type() {
    let config = Config::parse(
        r#"
        [server]
        engine = "/opt/valkey-server"
        restart = "on-failure"
        restart_delay = "250ms"
        shutdown_timeout = "10m"
        [network]
        bind = ["127.0.0.1", "-::1"]
        rdma_listen = "[::1]:7000"
        rdma_device = "rxe1,rxe2"
        rdma_fallback = "none"
        [network.rdma]
        rx_size = "1M"
        [engine]
        maxmemory = "1gb"
        appendonly = true
        save = ["3600 1", "60 10000"]
        requirepass = "secret"
        "#,
    )
    .expect("a valid file");
    assert_eq!(config.engine, Choice::Path("/opt/valkey-server".into()));
    assert_eq!(
        (config.restart, config.restart_delay),
        (Restart::OnFailure, Duration::from_millis(250))
    );
    assert_eq!(config.shutdown_timeout, Duration::from_secs(600));
    assert_eq!(config.bind, ["127.0.0.1", "-::1"]);
    let listen = (config.rdma_listen.map(|ip| ip.to_string()), config.rdma_port);
    assert_eq!((listen, config.rdma()), ((Some("::1".into()), 7000), Rdma::Require));
    assert_eq!(config.rdma_devices, ["rxe1", "rxe2"]);
    assert_eq!(config.rx_size, Some(1 << 20));
    assert_eq!(config.password(), Some("secret"));
    let mut lines: Vec<_> =
        config.directives.iter().map(|(name, rest)| format!("{name} {rest}")).collect();
    lines.sort();
    assert_eq!(
        lines,
        ["appendonly yes", "maxmemory 1gb", "requirepass secret", "save 3600 1", "save 60 10000"]
    );
}
