//! Draws a screen as an SVG, for the documentation and for bug reports.

use std::fmt::Write as _;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

use super::app::App;
use super::draw;

/// The width and the height of a cell of the screen.
const CELL: (f64, f64) = (8.4, 18.0);
const BACKGROUND: &str = "#1e1e1e";
const FOREGROUND: &str = "#d4d4d4";

/// Draws the state on a screen of this size. Returns the SVG.
pub(super) fn screen(app: &App, columns: u16, rows: u16) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows))?;
    terminal.draw(|frame| draw::draw(frame, app))?;
    Ok(svg(terminal.backend().buffer()))
}

fn svg(buffer: &Buffer) -> String {
    let area = buffer.area;
    let (width, height) = (f64::from(area.width) * CELL.0, f64::from(area.height) * CELL.1);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"'DejaVu Sans Mono', monospace\" font-size=\"14\" xml:space=\"preserve\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"{BACKGROUND}\"/>\n"
    );
    for row in 0..area.height {
        let mut column = 0;
        while column < area.width {
            let first = &buffer[(column, row)];
            let end = (column..area.width)
                .find(|at| !looks_alike(first, &buffer[(*at, row)]))
                .unwrap_or(area.width);
            run(buffer, row, column, end, &mut out);
            column = end;
        }
    }
    out + "</svg>\n"
}

fn looks_alike(one: &Cell, other: &Cell) -> bool {
    (one.fg, one.bg, one.modifier) == (other.fg, other.bg, other.modifier)
}

/// Writes cells that look alike as one text. The text has an explicit width, because fonts differ.
fn run(buffer: &Buffer, row: u16, column: u16, end: u16, out: &mut String) {
    let cell = &buffer[(column, row)];
    let (mut front, mut back) = (colour(cell.fg, FOREGROUND), colour(cell.bg, BACKGROUND));
    if cell.modifier.contains(Modifier::REVERSED) {
        std::mem::swap(&mut front, &mut back);
    }
    let (x, y) = (f64::from(column) * CELL.0, f64::from(row) * CELL.1);
    let width = f64::from(end - column) * CELL.0;
    if back != BACKGROUND {
        let _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{}\" fill=\"{back}\"/>",
            CELL.1
        );
    }
    let text: String = (column..end).map(|at| buffer[(at, row)].symbol()).collect();
    if text.trim().is_empty() {
        return;
    }
    // Spaces at both ends would be lost in some viewers.
    let before = text.len() - text.trim_start().len();
    #[expect(clippy::cast_precision_loss, reason = "a screen is narrow")]
    let (x, width) = (x + before as f64 * CELL.0, text.trim().chars().count() as f64 * CELL.0);
    let bold = if cell.modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{:.1}\" textLength=\"{width:.1}\" fill=\"{front}\"{bold}>{}</text>",
        y + 13.5,
        text.trim().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
    );
}

/// Returns a terminal colour in the shade that many terminals use.
fn colour(colour: Color, default: &'static str) -> &'static str {
    match colour {
        Color::Cyan => "#4ec9e0",
        Color::Green => "#6cc070",
        Color::Yellow => "#e0b84e",
        Color::Red => "#f07070",
        Color::DarkGray => "#8a8a8a",
        _ => default,
    }
}
