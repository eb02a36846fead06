//! `ferrite bench kv` with a real `redis-server`, on any host: it leaves the server's data alone,
//! keeps its results and shows its progress.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ferrite_testkit::{TempDir, Terminal};
use serde_json::Value;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A redis-server on a Unix socket; killed on drop.
struct Redis {
    process: Child,
    socket: PathBuf,
}

impl Redis {
    fn start() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ferrite-bench-{}-{number}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server starts: apt-get install redis-server");
        let redis = Self { process, socket };
        until("redis-server listens", || UnixStream::connect(&redis.socket).is_ok());
        redis
    }

    /// Runs an inline command. Returns the whole reply.
    fn ask(&self, command: &str) -> String {
        let mut engine = UnixStream::connect(&self.socket).expect("it listens");
        engine.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).expect("to write");
        let mut reply = String::new();
        engine.read_to_string(&mut reply).expect("a reply");
        reply
    }

    fn bench(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["bench", "kv", "--unix"]).arg(&self.socket).args(arguments);
        command
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < TIMEOUT, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const SHORT: [&str; 4] = ["--seconds", "0.2", "--warmup", "0"];

#[test]
fn writes_keys_of_its_own_and_removes_them() {
    let redis = Redis::start();
    redis.ask("SET key:12 precious");
    for test in ["set", "get", "mixed"] {
        let output = redis.bench(&["--test", test]).args(SHORT).output().expect("ferrite starts");
        assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
        assert_eq!(redis.ask("GET key:12"), "$8\r\nprecious\r\n+OK\r\n", "{test}");
        assert_eq!(redis.ask("DBSIZE"), ":1\r\n+OK\r\n", "{test}");
    }
    let kept = redis.bench(&["--test", "get", "--keys", "50", "--keep-keys", "--json"]);
    let output = { kept }.args(SHORT).output().expect("ferrite starts");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let prefix = report["key_prefix"].as_str().expect("a prefix");
    assert!(prefix.starts_with("ferrite-bench:"), "{prefix}");
    assert!(redis.ask(&format!("EXISTS {prefix}0 {prefix}49")).starts_with(":2\r\n"));
    assert!(redis.ask("DBSIZE").starts_with(":51\r\n"));
}

#[test]
fn removes_its_keys_when_it_is_interrupted() {
    let redis = Redis::start();
    let mut command = redis.bench(&["--test", "get", "--seconds", "600"]);
    let mut bench = command.stderr(Stdio::piped()).spawn().expect("ferrite starts");
    until("the keys are written", || redis.ask("DBSIZE").starts_with(":10000\r\n"));
    let id = bench.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    let lines: Vec<String> = BufReader::new(bench.stderr.take().expect("piped"))
        .lines()
        .map(|line| line.expect("UTF-8"))
        .collect();
    assert_eq!(bench.wait().expect("an end").code(), Some(1), "{lines:?}");
    assert!(lines[0].contains("removing the keys"), "{lines:?}");
    assert_eq!(lines.last().map(String::as_str), Some("ferrite: interrupted"), "{lines:?}");
    assert!(redis.ask("DBSIZE").starts_with(":0\r\n"));
}

#[test]
fn names_the_keys_that_it_cannot_remove() {
    let redis = Redis::start();
    redis.ask("ACL SETUSER default -del");
    let output = redis.bench(&["--test", "set"]).args(SHORT).output().expect("ferrite starts");
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("cannot remove the keys ferrite-bench:"), "{text}");
    assert!(text.contains("the server rejects DEL: -NOPERM"), "{text}");
}

#[test]
fn a_plot_that_cannot_be_written_fails_before_the_benchmark() {
    let redis = Redis::start();
    let output = redis
        .bench(&["--plot", "/nonexistent/plot.svg", "--seconds", "600"])
        .output()
        .expect("ferrite starts");
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("cannot write /nonexistent/plot.svg: No such file"), "{text}");
    assert!(redis.ask("INFO commandstats").find("cmdstat_set").is_none(), "it wrote keys");

    let plot = redis.socket.with_extension("svg");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["bench", "kv", "--unix", "/nonexistent/socket", "--plot"]).arg(&plot);
    assert_eq!(command.output().expect("ferrite starts").status.code(), Some(1));
    assert!(!plot.exists(), "a failed benchmark leaves no empty plot");
}

fn json(text: &[u8]) -> Value {
    serde_json::from_slice(text)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

#[test]
fn shows_progress_on_a_terminal() {
    let redis = Redis::start();
    let bench = redis.bench(&["--test", "get", "--seconds", "1.5", "--warmup", "0"]);
    let (status, shown) = Terminal::start(&bench, 100, 30).finish();
    assert!(status.success(), "{shown}");
    for expected in ["writing keys: ", "  get: ", " requests/s  ", " %  "] {
        assert!(shown.contains(expected), "no {expected:?} in {shown:?}");
    }
    // The bar is gone when the result is printed.
    let (_, result) = shown.rsplit_once("over Unix socket: ").expect("a result");
    assert!(result.contains("p99.9 µs") && !result.contains(" %  "), "{result:?}");
    assert!(!result.contains("CPU"), "{result:?}");
}

#[test]
fn keeps_results_when_the_server_goes() {
    let mut redis = Redis::start();
    let directory = TempDir::new("bench");
    let (saved, plot) = (directory.join("saved.json"), directory.join("plot.svg"));
    let mut command = redis.bench(&["--test", "set,get", "--seconds", "600", "--warmup", "0"]);
    command.args(["--threads", "2", "--json", "--save"]).arg(&saved).arg("--plot").arg(&plot);
    let bench = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // One connection writes the 10,000 keys for `get`. Then ten connections run the test `set`.
    until("requests are measured", || {
        let stats = redis.ask("INFO commandstats");
        let calls = stats.split_once("cmdstat_set:calls=").and_then(|(_, rest)| {
            rest.split(',').next().and_then(|calls| calls.parse::<u64>().ok())
        });
        calls.is_some_and(|calls| calls > 11_000)
    });
    redis.process.kill().expect("it runs");
    let output = bench.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot measure on this connection"), "{}", stderr(&output));
    let report = json(&output.stdout);
    let results = report["results"].as_array().expect("results");
    assert_eq!(results.len(), 1, "{report}");
    assert_eq!((&results[0]["test"], &results[0]["complete"]), (&"set".into(), &false.into()));
    assert!(results[0]["requests"].as_u64().is_some_and(|requests| requests > 500), "{report}");
    let message = report["error"]["message"].as_str().expect("a message");
    assert!(message.contains("cannot measure on this connection"), "{message}");
    assert_eq!(json(&std::fs::read(&saved).expect("a saved result")), report);
    let drawn = std::fs::read_to_string(&plot).expect("a plot");
    assert!(drawn.contains(">set<") && !drawn.contains(">get<"), "{drawn}");
}

/// Three tests, of which the last ends the server.
const ENDS_THE_SERVER: [&str; 6] =
    ["--test", "set,get", "--command", "SHUTDOWN NOSAVE", "--connections", "1"];

#[test]
fn keeps_complete_results_when_the_server_goes_in_a_later_test() {
    let redis = Redis::start();
    let directory = TempDir::new("bench");
    let (saved, plot) = (directory.join("saved.json"), directory.join("plot.svg"));
    let mut command = redis.bench(&ENDS_THE_SERVER);
    command.args(SHORT).args(["--json", "--save"]).arg(&saved).arg("--plot").arg(&plot);
    let output = command.output().expect("ferrite starts");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report = json(&output.stdout);
    let results = report["results"].as_array().expect("results");
    let tests: Vec<_> = results.iter().map(|row| (&row["test"], &row["complete"])).collect();
    let complete = Value::from(true);
    assert_eq!(tests, [(&"set".into(), &complete), (&"get".into(), &complete)], "{report}");
    for row in results {
        assert!(row["errors"] == 0 && row["requests"].as_u64() > Some(10), "{row}");
    }
    let message = report["error"]["message"].as_str().expect("a message");
    assert!(message.contains("cannot measure on this connection"), "{message}");
    assert_eq!(json(&std::fs::read(&saved).expect("a saved result")), report);
    let drawn = std::fs::read_to_string(&plot).expect("a plot");
    assert!(drawn.contains(">set<") && drawn.contains(">get<"), "{drawn}");

    let redis = Redis::start();
    let mut command = redis.bench(&ENDS_THE_SERVER);
    let output = command.args(SHORT).output().expect("ferrite starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<_> = printed.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(rows.contains(&"set") && rows.contains(&"get"), "{printed}");
    assert!(!printed.contains("partial result"), "{printed}");
}

/// Returns the day of the local time, as `2026-01-31`.
fn today() -> String {
    let output = Command::new("date").arg("+%F").output().expect("date starts");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn plot_has_the_date_the_version_and_the_command_line() {
    let redis = Redis::start();
    let directory = TempDir::new("plot");
    let plot = directory.join("plot.svg");
    let mut command = redis.bench(&["--test", "set", "--plot"]);
    let before = today();
    let output = command.arg(&plot).args(SHORT).output().expect("ferrite starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let days = [before, today()];
    let drawn = std::fs::read_to_string(&plot).expect("a plot");
    // The lines below the plot have the smallest font. A long command line is wrapped.
    let texts = drawn.lines().filter_map(|line| line.split_once(" font-size=\"11\">"));
    let words: Vec<_> = texts.filter_map(|(_, text)| text.strip_suffix("</text>")).collect();
    let footer = words.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
    let first = |day: &String| format!("ferrite {}, {day} ", env!("CARGO_PKG_VERSION"));
    assert!(days.iter().any(|day| footer.starts_with(&first(day))), "{days:?}: {footer}");
    let (socket, plot) = (redis.socket.display(), plot.display());
    let command_line =
        format!(" ferrite bench kv --unix {socket} --test set --plot {plot} --seconds 0.2 ");
    assert!((footer + " ").contains(&command_line), "{command_line} is not in {drawn}");
}

#[test]
fn measures_commands_with_placeholders() {
    let redis = Redis::start();
    let output = redis
        .bench(&["--command", "LPUSH __key__ '__data__ __data__'"])
        .args(["--command", "HSET own:__rand_int__ field __data__", "--keys", "10", "--size", "3"])
        .args(["--json", "--keep-keys"])
        .args(SHORT)
        .output()
        .expect("ferrite starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let report = json(&output.stdout);
    let tests: Vec<_> = report["results"].as_array().expect("results").iter().collect();
    assert_eq!(tests[0]["test"], "LPUSH __key__ '__data__ __data__'");
    assert_eq!(tests[1]["test"], "HSET own:__rand_int__ field __data__");
    for test in tests {
        assert!(test["errors"] == 0 && test["requests"].as_u64() > Some(100), "{test}");
    }
    let prefix = report["key_prefix"].as_str().expect("a prefix");
    assert!(redis.ask(&format!("LINDEX {prefix}7 0")).starts_with("$7\r\nxxx xxx\r\n"));
    assert!(redis.ask("HGET own:000000000007 field").starts_with("$3\r\nxxx\r\n"));
    assert!(redis.ask("DBSIZE").starts_with(":20\r\n"), "the built-in tests must not run");
    let output = redis.bench(&["--command", "LPUSH __key__ a"]).args(SHORT).output();
    assert!(output.expect("ferrite starts").status.success());
    assert!(redis.ask("DBSIZE").starts_with(":20\r\n"), "it removes its own keys");
}

/// SUBSCRIBE gets a reply for each channel. No single reply answers the request, so there is no
/// latency to measure.
#[test]
fn refuses_commands_with_several_replies() {
    let redis = Redis::start();
    let bench = redis.bench(&["--command", "SUBSCRIBE a b"]).args(SHORT).output();
    let message = stderr(&bench.expect("ferrite starts"));
    assert!(message.contains("more replies than requests"), "{message}");
}

#[test]
fn authenticates_as_a_user() {
    let redis = Redis::start();
    redis.ask("ACL SETUSER bench on >hush ~* +@all");
    redis.ask("ACL SETUSER default -set");
    let run = |arguments: &[&str]| {
        let mut bench = redis.bench(&["--test", "set", "--json"]);
        bench.args(SHORT).args(arguments).env_remove("REDISCLI_AUTH").output().expect("it starts")
    };
    let denied = json(&run(&[]).stdout);
    let error = denied["results"][0]["first_error"].as_str().expect("an error");
    assert!(error.starts_with("-NOPERM"), "{denied}");
    let allowed = json(&run(&["--user", "bench", "--auth", "hush"]).stdout);
    assert_eq!(allowed["results"][0]["errors"], 0, "{allowed}");
    let command_line = allowed["command_line"].as_str().expect("a command line");
    assert!(command_line.ends_with("--user bench --auth ***"), "{command_line}");
    assert_eq!(run(&["--user", "bench"]).status.code(), Some(2), "no password");
    let wrong = run(&["--user", "bench", "--auth", "wrong"]);
    assert!(stderr(&wrong).contains("AUTH: -WRONGPASS"), "{}", stderr(&wrong));
}

#[test]
fn failure_of_one_thread_ends_the_others() {
    let redis = Redis::start();
    redis.ask("CONFIG SET requirepass hush");
    let mut one = UnixStream::connect(&redis.socket).expect("it listens");
    one.write_all(b"AUTH hush\r\nCONFIG SET maxclients 2\r\n").expect("to write");
    one.read_exact(&mut [0; 10]).expect("two replies");
    let mut bench = redis.bench(&["--threads", "2", "--connections", "2", "--auth", "hush"]);
    let output = bench.args(["--test", "set", "--seconds", "600"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("max number of clients"), "{}", stderr(&output));
}

#[test]
fn rejects_comparisons_of_one_transport() {
    let bench = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["bench", "kv", "127.0.0.1:1"]).args(arguments).output().expect("it starts")
    };
    for wrong in [&["--compare", "tcp"][..], &["--compare", "tcp,rdma", "--rdma", "forbid"]] {
        let output = bench(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", stderr(&output));
    }
}
