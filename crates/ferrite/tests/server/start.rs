//! Failures before the engine is ready, and `--check`, which starts no engine.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::server::harness::{Server, Setup, directory};
use crate::{engines, has_device, network, run, text};

#[test]
fn check_prints_the_configuration_and_starts_nothing() {
    let directory = directory();
    let network = network();
    let setup = Setup {
        network: &network,
        engine: "maxmemory = \"1gb\"\nrequirepass = \"hush\"",
        ..Setup::default()
    };
    let file = directory.file("ferrite.toml", setup.text(directory.path()));
    let output = run(&["--check"], &file);
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{stdout}");
    for part in [
        "engine   /",
        "server v=",
        "loadmodule \"",
        " rdma-port ",
        "  maxmemory 1gb\n",
        "  requirepass …\n",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert!(!stdout.contains("hush"), "{stdout}");
    for (mode, is_warned) in [(0o644, true), (0o600, false)] {
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).expect("permitted");
        let log = text(&run(&["--check"], &file).stderr);
        let warning = "all users of this host can read the value of requirepass";
        assert_eq!(log.contains(warning), is_warned, "{log}");
        assert!(!log.contains("hush"), "{log}");
    }
    let object: Value =
        serde_json::from_slice(&run(&["--check", "--json"], &file).stdout).expect("JSON");
    assert!(
        object["configuration"]
            .as_array()
            .is_some_and(|lines| lines.contains(&"maxmemory 1gb".into()))
    );
    let socket = Path::new(object["unix_socket"].as_str().expect("a path"));
    assert!(!socket.parent().is_some_and(Path::exists), "no directory was created");
}

#[test]
fn errors_in_the_file_name_file_and_line() {
    let directory = directory();
    let file = directory.file("ferrite.toml", "[network]\n\nrdma_devcie = \"mlx5_0\"\n");
    let output = run(&["--json"], &file);
    assert_eq!(output.status.code(), Some(2));
    let message = format!(
        "{}:3: network.rdma_devcie: unknown key; the nearest known one is network.rdma_device",
        file.display()
    );
    assert!(text(&output.stderr).contains(&message), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).lines().count(), 1, "{}", text(&output.stdout));
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (object["error"]["kind"].as_str(), object["error"]["message"].as_str()),
        (Some("config"), Some(message.as_str()))
    );
    assert_eq!(run(&[], &directory.path().join("nowhere.toml")).status.code(), Some(2));
    assert_eq!(run(&["--no-such-option"], &file).status.code(), Some(2));
    assert_eq!(run(&["--help"], &file).status.code(), Some(0));
}

#[test]
fn names_the_places_where_engine_and_module_were_searched() {
    let directory = directory();
    let file = directory.file("ferrite.toml", "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let output = command
        .args(["server", "--config"])
        .arg(&file)
        .env("PATH", "/nowhere")
        .output()
        .expect("ferrite starts");
    assert_eq!(output.status.code(), Some(71));
    assert!(
        text(&output.stderr)
            .contains("looked for valkey-server and redis-server in PATH (/nowhere)")
    );
    let file = directory.file("ferrite.toml", "[server]\nmodule = \"/nowhere/ferrite.so\"\n");
    let output = run(&[], &file);
    assert_eq!(output.status.code(), Some(71));
    assert!(text(&output.stderr).contains("server.module: no such file: /nowhere/ferrite.so"));
}

#[test]
fn exits_with_69_if_rdma_is_required_and_unavailable() {
    if has_device() {
        return;
    }
    for engine in engines() {
        let directory = directory();
        let (network, server) = (network(), format!("engine = \"{engine}\"\nrdma = \"require\""));
        let mut server = Server::start(
            &directory,
            &Setup { network: &network, server: &server, ..Setup::default() },
        );
        let (code, stdout) = server.end();
        assert_eq!(code, Some(69), "{}", server.log());
        let object: Value = serde_json::from_str(&stdout).expect("JSON");
        assert_eq!(object["error"]["kind"], "absent");
        let message = object["error"]["message"].as_str().expect("a message");
        assert!(message.contains("RDMA is required") && message.contains("to do: "), "{message}");
    }
}

/// A start would fail here, so the check must fail, too.
#[test]
fn check_exits_with_69_if_rdma_is_required_and_unavailable() {
    if has_device() {
        return;
    }
    let directory = directory();
    let setup = Setup { server: "rdma = \"require\"", ..Setup::default() };
    let file = directory.file("ferrite.toml", setup.text(directory.path()));
    let output = run(&["--check"], &file);
    assert_eq!(output.status.code(), Some(69), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("RDMA is required (server.rdma): no RDMA "));
}

#[test]
fn reports_the_message_of_an_engine_that_does_not_start() {
    let directory = directory();
    let network = network();
    let wrong = Setup { network: &network, engine: "maxmemory = \"much\"", ..Setup::default() };
    let mut server = Server::start(&directory, &wrong);
    let (code, stdout) = server.end();
    assert_eq!(code, Some(1), "{}", server.log());
    let object: Value = serde_json::from_str(&stdout).expect("JSON");
    let message = object["error"]["message"].as_str().expect("a message");
    assert!(message.contains("exited with code 1 before it was ready: "), "{message}");
    assert!(message.contains("maxmemory"), "{message}");
    assert!(message.contains("must be a memory value"), "{message}");
    assert!(server.log().contains("must be a memory value"), "{}", server.log());
}

/// An engine quotes the line that it rejects. ferrite hides the password in it.
#[test]
fn hides_passwords_that_the_engine_quotes() {
    let directory = directory();
    let text = Setup {
        engine: "requirepass = \"one swordfish\"",
        network: &network(),
        ..Setup::default()
    };
    let file = directory.file("ferrite.toml", text.text(directory.path()));
    let output = run(&["--json"], &file);
    let (stdout, log) = (self::text(&output.stdout), self::text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains(">>> 'requirepass …'"), "{log}");
    assert!(!log.contains("swordfish") && !stdout.contains("swordfish"), "{log}{stdout}");
}

/// Writes a program that stands in for an engine.
fn program(directory: &ferrite_testkit::TempDir, script: &str) -> PathBuf {
    let program = directory.file("program", format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("a program");
    program
}

/// A program that is not an engine may end at once with code 0.
#[test]
fn reports_an_engine_that_ends_with_code_0_before_it_is_ready() {
    let directory = directory();
    let program = program(&directory, "cat >/dev/null; echo these are its last words");
    let server = format!("engine = \"{}\"", program.display());
    let mut server = Server::start(&directory, &Setup { server: &server, ..Setup::default() });
    let (code, stdout) = server.end();
    assert_eq!(code, Some(71), "{}", server.log());
    let words = "the engine exited with code 0 before it was ready: these are its last words";
    assert!(stdout.contains(words), "{stdout}");
}

#[test]
fn stops_an_engine_that_does_not_answer() {
    let directory = directory();
    let program = program(&directory, "exec sleep 600");
    let server = format!("engine = \"{}\"\nstartup_timeout = \"1s\"", program.display());
    let mut server = Server::start(&directory, &Setup { server: &server, ..Setup::default() });
    let (code, stdout) = server.end();
    assert_eq!(code, Some(71), "{}", server.log());
    assert!(stdout.contains("the engine did not answer at "), "{stdout}");
    assert!(stdout.contains(" for 1 s"), "{stdout}");
}
