//! Draws the screen into memory, and presses keys.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::app::{Action, App, Mode};
use super::snapshot::{LatencyRow, Session, Snapshot};
use super::{ascii, draw, svg};

fn session(id: u64, transport: &str, out_bytes: u64) -> Session {
    Session {
        id,
        client_id: Some(id + 100),
        user: "default".into(),
        address: format!("10.0.0.{id}:40000"),
        local_address: "10.0.0.100:6380".into(),
        transport: transport.into(),
        device: if transport == "tcp" { "" } else { "rxe1" }.into(),
        path: "call".into(),
        age_s: 75,
        held_bytes: 2048,
        in_bytes: 1000,
        out_bytes,
    }
}

fn row<const N: usize>(name: &str, percentiles: [(&str, f64); N]) -> LatencyRow {
    let percentiles = percentiles.map(|(name, us)| (name.to_owned(), us)).into();
    LatencyRow { name: name.into(), count: None, percentiles }
}

fn snapshot(sessions: Vec<Session>) -> Snapshot {
    let mut transports = std::collections::BTreeMap::new();
    for session in &sessions {
        *transports.entry(session.transport.clone()).or_insert(0) += 1;
    }
    Snapshot {
        program: "Redis 7.0.15, module 0.1.0".into(),
        status: "listening 10.0.0.100:6380 over RDMA (rxe1)".into(),
        transports,
        sessions: Some(sessions),
        totals: [("called", 1000), ("send_ops", 500), ("completion_errors", 2)].into(),
        fallbacks: [("no device".to_owned(), 3)].into(),
        memory: [("registered", 64 << 20), ("limit", 256 << 20), ("windows", 5 << 20)].into(),
        latency: vec![row("get", [("p50", 1.5), ("p99", 9.25), ("p99.9", 14_286.8)])],
        ..Snapshot::default()
    }
}

/// Returns an app that has seen two states, a second apart.
fn app() -> App {
    let mut app = App::new("10.0.0.100:6379".into());
    let all = [(1, "rdma-ferrite", 0), (2, "tcp", 0), (3, "rdma-valkey", 0)];
    let first = snapshot(all.map(|(id, transport, out)| session(id, transport, out)).into());
    let all = [(1, "rdma-ferrite", 4096), (2, "tcp", 1 << 20), (3, "rdma-valkey", 100)];
    let mut second = snapshot(all.map(|(id, transport, out)| session(id, transport, out)).into());
    second.taken = first.taken + Duration::from_secs(1);
    second.totals.insert("called", 13_345);
    app.update(Ok(first));
    app.update(Ok(second));
    app
}

fn shown(app: &App) -> String {
    let mut terminal = Terminal::new(TestBackend::new(132, 30)).expect("a screen");
    terminal.draw(|frame| draw::draw(frame, app)).expect("it draws");
    terminal.backend().to_string()
}

fn press(app: &mut App, keys: &[KeyCode]) -> Action {
    let event = |code: &KeyCode| KeyEvent::new(*code, KeyModifiers::NONE);
    keys.iter().map(|code| app.press(event(code))).last().unwrap_or(Action::None)
}

/// Returns the ids of the sessions in the order of the table.
fn order(app: &App) -> Vec<u64> {
    app.sessions().iter().map(|session| session.id).collect()
}

#[test]
fn shows_sessions_rates_memory_latency_and_fallbacks() {
    let screen = shown(&app());
    for expected in [
        "10.0.0.100:6379",
        "Redis 7.0.15, module 0.1.0",
        "listening 10.0.0.100:6380 over RDMA (rxe1)",
        "rdma-ferrite     1",
        "12.3k in-process",
        "registered    64.0 MiB",
        "25%",
        "get        1.5   9.2 14287",
        "3 no device",
        "2 failed requests",
        "3 sessions",
        "10.0.0.2:40000",
        "1.0 MiB",
        "1:15 min",
        "k kill",
    ] {
        assert!(screen.contains(expected), "no {expected:?} in\n{screen}");
    }
}

#[test]
fn sorts_and_reverses() {
    let mut app = app();
    assert_eq!(order(&app), [2, 1, 3], "by the rate of bytes to the client");
    assert!(shown(&app).contains("▼out/s"));
    press(&mut app, &[KeyCode::Char('r')]);
    assert_eq!(order(&app), [3, 1, 2]);
    assert!(shown(&app).contains("▲out/s"));
    press(&mut app, &[KeyCode::Char('r')]);
    press(&mut app, &[KeyCode::Char('s'); 7]);
    assert_eq!(order(&app), [1, 2, 3], "by id");
    press(&mut app, &[KeyCode::Char('s')]);
    assert_eq!(order(&app), [2, 1, 3], "the first column again");
}

#[test]
fn filters_by_a_part_of_a_field() {
    let mut app = app();
    let typed: Vec<_> = "/RDMA".chars().map(KeyCode::Char).collect();
    press(&mut app, &typed);
    assert_eq!((order(&app), app.mode), (vec![1, 3], Mode::Filter));
    assert!(shown(&app).contains("2 of 3 sessions match \"RDMA\""), "{}", shown(&app));
    press(&mut app, &[KeyCode::Enter]);
    assert_eq!((order(&app).len(), app.mode, app.selected), (2, Mode::Table, Some(1)));
    press(&mut app, &[KeyCode::Esc]);
    assert_eq!(order(&app).len(), 3);
}

#[test]
fn shows_a_session_in_detail() {
    let mut app = app();
    press(&mut app, &[KeyCode::Enter]);
    let screen = shown(&app);
    for expected in
        ["session 1 ", "10.0.0.100:6380", "engine's client id  101", "device              rxe1"]
    {
        assert!(screen.contains(expected), "no {expected:?} in\n{screen}");
    }
    // The session ends while its details are shown.
    app.update(Ok(snapshot(vec![session(2, "tcp", 0)])));
    assert!(shown(&app).contains("the session has ended"), "{}", shown(&app));
    press(&mut app, &[KeyCode::Esc]);
    assert_eq!(app.mode, Mode::Table);
}

#[test]
fn asks_before_it_kills() {
    let mut app = app();
    assert_eq!(press(&mut app, &[KeyCode::Char('k')]), Action::None);
    assert!(shown(&app).contains("Kill session 1 of 10.0.0.1:40000?"), "{}", shown(&app));
    assert_eq!(press(&mut app, &[KeyCode::Enter]), Action::None, "only y kills");
    assert!(shown(&app).contains("not killed"));
    assert_eq!(press(&mut app, &[KeyCode::Char('k'), KeyCode::Char('y')]), Action::Kill(1));
}

#[test]
fn selection_stays_on_its_session_when_the_order_changes() {
    let mut app = app();
    press(&mut app, &[KeyCode::End]);
    assert_eq!(app.selected, Some(3));
    let mut next = snapshot(vec![session(1, "tcp", 0), session(3, "tcp", 9 << 20)]);
    next.taken += Duration::from_secs(2);
    app.update(Ok(next));
    assert_eq!((order(&app), app.selected), (vec![3, 1], Some(3)));
    app.update(Ok(snapshot(vec![session(1, "tcp", 0)])));
    assert_eq!(app.selected, Some(1), "the selected one is gone");
}

#[test]
fn an_error_keeps_the_last_state_and_a_pause_stops_it() {
    let mut app = app();
    app.update(Err(anyhow::anyhow!("cannot connect to 10.0.0.100:6379: refused")));
    let screen = shown(&app);
    assert!(screen.contains("cannot connect") && screen.contains("10.0.0.2:40000"), "{screen}");
    press(&mut app, &[KeyCode::Char('p')]);
    app.update(Ok(snapshot(Vec::new())));
    let screen = shown(&app);
    assert!(screen.contains("paused") && screen.contains("10.0.0.2:40000"), "{screen}");
    assert_eq!(press(&mut app, &[KeyCode::Char('q')]), Action::Quit);
}

#[test]
fn fits_any_size_of_the_terminal() {
    for (columns, rows) in [(1, 1), (20, 5), (80, 24), (300, 100)] {
        for mode in [Mode::Table, Mode::Details, Mode::ConfirmKill(2)] {
            let mut app = app();
            app.mode = mode;
            let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a screen");
            terminal.draw(|frame| draw::draw(frame, &app)).expect("it draws");
        }
    }
}

fn shown_at(app: &App, (columns, rows): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a screen");
    terminal.draw(|frame| draw::draw(frame, app)).expect("it draws");
    terminal.backend().to_string()
}

const SMALL: (u16, u16) = (80, 24);

#[test]
fn a_small_terminal_shows_the_other_boxes_by_a_key() {
    let mut app = app();
    let screen = shown_at(&app, SMALL);
    assert!(!screen.contains("latency") && screen.contains(" Tab more "), "{screen}");
    assert!(screen.contains("q quit") && screen.contains("10.0.0.2:40000"), "{screen}");
    press(&mut app, &[KeyCode::Tab; 3]);
    let screen = shown_at(&app, SMALL);
    assert!(screen.contains("p99.9") && screen.contains("3 no device"), "{screen}");
    let screen = shown_at(&app, (80, 40));
    assert!(screen.contains("p99.9") && screen.contains("registered"), "{screen}");
    assert!(screen.contains("10.0.0.2:40000") && !screen.contains("Tab more"), "{screen}");
}

/// A host with 8 cards of 2 ports has hundreds of counters.
#[test]
fn counters_of_many_ports_are_scrolled_and_filtered() {
    let state = |fast: u64| {
        let mut state = Snapshot { sessions: None, ..snapshot(Vec::new()) };
        for (device, port) in (0..8).flat_map(|device| [(device, 1), (device, 2)]) {
            for counter in ["port_rcv_data", "port_xmit_data", "port_xmit_wait"] {
                state.devices.insert(format!("mlx5_{device} {port} {counter}"), 70_000);
            }
        }
        state.devices.insert("mlx5_6 2 port_xmit_data".into(), fast);
        state
    };
    let (first, mut second) = (state(1000), state(5000));
    second.taken = first.taken + Duration::from_secs(1);
    let mut app = App::new("10.0.0.100:9121".into());
    app.update(Ok(first));
    app.update(Ok(second));
    let line = |screen: &str, text: &str| screen.lines().position(|line| line.contains(text));
    for size in [SMALL, (132, 30)] {
        let screen = shown_at(&app, size);
        let fast = line(&screen, "mlx5_6 2 port_xmit_data").expect("the counter that moves");
        assert!(line(&screen, "mlx5_0 1 port_rcv_data").is_none_or(|at| fast < at), "{screen}");
        let fast = screen.lines().nth(fast).expect("a line");
        assert!(fast.contains("5000") && fast.contains("4.0k"), "{screen}");
        assert!(screen.contains("48 counters"), "{screen}");
        assert_eq!(screen.contains("p99.9"), size != SMALL, "{screen}");
        assert_eq!(screen.contains(" Tab more "), size == SMALL, "{screen}");
    }
    press(&mut app, &[KeyCode::End]);
    let screen = shown_at(&app, SMALL);
    assert!(screen.contains("mlx5_7 2 port_xmit_wait"), "{screen}");
    press(&mut app, &[KeyCode::Home]);
    let typed: Vec<_> = "/mlx5_3 1".chars().map(KeyCode::Char).collect();
    press(&mut app, &typed);
    let screen = shown_at(&app, SMALL);
    assert!(screen.contains("3 counters match") && screen.contains("mlx5_3 1"), "{screen}");
}

#[test]
fn a_terminal_without_utf_8_gets_ascii() {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a screen");
    let app = app();
    let drawn = terminal.draw(|frame| {
        draw::draw(frame, &app);
        ascii::replace(frame.buffer_mut());
    });
    drawn.expect("it draws");
    let screen = terminal.backend().to_string();
    assert!(screen.is_ascii() && screen.contains("+ sessions ---"), "{screen}");
    let by = |set: &'static [(&str, &str)]| {
        let value =
            |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, to)| (*to).into());
        ascii::is_ascii_only(value)
    };
    assert!(by(&[("LANG", "C")]) && by(&[("LANG", "en_US.UTF-8"), ("LC_ALL", "POSIX")]));
    assert!(by(&[("LANG", "C.UTF-8"), ("TERM", "vt220")]));
    assert!(!by(&[]) && !by(&[("LANG", "C.utf8"), ("LC_ALL", ""), ("TERM", "xterm")]));
}

#[test]
fn text_of_clients_cannot_control_the_terminal() {
    let mut app = app();
    let evil = Session { user: "\x1b[2Jevil".into(), ..session(1, "tcp", 0) };
    app.update(Ok(snapshot(vec![evil])));
    let screen = shown(&app);
    assert!(!screen.contains('\x1b') && screen.contains("evil"), "{screen}");
}

#[test]
fn draws_latencies_that_are_no_numbers() {
    let mut random = 1_u64;
    for rows in 40..60 {
        let latency = (0..rows).map(|row| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let values = [f64::NAN, f64::INFINITY, -5.0, f64::from(row)];
            let p99_us = values[usize::try_from(random >> 62).expect("two bits")];
            let percentiles = [("p50", 1.0), ("p99", p99_us), ("p99.9", f64::NAN)];
            self::row(&format!("c{row}"), percentiles)
        });
        let latency = latency.collect();
        let mut app = app();
        app.update(Ok(Snapshot { latency, ..snapshot(vec![]) }));
        assert!(shown(&app).contains("p99.9"));
    }
}

#[test]
fn shows_the_percentiles_that_the_engine_reports() {
    let mut app = app();
    let four = [("p25", 1.0), ("p75", 2.5), ("p90", 3.5), ("p100", 4.5)];
    app.update(Ok(Snapshot { latency: vec![row("get", four)], ..snapshot(vec![]) }));
    let screen = shown(&app);
    assert!(screen.contains("p25   p90  p100") && !screen.contains("p75"), "{screen}");
    assert!(screen.contains("get        1.0   3.5   4.5"), "{screen}");
    app.update(Ok(Snapshot { latency: vec![row("get", [("p50", 7.5)])], ..snapshot(vec![]) }));
    assert!(shown(&app).contains("get        7.5"), "{}", shown(&app));
    app.update(Ok(Snapshot { latency: vec![], ..snapshot(vec![]) }));
    assert!(shown(&app).contains("see CONFIG GET latency-track*"), "{}", shown(&app));
}

/// Commands with subcommands have long names, such as `command|docs`.
#[test]
fn latency_column_is_as_wide_as_the_names() {
    let mut app = app();
    let percentiles = [("p50", 1204.0), ("p99", 692.2), ("p99.9", 14_286.8)];
    let rows = |names: &[&str]| names.iter().map(|name| row(name, percentiles)).collect();
    let latency = rows(&["command|docs", "command|info", "get"]);
    app.update(Ok(Snapshot { latency, ..snapshot(vec![]) }));
    let screen = shown(&app);
    for expected in ["command|docs  1204", "command|info  1204", "fallbacks, devices"] {
        assert!(screen.contains(expected), "no {expected:?} in\n{screen}");
    }
    let latency = rows(&["latency|histogram", "latency|histories"]);
    app.update(Ok(Snapshot { latency, ..snapshot(vec![]) }));
    let screen = shown_at(&app, (137, 30));
    for expected in ["latency|histogram  1204", "latency|histories  1204", "fallbacks, devices"] {
        assert!(screen.contains(expected), "no {expected:?} in\n{screen}");
    }
    // In a narrower terminal the names are shortened, but can still be told apart.
    let screen = shown(&app);
    for expected in ["laten…togram  1204", "laten…tories  1204", "fallbacks, devices"] {
        assert!(screen.contains(expected), "no {expected:?} in\n{screen}");
    }
}

#[test]
fn formats_numbers_and_times() {
    assert_eq!([0, 999, 12_345, 5_000_000].map(draw::count), ["0", "999", "12.3k", "5.0M"]);
    assert_eq!([0, 1023, 1536].map(draw::bytes), ["0 B", "1023 B", "1.5 KiB"]);
    assert_eq!([5, 75, 3700, 200_000].map(draw::age), ["5 s", "1:15 min", "1:01 h", "2 d"]);
}

#[test]
fn picture_has_the_text_and_the_colours_of_the_screen() {
    let picture = svg::screen(&app(), 132, 30).expect("a picture");
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    for expected in [">rdma-ferrite<", "#6cc070", ">10.0.0.100:6379<", "▼out/s", "font-weight"] {
        assert!(picture.contains(expected), "no {expected:?} in {picture}");
    }
}
