//! Tests the settings in a file, and the shipped example.

use super::*;

const EXAMPLE: &str = include_str!("../../../../../packaging/ferrite.toml");

/// The shipped file sets only defaults. It shows every key, and the keys in its comments are valid.
#[test]
fn shipped_example_is_valid_and_complete() {
    let shown: Vec<_> =
        EXAMPLE.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)).collect();
    let is_key = |line: &str| line.split_once(" = ").is_some_and(|(name, _)| !name.contains(' '));
    let shown = shown.into_iter().filter(|line| line.starts_with('[') || is_key(line));
    let shown = shown.collect::<Vec<_>>().join("\n");
    Config::parse(&shown).unwrap_or_else(|why| panic!("{why}, in\n{shown}"));
    for setting in table::all().filter(|setting| !setting.key.is_empty()) {
        let (section, name) = setting.key.rsplit_once('.').expect("a section");
        let (start, section) = (format!("{name} = "), format!("[{section}]\n"));
        let found = shown.split_once(&section).is_some_and(|(_, rest)| {
            rest.lines()
                .take_while(|line| !line.starts_with('['))
                .any(|line| line.starts_with(&start))
        });
        assert!(found, "packaging/ferrite.toml does not show {}", setting.key);
    }
    // Keys that are not in a comment have their default values.
    let file = file::read(Program::Server, EXAMPLE).expect("the example");
    for (setting, entry) in file.values.iter() {
        assert_eq!(
            entry.value,
            Values::new(Program::Server).entry(setting).value,
            "{}",
            setting.key
        );
    }
}

#[test]
fn keys_for_the_module_become_its_arguments() {
    let config = Config::parse(
        "[network]\nrdma_enabled = true\nrdma_fallback = \"none\"\nrdma_device = [\"a\", \"b\"]\n\
         rdma_port = 1\n[network.rdma]\nmax_connections = 5\nbusy_poll_us = 100\n\
         rdma_recv_block_type = \"large\"\nhuge_pages = true",
    )
    .expect("a valid file");
    assert_eq!(config.rdma(), Rdma::Require);
    let arguments: Vec<_> = config.for_module().collect();
    let expected = [
        ("rdma-device", "a,b"),
        ("rdma-device-port", "1"),
        ("max-clients", "5"),
        ("recv-buffer-size", "64kb"),
        ("busy-poll-us", "100us"),
        ("huge-pages", "yes"),
    ];
    assert_eq!(arguments, expected.map(|(name, value)| (name, value.to_owned())));
}

#[test]
fn reads_the_engines_settings() {
    let config = Config::parse(
        "[server]\nengine = \"/opt/valkey-server\"\nrestart = \"on-failure\"\n\
         restart_delay = \"250ms\"\nshutdown_timeout = \"10m\"\n[network]\n\
         rdma_listen = \"[::1]:7000\"\n[engine]\nrequirepass = \"secret\"",
    )
    .expect("a valid file");
    assert_eq!(config.engine, Choice::Path("/opt/valkey-server".into()));
    assert_eq!(
        (config.restart, config.restart_delay),
        (Restart::OnFailure, Duration::from_millis(250))
    );
    assert_eq!(config.shutdown_timeout, Duration::from_secs(600));
    assert_eq!((config.rdma_listen.clone(), config.rdma_port), (vec!["::1".to_owned()], 7000));
    assert_eq!(config.password(), Some("secret"));
    assert_eq!(Config::default().rdma_port, 6380);
}

/// A link-local address names its interface after `%`.
#[test]
fn reads_addresses_with_an_interface() {
    for (listen, hosts, port) in [
        ("[fe80::1%lo]:7000", &["fe80::1%lo"][..], 7000),
        ("fe80::1%lo", &["fe80::1%lo"], 6380),
        ("[fe80::1%lo], fe80::2%eth0.7", &["fe80::1%lo", "fe80::2%eth0.7"], 6380),
    ] {
        let file = format!("[network]\nrdma_listen = \"{listen}\"");
        let config = Config::parse(&file).unwrap_or_else(|why| panic!("{listen}: {why}"));
        assert_eq!(config.rdma_listen, hosts, "{listen}");
        assert_eq!(config.rdma_port, port, "{listen}");
    }
    for wrong in ["fe80::1%", "[fe80::1%]:7000", "10.0.0.1%lo"] {
        Config::parse(&format!("[network]\nrdma_listen = \"{wrong}\"")).expect_err(wrong);
    }
}

#[test]
fn errors_of_a_file_are_shown_together() {
    let error = Config::parse("[server]\nrestrat = 1\n[network]\nport = 70000").expect_err("wrong");
    assert_eq!(
        error,
        "ferrite.toml:2: server.restrat: unknown key; the nearest known one is server.restart\n\
         ferrite.toml:4: network.port: expected a number from 0 to 65535"
    );
}

#[test]
fn agent_has_the_settings_of_its_section_and_an_admin_port_of_its_own() {
    let text = "[server]\nagent_admin_listen = \"127.0.0.1:2\"\n[replication]\n\
                transport = \"rdma\"\n[agent]\nmode = \"transparent\"\nlisten = \"192.0.2.1\"\n\
                peers = [\"192.0.2.2\"]\nports = [\"6379\"]\n[observability]\n\
                admin_listen = \"127.0.0.1:1\"";
    let config = Config::parse(text).expect("a valid file");
    let agent = config.agent.as_ref().expect("an agent");
    assert_eq!(agent.text(&table::ADMIN_LISTEN), Some("127.0.0.1:2"));
    assert_eq!(rdma_policy(agent), Rdma::Require);
    assert_eq!(config.rdma(), Rdma::Prefer);
    let arguments: Vec<_> = config.for_module().collect();
    assert_eq!(arguments, [("admin-listen", "127.0.0.1:1".to_owned())]);
    // The certificates are missing.
    let make_setup = config.agent_setup(Path::new("/s")).expect("an agent");
    let wrong = make_setup().err().expect("an error");
    assert!(wrong.is::<settings::WrongSettings>());
    let wrong = format!("{wrong:#}");
    assert!(wrong.starts_with("192.0.2.1:7470 is not a loopback address"), "{wrong}");
    let allowed = text.replace("\nports", "\nallow_unauthenticated_peers = true\nports");
    let config = Config::parse(&allowed).expect("a valid file");
    let make_setup = config.agent_setup(Path::new("/s")).expect("an agent");
    assert_eq!(
        make_setup().expect("valid settings").describe(),
        "alias 192.0.2.1, peers 192.0.2.2, ports 6379 (mode transparent, RDMA: require, direct: \
         refuse)"
    );
    assert_eq!(Config::parse("").expect("valid").agent, None);
}
