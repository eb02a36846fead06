//! Runs the examples of ferrite-client as a reader would: `tcp_examples` anywhere,
//! `lab_client_examples` in the lab.
#![expect(clippy::print_stdout, reason = "shows the examples' output with `-- --no-capture`")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A running example; drop stops it. Cargo puts examples into a directory next to that of the
/// tests.
struct RunningExample(Child);

impl RunningExample {
    fn start(name: &str, arguments: &[String]) -> Self {
        let test = std::env::current_exe().expect("path of the test");
        let built: PathBuf = test
            .parent()
            .and_then(|deps| deps.parent())
            .expect("target directory")
            .join("examples")
            .join(name);
        // `timeout` exits when the example exits. It passes SIGTERM on to the example.
        let child = Command::new("timeout")
            .arg("120")
            .arg(built)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn();
        Self(child.expect("start the example"))
    }

    /// Waits until the example has succeeded, and returns its output.
    fn output(mut self) -> String {
        let mut output = String::new();
        let mut stdout = self.0.stdout.take().expect("piped stdout");
        stdout.read_to_string(&mut output).expect("read the output");
        println!("{output}");
        let status = self.0.wait().expect("wait for the example");
        assert!(status.success(), "{status}: {output}");
        output
    }
}

impl Drop for RunningExample {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // Does not use `Child::kill`: `timeout` cannot pass SIGKILL on to the example.
            let _ = Command::new("kill").arg(self.0.id().to_string()).status();
            let _ = self.0.wait();
        }
    }
}

pub(crate) fn llm_cache(arguments: &[String], transport: &str) {
    let output = RunningExample::start("llm_cache", arguments).output();
    assert!(output.starts_with(&format!("over {transport}")), "{output}");
    assert_eq!(output.matches("verified").count(), 4, "{output}");
}

pub(crate) fn pubsub(arguments: &[String], transport: &str) {
    let output = RunningExample::start("pubsub", arguments).output();
    assert_eq!(output, format!("over {transport}\n100 messages on news, in order\n"));
}

pub(crate) fn web(arguments: &[String], transport: &str) {
    let mut web = RunningExample::start("web", arguments);
    let mut line = String::new();
    BufReader::new(web.0.stdout.as_mut().expect("piped stdout"))
        .read_line(&mut line)
        .expect("read the address");
    let address = line
        .trim()
        .strip_prefix("http://")
        .and_then(|rest| rest.strip_suffix('/'))
        .expect("an address");
    for views in 1..=3 {
        let mut page = TcpStream::connect(address).expect("connect");
        page.write_all(b"GET /a/page HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            .expect("send the request");
        let mut response = String::new();
        page.read_to_string(&mut response).expect("read the response");
        let expected = format!("a/page: {views} views, counted over {transport}\n");
        assert!(
            response.starts_with("HTTP/1.1 200 OK\r\n") && response.ends_with(&expected),
            "{response}"
        );
    }
}

/// Defines a test in the calling target for each example.
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
