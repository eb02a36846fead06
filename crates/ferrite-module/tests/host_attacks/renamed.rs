//! Renamed commands: the module knows a command by its identity, not by its name.

use ferrite_testkit::resp::Client;

use crate::client::of_module;
use crate::{SECRET, address, on_each};

/// The module takes a renamed SUBSCRIBE for a SUBSCRIBE, which has a reply for each channel. It
/// once took the second of these replies for the reply to the login that follows.
#[test]
fn a_renamed_subscribe_is_a_subscribe() {
    on_each(&["--rename-command", "SUBSCRIBE", "sub2"], |server| {
        let mut admin = server.client();
        admin.ok(&["ACL", "SETUSER", "admin", "on", ">right", "~*", "+@all"]);
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low", "&*", "+subscribe", "+hello"]);
        admin.ok(&["SET", "secret", SECRET]);
        let mut client = of_module(server);
        client.ok(&["AUTH", "low", "p"]);
        client.send(&[
            vec!["sub2", "a", "b"],
            vec!["HELLO", "2", "AUTH", "admin", "wrong"],
            vec!["GET", "secret"],
        ]);
        let replies = client.replies(4).concat();
        assert!(!String::from_utf8_lossy(&replies).contains(SECRET));
    });
}

/// After a renamed SELECT, writes go to the new database. They once went to the previous one.
#[test]
fn a_renamed_select_selects() {
    on_each(&["--rename-command", "SELECT", "sel"], |server| {
        let mut client = of_module(server);
        client.ok(&["sel", "5"]);
        client.ok(&["SET", "k", "in 5"]);
        let mut admin = server.client();
        assert_eq!(admin.ask(&["EXISTS", "k"]), ":0");
        admin.ok(&["sel", "5"]);
        assert_eq!(admin.ask(&["EXISTS", "k"]), ":1");
    });
}

/// After a renamed MULTI, commands are queued. They once ran at once.
#[test]
fn a_renamed_multi_queues() {
    on_each(
        &["--rename-command", "MULTI", "xmulti", "--rename-command", "EXEC", "xexec"],
        |server| {
            let (mut client, mut admin) = (of_module(server), server.client());
            client.ok(&["xmulti"]);
            assert_eq!(client.ask(&["SET", "k", "queued"]), "+QUEUED");
            assert_eq!(admin.ask(&["EXISTS", "k"]), ":0");
            assert_eq!(client.ask(&["xexec"]), "*1\r\n+OK");
            assert_eq!(client.ask(&["EXISTS", "k"]), ":1");
        },
    );
}

/// After a renamed AUTH, calls have the rights of the new user. They once kept those of the
/// previous user.
#[test]
fn a_renamed_auth_changes_the_user() {
    on_each(&["--rename-command", "AUTH", "xauth"], |server| {
        let (mut client, mut admin) = (of_module(server), server.client());
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get"]);
        admin.ok(&["SET", "k", "v"]);
        client.ok(&["xauth", "low", "p"]);
        assert!(client.ask(&["GET", "k"]).starts_with("-NOPERM"));
        assert_eq!(client.ask(&["GET", "low:k"]), "$-1");
    });
}

/// With CLIENT renamed, REPLY SKIP skips one reply. It once made the session wait forever.
#[test]
fn a_renamed_client_reply_skips() {
    on_each(&["--rename-command", "CLIENT", "xclient"], |server| {
        let mut client = of_module(server);
        client.send(&[vec!["xclient", "REPLY", "SKIP"], vec!["SET", "k", "v"], vec!["GET", "k"]]);
        assert_eq!(client.next_reply().as_deref(), Some(&b"$1\r\nv\r\n"[..]));
    });
}

/// If ACL is renamed, the module cannot find out whether the engine needs a password. Sessions then
/// use the proxy path.
#[test]
fn sessions_work_if_acl_is_renamed() {
    on_each(&["--rename-command", "ACL", "xacl"], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&["xacl", "WHOAMI"]), "$7\r\ndefault");
        assert_eq!(client.ask(&["GET", "k"]), "$1\r\nv");
    });
}

/// A command can be renamed to a name of any length.
#[test]
fn a_renamed_reset_with_a_long_name_resets() {
    let name = "reset-0123456789abcdef0123456789abcdef0123456789";
    on_each(&["--requirepass", "x", "--rename-command", "RESET", name], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        client.ok(&["AUTH", "x"]);
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&[name]), "+RESET");
        assert!(client.ask(&["GET", "k"]).starts_with("-NOAUTH"));
    });
}
