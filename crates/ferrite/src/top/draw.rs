//! Draws the state of the screen.

use std::collections::BTreeMap;
use std::iter::Peekable;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState, Wrap};

use super::app::{App, Mode, Sort};
use super::latencies::Latencies;
use super::snapshot::{Session, Snapshot};

/// Height of the boxes above the table, with their borders.
const BOXES: u16 = 9;
/// The height that must remain for the sessions, or for the counters of devices, below another row
/// of boxes.
const SESSIONS_MIN: u16 = 10;
const COUNTERS_MIN: u16 = 8;
const DIM: Style = Style::new().fg(Color::DarkGray);

/// Draws the whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let [title, boxes, table, footer] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(BOXES),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_title(frame, app, title);
    let empty = Snapshot::default();
    let snapshot = app.snapshot.as_ref().unwrap_or(&empty);
    let latencies = Latencies::of(&snapshot.latency);
    let latencies_width = u16::try_from(latencies.full_width() + 2).unwrap_or(u16::MAX);
    let fixed = |title, width, lines: fn(&App, &Snapshot) -> Vec<Line<'static>>| Contents {
        title,
        width,
        full_width: width,
        lines: Box::new(move |_| lines(app, snapshot)),
    };
    let mut contents = [
        fixed(" sessions ", 22, |_, snapshot| session_lines(snapshot)),
        fixed(" operations/s ", 30, |app, _| operation_lines(app)),
        fixed(" pinned memory ", 25, |_, snapshot| memory_lines(snapshot)),
        Contents {
            title: " latency, µs ",
            width: 32,
            full_width: latencies_width,
            lines: Box::new(|width| latency_lines(snapshot, &latencies, width)),
        },
        fixed(" fallbacks, devices ", 22, |_, snapshot| device_lines(snapshot)),
    ];
    let count = contents.len();
    contents.rotate_left(app.first_box % count);
    let mut contents = contents.into_iter().peekable();
    draw_boxes(frame, boxes, &mut contents);
    // If not all boxes fit into one row, a terminal that is high enough gets further rows of boxes.
    let below = if snapshot.sessions.is_some() { SESSIONS_MIN } else { COUNTERS_MIN };
    let mut table = table;
    while table.height >= BOXES + below
        && contents.peek().is_some_and(|next| next.width <= table.width)
    {
        let heights = [Constraint::Length(BOXES), Constraint::Min(0)];
        let [row, rest] = Layout::vertical(heights).areas(table);
        draw_boxes(frame, row, &mut contents);
        table = rest;
    }
    match &snapshot.sessions {
        Some(_) => draw_sessions(frame, app, table),
        None => draw_counters(frame, app, table),
    }
    draw_footer(frame, app, footer, contents.next().is_some());
    match app.mode {
        Mode::Details => draw_details(frame, app),
        Mode::ConfirmKill(id) => draw_question(frame, app, id),
        Mode::Table | Mode::Filter => {}
    }
}

/// A box above the table.
struct Contents<'a> {
    title: &'static str,
    /// The width with the borders. A box that has less space is not drawn.
    width: u16,
    /// The width at which nothing is shortened.
    full_width: u16,
    /// Returns the lines for a width without the borders.
    lines: Box<dyn Fn(usize) -> Vec<Line<'static>> + 'a>,
}

/// Draws the boxes that fit next to each other. Boxes that would shorten a text get the spare
/// width. If the last of all boxes is drawn, it gets the width that the other boxes do not need.
fn draw_boxes<'a>(
    frame: &mut Frame<'_>,
    mut left: Rect,
    contents: &mut Peekable<impl Iterator<Item = Contents<'a>>>,
) {
    let (mut row, mut spare) = (Vec::new(), left.width);
    while let Some(next) = contents.next_if(|next| next.width <= spare) {
        spare -= next.width;
        row.push(next);
    }
    let is_end = contents.peek().is_none();
    let count = row.len();
    for (at, Contents { title, width, full_width, lines }) in row.into_iter().enumerate() {
        let more = match is_end && at + 1 == count {
            true => spare,
            false => spare.min(full_width.saturating_sub(width)),
        };
        spare -= more;
        let area = Rect { width: width + more, ..left };
        left = Rect { x: left.x + area.width, width: left.width - area.width, ..left };
        let block = Block::bordered().border_style(DIM).title(title);
        let lines = lines(usize::from(block.inner(area).width));
        frame.render_widget(Paragraph::new(lines).block(block), area);
    }
}

fn draw_title(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let program = app.snapshot.as_ref().map_or("", |snapshot| &snapshot.program);
    let first = Line::from(vec![
        Span::raw(" ferrite top  ").bold(),
        Span::raw(app.address.clone()).fg(Color::Cyan),
        Span::raw(format!("  {program}")),
        Span::raw(if app.is_paused { "  paused" } else { "" }).fg(Color::Yellow),
    ]);
    let second = match (&app.error, &app.snapshot) {
        (Some(error), _) => Line::from(format!(" {error}")).fg(Color::Red),
        (None, Some(snapshot)) => {
            let is_good = snapshot.status.is_empty() || snapshot.status.starts_with("listening");
            let colour = if is_good { Color::Green } else { Color::Yellow };
            Line::from(format!(" {}", snapshot.status)).fg(colour)
        }
        (None, None) => Line::from(" connecting").style(DIM),
    };
    frame.render_widget(Paragraph::new(vec![first, second]), area);
}

/// Formats a name and a number, the number on the right of a box.
fn pair(name: &str, value: impl Into<String>, width: usize) -> Line<'static> {
    let value = value.into();
    Line::from(format!(" {name:<12}{value:>width$}"))
}

fn session_lines(snapshot: &Snapshot) -> Vec<Line<'static>> {
    let mut lines: Vec<_> = snapshot
        .transports
        .iter()
        .map(|(transport, count)| pair(transport, count.to_string(), 6).bold())
        .collect();
    if lines.is_empty() {
        lines.push(Line::from(" none open").style(DIM));
    }
    let opened = ["opened_ferrite", "opened_valkey", "opened_tcp", "opened_tls"];
    let opened = opened.map(|name| snapshot.total(name));
    let opened = opened.into_iter().fold(0, u64::saturating_add);
    lines.push(pair("opened", count(opened), 6));
    for name in ["refused", "killed", "evicted"] {
        lines.push(pair(name, count(snapshot.total(name)), 6));
    }
    lines
}

fn operation_lines(app: &App) -> Vec<Line<'static>> {
    let rate = |name: &str| app.rates.total(name);
    let line = |name: &str, ops: Option<u64>, rate: u64| {
        let ops = ops.map_or(String::new(), count);
        Line::from(format!(" {name:<9}{ops:>7}{:>9}/s", bytes(rate)))
    };
    vec![
        Line::from(format!(" {:<9}{:>7} in-process", "commands", count(rate("called")))),
        Line::from(format!(" {:<9}{:>7} proxied", "", count(rate("proxied")))),
        line("in, out", None, rate("in_bytes").saturating_add(rate("out_bytes"))),
        line("send", Some(rate("send_ops")), rate("send_bytes")),
        line("receive", Some(rate("recv_ops")), rate("recv_bytes")),
        line("write", Some(rate("write_ops")), rate("write_bytes")),
        line("read", Some(rate("read_ops")), rate("read_bytes")),
    ]
}

fn memory_lines(snapshot: &Snapshot) -> Vec<Line<'static>> {
    let of = |name: &str| snapshot.memory.get(name).copied();
    let mut lines: Vec<_> = ["registered", "limit", "send", "receive", "windows"]
        .into_iter()
        .filter_map(|name| Some(pair(name, bytes(of(name)?), 10)))
        .collect();
    if let (Some(registered), Some(limit @ 1..)) = (of("registered"), of("limit")) {
        let width = 18;
        let full = usize::try_from((registered.min(limit)).saturating_mul(width) / limit);
        let full = full.unwrap_or(0);
        let bar = "█".repeat(full) + &"░".repeat(usize::try_from(width).unwrap_or(0) - full);
        lines.push(Line::from(format!(" {bar}{:>3}%", registered.saturating_mul(100) / limit)));
    }
    lines
}

fn latency_lines(snapshot: &Snapshot, latencies: &Latencies, width: usize) -> Vec<Line<'static>> {
    let Some(heading) = latencies.heading(width) else {
        let mut lines = vec![Line::from(" not reported").style(DIM)];
        // An engine may not track latencies. An admin port always has them after the first
        // operation.
        if snapshot.sessions.is_some() {
            lines.push(Line::from(" see CONFIG GET latency-track*").style(DIM));
        }
        return lines;
    };
    [Line::from(heading).style(DIM)]
        .into_iter()
        .chain(latencies.rows(width).map(Line::from))
        .collect()
}

fn device_lines(snapshot: &Snapshot) -> Vec<Line<'static>> {
    let numbers = |map: &BTreeMap<String, u64>, colour| {
        map.iter()
            .map(|(name, number)| Line::from(format!(" {:>4} {name}", count(*number))).fg(colour))
            .collect::<Vec<_>>()
    };
    let mut lines = numbers(&snapshot.fallbacks, Color::Yellow);
    if lines.is_empty() {
        lines.push(Line::from(" no fallbacks to TCP").fg(Color::Green));
    }
    let errors = snapshot.total("completion_errors");
    let colour = if errors > 0 { Color::Yellow } else { Color::Reset };
    lines.push(Line::from(format!(" {:>4} failed requests", count(errors))).fg(colour));
    for (name, total) in [("failed links", "failed_links"), ("migrations", "migrations")] {
        lines.push(Line::from(format!(" {:>4} {name}", count(snapshot.total(total)))));
    }
    // Without sessions, the counters have a table of their own.
    if snapshot.sessions.is_some() {
        lines.extend(numbers(&snapshot.devices, Color::Reset));
    }
    lines
}

const COLUMNS: [(&str, Option<Sort>, Constraint); 11] = [
    ("id", Some(Sort::Id), Constraint::Length(7)),
    ("client", Some(Sort::Address), Constraint::Min(21)),
    ("user", None, Constraint::Max(14)),
    ("transport", None, Constraint::Length(13)),
    ("path", None, Constraint::Length(6)),
    ("age", Some(Sort::Age), Constraint::Length(9)),
    ("in/s", Some(Sort::InRate), Constraint::Length(10)),
    ("out/s", Some(Sort::OutRate), Constraint::Length(10)),
    ("in", Some(Sort::In), Constraint::Length(10)),
    ("out", Some(Sort::Out), Constraint::Length(10)),
    ("held", Some(Sort::Held), Constraint::Length(10)),
];
/// Index of the first column that is aligned to the right.
const FIRST_NUMBER: usize = 5;

fn draw_sessions(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let sessions = app.sessions();
    let all = app.snapshot.iter().flat_map(|snapshot| &snapshot.sessions).flatten().count();
    let heading = COLUMNS.iter().enumerate().map(|(index, (name, sort, _))| {
        let is_sorted = *sort == Some(app.sort);
        let arrow = if app.is_reversed { "▲" } else { "▼" };
        let text = if is_sorted { format!("{arrow}{name}") } else { (*name).to_owned() };
        let style = if is_sorted { Style::new().fg(Color::Cyan).bold() } else { DIM };
        cell(text, index).style(style)
    });
    let rows = sessions.iter().map(|session| row(app, session));
    let count = match app.filter.is_empty() {
        true if all == 1 => " 1 session ".to_owned(),
        true => format!(" {all} sessions "),
        false => format!(" {} of {all} sessions match {:?} ", sessions.len(), app.filter),
    };
    let table = Table::new(rows, COLUMNS.map(|(_, _, width)| width))
        .header(Row::new(heading))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::bordered().border_style(DIM).title(count));
    let at = sessions.iter().position(|session| Some(session.id) == app.selected);
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(at));
}

fn cell(text: String, column: usize) -> Cell<'static> {
    let line = Line::from(text);
    Cell::from(if column >= FIRST_NUMBER { line.right_aligned() } else { line })
}

fn row(app: &App, session: &Session) -> Row<'static> {
    let (in_rate, out_rate) = app.rates.session(session.id);
    let colour = if session.transport.starts_with("rdma") { Color::Green } else { Color::Yellow };
    let texts = [
        session.id.to_string(),
        session.address.clone(),
        session.user.clone(),
        session.transport.clone(),
        session.path.clone(),
        age(session.age_s),
        bytes(in_rate),
        bytes(out_rate),
        bytes(session.in_bytes),
        bytes(session.out_bytes),
        bytes(session.held_bytes),
    ];
    Row::new(texts.into_iter().enumerate().map(|(index, text)| {
        let cell = cell(text, index);
        if COLUMNS[index].0 == "transport" { cell.fg(colour) } else { cell }
    }))
}

/// Draws the counters of the RDMA ports, which an admin port has instead of sessions.
fn draw_counters(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let counters = app.counters();
    let has_any = app.snapshot.as_ref().is_some_and(|snapshot| !snapshot.devices.is_empty());
    if !has_any {
        let text = match app.snapshot {
            None => "",
            Some(_) => {
                " An admin port does not list sessions, and no RDMA port of its host has counted \
                 anything. For the sessions of a module, give the engine's address: ferrite top \
                 HOST:PORT"
            }
        };
        let block = Block::bordered().border_style(DIM).title(" RDMA ports ");
        let text = Paragraph::new(text).style(DIM).wrap(Wrap { trim: false });
        frame.render_widget(text.block(block), area);
        return;
    }
    let right = |text: String| Cell::from(Line::from(text).right_aligned());
    let heading = ["device, port, counter", "total", "per second"];
    let heading = Row::new(heading.map(|name| match name {
        "device, port, counter" => Cell::from(name),
        name => right(name.to_owned()),
    }));
    let shown = counters.iter().skip(app.first_counter);
    let rows = shown.map(|(name, value, rate)| {
        Row::new([Cell::from((*name).to_owned()), right(value.to_string()), right(count(*rate))])
    });
    let widths = [Constraint::Min(30), Constraint::Length(20), Constraint::Length(10)];
    let title = match app.filter.is_empty() {
        true => format!(" RDMA ports: {} counters ", counters.len()),
        false => format!(" RDMA ports: {} counters match {:?} ", counters.len(), app.filter),
    };
    let block = Block::bordered().border_style(DIM).title(title);
    frame.render_widget(Table::new(rows, widths).header(heading.style(DIM)).block(block), area);
}

/// Draws the keys, the filter or a message. `has_more` tells that the terminal has no space for all
/// boxes.
fn draw_footer(frame: &mut Frame<'_>, app: &App, area: Rect, has_more: bool) {
    let has_sessions = app.snapshot.as_ref().is_none_or(|snapshot| snapshot.sessions.is_some());
    let keys = match (has_sessions, has_more) {
        (true, false) => {
            " ↑↓ select  Enter details  k kill  s sort  r reverse  / filter  p pause  q quit"
        }
        (true, true) => {
            " Tab more  ↑↓ select  Enter details  k kill  s sort  r reverse  / filter  q quit"
        }
        (false, false) => " ↑↓ scroll  / filter  p pause  q quit",
        (false, true) => " Tab more  ↑↓ scroll  / filter  p pause  q quit",
    };
    let line = match (&app.mode, &app.message) {
        (Mode::Filter, _) => {
            Line::from(format!(" filter: {}▏  Enter keeps it, Esc clears it", app.filter))
        }
        (Mode::Details, _) => Line::from(" Esc back  k kill  q quit").style(DIM),
        (_, Some(message)) => Line::from(format!(" {message}")).fg(Color::Yellow),
        _ => Line::from(keys).style(DIM),
    };
    frame.render_widget(line, area);
}

/// Returns an area of this size in the middle of the screen, or less if the screen is smaller.
fn middle(frame: &Frame<'_>, width: u16, height: u16) -> Rect {
    let area = frame.area();
    let (width, height) = (width.min(area.width), height.min(area.height));
    Rect::new((area.width - width) / 2, (area.height - height) / 2, width, height)
}

fn draw_details(frame: &mut Frame<'_>, app: &App) {
    let area = middle(frame, 60, 16);
    let lines = match app.selected_session() {
        None => vec![Line::from(" the session has ended")],
        Some(session) => {
            let (in_rate, out_rate) = app.rates.session(session.id);
            let client_id = session.client_id.map_or("–".to_owned(), |id| id.to_string());
            let device = if session.device.is_empty() { "–" } else { &session.device };
            [
                ("client", session.address.clone()),
                ("connected to", session.local_address.clone()),
                ("user", session.user.clone()),
                ("engine's client id", client_id),
                ("transport", session.transport.clone()),
                ("device", device.to_owned()),
                ("path", path_text(&session.path)),
                ("age", age(session.age_s)),
                ("to the engine", format!("{}, {}/s", bytes(session.in_bytes), bytes(in_rate))),
                ("to the client", format!("{}, {}/s", bytes(session.out_bytes), bytes(out_rate))),
                ("memory held", bytes(session.held_bytes)),
            ]
            .map(|(name, value)| {
                Line::from(vec![Span::styled(format!(" {name:<20}"), DIM), Span::raw(value)])
            })
            .into()
        }
    };
    let title = format!(" session {} ", app.selected.unwrap_or(0));
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)), area);
}

fn path_text(path: &str) -> String {
    match path {
        "call" => "call: commands run in the engine".into(),
        "proxy" => "proxy: commands go to the engine's socket".into(),
        other => other.into(),
    }
}

fn draw_question(frame: &mut Frame<'_>, app: &App, id: u64) {
    let area = middle(frame, 56, 4);
    let session = app.selected_session().filter(|session| session.id == id);
    let address = session.map_or(String::new(), |session| format!(" of {}", session.address));
    let lines = vec![
        Line::from(format!(" Kill session {id}{address}?")),
        Line::from(" y kills it, any other key does not").style(DIM),
    ];
    let block = Block::bordered().border_style(Style::new().fg(Color::Red)).title(" kill ");
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// Formats a number in units of 1,000.
pub(super) fn count(number: u64) -> String {
    scaled(number, 1000, &["", "k", "M", "G", "T", "P", "E"])
}

/// Formats bytes in units of 1,024.
pub(super) fn bytes(number: u64) -> String {
    scaled(number, 1024, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"])
}

#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
fn scaled(number: u64, step: u64, units: &[&str]) -> String {
    let (mut value, mut index) = (number as f64, 0);
    while value >= step as f64 && index + 1 < units.len() {
        value /= step as f64;
        index += 1;
    }
    if index == 0 { format!("{number}{}", units[0]) } else { format!("{value:.1}{}", units[index]) }
}

/// Formats seconds.
pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{}:{:02} min", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}:{:02} h", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d", seconds / 86_400),
    }
}
