//! The examples of ferrite-client as a reader would run them: `tcp_examples` anywhere,
//! `lab_client_examples` in the lab.
#![expect(clippy::print_stdout, reason = "what they said is worth a look: `-- --no-capture`")]

#[path = "../../ferrite-session/tests/redis_server.rs"]
pub(crate) mod redis_server;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// An example that runs; ended with the test. Cargo puts examples beside the tests.
struct Running(Child);

impl Running {
    fn start(name: &str, arguments: &[String]) -> Self {
        let test = std::env::current_exe().expect("the test's own path");
        let built: PathBuf = test
            .parent()
            .and_then(|deps| deps.parent())
            .expect("target")
            .join("examples")
            .join(name);
        // `timeout` ends with what it runs, and ends that when it is ended itself.
        let child = Command::new("timeout")
            .arg("120")
            .arg(built)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn();
        Self(child.expect("it runs"))
    }

    /// What it says until it ends well.
    fn said(mut self) -> String {
        let mut said = String::new();
        self.0.stdout.take().expect("piped").read_to_string(&mut said).expect("text");
        println!("{said}");
        let status = self.0.wait().expect("its end");
        assert!(status.success(), "{status}: {said}");
        said
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // Not by `Child::kill`, which `timeout` could not pass on.
            let _ = Command::new("kill").arg(self.0.id().to_string()).status();
            let _ = self.0.wait();
        }
    }
}

pub(crate) fn llm_cache(arguments: &[String], transport: &str) {
    let said = Running::start("llm_cache", arguments).said();
    assert!(said.starts_with(&format!("over {transport}")), "{said}");
    assert_eq!(said.matches("the same bytes").count(), 4, "{said}");
}

pub(crate) fn pubsub(arguments: &[String], transport: &str) {
    let said = Running::start("pubsub", arguments).said();
    assert_eq!(said, format!("over {transport}\n100 messages on news, in order\n"));
}

pub(crate) fn web(arguments: &[String], transport: &str) {
    let mut web = Running::start("web", arguments);
    let mut line = String::new();
    BufReader::new(web.0.stdout.as_mut().expect("piped"))
        .read_line(&mut line)
        .expect("its address");
    let at = line
        .trim()
        .strip_prefix("http://")
        .and_then(|rest| rest.strip_suffix('/'))
        .expect("an address");
    for views in 1..=3 {
        let mut page = TcpStream::connect(at).expect("it listens");
        page.write_all(b"GET /a/page HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            .expect("asked");
        let mut answer = String::new();
        page.read_to_string(&mut answer).expect("an answer");
        let expected = format!("a/page: {views} views, counted over {transport}\n");
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with(&expected),
            "{answer}"
        );
    }
}

/// Makes every test a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        #[test]
        fn llm_cache() {
            $run(crate::client_examples::llm_cache);
        }
        #[test]
        fn pubsub() {
            $run(crate::client_examples::pubsub);
        }
        #[test]
        fn web() {
            $run(crate::client_examples::web);
        }
    };
}
pub(crate) use run_suite;
