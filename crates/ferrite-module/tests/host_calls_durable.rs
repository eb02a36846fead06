//! What a called write promises: whatever was answered is in the AOF and reaches replicas, once,
//! and WAIT tells the truth.

mod scene;
mod talk;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use scene::{Server, Start, free_port};
use talk::{Peer, engines, start};

/// An engine that can be started again, with an AOF.
fn start_with_aof(program: &Path, fsync: &str) -> Server {
    let arguments = ["rdma-port", &free_port(), "rdma-bind", "127.0.0.1", "call-path", "yes"];
    let fsync = format!("appendfsync {fsync}");
    let options = ["port 0", "save \"\"", "appendonly yes", "enable-debug-command yes", &fsync];
    Server::start_by_file(&Start { program, arguments: &arguments, options: &options })
}

/// After SIGKILL, by its file.
fn start_again(server: &mut Server, program: &Path) {
    server.wait();
    server.start_again(program);
    server.until("loaded", || Peer::native(server).ask(&["PING"]) == "+PONG");
}

/// Clients that write until the engine is killed: what they were told counts, and nothing counts
/// twice.
#[test]
fn what_was_answered_survives_a_kill() {
    const AT_A_TIME: usize = 8;
    for program in engines() {
        // Not `everysec`: while the disk is at a synchronisation the engine keeps what it would
        // write, for two seconds at most, and answers all the same, over TCP as well.
        for fsync in ["always", "no"] {
            let mut server = start_with_aof(&program, fsync);
            for _ in 0..3 {
                let address = server.info("address");
                let before: Vec<i64> = (0..4).map(|writer| counter(&server, writer)).collect();
                let told: Mutex<[i64; 4]> = Mutex::default();
                std::thread::scope(|scope| {
                    for writer in 0..4 {
                        let (address, told) = (&address, &told);
                        scope.spawn(move || {
                            let mut peer = Peer::called_at(address);
                            let key = format!("counter{writer}");
                            while peer.try_send(&vec![vec!["INCR", &key]; AT_A_TIME]) {
                                for _ in 0..AT_A_TIME {
                                    if peer.next().is_none() {
                                        return;
                                    }
                                    told.lock().expect("no panic")[writer] += 1;
                                }
                            }
                        });
                    }
                    server.until("each is told something", || {
                        !told.lock().expect("no panic").contains(&0)
                    });
                    std::thread::sleep(Duration::from_millis(300));
                    server.signal("KILL");
                });
                start_again(&mut server, &program);
                for (writer, told) in told.into_inner().expect("no panic").into_iter().enumerate() {
                    let counted = counter(&server, writer) - before[writer];
                    let most = told + i64::try_from(AT_A_TIME).expect("8");
                    assert!(
                        told > 0 && (told..=most).contains(&counted),
                        "{told} told, {counted} counted, {fsync}"
                    );
                }
            }
            server.assert_well();
        }
    }
}

fn counter(server: &Server, writer: usize) -> i64 {
    let answer = Peer::native(server).ask(&["INCRBY", &format!("counter{writer}"), "0"]);
    answer.trim_start_matches(':').parse().expect("a number")
}

/// The engine writes the AOF when a turn of its loop ends. An answer in the turn itself could be
/// one to a write that is lost.
#[test]
fn an_answer_waits_for_the_aof() {
    for program in engines() {
        for fsync in ["always", "no"] {
            let mut server = start_with_aof(&program, fsync);
            let mut caller = Peer::called(&server);
            let [mut first, mut last] = [(); 2].map(|()| Peer::native(&server));
            caller.ok(&["SET", "key", "before"]);
            // A turn that has the write and, after it, something long.
            first.send(&[vec!["DEBUG", "SLEEP", "0.6"]]);
            std::thread::sleep(Duration::from_millis(200));
            caller.send(&[vec!["SET", "key", "after"]]);
            std::thread::sleep(Duration::from_millis(100));
            last.send(&[vec!["DEBUG", "SLEEP", "1"]]);
            assert_eq!(caller.next().expect("an answer"), b"+OK\r\n");
            server.signal("KILL");
            start_again(&mut server, &program);
            assert_eq!(Peer::native(&server).ask(&["GET", "key"]), "$5\r\nafter", "{fsync}");
        }
    }
}

/// With `appendfsync always`, nobody ever sees what can still be lost: not by reading what another
/// has just written, either.
#[test]
fn what_was_read_is_safe_too() {
    for program in engines() {
        let mut server = start_with_aof(&program, "always");
        let mut caller = Peer::called(&server);
        let [mut first, mut writer, mut last] = [(); 3].map(|()| Peer::native(&server));
        caller.ok(&["SET", "key", "before"]);
        // A turn that has a write, a read of it and, after them, something long.
        first.send(&[vec!["DEBUG", "SLEEP", "0.6"]]);
        std::thread::sleep(Duration::from_millis(200));
        writer.send(&[vec!["SET", "key", "after!"]]);
        std::thread::sleep(Duration::from_millis(100));
        caller.send(&[vec!["GET", "key"]]);
        std::thread::sleep(Duration::from_millis(100));
        last.send(&[vec!["DEBUG", "SLEEP", "1"]]);
        let read = caller.next().expect("an answer");
        server.signal("KILL");
        assert_eq!(read, b"$6\r\nafter!\r\n");
        start_again(&mut server, &program);
        assert_eq!(Peer::native(&server).raw(&["GET", "key"]), read);
    }
}

/// A replica has all of it, and WAIT of a session speaks of its called writes.
#[test]
fn replicas_have_it_and_wait_is_true() {
    for program in engines() {
        let port = free_port();
        let mut primary = start(&program, &["--port", &port, "--repl-diskless-sync-delay", "0"]);
        let mut replica = start(&program, &["--appendonly", "yes"]);
        let mut caller = Peer::called(&primary);
        caller.ok(&["SET", "key", "0"]);
        Peer::native(&replica).ok(&["REPLICAOF", "127.0.0.1", &port]);
        primary.until("a replica", || caller.ask(&["WAIT", "1", "100"]) == ":1");
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
        let seen = |server: &Server| Peer::native(server).ask(&["LRANGE", "list", "0", "-1"]);
        assert_eq!(seen(&primary), seen(&replica));
        // One that does not take it.
        replica.signal("STOP");
        caller.ok(&["SET", "key", "unseen"]);
        assert_eq!(caller.ask(&["WAIT", "1", "200"]), ":0");
        replica.signal("CONT");
        assert_eq!(caller.ask(&["WAIT", "1", "10000"]), ":1");
        assert_eq!(Peer::native(&replica).ask(&["GET", "key"]), "$6\r\nunseen");
        // Its own sessions read and may not write; what the primary says ends keys.
        let mut reader = Peer::called(&replica);
        assert_eq!(reader.ask(&["GET", "key"]), "$6\r\nunseen");
        assert!(reader.ask(&["SET", "key", "mine"]).starts_with("-READONLY"));
        primary.assert_well();
        replica.assert_well();
    }
}
