//! Tests of the command line.

use super::*;

fn run(words: &[&str]) -> (Box<Settings>, Mode) {
    let options = Options::try_parse_from([&["ferrite-cli"], words].concat());
    match options.unwrap_or_else(|error| panic!("{error}")).into_action().expect("valid options") {
        Action::Run(settings, mode) => (settings, mode),
        Action::Version => panic!("{words:?} asks only for the version"),
    }
}

fn command(words: &[&str]) -> Vec<Vec<u8>> {
    match run(words).1 {
        Mode::Command(words) => words,
        _ => panic!("{words:?} is not a command"),
    }
}

#[test]
fn passes_options_after_the_command_to_it() {
    assert_eq!(command(&["-n", "3", "SET", "-h", "--raw"]), [b"SET", &b"-h"[..], b"--raw"]);
    assert_eq!(command(&["GET", ""]), [&b"GET"[..], b""]);
    assert_eq!(command(&["INCRBY", "k", "-1"]), [&b"INCRBY"[..], b"k", b"-1"]);
    assert!(Options::try_parse_from(["ferrite-cli", "--no-such", "GET"]).is_err());
    assert!(Options::try_parse_from(["ferrite-cli", "-2", "-3"]).is_err());
}

#[test]
fn uses_the_last_style() {
    assert_eq!(run(&["--csv", "--no-raw"]).0.format.style, Style::Human);
    let (settings, _) = run(&["--raw", "--json"]);
    assert_eq!((settings.format.style, settings.protocol), (Style::Json, Protocol::Resp3IfKnown));
    assert_eq!(run(&["-2", "--json"]).0.protocol, Protocol::Resp2);
}

#[test]
fn takes_server_and_login_from_a_uri() {
    let (settings, mode) = run(&["--no-auth-warning", "-u", "redis://me:p%20w@there:7000/4"]);
    assert!(matches!(mode, Mode::Prompt));
    assert_eq!(settings.server.to_string(), "there:7000");
    assert_eq!((settings.user.as_deref(), settings.password.as_deref()), (Some("me"), Some("p w")));
    assert_eq!(settings.database, 4);
}

#[test]
fn unquotes_arguments() {
    assert_eq!(command(&["--quoted-input", "SET", r#""\x00""#]), [b"SET", &b"\0"[..]]);
}

#[test]
fn defines_valid_options() {
    use clap::CommandFactory as _;
    Options::command().debug_assert();
}
