//! The durability of writes that the module calls in-process: an acknowledged write is in the AOF
//! and reaches replicas exactly once, and WAIT is correct.

mod client;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use client::{Pair, calls, of_module, start};
use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, Start, free_port};

/// Starts an engine that has an AOF and can be restarted.
fn start_with_aof(program: &Path, fsync: &str) -> Engine {
    let arguments =
        ["rdma-port", &free_port().to_string(), "rdma-bind", "127.0.0.1", "call-path", "yes"];
    let fsync = format!("appendfsync {fsync}");
    let options = ["port 0", "save \"\"", "appendonly yes", "enable-debug-command yes", &fsync];
    Engine::start_from_file(&Start { program, module: Some(&arguments), options: &options })
}

/// Restarts an engine after SIGKILL.
fn restart(server: &mut Engine) {
    server.wait();
    server.restart();
    server.wait_until("the data is loaded", || server.client().ask(&["PING"]) == "+PONG");
}

/// Clients write until the engine is killed. No acknowledged write is lost, and none is applied
/// twice.
#[test]
fn acknowledged_writes_survive_a_kill() {
    const AT_A_TIME: usize = 8;
    for program in engines() {
        // Leaves out `everysec`: during an fsync, the engine delays its writes to the AOF by up to
        // two seconds but still sends replies, also at its own port.
        for fsync in ["always", "no"] {
            let mut server = start_with_aof(&program, fsync);
            for _ in 0..3 {
                let address = server.info("address");
                let before: Vec<i64> = (0..4).map(|writer| counter(&server, writer)).collect();
                let acknowledged: Mutex<[i64; 4]> = Mutex::default();
                std::thread::scope(|scope| {
                    for writer in 0..4 {
                        let (address, acknowledged) = (&address, &acknowledged);
                        scope.spawn(move || {
                            let mut client = Client::to_tcp(address);
                            let key = format!("counter{writer}");
                            while client.try_send(&vec![vec!["INCR", &key]; AT_A_TIME]) {
                                for _ in 0..AT_A_TIME {
                                    if client.next_reply().is_none() {
                                        return;
                                    }
                                    acknowledged.lock().expect("no panic")[writer] += 1;
                                }
                            }
                        });
                    }
                    server.wait_until("an acknowledgement for each writer", || {
                        !acknowledged.lock().expect("no panic").contains(&0)
                    });
                    std::thread::sleep(Duration::from_millis(300));
                    server.signal("KILL");
                });
                restart(&mut server);
                let acknowledged = acknowledged.into_inner().expect("no panic");
                for (writer, acknowledged) in acknowledged.into_iter().enumerate() {
                    let kept = counter(&server, writer) - before[writer];
                    let most = acknowledged + i64::try_from(AT_A_TIME).expect("a small number");
                    assert!(
                        acknowledged > 0 && (acknowledged..=most).contains(&kept),
                        "{acknowledged} acknowledged, {kept} kept, appendfsync {fsync}"
                    );
                }
            }
            server.assert_healthy();
        }
    }
}

fn counter(server: &Engine, writer: usize) -> i64 {
    let reply = server.client().ask(&["INCRBY", &format!("counter{writer}"), "0"]);
    reply.trim_start_matches(':').parse().expect("a number")
}

/// The engine writes the AOF at the end of an iteration of its event loop. The module sends replies
/// only after that, because an earlier reply could acknowledge a write that is lost.
#[test]
fn replies_wait_for_the_aof() {
    for program in engines() {
        for fsync in ["always", "no"] {
            let mut server = start_with_aof(&program, fsync);
            let mut caller = of_module(&server);
            let [mut first, mut last] = [(); 2].map(|()| server.client());
            caller.ok(&["SET", "key", "before"]);
            // One iteration of the event loop runs the write and then a long command.
            first.send(&[vec!["DEBUG", "SLEEP", "0.6"]]);
            std::thread::sleep(Duration::from_millis(200));
            caller.send(&[vec!["SET", "key", "after"]]);
            std::thread::sleep(Duration::from_millis(100));
            last.send(&[vec!["DEBUG", "SLEEP", "1"]]);
            assert_eq!(caller.next_reply().expect("a reply"), b"+OK\r\n");
            server.signal("KILL");
            restart(&mut server);
            assert_eq!(server.client().ask(&["GET", "key"]), "$5\r\nafter", "{fsync}");
        }
    }
}

/// With `appendfsync always`, no client sees data that can still be lost, not even by reading what
/// another client has just written.
#[test]
fn replies_to_reads_wait_for_the_aof() {
    for program in engines() {
        let mut server = start_with_aof(&program, "always");
        // The engine may run the read before the write. Then the attempt shows nothing.
        let shown = (0..10).any(|_| reads_what_was_just_written(&mut server));
        assert!(shown, "no iteration had the write before the read");
    }
}

/// Kills the engine when a client has read a write of the same iteration, and checks that the write
/// was kept. Returns true if the client read the written value.
fn reads_what_was_just_written(server: &mut Engine) -> bool {
    let mut caller = of_module(server);
    let [mut first, mut writer, mut last] = [(); 3].map(|()| server.client());
    caller.ok(&["SET", "key", "before"]);
    // One iteration of the event loop runs a write, a read of the same key, and then a long
    // command.
    first.send(&[vec!["DEBUG", "SLEEP", "0.6"]]);
    std::thread::sleep(Duration::from_millis(200));
    writer.send(&[vec!["SET", "key", "after!"]]);
    std::thread::sleep(Duration::from_millis(100));
    caller.send(&[vec!["GET", "key"]]);
    std::thread::sleep(Duration::from_millis(100));
    last.send(&[vec!["DEBUG", "SLEEP", "1"]]);
    let read = caller.next_reply().expect("a reply");
    server.signal("KILL");
    restart(server);
    let kept = server.client().raw(&["GET", "key"]);
    assert!(kept == read || read == b"$6\r\nbefore\r\n", "{}", String::from_utf8_lossy(&read));
    read == b"$6\r\nafter!\r\n"
}

/// A replica gets all called writes, and WAIT of a session covers them.
#[test]
fn replicas_get_called_writes_and_wait_covers_them() {
    for program in engines() {
        let port = free_port().to_string();
        let mut primary = start(&program, &["--port", &port, "--repl-diskless-sync-delay", "0"]);
        let mut replica = start(&program, &["--appendonly", "yes"]);
        let mut caller = of_module(&primary);
        caller.ok(&["SET", "key", "0"]);
        replica.client().ok(&["REPLICAOF", "127.0.0.1", &port]);
        primary.wait_until("an online replica", || caller.ask(&["WAIT", "1", "100"]) == ":1");
        for number in 0..200 {
            caller.send(&[
                vec!["SET".into(), "key".into(), number.to_string()],
                vec!["RPUSH".into(), "list".into(), number.to_string()],
                vec!["SET".into(), format!("short{number}"), "v".into(), "PX".into(), "1".into()],
                vec!["GET".into(), format!("short{}", number / 2)],
            ]);
            caller.replies(4);
        }
        assert_eq!(caller.ask(&["WAIT", "1", "10000"]), ":1");
        let seen = |server: &Engine| server.client().ask(&["LRANGE", "list", "0", "-1"]);
        assert_eq!(seen(&primary), seen(&replica));
        // While the replica is stopped, WAIT does not count it.
        replica.signal("STOP");
        caller.ok(&["SET", "key", "unseen"]);
        assert_eq!(caller.ask(&["WAIT", "1", "200"]), ":0");
        replica.signal("CONT");
        assert_eq!(caller.ask(&["WAIT", "1", "10000"]), ":1");
        assert_eq!(replica.client().ask(&["GET", "key"]), "$6\r\nunseen");
        // The replica's own sessions may read but not write.
        let mut reader = of_module(&replica);
        assert_eq!(reader.ask(&["GET", "key"]), "$6\r\nunseen");
        assert!(reader.ask(&["SET", "key", "mine"]).starts_with("-READONLY"));
        primary.assert_healthy();
        replica.assert_healthy();
    }
}

/// A replica calls reads while it is connected to its primary. It hides expired keys, as at its own
/// port, whether it calls reads or not.
#[test]
fn replicas_call_reads_while_they_are_connected() {
    for program in engines() {
        let port = free_port().to_string();
        let primary = start(&program, &["--port", &port, "--repl-diskless-sync-delay", "0"]);
        let mut replica = start(&program, &[]);
        // The primary must not delete expired keys. A replica never does so by itself.
        primary.client().ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
        replica.client().ok(&["REPLICAOF", "127.0.0.1", &port]);
        let mut writer = of_module(&primary);
        let long = "v".repeat(1000);
        for (name, time) in [("short", "300"), ("kept", "600000")] {
            writer.ok(&["SET", name, &long, "PX", time]);
        }
        replica.wait_until("the data", || replica.ask::<u64>(&["DBSIZE"]) == 2);
        let mut pair = Pair::new(&replica);
        let called = calls(&replica, || {
            for _ in 0..10 {
                assert!(pair.same(&["GET", "kept"]).starts_with("$1000"));
                pair.same(&["MGET", "missing", "kept"]);
                pair.same(&["EXISTS", "kept"]);
            }
            // Both clients are asked about the key only after it has expired.
            replica.wait_until("the key expires", || pair.native.ask(&["EXISTS", "short"]) == ":0");
            assert_eq!(pair.same(&["GET", "short"]), "$-1");
            assert_eq!(pair.same(&["DBSIZE"]), ":2", "the key is hidden, not deleted");
        });
        assert_eq!(called, 32, "on {}", program.display());
        assert!(pair.same(&["SET", "kept", "mine"]).starts_with("-READONLY"));
        // Without its primary, the replica calls nothing.
        drop(writer);
        primary.signal("KILL");
        replica.wait_until("the loss of the primary", || {
            replica.ask::<String>(&["INFO", "replication"]).contains("master_link_status:down")
        });
        let called = calls(&replica, || {
            assert_eq!(pair.same(&["GET", "short"]), "$-1");
            assert!(pair.same(&["GET", "kept"]).starts_with("$1000"));
        });
        assert_eq!(called, 0, "on {}", program.display());
        replica.assert_healthy();
    }
}

/// A session that has written continues after its engine has become a replica, which refuses
/// FERRITE MARK.
#[test]
fn sessions_that_wrote_continue_on_a_replica() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let commands: [&[&str]; 4] = [
            &["CLIENT", "NO-EVICT", "on"],
            &["WAIT", "0", "0"],
            &["READONLY"],
            &["SUBSCRIBE", "channel"],
        ];
        for command in commands {
            let mut pair = Pair::new(&server);
            pair.module.ok(&["SET", "key", "value"]);
            pair.native.ok(&["REPLICAOF", "127.0.0.1", "1"]);
            pair.same(command);
            pair.same(&["PING"]);
            drop(pair);
            server.client().ok(&["REPLICAOF", "NO", "ONE"]);
        }
        server.assert_healthy();
    }
}
