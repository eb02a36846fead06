//! Starts programs with an admin port, and reads its answers.
#![allow(dead_code, reason = "no test binary uses all of it")]

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Deref;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use ferrite_testkit::TIMEOUT;
use ferrite_testkit::process::KillOnDrop;
use serde_json::Value;

/// The address of an admin port.
pub(crate) struct Admin(pub(crate) String);

impl Admin {
    /// Returns the status and the body of an answer.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        self.request(&format!("GET {path}"))
    }

    pub(crate) fn request(&self, method_and_path: &str) -> (u16, String) {
        let mut socket = TcpStream::connect(&self.0).expect("the admin port");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        write!(socket, "{method_and_path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        if status == 200 && method_and_path.ends_with("/metrics") {
            assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
        }
        (status, body.to_owned())
    }

    /// Returns the names of all metrics, as queries spell them.
    pub(crate) fn names(&self) -> HashSet<String> {
        let (_, text) = self.get("/metrics");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let names = types.flat_map(|(name, kind)| match kind {
            "counter" => vec![format!("{name}_total")],
            "histogram" => ["bucket", "count", "sum"].map(|end| format!("{name}_{end}")).into(),
            _ => vec![name.to_owned()],
        });
        names.collect()
    }

    /// Returns all samples. Checks that each sample follows its type, and that the text ends with
    /// its end marker.
    pub(crate) fn scrape(&self) -> BTreeMap<String, f64> {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200);
        assert!(text.ends_with("# EOF\n"), "{text}");
        let (mut samples, mut family) = (BTreeMap::new(), String::new());
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().expect("a name").to_owned();
            }
            if line.starts_with('#') {
                continue;
            }
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            assert!(name.starts_with(&family) && name.starts_with("ferrite_"), "{line}");
            let previous = samples.insert(name.to_owned(), value.parse().expect("a number"));
            assert_eq!(previous, None, "this series has two samples: {line}");
        }
        samples
    }
}

/// A gateway, relay or agent with an admin port.
pub(crate) struct Running {
    pub(crate) process: KillOnDrop,
    pub(crate) address: String,
    pub(crate) admin: Admin,
}

impl Deref for Running {
    type Target = Admin;

    fn deref(&self) -> &Admin {
        &self.admin
    }
}

impl Running {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(&mut Self::command(arguments))
    }

    /// Starts the program, and also returns the lines of its log.
    pub(crate) fn start_logged(arguments: &[&str]) -> (Self, Receiver<String>) {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let running = Self::spawn(Self::command(arguments).stderr(writer));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(reader).lines().map_while(Result::ok);
            lines.try_for_each(|line| sender.send(line))
        });
        (running, lines)
    }

    /// Returns the command with an admin port. The variable `FERRITE_PROGRAM` names another build
    /// of ferrite, such as an optimised one.
    pub(crate) fn command(arguments: &[&str]) -> Command {
        let program = std::env::var_os("FERRITE_PROGRAM");
        let mut command =
            Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrite").into()));
        command.args(arguments).args(["--admin-listen", "127.0.0.1:0", "--json"]);
        command
    }

    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().expect("ferrite starts");
        let stdout = process.stdout.take().expect("piped");
        let process = KillOnDrop(process);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let listening: Value = serde_json::from_str(&line).expect("JSON");
        let of = |name: &str| listening[name].as_str().expect(name).to_owned();
        Self { process, address: of("address"), admin: Admin(of("admin")) }
    }

    /// Sends a command and waits for its reply. The session stays open as long as the socket.
    pub(crate) fn ping(&self) -> TcpStream {
        let mut socket = TcpStream::connect(&self.address).expect("a session");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        socket.write_all(b"PING\r\n").expect("sent");
        let mut reply = [0; 7];
        socket.read_exact(&mut reply).expect("a reply");
        assert_eq!(&reply, b"+PONG\r\n");
        socket
    }
}
